from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.legality.rules import (
    CODES,
    MANY,
    RULES,
    legality_codes,
    require_legal,
)
from cost_models.model.families import model_spec
from cost_models.model.freezing import with_frozen_parts
from cost_models.model.spec import ModelSpec
from cost_models.plan.plan import SCHEDULES, Plan, PlanTable
from cost_models.plan.recompute import RECOMPUTE
from cost_models.plan.workload import Workload
from cost_models.pricing.estimate import price
from cost_models.pricing.simulated_steps import simulated_steps
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from tests.samples import CONFIGS, llama, make_scenario, sample_model

LEGAL = Plan(
    data_parallel=2,
    tensor_parallel=2,
    pipeline_parallel=2,
    zero_stage=1,
    sequence_parallel=True,
    micro_batch_size=2,
    num_microbatches=4,
)
GPT2 = {"model_type": "gpt2", "n_positions": 512, "n_embd": 64, "n_head": 8, "n_layer": 6}
SIX_KEY_HEADS = {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6}
FIRST = "embedding,layers:0-3"  # all of the first of two stages
NARROW_MLP = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 132}

# rule: (changes of the legal plan, changes of the scenario, words that must be said)
BREAKS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "world_size": ({}, {"num_gpus": 16}, ["2 x tensor_parallel 2", "= 8", "16 ranks"]),
    "global_batch_size": ({"micro_batch_size": 3}, {}, ["3 x", "= 24", "is 16"]),
    "num_heads": (
        {"tensor_parallel": 16},
        {"num_gpus": 64, "model": llama(num_key_value_heads=8)},
        ["tensor_parallel = 16", "num_heads = 8", "1, 2, 4, 8"],
    ),
    "num_kv_heads": (
        {"tensor_parallel": 8},
        {"num_gpus": 32},
        ["tensor_parallel = 8", "num_kv_heads = 4", "1, 2, 4"],
    ),
    "ffn_hidden_size": (
        {"tensor_parallel": 8},
        {"num_gpus": 32, "model": llama(**NARROW_MLP)},
        ["tensor_parallel = 8", "ffn_hidden_size = 132", "1, 2, 3, 4, 6"],
    ),
    "expert_ffn_hidden_size": (
        {"tensor_parallel": 8},
        {"num_gpus": 32, "model": sample_model("mixtral", **NARROW_MLP)},
        ["tensor_parallel = 8", "experts' ffn_hidden_size = 132", "expert_tensor_parallel off"],
    ),
    "sequence_parallel_alone": (
        {"tensor_parallel": 1, "data_parallel": 4, "num_microbatches": 2},
        {},
        ["tensor_parallel >= 2"],
    ),
    "sequence_length": ({}, {"seq_len": 255}, ["tensor_parallel = 2", "seq_len = 255"]),
    "num_layers": (
        {"pipeline_parallel": 9, "num_microbatches": 9},
        {"num_gpus": 36, "batch": 36},
        ["pipeline_parallel 9", "9 stages", "8 layers"],
    ),
    "stage_layers": (
        {},
        {"layer_ranges": ((0, 2), (2, 4), (4, 8))},
        ["given for 3 stages", "pipeline_parallel 2 x virtual_stages 1 = 2 stages"],
    ),
    "recompute_layers_alone": (
        {"recompute_layers": 2},
        {},
        ["recompute_layers = 2", "needs recompute selective or full"],
    ),
    "recompute_offload": (
        {"recompute": "selective_ops", "offload": "activations"},
        {},
        ["selective_ops with offload activations", "cannot leave the device"],
    ),
    "recompute_encoder_decoder": (
        {"recompute": "selective_ops"},
        {"model": sample_model("t5")},
        ["selective_ops", "encoder-decoder", "must be none, selective or full"],
    ),
    "recompute_every": (
        {"recompute": "full", "recompute_layers": 1, "recompute_every": 5},
        {},
        ["recompute full:1/5", "smallest of 2 stages has 4 layers"],
    ),
    "stage_recompute_layers": (
        {"recompute": "full"},
        {"by_stage": (2, 5)},
        ["recompute_layers = 2,5", "stage 1 has 4 layers"],
    ),
    "stage_recompute_layers_alone": (
        {"recompute": "full", "recompute_layers": 2},
        {"by_stage": (2, 1)},
        ["for each stage and as 2 for all", "choose one"],
    ),
    "recompute_layers": (
        {"recompute": "full", "recompute_layers": 5},
        {},
        ["recompute_layers = 5", "smallest of 2 stages has 4 layers"],
    ),
    "virtual_stages": ({"virtual_stages": 2}, {}, ["1f1b", "virtual_stages = 2"]),
    "schedule_microbatches": (
        {"num_microbatches": 1, "micro_batch_size": 8},
        {},
        ["1f1b needs num_microbatches >= 2", "got 1"],
    ),
    "interleaved_microbatches": (
        {
            "virtual_stages": 2,
            "pipeline_schedule": "interleaved_1f1b",
            "num_microbatches": 3,
        },
        {"batch": 12},
        ["multiple of pipeline_parallel", "3 and 2"],
    ),
    "pipeline_schedule": (
        {"pipeline_schedule": "zero_bubble"},
        {"splits_backward": False},
        ["zero_bubble", "allowed: gpipe, 1f1b, interleaved_1f1b)"],
    ),
    "zero_alone": (
        {"data_parallel": 1, "micro_batch_size": 4},
        {"num_gpus": 4},
        ["zero_stage = 1", "data_parallel >= 2"],
    ),
    "zero_stage": ({"zero_stage": 2}, {"largest_zero_stage": 1}, ["zero_stage = 2", "stage 1"]),
    "projected_gradients": (
        {},
        {"optimizer": "galore_adamw"},
        ["galore_adamw projects gradients of whole matrices", "zero_stage 0", "got 1"],
    ),
    "offload_weights": (
        {"zero_stage": 2, "offload": "weights"},
        {},
        ["offload weights", "zero_stage 3 (got 2)"],
    ),
    "offload_device": (
        {"offload": "activations", "offload_device": "nvme"},
        {},
        ["offload_device = nvme", "got activations"],
    ),
    "zero_plus_plus": (
        {"zero_stage": 1, "quantised_weights": True},
        {},
        ["ZeRO++", "zero_stage 3 (got 1)"],
    ),
    "secondary_ranks": (
        {"zero_stage": 3, "secondary_ranks": 3},
        {},
        ["secondary_ranks = 3", "the 2 ranks", "1, 2"],
    ),
    "context_attention": (
        {"context_parallel": 2, "pipeline_parallel": 1, "context_parallel_method": "ulysses"},
        {"model": sample_model("t5")},
        ["context_parallel = 2", "causal", "t5"],
    ),
    "context_linear_attention": (
        {"context_parallel": 2, "pipeline_parallel": 1},
        {"model": sample_model("qwen3-next-80b-a3b")},
        ["context_parallel = 2", "linear attention", "qwen3-next-80b-a3b", "must be 1"],
    ),
    "context_length": (
        {"context_parallel": 2, "sequence_parallel": False},
        {"num_gpus": 16, "seq_len": 250},
        ["ring", "into 4 equal chunks", "seq_len = 250"],
    ),
    "context_heads": (
        {"context_parallel": 3, "context_parallel_method": "ulysses"},
        {"num_gpus": 24, "seq_len": 252, "model": llama(num_key_value_heads=2)},
        ["context_parallel 3", "num_heads = 8", "1, 2, 4, 8"],
    ),
    "context_kv_heads": (
        {"context_parallel": 2, "context_parallel_method": "ulysses", "tensor_parallel": 2},
        {
            "num_gpus": 16,
            "model": llama(**SIX_KEY_HEADS),
        },
        ["num_kv_heads / tensor_parallel = 3", "context_parallel = 2"],
    ),
    "context_dropout": (
        {"context_parallel": 2},
        {"num_gpus": 16, "model": model_spec(GPT2, name="g")},
        ["ring", "0.1", "ulysses"],
    ),
    "dp_replicate": (
        {"dp_replicate": 3},
        {},
        ["dp_replicate = 3", "data_parallel = 2", "legal values: 1, 2"],
    ),
    "dp_replicate_alone": (
        {"dp_replicate": 2},
        {},
        ["dp_replicate = 2", "zero_stage >= 1", "(got 1)"],
    ),
    "without_experts": ({"expert_parallel": 2}, {}, ["expert_parallel = 2", "no experts"]),
    "expert_parallel": (
        {"expert_parallel": 3, "data_parallel": 6, "num_microbatches": 4},
        {"model": sample_model("mixtral"), "num_gpus": 24, "batch": 48},
        ["expert_parallel = 3", "num_experts = 4", "legal values: 1, 2, 4"],
    ),
    "expert_ranks": (
        {"expert_parallel": 4},
        {"model": sample_model("mixtral")},
        ["expert_parallel = 4", "2 ranks", "legal values: 1, 2"],
    ),
    "expert_tokens": (
        {"expert_tensor_parallel": False, "sequence_parallel": False},
        {"model": sample_model("mixtral"), "seq_len": 255},
        ["expert_tensor_parallel off", "seq_len = 255"],
    ),
    "adapter_experts": (
        {},
        {"model": sample_model("mixtral"), "adapter": "lora"},
        ["adapter lora", "routed experts", "must be attention"],
    ),
    "autocast": (
        {},
        {"adapter": "lora", "autocasts": True},
        ["adapter = lora", "fp32 weights", "--software hf-trainer"],
    ),
    "cast": (
        {"data_parallel": 1, "micro_batch_size": 4, "zero_stage": 0},
        {"num_gpus": 4, "software": "eager-fsdp2"},
        ["precision bf16", "is 1 with 4 ranks", "must be precision fp32"],
    ),
    "freeze": (
        {"offload": "weights", "zero_stage": 3},
        {"freeze": "norms"},
        ["freeze = norms", "offload weights"],
    ),
    "freeze_stages": (
        {},
        {"model": with_frozen_parts(llama(), FIRST), "freeze": FIRST},
        [f"freeze = {FIRST}", "stage 0 of 2 (layers 0 to 3)", "pipeline_parallel 2"],
    ),
    "fp8": (
        {"tensor_parallel": 2, "data_parallel": 2},
        {"precision": "fp8"},
        ["tensor_parallel 2", "fp8 only for whole matrices", "--software megatron"],
    ),
    "fp8_lengths": (
        {
            "tensor_parallel": 1,
            "data_parallel": 4,
            "num_microbatches": 2,
            "sequence_parallel": False,
        },
        {"precision": "fp8", "seq_len": 251},
        ["502 tokens of a micro-batch", "multiples of 16"],
    ),
    "positions": ({}, {"model": model_spec(GPT2, name="g"), "seq_len": 1024}, ["1024", "512"]),
    "trainer": ({}, {"software": "hf-trainer"}, ["Hugging Face Trainer", "pipeline_parallel = 2"]),
}


