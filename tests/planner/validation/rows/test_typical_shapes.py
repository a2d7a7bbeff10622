"""Typical models of a size against the published ones of that size."""

from typing import Any

import pytest

from cost_models.model.families import model_spec
from cost_models.model.presets import all_presets
from cost_models.uncertainty import TYPICAL_MEMORY, TYPICAL_TIME, Spread
from planner.validation.pricing import predict_cases
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.runs_file import Row

EVERY = (
    5  # presets that are compared; all of them, which the intervals are from, take half a minute
)


def case(name: str, **cells: Any) -> Case:
    run = {"framework": "torchtitan", "gpu": "A100-SXM", "gpu_mem_gb": 80.0, "num_gpus": 64}
    run |= {"precision": "bf16", "zero_stage": 3, "seq_len": 4096, "micro_batch_size": 1}
    return case_of(Row(line=2, row_id=name, **{**run, "model": name, **cells}))


def share_inside(ratios: list[float], spread: Spread) -> float:
    return sum(-spread.below <= ratio - 1.0 <= spread.above for ratio in ratios) / len(ratios)


def test_intervals_of_a_typical_model_are_wider() -> None:
    known, typical = case("llama-2-7b"), case("other", params_billion=6.74)
    priced, _ = predict_cases([known, typical])
    one, other = priced["llama-2-7b"], priced["other"]
    assert other.step == pytest.approx(one.step, rel=1e-3)
    assert other.step_high / other.step == pytest.approx(
        one.step_high / one.step * (1 + TYPICAL_TIME.above)
    )
    assert other.peak_low / other.peak == pytest.approx(
        one.peak_low / one.peak * (1 - TYPICAL_MEMORY.below)
    )


@pytest.mark.slow
def test_typical_models_are_as_fast_and_large_as_published_ones() -> None:
    specs = [model_spec(preset.config, name=preset.name) for preset in all_presets()]
    dense = [
        s for s in specs if not s.has_experts and s.kinds[-1].attention.causal and not s.bridge
    ]
    times, peaks = [], []
    for recompute in ("none", "full"):
        cases = []
        for spec in dense[::EVERY]:
            size = float(f"{spec.num_parameters / 1e9:.3g}")
            cases.append(case(spec.name, recompute=recompute))
            cases.append(case(f"other than {spec.name}", params_billion=size, recompute=recompute))
        priced, _ = predict_cases(cases)
        for real, typical in zip(cases[::2], cases[1::2], strict=True):
            assert typical.is_typical
            assert not real.is_typical
            published, assumed = priced[real.row.name], priced[typical.row.name]
            times.append(published.step / assumed.step)
            peaks.append(published.peak / assumed.peak)
    assert share_inside(times, TYPICAL_TIME) >= 0.85
    assert share_inside(peaks, TYPICAL_MEMORY) >= 0.85
