"""One decoder layer over the parts of the Hugging Face module, whole or as one rank's slice of it.

The module keeps the parameters, the norms, the activation and their names; only the order of the
calls is ours, because Hugging Face's forward takes heads and positions from shapes that sequence
parallelism changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from executor.attention import Core
from executor.compat import Conv1D, apply_rotary_pos_emb
from executor.recompute import recomputed
from executor.tensor_parallel import TensorAxis, column_linear, row_linear

Rotary = tuple[Tensor, Tensor]  # cosine and sine of every position
LayerForward = Callable[[nn.Module, "Layer", Tensor, "Rotary | None"], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """How one layer runs."""

    axis: TensorAxis
    core: Core
    forward: LayerForward
    recompute: bool  # the whole layer
    random: bool  # has dropout

    def __call__(self, module: nn.Module, hidden: Tensor, rotary: Rotary | None) -> Tensor:
        """Run the layer."""
        if self.recompute:
            return recomputed(self.forward, module, self, hidden, rotary, random=self.random)
        return self.forward(module, self, hidden, rotary)


def llama_layer(module: Any, layer: Layer, hidden: Tensor, rotary: Rotary | None) -> Tensor:
    """Pre-norm decoder layer with rotary positions and a gated MLP (Llama, Mistral, Qwen)."""
    assert rotary is not None
    attention, mlp = module.self_attn, module.mlp
    q, k, v = _heads(
        _columns(
            layer.axis,
            module.input_layernorm(hidden),
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
        ),
        attention.head_dim,
    )
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k = apply_rotary_pos_emb(q, k, *rotary, unsqueeze_dim=2)
    hidden = hidden + _row(layer.axis, layer.core(q, k, v), attention.o_proj)
    gate, up = _columns(
        layer.axis, module.post_attention_layernorm(hidden), mlp.gate_proj, mlp.up_proj
    )
    return hidden + _row(layer.axis, mlp.act_fn(gate) * up, mlp.down_proj)


def gpt2_layer(module: Any, layer: Layer, hidden: Tensor, rotary: Rotary | None) -> Tensor:
    """GPT-2 block: layer norms, one matrix for q, k and v, dropout after each block."""
    attention, mlp = module.attn, module.mlp
    (qkv,) = _columns(layer.axis, module.ln_1(hidden), attention.c_attn)
    q, k, v = _heads(qkv.chunk(3, -1), attention.head_dim)
    output = _row(layer.axis, layer.core(q, k, v), attention.c_proj)
    hidden = hidden + attention.resid_dropout(output)
    (inner,) = _columns(layer.axis, module.ln_2(hidden), mlp.c_fc)
    return hidden + mlp.dropout(_row(layer.axis, mlp.act(inner), mlp.c_proj))


def _heads(projections: tuple[Tensor, ...], head_dim: int) -> list[Tensor]:
    """Return (B, S, heads of this rank, head_dim)."""
    return [x.unflatten(-1, (-1, head_dim)) for x in projections]


def _columns(axis: TensorAxis, x: Tensor, *linears: Any) -> tuple[Tensor, ...]:
    weights = [_out_in(linear) for linear in linears]
    return column_linear(axis, x, weights, [linear.bias for linear in linears])


def _row(axis: TensorAxis, x: Tensor, linear: Any) -> Tensor:
    return row_linear(axis, x, _out_in(linear), linear.bias)


def _out_in(linear: Any) -> Tensor:
    """Return the weight as (out, in); GPT-2's Conv1D stores (in, out)."""
    weight: Tensor = linear.weight
    return weight.t() if isinstance(linear, Conv1D) else weight
