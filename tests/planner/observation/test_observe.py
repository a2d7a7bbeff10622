"""``shardplan observe``: lines of other trainers' logs become a row that can be priced.

Samples are synthetic, in the formats of the sources that the modules of
``planner/observation/logs`` name.
"""

# ruff: noqa: E501
import json
from pathlib import Path

import pytest

from hardware_profiles.errors import InputError
from planner.observation.answer import observe
from planner.observation.logs.deepspeed import read_deepspeed
from planner.observation.logs.megatron import read_megatron
from planner.observation.logs.torchtitan import read_torchtitan
from planner.validation.rows.runs_file import read_runs

MEGATRON = """\
  bf16 ............................................ True
  global_batch_size ............................... 64
  group_query_attention ........................... True
  hidden_size ..................................... 4096
  ffn_hidden_size ................................. 14336
  micro_batch_size ................................ 1
  num_attention_heads ............................. 32
  num_layers ...................................... 32
  num_query_groups ................................ 8
  padded_vocab_size ............................... 128256
  pipeline_model_parallel_size .................... 1
  recompute_granularity ........................... None
  seq_length ...................................... 8192
  swiglu .......................................... True
  tensor_model_parallel_size ...................... 2
  untie_embeddings_and_output_weights ............. True
  use_distributed_optimizer ....................... True
  world_size ...................................... 8
[Rank 0] (after 1 iterations) memory (MB) | allocated: 20000.0 | max allocated: 40000.5 | reserved: 42000.0 | max reserved: 43008.0
 [2026-01-01 00:00:00] iteration  1/  10 | consumed samples:  64 | elapsed time per iteration (ms): 90000.0 | global batch size:    64 | lm loss: 1.1E+01 |
"""
ITERATION = " iteration  {n}/  10 | consumed samples: 640 | elapsed time per iteration (ms): 7000.0 | global batch size:    64 | lm loss: 1.0E+01 |\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_log_of_megatron_gives_model_plan_and_median_step(tmp_path: Path) -> None:
    text = MEGATRON + "".join(ITERATION.format(n=n) for n in range(2, 11))
    log, runs = write(tmp_path, "m.log", text), tmp_path / "runs.csv"
    answer = observe(log, cluster="8xH100-SXM", output=runs)
    assert (answer.cells["step_time_s"], answer.steps) == (7.0, 5)
    assert answer.cells["peak_memory_gib"] == 43008.0 / 1024
    assert answer.prediction is not None
    (row,) = read_runs(runs)
    assert (row.tensor_parallel, row.zero_stage, row.gated_mlp, row.recompute) == (
        2,
        1,
        True,
        "none",
    )
    observe(log, cluster="8xH100-SXM", output=runs, recompute="full")
    assert [one.recompute for one in read_runs(runs)] == ["none", "full"]


def test_the_sizes_before_the_arguments_are_read(tmp_path: Path) -> None:
    sizes = (
        "using world size: 8, data-parallel size: 2, context-parallel size: 1, hierarchical "
        "context-parallel sizes: None, tensor-model-parallel size: 4, pipeline-model-parallel "
        "size: 1\n"
    )
    cells = read_megatron([sizes, ITERATION]).cells
    assert (cells["tensor_parallel"], cells["context_parallel"], cells["num_gpus"]) == (4, 1, 8)
    log = write(tmp_path, "m.log", MEGATRON)
    with pytest.raises(InputError, match="has 4 accelerators, but"):
        observe(log, cluster="4xH100-SXM")
    with pytest.raises(InputError, match="'foo' is unknown"):
        observe(log, cluster="8xH100-SXM", software="foo")
    assert "recompute none" not in str(observe(log, cluster="8xH100-SXM"))


def test_the_memory_report_of_megatron_bridge_is_read() -> None:
    report = "[Rank 0] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 16.6 | "
    report += "mem-max-allocated-gigabytes: 50.5 | mem-max-reserved-gigabytes: 60.25 | x: 0"
    found = read_megatron([report, ITERATION.format(n=2)])
    assert (found.allocated, found.reserved) == (50.5e9, 60.25e9)


