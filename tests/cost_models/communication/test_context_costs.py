"""Context parallelism: traffic worked out by hand, what a ring hides, what each rank holds."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.activations.live import live_activations
from cost_models.communication.context_parallel import (
    context_buffer_bytes_per_token,
    context_bytes_moved_per_token,
    context_launch_shares,
    exchanged_key_heads,
    exposed_context_seconds,
    sum_bytes,
)
from cost_models.communication.volumes import rank_traffic
from cost_models.memory.saved_tensors import saved_rows
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import CONTEXT_METHODS, Plan, PlanTable
from cost_models.plan.recompute import WORDS
from cost_models.plan.workload import Workload
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from hardware_profiles.software.trainer import software_profile
from tests.samples import llama, make_scenario, rank_view, sample_model

WORKLOAD = Workload(seq_len=64, global_batch_size=8)
RING = Plan(context_parallel=4, micro_batch_size=2, num_microbatches=4)


def traffic(plan: Plan, model: Any = None) -> dict[tuple[str, str], tuple[float, float]]:
    """Count and bytes of a plan without a pipeline, of what is not zero."""
    model = model or llama()
    found = rank_traffic(rank_view(model, WORKLOAD, None, plan))
    values = {key: (float(t.count[0]), float(t.size[0])) for key, t in found.items()}  # type: ignore[index]
    return {key: value for key, value in values.items() if value[0]}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["llama", "mixtral", "gpt2"])
def test_a_table_is_priced_as_its_rows(model: str) -> None:
    scenario = make_scenario(model, "2x4xH100-SXM", seq_len=512, global_batch_size=8)
    if scenario.model.attention_dropout:
        scenario = replace(scenario, model=replace(scenario.model, attention_dropout=0.0))
    plans = [
        Plan(
            data_parallel=2, context_parallel=4, context_parallel_method=method,  # type: ignore[arg-type]
            zero_stage=zero, recompute=recompute, dp_replicate=copies, num_microbatches=4,  # type: ignore[arg-type]
        )
        for method, zero, recompute, copies in itertools.product(
            CONTEXT_METHODS, (1, 3), (*WORDS, "modules:core_attn+mlp"), (1, 2)
        )
    ]  # fmt: skip
    table = price(scenario, PlanTable.from_plans(plans))
    for row, plan in enumerate(plans):
        alone = price(scenario, PlanTable.from_plans([plan]))
        assert table.step[row] == alone.step[0]
        assert table.peak[row] == alone.peak[0]


def test_a_ring_by_hand() -> None:
    """Keys and values go round but for one hop, forward and backward; gradients go all round."""
    model = llama()
    attention = model.kinds[0].attention
    elements = 2 * 16 * attention.num_kv_heads * 2 * attention.head_dim  # b s k (d + e)
    layers, m, n = model.num_layers, 4, 4
    found = traffic(RING)
    assert found["context", "send"] == (
        layers * m * (2 * (n - 1) + n),
        layers * m * (2 * (n - 1) * 2 * elements + n * 4 * elements),  # bf16, gradients in fp32
    )
    again = traffic(replace(RING, recompute="selective"))
    assert again["context", "send"][0] == layers * m * (3 * (n - 1) + n)
    assert ("context", "all_to_all") not in found


def test_allgather_and_ulysses_by_hand() -> None:
    model = llama()
    attention = model.kinds[0].attention
    a, k, d = attention.num_heads, attention.num_kv_heads, attention.head_dim
    times = model.num_layers * 4
    gathered = traffic(replace(RING, context_parallel_method="allgather"))
    whole = 2 * 64 * k * 2 * d
    assert gathered["context", "all_gather"] == (2 * times, 2 * times * 2 * whole)
    assert gathered["context", "reduce_scatter"] == (times, times * 4 * whole)
    exchanged = traffic(replace(RING, context_parallel_method="ulysses"))
    both = 2 * 2 * 16 * (a * d + 2 * k * d + a * d)
    assert exchanged["context", "all_to_all"] == (4 * times, 2 * times * both)


def test_ulysses_repeats_key_heads_until_every_rank_has_one() -> None:
    attention = llama(num_key_value_heads=2).kinds[0].attention
    table = PlanTable.from_plans([Plan(context_parallel=n) for n in (1, 2, 4, 8)])
    assert np.asarray(exchanged_key_heads(attention, table)).tolist() == [2, 2, 4, 8]


def test_messages_and_collectives_of_hidden_states_shrink_with_the_tokens() -> None:
    one = Plan(tensor_parallel=2, sequence_parallel=True, num_microbatches=2)
    two = replace(one, context_parallel=2)
    for key in (("tensor", "all_gather"), ("tensor", "reduce_scatter")):
        assert traffic(two)[key][1] == traffic(one)[key][1] / 2
    # ranks that share tokens share the weights too
    sharded = traffic(replace(two, zero_stage=3))
    assert sharded["data", "all_gather"][0] > 0


def test_a_long_ring_hides_behind_attention_and_a_short_one_does_not() -> None:
    def exposed(seq_len: int, method: str, cluster: str = "8xH100-SXM") -> float:
        scenario = make_scenario("llama-3-8b", cluster, seq_len=seq_len, global_batch_size=1)
        plan = Plan(context_parallel=8, context_parallel_method=method, zero_stage=3)  # type: ignore[arg-type]
        return float(price(scenario, PlanTable.from_plans([plan])).time.context_communication[0])  # type: ignore[index]

    assert exposed(4096, "ring") > 0
    # but for the last hop of the gradients nothing shows
    assert exposed(131072, "ring") < 0.15 * exposed(131072, "allgather")
    assert exposed(131072, "ulysses") > 0


def test_nothing_hides_on_a_cpu() -> None:
    view = rank_view(llama(), replace(WORKLOAD, precision="fp32"), None, RING)
    arguments = (np.array([1.0]), np.array([9.0]), np.array([9.0]), view)
    assert float(sum(exposed_context_seconds(*arguments, overlaps=False))[0]) == 1.0  # type: ignore[index]
    hidden = float(sum(exposed_context_seconds(*arguments, overlaps=True))[0])  # type: ignore[index]
    assert 0 < hidden < 0.2


@pytest.mark.parametrize("method", CONTEXT_METHODS)
def test_saved_activations_are_shared_out(method: str) -> None:
    scenario = make_scenario("llama-3-8b", "8xH100-SXM", seq_len=16384, global_batch_size=1)
    table = PlanTable.from_plans(
        [Plan(context_parallel=n, context_parallel_method=method) for n in (1, 4)]  # type: ignore[arg-type]
    )
    (rank,) = even_split_contents(scenario.model, 1, 1)
    rest, head = saved_rows(live_activations(RankView(scenario, table, rank)))
    one, four = np.asarray(rest.size + head.size).tolist()
    # ulysses keeps the output by heads and by tokens
    attention, layers = scenario.model.kinds[0].attention, scenario.model.num_layers
    output = 2 * layers * 16384 * attention.num_heads * attention.head_dim
    assert four == pytest.approx((one + output * (method == "ulysses")) / 4)


def test_time_of_the_layers_is_shared_out() -> None:
    """Exactly where the multiprocessors are unknown; tiles and waves may only add to a share."""

    def computing(context: int, *, tiles: bool) -> float:
        scenario: Scenario = make_scenario(
            "llama-3-8b", f"{context}xH100-SXM", seq_len=32768, global_batch_size=1
        )
        if not tiles:
            chip = replace(scenario.cluster.accelerator, compute_units=None)
            scenario = replace(scenario, cluster=replace(scenario.cluster, accelerator=chip))
        plan = Plan(context_parallel=context)
        return float(price(scenario, PlanTable.from_plans([plan])).time.compute[0])  # type: ignore[index]

    shared = 8 * computing(8, tiles=False) / computing(1, tiles=False)  # sums of blocks are added
    assert 1.0 < shared < 1.1
    assert shared <= 8 * computing(8, tiles=True) / computing(1, tiles=True) < 1.02 * shared


def test_sums_of_blocks_and_sorted_exchanges_move_bytes() -> None:
    attention = llama().kinds[0].attention
    a, k, d = attention.num_heads, attention.num_kv_heads, attention.head_dim

    def moved(method: str, n: int = 2) -> tuple[float, float]:
        plan = Plan(context_parallel=n, context_parallel_method=method)  # type: ignore[arg-type]
        found = context_bytes_moved_per_token(attention, 2.0, 4.0, PlanTable.from_plans([plan]))
        return float(found[0][0]), float(found[1][0])  # type: ignore[index]

    each = 1.75 * (2 + 2 * 4) + 4 + 2  # rows of two blocks, added in fp32 and cast
    assert moved("allgather") == (each * a * d, each * (a * d + 2 * k * d))
    assert moved("ring")[1] == moved("allgather")[1] + 2 * 3 * 4 * 2 * k * d
    assert moved("ulysses") == (4 * 2 * (2 * a * d + 2 * k * d),) * 2
    assert moved("ring", n=1) == (0.0, 0.0)


def test_the_ring_of_transformer_engine_passes_gradients_on_in_16_bits() -> None:
    executor, engine = (software_profile(name) for name in ("shardplan", "nemo"))
    assert (sum_bytes(2.0, executor), sum_bytes(2.0, engine)) == (4.0, 2.0)
    assert sum_bytes(4.0, engine) == 4.0


def test_every_block_of_a_ring_is_launched() -> None:
    plans = [Plan(context_parallel=n) for n in (1, 2, 4)]
    ahead, back = (np.asarray(one) for one in context_launch_shares(PlanTable.from_plans(plans)))
    assert (73 * (1 + ahead)).round().tolist() == [73, 131, 181]
    assert (135 * (1 + back)).round().tolist() == [135, 217, 291]


def test_experts_get_the_tokens_of_the_rank_only() -> None:
    mixtral = sample_model("mixtral")
    plan = Plan(4, zero_stage=1, expert_parallel=2)
    half = replace(plan, data_parallel=2, context_parallel=2)
    one, two = traffic(plan, mixtral), traffic(half, mixtral)
    assert two["expert", "all_to_all"][1] < one["expert", "all_to_all"][1]


def test_buffers_of_the_exchanges_by_hand() -> None:
    """Keys and values K, queries q and output o of a token, in bf16 and in fp32 sums."""
    attention = llama().kinds[0].attention
    width = attention.head_dim
    keys, query = 2 * attention.num_kv_heads * width, attention.num_heads * width

    def buffers(method: str) -> tuple[float, float]:
        plan = replace(RING, context_parallel_method=method)  # type: ignore[arg-type]
        found = context_buffer_bytes_per_token(attention, 2.0, 4.0, PlanTable.from_plans([plan]))
        return float(found[0][0]), float(found[1][0])

    assert buffers("ring") == (2 * 2 * keys + 6 * query, 2 * 6 * keys + 2 * keys + 6 * query)
    assert buffers("allgather") == (5 * 2 * keys + 6 * query, 4 * 6 * keys + 2 * keys + 6 * query)
    assert buffers("ulysses") == (4 * (query + keys), 8 * (query + keys))
