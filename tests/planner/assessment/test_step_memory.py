import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import planner
from cost_models.legality.rules import legality_codes
from cost_models.memory.ledger import MOMENTS
from cost_models.memory.terms import SMALL
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.prediction import MEMORY_PARTS
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from planner.answer.memory_explanation import SHORT_MOMENT, SHORT_WITHOUT_HEAD
from planner.answer.memory_html import terms_table
from planner.assessment.assess import amounts, assess
from planner.assessment.step_memory import (
    EXPLANATIONS_WITHOUT_HEAD,
    MOMENT_EXPLANATIONS,
    step_memory,
)
from planner.cli.app import app
from planner.request.model import model_of
from planner.text.bars import MARKS, ORDER, stacked_bar
from planner.text.paragraphs import MOMENT_WORDS, width
from tests.samples import CONFIGS, make_scenario, sample_model

STAGES = {"tensor_parallel": 2, "pipeline_parallel": 4, "num_microbatches": 8}
PIPELINE = {"pipeline_parallel": 4, "tensor_parallel": 2, "num_microbatches": 8, "seq_len": 4096}


Question = tuple[str, str, dict[str, Any]]  # a model or the name of a sample, cluster, options


SHARDED: Any = {"seq_len": 8192, "recompute": "none", "data_parallel": 8, "zero_stage": 3}


