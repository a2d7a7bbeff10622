"""Host time of launches: synchronous ones, CUDA graphs, adapters, casts to 8 bits, the loop."""

from dataclasses import replace
from typing import Any

import pytest

from cost_models.compute.kernel_launch import (
    EAGER_CHUNK,
    EAGER_RULE,
    NORMS_OF_HEADS,
    WITHOUT_SEQUENCE_PARALLEL,
    operator_seconds,
)
from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.model.spec import ModelSpec
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.trainer import software_profile
from tests.samples import GPT3, rank_view, sample_model

SMALL = {**GPT3, "n_embd": 512, "n_head": 8, "n_layer": 12}


def host(software: str, figures: dict[str, Any] | None = None, **workload: Any) -> float:
    return step(software, figures, **workload)[1]


def step(
    software: str, figures: dict[str, Any] | None = None, wide: bool = False, **workload: Any
) -> tuple[float, float]:
    """Seconds of a step of a GPT on one H100, and of it the wait for the host."""
    config = GPT3 if wide else SMALL
    load = Workload(1024, 8, **{"precision": "bf16", **workload})
    scenario = Scenario(
        adapted(model_spec(config, name="gpt"), load),
        parse_cluster("1xH100-SXM"),
        load,
        software_profile(software).changed(figures or {}),
    )
    plan = Plan(micro_batch_size=8)
    priced = price(scenario, PlanTable.from_plans([plan]), [(0, config["n_layer"])])
    return float(priced.step[0]), float(priced.time.host[0])


def test_synchronous_launches_hide_nothing() -> None:
    """Every operator adds its host time and the way to the device, whatever the device does."""
    profile = software_profile("megatron").host
    operators = 12 * (profile.layer_operators_forward + profile.layer_operators_backward)
    operators += profile.microbatch_operators
    each = profile.operator_seconds + profile.launch_latency
    assert each == pytest.approx(47e-6)
    assert host("megatron+blocking-launches") == pytest.approx(operators * each, rel=1e-6)
    # where the device is busy, launching ahead hides almost all of it
    slower, waits = step("megatron+blocking-launches", wide=True)
    usual, hidden = step("megatron", wide=True)
    assert slower - usual == pytest.approx(waits - hidden)
    assert hidden < 0.05 * waits


def test_graphs_launch_a_layer_or_an_iteration_at_once() -> None:
    eager, layers, whole = (host(f"megatron{g}") for g in ("", "+layer-graphs", "+iteration-graph"))
    assert whole == 0.0
    assert 0.0 < layers < 0.2 * eager


def test_a_device_runs_dry_between_kernels() -> None:
    """Where it is busy: once an operator of both passes; not behind graphs or single launches."""
    none = {"host.gap_seconds": 0.0}
    profile = software_profile("hf-trainer").host
    layers = GPT3["n_layer"]
    operators = layers * (profile.layer_operators_forward + profile.layer_operators_backward)
    operators += profile.microbatch_operators
    longer = step("hf-trainer", wide=True)[0] - step("hf-trainer", none, wide=True)[0]
    assert longer == pytest.approx(profile.gap_seconds * operators, rel=0.05)
    compiled = software_profile("hf-trainer+compiled-layers").host
    assert 0.0 < compiled.gap_seconds < 0.5 * profile.gap_seconds
    for engine in ("iteration-graph", "layer-graphs", "blocking-launches"):
        assert step(f"hf-trainer+{engine}") == step(f"hf-trainer+{engine}", none)


@pytest.mark.parametrize(
    ("software", "wraps"),
    [("torch-compile", False), ("shardplan+compiled-layers", True), ("torch-trainer", True)],
)
def test_a_compiled_model_casts_without_wrappers(software: str, wraps: bool) -> None:
    """Where nothing is sharded: weights with a master copy, or 16-bit weights alone."""
    trainer = f"{software}+blocking-launches"
    profile = software_profile(trainer).host
    groups = 12 + 2  # with the embedding and the head
    each = profile.operator_seconds + profile.launch_latency
    more = host(trainer) - host(trainer, master_weights=False)
    assert more == pytest.approx(wraps * 2 * groups * profile.group_operators * each, abs=1e-9)


