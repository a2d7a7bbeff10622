"""Software profiles of trainers: memory, kernel and overlap figures, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, Literal

from msgspec.structs import replace

from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import Amount, Positive, convert, read_toml
from hardware_profiles.software.engine import PLUS, engine, engine_names, engines_together
from hardware_profiles.software.kernels import ForwardKernels, Host
from hardware_profiles.software.profile import Profile, ProfileGroup, profile_of

FOLDER = Path(__file__).parent / "trainers"
OPTIMIZER_KERNELS: Final = ("fused", "foreach", "for-loop")
UNKNOWN: Final = "torch-trainer"  # an ordinary training loop of torch
MAX_NAME: Final = 1000  # characters
OWN_FILE: Final = ".toml"  # a profile of a user's own is named by its file


CudaGraphs = Literal["none", "layers", "iteration"]
FewestMicrobatches = Literal["any", "ranks - 1", "ranks"]
# as cost_models/partition/stage_cuts.py describes them
StageCut = Literal["even", "ends", "parameters", "cost", "thresholds"]


class Precision(ProfileGroup, frozen=True, kw_only=True):
    """Precision of weights and hidden states."""

    autocasts_weights: bool  # fp32 weights; 16-bit copies live from use to backward pass
    fp32_hidden_states: bool  # between matrices in 16 bits, each of which casts them


class TrainerGradients(ProfileGroup, frozen=True, kw_only=True):
    """Buffers in which gradients are accumulated, and when they are reduced."""

    in_master_precision: bool  # accumulated in fp32 (true) or in the compute precision
    whole_buffer: bool  # gradients of all weights are allocated from the first step on
    whole_replica_buffer: bool  # also those that replicas in one precision all-reduce
    reduced_once_under_pipeline: bool  # with the last micro-batch
    accumulated_unsharded: bool  # no_sync: unsharded gradients until the last micro-batch
    reduced_in_compute_precision: bool  # of sharding ranks, and kept so while they are whole
    fp16_reduced_in_fp16: bool  # by all ranks, whatever their sums are kept in; not those of bf16
    ties_in_compute_precision: bool  # of a tensor that several stages have and sum up
    include_frozen: bool  # gradients of flat parameters span the frozen weights in them
    accumulation_bytes: Amount  # moved per parameter when a micro-batch's gradient is added
    zeroed: bool  # filled with zeros after a step instead of released
    bucket_copies: Amount  # of all gradients, in buckets that replicas all-reduce
    whole_until_update: bool  # ZeRO-1 keeps all of them to the end of the backward pass
    all_reduced: bool  # by all ranks of ZeRO-1 and 2, of which each needs its shard only
    in_both_precisions: (
        bool  # 16-bit gradients of a backward pass are whole next to ``whole_buffer``
    )
    kept_after_backward: bool  # those stay until the next backward pass


class TrainerOptimizer(ProfileGroup, frozen=True, kw_only=True):
    """Kernels of the optimizer step."""

    fused: bool  # one kernel updates in place; otherwise updates make copies of shards
    loops: bool  # if not fused, over tensors: temporaries of the largest one
    flat: bool  # what a rank updates at once is one tensor: such temporaries are of all of it
    copied_bytes: Amount  # per updated element, of gradients or states cast for the update
    group_elements: Amount  # that ZeRO-3 updates at once; 0: all
    in_backward: bool  # weights are updated as their gradients arrive, which are then freed
    offloads_masters: bool  # fp32 weights and gradients leave the device with offloaded states
    torch_on_host: bool  # torch's own operators clip and update what is offloaded, not a kernel
    casts_on_host: bool  # where that is: new weights are cast there, in pageable memory
    accumulates_on_host: bool  # where that is: gradients return to have the next ones added
    gradient_accesses: Amount  # of each gradient element
    moved_bytes: Amount  # per parameter


class Sharding(ProfileGroup, frozen=True, kw_only=True):
    """Sharding over data-parallel ranks."""

    largest_zero_stage: Amount
    blockwise_backward: bool  # backward pass by blocks, as FSDP2 gathers and reduces them
    flat_parameters: bool  # torch FSDP1: the root's weights stay gathered through the step
    gathered_layers: Amount  # layers whose weights are gathered at once (prefetch)
    frozen_weights: bool  # ZeRO-3 shards frozen weights like all others
    frozen_stay: bool  # FSDP1: those of finished layers stay gathered until the backward pass ends
    bucket_elements: Amount  # of buckets in which ZeRO reduces gradients of the compute precision
    bucket_hidden_squares: Amount  # the same, in multiples of the squared hidden size
    live_elements: Amount  # of gathered weights that ZeRO-3 does not release; 0: its layers' only
    compute_shards: bool  # ZeRO-3 keeps shards in compute precision next to the fp32 ones
    casts_unsharded: bool  # fp32 weights alone, cast unit by unit, where nothing is sharded, too
    needed_to_cast: bool  # unsharded ranks of tensor and pipeline groups multiply fp32 weights
    gathers_outputs: bool  # the first accelerator receives what all replicas return
    states_over_replicas: bool  # replicas of ZeRO-3's shards divide states and update among them
    matrices_apart: bool  # ZeRO-3 gathers a layer matrix by matrix
    adapters_apart: bool  # each adapter is a group of its own; under ZeRO-3 the host waits for it


class TrainerPipeline(ProfileGroup, frozen=True, kw_only=True):
    """Pipeline schedules and messages."""

    splits_backward: bool  # runs schedules that compute weight gradients after input gradients
    fewest_microbatches: FewestMicrobatches  # of 1F1B, by pipeline ranks
    stages: StageCut  # how layers are cut into stages
    scatters_messages: bool  # each tensor-parallel rank sends its part; the receiver gathers
    scatters_gradients: bool  # so are gradients, not activations alone
    sends_masks: bool  # attention's mask goes along with the activations, whole from every rank


class Fp8(ProfileGroup, frozen=True, kw_only=True):
    """Matrix multiplications in 8 bits, or in 4."""

    matmul_share: Positive  # of the rate of matmuls with one scale a tensor
    attention_rate: Positive  # of attention cores, over that in 16 bits
    cast_bytes: Amount  # moved to cast an element of 16 bits, along the rows and the columns
    scaling_bytes: Amount  # moved to scale an element of a backward matmul's output on its own
    scale_bytes: Amount  # of an element that is kept or gathered
    gathers: bool  # with sequence parallelism: cast first, gathered in 8 bits
    gathers_weights: bool  # of ZeRO: matrices are cast first, gathered in 8 bits
    weight_casts: Amount  # of every matrix in a forward, and in a backward pass
    whole_matrices: bool  # only unsharded matrices, with no split backward pass
    weight_copies: Amount  # of every matrix, from the forward to the backward pass
    copies_as_needed: bool  # one where matmuls read a matrix along either direction
    integers: bool  # multiplied as 8-bit integers, at their rate
    stores_frozen: bool  # frozen matrices are kept in few bits alone
    trained_bytes: Amount  # of an element of trained matrices in few bits; 0: as they are computed


class Rounding(ProfileGroup, frozen=True, kw_only=True):
    """Quantisation-aware training: rounds weights and inputs to the values of few bits.

    They are stored and multiplied in 16 bits.
    """

    weight_bytes: Amount  # moved for each element of a matrix, forward
    weight_gradient_bytes: Amount  # the same, backward
    input_bytes: Amount  # moved for each element that a matrix reads, forward
    input_gradient_bytes: Amount
    weight_saved_bytes: Amount  # kept with each element of a matrix for the backward pass
    input_saved_bytes: Amount
    temporary_bytes: Amount  # of an element of the matrix that is being rounded
    operators_forward: Amount  # of each matrix
    operators_backward: Amount


class Activations(ProfileGroup, frozen=True, kw_only=True):
    """Activations that autograd saves for the backward pass.

    "Saved" counts elements in the compute precision; names with ``bytes`` count bytes.
    """

    rms_norm_saved: Amount  # per element of the hidden size
    rms_norm_saved_fp32_bytes: Amount  # per element, in addition (fp32 copies)
    layer_norm_saved: Amount
    rms_norm_in_fp32_saved: Amount  # norms that multiply with their weights before the cast back
    rms_norm_in_fp32_saved_fp32_bytes: Amount
    layer_norm_in_fp32_saved: Amount  # the same, not fused (Cohere)
    layer_norm_in_fp32_saved_fp32_bytes: Amount
    rms_norm_statistics_bytes: Amount  # per token and norm
    layer_norm_statistics_bytes: Amount
    recomputes_head_norms: bool  # of queries and keys, with the layer norms of ``modules:...``
    keeps_gathered_inputs: bool  # sequence parallel: linear inputs are kept, not gathered again
    activation_saved: Mapping[str, Amount]  # elements of the FFN size, by activation function
    activation_inputs_in_fp8: bool  # what an activation saves has a byte an element
    eager_scores_bytes: Amount  # per head and pair of tokens, eager attention without dropout
    score_gradients: Amount  # eager attention: tensors of scores while its softmax runs backward
    window_needs_mask: bool  # flash kernels without windows: a mask, keys repeated per query head
    attention_dropout_bytes: Amount  # per head and pair of tokens, in addition, with dropout
    dropout_mask_bytes: Amount  # per element of a hidden-size dropout
    router_saved_bytes: Amount  # per token and expert
    expert_outputs_saved: Amount  # per element of each of a token's k expert outputs
    # per element of these, besides saved tensors, while their weighting runs backward; 0: by the
    # model's own code
    weighting_gradient_bytes: Amount
    router_copies_input: bool  # in fp32, of models whose router computes in fp32
    experts_one_by_one: bool  # a loop over experts: gradients of one expert's tokens at a time
    repeats_keys: bool  # flash kernels get keys and values of every query head (repeat_kv)
    caches_rotary_tables: bool  # once for each stage, not for each micro-batch
    keeps_fused_qkv: bool  # values are a view: queries and keys before rotary embedding stay
    share: Positive  # of the counted bytes of activations and logits that a step holds
    layer_input_extra_bytes: Amount  # per hidden element, besides a recomputed layer's input
    keeps_exchanged_rows: bool  # selective by operator: rows that came from or to experts elsewhere
    keeps_cache: bool  # keys and values of recomputed layers, for a generation that never comes
    longest_sequences_first: bool  # before any gradients have been accumulated


class Adapters(ProfileGroup, frozen=True, kw_only=True):
    """LoRA adapters."""

    input_bytes: Amount  # saved per adapted matrix and input element; 0: the matrix's own input
    output_bytes: Amount  # saved per output element of adapted queries, keys and values
    input_accesses: Amount  # per adapted matrix and input element, forward
    output_accesses: Amount  # per adapted matrix and output element, forward
    input_gradient_accesses: Amount  # the same, backward
    output_gradient_accesses: Amount
    in_fp32: bool  # on a 16-bit base: their inputs are cast, their outputs cast back
    of_fused_matrices: bool  # queries, keys and values share one; so do gate and up


class Frozen(ProfileGroup, frozen=True, kw_only=True):
    """Weights that are not trained."""

    quantises_every_matrix: bool  # QLoRA: of all layers (true), or the adapted ones
    in_fp32: bool  # weights that are not quantised have the precision of trained ones
    unquantised_in_fp32: bool  # with 4-bit matrices: norms, embedding and head become fp32
    quantised_input_bytes: Amount  # saved per input element of a frozen 4-bit matrix
    unpacking_share: Amount  # of the memory rate, reached by kernels that unpack 4-bit weights
    unpacks_by_operators: bool  # of torch: what they give is kept for the backward pass
    whole_scales: bool  # of 4-bit matrices: no parameters, on every rank that shares these
    saves_inputs: bool  # a function of the trainer's own saves the inputs of frozen matrices
    layer_inputs: Amount  # of FSDP1, that stay with recomputed frozen layers (``kept_input_bytes``)


class Loss(ProfileGroup, frozen=True, kw_only=True):
    """Logits and cross-entropy: copies at the loss's peak, and bytes moved."""

    logits_copies: Amount  # in compute precision, forward; the logits count as one
    fp32_logits_copies: Amount
    by_family: bool  # fp32 copies are 16-bit ones where the family's code does not upcast
    capped_copies: Amount  # in compute precision, that a cap of logits keeps (Gemma 2)
    logits_gradient_copies: Amount  # in compute precision, in addition in the backward pass
    gathers_logits: bool  # tensor-parallel ranks gather all columns, and each computes the loss
    pads_vocabulary: bool  # with columns that no token has
    predicted_share: Amount  # of the tokens, for which head and loss are computed
    chunk_tokens: Amount  # tokens whose copies exist at once; 0: a share of a micro-batch
    chunk_share: Amount  # of a micro-batch's tokens, whose copies exist at once
    piece_bytes: Amount  # of fp32 logits that exist at once; 0: all of a micro-batch
    chunks_logits: bool  # the logits themselves exist only chunk by chunk, too
    hidden_sized_chunks: bool  # each as many tokens as have logits of the size of all hidden states
    head_copy_bytes: Amount  # of copies of the projection that a chunk makes, per element
    repeats_chunks: bool  # each is checkpointed: projected again in the backward pass
    forward_bytes: Amount  # moved per logit by the cross-entropy
    backward_bytes: Amount


