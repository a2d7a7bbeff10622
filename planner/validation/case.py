"""One row of RUNS.csv as model, cluster, workload, plan and software profile.

An empty cell takes a default, which is listed in the result. A row that cannot be priced raises
``Unpriceable`` with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final, get_args

from cost_models.model.freezing import without_adapters_before
from cost_models.model.lora import adapted
from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import OFFLOADS, RECOMPUTE, Plan
from cost_models.plan.workload import MIXED, Adapter, AttentionKernel, Precision, Workload
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import names_engines, software_profile
from planner.request.scenario import default_precision
from planner.validation.cluster_of_row import cluster_of
from planner.validation.micro_batch import with_usual_micro_batch
from planner.validation.model_of_row import model_of
from planner.validation.reading import Reading, Unpriceable
from planner.validation.runs_file import Row
from planner.validation.words import entry_of, look_up, number_in, words_table

NEAR: Final = 0.8  # fraction of the virtual stages in the row; with fewer it is a different plan
DEFAULT_RANK: Final = 8  # of adapters of unknown rank; the effect on memory and time is small


@dataclass(frozen=True, slots=True)
class Case:
    """One row, ready to be priced."""

    row: Row
    scenario: Scenario
    plan: Plan
    defaults: tuple[str, ...]
    key: tuple[Any, ...] = field(repr=False)  # of the scenario: equal keys are priced together

    @property
    def plan_words(self) -> str:
        """The fields of the plan that differ from the default, as text."""
        usual = Plan().to_dict()
        fields = self.plan.to_dict().items()
        return " ".join(f"{name}={value}" for name, value in fields if value != usual[name])

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
    reading = Reading(row)
    try:
        return _case(reading)
    except InputError as error:
        raise Unpriceable(str(error)) from None


def _case(reading: Reading) -> Case:
    row = reading.row
    if unpriced := look_up(words_table().unpriced, row):
        raise Unpriceable(unpriced.why)
    trainer = entry_of(words_table().software, row)
    cluster, cluster_key = cluster_of(reading)
    base, model_key = model_of(reading)
    plan, batch = _plan(reading, base)
    workload = _workload(reading, base, batch, default_precision(cluster.accelerator))
    changes = {
        f"{group}.{name}": value
        for group, figures in trainer.figures.items()
        for name, value in figures.items()
    }
    engines = row.words("framework")
    if names_engines(engines):
        changes, software = {}, software_profile(engines)
    else:
        software = software_profile(trainer.profile).changed(changes)
    adapter = look_up(words_table().adapter, row)
    first = adapter.first_layer if adapter else 0
    model = _adapted(base, model_key, workload, software.frozen.quantises_every_matrix, first)
    stages = _stages(row, plan)
    scenario = Scenario(model, cluster, workload, software, layer_ranges=stages)
    changed = tuple(sorted(changes.items()))
    plan = with_usual_micro_batch(reading, scenario, plan)
    key = (model_key, cluster_key, workload, software.name, changed, stages, first)
    return Case(row, scenario, plan, tuple(reading.defaults), key)


_MODELS: dict[tuple[str, str, int, str, bool, int], ModelSpec] = {}


def _adapted(
    base: ModelSpec, key: str, workload: Workload, every: bool, first_layer: int
) -> ModelSpec:
    """Return the model with its adapters; cached, since equal keys are priced together."""
    trained = (workload.adapter, workload.adapter_rank, workload.adapter_targets)
    full = (key, *trained, every, first_layer)
    if full not in _MODELS:
        model = adapted(base, workload, quantises_every_matrix=every)
        _MODELS[full] = without_adapters_before(model, first_layer) if first_layer else model
    return _MODELS[full]


def _plan(reading: Reading, model: ModelSpec) -> tuple[Plan, int]:
    row = reading.row
    num_gpus = reading.need("num_gpus")
    tensor = reading.value("tensor_parallel", 1, "none")
    pipeline = reading.value("pipeline_parallel", 1, "none")
    virtual = 1
    if pipeline > 1:
        recipe = look_up(words_table().interleaved, row)
        usual = max(1, -(-model.num_layers // (pipeline * recipe.layers))) if recipe else 1
        virtual = reading.value("virtual_stages", usual, "its recipe" if recipe else "none")
    virtual = _virtual_stages(reading, model, pipeline, virtual)
    context = reading.value("context_parallel", 1, "none")
    ranks = tensor * pipeline * context
    if num_gpus % ranks:
        raise Unpriceable(f"{ranks} model-parallel ranks do not divide {num_gpus} accelerators")
    data = reading.value("data_parallel", num_gpus // ranks, "all that are left")
    if data * ranks != num_gpus:
        raise Unpriceable(f"{data} x {ranks} ranks for {num_gpus} accelerators")
    micro = row.get("micro_batch_size") or 1  # where it is empty: see ``micro_batch``
    batch = _batch(reading, micro * data)
    if batch % (micro * data):
        raise Unpriceable(f"a batch of {batch} is not a multiple of {micro} x {data}")
    zero = look_up(words_table().zero_stage, row)
    stage = zero.value if zero else reading.value("zero_stage", 0, "of that trainer")
    recompute, layers = _recompute(reading, model, pipeline * virtual)
    shard = (
        row.get("dp_shard")
        or number_in(words_table().shard_ranks, row)
        or (row.get("gpus_per_node") if look_up(words_table().sharding, row) else None)
    )
    experts = row.get("expert_parallel") or 1
    return Plan(
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_stages=virtual,
        pipeline_schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
        zero_stage=stage if data * context > 1 else 0,
        sequence_parallel=_sequence_parallel(reading, tensor),
        recompute=recompute,
        recompute_layers=layers,
        micro_batch_size=micro,
        num_microbatches=batch // (micro * data),
        dp_replicate=data // shard if shard and data % shard == 0 else 1,
        context_parallel=context,
        expert_parallel=experts,
        expert_tensor_parallel=_cuts_experts(row, tensor, experts),
        offload=_offload(row),
    ), batch


def _cuts_experts(row: Row, tensor: int, experts: int) -> bool:
    """Whether experts are sharded over tensor-parallel ranks, by words or the trainer's default."""
    cut = number_in(words_table().expert_tensor, row)
    if cut not in (None, 1, tensor):
        raise Unpriceable(f"experts cut over {cut} of {tensor} tensor-parallel ranks")
    default = look_up(words_table().expert_tensor_parallel, row)
    usual = cut is None and default is not None and default.value
    return tensor == 1 or experts == 1 or cut == tensor or usual


