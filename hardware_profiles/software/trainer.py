"""Software profiles: the few numbers in which trainers differ, as data with a source each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import Fields, read_toml

FOLDER = Path(__file__).parent / "trainers"


@dataclass(frozen=True, slots=True)
class SoftwareProfile:
    """How one trainer runs a transformer layer. Bytes are per element or per token, as named.

    "Saved" is what autograd keeps for the backward pass, in elements of the compute precision
    unless
    a name says ``bytes``. "Accesses" are reads and writes of memory-bound operators.
    """

    name: str
    description: str
    # model states
    gradients_in_master_precision: bool  # accumulated gradients: fp32 (true) or compute precision
    whole_gradient_buffer: bool  # gradients of all weights have memory from the first step on
    keeps_replica_gradients: bool  # so do those that replicas in one precision add up
    autocasts_weights: bool  # fp32 weights whose 16-bit copies live from use to backward pass
    largest_zero_stage: float  # beyond it the trainer shards nothing more
    # the way back through a layer is priced place by place, as FSDP2 gathers and reduces blocks
    walks_by_blocks: bool
    reduces_gradients_at_last_microbatch_under_pipeline: bool
    fused_optimizer: bool  # one kernel updates in place; without, updates make copies of shards
    fp8_cast_bytes: float  # moved to cast an element of 16 bits, along the rows and the columns
    fp8_gathers: bool  # with sequence parallelism: cast first, gathered in 8 bits
    fp8_weight_casts: float  # of every matrix in a forward, and in a backward pass
    fp8_whole_matrices: bool  # multiplies in fp8 only what is not cut, with no split backward pass
    fp8_weight_copies: float  # of every matrix, from the forward to the backward pass
    splits_backward: bool  # runs the schedules whose weight gradients come after those of inputs
    short_pipelines: bool  # runs 1F1B with fewer micro-batches than pipeline ranks
    # saved activations
    rms_norm_saved: float  # per element of the hidden size, in compute precision
    rms_norm_saved_fp32_bytes: float  # per element, bytes, on top (fp32 copies)
    layer_norm_saved: float
    rms_norm_in_fp32_saved: float  # norms that multiply with their weights before they cast back
    rms_norm_in_fp32_saved_fp32_bytes: float
    layer_norm_in_fp32_saved: float  # the same, and written out (Cohere)
    layer_norm_in_fp32_saved_fp32_bytes: float
    rms_norm_statistics_bytes: float  # per token and norm
    layer_norm_statistics_bytes: float
    keeps_gathered_inputs: bool  # sequence parallel: linear inputs are kept whole, not re-gathered
    activation_saved: Mapping[str, float]  # elements of the FFN size that the activation keeps
    eager_scores_bytes: float  # per head and pair of tokens, eager attention without dropout
    window_needs_mask: bool  # flash kernels without windows: a mask, every query head its own keys
    attention_dropout_bytes: float  # per head and pair of tokens, on top, with dropout
    dropout_mask_bytes: float  # per element of a hidden-size dropout
    router_saved_bytes: float  # per token and expert
    router_copies_input: bool  # in fp32, of models whose router computes in that
    experts_one_by_one: bool  # a loop over experts: gradients of one expert's tokens at a time
    repeats_keys: bool  # flash kernels get keys and values of every query head (repeat_kv)
    # what is not trained
    frozen_weights_save_inputs: bool  # a function of the trainer's own keeps what they multiply
    shards_frozen_weights: bool  # ZeRO-3 shards them as all others
    quantises_every_matrix: bool  # QLoRA: of all layers (true), or those that are adapted
    adapter_input_bytes: float  # per adapted matrix and input element; 0: the matrix's own input
    adapter_output_bytes: float  # per output element of adapted queries, keys and values
    quantised_input_bytes: (
        float  # per input element of a matrix in 4 bits, kept though it is frozen
    )
    fused_qkv_stays: bool  # values are a view: queries and keys before their positions stay too
    frozen_layer_inputs: float  # copies of each layer's input that sharded frozen layers keep
    layer_input_extra_bytes: float  # per hidden element, beside a recomputed layer's input
    # how weights are gathered and gradients added up under ZeRO-3
    flat_parameters: bool  # torch FSDP1: the root's weights stay gathered through the step
    gathered_layers: float  # layers whose weights are gathered at once (prefetch)
    optimizer_in_backward: bool  # weights are updated as their gradients come, which then go
    accumulates_whole_gradients: bool  # no_sync: unsharded gradients until the last micro-batch
    longest_first: bool  # the longest sequences come first, before gradients have been added up
    frozen_in_gradients: bool  # gradients of flat parameters span what is frozen in them
    # logits and loss: copies alive at the peak of the loss, beside the logits themselves
    logits_copies: float  # in compute precision, forward; the logits count as one
    fp32_logits_copies: float
    logits_gradient_copies: float  # in compute precision, on top in the backward pass
    loss_chunk_tokens: float  # tokens whose copies exist at once; 0: all of a micro-batch
    loss_piece_bytes: float  # of logits in fp32 that exist at once; 0: all of a micro-batch
    gathers_logits: bool  # tensor-parallel ranks gather all columns, and each computes the loss
    logits_chunked: bool  # the logits themselves exist only chunk by chunk, too
    # memory-bound work: element accesses per layer, forward
    rms_norm_accesses: float  # per norm and hidden element
    rms_norm_fp32_bytes: (
        float  # the same, bytes on top: what a norm that is written out does in fp32
    )
    layer_norm_accesses: float
    layer_norm_in_fp32_accesses: float
    residual_accesses: float  # per residual add and hidden element
    activation_accesses: float  # per FFN element
    rotary_accesses: float  # per query/key element
    dropout_accesses: float  # per element that a dropout on its own masks
    bias_accesses: float  # per element of a matrix's output, forward, where it has a bias
    bias_gradient_accesses: float  # the same, backward: what adds the gradient up over tokens
    eager_scores_accesses: float  # per head and pair of tokens
    adapter_input_accesses: float  # per adapted matrix and input element
    adapter_output_accesses: float  # per adapted matrix and output element
    adapter_input_gradient_accesses: float  # the same, backward
    adapter_output_gradient_accesses: float
    hidden_states_in_fp32: bool  # between matrices in 16 bits, each of which casts them
    wraps_adapters: bool  # ZeRO-3 shards each as a group of its own, which the host waits for
    adapters_in_fp32: (
        bool  # beside a base in 16 bits: their inputs are cast, their outputs cast back
    )
    loss_bytes: float  # moved per logit by the cross-entropy, forward
    loss_gradient_bytes: float  # the same, backward
    backward_access_ratio: float  # backward accesses / forward accesses
    unpacking_share: float  # of the memory rate, what kernels that unpack 4-bit weights reach
    recomputes_whole_layers: bool  # up to their outputs, not only what the backward pass reads
    pads_vocabulary: bool  # with columns that no token has
    gradient_accumulation_bytes: float  # moved per parameter when a micro-batch's gradient is added
    gradient_accesses: float  # in the optimizer step, of each element
    optimizer_accesses_bytes: float  # bytes moved per parameter in the optimizer step
    # host: operators (kernels) that one pass starts
    layer_operators_forward: float
    layer_operators_backward: float
    microbatch_operators: float
    step_operators: float
    group_operators: float  # sharded weights: around each group (layer), forward and backward
    # a fused softmax that takes multiples of so many attention matrices only; 0: any number
    fused_softmax_batch: float
    unfused_softmax_operators: float  # that take its place, on top
    operator_seconds: float  # host seconds per operator where the machine was not measured
    # communication
    bus_efficiency: float  # achieved / nominal bandwidth of large collectives inside a node
    network_efficiency: float  # the same between nodes
    data_parallel_overlap: float  # share of the backward pass that can hide gradient reduction
    data_parallel_interference: float  # seconds that computation loses to one hidden behind it
    tensor_parallel_overlap: float  # share of tensor-parallel traffic hidden behind compute
    gathers_by_matrix: bool  # each column-cut matrix, and adds up its input's gradient, for itself
    chunks_tensor_traffic: bool  # chunk by chunk behind the matmuls before or after it
    gathers_behind_forward: bool  # ZeRO-1 and 2: new weights, behind the first forward pass
    hides_tensor_reduction: bool  # of inputs' gradients, behind the matmuls of weights' gradients
    exchanges_once_a_node: (
        bool  # a token goes to a node once, however many of its experts are there
    )
    hides_exchange_between_nodes: bool  # of experts' tokens, behind another micro-batch's passes
    prefetches_activations: bool  # from the host, behind the backward pass of the layer before
    hides_exchange_inside_nodes: bool  # the same, where experts lie in one node or rack
    scatters_stage_messages: bool  # each tensor-parallel rank sends its part, gathered over there
    # attention kernel
    flash_efficiency: float  # of the achievable matmul rate, on the FLOPs really done
    flash_share_since_hopper: float  # of that, on Hopper and later: kernels without its matmuls
    # runtime memory on a GPU, bytes
    buffer_bytes: float  # of collectives, whatever the model
    buffer_bytes_without_pipeline: float  # more of the same on one stage
    context_bytes: float
    allocator_slack: float  # of what is allocated: blocks that cannot be given back
    allocator_cache: float  # reserved / allocated - 1 where memory is plentiful
    sources: Mapping[str, str] = field(default_factory=dict)


def profile_names() -> list[str]:
    """Return the names of all software profiles."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@cache
