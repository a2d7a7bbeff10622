"""Document masks cost what the executor is seen to hold."""

from dataclasses import replace

import pytest

from benchmarks.memory_truth.rows import rows_of
from benchmarks.memory_truth.small_models import small
from cost_models.activations.document_masks import as_computed, mask_bytes, masked_key_bytes
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.pricing.estimate import price
from hardware_profiles.software.trainer import software_profile
from tests.samples import make_scenario, rank_view

PLANS = {
    "grouped queries": ("llama", "fp32", Plan(micro_batch_size=2)),
    "16 bits, core recomputed": ("llama", "bf16", Plan(micro_batch_size=2, recompute="selective")),
    "pipeline": ("llama", "fp32", Plan(pipeline_parallel=2, num_microbatches=4)),
}


def test_one_mask_a_window_by_hand():
    """Gemma 3 has full layers and windows of 512; 4 sequences of 8192 tokens in bf16."""
    scenario = make_scenario("gemma-3-1b", seq_len=8192, global_batch_size=32)
    work = replace(scenario.workload, document_mask=True, precision="bf16")
    table = PlanTable.from_plans([Plan(micro_batch_size=4), Plan(micro_batch_size=1)])

    def found(workload: Workload, software: str = "shardplan") -> list[float]:
        profile = software_profile(software)
        return list(mask_bytes(rank_view(scenario.model, workload, profile, table)))

    assert found(work) == [2 * 2.0 * 4 * 8192**2, 2 * 2.0 * 8192**2]
    assert found(replace(work, seq_len=512))[1] == 2.0 * 512**2  # no window is narrower
    assert found(replace(work, document_mask=False)) == [0.0, 0.0]
    assert found(replace(work, attention_kernel="eager")) == [0.0, 0.0]
    assert found(work, "megatron") == [0.0, 0.0]


def test_keys_are_repeated_for_every_query_head():
    attention = make_scenario("llama-3-8b").model.kinds[0].attention
    work, software = Workload(128, 1, document_mask=True), software_profile("shardplan")
    assert masked_key_bytes(attention, work, software) == 2 * (32 - 8) * 2 * 128
    assert masked_key_bytes(attention, Workload(128, 1), software) == 0
    windowed = replace(attention, window=64)  # they are repeated for the window
    assert masked_key_bytes(windowed, work, software) == 0


def test_kernels_that_know_documents_compute_their_scores_only():
    kind = make_scenario("llama-3-8b").model.kinds[0]
    megatron, ours = software_profile("megatron"), software_profile("shardplan")
    work = Workload(4096, 1, document_mask=True, document_length=200)
    assert as_computed(kind, work, megatron).attention.window == 100, "causal: half a document"
    whole = replace(kind, attention=replace(kind.attention, causal=False))
    assert as_computed(whole, work, megatron).attention.window == 200
    assert as_computed(kind, replace(work, document_length=0), megatron) is kind
    assert as_computed(kind, replace(work, attention_kernel="eager"), megatron) is kind
    masked = as_computed(kind, work, ours).attention
    assert (masked.causal, masked.window) == (False, None), "a mask hides no work"
    windowed = replace(kind, attention=replace(kind.attention, window=512))
    masked = as_computed(windowed, Workload(4096, 1), ours).attention
    assert (masked.causal, masked.window) == (False, None), "nor does that of a window"
    assert as_computed(windowed, Workload(512, 1), ours) is windowed, "which hides nothing"
    assert as_computed(windowed, Workload(4096, 1), megatron) is windowed


def test_masks_are_never_free():
    scenario = make_scenario("llama-3-8b", seq_len=4096, global_batch_size=8)
    masked = replace(scenario, workload=replace(scenario.workload, document_mask=True))
    table = PlanTable.from_plans(
        [Plan(data_parallel=8), Plan(data_parallel=4, tensor_parallel=2, recompute="full")]
    )
    plain, dear = price(scenario, table), price(masked, table)
    assert dear.peak[0] > plain.peak[0]
    assert dear.peak[1] == plain.peak[1]  # in the optimizer step no mask is left
    assert (dear.step > plain.step).all()
    kind = scenario.model.kinds[0]
    assert as_computed(kind, scenario.workload, scenario.software) is kind


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", PLANS)
def test_the_memory_is_what_is_traced(name: str):
    family, precision, plan = PLANS[name]
    plain = {row["stage"]: row for row in rows_of(small(family, precision, plan, layers=4))}
    for row in rows_of(small(family, precision, plan, layers=4, document_mask=True)):
        before = plain[row["stage"]]
        assert abs(row["error_percent"]) < 2.0
        # of what the masks add, nothing is missing
        added = row["traced"] - before["traced"]
        assert row["predicted"] - before["predicted"] == pytest.approx(added, rel=0.05)