def test_targets_are_split_along_the_sequence_too() -> None:
    scenario = make_scenario("t5", "2xA100-80GB", global_batch_size=1, target_seq_len=63)
    plan = Plan(tensor_parallel=2, sequence_parallel=True)
    with pytest.raises(InputError, match="tensor_parallel = 2 does not divide target_seq_len = 63"):
        require_legal(scenario, plan)
    workload = replace(scenario.workload, target_seq_len=64)
    require_legal(replace(scenario, workload=workload), plan)


def test_fp8_needs_suitable_lengths_of_targets_too() -> None:
    options = {"seq_len": 512, "global_batch_size": 4, "precision": "fp8"}
    plan = Plan(micro_batch_size=4)
    scenario = make_scenario("t5-small", "1xH100-SXM", **options, target_seq_len=114)
    with pytest.raises(InputError, match="2048 and 456 tokens of a micro-batch"):
        require_legal(scenario, plan)
    workload = replace(scenario.workload, target_seq_len=112)
    require_legal(replace(scenario, workload=workload), plan)


def asked(
    model: ModelSpec | None = None,
    num_gpus: int = 8,
    seq_len: int = 256,
    batch: int = 16,
    largest_zero_stage: int = 3,
    splits_backward: bool = True,
    adapter: Any = "none",
    layer_ranges: Any = None,
    by_stage: Any = None,
    freeze: str = "",
    precision: Any = "bf16",
    optimizer: Any = "adamw",
    autocasts: bool = False,
    software: str = "shardplan",
) -> Scenario:
    rank = 0 if adapter == "none" else 4
    adapters: Any = {"adapter": adapter, "adapter_rank": rank}
    workload = Workload(seq_len, batch, precision, optimizer, freeze=freeze, **adapters)
    profile = software_profile(software).changed(
        {
            "sharding.largest_zero_stage": largest_zero_stage,
            "pipeline.splits_backward": splits_backward,
            "precision.autocasts_weights": autocasts,
        }
    )
    return Scenario(
        model or llama(),
        parse_cluster("8xA100-80GB"),
        workload,
        profile,
        layer_ranges,
        by_stage,
        num_ranks=num_gpus,
    )