def test_logs_of_other_trainers(tmp_path: Path) -> None:
    options = {"model": "llama-3-8b", "cluster": "8xH100-SXM", "warm_up": 1, "seq_len": 8192}
    titan = "".join(
        f"[rank0]:[titan] 2026-01-01 - root - INFO - \x1b[31mstep: {n:2}  \x1b[32mloss: 9.1  "
        f"\x1b[33mmemory: 47.5GiB(50.0%)  \x1b[34mtps: {tps}  \x1b[36mtflops: 1.0  mfu: 1.0%\n"
        for n, tps in ((1, "500"), (10, "5,000"), (20, "5,000"))
    )
    found = observe(write(tmp_path, "t.log", titan), global_batch_size=8, **options)
    assert found.cells["step_time_s"] == 8192 / 5000
    assert found.cells["memory_definition"] == "torch max_memory_reserved"
    unknown = str(observe(write(tmp_path, "u.log", titan), model="llama-3-8b", seq_len=8192))
    assert "tokens/s per device (for the step, give --global-batch-size)" in unknown
    assert "Not priced: the log does not state the accelerator; add --cluster CLUSTER" in unknown
    speed = "".join(
        f"[2026-01-01 00:00:00,000] [INFO] [timer.py:260:stop] epoch=0/micro_step={n}/global_step={n}, "
        "RunningAvgSamplesPerSec=3.0, CurrSamplesPerSec=4.0, MemAllocated=4.32GB, MaxMemAllocated=38.49GB\n"
        for n in (10, 20)
    )
    found = observe(write(tmp_path, "d.log", speed), global_batch_size=16, **options)
    assert (found.cells["step_time_s"], found.cells["peak_memory_gib"]) == (4.0, 38.49)
    nemo = "".join(
        f"Training epoch 0, iteration {n}/9 | lr: 2e-06 | global_batch_size: 8 | global_step: {n} | "
        f"train_step_timing in s: {time}\n"
        for n, time in ((0, 7.126), (1, 1.5), (2, 1.5))
    )
    found = observe(write(tmp_path, "n.log", nemo), **options)
    assert (found.cells["step_time_s"], found.cells["global_batch_size"]) == (1.5, 8)
    state = {"global_step": 100, "log_history": [{"train_steps_per_second": 0.5}]}
    found = observe(
        write(tmp_path, "trainer_state.json", json.dumps(state)), global_batch_size=8, **options
    )
    assert found.cells["step_time_s"] == 2.0


def test_a_run_out_of_memory_is_an_outcome(tmp_path: Path) -> None:
    text = MEGATRON.split("[Rank")[0] + "CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    text += "elapsed time per iteration (ms): \n"
    found = observe(write(tmp_path, "o.log", text), cluster="8xH100-SXM")
    assert found.cells["outcome"] == "oom"
    assert "step_time_s" not in found.cells


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no lines of a known trainer"):
        observe(write(tmp_path, "x.log", "hello\n"))
    log = write(tmp_path, "n.log", "train_step_timing in s: 1.5\n")
    with pytest.raises(InputError, match="--seq-len"):
        observe(log)
    table = write(tmp_path, "table.csv", "a,b\n1,2\n")
    with pytest.raises(InputError, match="unknown column 'a'"):
        observe(log, model="llama-3-8b", cluster="8xH100-SXM", seq_len=8192, output=table)
    assert table.read_text() == "a,b\n1,2\n"


def test_lines_of_present_releases_are_read() -> None:
    """DeepSpeed 0.19.8 prints no dots behind long names; torchtitan 0.3.0 the name of a class."""
    found = read_deepspeed(
        [
            "  train_micro_batch_size_per_gpu  4",
            "  bfloat16_config .............. enabled=True immediate_grad_update=False",
            "  float16_config ............... enabled=False auto_cast=False",
        ]
    )
    assert found.cells == {"micro_batch_size": 4, "precision": "bf16"}
    lines = ["Applied FullAC activation checkpointing to the model"]
    assert read_torchtitan(lines).cells == {"recompute": "full"}
    assert (
        read_torchtitan(["Compiling the loss function with torch.compile"]).trainer == "torchtitan"
    )
