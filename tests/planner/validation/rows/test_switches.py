"""Switches that a run states: what each phrasing changes under any trainer, and its cost."""

from typing import Any

import pytest

from cost_models.model.spec import ModelSpec
from planner.validation.pricing import predict_cases
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.reading import Unpriceable
from planner.validation.rows.runs_file import Row

LLAMA = {
    "model": "llama-2-7b",
    "seq_len": 4096,
    "gpu": "H100-SXM",
    "num_gpus": 16,
    "tensor_parallel": 4,
    "micro_batch_size": 1,
    "precision": "bf16",
    "framework": "Megatron-Core",
}


def case(**cells: Any) -> Case:
    return case_of(Row(line=2, **{**LLAMA, **cells}))


def seconds(**cells: Any) -> float:
    one = case(**cells)
    found, refused = predict_cases([one])
    assert not refused
    return found[one.row.name].step


TRAFFIC = {
    ("chunked_tensor_traffic", True): [
        "tp_comm_overlap",
        "TP overlap on",
        "user buffers",
        "tp-comm-overlap=true",
        "async TP",
        "asynchronous tensor parallelism",
    ],
    ("chunked_tensor_traffic", False): [
        "tp_comm_overlap=False",
        "no TP comm overlap",
        "without tp-comm-overlap",
        "async TP off",
    ],
    ("tensor_reduction", False): [
        "--no-async-tensor-model-parallel-allreduce",
        "async tp all-reduce off",
    ],
    ("tensor_reduction", True): ["async-tensor-model-parallel-allreduce", "tp_comm_overlap=0"],
    ("data_parallel", 1.0): [
        "overlap_grad_reduce",
        "overlapped gradient reduction",
        "--overlap-grad-reduce",
        "overlap_comm=true",
    ],
    ("data_parallel", 0.0): [
        "overlap_grad_reduce=False",
        "no overlap-grad-reduce",
        "gradient reduction overlapped: no",
    ],
    ("weight_gathers", True): [
        "overlap_param_gather",
        "overlapped parameter gathers",
        "--overlap-param-gather",
    ],
    ("weight_gathers", False): ["overlap_param_gather=0", "no overlap-param-gather"],
    ("stage_messages", True): ["overlap_p2p_comm", "p2p overlap", "pp_comm_async=True"],
    ("stage_messages", False): [
        "--no-overlap-p2p-communication",
        "overlap_p2p_comm=False",
        "pp_comm_async=False",
    ],
    ("expert_exchange_between_nodes", True): [
        "overlap_moe_expert_parallel_comm",
        "MoE all-to-all hidden behind 1F1B",
        "1F1B a2a overlap",
        "EP overlap",
        "overlap of the expert communication",
        "all-to-all overlap",
    ],
    ("expert_exchange_inside_nodes", False): [
        "overlap_moe_expert_parallel_comm=False",
        "no EP overlap",
        "overlap of the all-to-all off",
    ],
}


@pytest.mark.parametrize(
    ("words", "figure"), [(text, key) for key, texts in TRAFFIC.items() for text in texts]
)
@pytest.mark.parametrize("framework", ["Megatron-Core", "Megatron-LM"])
def test_overlap(words: str, figure: tuple[str, Any], framework: str) -> None:
    software = case(framework=framework, notes=words).scenario.software
    assert getattr(software.overlap, figure[0]) == figure[1]
    assert "+" not in software.name  # the interval is that of the trainer's own runs


@pytest.mark.parametrize("framework", ["Megatron-LM (2021)", "Megatron-DeepSpeed", "GPT-NeoX"])
@pytest.mark.parametrize("words", ["tp_comm_overlap", "async TP all-reduce", ""])
def test_releases_without_asynchronous_tensor_parallelism(framework: str, words: str) -> None:
    overlap = case(framework=framework, notes=words or None).scenario.software.overlap
    assert not overlap.tensor_reduction
    assert not overlap.chunked_tensor_traffic


def test_overlap_costs_no_more_than_waiting() -> None:
    tensor = [
        seconds(notes=words)
        for words in (
            "tp_comm_overlap",
            "tp_comm_overlap=0",
            "tp_comm_overlap=0, no async tp all-reduce",
        )
    ]
    assert tensor == sorted(tensor)
    assert tensor[0] < tensor[1] < tensor[2]
    assert seconds(notes="overlap_grad_reduce=0") > seconds(notes="overlap_grad_reduce")


