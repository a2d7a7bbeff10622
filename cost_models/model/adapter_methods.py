"""Methods that train a few tensors next to a frozen matrix, each as one line of a table.

Symbols   i, o  inputs and outputs of the matrix   r  rank (OFT: block size)

A method is what it trains, what it keeps for the backward pass, and whether it multiplies tokens
with a product of its tensors that is as large as the matrix. The formulas read the table; none
knows a method by its name. What it keeps was counted of huggingface/peft 0.21, module by module
(torch.autograd.graph.saved_tensors_hooks).

Leaves out: methods without a tensor for each matrix (prompts, prefixes, new layers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt
from typing import Final

from msgspec import Struct

from cost_models.model.spec import Weight

FIRST, SECOND = ".lora_A.weight", ".lora_B.weight"  # suffixes to the name of the matrix
Shape = tuple[int | str, ...]  # "i" and "o": the matrix's own, which sharding divides


class Method(Struct, frozen=True):
    """Tensors of a method, and what it does with them."""

    tensors: Callable[[int, int, int], Mapping[str, Shape]]  # by suffix, of i, o and r
    # tokens are multiplied with a matrix (i, o) that is made of the tensors, and kept
    composed: bool = False
    reads_input: bool = True  # a gradient needs the input of the matrix
    kept_outputs: float = 0.0  # of the frozen matrix, for each of its outputs
    kept_results: float = 0.0  # of the adapter, in its precision
    accesses: float = 0.0  # elements an output that are read and written besides LoRA's, forward
    gradient_accesses: float = 0.0  # the same, backward
    # elements of (i, o) that a pass reads and writes to make matrices, forward and backward
    making: tuple[float, float] = (0.0, 0.0)
    # temporary matrices of a pass in the adapter's precision: of (i, o), and of (i, i)
    temporary: float = 0.0
    identity: float = 0.0
    of_last: str = ""  # the method of the last matrix of an MLP, if it is another one
    # frozen matrices that all layers share, of the largest i and o and of r
    shared: Callable[[int, int, int], tuple[tuple[int, int], ...]] = lambda i, o, r: ()


def is_composed(weight: Weight) -> bool:
    """Whether tokens are also multiplied with an adapter's matrix that is as large."""
    return bool(weight.adapter) and METHODS[weight.adapter].composed


def nearest_factors(length: int) -> tuple[int, int]:
    """Return two factors of a length, the nearest to its root, the smaller one first.

    >>> nearest_factors(768), nearest_factors(640)
    ((24, 32), (20, 32))
    """
    small = next(each for each in range(isqrt(length), 0, -1) if length % each == 0)
    return small, length // small


def _lora(i: int, o: int, r: int) -> dict[str, Shape]:
    return {FIRST: (r, "i"), SECOND: ("o", r)}


def _lokr(i: int, o: int, r: int) -> dict[str, Shape]:
    (few_out, out), (few_in, inner) = nearest_factors(o), nearest_factors(i)
    second: dict[str, Shape] = {".lokr_w2": (out, inner)}
    if r < max(out, inner) / 2:
        second = {".lokr_w2_a": (out, r), ".lokr_w2_b": (r, inner)}
    return {".lokr_w1": (few_out, few_in), **second}


METHODS: Final[Mapping[str, Method]] = {
    # Hu et al., arXiv:2106.09685. rsLoRA, LoRA+, PiSSA, OLoRA, LoRA-GA and CorDA differ in scales,
    # learning rates and first values alone
    "lora": Method(_lora),
    # Liu et al., arXiv:2402.09353, sec. 4.3; peft, tuners/lora/dora.py: magnitudes, and the norm of
    # W + B A, where the product is made with an identity matrix. Without dropout, with which the
    # frozen matrix is multiplied and copied once more
    "dora": Method(
        lambda i, o, r: {**_lora(i, o, r), ".lora_magnitude_vector.weight": ("o",)},
        kept_outputs=1.0,
        kept_results=1.0,
        accesses=7.0,
        gradient_accesses=12.0,
        making=(9.0, 0.0),
        temporary=4.0,
        identity=1.0,
    ),
    # Zhang et al., arXiv:2303.10512, sec. 3.1: r is the first rank, 1.5 times the last by default
    "adalora": Method(lambda i, o, r: {**_lora(i, o, r), ".lora_E": (r,)}),
    # Hyeon-Woo et al., arXiv:2108.06098: the elementwise product of two products
    "loha": Method(
        lambda i, o, r: {
            ".hada_w1_a": (o, r),
            ".hada_w1_b": (r, i),
            ".hada_w2_a": (o, r),
            ".hada_w2_b": (r, i),
        },
        composed=True,
        making=(7.0, 14.0),
        temporary=2.0,
    ),
    # Yeh et al., arXiv:2309.14859, sec. 3.2.3: a Kronecker product
    "lokr": Method(_lokr, composed=True, making=(4.0, 6.0), temporary=1.0),
    # Kopiczko et al., arXiv:2310.11454, sec. 3.1. Leaves out: the matmuls of the shared matrices
    "vera": Method(
        lambda i, o, r: {".vera_lambda_d": (r,), ".vera_lambda_b": ("o",)},
        reads_input=False,
        kept_results=1.0,
        accesses=5.0,
        gradient_accesses=6.0,
        shared=lambda i, o, r: ((r, i), (o, r)),
    ),
    # Liu et al., arXiv:2205.05638, sec. 3.3: a factor for each output, or input of the last matrix
    # of an MLP (peft, feedforward_modules)
    "ia3": Method(
        lambda i, o, r: {".ia3_l": ("o",)},
        reads_input=False,
        kept_outputs=1.0,
        accesses=2.0,
        gradient_accesses=6.0,
        of_last="ia3_of_inputs",
    ),
    "ia3_of_inputs": Method(lambda i, o, r: {".ia3_l": ("i",)}),
    # Qiu et al., arXiv:2306.07280; peft, tuners/oft/layer.py: skew-symmetric blocks turn the input.
    # Leaves out: the matmuls of the blocks
    "oft": Method(lambda i, o, r: {".oft_R.weight": (i // r, r * (r - 1) // 2)}),
}
