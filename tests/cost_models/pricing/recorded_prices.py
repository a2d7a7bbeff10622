"""Prices of plans under every trainer, on file.

    python -m tests.cost_models.pricing.recorded_prices [--write | --draw]

A change of a formula shows in the file which prices it moves, and by how much. ``--write`` prices
the plans of the file again; ``--draw`` draws other plans, which only a new trainer or a new part of
a plan needs.
"""

import csv
import json
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import asdict

from benchmarks.same_prices import scenario_of
from cost_models.legality.rules import legality_codes
from cost_models.plan.plan import Plan, PlanTable
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import profile_names
from planner.search.space import enumerate_plans

FILE: Final = Path(__file__).with_name("recorded_prices.csv")
ASKED: Final = ("software", "model", "cluster", "seq_len", "batch", "options")
PLANS: Final = 4  # of a question
DIGITS: Final = 8
# model, cluster, tokens of a sequence, sequences of a batch, options: of these each trainer has two
QUESTIONS: Final[tuple[tuple[str, str, int, int, dict[str, Any]], ...]] = (
    ("llama-3-8b", "2x8xA100-80GB", 4096, 64, {}),
    ("mixtral-8x7b", "4x8xH100-SXM", 4096, 64, {}),
    ("gpt2-xl", "8xV100-SXM2-32GB", 1024, 32, {"precision": "fp16"}),
    ("deepseek-v2-lite", "8xH800-SXM", 4096, 32, {}),
    ("llama-2-13b", "8xRTX-4090", 2048, 16, {"lora": 16}),
    ("gemma-2-9b", "2x4xL40S", 4096, 16, {"optimizer": "adamw8bit"}),
    ("bert-large", "8xA100-40GB", 512, 256, {"precision": "fp32"}),
    ("llama-3-70b", "8x8xH100-SXM", 8192, 64, {"gradient_precision": "bf16"}),
    ("falcon-40b", "1xA100-80GB", 2048, 4, {"qlora": 8}),
    ("qwen2.5-32b", "4x8xMI300X", 32768, 64, {"precision": "fp8"}),
    ("gpt-oss-20b", "8xB200", 8192, 32, {}),
)


def asked() -> Iterator[dict[str, Any]]:
    """Yield the questions: all trainers, two each, and the bundled executor with all of them."""
    for number, software in enumerate(profile_names()):
        chosen = {(5 * number + step) % len(QUESTIONS) for step in (0, 3)}
        for place in range(len(QUESTIONS)) if software == "shardplan" else sorted(chosen):
            model, cluster, seq_len, batch, options = QUESTIONS[place]
            yield {
                "software": software,
                "model": model,
                "cluster": cluster,
                "seq_len": seq_len,
                "batch": batch,
                "options": json.dumps(options),
            }


def question(row: Mapping[str, Any]) -> Scenario:
    """Return the scenario of a question."""
    software, model, cluster, seq_len, batch, options = (row[name] for name in ASKED)
    sizes = int(seq_len), int(batch)
    return scenario_of(model, cluster, *sizes, software, json.loads(options))


def drawn() -> Iterator[dict[str, Any]]:
    """Yield questions with legal plans, drawn at random."""
    for number, row in enumerate(asked()):
        try:
            scenario = question(row)
        except InputError:  # a trainer that has no such optimizer or precision
            continue
        candidates = enumerate_plans(
            scenario.model, scenario.workload, scenario.cluster.num_gpus, {}
        )
        legal = np.flatnonzero(legality_codes(scenario, candidates) == 0)
        chosen = np.random.default_rng(number).choice(legal, min(PLANS, len(legal)), replace=False)
        for plan in map(candidates.plan, np.sort(chosen).tolist()):
            default = Plan().to_dict()
            given = {name: v for name, v in plan.to_dict().items() if v != default[name]}
            yield {**row, "plan": json.dumps(given)}


def recorded() -> list[dict[str, str]]:
    """Return the rows of the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def priced(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows with today's prices: bytes of the fullest rank, and seconds."""
    for _, group in groupby(rows, key=lambda row: [row[name] for name in ASKED]):
        of_question = list(group)
        plans = [Plan(**json.loads(row["plan"])) for row in of_question]
        found = price(question(of_question[0]), PlanTable.from_plans(plans))
        columns = {"peak": found.peak, "step": found.step}
        columns |= {**asdict(found.memory), **{f"{n}_s": v for n, v in asdict(found.time).items()}}
        columns |= {f"host_{name}": values for name, values in asdict(found.host).items()}
        for place, row in enumerate(of_question):
            numbers = {
                name: float(np.broadcast_to(values, len(plans))[place])
                for name, values in columns.items()
            }
            asked_for = {name: row[name] for name in (*ASKED, "plan")}
            yield {**asked_for, **{n: f"{value:.{DIGITS}g}" for n, value in numbers.items()}}


def main() -> None:
    """Print the number of prices that differ; with ``--write`` or ``--draw`` write the file."""
    rows = list(priced(list(drawn()) if "--draw" in sys.argv else recorded()))
    if {"--draw", "--write"} & set(sys.argv):
        with FILE.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    else:
        print(sum(new != old for new, old in zip(rows, recorded(), strict=True)), "plans differ")


if __name__ == "__main__":
    main()