def test_all_to_all_hides_behind_other_micro_batches() -> None:
    mixture = {"model": "mixtral-8x7b", "tensor_parallel": 1, "expert_parallel": 8, "zero_stage": 1}

    def hidden(batch: int) -> float:
        each = {**mixture, "global_batch_size": batch}
        return seconds(**each) - seconds(**each, notes="EP overlap")

    assert hidden(16) == 0.0  # one micro-batch has no other
    assert 0.0 < hidden(32) / 2 < hidden(64) / 4


METHODS = {
    "ring": ["ring attention", "cp_comm_type=p2p", "context parallelism by ring", "CP ring", ""],
    "allgather": [
        "cp_comm_type=all_gather",
        "all-gather CP",
        "context parallelism by all-gather",
        "context_parallel_rotate_method=allgather",
    ],
    "ulysses": ["Ulysses", "DeepSpeed-Ulysses", "cp_comm_type=a2a", "CP all-to-all"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in METHODS.items() for text in texts]
)
def test_context_parallelism(words: str, expected: str) -> None:
    found = case(context_parallel=2, notes=words or None)
    assert found.plan.context_parallel_method == expected
    assert ("context parallelism by ring (default: it is not given)" in found.defaults) == (
        not words
    )
    assert (
        case(notes=words or None).plan.context_parallel_method == "ring"
    )  # no context parallelism


RECIPES = {
    ("cast_bytes", 4.0): ["fp8", "FP8 (delayed scaling)", "fp8, recipe=delayed"],
    ("cast_bytes", 6.0): [
        "FP8 tensorwise",
        "fp8-recipe=tensorwise",
        "FP8-CS",
        "fp8, current scaling",
        "FP8 (per-tensor scaling)",
    ],
    ("scaling_bytes", 4.0): [
        "FP8 rowwise",
        "float8 row-wise",
        "fp8, row-wise scaling",
        "fp8 (axiswise)",
    ],
    ("matmul_share", 0.765): [
        "FP8 blockwise",
        "fp8-recipe=blockwise",
        "FP8, block scaling",
        "fp8 (128x128)",
    ],
    ("cast_bytes", 4.06): ["MXFP8", "fp8, mxfp8 recipe", "FP8-MX"],
}


@pytest.mark.parametrize(
    ("words", "figure"), [(text, key) for key, texts in RECIPES.items() for text in texts]
)
def test_recipes_of_fp8(words: str, figure: tuple[str, float]) -> None:
    scenario = case(precision=words).scenario
    assert scenario.workload.precision == "fp8"
    assert getattr(scenario.software.fp8, figure[0]) == figure[1]
    assert case(precision="fp8", notes=words).scenario.software.fp8 == scenario.software.fp8


def test_a_recipe_costs_what_its_rate_and_its_casts_cost() -> None:
    steps = {
        words: seconds(precision=words, tensor_parallel=1)
        for words in ("fp8", "fp8 tensorwise", "fp8 rowwise", "fp8 blockwise")
    }
    plain, tensorwise, rowwise, blockwise = steps.values()
    assert plain < tensorwise < min(rowwise, blockwise)
    assert seconds(precision="fp8", notes="fp8 attention") < seconds(precision="fp8")
    assert seconds(precision="bf16", notes="fp8 attention") == seconds(precision="bf16")


def test_weights_gathered_in_8_bits() -> None:
    slow = {
        "precision": "fp8",
        "framework": "torchtitan, compile",
        "tensor_parallel": 1,
        "zero_stage": 3,
        "inter_link_gbps_per_gpu": 1.0,
    }
    assert 0.5 < seconds(**slow, notes="float8 all-gather") / seconds(**slow) < 0.8


