"""Verification of a plan: loss, gradients, weights and traffic, compared with a single process.

Both sides compute in float64 from the same initial values and data, without dropout; updates
between batches are plain SGD, since Adam's first steps would amplify rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cost_models.activations.operators import SINK_FEATURES
from cost_models.compute.hardware_flops import hardware_flops_per_step
from cost_models.model.spec import Attention, LayerKind, ModelSpec
from cost_models.plan.plan import PlanTable
from cost_models.plan.workload import AttentionKernel
from cost_models.plan_file import PlanFile
from cost_models.pricing.estimate import rank_memories
from cost_models.pricing.prediction import scenario_of
from executor.counters.collectives_and_flops import FlopCounter
from executor.data.batch import IGNORED, Batch
from executor.dtypes import local_tensor
from executor.model.families import FAMILIES
from executor.parallel.mesh import gather_json, local_device
from executor.training.step_measurement import memory_tracker
from executor.training.traffic import counted_traffic, is_as_predicted
from executor.training.trainer import StepTotals, Trainer
from executor.verify.gather import gathered
from executor.verify.reference import KeepFloat64, reference_model
from hardware_profiles.fields import names_in

HIDDEN_SHARE: Final = 0.3  # of the tokens, where hidden ones are predicted
TOLERANCE: Final = 1e-9  # relative
# of the gradient's norm: smaller gradients may be nothing but rounding (keys' biases without rotary
# positions, which softmax does not see); an error above 1e-14 of the whole is seen all the same
NOISE: Final = 1e-5
LEARNING_RATE: Final = 0.1
DOCUMENTS: Final = 4  # of a sequence, about
_NO_DROPOUT: Final = names_in("""
    attention_dropout attn_pdrop embd_pdrop attention_probs_dropout_prob dropout dropout_rate
    embedding_dropout hidden_dropout hidden_dropout_prob resid_pdrop residual_dropout
