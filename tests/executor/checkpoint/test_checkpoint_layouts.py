"""What was saved under one plan continues under the same plan bit for bit, and under any other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.checkpoint.format.pieces import whole_tensor
from executor.checkpoint.loading.checkpoint_reader import Checkpoint
from executor.checkpoint.saving.manager import CheckpointManager
from executor.processes.fork import run_forked
from tests.executor.checkpoint.saving import begin, trained
from tests.executor.tiny import tiny

pytestmark = pytest.mark.distributed

STEPS, SAVED = 5, 3  # two steps go on: the second needs the optimizer's states
DROPOUT = {"resid_pdrop": 0.2, "attn_pdrop": 0.3, "embd_pdrop": 0.1}
PLANS = {
    "dp4": Plan(4, zero_stage=0, micro_batch_size=2),
    "tp2·pp2": Plan(1, 2, 2, sequence_parallel=True, micro_batch_size=4, num_microbatches=2),
    "zero3·tp2": Plan(2, 2, zero_stage=3, micro_batch_size=4),
    "pp2·v2·zero1": Plan(
        2, 1, 2, 2, "interleaved_1f1b", zero_stage=1, micro_batch_size=2, num_microbatches=2
    ),
    "hsdp": Plan(4, dp_replicate=2, zero_stage=2, micro_batch_size=2),
    "cp2·zero2": Plan(
        2,
        zero_stage=2,
        context_parallel=2,
        context_parallel_method="ulysses",
        micro_batch_size=4,
    ),
    "zbv": Plan(1, 1, 2, 2, "zbv", micro_batch_size=2, num_microbatches=4),
    "single": Plan(micro_batch_size=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3·tp2", "tp2·pp2", "pp2·v2·zero1", "cp2·zero2"])
def test_the_same_plan_continues_bit_for_bit(name: str, tmp_path: Path):
    file = tiny(PLANS[name], "gpt2", tied=True, optimizer="adamw", precision="fp32", **DROPOUT)
    whole = trained(file, tmp_path, STEPS, every=SAVED)
    resumed = trained(file, tmp_path, STEPS)
    for before, after in zip(whole, resumed, strict=True):
        assert after["losses"] == before["losses"][SAVED:]
        assert after["digest"] == before["digest"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("dp4", "tp2·pp2"),
        ("tp2·pp2", "zero3·tp2"),
        ("zero3·tp2", "pp2·v2·zero1"),
        ("pp2·v2·zero1", "hsdp"),
        ("hsdp", "dp4"),
        ("single", "cp2·zero2"),
        ("cp2·zero2", "zbv"),
        ("zbv", "dp4"),
    ],
)
def test_another_plan_continues_with_equal_losses(saved: str, resumed: str, tmp_path: Path):
    options: dict[str, Any] = {"tied": True, "optimizer": "adamw", "vocab_size": 131}
    family = "gpt2" if resumed in ("tp2·pp2", "pp2·v2·zero1", "dp4") else "qwen3"
    options |= dict.fromkeys(DROPOUT, 0.0) if family == "gpt2" else {}
    before = tiny(PLANS[saved], family, **options)
    after = tiny(PLANS[resumed], family, **options)
    whole = trained(before, tmp_path, STEPS, every=SAVED)[0]["losses"]
    found = trained(after, tmp_path, STEPS)[0]["losses"]
    assert found == pytest.approx(whole[SAVED:], rel=1e-12)


SPANS = {
    "dp2": Plan(2, zero_stage=3, micro_batch_size=2),
    "tp2": Plan(1, 2, sequence_parallel=True, micro_batch_size=4),
    "pp3": Plan(1, 1, 3, micro_batch_size=1, num_microbatches=4),  # tables on two stages each
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("dp2", "tp2"), ("tp2", "pp3"), ("pp3", "dp2")],
)
def test_an_encoder_and_a_decoder_are_resharded(saved: str, resumed: str, tmp_path: Path):
    options: dict[str, Any] = {"optimizer": "adamw", "num_layers": 2, "dropout_rate": 0.0}
    before, after = (tiny(SPANS[name], "t5", **options) for name in (saved, resumed))
    whole = trained(before, tmp_path, STEPS, every=SAVED)[0]["losses"]
    found = trained(after, tmp_path, STEPS)[0]["losses"]
    assert found == pytest.approx(whole[SAVED:], rel=1e-12)


def _saved_again(rank: int, file: PlanFile, source: str, target: str) -> str:
    """Resume, and save what that gave."""
    trainer, _ = begin(file, Path(source))
    return str(CheckpointManager(trainer, Path(target), every=None).save_now())


EXPERTS = {
    "ep2·tp2": Plan(
        2, 2, expert_parallel=2, expert_tensor_parallel=False, zero_stage=1, micro_batch_size=2
    ),
    "ep2·tp2 cut": Plan(2, 2, expert_parallel=2, zero_stage=3, micro_batch_size=2),
    "pp2·tp2": Plan(1, 2, 2, sequence_parallel=True, micro_batch_size=2, num_microbatches=2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "saved", "resumed"),
    [
        ("deepseek_v3", "ep2·tp2", "pp2·tp2"),
        ("gpt_oss", "ep2·tp2 cut", "ep2·tp2"),
        ("mixtral", "pp2·tp2", "ep2·tp2 cut"),
    ],
)
def test_experts_are_resharded_bit_for_bit(family: str, saved: str, resumed: str, tmp_path: Path):
    options: dict[str, Any] = {"optimizer": "adamw", "num_layers": 2, "vocab_size": 131}
    before = tiny(EXPERTS[saved], family, **options)
    trained(before, tmp_path / "one", 1, every=1)
    after = tiny(EXPERTS[resumed], family, **options)
    where = (str(tmp_path / "one"), str(tmp_path / "two"))
    (folder,) = set(run_forked(_saved_again, after.plan.world_size, after, *where))
    one, two = Checkpoint(tmp_path / "one" / "step-00000001"), Checkpoint(Path(folder))
    assert one.index.tensors.keys() == two.index.tensors.keys()
    assert one.index.state == two.index.state
    for name, entry in one.index.tensors.items():
        pieces = whole_tensor(entry.shape)
        assert torch.equal(one.weights(name, pieces), two.weights(name, pieces)), name
        if name.endswith("e_score_correction_bias"):
            continue  # nothing updates it
        states = (one.state(name, pieces), two.state(name, pieces))
        for key in one.index.state:
            assert torch.equal(states[0][key], states[1][key]), (key, name)
