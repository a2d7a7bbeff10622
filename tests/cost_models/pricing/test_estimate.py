"""All formulas together: a table against its rows, extreme sizes, and what cannot decrease."""

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cost_models.activations import saved as activations
from cost_models.activations.layer import backward_working_bytes_per_token
from cost_models.activations.logits import logits_bytes_per_token
from cost_models.communication import ring_and_tree as collectives
from cost_models.compute import elementwise, flops
from cost_models.compute import layer as compute
from cost_models.compute.head import head_seconds
from cost_models.compute.rates import Rates
from cost_models.legality.rules import legality_codes
from cost_models.memory import model_states, optimizer_states
from cost_models.memory.ledger import total
from cost_models.memory.peak import rank_timeline
from cost_models.model import parameters
from cost_models.model.families import model_spec
from cost_models.partition import in_flight
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.partition.rank_view import RankView
from cost_models.partition.schedules import SPLIT_CODES
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import SCHEDULES, Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.pricing.estimate import (
    PredictionTable,
    price,
    rank_communication,
    rank_memories,
    throughput,
)
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Cluster
from hardware_profiles.software.trainer import software_profile
from tests.samples import (
    CONFIGS,
    all_plans,
    bubble_fraction,
    columns,
    legal_table,
    llama,
    make_scenario,
    sample_model,
)

SLACK = 1 + 1e-12  # of sums whose terms are added in another order
SETTINGS = [
    ("llama", "8xA100-80GB", 256, 16, "shardplan", "flash"),
    ("llama tied", "2x4xH100-SXM", 128, 16, "megatron", "eager"),
    ("gpt2", "8xA100-80GB", 64, 32, "shardplan", "eager"),
    ("mixtral", "4xA100-80GB", 64, 8, "megatron", "flash"),
    ("qwen3", "6xA100-80GB", 120, 12, "shardplan", "flash"),
    ("t5", "8xA100-80GB", 64, 16, "shardplan", "eager"),
]


