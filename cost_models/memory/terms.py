"""Terms of the parts of a peak: their formulas in symbols, and with numbers.

Symbols   P parameters on a rank   d ranks that ZeRO shards over   t tensor parallel
          n micro-batches in flight   L layers of a rank   b micro-batch size
          s tokens of a sequence   c bytes of the compute precision   V vocabulary   h hidden size
Units     bytes. Every term is computed by the formulas that price a plan.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec import Struct

from cost_models.activations.embedding_and_head import embedding_bytes_per_token
from cost_models.activations.encoder_decoder import shared_bytes_per_token
from cost_models.activations.live import LiveActivations, layer_bytes, live_activations
from cost_models.arrays import Real
from cost_models.communication.host_link import without_offload
from cost_models.memory.ledger import MOMENTS, total
from cost_models.memory.model_states import MASTER, rank_weights
from cost_models.memory.parts import MemoryParts
from cost_models.partition.frozen_weights import frozen_bytes
from cost_models.partition.rank_parameters import RankParameters
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import PipelineRank
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.scenario import Scenario
from cost_models.units import format_bytes, format_count

SMALL: Final = 0.005  # of the peak: smaller terms are not listed
BEFORE_LATER: Final = MOMENTS.index("later_backward")


class Term(Struct, frozen=True):
    """One term of one part."""

    part: str
    name: str
    formula: str  # in symbols
    numbers: str  # the formula with numbers
    size: float  # bytes


def memory_terms(
    scenario: Scenario, plan: Plan, rank: PipelineRank, parts: MemoryParts, moment: int
) -> list[Term]:
    """Return the terms of the parts of a rank at one of ``MOMENTS``, largest first.

    The terms of a part add up to it; a term below ``SMALL`` of the peak joins the part's largest.
    """
    table = PlanTable.from_plans([plan])
    if not scenario.on_gpu:
        table = without_offload(table)
    view = RankView(scenario, table, rank)
    params, live = view.parameters, live_activations(view)
    found = [
        *_states(view, plan, parts),
        *_gradients(plan, params, parts, moment),
        *_activations(view, plan, live, parts, moment),
        *_logits(view, plan, parts),
        *_buffers(plan, params, live, parts, moment),
        *_runtime(scenario, parts),
    ]
    listed = [term for term in found if term.size >= SMALL * float(parts.peak)]
    return sorted(listed, key=lambda term: -term.size)


def first(value: Real) -> float:
    """Return the number of a table with one row."""
    return float(np.ravel(np.asarray(value))[0])


def _sharded(plan: Plan, params: RankParameters, least_stage: int) -> tuple[float, str, str]:
    """Return elements of a rank's shard from a ZeRO stage on, as a formula and with numbers."""
    total, of_experts = first(params.total), first(params.expert_total)
    count = format_count(total)
    if plan.zero_stage < least_stage or (plan.shard_ranks == 1 and not of_experts):
        return total, "P", f"{count} parameters"
    ranks, experts = plan.shard_ranks, max(1, plan.expert_shard_ranks)
    if not of_experts:
        return total / ranks, "P/d", f"{count} parameters ÷ {ranks} ranks"
    rest = (
        f"({format_count(total - of_experts)} ÷ {ranks} + {format_count(of_experts)} of experts ÷ "
    )
    elements = (total - of_experts) / ranks + of_experts / experts
    return elements, "(P − E)/d + E/d'", f"{rest}{experts}) parameters"


def _states(view: RankView, plan: Plan, parts: MemoryParts) -> list[Term]:
    """Return the terms of weights and optimizer: bytes a parameter times parameters."""
    frozen, terms = first(frozen_bytes(view)), []
    if frozen:
        shared = view.software.sharding.frozen_weights and plan.zero_stage == 3
        numbers = format_bytes(frozen) + ("" if shared else ", not sharded")
        terms.append(Term("weights", "frozen base", "bytes of the frozen weights", numbers, frozen))
    masters = first(total(row for row in rank_weights(view) if row.name == MASTER))
    for part, name, least, size in (
        ("weights", "fp32 master weights", 1, masters),
        ("weights", _weight_name(view.workload, plan), 3, first(parts.weights) - frozen - masters),
        ("optimizer", f"states of {view.workload.optimizer}", 1, first(parts.optimizer)),
    ):
        elements, symbols, numbers = _sharded(plan, view.parameters, least)
        if not elements or size <= 0.0:
            continue
        if part == "weights" and plan.offloads_weights:
            terms.append(_fetched(plan, size))
            continue
        each = size / elements
        terms.append(Term(part, name, f"bytes · {symbols}", f"{each:.3g} bytes × {numbers}", size))
    return terms


def _fetched(plan: Plan, size: float) -> Term:
    """Return the term of offloaded weights: the shards that are being fetched."""
    where = "the drives" if plan.offload_device == "nvme" else "the host"
    layers = "of the layer that runs and of the next one"
    return Term("weights", f"shards in transfer from {where}", layers, "", size)


def _weight_name(workload: Workload, plan: Plan) -> str:
    """Describe the weights that a plan gathers under ZeRO-3, or else those of the matmuls."""
    if plan.zero_stage < 3:
        return f"{workload.precision} weights"
    mixed = workload.master_bytes != workload.compute_bytes
    return f"{'fp32 master' if mixed else workload.precision} weights, shared out"


