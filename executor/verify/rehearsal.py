"""Training steps on fake tensors: the executor as one rank of a world of any size.

Runs the real modules, sharding, FSDP2, pipeline schedule and optimizer, but tensors have no memory
and collectives move no data; the memory tracker records the lifetimes of storages. Routers are
assumed to distribute tokens evenly.

The device is a CPU, whose flash attention saves the same tensors as a GPU's. With dropout of scores
or a trained bias, GPU kernels are used, because the CPU's support neither. Not included: memory
inside kernels, the caching allocator, buffers of libraries. Of plans that offload, fake tensors on
another device stand for host memory.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_models.plan_file import PlanFile
from executor.activity import ACTIVITY
from executor.compat import (
    allow_fused_updates_on,
    cuda_flash,
    cuda_masked,
    fake_world,
    outside_fake_mode,
    propagating_global_shapes,
)
from executor.counters.allocations import Allocation
from executor.counters.allocator_replay import AllocatorEvent
from executor.counters.live_tensors import Hint, MemoryTracker
from executor.counters.memory_peak import MemoryPeak
from executor.data.batch import Batch
from executor.model.encoder_decoder import EncoderDecoderStage
from executor.model.parameter_layout import ParameterLayout, Pieces
from executor.model.stage import Stage
from executor.ops import host_reads, offload_activations
from executor.parallel.data_parallel import enable_gradient_reducer, shard_parameters
from executor.processes.fork import describe_failure, error_from_failure
from executor.training import trainer as train
from executor.training.step_measurement import memory_tracker

STEPS = 2  # optimizer states exist in the second step
HOST = "meta"  # device of fake tensors that are in host memory
LOSS, HEAD, LAYERS, EMBEDDING = "loss", "head", "layers", "embedding"


def rehearse(
    file: PlanFile, rank: int, *, documents: bool = False, sends_stay: bool = False
) -> MemoryPeak:
    """Return the peak memory of one global rank, computed in a separate process.

    ``sends_stay``: a sent message counts until the end of the step, as with gloo, which does not
    report its completion; otherwise until the next message is sent.
    """
    run = partial(
        _rehearse, file, rank, documents, sends_stay, (), lambda seen: seen.result().to_dict()
    )
    return MemoryPeak(**in_forked_process(run))


def allocator_events(
    file: PlanFile, rank: int, lengths: Sequence[int] = ()
) -> list[AllocatorEvent]:
    """Return the requests and releases of device memory of one rank, in a separate process.

    ``lengths``: tokens of the sequences of each step, at most the workload's, for plans without
    pipeline and context parallelism; by default two steps of the workload's.
    """
    documents = file.workload.document_mask
    run = partial(_rehearse, file, rank, documents, False, lengths, MemoryTracker.events)
    return [AllocatorEvent(*event) for event in in_forked_process(run)]


def allocations(file: PlanFile, rank: int) -> dict[str, list[Allocation]]:
    """Return what is live at the largest moment of every part of a step (``_event``) of one rank.

    In a separate process.
    """
    plan = file.plan
    last = plan.num_microbatches - 1 if plan.pipeline_parallel > 1 else None
    documents = file.workload.document_mask
    answer = partial(MemoryTracker.by_event, event=partial(_event, last))
    found = in_forked_process(partial(_rehearse, file, rank, documents, False, (), answer))
    return {name: [Allocation(*row) for row in rows] for name, rows in found.items()}


def _event(last: int | None, phase: str, place: str) -> str | None:
    """Name the part of a step: loss_forward, loss_backward, layers, embedding, optimizer.

    The output projection's backward pass is the loss's: its place changes with the last norm's. Of
    a pipeline, the embedding's counts in the ``last`` micro-batch, when no other is in flight.
    """
    where, _, microbatch = place.partition(" of micro-batch ")
    if phase == "optimizer":
        return phase
    if phase == "forward":
        return "loss_forward" if where == LOSS else None
    if where in (LOSS, HEAD):
        return "loss_backward"
    if where == EMBEDDING:
        return EMBEDDING if last is None or microbatch == str(last) else None
    return LAYERS if where else None


def in_forked_process(function: Callable[[], Any]) -> Any:
    """Return the result of a function that runs in a forked process and may modify global state."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sending, function))
    child.start()
    sending.close()
    try:
        answer = json.loads(receiving.recv_bytes())
    except EOFError:
        answer = {"error": "ended without a result"}
    child.join()
    if "error" in answer:
        raise error_from_failure(0, answer)
    return answer["result"]


def _answer(pipe: Connection, function: Callable[[], Any]) -> None:
    try:
        pipe.send_bytes(json.dumps({"result": function()}).encode())
    except BaseException as error:
        pipe.send_bytes(json.dumps(describe_failure(error)).encode())
    os._exit(0)


