"""``shardplan compare-techniques``: its options."""

from __future__ import annotations

from planner.cli.options import Json, Verbose
from planner.cli.outputs import print_answer
from planner.request.requests import TechniquesRequest


def compare_techniques(
    request: TechniquesRequest, json: Json = False, verbose: Verbose = False
) -> None:
    """Print one line for every technique."""
    from hardware_profiles.terminal import say
    from planner.request.executor_process import cluster_or_measure
    from planner.techniques.compare import compare_techniques as ask

    cluster = cluster_or_measure(str(request.cluster), say)
    print_answer(ask(**{**vars(request), "cluster": cluster}), json=json, verbose=verbose)
