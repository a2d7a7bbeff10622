"""A trace of a module that is small enough to price by hand."""

import json
from typing import Any

from cost_models.traced.module import TracedModule, traced_module

BLOCK = {"tensors": [[8, 4, 1, True]]}  # 32 elements, 128 bytes
OUTSIDE = {"tensors": [[6, 4, 1, True], [1, 4, 2, False]]}  # 24 trained ones, 8 frozen
# one matmul of a block: 100 FLOP a row, 40 bytes a row and its weights
OPERATORS = {
    "forward": [[2.0, 0.0, 100.0, 128.0, 40.0]],
    "backward": [[4.0, 0.0, 100.0, 0.0, 40.0]],
}
AGAIN = {**OPERATORS, "backward": [[6.0, 0.0, 100.0, 0.0, 40.0]]}


def segment(
    phase: str,
    block: str | None,
    live: list[float],
    end: list[float],
    gradients: tuple[float, float],
) -> dict[str, Any]:
    works, number = block is not None, {None: 0, "b.0": 1, "b.1": 2}[block]
    reads = [[number, 24 if number == 0 else 32, 1]] if phase == "forward" else []
    freed = [live[0] - (96.0 if phase == "backward" and block else 0.0), live[1]]
    return {
        "phase": phase,
        "block": block,
        "kept": [live],
        "freed": [freed],
        "end": end,
        "block_gradient_bytes": gradients[0],
        "outside_gradient_bytes": gradients[1],
        "operators": [[1.0 + (phase == "backward"), 0.0, 100.0, 0.0, 40.0]] if works else [],
        "parameters": reads,
    }


def _pass(saved: float, operators: dict[str, Any]) -> dict[str, Any]:
    """Blocks that keep ``saved`` bytes a row each for the backward pass."""
    return {
        "operators": operators,
        # the first node's output is read by the first block and, again, behind the last one
        "tensors": [[0, [1, 3], 0.0, 16.0, True], [1, [2], 0.0, 16.0, True], [2, [3], 0.0, 8.0, 0]],
        "segments": [
            segment("forward", None, [0.0, 10.0], [0.0, 10.0], (0.0, 0.0)),
            segment("forward", "b.0", [0.0, 60.0 + saved], [0.0, 10.0 + saved], (0.0, 0.0)),
            segment("forward", "b.1", [0.0, 60.0 + 2 * saved], [0.0, 10.0 + 2 * saved], (0.0, 0.0)),
            segment("forward", None, [0.0, 20.0 + 2 * saved], [0.0, 20.0 + 2 * saved], (0.0, 0.0)),
            segment(
                "backward", "b.1", [128.0, 90.0 + 2 * saved], [128.0, 10.0 + saved], (0.0, 0.0)
            ),
            segment("backward", "b.0", [128.0, 90.0 + saved], [128.0, 10.0], (128.0, 0.0)),
            segment("backward", None, [96.0, 10.0], [96.0, 0.0], (256.0, 0.0)),
        ],
    }


def document(precision: str = "fp32") -> dict[str, Any]:
    return {
        "schema_version": 1,
        "name": "module:package.nets:net",
        "class": "Net",
        "precision": precision,
        "device": "cuda",
        "blocks": [{"name": "b.0", **BLOCK}, {"name": "b.1", **BLOCK}],
        "outside": OUTSIDE,
        "buffer_bytes": 16,
        "tied_parameters": 0,
        "inputs": {"x": {"dtype": "float32", "sizes": [4]}},
        "output_bytes_per_row": 4.0,
        "passes": {"none": _pass(50.0, OPERATORS), "full": _pass(10.0, AGAIN)},
        "notes": ["a note of the trace"],
    }


def sample(precision: str = "fp32") -> TracedModule:
    return traced_module(document(precision))


def large(factor: float = 1e7) -> TracedModule:
    """The same with so many times the memory a row and the rows of a tensor."""
    found = json.loads(json.dumps(document()))  # no two parts are one object
    for block in (*found["blocks"], found["outside"]):
        block["tensors"] = [[int(r * factor), w, n, t] for r, w, n, t in block["tensors"]]
    for one in found["passes"].values():
        for part in one["segments"]:
            for name in ("block_gradient_bytes", "outside_gradient_bytes"):
                part[name] *= factor
            part["kept"] = [[a * factor, b * factor] for a, b in part["kept"]]
            part["freed"] = [[a * factor, b * factor] for a, b in part["freed"]]
            part["parameters"] = [[n, int(e * factor), t] for n, e, t in part["parameters"]]
            part["end"] = [value * factor for value in part["end"]]
        one["operators"] = {
            phase: [[n, *(value * factor for value in line)] for n, *line in kinds]
            for phase, kinds in one["operators"].items()
        }
    return traced_module(found)