@pytest.mark.parametrize("words", ["nvfp4", "NVFP4", "MXFP4", "fp4", "NV-FP4"])
def test_training_in_4_bits(words: str) -> None:
    blackwell = {"gpu": "GB200", "tensor_parallel": 1}
    scenario = case(**blackwell, precision=words).scenario
    assert scenario.workload.precision == "fp4"
    assert scenario.software.fp8.scale_bytes == (0.031 if "MX" in words else 0.0625)
    assert seconds(**blackwell, precision=words) < seconds(**blackwell, precision="mxfp8")
    one = case(precision=words)
    found, refused = predict_cases([one])
    assert not found
    assert "no rate is known for fp4" in refused[one.row.name]


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("18 16", None),
        ("17,17", (16, 16)),
        ("16 16", (16, 16)),
        ("16/18", (15, 17)),
        ("embedding and loss: 17 17", (16, 16)),
    ],
)
def test_stages_count_embedding_and_head(words: str, sizes: tuple[int, int] | None) -> None:
    ranges = case(
        pipeline_parallel=2, layers_by_stage=words, global_batch_size=8
    ).scenario.layer_ranges
    assert ranges is not None
    assert tuple(last - first for first, last in ranges) == (sizes or (17, 15))


LATENT = {
    "model": "a mixture",
    "model_kind": "moe-mla",
    "num_layers": 27,
    "hidden_size": 2048,
    "num_heads": 16,
    "vocab_size": 102400,
    "ffn_hidden_size": 10944,
    "moe_ffn_hidden_size": 1408,
    "num_experts": 64,
    "experts_per_token": 6,
    "num_shared_experts": 2,
    "num_dense_layers": 1,
    "gated_mlp": True,
    "tensor_parallel": 1,
}


def test_ranks_of_latent_attention_are_cells() -> None:
    def model(**cells: int) -> ModelSpec:
        return case(**LATENT, **cells).scenario.model

    lite = model(
        q_lora_rank=0, kv_lora_rank=512, rope_head_dim=64, value_head_dim=128, head_dim=192
    )
    assert round(lite.num_parameters / 1e9, 2) == 15.71  # DeepSeek-V2-Lite: 15.7 billion
    with pytest.raises(Unpriceable, match="kv_lora_rank is empty"):
        case(**LATENT)
    assert model(kv_lora_rank=256).num_parameters < lite.num_parameters


def test_an_encoder_with_a_classification_head_has_no_vocabulary_of_logits() -> None:
    cells = {
        "model": "bert-large",
        "seq_len": 128,
        "tensor_parallel": 1,
        "num_gpus": 1,
        "micro_batch_size": 64,
    }
    masked, labels = case(**cells), case(**cells, model_kind="encoder-classifier")
    assert (
        labels.scenario.model.num_parameters - masked.scenario.model.num_parameters
        == -30522 - 3 * 1024 + 2 * 1024
    )
    assert seconds(**cells, model_kind="encoder-classifier") < seconds(**cells)


GPUS = {
    "RTX-A4000": ["RTX A4000", "A4000"],
    "RTX-A4500": ["RTX A4500", "A4500"],
    "RTX-A5500": ["RTX A5500", "NVIDIA RTX A5500"],
    "A10": ["A10", "NVIDIA A10"],
    "RTX-3080": ["RTX 3080", "GeForce RTX 3080"],
    "TITAN-RTX": ["RTX TITAN", "Titan RTX"],
    "Quadro-RTX-8000": ["Quadro RTX 8000", "RTX 8000"],
    "MI250-GCD-64GB": ["MI250", "AMD MI250", "MI250 (one die)"],
    "MI250X-GCD-64GB": ["MI250X", "AMD Instinct MI250X"],
    "L40": ["L40", "NVIDIA L40"],
    "RTX-5060-Ti-16GB": ["5060 Ti", "RTX 5060 Ti"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in GPUS.items() for text in texts]
)
def test_accelerators(words: str, expected: str) -> None:
    assert (
        case(gpu=words, num_gpus=1, tensor_parallel=1).scenario.cluster.accelerator.name == expected
    )


@pytest.mark.parametrize(
    ("words", "share"),
    [("FlashAttention-2", 0.6), ("flash_attention_3", 1.0), ("FA4", 1.0), ("cuDNN attention", 1.0)],
)
@pytest.mark.parametrize("framework", ["Megatron-Core", "HF Trainer", "PyTorch FSDP2", "torchtune"])
def test_generation_of_flash_attention(words: str, share: float, framework: str) -> None:
    cells = {"framework": framework, "notes": words, "tensor_parallel": 1}
    software = case(**cells).scenario.software
    assert software.kernels.flash_share_since_hopper == share


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-8b"])
def test_mixtures_of_automodel_run_on_transformer_engine(model: str) -> None:
    kind = "moe" if model == "qwen3-30b-a3b" else "dense"
    cells = {"framework": "NeMo Automodel", "model": model, "model_kind": kind}
    software = case(**cells, tensor_parallel=1).scenario.software
    assert (software.kernels.rms_norm_accesses == 2.0) == (kind == "moe")
    assert (software.activations.expert_outputs_saved == 0.0) == (kind == "moe")


