"""Counts of parameters against published figures, and the law that a table equals its rows."""

import numpy as np
import pytest

from cost_models.model.families import model_spec
from cost_models.model.parameters import (
    active_parameters,
    block_numel,
    kind_numel,
    parameters_by_part,
    shard_numel,
)
from cost_models.model.presets import load_preset
from cost_models.model.spec import ModelSpec

RANKS = np.array([1, 2, 4, 8])


def spec_of(name: str) -> ModelSpec:
    return model_spec(load_preset(name).config, name=name)


@pytest.mark.parametrize(
    ("name", "billions", "without_embedding"),
    [
        ("mixtral-8x7b", 12.9, False),  # arXiv:2401.04088, sec. 1: "13B active"
        ("deepseek-v2", 21.4, False),  # arXiv:2405.04434, abstract: 21B
        ("deepseek-v3", 37.6, False),  # arXiv:2412.19437, abstract: 37B
        ("qwen3-30b-a3b", 3.35, False),  # model card: 3.3B
        ("qwen3-235b-a22b", 22.2, False),  # model card: 22B
        ("gpt-oss-20b", 3.61, True),  # arXiv:2508.10925, table 1; the embedding is not counted
        ("gpt-oss-120b", 5.13, True),
        ("llama-3-8b", 8.03, False),
    ],
)
def test_active_parameters(name: str, billions: float, without_embedding: bool) -> None:
    spec = spec_of(name)
    counted = active_parameters(spec)
    if without_embedding:
        counted -= parameters_by_part(spec)["embedding"]
    assert counted / 1e9 == pytest.approx(billions, abs=0.05 if billions > 10 else 0.01)


def test_parts_of_gpt_oss() -> None:
    """Billions of arXiv:2508.10925, table 1: MLP 114.71, attention 0.96, (un)embedding 1.16."""
    parts = parameters_by_part(spec_of("gpt-oss-120b"))
    assert (parts["experts"] + parts["router"]) / 1e9 == pytest.approx(114.71, abs=0.01)
    assert parts["attention"] / 1e9 == pytest.approx(0.96, abs=0.01)
    assert (parts["embedding"] + parts["head"]) / 1e9 == pytest.approx(1.16, abs=0.01)


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2", "deepseek-v3", "gpt-oss-20b", "t5-3b"])
def test_a_table_equals_its_rows(name: str) -> None:
    spec = spec_of(name)
    for kind in spec.kinds:
        table = kind_numel(kind, RANKS)
        assert list(table) == [float(kind_numel(kind, int(t))) for t in RANKS]
        summed = sum(shard_numel(weight, RANKS) for weight in kind.weights)
        np.testing.assert_allclose(table, summed, rtol=1e-15)
    for block in (spec.embedding, spec.head):
        assert list(block_numel(block, RANKS)) == [float(block_numel(block, int(t))) for t in RANKS]


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2", "deepseek-v3", "mixtral-8x7b"])
def test_ranks_together_hold_everything_and_replicas_more(name: str) -> None:
    spec = spec_of(name)
    for kind in spec.kinds:
        whole = sum(weight.numel for weight in kind.weights)
        one = kind_numel(kind, RANKS)
        assert float(one[0]) == whole
        assert np.all(np.diff(one) < 0)
        assert np.all(one * RANKS >= whole)
