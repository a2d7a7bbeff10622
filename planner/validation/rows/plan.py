"""The plan of a row: its ranks, batch, schedule, sharding and offload."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, Final

from msgspec.structs import replace

from cost_models.model.spec import ModelSpec
from cost_models.partition.schedules import V_SHAPED
from cost_models.plan.plan import ContextMethod, Offload, Plan, Schedule
from cost_models.plan.workload import PROJECTED
from planner.validation.rows.counts import STATE_RANKS, WEIGHT_RANKS, accumulation
from planner.validation.rows.reading import Reading, Unpriceable
from planner.validation.rows.recompute import recompute_of
from planner.validation.rows.runs_file import Row
from planner.validation.rows.trainer import DEEPSPEED, profile_of_trainer
from planner.validation.rows.vocabulary import ANYWHERE, terms_of, vocabulary
from planner.validation.rows.words import SoftwareEntry, look_up, words_table

GPUS_A_NODE: Final = 8
OF_SEVERAL_STAGES: Final = (*V_SHAPED, "interleaved_zero_bubble")
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
# NeMo, Megatron Core: cpu_offloading_num_layers, activation_offload_layers
OFFLOADED_LAYERS: Final = re.compile(r"layers[ =:]+(\d+)|\b(\d+) (?:of (?:the )?\d+ )?layers?\b")
MESH: Final = re.compile(r"\bhsdp[ (=:]*(\d+) ?[x×*] ?(\d+)\b")
# NPROC_PER_NODE=2 next to four visible cards (modelscope/ms-swift: swift/cli/main.py, use_torchrun)
PROCESSES: Final = re.compile(r"\bnproc[ _]per[ _]node[ =:]*(\d+)|\b(\d+) process(?:es)?\b")
WITHOUT_ACTIVATIONS: Final[dict[Offload, Offload]] = {
    "activations": "none",
    "optimizer+activations": "optimizer",
    "weights+activations": "weights",
}
ROUNDED: Final = 0.15  # of a batch, that a source may round
ENDS: Final = "ends-as-layers"


def plan_of(
    reading: Reading, model: ModelSpec, trainer: SoftwareEntry, gpus_per_node: int
) -> tuple[Plan, int]:
    """Return the plan of a row, and the sequences of a step."""
    row = reading.row
    num_gpus = reading.need("num_gpus")
    tensor, context, pipeline = _model_parallel_ranks(reading, num_gpus, gpus_per_node)
    virtual = _virtual_stages(reading, model.num_layers, pipeline) if pipeline > 1 else 1
    tensor, context, method = _ranks_of_a_sequence(reading, model, tensor, context)
    data = _data_ranks(reading, num_gpus, tensor * pipeline * context)
    micro = row.get("micro_batch_size") or 1  # where it is empty: see ``micro_batch``
    batch = _batch(reading, micro * data, pipeline)
    stage, offload = _sharding_and_offload(reading, model, trainer)
    moved = offload not in ("none", "activations")
    alone = data * context == 1 and not moved
    recompute, layers = _recomputed(reading, model, pipeline * virtual, offload)
    experts = _expert_parallel(reading, model, tensor, data * context)
    shard = _shard_ranks(row, data, experts, gpus_per_node)
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
        dp_replicate=_replicas(row, data, context, shard) if sharded else 1,
        context_parallel=context,
        context_parallel_method=method,
        expert_parallel=experts,
        expert_tensor_parallel=_cuts_experts(row, tensor, experts),
        offload=offload,
        offload_device="nvme" if moved and "nvme" in terms_of(row, ANYWHERE) else "cpu",
    ), batch


def _model_parallel_ranks(
    reading: Reading, num_gpus: int, gpus_per_node: int
) -> tuple[int, int, int]:
    """Return the tensor-, context- and pipeline-parallel ranks."""
    row = reading.row
    tensor = reading.value("tensor_parallel", *_usual_tensor(row, num_gpus, gpus_per_node))
    context = reading.value("context_parallel", 1, "none")
    others = tensor * context * (row.data_parallel or _processes(row))
    usual = (1, "none")
    if takes_layers_in_turn(row):
        usual = (max(1, num_gpus // others), "layers over all cards")
    return tensor, context, reading.value("pipeline_parallel", *usual)


def _ranks_of_a_sequence(
    reading: Reading, model: ModelSpec, tensor: int, context: int
) -> tuple[int, int, ContextMethod]:
    """Return tensor- and context-parallel ranks, and how the latter share a sequence."""
    method = _context_method(reading, context)
    if "isp" in terms_of(reading.row, ANYWHERE):
        tensor, context, method = 1, max(context, tensor), "ulysses"  # one group of ranks
    if method == "ulysses" and any(k.attention.num_heads % (tensor * context) for k in model.kinds):
        # Ulysses over what divides the heads, rings of these (modelscope/ms-swift: swift/trainers/
        # sequence_parallel; InternLM/InternEvo: sequence_2D)
        method = "ring"
        reading.defaults.append(f"{context} ranks do not divide the heads: priced as ring")
    return tensor, context, method


def _data_ranks(reading: Reading, num_gpus: int, ranks: int) -> int:
    """Return the data-parallel ranks beside those of model parallelism."""
    if num_gpus % ranks:
        raise Unpriceable(f"{ranks} model-parallel ranks do not divide {num_gpus} accelerators")
    data = int(reading.value("data_parallel", num_gpus // ranks, "all that are left"))
    if data * ranks != num_gpus:
        raise Unpriceable(f"{data} x {ranks} ranks for {num_gpus} accelerators")
    return data


def _sharding_and_offload(
    reading: Reading, model: ModelSpec, trainer: SoftwareEntry
) -> tuple[int, Offload]:
    """Return the ZeRO stage, and what lives on the host."""
    stage = _zero_stage(reading)
    offload = _offload(reading, model.num_layers, stage, trainer)
    updates = look_up(words_table().optimizer, reading.row)
    if stage and reading.row.zero_stage is None and updates and updates.value in PROJECTED:
        stage = 0
        reading.defaults.append("zero_stage 0 (default: gradients of whole matrices are projected)")
    if offload.startswith("weights") and stage < 3:
        # whole weights compute below stage 3, whatever is offloaded (torch: SHARD_GRAD_OP with
        # CPUOffload; deepspeedai/DeepSpeed: runtime/zero/stage3.py alone reads offload_param)
        reading.defaults.append(f"offload of the optimizer: ZeRO stage {stage} has whole weights")
        offload = "optimizer+activations" if offload.endswith("activations") else "optimizer"
    return stage, offload


def _recomputed(
    reading: Reading, model: ModelSpec, stages: int, offload: Offload
) -> tuple[Any, int]:
    """Return what is recomputed, of what two stacks or offloaded activations allow."""
    recompute, layers = recompute_of(reading, model, stages)
    if model.bridge and recompute not in ("none", "selective", "full"):
        reading.defaults.append(f"recompute selective: {recompute} is not priced of two stacks")
        recompute = "selective"
    if recompute.startswith(("ops:", "selective_ops")) and offload.endswith("activations"):
        reading.defaults.append("recompute full (default: activations leave the device as a whole)")
        recompute = "full"
    return recompute, layers


def _virtual_stages(reading: Reading, num_layers: int, pipeline: int) -> int:
    """Return the stages of a pipeline rank: given, of the layers of a stage, or the trainer's own.

    Where embedding and head count as a layer each, they are counted too (Modalities/modalities:
    models/parallelism/stages_generator.py, get_stages).
    """
    row, ends = reading.row, look_up(words_table().stages, reading.row)
    named = _named_schedule(row)
    if named in OF_SEVERAL_STAGES and row.virtual_stages in (None, 1):
        reading.defaults.append(f"virtual_stages 2 (default: those of {named})")
        return 2
    counted = num_layers + (2 if ends is not None and ends.add == ENDS else 0)
    if found := LAYERS_A_STAGE.search(row.words("notes")):
        stages = -(-counted // max(1, int(found[1])))
        if stages % pipeline == 0:
            why = f"{found[1]} layers a stage"
            return int(reading.value("virtual_stages", stages // pipeline, why))
    usual = look_up(words_table().usual_stages, row)
    if usual is None:
        return int(reading.value("virtual_stages", 1, "none"))
    most = max(v for v in range(1, usual.value + 1) if v == 1 or counted % (pipeline * v) == 0)
    return int(reading.value("virtual_stages", most, "those of that trainer's configurations"))


def _usual_tensor(row: Row, num_gpus: int, gpus_per_node: int) -> tuple[int, str]:
    """Return the tensor-parallel ranks of a row that gives no kind of ranks, and why.

    Where a step of a trainer with tensor parallelism has fewer micro-batches than accelerators,
    several accelerators work on each micro-batch.
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
    """Return the schedule that a row names; of ranks with several stages few."""
    named = _named_schedule(row) if pipeline > 1 else "1f1b"
    if named in V_SHAPED:
        return named if virtual == 2 else "interleaved_1f1b"
    return "interleaved_1f1b" if virtual > 1 and named not in OF_SEVERAL_STAGES else named


