"""Launch scripts of Megatron-LM: the flags of ``pretrain_gpt.py``.

Source: NVIDIA/Megatron-LM@000c4ac24f, megatron/training/arguments.py (names of flags,
validate_args); megatron-core 0.16.1, whose fields the flags set.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from hardware_profiles.fields import names_in
from planner.exchange.job import Job
from planner.exchange.keys import Key, Settings, Source, without_effect
from planner.exchange.megatron_fields import (
    CARRIES,
    ELSEWHERE,
    Get,
    check_fields,
    fields_of,
    notes_of_fields,
    settings_of_fields,
)
from planner.exchange.megatron_model import config_of_fields, model_fields
from planner.exchange.syntax.flags import FLAGS, UNRESOLVED
from planner.exchange.target import Target

FILE: Final = "megatron.sh"
PROGRAM: Final = "pretrain_gpt.py"
# fields whose flag has another name
NAMES: Final = {
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "num_moe_experts": "num-experts",
    "fp8": "fp8-format",
    "layernorm_epsilon": "norm-epsilon",
}
VIRTUAL: Final = "virtual_pipeline_model_parallel_size"
LAYERS_OF_VIRTUAL: Final = "num-layers-per-virtual-pipeline-stage"
MARKS: Final = names_in("""
    tensor-model-parallel-size pipeline-model-parallel-size micro-batch-size num-attention-heads
    use-distributed-optimizer
""")
# fields that are read besides those that are written
ALSO_READ: Final = names_in("""
    num_layers_per_virtual_pipeline_stage num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split use_torch_fsdp2 use_custom_fsdp
    torch_fsdp2_no_reshard_after_forward recompute_activations rampup_batch_size mtp_num_layers
    cpu_offloading_num_layers fine_grained_activation_offloading padded_vocab_size tokenizer_type
""")
# flags that written scripts have, and that state something in another form
OWN: Final = {
    "swiglu": "gated_linear_unit",
    "disable-bias-linear": "add_bias_linear",
    "group-query-attention": "num_query_groups",
    "grad-reduce-in-bf16": "grad_reduce_in_fp32",
    "accumulate-allreduce-grads-in-fp32": "grad_reduce_in_fp32",
}
NO_EFFECT: Final = f"""
    lr* min-lr decoupled-lr decoupled-min-lr weight-decay* start-weight-decay end-weight-decay
    adam-* clip-grad muon-* loss-scale* initial-loss-scale min-loss-scale hysteresis init-method*
    embedding-init* use-cpu-initialization train-iters train-samples train-data-path valid-data-path
    test-data-path exit-* eval-* full-validation skip-train seed data-* per-split-* split mock-data
    num-workers dataloader-type num-dataset-builder-threads no-create-attention-mask-in-dataloader
    no-mmap-bin-files mmap-bin-files tokenizer-* tiktoken-* vocab-file merge-file vocab-extra-ids
    legacy-tokenizer make-vocab-size-divisible-by reset-position-ids eod-mask-loss sft*
    reset-attention-mask save* load* no-save-* no-load-* ckpt-* dist-ckpt* use-dist-ckpt finetune
    async-save use-persistent-ckpt-worker use-checkpoint-* use-mp-args-from-* override-opt*
    pretrained-checkpoint non-persistent-* auto-detect-ckpt-format log-* timing-* tensorboard*
    wandb* profile* use-pytorch-profiler logging-* record-memory-history memory-snapshot-path
    one-logger* enable-one-logger no-log-* distributed-* local-rank lazy-mpu-init nccl-* use-nccl-ub
    no-async-tensor-model-parallel-allreduce tp-comm-* overlap-* no-overlap-* align-* no-align-*
    ddp-* high-priority-stream-groups use-sharp sharp-* disable-gloo-process-groups
    enable-gloo-process-groups use-tp-pp-dp-mapping delay-wgrad-compute
    defer-embedding-wgrad-compute wgrad-deferral-limit batch-p2p-communication
    microbatch-group-size-per-virtual-pipeline-stage manual-gc* empty-unused-memory-level
    check-for-* no-check-for-* rerun-mode deterministic-mode enable-experimental use-mcore-models
    use-legacy-models spec transformer-impl use-flash-attn fp8-* first-last-layers-bf16
    num-layers-at-* te-rng-tracker cuda-graph-* enable-cuda-graph external-cuda-graph
    no-gradient-accumulation-fusion gradient-accumulation-fusion no-masked-softmax-fusion
    cross-entropy-* no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion
    apply-rope-fusion apply-layernorm-1p use-fused-* calculate-per-token-loss
    attention-softmax-in-fp32 apply-query-key-layer-scaling no-persist-layer-norm
    fp32-residual-connection no-position-embedding rotary-* rope-* use-rope-scaling
    use-rotary-position-embeddings no-rope-freq mscale* original-max-position-embeddings beta-*
    norm-epsilon layernorm-epsilon moe-aux-loss-coeff moe-z-loss-coeff moe-router-* moe-token-*
    moe-permute-fusion moe-shared-expert-overlap moe-grouped-gemm moe-enable-deepep
    moe-per-layer-logging moe-use-* moe-pad-* moe-expert-capacity-factor moe-flex-* moe-deepep-*
    mtp-loss-scaling-factor mtp-num-layers no-weight-decay-cond-type kitchen-* inference-* fsdp-*
    init-model-with-meta-device suggested-communication-unit-size main-grads-dtype main-params-dtype
    overlap-cpu-optimizer-d2h-h2d use-torch-optimizer-for-cpu-offload no-pin-cpu-*
    outer-dp-sharding-strategy squared-relu quick-geglu window-attn-skip-freq softmax-type
    hidden-dropout attention-dropout enable-ft-package calc-ft-timeouts test-mode rl-* grpo-* env.*
    torchrun.* {UNRESOLVED}
