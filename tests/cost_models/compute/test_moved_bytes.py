"""What layers move beside their matmuls, and what collectives reach, each switched on and off."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cost_models.communication.seconds import achieved
from cost_models.compute import matmul
from cost_models.compute.adapters import adapter_bytes_per_token, adapter_wait
from cost_models.compute.casts import autocast_bytes_per_token, cast_bytes_per_token
from cost_models.compute.elementwise import (
    ElementwiseWork,
    bias_elements,
    elementwise_bytes_per_token,
    loop_bytes,
)
from cost_models.compute.layer import LayerWork, PassSeconds, dequantised_bytes, layer_seconds
from cost_models.compute.matmul import matmul_seconds
from cost_models.compute.matrices import matrices_seconds
from cost_models.compute.rates import Rates
from cost_models.model.lora import adapted, first_adapters
from cost_models.model.spec import LayerKind
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.pricing.estimate import price
from cost_models.step_time.tensor_parallel_overlap import chunked_seconds
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.cluster.schema import Figure
from hardware_profiles.software.trainer import SoftwareProfile, software_profile
from tests.samples import make_scenario, sample_model

EAGER = software_profile("shardplan")
ONE_RANK: dict[str, Any] = {  # of layer_seconds: a 16-bit layer of which nothing is recomputed
    "tensor_parallel": 1,
    "sequence_parallel": False,
    "recompute_full": False,
    "recompute_core": False,
    "kernel": "flash",
    "compute_bytes": 2.0,
}


MEMORY_BOUND = Rates(1e30, 1e12, 0.0, False)  # bytes/s


def layer_of(
    kind: LayerKind, hidden: int, software: SoftwareProfile, rate: Rates = MEMORY_BOUND
) -> PassSeconds:
    """Return the seconds of a layer of 128 tokens."""
    return layer_seconds(
        LayerWork(kind, hidden, 128, 128.0, rate=rate, software=software, **ONE_RANK)
    )


def bytes_between(kind: LayerKind, hidden: int, compute_bytes: float = 2.0, **more: Any) -> float:
    """Return the bytes a token that operators between matrices and attention move."""
    software = more.pop("software", EAGER)
    work = ElementwiseWork(kind, hidden, compute_bytes, 1, False, software, **more)
    return float(sum(elementwise_bytes_per_token(work)))


def moved(name: str, compute_bytes: float = 2.0, dropout: bool = False, **changes: Any) -> float:
    model = sample_model(name)
    software = EAGER.changed({f"kernels.{name}": value for name, value in changes.items()})
    sizes = model.kinds[0], model.hidden_size, compute_bytes
    return bytes_between(*sizes, software=software, hidden_dropout=dropout)


def test_a_norm_that_is_written_out_moves_fp32() -> None:
    model = sample_model("llama")
    norms = model.kinds[0].num_norms * model.hidden_size
    # 16 bits: read to be cast, and so on: 18 accesses of 2 bytes; fp32: 11 of 4, as counted
    without = {"rms_norm_accesses": 0.0, "rms_norm_fp32_bytes": 0.0}
    assert moved("llama") - moved("llama", **without) == pytest.approx(36.0 * norms)
    assert moved("llama", 4.0) - moved("llama", 4.0, **without) == pytest.approx(44.0 * norms)


def test_an_activation_without_a_gate_is_read_and_written() -> None:
    model = sample_model("gpt2")
    assert not model.kinds[0].feed_forward.gated
    assert moved("gpt2") == moved("gpt2", activation_accesses=100.0)
    assert moved("llama") < moved("llama", activation_accesses=100.0)


def test_tokens_are_brought_to_their_experts_and_back() -> None:
    kind, hidden = sample_model("mixtral").kinds[0], sample_model("mixtral").hidden_size

    def bytes_of(ranks: int = 1, **changes: Any) -> float:
        changed = replace(kind, feed_forward=replace(kind.feed_forward, **changes))
        return bytes_between(changed, hidden, expert_parallel=ranks)

    routed = kind.feed_forward.experts_per_token
    dense = bytes_of(num_experts=0)
    assert bytes_of() - dense == pytest.approx(2.0 * (3 * routed + 1) * hidden)
    # experts of several ranks: ordered again behind the exchange, and on the way back
    assert bytes_of(4) - dense == pytest.approx(2.0 * (7 * routed + 1) * hidden)
    assert bytes_of(4, num_experts=0) == dense


def test_a_layer_counts_the_ranks_that_share_its_experts() -> None:
    kind, hidden = sample_model("mixtral").kinds[0], sample_model("mixtral").hidden_size
    rate = Rates(1e30, 1e12, 0.0, False)

    def moving(ranks: int) -> float:
        tokens = np.array([4096.0])
        pieces: dict[str, Any] = {"expert_parallel": ranks, "expert_tensor": 1}
        layer = layer_seconds(
            LayerWork(
                kind,
                hidden,
                1024,
                tokens,
                rate=rate,
                software=EAGER,
                **ONE_RANK,
                **pieces,
            )
        )
        matrices = matrices_seconds(
            kind.weights,
            tokens,
            1,
            2.0,
            rate,
            experts_per_token=kind.feed_forward.experts_per_token,
            **pieces,
        )
        return float((layer.forward - matrices.forward)[0])

    routed = kind.feed_forward.experts_per_token
    assert moving(4) - moving(1) == pytest.approx(2.0 * 4 * routed * hidden * 4096 / 1e12)


def test_dropout_on_its_own_is_two_and_a_half_accesses_of_each_residual() -> None:
    hidden = sample_model("gpt2").hidden_size
    more = moved("gpt2", dropout=True) - moved("gpt2")
    assert more == pytest.approx(2 * 2.5 * 2.0 * hidden)
    assert moved("gpt2", dropout=True, dropout_accesses=0.0) == moved("gpt2")


def test_adapters_are_scaled_and_added_and_4_bit_weights_unpacked() -> None:
    workload = Workload(128, 8, adapter="qlora", adapter_rank=8, adapter_targets="q")
    kind = adapted(sample_model("llama"), workload).kinds[0]
    (query,) = [w for w in kind.weights if w.quantised]
    outputs, inputs = query.shape
    software = EAGER.changed({"adapters.input_accesses": 3.0, "adapters.output_accesses": 5.0})
    there, back = adapter_bytes_per_token(kind, 2.0, 1, software, 1.0)
    assert there == 2.0 * (3.0 * inputs + 5.0 * outputs)
    assert back == 2.0 * 2.0 * outputs, "scaled again"
    assert float(dequantised_bytes(kind, 2.0, 1)) == 2.5 * query.numel
    assert float(dequantised_bytes(kind, 2.0, 2)) == 1.25 * query.numel
    plain = sample_model("llama").kinds[0]
    assert adapter_bytes_per_token(plain, 2.0, 1, software, 1.0) == (0.0, 0.0)
    assert float(dequantised_bytes(plain, 2.0, 1)) == 0.0


def test_fused_queries_keys_and_values_have_one_adapter() -> None:
    workload = Workload(128, 8, adapter="lora", adapter_rank=8, adapter_targets="q,k,v,o")
    kind = adapted(sample_model("llama"), workload).kinds[0]
    first = [w for w in kind.weights if w.is_adapter and "lora_A" in w.name]
    apart = EAGER.changed({"adapters.input_accesses": 2.0, "adapters.output_accesses": 0.0})
    fused = apart.changed({"adapters.of_fused_matrices": True})
    inputs = [w.shape[1] for w in first]
    assert adapter_bytes_per_token(kind, 2.0, 1, apart, 1.0)[0] == 4.0 * sum(inputs)
    assert adapter_bytes_per_token(kind, 2.0, 1, fused, 1.0)[0] == 4.0 * (inputs[0] + inputs[3])
    assert len(first_adapters(kind, of_fused_matrices=False)) == 4
    assert len(first_adapters(kind, of_fused_matrices=True)) == 2


def test_adapters_in_fp32_move_twice_as_much_cast_and_multiply_in_fp32() -> None:
    workload = Workload(128, 8, adapter="lora", adapter_rank=8, adapter_targets="q")
    model = sample_model("llama")
    kind = adapted(model, workload).kinds[0]
    ends = sum(max(weight.shape) for weight in kind.weights if weight.is_adapter)
    plain = EAGER.changed({"adapters.input_accesses": 3.0, "adapters.output_accesses": 3.0})
    single = plain.changed({"adapters.in_fp32": True})
    assert adapter_bytes_per_token(kind, 2.0, 1, plain, 1.0)[0] == 2.0 * 3.0 * ends
    assert adapter_bytes_per_token(kind, 2.0, 1, single, 1.0)[0] == (4.0 * 3.0 + 6.0) * ends
    same = [adapter_bytes_per_token(kind, 4.0, 1, software, 1.0) for software in (plain, single)]
    assert same[0] == same[1], "nothing to cast"
    rate = Rates(1e12, 1e30, 0.0, False, single=1e11)
    times = [layer_of(kind, model.hidden_size, software, rate) for software in (plain, single)]
    flops = 2.0 * 128.0 * 8.0 * ends
    assert float(times[1].forward - times[0].forward) == pytest.approx(flops * (1e-11 - 1e-12))


def test_hidden_states_in_fp32_are_cast_around_every_matrix() -> None:
    model = sample_model("llama")
    kind = model.kinds[0]
    attention, mlp = kind.attention, kind.feed_forward
    queries = attention.num_heads * attention.head_dim
    keys = attention.num_kv_heads * attention.head_dim
    ends = 4 * model.hidden_size + 2 * queries + 2 * keys
    ends += 3 * (model.hidden_size + mlp.ffn_hidden_size)
    casts = float(cast_bytes_per_token(kind, 2.0, 1))
    assert casts == 6.0 * ends
    times = [
        layer_of(kind, model.hidden_size, software)
        for software in (EAGER, EAGER.changed({"precision.fp32_hidden_states": True}))
    ]
    more = casts + moved("llama", 4.0) - moved("llama")
    assert float(times[1].forward - times[0].forward) == pytest.approx(more * 128.0 / 1e12)


def test_autocast_casts_what_reads_a_norm_and_leaves_what_matrices_give() -> None:
    """Queries, keys, values, gate and up each cast their input; every weight is cast once."""
    model = sample_model("llama")
    kind = model.kinds[0]
    casts = float(autocast_bytes_per_token(kind, 2.0, 1))
    assert casts == 6.0 * 5 * model.hidden_size
    changed = {"precision.fp32_hidden_states": True, "precision.autocasts_weights": True}
    times = [
        layer_of(kind, model.hidden_size, software) for software in (EAGER, EAGER.changed(changed))
    ]
    between = bytes_between(kind, model.hidden_size, 4.0, inner_bytes=2.0) - moved("llama")
    assert 0.0 < between < moved("llama", 4.0) - moved("llama")  # rotary, activation: 16 bits
    matrices = sum(weight.numel for weight in kind.weights if weight.role == "linear")
    more = 128.0 * (casts + between) + 6.0 * matrices
    assert float(times[1].forward - times[0].forward) == pytest.approx(more / 1e12)


def test_the_host_waits_at_adapters_that_are_groups_of_their_own() -> None:
    """peft's under FSDP1: 100 operators of 10 us around each; one device second hides them all."""
    workload = Workload(128, 8, adapter="lora", adapter_rank=8, adapter_targets="q,v")
    kind = adapted(sample_model("llama"), workload).kinds[0]
    starting = EAGER.host.group_operators * 1e-5
    empty, busy = (Rates(rate, 1e30, 1e-5, False) for rate in (1e30, 1e3))
    idle = float(adapter_wait(kind, 128.0, 1, 2.0, empty, EAGER))
    assert idle == pytest.approx(4 * starting), "both matrices of queries and of values"
    # as the frozen matrix before it hides the first group, as after a product of 2 m n k FLOP
    (query,) = (w for w in kind.weights if w.name == "self_attn.q_proj.weight")
    hidden = Rates(2.0 * 128.0 * query.numel / (10.0 * starting), 1e30, 1e-5, False)
    assert float(adapter_wait(kind, 128.0, 1, 2.0, hidden, EAGER)) < 3.1 * starting
    assert float(adapter_wait(kind, 128.0, 1, 2.0, busy, EAGER)) < 1e-9
    plain = sample_model("llama").kinds[0]
    assert float(adapter_wait(plain, 128.0, 1, 2.0, empty, EAGER)) == 0.0


