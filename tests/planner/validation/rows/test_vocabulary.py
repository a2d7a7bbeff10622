"""Phrasings of settings: what each cell is priced as, and what is reported as not understood."""

from typing import Any

import pytest

from cost_models.plan.recompute import MODULES
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.counts import not_understood
from planner.validation.rows.runs_file import Row
from planner.validation.rows.trainer import is_described
from planner.validation.rows.vocabulary import terms_of, tokens_of, vocabulary
from planner.validation.rows.words import words_table

LLAMA = {
    "model": "llama-2-7b",
    "seq_len": 2048,
    "gpu": "H100-SXM",
    "num_gpus": 8,
    "micro_batch_size": 1,
    "precision": "bf16",
}


def case(**cells: Any) -> Case:
    return case_of(Row(line=2, **{**LLAMA, **cells}))


RECOMPUTE = {
    ("full", 0): [
        "full",
        "Full",
        "all layers",
        "gradient checkpointing",
        "gradient-checkpointing",
        "activation checkpointing",
        "gradient_checkpointing=1",
        "every layer",
        "full AC",
        "true",
    ],
    ("full", 11): ["every 3rd layer", "every 3 layers", "full, 1 of 3 layers", "1/3 layers"],
    ("full", 24): ["3 of 4 layers", "checkpointing of 3/4 layers", "full (3 in 4 blocks)"],
    ("selective", 0): [
        "selective",
        "attention only",
        "core attention",
        "selective activation recomputation",
        "core_attn",
        "activation-checkpointing=selective",
    ],
    ("full", 16): [
        "every second layer",
        "every 2nd layer",
        "every other layer",
        "1 of 2 layers",
        "AC every 2 layers",
        "alternating layers",
    ],
    ("ops:every-2nd-mm", 0): [
        "ops:every-2nd-mm",
        "selective op",
        "per-op SAC",
        "op-level selective",
        "selective AC by op",
        "SAC per op",
        "selective, per-op",
        "SAC (op)",
    ],
    ("modules:mlp", 0): ["modules:mlp", "mlp only", "selective (MLP)"],
    ("modules:core_attn+mlp", 0): [
        "modules:mlp,core_attn",
        "core_attn, mlp",
        "MLP + core attention",
    ],
    ("modules:layernorm+moe_act", 0): [
        "layernorm, moe_act",
        "moe-act and layernorm",
        "norms+moe_act",
    ],
    ("none", 0): ["none", "no", "off", "no gradient checkpointing", "w/o checkpointing", "AC off"],
    ("selective_ops", 0): ["selective_ops", "selective ops", "Selective-Ops"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in RECOMPUTE.items() for text in texts]
)
def test_recomputation(words: str, expected: tuple[str, int]) -> None:
    plan = case(recompute=words).plan
    assert (plan.recompute, plan.recompute_layers) == expected


OPTIMIZERS = {
    "adamw": ["adamw", "AdamW", "Adam", "torch AdamW, fused", "FusedAdam", "adamw_torch_fused"],
    "adamw_8bit": ["8-bit Adam", "adamw 8bit", "AdamW8bit", "bnb-8bit-adam", "adamw_bnb_8bit"],
    "paged_adamw": ["paged AdamW", "PagedAdamW (bitsandbytes)", "paged_adamw_32bit"],
    "paged_adamw_8bit": ["paged AdamW 8-bit", "PagedAdamW8bit", "paged_adamw_8bit"],
    "lamb": ["LAMB", "FusedLAMB", "fused lamb"],
    "sgd_momentum": ["SGD with momentum", "sgd, momentum 0.9", "momentum"],
    "adafactor": ["adafactor", "Adafactor", "Ada-Factor"],
    "lion": ["Lion", "lion_32bit", "DecoupledLionW"],
    "lion_8bit": ["8-bit Lion", "Lion8bit", "lion_8bit", "paged_lion_8bit", "bnb 8-bit Lion"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in OPTIMIZERS.items() for text in texts]
)
def test_optimizers(words: str, expected: str) -> None:
    assert case(optimizer=words).scenario.workload.optimizer == expected


