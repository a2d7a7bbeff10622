"""Rows as tables of trainers that nothing was compared with would phrase them."""

from typing import Any

import pytest

from cost_models.plan.plan import PlanTable
from cost_models.pricing.estimate import price
from cost_models.units import GIB
from planner.validation.measurement import measured_memory
from planner.validation.pricing import why_impossible
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.counts import not_understood
from planner.validation.rows.reading import Unpriceable
from planner.validation.rows.runs_file import Row
from planner.validation.rows.vocabulary import vocabulary

CELLS = {"model": "llama-2-7b", "seq_len": 4096, "gpu": "A100-SXM4-80GB", "num_gpus": 16}


def case(**cells: Any) -> Case:
    return case_of(Row(line=2, **{**CELLS, **cells}))


GPUS = {
    "A100-SXM-40GB": ["A100-SXM4-40GB", "NVIDIA A100 (40GB)", "A100 40G"],
    "A100-PCIe-40GB": ["A100-PCIE-40GB"],
    "A100-PCIe-80GB": ["A100 PCIE", "A100-PCIe-80GB"],
    "A100-SXM-64GB": ["A100-SXM4-64GB", "A100-64GB (Leonardo, custom)"],
    "V100-SXM2-32GB": ["V100", "Tesla V100", "DGX-1 V100-32GB"],
    "V100-SXM2-16GB": ["V100-16GB-SXM2", "V100 (16 GB)"],
    "GB200-186GB": ["GB200 NVL72", "GB200"],
    "H800-SXM-80GB": ["H800", "HGX H800"],
    "H100-SXM-64GB": ["H100 64GB", "H100-SXM-64GB", "H100 64GB MareNostrum 5"],
    "A800-PCIe-80GB": ["A800 PCIe", "A800 80GB PCIe"],
    "H20-141GB": ["H20-3e", "H20 141GB"],
    "Ascend-910B": ["910B", "Ascend910-64G", "Huawei Ascend 910B3"],
    "T4": ["Tesla T4", "NVIDIA T4"],
    "H100-SXM-80GB": ["H100 SXM5 80GB HBM3 700W", "H100 80GB HBM3 SXM", "A3 Mega H100"],
    "H100-SXM-96GB": ["H100 SXM 96GB HBM2e", "H100-SXM5-94GB"],
    "GH200-96GB": ["GH200 120GB", "NVIDIA GH200 Grace Hopper Superchip"],
    "B200-SXM-180GB": ["HGX B200", "B200", "8 x B200 180GB", "8xB200"],
    "A800-SXM-80GB": ["A800-80G SXM", "A800-SXM4-80G"],
    "MI300X": ["AMD Instinct MI300X OAM 192GB HBM3"],
    "MI355X": ["MI355X 288GB HBM3e"],
    "TPU-v4": ["v4-256", "TPU v4-4096"],
    "TPU-v5e": ["v5litepod-256", "TPU v5e-256"],
    "TPU-v5p": ["TPU v5p-512"],
    "TPU-v6e": ["Trillium (v6e-8)"],
    "Gaudi3": ["Intel Gaudi 3 HL-325L", "Gaudi3 OAM"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, name) for name, texts in GPUS.items() for text in texts]
)
def test_names_of_accelerators(words: str, expected: str) -> None:
    assert case(gpu=words).scenario.cluster.accelerator.name == expected


@pytest.mark.parametrize(
    "words", ["g4dn.12xlarge + p3.8xlarge", "3 x g4dn.12xlarge, 1 x p3.8xlarge"]
)
def test_nodes_of_several_kinds_have_the_slowest_network(words: str) -> None:
    found = case(gpu="T4 + V100", node=words, gpus_per_node=4, framework="Megatron-LM v1.1.5")
    cluster = found.scenario.cluster
    assert cluster.accelerator.name == "T4"
    alone = case(gpu="V100", node="p3.8xlarge", gpus_per_node=4).scenario.cluster
    assert cluster.tiers[-1].bandwidth.value == alone.tiers[-1].bandwidth.value
    assert any("slowest" in text for text in found.defaults)
    unsaid = case(gpu="V100", node=words, gpus_per_node=4, framework="Megatron-LM v1.1.5")
    assert unsaid.scenario.cluster.accelerator.name == "T4"


def test_what_is_not_priced_is_not_taken_for_a_card_of_a_similar_name() -> None:
    for name in ("Biren BR106", "BR106 32GB"):
        with pytest.raises(Unpriceable, match="it is not priced"):
            case(gpu=name)
    for name in ("RTX 2080 Laptop", "RTX 4090 480GB", "TPU v2-32"):
        with pytest.raises(Unpriceable, match="is not in the catalogue"):
            case(gpu=name)


def test_stated_memory_replaces_that_of_a_known_card() -> None:
    whole = case(gpu="RTX 4090").scenario.cluster
    for cells in ({"gpu": "RTX 4090 48GB"}, {"gpu": "RTX 4090", "gpu_mem_gb": 48.0}):
        found = case(**cells)
        card = found.scenario.cluster.accelerator
        assert card.memory_capacity.value == 48 * GIB
        assert card.memory_bandwidth == whole.accelerator.memory_bandwidth
        assert found.scenario.cluster.tiers == whole.tiers
        assert "RTX-4090 with 48 GB of memory" in " ".join(found.defaults)
    # a name that states its memory, and the rounded memory of a card
    for cells in ({"gpu": "MI250X", "gpu_mem_gb": 128.0}, {"gpu": "L40S", "gpu_mem_gb": 48.0}):
        assert "in the catalogue" not in " ".join(case(**cells).defaults)


TRAINERS = {
    ("nemo", 1): [
        "SimuMax (Megatron Core)",
        "simumax",
        "NeMo (MLPerf v4.1)",
        "FlagPerf megatron",
        "Megatron-LM (FlagPerf)",
        "FlagPerf (FlagScale)",
    ],
    ("hf-trainer", 0): ["swift LoRA", "ms-swift 2.6", "modelscope/ms-swift"],
    ("hf-trainer+deepspeed-zero3+deepspeed-auto-buckets+adamw-fused", 3): [
        "Qwen (DeepSpeed ZeRO-3)",
        "Qwen finetune.py",
    ],
    ("hf-trainer+deepspeed-zero3+deepspeed-auto-buckets", 3): ["ms-swift, zero3"],
    ("hf-trainer+deepspeed-zero3+adamw-fused", 3): ["FlagPerf deepspeed, ZeRO-3"],
    ("hf-trainer+deepspeed-zero2+deepspeed-two-buckets+adamw-fused", 2): ["Qwen, ZeRO-2"],
    ("hf-trainer+deepspeed-zero2+deepspeed-two-buckets+adamw-fused+gptq-operators", 2): [
        "Qwen (Q-LoRA)"
    ],
    ("hf-trainer", 3): ["fsdp_qlora bnb-4bit", "FSDP QLoRA (Answer.AI)"],
    ("torch-trainer+autocast", 0): ["timm"],
    ("torch-trainer+adamw-fused", 0): ["torchao"],
    ("torch-trainer+fsdp2", 3): ["modalities FSDP2"],
    ("torch-trainer", 3): ["modalities"],
    ("hf-trainer+fsdp2+adamw-for-loop", 3): ["NeMo-RL SFT (May 2025)", "NVIDIA NeMo RL"],
    ("torchtitan", 3): ["torchtitan + torchao, compile"],
    ("megatron-deepspeed", 0): ["BigScience Megatron-DeepSpeed", "Megatron-DeepSpeed (BigScience)"],
    ("internevo", 1): ["InternEvo v0.4", "InternLM/InternEvo"],
    ("internevo+fsdp2", 3): ["InternEvo (isp)", "InternEvo, tensor mode isp"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in TRAINERS.items() for text in texts]
)
def test_trainers_and_how_they_shard(words: str, expected: tuple[str, int]) -> None:
    found = case(framework=words)
    assert (found.scenario.software.name, found.plan.zero_stage) == expected
    assert not any("trainer unknown" in text for text in found.defaults)


