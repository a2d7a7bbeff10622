"""torchtitan 0.3.0 with an exported configuration, on CPUs.

Its CUDA device is replaced by the CPU, c4 by a short text, the model by torchtitan's own debug
model, and FlexAttention, which has no backward pass on CPUs, by torch's SDPA.
"""

from types import SimpleNamespace
from typing import Any

import datasets
import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils


class Cpu:
    """``torch.cpu`` with the functions of ``torch.cuda`` that torchtitan calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any) -> str:
        return "CPU"

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=1 << 34)

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...

    def memory_stats(self, device: Any) -> dict[str, float]:
        return {}


utils.device_type, utils.device_module = "cpu", Cpu()

import torchtitan_job  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig, text_datasets  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.train import main  # noqa: E402


def attention(query: Any, key: Any, value: Any, *, enable_gqa: bool = False, **more: Any) -> Any:
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=enable_gqa
    )
    return found, SimpleNamespace(lse=None)


def set_divisor(module: Any, factor: float) -> None:
    module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    plain_divisor(module, factor)


def toy_job() -> Any:
    job = exported()
    job.model_spec = model_registry("debugmodel")
    job.compile.enable = False
    return job


FlexAttention.compiled_flex_attn = staticmethod(attention)
if not hasattr(torch.distributed, "set_timeout"):  # before torch 2.14
    torch.distributed.set_timeout = lambda *_: None
plain_divisor = FSDPModule.set_gradient_divide_factor
FSDPModule.set_gradient_divide_factor = set_divisor
text_datasets.DATASETS["c4"] = DatasetConfig(
    path="",
    loader=lambda path: datasets.Dataset.from_dict({"text": ["sharded plans " * 512] * 8}),
    sample_processor=lambda sample: sample["text"],
)
exported, torchtitan_job.shardplan_job = torchtitan_job.shardplan_job, toy_job
main()