def test_wrapped_adapters_cost_a_sharded_run_only() -> None:
    def host(plan: Plan, *, wraps: bool) -> float:
        scenario = make_scenario(
            "llama", "4xA100-80GB", adapter="lora", adapter_rank=8, adapter_targets="q,v"
        )
        scenario = replace(
            scenario,
            model=adapted(scenario.model, scenario.workload),
            software=scenario.software.changed({"sharding.adapters_apart": wraps}),
        )
        return float(price(scenario, PlanTable.from_plans([plan])).time.host[0])

    sharded, gradients, whole = (Plan(4, zero_stage=z, num_microbatches=4) for z in (3, 2, 0))
    assert host(sharded, wraps=True) > host(sharded, wraps=False)
    assert host(gradients, wraps=True) > host(gradients, wraps=False)
    assert host(whole, wraps=True) == host(whole, wraps=False)


def test_kernels_that_unpack_reach_a_part_of_the_memory_rate() -> None:
    workload = Workload(128, 8, adapter="qlora", adapter_rank=8, adapter_targets="q")
    model = sample_model("llama")
    kind = adapted(model, workload).kinds[0]

    def forward(software: SoftwareProfile) -> float:
        found = layer_of(kind, model.hidden_size, software)
        return float(found.forward)

    slow = EAGER.changed({"frozen.unpacking_share": 0.25})
    unpacked = float(dequantised_bytes(kind, 2.0, 1)) / 1e12
    assert forward(slow) - forward(EAGER) == pytest.approx(3.0 * unpacked)


