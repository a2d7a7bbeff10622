"""Predicted step times beside two published tables: ``python -m benchmarks.published_step_times``.

Narayanan et al. 2021 (arXiv:2104.04473), table 1, and Korthikanti et al. 2022 (arXiv:2205.05198),
table 5: GPT models of 1.7 to 1008 billion parameters on 8 to 3072 A100, Megatron-LM. The rows carry
their source (benchmarks/data/published_step_times.csv). No constant was fitted on them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from cost_models.estimate import Setting, price
from cost_models.families import model_spec
from cost_models.plan import Plan, PlanTable
from cost_models.workload import Workload
from hardware_profiles.software import software_profile
from hardware_profiles.spec import parse_cluster

ROWS = Path(__file__).parent / "data" / "published_step_times.csv"


def gpt_config(row: pd.Series) -> dict[str, object]:
    """A GPT with learned positions and dropout, as Megatron-LM trains it."""
    return {
        "model_type": "gpt2",
        "n_layer": int(row.num_layers),
        "n_embd": int(row.hidden_size),
        "n_head": int(row.num_heads),
        "n_positions": int(row.seq_len),
        "vocab_size": int(row.vocab_size),
        "activation_function": "gelu",
    }


def predict(row: pd.Series) -> float:
    """Predicted step seconds of one published run."""
    nodes = max(1, int(row.num_gpus) // 8)
    setting = Setting(
        model=model_spec(gpt_config(row), name=str(row.row_id)),
        cluster=parse_cluster(f"{nodes}x8xA100-SXM-80GB"),
        workload=Workload(
            int(row.seq_len), int(row.global_batch_size), precision="fp16", attention_kernel="eager"
        ),
        software=software_profile("megatron"),
    )
    virtual = int(row.virtual_stages)
    plan = Plan(
        data_parallel=int(row.data_parallel),
        tensor_parallel=int(row.tensor_parallel),
        pipeline_parallel=int(row.pipeline_parallel),
        virtual_stages=virtual,
        pipeline_schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
        sequence_parallel=bool(row.sequence_parallel),
        recompute=row.recompute,
        micro_batch_size=int(row.micro_batch_size),
        num_microbatches=int(row.global_batch_size // (row.micro_batch_size * row.data_parallel)),
    )
    return float(price(setting, PlanTable.from_plans([plan])).step[0])


def table() -> pd.DataFrame:
    """Predicted, measured and signed error of every row."""
    rows = pd.read_csv(ROWS)
    rows["predicted"] = [predict(row) for _, row in rows.iterrows()]
    rows["error_percent"] = 100.0 * (rows.predicted / rows.step_time_s - 1.0)
    return rows


def main() -> None:
    rows = table()
    shown = rows[["row_id", "num_gpus", "recompute", "step_time_s", "predicted", "error_percent"]]
    print(shown.to_string(index=False, float_format=lambda v: f"{v:.2f}"))
    for group, part in rows.groupby("source_group"):
        mean, bias = np.abs(part.error_percent).mean(), part.error_percent.mean()
        print(f"{group}: mean absolute error {mean:.1f} %, bias {bias:+.1f} % ({len(part)} runs)")


if __name__ == "__main__":
    main()