def questions() -> dict[str, Question]:
    found: dict[str, Question] = {}
    for name in CONFIGS:
        options: list[dict[str, Any]] = [{}, {"recompute": "full", "precision": "fp32"}]
        if name != "t5":
            options.append({"tensor_parallel": 2, "pipeline_parallel": 2, "zero_stage": 1})
        for number, each in enumerate(options):
            found[f"{name} {number}"] = (name, "8xA100-80GB", each)
    for schedule in ("gpipe", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"):
        more = {"pipeline_schedule": schedule, "recompute": "none", **PIPELINE}
        found[schedule] = ("llama-3-8b", "8xH100-SXM", more)
    found["too large"] = ("llama-3-70b", "8xA100-80GB", {})
    found["qlora"] = ("llama-3-8b", "1xRTX-4090", {"qlora": 16})
    found["offload"] = ("llama-3-8b", "8xA100-80GB", {"offload": "activations"})
    return found


QUESTIONS = questions()
EACH = pytest.mark.parametrize("answer", QUESTIONS, indirect=True)


@cache  # asked when a test needs it, not while tests are collected
def answer_to(name: str) -> Any:
    model, cluster, options = QUESTIONS[name]
    return planner.fit(sample_model(model) if model in CONFIGS else model, cluster, **options)


@pytest.fixture
def answer(request: pytest.FixtureRequest) -> Any:
    return answer_to(request.param)


def test_every_moment_and_part_has_words_and_marks() -> None:
    for words in (MOMENT_EXPLANATIONS, SHORT_MOMENT, MOMENT_WORDS):
        assert set(words) == set(MOMENTS)
    assert set(EXPLANATIONS_WITHOUT_HEAD) == set(SHORT_WITHOUT_HEAD) <= set(MOMENTS)
    assert set(MARKS) == set(ORDER) == set(MEMORY_PARTS)
    assert len(set(MARKS.values())) == len(MARKS)


@pytest.mark.sampled(2)
@EACH
def test_the_timeline_holds_the_peak_and_its_parts(answer: Any) -> None:
    memory = answer.to_dict()["memory"]
    assert [moment["moment"] for moment in memory["timeline"]] == list(MOMENTS)
    peak = max(memory["timeline"], key=lambda moment: moment["peak_bytes"])
    assert peak["moment"] == memory["moment"]
    assert peak["peak_bytes"] == pytest.approx(memory["peak_bytes"], rel=1e-9)
    assert peak["parts"] == pytest.approx(memory["parts"], rel=1e-9)
    assert {moment["stage"] for moment in memory["timeline"]} == {memory["limiting_stage"]}
    for told, priced in zip(answer.step_memory.stages, memory["stages"], strict=True):
        assert float(told.parts.peak) == pytest.approx(priced["peak_bytes"], rel=1e-9)
        assert told.moment == priced["moment"]


@pytest.mark.sampled(3)
@EACH
def test_terms_add_up_to_their_parts(answer: Any) -> None:
    memory = answer.to_dict()["memory"]
    for part, size in memory["parts"].items():
        terms = [term["bytes"] for term in memory["terms"] if term["part"] == part]
        # terms below half a percent of the peak are not listed
        assert sum(terms) == pytest.approx(size, abs=0.011 * memory["peak_bytes"])


@pytest.mark.sampled(3)
@EACH
def test_the_story_fits_into_a_terminal(answer: Any) -> None:
    text = answer.explain()
    assert all(len(line) <= width() for line in text.splitlines())
    assert text.count("▶") >= 2
    assert "nan" not in text.lower().split()
    assert "np.float64" not in text


def test_numbers_of_a_term_give_the_term() -> None:
    """What is printed can be worked out by hand: 8.03 B parameters, 8 ranks, 8192 tokens."""
    answer = planner.fit("llama-3-8b", "8xA100-80GB", **SHARDED)
    terms = {(t["part"], t["name"]): t for t in answer.to_dict()["memory"]["terms"]}
    saved = terms["activations", "saved by layers"]
    assert saved["numbers"] == "1 in flight × 32 layers × 8,192 tokens × 200,840 bytes"
    assert saved["bytes"] == 32 * 8192 * 200_840
    states = terms["optimizer", "states of adamw"]
    assert states["numbers"] == "8 bytes × 8.03 B parameters ÷ 8 ranks"
    assert states["bytes"] == pytest.approx(8 * 8_030_261_248 / 8)
    (layer,) = {sum(each.size for each in answer.step_memory.layer)}
    assert layer == 200_840


def test_stages_say_what_they_keep_in_flight() -> None:
    more = {"recompute": "none", **PIPELINE}
    answer = planner.fit("llama-3-8b", "8xH100-SXM", **more)
    assert [stage.in_flight for stage in answer.step_memory.stages] == [4, 3, 2, 1]
    text = " ".join(answer.explain().split())
    assert (
        "1f1b: stage 0 keeps 4 micro-batches of its layers (min(m, p − r) = min(8, 4 − 0))" in text
    )
    assert "3: 8 layers × 1 + head" in text
    # the fullest stage has no head: nobody is told about a loss there
    assert "the loss" not in text
    assert "forward pass ends" in text


def test_moments_that_do_not_happen_are_not_shown() -> None:
    shown = planner.fit("llama-3-8b", "8xA100-80GB").step_memory.shown_moments
    assert [moment.name for moment in shown] == [m for m in MOMENTS if m != "later_backward"]


def test_bars_are_to_scale() -> None:
    parts = {"weights": 10.0, "optimizer": 20.0, "activations": 30.0, "logits": 0.001}
    bar = stacked_bar(parts, 100.0, 100, 80.0)
    assert bar.count(MARKS["weights"]) == 10
    assert bar.count(MARKS["optimizer"]) == 20
    assert bar.count(MARKS["activations"]) == 30
    assert bar.index("│") == 80
    assert "│" not in stacked_bar(parts, 60.0, 100, 80.0)
    over = stacked_bar({"weights": 90.0}, 100.0, 100, 80.0)
    assert over.index("│") == 80
    assert len(over) == 90


@pytest.mark.sampled(2)
@EACH
def test_drawings_are_to_scale_and_well_formed(answer: Any) -> None:
    svg = ET.fromstring(answer.to_svg())
    name = "{http://www.w3.org/2000/svg}"
    memory = answer.to_dict()["memory"]
    bars = [rect for rect in svg.iter(f"{name}rect") if rect.find(f"{name}title") is not None]
    lines = [line for line in svg.iter(f"{name}line") if line.get("class") == "budget"]
    left = min(float(bar.get("x", "0")) for bar in bars)
    assert bool(lines) == (memory["peak_bytes"] >= 0.25 * memory["budget_bytes"])
    if not lines:
        assert "budget" in answer.to_svg()
        return
    right = max(float(bar.get("x", "0")) + float(bar.get("width", "0")) for bar in bars)
    budget = float(lines[0].get("x1", "0")) - left
    # drawn with two decimals
    assert (right - left) / budget == pytest.approx(
        memory["peak_bytes"] / memory["budget_bytes"], rel=0.002
    )
    html = answer.to_html()
    assert html.count("<svg") == 1
    assert "<script" not in html
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "").split("<h2>The answer")[0]
    assert "<svg" in answer._repr_html_()