def test_operators_unpack_by_way_of_int32_and_once() -> None:
    workload = Workload(128, 8, adapter="qlora", adapter_rank=8, adapter_targets="q")
    model = sample_model("llama")
    kind = adapted(model, workload).kinds[0]

    def passes(software: SoftwareProfile) -> tuple[float, float]:
        found = layer_of(kind, model.hidden_size, software)
        return float(found.forward), float(found.backward)

    unpacked = float(dequantised_bytes(kind, 2.0, 1)) / 1e12
    forward, backward = passes(EAGER)
    chain, kept = passes(EAGER.changed({"frozen.unpacks_by_operators": True}))
    assert chain - forward == pytest.approx(unpacked * 14.0 / 2.5)
    assert backward - kept == pytest.approx(unpacked)


def test_a_loop_over_experts_moves_whole_gradients_for_each() -> None:
    model = sample_model("mixtral")
    kind = model.kinds[0]
    experts, chosen = kind.feed_forward.num_experts, kind.feed_forward.experts_per_token
    times = [
        layer_of(kind, model.hidden_size, software)
        for software in (EAGER, EAGER.changed({"activations.experts_one_by_one": True}))
    ]
    one = 2.0 * 128.0 * model.hidden_size / 1e12
    assert float(times[1].forward - times[0].forward) == pytest.approx(4 * chosen * one)
    more = 4 * experts + 11 * chosen - 3 - 2 * (3 * chosen + 1)
    assert float(times[1].backward - times[0].backward) == pytest.approx(more * one)
    assert loop_bytes(sample_model("llama").kinds[0], 64, 2.0, EAGER) == (0.0, 0.0)


