"""Predicted latency and throughput of one layout of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from cost_models.compute.flops import layer_flops_per_token, linear_flops_per_token
from cost_models.plan.plan import Plan
from cost_models.serving.forward_pass import PassTime
from cost_models.serving.kv_cache import has_cache
from cost_models.serving.latency import serving_times
from cost_models.serving.number_formats import WEIGHT_FORMATS
from cost_models.uncertainty import interval, serving_spreads
from planner.serving.scenario import ServingScenario, replica_of, sequences_of, stages_of


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Seconds of one output token with their interval and parts, and the rates that follow."""

    seconds: float
    low_seconds: float
    high_seconds: float
    parts: Mapping[str, float]
    tokens_per_second: float  # of all replicas, while a batch of answers is written
    tokens_per_second_per_gpu: float


@dataclass(frozen=True, slots=True)
class ServingTimePrediction:
    """Latency and throughput of a layout of replicas."""

    prompt_len: int
    answer_len: int
    sequences_per_replica: int
    first_token_seconds: float
    first_token_low_seconds: float
    first_token_high_seconds: float
    prefill_seconds: float  # of all sequences of a replica
    prefill_parts: Mapping[str, float]
    prompt_tokens_per_second: float
    batch_seconds: float  # prefill and answers of all sequences of a replica
    token: TokenTimes | None  # None: the model writes no answer

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        token = self.token
        return {
            "prompt_len": self.prompt_len,
            "answer_len": self.answer_len,
            "sequences_per_replica": self.sequences_per_replica,
            "time_to_first_token_seconds": self.first_token_seconds,
            "time_to_first_token_low_seconds": self.first_token_low_seconds,
            "time_to_first_token_high_seconds": self.first_token_high_seconds,
            "prefill_seconds": self.prefill_seconds,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "time_per_output_token_seconds": None if token is None else token.seconds,
            "time_per_output_token_low_seconds": None if token is None else token.low_seconds,
            "time_per_output_token_high_seconds": None if token is None else token.high_seconds,
            "tokens_per_second_per_sequence": None if token is None else 1.0 / token.seconds,
            "batch_seconds": self.batch_seconds,
            "output_tokens_per_second": None if token is None else token.tokens_per_second,
            "output_tokens_per_second_per_gpu": (
                None if token is None else token.tokens_per_second_per_gpu
            ),
            "parts": {
                "prefill": dict(self.prefill_parts),
                "token": None if token is None else dict(token.parts),
            },
        }


def predict_serving_time(scenario: ServingScenario, plan: Plan) -> ServingTimePrediction:
    """Return the times of one legal layout.

    The fullest replica determines them; all replicas work in parallel. An encoder writes no tokens.
    """
    workload = scenario.workload
    prompt = workload.prompt_tokens
    times = serving_times(
        replica_of(scenario, plan), scenario.cluster, stages_of(scenario, plan), prompt
    )
    prefill, alone, token = (float(x) for x in (times.prefill, times.alone, times.token))
    answer, sequences = float(times.answer_len), sequences_of(scenario, plan)
    around_first, around_token = serving_spreads(scenario.cluster.accelerator)
    first_low, first_high = interval(alone, around_first)
    least_prompt, least_token = least_seconds(scenario, plan)
    first_low = max(first_low, min(alone, least_prompt))
    output, batch = None, prefill
    if has_cache(scenario.model) and answer >= 1.0:
        batch = float(times.batch)
        low, high = interval(token, around_token)
        low = max(low, min(token, least_token))
        rate = workload.concurrency * answer / batch
        output = TokenTimes(
            seconds=token,
            low_seconds=low,
            high_seconds=high,
            parts={**_parts(times.token_parts), "stage_wait": float(times.stage_wait)},
            tokens_per_second=rate,
            tokens_per_second_per_gpu=rate / scenario.cluster.num_gpus,
        )
    return ServingTimePrediction(
        prompt_len=prompt,
        answer_len=round(answer),
        sequences_per_replica=sequences,
        first_token_seconds=alone,
        first_token_low_seconds=first_low,
        first_token_high_seconds=first_high,
        prefill_seconds=prefill,
        prefill_parts=_parts(times.prefill_parts),
        prompt_tokens_per_second=workload.concurrency * prompt / prefill,
        batch_seconds=batch,
        token=output,
    )


def least_seconds(scenario: ServingScenario, plan: Plan) -> tuple[float, float]:
    """Return the least seconds of a prompt alone and of an output token on an accelerator.

        prompt   FLOP of the layers for all its tokens / (ranks of a replica · peak)
        token    bytes of the layers' matrices that one token reads / (ranks that cut them · beta)

    peak  dense FLOP/s of the datasheet, the highest of the precisions   beta  memory bandwidth
    Zero for a CPU, whose caches may hold a small model.
    Source: Williams, Waterman, Patterson, Roofline, CACM 52 (2009).
    """
    chip, workload, model = scenario.cluster.accelerator, scenario.workload, scenario.model
    peaks = [
        chip.peak_flops[name].value
        for name in {workload.precision, workload.weight_precision}
        if name in chip.peak_flops
    ]
    if chip.device == "cpu" or not peaks:
        return 0.0, 0.0
    kinds = [model.kinds[kind] for kind in model.pattern]
    prompt = workload.prompt_tokens
    flops = sum(float(layer_flops_per_token(kind, prompt, masked=True)) for kind in kinds)
    numel = 0.5 * sum(linear_flops_per_token(kind) for kind in kinds)
    read = numel * WEIGHT_FORMATS[workload.weight_precision].element
    cut = plan.world_size if plan.expert_parallel > 1 else plan.tensor_parallel
    ranks = max(cut, plan.tensor_parallel * plan.pipeline_parallel)
    return prompt * flops / (ranks * max(peaks)), read / (cut * chip.memory_bandwidth.value)


def _parts(parts: PassTime) -> dict[str, float]:
    return {f.name: float(getattr(parts, f.name)) for f in fields(PassTime)}
