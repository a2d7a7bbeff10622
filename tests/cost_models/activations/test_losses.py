"""Bytes a logit of each loss, as an engine states them and as torch allocates them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

from cost_models.activations.logits import logits_bytes_per_token
from hardware_profiles.software.trainer import software_profile
from tests.allocations import LiveBytes

SEQUENCES, TOKENS, VOCABULARY, HIDDEN = 2, 512, 2048, 4


def torch_loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def of_16_bits(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_transformers_now(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    return ForCausalLMLoss(logits=logits, labels=labels, vocab_size=VOCABULARY)


def of_transformers_2024(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    logits = logits.float()
    shifted = logits[:, :-1].contiguous()
    return F.cross_entropy(shifted.flatten(0, 1), labels[:, 1:].flatten())


def in_chunks(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    chunks = [F.linear(part, weight) for part in x.chunk(8, dim=1)]
    losses = (
        F.cross_entropy(logits.flatten(0, 1).float(), part.flatten(), reduction="sum")
        for logits, part in zip(chunks, labels.chunk(8, dim=1), strict=True)
    )
    total: Tensor = sum(losses, start=torch.zeros(()))
    return total / labels.numel()


def in_linear_chunks(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    total = torch.zeros(())
    for part, label in zip(x.chunk(8, dim=1), labels.chunk(8, dim=1), strict=True):
        logits = F.linear(part, weight).flatten(0, 1)
        total = total + F.cross_entropy(logits.float(), label.flatten(), reduction="sum")
    return total / labels.numel()


def with_its_backward_pass(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    total = torch.zeros(())
    for part, label in zip(x.chunk(8, dim=1), labels.chunk(8, dim=1), strict=True):
        logits = F.linear(part.detach().requires_grad_(), weight).flatten(0, 1)
        loss = F.cross_entropy(logits.float(), label.flatten(), reduction="sum")
        loss.backward()
        total = total + loss.detach()
    return total.requires_grad_()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch-loss": torch_loss,
    "16-bit-loss": of_16_bits,
    "unshifted-loss": of_transformers_now,
    "shifted-loss": of_transformers_2024,
    "chunked-loss": in_chunks,
    "chunked-linear-loss": in_linear_chunks,
    "chunked-backward-loss": with_its_backward_pass,
}


@pytest.mark.parametrize("name", LOSSES)
def test_an_engine_states_what_torch_allocates(name: str) -> None:
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    x = torch.randn(SEQUENCES, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS))
    logits = SEQUENCES * TOKENS * VOCABULARY
    with LiveBytes() as peak:
        loss = LOSSES[name](x, weight, labels)
        forward, peak.peak = peak.peak / logits, 0
        loss.backward()
        backward = peak.peak / logits
    software = software_profile(f"torch-trainer+{name}")
    stated = logits_bytes_per_token(1, 2.0, 1, software, SEQUENCES * TOKENS)
    assert stated.forward == pytest.approx(forward, abs=0.1)
    # where gradients are not the peak, the forward pass's stands for both
    assert max(stated.forward, stated.backward) == pytest.approx(max(forward, backward), abs=0.1)


@pytest.mark.parametrize("name", ["unshifted-loss", "16-bit-loss"])
def test_capped_logits_keep_what_tanh_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gemma2ForCausalLM caps them, before its loss."""
    logits = SEQUENCES * TOKENS * VOCABULARY
    x = torch.randn(SEQUENCES, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (SEQUENCES, TOKENS))
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: torch.tanh(linear(*args) / 30.0) * 30.0)
    with LiveBytes() as peak:
        loss = LOSSES[name](x, weight, labels)
        peak.peak = 0
        loss.backward()
    software = software_profile(f"torch-trainer+{name}")
    stated = logits_bytes_per_token(1, 2.0, 1, software, SEQUENCES * TOKENS, caps=True)
    assert max(stated.forward, stated.backward) == pytest.approx(peak.peak / logits, abs=0.1)


def test_a_fused_loss_has_logits_and_gradient_and_a_cut_one_none() -> None:
    fused = logits_bytes_per_token(1, 2.0, 1, software_profile("fused-loss"), 8192.0)
    assert (fused.kept, fused.forward, fused.backward) == (2.0, 2.0, 4.0)
    cut = logits_bytes_per_token(1, 2.0, 1, software_profile("cut-loss"), 8192.0)
    assert cut.backward < 0.2


def test_logits_of_masked_tokens_alone() -> None:
    usual = software_profile("apex-bert")
    masked = usual.changed({"loss.predicted_share": 0.15})
    every, few = (logits_bytes_per_token(30528, 2.0, 1, one) for one in (usual, masked))
    assert float(few.backward) == pytest.approx(0.15 * float(every.backward))
