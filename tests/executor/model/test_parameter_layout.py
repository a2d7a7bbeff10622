"""Slices of parameters: names and shapes of the real modules, equal starts in every layout."""

import pytest
import torch

from cost_models.plan.plan import Plan
from executor.compat import causal_lm
from executor.model.parameter_layout import (
    BLOCK_NUMEL,
    ParameterLayout,
    parameter_layouts,
    random_tensor,
)
from executor.parallel.tensor_parallel import UNSHARDED, TensorAxis
from tests.executor.tiny import CONFIGS, tiny


@pytest.mark.sampled(12)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_names_and_shapes_are_those_of_the_module(family: str, tied: bool):
    model = tiny(Plan(), family, tied=tied).model
    real = causal_lm(model.config, device="meta", dtype=torch.float32, attention_kernel="flash")
    expected = {name: tuple(p.shape) for name, p in real.named_parameters()}
    assert {
        n: layout.shape for n, layout in parameter_layouts(model, UNSHARDED).items()
    } == expected


@pytest.mark.sampled(12)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", CONFIGS)
def test_slices_are_parts_of_the_whole_tensor(family: str, size: int):
    model = tiny(Plan(), family, vocab_size=131).model
    for name, layout in parameter_layouts(model, UNSHARDED).items():
        whole = random_tensor(layout, 7, layout.ranges(UNSHARDED))
        assert whole.shape == layout.shape
        if layout.shard_dim is None:
            continue
        pieces = []
        for rank in range(size):
            axis = TensorAxis(size=size, rank=rank)
            piece = random_tensor(layout, 7, layout.ranges(axis))
            assert piece.shape == layout.local_shape(axis)
            pieces.append(piece)
        # q, k and v lie one after the other, each cut for itself
        parts = [(p,) for p in pieces]
        if len(layout.parts) > 1:
            parts = [p.split([n // size for n in layout.parts], layout.shard_dim) for p in pieces]
        ordered = [parts[rank][n] for n in range(len(layout.parts)) for rank in range(size)]
        assert torch.equal(torch.cat(ordered, layout.shard_dim), whole), name


def test_rows_do_not_depend_on_who_draws_them():
    rows = 3 * BLOCK_NUMEL // 1024 + 5
    layout = ParameterLayout("w", (rows, 1024), 0.02, 0.0, 0, (rows,), False)
    whole = random_tensor(layout, 1, (((0, rows),), ((0, 1024),)))
    for start, stop in ((0, 1), (1000, 1100), (rows - 3, rows), (17, 17)):
        part = random_tensor(layout, 1, (((start, stop),), ((5, 900),)))
        assert torch.equal(part, whole[start:stop, 5:900])


def test_start_values_follow_hugging_face():
    model = tiny(Plan(), "gpt2", num_layers=8, initializer_range=0.05).model
    table = parameter_layouts(model, UNSHARDED)

    def start(name: str) -> torch.Tensor:
        return random_tensor(table[name], 0, table[name].ranges(UNSHARDED))

    std = {
        "transformer.wte.weight": 0.05,
        "transformer.h.3.attn.c_attn.weight": 0.05,
        "transformer.h.3.mlp.c_proj.weight": 0.05 / 4,  # 1 / sqrt(2 x 8 layers)
    }
    for name, expected in std.items():
        values = start(name)
        assert float(values.std()) == pytest.approx(expected, rel=0.03)
        assert abs(float(values.mean())) < 3 * expected / values.numel() ** 0.5
    assert torch.equal(start("transformer.h.3.ln_1.weight"), torch.ones(64))
    assert torch.equal(start("transformer.h.3.ln_1.bias"), torch.zeros(64))
    assert torch.equal(start("transformer.h.3.attn.c_attn.bias"), torch.zeros(192))
    assert not torch.equal(
        start("transformer.h.3.mlp.c_proj.weight"), start("transformer.h.4.mlp.c_proj.weight")
    )