ADAPTERS = {
    ("none", "nf4"): ["none", "full fine-tuning", "no", "w/o LoRA"],
    ("lora", "nf4"): ["lora r=16", "LoRA rank 16", "low-rank adapters r=16", "LoRA-16", "lora r16"],
    ("qlora", "nf4"): ["qlora r=16", "QLoRA (bnb 4bit) r=16", "4-bit LoRA r=16", "lora, bnb-nf4"],
    ("qlora", "nf4_double"): [
        "qlora (nf4 double quant)",
        "qlora (nf4-dq)",
        "qlora, nf4, nested",
        "QLoRA bitsandbytes 4-bit, double quantisation",
    ],
    ("qlora", "int4"): ["qlora (gptq) r=8", "LoRA on GPTQ 4-bit", "lora, int4 GPTQ"],
    ("qlora", "int8"): ["lora on int8 GPTQ", "LoRA, load_in_8bit", "lora over LLM.int8()"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in ADAPTERS.items() for text in texts]
)
def test_adapters(words: str, expected: tuple[str, str]) -> None:
    workload = case(peft=words).scenario.workload
    assert workload.adapter == expected[0]
    assert workload.adapter == "none" or workload.quantisation == expected[1]
    assert "6" not in words or workload.adapter_rank == 16


TARGETS = {
    "q,v": ["lora q,v", "lora q_proj,v_proj", "LoRA (query, value)", "lora v_proj + q_proj"],
    "q,k,v,o": ["lora (q,k,v,o)", "lora q_proj k_proj v_proj o_proj", "LoRA qkv, o"],
    "all": [
        "lora all-linear",
        "lora q,k,v,o,gate,up,down",
        "LoRA on qkv, o and mlp",
        "LoRA, attention + mlp",
    ],
    "gate,up,down": ["lora mlp", "lora gate_proj,up_proj,down_proj", "lora up, gate, down"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in TARGETS.items() for text in texts]
)
def test_matrices_with_adapters(words: str, expected: str) -> None:
    assert case(peft=words).scenario.workload.adapter_targets == expected


STAGES = {
    0: ["torch DDP", "PyTorch DistributedDataParallel", "FSDP NO_SHARD", "ZeRO-0"],
    1: ["DeepSpeed ZeRO-1", "zero1", "distributed optimizer", "ZeroRedundancyOptimizer"],
    2: ["DeepSpeed ZeRO-2", "zero2", "FSDP SHARD_GRAD_OP", "zero_stage=2"],
    3: ["DeepSpeed ZeRO stage 3", "zero3", "FSDP full shard", "FULL_SHARD", "fsdp2", "HSDP"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in STAGES.items() for text in texts]
)
@pytest.mark.parametrize("column", ["framework", "notes"])
def test_sharding(words: str, expected: int, column: str) -> None:
    assert case(**{column: words}).plan.zero_stage == expected
    assert case(**{column: words}, zero_stage=1).plan.zero_stage == 1


OFFLOADS = {
    "optimizer": ["optimizer", "optimizer states to CPU", "cpu (optimizer)", "Optim. to host"],
    "activations": ["activations to CPU", "saved tensors", "activation offloading"],
    "weights": ["params to CPU", "cpu (optimizer+params)", "weights and optimizer"],
    "none": ["none", "no", "no offload"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in OFFLOADS.items() for text in texts]
)
def test_offload(words: str, expected: str) -> None:
    assert case(offload=words, zero_stage=3).plan.offload == expected


