from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cost_models.columnar.columns import FactoredColumn
from cost_models.columnar.largest_sums import MISSING, largest_sums
from cost_models.legality.rules import legality_codes
from cost_models.memory.outside_torch import outside_bytes
from cost_models.plan.factored import factored
from cost_models.plan.plan import OFFLOADS, PlanTable
from cost_models.plan.recompute import RECOMPUTE
from cost_models.pricing.estimate import price
from cost_models.pricing.table import price_table, table_memory
from cost_models.scenario import Scenario
from planner.search.space import enumerate_plans
from tests.samples import examples, make_scenario


def lora() -> Scenario:
    from hardware_profiles.cluster.parse import parse_cluster
    from planner.request.model import resolve_model
    from planner.request.scenario import Adapting, build_scenario

    question = build_scenario(
        resolve_model("llama-3.2-1b"), parse_cluster("8xA100-80GB"), adapter=Adapting("qlora", 8)
    )
    return question.scenario


def many_layers() -> Scenario:
    """Stages of one to eighty layers."""
    from hardware_profiles.cluster.parse import parse_cluster
    from planner.request.model import resolve_model
    from planner.request.scenario import build_scenario

    cluster = parse_cluster("8x8xH100-SXM")
    return build_scenario(resolve_model("llama-3-70b"), cluster, global_batch_size=64).scenario


SETTINGS: dict[str, Any] = {
    "many layers": many_layers,
    "llama": lambda: make_scenario("llama", "2x4xH100-SXM", global_batch_size=32),
    "tied": lambda: make_scenario("llama tied", "8xA100-80GB"),
    "long": lambda: make_scenario("llama", "8xA100-80GB", seq_len=65_536, global_batch_size=8),
    "mixtral": lambda: make_scenario("mixtral", "8xH100-SXM"),
    "t5": lambda: make_scenario("t5", "8xA100-80GB"),
    "t5 with short targets": lambda: make_scenario("t5", "8xA100-80GB", target_seq_len=64),
    "gpt2 by megatron": lambda: make_scenario(
        "gpt2", "8xA100-80GB", software="megatron", attention_kernel="eager"
    ),
    "llama by nemo": lambda: make_scenario("llama", "2x8xH100-SXM", software="nemo"),
    "fp8": lambda: make_scenario("llama", "8xH100-SXM", precision="fp8"),
    "fp32": lambda: make_scenario("llama", "8xA100-80GB", precision="fp32"),
    "8-bit states": lambda: make_scenario("llama", "8xA100-80GB", optimizer="paged_adamw_8bit"),
    "8-bit states of experts": lambda: make_scenario(
        "mixtral", "8xA100-80GB", optimizer="adamw_8bit"
    ),
    "muon of experts": lambda: make_scenario("mixtral", "8xA100-80GB", optimizer="muon"),
    "qlora": lora,
}


def plans_of_all_kinds(scenario: Scenario, seed: int = 0, most: int = 250) -> PlanTable:
    """Legal plans of the space, and some with what the space leaves at its default."""
    table = enumerate_plans(scenario.model, scenario.workload, scenario.cluster.num_gpus, {})
    rng = np.random.default_rng(seed)
    columns = {f.name: np.tile(getattr(table, f.name), 2) for f in fields(PlanTable)}
    half, size = len(table), len(table) * 2
    more = {
        "offload": rng.integers(0, len(OFFLOADS), size),
        "offload_device": rng.integers(0, 2, size),
        "recompute": rng.integers(0, len(RECOMPUTE), size),
        "recompute_layers": rng.integers(0, 3, size),
        "quantised_weights": rng.random(size) < 0.3,
        "quantised_gradients": rng.random(size) < 0.3,
        "secondary_ranks": rng.integers(1, 3, size),
    }
    for name, values in more.items():
        columns[name][half:] = values[half:]
    table = PlanTable(**columns)
    legal = np.flatnonzero(legality_codes(scenario, table) == 0)
    return table.rows(np.sort(rng.choice(legal, min(most, len(legal)), replace=False)))


QUICK = ("llama", "mixtral", "t5", "t5 with short targets")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS],
)
def test_equal_rows_once_or_each_row_is_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds and host bytes bit for bit; a peak but for the order in which its parts are added."""
    monkeypatch.setattr("cost_models.pricing.table.FEW", 0)
    scenario = SETTINGS[name]()
    table = plans_of_all_kinds(scenario)
    one_by_one, together = price(scenario, table), price_table(scenario, table)
    assert np.array_equal(together.step, one_by_one.step)
    assert np.array_equal(together.host.memory, one_by_one.host.memory)
    assert np.array_equal(together.host.nvme, one_by_one.host.nvme)
    np.testing.assert_allclose(together.peak, one_by_one.peak, rtol=1e-14)


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5", "many layers"])
def test_equal_rows_are_judged_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all candidates, and of some with what is seldom pinned, each row alike."""
    scenario = SETTINGS[name]()
    table = enumerate_plans(scenario.model, scenario.workload, scenario.cluster.num_gpus, {})
    odd = {
        "recompute_layers": np.arange(len(table)) % 5,
        "virtual_stages": 1 + np.arange(len(table)) % 3,
        "dp_replicate": 1 + np.arange(len(table)) % 4,
    }
    for some in (table, replace(table, **odd)):
        monkeypatch.setattr("cost_models.legality.rules.MANY", 10**9)
        row_by_row = legality_codes(scenario, some)
        monkeypatch.setattr("cost_models.legality.rules.MANY", 0)
        assert np.array_equal(legality_codes(scenario, some), row_by_row)
        assert len(np.unique(row_by_row)) > 2


