"""The times of one way to serve, as plain JSON values."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from cost_models.plan.plan import Plan
from cost_models.serving.forward_pass import PassTime
from cost_models.serving.kv_cache import has_cache
from cost_models.serving.latency import serving_times
from cost_models.uncertainty import interval, serving_spreads
from planner.serving.scenario import ServingScenario, point_of, sequences_of, stages_of


def time_document(scenario: ServingScenario, plan: Plan) -> dict[str, Any]:
    """Return what one legal way to serve takes: prompts, tokens, and tokens a second.

    The fullest replica counts; all replicas work at the same time. An encoder writes no tokens.
    """
    workload = scenario.workload
    prompt = workload.prompt_tokens
    times = serving_times(
        scenario.model,
        workload,
        scenario.cluster,
        scenario.engine,
        stages_of(scenario, plan),
        point_of(scenario, plan),
        prompt,
    )
    prefill, alone, token = (float(x) for x in (times.prefill, times.alone, times.token))
    answer, sequences = float(times.answer_len), sequences_of(scenario, plan)
    around_first, around_token = serving_spreads(scenario.cluster.accelerator)
    low, high = interval(alone, around_first)
    document: dict[str, Any] = {
        "prompt_len": prompt,
        "answer_len": round(answer),
        "sequences_per_replica": sequences,
        "time_to_first_token_seconds": alone,
        "time_to_first_token_low_seconds": low,
        "time_to_first_token_high_seconds": high,
        "prefill_seconds": prefill,
        "prompt_tokens_per_second": workload.concurrency * prompt / prefill,
        "time_per_output_token_seconds": None,
        "time_per_output_token_low_seconds": None,
        "time_per_output_token_high_seconds": None,
        "tokens_per_second_per_sequence": None,
        "batch_seconds": prefill,
        "output_tokens_per_second": None,
        "output_tokens_per_second_per_gpu": None,
        "parts": {"prefill": _parts(times.prefill_parts), "token": None},
    }
    if has_cache(scenario.model) and answer >= 1.0:
        low, high = interval(token, around_token)
        batch = float(times.batch)
        rate = workload.concurrency * answer / batch
        document |= {
            "time_per_output_token_seconds": token,
            "time_per_output_token_low_seconds": low,
            "time_per_output_token_high_seconds": high,
            "tokens_per_second_per_sequence": 1.0 / token,
            "batch_seconds": batch,
            "output_tokens_per_second": rate,
            "output_tokens_per_second_per_gpu": rate / scenario.cluster.num_gpus,
            "parts": {
                "prefill": document["parts"]["prefill"],
                "token": {**_parts(times.token_parts), "stage_wait": float(times.stage_wait)},
            },
        }
    return document


def _parts(parts: PassTime) -> dict[str, float]:
    return {f.name: float(getattr(parts, f.name)) for f in fields(PassTime)}