def broken_rules(scenario: Scenario, plan: Plan) -> list[str]:
    table = PlanTable.from_plans([plan])
    return [rule.code for rule in RULES if np.ravel(rule.broken(scenario, table))[0]]


def test_the_legal_plan_is_legal() -> None:
    assert broken_rules(asked(), LEGAL) == []
    require_legal(asked(), LEGAL)


def test_the_smallest_pinned_stage_bounds_what_is_recomputed() -> None:
    plan = replace(LEGAL, recompute="full", recompute_layers=3)
    assert broken_rules(asked(layer_ranges=((0, 3), (3, 8))), plan) == []
    uneven = asked(layer_ranges=((0, 2), (2, 8)))
    with pytest.raises(InputError, match="smallest of 2 stages has 2 layers"):
        require_legal(uneven, plan)


@pytest.mark.parametrize(
    ("changes", "about", "said"),
    [
        (
            {"recompute": "none"},
            {"by_stage": (2, 1)},
            "recompute_layers = 2,1 selects the recomputed layers",
        ),
        ({}, {"by_stage": (2, 1, 1)}, "3 numbers for 2 stages"),
        ({}, {"by_stage": (4, 1)}, None),
        ({}, {"by_stage": (4, 1), "layer_ranges": ((0, 2), (2, 8))}, "stage 0 has 2 layers"),
        ({}, {"by_stage": (0, 6), "layer_ranges": ((0, 2), (2, 8))}, None),
        ({"recompute_every": 2}, {}, "recompute full:0/2"),
        ({"recompute_layers": 3, "recompute_every": 2}, {}, "recompute full:3/2"),
        ({"recompute_layers": 2, "recompute_every": 4}, {}, None),
    ],
)
def test_which_layers_can_be_recomputed(changes: Any, about: Any, said: str | None) -> None:
    plan = replace(LEGAL, **{"recompute": "full", **changes})
    if said is None:
        require_legal(asked(**about), plan)
        return
    with pytest.raises(InputError, match=said):
        require_legal(asked(**about), plan)


