"""Rows are priced as ``fit`` prices: pipelines simulated, not their lower bound."""

import pytest
from msgspec.structs import replace

from cost_models.plan.plan import PlanTable
from cost_models.pricing.estimate import price
from planner.validation.pricing import predict_cases
from planner.validation.rows.case import case_of
from planner.validation.rows.runs_file import PUBLISHED, Row, read_runs
from planner.validation.rows.unstated_plan import assumed_settings


def test_pipelines_are_simulated() -> None:
    row = next(row for row in read_runs(PUBLISHED) if row.row_id == "llama3-paper-0003")
    case = case_of(row)  # 16 stages of a rank, in turn: the bound is not reached
    bound = float(price(case.scenario, PlanTable.from_plans([case.plan])).step[0])
    found, refused = predict_cases([case])
    assert not refused
    assert bound * 1.001 < found[row.name].step < bound * 1.01


@pytest.mark.parametrize("seq_len", [1280, 4096])
def test_memory_reaches_down_to_checkpointing_where_nobody_says(seq_len: int) -> None:
    """A user of Hugging Face's Trainer switches it on or not: on where nothing else can fit."""
    cells = {
        "model": "llama-3.1-8b",
        "seq_len": seq_len,
        "gpu": "RTX-3090",
        "num_gpus": 2,
        "zero_stage": 3,
        "optimizer": "adamw",
        "micro_batch_size": 1,
        "precision": "bf16",
    }
    row = Row(row_id="a", framework="HF Trainer, FSDP", peft="lora r=8", **cells)
    rows = row, replace(row, recompute="none"), replace(row, recompute="full")
    found, plain, again = (predict_cases([case_of(one)])[0]["a"] for one in rows)
    assert plain.verdict == ("does_not_fit" if seq_len == 4096 else "tight")
    assert again.verdict == ("tight" if seq_len == 4096 else "fits")
    assert found.verdict == "tight"
    taken = again if seq_len == 4096 else plain
    assert (found.peak, found.peak_high, found.step) == (taken.peak, taken.peak_high, taken.step)
    assert found.peak_low == again.peak_low < plain.peak_low


def test_a_verdict_that_hangs_on_memory_that_is_not_said_is_tight() -> None:
    """V100s have 16 or 32 GB; a peak of more than 16 says which."""
    cells = {"model": "gpt2", "seq_len": 1024, "num_gpus": 4, "micro_batch_size": 10}
    row = Row(
        row_id="a", gpu="V100", framework="HF Trainer", recompute="none", precision="fp32", **cells
    )
    sizes = [replace(row, gpu_mem_gb=size) for size in (16.0, 32.0)]
    peak = {"peak_memory_gib": 18.0, "memory_definition": "nvidia-smi"}
    rows = (*sizes, row, replace(row, **peak), replace(row, micro_batch_size=1))
    found = [predict_cases([case_of(one)])[0]["a"].verdict for one in rows]
    assert found == ["does_not_fit", "fits", "tight", "fits", "fits"]
    assert any("its memory is not said" in words for words in case_of(row).defaults)


def test_a_row_that_leaves_most_settings_open_is_not_said_to_fit() -> None:
    cells = {"model": "gpt2", "seq_len": 512, "gpu": "A100-SXM-80GB", "num_gpus": 1}
    stated = {"recompute": "none", "optimizer": "adamw", "micro_batch_size": 1, "precision": "bf16"}
    row = Row(row_id="a", framework="HF Trainer", **cells)
    some = [replace(row, **dict(list(stated.items())[:count])) for count in (0, 2, 3, 4)]
    verdicts = [predict_cases([case_of(one)])[0]["a"].verdict for one in some]
    assert [assumed_settings(case_of(one).defaults) for one in some] == [5, 3, 2, 1]
    assert verdicts == ["tight", "tight", "fits", "fits"]


@pytest.mark.parametrize(
    ("notes", "definition", "times"),
    [
        ("DDP", "max reserved", 1.0),
        ("DDP", "max reserved, sum over all GPUs", 4.0),
        ("DDP", "max reserved, total of 4 GPUs", 4.0),
        ("DDP", "reserved, of a total memory of the card of 80 GB", 1.0),
        ("DDP", "total reserved memory max over all GPUs", 1.0),
        ("MP=2, DDP=2", "max reserved, total of 4 GPUs", 2.0),
    ],
)
def test_a_sum_over_accelerators_is_compared_with_a_sum(
    notes: str, definition: str, times: float
) -> None:
    cells = {"model": "qwen-14b", "seq_len": 1024, "gpu": "A100-80GB", "num_gpus": 4}
    row = Row(row_id="a", framework="ms-swift", peft="lora", notes=notes, **cells)
    measured = {"peak_memory_gib": 40.0, "memory_definition": definition}
    (found,) = predict_cases([case_of(replace(row, micro_batch_size=1, **measured))])[0].values()
    one = {**measured, "memory_definition": "max reserved"}
    alone = replace(row, notes="DDP", micro_batch_size=1, **one)
    (single,) = predict_cases([case_of(alone)])[0].values()
    assert found.peak == pytest.approx(times * single.peak, rel=0.1)
    assert found.peak_high / found.peak == pytest.approx(single.peak_high / single.peak, rel=0.1)


def test_swift_logs_the_sum_over_the_cards_of_a_model() -> None:
    cells = {"model": "qwen-14b", "seq_len": 1024, "gpu": "A100-80GB", "num_gpus": 2}
    measured = {"peak_memory_gib": 40.0, "memory_definition": "GPU memory (GiB)"}
    row = Row(row_id="a", framework="ms-swift", peft="lora", notes="MP=2", **cells, **measured)
    stated = replace(row, memory_definition="max reserved")
    found, one = (predict_cases([case_of(each)])[0]["a"].peak for each in (row, stated))
    assert 1.5 * one < found < 2.0 * one


@pytest.mark.parametrize(("stage", "bytes_each"), [(0, 20.0), (1, 6.0 + 12.0 / 8)])
def test_nanotrons_benchmarks_print_the_peak_of_the_update(stage: int, bytes_each: float) -> None:
    """Weights 2, fp32 gradients 4, states 12; without ZeRO-1 buckets of 16 bits as well."""
    cells = {"model": "llama-3.2-1b", "seq_len": 4096, "gpu": "H100-80GB", "num_gpus": 8}
    row = Row(row_id="a", framework="nanotron", zero_stage=stage, peak_memory_gib=1.0, **cells)
    kinds = "torch max_memory_allocated (Mem Alloc (GB))", "Mem Res (GB)"
    rows = [replace(row, precision="bf16", memory_definition=kind) for kind in kinds]
    update, step = (predict_cases([case_of(one)])[0]["a"].peak for one in rows)
    parameters = case_of(row).scenario.model.num_parameters
    assert update == pytest.approx(bytes_each * parameters, rel=0.02)
    assert step > 1.3 * update
