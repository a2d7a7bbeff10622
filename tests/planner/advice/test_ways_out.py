import json
import math
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import planner
from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import OFFLOADS, Plan
from cost_models.pricing.estimate import price
from hardware_profiles.cluster.parse import parse_cluster
from planner.advice.changes import resized
from planner.advice.refusal import no_plan
from planner.advice.ways_out import MOST_WAYS, ways_out
from planner.api.fit import fit
from planner.assessment.assess import assess
from planner.assessment.reach import largest, largest_micro_batch, longest_sequence
from planner.assessment.too_small import least_bytes, least_host_bytes
from planner.cli.app import app
from planner.search.search import search
from planner.search.space import enumerate_plans
from tests.samples import make_scenario, sample_model, with_memory

TOO_LARGE = [
    ("llama-3-8b", "8xA100-80GB", {"seq_len": 32768, "micro_batch_size": 4, "recompute": "none"}),
    ("llama-3-70b", "8xA100-80GB", {"seq_len": 4096}),
    ("llama-3.2-1b", "1xA100-80GB", {"seq_len": 65536, "recompute": "none"}),
    ("gpt2-xl", "1xA100-80GB", {"seq_len": 1024, "micro_batch_size": 64, "recompute": "none"}),
]


@cache
def too_large(number: int) -> Any:
    """Return the answer to one of TOO_LARGE, for several tests."""
    model, cluster, options = TOO_LARGE[number]
    return fit(model, cluster, **options)


EACH = pytest.mark.parametrize("number", range(len(TOO_LARGE)), ids=lambda n: TOO_LARGE[n][0])


@pytest.mark.sampled(1)
@EACH
def test_every_way_out_fits_when_priced_again(number: int) -> None:
    answer = too_large(number)
    assert answer.verdict == "does_not_fit"
    assert 1 <= len(answer.ways_out) <= MOST_WAYS
    for way in answer.ways_out:
        plan = way.plan
        scenario = answer.scenario
        if way.num_gpus != scenario.cluster.num_gpus:
            scenario = replace(scenario, cluster=way.scenario.cluster)
        if way.kind in ("accelerator", "lora", "qlora", "optimizer", "16 bits"):
            continue  # typed in full below
        workload = scenario.workload
        if way.kind == "sequence":
            length = way.scenario.workload.seq_len
            workload = replace(workload, seq_len=length)
        workload = replace(workload, global_batch_size=plan.global_batch_size)
        scenario = replace(scenario, workload=workload)
        found = assess(scenario, plan)
        assert found.memory.peak_bytes == way.peak_bytes
        assert found.verdict == "fits"
    assert len({way.options for way in answer.ways_out}) == len(answer.ways_out)


@pytest.mark.slow
def test_no_more_layers_are_recomputed_than_it_takes() -> None:
    options = {"seq_len": 24576, "recompute": "none", "zero_stage": 3, "data_parallel": 8}
    answer = fit("llama-3-8b", "8xA100-80GB", **options)
    (way,) = [w for w in answer.ways_out if w.options.startswith("--recompute full")]
    count = way.plan.recompute_layers
    assert 1 < count < 32
    options |= {"recompute": "full", "recompute_layers": count - 1}
    assert fit("llama-3-8b", "8xA100-80GB", **options).verdict != "fits"


