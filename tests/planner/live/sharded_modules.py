"""Prints how modules under FSDP1 and FSDP2 are described on two ranks of gloo, as JSON."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from planner.live.description import describe_model

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
found = {}


def model():
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))


def describe(name, module):
    live = describe_model(module, torch.optim.AdamW(module.parameters()), (2, 16))
    stated = live.spec is not None and live.num_parameters == live.spec.num_parameters
    sharding = live.sharding
    found[name] = [sharding.engine, sharding.zero_stage, sharding.dp_replicate, stated]


def fsdp2(mesh=None, **options):
    module = model()
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def main():
    dist.init_process_group("gloo")
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        module = FullyShardedDataParallel(
            model(),
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
            use_orig_params=strategy == "SHARD_GRAD_OP",
            device_id=torch.device("cpu"),
        )
        describe(strategy, module)
    describe("kept", fsdp2(reshard_after_forward=False))
    module = fsdp2()  # by default the root keeps its weights, which its first forward pass decides
    module(input_ids=torch.zeros((2, 16), dtype=torch.long)).logits.sum().backward()
    describe("after a step", module)
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    describe("replicas", fsdp2(mesh))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