SAID_OFFLOADS = {
    (3, "weights"): [
        "ZeRO-3, CPU offload",
        "DeepSpeed ZeRO-3 with CPU offload",
        "ZeRO stage 3 + offload",
        "ZeRO-3 with offload",
        "DeepSpeed ZeRO-Infinity",
        "FSDP2 with CPU offload",
        "ZeRO-3, offload optimizer and parameters to CPU",
        "ZeRO-3, offload optimizer states and weights",
        "ZeRO-3, params offloaded to CPU",
    ],
    (3, "optimizer"): ["ZeRO-3, adam_offload", "ZeRO-3, offload_optimizer_device: cpu"],
    (2, "optimizer"): [
        "ZeRO-2, cpu offload",
        "DeepSpeed ZeRO-2 with CPU offloading",
        "ZeRO-2 with offload",
        "ZeRO-2, adam_offload",
    ],
    (1, "optimizer"): ["DeepSpeed ZeRO stage 1, offload to CPU"],
    (3, "activations"): [
        "ZeRO-3, activation CPU offload",
        "ZeRO-3, activations offloaded to CPU",
        "ZeRO-3, offload activations to CPU",
        "ZeRO-3, CPU offload of activations",
    ],
    (3, "none"): [
        "ZeRO-3, no CPU offload",
        "ZeRO-3 without offload",
        "ZeRO-3, CPU_OFFLOAD=False",
        "ZeRO-3, offload_optimizer_device: none",
        "ZeRO-3, cpu_offload: none",
        "FSDP, cpu offload false",
    ],
}


@pytest.mark.parametrize("column", ["framework", "notes"])
@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in SAID_OFFLOADS.items() for text in texts]
)
def test_offload_in_words(words: str, expected: tuple[int, str], column: str) -> None:
    plan = case(**{column: words}).plan
    assert (plan.zero_stage, plan.offload) == expected


@pytest.mark.parametrize("words", ["CPU offload", "with CPU offloading", "offload to CPU"])
@pytest.mark.parametrize(
    ("stage", "expected"), [(1, "optimizer"), (2, "optimizer"), (3, "weights")]
)
def test_offload_to_the_host_is_of_what_the_stage_shards(
    words: str, stage: int, expected: str
) -> None:
    assert case(framework="DeepSpeed", notes=words, zero_stage=stage).plan.offload == expected
    assert case(framework="DeepSpeed", offload="none", notes=words).plan.offload == "none"
    assert case(framework="Megatron-Core", notes=words, zero_stage=1).plan.offload == "none"


PRECISIONS = {
    "bf16": ["bf16", "bfloat16", "BF16 mixed"],
    "fp16": ["fp16", "float16", "half precision", "half", "Half (torch.half)", "fp16 (half)"],
    "fp32": ["fp32", "float32", "single precision", "single"],
    "fp64": ["fp64", "float64", "double precision", "double"],
    "fp8": ["fp8", "float8", "MXFP8", "FP8 tensorwise"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in PRECISIONS.items() for text in texts]
)
def test_precision(words: str, expected: str) -> None:
    assert case(precision=words).scenario.workload.precision == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("4-bit NF4 (double quantization), bf16 compute dtype", ("bf16", "nf4_double")),
        ("bnb_4bit_use_double_quant, bnb_4bit_compute_dtype=bf16, nf4", ("bf16", "nf4_double")),
        ("nf4 double quant, bf16 compute", ("bf16", "nf4_double")),
        ("nf4 + nested quantisation, compute in fp16", ("fp16", "nf4_double")),
        ("bnb 4bit double-quant", ("bf16", "nf4_double")),  # no precision of matmuls
        ("load_in_4bit, half precision compute", ("fp16", "nf4")),
        ("4-bit base, fp16 mixed", ("fp16", "nf4")),
        ("int4 + bf16 compute", ("bf16", "int4")),
        ("GPTQ 4-bit, fp16 compute", ("fp16", "int4")),
    ],
)
@pytest.mark.parametrize("peft", ["qlora r=16", "lora r=16", None])
def test_bits_of_a_base_in_the_precision(
    words: str, expected: tuple[str, str], peft: str | None
) -> None:
    read = case(precision=words, peft=peft)
    workload = read.scenario.workload
    assert (workload.adapter, workload.precision, workload.quantisation) == ("qlora", *expected)
    assert not not_understood(read.row)


