"""What families have beside their defaults, against the module of transformers.

Every family under every kind of layout is in the matrix (``python -m executor.verify --matrix``).
"""

from dataclasses import replace

import pytest

from cost_models.plan.plan import Plan
from executor.parallel import tensor_parallel
from tests.executor.tiny import assert_equal, tiny, verified


@pytest.mark.sampled(1)
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


@pytest.mark.slow
@pytest.mark.distributed
def test_the_gradient_of_shared_statistics_is_a_sum_over_ranks():
    file = tiny(Plan(tensor_parallel=2), "olmo2", num_layers=2)
    found = verified(file, _local_statistics)
    assert found.gradient_difference > 1e-3
    assert not found.passed
    assert_equal(verified(file))


RING = Plan(context_parallel=2, recompute="full")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "plan", "kernel", "documents"),
    [
        ("t5", Plan(2, zero_stage=1, recompute="selective"), "flash", False),
        ("llama", RING, "eager", False),
        ("llama", RING, "flash", True),
        ("mistral", replace(RING, context_parallel=4), "flash", False),  # a window hides chunks
        ("mixtral", Plan(2, zero_stage=1, expert_parallel=2), "flash", False),
        ("gpt_oss", Plan(1, 2, expert_tensor_parallel=False), "flash", False),
        ("qwen2_moe", Plan(1, 2, recompute="modules:shared_experts"), "flash", False),
    ],
)
def test_flop_are_predicted_as_counted(family: str, plan: Plan, kernel: str, documents: bool):
    file = tiny(plan, family, num_layers=2, attention_kernel=kernel)
    file = replace(file, workload=replace(file.workload, seq_len=24))
    found = verified(file, documents=documents).flops
    assert found["predicted"] == found["counted"]
