"""Predicted step times beside published ones: ``python -m benchmarks.published_step_times``.

Narayanan et al. 2021 (arXiv:2104.04473), table 1, and Korthikanti et al. 2022
(arXiv:2205.05198), table 5: GPT models of 1.7 to 1008 billion parameters on 8 to 3072 A100,
Megatron-LM. fms-fsdp: Llama models of 34 and 70 billion parameters under eager FSDP with full
sharding and full recomputation on 128 A100 and 96 H100, priced as our own executor, which is FSDP
too; models of 7 and 13 billion parameters without recomputation under HSDP (shards inside a node).
The rows carry their source (benchmarks/data/published_step_times.csv). No constant was fitted
on them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from cost_models.estimate import Setting, price
from cost_models.families import model_spec
from cost_models.plan import Plan, PlanTable
from cost_models.workload import Workload
from hardware_profiles.build import build_cluster
from hardware_profiles.catalogue import find_accelerator
from hardware_profiles.schema import Cluster, Figure
from hardware_profiles.software import software_profile

ROWS = Path(__file__).parent / "data" / "published_step_times.csv"


GPUS = {"A100-SXM": "A100-SXM-80GB", "H100-SXM": "H100-SXM-80GB"}


def config(row: pd.Series) -> dict[str, object]:
    """A GPT with learned positions and dropout, as Megatron-LM trains it, or a Llama."""
    if row.model_type == "llama":
        return {
            "model_type": "llama",
            "num_hidden_layers": int(row.num_layers),
            "hidden_size": int(row.hidden_size),
            "num_attention_heads": int(row.num_heads),
            "num_key_value_heads": int(row.num_kv_heads),
            "intermediate_size": int(row.ffn_hidden_size),
            "vocab_size": int(row.vocab_size),
            "max_position_embeddings": int(row.seq_len),
        }
    return {
        "model_type": "gpt2",
        "n_layer": int(row.num_layers),
        "n_embd": int(row.hidden_size),
        "n_head": int(row.num_heads),
        "n_positions": int(row.seq_len),
        "vocab_size": int(row.vocab_size),
        "activation_function": "gelu",
    }


def cluster(row: pd.Series) -> Cluster:
    """The nodes of a row, with its network."""
    bits = float(row.network_gbps_per_gpu) * 1e9
    return build_cluster(
        find_accelerator(GPUS[row.gpu]),
        num_nodes=max(1, int(row.num_gpus) // 8),
        gpus_per_node=8,
        network_bandwidth=Figure(bits / 8.0, "published", str(row.source)),
    )


def predict(row: pd.Series) -> float:
    """Predicted step seconds of one published run."""
    setting = Setting(
        model=model_spec(config(row), name=str(row.row_id)),
        cluster=cluster(row),
        workload=Workload(
            int(row.seq_len),
            int(row.global_batch_size),
            precision=row.precision,
            attention_kernel="eager" if row.trainer == "megatron" else "flash",
        ),
        software=software_profile(row.trainer),
    )
    virtual = int(row.virtual_stages)
    plan = Plan(
        data_parallel=int(row.data_parallel),
        dp_replicate=int(row.dp_replicate),
        tensor_parallel=int(row.tensor_parallel),
        pipeline_parallel=int(row.pipeline_parallel),
        virtual_stages=virtual,
        pipeline_schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
        zero_stage=int(row.zero_stage),
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
    shown = rows[
        ["row_id", "gpu", "num_gpus", "recompute", "step_time_s", "predicted", "error_percent"]
    ]
    print(shown.to_string(index=False, float_format=lambda v: f"{v:.2f}"))
    for group, part in [*rows.groupby("source_group"), ("all", rows)]:
        error = np.abs(part.error_percent)
        print(
            f"{group}: mean absolute error {error.mean():.1f} %, 90th percentile "
            f"{error.quantile(0.9):.1f} %, bias {part.error_percent.mean():+.1f} % "
            f"({len(part)} runs)"
        )


if __name__ == "__main__":
    main()