MEMORY = {
    ("allocated", "fullest"): [
        "MaxMemAllocated of DeepSpeed (GB)",
        "torch max_memory_allocated",
        "peak allocated",
        "peak active (torch)",
    ],
    ("allocated", "first"): ["max_memory_allocated of rank 0", "allocated, first stage"],
    ("reserved", "fullest"): ["torch max_memory_reserved", "reserved (torch)", "peak reserved, GB"],
    ("device", "fullest"): [
        "nvidia-smi",
        "nvidia-smi memory.used",
        "NVML",
        "memory used of the device, MiB",
        "device level",
        "GPU memory allocated, a tracker's system metric",
        "wandb: GPU memory allocated",
        *("ixsmi", "mx-smi", "xpu_smi", "npu-smi", "mthreads-gmi", "vendor smi tool"),
    ],
    ("allocated", "last"): ["torch allocated (last rank)", "allocated on the last stage"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in MEMORY.items() for text in texts]
)
def test_kinds_of_memory(words: str, expected: tuple[str, str]) -> None:
    from planner.validation.measurement import measured_memory

    found = measured_memory(Row(peak_memory_gib=1.0, memory_definition=words))
    assert found is not None
    assert (found.kind, found.rank) == expected


@pytest.mark.parametrize(
    "words",
    [
        "memory allocated after model wrap",
        "reserved after loading the model, before training",
        "memory/allocated_after_backward",
        "peak CPU memory",
    ],
)
def test_what_is_no_peak_of_a_device_is_not_compared(words: str) -> None:
    from planner.validation.measurement import lacks_definition, measured_memory

    row = Row(peak_memory_gib=1.0, memory_definition=words)
    assert measured_memory(row) is None
    assert lacks_definition(row) == f"memory_definition {words!r}: no peak of an accelerator"


def test_peaks_since_a_moment_are_compared() -> None:
    from planner.validation.measurement import measured_memory

    for words in (
        "max allocated, reset after loading",
        "max allocated, counters reset right before training",
        "max allocated after initial steps",
        "max allocated, host memory not counted",
        "reserved after backward",
    ):
        assert measured_memory(Row(peak_memory_gib=1.0, memory_definition=words)) is not None


