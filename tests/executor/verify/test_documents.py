"""A packed document is computed as if it were alone: attention, positions, labels."""

from typing import Any

import pytest
import torch

from cost_models.plan.plan import Plan
from executor.attention import core as attention
from executor.attention.core import visible
from executor.support import SPAN_FAMILIES
from executor.verify.parity import TOLERANCE, random_batch
from executor.verify.tiny_models import KERNELS
from tests.executor.tiny import CONFIGS, assert_equal, tiny, verified

pytestmark = pytest.mark.distributed

CASES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "one process": (Plan(), {"family": "qwen3"}),
    "eager": (Plan(), {"family": "gpt2", "attention_kernel": "eager"}),
    "window in some layers, recomputed core": (
        Plan(1, 2, recompute="selective"),
        {"family": "qwen2"},
    ),
    "learned positions over tensor ranks": (
        Plan(1, 2, sequence_parallel=True, recompute="full"),
        {"family": "gpt2"},
    ),
    "all axes, several micro-batches": (
        Plan(2, 1, 2, zero_stage=3, micro_batch_size=2, num_microbatches=2),
        {"family": "mistral", "tied": True},
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_packed_documents_are_computed_as_if_alone(name: str):
    plan, options = CASES[name]
    assert_equal(verified(tiny(plan, num_layers=3, **options), documents=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in CONFIGS if f not in (*SPAN_FAMILIES, *KERNELS)])
def test_every_family_keeps_documents_apart(family: str):
    found = verified(tiny(Plan(), family), documents=True)
    assert found.gradient_difference <= TOLERANCE, found.worst_gradient
    assert found.loss_difference <= TOLERANCE


def test_eager_attention_with_a_window_keeps_to_documents():
    """Llama's kin take an eager softmax in fp32, whose rounding depends on the length."""
    found = verified(tiny(Plan(), "mistral", attention_kernel="eager"), documents=True)
    assert found.loss_difference <= 1e-7
    assert found.gradient_difference <= 1e-6


def _one_long_document() -> None:
    attention.Documents.visible = lambda self, window: visible(  # type: ignore[method-assign]
        torch.arange(self.starts.size(1)), window
    ).expand(len(self.starts), 1, -1, -1)


def _running_positions() -> None:
    attention.Documents.positions = property(  # type: ignore[assignment]
        lambda self: torch.arange(self.starts.size(1)).expand_as(self.starts)
    )


# rotary positions are relative: that they start again is seen with learned ones
@pytest.mark.parametrize(
    ("guard", "family"), [(_one_long_document, "llama"), (_running_positions, "gpt2")]
)
def test_a_missing_guard_is_seen(guard: Any, family: str):
    found = verified(tiny(Plan(), family, num_layers=2), guard, documents=True)
    assert found.gradient_difference > 1e-3


def test_random_batches_hold_several_documents():
    batch = random_batch(tiny(Plan(micro_batch_size=8)), 0, documents=True)
    assert batch.starts is not None
    documents = [len(row.unique()) for row in batch.starts]
    assert max(documents) > 3
    assert batch.tokens == batch.inputs.numel() - (sum(documents) - len(documents))
