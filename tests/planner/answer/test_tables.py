"""Tables of answers: memory by moment and stage, all candidates, the timeline of a trace."""

from pathlib import Path

import pytest

import planner
from cost_models.plan_file import read_plan_file, write_plan_file
from hardware_profiles.errors import InputError
from planner.assessment.assess import assess

PLAN = {"data_parallel": 2, "pipeline_parallel": 4, "num_microbatches": 8, "micro_batch_size": 1}
PLAN |= {"zero_stage": 1, "tensor_parallel": 1}


def test_moments_and_stages_are_those_of_the_peak() -> None:
    answer = planner.fit("llama-3-8b", "8xA100-80GB", seq_len=4096, recompute="full", **PLAN)
    peak = answer.assessment.memory.peak_bytes
    assert answer.moments.sum(axis=1).max() == pytest.approx(peak)
    stages = answer.stages
    assert stages.drop(columns=["layers", "in_flight"]).sum(axis=1).max() == pytest.approx(peak)
    assert (stages.layers.sum(), list(stages.in_flight)) == (32, [4, 3, 2, 1])


def test_candidates_hold_what_the_search_chose() -> None:
    answer = planner.plan("llama-3-8b", "8xA100-80GB", seq_len=4096, global_batch_size=32)
    every = answer.candidates()
    assert len(every) == answer.result.counts.priced
    assert (every.verdict == "fits").sum() == answer.result.counts.fitting
    chosen = answer.result.plans[0]  # before layers of its own
    fields = [name for name in chosen.to_dict() if name in every.columns]
    found = every[(every[fields] == [getattr(chosen, name) for name in fields]).all(axis=1)]
    peak = assess(answer.scenario, chosen).memory.peak_bytes
    assert found.peak_bytes.item() == pytest.approx(peak)


def test_a_timeline_holds_every_pass_and_ends_with_the_step(tmp_path: Path) -> None:
    answer = planner.fit("llama-3-8b", "8xA100-80GB", seq_len=4096, recompute="full", **PLAN)
    trace = planner.trace(answer)
    passes = trace.timeline.query("lane == 'passes'")
    assert len(passes) == 2 * 8 * 4
    assert set(passes.kind) == {"forward", "backward"}
    assert trace.timeline.end_seconds.max() == pytest.approx(trace.step_seconds)
    parts = trace.memory.drop(columns=["rank", "seconds"])
    assert parts.sum(axis=1).max() == pytest.approx(trace.peak_bytes)
    write_plan_file(tmp_path / "plan.json", answer.plan_file())
    assert read_plan_file(tmp_path / "plan.json").plan == answer.plan
    assert planner.trace(tmp_path / "plan.json").events == trace.events


def test_every_micro_batch_has_its_activations() -> None:
    one = {"micro_batch_size": 1, "num_microbatches": 3, "zero_stage": 0, "recompute": "none"}
    memory = planner.trace(planner.fit("llama-3.2-1b", "1xA100-80GB", seq_len=2048, **one)).memory
    high = memory.activations > 0.9 * memory.activations.max()
    assert (high & ~high.shift(fill_value=False)).sum() == 3


def test_a_trace_needs_a_plan() -> None:
    with pytest.raises(InputError, match=r"must be a plan\.json, a run's folder, or an answer"):
        planner.trace(3)  # type: ignore[arg-type]