def _gradients(plan: Plan, params: RankParameters, parts: MemoryParts, moment: int) -> list[Term]:
    size, total = first(parts.gradients), first(params.total)
    if size <= 0.0:
        return []
    sharded, symbols, numbers = _sharded(plan, params, 1)
    for elements, in_symbols, in_numbers in (
        (sharded, symbols, numbers),
        (total, "P", f"{format_count(total)} parameters, whole until they are reduced"),
    ):
        each = size / elements
        if abs(each - round(each)) < 1e-9 * each and round(each) in (2, 4, 8):
            done = "of micro-batches that are done" if moment <= BEFORE_LATER else "of all weights"
            return [
                Term(
                    "gradients",
                    done,
                    f"bytes · {in_symbols}",
                    f"{each:.0f} bytes × {in_numbers}",
                    size,
                )
            ]
    return [
        Term(
            "gradients",
            "of the layers that are done",
            f"bytes · ({symbols} − the blocks still to come)",
            "",
            size,
        )
    ]


def _activations(
    view: RankView, plan: Plan, live: LiveActivations, parts: MemoryParts, moment: int
) -> list[Term]:
    size, tokens = first(parts.activations), first(view.tokens)
    if size <= 0.0:
        return []
    name = MOMENTS[moment]
    if name == "last_layer":
        numbers = f"{size / tokens:,.0f} bytes × {tokens:,.0f} tokens"
        what = "the backward pass of the only layer left"
        return [Term("activations", what, "a layer saved + its backward pass", numbers, size)]
    in_flight = first(live.in_flight)
    base = first(live.saved)  # of ``size``, what no backward pass adds
    if name == "later_backward":
        in_flight, base = max(0.0, in_flight - 1.0), first(live.saved_later)
    head = first(live.head_saved)
    if MOMENTS.index(name) >= MOMENTS.index("backward"):
        base, head = base - head, 0.0  # freed by the head's backward pass
    found = []
    if plan.offloads_activations:
        found.append(("layers in transfer to the host", "of two layers", "", base))
    else:
        found += _saved_terms(view, plan, live, in_flight, tokens)
    shared = first(shared_bytes_per_token(view) + embedding_bytes_per_token(view))
    which = "of the embedding"
    if view.model.bridge:
        which = "kept for all layers: encoder's output, position biases"
    found += [
        ("the backward pass of a layer", "gradients and recomputed tensors", "", size - base),
        ("the head's inputs", "b·s · bytes a token", "", head),
        (which, "n · b·s · bytes a token", "", in_flight * tokens * shared),
    ]
    terms, rest = [], size
    for what, formula, numbers, wanted in found:
        each = min(rest, max(0.0, wanted))
        if each > 0.0:
            terms.append(Term("activations", what, formula, numbers, each))
            rest -= each
    if rest > 0.0:
        terms.append(Term("activations", "others", "rotary tables, masks, token ids", "", rest))
    return terms


def _saved_terms(
    view: RankView, plan: Plan, live: LiveActivations, in_flight: float, tokens: float
) -> list[tuple[str, str, str, float]]:
    """Return name, formula, numbers and bytes of the layers' saved tensors of a rank."""
    layers, one = sum(view.rank.kind_counts), first(layer_bytes(view))
    numbers = (
        f"{in_flight:g} in flight × {layers} layers × {tokens:,.0f} tokens × "
        f"{one / tokens / layers:,.0f} bytes"
    )
    formula, saved = "n · L · b·s · bytes a token", in_flight * one
    found = [(f"saved by layers (recompute {plan.recompute})", formula, numbers, saved)]
    late, due = first(live.pending_bytes), first(live.pending)
    if late > 0.0:
        numbers = f"{due:.3g} due × {format_bytes(late / due)}"
        formula = "n · bytes of a micro-batch"
        found.append(("operands of pending weight gradients", formula, numbers, late))
    return found


def _logits(view: RankView, plan: Plan, parts: MemoryParts) -> list[Term]:
    size = first(parts.logits)
    if size <= 0.0:
        return []
    tokens, vocab = first(view.tokens), view.model.vocab_size
    share = vocab / plan.tensor_parallel
    over = f" ÷ {plan.tensor_parallel}" if plan.tensor_parallel > 1 else ""
    return [
        Term(
            "logits",
            "logits, their gradient, copies in fp32",
            "bytes · V/t · b·s" if over else "bytes · V · b·s",
            f"{size / share / tokens:.3g} bytes × {vocab:,}{over} words × {tokens:,.0f} tokens",
            size,
        )
    ]


def _buffers(
    plan: Plan, params: RankParameters, live: LiveActivations, parts: MemoryParts, moment: int
) -> list[Term]:
    messages = first(live.messages)
    size = first(parts.buffers) - messages
    block = {
        "loss_forward": params.head,
        "loss_backward": params.head + params.largest_layer,
        "head": params.head,
        "embedding": params.embedding,
    }
    elements = first(block.get(MOMENTS[moment], params.largest_layer))
    each = f"{size / elements:.3g} bytes × " if elements else ""
    sharding = "gathered weights, and gradients" if plan.zero_stage >= 3 else "gradients"
    terms = [
        Term(
            "buffers",
            f"{sharding} in transfer",
            "bytes · P of a block",
            f"{each}{format_count(elements)} parameters",
            size,
        )
    ]
    if messages > 0.0:
        formula = "received inputs · b·s · c·h"
        terms.append(Term("buffers", "messages between stages", formula, "", messages))
    return terms


def _runtime(scenario: Scenario, parts: MemoryParts) -> list[Term]:
    if not scenario.on_gpu:
        return []
    memory, allocated = scenario.software.memory, float(parts.allocated)
    return [
        Term(
            "runtime",
            "context, libraries, what the allocator cannot use",
            "context + slack · allocated",
            f"{format_bytes(memory.context_bytes)} + {100 * memory.allocator_slack:.3g} % × "
            f"{format_bytes(allocated)}",
            first(parts.runtime),
        )
    ]
