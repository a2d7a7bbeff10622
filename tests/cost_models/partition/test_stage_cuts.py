"""Stages as trainers cut a model: by hand, and through the price of a plan."""

from itertools import pairwise

import pytest

from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.partition.stage_cuts import cut_layers
from cost_models.plan.plan import Plan
from hardware_profiles.software.trainer import StageCut
from tests.samples import llama, make_scenario


def layers_of(cut: StageCut, stages: int, **changes: int) -> list[int]:
    ranges = cut_layers(cut, llama(**changes), stages)
    assert ranges[0][0] == 0
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
    return [last - first for first, last in ranges]


def test_embedding_and_head_count_as_layers() -> None:
    """29 of 27 layers over 4 stages: 8, 7, 7, 7, of which the ends take one each."""
    assert layers_of("ends", 4, num_hidden_layers=27) == [7, 7, 7, 6]
    assert layers_of("ends", 4, num_hidden_layers=26) == [6, 7, 7, 6]
    assert layers_of("even", 4, num_hidden_layers=26) == [6, 7, 7, 6]
    assert layers_of("even", 4, num_hidden_layers=27) == [7, 7, 7, 6]
    assert layers_of("ends", 4, num_hidden_layers=8) == [2, 3, 2, 1]
    assert layers_of("ends", 8, num_hidden_layers=8) == [1] * 8  # no stage is without a layer


def test_a_large_vocabulary_takes_layers_from_the_ends() -> None:
    wide = {"num_hidden_layers": 12, "vocab_size": 4096}
    of_parameters, of_cost = layers_of("parameters", 4, **wide), layers_of("cost", 4, **wide)
    assert of_parameters[0] == of_parameters[-1] < min(of_parameters[1:-1])
    assert of_cost[-1] < of_cost[0]  # a look-up is no computation
    assert layers_of("parameters", 4, num_hidden_layers=12, vocab_size=2) == [3] * 4


def test_a_stage_ends_with_the_first_layer_past_its_share() -> None:
    """By hand: layers of one cost, a head of none, then one of two layers."""
    even = {"num_hidden_layers": 12, "vocab_size": 2}
    assert layers_of("thresholds", 4, **even) == [4, 3, 3, 2]  # 3.0005: the third is not past it
    model = llama(num_hidden_layers=12)
    two = 2 * (4 * model.hidden_size + 3 * model.kinds[0].feed_forward.ffn_hidden_size)
    assert layers_of("thresholds", 4, num_hidden_layers=12, vocab_size=two) == [4, 4, 3, 1]
    assert layers_of("thresholds", 4, num_hidden_layers=5, vocab_size=9 * two) == [2, 1, 1, 1]


@pytest.mark.parametrize("cut", ["ends", "parameters", "cost", "thresholds"])
def test_the_largest_stage_is_the_smallest_possible(cut: StageCut) -> None:
    model = model_spec(load_preset("llama-3-8b").config, name="llama-3-8b")
    for stages in (2, 4, 8, 32):
        counts = [last - first for first, last in cut_layers(cut, model, stages)]
        assert sum(counts) == model.num_layers
        assert min(counts) >= 1


def test_a_trainer_cuts_its_stages() -> None:
    plan = Plan(pipeline_parallel=4, num_microbatches=4)
    for software, layers in (
        ("shardplan", [2, 2, 2, 2]),
        ("torch-trainer+ends-as-layers", [2, 3, 2, 1]),
        ("nanotron", [3, 2, 2, 1]),
    ):
        ranges = default_layer_ranges(make_scenario("llama", software=software), plan)
        assert [last - first for first, last in ranges] == layers
