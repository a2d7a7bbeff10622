"""T5: the module of transformers over data ranks, against the same module alone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_parity import assert_equal
from tiny import random_batch, tiny, verified

from cost_models.plan import Plan
from executor import encoder_decoder
from executor.compiled import check_compilable
from executor.data import DataOptions, open_corpus
from executor.forked import run_forked
from executor.support import check_supported
from executor.train import Trainer
from hardware_profiles.errors import InputError

PLANS = {
    "one process": Plan(num_microbatches=2),
    "zero 0": Plan(2, zero_stage=0, num_microbatches=2),
    "zero 1": Plan(2, zero_stage=1, num_microbatches=2),
    "zero 2": Plan(2, zero_stage=2, num_microbatches=2),
    "zero 3": Plan(2, zero_stage=3, num_microbatches=2, micro_batch_size=2),
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", PLANS)
def test_parity_and_traffic(name: str):
    assert_equal(verified(tiny(PLANS[name], "t5", num_layers=2)))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_copies_of_shards_and_stacks_of_different_depth(zero: int):
    plan = Plan(4, dp_replicate=2, zero_stage=zero, num_microbatches=2)
    options = {"num_decoder_layers": 3, "feed_forward_proj": "gated-gelu"}
    assert_equal(verified(tiny(plan, "t5", num_layers=2, **options)))


def _see_everything() -> None:
    encoder_decoder.is_source = torch.ones_like


def _read_the_answer() -> None:
    encoder_decoder.one_later = lambda labels: labels.clamp(min=0)


@pytest.mark.distributed
@pytest.mark.parametrize("change", [_see_everything, _read_the_answer])
def test_what_the_stacks_see_matters(change: Any):
    found = verified(tiny(Plan(), "t5", num_layers=2), change)
    assert found.gradient_difference > 1e-6
    assert not found.passed


def _losses(rank: int, precision: str, plan: Plan) -> list[float]:
    file = tiny(plan, "t5", num_layers=2, precision=precision, optimizer="adamw", vocab_size=64)
    corpus = open_corpus(
        DataOptions(), vocab_size=64, seq_len=file.workload.seq_len, seed=0, spans=True
    )
    trainer = Trainer(file, learning_rate=1e-2)
    batch = corpus.batch(0, plan.global_batch_size)
    return [trainer.step(batch).loss for _ in range(20)]


@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_spans_are_learnt(precision: str):
    plan = Plan(2, zero_stage=3, num_microbatches=2)
    losses = run_forked(_losses, 2, precision, plan, timeout=120)[0]
    assert losses[-1] < 0.7 * losses[0], losses


REFUSED: dict[str, tuple[Plan, dict[str, Any], str]] = {
    "tensor": (Plan(1, 2), {}, "tensor_parallel 2: the layers of t5"),
    "pipeline": (Plan(1, 1, 2), {}, "encoder-decoder .*pipeline_parallel must be 1"),
    "context": (Plan(context_parallel=2), {}, "context_parallel = 2 .*causal"),
    "recompute": (Plan(recompute="full"), {}, r"recompute full: .*\(must be none\)"),
    "selective": (Plan(recompute="selective"), {}, "recompute selective: the layers of t5"),
    "half": (Plan(), {"precision": "fp16"}, "precision fp16: t5"),
    "adapters": (Plan(), {"lora": 4}, "adapter lora for t5"),
    "pad": (Plan(), {"pad_token_id": 1}, "pad_token_id = 1 for t5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_option(name: str):
    plan, options, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        check_supported(tiny(plan, "t5", num_layers=2, **options))


def test_neither_documents_nor_compiled_layers():
    with pytest.raises(InputError, match="--compile: for t5"):
        check_compilable(Plan(), "t5")
    file = tiny(Plan(), "t5", num_layers=1)
    batch = random_batch(file)
    batch = replace(batch, starts=torch.zeros_like(batch.inputs))
    with pytest.raises(InputError, match="rows of one document"):
        encoder_decoder.EncoderDecoderStage.forward(None, batch)  # type: ignore[arg-type]


def test_the_price_says_what_a_length_is():
    words = " ".join(tiny(Plan(), "t5", num_layers=1).model.assumptions)
    assert re.search(r"seq_len counts the encoder's tokens and as many of the decoder", words)
