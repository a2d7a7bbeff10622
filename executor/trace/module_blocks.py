"""Blocks of an arbitrary ``nn.Module``: the units of parameter gathering and recomputation.

Blocks are the members with parameters of the outermost lists (``ModuleList``, ``Sequential``). If a
list has at most MOST_STAGES members, each of which contains a list of composite modules (the stages
of a ResNet or a Swin transformer), the members of those inner lists are the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Final

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

MOST_STAGES: Final = 5  # ResNet, ConvNeXt and Swin have 4; transformers have more layers
LISTS: Final = (nn.ModuleList, nn.Sequential)
BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks by name, in the order of the module's children."""
    found: dict[str, nn.Module] = {}
    for name, group in _lists(module, ""):
        members = dict(_members(name, group))
        inner = [list(_lists(member, name)) for name, member in members.items()]
        if len(members) <= MOST_STAGES and inner and all(_composite(lists) for lists in inner):
            for lists in inner:
                for inner_name, inner_group in lists:
                    found.update(_members(inner_name, inner_group))
        else:
            found.update(members)
    return found


def recompute(parts: Iterable[nn.Module]) -> None:
    """Make blocks save only their inputs and recompute the rest in the backward pass.

    The recomputation does not update the running statistics of batch norms.
    """
    for part in parts:
        norms = [module for module in part.modules() if isinstance(module, BATCH_NORMS)]
        part.forward = _recomputed(part.forward, norms)


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in a module's output: a single number, or its ``loss``.

    None if it has neither.

    ``loss`` may be a key of a mapping or an attribute, as in Hugging Face outputs.
    """
    if not isinstance(output, Tensor):
        output = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)
    is_loss = isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad
    return output if is_loss else None


def tensors(values: Any) -> list[Tensor]:
    """Return all tensors of a nested value."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _recomputed(forward: Callable[..., Any], norms: list[Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        contexts = {"context_fn": lambda: (nullcontext(), _unchanged(norms))} if norms else {}
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)

    return run


@contextmanager
def _unchanged(norms: list[Any]) -> Iterator[None]:
    kept = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, count in kept:
            norm.momentum, norm.num_batches_tracked = momentum, count


def _lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost lists with parameters; the module itself if it is one."""
    if isinstance(module, LISTS):
        if _has_parameters(module):
            yield prefix, module
        return
    for name, child in module.named_children():
        yield from _lists(child, f"{prefix}.{name}" if prefix else name)


def _members(name: str, group: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for key, member in group.named_children():
        if _has_parameters(member):
            yield (f"{name}.{key}" if name else key), member


def _composite(lists: list[tuple[str, nn.Module]]) -> bool:
    """Whether the lists have members with parameters, all of which contain other modules."""
    members = [member for name, group in lists for _, member in _members(name, group)]
    return bool(members) and all(any(True for _ in member.children()) for member in members)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
