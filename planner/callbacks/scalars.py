"""Scalars for experiment trackers that are active in this process.

Only trackers that the script has imported and started receive any: nothing is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def log_scalars(scalars: Mapping[str, float]) -> list[str]:
    """Send scalars to the running W&B, MLflow and trackio runs; return the names of these."""
    sent = []
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.run.summary.update(dict(scalars))
        sent.append("wandb")
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and mlflow.active_run() is not None:
        mlflow.log_metrics({name.replace(":", "_"): value for name, value in scalars.items()})
        sent.append("mlflow")
    trackio = sys.modules.get("trackio")
    if trackio is not None and _trackio_run(trackio) is not None:
        trackio.log(dict(scalars))
        sent.append("trackio")
    return sent


def _trackio_run(trackio: Any) -> Any:
    """Return trackio's current run: a context variable of its module ``context_vars``."""
    variables = getattr(trackio, "context_vars", None)
    current = getattr(variables, "current_run", None)
    return None if current is None else current.get()


def tensorboard_scalars(folder: str, scalars: Mapping[str, float], step: int) -> bool:
    """Write scalars as TensorBoard events into a folder; whether the package is installed."""
    try:
        from importlib import import_module

        writer = import_module("torch.utils.tensorboard").SummaryWriter(folder)
    except ImportError:
        return False
    for name, value in scalars.items():
        writer.add_scalar(name, value, step)
    writer.close()
    return True