@pytest.mark.parametrize(
    ("gpu", "accelerator", "gigabits"),
    [
        ("p3.8xlarge", "V100-SXM2-16GB", 2.5),
        ("4 g4dn.12xlarge nodes", "T4", 12.5),
        ("V100-16GB (p3.8xlarge)", "V100-SXM2-16GB", 2.5),
        ("3x p3.8xlarge (V100) + 1x g4dn.12xlarge (T4)", "T4", 2.5),
        ("3x4 V100 (p3.8xlarge) and 1x4 T4 (g4dn.12xlarge)", "T4", 2.5),
    ],
)
def test_instances_as_accelerators(gpu: str, accelerator: str, gigabits: float) -> None:
    cluster = case(gpu=gpu, model="gpt2", seq_len=1024).scenario.cluster
    assert cluster.accelerator.name == accelerator
    assert cluster.gpus_per_node == 4
    assert cluster.tiers[-1].bandwidth.value == pytest.approx(gigabits * 1e9 / 8)


def test_torchtune_of_2025_has_a_loss_in_chunks_and_expandable_segments() -> None:
    def of(framework: str) -> tuple[float, bool]:
        software = case(framework=framework, precision="bf16").scenario.software
        return software.loss.fp32_logits_copies, software.memory.expandable_segments

    assert of("torchtune (2024)") == (3.0, False)
    assert of("torchtune (2025)") == of("torchtune, PyTorch 2.10") == (1.125, True)
    assert of("torchtune (2026), torch.compile") == (0.5, True)


def test_accelerate_of_2025_upcasts_sharded_weights() -> None:
    def masters(framework: str, **cells: Any) -> bool:
        usual = {"framework": framework, "zero_stage": 3, "precision": "bf16", "peft": "none"}
        return case(**{**usual, **cells}).scenario.workload.master_weights

    for release in ("2025", "transformers 4.48", "accelerate 1.3"):
        assert masters(f"HF Trainer ({release}), FSDP")
        assert not masters(f"HF Trainer ({release}), FSDP", precision="pure bf16")
        assert not masters(f"HF Trainer ({release}), FSDP", optimizer="adamw (pure bf16)")
    for trainer in ("TRL SFTTrainer (Accelerate FSDP2)", "HF Trainer, FSDP2", "Axolotl, FSDP2"):
        assert masters(trainer)
        assert not masters(trainer, precision="pure bf16")
        assert not masters(trainer, optimizer="adamw (pure bf16)")
        assert not masters(trainer, notes="pure bf16")
        assert not masters(trainer, peft="lora r=8")
    assert not masters("HF Trainer (2024), FSDP")
    assert not masters("HF Trainer (2025), DDP", zero_stage=0)
    assert not masters("HF Trainer (2025), FSDP", peft="lora r=8")


def test_mixed_precision_of_fsdp2_is_not_autocast() -> None:
    def name(**cells: str) -> str:
        usual = {"framework": "own loop, PyTorch FSDP2", "precision": "bf16"}
        return case(**{**usual, **cells}).scenario.software.name

    assert name(notes="bf16 mixed precision") == name() == "torch-trainer+fsdp2"
    assert name(notes="bf16 autocast") == "torch-trainer+fsdp2+autocast"
    assert name(framework="own loop", notes="bf16 mixed precision") == "torch-trainer+autocast"


def test_activations_of_llm_c_are_one_kernel() -> None:
    found = case(framework="llm.c", model="gpt2").scenario.software
    assert dict(found.kernels.unfused_activation_accesses) == {}
    assert found.activations.activation_saved["default"] == 1.0


RECIPE = "q,v,o,gate,up,down"  # torchtune's


@pytest.mark.parametrize(
    ("cells", "rank", "targets"),
    [
        ({"framework": "swift 2.4", "peft": "lora"}, 8, "q,k,v"),
        ({"framework": "swift 2.4", "peft": "lora", "notes": "target all, rank 16"}, 16, "all"),
        ({"framework": "torchtune", "peft": "lora", "notes": "memory of rank 1, r=4"}, 4, RECIPE),
        ({"framework": "ms-swift 3.1", "peft": "lora"}, 8, "all"),
        ({"framework": "swift LoRA"}, 8, "all"),
        ({"framework": "fsdp_qlora", "peft": "custom_qlora"}, 64, "q,k,v,gate,up,down"),
        ({"framework": "Qwen finetune.py", "peft": "LoRA"}, 64, "all"),
        ({"framework": "MLPerf LoRA, TRL", "peft": "LoRA r=16 (qkv_proj, o_proj)"}, 16, "q,k,v,o"),
        ({"framework": "NeMo", "peft": "lora r=32 all"}, 32, "all"),
        ({"framework": "NeMo", "peft": "lora r=32, all attention matrices"}, 32, "q,k,v,o"),
        ({"framework": "NeMo", "peft": "lora r=32 q,v of all layers"}, 32, "q,v"),
    ],
)
def test_adapters_by_a_trainers_defaults(cells: dict[str, Any], rank: int, targets: str) -> None:
    workload = case(**cells).scenario.workload
    assert workload.adapter in ("lora", "qlora")
    assert (workload.adapter_rank, workload.adapter_targets) == (rank, targets)


def test_layers_that_alone_are_trained() -> None:
    """LISA draws some besides embedding and head, LLaMA Pro adds copies of some."""
    layer, tables = 202_383_360, 2 * 32_000 * 4096 + 4096  # of Llama-2-7B; its last norm
    whole = case().scenario.model.num_parameters

    def sizes(peft: str, notes: str | None = None) -> tuple[int, int]:
        found = case(framework="ms-swift", peft=peft, notes=notes, num_gpus=1)
        assert found.scenario.workload.adapter == "none"
        assert not not_understood(found.row)
        return found.scenario.model.num_trainable_parameters, found.scenario.model.num_parameters

    assert sizes("full + lisa") == (2 * layer + tables, whole)
    assert sizes("lisa", "lisa_activated_layers 8") == (8 * layer + tables, whole)
    assert sizes("llamapro") == (4 * layer, whole + 4 * layer)
    assert sizes("llama-pro, 8 blocks") == (8 * layer, whole + 8 * layer)
    with pytest.raises(Unpriceable, match=r"= 5 \(must be a divisor of 32\)"):
        sizes("llamapro, 5 blocks")


