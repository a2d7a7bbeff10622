"""What is to be trained: sequence length, global batch, precision, optimizer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

from hardware_profiles.errors import InputError
from hardware_profiles.reading import Fields

Precision = Literal["bf16", "fp16", "fp32", "fp64"]
Optimizer = Literal["adamw", "sgd"]
AttentionKernel = Literal["flash", "eager"]
Adapter = Literal["none", "lora", "qlora"]
AdapterTargets = Literal["all", "attention"]
MAX_ADAPTER_RANK: Final = 4096

# bytes of one element of the weights that are multiplied, and of the activations
COMPUTE_BYTES: Final = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp64": 8.0}
# bytes of one element of the weights that the optimizer updates, of reduced gradients and of the
# optimizer's states: mixed precision keeps them in fp32 (Micikevicius et al., arXiv:1710.03740,
# sec. 3.1)
MASTER_BYTES: Final = {"bf16": 4.0, "fp16": 4.0, "fp32": 4.0, "fp64": 8.0}
# elements of optimizer state per parameter, beside the weights
OPTIMIZER_STATES: Final = {"adamw": 2.0, "sgd": 0.0}
# fp8 is no number format of the whole computation as the others are: each matmul has its own scales
FP8_REFUSED: Final = (
    "precision = fp8: the executor keeps no scales of each tensor, which fp8 matmuls need (and "
    f"GPUs of compute capability 8.9 or newer); allowed: {', '.join(get_args(Precision))}"
)


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step's work."""

    seq_len: int
    global_batch_size: int  # sequences
    precision: Precision = "bf16"
    optimizer: Optimizer = "adamw"
    attention_kernel: AttentionKernel = "flash"
    adapter: Adapter = "none"
    adapter_rank: int = 0
    adapter_alpha: float = 0.0  # the adapters' output is multiplied with alpha / rank
    adapter_targets: AdapterTargets = "all"  # linear layers of attention and MLP
    document_mask: bool = False  # documents of one sequence do not see each other

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.seq_len * self.global_batch_size

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Fields) -> Workload:
        """Read and check."""
        fields.refuse_unknown(cls.__slots__)
        if fields.values.get("precision") == "fp8":
            raise InputError(f"{fields.where}: {FP8_REFUSED}")
        return cls(
            seq_len=fields.integer("seq_len", low=1, high=10**8),
            global_batch_size=fields.integer("global_batch_size", low=1, high=10**7),
            precision=fields.text("precision", "bf16", choices=get_args(Precision)),
            optimizer=fields.text("optimizer", "adamw", choices=get_args(Optimizer)),
            attention_kernel=fields.text(
                "attention_kernel", "flash", choices=get_args(AttentionKernel)
            ),
            document_mask=fields.flag("document_mask", False),
            **_adapter(fields),
        )


def _adapter(fields: Fields) -> dict[str, Any]:
    """Read the adapter; its rank and alpha belong to it alone."""
    kind = fields.text("adapter", "none", choices=get_args(Adapter))
    low = 0 if kind == "none" else 1
    high = 0 if kind == "none" else MAX_ADAPTER_RANK
    rank = fields.integer("adapter_rank", low, low=low, high=high)
    return {
        "adapter": kind,
        "adapter_rank": rank,
        "adapter_alpha": fields.number("adapter_alpha", 2.0 * rank, low=0.0, high=1e6),
        "adapter_targets": fields.text("adapter_targets", "all", choices=get_args(AdapterTargets)),
    }
