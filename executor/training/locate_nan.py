"""Locates the origin of a NaN or an infinity: rank, pass, module and operator.

Called once, when a step's loss or gradient norm is not finite; the weights are those before that
step. Every rank repeats the forward and backward passes of the same batch with the same dropout and
checks the result of every operator. An operator with finite inputs and a non-finite output is the
origin; non-finite values received from another rank or from the previous operator are not reported.
The ranks exchange their findings, and the earliest is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from executor.compat import in_backward
from executor.counters.collectives_and_flops import NAMESPACES, OperatorMode
from executor.counters.live_tensors import storages
from executor.data.batch import Batch
from executor.parallel.mesh import gather_json
from executor.training.trainer import Trainer
from hardware_profiles.fields import names_in

WEIGHT, FORWARD, BACKWARD, RECEIVED, GRADIENT = range(5)  # in order of precedence
MAX_MODULES: Final = 10**6  # modules of a stage
LOSS_DEPTH: Final = 10**12  # depth of the loss
# outputs that are not computed from inputs: uninitialised memory, or a constant used in a mask
CONSTANTS: Final = frozenset(
    names_in("""
        empty empty_like empty_strided new_empty new_empty_strided full full_like new_full fill
        fill_ scalar_tensor masked_fill masked_fill_ lift_fresh resize_ set_
    """)
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Origin of non-finite values on one rank; the first one in (stage, order) is the cause."""

    rank: int
    kind: int  # WEIGHT, FORWARD, ...
    microbatch: int
    depth: int  # of the module in the model, counted backward from the loss
    module: str
    what: str  # tensor or operator

    def describe(self) -> str:
        """Describe the finding to the user."""
        if self.kind == WEIGHT:
            return f"on rank {self.rank} {self.what} of {self.module} is not finite itself"
        if self.kind == GRADIENT:
            return (
                f"on rank {self.rank} the gradient of {self.what} ({self.module}) was not finite, "
                "but a second pass over the same batch is finite: it cannot be reproduced "
                "(a hardware fault, or a kernel that depends on chance)"
            )
        place = f"of micro-batch {self.microbatch + 1} in {self.module}"
        if self.kind == RECEIVED:
            return (
                f"it arrives on rank {self.rank} in the forward pass {place} ({self.what}), though "
                "all ranks computed finite values: a fault of the connection or of memory"
            )
        which = "forward" if self.kind == FORWARD else "backward"
        return f"it arises on rank {self.rank} in the {which} pass {place}: {self.what}"


def locate_nonfinite(trainer: Trainer, batch: Batch) -> list[Finding]:
    """Return the findings of all ranks, the cause first.

    All ranks call this after a failed step.
    """
    # the findings of one rank decide for all: all ranks run a pass together
    found = _gathered_findings(trainer, nonfinite_weight(trainer))
    found = found or _gathered_findings(trainer, _repeat_step(trainer, batch))
    found = found or _gathered_findings(trainer, nonfinite_gradient(trainer))
    return sorted(found, key=lambda f: (f.kind, f.microbatch, f.depth, f.rank))


def _gathered_findings(trainer: Trainer, own: Finding | None) -> list[Finding]:
    """Return the findings of all ranks."""
    gathered = gather_json(None if own is None else asdict(own), trainer.device)
    return [Finding(**values) for values in gathered if values is not None]


def nonfinite_weight(trainer: Trainer) -> Finding | None:
    """Return the first parameter of this rank that is not finite."""
    for depth, shard in enumerate(trainer.shards):
        if not _finite(shard.local.detach()):
            module, _, name = shard.name.rpartition(".")
            return Finding(dist.get_rank(), WEIGHT, 0, depth, module, name)
    return None


def nonfinite_gradient(trainer: Trainer) -> Finding | None:
    """Return the parameter nearest to the loss with a non-finite gradient after the failed step."""
    for depth, shard in enumerate(reversed(trainer.shards)):
        if shard.parameter.grad is not None and not _finite(shard.gradient):
            module = shard.name.rpartition(".")[0]
            return Finding(dist.get_rank(), GRADIENT, 0, depth, module, shard.name)
    return None


def _repeat_step(trainer: Trainer, batch: Batch) -> Finding | None:
    """Repeat the passes of a step that is already counted; return this rank's first finding."""
    kept = []
    for parameter in (shard.parameter for shard in trainer.shards):
        gradient = parameter.grad  # the passes may overwrite its memory
        kept.append((parameter, None if gradient is None else gradient.clone()))
        parameter.grad = None
    trainer.steps_done -= 1
    try:
        trainer.seed_dropout()
        with _OperatorMonitor(trainer) as monitor:
            trainer.accumulate(batch)
    finally:
        trainer.steps_done += 1
        for parameter, gradient in kept:
            parameter.grad = gradient
    return monitor.first()


@dataclass(slots=True)
class _Suspect:
    """An operator with finite inputs and a non-finite output."""

    kind: int
    microbatch: int
    module: str
    what: str


