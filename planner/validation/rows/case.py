"""One row of RUNS.csv as model, cluster, workload, plan and software profile.

An empty cell takes a default, which is listed in the result. A row that cannot be priced raises
``Unpriceable`` with the reason.
"""

from __future__ import annotations

import dataclasses
import re
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import gcd, prod
from typing import Any, Final

from msgspec.structs import replace

from cost_models.legality.rule import multiplies_in_fp32
from cost_models.model.freezing import with_trained_layers, without_adapters_before
from cost_models.model.lora import adapted, with_trained_ends
from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import ContextMethod, Offload, Plan, Schedule
from cost_models.plan.recompute import MODULES, PREFIX, RECOMPUTE, read_setting
from cost_models.plan.workload import PROJECTED, Workload
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from planner.validation.rows.cluster import cluster_of
from planner.validation.rows.counts import (
    STATE_RANKS,
    WEIGHT_RANKS,
    accumulation,
    adapters_in,
    spaced,
    with_counts_in_words,
    with_layers_in_turn,
    with_patches,
)
from planner.validation.rows.model import is_typical, model_of
from planner.validation.rows.reading import Reading, Unpriceable
from planner.validation.rows.runs_file import Row
from planner.validation.rows.stand_ins import with_assumed_figures
from planner.validation.rows.trainer import (
    DEEPSPEED,
    note_trainer,
    profile_of_trainer,
    shards_nothing,
    that_runs,
    trainer_of,
)
from planner.validation.rows.unstated_plan import (
    may_checkpoint,
    with_usual_checkpointing,
    with_usual_micro_batch,
    with_usual_sequence_parallelism,
)
from planner.validation.rows.vocabulary import ANYWHERE, terms_of, vocabulary
from planner.validation.rows.words import SoftwareEntry, look_up, number_in, words_table
from planner.validation.rows.workload import workload_of

