"""The workload of a row: batch, precision, optimizer, attention and adapters."""

from __future__ import annotations

from typing import Any, Final, get_args

from cost_models.compute.rates import BEFORE_AMPERE, best_matmul
from cost_models.model.lora import is_adapted
from cost_models.model.spec import Attention, ModelSpec
from cost_models.plan.plan import Plan
from cost_models.plan.workload import (
    MIXED,
    PROJECTED,
    USUAL_RANK,
    Adapter,
    AttentionKernel,
    Optimizer,
    Workload,
)
from hardware_profiles.cluster.schema import Accelerator
from planner.request.scenario import default_precision
from planner.validation.rows.counts import target_seq_len
from planner.validation.rows.reading import Reading, Unpriceable
from planner.validation.rows.runs_file import Row
from planner.validation.rows.vocabulary import BITS, is_rounded, terms_of, vocabulary
from planner.validation.rows.words import SoftwareEntry, entry_of, look_up, number_in, words_table

FEW_BITS: Final = ("fp8", "fp4")
TARGETS: Final = ("q", "k", "v", "o", "gate", "up", "down")


def workload_of(
    reading: Reading,
    model: ModelSpec,
    plan: Plan,
    batch: int,
    accelerator: Accelerator,
    trainer: SoftwareEntry,
) -> Workload:
    """Return the work of a row under its plan."""
    row, precision = reading.row, default_precision(accelerator)
    named = look_up(words_table().precision, row)
    word: Any = precision if named is None else named.value
    if is_rounded(row):  # multiplied in 16 bits (pytorch/ao: torchao/quantization/qat)
        word = precision if word in FEW_BITS else word
        rounding = look_up(words_table().rounding, row)
        how = "as torchao does it" if rounding and rounding.add else "is left out"
        reading.defaults.append(f"rounding of quantisation-aware training: {how}")
    if named is not None and named.note is not None:
        reading.defaults.append(named.note)
    if named is None and {"mixed", *BITS} & terms_of(row, "precision").keys():
        reading.defaults.append(f"precision {precision} (default: 16 bits of that accelerator)")
    elif named is None and row.precision is not None:
        reading.stand_in("precision", f"{precision}, 16 bits of that accelerator", "fp32", "fp8")
    elif named is None:
        usual = look_up(words_table().usual_precision, row)
        whose = "accelerator" if usual is None else "trainer"
        word = reading.value("precision", usual.value if usual else precision, f"of that {whose}")
    if word == "fp32" and "not tf32" not in terms_of(row, "precision"):
        word = "tf32" if look_up(words_table().tf32, row) else word
    if word == "tf32" and best_matmul(accelerator, word) is None:
        word = "fp32"  # without TF32, as before Ampere, the setting changes nothing
    optimizer = look_up(words_table().optimizer, row)
    reading.value("optimizer", optimizer.value if optimizer else "adamw", "the usual one")
    if optimizer is None and row.optimizer is not None and not _names_no_optimizer(row):
        if "unpriced" in terms_of(row, "optimizer"):
            raise Unpriceable(f"optimizer {row.optimizer!r} is not priced")
        reading.stand_in("optimizer", "adamw", "sgd", "ademamix")
    updates: Optimizer = optimizer.value if optimizer else "adamw"
    states = look_up(words_table().states, row)
    gradients = look_up(words_table().gradients, row)
    return Workload(
        seq_len=reading.need("seq_len"),
        global_batch_size=batch,
        precision=word,
        optimizer=updates,
        optimizer_rank=_optimizer_rank(reading) if updates in PROJECTED else USUAL_RANK,
        attention_kernel=_attention(reading, model, accelerator),
        master_weights=_keeps_master_weights(row, word, trainer),
        optimizer_state_precision=states.value if states else "auto",
        gradient_precision=row.gradient_precision or (gradients.value if gradients else "auto"),
        document_mask=row.document_length is not None,
        document_length=row.document_length or 0,
        target_seq_len=_targets_of(reading, model),
        **_adapter(reading, model),
    )


def _targets_of(reading: Reading, model: ModelSpec) -> int:
    """Return the tokens of an encoder-decoder's targets; 0: as many as of its inputs."""
    if not model.is_encoder_decoder:
        if stated := reading.row.target_seq_len:
            raise Unpriceable(f"target_seq_len {stated}: {model.name} has no decoder of its own")
        return 0
    found = target_seq_len(reading.row)
    if found is None:
        reading.defaults.append("targets as long as inputs (default: target_seq_len is not given)")
    elif reading.row.target_seq_len is None:
        reading.defaults.append(f"target_seq_len {found} (default: as the words say)")
    return found or 0


