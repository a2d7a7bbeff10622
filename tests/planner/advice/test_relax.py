"""The smallest change makes a plan exist, and nothing nearer does."""

import pytest

import planner
from hardware_profiles.errors import NoLegalPlanError
from planner.advice.relax import Relaxation, smallest_changes
from planner.request.constraints import parse_requirements
from planner.request.pins import parse_fixed
from planner.search.search import search
from tests.samples import llama, make_scenario

SETTING = make_scenario("llama", "4xA100-80GB", global_batch_size=4)


def changes(required: str = "", fixed: str = "") -> list[Relaxation]:
    return smallest_changes(SETTING, parse_fixed(fixed), parse_requirements(required))


def has_plan(required: str = "", fixed: str = "") -> bool:
    require = parse_requirements(required)
    return bool(search(SETTING, parse_fixed(fixed), require=require, top=1).plans)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("required", ["memory<=10MiB", "step<=0.001ms", "mfu>=99%,tp>=1"])
def test_a_result_is_relaxed_to_the_best_there_is(required: str) -> None:
    assert not has_plan(required)
    change = changes(required)[0].change
    assert has_plan(change)
    name, value = change.replace(">=", "<=").split("<=")
    number = float(value.rstrip("GiBs"))
    closer = f"{name}<={0.8 * number}" if "<=" in change else f"{name}>={1.03 * number}"
    closer += "GiB" if name == "memory" else ""
    assert not has_plan(closer)


def test_a_part_is_relaxed_to_the_nearest_value() -> None:
    assert changes("tp>=8") == [Relaxation("--require 'tp>=8'", "tp==4")]
    assert changes(fixed="tp=3")[0].change == "--fix tensor_parallel=2"


def test_each_of_two_is_relaxed_alone() -> None:
    both = changes("tp>=4, dp>=4")
    assert [change.change for change in both] == ["tp==1", "dp==1"]


@pytest.mark.slow
def test_two_that_stand_in_the_way_together_are_both_relaxed() -> None:
    """Neither alone: tp 8 is too many for four accelerators, and no plan needs so little memory."""
    required, pinned = "memory<=10MiB", "tp=8"
    for alone in (changes(required, "tp=4"), changes("memory<=80GiB", pinned)):
        assert alone  # one change is enough there
    (both,) = changes(required, pinned)
    assert both.instead_of == "--require 'memory<=10MiB' and --fix tensor_parallel=8"
    memory, pin = both.change.split(" and --fix ")
    assert pin == "tensor_parallel=4"
    assert has_plan(memory, pin)
    assert not has_plan(required, pin)
    assert not has_plan(memory, pinned)
    assert changes("memory<=10MiB, step<=0.001ms")[0].change.startswith("memory<=")


def test_a_batch_that_divides_nowhere_takes_back_the_pin() -> None:
    model = llama(num_key_value_heads=1, num_hidden_layers=1)  # data parallelism alone
    with pytest.raises(NoLegalPlanError) as caught:
        planner.plan(model, "4xA100-80GB", seq_len=64, global_batch_size=7, fix="cp=1")
    # without the pin four ranks share each sequence
    assert caught.value.document["changes"] == [
        {"instead_of": "--fix context_parallel=1", "change": "--fix context_parallel=4"}
    ]


def test_the_nearest_batch_need_not_be_a_multiple_of_all_accelerators() -> None:
    """Seven nodes of four: tensor parallelism over four leaves seven data-parallel ranks."""
    scenario = make_scenario("llama", "7x4xA100-80GB", seq_len=64, global_batch_size=12)
    (change,) = smallest_changes(scenario, {}, [])
    assert change == Relaxation("--global-batch-size 12", "--global-batch-size 14")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("required", ["pp==3", "mfu>=99%", "tokens_per_second_per_gpu>=1e9"])
def test_a_refusal_counts_what_is_legal_and_offers_no_way_that_is_not_as_required(
    required: str,
) -> None:
    """Plans fit here: what would save memory is no way out."""
    with pytest.raises(NoLegalPlanError) as caught:
        planner.plan(llama(), "4xA100-80GB", seq_len=64, global_batch_size=4, require=required)
    document = caught.value.document
    assert document["ways_out"] == []
    assert len(document["changes"]) == 1
    search_ = document["search"]
    legal = search_["enumerated"] - sum(search_["illegal"].values())
    assert legal > 0
    assert f" {legal:,} legal, none of them fits as required" in " ".join(str(caught.value).split())