GPUS_A_NODE: Final = 8
TPU: Final = "TPU"
SHARE: Final = re.compile(
    r"every (?P<every>\d+)(?:nd|rd|th)?[ -]*(?:layer|block)"
    r"|(?P<part>\d+) ?(?:of|in|/) ?(?P<whole>\d+) ?(?:layer|block)"
    r"|\b(?:ac[ _-])?freq(?:uency)?[ =:]*(?P<freq>\d+)"  # Modalities, torchtitan
    # InternEvo: activation_ckpt takes a share of the layers (configs/7B_sft.py, model.checkpoint)
    r"|^(?:[\w -]+[=:]|[\w -]*\b(?:ratio|fraction|ckpt|checkpoint))? *"
    r"(?P<share>[01]?\.\d+|[01]|(?P<percent>\d+) ?%)$"
)
NOTED_SHARE: Final = re.compile(
    r"(?:checkpoint|recomput)[^,;]*\bevery (?P<every>\d+)(?:nd|rd|th)?[ -]*\w*(?:layer|block)"
    r"|\bac[ _-]freq(?:uency)?[ =:]*(?P<freq>\d+)"
    r"|(?:\bactivation[ _-](?:ckpt|checkpoint\w*)(?:[ _-](?:ratio|fraction|share))?[ =:]*"
    r"|\bcheckpoint ?[=:] ?)(?P<share>[01]?\.\d+|(?P<percent>\d+) ?%)"
)
# --recompute-modules of Megatron Core, a list that replaces its default (core_attn)
NOTED_MODULES: Final = re.compile(
    r"(?<![a-z])recompute(?:[-_ ]modules?)?\W+"
    rf"((?:(?:{'|'.join(sorted(MODULES, reverse=True))})\b[^\w=;]*)+)"
)
# SimuMax: mla_rms_recompute, mlp_recompute=true
SWITCHED_MODULES: Final = re.compile(
    r"(?<![a-z])(?:[a-z]+[_-])+recompute\b(?!\s*[=:]\s*(?:false|0|no))"
)
# --decoder-first-pipeline-num-layers of Megatron Core; SimuMax: num_layers_in_first_pipeline_stage
END_LAYERS: Final = tuple(
    re.compile(
        rf"(?:num[_ -]layers[_ -]in[_ -]{end}[_ -]pipeline[_ -]stage"
        rf"|(?:decoder[_ -])?{end}[_ -]pipeline[_ -](?:stage[_ -])?num[_ -]layers)[ =:]*(\d+)"
    )
    for end in ("first", "last")
)
# Modalities: num_layers_per_stage; Megatron Core: --num-layers-per-virtual-pipeline-stage
LAYERS_A_STAGE: Final = re.compile(
    r"\bnum[ _-]layers[ _-]per[ _-](?:virtual[ _-])?(?:pipeline[ _-])?stage[ =:]*(\d+)"
)
# of a stage, in chunks of the method "block" (Megatron Core: --recompute-num-layers; NeMo's ACL in
# MLPerf; SimuMax: recompute_layer_num); "uniform" recomputes all of them
RECOMPUTED_LAYERS: Final = re.compile(
    r"\b(?:recompute|checkpoint)\w* (?:num layers|layers? num|layers)\b\W*(\d+)|\bacl\W+(\d+)"
)
BLOCK: Final = re.compile(
    r"\bacl\W+\d|(?<!each )(?<!every )(?<!per )(?<!fp8 )\bblock\b(?! (?:wise|scal))"
)
BLOCK_LAYERS: Final = re.compile(r"\bblock\W+(\d+)\b|\b(\d+) layers?\b")  # in a cell of its own
MESH: Final = re.compile(r"\bhsdp[ (=:]*(\d+) ?[x×*] ?(\d+)\b")
# tasks, suites and trainers after a model's name: "BERT-Large pretraining", "llama2_7b-deepspeed"
AROUND_MODEL: Final = re.compile(
    r"(?:[\s,(_-]+(?:mlperf|pre-?training|pretrain|phase[\s_-]?\d|fine-?tun(?:ing|e)"
    r"|continuetrain|container|pytorch|paddle|megatron|deepspeed|flagscale)\)?)+$",
    re.IGNORECASE,
)
VENDORS: Final = {
    "rocm": re.compile(r"\bmi\d{3}|instinct"),
    "gaudi": re.compile(r"gaudi|\bhl-?\d"),
    "xla": re.compile("tpu"),
}
ADAPTED: Final = re.compile(r"(?<![a-z])q?lora(?![a-z])")  # "llama2_70b_lora"
ROUNDED: Final = 0.15  # of a batch, that a source may round
ENDS: Final = "ends-as-layers"
# of accelerators on which Megatron-LM runs Transformer Engine's layers, its default since January
# 2024 (NVIDIA/Megatron-LM: megatron/training/arguments.py, --transformer-impl)
SINCE_2024: Final = frozenset({"Hopper", "Blackwell", "CDNA3", "CDNA4"})
UNHIDDEN: Final = re.compile(
    r"(?<![a-z_])overlap ?[=:]? ?(?:false|off|0\b)|\b(?:no|without) overlap\b"
)


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
    written = row
    row = _with_sharding(_with_adapters(with_layers_in_turn(row)))
    row = _with_kind_of_name(_of_suite(row))
    reading = with_patches(with_counts_in_words(Reading(row)))
    reading = _without_padding(_with_mode(reading))
    try:
        case = _case(reading)
    except InputError as error:
        raise Unpriceable(str(error)) from None
    others = []
    for cells in reading.also:
        with suppress(Unpriceable):
            others.append(case_of(replace(written, **cells)))
    return dataclasses.replace(case, others=tuple(others)) if others else case


def _with_adapters(row: Row) -> Row:
    """Return a row whose empty cell of adapters is what the trainer's name or other cells say."""
    if row.peft is None and (told := adapters_in(row)):
        stated = replace(row, peft=told)
        found = look_up(words_table().adapter, stated)
        return stated if found is not None and found.value != "none" else row
    if row.peft is None and "kinds of adapters" in terms_of(row, "framework"):
        row = replace(row, peft=row.framework)
    kind = look_up(words_table().adapter, row)
    if row.peft is None and kind is None and (named := ADAPTED.search(row.words("model"))):
        return replace(row, peft=named[0])
    return replace(row, peft=kind.value) if row.peft is None and kind is not None else row


def _with_sharding(row: Row) -> Row:
    """Return a row of Hugging Face's modules with the library that shards, which its notes name.

    A stage of ZeRO is DeepSpeed's, unless the row says FSDP. ms-swift takes a stage for DeepSpeed's
    itself, and FSDP for the first version, as accelerate does (``fsdp_version``); Qwen's scripts
    have a stage but on one card.
    """
    named, words = terms_of(row, "framework"), f"{row.words('notes')}; {row.words('offload')}"
    staged = row.zero_stage or {"zero 2", "zero 3"} & terms_of(row, ANYWHERE).keys()
    if {"deepspeed", "swift"} <= named.keys() and staged:
        return replace(row, framework=re.sub("(?i)deep ?speed", "", row.framework or ""))
    if "qwen" in named and not shards_nothing(row):
        stage = look_up(words_table().zero_stage, row)
        return row if stage is None or row.zero_stage else replace(row, zero_stage=stage.value)
    if "hugging face" not in named or {"deepspeed", "qwen", "mlperf"} & named.keys():
        return row
    fsdp = re.search("fsdp|full(y|_| )?shard", f"{row.words('framework')} {words}")
    if "swift" in named:
        first = fsdp and "fsdp2" not in terms_of(row, ANYWHERE)
        return replace(row, notes=f"{row.notes or ''}; fsdp1") if first else row
    said = vocabulary().read("notes", words).terms
    if fsdp or not {"deepspeed", "zero 2", "zero 3"} & said.keys():
        return row
    return replace(row, framework=f"{row.framework} with DeepSpeed")