"""


def flag_of(name: str) -> str:
    """Return the flag of a field.

    >>> flag_of("num_moe_experts"), flag_of("hidden_size")
    ('num-experts', 'hidden-size')
    """
    return NAMES.get(name, name.replace("_", "-"))


def getter(document: Mapping[str, Any]) -> Get:
    """Return the fields that flags set."""
    flags = dict(document)

    def get(name: str) -> Any:
        value = flags.get(flag_of(name))
        if name in COUNTS:
            return value if type(value) is int else None
        match name:
            case "add_bias_linear":
                return not flags.get("disable-bias-linear", False)
            case "gated_linear_unit":
                return bool(flags.get("swiglu"))
            case "group_query_attention":
                return bool(flags.get("group-query-attention"))
            case "grad_reduce_in_fp32":
                in_fp32 = True if flags.get("accumulate-allreduce-grads-in-fp32") else None
                return False if flags.get("grad-reduce-in-bf16") else in_fp32
            case "position_embedding_type":
                return "rope" if flags.get("use-rotary-position-embeddings") else value
            case "add_qkv_bias":
                return bool(value) or not flags.get("disable-bias-linear", False)
        return value

    return get


def _written(job: Job) -> dict[str, Any]:
    """Return all flags of a job; False and None are left out."""
    model, fields = model_fields(job.model), fields_of(job)
    gated, bias = model.pop("gated_linear_unit"), model.pop("add_bias_linear")
    activation = model.pop("activation")
    gradients = fields.pop("grad_reduce_in_fp32")
    model["add_qkv_bias"] = model["add_qkv_bias"] and not bias
    found = {flag_of(name): value for name, value in (*model.items(), *fields.items())}
    pattern = model.get("moe_layer_freq")
    groups = model.get("num_query_groups")
    is_grouped = groups is not None and groups != model["num_attention_heads"]
    found |= {
        "swiglu": gated and activation in ("silu", "swish"),
        "squared-relu": activation == "relu2",
        "disable-bias-linear": not bias,
        "group-query-attention": is_grouped,
        "num-query-groups": groups if is_grouped else None,
        "grad-reduce-in-bf16": gradients is False,
        "accumulate-allreduce-grads-in-fp32": gradients is True,
        "moe-layer-freq": None if pattern is None else "(" + _pattern(pattern) + ")",
        "window-size": ",".join(map(str, model["window_size"])) if "window_size" in model else None,
        "ckpt-format": "fsdp_dtensor" if fields["use_megatron_fsdp"] else None,
        "tokenizer-type": "NullTokenizer",
        "mock-data": True,
        "train-iters": 100,
        "lr": 3e-4,
    }
    return {
        name: value for name, value in found.items() if value is not None and value is not False
    }


def _pattern(layers: list[int]) -> str:
    """Return ``[0]*3+[1]*58`` for the layers with (1) and without (0) experts."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1][1] += 1
        else:
            runs.append([layer, 1])
    return "+".join(f"[{layer}]*{number}" for layer, number in runs)


def _launcher(job: Job) -> dict[str, Any]:
    nodes, local = job.cluster.num_nodes, job.cluster.gpus_per_node
    where = {
        "torchrun.nnodes": nodes,
        "torchrun.nproc-per-node": local,
        "torchrun.node-rank": '"$RANK"',
        "torchrun.master-addr": '"$HEAD"',
    }
    alone = {"torchrun.standalone": True, "torchrun.nproc-per-node": local}
    return {**(alone if nodes == 1 else where), "torchrun.program": PROGRAM}