""")
_DROPOUT_BY_DEFAULT: Final = {
    "bert": ("attention_probs_dropout_prob", "hidden_dropout_prob"),
    "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "opt": ("dropout",),
    "t5": ("dropout_rate",),
}


@dataclass(frozen=True, slots=True)
class Verification:
    """Largest relative differences from the single process, and collectives per rank."""

    loss_difference: float
    norm_difference: float
    gradient_difference: float
    worst_gradient: str
    weight_difference: float  # after the updates
    worst_weight: str
    traffic: list[dict[str, Any]]  # rank, axis, kind, predicted and counted count and bytes
    flops: dict[str, float]  # of all ranks in one step, predicted and counted
    memory: list[dict[str, float]] | None  # rank, predicted and counted peak of live tensors

    @property
    def traffic_is_predicted(self) -> bool:
        """Whether every rank's traffic is as predicted.

        Where a size does not divide evenly, the prediction is that of the fullest rank.
        """
        return all(map(is_as_predicted, self.traffic))

    @property
    def passed(self) -> bool:
        """Whether everything is equal within the tolerance."""
        differences = (self.loss_difference, self.norm_difference, self.gradient_difference)
        within = max(*differences, self.weight_difference) <= TOLERANCE
        return within and self.traffic_is_predicted


def verify(
    file: PlanFile,
    *,
    seed: int = 0,
    batches: int = 2,
    documents: bool = False,
    memory: bool = True,
    device: torch.device | None = None,
) -> Verification | None:
    """Run the plan on all ranks and a single process on rank 0; return the answer on rank 0.

    The last of the ``batches``, two or more, is the one whose collectives and FLOP are counted.
    ``documents``: sequences of several documents, each of which the single process runs alone.
    ``memory``: whether to track the peak.
    """
    file = exact(file)
    device = device or local_device()
    with KeepFloat64() if device.type == "cpu" else nullcontext():
        return _verify(file, seed, batches, documents, memory, device)


def _verify(
    file: PlanFile, seed: int, batches: int, documents: bool, memory: bool, device: torch.device
) -> Verification | None:
    trainer = Trainer(
        file,
        seed=seed,
        learning_rate=LEARNING_RATE,
        weight_decay=0.0,
        max_grad_norm=None,
        device=device,
    )
    rank_0 = dist.get_rank() == 0
    reference = reference_model(file, seed) if rank_0 else None
    worst: dict[str, tuple[float, str]] = {}
    noise = 0.0

    def record(what: str, difference: float, name: str = "") -> None:
        worst[what] = max(worst.get(what, (0.0, "")), (difference, name))

    def compare(batch: Batch, totals: StepTotals) -> None:
        nonlocal noise
        if reference is not None:
            expected = _reference_gradients(reference, batch)
            record("loss", _relative(totals.loss.cpu(), expected))
            gradients = [p.grad for p in reference.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            record("norm", _relative(totals.gradient_norm.cpu(), norm))
            noise = NOISE * float(norm)
        for name, full in gathered(trainer, lambda held: held.gradient):
            if reference is not None:
                record("gradient", _relative(full, reference.get_parameter(name).grad, noise), name)
        if reference is not None:
            _plain_sgd(reference)

    drawn = [random_batch(file, seed + number, documents=documents) for number in range(batches)]
    for batch in drawn[:-1]:
        trainer.step(batch, partial(compare, batch))
    flops = FlopCounter()
    trackers = [memory_tracker(trainer)] if memory else []
    counted = partial(compare, drawn[-1])
    traffic = counted_traffic(trainer, drawn[-1], *trackers, flops, inspect=counted)
    for name, full in gathered(trainer, lambda held: local_tensor(held.parameter.detach())):
        if reference is not None:
            expected = reference.get_parameter(name).detach()
            record("weight", _relative(full, expected, LEARNING_RATE * noise), name)
    peaks = [tracker.result().peak_bytes for tracker in trackers]
    ranks = gather_json([flops.total, *peaks], trainer.device)
    if not rank_0:
        return None
    return Verification(
        loss_difference=worst["loss"][0],
        norm_difference=worst["norm"][0],
        gradient_difference=worst["gradient"][0],
        worst_gradient=worst["gradient"][1],
        weight_difference=worst["weight"][0],
        worst_weight=worst["weight"][1],
        traffic=traffic,
        flops={
            "predicted": predicted_flops(file, device.type, documents=documents),
            "counted": float(sum(r[0] for r in ranks)),
        },
        memory=predicted_memory(file, [float(rank[1]) for rank in ranks]) if memory else None,
    )


def predicted_flops(file: PlanFile, device: str, *, documents: bool = False) -> float:
    """Return the FLOP of all ranks in a step.

    Routers decide which rank multiplies a token, not how often: no token is dropped or padded. On a
    CPU, scores with trained position biases are computed in full under every kernel: cross
    attention, which has none, is the only fused core there.
    """
    model, plan = file.model, file.plan
    in_blocks = plan.context_parallel > 1 and plan.context_parallel_method != "ulysses"
    # blocks are computed with the fused kernel's backward pass under every kernel
    kernel: AttentionKernel = "flash" if in_blocks else file.workload.attention_kernel
    kinds = []
    for kind in model.kinds:
        if file.workload.attention_kernel != "eager":
            kind = replace(kind, attention=_fused_core(kind.attention, file, in_blocks=in_blocks))
        if in_blocks:
            share = _block_share(kind.attention, file, documents=documents)
            kind = replace(kind, attention=_wider(kind.attention, share))
        kinds.append(kind)
    model = replace(model, kinds=tuple(kinds))
    found = _flops(file, model, kernel)
    biased = all(kind.trains_position_bias for kind in model.kinds)
    if device == "cpu" and biased and kernel == "flash":
        own = replace(model, kinds=tuple(map(_without_cross_scores, model.kinds)))
        found += _flops(file, own, "eager") - _flops(file, own, "flash")
    return float(round(found))


def _without_cross_scores(kind: LayerKind) -> LayerKind:
    across = kind.cross_attention
    return kind if across is None else replace(kind, cross_attention=replace(across, num_heads=0))


def _fused_core(attention: Attention, file: PlanFile, *, in_blocks: bool) -> Attention:
    """Return a core as fused kernels need it: values as wide as keys, sinks as one more key.

    A sink's key has features of its own. Blocks add sinks afterwards.
    """
    if attention.delta_rule is not None or (in_blocks and attention.capped):
        return attention
    width = max(attention.head_dim, attention.value_head_dim)
    if in_blocks or not attention.sinks:
        return replace(attention, value_head_dim=width)
    width += SINK_FEATURES
    seq_len = file.workload.seq_len
    return _wider(replace(attention, head_dim=width, value_head_dim=width), (seq_len + 1) / seq_len)


def _wider(attention: Attention, factor: float) -> Attention:
    """Return a core of so many times the FLOP."""
    head_dim, value_head_dim = factor * attention.head_dim, factor * attention.value_head_dim
    return replace(attention, head_dim=head_dim, value_head_dim=value_head_dim)  # type: ignore[arg-type]


def _block_share(attention: Attention, file: PlanFile, *, documents: bool) -> float:
    """Return the computed scores over those of blocks that are cut by a causal mask alone.

    Each rank has two of the 2 n chunks of a sequence. With documents or a window, of each pair of
    chunks that no mask hides all scores are computed.
    """
    ranks, seq_len = file.plan.context_parallel, file.workload.seq_len
    window = attention.window or seq_len
    if window >= seq_len and not documents:
        return 1.0
    chunk = seq_len // (2 * ranks)
    pairs = sum(
        (mine - other - 1) * chunk + 1 < window
        for mine in range(2 * ranks)
        for other in range(mine + 1)
    )
    return pairs / (2.0 * ranks * (ranks + 1.0))


def _flops(file: PlanFile, model: ModelSpec, kernel: AttentionKernel) -> float:
    table = PlanTable.from_plans([file.plan])
    workload = replace(file.workload, attention_kernel=kernel)
    stages = (file.layer_ranges, file.stage_recompute_layers)
    return float(np.ravel(hardware_flops_per_step(model, workload, table, *stages))[0])


def predicted_memory(file: PlanFile, counted: list[float]) -> list[dict[str, float]]:
    """Return the counted and predicted peak of live tensors of every rank."""
    scenario = scenario_of(replace(file, software="shardplan"))
    stages = rank_memories(scenario, file.plan, file.layer_ranges)
    of_stage = file.plan.world_size // file.plan.pipeline_parallel
    return [
        {
            "rank": rank,
            "predicted_bytes": float(stages[rank // of_stage][0].allocated),
            "counted_bytes": peak,
        }
        for rank, peak in enumerate(counted)
    ]


def exact(file: PlanFile) -> PlanFile:
    """Return the same plan in float64, with plain SGD and without dropout."""
    config = {key: 0.0 if key in _NO_DROPOUT else v for key, v in file.model.config.items()}
    config |= dict.fromkeys(_DROPOUT_BY_DEFAULT.get(file.model.family, ()), 0.0)
    model = replace(
        file.model, config=config, hidden_dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0
    )
    return replace(
        file, model=model, workload=replace(file.workload, precision="fp64", optimizer="sgd")
    )


def _reference_gradients(model: Any, batch: Batch) -> Tensor:
    """Compute the gradients with one process; return the loss."""
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for inputs, labels in _alone(batch):
        logits = _logits(model, inputs, labels).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / max(1, batch.tokens)
        loss.backward()
        total += loss.detach()
    return total


def _logits(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    more: dict[str, Tensor] = {}
    if model.config.is_encoder_decoder:
        seen = [torch.arange(len(row)) <= int(row.nonzero().max()) for row in inputs]
        more = {"attention_mask": torch.stack(seen).long(), "labels": labels}
    logits: Tensor = model(input_ids=inputs, **more).logits
    return logits


def _alone(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and labels of the whole batch, or of each document."""
    if batch.starts is None:
        yield batch.inputs, batch.labels
        return
    for inputs, labels, starts in zip(batch.inputs, batch.labels, batch.starts, strict=True):
        lengths = starts.unique_consecutive(return_counts=True)[1].tolist()
        for document in zip(inputs.split(lengths), labels.split(lengths), strict=True):
            yield document[0][None], document[1][None]