class TrainerKernels(ForwardKernels, frozen=True, kw_only=True):
    """Memory-bound operators of forward and backward pass."""

    bias_accesses: Amount  # per output element of a matrix with a bias, forward
    bias_gradient_accesses: Amount  # the same, backward: the sum over tokens
    backward_access_ratio: Amount  # backward accesses / forward accesses
    rank_spread: Amount  # standard deviation of the ranks' rates, over their mean
    recomputes_whole_layers: bool  # up to their outputs, beyond the last tensor that is needed
    recomputes_attention: bool  # with its layer; if not, a flash kernel's results are kept


class TrainerHost(Host, frozen=True, kw_only=True):
    """Operators (kernels) that the host launches in one pass."""

    layer_operators_forward: Amount
    layer_operators_backward: Amount
    microbatch_operators: Amount
    group_operators: Amount  # sharded weights: around each group (layer), forward and backward
    fused_softmax_batch: Amount  # the fused softmax takes multiples of this many attention
    # matrices; 0: any number
    unfused_softmax_operators: Amount  # that replace it, in addition
    dtensor_operators_forward: Amount  # per matrix cut over tensor-parallel ranks, in addition
    dtensor_operators_backward: Amount
    hook_operators_forward: Amount  # per module of a layer under ZeRO-3, else per trained weight
    hook_operators_backward: Amount
    adapter_operators_forward: Amount  # per adapted matrix, in addition
    adapter_operators_backward: Amount
    fp8_operators_forward: Amount  # per matrix in 8 bits, in addition: casts
    fp8_operators_backward: Amount
    routing_operators_forward: Amount  # of a layer with routed experts, beyond one with an MLP
    routing_operators_backward: Amount
    rule_operators_forward: Amount  # of a layer with a gated delta rule, beyond one with attention
    rule_operators_backward: Amount
    expert_operators_forward: Amount  # per expert of the rank, in addition; 0: one kernel for all
    expert_operators_backward: Amount
    gap_seconds: Amount  # of the device, between the kernels of an operator of a layer
    step_seconds: Amount  # that the device waits for the training loop: data, logging
    message_seconds: Amount  # that it waits around a message between stages: shapes, launches
    synchronous: bool  # the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1)
    launch_latency: Amount  # seconds from a launch to its kernel, waited for if synchronous
    cuda_graphs: CudaGraphs  # what one launch replays: no graphs, layers, the whole iteration