class _OperatorMonitor(OperatorMode):
    """Checks the results of all operators inside the context.

    An infinity may be intended (an additive mask of scores). An operator's result therefore counts
    only if its module's output is not finite: the inputs and outputs of the model's layers are
    checked, in the forward and in the backward pass.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer
        self.order: dict[str, int] = {}  # modules whose inputs and outputs are checked
        self.parameters: dict[int, str] = {}
        self.hooks: list[Any] = []
        self.suspects: list[_Suspect] = []
        self.found: list[_Suspect] = []
        self.unsure: list[_Suspect] = []
        self.path: list[str] = []
        self.forwards: dict[str, int] = {}  # number of runs of each module: its micro-batch
        self.received: _Suspect | None = None  # the first non-finite input of a module
        self.backward_module = "the loss"  # module whose backward pass is running
        self.microbatch = 0

    def __enter__(self) -> _OperatorMonitor:
        for stage in self.trainer.stages:
            modules = dict(stage.named_modules())
            for group in stage.groups():
                for module in group:
                    name = next(n for n, m in modules.items() if m is module)
                    self.order[name] = MAX_MODULES * stage.index + len(self.order)
                    self._add_hooks(name, module)
            for name, module in modules.items():
                if name and name not in self.order:
                    self.hooks.append(module.register_forward_pre_hook(self._enter(name)))
                    self.hooks.append(module.register_forward_hook(self._leave, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    def first(self) -> Finding | None:
        """Return the first finding, if any."""
        if any(not _finite(gradient) for gradient in self._gradients()):
            self.found += [*self.unsure, *self.suspects]
        seen = self.found[0] if self.found else self.received
        if seen is None:
            return None
        places = [place for name, place in self.order.items() if _within(seen.module, name)]
        place = places[0] if places else LOSS_DEPTH
        depth = -place if seen.kind == BACKWARD else place
        return Finding(dist.get_rank(), seen.kind, seen.microbatch, depth, seen.module, seen.what)

    def _gradients(self) -> Iterator[Tensor]:
        for shard in self.trainer.shards:
            if shard.parameter.grad is not None:
                yield shard.gradient

    def _add_hooks(self, name: str, module: nn.Module) -> None:
        """Check the hidden state before and after a module, in both passes."""

        def before(_: Any, inputs: Any) -> None:
            self.forwards[name] = self.forwards.get(name, -1) + 1
            self.microbatch = self.forwards[name]
            self._confirm(bad=False)
            self.path.append(name)
            if self.received is None and not all(map(_finite, tree_leaves(inputs))):
                self.received = _Suspect(RECEIVED, self.microbatch, name, "its input")
            for x in tree_leaves(inputs):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(self._leave_backward)
            for parameter_name, parameter in module.named_parameters(prefix=name):
                self._record_weight(name, parameter_name, parameter)

        def after(_: Any, inputs: Any, output: Any) -> None:
            self._confirm(bad=not _finite(output))
            self.path.pop()
            microbatch = self.forwards[name]
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(
                    lambda gradient: self._enter_backward(name, microbatch, gradient)
                )

        self.hooks.append(module.register_forward_pre_hook(before))
        self.hooks.append(module.register_forward_hook(after))

    def _record_weight(self, module: str, name: str, parameter: Tensor) -> None:
        """Record a gathered weight, and check it in the compute precision."""
        for storage in storages(parameter):
            self.parameters[storage._cdata] = name
        if not self.found and not _finite(parameter.detach()):
            what = f"{name} is not finite in {str(parameter.dtype).removeprefix('torch.')}"
            self.found.append(_Suspect(FORWARD, self.microbatch, module, what))

    def _enter(self, name: str) -> Any:
        def before(_: Any, inputs: Any) -> None:
            self.path.append(name)

        return before

    def _leave(self, _: Any, inputs: Any, output: Any) -> None:
        self.path.pop()

    def _enter_backward(self, name: str, microbatch: int, gradient: Tensor) -> None:
        """Note the gradient of a module's output: the backward pass enters the module."""
        self._confirm(bad=not _finite(gradient))
        self.backward_module, self.microbatch = name, microbatch

    def _leave_backward(self, gradient: Tensor) -> None:
        """Note the gradient of a module's input: its backward pass is almost complete."""
        self._confirm(bad=not _finite(gradient))

    def _confirm(self, *, bad: bool) -> None:
        """Confirm or clear the suspects since the last check, given the checked tensor."""
        if bad and self.suspects:
            self.found.append(self.suspects[0])
        elif not bad:  # a weight gradient may be non-finite on its own
            self.unsure += [seen for seen in self.suspects if seen.kind == BACKWARD]
        self.suspects.clear()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operator and check its result."""
        name = func._opname
        made = func.namespace not in (*NAMESPACES, "fsdp") and name not in CONSTANTS
        # an operator that overwrites a tensor does not read it
        read = args[1:] if name in ("copy_", "copy") else (args, kwargs)
        finite_before = made and not self.found and all(map(_finite, tree_leaves(read)))
        result = func(*args, **kwargs)
        if finite_before and not all(map(_finite, tree_leaves(result))):
            self.suspects.append(self._describe(name, args, result))
        return result

    def _describe(self, name: str, args: Any, result: Any) -> _Suspect:
        backward = in_backward()
        module = self.backward_module if backward else (self.path[-1] if self.path else "the loss")
        value = "nan" if any(_has_nan(leaf) for leaf in tree_leaves(result)) else "inf"
        what = f"{name.removeprefix('_')} gives {value} from finite values"
        for leaf in tree_leaves(args):
            if isinstance(leaf, Tensor):
                for storage in storages(leaf):
                    if storage._cdata in self.parameters:
                        what += f" with {self.parameters[storage._cdata]}"
        return _Suspect(BACKWARD if backward else FORWARD, self.microbatch, module, what)


def _within(module: str, top: str) -> bool:
    return module == top or module.startswith(f"{top}.")


def _finite(value: Any) -> bool:
    """Return whether all numbers of a value are finite; True for non-floating values."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    if value.device.type == "meta" or not value.numel():
        return True
    low, high = value.detach().aminmax()  # no temporary memory
    return bool(torch.isfinite(low + high))


def _has_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())
