"""One row of RUNS.csv as model, cluster, workload, plan and software profile.

An empty cell takes a default, which is listed in the result. A row that cannot be priced raises
``Unpriceable`` with the reason.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec.structs import replace

from cost_models.compute.rates import BEFORE_AMPERE, best_matmul
from cost_models.legality.rule import multiplies_in_fp32
from cost_models.model.freezing import with_trained_layers, without_adapters_before
from cost_models.model.lora import adapted, with_trained_ends
from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from cost_models.scenario import Scenario
from hardware_profiles.cluster.schema import Accelerator
from hardware_profiles.errors import InputError
from planner.validation.rows.cluster import cluster_of
from planner.validation.rows.counts import with_counts_in_words, with_layers_in_turn, with_patches
from planner.validation.rows.implied import (
    with_adapters,
    with_case_of_suite,
    with_kind_of_name,
    with_mode,
    with_modules_of_peft,
    with_sharding,
    with_stage_of_offload,
    without_padding,
    without_repeated_ranks,
)
from planner.validation.rows.model import is_typical, model_of
from planner.validation.rows.plan import plan_of, stages_of, takes_layers_in_turn
from planner.validation.rows.reading import Reading, Unpriceable
from planner.validation.rows.runs_file import Row
from planner.validation.rows.stand_ins import (
    with_as_many_accelerators_as_ranks,
    with_assumed_figures,
    with_usual_length,
)
from planner.validation.rows.trainer import (
    computes_in_fp32_by_default,
    note_trainer,
    profile_of_trainer,
    that_runs,
    trainer_of,
)
from planner.validation.rows.unstated_plan import (
    may_checkpoint,
    with_usual_checkpointing,
    with_usual_micro_batch,
    with_usual_sequence_parallelism,
)
from planner.validation.rows.vocabulary import terms_of
from planner.validation.rows.words import look_up, number_in, words_table
from planner.validation.rows.workload import workload_of

TPU: Final = "TPU"
# of accelerators on which Megatron-LM runs Transformer Engine's layers, its default since January
# 2024 (NVIDIA/Megatron-LM: megatron/training/arguments.py, --transformer-impl)
SINCE_2024: Final = frozenset({"Hopper", "Blackwell", "CDNA3", "CDNA4"})


@dataclass(frozen=True, slots=True)
class Case:
    """One row, ready to be priced."""

    row: Row
    scenario: Scenario
    plan: Plan
    defaults: tuple[str, ...]
    key: tuple[Any, ...] = field(repr=False)  # of the scenario: equal keys are priced together
    may_checkpoint: bool = False  # nobody says whether layers are computed again
    others: tuple[Case, ...] = ()  # that words without a meaning may stand for as well

    @property
    def plan_words(self) -> str:
        """The fields of the plan that differ from the default, as text."""
        usual = Plan().to_dict()
        fields = self.plan.to_dict().items()
        return " ".join(f"{name}={value}" for name, value in fields if value != usual[name])

    @property
    def is_typical(self) -> bool:
        """Whether a typical model of the row's size stands for one of an unknown shape."""
        return is_typical(self.defaults)

    @property
    def method(self) -> str:
        """Trained parameters and kinds of parallelism, as a short text."""
        plan, trained = self.plan, self.scenario.workload.adapter
        axes = {
            "tp": plan.tensor_parallel,
            "pp": plan.pipeline_parallel,
            "cp": plan.context_parallel,
            "ep": plan.expert_parallel,
        }
        words = [name for name, size in axes.items() if size > 1]
        if plan.data_parallel * plan.context_parallel > 1:
            words.append(f"zero {plan.zero_stage}" if plan.zero_stage else "dp")
        return f"{'full' if trained == 'none' else trained}, {' '.join(words) or 'one GPU'}"


def case_of(row: Row) -> Case:
    """Return a row as a case; raises Unpriceable with the reason."""
    case, also = _alone(row)
    others = []
    for cells in also:
        with suppress(Unpriceable):
            others.append(_alone(replace(row, **cells))[0])
    return dataclasses.replace(case, others=tuple(others)) if others else case


def _alone(row: Row) -> tuple[Case, list[dict[str, Any]]]:
    """Return the case of a row without ``others``, and the cells that these would have."""
    row = with_modules_of_peft(with_adapters(with_layers_in_turn(row)))
    row = with_sharding(row)
    row = with_kind_of_name(with_case_of_suite(row))
    reading = with_patches(with_counts_in_words(Reading(row)))
    reading = without_padding(with_mode(without_repeated_ranks(with_usual_length(reading))))
    try:
        return _case(reading), reading.also
    except InputError as error:
        raise Unpriceable(str(error)) from None


