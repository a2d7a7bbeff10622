"""Experts that ranks share are saved, resumed under another plan, and exported; so is the bias."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cost_models.plan.plan import Plan
from executor.checkpoint.export import newest_intact, write_hugging_face
from executor.checkpoint.loading.hugging_face import HuggingFaceFolder
from executor.checkpoint.saving.manager import CheckpointManager
from executor.model.parameter_layout import ParameterLayout, Pieces, random_tensor
from executor.processes.fork import run_forked
from executor.training.trainer import Trainer
from tests.executor.checkpoint.saving import begin, trained
from tests.executor.tiny import random_batch, tiny

pytestmark = pytest.mark.distributed

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
VALUES = torch.linspace(-0.5, 0.5, 8)
EP2_ZERO3 = Plan(4, zero_stage=3, expert_parallel=2, micro_batch_size=2)
WHOLE_EXPERTS = Plan(
    2,
    2,
    zero_stage=1,
    sequence_parallel=True,
    micro_batch_size=4,
    expert_parallel=4,
    expert_tensor_parallel=False,
)
CUT = Plan(1, 2, 2, micro_batch_size=4, num_microbatches=2)


def _start_with_bias(layout: ParameterLayout, pieces: Pieces) -> torch.Tensor:
    return VALUES.clone() if layout.name == BIAS else random_tensor(layout, 3, pieces)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "saved", "resumed"),
    [
        ("deepseek_v3", EP2_ZERO3, CUT),
        pytest.param("gpt_oss", CUT, WHOLE_EXPERTS, marks=pytest.mark.slow),
        pytest.param("mixtral", WHOLE_EXPERTS, EP2_ZERO3, marks=pytest.mark.slow),
    ],
)
def test_another_plan_continues_with_equal_losses(
    family: str, saved: Plan, resumed: Plan, tmp_path: Path
):
    options: dict[str, Any] = {"optimizer": "adamw", "num_layers": 2}
    whole = trained(tiny(saved, family, **options), tmp_path / "whole", 4)[0]["losses"]
    trained(tiny(saved, family, **options), tmp_path / "parts", 2, every=2)
    found = trained(tiny(resumed, family, **options), tmp_path / "parts", 4)[0]["losses"]
    # routers choose in float32: what rounding moved goes on to grow
    assert found == pytest.approx(whole[2:], rel=1e-6)


def _save_with_bias(rank: int, folder: str) -> None:
    trainer = Trainer(tiny(EP2_ZERO3, "deepseek_v3", num_layers=2), start=_start_with_bias)
    manager = CheckpointManager(trainer, Path(folder), every=1, keep=1)
    trainer.step(random_batch(trainer.file))
    manager.maybe_save()
    manager.wait()


def _bias_after(rank: int, folder: str) -> list[list[float]]:
    resumed, _ = begin(tiny(CUT, "deepseek_v3", num_layers=2), Path(folder))
    return [held.local.tolist() for held in resumed.buffers]


@pytest.mark.slow
def test_the_bias_of_a_router_is_saved_resumed_and_exported(tmp_path: Path):
    folder, exported = tmp_path / "checkpoints", tmp_path / "exported"
    run_forked(_save_with_bias, 4, str(folder))
    found = run_forked(_bias_after, 4, str(folder))
    assert [bias for rank in found for bias in rank] == [VALUES.tolist()] * 2  # of the last stage
    checkpoint, _ = newest_intact(tmp_path)
    write_hugging_face(checkpoint, exported, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert torch.equal(model.get_buffer(BIAS), VALUES)
    layout = ParameterLayout(BIAS, (8,), None, 0.0, None, (), False)
    assert torch.equal(HuggingFaceFolder(exported).start(layout, (((0, 8),),)), VALUES)