# of torchao, whose runs in 8 bits are torchtitan's (pytorch/ao: benchmarks/float8/training)
ITS_OWN: Final = frozenset(
    {"torchao", "torch loop", "fsdp2", "zero 3", "compile", "tensorwise", "rowwise"}
)


def _of_suite(row: Row) -> Row:
    """Return a row of a suite of benchmarks with the model and the trainer of the case it names.

    The suite is no trainer: the notes or the model's cell may name it ("llama2_7b-deepspeed"), and
    of FlagPerf's own cases only those of Megatron cut a model. Nor is torchao, a library.
    """
    said = f"{row.words('model')} {row.words('notes')}"
    if "mlperf" in terms_of(row, "framework"):  # whose submissions differ by vendor
        vendor = next((word for word, gpu in VENDORS.items() if gpu.search(row.words("gpu"))), "")
        row = replace(row, framework=f"{row.framework} {vendor}".strip())
    library = "torchao" in terms_of(row, "framework")
    trainer = re.search("torchtitan|torchtune", row.words("notes"))
    eights = "fp8" in terms_of(row, "precision") and terms_of(row, "framework").keys() <= ITS_OWN
    if library and (trainer or eights):
        row = replace(row, framework=f"{row.framework} {trainer[0] if trainer else 'torchtitan'}")
    if row.model is not None and (model := AROUND_MODEL.sub("", row.model)):
        row = replace(row, model=model)
    own = look_up(words_table().suite_trainers, row)
    if own is not None:
        stated = re.search(r"\d", row.peft or "")
        peft = row.peft if stated else f"{row.peft} {own.adapters}"
        row = replace(row, framework=own.value, peft=peft)
    named = look_up(words_table().suite_models, row)
    if named is not None and row.words("model") == named.when["model"][0]:
        row = replace(row, model=named.value)
    if "flagperf" not in terms_of(row, "framework") or look_up(words_table().software, row):
        return row
    trainer = re.search("deepspeed|megatron|paddle|torchtitan", said)
    cuts = max(row.tensor_parallel or 1, row.pipeline_parallel or 1, row.expert_parallel or 1) > 1
    if trainer is None and not cuts and "aquila" not in said:
        return row
    return replace(row, framework=f"{row.framework} {trainer[0] if trainer else 'Megatron'}")


def _without_padding(reading: Reading) -> Reading:
    """Return the reading with full sequences in the place of samples whose padding is left out.

    A step computes as many tokens in fewer sequences; attention stays inside of a sample. Of packed
    samples the micro-batch counts sequences (mlcommons: training_results_v3.1, BATCHSIZE), the
    global batch samples.
    """
    row, entry = reading.row, look_up(words_table().samples_a_sequence, reading.row)
    if entry is None or entry.value == 1.0 or row.document_length or row.seq_len is None:
        return reading
    micro, batch = row.micro_batch_size, row.global_batch_size
    if micro and "packed samples" in terms_of(row, ANYWHERE):
        least = micro * (row.num_gpus or 1)
        batch = max(least, round(batch / entry.value / least) * least) if batch else None
    elif micro:
        fewer = max(1, round(micro / entry.value))
        batch = round(batch * fewer / micro) if batch else None
        micro = fewer
    elif batch:
        batch = max(1, round(batch / entry.value))
    length = round(row.seq_len / entry.value)
    told = f"sequences of {row.seq_len} tokens hold {entry.value} samples: no padding is computed"
    fuller = replace(row, micro_batch_size=micro, global_batch_size=batch, document_length=length)
    return Reading(fuller, [*reading.defaults, told])


