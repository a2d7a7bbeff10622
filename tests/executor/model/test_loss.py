"""The loss in pieces: torch's own numbers, without whole copies of the logits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cost_models.activations.logits import logits_bytes_per_token
from executor.counters.live_tensors import MemoryTracker
from executor.data.batch import IGNORED
from executor.model import loss
from hardware_profiles.software.trainer import software_profile

ALONE: Any = SimpleNamespace(size=1, group=None)
TOKENS, VOCAB = 64, 512


def case(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCAB, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels[3] = IGNORED
    return logits, labels


def differentiated(logits: Tensor, labels: Tensor) -> Tensor:
    found = loss.summed_cross_entropy(ALONE, logits, labels, 0)
    (found / 7).backward()
    return found.detach()


@pytest.mark.parametrize("tokens", [5, TOKENS])
def test_the_loss_and_its_gradient_are_those_of_torch(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "PIECE_BYTES", tokens * VOCAB * 8)
    logits, labels = case(torch.float64)
    reference = logits.detach().clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        reference, labels, reduction="sum", ignore_index=IGNORED
    )
    (expected / 7).backward()
    torch.testing.assert_close(
        differentiated(logits, labels), expected.detach(), rtol=1e-13, atol=0
    )
    torch.testing.assert_close(logits.grad, reference.grad, rtol=0, atol=1e-16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [4, TOKENS])
def test_no_more_copies_are_alive_at_the_loss_than_the_formula_says(
    dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = tokens * VOCAB * 4
    monkeypatch.setattr(loss, "PIECE_BYTES", piece)
    software = software_profile("shardplan").changed({"loss.piece_bytes": float(piece)})
    priced = logits_bytes_per_token(VOCAB, dtype.itemsize, 1, software, float(TOKENS))
    logits, labels = case(dtype)
    with MemoryTracker([logits]) as tracker:
        differentiated(logits, labels)
    few = 64 * TOKENS  # bytes: numbers of each token, not of each logit
    assert tracker.result().peak_bytes == pytest.approx(TOKENS * float(priced.backward), abs=few)


def test_the_profile_has_the_size_of_the_executors_pieces() -> None:
    assert software_profile("shardplan").loss.piece_bytes == loss.PIECE_BYTES
