"""Compare prices with earlier ones: ``python -m benchmarks.same_prices OUT.json [OLD.json]``.

With ``--quick`` as the last argument: every fifth trainer profile, and no searches.

Prices several thousand plans: training plans under every trainer profile, the published runs of
``validate``, serving, and traced modules. Writes every number to OUT.json; with OLD.json, prints
the largest relative difference and exits with 1 above 1e-12.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import asdict

import planner
from benchmarks.unseen import UNSEEN
from cost_models.legality.rules import legality_codes
from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset
from cost_models.plan.plan import PlanTable
from cost_models.pricing.estimate import price
from cost_models.pricing.simulated_steps import with_simulated_steps
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import profile_names, software_profile
from planner.request.scenario import adapting, build_scenario
from planner.search.space import enumerate_plans

TOLERANCE: Final = 1e-12
PLANS: Final = 24  # of each question
SIMULATED: Final = 6  # of these
# model, cluster, tokens of a sequence, sequences of a batch, and the rest of the workload
QUESTIONS: Final[tuple[tuple[str, str, int, int, dict[str, Any]], ...]] = (
    ("llama-3-8b", "2x8xA100-80GB", 4096, 64, {}),
    ("gpt2-xl", "8xV100-SXM2-32GB", 1024, 32, {"precision": "fp16"}),
    ("mixtral-8x7b", "4x8xH100-SXM", 4096, 64, {}),
    ("deepseek-v2-lite", "8xH800-SXM", 4096, 32, {}),
    ("llama-2-13b", "8xRTX-4090", 2048, 16, {"optimizer": "sgd"}),
    ("gemma-2-9b", "4xL40S", 4096, 16, {"lora": 16}),
    ("llama-3.1-405b", "32x8xH100-SXM", 8192, 512, {}),
    ("qwen2.5-32b", "4x8xMI300X", 32768, 64, {}),
)
SERVED: Final = (
    ("llama-3-8b", "1xA100-80GB", {}),
    ("llama-3-70b", "8xH100-SXM", {"concurrency": 64, "context_len": 8192}),
    ("deepseek-v3", "8xH200-SXM", {"concurrency": 64, "context_len": 32768}),
    ("mixtral-8x7b", "2xA100-80GB", {"concurrency": 16}),
    ("gemma-2-9b", "1xL4", {"concurrency": 4, "context_len": 4096}),
    ("qwen2.5-32b", "2xL40S", {"weight_precision": "fp8", "concurrency": 32}),
    ("llama-3-8b", "1xT4", {"kv_precision": "fp8"}),
)
TRACED: Final = {
    "mlp": ["x=int64[B,16]", "y=int64[B,16]"],
    "lstm": ["x=int64[B,16]", "y=int64[B,16]"],
    "vit": ["pixel_values=float32[B,3,64,64]", "labels=int64[B]"],
}


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield every number of a document with its path."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _numbers(value[key], f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for place, one in enumerate(value):
            yield from _numbers(one, f"{name}/{place}")
    elif isinstance(value, float | int) and not isinstance(value, bool):
        yield name, float(value)


def _columns(record: Any, name: str) -> Iterator[tuple[str, float]]:
    for field, values in asdict(record).items():
        column = np.asarray(values, dtype=float)
        for row, value in enumerate(np.atleast_1d(column).tolist()):
            yield f"{name}/{row}/{field}", value


def _training(profiles: Sequence[str]) -> Iterator[tuple[str, float]]:
    for software in profiles:
        for number, (model, cluster, seq_len, batch, rest) in enumerate(QUESTIONS):
            name = f"train/{software}/{model}"
            try:
                scenario = scenario_of(model, cluster, seq_len, batch, software, rest)
            except InputError as error:
                yield f"{name}/refused/{type(error).__name__}", 1.0
                continue
            table = _plans(number)
            legal = np.flatnonzero(legality_codes(scenario, table) == 0)
            yield f"{name}/legal", float(len(legal))
            if not len(legal):
                continue
            chosen = np.random.default_rng(number).choice(legal, min(PLANS, len(legal)), False)
            few = table.rows(np.sort(chosen))
            priced = price(scenario, few)
            for part in (priced.memory, priced.time, priced.host):
                yield from _columns(part, f"{name}/{type(part).__name__}")
            yield from _numbers(priced.peak.tolist(), f"{name}/peak")
            head = few.rows(np.arange(min(SIMULATED, len(few))))
            steps = with_simulated_steps(scenario, head, price(scenario, head)).step
            yield from _numbers(steps.tolist(), f"{name}/simulated")


@cache
def _plans(number: int) -> PlanTable:
    """Return every candidate of a question; long sequences with one micro-batch size."""
    model, cluster, seq_len, batch, rest = QUESTIONS[number]
    scenario = scenario_of(model, cluster, seq_len, batch, "shardplan", rest)
    fixed = {} if seq_len <= 8192 else {"micro_batch_size": 1}
    return enumerate_plans(scenario.model, scenario.workload, scenario.cluster.num_gpus, fixed)


def scenario_of(
    model: str, cluster: str, seq_len: int, batch: int, software: str, rest: Mapping[str, Any]
) -> Scenario:
    """Return a scenario, with the workload that the command line would build."""
    assert software_profile(software)
    options = dict(rest)
    adapter = adapting(options.pop("lora", None), options.pop("qlora", None), None, None)
    return build_scenario(
        model_spec(load_preset(model).config, name=model),
        parse_cluster(cluster),
        seq_len=seq_len,
        global_batch_size=batch,
        software=software,
        adapter=adapter,
        **options,
    ).scenario


def _documents() -> Iterator[tuple[str, float]]:
    tables = [None, *UNSEEN.values()]
    for table in tables:
        for row in planner.validate(table).to_dict()["rows"]:
            yield from _numbers(row, f"validate/{row['row_id']}")
    for model, cluster, options in SERVED:
        answer = planner.fit(model, cluster, inference=True, **options)
        yield from _numbers(answer.to_dict(), f"serve/{model}/{cluster}")
    for module, inputs in TRACED.items():
        for micro, zero in ((1, 0), (4, 1), (2, 3)):
            answer = planner.fit(
                f"module:benchmarks.memory_truth.traced_modules:{module}",
                "4xA100-80GB",
                inputs=inputs,
                micro_batch_size=micro,
                zero_stage=zero,
            )
            yield from _numbers(answer.to_dict(), f"traced/{module}/{micro}/{zero}")
    for model, cluster, seq_len, batch, rest in QUESTIONS:
        asked = {"seq_len": seq_len, "global_batch_size": batch, **rest}
        yield from _numbers(
            planner.fit(model, cluster, **asked).to_dict(), f"fit/{model}/{cluster}"
        )


def _searches() -> Iterator[tuple[str, float]]:
    for model, cluster, seq_len, batch, rest in QUESTIONS[:5]:
        asked = {"seq_len": seq_len, "global_batch_size": batch, **rest}
        found = planner.plan(model, cluster, top=5, **asked).to_dict()
        yield from _numbers(found["plans"], f"plan/{model}/{cluster}")


def main() -> int:
    """Write the prices and compare them."""
    paths = [name for name in sys.argv[1:] if name != "--quick"]
    quick = "--quick" in sys.argv
    if len(paths) not in (1, 2) or any(name.startswith("-") for name in paths):
        print(__doc__, file=sys.stderr)
        return 2
    found = dict(_training(profile_names()[:: 5 if quick else 1]))
    if not quick:
        found |= {**dict(_documents()), **dict(_searches())}
    Path(paths[0]).write_text(json.dumps(found), encoding="utf-8")
    rows = len({name.rsplit("/", 1)[0] for name in found if "/MemoryParts/" in name})
    print(f"{len(found):,} numbers, {rows:,} training plans")
    if len(paths) == 1:
        return 0
    old = json.loads(Path(paths[1]).read_text(encoding="utf-8"))
    names = sorted(set(found) - set(old) if quick else set(old) ^ set(found))
    off = {
        name: abs(old[name] - found[name]) / max(abs(old[name]), abs(found[name]))
        for name in set(old) & set(found)
        if old[name] != found[name]
    }
    worst = sorted(off, key=lambda name: -off[name])[:10]
    print(f"{len(off):,} differ, by at most {max(off.values(), default=0.0):.1e}")
    for name in worst:
        print(f"  {name}: {old[name]!r} -> {found[name]!r}")
    print(f"{len(names):,} in one of the two alone", *names[:10], sep="\n  ")
    return int(bool(names) or max(off.values(), default=0.0) > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