def test_every_rule_has_an_example() -> None:
    assert list(BREAKS) == [rule.code for rule in RULES]
    assert ("legal", *BREAKS) == CODES


def test_what_is_not_cast_may_be_in_fp32_or_in_16_bits_from_the_start() -> None:
    """torchtitan casts by fully_shard alone; shards and a single rank are cast."""
    unsharded = replace(LEGAL, data_parallel=1, micro_batch_size=4, zero_stage=0)
    for changes in ({"precision": "fp32"}, {"master_weights": False}):
        scenario = asked(num_gpus=4, software="eager-fsdp2")
        workload = replace(scenario.workload, **changes)
        assert broken_rules(replace(scenario, workload=workload), unsharded) == []
    assert broken_rules(asked(software="eager-fsdp2"), LEGAL) == []


@pytest.mark.parametrize("code", BREAKS)
def test_a_plan_that_breaks_just_this_rule(code: str) -> None:
    changes, about, words = BREAKS[code]
    scenario, plan = asked(**about), replace(LEGAL, **changes)
    # key-value heads divide the heads: what does not divide these does not divide those
    implied = ["num_kv_heads"] if code == "num_heads" else []
    assert broken_rules(scenario, plan) == [code, *implied]
    position = int(legality_codes(scenario, PlanTable.from_plans([plan]))[0])
    assert CODES[position] == code
    with pytest.raises(InputError) as caught:
        require_legal(scenario, plan)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("code", BREAKS)
def test_each_rule_judges_a_large_table_as_it_judges_one_plan(code: str) -> None:
    """In large tables rules see columns of distinct values."""
    changes, of_question, _ = BREAKS[code]
    scenario, plans = asked(**of_question), [replace(LEGAL, **changes), Plan()]
    alone = [int(legality_codes(scenario, PlanTable.from_plans([plan]))[0]) for plan in plans]
    many = PlanTable.from_plans(plans).rows(np.arange(2 * MANY) % 2)
    assert legality_codes(scenario, many).tolist() == alone * MANY