@pytest.mark.slow
def test_the_command_explains_and_draws(tmp_path: Path) -> None:
    page, drawing = tmp_path / "e.html", tmp_path / "e.svg"
    ask = ["fit", "llama-3.2-1b", "1xA100-80GB", "--seq-len", "1024"]
    for path in (page, drawing):
        result = CliRunner().invoke(app, [*ask, "--explain", "-o", str(path)])
        assert result.exit_code == 0, result.output
        assert "One step's memory" in result.stdout
        assert path.exists()
    assert drawing.read_text().startswith("<svg ")
    result = CliRunner().invoke(app, [*ask, "--explain", "--json", "-o", str(page), "--force"])
    assert json.loads(result.stdout)["memory"]["timeline"]


def test_an_existing_drawing_is_kept(tmp_path: Path) -> None:
    page = tmp_path / "e.html"
    page.write_text("mine")
    ask = ["fit", "llama-3.2-1b", "1xA100-80GB", "-o"]
    with pytest.raises(InputError, match="exists already"):
        CliRunner().invoke(app, [*ask, str(page)], catch_exceptions=False)
    assert page.read_text() == "mine"
    with pytest.raises(InputError, match=r"ends in \.html or \.svg"):
        CliRunner().invoke(app, [*ask, str(tmp_path / "e.png")], catch_exceptions=False)


def test_the_worked_number_of_the_page_is_what_is_predicted() -> None:
    """docs/explanation/memory.md, the table worked out by hand."""
    page = (Path(__file__).parents[3] / "docs" / "explanation" / "memory.md").read_text(
        encoding="utf-8"
    )
    worked = page.split("## One number, worked out")[1].split("## ")[0]
    rows = re.findall(r"^\| (\w+) \|.*\| ([0-9.]+) \|$", worked, re.MULTILINE)
    answer = planner.fit("llama-3-8b", "8xA100-80GB", **SHARDED)
    memory = answer.to_dict()["memory"]
    said = {
        **memory["parts"],
        "allocated": memory["peak_bytes"] - memory["parts"]["runtime"],
        "peak": memory["peak_bytes"],
    }
    assert {name for name, size in said.items() if size} == {name for name, _ in rows}
    for name, gib in rows:
        assert said[name] / 2**30 == pytest.approx(float(gib), abs=0.006), name
    for moment in MOMENTS:
        assert f"| `{moment}` |" in page


@pytest.mark.slow
def test_a_no_says_how_its_largest_part_comes_about() -> None:
    answer = planner.fit("llama-3-8b", "1xRTX-4090", seq_len=2048, optimizer="adamw")
    assert answer.verdict == "does_not_fit"
    words = " ".join(answer.text(verbose=True).split())
    assert "Largest optimizer states: 59.8 GiB; states of adamw: " in words
    assert "k s · P = 8 bytes × 8.03 B parameters" in words
    options = {"seq_len": 65536, "recompute": "none", **STAGES}
    where = " ".join(planner.fit("llama-3-8b", "8xA100-40GB", **options).explain().split())
    assert "stage 0 of 4 (the fullest)" in where