def test_small_tiles_read_their_operands_in_the_same_time_in_any_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = Rates(1e14, 1e15, 0.0, False, units=100.0)
    slow = structs.replace(fast, matmul=1e13, setup=0.1)

    def seconds(rate: Rates) -> float:
        return float(matmul_seconds(640.0, 1024.0, 640.0, 2.0, rate))

    read = [seconds(rate) for rate in (fast, slow)]
    monkeypatch.setattr(matmul, "OPERAND_TRAFFIC", 0.0)
    unread = [seconds(rate) for rate in (fast, slow)]
    # the slower the arithmetic, the less its operands matter
    assert read[0] / unread[0] > 1.2 > 1.1 > read[1] / unread[1] > 1.0


def test_networks_and_links_inside_a_node_reach_their_own_share() -> None:
    tiers = achieved(parse_cluster("2x8xA100-80GB"), 0.5, 0.9).tiers
    assert [tier.bandwidth.value for tier in tiers] == [150e9, 0.9 * 25e9]
    alone = achieved(parse_cluster("2x1xA100-80GB"), 0.5, 0.9).tiers
    assert (
        alone[-1].bandwidth.value == 0.9 * parse_cluster("2x1xA100-80GB").tiers[-1].bandwidth.value
    )
    mesh = achieved(parse_cluster("8xMI300X"), 0.5, 0.9).tiers[0]
    assert mesh.peer_bandwidth is not None
    assert mesh.peer_bandwidth.value == 32e9


