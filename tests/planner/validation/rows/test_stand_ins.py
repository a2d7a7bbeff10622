"""Runs that exist are priced, whatever their rows leave unsaid or say in words of their own."""

import random
from typing import Any

import pytest

from hardware_profiles.cluster.catalogue import accelerators
from planner.validation.pricing import CasePrediction, predict_cases
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.reading import Unpriceable
from planner.validation.rows.runs_file import Row

USUAL: dict[str, Any] = {
    "row_id": "row",
    "gpu": "A100-SXM-80GB",
    "num_gpus": 8,
    "model": "llama-2-7b",
    "framework": "torch",
    "seq_len": 2048,
    "micro_batch_size": 1,
    "zero_stage": 3,
    "recompute": "full",
    "precision": "bf16",
    "optimizer": "adamw",
}


def priced(**cells: Any) -> tuple[Case, CasePrediction]:
    case = case_of(Row(**(USUAL | cells)))
    found, refused = predict_cases([case])
    assert refused == {}
    return case, found["row"]


@pytest.mark.parametrize(
    ("column", "word", "others"),
    [
        ("optimizer", "SOAP", ("adamw", "sgd", "ademamix")),
        ("recompute", "adaptive", ("none", "full")),
        ("offload", "SuperOffload", ("none", "optimizer", "activations")),
        ("peft", "Spectrum", ("lora", "none")),
        ("precision", "W16", ("bf16", "fp32")),
    ],
)
def test_an_interval_covers_what_an_unknown_word_may_mean(
    column: str, word: str, others: tuple[str, ...]
) -> None:
    case, found = priced(**{column: word})
    assert any(word in text and "has no meaning here" in text for text in case.defaults)
    for other in others:
        known = priced(**{column: other})[1]
        assert found.step_low <= known.step_low
        assert found.step_high >= known.step_high
        assert found.peak_low <= known.peak_low
        assert found.peak_high >= known.peak_high


def test_two_unknown_words_cover_all_their_readings() -> None:
    found = priced(optimizer="SOAP", recompute="adaptive")[1]
    most = priced(optimizer="ademamix", recompute="none")[1]
    assert found.peak_high >= most.peak_high


def test_a_verdict_that_hangs_on_an_unknown_word_is_tight() -> None:
    cells = {"num_gpus": 1, "zero_stage": 0, "model": "llama-3.2-3b"}
    sgd, more = (priced(optimizer=word, **cells)[1].verdict for word in ("sgd", "ademamix"))
    assert sgd != more
    assert priced(optimizer="SOAP", **cells)[1].verdict == "tight"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "int8"])
def test_every_accelerator_has_a_rate(precision: str) -> None:
    cells = USUAL | {"model": "gpt2", "precision": precision, "num_gpus": 1}
    cards = {frozenset(card.peak_flops) | {card.architecture}: card.name for card in accelerators()}
    rows = [Row(**(cells | {"row_id": name, "gpu": name})) for name in cards.values()]
    found, refused = predict_cases([case_of(row) for row in rows])
    assert refused == {}
    assert all(0.0 < one.step_low < one.step < one.step_high for one in found.values())


def test_every_accelerator_has_a_link_to_its_host() -> None:
    unknown = [card.name for card in accelerators() if card.host_bandwidth is None]
    for name in unknown:
        case, found = priced(gpu=name, model="gpt2", offload="optimizer")
        assert any(f"{name}: 15.75 GB/s to its host" in text for text in case.defaults)
        assert found.step_high > 1.3 * found.step


def test_an_assumed_rate_is_said_and_widens() -> None:
    case, found = priced(gpu="TPU-v4", precision="fp32", framework="MaxText", model="gpt2")
    said = "fp32 on TPU-v4: its rate is assumed (that of bf16)"
    assert said in case.defaults
    known = priced(gpu="TPU-v4", framework="MaxText", model="gpt2")[1]
    assert found.step_high / found.step > 1.3 * known.step_high / known.step


def test_double_precision_follows_the_cores() -> None:
    seconds = {
        gpu: priced(gpu=gpu, precision="fp64", model="gpt2", num_gpus=1)[1].step
        for gpu in ("A100-SXM-80GB", "V100-SXM2-32GB", "RTX-3090")
    }
    assert seconds["RTX-3090"] / seconds["V100-SXM2-32GB"] > 3.0
    assert seconds["A100-SXM-80GB"] < seconds["V100-SXM2-32GB"]


@pytest.mark.parametrize(("gpu", "precision"), [("A100-SXM-80GB", "fp8"), ("H100-SXM", "nvfp4")])
def test_matmuls_that_a_card_does_not_have_are_refused(gpu: str, precision: str) -> None:
    refused = predict_cases([case_of(Row(**(USUAL | {"gpu": gpu, "precision": precision})))])[1]
    assert "no rate is known" in refused["row"]


