"""Steps on fake tensors hold what real steps hold."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.memory_truth.__main__ import beyond, summary
from benchmarks.memory_truth.cases import file_of, read
from benchmarks.memory_truth.matrix import lines
from benchmarks.memory_truth.rows import PARTS, rows_of
from benchmarks.memory_truth.small_models import CONFIGS
from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from cost_models.plan_file import PlanFile
from executor.compat import fake_world, outside_fake_mode, propagating_global_shapes
from executor.counters.live_tensors import MemoryTracker
from executor.processes.fork import run_forked
from executor.training.step_measurement import memory_tracker
from executor.verify.parity import random_batch
from executor.verify.rehearsal import in_forked_process, rehearse
from hardware_profiles.errors import InputError

PLANS = {
    "core recomputed, sequence": Plan(
        tensor_parallel=2, sequence_parallel=True, recompute="selective", micro_batch_size=2
    ),
    "zero 1": Plan(data_parallel=2, zero_stage=1, num_microbatches=2),
    "zero 3, ring": Plan(context_parallel=2, zero_stage=3, num_microbatches=2),
    "pipeline": Plan(pipeline_parallel=2, num_microbatches=4, pipeline_schedule="zero_bubble"),
}


def _watched(rank: int, file: PlanFile) -> dict[str, Any]:
    """Train two real steps of one rank."""
    from executor.training.trainer import Trainer

    trainer = Trainer(file)
    with memory_tracker(trainer) as tracker:
        for step in range(2):
            batch = random_batch(file, step).rows(trainer.rows.start, trainer.rows.stop)
            own = replace(batch, inputs=batch.inputs.clone(), labels=batch.labels.clone())
            del batch
            trainer.step(own)
    return tracker.result().to_dict()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", PLANS)
def test_the_peak_is_that_of_real_steps(name: str) -> None:
    """A message's tensor can outlive its wait by a moment, in gloo's thread: the least of three."""
    plan = PLANS[name]
    work = Workload(64, plan.global_batch_size, precision="bf16")
    file = file_of({**CONFIGS["llama"], "num_hidden_layers": 4}, plan, work)
    ranks = range(file.plan.world_size)
    fakes = [rehearse(file, rank, sends_stay=True) for rank in ranks]
    peaks = {(rank, fake.phase): fake.peak_bytes for rank, fake in zip(ranks, fakes, strict=True)}
    least: dict[tuple[int, str], int] = {}
    for _ in range(3):
        for rank, real in enumerate(run_forked(_watched, len(ranks), file, timeout=300)):
            key = rank, real["phase"]
            least[key] = min(real["peak_bytes"], least.get(key, real["peak_bytes"]))
        if least == peaks:
            break
    assert least == peaks, fakes


@pytest.mark.slow
def test_a_layer_costs_the_same_at_every_depth() -> None:
    """What the matrix cuts away repeats: the third layer adds what the fourth one adds."""
    llama = CONFIGS["llama"]
    peaks = []
    for layers in (2, 3, 4):
        file = file_of(
            {**llama, "num_hidden_layers": layers}, Plan(2, zero_stage=3), Workload(256, 2)
        )
        peaks.append(rehearse(file, 0).peak_bytes)
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 0


def test_shadows_of_global_shapes_are_not_counted() -> None:
    """DTensor works out shapes on tensors of the whole: 8 times a rank's part."""

    def peak(muting: bool) -> int:
        with fake_world(0, 8):
            mesh = outside_fake_mode(init_device_mesh)("cpu", (8,))
            part = torch.zeros(64, 16)
            tracker = MemoryTracker()

            def mute(cast: bool) -> None:
                tracker.muted = cast and muting

            with propagating_global_shapes(mute), tracker:
                whole = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
                whole + whole
        return tracker.result().peak_bytes

    part = 64 * 16 * 4
    assert in_forked_process(lambda: peak(True)) == 2 * part
    assert in_forked_process(lambda: peak(False)) >= 8 * part


@pytest.mark.slow
def test_scores_that_a_cpu_would_hold_are_not_there() -> None:
    """Dropout of scores, and positions that are trained: a CPU's torch makes whole scores."""
    heads, seq_len, batch = 4, 1024, 2
    t5 = {"model_type": "t5", "vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 128}
    t5 |= {"num_heads": heads, "num_layers": 1, "dropout_rate": 0.1}
    bert = {"model_type": "bert", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    bert |= {"num_attention_heads": heads, "num_hidden_layers": 2}
    bert |= {"attention_probs_dropout_prob": 0.1, "max_position_embeddings": seq_len}
    scores = 4 * batch * heads * seq_len**2
    peaks = [
        rehearse(file_of(config, Plan(micro_batch_size=batch), Workload(seq_len, batch)), 0)
        for config in (bert, t5)
    ]
    assert peaks[0].peak_bytes < scores
    # T5: 16-bit positions of each sequence, and their gradients; no fp32 scores of three attentions
    assert peaks[1].peak_bytes < 3 * scores


@pytest.mark.slow
def test_one_data_rank_divides_no_gradient() -> None:
    """torch would divide by 1, into a copy as large as the table whose gradient is the peak."""
    config = {**CONFIGS["llama"], "vocab_size": 65536, "num_hidden_layers": 1}
    plan = Plan(tensor_parallel=2, num_microbatches=2)
    (row,) = rows_of(file_of(config, plan, Workload(16, 2)))
    assert abs(row["error_percent"]) < 1.0, row


def test_a_failure_is_told() -> None:
    def fails() -> None:
        raise InputError("no such layer")

    with pytest.raises(InputError, match="no such layer"):
        in_forked_process(fails)


@pytest.mark.slow
def test_cases_are_read() -> None:
    first, second, last = read("llama-3-8b:8 s8192 tp2 sp pp4 m8 dp2 zero1 full:1 fp32")
    plan, workload = first.file.plan, first.file.workload
    assert [first.rank, second.rank, last.rank] == [0, 4, 12]
    assert (plan.tensor_parallel, plan.sequence_parallel, plan.zero_stage) == (2, True, 1)
    assert (plan.recompute, plan.recompute_layers) == ("full", 1)
    assert (workload.seq_len, workload.precision) == (8192, "fp32")
    assert first.file.model.num_layers == 8
    with pytest.raises(ValueError, match="zero9x"):
        read("llama-3-8b zero9x")
    found = [read(line) for line in lines()]
    assert all(found)
    assert sum(map(len, found)) >= 120


def test_a_peak_or_a_median_beyond_its_bound_is_told() -> None:
    parts = dict.fromkeys(PARTS, 1.0)

    def row(error: float, **traced: float) -> dict[str, Any]:
        return {
            "case": "x",
            "stage": 1,
            "traced": 100.0,
            "error_percent": error,
            "parts": parts,
            "traced_parts": parts | traced,
        }

    def said(*rows: dict[str, Any]) -> list[str]:
        return beyond(rows, summary(rows))

    assert said(row(0.1), row(-0.2), row(1.9)) == []
    assert said(row(0.1), row(-0.2), row(-2.1)) == ["x stage 1: -2.10 % (at most 2 %)"]
    assert said(row(0.6), row(-0.7)) == ["peak: median 0.65 % (at most 0.5 %)"]
    assert said(row(0.1, buffers=3.0)) == ["buffers: median 2.00 % (at most 0.5 %)"]
