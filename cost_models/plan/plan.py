"""Layout of a job on the accelerators: one plan, or a table of plans (one array a field).

The ranks form a grid (pipeline_parallel, dp_replicate, dp_shard, context_parallel,
tensor_parallel), the last axis fastest: tensor-parallel neighbours are the nearest, pipeline stages
the farthest. The methods of the table import numpy, so that the declarations of a plan, which help
and completion read, do without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, Literal, TypeVar, get_args

from msgspec import Meta

from cost_models.plan.recompute import RECOMPUTE, SHOWN, read_setting
from hardware_profiles.errors import InputError
from hardware_profiles.options import Option, declared, read_fields

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[Any]

Schedule = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "zero_bubble",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
]
ContextMethod = Literal["ring", "ulysses", "allgather"]
# weights: gradients and the optimizer go with them
Offload = Literal[
    "none", "optimizer", "activations", "optimizer+activations", "weights", "weights+activations"
]
OffloadDevice = Literal["cpu", "nvme"]
Count = Annotated[int, Meta(ge=1, le=10**6)]
Layers = Annotated[int, Meta(ge=0, le=10**6)]
SEARCHED_RECOMPUTE: Final = ("none", "selective", "full")
ENDS: Final = 2  # stages that layers are no part of: the embedding, the head
SCHEDULES: Final[tuple[str, ...]] = get_args(Schedule)
GPIPE, ONE_F_ONE_B = (SCHEDULES.index(name) for name in ("gpipe", "1f1b"))
CONTEXT_METHODS: Final[tuple[str, ...]] = get_args(ContextMethod)
OFFLOADS: Final[tuple[str, ...]] = get_args(Offload)
OFFLOAD_DEVICES: Final[tuple[str, ...]] = get_args(OffloadDevice)
NVME: Final = OFFLOAD_DEVICES.index("nvme")  # code of the column ``offload_device``
# groups of options, in the order in which a command names them
PARALLELISM, MEMORY, TRAINING = "parallelism", "memory", "training"
Value = TypeVar("Value", int, Any)
GROUPS: Final = (PARALLELISM, MEMORY, TRAINING)


class Ranks(Generic[Value]):
    """Groups of ranks that follow from the fields of a plan, or from the columns of a table."""

    __slots__ = ()
    data_parallel: Value
    dp_replicate: Value
    context_parallel: Value
    tensor_parallel: Value
    pipeline_parallel: Value
    virtual_stages: Value
    expert_parallel: Value
    expert_tensor_parallel: Value
    micro_batch_size: Value
    num_microbatches: Value

    @property
    def dp_shard(self) -> Value:
        """Data ranks over which ZeRO shards; data_parallel = dp_replicate x dp_shard."""
        return self.data_parallel // self.dp_replicate

    @property
    def shard_ranks(self) -> Value:
        """Ranks over which ZeRO shards: those that share tokens share the weights too."""
        return self.data_parallel * self.context_parallel // self.dp_replicate

    @property
    def expert_tensor(self) -> Value:
        """Ranks over which each expert's matrices are cut."""
        return 1 + (self.tensor_parallel - 1) * self.expert_tensor_parallel

    @property
    def expert_ranks(self) -> Value:
        """Ranks of a copy of the model's stage over which whole experts can be distributed."""
        return self.shard_ranks * (self.tensor_parallel // self.expert_tensor)

    @property
    def expert_shard_ranks(self) -> Value:
        """Ranks with the same experts, over which ZeRO shards them."""
        return self.expert_ranks // self.expert_parallel

    @property
    def world_size(self) -> Value:
        """Ranks that a plan uses."""
        ranks = self.data_parallel * self.context_parallel * self.tensor_parallel
        return ranks * self.pipeline_parallel

    @property
    def global_batch_size(self) -> Value:
        """Sequences of one optimizer step."""
        return self.micro_batch_size * self.num_microbatches * self.data_parallel

    @property
    def num_stages(self) -> Value:
        """Pipeline stages, virtual ones counted."""
        return self.pipeline_parallel * self.virtual_stages

    @property
    def cuts(self) -> tuple[Value, Value, Value]:
        """Ranks over which matrices are cut, those of experts are cut, experts are shared."""
        return self.tensor_parallel, self.expert_tensor, self.expert_parallel

    @property
    def experts_apart(self) -> Any:
        """Whether experts are sharded in another way than all other weights."""
        return (self.expert_parallel > 1) | (self.expert_tensor < self.tensor_parallel)

    @property
    def offloads_optimizer(self) -> Any:
        """Whether the optimizer's states are off the accelerator."""
        return self._offloads("optimizer") | self.offloads_weights

    @property
    def offloads_weights(self) -> Any:
        """Whether the shards of weights and gradients are off the accelerator."""
        return self._offloads("weights")

    @property
    def offloads_activations(self) -> Any:
        """Whether saved activations live in host memory."""
        return self._offloads("activations")

    def _offloads(self, what: str) -> Any:
        """Whether something is off the accelerator."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Plan(Ranks[int]):
    """One layout of a job.

    A field is the one declaration of its option (see ``hardware_profiles.options``).
    """

    data_parallel: Annotated[
        Count,
        Option(
            "--dp",
            short="dp",
            common=True,
            help="data-parallel ranks (default: all that are left)",
            elsewhere=("data_parallel_size", "dp_size"),
            group=PARALLELISM,
            pasted="always",
            default="the remaining accelerators",
        ),
    ] = 1
    tensor_parallel: Annotated[
        Count,
        Option(
            "--tp",
            short="tp",
            common=True,
            help="tensor-parallel ranks",
            elsewhere=("tensor_parallel_size", "tensor_model_parallel_size", "tp_size"),
            group=PARALLELISM,
        ),
    ] = 1
    pipeline_parallel: Annotated[
        Count,
        Option(
            "--pp",
            short="pp",
            common=True,
            help="pipeline ranks",
            elsewhere=("pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size"),
            group=PARALLELISM,
        ),
    ] = 1
    virtual_stages: Annotated[
        Count,
        Option(
            short="vp",
            help="stages on each pipeline rank",
            group=PARALLELISM,
            of="pipeline_schedule",
            default="2 if the schedule needs several, else 1",
            why="zbv and dualpipev have exactly 2",
        ),
    ] = 1
    pipeline_schedule: Annotated[
        Schedule,
        Option(
            "--schedule",
            short="schedule",
            help="pipeline schedule: {values}",
            group=PARALLELISM,
            of="pipeline_parallel",
            pasted="always",
            default="1f1b; interleaved_1f1b with virtual stages",
        ),
    ] = "1f1b"
    zero_stage: Annotated[
        int,
        Meta(ge=0, le=3),
        Option(
            "--zero",
            short="zero",
            common=True,
            help="ZeRO stage, 0 to 3; 3 shards weights as FSDP does",
            elsewhere=("fsdp=3", "fsdp2=3", "full_shard=3", "ddp=0", "sharding", "stage"),
            group=MEMORY,
            pasted="always",
            default="3, or 0 with one data-parallel rank",
            why="everything is sharded",
        ),
    ] = 0
    sequence_parallel: Annotated[
        bool,
        Option(
            "--sp/--no-sp",
            short="sp",
            help="sequence parallelism: norms and dropout split over the tensor-parallel ranks",
            group=PARALLELISM,
            of="tensor_parallel",
            pasted="always",
            default="on with tensor parallelism",
            why="costs no more traffic, saves activations",
        ),
    ] = False
    recompute: Annotated[
        str,
        Option(
            common=True,
            as_text=True,
            values=SHOWN,
            metavar="SETTING",
            help="{values}; full:1/2: every other layer",
            elsewhere=(
                "gradient_checkpointing=full",
                "activation_checkpointing=full",
                "checkpoint_activations=full",
                "checkpointing=full",
                "grad_checkpointing=full",
                "recompute_activations=selective",
                "recompute_granularity",
                "ac=full",
            ),
            group=MEMORY,
            pasted="always",
            default="the least that fits: none, selective, full (full where "
            "`--recompute-layers` is given)",
            why="`selective_ops` (results of matmuls, fused attention and collectives stay, the "
            "rest is computed again; not for t5, nor with offloaded activations) is priced and run "
            "where it is requested, here or with `--fix`, as is `ops:every-2nd-mm` (torchtitan's "
            "selective op: also every second matmul is computed again) and `modules:core_attn+mlp` "
            "(Megatron Core's `--recompute-modules`; also layernorm, moe, moe_act, mla_up_proj, "
            "shared_experts, and attn and experts of its forks); `full:1/2` or `every:2` "
            "recomputes the first one of every two layers of each stage (any n of k, also of the "
            "others)",
        ),
    ] = "none"
    micro_batch_size: Annotated[  # sequences
        Count,
        Option(
            "--micro-batch-size",
            "--mbs",
            short="mbs",
            common=True,
            help="sequences of a micro-batch",
            elsewhere=(
                "per_device_train_batch_size",
                "per_device_batch_size",
                "device_batch_size",
                "local_batch_size",
                "micro_batch",
                "train_micro_batch_size_per_gpu",
            ),
            group=TRAINING,
            pasted="always",
        ),
    ] = 1
    num_microbatches: Annotated[
        Count,
        Option(
            short="microbatches",
            help="micro-batches of a step",
            elsewhere=(
                "gradient_accumulation_steps",
                "gradient_accumulation",
                "grad_accum",
                "accumulation_steps",
                "ga",
                "gas",
            ),
            group=TRAINING,
            pasted="never",
            default="global batch / (micro-batch size × data parallel)",
        ),
    ] = 1
    # HSDP: groups of data ranks with a whole model's shards each
    dp_replicate: Annotated[
        Count, Option(help="HSDP: replicas of the shards", group=PARALLELISM, why="also MiCS")
    ] = 1
    context_parallel: Annotated[  # ranks that share the tokens of a sequence
        Count,
        Option(
            "--cp",
            short="cp",
            help="context-parallel ranks",
            elsewhere=("context_parallel_size", "cp_size"),
            group=PARALLELISM,
        ),
    ] = 1
    context_parallel_method: Annotated[
        ContextMethod,
        Option(
            "--cp-method",
            short="cp_method",
            help="context parallelism by {values}",
            group=PARALLELISM,
            of="context_parallel",
            pasted="always",
        ),
    ] = "ring"
    expert_parallel: Annotated[  # ranks that share the experts of a layer
        Count,
        Option(
            "--ep",
            short="ep",
            help="expert-parallel ranks",
            elsewhere=("expert_parallel_size", "expert_model_parallel_size", "ep_size"),
            group=PARALLELISM,
        ),
    ] = 1
    expert_tensor_parallel: Annotated[  # experts are cut over the tensor-parallel ranks too
        bool,
        Option(
            "--etp/--no-etp",
            short="etp",
            help="experts cut over the tensor-parallel ranks, or whole",
            group=PARALLELISM,
        ),
    ] = True
    offload: Annotated[
        Offload,
        Option(
            help="off the accelerator: {values}",
            elsewhere=(
                "cpu_offload=optimizer",
                "offload_optimizer=optimizer",
                "offload_activations=activations",
                "offload_param=weights",
                "offload_params=weights",
                "fsdp_offload_params=weights",
            ),
            group=MEMORY,
            why="weights include gradients and optimizer; weights and NVMe are priced only",
        ),
    ] = "none"
    offload_device: Annotated[
        OffloadDevice,
        Option(
            help="device of offloaded optimizer and weights: {values}",
            group=MEMORY,
            of="offload",
            why="activations go to host memory",
            example="offload=optimizer,offload_device=nvme",
        ),
    ] = "cpu"
    recompute_layers: Annotated[  # the first ones of every (virtual) stage; 0: all
        Layers,
        Option(
            metavar="N[,N…]",
            as_text=True,
            help="only the first layers recompute, of every stage (0: all) or of each: 4,2,0,0",
            group=MEMORY,
            of="recompute",
            default="0: all layers of a stage",
            why="n: the first n of every (virtual) stage are recomputed as `--recompute` says, the "
            "others not at all; `4,2,0,0`: the first ones of each (virtual) stage in order, none "
            "where it says 0 (`stage_recompute_layers` in plan.json, next to `layer_ranges`); the "
            "search leaves it at 0 unless it is pinned "
            "(`--fix recompute=full,recompute_layers=2`, also with a list)",
            example="recompute=full,recompute_layers=2",
        ),
    ] = 0
    secondary_ranks: Annotated[
        Count,
        Option(
            help="ZeRO++: neighbours that share a second copy of weights",
            group=MEMORY,
            why="hpZ: priced only",
        ),
    ] = 1
    quantised_weights: Annotated[
        bool,
        Option(
            "--quantised-weights/--no-quantised-weights",
            help="ZeRO++: weights gathered in int8",
            group=MEMORY,
            why="qwZ: priced only",
        ),
    ] = False
    quantised_gradients: Annotated[
        bool,
        Option(
            "--quantised-gradients/--no-quantised-gradients",
            help="ZeRO++: gradients exchanged in int4",
            group=MEMORY,
            why="qgZ: priced only",
        ),
    ] = False
    # the first ones of every k layers of a stage (k: this field); 0: of all its layers. It is typed
    # as full:n/k, so it has no option of its own
    recompute_every: Layers = 0

    def _offloads(self, what: str) -> bool:
        return what in self.offload

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> Plan:
        """Read and check single values; ``cost_models.legality`` checks combinations."""
        read = read_fields(cls, values, where)
        return cls(**{**read, "recompute": read_setting(read["recompute"], f"{where}: ")})


# fields whose values are words: a table holds their positions in these lists
WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    name: RECOMPUTE if name == "recompute" else one.choices
    for name, one in declared(Plan).items()
    if one.choices or name == "recompute"
}
FLAGS: Final = tuple(name for name, one in declared(Plan).items() if one.type is bool)


def split_layers(num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Return the layers [first, last) of each stage, as even as possible.

    Where layers are left over, the middle stages take one more each: the first stage already holds
    the embedding and the most micro-batches, the last one the output projection. One stage more
    than layers is the head alone, a second one the embedding.

    >>> split_layers(10, 4), split_layers(2, 4)
    (((0, 2), (2, 5), (5, 8), (8, 10)), ((0, 0), (0, 1), (1, 2), (2, 2)))
    """
    if not 1 <= num_stages <= num_layers + ENDS:
        most = num_layers + ENDS
        raise InputError(f"{num_stages} stages for {num_layers} layers (must be 1 to {most})")
    if num_stages > num_layers:
        first = num_stages - num_layers - 1  # stages before the layers
        starts = [min(max(0, stage - first), num_layers) for stage in range(num_stages + 1)]
        return tuple(pairwise(starts))
    each, left = divmod(num_layers, num_stages)
    start = 1 if left <= num_stages - 2 else 0
    sizes = [each + (start <= stage < start + left) for stage in range(num_stages)]
    ends = list(accumulate(sizes))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _picked(column: Column, index: Any) -> Column:
    """Return some rows; of one value for all (``np.broadcast_to``), that value again."""
    import numpy as np

    if type(column) is not np.ndarray:
        return column.rows(index)  # type: ignore[attr-defined, no-any-return]  # encoded
    rows: Column
    if type(index) is not np.ndarray:
        rows = column[index]
    elif column.strides != (0,) or not len(column):
        rows = column.take(index)
    elif len(index) <= len(column):
        rows = column[: len(index)]
    else:
        rows = np.broadcast_to(column[:1].reshape(()), len(index))
    return rows


@dataclass(frozen=True, slots=True)
class PlanTable(Ranks[Any]):
    """Many plans: the fields of Plan as columns.

    Fields whose values are words hold indices into the lists of ``WORDS``. Columns of very many
    plans are by their values (``encode``): formulas want them ``plain``, or factored.
    """

    data_parallel: Column
    tensor_parallel: Column
    pipeline_parallel: Column
    virtual_stages: Column
    pipeline_schedule: Column
    zero_stage: Column
    sequence_parallel: Column
    recompute: Column
    micro_batch_size: Column
    num_microbatches: Column
    dp_replicate: Column
    context_parallel: Column
    context_parallel_method: Column
    expert_parallel: Column
    expert_tensor_parallel: Column
    offload: Column
    offload_device: Column
    recompute_layers: Column
    secondary_ranks: Column
    quantised_weights: Column
    quantised_gradients: Column
    recompute_every: Column

    def _offloads(self, what: str) -> Column:
        import numpy as np

        named, offload = [what in name for name in OFFLOADS], self.offload
        if type(offload) is np.ndarray:
            found: Column = np.array(named)[offload]
            return found
        return np.isin(offload, [code for code, is_named in enumerate(named) if is_named])

    def __len__(self) -> int:
        return len(self.data_parallel)

    @classmethod
    def from_plans(cls, plans: list[Plan]) -> PlanTable:
        """Turn plans into columns."""
        import numpy as np

        columns = {name: [*map(attrgetter(name), plans)] for name in COLUMNS}
        columns |= {name: [*map(WORDS[name].index, columns[name])] for name in WORDS}
        return cls(**{name: np.array(values) for name, values in columns.items()})

    def rows(self, index: Any) -> PlanTable:
        """Return the rows that a mask, slice or index array names."""
        import numpy as np

        if isinstance(index, np.ndarray) and index.dtype == bool:
            index = np.flatnonzero(index)
        return PlanTable(*[_picked(getattr(self, name), index) for name in COLUMNS])

    def plain(self) -> PlanTable:
        """Return the same plans with full-length columns."""
        from cost_models.columnar.dictionary_encoding import decode

        return PlanTable(*[decode(getattr(self, name)) for name in COLUMNS])

    def plan(self, row: int) -> Plan:
        """Return one row as a Plan."""
        values = {name: getattr(self, name)[row].item() for name in COLUMNS}
        values |= {name: words[values[name]] for name, words in WORDS.items()}
        return Plan(**values)

    def __iter__(self) -> Iterator[Plan]:
        return (self.plan(row) for row in range(len(self)))


COLUMNS: Final = tuple(column.name for column in fields(PlanTable))