def test_the_bars_of_the_page_are_what_is_printed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "explanation" / "memory.md").read_text(
        encoding="utf-8"
    )
    shown = page.split("```console\n$ ")[1].split("```")[0].splitlines()[1:]
    answer = planner.fit("llama-3-8b", "8xA100-80GB", **SHARDED)
    printed = [line.rstrip() for line in answer.explain().splitlines()]
    told = [line for line in shown if line]
    assert len(told) > 10
    assert told == [line for line in printed if line][: len(told)]


def test_what_is_freed_has_the_same_size_in_the_text_and_on_the_page() -> None:
    answer = planner.fit("llama-3-8b", "8xA100-80GB", data_parallel=8, zero_stage=1)
    (freed,) = [term.size_words for term in answer.step_memory.terms if term.size < 0.0]
    assert re.fullmatch(r"−[\d,]+ MiB", freed)
    assert f"{freed}  weights" in answer.explain()
    assert f">{freed}<" in terms_table(answer.step_memory)


def test_a_layer_of_experts_says_what_its_numbers_are() -> None:
    """DeepSeek-V3: 8 experts a token of 7168 features; values narrower than keys are padded."""
    answer = planner.fit("deepseek-v3", "32x8xH100-SXM", expert_parallel=64, seq_len=4096)
    terms = {term.name: term for term in answer.step_memory.layer}
    assert terms["copies for experts"].size == 2 * 8 * 2 * 7168
    assert terms["router"].size == 4 * 7168 + 4 * 256  # both in fp32
    assert terms["attention core"].formula != "4·a"


def test_a_decoder_layer_says_what_it_saves_for_its_own_targets() -> None:
    """Eager scores of a decoder of T5: rows of 64 keys, and of 512 of the inputs."""
    model = sample_model("t5", num_layers=2, num_decoder_layers=4)
    options = {"seq_len": 512, "target_seq_len": 64, "attention_kernel": "eager"}
    scenario = make_scenario(model, "1xA100-80GB", global_batch_size=1, **options)
    step = step_memory(scenario, Plan(), assess(scenario, Plan()).memory)
    terms = {term.name: term for term in step.layer}
    heads = model.kinds[0].attention.num_heads
    assert terms["attention core"].size % (heads * (512 + 64)) == 0


@pytest.mark.slow
def test_offloaded_weights_are_not_called_shared_out() -> None:
    answer = planner.fit("llama-3-8b", "8xA100-80GB", seq_len=1024, offload="weights")
    (term,) = [term for term in answer.step_memory.terms if term.part == "weights"]
    assert term.name == "shards in transfer of the layer that runs and the next one"
    assert "not executable" in answer.text(verbose=True)
    assert "--fix offload=weights" in " ".join(str(answer).split())
    plain = planner.fit("llama-3-8b", "8xA100-80GB", seq_len=1024)
    assert "not executable" not in plain.text(verbose=True)


def test_operands_of_late_weight_gradients_are_a_term_of_their_own() -> None:
    """Under zbv with recomputation they are most of what the last rank keeps."""
    plan = {"pipeline_schedule": "zbv", "pipeline_parallel": 8, "num_microbatches": 16}
    answer = planner.fit("llama-3-8b", "8xH100-SXM", seq_len=8192, recompute="full", **plan)
    terms = {term.name: term for term in answer.step_memory.terms}
    due = terms["operands of pending weight gradients"]
    assert due.size > 0.5 * answer.assessment.memory.parts.activations
    assert due.numbers
    assert terms["backward pass of a layer"].size > 0.0


LARGEST = [
    ("t5-11b", 512),
    ("t5-3b", 512),
    ("mixtral-8x7b", 2048),
    ("gemma-2-9b", 4096),
    ("llama-3-8b", 4096),
]