def _named_schedule(row: Row) -> Schedule:
    named = look_up(words_table().schedules, row)
    return "1f1b" if named is None else named.value


def takes_layers_in_turn(row: Row) -> bool:
    """Whether the cards hold layers and take turns: Hugging Face's ``device_map``.

    accelerate moves the activations of one micro-batch from card to card (accelerate/hooks.py,
    AlignDevicesHook), and no other starts before it is done: memory and seconds are those of a
    pipeline of one micro-batch.
    """
    return "device map" in terms_of(row, ANYWHERE) and not row.zero_stage


def _processes(row: Row) -> int:
    """Return the processes, two if unsaid, whose models lie on several cards each: DDP of those."""
    if not (takes_layers_in_turn(row) and "ddp" in terms_of(row, ANYWHERE)):
        return 1
    stated = PROCESSES.search(row.words("notes"))
    return int(stated[1] or stated[2]) if stated else 2


def _replicas(row: Row, data: int, context: int, shard: int | None) -> int:
    """Return the replicas of the shards of weights.

    InternEvo's weight-parallel ranks are a group of their own: fewer than those that share a
    sequence, or several times these (internlm/core/context/process_group_initializer.py, wp).
    """
    weight = WEIGHT_RANKS.search(f"{row.words('framework')} {row.words('notes')}")
    if weight and "isp" in terms_of(row, ANYWHERE):
        ranks = max(1, int(weight[1]))
        return data * context // ranks if data * context % ranks == 0 else 1
    return data // shard if shard and data % shard == 0 else 1