def test_embedding_and_head_are_trained_beside_adapters() -> None:
    """Copies of both are trained, the originals stay."""
    plain, ends = (case(peft=text).scenario.model for text in ("LoRA r=64", "LoRA (emb) r=64"))
    tables = 2 * 32_000 * 4096
    assert ends.num_trainable_parameters == plain.num_trainable_parameters + tables
    assert ends.num_parameters == plain.num_parameters + tables


@pytest.mark.parametrize(
    ("words", "optimizer", "in_backward"),
    [
        ("LOMO", "sgd", True),
        ("lomo (fused into the backward pass, no states)", "sgd", True),
        ("AdaLomo", "adafactor", True),
        ("Sophia-G", "adamw", False),
        ("ScheduleFree AdamW", "adamw", False),
        ("adamw_schedule_free", "adamw", False),
    ],
)
def test_optimizers_with_the_states_of_others(
    words: str, optimizer: str, in_backward: bool
) -> None:
    found = case(framework="DeepSpeed ZeRO-3", optimizer=words, precision="bf16").scenario
    assert found.workload.optimizer == optimizer
    assert found.software.optimizer.in_backward is in_backward
    assert found.workload.master_weights is not in_backward  # updated in 16 bits


@pytest.mark.parametrize(
    ("words", "masters"),
    [
        ("accumulate_grad_in_fp32: false", False),
        ("ZeRO-1, accumulate_grad_in_fp32=False", False),
        ("accumulate_grad_in_fp32=True", True),
        ("", True),
    ],
)
def test_nanotron_without_fp32_accumulators_updates_weights_in_16_bits(
    words: str, masters: bool
) -> None:
    found = case(framework="nanotron", notes=words or None).scenario
    sharded = case(framework="nanotron", notes=words or None, zero_stage=1).scenario
    assert sharded.workload.master_weights is found.workload.master_weights is masters
    assert (found.workload.gradient_precision == "bf16") is not masters
    assert found.software.gradients.in_both_precisions is masters


@pytest.mark.parametrize(
    ("framework", "recompute"),
    [("AXLearn", "modules:layernorm+mlp"), ("MaxText", "full"), ("Levanter (JAX)", "full")],
)
def test_trainers_whose_mesh_shards_weights(framework: str, recompute: str) -> None:
    found = case(framework=framework, zero_stage=None, recompute=None)
    assert found.scenario.software.name.startswith("xla")
    assert (found.plan.zero_stage, found.plan.recompute) == (3, recompute)


@pytest.mark.parametrize(
    ("notes", "pinned"),
    [
        ("rented machine", True),
        ("pin_memory false", False),
        ("pin_memory=false", False),
        ("unpinned memory", False),
        ("pageable memory", False),
    ],
)
def test_memory_of_what_is_offloaded(notes: str, pinned: bool) -> None:
    cells = {"framework": "DeepSpeed ZeRO-3", "offload": "optimizer and params to CPU"}
    found = case(**cells, notes=notes)
    assert found.scenario.software.communication.pinned_host_memory is pinned
    assert notes == "rented machine" or not_understood(found.row) == []


@pytest.mark.parametrize(("sequence", "weight"), [(16, 4), (8, 2), (16, 1), (4, 8)])
def test_weights_of_isp_are_a_group_of_their_own(sequence: int, weight: int) -> None:
    """Fewer ranks than a sequence has may share weights; all of them share the states."""
    found = case(framework="InternEvo", notes=f"isp, sp={sequence}, wp={weight}")
    assert found.plan.context_parallel == sequence
    assert found.plan.shard_ranks == weight
    assert why_impossible(found) is None
    memory = price(found.scenario, PlanTable.from_plans([found.plan])).memory
    parameters = found.scenario.model.num_parameters
    assert float(memory.weights[0]) == pytest.approx(parameters * (2 / weight + 4 / 16))
    assert float(memory.optimizer[0]) == pytest.approx(8 * parameters / 16)


@pytest.mark.parametrize("words", ["HYBRID_SHARD", "hsdp", "FSDP, hybrid sharding"])
def test_hybrid_shards_are_those_of_a_node_that_no_cell_describes(words: str) -> None:
    assert case(framework="modalities", notes=words).plan.dp_replicate == 2
    assert case(framework="modalities", notes=words, gpus_per_node=4).plan.dp_replicate == 4


@pytest.mark.parametrize(
    ("framework", "stage"),
    [("ms-swift", 2), ("HF Trainer", 1), ("ms-swift", 3), ("Qwen finetune.py", None)],
)
def test_deepspeed_by_its_stage_alone_has_fp32_partitions(
    framework: str, stage: int | None
) -> None:
    found = case(framework=framework, zero_stage=stage, peft="none").scenario
    assert "deepspeed-zero" in found.software.name
    assert found.workload.master_weights
    stated = case(framework=framework, zero_stage=2, peft="none", master_weights=False)
    assert not stated.scenario.workload.master_weights


def test_qwens_script_trains_embedding_and_head_beside_adapters_of_a_base_model() -> None:
    def trained(**cells: str) -> float:
        model = case(framework="Qwen finetune.py", **cells).scenario.model
        return model.num_trainable_parameters / 1e9

    base = trained(model="Qwen-7B", peft="LoRA")
    assert base > 1.2
    assert trained(model="Qwen-7B-Chat", peft="LoRA") < 0.2
    assert trained(model="Qwen-7B", peft="LoRA (chat)") < 0.2
    assert trained(model="Qwen-7B-Chat-Int4", peft="Q-LoRA") < 0.2
    assert trained(model="Qwen-7B", peft="LoRA (emb)") == base
    assert trained(model="Qwen-7B", peft="LoRA (no emb)") < 0.2
    assert trained(model="Qwen-7B", peft="LoRA w/ emb") == base
    assert trained(model="Qwen1.5-7B", peft="LoRA") == base  # not that release's script
    workload = case(framework="Qwen", model="Qwen-7B", peft="Q-LoRA").scenario.workload
    assert workload.quantisation == "int4"


@pytest.mark.parametrize(
    ("cells", "profile", "stage"),
    [
        ({"framework": "MLPerf Training v4.1"}, "nemo", 1),
        ({"framework": "MLPerf 4.0 (NVIDIA)", "model": "gpt3"}, "nemo", 1),
        ({"framework": "MLPerf BERT", "model": "bert-large", "seq_len": 512}, "apex-bert", 0),
        ({"framework": "MLPerf (HF reference)"}, "hf-trainer", 3),
        ({"framework": "MLPerf, PaxML", "gpu": "TPU v5p"}, "xla", 3),
        ({"framework": "torchao", "precision": "float8", "notes": "compile"}, "torchtitan", 3),
    ],
)
def test_trainers_behind_the_name_of_a_benchmark_or_library(
    cells: dict[str, Any], profile: str, stage: int
) -> None:
    found = case(**cells)
    assert found.scenario.software.name.split("+")[0] == profile
    assert found.plan.zero_stage == stage
    assert not_understood(found.row) == []


