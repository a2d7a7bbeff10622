"""Scenarios and plans as commands, and changes of a plan as options behind those of another."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import MISSING
from functools import cache
from typing import Final

from cost_models.plan.plan import GROUPS, Plan, split_layers
from cost_models.plan.workload import Workload
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.errors import ShardplanError
from hardware_profiles.options import Declared, declared
from planner.exchange.job import adapter_options
from planner.request.options.search import WholeRunOptions
from planner.request.options.training import AdapterOptions, CommonOptions, LayerOptions
from planner.request.scenario import DEFAULT_SOFTWARE, default_precision, default_seq_len
from planner.request.stage_layers import (
    Ranges,
    layers_option,
    recompute_option,
    stage_recompute_options,
)

TAKE_BACK: Final = " --recompute-layers 0"  # the number that was given before


def describe_plan(plan: Plan) -> str:
    """Return a plan as the options that give it."""
    shown = shown_fields(plan)
    words = [
        recompute_option(plan) if name == "recompute" else one.as_option(getattr(plan, name))
        for name, one in _in_order()
        if name in shown and name != "recompute_layers"  # it is part of recompute_option
    ]
    return " ".join(words)


def describe_with_stages(scenario: Scenario, plan: Plan, ranges: Ranges) -> str:
    """Return a plan as ``describe_plan`` does, with the options of stages that are not even."""
    even = split_layers(scenario.model.num_layers, plan.num_stages)
    stages = [] if ranges == even else [layers_option(ranges)]
    recomputed = stage_recompute_options(scenario.stage_recompute_layers)
    return " ".join([describe_plan(plan), *stages, *recomputed])


def shown_fields(plan: Plan) -> set[str]:
    """Return the fields of a plan that a command names.

    A field is named always, or where it is not at its default, as its option declares; but only
    together with the field that it belongs to (``--schedule`` with ``--pp``).
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
    """Return the options of a plan by group, each followed by those that belong to it."""
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
    """Return the CLUSTER argument of a cluster; None if only a file describes it.

    One node goes without its number: 8xA100-SXM-80GB.
    """
    name = cluster.name.removeprefix("1x") if cluster.name.count("x") > 1 else cluster.name
    for one in (name, cluster.name):
        try:
            found = parse_cluster(one)
            same_power = found.accelerator.watts == cluster.accelerator.watts
            if found.tiers == cluster.tiers and same_power:
                return shlex.quote(one)
        except ShardplanError:
            continue
    return None


def plan_command(
    scenario: Scenario, plan: Plan, whole_run: Mapping[str, object] | None = None
) -> str:
    """Return the command that searches for the best plan, with the offload of a given plan.

    Without the sequence length and the global batch where these are the defaults of the search,
    and without numbers of recomputed layers, which the search finds. ``whole_run``: the given
    options of a whole training run, by name.
    """
    workload, pinned = scenario.workload, []
    if plan.offload != "none":
        device = f",offload_device={plan.offload_device}" if plan.offload_device != "cpu" else ""
        pinned = [f"--fix offload={plan.offload}{device}"]
    length = [] if workload.seq_len == default_seq_len(scenario.model) else [_length(workload)]
    usual = workload.global_batch_size == scenario.cluster.num_gpus
    batch = [] if usual else [batch_option(workload)]
    training, whole = _training_options(scenario), _whole_run_options(whole_run or {})
    options = [*_question(scenario), *length, *batch, *training, *whole, *pinned]
    return " ".join(["shardplan plan", *options, "-o plan.json"])


def scenario_command(scenario: Scenario) -> str:
    """Return the command that asks whether any plan of a scenario fits."""
    return " ".join(["shardplan fit", *_scenario_options(scenario)])


def fit_command(scenario: Scenario, plan: Plan) -> str:
    """Return the command that checks whether a plan of a scenario fits."""
    return f"{scenario_command(scenario)} {describe_plan(plan)}"


def _scenario_options(scenario: Scenario) -> list[str]:
    """Return a scenario as words: model, cluster and every option that is not the default."""
    workload = scenario.workload
    batch = [_length(workload), batch_option(workload)]
    recomputed = stage_recompute_options(scenario.stage_recompute_layers)
    return [*_question(scenario), *batch, *_training_options(scenario), *recomputed]


def _question(scenario: Scenario) -> list[str]:
    return [shlex.quote(scenario.model.name), shlex.quote(scenario.cluster.name)]


def _length(workload: Workload) -> str:
    return f"--seq-len {workload.seq_len}"


def _training_options(scenario: Scenario) -> list[str]:
    """Return the options of a scenario that are not at their defaults, but for batch and length."""
    workload, words = scenario.workload, []
    usual = {name: one.default for name, one in declared(Workload).items()}
    usual["precision"] = default_precision(scenario.cluster.accelerator)
    usual["software"] = DEFAULT_SOFTWARE
    usual |= {"lora_alpha": 2.0 * workload.adapter_rank, "lora_targets": usual["adapter_targets"]}
    given = workload.to_dict() | {"software": scenario.software.name} | adapter_options(workload)
    words += [
        one.as_option(given[name])
        for group in (CommonOptions, LayerOptions, AdapterOptions)
        for name, one in declared(group).items()
        if name in given and usual.get(name) not in (MISSING, given[name])
    ]
    if scenario.layer_ranges is not None:
        words.append(layers_option(scenario.layer_ranges))
    return words


def _whole_run_options(given: Mapping[str, object]) -> list[str]:
    """Return the given options of a whole training run as words."""
    return [
        one.as_option(value if isinstance(value, (bool, float)) else shlex.quote(str(value)))
        for name, one in declared(WholeRunOptions).items()
        if (value := given.get(name)) is not None
    ]


def replan_options(
    scenario: Scenario, plan: Plan, before: Plan, *, reset_recompute: bool = False
) -> str:
    """Return a whole plan and its batch as options to append to those of another plan.

    ``reset_recompute``: reset numbers of recomputed layers, too.
    """
    words = [
        describe_plan(plan),
        *_taken_back(plan, before),
        rebatch_options(scenario, plan, before),
    ]
    return " ".join(words) + (TAKE_BACK if reset_recompute else "")


def rebatch_options(scenario: Scenario, plan: Plan, before: Plan) -> str:
    """Return the batch as options, with the number of micro-batches if it changes."""
    option = batch_option(scenario.workload)
    if plan.num_microbatches != before.num_microbatches:
        option += f" --num-microbatches {plan.num_microbatches}"
    return option


def _taken_back(plan: Plan, before: Plan) -> list[str]:
    """Return options for fields that an earlier plan set and this one leaves at their defaults."""
    shown = shown_fields(plan)
    return [
        one.as_option(one.default)
        for name, one in declared(Plan).items()
        if one.option is not None
        and one.option.pasted != "never"
        and one.option.of != "recompute"  # see TAKE_BACK
        and name not in shown
        and getattr(plan, name) == one.default != getattr(before, name)
    ]