class Communication(ProfileGroup, frozen=True, kw_only=True):
    """Collectives: achieved bandwidth and volumes."""

    bus_efficiency: Amount  # achieved / nominal bandwidth of large collectives inside a node
    network_efficiency: Amount  # the same between nodes
    gathers_by_matrix: bool  # each column-cut matrix gathers its input and reduces its gradient
    exchanges_once_a_node: bool  # a token is sent to a node once, for all experts in it
    sums_blocks_in_fp32: bool  # context parallelism: sums over blocks of keys, and their messages
    pinned_host_memory: bool  # holds offloaded states; else a core copies what the link carries


class Overlap(ProfileGroup, frozen=True, kw_only=True):
    """Communication hidden behind computation."""

    data_parallel: Amount  # share of the backward pass that can hide gradient reduction
    data_parallel_interference: Amount  # seconds that computation loses to one hidden behind it
    tensor_parallel: Amount  # share of tensor-parallel traffic hidden behind compute
    chunked_tensor_traffic: bool  # chunk by chunk, behind the matmuls before or after it
    weight_gathers: bool  # ZeRO-1 and 2: new weights, behind the first forward pass
    tensor_reduction: bool  # of input gradients, behind the matmuls of weight gradients
    stage_messages: bool  # of interleaved stages, behind passes of other micro-batches
    expert_exchange_between_nodes: bool  # behind another micro-batch's passes
    expert_exchange_inside_nodes: bool  # the same, where experts lie in one node or rack
    activation_prefetch: bool  # from the host, behind the backward pass of the previous layer