def _plain_sgd(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=LEARNING_RATE)


def random_batch(file: PlanFile, seed: int = 0, *, documents: bool = False) -> Batch:
    """Return a global batch of random tokens, optionally in documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows, seq_len = file.plan.global_batch_size, file.workload.seq_len
    tokens = torch.randint(file.model.vocab_size, (rows, seq_len + 1), generator=generator)
    # clones: of one row these are contiguous views of the same memory
    inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    if FAMILIES[file.model.family].masked:
        hidden = torch.rand(rows, seq_len, generator=generator) < HIDDEN_SHARE
        labels = torch.where(hidden, inputs, IGNORED)
        inputs = torch.where(hidden, 0, inputs)
    if FAMILIES[file.model.family].encoder_decoder:  # sources and targets of different lengths
        target = file.workload.target_tokens
        if target != seq_len:
            labels = torch.randint(file.model.vocab_size, (rows, target), generator=generator)
        lengths, more = (
            torch.randint(size // 2, size + 1, (rows, 1), generator=generator)
            for size in (seq_len, target)
        )
        inputs = torch.where(torch.arange(seq_len) < lengths, inputs.clamp(min=1), 0)
        labels = torch.where(torch.arange(target) < more, labels, IGNORED)
    if not documents:
        return Batch.whole(inputs, labels)
    begins = torch.rand(rows, seq_len, generator=generator) < DOCUMENTS / seq_len
    starts = torch.where(begins, torch.arange(seq_len), 0).cummax(1).values
    labels[:, :-1][starts[:, 1:] != starts[:, :-1]] = IGNORED  # no token predicts another document
    return Batch.whole(inputs, labels, starts)


def _relative(found: Tensor | None, expected: Tensor | None, noise: float = 0.0) -> float:
    """Return the norm of the difference over the norm; infinite where a tensor is missing.

    A norm below ``noise`` counts as that.
    """
    if found is None or expected is None:
        return float("inf")
    norm, difference = max(float(expected.norm()), noise), float((found - expected).norm())
    if difference != difference:
        return float("inf")
    return difference / norm if norm else (0.0 if difference == 0.0 else float("inf"))