@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_offloaded_weights_find_a_stage(stage: int | None) -> None:
    plan = priced(offload="parameters", zero_stage=stage)[0].plan
    assert (plan.zero_stage, plan.offload) == ((2, "optimizer") if stage == 2 else (3, "weights"))


def test_weights_that_may_stay_on_the_accelerator_widen_the_interval() -> None:
    found = priced(offload="parameters", zero_stage=None)[1]
    stays = priced(offload="optimizer", zero_stage=None)[1]
    stated = priced(offload="parameters")[1]
    assert stated.peak_high < stays.peak_high <= found.peak_high
    assert found.peak_low <= stated.peak_low


def test_engines_of_torch_give_way_to_a_stage_that_they_do_not_have() -> None:
    assert "ddp" not in priced(framework="DDP")[0].scenario.software.name


COLUMNS: dict[str, tuple[Any, ...]] = {
    "framework": (
        None,
        "torchtitan",
        "Megatron-LM",
        "DeepSpeed",
        "TRL",
        "MaxText",
        "my-own",
        "DDP",
    ),
    "precision": (None, "bf16", "fp16", "fp32", "tf32", "amp", "auto", "int8 mixed", "bfloat16"),
    "optimizer": (
        None,
        "AdamW",
        "Lion",
        "Muon",
        "Shampoo",
        "SOAP",
        "8-bit AdamW",
        "Adafactor",
        "CAME",
    ),
    "peft": (
        None,
        "none",
        "LoRA r=16",
        "QLoRA (nf4)",
        "DoRA",
        "LoRA HQQ",
        "prefix tuning",
        "BitFit",
    ),
    "recompute": (None, "none", "full", "selective", "50%", "partial", "every 2nd layer", "smart"),
    "offload": (None, "none", "optimizer", "parameters", "activations", "cpu", "nvme", "partial"),
    "model": (
        "llama-2-7b",
        "gpt2",
        "Qwen2.5-0.5B",
        "1.3B",
        "bert-base",
        "ViT-B/16",
        "Mixtral 8x7B",
    ),
    "zero_stage": (None, 0, 1, 2, 3),
    "num_gpus": (1, 2, 3, 6, 8, 12, 20, 64),
    "micro_batch_size": (None, 1, 4),
    "notes": (None, "FSDP full shard", "HSDP", "torch.compile", "ring attention", "packing"),
}


def test_no_row_of_a_sample_is_refused() -> None:
    """Accelerators with settings of other columns, in several spellings."""
    draw = random.Random(19)
    refused, rows = {}, []
    for number, accelerator in enumerate(accelerators()[::3]):
        cells = {name: draw.choice(values) for name, values in COLUMNS.items()}
        gpu = draw.choice((accelerator.name, *accelerator.aliases))
        rows.append(Row(row_id=f"{number}", seq_len=512, gpu=gpu, **cells))
    cases = []
    for row in rows:
        try:
            cases.append(case_of(row))
        except Unpriceable as reason:
            refused[row.name] = f"{row}: {reason}"
    found, unpriced = predict_cases(cases)
    assert refused | unpriced == {}
    assert len(found) == len(rows)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("2x RTX 3090", "RTX-3090"),
        ("RTX 3090 x2", "RTX-3090"),
        ("g5.12xlarge", "A10G"),
        ("RTX 4060 Ti", "RTX-4060-Ti-8GB"),
        ("RTX 4060 Ti 16GB", "RTX-4060-Ti-16GB"),
        ("NVIDIA GeForce RTX 3050 8GB", "RTX-3050"),
        ("RTX PRO 6000 Blackwell Max-Q", "RTX-PRO-6000-Max-Q"),
        ("RTX PRO 5000 72GB", "RTX-PRO-5000-72GB"),
        ("GeForce RTX 5090 Laptop GPU", "RTX-5090-Laptop"),
        ("Radeon RX 9070 XT", "RX-9070-XT"),
        ("Intel Arc B580 12GB", "Arc-B580"),
        ("Huawei Ascend 910C", "Ascend-910C-die"),
        ("trn1.32xlarge", "Trainium1"),
    ],
)
def test_cards_as_people_write_them(words: str, name: str) -> None:
    case, found = priced(gpu=words, model="gpt2")
    assert case.scenario.cluster.accelerator.name == name
    assert found.step > 0.0


@pytest.mark.parametrize(
    ("model", "millions"),  # of the published models, without pooler and heads
    [
        ("answerdotai/ModernBERT-base", 149),
        ("google/electra-large-discriminator", 334),
        ("BAAI/bge-large-en-v1.5", 335),
        ("sentence-transformers/all-MiniLM-L6-v2", 22.7),
        ("facebook/bart-large", 406),
        ("DINOv2-L", 304),
        ("DeiT-S", 22),
    ],
)
def test_encoders_by_name_have_their_size(model: str, millions: float) -> None:
    spec = priced(model=model, precision="fp32")[0].scenario.model
    assert spec.num_parameters / 1e6 == pytest.approx(millions, rel=0.06)