SOFTWARE = {
    "nemo": [
        "Megatron-LM",  # on an H100
        "Megatron-Core",
        "Megatron-LM (core 0.6.0)",
        "Megatron-LM with TE, 2023",
        "Megatron-LM + Transformer Engine",
        "mcore",
        "NeMo",
        "NeMo Megatron",
        "NVIDIA NeMo Framework 24.07",
        "Primus (Megatron-LM)",
        "Megatron-LM, January 2025",
        "ms-swift (Megatron)",
        "verl, Megatron",
        "MindSpeed-LLM",
        "OpenRLHF (Megatron)",
    ],
    "nanotron": ["nanotron", "Hugging Face nanotron", "huggingface/nanotron @ main"],
    "internevo": [
        "InternEvo",
        "InternLM/InternEvo",
        "InternLM training framework",
        "internevo 0.5",
    ],
    "megatron": ["Megatron-LM (2022)"],
    "megatron+deepspeed-bf16-optimizer": [
        "Megatron-DeepSpeed",
        "gpt-neox",
        "Megatron-LM + DeepSpeed",
        "Megatron-DeepSpeed (2021)",
    ],
    "megatron-2021": [
        "Megatron-LM (2021)",
        "Megatron-LM of 2020",
        "megatron 2021",
        "Megatron-LM v2.5",
        "Megatron-LM (NGC PyTorch 20.12)",
    ],
    "torch-trainer": [
        "PyTorch FSDP",
        "FSDP",
        "DeepSpeed",
        "Modalities",
    ],
    "hf-trainer+adamw-fused": ["Colossal-AI", "ColossalAI (Gemini plugin)"],
    "hf-trainer": [
        "TRL",
        "Axolotl",
        "LLaMA-Factory",
        "llama_factory",
        "Hugging Face Trainer",
        "transformers 4.48",
        "Accelerate 0.34",
        "TRL on accelerate, no liger",
        "XTuner",
        "xtuner 0.1.23",
        "OpenRLHF",
        "verl SFT",
        "verl",
        "fsdp_qlora",
    ],
    "hf-trainer-liger": ["HF Trainer, fused linear CE"],
    "hf-trainer-liger+liger-layers": ["TRL with Liger", "Axolotl, liger kernels"],
    "hf-trainer-foak": ["unsloth", "Unsloth (TRL SFTTrainer)", "TRL with Unsloth"],
    "xla": ["MaxText", "levanter", "PaxML (JAX)", "JAX"],
    "torch-trainer+fsdp1": ["PyTorch FSDP1", "FSDP full shard", "FullyShardedDataParallel"],
    "torch-trainer+fsdp2": [
        "PyTorch FSDP2",
        "fully_shard",
        "NeMo AutoModel (FSDP2)",
        "NVIDIA NeMo AutoModel",
        "NeMo-Automodel 0.1",
        "modalities (FSDP2)",
    ],
    "torch-trainer+fsdp1-no-shard": ["FSDP NO_SHARD", "PyTorch FSDP, no_shard", "no-shard FSDP"],
    "torch-trainer+ddp+autocast": [
        "torch DDP",
        "PyTorch DistributedDataParallel",
        "Lightning, DDP",
    ],
    "torch-trainer+deepspeed-zero2": ["DeepSpeed ZeRO-2", "deepspeed, zero2", "DeepSpeed stage 2"],
    "torch-trainer+fsdp1+autocast": ["PyTorch FSDP1, autocast", "FSDP full shard with torch AMP"],
    "torch-trainer+autocast": [
        "somebody's own, automatic mixed precision",
        "own loop, AMP",
        "somebody's own",
        "PyTorch Lightning",
        "OLMo-core",
        "open_lm",
    ],
    "hf-trainer+deepspeed-zero3": [
        "HF Trainer + DeepSpeed ZeRO-3",
        "Axolotl, deepspeed zero3",
        "TRL on DeepSpeed (zero_stage=3)",
        "OpenRLHF, DeepSpeed ZeRO-3",
        "xtuner (deepspeed_zero3)",
    ],
    "torchtitan": [
        "torchtitan 0.1.0, torch.compile",
        "TorchTitan compile=1",
        "torchtitan, compile on",
        "torchtitan with model compile enabled",
    ],
    "eager-fsdp2": [
        "torchtitan",
        "torchtitan compile=0",
        "torchtitan (no compile)",
        "torchtitan w/o torch.compile",
        "torchtitan, compile: false",
        "torchtitan, not compiled",
        "Primus (torchtitan)",
    ],
    "nemo+megatron-full-shard": ["Megatron-FSDP", "mcore FSDP"],
    "torchtune": ["torchtune", "torchtune full_finetune_single_device", "TorchTune 0.4"],
    "torchtune-chunked": ["torchtune, chunked CE", "torchtune (compile, chunked cross-entropy)"],
    "composer": ["llm-foundry", "MosaicML Composer", "composer"],
    "torch-compile": ["own loop, torch.compile", "PyTorch, compiled", "Lightning compile=true"],
}


@pytest.mark.parametrize(
    ("framework", "expected"), [(text, key) for key, texts in SOFTWARE.items() for text in texts]
)
def test_trainers(framework: str, expected: str) -> None:
    assert case(framework=framework).scenario.software.name == expected


def test_trainers_whose_modules_are_hugging_faces_differ_in_a_figure() -> None:
    gemini, sharded, xtuner = (
        case(framework=name).scenario for name in ("ColossalAI, Gemini", "ColossalAI", "XTuner")
    )
    assert gemini.software.overlap.data_parallel == 0.0 < sharded.software.overlap.data_parallel
    assert xtuner.software.kernels.rms_norm_accesses < sharded.software.kernels.rms_norm_accesses
    assert gemini.workload.master_weights
    assert xtuner.workload.master_weights
    assert not case(framework="Hugging Face Trainer").scenario.workload.master_weights