@pytest.mark.parametrize(
    ("words", "norm", "gelu"),
    [
        ({"notes": "LayerNorm and GELU by hand", "precision": "pure bf16"}, 3.0, 4.0),
        ({"notes": "own LayerNorm and GELU, written with elementary operations"}, 6.0, 7.0),
        ({"notes": "hand-written GELU", "precision": "pure bf16"}, 1.0, 1.0),
        ({"notes": "own GELU and layer norm", "precision": "bf16 autocast"}, 6.0, 7.0),
    ],
)
def test_layers_written_out_in_python(words: dict[str, Any], norm: float, gelu: float) -> None:
    found = case(framework="own PyTorch loop", **words)
    kept = found.scenario.software.activations
    autocasts = found.scenario.software.precision.autocasts_weights
    name = "gelu-autocast" if autocasts else "gelu"
    saved = kept.activation_saved
    assert (kept.layer_norm_saved, saved.get(name, saved["default"])) == (norm, gelu)
    assert not_understood(found.row) == []


@pytest.mark.parametrize(
    ("framework", "notes", "accesses"),
    [
        ("own PyTorch loop (torch 2.13)", "nn.RMSNorm, RoPE", 2.0),
        ("own PyTorch loop (March 2026)", "RMSNorm of torch", 2.0),
        ("own PyTorch loop (torch 2.6)", "nn.RMSNorm, RoPE", 4.0),
        ("own PyTorch loop (torch 2.6)", "fused RMSNorm of apex", 2.0),
        ("own PyTorch loop (torch 2.13)", "RMSNorm, RoPE", 4.0),
    ],
)
def test_norms_of_one_kernel(framework: str, notes: str, accesses: float) -> None:
    software = case(framework=framework, notes=notes).scenario.software
    assert software.kernels.rms_norm_accesses == accesses
    assert (software.activations.rms_norm_saved_fp32_bytes == 0.0) == (accesses == 2.0)


def test_compiled_layers_are_written_out_in_vain() -> None:
    words = {"framework": "own PyTorch loop, torch.compile"}
    by_hand = case(**words, notes="LayerNorm and GELU by hand").scenario.software
    assert by_hand == case(**words).scenario.software


@pytest.mark.parametrize(
    "words",
    ["Megatron-SWIFT", "ms-swift Megatron", "Megatron-SWIFT (ms-swift 3.6)", "mcore-bridge"],
)
def test_megatron_swifts_own_defaults(words: str) -> None:
    found = case(framework=words, tensor_parallel=2)
    plan, overlap = found.plan, found.scenario.software.overlap
    assert (plan.zero_stage, plan.recompute, plan.sequence_parallel) == (1, "selective", False)
    assert (overlap.data_parallel, overlap.weight_gathers) == (0.0, False)
    stated = case(framework=words, recompute="full uniform 1", notes="overlap_grad_reduce=true")
    assert stated.plan.recompute == "full"
    assert stated.scenario.software.overlap.data_parallel > 0.0


@pytest.mark.parametrize("words", ["MLPerf v4.1", "NeMo (MLPerf Training 4.0)"])
@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_mlperfs_frozen_weights_lie_in_few_bits(words: str, precision: str) -> None:
    def stored(**cells: Any) -> bool:
        return case(
            framework=words, precision=precision, **cells
        ).scenario.software.fp8.stores_frozen

    assert stored(peft="lora")
    assert not stored(peft="none")
    adapted = case(framework=words, precision=precision, peft="lora").scenario.software
    assert adapted.fp8.attention_rate > 1.0


@pytest.mark.parametrize(
    ("framework", "notes", "faster"),
    [
        ("NeMo (MLPerf v4.0)", None, True),
        ("NeMo (MLPerf v4.0)", "FP8_DPA=False", False),
        ("MLPerf v5.1 (NeMo)", "FP8_DPA=0", False),
        ("MLPerf v5.0, AMD (NeMo)", None, False),
        ("MLPerf v5.0 (NeMo, ROCm)", "FP8_DPA=1", True),
    ],
)
def test_mlperfs_attention_in_8_bits(framework: str, notes: str | None, faster: bool) -> None:
    cells = {"framework": framework, "precision": "fp8", "peft": "lora", "notes": notes}
    assert (case(**cells).scenario.software.fp8.attention_rate > 1.0) is faster


@pytest.mark.parametrize(
    ("framework", "width", "notes", "counted"),
    [
        ("Modalities", 10240, "SwiGLU", 2.8),  # 6,912 wide
        ("Modalities", 6912, "", 2.8),
        ("Modalities", 10240, "", 2.66),  # a plain MLP, tied
        ("plain PyTorch", 10240, "SwiGLU", 3.61),
    ],
)
def test_the_width_of_a_gated_mlp(framework: str, width: int, notes: str, counted: float) -> None:
    shape = {"num_layers": 32, "hidden_size": 2560, "num_heads": 32, "ffn_hidden_size": width}
    cells = {"model": "own-gpt", "framework": framework, "vocab_size": 50304, "notes": notes}
    model = case(**cells, **shape).scenario.model
    assert model.num_parameters / 1e9 == pytest.approx(counted, abs=0.01)


@pytest.mark.parametrize(
    ("name", "billions", "latent"),
    [
        ("deepseek-1b", 4.61, 512),
        ("deepseek_16b", 15.71, 512),
        ("DeepSeek-32B", 31.37, 512),
        ("mixtral_8x1b", 6.07, 0),
    ],
)
def test_simumaxs_own_models(name: str, billions: float, latent: int) -> None:
    model = case(framework="Megatron-Core (SimuMax)", model=name, num_gpus=8).scenario.model
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert (model.kinds[-1].attention.kv_lora_rank or 0) == latent


@pytest.mark.parametrize(
    ("size", "layers", "hidden"),
    [("7B", 32, 4096), ("20B", 60, 5120), ("30B", 60, 6656), ("65B", 80, 8192)],
)
def test_internevos_configurations_by_their_sizes(size: str, layers: int, hidden: int) -> None:
    model = case(framework="InternEvo", model=size).scenario.model
    assert (model.num_layers, model.hidden_size) == (layers, hidden)
    assert model.kinds[0].attention.num_kv_heads == model.kinds[0].attention.num_heads


def test_dense_layers_before_mixtures() -> None:
    def experts(**cells: Any) -> list[int]:
        cut = {"model": "deepseek-v3", "num_layers": 4, "framework": "Megatron-Core", **cells}
        model = case(**cut).scenario.model
        return [model.kinds[kind].feed_forward.num_experts for kind in model.pattern]

    assert experts() == [0, 0, 0, 256]
    assert experts(num_dense_layers=1) == [0, 256, 256, 256]
    assert experts(framework="SimuMax") == [0, 256, 256, 256]
    assert experts(framework="SimuMax", num_dense_layers=3) == [0, 0, 0, 256]