@pytest.mark.slow
@EACH
def test_ways_out_can_be_typed(number: int) -> None:
    """The options that are shown, added to the command, give a plan that fits."""
    model, cluster, options = TOO_LARGE[number]
    names = {
        "seq_len": "--seq-len",
        "micro_batch_size": "--micro-batch-size",
        "zero_stage": "--zero",
        "recompute": "--recompute",
    }
    given = [word for name, value in options.items() for word in (names[name], str(value))]
    for way in too_large(number).ways_out:
        words = way.options.split()
        on = cluster
        if not words[0].startswith("--"):
            on, words = words[0], words[1:]
        command = ["fit", model, on, *given, *words, "--json"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, (command, result.output, result.exception)
        assert json.loads(result.stdout)["memory"]["peak_bytes"] == way.peak_bytes


@pytest.mark.slow
@EACH
def test_the_command_of_a_way_out_stands_alone(number: int) -> None:
    """Pasted as it is, it gives the peak and the step time that were promised, and fits."""
    for way in too_large(number).ways_out:
        words = shlex.split(way.command)
        assert words[0] == "shardplan"
        result = CliRunner().invoke(app, [*words[1:], "--json"])
        assert result.exit_code == 0, (way.command, result.output, result.exception)
        document = json.loads(result.stdout)
        assert document["memory"]["peak_bytes"] == way.peak_bytes
        assert document["time"]["step_seconds"] == way.step_seconds
        assert document["cluster"]["num_gpus"] == way.num_gpus


@pytest.mark.slow
def test_adapters_on_four_bits_are_those_that_were_asked_for() -> None:
    """From LoRA to QLoRA the adapters stay as they are: what is promised is what comes."""
    asked = {"seq_len": 16384, "recompute": "full", "lora_alpha": 8.0}
    answer = fit("llama-3-8b", "1xRTX-4090", lora=8, **asked)
    (way,) = [way for way in answer.ways_out if way.kind == "qlora"]
    four = fit("llama-3-8b", "1xRTX-4090", qlora=8, **asked)
    assert way.peak_bytes == four.to_dict()["memory"]["peak_bytes"]
    assert way.step_seconds == four.to_dict()["time"]["step_seconds"]
    assert "--lora-alpha 8" in way.command


ORDER = (
    *("micro-batch", "recompute", "zero", "both", "search"),
    *("batch", "optimizer", "lora", "qlora", "trainer", "sequence", "offload"),
    *("accelerator", "nodes", "16 bits"),
)


@pytest.mark.sampled(1)
@EACH
def test_ways_out_come_in_the_order_in_which_people_try_them(number: int) -> None:
    kinds = [way.kind for way in too_large(number).ways_out]
    assert kinds == sorted(set(kinds), key=ORDER.index)


@pytest.mark.parametrize(
    ("question", "options"),
    [
        (("llama-3-8b", "1xRTX-4090"), {}),
        pytest.param(("llama-3-70b", "8xA100-80GB"), {}, marks=pytest.mark.slow),
        pytest.param(
            ("llama-3-8b", "8xA100-80GB"),
            {"seq_len": 32768, "recompute": "none", "micro_batch_size": 4, "offload": "none"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_fit_and_plan_list_the_same_ways_out(
    question: tuple[str, str], options: dict[str, Any]
) -> None:
    given = {name: options.pop(name) for name in list(options) if name != "seq_len"}
    answer: Any = fit(*question, **options, **given)
    scenario = answer.scenario
    refused = no_plan(scenario, search(scenario, given), fixed=given)
    assert [way.options for way in refused.ways_out] == [way.options for way in answer.ways_out]


def test_a_larger_accelerator_is_as_fast_and_more_come_in_one_node_first() -> None:
    ways = {way.kind: way for way in fit("llama-3-8b", "1xRTX-4090", seq_len=2048).ways_out}
    larger = ways["accelerator"].scenario.cluster.accelerator
    own = parse_cluster("1xRTX-4090").accelerator
    assert larger.peak_flops["bf16"].value >= own.peak_flops["bf16"].value
    assert ways["nodes"].scenario.cluster.num_nodes == 1
    assert ways["nodes"].num_gpus > 1


@pytest.mark.slow
def test_every_kind_of_change_is_offered_where_it_helps() -> None:
    """Settings in which one kind of change is enough, one for each kind."""
    seen: set[str] = set()
    for model, cluster, options in (
        ("llama-3-8b", "8xA100-80GB", {"seq_len": 16384, "recompute": "none", "data_parallel": 8}),
        ("llama-2-13b", "8xA100-80GB", {"seq_len": 2048, "zero_stage": 0, "data_parallel": 8}),
        ("llama-3.2-1b", "1xRTX-3090", {"seq_len": 4096, "micro_batch_size": 8}),
        ("llama-3.2-1b", "1xA100-80GB", {"seq_len": 4096, "micro_batch_size": 24}),
        ("llama-2-7b", "1xA100-80GB", {"seq_len": 2048}),
        ("llama-2-7b", "1xA100-40GB", {"seq_len": 2048}),
        ("llama-3-8b", "1xRTX-4090", {"seq_len": 2048}),
        ("llama-3-8b", "8xA100-80GB", {"seq_len": 131072, "recompute": "full", "data_parallel": 8}),
    ):
        answer = fit(model, cluster, **options)
        seen |= {way.kind for way in answer.ways_out}
    assert seen >= {
        *("recompute", "zero", "micro-batch", "batch", "search", "offload"),
        *("optimizer", "lora", "qlora", "sequence", "accelerator", "nodes"),
    }


def test_what_fits_needs_no_way_out() -> None:
    answer = fit("llama-3.2-1b", "8xA100-80GB", seq_len=512)
    assert answer.verdict == "fits"
    assert answer.ways_out == ()
    assert answer.reach is not None
    assert (answer.reach.longest_seq_len or 0) >= 512


def test_how_far_a_plan_goes_equals_a_walk() -> None:
    scenario = make_scenario("llama-3.2-1b", "1xA100-80GB", seq_len=1024, global_batch_size=1)
    plan = Plan()

    def goes(seq_len: int, micro: int) -> bool:
        changed = replace(scenario, workload=replace(scenario.workload, seq_len=seq_len))
        return assess(changed, replace(plan, micro_batch_size=micro)).verdict == "fits"

    longest = longest_sequence(scenario, plan, 10**6)
    assert goes(longest, 1)
    assert not goes(longest + 128, 1)
    most = largest_micro_batch(scenario, plan)
    assert goes(1024, most)
    assert not goes(1024, most + 1)
    assert longest_sequence(scenario, plan, 1000) <= 1000


@given(st.integers(0, 300), st.integers(0, 300))
def test_bisection_finds_the_border(border: int, highest: int) -> None:
    expected = min(border, highest)
    assert largest(lambda n: 0.0 if n <= border else math.inf, highest) == expected
    assert largest(lambda n: n / border if border else math.inf, highest) == expected


@pytest.mark.parametrize("text", ["8xA100-80GB", "2x8xH100-SXM", "4xDGX-A100-80GB"])
def test_a_resized_cluster_is_the_one_of_that_name(text: str) -> None:
    cluster = parse_cluster(text)
    larger = resized(cluster, 8)
    assert larger.num_gpus == 8 * cluster.gpus_per_node
    assert larger.tiers[-1].domain_size == larger.num_gpus
    assert parse_cluster(larger.name).num_gpus == larger.num_gpus


OWN_NETWORK = """
nodes = {nodes}
gpus_per_node = 8
accelerator = "A100-SXM-80GB"
[network]
name = "ours"
bandwidth = 3e9
latency = 9e-6
"""


@pytest.mark.slow
def test_more_nodes_of_a_cluster_file_are_not_given_a_name_of_the_catalogue(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(OWN_NETWORK.format(nodes=2))
    answer = fit("llama-3-70b", str(file), seq_len=65536, zero_stage=3)
    (way,) = [w for w in answer.ways_out if "nodes" in w.change]
    assert "global batch of" in way.change
    assert way.options.startswith(f"(nodes = {way.num_gpus // 8} in the cluster's file)")
    file.write_text(OWN_NETWORK.format(nodes=way.num_gpus // 8))
    words = way.options.split(") ")[1].split()
    command = ["fit", "llama-3-70b", str(file), "--seq-len", "65536", *words, "--json"]
    result = CliRunner().invoke(app, command)
    assert json.loads(result.stdout)["time"]["step_seconds"] == way.step_seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    [
        "llama-3-8b 8xA100-80GB --seq-len 32768 --recompute none --pp 4 --schedule gpipe "
        "--num-microbatches 16",
        "llama-3-8b 2x8xA100-40GB --secondary-ranks 8 --quantised-weights --micro-batch-size 32 "
        "--recompute full --cp 1",
    ],
)
def test_ways_out_take_back_what_was_typed(typed: str) -> None:
    """Behind a plan's own axes and number of micro-batches the options still give what they say."""
    model, cluster, *given = typed.split()
    result = CliRunner().invoke(app, ["fit", model, cluster, *given, "--json"])
    assert result.exit_code == 7  # another plan of the cluster fits
    for way in json.loads(result.stdout)["ways_out"]:
        words = way["options"].split()
        on = cluster
        if not words[0].startswith("--"):
            on, words = words[0], words[1:]
        pasted = CliRunner().invoke(app, ["fit", model, on, *given, *words, "--json"])
        assert pasted.exit_code == 0, (way["options"], pasted.output, pasted.exception)
        assert json.loads(pasted.stdout)["memory"]["peak_bytes"] == way["peak_bytes"]


@pytest.mark.slow
def test_weights_go_to_the_host_where_less_is_too_little() -> None:
    ways = fit("llama-3.1-70b", "8xH100-SXM", seq_len=4096).ways_out
    assert {"--offload weights --pp 1"} == {way.options for way in ways if way.kind == "offload"}
    given: dict[str, Any] = {"seq_len": 4096, "data_parallel": 8, "zero_stage": 3}
    ways = fit("llama-3.1-70b", "8xH100-SXM", offload="optimizer", **given).ways_out
    assert "--offload weights" in {way.options for way in ways}  # eight data ranks are given


@pytest.mark.slow
def test_another_accelerator_runs_the_same_programs() -> None:
    """A larger one of another maker is no way out of what was asked for CUDA."""
    scenario = make_scenario("mixtral-8x7b", "8xA100-80GB", seq_len=8192, global_batch_size=32)
    plan = Plan(8, zero_stage=3, expert_parallel=8, micro_batch_size=4, recompute="full")
    (words,) = [w.change for w in ways_out(scenario, plan) if w.kind == "accelerator"]
    assert "Gaudi" not in words


@pytest.mark.sampled(8)
@pytest.mark.parametrize("software", ["shardplan", "megatron-core", "megatron-deepspeed"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adamw_8bit"])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_no_plan_needs_less_than_its_states_shared_out(
    software: str, optimizer: Any, offload: Any
) -> None:
    """So clusters that are too small for these are passed over, and not searched."""
    model = sample_model("llama", hidden_size=512, num_hidden_layers=2, vocab_size=1000)
    scenario = make_scenario(model, "8xA100-80GB", software=software)
    workload = replace(scenario.workload, optimizer=optimizer)
    scenario = replace(scenario, workload=workload)
    table = enumerate_plans(scenario.model, workload, 8, {"offload": offload})
    legal = table.rows(legality_codes(scenario, table) == 0)
    if "weights" in offload and software != "shardplan":
        assert not len(legal)  # it moves no weights
        return
    if not len(legal):  # nor an optimizer that its trainer does not have
        return
    priced = price(scenario, legal)
    peak, host = priced.peak, priced.host.memory
    assert (host >= least_host_bytes(scenario, offload)).all()  # one node
    assert (peak >= least_bytes(scenario, offload) / 8).all()
    assert (least_bytes(scenario, offload) > 0.0) == ("weights" not in offload)


def test_a_pipeline_of_autocast_is_tried_where_nothing_fits() -> None:
    """Copies that autocast does not make differ between the ranks of a table."""
    scenario = make_scenario(sample_model("ernie-4.5-0.3b"), "1x4xRTX-4090", seq_len=512)
    cluster = with_memory(scenario, 2 * 2.0**30).cluster
    answer = planner.plan(
        scenario.model, cluster, seq_len=512, global_batch_size=16, software="lightning"
    )
    assert answer.best.offload != "none", "in another ZeRO stage"