def _case(reading: Reading) -> Case:
    row = reading.row
    if row.not_priced is not None:
        raise Unpriceable(row.not_priced)
    if row.peft is not None and look_up(words_table().adapter, row) is None:
        reading.stand_in("peft", "LoRA", "none")
        reading = reading.changed(peft="lora")
    reading = with_as_many_accelerators_as_ranks(reading)
    cluster, cluster_key = cluster_of(reading)
    reading = with_stage_of_offload(_on_accelerator(reading, cluster.accelerator))
    row = reading.row
    trainer = trainer_of(row)
    note_trainer(reading)
    base, model_key = model_of(reading)
    plan, batch = plan_of(reading, base, trainer, cluster.gpus_per_node)
    workload = workload_of(reading, base, plan, batch, cluster.accelerator, trainer)
    if not takes_layers_in_turn(row):
        trainer = that_runs(plan, trainer, reading, experts=base.has_experts)
    software, changed = profile_of_trainer(trainer)
    if multiplies_in_fp32(workload, software, plan):
        reading.defaults.append("precision fp32 (default: unsharded, uncast)")
        workload = dataclasses.replace(workload, precision="fp32")
    adapter = look_up(words_table().adapter, row)
    first = adapter.first_layer if adapter else 0
    trained = look_up(words_table().trained_ends, row)
    ends = trained.copies if workload.adapter != "none" and trained and trained.value else None
    every = software.frozen.quantises_every_matrix
    model = _adapted(base, model_key, workload, every, first, ends)
    alone = look_up(words_table().trained_layers, row) if workload.adapter == "none" else None
    count = number_in(words_table().trained_layers_count, row) if alone else None
    if alone is not None:
        if count is None:
            count = alone.value
            reading.defaults.append(f"{count} trained layers (default: it is not given)")
        model = with_trained_layers(model, count, copies=alone.copies, ends=alone.ends)
    stages = stages_of(reading, plan, model.num_layers)
    cluster = with_assumed_figures(reading, cluster, workload, software, plan)
    scenario = Scenario(model, cluster, workload, software, layer_ranges=stages)
    either = may_checkpoint(row, plan)
    if either:
        plan = with_usual_checkpointing(reading, scenario, plan)
    if not trainer.without_sequence_parallel:
        plan = with_usual_sequence_parallelism(reading, scenario, plan)
    plan = with_usual_micro_batch(reading, scenario, plan)
    memory = look_up(words_table().memory, row)
    if row.peak_memory_gib is not None and memory and memory.usual:
        reading.defaults.append(f"peak memory as {memory.value} (default: which kind is not said)")
    host = cluster.accelerator.host_bandwidth
    key: tuple[Any, ...] = (model_key, cluster_key, workload, software.name, changed, stages)
    key = (*key, first, ends, count, host)
    if either and plan.recompute == "none":
        reading.defaults.append("memory from that with full recomputation upwards")
    return Case(row, scenario, plan, tuple(reading.defaults), key, either)


def _on_accelerator(reading: Reading, accelerator: Accelerator) -> Reading:
    """Return the reading with what its trainer is on an accelerator."""
    row, named = reading.row, terms_of(reading.row, "framework").keys()
    architecture, suites = accelerator.architecture, look_up(words_table().suite_precision, row)
    if row.precision is None and suites is not None and best_matmul(accelerator, suites.value):
        note = f"precision {suites.value} (default: of that suite's runs)"
        return reading.changed(note, precision=suites.value)
    if architecture == TPU and "xla" not in named:
        return reading.changed(framework=f"{row.framework or ''} xla".strip())  # all of its code
    if architecture in SINCE_2024 and named - {"megatron family"} == {"megatron"}:
        note = "Megatron-LM since 2024 (default: undated)"
        return reading.changed(note, framework=f"{row.framework} 2024")
    if architecture in BEFORE_AMPERE and computes_in_fp32_by_default(row):
        reading.also.append({"precision": "fp16"})
        note = "precision fp32 (default: of that trainer, which casts on request only)"
        return reading.changed(note, precision="fp32")
    return reading


_MODELS: dict[tuple[str, str, int, str, str, bool, int, bool | None], ModelSpec] = {}


def _adapted(
    base: ModelSpec, key: str, workload: Workload, every: bool, first_layer: int, ends: bool | None
) -> ModelSpec:
    """Return the model with its adapters; cached, since equal keys are priced together.

    ``ends``: trained embedding and head, copies (True) or the model's own (False).
    """
    trained = (workload.adapter, workload.adapter_rank, workload.adapter_targets)
    full = (key, *trained, workload.adapter_method, every, first_layer, ends)
    if full not in _MODELS:
        model = adapted(base, workload, quantises_every_matrix=every)
        model = model if ends is None else with_trained_ends(model, copies=ends)
        _MODELS[full] = without_adapters_before(model, first_layer) if first_layer else model
    return _MODELS[full]