def _optimizer_rank(reading: Reading) -> int:
    """Return the rank of projected gradients: of the row, else the usual one."""
    rank = number_in(words_table().optimizer_rank, reading.row)
    if rank is None:
        rank = entry_of(words_table().usual_optimizer_ranks, reading.row).value
        reading.defaults.append(f"gradients of rank {rank} (default: it is not given)")
    return rank


def _names_no_optimizer(row: Row) -> bool:
    """Whether a cell says how an optimizer is sharded or kept, but not which one it is."""
    found = vocabulary().read("optimizer", row.words("optimizer"))
    return not found.rest and "unpriced" not in found.terms


def _attention(reading: Reading, model: ModelSpec, accelerator: Accelerator) -> AttentionKernel:
    table = words_table()
    capped = any(kind.attention.capped for kind in model.kinds)
    if capped and (entry := look_up(table.capped_attention, reading.row)):
        if entry.value == "eager" and reading.row.flash_attention == "1":
            reading.defaults.append("attention eager (default: that of capped scores)")
        return entry.value
    flash, entry = reading.row.flash_attention, look_up(table.attention, reading.row)
    if entry is None and accelerator.architecture in BEFORE_AMPERE:
        entry = look_up(table.older_attention, reading.row)
        if entry is None and any(_groups_queries(kind.attention) for kind in model.kinds):
            entry = look_up(table.older_grouped_attention, reading.row)
    if flash not in (None, "unknown"):
        return "eager" if flash == "0" else "flash"
    kernel: AttentionKernel = entry.value if entry else "flash"
    reading.defaults.append(f"attention {kernel} (default: flash_attention is not given)")
    return kernel


def _groups_queries(attention: Attention) -> bool:
    return attention.num_kv_heads < attention.num_heads


def _keeps_master_weights(row: Row, precision: str, trainer: SoftwareEntry) -> bool:
    """Whether weights are updated in fp32: as the row says, else as the trainer does."""
    if precision not in MIXED:
        return True
    if row.master_weights is not None:
        return row.master_weights
    entry = look_up(words_table().master_weights, row)
    return entry.value if entry else trainer.master_weights


def _adapter(reading: Reading, model: ModelSpec) -> dict[str, Any]:
    row = reading.row
    kind = look_up(words_table().adapter, row)
    if row.peft is None or (kind and kind.value == "none"):
        return {}
    if kind is None or kind.value not in get_args(Adapter):
        raise Unpriceable(f"peft {row.peft!r} is not priced (LoRA and its kin, QLoRA or full are)")
    if "kin of lora" in terms_of(row, "peft"):
        reading.defaults.append(f"{row.peft}: priced as LoRA, which it is kin to")
    rank = number_in(words_table().adapter_rank, row)
    if rank is None:
        rank = entry_of(words_table().usual_ranks, row).value
        reading.defaults.append(f"adapters of rank {rank} (default: it is not given)")
    targets = _targets(row)
    lacks = targets != "all" and not _has_targets(model, targets)
    if lacks or (targets == "all" and any(kind.feed_forward.num_experts for kind in model.kinds)):
        reading.defaults.append("adapters of attention alone: those of routed experts are left out")
        targets = "attention"
    return {
        "adapter": kind.value,
        "adapter_rank": rank,
        "adapter_alpha": 2.0 * rank,
        "adapter_targets": targets,
        "adapter_method": entry_of(words_table().adapter_method, row).value,
        "quantisation": entry_of(words_table().quantisation, row).value,
    }


def _has_targets(model: ModelSpec, targets: str) -> bool:
    """Whether the layers have matrices of these names other than routed experts."""
    return any(is_adapted(weight, targets) for kind in model.kinds for weight in kind.weights)


def _targets(row: Row) -> str:
    """Return the matrices with adapters: those that the cell names, else the trainer's."""
    terms = terms_of(row, "peft")
    every = {name: name for name in TARGETS}
    shorter = {"qkv": ("q", "k", "v"), "mlp": ("gate", "up", "down")}
    named = {one for term in terms for one in shorter.get(term, (every.get(term),)) if one}
    if "attention" in terms and not named & {"q", "k", "v", "o"}:
        named |= {"q", "k", "v", "o"}
    if ("all" in terms and not named) or len(named) == len(TARGETS):  # "all attention matrices"
        return "all"
    if named:
        return ",".join(name for name in TARGETS if name in named)
    return entry_of(words_table().targets, row).value