def software_profile(name: str) -> SoftwareProfile:
    """Load a software profile by name."""
    if name not in profile_names():
        known = f"Known: {', '.join(profile_names())}"
        hint = did_you_mean(str(name), profile_names())
        raise InputError(f"software profile {name!r} is unknown. {f'{hint} {known}'.strip()}")
    path = FOLDER / f"{name}.toml"
    return _from_fields(Fields(read_toml(path, "a software profile"), str(path)))


def _from_fields(source: Fields) -> SoftwareProfile:
    """Read a profile; what it does not say is as in the profile that it ``inherits``."""
    known = [f.name for f in fields(SoftwareProfile) if f.name != "sources"]
    source.refuse_unknown([*known, "inherits"])
    values: dict[str, Any] = {
        "name": source.text("name"),
        "description": source.text("description"),
    }
    sources: dict[str, str] = {}
    parent = source.text("inherits", None)
    base = None if parent is None else software_profile(parent)
    for name in known:
        if name in values:
            continue
        if base is not None and name not in source:
            values[name] = getattr(base, name)
            sources[name] = base.sources[name]
            continue
        entry = source.sub(name)
        entry.refuse_unknown(("value", "source"))
        sources[name] = entry.text("source")
        raw = entry.values.get("value")
        if isinstance(raw, bool):
            values[name] = raw
        elif isinstance(raw, Mapping):
            table = entry.sub("value")
            values[name] = {key: table.number(key) for key in raw}
        else:
            values[name] = entry.number("value")
    return SoftwareProfile(**values, sources=sources)