def test_internevos_own_kind_of_parallelism() -> None:
    """Its tensor-parallel ranks share the sequence; weights are sharded over its own group."""
    found = case(framework="InternEvo", tensor_parallel=4, notes="isp, wp=8", zero_stage=1)
    isp = found.plan
    assert found.scenario.software.name == "internevo+fsdp2"
    assert why_impossible(found) is None
    assert (isp.tensor_parallel, isp.context_parallel, isp.zero_stage) == (1, 4, 3)
    assert (isp.context_parallel_method, isp.dp_shard) == ("ulysses", 2)
    priced = price(found.scenario, PlanTable.from_plans([isp]))
    parameters, ranks = found.scenario.model.num_parameters, 4 * isp.data_parallel
    assert float(priced.memory.optimizer[0]) == pytest.approx(8 * parameters / ranks)
    weights = (2 / 8 + 4 / ranks) * parameters  # 16 bits over the group, fp32 over all ranks
    assert float(priced.memory.weights[0]) == pytest.approx(weights)
    assert not case(framework="InternEvo", tensor_parallel=4).plan.sequence_parallel


@pytest.mark.parametrize("words", ["galore_adafactor", "L-BFGS"])
def test_an_optimizer_of_other_states_is_not_priced_as_one_without_any(words: str) -> None:
    with pytest.raises(Unpriceable, match=f"optimizer {words!r} is not priced"):
        case(optimizer=words)


def test_torchtune_keeps_its_profile_with_torchaos_host_optimizer() -> None:
    cells = {"framework": "torchtune", "offload": "optimizer", "gpu": "RTX 4090"}
    one = case(**cells, num_gpus=1, optimizer="CPUOffloadOptimizer")
    assert (one.plan.offload, one.scenario.software.name) == ("optimizer", "torchtune")
    assert case(**cells, num_gpus=4, zero_stage=3).scenario.software.name != "torchtune"


def test_rowwise_scales_with_weight_gradients_in_16_bits() -> None:
    rows, kept = (
        case(framework="torchtitan, compile", precision="float8", notes=words).scenario.software.fp8
        for words in ("float8 rowwise", "recipe rowwise_with_gw_hp")
    )
    assert kept.matmul_share < rows.matmul_share
    assert kept.cast_bytes < rows.cast_bytes


@pytest.mark.parametrize(
    ("words", "millions"),
    [
        ("timm/vit_base_patch16_224.augreg_in21k", 86.0),
        ("vit_huge_patch14_224", 632.0),
        ("vit_giant_patch14_dinov2.lvd142m", 1136.0),
        ("vit_giant_patch14_224", 1013.0),
        ("ViT-g/14", 1013.0),
    ],
)
def test_timms_names_of_models(words: str, millions: float) -> None:
    model = case(framework="torchao", num_gpus=1, model=words, seq_len=257).scenario.model
    assert model.num_parameters == pytest.approx(millions * 1e6, rel=0.02)


def test_a_size_after_a_point_is_no_other_models() -> None:
    model = case(framework="Megatron-LM", model="GPT 3.35B").scenario.model
    assert model.num_parameters == pytest.approx(3.35e9, rel=0.1)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Peak GPU Memory", "reserved"),
        ("memory(GiB)", "reserved"),
        ("max mem", "reserved"),
        ("peak VRAM (GB)", "allocated"),
        ("GPU memory usage", "device"),
        ("24 G of VRAM", "device"),
        ("显存占用", "device"),
        ("peak memory, GPU memory usage", "reserved"),
    ],
)
def test_a_peak_of_a_kind_that_is_not_said_is_the_usual_one(words: str, kind: str) -> None:
    row = Row(line=2, peak_memory_gib=20.0, memory_definition=words, **CELLS)
    found = measured_memory(row)
    assert found is not None
    assert (found.kind, found.is_stated) == (kind, False)
    assert "which kind is not said" in "; ".join(case_of(row).defaults)
    stated = measured_memory(Row(peak_memory_gib=20.0, memory_definition="peak memory allocated"))
    assert stated is not None
    assert (stated.kind, stated.is_stated) == ("allocated", True)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen1half-7b-chat", 7.72),
        ("Qwen-7B-Chat-Int4", 7.72),
        ("qwen2_5-7b-instruct", 7.62),
        ("llama2_70b", 68.98),
        ("aquila2-7b", 7.3),
        ("GPT-2 345M", 0.36),
        ("mistral-7b-instruct-v2", 7.24),
        ("gpt3_13B", 12.86),
        ("gpt3_6.7B", 6.66),
        ("gpt3", 174.62),
        ("chatglm_6b", 6.18),
        ("internlm3-8b-instruct", 8.8),
        ("Qwen-1_8B", 1.84),
        ("Qwen1.5-110B", 111.21),
        ("qwen1.5_MoE", 14.32),
        ("llama4-16e", 107.77),
        ("kimi-1T", 1026.4),
        ("tr11-176B", 176.25),
        ("megatron-22b", 22.07),
        ("QwQ-32B", 32.76),
    ],
)
def test_names_of_models(name: str, billions: float) -> None:
    parameters = case(model=name).scenario.model.num_parameters
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (
            {"framework": "torchao sparsity", "peft": "lora + pruning"},
            ["framework: sparsity", "peft: pruning"],
        ),
        ({"framework": "torchao, MLPerf, FlagPerf, TE"}, []),
    ],
)
def test_what_changes_a_price_but_is_not_known_is_reported(
    cells: dict[str, Any], words: list[str]
) -> None:
    assert not_understood(Row(**cells)) == words


@pytest.mark.parametrize(
    ("framework", "notes", "profile"),
    [
        ("mini-megatron (plain PyTorch 2.10)", None, "torch-trainer"),
        ("nano-megatron", None, "torch-trainer"),
        ("Megatron-LM", None, "megatron"),
        ("own loop, eager", "torch.compile fell back to eager", "torch-trainer"),
        ("own loop", "torch.compile", "torch-compile"),
    ],
)
def test_names_that_say_less_than_they_seem(
    framework: str, notes: str | None, profile: str
) -> None:
    found = case(framework=framework, notes=notes)
    assert found.scenario.software.name.startswith(profile)


CASTS = {
    "hf-trainer+autocast": {"master_weights": True},
    "hf-trainer+compiled-model+compiled-autocast": {"master_weights": True, "notes": "compiled"},
    "hf-trainer-liger+liger-layers+liger-autocast": {"master_weights": True, "notes": "Liger"},
    "hf-trainer+compiled-model": {"notes": "torch.compile"},
    "hf-trainer+compiled-layers+fsdp2": {"notes": "torch.compile, FSDP2", "zero_stage": 3},
    "hf-trainer+fp32-adapters": {"peft": "lora r=16 all linear", "notes": "no autocast"},
    "hf-trainer+deepspeed-zero3": {"framework": "HF Trainer, DeepSpeed ZeRO-3"},
    "hf-trainer": {"master_weights": False},
}


@pytest.mark.parametrize("software", CASTS)
def test_what_casts_the_weights_of_hugging_face(software: str) -> None:
    stated = {"framework": "Hugging Face Trainer", "precision": "bf16", "peft": "none"}
    if "zero3" in software:
        stated |= {"zero_stage": 3, "master_weights": True}  # DeepSpeed casts them
    found = case(**{**stated, **CASTS[software]}).scenario.software
    assert found.name == software


