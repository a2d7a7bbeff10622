"""Fit the constants of ``cost_models.compute.matmul``.

    python -m benchmarks.step_time.fit_matmul

Reads published matmul rates (hardware_profiles/cluster/measured/published_kernels.csv, a column
names the source) and
prints the constants that explain the bf16 shapes of the A100-PCIe best (mean absolute error of the
logarithm), next to those in the code, and the error of both on every card of the file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import minimize

import hardware_profiles
from cost_models.compute import matmul
from cost_models.compute.rates import Rates, rates
from hardware_profiles.cluster.catalogue import find_accelerator
from hardware_profiles.software.trainer import software_profile

ROWS = Path(hardware_profiles.__file__).parent / "cluster" / "measured" / "published_kernels.csv"
CARDS = {"A100-PCIe": "A100-PCIe-80GB", "B200-SXM": "B200-SXM-180GB"}
BOUND_BY_POWER = ("B200-SXM",)  # after a few of the repeated matmuls that are timed
NAMES = ("FULL_WAVE_SHARE", "TILE_SETUP", "OPERAND_TRAFFIC")
FITTED_ON = "A100-PCIe"


def shapes() -> pd.DataFrame:
    """Rows of single matmuls: card, m, k, n and measured seconds."""
    rows = pd.read_csv(ROWS)
    rows = rows[(rows.op == "matmul") & rows["shape"].str.startswith("b=1,")]
    for size in ("m", "k", "n"):
        rows[size] = rows["shape"].str.extract(rf"\b{size}=(\d+)", expand=False).astype(float)
    rate = rows.achieved_fraction_of_peak * rows.peak_tflops * 1e12
    return rows.assign(seconds=2.0 * rows.m * rows.k * rows.n / rate)


def card_rates(gpu: str) -> Rates:
    """The rates of a card of the file."""
    return rates(
        find_accelerator(CARDS[gpu]),
        "bf16",
        software_profile("shardplan"),
        long_run=gpu in BOUND_BY_POWER,
    )


def errors(rows: pd.DataFrame, constants: tuple[float, ...]) -> np.ndarray:
    """Predicted over measured, of one card's rows."""
    before = [getattr(matmul, name) for name in NAMES]
    try:
        for name, value in zip(NAMES, constants, strict=True):
            setattr(matmul, name, value)
        columns = (rows[size].to_numpy() for size in ("m", "k", "n"))
        predicted = matmul.matmul_seconds(*columns, 2.0, card_rates(rows.gpu.iloc[0]))
    finally:
        for name, value in zip(NAMES, before, strict=True):
            setattr(matmul, name, value)
    return np.asarray(predicted / rows.seconds.to_numpy())


def fit(rows: pd.DataFrame) -> tuple[float, ...]:
    """The constants that explain these rows best."""
    start = np.array([getattr(matmul, name) for name in NAMES])

    def loss(scale: np.ndarray) -> float:
        return float(np.abs(np.log(errors(rows, tuple(np.abs(start * scale))))).mean())

    found = minimize(loss, np.ones(len(NAMES)), method="Nelder-Mead")
    return tuple(np.abs(start * found.x).tolist())


def main() -> None:
    rows = shapes()
    coded = tuple(getattr(matmul, name) for name in NAMES)
    fitted = fit(rows[rows.gpu == FITTED_ON])
    for name, here, best in zip(NAMES, coded, fitted, strict=True):
        print(f"{name:<16} in the code {here:8.3f}   fitted on {FITTED_ON} {best:8.3f}")
    for gpu, part in rows.groupby("gpu"):
        for label, constants in (("code", coded), ("fit", fitted)):
            off = np.abs(errors(part, constants) - 1.0)
            print(
                f"{gpu:<10} {len(part):>4} shapes, {label}: mean absolute error "
                f"{100 * off.mean():.1f} %, 90th percentile {100 * np.quantile(off, 0.9):.1f} %"
            )


if __name__ == "__main__":
    main()
