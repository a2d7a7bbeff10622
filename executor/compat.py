"""Private and version-dependent names of torch and transformers that the executor uses.

torch 2.11 to 2.13 and transformers 5.17 or newer; tests/executor/test_compat.py checks each name.
"""

from __future__ import annotations

import datetime
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_in_fp32
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_adjacent
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from hardware_profiles.errors import InputError

# imported to be imported from here; the other names are defined below
__all__ = [
    "Conv1D",
    "FakeTensor",
    "FakeTensorMode",
    "apply_rotary_pos_emb",
    "replicate",
    "rotate_adjacent",
    "rotate_in_fp32",
    "unset_fake_temporarily",
]

# torch 2.13 renamed these functions and deprecated the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_to_all = dist.all_to_all_single

# attention kernels that return and accept the log-sum-exp of the scores
_ATEN = torch.ops.aten
cpu_attention = _ATEN._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
cuda_flash = _ATEN._scaled_dot_product_flash_attention
cuda_flash_backward = _ATEN._scaled_dot_product_flash_attention_backward
cuda_masked = _ATEN._scaled_dot_product_efficient_attention
cuda_masked_backward = _ATEN._scaled_dot_product_efficient_attention_backward

# one kernel for the matmuls of all experts; public since torch 2.10
grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

# results saved by torch-style selective recomputation: matmuls with a weight, fused attention
_ATTENTION: Final = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
ATTENTION_OPERATORS: Final = frozenset(getattr(_ATEN, name).default for name in _ATTENTION)
KEPT_OPERATORS: Final = ATTENTION_OPERATORS | {_ATEN.mm.default, _ATEN.addmm.default}


def alias_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached alias that shares the version counter of in-place changes.

    Inside ``__torch_dispatch__`` a plain ``detach`` would have its own version counter.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor."""
    version: int = tensor._version
    return version


foreach_multiply_ = torch._foreach_mul_  # one kernel for many tensors on a GPU


_OpType: Any = torch._C._distributed_c10d.OpType
_WORDS = {"ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "ALLTOALL": "all_to_all"}
_OPERATIONS = {int(kind): name for name, kind in _OpType.__members__.items()}


def operation_of(work: dist.Work) -> str:
    """Return the kind of a running collective: all_reduce, recv, ...; "other" where gloo sets none.

    >>> from types import SimpleNamespace
    >>> [operation_of(SimpleNamespace(_get_op_type=lambda: n)) for n in (1, 5, 13, 16, 100)]
    ['all_reduce', 'all_gather', 'recv', 'reduce_scatter', 'other']
    """
    name = _OPERATIONS.get(work._get_op_type(), "UNKNOWN").strip("_")
    name = name.removesuffix("_BASE").removesuffix("_COALESCED").removesuffix("_TENSOR")
    return "other" if name == "UNKNOWN" else _WORDS.get(name, name.lower())


def in_backward() -> bool:
    """Return whether this thread is running a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def set_fused_step_inputs(
    optimizer: torch.optim.Optimizer, spoiled: torch.Tensor | None, factor: torch.Tensor | None
) -> None:
    """Make the next step of a fused optimizer multiply the gradients by ``factor``.

    The step changes nothing if ``spoiled`` is true. This is the interface of torch.amp.GradScaler,
    which needs no synchronization with the host; the kernel divides by a number in fp32.
    """
    optimizer.grad_scale = None if factor is None else factor.to(torch.float32).reciprocal()
    optimizer.found_inf = None if spoiled is None else spoiled.to(torch.float32)


# product of 8-bit matrices, (N, K) row-major and (K, M) column-major, times both scales
scaled_matmul: Final = torch._scaled_mm

# methods of a process group (some exist only in some versions of torch), and their kinds
COLLECTIVE_METHODS: Final = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}


@contextmanager
def observing_collectives(
    enter: Callable[[str, str, int | None], None], wait: Callable[[int], None]
) -> Iterator[None]:
    """Call ``enter(group name, kind, peer)`` before each collective that Python starts.

    Also calls ``wait(1)`` before and ``wait(-1)`` after each wait for one. FSDP2, pipelines and the
    executor all use these methods.
    """

    def entering(method: Any, kind: str) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            peer = args[1] if kind in ("send", "recv") and len(args) > 1 else None
            enter(group.group_name, kind, peer)
            return method(group, *args, **kwargs)

        return call

    def waiting(method: Any) -> Any:
        def call(work: Any, *args: Any, **kwargs: Any) -> Any:
            wait(1)
            try:
                return method(work, *args, **kwargs)
            finally:
                wait(-1)

        return call

    replaced = [(dist.Work, "wait", vars(dist.Work)["wait"])]
    replaced += [
        (dist.ProcessGroup, name, vars(dist.ProcessGroup)[name])
        for name in COLLECTIVE_METHODS
        if name in vars(dist.ProcessGroup)
    ]
    for owner, name, _ in replaced:
        method = getattr(owner, name)
        kind = COLLECTIVE_METHODS.get(name)
        setattr(owner, name, waiting(method) if kind is None else entering(method, kind))
    try:
        yield
    finally:
        for owner, name, original in replaced:
            setattr(owner, name, original)


def ranks_of_group(name: str) -> list[int]:
    """Return the global ranks of the process group with this name."""
    group = dist.distributed_c10d._resolve_process_group(name)
    ranks: list[int] = dist.get_process_group_ranks(group)
    return ranks


def set_timeout(timeout: datetime.timedelta) -> None:
    """Set the timeout of collectives of the default process group."""
    dist.distributed_c10d._set_pg_timeout(timeout)