def engines_of(**cells: Any) -> set[str]:
    return set(case(**cells).scenario.software.name.split("+"))


@pytest.mark.parametrize(
    ("cells", "expected", "absent"),
    [
        # fp16 needs DeepSpeed on one card, bf16 does not
        ({"peft": "Q-LoRA", "num_gpus": 1}, "deepspeed-zero2 deepspeed-two-buckets", "fsdp1"),
        ({"peft": "q_lora (int4)", "num_gpus": 1}, "gptq-operators adamw-fused", ""),
        ({"peft": "LoRA", "num_gpus": 1}, "hf-trainer", "deepspeed-zero2 adamw-fused"),
        ({"peft": "LoRA", "num_gpus": 8}, "deepspeed-zero2 deepspeed-two-buckets", ""),
        ({"peft": "full"}, "deepspeed-zero3 deepspeed-auto-buckets", ""),
        ({"peft": "full", "zero_stage": 2}, "deepspeed-zero2 deepspeed-two-buckets", ""),
        ({"peft": "full", "notes": "zero2"}, "deepspeed-zero2 deepspeed-two-buckets", ""),
        (
            {"framework": "Qwen1.5 finetune.py", "peft": "Q-LoRA"},
            "deepspeed-zero2",
            "gptq-operators",
        ),
    ],
)
def test_qwens_scripts(cells: dict[str, Any], expected: str, absent: str) -> None:
    found = engines_of(**{"framework": "Qwen finetune.py", "model": "Qwen-7B-Chat", **cells})
    assert set(expected.split()) <= found
    assert not found & set(absent.split())


def test_loop_of_fsdp_qlora_holds_logits_and_clips_nothing() -> None:
    software = case(framework="fsdp_qlora", peft="qlora").scenario.software
    assert software.loss.fp32_logits_copies == 3.0
    assert software.loss.logits_gradient_copies == 2.0
    assert software.optimizer.gradient_accesses == 1.0
    clips = case(framework="fsdp_qlora", peft="qlora", notes="apply_gradient_clipping true")
    assert clips.scenario.software.optimizer.gradient_accesses > 1.0


def test_gptq_is_unpacked_by_operators() -> None:
    assert "gptq-operators" in engines_of(framework="ms-swift", peft="lora, GPTQ int4")
    assert "gptq-operators" not in engines_of(framework="ms-swift", peft="lora, bnb 4bit")
    webui = {
        "framework": "text-generation-webui (HF Trainer, June 2023)",
        "notes": "--monkey-patch",
    }
    assert "gptq-operators" not in engines_of(**webui, peft="lora, GPTQ 4-bit, q,v r=32")


@pytest.mark.parametrize(
    "words", ["TRL 0.9, DeepSpeed ZeRO-2", "qlora.py, zero2", "TRL, deepspeed"]
)
def test_deepspeed_casts_back_what_peft_prepared(words: str) -> None:
    assert "kbit-preparation" not in engines_of(framework=words, peft="qlora")
    assert "kbit-preparation" in engines_of(framework="TRL 0.9", peft="qlora", num_gpus=1)


@pytest.mark.parametrize(
    ("cells", "profile"),
    [
        ({"zero_stage": 3}, {"hf-trainer", "deepspeed-zero3"}),
        ({"zero_stage": 2}, {"hf-trainer", "deepspeed-zero2"}),
        ({"framework": "FlagPerf, Paddle", "zero_stage": 3}, {"torch-trainer"}),
    ],
)
def test_stages_of_flagperf(cells: dict[str, Any], profile: set[str]) -> None:
    assert engines_of(**{"framework": "FlagPerf", **cells}) == profile


@pytest.mark.parametrize(
    ("framework", "expected", "absent"),
    [
        ("swift 2.6, zero2", "deepspeed-two-buckets adamw-fused", "deepspeed-one-bucket"),
        ("ms-swift, zero2", "deepspeed-two-buckets", "adamw-fused"),
        ("ms-swift 3.8, zero2", "deepspeed-one-bucket", "adamw-fused"),
    ],
)
def test_swifts_configurations_of_deepspeed(framework: str, expected: str, absent: str) -> None:
    found = engines_of(framework=framework, peft="full")
    assert set(expected.split()) <= found
    assert not found & set(absent.split())


def test_qwens_script_with_bitsandbytes() -> None:
    cells = {"framework": "Qwen finetune.py", "peft": "QLoRA (nf4, dq)", "num_gpus": 1}
    assert "gptq-operators" not in engines_of(**cells)
    assert case(**cells).scenario.workload.quantisation == "nf4_double"


def test_phrases_that_shorter_ones_would_hide() -> None:
    assert "fp32 reductions" in vocabulary().read("notes", "all-reduce in fp32").terms
    assert "not equal batches" in vocabulary().read("notes", "w/out packing").terms


SCALE = {"model": "llama-3-70b", "gpu": "H100", "num_gpus": 256, "framework": "Megatron Core"}
WORDS_OF_SCALE = [
    ({"notes": "ZeRO-1 + TP8, PP=4, CP 2; MBS 1 GBS 1536"}, (8, 4, 2, 1, 1536)),
    ({"framework": "Megatron-LM (TP4/PP8)", "notes": "vpp5"}, (4, 8, 1, 1, 64)),
    (
        {
            "notes": "tensor_model_parallel_size=4, pipeline_model_parallel_size=8, "
            "virtual_pipeline_model_parallel_size=5, micro_batch_size=2, global_batch_size=128"
        },
        (4, 8, 1, 2, 128),
    ),
    ({"notes": "8-way tensor, 4-way pipeline parallelism, SP=1"}, (8, 4, 1, 1, 32)),
    ({"notes": "TP8, SP8", "micro_batch_size": 1}, (8, 1, 1, 1, 32)),  # Megatron's, of those ranks
    ({"framework": "DeepSpeed", "notes": "Ulysses sp=8, mbs 1"}, (1, 1, 8, 1, 32)),
    (
        {"framework": "InternEvo", "notes": "tensor parallel size 8, fsp, mbs 1"},
        (8, 1, 1, 1, 32),
    ),
    ({"notes": "TP2 was slower than TP4", "micro_batch_size": 1}, (1, 1, 1, 1, 256)),
    ({"tensor_parallel": 2, "notes": "TP8", "micro_batch_size": 1}, (2, 1, 1, 1, 128)),
]


