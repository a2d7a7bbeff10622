"""Finds where a NaN or an infinity arises: the rank, the pass, the module and the operator.

Called once, when a step's loss or gradient norm is not finite; the weights are as they were before
that step. Every rank runs the forward and backward passes of the same batch again, with the same
dropout, and looks at the result of every operator. Where the inputs of an operator are finite and
its output is not, it arises; what only came in (from another rank, or from the operator before) is
not reported. All ranks tell theirs, and the earliest is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.compat import in_backward
from executor.counters.collectives_and_flops import NAMESPACES, is_wrapped
from executor.counters.live_tensors import storages
from executor.data.batch import Batch
from executor.parallel.mesh import gather_json
from executor.training.trainer import Trainer

WEIGHT, FORWARD, BACKWARD, ARRIVED, GRADIENT = range(5)  # what comes first explains the rest
MOST_MODULES: Final = 10**6  # of a stage
BEHIND_ALL: Final = 10**12  # the loss
# their output is not computed from their inputs: memory as it was found, or a constant that a mask
# is made of
CONSTANTS: Final = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "full",
        "full_like",
        "new_full",
        "fill",
        "fill_",
        "scalar_tensor",
        "masked_fill",
        "masked_fill_",
        "lift_fresh",
        "resize_",
        "set_",
    }
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Where values stop being finite on one rank; the first one in (stage, order) is the cause."""

    rank: int
    kind: int  # WEIGHT, FORWARD, ...
    microbatch: int
    depth: int  # of the module in the model, counted backward from the loss
    module: str
    what: str  # the tensor

    def words(self) -> str:
        """Describe it to the user."""
        if self.kind == WEIGHT:
            return f"on rank {self.rank} {self.what} of {self.module} is not finite itself"
        if self.kind == GRADIENT:
            return (
                f"on rank {self.rank} the gradient of {self.what} ({self.module}) was not finite, "
                "but a second pass over the same batch is finite: it cannot be reproduced "
                "(a hardware fault, or a kernel that depends on chance)"
            )
        place = f"of micro-batch {self.microbatch + 1} in {self.module}"
        if self.kind == ARRIVED:
            return (
                f"it arrives on rank {self.rank} in the forward pass {place} ({self.what}), though "
                "all ranks computed finite values: a fault of the connection or of memory"
            )
        which = "forward" if self.kind == FORWARD else "backward"
        return f"it arises on rank {self.rank} in the {which} pass {place}: {self.what}"


def locate(trainer: Trainer, batch: Batch) -> list[Finding]:
    """Return what every rank found, the cause first; all ranks call this after a failed step."""
    # what one rank finds decides for all: a pass is one of all ranks together
    found = _told(trainer, spoiled_weight(trainer))
    found = found or _told(trainer, _pass_again(trainer, batch))
    found = found or _told(trainer, spoiled_gradient(trainer))
    return sorted(found, key=lambda f: (f.kind, f.microbatch, f.depth, f.rank))


def _told(trainer: Trainer, own: Finding | None) -> list[Finding]:
    """Return what all ranks found."""
    told = gather_json(None if own is None else asdict(own), trainer.device)
    return [Finding(**values) for values in told if values is not None]


def spoiled_weight(trainer: Trainer) -> Finding | None:
    """Return the first parameter of this rank that is not finite."""
    for depth, held in enumerate(trainer.held):
        if not _finite(held.local.detach()):
            module, _, name = held.name.rpartition(".")
            return Finding(dist.get_rank(), WEIGHT, 0, depth, module, name)
    return None


def spoiled_gradient(trainer: Trainer) -> Finding | None:
    """Return the parameter nearest to the loss whose gradient the failed step left not finite."""
    for depth, held in enumerate(reversed(trainer.held)):
        if held.parameter.grad is not None and not _finite(held.gradient):
            module = held.name.rpartition(".")[0]
            return Finding(dist.get_rank(), GRADIENT, 0, depth, module, held.name)
    return None


def _pass_again(trainer: Trainer, batch: Batch) -> Finding | None:
    """Run the passes of a step that is counted already; return what this rank saw first."""
    kept = []
    for parameter in (held.parameter for held in trainer.held):
        gradient = parameter.grad  # where it lies, the passes may write theirs
        kept.append((parameter, None if gradient is None else gradient.clone()))
        parameter.grad = None
    trainer.steps_done -= 1
    try:
        trainer.seed_dropout()
        with _Watch(trainer) as watch:
            trainer.accumulate(batch)
    finally:
        trainer.steps_done += 1
        for parameter, gradient in kept:
            parameter.grad = gradient
    return watch.first()