LOSSES = {
    "torch-trainer+fused-linear-loss+autocast": [
        "fused linear CE",
        "fused linear cross-entropy",
        "cut cross entropy",
    ],
    "torch-trainer+fused-loss+autocast": [
        "fused CE",
        "fused cross-entropy",
        "Triton cross entropy",
    ],
    "torch-trainer+chunked-loss+autocast": [
        "chunked CE",
        "chunked loss",
        "cross-entropy in chunks",
    ],
    "torch-trainer+compiled-loss+autocast": ["compiled CE", "compiled loss", "loss: compiled loss"],
    "torch-compile+compiled-chunked-loss": [
        "chunked CE, compile",
        "torch.compile; chunked loss",
        "compile=1 chunked_loss=1",
    ],
    "hf-trainer-liger": ["Liger", "liger kernels", "use_liger=true"],
    "torch-trainer": ["torch.compile; loop over experts", "compile, experts one after another"],
    "torch-compile": ["torch.compile", "compile=1"],
    "torch-compile+torch-loss": ["torch.compile of each layer", "torch.compile per block"],
}


@pytest.mark.parametrize(
    ("words", "expected"), [(text, key) for key, texts in LOSSES.items() for text in texts]
)
def test_losses_of_a_trainer_without_a_profile(words: str, expected: str) -> None:
    assert case(framework="somebody's own", notes=words).scenario.software.name == expected


def test_outputs_are_normed_where_a_row_says_so() -> None:
    for notes, norms in (("", 2), ("Peri-LN", 4), ("sandwich norms", 4), ("no Peri-LN", 2)):
        kinds = case(framework="somebody's own", notes=notes).scenario.model.kinds
        assert [kind.num_norms for kind in kinds] == [norms]


def test_an_engine_counts_where_it_shards_as_the_row_says() -> None:
    assert "+ddp" in case(framework="PyTorch DDP", zero_stage=0).scenario.software.name
    assert case(framework="PyTorch DDP", zero_stage=1).scenario.software.name == "torch-trainer"
    sharded = case(framework="DeepSpeed", zero_stage=3).scenario
    assert sharded.software.name == "torch-trainer+deepspeed-zero3"
    assert case(framework="TRL, DeepSpeed", zero_stage=3).scenario.workload.master_weights
    assert not case(framework="TRL", zero_stage=3).scenario.workload.master_weights


@pytest.mark.parametrize(
    ("framework", "optimizer", "expected"),
    [
        ("torchtitan", "AdamW", (True, False)),
        ("torchtitan", "AdamW (foreach)", (False, False)),
        ("torchtune", "AdamW foreach=False", (False, True)),
        ("Megatron-Core", "adamw (foreach=False, not fused)", (False, True)),
        ("torchao", "AdamW, foreach", (False, False)),
        ("HF Trainer", "AdamW foreach=False, fused=True", (True, False)),
    ],
)
def test_the_kernels_of_an_update_are_those_that_a_row_states(
    framework: str, optimizer: str, expected: tuple[bool, bool]
) -> None:
    found = case(framework=framework, optimizer=optimizer).scenario.software.optimizer
    assert (found.fused, found.loops) == expected


@pytest.mark.parametrize(
    "words",
    [
        "bf16 autocast, frozen weights in float32",
        "bf16 autocast (frozen base in fp32)",
        "base model loaded in fp32, bf16 autocast",
        "fp16 autocast, FP32 base",
        "bf16, frozen base weights in float 32",
        "fp16 AMP over fp32 frozen weights",
        "bf16 autocast, base kept in float-32",
    ],
)
def test_a_frozen_base_has_the_precision_that_is_said(words: str) -> None:
    found = case(framework="own loop", precision=words, peft="lora r=8").scenario
    assert found.software.frozen.in_fp32
    assert found.workload.precision in ("bf16", "fp16")
    assert not_understood(Row(precision=words)) == []