def all_columns(priced: PredictionTable) -> dict[str, np.ndarray]:
    return {
        **{f"memory.{k}": v for k, v in columns(priced.memory).items()},
        **{f"time.{k}": v for k, v in columns(priced.time).items()},
        "limiting_rank": priced.limiting_rank,
        "slowest_rank": priced.slowest_rank,
        "moment": priced.moment,
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", SETTINGS, ids=lambda key: key[0])
def test_a_table_costs_what_its_rows_cost_alone(key: Any) -> None:
    """The law: bit for bit, in any order of rows."""
    scenario, table = legal_table(key)
    rows = np.random.default_rng(0).permutation(len(table))[:75]
    together = all_columns(price(scenario, table.rows(rows)))
    assert len(rows) >= 60
    for position, row in enumerate(rows):
        alone = all_columns(price(scenario, PlanTable.from_plans([table.plan(int(row))])))
        for name, column in together.items():
            assert column[position] == alone[name][0], (name, table.plan(int(row)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", SETTINGS, ids=lambda key: key[0])
def test_every_part_is_finite_and_not_negative(key: Any) -> None:
    scenario, table = legal_table(key)
    priced = price(scenario, table)
    for name, column in all_columns(priced).items():
        assert column.shape == (len(table),)
        assert np.isfinite(column).all(), name
        assert (column >= 0).all(), name
    assert (priced.peak > 0).all()
    assert (priced.step > 0).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", SETTINGS, ids=lambda key: key[0])
def test_parts_add_up(key: Any) -> None:
    scenario, table = legal_table(key)
    priced = price(scenario, table)
    np.testing.assert_allclose(sum(columns(priced.memory).values()), priced.peak, rtol=1e-12)
    np.testing.assert_allclose(sum(columns(priced.time).values()), priced.step, rtol=1e-12)


@pytest.mark.slow
def test_the_limiting_stage_is_the_fullest_rank() -> None:
    scenario, table = legal_table(SETTINGS[0])
    priced = price(scenario, table)
    for row in range(0, len(table), 23):
        plan = table.plan(row)
        ranks = rank_memories(scenario, plan, default_layer_ranges(scenario, plan))
        peaks = [float(parts.peak) for parts, _ in ranks]
        assert len(peaks) == plan.pipeline_parallel
        assert priced.limiting_rank[row] == int(np.argmax(peaks)), plan
        assert priced.peak[row] == max(peaks), plan


@pytest.mark.slow
def test_explicit_layer_ranges_equal_to_the_even_split_change_nothing() -> None:
    scenario, table = legal_table(SETTINGS[0])
    for row in range(0, len(table), 41):
        plan = table.plan(row)
        one = PlanTable.from_plans([plan])
        even = all_columns(price(scenario, one))
        given = all_columns(price(scenario, one, default_layer_ranges(scenario, plan)))
        assert even == given


def test_uneven_layers_cost_more_time_and_memory() -> None:
    scenario = make_scenario("llama", "4xA100-80GB")
    plan = Plan(pipeline_parallel=4, num_microbatches=16)
    table = PlanTable.from_plans([plan])
    even = price(scenario, table)
    uneven = price(scenario, table, [(0, 5), (5, 6), (6, 7), (7, 8)])
    assert uneven.limiting_rank[0] == 0
    assert uneven.slowest_rank[0] == 0
    assert uneven.peak[0] > even.peak[0]
    assert uneven.step[0] > even.step[0]


# --- extreme sizes ------------------------------------------------------------------------------


def huge_model() -> Any:
    """About 10^13 parameters: an int64 product of them with FLOPs or tokens would overflow."""
    return model_spec(
        {
            "model_type": "llama",
            "vocab_size": 10**6,
            "hidden_size": 2**16,
            "intermediate_size": 2**18,
            "num_hidden_layers": 160,
            "num_attention_heads": 512,
            "num_key_value_heads": 512,
            "max_position_embeddings": 10**8,
        },
        name="huge",
    )


@pytest.mark.parametrize("kernel", ["flash", "eager"])
def test_extreme_sizes_stay_finite_and_positive(kernel: str) -> None:
    model = huge_model()
    assert model.num_parameters > 10**13
    scenario = make_scenario(
        model,
        "125000x8xA100-80GB",
        seq_len=10**8 - 10**8 % 1024,
        global_batch_size=10**7,
        attention_kernel=kernel,
    )
    plans = [
        Plan(data_parallel=10**6, micro_batch_size=10, zero_stage=3),
        Plan(data_parallel=10**6, num_microbatches=10, zero_stage=0, recompute="full"),
        Plan(
            data_parallel=3125,
            tensor_parallel=64,
            pipeline_parallel=5,
            zero_stage=1,
            sequence_parallel=True,
            num_microbatches=3200,
        ),
    ]
    table = PlanTable.from_plans(plans)
    assert not legality_codes(scenario, table.rows(np.array([0, 1]))).any()
    priced = price(scenario, table)
    for name, column in all_columns(priced).items():
        assert np.isfinite(column).all(), name
        assert (column >= 0).all(), name
    assert (priced.step > 1).all()
    assert (priced.peak > 2**40).all()
    for row, step in enumerate(priced.step):
        _, mfu = throughput(scenario, table.plan(row), float(step))
        assert mfu is not None
        assert 0 < mfu <= 1


def test_a_tiny_model_on_one_gpu() -> None:
    model = llama(
        vocab_size=1,
        hidden_size=2,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    scenario = make_scenario(model, "1xA100-80GB", seq_len=1, global_batch_size=1)
    priced = price(scenario, PlanTable.from_plans([Plan()]))
    assert np.isfinite(priced.step).all()
    assert priced.time.bubble[0] == priced.time.data_communication[0] == 0
    assert priced.time.tensor_communication[0] == priced.time.pipeline_communication[0] == 0


# --- more of anything -----------------------------------------------------------------------------


def priced_with(scenario: Any, table: PlanTable, **changes: Any) -> PredictionTable:
    return price(replace(scenario, **changes), table)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", SETTINGS, ids=lambda key: key[0])
def test_longer_sequences_need_more(key: Any) -> None:
    scenario, table = legal_table(key)
    longer = replace(scenario.workload, seq_len=2 * scenario.workload.seq_len)
    before, after = price(scenario, table), priced_with(scenario, table, workload=longer)
    assert (after.peak >= before.peak).all()  # equal where the optimizer step is the peak
    assert (after.peak > before.peak).any()
    assert (after.step > before.step).any()
    # where the host sets the pace, more work in the weights' half may fill the pipeline better
    slack = np.where(np.isin(table.pipeline_schedule, SPLIT_CODES), 1.05, SLACK)
    assert (after.step * slack >= before.step).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", SETTINGS, ids=lambda key: key[0])
def test_less_recomputation_needs_more_memory_and_less_computation(key: Any) -> None:
    scenario, table = legal_table(key)
    none, selective, full = (
        price(scenario, replace(table, recompute=np.full(len(table), code))) for code in range(3)
    )
    assert (none.peak * SLACK >= selective.peak).all()
    # one layer alone is recomputed beside its input: dropping it saves nothing
    several = scenario.model.num_layers >= 2 * table.pipeline_parallel
    # what is recomputed for weight gradients that come later stays until then
    slack = np.where(np.isin(table.pipeline_schedule, SPLIT_CODES), 1.01, SLACK)
    assert (selective.peak * slack >= full.peak)[several].all()
    assert (full.peak < none.peak).any()
    assert (none.time.recompute == 0).all()
    assert (selective.time.recompute <= full.time.recompute * SLACK).all()
    assert (full.time.recompute > 0).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", SETTINGS, ids=lambda key: key[0])
def test_larger_micro_batches_need_more_memory(key: Any) -> None:
    scenario, table = legal_table(key)
    larger = replace(table, micro_batch_size=2 * table.micro_batch_size)
    before, after = price(scenario, table).peak, price(scenario, larger).peak
    assert (after >= before).all()
    assert (after > before).any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("key", SETTINGS, ids=lambda key: key[0])
def test_more_ranks_never_hold_more_states(key: Any) -> None:
    scenario, table = legal_table(key)
    table = table.rows(table.pipeline_parallel == 1)  # one rank, so that the same one is compared

    def states(other: PlanTable) -> np.ndarray:
        memory = price(scenario, other).memory
        return np.asarray(memory.weights + memory.optimizer)

    before = states(table)
    for name in ("data_parallel", "tensor_parallel"):
        more = states(replace(table, **{name: 2 * getattr(table, name)}))
        assert (more <= before * SLACK).all(), name


@pytest.mark.parametrize("key", SETTINGS, ids=lambda key: key[0])
def test_a_higher_zero_stage_never_holds_more_states(key: Any) -> None:
    scenario, table = legal_table(key)
    table = table.rows((table.pipeline_parallel == 1) & (table.recompute_layers == 0))
    (rank,) = even_split_contents(scenario.model, 1, 1)
    by_stage = []
    for stage in range(4):
        moments = rank_timeline(
            RankView(scenario, replace(table, zero_stage=np.full(len(table), stage)), rank)
        )
        by_stage.append(np.stack([parts.weights + parts.optimizer for parts in moments]))
    sharded = np.asarray(table.data_parallel > 1)
    for lower, higher in pairwise(by_stage):  # at the moment when all is there
        assert (higher.max(axis=0)[sharded] <= lower.max(axis=0)[sharded] * SLACK).all()


def faster(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with every link faster by a factor."""
    tiers = tuple(
        replace(
            tier,
            bandwidth=replace(tier.bandwidth, value=factor * tier.bandwidth.value),
            latency=replace(tier.latency, value=tier.latency.value / factor),
        )
        for tier in cluster.tiers
    )
    return replace(cluster, tiers=tiers)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", SETTINGS, ids=lambda key: key[0])
def test_faster_links_and_chips_are_never_slower(key: Any) -> None:
    scenario, table = legal_table(key)
    before = price(scenario, table).step
    links = priced_with(scenario, table, cluster=faster(scenario.cluster, 2.0)).step
    assert (links <= before * SLACK).all()
    assert (links < before).any()
    chip = scenario.cluster.accelerator
    quick = replace(
        chip,
        memory_bandwidth=replace(chip.memory_bandwidth, value=2 * chip.memory_bandwidth.value),
        peak_flops={k: replace(v, value=2 * v.value) for k, v in chip.peak_flops.items()},
        achievable_flops={
            k: replace(v, value=2 * v.value) for k, v in chip.achievable_flops.items()
        },
    )
    chips = priced_with(scenario, table, cluster=replace(scenario.cluster, accelerator=quick)).step
    assert (chips <= before * SLACK).all()


def test_links_that_cost_nothing_leave_only_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cost_models.communication.seconds.COLLECTIVE_START", 0.0)
    scenario, table = legal_table(SETTINGS[0])
    free = priced_with(scenario, table, cluster=faster(scenario.cluster, 1e30)).time
    for part in (free.tensor_communication, free.pipeline_communication, free.data_communication):
        assert (part < 1e-12).all()


# --- reports on one plan --------------------------------------------------------------------------


def test_model_flop_utilisation_is_model_flops_over_what_the_chips_could_do() -> None:
    scenario = make_scenario("llama-3-8b", "8xA100-80GB", seq_len=8192, global_batch_size=8)
    plan = Plan(data_parallel=8, zero_stage=3)
    tokens, mfu = throughput(scenario, plan, 10.0)
    assert tokens == 8192 * 8 / 8 / 10.0
    # 6 N D, and 12 h s for each layer and token of attention scores; the embedding multiplies none
    model = scenario.model
    per_token = 6 * (model.num_parameters - 128256 * 4096 - 65 * 4096) + 12 * 4096 * 8192 * 32
    assert mfu == pytest.approx(per_token * 8192 * 8 / 10.0 / (8 * 312e12), rel=1e-9)


def test_communication_of_one_rank_alone_is_none() -> None:
    scenario = make_scenario("llama", "1xA100-80GB")
    traffic = rank_communication(scenario, Plan(num_microbatches=16), [(0, 8)])
    assert all(float(t.count[0]) == 0 for t in traffic[0].values())  # type: ignore[index]


def test_every_sample_has_legal_plans_of_every_kind() -> None:
    """The tests above mean something only if their tables hold all kinds of plans."""
    assert {key[0] for key in SETTINGS} == set(CONFIGS)
    _, table = legal_table(SETTINGS[0])
    assert set(np.unique(table.pipeline_schedule)) == set(range(len(SCHEDULES)))
    assert set(np.unique(table.zero_stage)) == {0, 1, 2, 3}
    assert len(np.unique(table.tensor_parallel)) > 2
    assert table.sequence_parallel.any()
    assert not table.sequence_parallel.all()


def test_all_plans_include_illegal_ones() -> None:
    scenario = make_scenario("llama", "8xA100-80GB")
    table = PlanTable.from_plans(list(all_plans(scenario)))
    codes = legality_codes(scenario, table)
    assert 0 < np.sum(codes == 0) < len(table)
    assert parse_cluster("8xA100-80GB").num_gpus == 8


# --- the law for each public formula --------------------------------------------------------------


def formulas() -> dict[str, Callable[[PlanTable], Any]]:
    """Every formula that takes columns, as a function of a table of plans."""
    model = sample_model("llama tied")
    kind = model.kinds[0]
    software = software_profile("shardplan")
    rate = Rates(matmul=2e14, memory=1e12, operator=1e-5, host_is_device=False)
    states = (2.0, 4.0)

    def tokens(t: PlanTable) -> Any:
        return 256.0 * t.micro_batch_size

    regions = activations.layer_regions(
        replace(model, hidden_dropout=0.1, attention_dropout=0.1),
        Workload(256, 1, attention_kernel="eager"),
        software,
        kind,
    )

    def saved(t: PlanTable) -> Any:
        return activations.saved_bytes_per_token(
            regions,
            model.hidden_size,
            compute_bytes=2.0,
            tensor_parallel=t.tensor_parallel,
            sequence_parallel=t.sequence_parallel,
            recompute=t.recompute,
            keeps_gathered_inputs=True,
        )

    def layer(t: PlanTable, part: str) -> Any:
        seconds = compute.layer_seconds(
            compute.LayerWork(
                kind,
                model.hidden_size,
                256,
                tokens(t),
                tensor_parallel=t.tensor_parallel,
                sequence_parallel=t.sequence_parallel,
                recompute_full=t.recompute == 2,
                recompute_core=t.recompute == 1,
                kernel="eager",
                compute_bytes=2.0,
                rate=rate,
                software=software,
            )
        )
        return getattr(seconds, part)

    return {
        "weight_rows": lambda t: total(
            model_states.weight_rows(1e9, t.data_parallel, t.zero_stage, *states)
        ),
        "quantised_state_bytes": lambda t: (
            optimizer_states.quantised_state_bytes(1e5 / t.data_parallel, 2.0, 8)[1]
            + optimizer_states.quantised_state_bytes(1e5 / t.data_parallel, 2.0, 8)[0]
        ),
        "factored_numel": lambda t: optimizer_states.factored_numel(
            (1.0, 4096.0 / t.data_parallel, 11008.0 / t.tensor_parallel)
        ),
        "accumulated_gradients": lambda t: (
            model_states.accumulated_gradients(
                1e9,
                t.data_parallel,
                t.zero_stage,
                4.0,
                accumulates=t.num_microbatches > 1,
                defers_reduction=t.pipeline_parallel > 1,
            ).size
        ),
        "reduced_gradients": lambda t: (
            model_states.reduced_gradients(1e9, t.data_parallel, t.zero_stage, 4.0).size
        ),
        "ring_all_gather": lambda t: collectives.ring_all_gather(1e9, t.data_parallel, 1e11, 1e-5),
        "ring_all_reduce": lambda t: collectives.ring_all_reduce(1e9, t.data_parallel, 1e11, 1e-5),
        "tree_all_reduce": lambda t: collectives.tree_all_reduce(1e9, t.data_parallel, 1e11, 1e-5),
        "all_reduce": lambda t: collectives.all_reduce(1e5, t.data_parallel, 1e11, 1e-5),
        "in_flight_1f1b": lambda t: in_flight.in_flight_1f1b(
            t.num_microbatches, t.pipeline_parallel, 0
        ),
        "in_flight_gpipe": lambda t: in_flight.in_flight_gpipe(t.num_microbatches),
        "in_flight_interleaved": lambda t: in_flight.in_flight_interleaved(
            t.num_microbatches, t.pipeline_parallel, t.virtual_stages, 0
        ),
        "peaks_zero_bubble": lambda t: in_flight.peaks_zero_bubble(
            t.num_microbatches, t.pipeline_parallel, t.virtual_stages, 1
        )[1][0],
        "peaks_zbv": lambda t: in_flight.peaks_zbv(t.pipeline_parallel, 1)[2][1],
        "peaks_dualpipev": lambda t: in_flight.peaks_dualpipev(t.pipeline_parallel, 1)[1][0],
        "due_bytes_per_token": lambda t: activations.due_bytes_per_token(
            kind, regions, 64, 2.0, t.tensor_parallel, t.sequence_parallel
        ),
        "bubble_fraction": lambda t: bubble_fraction(
            t.num_microbatches, t.pipeline_parallel, t.virtual_stages
        ),
        "shard_numel": lambda t: parameters.shard_numel(kind.weights[0], t.tensor_parallel),
        "kind_numel": lambda t: parameters.kind_numel(kind, t.tensor_parallel),
        "block_numel": lambda t: parameters.block_numel(model.head, t.tensor_parallel),
        "saved_bytes_per_token": saved,
        "backward_working_bytes_per_token": lambda t: backward_working_bytes_per_token(
            kind, model.hidden_size, 2.0, t.tensor_parallel, software
        ),
        "logits_bytes_per_token": lambda t: (
            logits_bytes_per_token(512, 2.0, t.tensor_parallel, software).backward
        ),
        "layer forward": lambda t: layer(t, "forward"),
        "layer backward": lambda t: layer(t, "backward"),
        "layer recompute": lambda t: layer(t, "recompute"),
        "head_seconds": lambda t: (
            head_seconds(model, tokens(t), t.tensor_parallel, 2.0, rate, software).forward
        ),
        "optimizer_seconds": lambda t: elementwise.optimizer_seconds(
            1e9 / t.data_parallel, rate, software.optimizer.moved_bytes
        ),
        "model_flops_per_step": lambda t: flops.model_flops_per_step(
            model, 256, t.micro_batch_size * t.data_parallel
        ),
    }


@pytest.mark.parametrize("name", formulas())
def test_a_formula_prices_a_column_as_it_prices_numbers(name: str) -> None:
    formula = formulas()[name]
    _, table = legal_table(SETTINGS[1])
    rows = table.rows(np.random.default_rng(2).permutation(len(table))[:100])
    together = np.broadcast_to(formula(rows), len(rows))
    assert together.dtype == np.float64
    for row in range(len(rows)):
        values = {f.name: getattr(rows, f.name)[row].item() for f in fields(PlanTable)}
        numbers = PlanTable(**values)
        assert float(formula(numbers)) == together[row], rows.plan(row)