def test_adapters_and_casts_launch_operators_of_their_own() -> None:
    """Four adapters a layer nearly double the host's time under Megatron."""
    without = {"host.adapter_operators_forward": 0.0, "host.adapter_operators_backward": 0.0}
    lora = {"adapter": "lora", "adapter_rank": 8}
    grown = host("megatron", **lora) / host("megatron", without, **lora)
    assert 1.5 < grown < 2.2
    none = {"host.fp8_operators_forward": 0.0, "host.fp8_operators_backward": 0.0}
    assert host("megatron", precision="fp8") > host("megatron", none, precision="fp8")
    assert host("megatron", none) == host("megatron")


def cut_host(
    profile: str,
    ranks: int,
    figures: dict[str, Any] | None = None,
    biases: bool = False,
    kind: str = "llama",
    **plan: Any,
) -> float:
    """Seconds that a micro-batch of a small Llama on two cards waits for the host."""
    llama = {**MIXTURE, "model_type": kind, "attention_bias": biases}
    scenario = Scenario(
        model_spec({k: v for k, v in llama.items() if k not in EXPERTS}, name=kind),
        parse_cluster("1x8xH100-SXM"),
        Workload(1024, 8 // ranks, precision="bf16"),
        software_profile(f"{profile}+blocking-launches").changed(figures or {}),
    )
    cut = Plan(**{"tensor_parallel": ranks, "data_parallel": 8 // ranks, **plan})
    return float(price(scenario, PlanTable.from_plans([cut]), [(0, 4)]).time.host[0])


def test_tensors_of_dtensor_cost_the_host_more_than_the_layer_does() -> None:
    """Eager torch cuts matrices with DTensor; compiled programs and Megatron do without."""
    host = software_profile("eager-fsdp2").host
    each = host.operator_seconds + host.launch_latency
    both = host.dtensor_operators_forward + host.dtensor_operators_backward
    norms = cut_host("eager-fsdp2", 2, sequence_parallel=True)
    matrices = cut_host("eager-fsdp2", 2)
    whole = cut_host("eager-fsdp2", 1)
    assert norms - whole == pytest.approx(4 * 7 * both * each, rel=1e-6)
    assert (matrices - whole) / (norms - whole) == pytest.approx(WITHOUT_SEQUENCE_PARALLEL)
    assert norms > 2.0 * whole
    of_heads = {"sequence_parallel": True, "kind": "qwen3"}
    more = cut_host("eager-fsdp2", 2, **of_heads) - cut_host("eager-fsdp2", 1, kind="qwen3")
    assert more / (norms - whole) == pytest.approx((7 + NORMS_OF_HEADS) / 7)
    for without in ("torchtitan", "torch-trainer+compiled-model", "torch-trainer+deepspeed-zero1"):
        assert cut_host(without, 2) == pytest.approx(cut_host(without, 1), rel=1e-6)


def test_hooks_of_deepspeed_cost_the_host_more_than_a_layer_does() -> None:
    """Modules gather weights in every pass, biases too; stages 1 and 2 hook gradients only."""
    host = software_profile("torch-trainer+deepspeed-zero3").host
    each = host.operator_seconds + host.launch_latency
    without = {f"host.hook_operators_{name}": 0.0 for name in ("forward", "backward")}
    forward, backward = host.hook_operators_forward, host.hook_operators_backward
    for recompute, passes in (("none", forward), ("full", 2 * forward)):
        plan = {"data_parallel": 8, "zero_stage": 3, "recompute": recompute}
        hooked = cut_host("torch-trainer+deepspeed-zero3", 1, **plan)
        plain = cut_host("torch-trainer+deepspeed-zero3", 1, figures=without, **plan)
        assert hooked - plain == pytest.approx(4 * 9 * (passes + backward) * each, rel=1e-6)
        assert hooked > 4.0 * plain
        assert cut_host("torch-trainer+deepspeed-zero3", 1, biases=True, **plan) == hooked
    zero2 = {"data_parallel": 8, "zero_stage": 2}
    hooked = cut_host("torch-trainer+deepspeed-zero2", 1, **zero2)
    plain = cut_host("torch-trainer+deepspeed-zero2", 1, figures=without, **zero2)
    assert hooked - plain == pytest.approx(4 * 9 * 30.0 * each, rel=1e-6)
    biased = cut_host("torch-trainer+deepspeed-zero2", 1, biases=True, **zero2)
    assert biased - hooked == pytest.approx(4 * 4 * 30.0 * each, rel=1e-6)


EXPERTS = ("num_local_experts", "num_experts_per_tok")
MIXTURE = {
    "model_type": "mixtral",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1024,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
}


def mixture_host(ranks: int, figures: dict[str, Any] | None = None) -> float:
    """Seconds that a micro-batch of a small mixture waits for the host, if nothing hides them."""
    load = Workload(1024, 2 * ranks, precision="bf16")
    scenario = Scenario(
        model_spec(MIXTURE, name="mixture"),
        parse_cluster("1x8xH100-SXM"),
        load,
        software_profile("megatron+blocking-launches").changed(figures or {}),
    )
    plan = Plan(data_parallel=8, expert_parallel=ranks, micro_batch_size=2 * ranks // 8)
    return float(price(scenario, PlanTable.from_plans([plan]), [(0, 4)]).time.host[0])


def test_routing_launches_operators_and_each_expert_of_a_rank_its_own() -> None:
    """A routed layer launches three quarters more than one with an MLP; half the experts less."""
    names = ("routing_operators_forward", "routing_operators_backward")
    own = ("expert_operators_forward", "expert_operators_backward")
    none = {f"host.{name}": 0.0 for name in (*names, *own)}
    profile = software_profile("megatron").host
    each = profile.operator_seconds + profile.launch_latency
    routed = sum(getattr(profile, name) for name in names)
    experts = sum(getattr(profile, name) for name in own)
    for ranks in (4, 8):
        added = mixture_host(ranks) - mixture_host(ranks, none)
        assert added == pytest.approx(4 * (routed + 16 / ranks * experts) * each, rel=1e-6)


def test_frozen_experts_launch_as_many_operators_backward_as_forward() -> None:
    """Gradients of their weights are neither computed nor handed to hooks."""
    mixture = sample_model("mixtral")
    (kind,) = mixture.kinds
    weights = tuple(replace(weight, frozen=weight.is_routed_expert) for weight in kind.weights)
    frozen = replace(mixture, kinds=(replace(kind, weights=weights),))
    (rank,) = even_split_contents(mixture, 1, 1)
    software, table = software_profile("megatron"), PlanTable.from_plans([Plan()])
    trained, left = (
        operator_seconds(rank_view(model, Workload(64, 1), software, table, rank), 1.0)
        for model in (mixture, frozen)
    )
    host = software.host
    fewer = host.expert_operators_backward - host.expert_operators_forward
    experts = mixture.num_layers * mixture.kinds[0].feed_forward.num_experts
    assert float((trained[1] - left[1])[0]) == pytest.approx(experts * fewer)
    assert float(trained[0][0]) == float(left[0][0])


def test_the_loop_adds_its_seconds_to_every_step() -> None:
    at_rest = step("torch-trainer", {"host.step_seconds": 0.0})[0]
    assert step("torch-trainer")[0] - at_rest == pytest.approx(4e-3)


@pytest.mark.parametrize("trainer", ["torch-trainer", "nemo"])
def test_gated_delta_rules_launch_kernels_of_their_own_and_chunks_without_them(
    trainer: str,
) -> None:
    spec = sample_model("qwen3-next-80b-a3b")
    linear = [kind.attention.delta_rule is not None for kind in spec.kinds].index(True)
    plain = tuple(
        replace(kind, attention=replace(kind.attention, delta_rule=None)) for kind in spec.kinds
    )
    rules = spec.pattern.count(linear)
    profile, table = software_profile(trainer), PlanTable.from_plans([Plan()])
    (rank,) = even_split_contents(spec, 1, 1)

    def launched(model: ModelSpec, kernel: str) -> tuple[float, float]:
        load = Workload(256, 1, attention_kernel=kernel)
        passes = operator_seconds(rank_view(model, load, profile, table, rank), 1.0)
        return float(passes[0][0]), float(passes[1][0])

    host = profile.host
    for at, own in enumerate((host.rule_operators_forward, host.rule_operators_backward)):
        fused, without = launched(spec, "flash")[at], launched(replace(spec, kinds=plain), "flash")
        assert fused - without[at] == pytest.approx(rules * own)
        written_out = (
            launched(spec, "eager")[at] - launched(replace(spec, kinds=plain), "eager")[at]
        )
        chunks = 256 / 64
        each = own + EAGER_RULE[at] + EAGER_CHUNK[at] * chunks
        assert written_out == pytest.approx(rules * each)
