"""Memory under torch's FSDP1, with mixed precision and under autocast, counted by torch."""

import functools
import warnings
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from cost_models.memory.ledger import EMBEDDING, LAST_LAYER, MOMENTS, OPTIMIZER
from cost_models.memory.peak import rank_timeline
from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.trainer import software_profile
from tests.allocations import peak_allocated
from tests.samples import rank_view

RANKS, TOKENS = 4, 64
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def counted(layers: int, recompute: str, *, autocast: bool) -> float:
    """Bytes that one step allocates at its peak next to shards and optimizer states."""
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    config = LlamaConfig(num_hidden_layers=layers, use_cache=False, **SIZES)  # type: ignore[arg-type]
    llama = LlamaForCausalLM(config).train()
    if recompute == "full":
        llama.gradient_checkpointing_enable({"use_reentrant": False})
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
    )
    model = FullyShardedDataParallel(
        llama,
        auto_wrap_policy=policy,
        mixed_precision=None if autocast else HALF,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    ids = torch.randint(0, SIZES["vocab_size"], (1, TOKENS))

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    return peak_allocated(step, *model.parameters())


def predicted(layers: int, recompute: str, *, autocast: bool) -> float:
    config = {"model_type": "llama", "num_hidden_layers": layers, **SIZES}
    software = software_profile("hf-trainer+fsdp1" + ("+autocast" if autocast else ""))
    model, cluster = model_spec(config, name="llama"), parse_cluster("4xA100-80GB")
    scenario = Scenario(model, cluster, Workload(TOKENS, RANKS), software)
    plan = Plan(data_parallel=RANKS, zero_stage=3, recompute=recompute)  # type: ignore[arg-type]
    moments = rank_timeline(rank_view(model, scenario.workload, software, plan))
    assert len(moments) == len(MOMENTS)
    return max(
        float(np.ravel(parts.gradients + parts.activations + parts.logits + parts.buffers)[0])
        for parts in moments[:OPTIMIZER]
    )


@pytest.mark.slow(seconds=20)
@pytest.mark.filterwarnings("ignore")
def test_a_step_of_fsdp1_allocates_what_is_predicted() -> None:
    """Few tokens: gathered units, casts and gradients are most of it. Autocast costs its copies.

    Each count is made in a process that never profiled: an earlier profile's addresses would be
    freed by the next one.
    """
    alone = get_context("forkserver")
    alone.set_forkserver_preload([__name__])
    for recompute, autocast in product(("none", "full"), (True, False)):
        with ProcessPoolExecutor(1, alone) as pool:
            counts = pool.submit(counted, 8, recompute, autocast=autocast).result()
        assert predicted(8, recompute, autocast=autocast) == pytest.approx(counts, rel=0.1), (
            recompute,
            autocast,
        )


def test_frozen_layers_stay_gathered_before_torch_2_1() -> None:
    """All of them at the end of the backward pass, instead of two: c P (L - 2)."""
    config = {"model_type": "llama", "num_hidden_layers": 8, **SIZES}
    work = Workload(TOKENS, RANKS, adapter="lora", adapter_rank=4, master_weights=False)
    base = model_spec(config, name="llama")
    model = adapted(base, work, quantises_every_matrix=True)
    plan = Plan(data_parallel=RANKS, zero_stage=3)
    found = []
    for name in ("hf-trainer+fsdp1", "hf-trainer+fsdp1-before-2.1"):
        scenario = Scenario(model, parse_cluster("4xA100-80GB"), work, software_profile(name))
        view = rank_view(model, work, scenario.software, plan)
        found.append([float(np.ravel(parts.buffers)[0]) for parts in rank_timeline(view)])
    layer = sum(weight.numel for weight in base.kinds[0].weights)
    added = np.subtract(found[1], found[0])
    assert added[LAST_LAYER] == pytest.approx(2.0 * 6 * layer, rel=0.05)
    assert added[EMBEDDING] == pytest.approx(2.0 * 8 * layer)
    assert not np.any(added[:LAST_LAYER])
