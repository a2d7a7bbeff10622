"""Files that people run, from public repositories (sources inside), and what they state."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import planner
from cost_models.plan_file import write_plan_file
from hardware_profiles.errors import InputError
from planner.cli.app import main
from planner.exchange.registry import read_config
from planner.exchange.syntax.flags import parse_flags
from planner.exchange.syntax.python_recipe import parse_recipe
from planner.exchange.syntax.shell_script import read_script
from planner.request.model import resolve_model

REAL = Path(__file__).parent / "real"
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "megatron_llama3_8b_fp8.sh": (
        "megatron",
        {
            "tensor_parallel": 1,
            "zero_stage": 1,
            "precision": "fp8",
            "gradient_precision": "bf16",
            "global_batch_size": 128,
            "seq_len": 8192,
            "attention_kernel": "flash",
        },
        "layer norms are priced as RMS norms",
    ),
    "megatron_mixtral_8x7b.sh": (
        "megatron",
        {"expert_parallel": 2, "zero_stage": 1, "precision": "fp32", "global_batch_size": 4},
        None,
    ),
    "megatron_2023_frontier.sh": (
        "megatron",
        {
            "tensor_parallel": 8,
            "pipeline_parallel": 2,
            "pipeline_schedule": "interleaved_1f1b",
            "virtual_stages": 4,
            "global_batch_size": 64,
            "recompute": "full",
            "recompute_layers": 2,
            "precision": "bf16",
            "zero_stage": 0,
        },
        None,
    ),
    "torchtitan_llama3_70b.toml": (
        "torchtitan",
        {
            "tensor_parallel": 8,
            "sequence_parallel": True,
            "zero_stage": 3,
            "recompute": "full",
            "micro_batch_size": 8,
            "num_microbatches": 1,
            "seq_len": 8192,
        },
        "compile is off",
    ),
    "torchtitan_2024_llama3_8b.toml": (
        "torchtitan",
        {"micro_batch_size": 1, "zero_stage": 3, "recompute": "ops:every-2nd-mm"},
        "compile is off",
    ),
    "nanotron_tiny_llama.yaml": (
        "nanotron",
        {
            "data_parallel": 2,
            "tensor_parallel": 2,
            "sequence_parallel": True,
            "pipeline_parallel": 2,
            "pipeline_schedule": "1f1b",
            "global_batch_size": 4,
        },
        None,
    ),
    "nemo_llama3_70b.py::pretrain_recipe": (
        "nemo",
        {
            "tensor_parallel": 4,
            "pipeline_parallel": 4,
            "virtual_stages": 5,
            "context_parallel": 2,
            "sequence_parallel": True,
            "zero_stage": 1,
            "global_batch_size": 512,
            "micro_batch_size": 1,
            "seq_len": 8192,
        },
        None,
    ),
    "nemo1_llama.yaml": (
        "nemo",
        {"precision": "fp32", "recompute": "selective", "seq_len": 4096, "zero_stage": 0},
        None,
    ),
    "megatron_mixtral_8x7b_32_gpus.sh": (
        "megatron",
        {"pipeline_parallel": 4, "expert_parallel": 8, "zero_stage": 1, "global_batch_size": 256},
        "vocab_size is not in the file",
    ),
    "transformers_bert_glue.json": (
        "transformers",
        {"micro_batch_size": 32, "seq_len": 128, "precision": "fp32", "recompute": "none"},
        None,
    ),
    "accelerate_trl_fsdp2.yaml": (
        "accelerate",
        {"zero_stage": 3, "software": "hf-trainer+fsdp2", "precision": "bf16"},
        None,
    ),
    "megatron_gpt3_175b.sh": (
        "megatron",
        {
            "tensor_parallel": 8,
            "pipeline_parallel": 16,
            "micro_batch_size": 1,
            "global_batch_size": 1536,
            "precision": "fp16",
            "seq_len": 2048,
            "zero_stage": 0,
            "recompute": "none",
        },
        "rampup_batch_size: priced with the full global batch",
    ),
    "megatron_bert_340m.sh": (
        "megatron",
        {"tensor_parallel": 8, "pipeline_parallel": 16, "global_batch_size": 32, "seq_len": 512},
        "vocab_size is not in the file",
    ),
    "torchtitan_llama3_405b_fp8.toml": (
        "torchtitan",
        {
            "tensor_parallel": 8,
            "zero_stage": 3,
            "precision": "fp8",
            "recompute": "full",
            "micro_batch_size": 2,
            "seq_len": 8192,
        },
        None,
    ),
    "torchtitan_deepseek_v3_671b.toml": (
        "torchtitan",
        {
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
            "expert_parallel": 1,
            "precision": "bf16",
            "recompute": "ops:every-2nd-mm",
            "micro_batch_size": 4,
        },
        "compile.components is without the model",
    ),
    "deepspeed_transformers_zero2_auto.json": (
        "deepspeed",
        {
            "zero_stage": 2,
            "offload": "optimizer",
            "optimizer": "adamw",
            "precision": None,  # "auto": the script's
            "global_batch_size": None,
        },
        None,
    ),
    "deepspeed_transformers_zero3_offload.json": (
        "deepspeed",
        {"zero_stage": 3, "offload": "weights", "offload_device": "cpu", "precision": "fp16"},
        None,
    ),
    "deepspeed_2021_zero3_offload.json": (
        "deepspeed",
        {"zero_stage": 3, "offload": "weights", "precision": "fp16", "global_batch_size": 64},
        None,
    ),
    "deepspeed_megatron_zero2_bf16.json": (
        "deepspeed",
        {"zero_stage": 2, "precision": "bf16", "global_batch_size": 96, "num_microbatches": 1},
        None,
    ),
    "deepspeed_bert_onebit_lamb.json": (
        "deepspeed",
        {"zero_stage": 0, "precision": "fp16", "optimizer": "lamb", "micro_batch_size": 64},
        None,
    ),
    "examples/deepspeed/ds_z3_config.json": ("deepspeed", {"zero_stage": 3}, None),
    "examples/deepspeed/ds_z2_autotp_config.json": (
        "deepspeed",
        {"zero_stage": 2, "tensor_parallel": 2},
        None,
    ),
    "accelerate_fsdp1.yaml": (
        "accelerate",
        {"zero_stage": 3, "software": "hf-trainer+fsdp1", "precision": "bf16", "recompute": "none"},
        None,
    ),
    "accelerate_fsdp2_tp_hsdp.yaml": (
        "accelerate",
        {
            "zero_stage": 3,
            "software": "hf-trainer+fsdp2",
            "tensor_parallel": 2,
            "sequence_parallel": False,
            "dp_replicate": 2,
        },
        None,
    ),
    "accelerate_fsdp2_cp.yaml": (
        "accelerate",
        {"zero_stage": 3, "context_parallel": 4, "context_parallel_method": "allgather"},
        None,
    ),
    "accelerate_deepspeed_zero3.yaml": (
        "accelerate",
        {"zero_stage": 3, "offload": "weights", "software": "hf-trainer+deepspeed-zero3"},
        None,
    ),
    "accelerate_multi_gpu.yaml": ("accelerate", {"zero_stage": 0, "precision": "bf16"}, None),
    "accelerate_megatron.yaml": (
        "accelerate",
        {"software": "megatron-core", "zero_stage": 0, "recompute": "none", "precision": "fp32"},
        None,
    ),
    "transformers_zephyr_sft.yaml": (
        "transformers",
        {
            "micro_batch_size": 16,
            "num_microbatches": 1,
            "seq_len": 2048,
            "precision": "bf16",
            "recompute": "full",
            "attention_kernel": "flash",
            "lora": None,
        },
        "torch_dtype = bfloat16: priced with weights in fp32",
    ),
    "transformers_zephyr_qlora.yaml": (
        "transformers",
        {
            "qlora": 16,
            "lora_alpha": 16,
            "lora_targets": "all",
            "quantisation": "nf4",
            "optimizer": "paged_adamw",
            "micro_batch_size": 4,
            "seq_len": 1024,
        },
        None,
    ),
    "transformers_vicuna_13b.sh": (
        "transformers",
        {
            "zero_stage": 3,
            "software": "hf-trainer+fsdp1",
            "precision": "bf16",
            "micro_batch_size": 1,
            "num_microbatches": 4,
            "recompute": "full",
            "seq_len": 2048,
        },
        None,
    ),
    "transformers_vicuna_lora.sh": (
        "transformers",
        {"lora": 8, "lora_targets": "q,v", "precision": "fp16", "zero_stage": None},
        "deepspeed: neither a mapping nor a file",  # a variable that the script does not set
    ),
    "transformers_fsdp_xla.json": (
        "transformers",
        {"zero_stage": 3},
        "fsdp_config.xla = True is not priced",
    ),
    "axolotl_llama32_3b_fp8_fsdp2.yaml": (
        "axolotl",
        {
            "precision": "fp8",
            "zero_stage": 3,
            "software": "hf-trainer+fsdp2",
            "recompute": "full",
            "micro_batch_size": 16,
            "seq_len": 512,
            "attention_kernel": "flash",
        },
        "liger_* is not priced (--software hf-trainer-liger+fsdp2",
    ),
    "axolotl_llama31_8b_hsdp_tp.yaml": (
        "axolotl",
        {"dp_replicate": 2, "tensor_parallel": 2, "zero_stage": 3, "recompute": "none"},
        "CutCrossEntropyPlugin is not priced",
    ),
    "axolotl_qwen3_8b_tp_cp.yaml": (
        "axolotl",
        {"tensor_parallel": 2, "context_parallel": 2, "attention_kernel": "flash"},
        "CutCrossEntropyPlugin is not priced",
    ),
    "axolotl_llama3_8b_lora.yml": (
        "axolotl",
        {
            "qlora": 32,  # load_in_8bit
            "quantisation": "int8",
            "lora_alpha": 16,
            "optimizer": "adamw_8bit",
            "num_microbatches": 4,
            "zero_stage": 0,
        },
        None,
    ),
    "axolotl_llama3_70b_qlora_fsdp.yaml": (
        "axolotl",
        {
            "qlora": 8,
            "quantisation": "nf4",
            "zero_stage": 3,
            "offload": "weights",
            "software": "hf-trainer+fsdp1",
            "recompute": "full",
        },
        None,
    ),
    "axolotl_mixtral_qlora_deepspeed.yml": (
        "axolotl",
        {
            "qlora": 32,
            "zero_stage": 2,
            "offload": "optimizer",
            "software": "hf-trainer+deepspeed-zero2",
        },
        None,
    ),
    "llamafactory_llama3_full_ds3.yaml": (
        "llamafactory",
        {
            "zero_stage": 3,
            "software": "hf-trainer+deepspeed-zero3",
            "lora": None,
            "precision": "bf16",
            "num_microbatches": 2,
            "seq_len": 1024,
            "recompute": "full",
        },
        "deepspeed: keys that are not known, so not priced: comms_config.verbose",
    ),
    "llamafactory_llama3_lora.yaml": (
        "llamafactory",
        {"lora": 8, "lora_alpha": 16, "lora_targets": "all", "num_microbatches": 8},
        None,
    ),
    "llamafactory_llama3_qlora.yaml": (
        "llamafactory",
        {"qlora": 8, "quantisation": "nf4_double", "seq_len": 2048, "lora": None},
        None,
    ),
    "llamafactory_llama3_galore.yaml": (
        "llamafactory",
        {"precision": "bf16", "master_weights": False, "zero_stage": 0},
        "use_galore = True is not priced",
    ),
    "llamafactory_llama3_freeze.yaml": (
        "llamafactory",
        {"precision": "fp16", "micro_batch_size": 1},
        "finetuning_type = 'freeze' (known: full, lora)",
    ),
    "llamafactory_qwen3_32b_autotp.yaml": (
        "llamafactory",
        {"tensor_parallel": 2, "zero_stage": 2, "micro_batch_size": 4},
        "deepspeed: keys that are not known, so not priced: _comment",
    ),
}
UNKNOWN: dict[str, tuple[str, ...]] = {  # arguments of the scripts themselves, and typing errors
    "megatron_2023_frontier.sh": ("no-such-flag",),
    "examples/deepspeed/ds_z3_config.json": ("comms_config.verbose",),
    "examples/deepspeed/ds_z2_autotp_config.json": ("_comment",),
    "transformers_bert_glue.json": ("task_name",),
    "transformers_zephyr_sft.yaml": (
        "dataset_mixture.datasets",
        "dataset_mixture.test_split_size",
        "dataset_mixture.seed",
    ),
    "transformers_zephyr_qlora.yaml": (
        "dataset_mixer.HuggingFaceH4/ultrafeedback_binarized",
        "dataset_splits",
        "preprocessing_num_workers",
        "beta",
    ),
    "transformers_vicuna_13b.sh": ("data_path", "lazy_preprocess"),
    "transformers_vicuna_lora.sh": ("data_path", "lora_weight_path", "flash_attn"),
    "llamafactory_llama3_freeze.yaml": (
        "freeze_trainable_layers",
        "freeze_trainable_modules",
        "use_llama_pro",
    ),
}
CLUSTERS = {  # of models whose files say so, and of those that need more than eight accelerators
    "32_gpus": ("mixtral-8x7b", "4x8xH100-SXM"),
    "glue": ("bert-base", "1xA100-80GB"),
    "gpt3_175b": ("175b", "16x8xA100-80GB"),
    "340m": ("bert-large-uncased", "16x8xA100-80GB"),
    "frontier": ("22b", "16x8xA100-80GB"),
    "nemo_llama3_70b": ("llama-3-70b", "4x8xH100-SXM"),
    "torchtitan_llama3_70b": ("llama-3-70b", "8x8xH100-SXM"),
    "405b": ("llama-3.1-405b", "16x8xH100-SXM"),
    "671b": ("deepseek-v3", "64x8xH100-SXM"),
    "hsdp_tp": ("llama-3.1-8b", "2x8xH100-SXM"),
    "autotp": ("qwen3-32b", "8xH100-SXM"),
    "bert_onebit": ("bert-large-uncased", "64xV100-SXM2-32GB"),
    "mixtral_8x7b": ("mixtral-8x7b", "2xA100-80GB"),
    "mixtral_qlora": ("mixtral-8x7b", "8xA100-80GB"),
    "nemo1": ("llama-3-8b", "1xH100-SXM"),
}
ERRORS = {  # of jobs that the rules of plans forbid
    "mixtral_qlora": "--lora-targets must be attention",
}


@pytest.mark.parametrize("name", CASES)
def test_a_real_file_is_read(name: str) -> None:
    target, expected, note = CASES[name]
    reading = read_config(str(REAL / name))
    assert reading.target == target
    assert {key: reading.settings.get(key) for key in expected} == expected
    assert (note is None) is (reading.notes == ())
    assert note is None or any(note in each for each in reading.notes)
    assert reading.unknown == UNKNOWN.get(name.partition("::")[0], ())


def test_every_file_names_its_source() -> None:
    table = (REAL / "README.md").read_text()
    files = {str(each.relative_to(REAL)) for each in REAL.rglob("*.*") if each.suffix != ".md"}
    assert files >= {name.partition("::")[0] for name in CASES}
    for name in files:
        head = (REAL / name).read_text()[:300]
        assert re.search(r"# Trimmed from \S+/\S+@\w{10}: \S+ \(", head) or name in table, name


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fit_answers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = next((each for part, each in CLUSTERS.items() if part in name), None)
    model, cluster = found or ("llama-3-8b", "8xH100-SXM")
    expected = next((each for part, each in ERRORS.items() if part in name), None)
    with pytest.raises(SystemExit) as end:
        main(["fit", model, cluster, "--from", str(REAL / name)])
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    if expected is not None:
        assert end.value.code == 2
        assert expected in errors
    else:
        assert end.value.code in (0, 3, 4, 7), errors  # a verdict
        assert "read as a file of" in errors


def test_a_named_file_is_found_above(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "examples" / "full").mkdir(parents=True)
    job = tmp_path / "examples" / "full" / "job.yaml"
    job.write_text("base_model: x\ndeepspeed: configs/z3.json\n")
    assert read_config(str(job)).settings["zero_stage"] == 3


def test_flags_behind_a_launcher_module() -> None:
    text = "python -m torch.distributed.run --nnodes 2 train.py --bf16 True --lr 1"
    assert parse_flags(text, "x") == {"torchrun": {"nnodes": 2}, "bf16": "True", "lr": 1}


def test_accelerate_launch_states_the_sharding(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nmixed_precision: bf16\n"
    )
    job = tmp_path / "job.sh"

    def settings(launcher: str, arguments: str = "") -> dict[str, object]:
        script = f"train.py --per_device_train_batch_size 1 --output_dir x {arguments}"
        job.write_text(f"accelerate launch {launcher} --num_processes 8 {script}\n")
        return dict(read_config(str(job)).settings)

    found = settings("--config_file fsdp.yaml")
    assert (found["zero_stage"], found["precision"]) == (3, "bf16")
    assert found["software"] == "hf-trainer+fsdp2"
    assert "zero_stage" not in settings("--config_file elsewhere.yaml")  # open, not DDP
    assert settings("--use_deepspeed --zero_stage 2")["zero_stage"] == 2
    flags = "--config_file fsdp.yaml"
    assert settings(flags, "--fsdp shard_grad_op")["zero_stage"] == 2  # arguments win
    assert settings("--multi_gpu")["zero_stage"] == 0


def test_one_rank_of_a_file_that_shards_is_priced_unsharded(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}')
    answer = planner.fit("qwen2.5-0.5b", "1xA100-80GB", source=str(file))
    assert answer.plan.zero_stage == 0
    assert "ZeRO 2 shards nothing" in answer.notes[-1]
    offload = '"stage": 2, "offload_optimizer": {"device": "cpu"}'
    file.write_text(file.read_text().replace('"stage": 2', offload))
    answer = planner.fit("qwen2.5-0.5b", "1xA100-80GB", source=str(file))
    assert (answer.plan.zero_stage, answer.plan.offload) == (2, "optimizer")  # ZeRO-Offload
    found = planner.plan("qwen2.5-0.5b", "1xA100-80GB", source=str(file))
    assert found.best.world_size == 1


def test_adapters_that_are_given_replace_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text("base_model: x\nadapter: qlora\nload_in_4bit: true\nlora_r: 32\n")
    answer = planner.fit("qwen2.5-0.5b", "1xA100-80GB", source=str(file), lora=8)
    workload = answer.scenario.workload
    assert (workload.adapter, workload.adapter_rank) == ("lora", 8)


def test_a_misspelt_key_is_named_by_fit_and_plan(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "gradient_acumulation_steps": 4}')
    for command in ("fit", "plan"):
        with pytest.raises(SystemExit):
            main([command, "qwen2.5-0.5b", "2xA100-80GB", "--from", str(file)])
        said = " ".join(capsys.readouterr().err.split())
        assert "so not priced: gradient_acumulation_steps (is gradient_accumulation_steps" in said


def test_the_stage_of_a_file_holds_for_a_trainer_that_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}')
    answer = planner.fit("qwen2.5-0.5b", "4xA100-80GB", source=str(file), software="deepspeed")
    assert answer.plan.zero_stage == 1


def test_a_file_for_other_processes_than_the_cluster_has_says_so(tmp_path: Path) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: FSDP\nfsdp_config: {}\nnum_processes: 8\n")
    answer = planner.fit("qwen2.5-0.5b", "4xA100-80GB", source=str(file))
    assert answer.notes[-1].endswith("starts 8 processes; priced: 4 accelerators")
    answer = planner.fit("qwen2.5-0.5b", "8xA100-80GB", source=str(file))
    assert not any("processes" in note for note in answer.notes)


def test_a_file_with_other_layers_than_the_model_says_so(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    shape = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008"
    file.write_text(
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {shape} --swiglu --bf16 --seq-length 4096 "
        "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
        "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64\n"
    )
    notes = planner.fit("llama-3-8b", "8xA100-80GB", source=str(file)).notes
    assert notes[-1].endswith(
        "layers have 6.48 B parameters; priced: llama-3-8b, whose layers have 6.98 B"
    )
    notes = planner.fit("llama-2-7b", "8xA100-80GB", source=str(file)).notes
    assert not any("its layers" in note for note in notes)
    with pytest.raises(InputError, match="vocab_size is not in the file"):
        planner.fit(str(file), "8xA100-80GB")


def test_the_model_is_read_from_the_file_itself() -> None:
    sizes = {
        "megatron_llama3_8b_fp8.sh": 8_030_261_248,  # Llama 3 8B (arXiv:2407.21783)
        "torchtitan_llama3_70b.toml": 70_553_706_496,
        "nemo_llama3_70b.py::pretrain_recipe": 70_553_706_496,
    }
    for name, parameters in sizes.items():
        assert resolve_model(str(REAL / name)).num_parameters == parameters
    gpt = resolve_model(str(REAL / "megatron_2023_frontier.sh"))
    assert (gpt.family, gpt.num_layers, gpt.hidden_size) == ("gpt2", 48, 6144)


def test_one_of_several_functions_must_be_named() -> None:
    text = "def a():\n    return f(x=1)\ndef b():\n    return f(x=2)\n"
    with pytest.raises(InputError, match=r"name one as x.py::NAME \(a, b\)"):
        parse_recipe(text, "x.py")
    assert parse_recipe(text, "x.py::b")["x"] == 2
    with pytest.raises(InputError, match=r"no function 'bb'"):
        parse_recipe(text, "x.py::bb")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("X='--a  b'\nrun $X \"$X\"", ["run", "--a", "b", "--a  b"]),
        ('A=(--x "p q")\nA+=(--y)\nrun "${A[@]}" ${#A[@]}', ["run", "--x", "p q", "--y", "3"]),
        ("if [[ $X == 1 || -z $Y ]]; then T=2; else T=3; fi; run $T", ["run", "2"]),
        ("for n in 1 2; do M=$n; done\nrun ${M:+-m $M}", ["run", "-m", "1"]),
        ("N=$(( (2+1)*4 / 3 ))\nrun ${N} # $N\n", ["run", "4"]),
        ("F=a/b.json\nrun ${F##*/} ${F%.json} ${F/a/c} ${U:-$F}", None),
        ("cat <<EOF\nrun --a\nEOF\nC='run --b 1'\neval $C", ["run", "--b", "1"]),
        ("run a \\\n  b &> log", ["run", "a", "b"]),
    ],
)
def test_shell_words(script: str, words: list[str] | None) -> None:
    expected = ["run", "b.json", "a/b", "c/b.json", "a/b.json"] if words is None else words
    assert expected in read_script(script).commands


@pytest.mark.parametrize("text", ["", "ls", "${", "if then fi", "A=(", "[[ a", "\\", "`", "$(("])
def test_a_script_without_flags_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match="no command with flags"):
        parse_flags(text, "x.sh")


def test_one_file_may_have_another_name(tmp_path: Path, capsys: Any) -> None:
    plan = tmp_path / "plan.json"
    write_plan_file(plan, planner.plan("qwen2.5-0.5b", "2xA100-80GB", top=1).plan_file())
    named = tmp_path / "mine.yaml"
    with pytest.raises(SystemExit):
        main(["export", str(plan), "--to", "accelerate", "-o", str(named)])
    assert "Start      accelerate launch --config_file mine.yaml" in capsys.readouterr().out
    assert "# Start: accelerate launch --config_file mine.yaml" in named.read_text()
    with pytest.raises(SystemExit):
        main(["export", str(plan), "--to", "lightning", "-o", str(tmp_path / "job.py")])
    assert "name a folder" in capsys.readouterr().err


def test_a_script_of_transformers_says_how_to_save_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import transformers\nargs = transformers.TrainingArguments('x', bf16=True)\n")
    with pytest.raises(InputError, match=r"to_json_string\(\)\), then --from args.json"):
        planner.fit("qwen2.5-0.5b", "2xA100-80GB", source=str(file))


def test_the_name_of_an_organisation_is_no_other_model(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text("base_model: Qwen/Qwen2.5-0.5B\nmicro_batch_size: 1\n")
    answer = planner.fit("qwen2.5-0.5b", "1xA100-80GB", source=str(file))
    assert not any("names the model" in note for note in answer.notes)