def default_store() -> Any:
    """Return a connection to the store of the default process group, for use in another thread."""
    return dist.distributed_c10d._get_default_store().clone()


_MASKED = ("bert",)  # trained to predict masked tokens
_ENCODER_DECODER = ("t5",)
_EAGER_ONLY = ("gemma2", "gpt_oss")  # soft caps, attention sinks: not in fused kernels
# fields of a transformers config that do not describe the module
_NOT_MODULE = ("architectures", "model_type", "transformers_version", "dtype", "torch_dtype")


def hugging_face_config(values: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the transformers config object for the values of a config.json."""
    kept = {key: value for key, value in values.items() if key not in _NOT_MODULE}
    with _quiet():
        return CONFIG_MAPPING[values["model_type"]].from_dict(kept)


def causal_lm(
    values: Mapping[str, Any], *, device: str, dtype: torch.dtype, attention_kernel: str
) -> nn.Module:
    """Return the Hugging Face module of a config.json, in training mode."""
    try:
        config = hugging_face_config(values)
        config.use_cache = False
        start = getattr(config, "decoder_start_token_id", None)
        if config.model_type in _ENCODER_DECODER and start is None:
            config.decoder_start_token_id = config.pad_token_id
        eager = attention_kernel == "eager" or config.model_type in _EAGER_ONLY
        implementation = "eager" if eager else "sdpa"
        with _quiet(), torch.device(device):
            model = _auto_class(config.model_type).from_config(
                config, attn_implementation=implementation, dtype=dtype
            )
    except Exception as error:  # the module's own checks raise various errors
        words = " ".join(str(error).split())
        raise InputError(f"model config: rejected by transformers: {words[:300]}") from error
    # routers of transformers 5.24 are float32 in every precision; rotary frequencies stay so
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # other implementations do not support float64
    return model.train()


def _auto_class(model_type: str) -> Any:
    if model_type in _ENCODER_DECODER:
        return AutoModelForSeq2SeqLM
    return AutoModelForMaskedLM if model_type in _MASKED else AutoModelForCausalLM


Gradients = list[tuple[torch.Tensor, torch.Tensor]]  # whole parameter and gradient


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that FSDP2 gathers and reduces together."""

    whole: tuple[torch.Tensor, ...]  # unsharded, as in the forward pass
    end: Callable[[], None]  # to be called when all gradients of a backward pass are computed
    take: Callable[[], Gradients]  # removes and returns the unreduced gradients


def parameter_groups(module: FSDPModule) -> list[ParameterGroup]:
    """Return the FSDP2 groups of a root module, in the order of a backward pass."""
    found = []
    for state in module._get_fsdp_state()._state_ctx.all_states:
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch 2.11
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for group in groups:
            whole = tuple(parameter.unsharded_param for parameter in group.fsdp_params)
            found.append(ParameterGroup(whole, group.post_backward, partial(_take, group)))
    return found[::-1]


def _take(group: Any) -> Gradients:
    """Return the gradients that are not reduced yet, and remove them from the parameters."""
    found = []
    for parameter in group.fsdp_params:
        whole = parameter.unsharded_param
        # in the precision of the reduction, if it differs from the parameter's
        gradient = parameter.unsharded_accumulated_grad
        gradient = whole.grad if gradient is None else gradient
        if gradient is not None:
            found.append((whole, gradient))
        parameter.unsharded_accumulated_grad = whole.grad = None
    return found


def end_backward(module: FSDPModule) -> None:
    """Run FSDP2's final callback of a root module's backward pass."""
    module._get_fsdp_state()._root_post_backward_final_callback()


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Run as one rank of ``size``, with fake tensors and collectives that move no data."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        dist.destroy_process_group()


def allow_fused_updates_on(device: str) -> None:
    """Let fused optimizers take fake tensors of a device for which torch has no fused kernel."""
    module: Any = import_module("torch.optim.optimizer")
    known = module._get_fused_kernels_supported_devices()
    module._get_fused_kernels_supported_devices = lambda: [*known, device]


def outside_fake_mode(function: Any) -> Any:
    """Wrap a function to create real tensors in a fake world, such as those on ``meta``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


@contextmanager
def propagating_global_shapes(notify: Callable[[bool], None]) -> Iterator[None]:
    """Call ``notify(True)`` before and ``notify(False)`` after DTensor infers a global shape.

    DTensor infers it on tensors of that shape; in a FakeTensorMode they belong to that mode.
    """

    def casting(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            notify(True)
            try:
                return method(*args, **kwargs)
            finally:
                notify(False)

        return call

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)
    setattr(ShardingPropagator, name, casting(original))
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, original)


def causal_convolution(*arguments: Any, **options: Any) -> torch.Tensor:
    """Convolve (B, channels, S) along the tokens before each, written out in torch."""
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    convolved: torch.Tensor = inspect.unwrap(module.causal_conv1d_fn)(*arguments, **options)
    return convolved


def gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, Any]:
    """Apply the gated delta rule in chunks, written out in torch; return output and state.

    ``query``, ``key``: (B, S, key heads, head_dim); ``value``: (B, S, value heads, head_dim).
    """
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    rule = inspect.unwrap(module.torch_chunk_gated_delta_rule)
    group = value.shape[2] // key.shape[2]
    if group > 1:  # transformers up to 5.17 repeats the heads outside the rule
        query, key = (heads.repeat_interleave(group, dim=2) for heads in (query, key))
    found: tuple[torch.Tensor, Any] = rule(query, key, value, **options)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of transformers about a config that was checked before."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
