"""Recomputation of a layer's activations in the backward pass, in full or selectively.

Full (``checkpointed``): only the arguments are saved. Selective (``checkpointed_selectively``,
torch's sense): a layer runs under ``torch.utils.checkpoint``; the results of its matmuls, fused
attention kernels and collectives are recorded in order in the first run and replayed in the
recomputation. Elementwise work (norms, activations, rotary embeddings, the scores of eager
attention) is done twice.

Operators of torch are intercepted at dispatch, below autograd; an autograd function of this package
that computes or communicates inside uses ``compute_once``. A block's result that nothing reads
again (the MLP's, where no norm follows) leaves only its shape and is NaN in the second run, so that
an unexpected read cannot pass unnoticed.

``every_second``: the policy ``ops:every-2nd-mm``. A matmul is recorded only if ``matmuls`` says so,
whether its result is read or not; grouped matmuls and gathered inputs run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from executor.compat import ATTENTION_OPERATORS, KEPT_OPERATORS, alias_below_autograd, version_of
from executor.counters.collectives_and_flops import OperatorMode

Result = TypeVar("Result")


class _RecordedResult(NamedTuple):
    """Result of one operator, or of one function of this package (operator None)."""

    operator: Any
    values: Any  # tensors, or only their shapes
    versions: list[int]  # of the tensors, when recorded


class _Shape(NamedTuple):
    """Shape of a tensor that nothing reads again."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device

    def tensor(self) -> Tensor:
        return torch.full(self.size, float("nan"), dtype=self.dtype, device=self.device)


class _Results:
    """The recorded results of one layer and micro-batch, in order."""

    def __init__(self, *, every_second: bool) -> None:
        self.every_second = every_second
        self.again: list[bool] = []  # whether each of the next matmuls runs again
        self.entries: list[_RecordedResult | None] = []
        self.taken: int | None = None  # number of entries replayed in the second run
        self.inside = False  # inside a function that records its result itself
        self.unread = False  # nothing reads the current block's result again
        self.shape_only = False

    def keeps(self, operator: Any) -> bool:
        """Return whether the result of an operator is recorded."""
        if operator not in KEPT_OPERATORS or self.inside:
            return False
        if not self.every_second or operator in ATTENTION_OPERATORS:
            return True
        return bool(self.again) and not self.again.pop(0)

    def add(self, operator: Any, values: Any) -> None:
        versions: list[int] = []

        def kept(tensor: Tensor) -> Any:
            if self.shape_only:
                return _Shape(tensor.size(), tensor.dtype, tensor.device)
            alias = alias_below_autograd(tensor)
            versions.append(version_of(alias))
            return alias

        with torch.no_grad():
            self.entries.append(
                _RecordedResult(operator, tree_map_only(Tensor, kept, values), versions)
            )

    def take(self, operator: Any) -> Any:
        """Return the next result and forget it: each is replayed once."""
        assert self.taken is not None
        entry = self.entries[self.taken] if self.taken < len(self.entries) else None
        if entry is None or entry.operator is not operator:
            raise RuntimeError(
                f"recomputing a layer took another path: {operator or 'a function'} ran where "
                f"{entry.operator if entry else 'nothing'} ran in the forward pass"
            )
        versions: list[int] = []

        def given(kept: Any) -> Tensor:
            if isinstance(kept, _Shape):
                return kept.tensor()
            versions.append(version_of(kept))
            return alias_below_autograd(kept)

        self.entries[self.taken] = None
        self.taken += 1
        with torch.no_grad():
            values = _map(given, entry.values)
        if operator is not None and versions != entry.versions:
            raise RuntimeError(f"a result of {operator} was modified in place after it was saved")
        return values


def _map(given: Callable[[Any], Tensor], values: Any) -> Any:
    if isinstance(values, (Tensor, _Shape)):
        return given(values)
    if isinstance(values, (tuple, list)):
        return type(values)(_map(given, value) for value in values)
    return values


_open: list[_Results] = []  # global: autograd may run backward in another thread


class _Catch(OperatorMode):
    """Records results of KEPT_OPERATORS in the first run, replays them in the second."""

    def __init__(self, results: _Results, *, again: bool) -> None:
        super().__init__()
        self.results, self.again = results, again

    def __enter__(self) -> _Catch:
        if self.again:
            self.results.taken = 0
        _open.append(self.results)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _open.pop()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run, save or replay one operator."""
        if not self.results.keeps(func):
            return func(*args, **kwargs)
        if self.again:
            return self.results.take(func)
        found = func(*args, **kwargs)
        self.results.add(func, found)
        return found


def checkpointed(function: Callable[..., Tensor], *arguments: Any, random: bool) -> Tensor:
    """Call ``function`` and save only its arguments; call it again when the backward pass needs it.

    Non-reentrant, so that the second call stops at the last tensor that the backward pass needs.
    ``random``: the random state is restored too (dropout).
    """
    result: Tensor = checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=random
    )
    return result


def checkpointed_selectively(
    function: Callable[..., Tensor], *arguments: Any, random: bool, every_second: bool = False
) -> Tensor:
    """Call ``function``; save its arguments and the results of matmuls, attention and collectives.

    ``random``: the random state is restored for the second call (dropout). ``every_second``: of
    matmuls only some, see ``matmuls``.
    """

    def contexts() -> tuple[_Catch, _Catch]:
        results = _Results(every_second=every_second)
        return _Catch(results, again=False), _Catch(results, again=True)

    result: Tensor = checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=random, context_fn=contexts
    )
    return result


def compute_once(compute: Callable[[], Result], *, by_matmul: bool = False) -> Result:
    """Return the result of ``compute``; a selective recomputation replays it instead.

    For the inside of autograd functions: no gradient flows through it. ``by_matmul``: matmuls, or
    gathered inputs of matmuls, of which ``every_second`` keeps only the results of some matmuls.
    """
    if not _open:
        return compute()
    results = _open[-1]
    if results.inside or (by_matmul and results.every_second):
        return compute()
    if results.taken is not None:
        found: Result = results.take(None)
        return found
    results.inside = True
    try:
        given = compute()
    finally:
        results.inside = False
    results.add(None, given)
    return given


def is_recomputing() -> bool:
    """Return whether the current layer is being recomputed selectively."""
    return bool(_open) and _open[-1].taken is not None


@contextmanager
def matmuls(linears: Sequence[Any]) -> Iterator[None]:
    """Run the matmuls of some modules in this order; ``every_second`` keeps results of some.

    A module of which the plan computes the result again has the attribute ``runs_again``.
    """
    if not _open or not _open[-1].every_second:
        yield
        return
    results = _open[-1]
    results.again = [hasattr(linear, "runs_again") for linear in linears]
    try:
        yield
    finally:
        results.again = []


@contextmanager
def result_unread(nothing_reads_it: bool) -> Iterator[None]:
    """Run a block of a layer; only the shape of an unread result is recorded."""
    if not _open:
        yield
        return
    results = _open[-1]
    results.unread, before = nothing_reads_it, results.unread
    try:
        yield
    finally:
        results.unread = before


@contextmanager
def block_result(*, summed: bool = False) -> Iterator[None]:
    """Compute the result of a block; ``summed``: a summand, of which only the sum is read."""
    if not _open:
        yield
        return
    results = _open[-1]
    unread = results.unread and not results.every_second
    results.shape_only, before = summed or unread, results.shape_only
    try:
        yield
    finally:
        results.shape_only = before
