"""``shardplan plan``: its options and its output."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from hardware_profiles.options import Option
from hardware_profiles.terminal import say, show
from planner.cli.numpy_threads import import_numpy, keep_freed_memory
from planner.cli.options import Force, Json, Verbose
from planner.cli.outputs import print_answer, refuse_existing
from planner.request.options.search import SEARCH
from planner.request.requests import PlanRequest

if TYPE_CHECKING:
    from planner.api.plan import PlannedAnswer


def plan(
    request: PlanRequest,
    output: Annotated[
        Path | None,
        Option(
            "--output", "-o", metavar="FILE", common=True, help="write the best plan to this file"
        ),
    ] = None,
    improve: Annotated[
        bool,
        Option(
            "--improve",
            group=SEARCH,
            help="the better plan as a diff of the file of --from; -o FILE writes the changed file",
        ),
    ] = False,
    force: Force = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Print the best plans, and write the best one to a file."""
    import_numpy()
    keep_freed_memory()
    if improve:
        _print_improved(request, output, force=force, json=json)
        return
    from cost_models.plan_file import write_plan_file
    from hardware_profiles.errors import NoLegalPlanError
    from planner.answer.answers import not_run
    from planner.api.plan import plan as ask
    from planner.request.clusters import split_clusters
    from planner.request.executor_process import (
        cluster_or_measure,
        is_module,
        refuse_for_modules,
    )
    from planner.request.scenario import DEFAULT_SOFTWARE
    from planner.text.answer import json_text
    from planner.text.paragraphs import labelled

    if output is not None:
        refuse_existing(output, force=force)  # before any work is done
    refuse_for_modules(str(request.model), output)
    names = split_clusters(str(request.cluster))
    clusters = [cluster_or_measure(name, say) for name in names]
    if request.source is not None and len(clusters) == 1:
        from planner.request.config_file import notes_of_file

        for note in notes_of_file(request, clusters[0]):
            say(f"note: {note}")
    try:
        answer = ask(
            **{**vars(request), "cluster": clusters[0] if len(clusters) == 1 else clusters}
        )
    except NoLegalPlanError as error:
        if json:
            show(json_text(error.document))
        raise
    planned = None if is_module(request.model) else cast("PlannedAnswer", answer)
    if output is not None and planned is not None:
        write_plan_file(output, planned.plan_file(), force=force)
    print_answer(answer, json=json, verbose=verbose)
    if output is not None and planned is not None:
        why = not_run(planned.scenario, planned.best)
        quoted = shlex.quote(str(output))
        if planned.scenario.software.name != DEFAULT_SOFTWARE:
            why = f"{why}; next: shardplan export {quoted} --to {request.to or 'TARGET'}"
        following = (
            f"next: shardplan run {quoted} --data FILE"
            if planned.scenario.cluster.num_nodes == 1
            else f"next: shardplan launch {quoted} --on slurm -- --data FILE"
        )
        say(f"{'':<11}wrote {output}; {following if why is None else why}")
    elif not json and planned is not None:
        following = "add -o plan.json to write the best plan; shardplan run trains it"
        show("\n".join(labelled("Next", following)))


def _print_improved(request: PlanRequest, output: Path | None, *, force: bool, json: bool) -> None:
    """Print both predictions and the diff of ``--improve``; write the changed file."""
    from hardware_profiles.fields import write_text_atomically
    from planner.api.improve import improve
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