def test_trl_of_2026_takes_cudnns_attention() -> None:
    kernels = case(framework="TRL SFTTrainer", notes="chunked_nll loss").scenario.software.kernels
    assert kernels.flash_share_since_hopper == 1.0
    older = case(framework="TRL SFTTrainer").scenario.software.kernels
    assert older.flash_share_since_hopper < 1.0


GRADIENTS = {
    "bf16": [
        "grad_reduce_in_bf16",
        "grad_reduce_in_fp32=False",
        "grad_reduce_in_fp32: false",
        "no accumulate-allreduce-grads-in-fp32",
        "grad_sync_dtype: bf16",
        "bf16 gradient reduction",
    ],
    "fp32": ["grad_reduce_in_fp32", "--accumulate-allreduce-grads-in-fp32", "grad_sync_dtype=fp32"],
}


@pytest.mark.parametrize(
    ("words", "precision"), [(text, key) for key, texts in GRADIENTS.items() for text in texts]
)
@pytest.mark.parametrize("framework", ["Megatron-Core", "Megatron-Bridge"])
def test_precision_of_main_gradients(framework: str, words: str, precision: str) -> None:
    workload = case(framework=framework, notes=words).scenario.workload
    assert workload.gradient_precision == precision


@pytest.mark.parametrize(
    ("framework", "words", "casts"),
    [
        ("Megatron Core", "torch.autocast over fp32 weights", True),
        ("Megatron-LM (2024)", "bf16 autocast", True),
        ("NeMo 23.08", "megatron_amp_O2=False", True),
        ("NeMo 24.07 (GPT pretraining)", None, True),
        ("NeMo 24.07 (GPT pretraining)", "megatron_amp_O2", False),
        ("NeMo 25.04", "bf16-mixed", False),
        ("Megatron Bridge", "bf16-mixed", False),
        ("Megatron Core", None, False),
    ],
)
def test_weights_that_autocast_casts_under_megatron(
    framework: str, words: str | None, casts: bool
) -> None:
    precision = case(framework=framework, notes=words).scenario.software.precision
    assert precision.autocasts_weights is precision.fp32_hidden_states is casts
    assert case(framework=framework, notes=words).scenario.software.name == "nemo"


@pytest.mark.parametrize(
    ("words", "kernel", "accesses"),
    [
        ("--transformer-impl local", "eager", (16.0, 4.0)),
        ("local layer spec, no Transformer Engine", "eager", (16.0, 4.0)),
        ("local layer spec, cuDNN fused attention", "flash", (16.0, 4.0)),
        ("local layers, bias-dropout fusion off", "eager", (16.0, 5.0)),
        (None, "flash", (6.0, 4.0)),
    ],
)
def test_megatrons_own_layers(
    words: str | None, kernel: str, accesses: tuple[float, float]
) -> None:
    scenario = case(notes=words).scenario
    kernels = scenario.software.kernels
    assert scenario.workload.attention_kernel == kernel
    assert (kernels.eager_scores_accesses, kernels.residual_accesses) == accesses
    assert seconds(notes=words) >= seconds()
    plain = case(framework="PyTorch FSDP2", notes=words, tensor_parallel=1).scenario
    assert plain.workload.attention_kernel == "flash"


@pytest.mark.parametrize(
    "words", ["VPP=2", "vp_size: 2", "interleaving_size=2", "INTERLEAVED_PIPELINE=2"]
)
def test_virtual_stages_in_notes(words: str) -> None:
    assert case(pipeline_parallel=2, notes=words).plan.virtual_stages == 2
    assert case(pipeline_parallel=2, virtual_stages=4, notes=words).plan.virtual_stages == 4


@pytest.mark.parametrize("words", ["lora dim=16", "LoRA, adapter_dim: 16", "lora r=16"])
def test_dim_is_the_rank_of_adapters(words: str) -> None:
    assert case(framework="NeMo", peft=words).scenario.workload.adapter_rank == 16
