"""Times of serving as text: the first token, every further one, what takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cost_models.units import format_seconds
from planner.serving.scenario import ServingScenario
from planner.text.paragraphs import labelled

PART_WORDS: Final = {
    "matrices": "matrices",
    "attention": "attention",
    "memory": "norms, activations, logits",
    "kernels": "starting and ending kernels",
    "communication": "tensor-parallel and expert communication",
    "host": "waiting for the host",
    "send": "sends between stages",
    "stage_wait": "waiting for the slowest stage",
}
SMALL: Final = 0.005  # parts below this share are not told


def time_lines(scenario: ServingScenario, time: Mapping[str, Any]) -> list[str]:
    """Return the lines: prompts, tokens, both together."""
    first = format_seconds(time["time_to_first_token_seconds"])
    low, high = (
        format_seconds(time[f"time_to_first_token_{end}_seconds"]) for end in ("low", "high")
    )
    token = time["time_per_output_token_seconds"]
    words = "first token of" if token is not None else "one sequence of"
    words += f" {time['prompt_len']:,} tokens after {first} (likely {low} to {high})"
    if time["sequences_per_replica"] > 1:
        words += (
            f", of all {time['sequences_per_replica']:,} of a replica after "
            f"{format_seconds(time['prefill_seconds'])}"
        )
    lines = labelled("Prompt" if token is not None else "Pass", words)
    lines += labelled("", _shares(time["parts"]["prefill"]))
    if token is None:
        return lines
    low, high = (
        format_seconds(time[f"time_per_output_token_{end}_seconds"]) for end in ("low", "high")
    )
    lines += labelled(
        "A token",
        f"{format_seconds(token)} (likely {low} to {high}), {_rate(1.0 / token)} tokens/s a "
        "sequence",
    )
    lines += labelled("", _shares(time["parts"]["token"]))
    per_gpu = time["output_tokens_per_second_per_gpu"]
    each = f" ({_rate(per_gpu)} per accelerator)" if scenario.cluster.num_gpus > 1 else ""
    return lines + labelled(
        "Together",
        f"{_rate(time['output_tokens_per_second'])} tokens/s{each} while a batch of answers of "
        f"{time['answer_len']:,} tokens takes {format_seconds(time['batch_seconds'])}",
    )


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _shares(parts: Mapping[str, float]) -> str:
    """Return the parts that count, largest first, as shares."""
    whole = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{PART_WORDS[name]} {100 * value / whole:.0f} %"
        for name, value in ordered
        if value >= SMALL * whole
    )