class RuntimeMemory(ProfileGroup, frozen=True, kw_only=True):
    """Memory of the runtime on a GPU, bytes."""

    buffer_bytes: Amount  # of collectives, whatever the model
    buffer_bytes_without_pipeline: Amount  # more of the same on one stage
    context_bytes: Mapping[str, Amount]  # by the accelerator's architecture
    expandable_segments: bool  # PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    side_streams: bool  # gathered weights and gradients in blocks of other streams
    ragged_batches: bool  # padded to their own longest sequence: shapes change between steps
    empties_cache: bool  # torch.cuda.empty_cache() between steps


class SoftwareProfile(Profile, frozen=True, kw_only=True):
    """Figures of one trainer."""

    precision: Precision
    gradients: TrainerGradients
    optimizer: TrainerOptimizer
    sharding: Sharding
    pipeline: TrainerPipeline
    fp8: Fp8
    rounding: Rounding
    activations: Activations
    adapters: Adapters
    frozen: Frozen
    loss: Loss
    kernels: TrainerKernels
    host: TrainerHost
    communication: Communication
    overlap: Overlap
    memory: RuntimeMemory


@cache
def profile_names() -> tuple[str, ...]:
    """Return the names of all software profiles."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def parent_of(name: str) -> str:
    """Return the profile that another one or an expression begins from; empty: it has none.

    >>> parent_of("hf-trainer-liger"), parent_of("hf-trainer+fsdp2"), parent_of("megatron")
    ('hf-trainer-foak', 'hf-trainer', '')
    """
    base, plus, _ = name.partition(PLUS)
    if plus or base not in profile_names():
        return base if base in profile_names() else UNKNOWN
    return str(read_toml(FOLDER / f"{name}.toml", "a software profile").get("inherits", ""))


def software_names() -> list[str]:
    """Return what ``--software`` may name: profiles, and engines with a plus between them."""
    return [*profile_names(), *engine_names()]


@cache
def software_profile(name: str) -> SoftwareProfile:
    """Load a software profile by name, or compose one: ``fsdp2+adamw-fused``.

    An expression may begin with a profile, of which its engines are parts: ``hf-trainer+fsdp2``.
    Without one they are parts of an ordinary training loop (``UNKNOWN``). A name that ends in
    ``.toml`` is a user's file.

    >>> software_profile("fsdp2+adamw-fused").optimizer.fused
    True
    """
    if not isinstance(name, str):
        raise InputError(f"software = {name!r} (must be the name of a software profile)")
    if len(name) > MAX_NAME:  # a file that a plan.json names
        raise InputError(f"software = {name[:60]!r}… (must have at most {MAX_NAME:,} characters)")
    if name in profile_names():
        path = FOLDER / f"{name}.toml"
        document = dict(read_toml(path, "a software profile"))
        engines = convert(document.pop("engines", []), list[str], f"{path}: engines")
        shared = engines_together(engines)
        return profile_of(SoftwareProfile, document, str(path), software_profile, shared)
    if name.endswith(OWN_FILE):
        return _own_profile(name)
    names = [part.strip() for part in name.split(PLUS)]
    own = names[0] in profile_names() or names[0].endswith(OWN_FILE)
    base = names.pop(0) if own else UNKNOWN
    for part in names:
        if part not in engine_names():
            raise InputError(_unknown(name, part))
    document = {"name": name, "description": f"{base} with {', '.join(names)}", "inherits": base}
    for limits in (engine(part).capabilities for part in names):
        if limits is not None:
            document["capabilities"] = limits
    shared = engines_together(names)
    return profile_of(SoftwareProfile, document, name, software_profile, shared)


def with_engines(name: str, kernel: str | None, copies_gradients: bool | None) -> str:
    """Return a trainer with the kernel of its update, and its copy of gradients, as given.

    >>> with_engines("hf-trainer", "fused", False)
    'hf-trainer+adamw-fused+uncopied-gradients'
    """
    parts = [] if kernel is None else [f"adamw-{kernel}"]
    if copies_gradients is not None:
        parts.append("copied-gradients" if copies_gradients else "uncopied-gradients")
    return PLUS.join([name, *parts]) if parts else name


def _own_profile(name: str) -> SoftwareProfile:
    """Load a user's file: a profile that it inherits, and other figures (``shardplan learn``)."""
    document = {
        "inherits": UNKNOWN,
        "description": "",
        **read_toml(Path(name), "a software profile"),
    }
    parent = convert(document["inherits"], str, f"{name}: inherits")
    if parent.endswith(OWN_FILE):
        raise InputError(f"{name}: inherits = {parent!r} (must be a profile of shardplan)")
    try:
        software_profile(parent)
    except InputError as error:
        raise InputError(f"{name}: inherits: {error}") from None
    found = profile_of(SoftwareProfile, {**document, "name": name}, name, software_profile)
    return replace(found, inherits=parent)


def names_engines(text: str) -> bool:
    """Return whether a text is an expression of engines, each of which exists; not a profile.

    >>> names_engines("fsdp2 + adamw-fused"), names_engines("hf-trainer"), names_engines("a+b")
    (True, False, False)
    """
    known = set(software_names())
    return text not in profile_names() and all(p.strip() in known for p in text.split(PLUS))


def _unknown(name: str, part: str) -> str:
    """Return the message for a name that is neither a profile nor an engine."""
    where = f" of {name!r}" if PLUS in name else ""
    hint = did_you_mean(part, software_names())
    known = f"shardplan software lists all; {PLUS} joins parts: fsdp2{PLUS}adamw-fused"
    return f"software profile {part!r}{where} is unknown. {f'{hint} {known}'.strip()}"
