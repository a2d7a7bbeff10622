"""Training workload: sequence length, global batch, precision, optimizer.

``auto`` for a precision follows the related part (optimizer states: the updated weights; gradients:
the trainer's own precision, see ``gradients.in_master_precision``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal, get_args

from msgspec import Meta

from hardware_profiles.errors import InputError
from hardware_profiles.fields import wrong_value
from hardware_profiles.options import read_fields

NAMED: Final = ("embedding", "head", "norms", "all-but-head")
_LAYERS: Final = re.compile(r"layers:(\d{1,5})-(\d{1,5})")
_ALLOWED: Final = (
    f"must be {', '.join(NAMED)} or layers:FIRST-LAST, counted from 0; several with commas"
)

Precision = Literal["bf16", "fp16", "fp32", "fp64", "tf32", "fp8", "fp4"]
Optimizer = Literal[
    "adamw",
    "sgd",
    "sgd_momentum",
    "adam",
    "lamb",
    "lion",
    "adafactor",
    "adafactor_momentum",
    "muon",
    "adamw_8bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "adamw_4bit",
    "ademamix",
    "ademamix_8bit",
    "galore_adamw",
    "galore_adamw_8bit",
    "apollo_adamw",
    "lion_8bit",
]
KeptPrecision = Literal["auto", "fp32", "bf16"]
AttentionKernel = Literal["flash", "eager"]
Adapter = Literal["none", "lora", "qlora"]
# the method that adapts frozen matrices (``model.adapter_methods``)
AdapterMethod = Literal["lora", "dora", "adalora", "loha", "lokr", "vera", "ia3", "oft"]
AdapterTargets = Literal["all", "attention"]  # or TARGET_NAMES with commas: "q,v"
TARGET_NAMES: Final = ("q", "k", "v", "o", "gate", "up", "down")
# of the frozen matrices of qlora
Quantisation = Literal["nf4", "nf4_double", "int8", "int4", "int2"]
MAX_ADAPTER_RANK: Final = 4096
MAX_SEQ_LEN: Final = 10**8
SeqLen = Annotated[int, Meta(ge=1, le=MAX_SEQ_LEN)]
Batch = Annotated[int, Meta(ge=1, le=10**7)]

# bytes of one element of the weights that are multiplied, and of the activations. tf32 is fp32 in
# memory (NVIDIA A100 whitepaper, "TensorFloat-32": inputs and outputs are IEEE fp32)
COMPUTE_BYTES: Final = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp32": 4.0,
    "fp64": 8.0,
    "tf32": 4.0,
    "fp8": 2.0,  # without copies in fewer bits, see ``activations.fp8``
    "fp4": 2.0,
}
# bytes of an element during matmuls, without scales
QUANTISED: Final = {"fp8": 1.0, "fp4": 0.5}
# bytes of one element of the weights that the optimizer updates, of reduced gradients and of the
# optimizer's states: mixed precision keeps them in fp32 (Micikevicius et al., arXiv:1710.03740,
# sec. 3.1)
MASTER_BYTES: Final = {
    "bf16": 4.0,
    "fp16": 4.0,
    "fp32": 4.0,
    "fp64": 8.0,
    "tf32": 4.0,
    "fp8": 4.0,
    "fp4": 4.0,
}
KEPT_BYTES: Final = {"fp32": 4.0, "bf16": 2.0}
# precisions with fp32 master weights, unless set otherwise
MIXED: Final = ("bf16", "fp16", "fp8", "fp4")
# bits of an element of states that also have fp32 scales, whatever is requested
STATE_BITS: Final = {
    "adamw_8bit": 8,
    "paged_adamw_8bit": 8,
    "adamw_4bit": 4,
    "ademamix_8bit": 8,
    "galore_adamw_8bit": 8,
    "lion_8bit": 8,
}
# states of a layer's matrices are of gradients that are projected to a lower rank: onto their
# singular vectors, or at random
Projection = Literal["", "svd", "random"]
PROJECTED: Final[dict[str, Projection]] = {
    "galore_adamw": "svd",
    "galore_adamw_8bit": "svd",
    "apollo_adamw": "random",
}
USUAL_RANK: Final = 128  # of transformers' GaLore (trainer.py, get_optimizer_cls_and_kwargs)
# bitsandbytes, optim/optimizer.py: get_state_buffer makes fp32 states of weights in any precision
FP32_STATES: Final = ("paged_adamw", "ademamix")


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step's work."""

    seq_len: SeqLen
    global_batch_size: Batch  # sequences
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    attention_kernel: AttentionKernel = "flash"
    adapter: Adapter = "none"
    adapter_rank: Annotated[int, Meta(ge=0, le=MAX_ADAPTER_RANK)] = 0
    # the adapters' output is multiplied with alpha / rank
    adapter_alpha: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    adapter_targets: str = "all"  # linear layers of attention and MLP: AdapterTargets
    quantisation: Quantisation = "nf4"  # of qlora's frozen matrices
    freeze: str = ""  # parts that are not trained (``frozen_parts``)
    document_mask: bool = False  # documents of one sequence do not see each other
    # tokens of such a document; 0: not known, as long as the sequence
    document_length: Annotated[int, Meta(ge=0, le=MAX_SEQ_LEN)] = 0
    master_weights: bool = True  # mixed precision updates fp32 weights; false: 16-bit ones
    optimizer_state_precision: KeptPrecision = "auto"
    gradient_precision: KeptPrecision = "auto"  # of gradients that are kept and reduced
    # of the projected gradients of GaLore and APOLLO
    optimizer_rank: Annotated[int, Meta(ge=1, le=MAX_ADAPTER_RANK)] = USUAL_RANK
    adapter_method: AdapterMethod = "lora"
    # tokens of an encoder-decoder's targets, where inputs have seq_len; 0: as many
    target_seq_len: Annotated[int, Meta(ge=0, le=MAX_SEQ_LEN)] = 0

    @property
    def adapter_name(self) -> str:
        """Adapters in words: ``qlora``; ``dora, qlora`` where they are not those of LoRA."""
        method = self.adapter_method
        return self.adapter if method == "lora" else f"{method}, {self.adapter}"

    @property
    def compute_bytes(self) -> float:
        """Bytes of an element of the weights that are multiplied, and of the activations."""
        return COMPUTE_BYTES[self.precision]

    @property
    def master_bytes(self) -> float:
        """Bytes of an element of the weights that the optimizer updates."""
        return MASTER_BYTES[self.precision] if self.master_weights else self.compute_bytes

    @property
    def state_bytes(self) -> float:
        """Bytes of an element of an optimizer state; bitsandbytes' 32-bit ones are so always."""
        if self.optimizer in FP32_STATES and self.optimizer_state_precision == "auto":
            return 4.0
        return KEPT_BYTES.get(self.optimizer_state_precision, self.master_bytes)

    @property
    def reduction_bytes(self) -> float:
        """Bytes of an element of a gradient that is reduced over data ranks."""
        return KEPT_BYTES.get(self.gradient_precision, self.master_bytes)

    def gradient_bytes(self, *, in_master_precision: bool) -> float:
        """Bytes of an element of an accumulated gradient."""
        auto = self.master_bytes if in_master_precision else self.compute_bytes
        return KEPT_BYTES.get(self.gradient_precision, auto)

    @property
    def target_tokens(self) -> int:
        """Tokens of a target: of the labels of one sequence."""
        return self.target_seq_len or self.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees; of an encoder-decoder, those of the inputs."""
        return self.seq_len * self.global_batch_size

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> Workload:
        """Read and check."""
        read = read_fields(cls, values, where)
        read["freeze"] = check_freeze(read["freeze"], f"{where}: freeze")
        given = {name for name, value in values.items() if value is not None}
        found = cls(**read | _adapter(read, given, where))
        require_consistent(found, f"{where}: ")
        return found


def require_consistent(workload: Workload, where: str = "") -> None:
    """Raise an InputError where two of its values contradict each other."""
    if workload.quantisation != "nf4" and workload.adapter != "qlora":
        raise InputError(
            f"{where}quantisation = {workload.quantisation} is of qlora's frozen matrices (adapter "
            f"is {workload.adapter})"
        )
    if workload.adapter_method != "lora" and workload.adapter == "none":
        raise InputError(
            f"{where}adapter_method = {workload.adapter_method} is of adapters (adapter is none)"
        )
    if workload.freeze and workload.adapter != "none":
        raise InputError(
            f"{where}freeze = {workload.freeze}: {workload.adapter} freezes all but its adapters "
            "(choose one of them)"
        )
    if not workload.master_weights and workload.precision not in MIXED:
        raise InputError(
            f"{where}master_weights = false: precision {workload.precision} updates the weights "
            f"that it multiplies (must be true; false needs {', '.join(MIXED)})"
        )
    if workload.optimizer in STATE_BITS and workload.optimizer_state_precision != "auto":
        raise InputError(
            f"{where}optimizer_state_precision = {workload.optimizer_state_precision}: the states "
            f"of {workload.optimizer} are {STATE_BITS[workload.optimizer]}-bit (must be auto)"
        )
    if workload.optimizer not in PROJECTED and workload.optimizer_rank != USUAL_RANK:
        raise InputError(
            f"{where}optimizer_rank = {workload.optimizer_rank}: {workload.optimizer} keeps states "
            f"of whole gradients (choose an optimizer of {', '.join(PROJECTED)})"
        )
    if workload.precision == "fp64":
        for name in ("optimizer_state_precision", "gradient_precision"):
            if getattr(workload, name) != "auto":
                raise InputError(
                    f"{where}{name} = {getattr(workload, name)}: precision fp64 keeps everything "
                    "in fp64 (must be auto)"
                )


def check_targets(text: str, where: str) -> str:
    """Return the adapted matrices: all, attention, or names of matrices such as "q,v".

    >>> check_targets("q, v", "lora_targets")
    'q,v'
    """
    if text in get_args(AdapterTargets):
        return text
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) < len(names) or not set(names) <= set(TARGET_NAMES):
        raise InputError(
            f"{where} = {text[:60]!r} (must be {', '.join(get_args(AdapterTargets))}, or some of "
            f"{', '.join(TARGET_NAMES)} with commas between them)"
        )
    return ",".join(names)


def _adapter(read: Mapping[str, Any], given: Collection[str], where: str) -> dict[str, Any]:
    """Return the values of an adapter whose bounds and defaults depend on others."""
    low = 0 if read["adapter"] == "none" else 1
    high = low * MAX_ADAPTER_RANK
    rank = read["adapter_rank"] if "adapter_rank" in given else low
    if not low <= rank <= high:
        allowed = f"a whole number from {low:,} to {high:,}"
        raise wrong_value(where, "adapter_rank", rank, allowed)
    alpha = read["adapter_alpha"] if "adapter_alpha" in given else 2.0 * rank
    targets = check_targets(read["adapter_targets"], f"{where}: adapter_targets")
    return {"adapter_rank": rank, "adapter_alpha": alpha, "adapter_targets": targets}


def check_freeze(text: str, where: str) -> str:
    """Return frozen parts in canonical form: names in order, each once; "" for none.

    >>> check_freeze("layers:0-3, embedding", "freeze")
    'embedding,layers:0-3'
    """
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    for word in words:
        found = _LAYERS.fullmatch(word)
        if word not in NAMED and (found is None or int(found[1]) > int(found[2])):
            raise InputError(f"{where} = {word[:60]!r} ({_ALLOWED})")
    if len(set(words)) < len(words):
        raise InputError(f"{where} = {text[:60]!r} names a part twice")
    return ",".join(sorted(words, key=lambda w: (w not in NAMED, w)))