def _shard_ranks(row: Row, data: int, experts: int, gpus_per_node: int) -> int | None:
    """Return the data ranks of a sharding group, if the row says which; None: all of them.

    MaxText's expert ranks are an axis of their mesh next to that of FSDP, and weights are sharded
    over both (AI-Hypercomputer/maxtext: configs/base.yml, logical_axis_rules of embed and exp).
    """
    if row.dp_shard is not None:
        axes = experts if "maxtext" in terms_of(row, "framework") else 1
        return min(data, row.dp_shard * axes)
    words = f"{row.words('framework')} {row.words('notes')}"
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
    """Return the ranks that share experts: as given, else of some trainers.

    Those of a node, unless the trainer's own configuration says how many.
    """
    entry = look_up(words_table().expert_parallelism, reading.row)
    if not model.has_experts or entry is None or not entry.value:
        return reading.row.get("expert_parallel") or 1
    experts = gcd(ranks, *(kind.feed_forward.num_experts for kind in model.kinds))
    if entry.ranks is not None:
        return int(reading.value("expert_parallel", gcd(experts, entry.ranks), "of that trainer"))
    node = max(1, (reading.row.get("gpus_per_node") or GPUS_A_NODE) // tensor)
    most = max(size for size in range(1, experts + 1) if experts % size == 0 and size <= node)
    return int(reading.value("expert_parallel", most, "as many ranks of a node as divide experts"))


def _cuts_experts(row: Row, tensor: int, experts: int) -> bool:
    """Whether experts are sharded over tensor-parallel ranks."""
    cut = row.expert_tensor_parallel
    if cut not in (None, 1, tensor):
        raise Unpriceable(f"experts cut over {cut} of {tensor} tensor-parallel ranks")
    return tensor == 1 or experts == 1 or cut == tensor


def stages_of(reading: Reading, plan: Plan, num_layers: int) -> tuple[tuple[int, int], ...] | None:
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
    """Return sequences per step: ``least`` where layers take turns, else whole micro-batches."""
    in_turn = takes_layers_in_turn(reading.row)
    stated = _stated_batch(reading, least, 1 if in_turn else pipeline)
    batch = _whole_micro_batches(reading, stated, least)
    if in_turn:
        reading.defaults.append("one micro-batch at a time: priced as a step of one")
        batch = least
    return batch


def _stated_batch(reading: Reading, least: int, pipeline: int) -> int:
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


def _offload(reading: Reading, layers: int, stage: int, trainer: SoftwareEntry) -> Offload:
    """Return what a row offloads: what it names, or what the stage shards ("CPU offload").

    Activations of less than half of the layers count as none, and of more as all. Left out:
    ``cpu_offloading`` of Megatron Core, which is of activations.
    """
    row, table = reading.row, words_table()
    entry = look_up(table.offload, row)
    said = terms_of(row, "framework").keys() | terms_of(row, "notes").keys()
    if (
        entry is None
        and row.offload is None
        and "offloads to host" in said
        and "not offloads all" not in said
    ):
        shards = profile_of_trainer(trainer)[0].sharding.largest_zero_stage > 1
        row = replace(row, offload="cpu") if shards or DEEPSPEED in trainer.profile else row
    if entry is None and not vocabulary().read("offload", row.words("offload")).rest:
        entry = look_up(table.host_offload, replace(row, zero_stage=stage))
    if entry is None and row.offload is not None:
        reading.stand_in("offload", "none", "optimizer", "activations")
    offload = entry.value if entry else "none"
    found = OFFLOADED_LAYERS.search(row.words("offload"))
    few = int(found[1] or found[2]) if found else layers
    if few >= layers or not offload.endswith("activations"):
        return offload
    others = WITHOUT_ACTIVATIONS[offload]
    taken, other = (others, offload) if 2 * few < layers else (offload, others)
    told = f"activations of {few} of {layers} layers are offloaded: priced as {taken}"
    reading.defaults.append(told)
    reading.also.append({"offload": other})
    return taken
