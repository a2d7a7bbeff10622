"""T5 under every kind of plan, against the module of transformers alone."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.memory_truth import small_models
from benchmarks.memory_truth.rows import rows_of
from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.data import DataOptions, open_corpus
from executor.model import encoder_decoder
from executor.processes.fork import run_forked
from executor.support import check_supported
from executor.training import trainer as train
from executor.training.compiled import check_compilable
from executor.training.trainer import Trainer
from hardware_profiles.errors import InputError
from tests.executor.tiny import assert_equal, first_step, random_batch, tiny, verified

EAGER: dict[str, Any] = {"attention_kernel": "eager"}
PLANS: dict[str, tuple[Plan, dict[str, Any]]] = {
    "one process": (Plan(num_microbatches=2), {}),
    "zero 3": (Plan(2, zero_stage=3, num_microbatches=2, micro_batch_size=2), {}),
    "tensor": (
        Plan(1, 2, sequence_parallel=True, recompute="full", num_microbatches=2),
        {"feed_forward_proj": "gated-gelu", "vocab_size": 131},
    ),
    "tensor, nothing along the sequence": (Plan(1, 2, recompute="selective"), EAGER),
    "pipeline": (Plan(1, 1, 2, num_microbatches=2), {}),
    "pipeline that turns in the decoder": (
        Plan(1, 1, 2, 2, "zbv", num_microbatches=4),
        {"layer_ranges": ((0, 1), (1, 3), (3, 4), (4, 5)), "num_decoder_layers": 3},
    ),
    "targets shorter than inputs, along the sequence": (
        Plan(1, 2, 2, sequence_parallel=True, recompute="full", num_microbatches=2),
        {"target_seq_len": 4},
    ),
}
# where encoder and decoder meet: with the embedding, with the head, on a stage between them
SLOW_PLANS: dict[str, tuple[Plan, dict[str, Any]]] = {
    "zero 1 and copies": (
        Plan(4, dp_replicate=2, zero_stage=1, num_microbatches=2),
        {"num_decoder_layers": 3, "feed_forward_proj": "gated-gelu"},
    ),
    "zero 3, decoder begins on the first stage": (
        Plan(2, 1, 2, zero_stage=3, num_microbatches=2),
        {"layer_ranges": ((0, 3), (3, 4))},
    ),
    "zero 3, encoder ends on the last stage": (
        Plan(2, 1, 2, zero_stage=3, num_microbatches=2),
        {"layer_ranges": ((0, 1), (1, 4))},
    ),
    "zero 3, four stages": (Plan(2, 1, 4, zero_stage=3, num_microbatches=4), EAGER),
    "interleaved, copies on one rank": (
        Plan(1, 2, 2, 2, "interleaved_zero_bubble", num_microbatches=4),
        EAGER,
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize("name", PLANS)
def test_parity_and_traffic(name: str):
    plan, options = PLANS[name]
    assert_equal(verified(tiny(plan, "t5", **{"num_layers": 2, **options})))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_PLANS)
def test_parity_of_more_plans(name: str):
    plan, options = SLOW_PLANS[name]
    found = verified(tiny(plan, "t5", **{"num_layers": 2, **options}), memory=True)
    assert_equal(found)
    for row in found.memory:
        assert row["predicted_bytes"] == pytest.approx(row["counted_bytes"], rel=0.3)


WIDE = {
    "model_type": "t5",
    "vocab_size": 4096,
    "d_model": 256,
    "d_kv": 32,
    "d_ff": 704,
    "num_heads": 8,
    "num_layers": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_peak_of_every_stage_is_predicted(recompute: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(small_models.CONFIGS, "t5", WIDE)
    plan = Plan(1, 1, 4, recompute=recompute, num_microbatches=4)
    for row in rows_of(small_models.small("t5", "fp32", plan, attention_kernel="eager")):
        assert abs(row["error_percent"]) < 6.0, row


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("target_seq_len", "plan", "percent"),
    [
        (32, Plan(num_microbatches=2), 1.0),
        pytest.param(512, Plan(num_microbatches=2), 1.0, marks=pytest.mark.slow),
        pytest.param(
            32,
            Plan(1, 2, 2, num_microbatches=2, sequence_parallel=True),
            4.0,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_shorter_and_longer_targets_are_in_the_peak(
    target_seq_len: int, plan: Plan, percent: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(small_models.CONFIGS, "t5", WIDE)
    options: dict[str, Any] = {"attention_kernel": "eager", "target_seq_len": target_seq_len}
    for row in rows_of(small_models.small("t5", "fp32", plan, **options)):
        assert abs(row["error_percent"]) < percent, row


def _see_everything() -> None:
    encoder_decoder.source_mask = torch.ones_like


def _read_the_answer() -> None:
    encoder_decoder.shift_right = lambda labels: labels.clamp(min=0)


def _keep_positions_apart() -> None:
    shared = train.sum_shared_gradients

    def only_the_embedding(shard: Any, grid: Any, names: dict[str, list[int]]) -> None:
        shared(shard, grid, {name: names[name] for name in names if name == "shared.weight"})

    train.sum_shared_gradients = only_the_embedding


def _keep_the_embedding_apart() -> None:
    shared = train.sum_shared_gradients

    def only_positions(shard: Any, grid: Any, names: dict[str, list[int]]) -> None:
        shared(shard, grid, {name: names[name] for name in names if name != "shared.weight"})

    train.sum_shared_gradients = only_positions


def _keep_the_source_apart() -> None:
    encoder_decoder.gather_tokens = lambda axis, source: source


def _forget_the_source() -> None:
    packed = encoder_decoder.packed
    encoder_decoder.packed = lambda target, source: packed(target, source.detach())


THREE = Plan(1, 1, 3, num_microbatches=3)
GUARDS: dict[str, tuple[Plan, Any, str]] = {
    "filled-up places": (Plan(), _see_everything, ""),
    "the answer": (Plan(), _read_the_answer, ""),
    "positions over stages": (THREE, _keep_positions_apart, "relative_attention_bias"),
    "embedding over stages": (THREE, _keep_the_embedding_apart, "shared"),
    "source over tensor ranks": (Plan(1, 2), _keep_the_source_apart, "encoder"),
    "source over stages": (THREE, _forget_the_source, "encoder"),
}


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize("name", GUARDS)
def test_a_missing_guard_is_seen(name: str):
    plan, change, worst = GUARDS[name]
    found = verified(tiny(plan, "t5", num_layers=2), change)
    assert found.gradient_difference > 1e-6
    assert worst in found.worst_gradient
    assert not found.passed


def _copies(rank: int, file: PlanFile) -> dict[str, tuple[str, Any]]:
    """Return the whole tensors that this rank holds after two steps, and every shared one."""
    trainer = Trainer(file, seed=5, learning_rate=0.1)
    batch = random_batch(file)
    trainer.step(batch)
    trainer.step(batch)
    return {h.name: (h.layout.name, h.local.detach().tolist()) for h in trainer.shards}


@pytest.mark.distributed
def test_copies_on_stages_stay_equal_bit_for_bit():
    file = tiny(THREE, "t5", num_layers=2, precision="fp32", optimizer="adamw")
    found: dict[str, list[Any]] = {}
    for rank in run_forked(_copies, 3, file):
        for layout, values in rank.values():
            found.setdefault(layout, []).append(values)
    several = {name: copies for name, copies in found.items() if len(copies) > 1}
    table = "layer.0.SelfAttention.relative_attention_bias.weight"
    # the stages: encoder | encoder, decoder | decoder
    numbers = {name: len(copies) for name, copies in several.items()}
    tables = {f"{stack}.block.0.{table}": 2 for stack in ("encoder", "decoder")}
    assert numbers == {"shared.weight": 3, **tables}
    for copies in several.values():
        assert all(copy == copies[0] for copy in copies)


DROPOUT = {"dropout_rate": 0.2}


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_replayed_and_keeps_whole_tensors_equal(sequence_parallel: bool):
    found = {}
    for recompute in ("none", "full"):
        plan = Plan(1, 2, sequence_parallel=sequence_parallel, recompute=recompute)
        first, second = run_forked(first_step, 2, tiny(plan, "t5", num_layers=2, **DROPOUT))
        assert first == second
        found[recompute] = first
    assert found["full"]["loss"] == found["none"]["loss"]
    assert found["full"]["norm"] == pytest.approx(found["none"]["norm"], rel=1e-12)


def _losses(rank: int, precision: str, plan: Plan) -> list[float]:
    file = tiny(plan, "t5", num_layers=2, precision=precision, optimizer="adamw", vocab_size=64)
    corpus = open_corpus(
        DataOptions(), vocab_size=64, seq_len=file.workload.seq_len, seed=0, spans=True
    )
    trainer = Trainer(file, learning_rate=1e-2)
    batch = corpus.batch(0, plan.global_batch_size)
    return [trainer.step(batch).loss for _ in range(20)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("precision", "plan"),
    [
        ("fp32", Plan(2, zero_stage=3, num_microbatches=2)),
        ("bf16", Plan(1, 1, 2, num_microbatches=4)),
    ],
)
def test_spans_are_learnt(precision: str, plan: Plan):
    losses = run_forked(_losses, 2, precision, plan, timeout=120)[0]
    assert losses[-1] < 0.7 * losses[0], losses


REFUSED: dict[str, tuple[Plan, dict[str, Any], str]] = {
    "context": (Plan(context_parallel=2), {}, "context_parallel = 2 .*causal"),
    "half": (Plan(), {"precision": "fp16"}, "precision fp16: t5"),
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
    with pytest.raises(InputError, match="one document per row"):
        encoder_decoder.EncoderDecoderStage.forward(None, batch)  # type: ignore[arg-type]


def test_the_price_says_what_a_length_is():
    words = " ".join(tiny(Plan(), "t5", num_layers=1).model.assumptions)
    assert re.search(
        r"seq_len is the length of the encoder's sequences, and of the decoder's without", words
    )