def _with_mode(reading: Reading) -> Reading:
    """Return a row of InternEvo with ranks that no mode but ISP has as one of that mode.

    They share weights, or a sequence alone (internlm/initialize/launch.py, parallel.tensor.mode).
    Its weights are gathered as they are needed where ``overlap`` of parallel.weight is off
    (internlm/core/parallel/comm/isp.py, weight_hook).
    """
    row, terms = reading.row, terms_of(reading.row, ANYWHERE)
    if "internevo" not in terms_of(row, "framework"):
        return reading
    if "isp" in terms:
        waits = UNHIDDEN.search(row.words("notes"))
        notes = f"{row.notes}; overlap_comm=False" if waits else row.notes
        return Reading(replace(row, notes=notes), reading.defaults)
    weight = WEIGHT_RANKS.search(f"{row.words('framework')} {row.words('notes')}")
    others = {"sequence parallel", "plain tensor parallel"} & terms.keys()
    if (row.context_parallel or 1) > 1 or (weight and int(weight[1]) > 1 and not others):
        return Reading(replace(row, notes=f"{row.notes or ''}; isp"), reading.defaults)
    return reading


def _with_kind_of_name(row: Row) -> Row:
    """Return a row whose empty kind is that of a BERT, by which trainers differ."""
    if row.model_kind is None and re.search(r"(?<![a-z])bert(?![a-z])", row.words("model")):
        return replace(row, model_kind="encoder")
    return row


def _case(reading: Reading) -> Case:
    row = reading.row
    if row.not_priced is not None:
        raise Unpriceable(row.not_priced)
    reading.need("seq_len")
    if row.peft is not None and look_up(words_table().adapter, row) is None:
        reading.stand_in("peft", "LoRA", "none")
        row = replace(row, peft="lora")
        reading = Reading(row, reading.defaults, reading.also)
    cluster, cluster_key = cluster_of(reading)
    if cluster.accelerator.architecture == TPU and "xla" not in terms_of(row, "framework"):
        row = replace(row, framework=f"{row.framework or ''} xla".strip())  # all of its code
        reading = Reading(row, reading.defaults, reading.also)
    if terms_of(row, "framework").keys() == {"megatron"} and (
        cluster.accelerator.architecture in SINCE_2024
    ):
        row = replace(row, framework=f"{row.framework} 2024")
        reading.defaults.append("Megatron-LM since 2024 (default: undated)")
        reading = Reading(row, reading.defaults, reading.also)
    reading = _with_stage_of_offload(reading)
    row = reading.row
    trainer = trainer_of(row)
    note_trainer(reading)
    base, model_key = model_of(reading)
    plan, batch = _plan(reading, base, trainer, cluster.gpus_per_node)
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
    ends = workload.adapter != "none" and trained is not None and trained.value
    every = software.frozen.quantises_every_matrix
    model = _adapted(base, model_key, workload, every, first, ends)
    alone = look_up(words_table().trained_layers, row) if workload.adapter == "none" else None
    count = number_in(words_table().trained_layers_count, row) if alone else None
    if alone is not None:
        if count is None:
            count = alone.value
            reading.defaults.append(f"{count} trained layers (default: it is not given)")
        model = with_trained_layers(model, count, copies=alone.copies, ends=alone.ends)
    stages = _stages(reading, plan, model.num_layers)
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


def _with_stage_of_offload(reading: Reading) -> Reading:
    """Return a row whose weights are offloaded with the stage that shards them, if it gives none.

    One card has nothing to shard, and offloads under any stage.
    """
    row, entry = reading.row, look_up(words_table().offload, reading.row)
    if entry is None or not entry.value.startswith("weights"):
        return reading
    stage = look_up(words_table().zero_stage, row)
    if (stage is not None and stage.value == 3) or row.zero_stage == 3:
        return reading
    if row.zero_stage and (row.num_gpus or 1) > 1:
        return reading
    reading.defaults.append("zero_stage 3 (default: shards of the weights are offloaded)")
    return Reading(replace(row, zero_stage=3), reading.defaults, reading.also)


_MODELS: dict[tuple[str, str, int, str, str, bool, int, bool], ModelSpec] = {}


def _adapted(
    base: ModelSpec, key: str, workload: Workload, every: bool, first_layer: int, ends: bool
) -> ModelSpec:
    """Return the model with its adapters; cached, since equal keys are priced together."""
    trained = (workload.adapter, workload.adapter_rank, workload.adapter_targets)
    full = (key, *trained, workload.adapter_method, every, first_layer, ends)
    if full not in _MODELS:
        model = adapted(base, workload, quantises_every_matrix=every)
        model = with_trained_ends(model) if ends else model
        _MODELS[full] = without_adapters_before(model, first_layer) if first_layer else model
    return _MODELS[full]