@pytest.mark.parametrize(
    "words", ["bf16 autocast, frozen weights in bfloat16", "base in bf16", "bf16 (frozen base)"]
)
def test_a_frozen_base_in_16_bits_is_the_usual_one(words: str) -> None:
    found = case(framework="own loop", precision=words, peft="lora r=8").scenario
    assert not found.software.frozen.in_fp32
    assert found.workload.precision == "bf16"
    assert not_understood(Row(precision=words)) == []


@pytest.mark.parametrize(
    ("framework", "described"),
    [
        ("own PyTorch loop, HF transformers model", False),
        ("custom training loop (DeepSpeed ZeRO-2)", False),
        ("plain PyTorch, GPT written by hand", False),
        ("plain PyTorch (course assignment)", False),
        ("own GPT script, torch.compile", False),
        ("plain PyTorch loop, HF transformers 4.52", True),
        ("HF Trainer", True),
        ("torchtitan (own cluster)", True),
    ],
)
def test_code_of_its_author_is_described_by_no_profile(framework: str, described: bool) -> None:
    row = Row(line=2, framework=framework, **{**LLAMA, "num_gpus": 1})
    assert is_described(row) is described
    assert any("trainer unknown" in text for text in case_of(row).defaults) is not described


def test_hugging_face_scripts_before_torch_2_train_in_fp32_unless_told_otherwise() -> None:
    def precision(**cells: Any) -> str:
        found = case(framework="HF Trainer (March 2021)", **{"precision": None, **cells})
        return found.scenario.workload.precision

    assert precision() == "tf32"
    assert precision(gpu="V100-SXM2-32GB") == "fp32"
    assert precision(precision="fp16") == "fp16"
    assert precision(precision="mixed") == "bf16"
    later = case(framework="HF Trainer (March 2024)", precision=None)
    assert later.scenario.workload.precision == "bf16"


def test_an_unknown_trainer_is_named() -> None:
    def words(framework: str | None) -> str:
        return "; ".join(case(framework=framework).defaults)

    assert "'somebody's own': trainer unknown" in words("somebody's own").replace('"', "'")
    assert "framework is not given: trainer unknown" in words(None)
    for known in ("PyTorch FSDP", "TRL", "fsdp2+adamw-fused"):
        assert "trainer unknown" not in words(known)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"recompute": "full, but backwards"}, ["recompute: but backwards"]),
        ({"optimizer": "adamw with shampoo blocks"}, ["optimizer: shampoo"]),
        ({"peft": "lora r=16 on q,v plus prompts"}, ["peft: plus prompts"]),
        ({"precision": "bf16 stochastic"}, ["precision: stochastic"]),
        ({"offload": "optimizer and tables"}, ["offload: tables"]),
        ({"framework": "TRL 0.9 with my patches"}, ["framework: my patches"]),
        ({"notes": "ran at night; bucket_size=5e8; compile=0"}, ["notes: bucket_size=5e8"]),
        ({"notes": "any prose; max seq 512"}, []),
        ({"framework": "torchtitan 0.1.0 (FSDP2)", "recompute": "selective op"}, []),
        ({"optimizer": "adamw (fp32 master and states)"}, []),
        ({"framework": "hf trainer (finetune.py, transformers 4.x), Sept 2023"}, []),
    ],
)
def test_what_was_not_understood_is_reported(cells: dict[str, Any], expected: list[str]) -> None:
    assert not_understood(Row(**cells)) == expected


def test_a_longer_name_is_not_caught_by_a_shorter_one() -> None:
    assert "nemo" not in terms_of(Row(framework="NeMo AutoModel"), "framework")
    assert "megatron" not in terms_of(Row(framework="Megatron-DeepSpeed"), "framework")
    assert "lora" not in terms_of(Row(peft="QLoRA"), "peft")


def test_releases_are_compared_as_numbers() -> None:
    def since(text: str) -> bool:
        return "accelerate since 0.34" in terms_of(Row(framework=text), "framework")

    assert [since(f"accelerate {n}") for n in ("0.34", "0.34.2", "1.0", "0.9", "0.33.0")] == [
        *(True, True, True, False, False)
    ]


