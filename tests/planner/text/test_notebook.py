"""Every public answer shows itself in a notebook: its verdict, well-formed, and escaped."""

import csv
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import planner
from cost_models.plan_file import write_plan_file
from planner.api.check import MemoryEstimate
from planner.learning.answer import LearnAnswer
from planner.learning.conclusions import ComparedRun, Conclusion
from planner.runs import calibrate as calibration
from planner.text.answer import Answer
from planner.text.notebook import STYLE
from tests.planner.runs.recorded import machine, plan_file, write_run
from tests.samples import LLAMA

HOSTILE = "</pre><script>alert(1)</script>'\"&amp;"
MODEL = LLAMA | {"num_hidden_layers": 4, "_name_or_path": HOSTILE}
JOB: dict[str, Any] = {"seq_len": 512, "global_batch_size": 16}


def fits(folder: Path) -> Answer:
    return planner.fit(MODEL, "8xA100-80GB", **JOB)


def does_not_fit(folder: Path) -> Answer:
    return planner.fit("llama-3-8b", "1x4090", seq_len=8192)


def serves(folder: Path) -> Answer:
    return planner.fit(MODEL, "1xA100-80GB", inference=True, concurrency=4, context_len=512)


def plans(folder: Path) -> Answer:
    return planner.plan(MODEL, "2xA100-80GB", **JOB)


def surveys(folder: Path) -> Answer:
    return planner.plan(MODEL, "2xA100-80GB,2xH100-SXM", **JOB, tokens="1B", price=2.0)


def inverts(folder: Path) -> Answer:
    return planner.plan(MODEL, "2xA100-80GB", find="largest-micro-batch", seq_len=512)


def explains(folder: Path) -> Answer:
    found = planner.plan(MODEL, "2xA100-80GB", **JOB)
    return planner.explain(found, why_not=["tp=2", "pp=8"], sensitivity=False)


def named() -> Any:
    file = plan_file()
    return replace(file, model=replace(file.model, name=HOSTILE))


def compares(folder: Path) -> Answer:
    one, other = folder / "<script>.json", folder / "other.json"
    write_plan_file(one, named())
    write_plan_file(other, plan_file())
    return planner.compare(one, other)


def compares_a_run(folder: Path) -> Answer:
    write_plan_file(folder / "plan.json", named())
    return planner.compare(folder / "plan.json", write_run(folder / "<script>", named(), machine()))


def calibrates(folder: Path) -> Answer:
    run = write_run(folder / "<script>", named(), machine())
    return planner.calibrate(run, say=lambda words: None)


def validates(folder: Path) -> Answer:
    row = {"row_id": "a", "source_group": HOSTILE, "framework": "torchtitan", "num_gpus": 8}
    row |= {"model": "llama-3-8b", "gpu": "H100-SXM-80GB", "gpus_per_node": 8, "seq_len": 4096}
    row |= {"micro_batch_size": 1, "zero_stage": 3, "precision": "bf16", "step_time_s": 1.5}
    with (folder / "RUNS.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    return planner.validate(folder / "RUNS.csv")


def learns(folder: Path) -> Answer:
    run = ComparedRun(HOSTILE, 1.0, 1.2, 1.01, 1.02, None, None, None)
    said = Conclusion("a switch", "concluded", "on", "99 %, before 50 %")
    path = folder / "mine.toml"
    return LearnAnswer(path, "RUNS.csv", "a trainer", "A100", (run,), (said,), (), {}, "", {})


def checks(folder: Path) -> Answer:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{k: v for k, v in MODEL.items() if k != "model_type"})
    config._name_or_path = HOSTILE
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    return planner.check(model, inputs=(2, 64), cluster="1xA100-80GB")


def estimates(folder: Path) -> Answer:
    return MemoryEstimate(planner.fit(MODEL, "8xA100-80GB", **JOB))


def traces(folder: Path) -> Answer:
    return planner.trace(planner.fit(MODEL, "8xA100-80GB", **JOB))


def reports(folder: Path) -> Any:
    return planner.report(planner.fit(MODEL, "2xA100-80GB", **JOB))


SAID: dict[Callable[[Path], Any], str] = {
    fits: "FITS",
    does_not_fit: "DOES NOT FIT",
    serves: "FITS",
    plans: "FITS",
    surveys: "2xH100-SXM",
    inverts: "micro-batch",
    explains: "FITS",
    compares: "Both take the same time",
    compares_a_run: "The measured step is",
    calibrates: "predicted now",
    validates: "1 of 1 runs predicted",
    learns: "Concluded",
    checks: "FITS",
    estimates: "FITS",
    traces: "the simulated step",
    reports: "FITS",
}


def cases(answers: Iterable[Callable[[Path], Any]]) -> list[Any]:
    """Parameters with names; torch takes seconds to import."""
    slow = pytest.mark.slow(15)
    return [
        pytest.param(one, id=one.__name__, marks=[slow] if one is checks else []) for one in answers
    ]


@pytest.mark.parametrize("answer", cases(SAID))
def test_an_answer_shows_itself(
    answer: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDPLAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "uncalibrated_here", machine)
    shown = answer(tmp_path)._repr_html_()
    tree = ElementTree.fromstring(shown)
    words = "".join(tree.itertext()) + tree.get("srcdoc", "")
    assert SAID[answer] in words
    assert not re.search(r"<script|javascript:|https?://(?!ui\.perfetto|www\.w3\.org)", shown)
    if answer is reports:  # in a frame, so that its style stays inside
        assert (tree.tag, tree.get("sandbox")) == ("iframe", "")
        assert tree.get("srcdoc", "").startswith("<!doctype html>")
    names = [element.tag.partition("}")[2] or element.tag for element in tree.iter()]
    assert set(names).isdisjoint({"script", "link", "img", "object"})
    assert not any(name.startswith("on") for element in tree.iter() for name in element.attrib)


@pytest.mark.parametrize("answer", cases([fits, plans, serves, explains, checks]))
def test_a_hostile_name_is_shown_as_it_is(answer: Callable[[Path], Any], tmp_path: Path) -> None:
    shown = answer(tmp_path)._repr_html_()
    words = "".join(ElementTree.fromstring(shown).itertext())
    assert HOSTILE[:20] in words


def test_the_style_reaches_nothing_else_in_a_notebook() -> None:
    shown = planner.fit(MODEL, "8xA100-80GB", **JOB)._repr_html_()
    styles = re.findall(r"<style>(.*?)</style>", shown)
    assert STYLE in styles
    for style in styles:
        selectors = [one for rule in re.findall(r"([^{}]+)\{", style) for one in rule.split(",")]
        assert all(one.startswith((".shardplan", ".drawn ")) for one in selectors)
