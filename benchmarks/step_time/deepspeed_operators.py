"""Host work of DeepSpeed's hooks around a layer.

    pip install deepspeed  # 0.19.8 was clocked
    python -m benchmarks.step_time.deepspeed_operators

Clocks the passes of a Llama model of transformers, so small that the host's work is all there is
(the fastest of several), alone and under each ZeRO stage, in operators: the forward pass of a layer
has 73 (``python -m benchmarks.step_time.count_operators``). The group is a fake one, whose
collectives cost nothing. Buckets and thresholds are those that transformers sets where a
configuration says "auto" (transformers/integrations/deepspeed.py), and no layer stays gathered, as
in a large model.

Prints how much each weight of a layer adds: ``host.hook_operators_forward`` and ``…_backward`` of
``hardware_profiles/software/engines/wrappers/deepspeed-*.toml``.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

import numpy as np

from hardware_profiles.software.trainer import software_profile

WIDTH: Final = 16
STEPS: Final = 40
ROUNDS: Final = 4
WEIGHTS: Final = 9  # of a layer


def pass_seconds(stage: int, num_layers: int) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward pass; stage 0: without DeepSpeed."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False}
    config = LlamaConfig(num_hidden_layers=num_layers, **sizes, **heads)
    model: Any = LlamaForCausalLM(config).bfloat16().train()
    optimizer = torch.optim.AdamW(model.parameters())
    if stage:
        zero = {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": WIDTH**2,
            "stage3_prefetch_bucket_size": int(0.9 * WIDTH**2),
            "stage3_param_persistence_threshold": 10 * WIDTH,
            "stage3_max_live_parameters": 24 * WIDTH**2,
            "stage3_max_reuse_distance": 0,
        }
        options = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        }
        model = deepspeed.initialize(model=model, optimizer=optimizer, config=options)[0]
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    times = []
    for _ in range(STEPS):
        clock = [time.thread_time()]
        loss = model(input_ids=tokens, labels=tokens).loss
        clock.append(time.thread_time())
        (model if stage else torch.autograd).backward(loss)
        clock.append(time.thread_time())
        (model if stage else optimizer).step()
        model.zero_grad()
        times.append((clock[1] - clock[0], clock[2] - clock[1]))
    ahead, back = (min(each) for each in zip(*times[5:], strict=True))
    return ahead, back


def clocked() -> dict[int, list[float]]:
    """Return the operators of a layer's passes, by stage."""
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    torch.set_num_threads(1)
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    rounds: list[dict[tuple[int, int], tuple[float, float]]] = [
        {(stage, layers): pass_seconds(stage, layers) for stage in range(4) for layers in (2, 10)}
        for _ in range(ROUNDS)
    ]
    found = {}
    for stage in range(4):
        few, many = (np.min([each[stage, n] for each in rounds], axis=0) for n in (2, 10))
        found[stage] = [float(x) for x in (many - few) / 8]
    distributed.destroy_process_group()
    one = found[0][0] / software_profile("shardplan").host.layer_operators_forward
    return {stage: [seconds / one for seconds in passes] for stage, passes in found.items()}


def main() -> None:
    """Print a line for each stage."""
    found = clocked()
    plain = found.pop(0)
    print("layer without DeepSpeed: forward {:.0f}, backward {:.0f} operators".format(*plain))
    for stage, passes in found.items():
        more = [(x - y) / WEIGHTS for x, y in zip(passes, plain, strict=True)]
        print(f"stage {stage}: {more[0]:.0f} forward and {more[1]:.0f} backward more a weight")


if __name__ == "__main__":
    main()