def test_a_month_may_be_shortened() -> None:
    for month in ("Sept", "Sep.", "September"):
        terms = terms_of(Row(framework=f"torchtitan ({month} 2025)"), "framework")
        assert {"2025", "since april 2025"} <= terms.keys()


def test_every_term_has_a_meaning() -> None:
    """A term that no entry names would be consumed without any effect."""
    table = words_table()
    named = {
        term.removeprefix("not ")
        for section in (getattr(table, name) for name in table.__struct_fields__)
        if isinstance(section, tuple)
        for entry in section
        for terms in getattr(entry, "when", {}).values()
        for term in terms
    }
    matrices = {"q", "k", "v", "o", "gate", "up", "down", "mlp", "qkv", "attention", "all"}
    # "unpriced": no entry applies, and the row is refused
    by_code = {
        "torch loop",
        "own code",
        "base",  # "frozen base in bf16": the precision is a term of its own
        "gradient all-reduce",  # keeps its words from those of tensor parallelism
        "mixed",
        "nvme",  # the device of what is offloaded
        "tensor plan",  # says that TRL cuts weights
        "unpriced",
        "kinds of adapters",
        "kin of lora",
        "qat",
        "packed samples",
        "no vocabulary head",
        "no setting",  # other meanings of words that are settings
        "gathers 32 bits",
        *matrices,
        *(f"module {name}" for name in MODULES),
    }
    columns = ("framework", "recompute", "optimizer", "peft", "precision", "offload")
    for column in (*columns, "memory_definition", "flops_definition"):
        found = {term for terms in vocabulary().phrases(column).values() for term in terms}
        assert found - named - by_code == set(), column


def test_words_are_normalised() -> None:
    words = [token.word for token in tokens_of("8-bit Optimisers; w/o torch.compile=0, v1.2.3")]
    assert words == ["8bit", "optimizer", "without", "torch", "compile", "0", "v1.2.3"]


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("no Liger kernels; fits with Liger", "not liger", "liger"),
        ("liger kernels; the same without liger died", "liger", "not liger"),
        ("compile=0, before torch.compile was added", "not compile", "compile"),
        ("torch.compile is disabled", "not compile", "compile"),
        ("CUDA graphs were turned off", "not layer graphs", "layer graphs"),
        ("DeepSpeed is not used", "not deepspeed", "deepspeed"),
        ("torch.compile is on", "compile", "not compile"),
        ("CPU offload no, compile yes", "not offloads to host", "offloads to host"),
        ("offload, no gradient checkpointing", "not recompute", "recompute"),
        ("compile; AC", "recompute", "not recompute"),
        ("w/o AC, compile", "not recompute", "recompute"),
        ("laptop on AC power, no gradient checkpointing", "not recompute", "recompute"),
    ],
)
def test_the_first_mention_of_a_setting_counts(text: str, first: str, second: str) -> None:
    found = vocabulary().read("notes", text).terms
    assert first in found
    assert second not in found


def test_a_trainer_that_does_not_shard_as_the_row_says_is_composed_with_one_that_does() -> None:
    found = case(framework="Megatron-DeepSpeed", zero_stage=3, precision="fp16")
    assert found.scenario.software.name == "megatron-deepspeed+deepspeed-zero3"
    assert "megatron-deepspeed has no ZeRO stage 3: sharded as by deepspeed-zero3" in found.defaults
    other = case(framework="Megatron-DeepSpeed", zero_stage=2, precision="bf16")
    assert other.scenario.software.name == "megatron+deepspeed-zero2"
    own = case(framework="Megatron-LM (2022)", zero_stage=2)
    assert own.scenario.software.name == "megatron+fsdp2"
    bf16, fp16 = (
        case(framework="Megatron-DeepSpeed", zero_stage=1, precision=precision)
        for precision in ("bf16", "fp16")
    )
    assert bf16.scenario.software.name == "megatron+deepspeed-bf16-optimizer"
    assert fp16.scenario.software.name == "megatron-deepspeed"
