"""Layout of parameters over ranks, and their initial values.

Names, shapes and sharded dimensions come from the table (``cost_models.model.spec``) on which the
estimates are based.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor

from cost_models.model.adapter_methods import SECOND
from cost_models.model.spec import ModelSpec, Weight
from cost_models.partition.tensor_sharding import shard_dim
from executor.model.families import FAMILIES
from executor.parallel.expert_parallel import ALL_EXPERTS, ExpertAxis
from executor.parallel.tensor_parallel import TensorAxis

# Initial values are drawn in blocks of whole rows, each from its own seed, so that a rank draws
# only its own rows and every layout gives the same tensor.
BLOCK_NUMEL: Final = 1 << 20
CONVOLUTION_DIMS: Final = 3  # (out, in of a group, tokens)
Value = TypeVar("Value")
Ranges = tuple[tuple[int, int], ...]  # [start, stop) pieces along one dimension
Pieces = tuple[Ranges, ...]  # per dimension: the part of a tensor on one rank


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """One parameter of the model, and its slice on a tensor-parallel rank."""

    name: str  # in the Hugging Face state dict of the whole model
    shape: tuple[int, ...]
    std: float | None  # None: constant initial values
    constant: float
    shard_dim: int | None  # dimension sharded over the tensor-parallel ranks
    parts: tuple[int, ...]  # along it, each sharded separately: q, k and v of one matrix
    partial_gradient: bool  # replicated tensor whose gradient is summed over the ranks
    of_experts: bool = False  # its first dimension counts experts, which ranks may share
    frozen: bool = False  # no gradient, no update
    is_adapter: bool = False  # LoRA matrix
    quantised: bool = False  # stored in 4 bits, see ``executor.ops.nf4``
    transposed: bool = False  # a matrix stored (in, out)
    # logarithms of numbers drawn uniformly between these; None: as ``std`` says
    log_uniform: tuple[float, float] | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether weight decay applies: not to norms and biases, experts' included."""
        return len(self.shape) > 1 and not self.name.endswith("bias")

    def ranges(self, axis: TensorAxis, experts: ExpertAxis = ALL_EXPERTS) -> Pieces:
        """Return the pieces of every dimension on a rank of the two axes."""
        pieces: list[Ranges] = [((0, length),) for length in self.shape]
        if self.of_experts:
            pieces[0] = (experts.slice_of(self.shape[0]),)
        if self.shard_dim is not None and (experts.tensor_sharded or not self.of_experts):
            ends = list(itertools.accumulate(self.parts, initial=0))
            slices = [axis.slice_of(length) for length in self.parts]
            pieces[self.shard_dim] = tuple(
                (begin + start, begin + stop)
                for begin, (start, stop) in zip(ends, slices, strict=False)
            )
        return tuple(pieces)

    def local_shape(self, axis: TensorAxis, experts: ExpertAxis = ALL_EXPERTS) -> tuple[int, ...]:
        """Return the shape of a rank's slice."""
        return tuple(sum(b - a for a, b in pieces) for pieces in self.ranges(axis, experts))


Initializer = Callable[[ParameterLayout, Pieces], Tensor]  # source of a tensor's initial values


def parameter_layouts(
    model: ModelSpec, axis: TensorAxis, experts: ExpertAxis = ALL_EXPERTS
) -> dict[str, ParameterLayout]:
    """Return the layout of every parameter of the model by name."""
    blocks = [("", model.outer)]
    blocks += [
        (f"{prefix}.", model.kinds[kind].weights)
        for prefix, kind in zip(model.layer_prefixes, model.pattern, strict=True)
    ]
    return {
        f"{prefix}{weight.name}": _layout(model, axis, experts, f"{prefix}{weight.name}", weight)
        for prefix, weights in blocks
        for weight in weights
    }


def buffer_layouts(model: ModelSpec) -> dict[str, ParameterLayout]:
    """Return the layouts of persistent buffers; they are zero unless loaded."""
    buffer = FAMILIES[model.family].expert_buffer
    found = {}
    for prefix, kind in zip(model.layer_prefixes, model.pattern, strict=True):
        experts = model.kinds[kind].feed_forward.num_experts
        if buffer is not None and experts:
            name = f"{prefix}.{buffer}"
            found[name] = ParameterLayout(name, (experts,), None, 0.0, None, (), False)
    return found