def test_the_legal_values_in_the_words_are_legal() -> None:
    """Of two rules about tensor parallelism the stricter one speaks."""
    scenario = asked(num_gpus=32)
    with pytest.raises(InputError, match=r"num_kv_heads = 4; legal values: 1, 2, 4$"):
        require_legal(scenario, replace(LEGAL, tensor_parallel=8))


# --- once more, one plan at a time in plain Python ------------------------------------------------


def first_broken(scenario: Scenario, plan: Plan) -> str:
    model, batch = scenario.model, scenario.workload.global_batch_size
    t, p, v, m = (
        plan.tensor_parallel,
        plan.pipeline_parallel,
        plan.virtual_stages,
        plan.num_microbatches,
    )
    attentions = [k.attention for k in model.kinds]
    attentions += [k.cross_attention for k in model.kinds if k.cross_attention is not None]
    if plan.data_parallel * t * p != scenario.world_size:
        return "world_size"
    if plan.micro_batch_size * m * plan.data_parallel != batch:
        return "global_batch_size"
    if any(a.num_heads % t for a in attentions):
        return "num_heads"
    if any(a.num_kv_heads % t for a in attentions):
        return "num_kv_heads"
    for kind in model.kinds:
        sizes = kind.feed_forward
        dense = 0 if sizes.num_experts else sizes.ffn_hidden_size
        if dense % t or sizes.shared_ffn_hidden_size % t:
            return "ffn_hidden_size"
    experts = [k.feed_forward for k in model.kinds if k.feed_forward.num_experts]
    if plan.expert_tensor_parallel and any(e.ffn_hidden_size % t for e in experts):
        return "expert_ffn_hidden_size"
    if plan.sequence_parallel and t == 1:
        return "sequence_parallel_alone"
    if plan.sequence_parallel and scenario.workload.seq_len % t:
        return "sequence_length"
    if p * v > model.num_layers:
        return "num_layers"
    plain = ("none", "selective", "full")
    if plan.recompute not in plain and any(k.cross_attention for k in model.kinds):
        return "recompute_encoder_decoder"
    schedule = plan.pipeline_schedule
    several = {"zbv": (2,), "dualpipev": (2,)}
    several |= dict.fromkeys(("interleaved_1f1b", "interleaved_zero_bubble"), (2, 3))
    if v not in several.get(schedule, (1,)) or (v > 1 and p == 1):
        return "virtual_stages"
    of_1f1b = {"any": 1, "ranks - 1": p - 1, "ranks": p}
    few = of_1f1b[scenario.software.pipeline.fewest_microbatches]
    fewest = {"1f1b": few, "zero_bubble": p, "zbv": 2 * p - 1, "dualpipev": 2 * p}
    if p > 1 and m < fewest.get(schedule, 1):
        return "schedule_microbatches"
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and m % p:
        return "interleaved_microbatches"
    if schedule not in SCHEDULES[:3] and not scenario.software.pipeline.splits_backward:
        return "pipeline_schedule"
    if plan.zero_stage and plan.data_parallel == 1:
        return "zero_alone"
    if not experts and (plan.expert_parallel > 1 or not plan.expert_tensor_parallel):
        return "without_experts"
    if any(e.num_experts % plan.expert_parallel for e in experts):
        return "expert_parallel"
    if plan.data_parallel * (1 if plan.expert_tensor_parallel else t) % plan.expert_parallel:
        return "expert_ranks"
    splits = not plan.expert_tensor_parallel and not plan.sequence_parallel
    if splits and scenario.workload.seq_len % t:
        return "expert_tokens"
    if model.max_seq_len_is_hard and scenario.workload.seq_len > (model.max_seq_len or 0):
        return "positions"
    return "legal"