def _rehearse(
    file: PlanFile,
    rank: int,
    documents: bool,
    sends_stay: bool,
    lengths: Sequence[int],
    answer: Callable[[MemoryTracker], Any],
) -> Any:
    offload_activations.HOST = HOST
    allow_fused_updates_on(HOST)
    host_reads.read_values, host_reads.read_counts = _zeros, _spread_evenly
    torch.nn.functional.dropout = _dropout
    torch.nn.functional.scaled_dot_product_attention = partial(
        _fused_attention, torch.nn.functional.scaled_dot_product_attention
    )
    if not sends_stay:
        # P2POp compares with the name in the module that defines it
        dist.isend = dist.distributed_c10d.isend = lambda *_, **__: _CompletedSend()
    # parameters are first created on ``meta``, and device meshes read the values of their tensors
    train.shard_parameters = outside_fake_mode(shard_parameters)  # type: ignore[attr-defined]
    train.enable_gradient_reducer = outside_fake_mode(enable_gradient_reducer)  # type: ignore[attr-defined]
    for kind in (Stage, EncoderDecoderStage):
        kind.__init__ = outside_fake_mode(kind.__init__)  # type: ignore[method-assign]
    with fake_world(rank, file.plan.world_size):
        trainer = train.Trainer(file, device=torch.device("cpu"), start=_start)
        works = [replace(file.workload, seq_len=length) for length in lengths]
        steps = [replace(file, workload=work) for work in works] or [file] * STEPS
        batch = _batch(steps[0], trainer, documents)
        tracker = memory_tracker(trainer, _hint(file, trainer.stages))
        tracker.tag("other", [batch.inputs, batch.labels, batch.starts])
        for stage in trainer.stages:
            _track_places(stage, tracker)
        # operators of the propagation are ignored
        with propagating_global_shapes(partial(setattr, tracker, "muted")), tracker:
            for number, step in enumerate(steps):
                if number and step is not file:
                    batch = _batch(step, trainer, documents)
                trainer.file = step
                trainer.step(batch)
        return answer(tracker)


def _start(layout: ParameterLayout, pieces: Pieces) -> Tensor:
    return torch.empty([sum(b - a for a, b in ranges) for ranges in pieces])


def _batch(file: PlanFile, trainer: train.Trainer, documents: bool) -> Batch:
    """Return the rows of this rank."""
    shape = (len(trainer.rows), file.workload.seq_len)
    inputs = torch.empty(shape, dtype=torch.int64)
    labels = torch.empty((len(trainer.rows), file.workload.target_tokens), dtype=torch.int64)
    starts = torch.empty(shape, dtype=torch.int64) if documents else None
    tokens = file.plan.global_batch_size * file.workload.seq_len
    return Batch(inputs, labels, tokens, starts, trainer.rows.start)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Apply dropout as on a GPU: the saved mask has one byte per element."""
    return torch.native_dropout(x, p, True)[0] if training and p else x


def _fused_attention(
    on_cpu: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Use GPU attention kernels where a CPU has none and would store full score matrices."""
    trained = attn_mask is not None and attn_mask.requires_grad
    if not (dropout_p or trained):
        options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return on_cpu(query, key, value, attn_mask, **options)
    if attn_mask is None:
        outputs = cuda_flash(query, key, value, dropout_p, is_causal, False, scale=scale)
    else:
        added = attn_mask.expand(*query.shape[:-1], key.size(-2))
        outputs = cuda_masked(query, key, value, added, True, dropout_p, is_causal, scale=scale)
    output: Tensor = outputs[0]
    return output


class _CompletedSend:
    """A send that has completed."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def _zeros(values: Tensor) -> list[Any]:
    return [0] * values.numel()


def _spread_evenly(values: Tensor, total: int) -> list[Any]:
    """Return balanced counts, in the shape of ``values``."""
    places = values.size(-1)
    counts = [total // places + (place < total % places) for place in range(places)]
    return counts if values.dim() == 1 else [counts] * values.size(0)


def _hint(file: PlanFile, stages: list[Stage]) -> Hint:
    """Identify logits by their width, and unreduced gradients by the shapes of whole parameters.

    An activation can have the shape of a parameter if it has as many rows as there are tokens. Such
    a tensor is a gradient only if it is a product over the tokens, in autograd's operand order.
    """
    start, stop = stages[-1].start, stages[-1].stop
    plan = file.plan
    rows = set[int]()
    for length in (file.workload.seq_len, file.workload.target_tokens):
        tokens = length // plan.context_parallel * plan.micro_batch_size
        rows |= {tokens, tokens // plan.tensor_parallel if plan.sequence_parallel else tokens}
    shapes = (
        layout.local_shape(stage.axis, stage.experts)
        for stage in stages
        for layout in stage.layouts.values()
    )
    whole = {shape for shape in shapes if len(shape) > 1}

    def hint(tensor: Tensor, operator: str, inputs: Sequence[Any]) -> str | None:
        shape = tuple(tensor.shape)
        is_whole = shape in whole or shape[::-1] in whole
        if is_whole and (rows.isdisjoint(shape[:1]) or _over_tokens(operator, inputs, rows)):
            return "buffers"
        return "logits" if len(shape) > 1 and shape[-1] == stop - start else None

    return hint


def _over_tokens(operator: str, inputs: Sequence[Any], rows: set[int]) -> bool:
    """Whether the operator multiplies a transposed matrix, with tokens as columns.

    A weight gradient.
    """
    if operator != "aten::mm":
        return False
    first = inputs[0]
    return bool(first.size(1) in rows and first.stride(0) < first.stride(1))


def _track_places(stage: Stage, tracker: MemoryTracker) -> None:
    """Report the module and micro-batch of the current forward or backward pass to the tracker."""

    def note(name: str) -> None:
        action = ACTIVITY.action
        tracker.place = name if action is None else f"{name} of micro-batch {action.microbatch}"

    def entered(name: str, *_: Any) -> None:
        note(name)

    def left(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: note(name))

    family = stage.family
    places = {name: name for name in stage.layer_names}
    if stage.first:
        places[family.embedding_modules[0]] = EMBEDDING
    if stage.last:
        places[family.head] = LOSS
        if family.norm:
            places[family.norm] = HEAD
    for module_name, place in places.items():
        module = stage.get_submodule(module_name)
        module.register_forward_pre_hook(partial(entered, place))
        module.register_forward_hook(partial(left, place))