def test_a_table_of_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """No column differs: there is nothing to factor."""
    monkeypatch.setattr("cost_models.pricing.table.FEW", 0)
    scenario = SETTINGS["llama"]()
    table = plans_of_all_kinds(scenario)
    for row in (0, len(table) // 2):
        one = table.rows(slice(row, row + 1))
        assert price_table(scenario, one).step == price(scenario, one).step
        assert price_table(scenario, one).peak == pytest.approx(
            price(scenario, one).peak, rel=1e-14
        )


@given(
    st.integers(1, 300),
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.sampled_from([0, 1e9]),
    st.integers(0, 2),
)
@example(50, 3, 3, 0, 2)
@settings(max_examples=examples(60))
def test_largest_sums_are_those_of_all_sums(
    size: int, seed: int, groups: int, sums_of_group: float, unused: int
) -> None:
    """``unused``: values of a shared column that no plan has."""
    rng = np.random.default_rng(seed)
    zeros = {f.name: np.zeros(size, dtype=np.int64) for f in fields(PlanTable)}
    table = PlanTable(
        **{
            **zeros,
            "tensor_parallel": rng.integers(0, groups, size),
            "zero_stage": rng.integers(0, 4, size),
            "micro_batch_size": rng.integers(0, 9, size),
        }
    )
    few, frame = factored(table)
    shared: Any = few.tensor_parallel
    if unused:
        values = rng.choice(groups + unused, groups, replace=False)
        codes = values[table.tensor_parallel]
        shared = FactoredColumn(frame.add(codes, groups + unused), np.arange(0.0, groups + unused))
    scale = rng.choice([1.0, 5.0, 1e3], (7, 2))
    first: list[Any] = [
        scale[k, 0] * np.sin(k + few.zero_stage * 1.3 + 7.1 * shared) for k in range(7)
    ]
    first[3] = np.where(few.zero_stage > 1, first[3], MISSING)
    second: list[Any] = [
        scale[k, 1] * np.cos(2.0 * k + few.micro_batch_size * (k + shared)) for k in range(4)
    ]
    partners = [0, 1, 2, 3, 0, 2, 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cost_models.columnar.largest_sums.SUMS_OF_GROUP", sums_of_group)
        found = largest_sums(frame, first, second, partners)
        enough = float(np.median(found))
        small = largest_sums(frame, first, second, partners, enough)

    def expanded(value: Any) -> Any:
        return value.expanded() if type(value) is FactoredColumn else np.broadcast_to(value, size)

    sums = [expanded(z) + expanded(second[k]) for z, k in zip(first, partners, strict=True)]
    assert np.array_equal(found, np.max(np.stack(sums), axis=0))
    assert np.array_equal(small[found <= enough], found[found <= enough])


@pytest.mark.slow
def test_largest_sums_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = SETTINGS["llama"]()
    table = plans_of_all_kinds(scenario)
    monkeypatch.setattr("cost_models.pricing.table.FEW", 0)
    monkeypatch.setattr("cost_models.columnar.largest_sums.SUMS_OF_GROUP", 0)
    by_groups = price_table(scenario, table).peak
    monkeypatch.setattr("cost_models.columnar.largest_sums.SUMS_OF_GROUP", 1e9)
    assert np.array_equal(price_table(scenario, table).peak, by_groups)


@pytest.mark.slow
def test_a_peak_that_is_too_large_may_be_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cost_models.pricing.table.FEW", 0)
    monkeypatch.setattr("cost_models.pricing.plan_groups.ONE_GROUP", 0)
    monkeypatch.setattr("cost_models.columnar.largest_sums.SUMS_OF_GROUP", 0)
    scenario = SETTINGS["llama"]()
    table = enumerate_plans(scenario.model, scenario.workload, scenario.cluster.num_gpus, {})
    table = table.rows(legality_codes(scenario, table) == 0)
    exact, _ = table_memory(scenario, table)
    outside = outside_bytes(scenario.software, scenario.cluster, table.plain())
    inside = exact - outside
    for share in (1.0, 10.0):
        enough = float(np.percentile(inside, share))
        found, _ = table_memory(scenario, table, enough)
        small = inside <= enough
        assert np.array_equal(found[small], exact[small])
        assert ((found - outside)[~small] > enough).all()
        assert (found <= exact).all()
        assert (found < exact).any()