def values(job: Job) -> dict[str, Any]:
    """Return the flags, the launcher's options and the exported variables of a job."""
    # validate_args: tensor parallelism needs one queue, FSDP forbids it
    environment = {"env.CUDA_DEVICE_MAX_CONNECTIONS": 1} if job.plan.zero_stage < 2 else {}
    return {**environment, **_launcher(job), **_written(job)}


def _stated(name: str, value: Any, source: Source) -> Settings:
    if name in COUNTS and type(value) is not int:
        raise ValueError(value)
    return {DIRECT[name]: value} if name in DIRECT else {}


def complete(settings: Settings, source: Source) -> Settings:
    """Return the options that flags state together."""
    return settings_of_fields(getter(source.document))


def remarks(source: Source) -> list[str]:
    """Return what the flags state that is not priced, and variables without a value."""
    get = getter(source.document)
    found = list(notes_of_fields(get))
    if remark := config_of_fields(get)[1]:
        found.append(remark)
    empty = [name for name in COUNTS if source.document.get(flag_of(name)) is True]
    if empty and (unset := source.get(UNRESOLVED)):
        found.append(f"the script does not set {', '.join(unset)}")
    return found


def model_config(source: Source) -> dict[str, Any] | None:
    """Return the config.json of the model that the flags describe."""
    return config_of_fields(getter(source.document))[0]


def restate(leaves: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags, with virtual stages by their layers where a script has them so."""
    found = dict(leaves)
    virtual = found.get(flag_of(VIRTUAL))
    if LAYERS_OF_VIRTUAL not in document or virtual is None:
        return found
    layers = found["num-layers"] // (found["pipeline-model-parallel-size"] * virtual)
    del found[flag_of(VIRTUAL)]
    return {**found, LAYERS_OF_VIRTUAL: layers}


def check(document: Mapping[str, Any], job: Job) -> None:
    """Raise for plans that Megatron Core refuses."""
    check_fields(job)


DIRECT: Final = {
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "seq_length": "seq_len",
}
COUNTS: Final = frozenset(
    name for name in CARRIES if name.endswith(("_parallel_size", "_batch_size", "_length"))
) | set(
    names_in("""
    num_distributed_optimizer_instances recompute_num_layers num_layers hidden_size ffn_hidden_size
    num_attention_heads num_query_groups vocab_size kv_channels num_moe_experts moe_ffn_hidden_size
    moe_router_topk num_layers_per_virtual_pipeline_stage max_position_embeddings
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage padded_vocab_size
    q_lora_rank kv_lora_rank qk_head_dim v_head_dim qk_pos_emb_head_dim
    moe_shared_expert_intermediate_size
    """)
)
OF_MODEL: Final = names_in("""
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    max_position_embeddings position_embedding_type normalization layernorm_epsilon rotary_base
    rotary_percent window_size add_qkv_bias qk_layernorm untie_embeddings_and_output_weights
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    attention_dropout hidden_dropout num_moe_experts moe_router_topk moe_ffn_hidden_size
    moe_shared_expert_intermediate_size moe_layer_freq moe_grouped_gemm moe_token_dispatcher_type
    vocab_size
""")
_REPLACE: Final = ("replace with yours",)  # comment of the flags of data

KEYS: Final = (
    *(
        Key(flag_of(name), CARRIES.get(name, ()), read=partial(_stated, name))
        for name in (*CARRIES, *OF_MODEL)
        if name != "grad_reduce_in_fp32"
    ),
    *(Key(flag, CARRIES.get(name, ())) for flag, name in OWN.items()),
    *(Key(flag, _REPLACE) for flag in ("tokenizer-type", "mock-data")),
    *without_effect("squared-relu ckpt-format train-iters lr"),
    *without_effect("""
        env.CUDA_DEVICE_MAX_CONNECTIONS torchrun.standalone torchrun.nnodes torchrun.nproc-per-node
        torchrun.node-rank torchrun.master-addr torchrun.program
    """),
    *without_effect(map(flag_of, ALSO_READ)),
    *without_effect(NO_EFFECT),
)

TARGET: Final = Target(
    name="megatron",
    file=FILE,
    syntax=FLAGS,
    keys=KEYS,
    elsewhere=ELSEWHERE,
    processes=("torchrun.nproc-per-node", "torchrun.nnodes"),
    recognises=lambda document: sum(mark in document for mark in MARKS) >= 2,
    launch=lambda job: (
        f"bash {FILE}"
        if job.cluster.num_nodes == 1
        else f"RANK=NUMBER HEAD=ADDRESS_OF_NODE_0 bash {FILE}  (on every node)"
    ),
    complete=complete,
    check=check,
    values=values,
    remarks=remarks,
    model_config=model_config,
    restate=restate,
)
