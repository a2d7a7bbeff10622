"""``shardplan plan --from FILE --improve``: its output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hardware_profiles.terminal import say, show
from planner.request.requests import PlanRequest


def print_improved(request: PlanRequest, output: Path | None, *, force: bool, json: bool) -> None:
    """Print both predictions and the diff; write the changed file."""
    from hardware_profiles.fields import write_text_atomically
    from planner.api.improve import improve
    from planner.cli.outputs import refuse_existing
    from planner.request.executor_process import cluster_or_measure
    from planner.text.answer import json_text

    if output is not None:
        refuse_existing(output, force=force)  # before any work is done
    cluster = cluster_or_measure(str(request.cluster), say)
    answer = improve(replace(request, cluster=cluster))
    for note in answer.notes:
        say(f"note: {note}")
    show(json_text(answer.to_dict()) if json else str(answer))
    if output is None:
        return
    if answer.patch is None:
        say(f"{'':<11}nothing is better: {output} is not written")
        return
    write_text_atomically(output, answer.patch.after, force=force)
    say(f"{'':<11}wrote {output}")
