"""Step times of the tables that every reader knows.

    python -m benchmarks.accuracy.published_step_times

A view of ``shardplan validate --time``: Narayanan et al. 2021 (arXiv:2104.04473), table 1, and
Korthikanti et al. 2022 (arXiv:2205.05198), table 5: GPT models of 1.7 to 1008 billion parameters on
8 to 3072 A100, Megatron-LM; Megatron-LM's scaling on H100 (with validate's defaults for what it
leaves unsaid); vTrain's sweeps on one node and on many; fms-fsdp: Llama models of 7 to 70 billion
parameters under FSDP and HSDP on 128 A100 and 96 H100.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pandas as pd

import planner

# source group, and how many of its first rows belong to the table
TABLES: Final[Mapping[str, tuple[str, int]]] = {
    "Narayanan 2021, table 1": ("megatron-sc21", 10),
    "Korthikanti 2022, table 5": ("korthikanti-2022", 8),
    "Megatron on H100, weak scaling": ("megatron-h100-scaling", 9),
    "vTrain, many nodes": ("vtrain-multi", 10_000),
    "vTrain, one node": ("vtrain-single", 10_000),
    "FSDP and HSDP, Llama 7B to 70B": ("ibm-fms-fsdp", 10_000),
}
MOST_ROWS: Final = 30  # of a table that is printed row by row


def tables() -> dict[str, pd.DataFrame]:
    """Predicted, measured and signed error of every row, by table."""
    groups = [group for group, _ in TABLES.values()]
    rows = planner.validate(only=groups, what="time").rows
    return {
        name: rows[rows.source_group == group].head(most) for name, (group, most) in TABLES.items()
    }


def main() -> None:
    for name, rows in tables().items():
        if len(rows) <= MOST_ROWS:
            shown = rows[["row_id", "gpu", "num_gpus"]].assign(
                measured=rows.measured_step_seconds,
                predicted=rows.predicted_step_seconds,
                error_percent=100.0 * rows.time_error,
            )
            print(shown.to_string(index=False, float_format=lambda v: f"{v:.2f}"))
        error = 100.0 * rows.time_error.astype(float)
        print(
            f"{name}: mean absolute error {error.abs().mean():.1f} %, 90th percentile "
            f"{error.abs().quantile(0.9):.1f} %, bias {error.mean():+.1f} % ({len(rows)} runs)\n"
        )


if __name__ == "__main__":
    main()
