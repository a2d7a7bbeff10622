"""Every family that the executor trains, against the module of transformers."""

from __future__ import annotations

import pytest
from test_parity import OPTIONS, assert_equal
from tiny import CONFIGS, tiny, verified

from cost_models.plan import Plan
from executor import tensor_parallel
from executor.support import SPAN_FAMILIES

# the others are part of the matrix of all options
FAMILIES = [family for family in CONFIGS if family not in (*OPTIONS["family"], *SPAN_FAMILIES)]
# all axes but the data ranks; whole layers again, ZeRO-3
WIDE = Plan(
    tensor_parallel=2,
    sequence_parallel=True,
    pipeline_parallel=2,
    recompute="selective",
    num_microbatches=2,
)
SHARDED = Plan(
    data_parallel=2, tensor_parallel=2, zero_stage=3, recompute="full", num_microbatches=2
)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_sequence_and_pipeline_parallel(family: str):
    ranges = ((0, 3), (3, 5))  # uneven
    assert_equal(verified(tiny(WIDE, family, num_layers=5, layer_ranges=ranges, tied=True)))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_zero_tensor_parallel_and_recomputation(family: str):
    assert_equal(verified(tiny(SHARDED, family, num_layers=2)))


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "phi3", "smollm3"])
@pytest.mark.parametrize("kernel", ["flash", "eager"])
def test_documents_with_either_kernel(family: str, kernel: str):
    file = tiny(Plan(), family, num_layers=2, attention_kernel=kernel)
    assert_equal(verified(file, documents=True))


# what a family's defaults leave out
OTHERWISE = {
    "phi without norms of heads": ("phi", {"qk_layernorm": False, "num_key_value_heads": 4}),
    "gpt_neox in turn": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "cohere without norms of heads": ("cohere", {"use_qk_norm": False, "attention_bias": True}),
    "smollm3 with windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 5}),
    "starcoder2 without biases": ("starcoder2", {"use_bias": False, "sliding_window": None}),
    "gemma2 without caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERWISE)
def test_other_options_of_a_family(name: str):
    family, options = OTHERWISE[name]
    assert_equal(verified(tiny(Plan(tensor_parallel=2), family, num_layers=2, **options)))


def _local_statistics() -> None:
    """The ranks still agree on the norms' statistics, but not on their gradient."""
    tensor_parallel._Total.backward = staticmethod(lambda ctx, gradient: (None, gradient))


@pytest.mark.distributed
def test_the_gradient_of_shared_statistics_is_a_sum_over_ranks():
    file = tiny(Plan(tensor_parallel=2), "olmo2", num_layers=2)
    found = verified(file, _local_statistics)
    assert found.gradient_difference > 1e-3
    assert not found.passed
    assert verified(file).passed