@pytest.mark.parametrize(("cells", "expected"), WORDS_OF_SCALE)
def test_ranks_and_batches_in_words_fill_empty_cells(
    cells: dict[str, Any], expected: tuple[int, ...]
) -> None:
    found = case(**{**SCALE, **cells})
    plan = found.plan
    ranks = (plan.tensor_parallel, plan.pipeline_parallel, plan.context_parallel)
    batch = (plan.micro_batch_size, found.scenario.workload.global_batch_size)
    assert ranks + batch == expected
    assert not [words for words in not_understood(found.row) if words.startswith("notes")]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"recompute": "sel. recompute"}, {"recompute": "selective"}),
        ({"notes": "full uniform 1 layer"}, {"recompute": "full"}),
        ({"framework": "JAX", "recompute": "nothing_saveable"}, {"recompute": "full"}),
        ({"framework": "JAX", "recompute": "dots_saveable"}, {"recompute": "selective_ops"}),
        ({"framework": "NeMo", "notes": "ACL=21"}, {"recompute_layers": 0}),
        ({"framework": "NeMo", "notes": "full recompute, ACL=21"}, {"recompute_layers": 21}),
        ({"framework": "Megatron-DeepSpeed", "notes": "TP8, SP on"}, {"sequence_parallel": True}),
        ({"framework": "Megatron-LM", "notes": "TP8, SP off"}, {"sequence_parallel": False}),
        ({"framework": "modalities", "notes": "hsdp 4x64"}, {"dp_replicate": 4}),
        ({"framework": "modalities", "notes": "hsdp 8x32"}, {"dp_replicate": 32}),  # of a node
        ({"framework": "modalities", "notes": "HSDP, dp_shard=16"}, {"dp_replicate": 16}),
        ({"framework": "MaxText", "notes": "ici"}, {"zero_stage": 3, "recompute": "full"}),
        ({"framework": "MaxText", "global_batch_size": 4096}, {"micro_batch_size": 16}),
        ({"framework": "Primus (Megatron)", "notes": "use_torch_fsdp2"}, {"zero_stage": 3}),
        ({"framework": "Megatron-LM", "precision": "fp8"}, {"zero_stage": 1}),
        ({"framework": "Megatron-LM (ROCm fork)"}, {"zero_stage": 1}),
    ],
)
def test_plans_of_pretraining_in_words(cells: dict[str, Any], expected: dict[str, Any]) -> None:
    plan = case(**{**SCALE, **cells}).plan
    assert {name: getattr(plan, name) for name in expected} == expected


def test_words_of_traffic_belong_to_a_trainers_switch() -> None:
    cells = {"framework": "nanotron", "tensor_parallel": 4}
    assert case(**cells, notes="gradients by all-reduce").plan.sequence_parallel
    assert not case(**cells, notes="tp_mode: ALL_REDUCE").plan.sequence_parallel
    plain = case(tensor_parallel=4, framework="PyTorch FSDP").scenario.software
    asynchronous = case(tensor_parallel=4, framework="PyTorch FSDP", notes="async communication")
    assert asynchronous.scenario.software == plain


@pytest.mark.parametrize(
    ("cells", "micro", "batch"),
    [
        ({"micro_batch_size": 56, "global_batch_size": 448, "notes": "unpad"}, 28, 224),
        ({"micro_batch_size": 48, "global_batch_size": 768, "notes": "packed samples"}, 48, 384),
        ({"micro_batch_size": 48, "global_batch_size": 384, "notes": "packed samples"}, 48, 384),
        ({"micro_batch_size": 48, "notes": "packed samples"}, 48, 384),
        ({"global_batch_size": 448}, None, 224),
        ({"micro_batch_size": 28, "gpu": "TPU v4"}, 28, 224),
        ({"micro_batch_size": 28, "document_length": 300}, 28, 224),
    ],
)
def test_padding_that_mlperfs_bert_leaves_out(
    cells: dict[str, Any], micro: int | None, batch: int
) -> None:
    usual = {"framework": "MLPerf", "model": "bert", "gpu": "H100", "num_gpus": 8, "seq_len": 512}
    found = case(**usual | cells)
    workload, plan = found.scenario.workload, found.plan
    assert workload.global_batch_size == batch
    assert micro in (None, plan.micro_batch_size)
    packed = "gpu" not in cells and "document_length" not in cells
    assert (workload.document_length == 252) == packed
    assert found.scenario.software.loss.predicted_share == 0.15


def test_settings_of_flagperfs_own_cases() -> None:
    glm, chatglm, baichuan = (
        case(framework=framework, model=name, gpu="A100-40GB", num_gpus=8, seq_len=512)
        for framework, name in (
            ("FlagPerf", "glm"),
            ("FlagPerf deepspeed", "chatglm3_6b"),
            ("FlagPerf deepspeed", "baichuan2_13b"),
        )
    )
    assert (glm.plan.recompute, glm.scenario.workload.attention_kernel) == ("full", "eager")
    assert (chatglm.plan.recompute, chatglm.scenario.workload.attention_kernel) == ("none", "flash")
    assert (chatglm.plan.zero_stage, baichuan.plan.zero_stage) == (3, 1)


@pytest.mark.parametrize(
    ("notes", "plan"),
    [
        ("DGXB200_1x8x1xtp4pp1cp2", {"tensor_parallel": 4, "context_parallel": 2}),
        ("TP4PP2", {"tensor_parallel": 4, "pipeline_parallel": 2}),
        ("TP2PP1SH2SP4", {"tensor_parallel": 2, "zero_stage": 2, "context_parallel": 1}),
    ],
)
def test_counts_without_spaces_between(notes: str, plan: dict[str, int]) -> None:
    found = case(framework="Megatron-LM", num_gpus=8, notes=notes).plan
    assert {name: getattr(found, name) for name in plan} == plan


def test_ranks_of_a_batch_with_fewer_sequences_than_accelerators() -> None:
    pax = {"framework": "PaxML", "model": "gpt3-175b", "gpu": "TPU v5e", "seq_len": 2048}
    found = case(**pax, num_gpus=4096, global_batch_size=1024)
    assert (found.plan.tensor_parallel, found.plan.data_parallel) == (4, 1024)
    with pytest.raises(Unpriceable, match="not near a multiple"):
        case(**pax, num_gpus=4096, global_batch_size=64)  # 64 ranks of one sequence


def test_mlperfs_attention_on_amd_cards_is_of_16_bits() -> None:
    cells = {"framework": "MLPerf v5.1", "model": "llama2_70b_lora", "precision": "fp8"}
    assert case(**cells, gpu="MI325X").scenario.software.fp8.attention_rate == 1.0
    assert case(**cells, gpu="H100").scenario.software.fp8.attention_rate > 1.0


def test_losses_and_buckets_of_megatron_deepspeed_in_16_bits() -> None:
    cells = {"framework": "Megatron-DeepSpeed", "zero_stage": 1}
    half, brain = (case(**cells, precision=one) for one in ("fp16", "bf16"))
    assert half.scenario.software.loss == brain.scenario.software.loss
    assert half.scenario.software.memory.buffer_bytes == 2e9
    assert brain.scenario.software.memory.buffer_bytes == 0.0  # BF16_Optimizer has none


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_an_encoder_is_no_encoder_decoder(kind: str) -> None:
    model = {"encoder": "bert-large", "encoder-decoder": "t5-small"}[kind]
    found = case(**{**CELLS, "model": model, "seq_len": 512}, framework="FlagPerf", model_kind=kind)
    assert (found.scenario.software.name == "apex-bert") == (kind == "encoder")


@pytest.mark.parametrize(
    "notes", ["attn_implementation=sdpa", "attention_implementation: pytorch_flash", ""]
)
@pytest.mark.parametrize("framework", ["nanotron", "TRL", "Modalities"])
def test_names_of_attention_that_is_not_written_out(framework: str, notes: str) -> None:
    found = case(framework=framework, notes=notes)
    assert found.scenario.workload.attention_kernel == "flash"
    assert not not_understood(found.row)