def _stages(row: Row, plan: Plan) -> tuple[tuple[int, int], ...] | None:
    """Return the layers [first, last) of every stage if the row's source gives uneven stages."""
    given = look_up(words_table().stages, row)
    if given is None or len(given.layers) != plan.num_stages:
        return None
    ends = list(accumulate(given.layers, initial=0))
    return tuple(pairwise(ends))


def _virtual_stages(reading: Reading, model: ModelSpec, pipeline: int, virtual: int) -> int:
    """Return stages per rank; fewer if the source counts embedding and head as layers."""
    most = max(1, model.num_layers // pipeline)
    if virtual <= most or pipeline * virtual > model.num_layers + 2 or most < NEAR * virtual:
        return virtual
    reading.defaults.append(
        f"virtual_stages {most} instead of {virtual}: embedding and head count as layers there"
    )
    return most


def _batch(reading: Reading, least: int) -> int:
    """Return sequences per step: given, found in words, the trainer's default, or the minimum."""
    row = reading.row
    words = number_in(words_table().batch, row) or entry_of(words_table().software, row).batch
    if row.get("global_batch_size") is None and words:
        return max(least, int(words) // least * least)
    return int(reading.value("global_batch_size", least, "one micro-batch for each data rank"))


def _sequence_parallel(reading: Reading, tensor: int) -> bool:
    if tensor == 1:
        return False
    if entry_of(words_table().software, reading.row).without_sequence_parallel:
        return bool(reading.value("sequence_parallel", False, "this trainer has none"))
    return bool(reading.value("sequence_parallel", True, "with tensor parallelism"))


def _recompute(reading: Reading, model: ModelSpec, stages: int) -> tuple[Any, int]:
    """Return the recompute setting and the recomputed layers of a stage (0: all)."""
    entry = look_up(words_table().recompute, reading.row)
    word = entry.value if entry else reading.value("recompute", "none", "not given")
    if word not in RECOMPUTE:
        raise Unpriceable(f"recompute {word!r} is not known")
    layers = number_in(words_table().recompute_layers, reading.row)
    if layers is not None and word == "full":
        return ("full", layers) if layers else ("none", 0)
    if entry and entry.layers is not None:
        reading.defaults.append(f"recompute of {entry.layers:g} of the layers")
        return word, max(1, round(entry.layers * model.num_layers / stages))
    return word, 0


def _offload(row: Row) -> Any:
    entry = look_up(words_table().offload, row)
    word = entry.value if entry else row.get("offload") or "none"
    if word not in OFFLOADS:
        raise Unpriceable(f"offload {row.get('offload')!r} is not priced")
    return word


def _workload(reading: Reading, model: ModelSpec, batch: int, precision: str) -> Workload:
    row = reading.row
    named = look_up(words_table().precision, row)
    word: Any = (
        named.value if named else reading.value("precision", precision, "of that accelerator")
    )
    if word not in get_args(Precision):
        raise Unpriceable(f"precision {row.get('precision')} is not priced")
    reading.value("optimizer", "adamw", "the usual one")
    documents = look_up(words_table().documents, row)
    optimizer = look_up(words_table().optimizer, row)
    if optimizer is None and row.get("optimizer"):
        raise Unpriceable(f"optimizer {row.get('optimizer')!r} is not priced")
    states = look_up(words_table().states, row)
    gradients = look_up(words_table().gradients, row)
    return Workload(
        seq_len=reading.need("seq_len"),
        global_batch_size=batch,
        precision=word,
        optimizer=optimizer.value if optimizer and row.get("optimizer") else "adamw",
        attention_kernel=_attention(reading),
        master_weights=_keeps_master_weights(row, word),
        optimizer_state_precision=states.value if states else "auto",
        gradient_precision=gradients.value if gradients else "auto",
        document_mask=documents is not None,
        document_length=documents.length if documents else 0,
        **_adapter(reading, model),
    )


def _attention(reading: Reading) -> AttentionKernel:
    flash, entry = reading.row.flash_attention, look_up(words_table().attention, reading.row)
    if entry and entry.always:
        return entry.value
    if flash not in (None, "unknown"):
        return "eager" if flash == "0" else "flash"
    kernel: AttentionKernel = entry.value if entry else "flash"
    reading.defaults.append(f"attention {kernel} (default: flash_attention is not given)")
    return kernel


def _keeps_master_weights(row: Row, precision: str) -> bool:
    """Whether weights are updated in fp32: the optimizer's words override the trainer's default."""
    if precision not in MIXED:
        return True
    entry = look_up(words_table().master_weights, row)
    return entry.value if entry else entry_of(words_table().software, row).master_weights


def _adapter(reading: Reading, model: ModelSpec) -> dict[str, Any]:
    row = reading.row
    if row.words("peft") in ("", "none"):
        return {}
    kind = look_up(words_table().adapter, row)
    if kind is None or kind.value not in get_args(Adapter):
        raise Unpriceable(f"peft {row.get('peft')!r} is not priced")
    rank = number_in(words_table().adapter_rank, row) or DEFAULT_RANK
    targets = entry_of(words_table().targets, row).value
    if targets == "all" and any(kind.feed_forward.num_experts for kind in model.kinds):
        reading.defaults.append("adapters of attention alone: those of routed experts are left out")
        targets = "attention"
    return {
        "adapter": kind.value,
        "adapter_rank": rank,
        "adapter_alpha": 2.0 * rank,
        "adapter_targets": targets,
        "quantisation": entry_of(words_table().quantisation, row).value,
    }
