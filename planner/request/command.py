"""Shell commands and options that reproduce a scenario or a plan."""

from __future__ import annotations

import shlex
from dataclasses import MISSING
from functools import cache

from cost_models.plan.plan import GROUPS, Plan
from cost_models.plan.workload import Workload
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import ShardplanError
from hardware_profiles.options import Declared, declared
from planner.request.recompute import recompute_options, stage_recompute_options
from planner.request.requests import CommonOptions, LayerOptions
from planner.request.scenario import DEFAULT_SOFTWARE, default_precision
from planner.request.stage_layers import layers_option


def describe_plan(plan: Plan) -> str:
    """Return the options of ``shardplan fit`` that select a plan."""
    shown = shown_fields(plan)
    words = [
        recompute_options(plan) if name == "recompute" else one.as_flag(getattr(plan, name))
        for name, one in _in_order()
        if name in shown and name != "recompute_layers"  # recompute_options includes it
    ]
    return " ".join(words)


def shown_fields(plan: Plan) -> set[str]:
    """Return the fields of a plan that a command names.

    The option of a field declares whether it is always named or only when it differs from its
    default. A field that depends on another one (``--schedule`` on ``--pp``) needs that one too.
    """
    shown: set[str] = set()
    for name, one in _in_order():
        option = one.option
        assert option is not None
        changed = getattr(plan, name) != one.default
        wanted = option.pasted == "always" or (changed and option.pasted != "never")
        if wanted and (option.of is None or option.of in shown):
            shown.add(name)
    return shown


@cache
def _in_order() -> tuple[tuple[str, Declared], ...]:
    """Return the options of a plan by group, each followed by its dependent options."""
    known = {name: one for name, one in declared(Plan).items() if one.option is not None}

    def with_dependants(name: str) -> list[str]:
        dependants = [other for other, one in known.items() if _of(one) == name]
        return [name, *(n for other in dependants for n in with_dependants(other))]

    names = [
        each
        for group in GROUPS
        for name, one in known.items()
        if one.option is not None and one.option.group == group and one.option.of is None
        for each in with_dependants(name)
    ]
    return tuple((name, known[name]) for name in names)


def _of(one: Declared) -> str | None:
    return one.option.of if one.option else None


def batch_option(workload: Workload) -> str:
    """Return the option for the global batch."""
    return f"--global-batch-size {workload.global_batch_size}"


def cluster_argument(cluster: Cluster) -> str | None:
    """Return the command-line argument for a cluster; None if only a file describes it."""
    try:
        same = parse_cluster(cluster.name).tiers == cluster.tiers
    except ShardplanError:
        return None
    return shlex.quote(cluster.name) if same else None


def plan_command(scenario: Scenario, plan: Plan) -> str:
    """Return the command that searches for the best plan with the same offloading as ``plan``."""
    pinned = []
    if plan.offload != "none":
        device = f",offload_device={plan.offload_device}" if plan.offload_device != "cpu" else ""
        pinned = [f"--fix offload={plan.offload}{device}"]
    return " ".join(["shardplan plan", *_scenario_words(scenario), *pinned, "-o plan.json"])


def fit_command(scenario: Scenario, plan: Plan) -> str:
    """Return the command that checks whether a plan of a scenario fits."""
    return " ".join(["shardplan fit", *_scenario_words(scenario), describe_plan(plan)])


def _scenario_words(scenario: Scenario) -> list[str]:
    """Return the words of a scenario: model, cluster and every option that is not the default."""
    workload = scenario.workload
    words = [shlex.quote(scenario.model.name), shlex.quote(scenario.cluster.name)]
    words += [f"--seq-len {workload.seq_len}", batch_option(workload)]
    usual = {name: one.default for name, one in declared(Workload).items()}
    usual["precision"] = default_precision(scenario.cluster.accelerator)
    usual["software"] = DEFAULT_SOFTWARE
    given = workload.to_dict() | {"software": scenario.software.name}
    words += [
        one.as_flag(given[name])
        for group in (CommonOptions, LayerOptions)
        for name, one in declared(group).items()
        if name in given and usual[name] not in (MISSING, given[name])
    ]
    if workload.adapter != "none":
        words.append(f"--{workload.adapter} {workload.adapter_rank}")
        words.append(f"--lora-alpha {workload.adapter_alpha:g}")
        words.append(f"--lora-targets {workload.adapter_targets}")
        if workload.quantisation != usual["quantisation"]:
            words.append(f"--quantisation {workload.quantisation}")
    if scenario.layer_ranges is not None:
        words.append(layers_option(scenario.layer_ranges))
    words += stage_recompute_options(scenario.stage_recompute_layers)
    return words
