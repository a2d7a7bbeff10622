"""Description of a live training step: model, options of ``fit``, cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final

import torch
from torch import nn

from cost_models.model.families import model_spec
from cost_models.model.spec import ModelSpec
from cost_models.units import format_count
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import InputError
from planner.live.adapters import LORA, adapter_options, frozen_parts, has_adapters
from planner.live.batches import LiveBatch, batch_of
from planner.live.optimizers import optimizer_of
from planner.live.wrappers import LiveSharding, is_compiled, sharding_of, unwrapped
from planner.request.clusters import cluster_of
from planner.request.executor_process import cluster_or_measure, is_here
from planner.request.options.choices import ClusterLike

SHORT: Final = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A module inside its wrappers, and what the step does with it."""

    module: nn.Module
    spec: ModelSpec | None  # None: its layers are not known, it has to be traced
    sharding: LiveSharding
    batch: LiveBatch | None
    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of ``fit``: precision, adapters, ...
    recomputes: bool = False
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the model, or of the class of a module."""
        return type(self.module).__name__ if self.spec is None else self.spec.name

    @property
    def num_parameters(self) -> int:
        """Number of parameters, adapters included; whole ones, even where they are sharded."""
        if self.spec is not None and self.sharding.engine == "fsdp1":  # flat parts of one rank
            return self.spec.num_parameters
        return sum(elements(p) for p in self.module.parameters())


def describe_model(
    model: nn.Module,
    optimizer: Any = None,
    inputs: Any = None,
    precision: str | None = None,
    trainer: str | None = None,
) -> LiveModel:
    """Describe a live module; nothing is moved or run.

    ``precision``: of autocast, where it is not active yet; ``trainer``: a software profile.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model = {type(model).__name__} (must be an nn.Module; planner.fit takes names)"
        )
    module, sharding = unwrapped(model), sharding_of(model)
    notes: list[str] = []
    batch = None if inputs is None else batch_of(inputs, module)
    frozen = "" if has_adapters(module) else frozen_parts(module)
    spec = None if frozen is None else _spec_of(module, sharding)
    compute, autocast, kept = _precision(module, sharding, precision)
    if optimizer is None:
        name, kernel = "adamw", None
        notes.append("optimizer adamw (default)")
    else:
        name, kernel, more = optimizer_of(optimizer)
        notes += more
    options: dict[str, Any] = {"precision": compute, "optimizer_kernel": kernel}
    if spec is not None:
        options |= {**adapter_options(module), "freeze": frozen or None}
        if compute in ("bf16", "fp16") and not autocast and kept == compute:
            options["master_weights"] = False
        if getattr(module.config, "_attn_implementation", None) == "eager":
            options["attention_kernel"] = "eager"
    partly = bool(options.get("lora_targets") or options.get("freeze"))
    casts = "" if spec is None or not autocast else "autocast"
    if casts and partly:  # over a frozen base in 16 bits autocast changes little
        casts = "autocast+fp32-frozen" if largest_dtype(module) == "fp32" else ""
    known = spec is not None and not is_compiled(model)
    plain = "peft" if "lora_targets" in options else "hf-trainer" if known else "torch-trainer"
    software = trainer or ("torch-compile" if is_compiled(model) else plain)
    options["software"] = _with_engine(software, sharding, casts=casts)
    return LiveModel(
        module,
        spec,
        sharding,
        batch,
        name,
        {key: value for key, value in options.items() if value is not None},
        _recomputes(model),
        tuple(notes),
    )


