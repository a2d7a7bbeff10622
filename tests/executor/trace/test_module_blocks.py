"""Blocks of modules of all kinds, and their recomputation."""

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from executor.trace import module_blocks
from executor.trace.module_blocks import blocks, loss_of, recompute


def names(module: nn.Module) -> list[str]:
    return list(blocks(module))


def test_layers_of_a_list_are_blocks():
    with torch.device("meta"):
        vit = ViTForImageClassification(ViTConfig(num_hidden_layers=3))
    assert names(vit) == [f"vit.layers.{i}" for i in range(3)]
    assert names(nn.Linear(2, 2)) == []
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]


def test_stages_are_looked_into():
    with torch.device("meta"):
        resnet = ResNetForImageClassification(ResNetConfig(depths=[2, 1, 3, 1]))
    found = names(resnet)
    assert found[:3] == [
        f"resnet.encoder.stages.{i}" for i in ("0.layers.0", "0.layers.1", "1.layers.0")
    ]
    assert len(found) == 7 + 1  # and the classifier, a list too


def test_what_counts_as_a_loss():
    x = torch.ones(2, requires_grad=True)
    assert loss_of(x.sum()) is not None
    assert loss_of({"loss": x.sum(), "logits": x}) is not None
    for nothing in (x, (x.sum(), x), {"logits": x}, x.detach().sum(), None):
        assert loss_of(nothing) is None


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=m)) for m in (0.1, None)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def trained(recomputes: bool) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    module = Normed().double()
    if recomputes:
        recompute(blocks(module).values())
    for _ in range(3):
        module(torch.randn(5, 4, dtype=torch.float64)).backward()
    return [p.grad for p in module.parameters()], [b.clone() for b in module.buffers()]  # type: ignore[misc]


def test_recomputed_blocks_have_the_same_gradients_and_statistics():
    for alone, again in zip(trained(False), trained(True), strict=True):
        torch.testing.assert_close(again, alone, rtol=1e-12, atol=0)


def test_without_its_guard_a_second_run_would_move_the_statistics(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module_blocks, "BATCH_NORMS", ())
    gradients, statistics = trained(True)
    expected, right = trained(False)
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(statistics, right)
