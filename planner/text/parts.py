"""Names of the parts of memory, the same in every answer."""

from __future__ import annotations

from typing import Final

PART_WORDS: Final = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits",
    "kv_cache": "KV cache",
    "buffers": "temporary buffers",
    "runtime": "CUDA and allocator",
}
NAME: Final = max(map(len, PART_WORDS.values()))