@dataclass(slots=True)
class _Seen:
    """An operator with finite inputs and an output that is not."""

    kind: int
    microbatch: int
    module: str
    what: str


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Looks at the results of all operators while it is entered.

    An infinity may be meant (a mask that is added to scores). So what an operator makes counts only
    if the module around it gives something that is not finite: the layers of the model are checked
    at their ends, in the forward and in the backward pass.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer
        self.order: dict[str, int] = {}  # of the modules between which the hidden state is checked
        self.parameters: dict[int, str] = {}
        self.hooks: list[Any] = []
        self.suspects: list[_Seen] = []
        self.found: list[_Seen] = []
        self.unsure: list[_Seen] = []
        self.path: list[str] = []
        self.forwards: dict[str, int] = {}  # how often each module ran: its micro-batch
        self.arrived: _Seen | None = None  # the first input of a module that is not finite
        self.behind = "the loss"  # whose backward pass is under way
        self.microbatch = 0

    def __enter__(self) -> _Watch:
        for stage in self.trainer.stages:
            modules = dict(stage.named_modules())
            for group in stage.groups():
                for module in group:
                    name = next(n for n, m in modules.items() if m is module)
                    self.order[name] = MOST_MODULES * stage.index + len(self.order)
                    self._follow(name, module)
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
        """Return what arose first."""
        if any(not _finite(gradient) for gradient in self._gradients()):
            self.found += [*self.unsure, *self.suspects]
        seen = self.found[0] if self.found else self.arrived
        if seen is None:
            return None
        places = [place for name, place in self.order.items() if _within(seen.module, name)]
        place = places[0] if places else BEHIND_ALL
        depth = -place if seen.kind == BACKWARD else place
        return Finding(dist.get_rank(), seen.kind, seen.microbatch, depth, seen.module, seen.what)

    def _gradients(self) -> Iterator[Tensor]:
        for held in self.trainer.held:
            if held.parameter.grad is not None:
                yield held.gradient

    def _follow(self, name: str, module: nn.Module) -> None:
        """Check the hidden state before and after a module, in both passes."""

        def before(_: Any, inputs: Any) -> None:
            self.forwards[name] = self.forwards.get(name, -1) + 1
            self.microbatch = self.forwards[name]
            self._confirm(bad=False)
            self.path.append(name)
            if self.arrived is None and not all(map(_finite, tree_leaves(inputs))):
                self.arrived = _Seen(ARRIVED, self.microbatch, name, "its input")
            for x in tree_leaves(inputs):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(self._leave_backward)
            for parameter_name, parameter in module.named_parameters(prefix=name):
                self._meet(name, parameter_name, parameter)

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

    def _meet(self, module: str, name: str, parameter: Tensor) -> None:
        """Remember a gathered weight; it may not be finite in the precision of the computation."""
        for storage in storages(parameter):
            self.parameters[storage._cdata] = name
        if not self.found and not _finite(parameter.detach()):
            what = f"{name} is not finite in {str(parameter.dtype).removeprefix('torch.')}"
            self.found.append(_Seen(FORWARD, self.microbatch, module, what))

    def _enter(self, name: str) -> Any:
        def before(_: Any, inputs: Any) -> None:
            self.path.append(name)

        return before

    def _leave(self, _: Any, inputs: Any, output: Any) -> None:
        self.path.pop()

    def _enter_backward(self, name: str, microbatch: int, gradient: Tensor) -> None:
        """The gradient of a module's output is there: what was before it is done."""
        self._confirm(bad=not _finite(gradient))
        self.behind, self.microbatch = name, microbatch

    def _leave_backward(self, gradient: Tensor) -> None:
        """The gradient of a module's input is there: its backward pass is done, nearly."""
        self._confirm(bad=not _finite(gradient))

    def _confirm(self, *, bad: bool) -> None:
        """Judge the suspects since the last check by what became of them."""
        if bad and self.suspects:
            self.found.append(self.suspects[0])
        elif not bad:  # a weight's gradient may be spoiled where the hidden state's is not
            self.unsure += [seen for seen in self.suspects if seen.kind == BACKWARD]
        self.suspects.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator and look at what it gives."""
        if is_wrapped(types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func._opname
        made = func.namespace not in (*NAMESPACES, "fsdp") and name not in CONSTANTS
        # an operator that writes into a tensor reads it no more
        read = args[1:] if name in ("copy_", "copy") else (args, kwargs)
        finite_before = made and not self.found and all(map(_finite, tree_leaves(read)))
        result = func(*args, **kwargs)
        if finite_before and not all(map(_finite, tree_leaves(result))):
            self.suspects.append(self._describe(name, args, result))
        return result

    def _describe(self, name: str, args: Any, result: Any) -> _Seen:
        backward = in_backward()
        module = self.behind if backward else (self.path[-1] if self.path else "the loss")
        value = "nan" if any(_has_nan(leaf) for leaf in tree_leaves(result)) else "inf"
        what = f"{name.removeprefix('_')} gives {value} from finite values"
        for leaf in tree_leaves(args):
            if isinstance(leaf, Tensor):
                for storage in storages(leaf):
                    if storage._cdata in self.parameters:
                        what += f" with {self.parameters[storage._cdata]}"
        return _Seen(BACKWARD if backward else FORWARD, self.microbatch, module, what)


def _within(module: str, top: str) -> bool:
    return module == top or module.startswith(f"{top}.")


def _finite(value: Any) -> bool:
    """Return whether all numbers of a value are finite; what is no floating tensor always is."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return True
    if value.device.type == "meta" or not value.numel():
        return True
    low, high = value.detach().aminmax()  # no temporary memory
    return bool(torch.isfinite(low + high))


def _has_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())