def test_a_flag_of_lora_beside_one_of_qlora() -> None:
    flags = "--use_lora --q_lora --deepspeed finetune/ds_config_zero2.json"
    found = case(framework="Qwen finetune.py", model="qwen-7b", num_gpus=2, notes=flags)
    named = case(framework="Qwen finetune.py", model="qwen-7b", num_gpus=2, notes="Q-LoRA, ZeRO-2")
    assert found.scenario.workload == named.scenario.workload
    assert found.scenario.model.num_parameters == named.scenario.model.num_parameters


@pytest.mark.parametrize(
    ("cells", "quantisation", "profile"),
    [
        ({"framework": "fsdp_qlora", "peft": "hqq_lora", "notes": "n_bits 2"}, "int2", "+hqq"),
        ({"framework": "fsdp_qlora", "peft": "hqq_lora 2-bit"}, "int2", "+hqq"),
        (
            {"framework": "fsdp_qlora", "peft": "hqq_dora", "notes": "n_bits=4"},
            "nf4_double",
            "+hqq",
        ),
        ({"framework": "swift", "model": "llama2-7b-aqlm-2bit-1x16", "peft": "lora"}, "int2", ""),
        ({"framework": "swift", "peft": "lora", "notes": "quantization_bit 2"}, "int2", ""),
        ({"framework": "swift", "model": "qwen-7b-chat-int4", "peft": "lora"}, "int4", ""),
    ],
)
def test_bases_in_two_bits(cells: dict[str, Any], quantisation: str, profile: str) -> None:
    found = case(num_gpus=2, precision="bf16", **cells).scenario
    assert (found.workload.adapter, found.workload.quantisation) == ("qlora", quantisation)
    assert profile in found.software.name


@pytest.mark.parametrize(
    "cells",
    [
        {"precision": "bf16", "peft": "LoRA r=8 (QAT)", "notes": "int4 QAT + LoRA"},
        {"precision": "nvfp4 QAT"},
        {"precision": "int8", "notes": "QAT, fake quantized weights"},
        {"precision": "bf16", "notes": "8da4w-qat: int8 activations, int4 weights"},
    ],
)
def test_rounded_weights_are_stored_and_multiplied_in_16_bits(cells: dict[str, Any]) -> None:
    found = case(framework="torchtune (torchao)", num_gpus=8, **cells)
    assert found.scenario.workload.precision == "bf16"
    assert found.scenario.workload.adapter != "qlora"
    assert any("rounding" in note for note in found.defaults)


@pytest.mark.parametrize("words", ["mp_bf16_autocast", "bf16_autocast"])
def test_autocast_of_fsdp_qlora(words: str) -> None:
    found = case(framework="fsdp_qlora", num_gpus=2, peft="lora", precision=words)
    assert "autocast+fp32-frozen" in found.scenario.software.name
    assert not_understood(found.row) == []


@pytest.mark.parametrize(("peft", "notes"), [("unsloth+qlora", ""), ("lora", "use_unsloth")])
def test_unsloth_is_a_tuner_of_swift(peft: str, notes: str) -> None:
    found = case(framework="ms-swift", num_gpus=1, peft=peft, notes=notes)
    assert found.scenario.software.name.startswith("hf-trainer-foak")


@pytest.mark.parametrize(
    ("framework", "equal"),
    [
        ("GLM-4 finetune.py, DeepSpeed ZeRO-3", False),
        ("DeepSeek-Coder finetune_deepseekcoder.py, DeepSpeed ZeRO-3", False),
        ("MiniCPM finetune.py, DeepSpeed ZeRO-3", True),
        ("Baichuan2 fine-tune.py, DeepSpeed ZeRO-3", False),
    ],
)
def test_scripts_next_to_a_model_are_transformers_trainer(framework: str, equal: bool) -> None:
    found = case(framework=framework)
    assert found.scenario.software.name == "hf-trainer+deepspeed-zero3"
    one = {"peft": "lora", "num_gpus": 1, "zero_stage": 0}
    ragged = case(framework=framework.partition(",")[0], **one).scenario.software.memory
    assert ragged.ragged_batches != equal


@pytest.mark.parametrize("framework", ["fsdp_qlora", "ms-swift", "Unsloth"])
def test_scales_are_not_quantised_where_a_row_says_so(framework: str) -> None:
    single = case(framework=framework, peft="QLoRA nf4, no double quant")
    assert single.scenario.workload.quantisation == "nf4"
    assert case(framework=framework, peft="QLoRA nf4").scenario.workload.quantisation != "nf4"


@pytest.mark.parametrize(
    ("precision", "size"), [("int8 weight-only", 1.0), ("int8 QT", 1.0), ("BitNet b1.58", 0.0)]
)
def test_trained_weights_that_torchao_keeps_in_8_bits(precision: str, size: float) -> None:
    found = case(framework="torchao", precision=precision, num_gpus=1)
    assert found.scenario.software.fp8.trained_bytes == size
    assert found.scenario.workload.precision == "bf16"
    assert any("as those of 16 bits" in note for note in found.defaults) == (size == 0.0)


@pytest.mark.parametrize(
    ("framework", "notes", "copies"),
    [
        ("own GPT", "torch.compile", 2.0 + 2.0 + 2.0),  # logits, zeros, gradient
        ("nanochat", "torch.compile", 2.0),  # the gradient over the logits
        ("GPT of microsoft/dion, DDP", "torch.compile", 2.0),
        ("parameter-golf train_gpt.py, DDP", "torch.compile", 2.0),
        ("nanochat", None, 2.0 + 8.0 + 2.0),
        ("nanochat", "torch.compile, chunked loss", 2.0 + 2.0 + 2.0),
    ],
)
def test_a_compiled_model_that_returns_its_loss_alone_holds_no_zeros(
    framework: str, notes: str | None, copies: float
) -> None:
    loss = case(framework=framework, notes=notes).scenario.software.loss
    bytes_a_logit = 2.0 * loss.logits_copies + 4.0 * loss.fp32_logits_copies
    assert bytes_a_logit + 2.0 * loss.logits_gradient_copies == copies


def test_compiled_autocast_adds_to_fp32_hidden_states() -> None:
    """nanochat's are 16 bits: its embedding is."""
    cells = {"notes": "torch.compile", "precision": "bf16 autocast, fp32 parameters"}
    for framework, saved in (("own GPT", 4.0), ("nanochat", 2.0)):
        found = case(framework=framework, **cells).scenario.software.activations
        assert found.rms_norm_saved_fp32_bytes == saved


@pytest.mark.parametrize(
    ("optimizer", "loops"),
    [("AdamW (own, fp32)", True), ("own AdamW", True), ("Adam (own)", True), ("AdamW", False)],
)
def test_an_optimizer_of_the_authors_own_updates_tensor_by_tensor(
    optimizer: str, loops: bool
) -> None:
    found = case(framework="own loop, eager", optimizer=optimizer).scenario.software.optimizer
    assert found.loops == loops