def _plan(
    reading: Reading, model: ModelSpec, trainer: SoftwareEntry, gpus_per_node: int
) -> tuple[Plan, int]:
    row = reading.row
    num_gpus = reading.need("num_gpus")
    tensor = reading.value("tensor_parallel", *_usual_tensor(row, num_gpus, gpus_per_node))
    context = reading.value("context_parallel", 1, "none")
    mapped = takes_layers_in_turn(row)
    others = tensor * context * (row.data_parallel or 1)
    usual = (num_gpus // others, "layers over all cards") if mapped else (1, "none")
    pipeline = reading.value("pipeline_parallel", *usual)
    virtual = _virtual_stages(reading, model.num_layers, pipeline) if pipeline > 1 else 1
    method = _context_method(reading, context)
    if "isp" in terms_of(row, ANYWHERE):
        tensor, context, method = 1, context * tensor, "ulysses"
        if any(kind.attention.num_heads % context for kind in model.kinds):
            method = "ring"
            reading.defaults.append(f"ISP over {context} ranks: priced as ring (its sequence_2D)")
    ranks = tensor * pipeline * context
    if num_gpus % ranks:
        raise Unpriceable(f"{ranks} model-parallel ranks do not divide {num_gpus} accelerators")
    data = reading.value("data_parallel", num_gpus // ranks, "all that are left")
    if data * ranks != num_gpus:
        raise Unpriceable(f"{data} x {ranks} ranks for {num_gpus} accelerators")
    micro = row.get("micro_batch_size") or 1  # where it is empty: see ``micro_batch``
    batch = _batch(reading, micro * data, 1 if mapped else pipeline)
    batch = _whole_micro_batches(reading, batch, micro * data)
    if mapped:
        reading.defaults.append("one micro-batch at a time: priced as a step of one")
        batch = micro * data
    stage = _zero_stage(reading)
    offload = _offload(reading, stage, trainer)
    updates = look_up(words_table().optimizer, row)
    if stage and row.zero_stage is None and updates and updates.value in PROJECTED:
        stage = 0
        reading.defaults.append("zero_stage 0 (default: gradients of whole matrices are projected)")
    if offload.startswith("weights") and stage < 3:
        # whole weights compute below stage 3, whatever is offloaded (torch: SHARD_GRAD_OP with
        # CPUOffload; deepspeedai/DeepSpeed: runtime/zero/stage3.py alone reads offload_param)
        reading.defaults.append(f"offload of the optimizer: ZeRO stage {stage} has whole weights")
        offload = "optimizer+activations" if offload.endswith("activations") else "optimizer"
    alone = data * context == 1 and offload in ("none", "activations")
    recompute, layers = _recompute(reading, model, pipeline * virtual)
    if recompute.startswith("ops:") and offload.endswith("activations"):
        reading.defaults.append("recompute full (default: activations leave the device as a whole)")
        recompute = "full"
    experts = _expert_parallel(reading, model, tensor, data * context)
    shard = _shard_ranks(row, data, context, experts, gpus_per_node)
    sharded = stage > 0 and (shard or data) * context > 1
    return Plan(
        data_parallel=data,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_stages=virtual,
        pipeline_schedule=_schedule(row, pipeline, virtual),
        zero_stage=0 if alone else stage,
        sequence_parallel=_sequence_parallel(reading, tensor, trainer),
        recompute=recompute,
        recompute_layers=layers,
        micro_batch_size=micro,
        num_microbatches=batch // (micro * data),
        dp_replicate=data // shard if shard and data % shard == 0 and sharded else 1,
        context_parallel=context,
        context_parallel_method=method,
        expert_parallel=experts,
        expert_tensor_parallel=_cuts_experts(row, tensor, experts),
        offload=offload,
    ), batch


def _virtual_stages(reading: Reading, num_layers: int, pipeline: int) -> int:
    """Return the stages of a pipeline rank: given, or of the layers of a stage that notes give.

    Where embedding and head count as a layer each, they take part (Modalities/modalities:
    models/parallelism/stages_generator.py, get_stages).
    """
    row, ends = reading.row, look_up(words_table().stages, reading.row)
    if found := LAYERS_A_STAGE.search(row.words("notes")):
        counted = num_layers + (2 if ends is not None and ends.add == ENDS else 0)
        stages = -(-counted // max(1, int(found[1])))
        if stages % pipeline == 0:
            why = f"{found[1]} layers a stage"
            return int(reading.value("virtual_stages", stages // pipeline, why))
    return int(reading.value("virtual_stages", 1, "none"))


def _usual_tensor(row: Row, num_gpus: int, gpus_per_node: int) -> tuple[int, str]:
    """Return the tensor-parallel ranks of a row that gives no kind of ranks, and why.

    Where a step has fewer micro-batches than accelerators, several work on each of them, of a
    trainer that cuts models.
    """
    stated = (row.pipeline_parallel, row.context_parallel, row.expert_parallel, row.data_parallel)
    least = num_gpus * (row.micro_batch_size or 1)
    cuts = {"megatron", "megatron core", "mlperf", "nemo", "xla"} & terms_of(
        row, "framework"
    ).keys()
    if not cuts or row.global_batch_size is None or any(size is not None for size in stated):
        return 1, "none"
    needed, rest = divmod(least, row.global_batch_size)
    if rest or not 1 < needed <= max(GPUS_A_NODE, gpus_per_node) or num_gpus % needed:
        return 1, "none"
    return needed, "more accelerators than sequences"


def _schedule(row: Row, pipeline: int, virtual: int) -> Schedule:
    """Return the schedule that a row names, for ranks with one stage each."""
    named = look_up(words_table().schedules, row) if pipeline > 1 else None
    if virtual > 1:
        return "interleaved_1f1b"
    return "1f1b" if named is None else named.value


def takes_layers_in_turn(row: Row) -> bool:
    """Whether the cards hold layers and take turns: Hugging Face's ``device_map``.

    accelerate moves the activations of one micro-batch from card to card (accelerate/hooks.py,
    AlignDevicesHook), and no other starts before it is done: memory and seconds are those of a
    pipeline of one micro-batch.
    """
    return "device map" in terms_of(row, ANYWHERE) and not row.zero_stage


def _shard_ranks(row: Row, data: int, context: int, experts: int, gpus_per_node: int) -> int | None:
    """Return the data ranks of a sharding group, if the row says which; None: all of them.

    MaxText's expert ranks are an axis of their mesh next to that of FSDP, and weights are sharded
    over both (AI-Hypercomputer/maxtext: configs/base.yml, logical_axis_rules of embed and exp).
    InternEvo's weight-parallel ranks are those of its sequence, and as many data ranks as it takes
    (internlm/core/parallel/comm/isp.py).
    """
    if row.dp_shard is not None:
        axes = experts if "maxtext" in terms_of(row, "framework") else 1
        return min(data, row.dp_shard * axes)
    words = f"{row.words('framework')} {row.words('notes')}"
    weight = WEIGHT_RANKS.search(words)
    if weight and "isp" in terms_of(row, ANYWHERE):
        return max(1, int(weight[1]) // context)
    states = STATE_RANKS.search(words)
    if states and "internevo" in terms_of(row, "framework") and int(states[1]) > 0:
        return int(states[1])
    if look_up(words_table().sharding, row) is None:
        return None
    mesh = MESH.search(words)  # replicas x shards, as torch's; a factor of a node is the shards
    sizes = [int(size) for size in mesh.groups()] if mesh else []
    if len(sizes) == 2 and sizes[0] * sizes[1] == data and gpus_per_node not in sizes:
        return sizes[1]
    return gpus_per_node


def _context_method(reading: Reading, context: int) -> ContextMethod:
    """Return how context-parallel ranks share a sequence: as the row says, else as the trainer."""
    entry = look_up(words_table().context_parallelism, reading.row)
    method: ContextMethod = entry.value if entry else "ring"
    if context > 1 and (entry is None or ANYWHERE not in entry.when):
        reading.defaults.append(f"context parallelism by {method} (default: it is not given)")
    return method if context > 1 else "ring"


def _expert_parallel(reading: Reading, model: ModelSpec, tensor: int, ranks: int) -> int:
    """Return the ranks that share experts: as given, else of some trainers those of a node."""
    entry = look_up(words_table().expert_parallelism, reading.row)
    if not model.has_experts or entry is None or not entry.value:
        return reading.row.get("expert_parallel") or 1
    experts = gcd(ranks, *(kind.feed_forward.num_experts for kind in model.kinds))
    node = max(1, (reading.row.get("gpus_per_node") or GPUS_A_NODE) // tensor)
    most = max(size for size in range(1, experts + 1) if experts % size == 0 and size <= node)
    return int(reading.value("expert_parallel", most, "as many ranks of a node as divide experts"))


def _cuts_experts(row: Row, tensor: int, experts: int) -> bool:
    """Whether experts are sharded over tensor-parallel ranks."""
    cut = row.expert_tensor_parallel
    if cut not in (None, 1, tensor):
        raise Unpriceable(f"experts cut over {cut} of {tensor} tensor-parallel ranks")
    return tensor == 1 or experts == 1 or cut == tensor


def _stages(reading: Reading, plan: Plan, num_layers: int) -> tuple[tuple[int, int], ...] | None:
    """Return the layers [first, last) of every stage if the row gives uneven stages.

    Numbers that add up to two more than the layers count embedding and head as a layer each. So
    does a trainer that has one or two stages more than layers: the last stage is then the head
    alone, and the first one the embedding (Megatron Core, account_for_loss_in_pipeline_split and
    account_for_embedding_in_pipeline_split; arXiv:2407.21783, sec. 3.3.2).
    """
    row = reading.row
    if (ends := _layers_of_ends(row, plan, num_layers)) is not None:
        reading.defaults.append(f"layers of the stages: {', '.join(map(str, ends))}")
        row = replace(row, layers_by_stage=",".join(map(str, ends)))
    if row.layers_by_stage is None:
        alone = plan.num_stages - num_layers
        if alone not in (1, 2):
            return None
        reading.defaults.append("embedding and head count as layers: they are stages of their own")
        filled = tuple((layer, layer + 1) for layer in range(num_layers))
        return ((0, 0),) * (alone - 1) + filled + ((num_layers, num_layers),)
    given = [int(number) for number in re.findall(r"\d+", row.layers_by_stage)]
    if len(given) == plan.num_stages and sum(given) == num_layers + 2 and min(given) > 0:
        given[0] -= 1
        given[-1] -= 1
    ends = list(accumulate(given, initial=0))
    if len(given) != plan.num_stages or ends[-1] != num_layers or 0 in given[1:-1]:
        raise Unpriceable(
            f"layers_by_stage {row.layers_by_stage!r} (must be {plan.num_stages} numbers that "
            f"add up to {num_layers} layers, or to {num_layers + 2} with embedding and head)"
        )
    return tuple(pairwise(ends))


def _layers_of_ends(row: Row, plan: Plan, num_layers: int) -> list[int] | None:
    """Return the layers of every stage where the notes give those of the first or last one.

    The stages between share the others evenly (NVIDIA/Megatron-LM: megatron/core/transformer/
    transformer_block.py, get_num_layers_to_build).
    """
    words = row.words("notes")
    first, last = ([int(n) for n in pattern.findall(words)[:1]] for pattern in END_LAYERS)
    between = plan.num_stages - len(first + last)
    rest = num_layers - sum(first + last)
    if row.layers_by_stage or not first + last or between < 1 or rest < between or rest % between:
        return None
    return first + [rest // between] * between + last


def _zero_stage(reading: Reading) -> int:
    entry = look_up(words_table().zero_stage, reading.row)
    if entry and entry.usual:
        return int(reading.value("zero_stage", entry.value, "of most runs with that engine"))
    if entry and (entry.always or reading.row.zero_stage is None):
        return entry.value
    return int(reading.value("zero_stage", 0, "of that trainer"))


def _batch(reading: Reading, least: int, pipeline: int) -> int:
    """Return sequences per step: given, or one micro-batch for each data rank and pipeline rank.

    With fewer, some stages never run at the same time, and torch's schedules refuse them.
    """
    if (many := accumulation(reading.row)) is not None:
        return int(reading.value("global_batch_size", least * many, "as the notes say"))
    why = "one micro-batch for each data rank"
    if pipeline > 1:
        why = "a micro-batch for each pipeline rank of each data rank"
    return int(reading.value("global_batch_size", least * pipeline, why))


def _whole_micro_batches(reading: Reading, batch: int, least: int) -> int:
    """Return the multiple of ``least`` next to a batch, which a source may round or give in tokens.

    Where none is near, the row describes no run.
    """
    nearest = max(1, round(batch / least)) * least
    if abs(nearest - batch) > ROUNDED * batch:
        raise Unpriceable(f"a batch of {batch} is not near a multiple of {least} (micro x data)")
    if nearest != batch:
        reading.defaults.append(f"global_batch_size {nearest}: {batch} is no multiple of {least}")
    return nearest


def _sequence_parallel(reading: Reading, tensor: int, trainer: SoftwareEntry) -> bool:
    if tensor == 1:
        return False
    entry = look_up(words_table().sequence_parallelism, reading.row)
    if entry is not None:
        why = "of that trainer" if entry.usual else "as the row's words say"
        return bool(reading.value("sequence_parallel", entry.value, why))
    if trainer.without_sequence_parallel:
        return bool(reading.value("sequence_parallel", False, "this trainer has none"))
    return bool(reading.value("sequence_parallel", True, "with tensor parallelism"))


def _recompute(reading: Reading, model: ModelSpec, stages: int) -> tuple[Any, int]:
    """Return the recompute setting and the recomputed layers of a stage (0: all)."""
    row = reading.row
    entry = look_up(words_table().recompute, row)
    if setting := _modules(row):
        return setting, 0
    share = _share_of_layers(row)
    if entry is None and row.recompute is not None and share is None:
        reading.stand_in("recompute", "none", "full")
    usual = "none" if share is None else "full"  # "every 3rd layer"
    word = entry.value if entry else usual
    if entry and entry.full_from is not None and model.num_parameters >= entry.full_from:
        word = "full"
    if entry is None and row.recompute is None and share is None:
        reading.value("recompute", "none", "not given")
    first = row.recompute_layers
    if first is None and (first := _recomputed_layers(row)) is not None and word == "full":
        reading.defaults.append(f"recompute of {first} layers of each stage")
    if first is not None and word == "full":
        if not first:
            return "none", 0
        # the first n of each (virtual) stage: all of them where it has no more
        # (NVIDIA/Megatron-LM: core/transformer/transformer_block.py, _checkpointed_forward)
        return "full", 0 if first >= -(-model.num_layers // stages) else first
    if share is None:
        share = entry.layers if entry else None
    if share is None or word == "none":
        return word, 0
    if share in (0.0, 1.0):
        return ("full" if share else "none"), 0
    reading.defaults.append(f"recompute of {share:.3g} of the layers")
    return "full", max(1, round(share * model.num_layers / stages))


def _recomputed_layers(row: Row) -> int | None:
    """Return the layers of a stage that the method "block" recomputes; None if nothing says so."""
    cell, notes = (spaced(row.words(column)) for column in ("recompute", "notes"))
    said = f"{cell}; {notes}"
    if not BLOCK.search(said) or "uniform" in said or _share_of_layers(row) is not None:
        return None
    found = RECOMPUTED_LAYERS.search(said)
    if found is None and BLOCK.search(cell):
        found = BLOCK_LAYERS.search(cell)
    return None if found is None else int(found[1] or found[2])


def _share_of_layers(row: Row) -> float | None:
    """Return the share in "every 3rd layer", "2 of 5 layers" and the like; None without one."""
    found = SHARE.search(row.words("recompute"))
    if row.recompute is None:
        found = NOTED_SHARE.search(row.words("notes"))
    if found is None:
        return None
    if found["share"]:
        return float(found["percent"]) / 100.0 if found["percent"] else float(found["share"])
    counts = found.groupdict("1")
    part = int(counts.get("part", 1))
    whole = prod(int(counts.get(name, 1)) for name in ("whole", "every", "freq"))
    return part / whole if 0 < part <= whole else None


def _modules(row: Row) -> str | None:
    """Return the setting of the modules that a row names, as ``--recompute`` takes it."""
    text = row.words("recompute")
    if ":" in text and (text in RECOMPUTE or text.startswith(PREFIX)):
        return read_setting(text)
    terms = terms_of(row, "recompute")
    if "full" in terms or "none" in terms:
        return None
    if noted := NOTED_MODULES.search(row.words("notes")):
        return read_setting(PREFIX + "+".join(re.findall(r"\w+", noted[1])))
    switches = "; ".join(SWITCHED_MODULES.findall(row.words("notes")))
    terms = {**terms, **vocabulary().read("recompute", switches).terms}
    named = [module for module in MODULES if f"module {module}" in terms]
    return read_setting(PREFIX + "+".join(named)) if named else None


def _offload(reading: Reading, stage: int, trainer: SoftwareEntry) -> Offload:
    """Return what a row offloads: what it names, or what the stage shards ("CPU offload").

    Left out: ``cpu_offloading`` of Megatron Core, which is of activations.
    """
    row, table = reading.row, words_table()
    entry = look_up(table.offload, row)
    said = terms_of(row, "framework").keys() | terms_of(row, "notes").keys()
    if entry is None and row.offload is None and "offloads to host" in said:
        shards = profile_of_trainer(trainer)[0].sharding.largest_zero_stage > 1
        row = replace(row, offload="cpu") if shards or DEEPSPEED in trainer.profile else row
    if entry is None and not vocabulary().read("offload", row.words("offload")).rest:
        entry = look_up(table.host_offload, replace(row, zero_stage=stage))
    if entry is None and row.offload is not None:
        reading.stand_in("offload", "none", "optimizer", "activations")
    return entry.value if entry else "none"