@pytest.mark.parametrize(
    ("software", "fewest"), [("shardplan", 4), ("nanotron", 3), ("megatron-core", 1)]
)
def test_the_trainer_says_how_few_micro_batches_1f1b_takes(software: str, fewest: int) -> None:
    scenario = make_scenario("llama", "4xA100-80GB", global_batch_size=12, software=software)
    for count in (1, 2, 3, 4):
        plan = Plan(pipeline_parallel=4, num_microbatches=count, micro_batch_size=12 // count)
        (code,) = legality_codes(scenario, PlanTable.from_plans([plan]))
        assert (CODES[code] == "schedule_microbatches") is (count < fewest), count


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("splits_backward", [True, False])
def test_codes_equal_a_plain_python_walk(name: str, splits_backward: bool) -> None:
    random = np.random.default_rng(1)
    scenario = make_scenario(name, seq_len=252, global_batch_size=12)
    software = scenario.software.changed(
        {
            "pipeline.splits_backward": splits_backward,
            "pipeline.fewest_microbatches": "ranks" if splits_backward else "any",
        }
    )
    scenario = replace(scenario, software=software, num_ranks=12)

    def some(values: Any) -> Any:
        value = random.choice(values)
        return value.item()

    plans = [
        Plan(
            data_parallel=some([1, 2, 3, 4, 6, 12]),
            tensor_parallel=some([1, 1, 2, 3, 4]),
            pipeline_parallel=some([1, 1, 2, 3, 4, 12]),
            virtual_stages=some([1, 1, 2, 3]),
            pipeline_schedule=some(SCHEDULES),
            zero_stage=some([0, 1, 2, 3]),
            sequence_parallel=some([True, False]),
            recompute=some([*RECOMPUTE[:5], RECOMPUTE[-1]]),
            micro_batch_size=some([1, 1, 2, 3]),
            num_microbatches=some([1, 2, 3, 4, 6, 12]),
            expert_parallel=some([1, 1, 1, 1, 2, 3, 4]),
            expert_tensor_parallel=some([True, True, True, True, False]),
        )
        for _ in range(3000)
    ]
    # most random plans break one of the first two rules: mend those of half of them
    mended = [
        replace(
            plan,
            data_parallel=12 // (plan.tensor_parallel * plan.pipeline_parallel),
            micro_batch_size=1,
            num_microbatches=plan.tensor_parallel * plan.pipeline_parallel,
        )
        for plan in plans[::2]
        if 12 % (plan.tensor_parallel * plan.pipeline_parallel) == 0
    ]
    table = PlanTable.from_plans(plans + mended)
    found = [CODES[code] for code in legality_codes(scenario, table)]
    assert found == [first_broken(scenario, plan) for plan in plans + mended]
    assert found.count("legal") > 20
    assert len(set(found)) >= 6


def test_require_legal_agrees_with_the_codes() -> None:
    scenario = asked()
    for schedule in SCHEDULES:
        plan = replace(LEGAL, pipeline_schedule=schedule)
        code = int(legality_codes(scenario, PlanTable.from_plans([plan]))[0])
        if code:
            with pytest.raises(InputError):
                require_legal(scenario, plan)
        else:
            require_legal(scenario, plan)


def test_megatron_runs_fewer_micro_batches_than_ranks_and_torch_does_not() -> None:
    """Its warm-up ends with the last micro-batch: the order is that of GPipe, as is the step."""
    plans = [
        Plan(data_parallel=1, pipeline_parallel=8, num_microbatches=2, pipeline_schedule=schedule)
        for schedule in ("1f1b", "gpipe")
    ]
    settings = {
        software: make_scenario("llama", "8xA100-80GB", global_batch_size=2, software=software)
        for software in ("megatron+any-plan", "shardplan")
    }
    legal = {
        name: legality_codes(one, PlanTable.from_plans(plans)).tolist()
        for name, one in settings.items()
    }
    assert legal == {
        "megatron+any-plan": [0, 0],
        "shardplan": [CODES.index("schedule_microbatches"), 0],
    }
    priced = price(settings["megatron+any-plan"], PlanTable.from_plans(plans))
    assert priced.step[0] == pytest.approx(priced.step[1], rel=0.002)
    assert priced.peak[0] == pytest.approx(priced.peak[1], rel=0.002)
    simulated = simulated_steps(settings["megatron+any-plan"], PlanTable.from_plans(plans))
    assert (simulated >= priced.step * (1.0 - 1e-12)).all()


@pytest.mark.parametrize("offload", ["optimizer", "weights"])
def test_one_rank_may_offload_at_any_stage_of_zero(offload: str) -> None:
    scenario = make_scenario("llama", "1xA100-80GB", global_batch_size=1)
    plan = Plan(zero_stage=3, offload=offload)  # type: ignore[arg-type]
    require_legal(scenario, plan)
    with pytest.raises(InputError, match="zero_stage = 3 shards"):
        require_legal(scenario, replace(plan, offload="none"))
    with pytest.raises(InputError, match="zero_stage = 3 shards"):
        require_legal(scenario, replace(plan, offload="activations"))
