"""BERT: bidirectional attention, masked-token prediction, norms after the residual sum."""

from __future__ import annotations

from typing import Final

from executor.model.families.description import Family, ResidualBlock
from executor.model.families.mlp import ungated
from executor.model.families.self_attention import SelfAttention, separate

BERT: Final = Family(
    tokens="bert.embeddings.word_embeddings",
    positions="bert.embeddings.position_embeddings",
    token_types="bert.embeddings.token_type_embeddings",
    embedding_norm="bert.embeddings.LayerNorm",
    embedding="bert.embeddings",
    layers="bert.encoder.layer",
    norm=None,
    head="cls.predictions",
    projection="cls.predictions.decoder",
    head_bias="cls.predictions.bias",
    head_transform="cls.predictions.transform",
    attention=SelfAttention(separate("self.query", "self.key", "self.value"), "output.dense"),
    feed_forward=ungated("intermediate.dense", "output.dense", "intermediate.intermediate_act_fn"),
    attention_block=ResidualBlock("attention", None, norm_sum="attention.output.LayerNorm"),
    feed_forward_block=ResidualBlock("", None, norm_sum="output.LayerNorm"),
    softmax_in_fp32=False,
    masked=True,
)