def _layout(
    model: ModelSpec, axis: TensorAxis, experts: ExpertAxis, name: str, weight: Weight
) -> ParameterLayout:
    whole, cut = weight.sharding == "replicate", shard_dim(weight)
    std = float(model.config.get("initializer_range") or 0.02)
    family = FAMILIES[model.family]
    if family.scaled_down_weights and name.endswith(family.scaled_down_weights):
        std /= math.sqrt(2 * model.num_layers)
    # where a tensor-parallel rank reads a part of the tokens, of the heads, or of each expert
    summand = axis.sequence_parallel or weight.gradient_is_partial_sum or weight.part == "router"
    if weight.is_routed_expert:
        summand = experts.tensor_sharded
    is_norm = weight.part == "norm" and name.endswith("weight")
    starts_at_zero = weight.role not in ("linear", "lookup", "expert")
    starts_at_zero = starts_at_zero and len(weight.shape) < CONVOLUTION_DIMS
    logarithms = _of_name(family.log_uniform, name)
    if weight.is_adapter:  # Hu et al. (arXiv:2106.09685), sec. 4.1: A at random, B zero
        starts_at_zero = name.endswith(SECOND)
        std = weight.shape[1] ** -0.5
    return ParameterLayout(
        name=name,
        shape=weight.shape,
        std=None if starts_at_zero and logarithms is None else std,
        constant=_of_name(family.initial_constants, name) or family.initial_norm * is_norm,
        log_uniform=logarithms,
        shard_dim=cut,
        parts=weight.parts or (() if cut is None else (weight.shape[cut],)),
        partial_gradient=whole and axis.size > 1 and summand,
        of_experts=weight.is_routed_expert,
        frozen=weight.frozen,
        is_adapter=weight.is_adapter,
        quantised=weight.quantised,
        transposed=weight.transposed,
    )


def _of_name(values: Mapping[str, Value], name: str) -> Value | None:
    """Return the value whose key ends a parameter's name."""
    return next((value for end, value in values.items() if name.endswith(end)), None)


def random_initializer(seed: int) -> Initializer:
    """Return the initialisation of an untrained model."""
    return lambda layout, pieces: random_tensor(layout, seed, pieces)


def random_tensor(layout: ParameterLayout, seed: int, pieces: Pieces) -> Tensor:
    """Return the given pieces of a parameter's initial values: normal, or a constant (fp32)."""
    if layout.std is None:
        shape = [sum(b - a for a, b in ranges) for ranges in pieces]
        return torch.full(shape, layout.constant)
    rows = [_rows(layout, seed, start, stop) for start, stop in pieces[0]]
    tensor = torch.cat(list(rows)) if len(rows) > 1 else rows[0]
    for dim, ranges in enumerate(pieces[1:], start=1):
        if ranges != ((0, layout.shape[dim]),):
            tensor = torch.cat([tensor.narrow(dim, a, b - a) for a, b in ranges], dim)
    return tensor


def _rows(layout: ParameterLayout, seed: int, start: int, stop: int) -> Tensor:
    width = math.prod(layout.shape[1:])
    rows_per_block = max(1, BLOCK_NUMEL // width)
    kept = [torch.empty(0, width)]
    for block, rows in _blocks(layout.shape[0], rows_per_block, start, stop):
        digest = hashlib.sha256(f"{seed}/{layout.name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        first = block * rows_per_block
        values = torch.empty(rows, width)
        if layout.log_uniform is not None:
            values.uniform_(*layout.log_uniform, generator=generator).log_()
        else:
            values.normal_(0.0, layout.std or 0.0, generator=generator)
        kept.append(values[max(0, start - first) : stop - first])
    return torch.cat(kept).view(-1, *layout.shape[1:])


def _blocks(length: int, per_block: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the number and the rows of each block that [start, stop) touches."""
    for block in range(start // per_block, -(-stop // per_block)):
        yield block, min(per_block, length - block * per_block)


def subrange(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the part [start, stop) of consecutive pieces."""
    found, offset = [], 0
    for a, b in ranges:
        low, high = max(start - offset, 0), min(stop - offset, b - a)
        if low < high:
            found.append((a + low, a + high))
        offset += b - a
    return tuple(found) or ((ranges[0][0], ranges[0][0]),)
