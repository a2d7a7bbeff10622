"""Memory and work of an arbitrary module, traced on fake tensors.

Runs the module forward and backward with several numbers of rows. The live bytes after every
operator are affine in the rows (checked), so that a few lines per segment give the peak at any
micro-batch size. The result consists of JSON values, which ``cost_models.traced.module`` reads.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor, nn

from cost_models.plan.workload import Precision
from executor.compat import FakeTensor, FakeTensorMode, unset_fake_temporarily
from executor.dtypes import COMPUTE_DTYPE, MASTER_DTYPE
from executor.trace.cuda_rules import CudaRules
from executor.trace.linear_fit import ROWS, pass_lines
from executor.trace.module_blocks import blocks, loss_of, recompute, tensors
from executor.trace.module_factory import Factory, load_factory, one_line
from executor.trace.module_inputs import Inputs, inputs_of
from executor.trace.module_trainer import check_precision, module_of
from executor.trace.timeline import OUTSIDE, Timeline
from hardware_profiles.errors import InputError, ShardplanError
from hardware_profiles.progress import tracked

SCHEMA_VERSION: Final = 1
TRACING: Final = "tracing pass {number} of {total}"
RECURRENT: Final = (
    "recurrent layers are traced step by step: fused kernels (cuDNN, oneDNN) keep workspaces that "
    "are not traced (oneDNN: up to 13 % of the peak of a small LSTM)"
)


def trace(
    name: str,
    *,
    precision: Precision = "fp32",
    input_shapes: Sequence[str] = (),
    device: str = "cpu",
) -> dict[str, Any]:
    """Trace ``module:package.path:factory`` with the operators of ``device`` (cpu or cuda)."""
    check_precision(precision)
    with one_line(name):
        factory = load_factory(name)
    with one_line(name), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        module = _build(factory, fake, MASTER_DTYPE[precision])
        inputs, notes = inputs_of(factory, module, input_shapes)
        parts = blocks(module)
        run = PassRunner(module, parts, inputs, precision, device)
        passes = {}
        for kind in tracked(("none", "full") if parts else ("none",)):
            if kind == "full":
                run.rule_blocks()
                recompute(parts.values())
            passes[kind] = pass_lines([run.timeline(rows) for rows in tracked(ROWS, TRACING)])
            if kind == "none":
                document = describe_module(name, module, parts, inputs, run)
        if run.sums:
            notes.append("the module returns no loss: the sum of its outputs is differentiated")
        if any(isinstance(part, nn.RNNBase) for part in module.modules()):
            notes.append(RECURRENT)
    return {
        "schema_version": SCHEMA_VERSION,
        **document,
        "precision": precision,
        "device": device,
        "passes": passes,
        "notes": notes,
    }


class PassRunner:
    """Runs forward and backward passes with different numbers of rows."""

    def __init__(
        self,
        module: nn.Module,
        parts: Mapping[str, nn.Module],
        inputs: Inputs,
        precision: Precision,
        device: str,
        master: torch.dtype | None = None,
    ) -> None:
        self.module, self.parts, self.inputs = module, parts, inputs
        self.master = master or MASTER_DTYPE[precision]  # of weights and inputs
        self.compute = COMPUTE_DTYPE[precision]
        self.rules = CudaRules if device == "cuda" else nullcontext
        self.block_of = block_of_parameters(module, parts)
        self.sums = False  # whether the outputs are summed, for lack of a loss
        self.output_bytes: dict[int, int] = {}  # by rows

    def timeline(self, rows: int) -> Timeline:
        """Run one forward and backward pass; return its timeline."""
        for parameter in self.module.parameters():
            parameter.grad = None
        gc.collect()
        arguments = {k: self._cast(v) for k, v in self.inputs(rows).items()}
        timeline = Timeline(self.module, self.parts)
        timeline.add_inputs(tensors(arguments))
        gc.disable()  # the time at which Python frees cycles is not a property of the module
        try:
            with timeline, self.rules(), torch.backends.mkldnn.flags(enabled=False):
                self._loss(arguments, rows).backward()
        finally:
            gc.enable()
        timeline.name_gradients(self.block_of)
        return timeline

    def rule_blocks(self) -> None:
        """Make blocks apply the rules themselves.

        Torch disables function modes in the backward pass.
        """
        for part in self.parts.values():
            part.forward = self._ruled(part.forward)

    def _ruled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.rules():
                return forward(*args, **kwargs)

        return run

    def _loss(self, arguments: dict[str, Any], rows: int) -> Tensor:
        mixed = self.compute != self.master
        with torch.autocast("cpu", self.compute) if mixed else nullcontext():
            output = self.module(**arguments)
        found = tensors(output)
        self.output_bytes[rows] = sum(t.numel() * t.element_size() for t in found)
        loss = loss_of(output)
        if loss is None:
            self.sums = True
            summands = [t.sum() for t in found if t.requires_grad]
            if not summands:
                raise InputError("none of its outputs can be differentiated")
            loss = torch.stack([s.to(self.master) for s in summands]).sum()
        return loss

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == torch.float32:
            return value.to(self.master)
        return value


def block_of_parameters(
    module: nn.Module, parts: Mapping[str, nn.Module]
) -> dict[nn.Parameter, str]:
    """Return the block of every parameter; shared ones belong to no block, as in FSDP2."""
    found: dict[nn.Parameter, str] = {}
    for name, part in parts.items():
        for parameter in part.parameters():
            found[parameter] = OUTSIDE if parameter in found else name
    for parameter in module.parameters():
        found.setdefault(parameter, OUTSIDE)
    return found


def _build(factory: Factory, fake: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    """Return the module with fake parameters of ``dtype``.

    Factories that fail under fake tensors (because they read a value, for example) run with real
    ones.
    """
    try:
        module = module_of(factory)
    except ShardplanError:
        raise
    except Exception:
        with unset_fake_temporarily():
            module = module_of(factory)

    def faked(value: Tensor) -> Tensor:
        found = value if isinstance(value, FakeTensor) else fake.from_tensor(value)
        return found.detach().to(dtype) if found.is_floating_point() else found

    known: dict[Tensor, Tensor] = {}  # tied parameters stay tied
    for part in module.modules():
        for key, value in part._parameters.items():
            if value is not None:
                known[value] = known.get(value, nn.Parameter(faked(value), value.requires_grad))
                part._parameters[key] = known[value]
        for key, value in part._buffers.items():
            if value is not None:
                part._buffers[key] = faked(value)
    return module


def describe_module(
    name: str, module: nn.Module, parts: Mapping[str, nn.Module], inputs: Inputs, run: PassRunner
) -> dict[str, Any]:
    """Return the entries of a trace that are not passes: blocks, tensors, inputs, output."""
    low, high = min(run.output_bytes), max(run.output_bytes)
    each = run.output_bytes[low] / low
    if high > low:
        each = (run.output_bytes[high] - run.output_bytes[low]) / (high - low)
    return {
        "name": name,
        "class": type(module).__name__,
        "blocks": [
            {"name": part, **_sizes(p for p, owner in run.block_of.items() if owner == part)}
            for part in parts
        ],
        "outside": _sizes(p for p, owner in run.block_of.items() if owner == OUTSIDE),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in module.buffers()),
        "tied_parameters": len(list(module.named_parameters(remove_duplicate=False)))
        - len(run.block_of),
        "inputs": {
            key: {"dtype": str(value.dtype).removeprefix("torch."), "sizes": list(value.shape[1:])}
            for key, value in inputs(low).items()
            if isinstance(value, Tensor)
        },
        "output_bytes_per_row": each,
    }


def _sizes(parameters: Iterator[nn.Parameter]) -> dict[str, Any]:
    """Return element counts, and tensors as [rows, elements per row, count, trainable]."""
    found = list(parameters)
    kinds = Counter(
        (p.shape[0] if p.dim() else 1, p.numel() // (p.shape[0] if p.dim() else 1), p.requires_grad)
        for p in found
        if p.numel()
    )
    return {
        "parameters": sum(p.numel() for p in found),
        "trainable_parameters": sum(p.numel() for p in found if p.requires_grad),
        "tensors": [[rows, width, n, trained] for (rows, width, trained), n in kinds.items()],
    }