def _spec_of(module: nn.Module, sharding: LiveSharding) -> ModelSpec | None:
    """Return the model that a config of transformers describes, if it has its parameters."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(config, "model_type"):
        return None
    values = config.to_dict()
    path = str(values.get("_name_or_path") or getattr(config, "name_or_path", "") or "")
    kind = type(getattr(module, "get_base_model", lambda: module)()).__name__
    try:
        spec = model_spec(values, name=path or kind, where=kind)
    except InputError:
        return None
    if sharding.engine in ("fsdp1", "deepspeed-zero3"):  # parameters are parts of flat ones
        return spec
    own = sum(elements(p) for name, p in module.named_parameters() if not LORA.search(name))
    return spec if own == spec.num_parameters else None


def elements(parameter: Any) -> int:
    """Return the elements of a parameter before it was sharded or packed into 4 bits."""
    packed = getattr(getattr(parameter, "quant_state", None), "shape", None)
    if packed is not None:
        return prod(packed)
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def largest_dtype(module: nn.Module) -> str:
    """Return the precision of the largest parameter."""
    floating = [p for p in module.parameters() if p.is_floating_point()]
    return SHORT.get(max(floating, key=elements).dtype, "fp32") if floating else "fp32"


def _precision(
    module: nn.Module, sharding: LiveSharding, given: str | None
) -> tuple[str, bool, str]:
    """Return the precision of the computation, whether autocast makes it, and that of weights."""
    floating = [p for p in module.parameters() if p.is_floating_point()]
    trained = [p for p in floating if p.requires_grad] or floating
    if not trained:
        raise InputError(f"{type(module).__name__} has no parameters to train")
    kept = SHORT.get(trained[0].dtype, "fp32")
    stored = largest_dtype(module)
    if sharding.compute is not None:
        return given or SHORT.get(sharding.compute, kept), False, kept
    if given is not None:
        return given, given in ("bf16", "fp16", "fp8") and kept == "fp32", kept
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return SHORT.get(torch.get_autocast_dtype(device), "bf16"), kept == "fp32", kept
    if stored in ("bf16", "fp16") or any(type(p).__name__ == "Params4bit" for p in floating):
        return stored, False, kept
    quantised = getattr(getattr(module, "config", None), "quantization_config", None)
    dtype = getattr(quantised, "bnb_4bit_compute_dtype", None)
    return SHORT.get(dtype, stored) if dtype is not None else stored, False, kept


def _with_engine(software: str, sharding: LiveSharding, *, casts: str) -> str:
    """Return a profile with the wrapper of a module, and autocast over fp32 weights (``casts``)."""
    parts = [software]
    if sharding.engine is not None and sharding.engine not in software.split("+"):
        parts.append(sharding.engine)
    if casts and software != "torch-compile":
        parts += [engine for engine in casts.split("+") if engine not in software]
    return "+".join(parts)


def _recomputes(model: nn.Module) -> bool:
    """Whether layers are recomputed: by transformers, or by torch's checkpoint wrappers."""
    if any(getattr(part, "gradient_checkpointing", False) is True for part in model.modules()):
        return True
    return any(type(part).__name__ == "CheckpointWrapper" for part in model.modules())


def cluster_of_run(cluster: ClusterLike, sharding: LiveSharding, say: Any) -> Cluster:
    """Return a cluster; ``here`` has the ranks of this run, on as many machines as they are."""
    if not isinstance(cluster, str) or not is_here(cluster) or ":" in cluster:
        return cluster_or_measure(cluster, say) if isinstance(cluster, str) else cluster_of(cluster)
    here = cluster_or_measure(f"here:{sharding.ranks_here}", say)
    if sharding.ranks == sharding.ranks_here:
        return here
    nodes = sharding.ranks // sharding.ranks_here
    if here.accelerator.device == "cpu":
        raise InputError(
            f"{nodes} machines with CPUs: the network between them is not known: name a CLUSTER"
        )
    found = cluster_of(f"{nodes}x{sharding.ranks_here}x{here.accelerator.name}")
    note = f"{nodes} machines like this one; their network is that of the usual node"
    return replace(found, accelerator=here.accelerator, notes=(*found.notes, note))


def what_was_read(live: LiveModel) -> str:
    """Return model, adapters, optimizer and precision in a few words."""
    options = live.options
    rank = options.get("lora") or options.get("qlora")
    kind = "lora" if "lora" in options else "qlora"
    words = [
        f"{live.name}, {format_count(live.num_parameters)} parameters",
        f"{kind} r={rank} {options['lora_targets']}" if rank else "",
        f"frozen {options['freeze']}" if options.get("freeze") else "",
        f"{options['precision']} {live.optimizer}",
        "recompute" if live.recomputes else "",
    ]
    return ", ".join(word for word in words if word)