def test_a_link_whose_share_was_measured_reaches_that() -> None:
    cards = parse_cluster("2x8xRTX-PRO-6000")
    cards = replace(cards, tiers=(cards.tiers[0], replace(cards.tiers[1], name="InfiniBand")))
    inside, between = achieved(cards, 0.5, 0.9).tiers
    assert inside.bandwidth.value == pytest.approx(0.645 * 63e9)
    assert between.bandwidth.value == pytest.approx(0.9 * cards.tiers[1].bandwidth.value)
    # of another link in its place nothing is known
    other = replace(cards, tiers=(replace(cards.tiers[0], name="NVLink"), cards.tiers[1]))
    assert achieved(other, 0.5, 0.9).tiers[0].bandwidth.value == 31.5e9
    measured = Figure(20e9, "measured", "nccl-tests")
    said = replace(cards, tiers=(replace(cards.tiers[0], bandwidth=measured), cards.tiers[1]))
    assert achieved(said, 0.5, 0.9).tiers[0].bandwidth.value == 10e9


def test_tcp_between_nodes_reaches_half_of_its_line_rate() -> None:
    cards = parse_cluster("2x8xRTX-4090")
    network = cards.tiers[1]
    assert network.name == "Ethernet"
    assert achieved(cards, 0.5, 0.9).tiers[1].bandwidth.value == 0.54 * network.bandwidth.value
    measured = Figure(5e9, "measured", "nccl-tests")
    said = replace(cards, tiers=(cards.tiers[0], replace(network, bandwidth=measured)))
    assert achieved(said, 0.5, 0.9).tiers[1].bandwidth.value == 4.5e9
    # 1.56 GB/s of a node, which TCP fills: as much as of any other network
    alone = achieved(parse_cluster("2x1xRTX-4090"), 0.5, 0.9)
    assert alone.tiers[-1].bandwidth.value == 0.9 * network.bandwidth.value


def test_collectives_in_chunks_leave_the_first_and_what_is_longer_than_the_matmuls() -> None:
    assert float(chunked_seconds(8.0, 100.0, 8.0, 0.25)) == pytest.approx(1.0 + 0.25 * 7.0)
    assert float(chunked_seconds(8.0, 2.0, 8.0, 0.0)) == pytest.approx(6.0)
    assert float(chunked_seconds(8.0, 0.0, 8.0, 0.25)) == 8.0
    assert float(chunked_seconds(0.0, 5.0, 1.0, 0.25)) == 0.0


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"overlap.chunked_tensor_traffic": True}, "tensor_communication"),
        ({"overlap.weight_gathers": True, "overlap.data_parallel": 1.0}, "data_communication"),
    ],
)
def test_what_is_hidden_is_not_waited_for(change: dict[str, Any], part: str) -> None:
    scenario = make_scenario(
        "llama", "2x8xA100-80GB", seq_len=1024, global_batch_size=64, software="megatron"
    )
    usual = scenario.software.changed({"overlap.data_parallel": 1.0, "host.operator_seconds": 0.0})
    plans = PlanTable.from_plans(
        [Plan(tensor_parallel=4, data_parallel=4, zero_stage=1, num_microbatches=16)]
    )
    times = [
        float(np.ravel(getattr(price(replace(scenario, software=s), plans).time, part))[0])
        for s in (usual, usual.changed(change))
    ]
    assert times[1] < times[0]


def test_biases_cost_what_reads_and_writes_them() -> None:
    gpt2 = sample_model("gpt2")
    (kind,), hidden = gpt2.kinds, gpt2.hidden_size
    # queries, keys and values, output, two of the MLP, each with a bias
    assert float(bias_elements(kind, 1)) == (3 + 1 + 4 + 1) * hidden
    assert float(bias_elements(kind, 2)) == (3 / 2 + 1 + 4 / 2 + 1) * hidden
    assert bias_elements(sample_model("llama").kinds[0], 1) == 0

    def passes(**changes: float) -> tuple[float, float]:
        software = EAGER.changed(
            {"kernels.bias_accesses": 0.0, "kernels.bias_gradient_accesses": 0.0}
        )
        layer = layer_seconds(
            LayerWork(
                kind,
                hidden,
                128,
                512.0,
                rate=Rates(1e30, 1e12, 0.0, False),
                software=software.changed({f"kernels.{k}": v for k, v in changes.items()}),
                **ONE_RANK,
            )
        )
        return float(layer.forward), float(layer.backward)

    once = 2.0 * 9 * hidden * 512 / 1e12
    forward, backward = passes()
    assert passes(bias_gradient_accesses=1.0) == pytest.approx((forward, backward + once))
    assert passes(bias_accesses=2.0) == pytest.approx((forward + 2 * once, backward))