def split_plans(model: str, seq_len: int) -> Iterator[tuple[Scenario, Plan]]:
    """Yield legal plans of 8 accelerators with every ZeRO stage."""
    for batch in (1, 8):
        scenario = make_scenario(
            model_of(model), "8xA100-80GB", seq_len=seq_len, global_batch_size=8 * batch
        )
        for zero, recompute, tensor in product(range(4), ("none", "full"), (1, 2)):
            plan = Plan(
                data_parallel=8 // tensor,
                tensor_parallel=tensor,
                sequence_parallel=tensor > 1,
                zero_stage=zero,
                recompute=recompute,
                micro_batch_size=batch,
                num_microbatches=tensor,
            )
            if not legality_codes(scenario, PlanTable.from_plans([plan])).any():
                yield scenario, plan


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "seq_len"), LARGEST)
def test_the_named_term_is_the_largest(model: str, seq_len: int) -> None:
    """Never a remainder, nor one kind of activations under the name of another."""
    seen = 0
    for scenario, plan in split_plans(model, seq_len):
        assessment = assess(scenario, plan)
        memory = assessment.memory
        found = step_memory(scenario, plan, memory)
        parts = amounts(memory.parts)
        for part, size in parts.items():
            terms = [term for term in found.terms if term.part == part]
            if not terms:
                assert size < 0.05 * memory.peak_bytes
                continue
            listed = sum(term.size for term in terms)
            named = max(terms, key=lambda term: term.size)
            assert named.name != "others"
            # what is not listed is smaller than what is
            assert abs(size - listed) <= 4 * SMALL * memory.peak_bytes
            assert named.size >= SMALL * memory.peak_bytes
        seen += 1
    assert seen >= 8


def test_the_backward_pass_of_a_recomputed_layer_is_named() -> None:
    """T5 in large micro-batches: one layer's backward pass exceeds what all layers keep."""
    scenario = make_scenario(model_of("t5-11b"), "8xA100-80GB", seq_len=512, global_batch_size=64)
    plan = Plan(data_parallel=8, zero_stage=1, recompute="full", micro_batch_size=8)
    memory = assess(scenario, plan).memory
    terms = [t for t in step_memory(scenario, plan, memory).terms if t.part == "activations"]
    assert "backward pass" in max(terms, key=lambda term: term.size).name
    # without recomputation they are what the layers save
    plan = replace(plan, recompute="none", micro_batch_size=1, num_microbatches=8)
    memory = assess(scenario, plan).memory
    terms = [t for t in step_memory(scenario, plan, memory).terms if t.part == "activations"]
    assert max(terms, key=lambda term: term.size).name == "saved by layers"


def test_megatron_saves_neither_outputs_of_experts_nor_a_third_gated_tensor() -> None:
    """Routing weights multiply inside the fused activation, which saves gate and up projection."""
    plan = {"expert_parallel": 8, "data_parallel": 64, "zero_stage": 1, "micro_batch_size": 1}
    answer = planner.fit("qwen3-30b-a3b", "8x8xB200", software="nemo", seq_len=4096, **plan)
    terms = {term.name: term for term in answer.step_memory.layer}
    assert terms["copies for experts"].size == 8 * 2 * 2048
    assert terms["MLP"].size == 8 * 3 * 2 * 768


def test_an_overlapped_exchange_keeps_two_micro_batches() -> None:
    """Megatron's combined 1F1B runs a forward pass together with a backward pass."""
    plan = {"expert_parallel": 8, "data_parallel": 64, "zero_stage": 1, "micro_batch_size": 1}
    plan |= {"seq_len": 4096, "global_batch_size": 256, "recompute": "none"}
    activations = {
        software: planner.fit("qwen3-30b-a3b", "8x8xB200", software=software, **plan)
        .to_dict()["memory"]["parts"]["activations"]
        for software in ("nemo", "nemo+overlapped-experts")
    }  # fmt: skip
    assert activations["nemo+overlapped-experts"] == pytest.approx(
        2 * activations["nemo"], rel=0.01
    )