def test_nodes_of_unequal_size_are_parted_evenly() -> None:
    case = priced(num_gpus=12, gpus_per_node=8)[0]
    assert (case.scenario.cluster.num_nodes, case.scenario.cluster.gpus_per_node) == (2, 6)
    assert "nodes of 6: 12 are no whole ones of 8" in case.defaults


LOOP: dict[str, Any] = {"framework": "plain PyTorch", "zero_stage": None, "num_gpus": 1}


@pytest.mark.parametrize("framework", ["plain PyTorch", "HF Trainer", "plain PyTorch DDP"])
def test_trainers_before_ampere_cast_nothing_unless_told(framework: str) -> None:
    """torch makes weights in fp32, and TrainingArguments has fp16=False and bf16=False."""
    cells = LOOP | {"framework": framework, "model": "gpt2", "seq_len": 512, "gpu": "T4"}
    case, found = priced(**cells, precision=None)
    assert case.scenario.workload.precision == "fp32"
    assert "autocast" not in case.scenario.software.name
    assert any(text.startswith("precision fp32 (default: ") for text in case.defaults)
    for said in ("fp32", "fp16"):
        known = priced(**cells, precision=said)[1]
        assert found.step_low <= known.step_low
        assert found.peak_high >= known.peak_high
    assert found.step == priced(**cells, precision="fp32")[1].step


@pytest.mark.parametrize(
    "cells",
    [
        {"gpu": "A100-SXM-80GB"},
        {"notes": "autocast"},
        {"notes": "torch.compile"},
        {"framework": "plain PyTorch, DeepSpeed"},
        {"framework": "Megatron-LM"},
        {"peft": "lora r=8"},
    ],
)
def test_others_train_in_16_bits_where_they_say_nothing(cells: dict[str, Any]) -> None:
    case = priced(
        **(LOOP | {"gpu": "V100-SXM2-32GB", "model": "gpt2", "seq_len": 512} | cells),
        precision=None,
    )[0]
    assert case.scenario.workload.precision in ("bf16", "fp16")


@pytest.mark.parametrize(
    ("framework", "model", "tokens"),
    [
        ("plain PyTorch", "llama-2-7b", 2048),
        ("Axolotl", "llama-2-7b", 512),
        ("TRL SFTTrainer", "llama-2-7b", 1024),
        ("LLaMA-Factory", "llama-2-7b", 2048),
        ("Unsloth", "llama-2-7b", 2048),
        ("torchtitan", "llama3-8b", 4096),
        ("NeMo 2.0 (Megatron Core)", "llama3-8b", 4096),
        ("HF Trainer", "bert-large", 512),
    ],
)
def test_an_unsaid_length_is_the_trainers_and_widens(
    framework: str, model: str, tokens: int
) -> None:
    cells = {"framework": framework, "model": model, "micro_batch_size": 4}
    case, found = priced(**cells, seq_len=None)
    assert case.scenario.workload.seq_len == tokens
    assert any(text.startswith(f"seq_len {tokens} (default: ") for text in case.defaults)
    shorter, stated, longer = (
        priced(**cells, seq_len=length)[1] for length in (tokens // 4, tokens, 4 * tokens)
    )
    assert found.step == stated.step
    assert found.step_low <= shorter.step_low < stated.step_low
    assert found.peak_high >= longer.peak_high > stated.peak_high


@pytest.mark.parametrize(
    ("cells", "gpu"),
    [
        ({}, "A100-SXM-80GB"),
        ({"gpu_mem_gb": 24.0}, "RTX-4090"),
        ({"gpu_mem_gb": 48.0}, "RTX-A6000"),
        ({"gpu_mem_gb": 80.0}, "A100-SXM-80GB"),
        ({"peak_memory_gib": 100.0}, "H200-SXM-141GB"),
        ({"peak_memory_gib": 300.0}, "B300-SXM-288GB"),
    ],
)
def test_an_unnamed_accelerator_has_room_for_what_was_measured(
    cells: dict[str, Any], gpu: str
) -> None:
    case, found = priced(gpu=None, **cells)
    assert case.scenario.cluster.accelerator.name == gpu
    assert any(text.startswith(f"gpu {gpu} (default: ") for text in case.defaults)
    if not cells:
        faster = priced(gpu="H100-SXM-80GB")[1]
        slower = priced(gpu="RTX-4090")[1]
        assert found.step_low <= faster.step_low
        assert found.step_high >= slower.step_high


def test_accelerators_follow_from_the_ranks() -> None:
    case = priced(num_gpus=None, tensor_parallel=2, data_parallel=4)[0]
    assert case.scenario.cluster.num_gpus == 8
    assert "num_gpus 8 (default: as many as ranks)" in case.defaults
