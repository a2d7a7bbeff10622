"""Parts of a full model that are not trained: what is named, and what it saves."""

from dataclasses import replace

import numpy as np
import pytest

from cost_models.activations.live import layer_bytes
from cost_models.compute.flops import (
    forward_only_flops_per_token,
    frozen_flops_per_token,
    model_flops_per_step,
)
from cost_models.legality.frozen_rules import untrained_stage
from cost_models.legality.rules import CODES, legality_codes
from cost_models.memory.fsdp.fsdp1 import units
from cost_models.model.freezing import (
    with_frozen_parts,
    with_trained_layers,
    without_adapters_before,
)
from cost_models.model.lora import adapted, trainable_part
from cost_models.model.spec import ModelSpec
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload, check_freeze
from cost_models.pricing.estimate import PredictionTable, price
from cost_models.scenario import Scenario
from hardware_profiles.errors import InputError
from tests.samples import make_scenario, rank_view, sample_model


def frozen(freeze: str, name: str = "llama", **changes: int) -> ModelSpec:
    return with_frozen_parts(sample_model(name, **changes), check_freeze(freeze, "freeze"))


def priced(
    freeze: str, plan: Plan | None = None, **options: str
) -> tuple[Scenario, PredictionTable]:
    plan = plan or Plan(data_parallel=8, zero_stage=3, num_microbatches=2)
    scenario = make_scenario("llama-3.2-1b", seq_len=2048, global_batch_size=16, **options)
    workload = replace(scenario.workload, freeze=freeze)
    scenario = replace(scenario, workload=workload, model=adapted(scenario.model, workload))
    return scenario, price(scenario, PlanTable.from_plans([plan]))


def test_names_are_put_in_order() -> None:
    assert check_freeze(" layers:0-3 ,embedding", "freeze") == "embedding,layers:0-3"
    assert check_freeze("", "freeze") == ""


@pytest.mark.parametrize(
    "text", ["layers", "layers:3-1", "layers:-1-2", "embeddings", "norms,,head", "norms,norms"]
)
def test_wrong_names_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(InputError, match="freeze"):
        check_freeze(text, "freeze")


@pytest.mark.parametrize(
    ("freeze", "name", "words"),
    [
        ("layers:0-99", "llama", "has layers 0 to"),
        ("all-but-head,head", "llama", "no parameter of .* is left to train"),
        ("head", "llama tied", "its embedding; name embedding,head or neither"),
        ("all-but-head", "llama tied", "which trains both"),
        ("layers:0-1", "t5", "an encoder and a decoder"),
    ],
)
def test_what_a_model_cannot_freeze_says_why(freeze: str, name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        frozen(freeze, name)


def test_each_part_is_counted_by_hand() -> None:
    model = sample_model("llama")
    layer = sum(w.numel for w in model.kinds[0].weights)
    norms = sum(w.numel for w in model.kinds[0].weights if w.part == "norm")
    table, h = model.vocab_size * model.hidden_size, model.hidden_size
    for freeze, less in (
        ("embedding", table),
        ("head", table + h),  # and its norm
        ("norms", model.num_layers * norms + h),
        ("layers:1-2", 2 * layer),
        ("all-but-head", table + model.num_layers * layer),
    ):
        found = frozen(freeze)
        assert found.num_trainable_parameters == model.num_parameters - less, freeze
        assert trainable_part(found).num_parameters == found.num_trainable_parameters
        assert found.num_parameters == model.num_parameters


def test_layers_below_the_first_trained_one_are_idle() -> None:
    def idle(freeze: str) -> list[bool]:
        model = frozen(freeze)
        return [model.kinds[kind].forward_only for kind in model.pattern]

    layers = sample_model("llama").num_layers
    assert idle("embedding,layers:0-1") == [True, True] + [False] * (layers - 2)
    assert not any(idle("layers:0-1"))  # the embedding below them is trained
    assert not any(idle("embedding,layers:1-2"))
    assert idle("embedding,layers:0-0,layers:2-2") == [True] + [False] * (layers - 1)
    assert all(idle("all-but-head"))


def test_adapters_from_a_layer_on_leave_those_below_idle() -> None:
    scenario = make_scenario("llama-3.2-1b", seq_len=2048, global_batch_size=1)
    workload = replace(scenario.workload, adapter="lora", adapter_rank=8)
    every = adapted(scenario.model, workload)
    above = without_adapters_before(every, 4)
    assert [above.kinds[index].forward_only for index in above.pattern] == [True] * 4 + [False] * 12
    adapters = every.num_trainable_parameters
    assert above.num_trainable_parameters == adapters * 12 // 16
    assert above.num_parameters == every.num_parameters - adapters * 4 // 16
    assert without_adapters_before(every, 0) == every
    (rank,) = even_split_contents(every, 1, 1)
    (kept,) = even_split_contents(above, 1, 1)
    whole, less = (
        float(
            np.ravel(layer_bytes(rank_view(model, workload, scenario.software, Plan(), one))[0])[0]
        )
        for model, one in ((every, rank), (above, kept))
    )
    assert less == pytest.approx(whole * 12 / 16)


def test_a_tied_table_stays_tied_where_it_is_trained() -> None:
    assert trainable_part(frozen("layers:0-0", "llama tied")).tie_embeddings
    assert not trainable_part(frozen("embedding,head", "llama tied")).tie_embeddings


def test_flops_by_hand() -> None:
    """6 N a token: 2 forward everywhere; 2 less for a frozen matrix, 4 for one in an idle layer."""
    model, s = sample_model("llama"), 64
    linear = sum(2.0 * w.numel for w in model.kinds[0].weights if w.role == "linear")
    core = 4.0 * s * model.hidden_size
    whole = float(model_flops_per_step(model, s, 1)) / s
    for freeze, less in (
        ("layers:0-1", 2 * linear),
        ("embedding,layers:0-1", 2 * (2 * linear + 2 * core)),
        ("head", 2.0 * model.vocab_size * model.hidden_size),
    ):
        found = frozen(freeze)
        assert whole - float(model_flops_per_step(found, s, 1)) / s == pytest.approx(less), freeze
    assert frozen_flops_per_token(model) == float(forward_only_flops_per_token(model, s)) == 0.0


def test_memory_by_hand() -> None:
    """Mixed precision, ZeRO-3 on 8: 12 bytes over 8 of what is trained, 2 bytes of the rest."""
    scenario, found = priced("embedding,head,layers:0-7")
    trained = scenario.model.num_trainable_parameters
    rest = scenario.model.num_parameters - trained
    memory = found.memory
    assert float(memory.weights[0]) == pytest.approx(4.0 * trained / 8 + 2.0 * rest)  # type: ignore[index]
    assert float(memory.optimizer[0]) == pytest.approx(8.0 * trained / 8)  # type: ignore[index]
    _, whole = priced("")
    # 8 of 16 layers keep nothing
    ratio = float(memory.activations[0]) / float(whole.memory.activations[0])  # type: ignore[index]
    assert ratio == pytest.approx(0.5, abs=0.03)


def test_fsdp1_gathers_a_layer_that_is_trained_or_one_that_is_frozen() -> None:
    plan = Plan(data_parallel=8, zero_stage=3, num_microbatches=2)
    table = PlanTable.from_plans([plan])
    found = []
    for freeze in ("", "layers:0-7"):
        scenario, _ = priced(freeze, plan, software="hf-trainer")
        (rank,) = even_split_contents(scenario.model, 1, 1)
        whole = units(RankView(scenario, table, rank))
        found.append((float(whole.layer[0]), float(whole.root[0])))  # type: ignore[index]
    assert found[0] == found[1]


def test_frozen_layers_take_less_time_and_none_more_memory() -> None:
    one_gpu = Plan(num_microbatches=16)
    times, sizes = [], []
    for freeze in ("", "layers:0-7", "embedding,head,layers:0-7", "embedding,head,layers:0-14"):
        _, found = priced(freeze, one_gpu)
        times.append(float(found.step[0]))
        sizes.append(float(found.peak[0]))
    assert times == sorted(times, reverse=True)
    assert sizes == sorted(sizes, reverse=True)


def test_every_stage_needs_something_to_train() -> None:
    model = frozen("embedding,layers:0-3")
    halves, pinned = [(0, 4), (4, 8)], [(0, 5), (5, 8)]
    assert model.num_layers == 8
    assert (untrained_stage(model, halves), untrained_stage(model, pinned)) == (0, None)
    assert untrained_stage(frozen("layers:0-3"), halves) is None  # its embedding is trained
    assert untrained_stage(frozen("layers:4-7,head"), halves) == 1
    # a tied projection is trained with the embedding
    tied = frozen("layers:4-7", "llama tied")
    assert untrained_stage(tied, halves) is None


def test_plans_of_every_axis_are_legal() -> None:
    scenario, _ = priced("norms")
    plans = [
        Plan(8, zero_stage=3, num_microbatches=2),
        Plan(4, 2, num_microbatches=4),
        Plan(4, 1, 2, num_microbatches=4),
        Plan(4, context_parallel=2, num_microbatches=4),
        Plan(8, zero_stage=3, offload="weights", num_microbatches=2),
    ]
    codes = legality_codes(scenario, PlanTable.from_plans(plans))
    assert [CODES[code] for code in codes] == [*["legal"] * 4, "freeze"]


def test_it_travels_in_the_workload() -> None:
    told = Workload(8, 8, freeze="embedding,norms").to_dict()
    assert Workload.from_dict(told, "workload").freeze == "embedding,norms"
    told |= {"adapter": "lora", "adapter_rank": 4}
    with pytest.raises(InputError, match="freezes all but its adapters"):
        Workload.from_dict(told, "workload")


def test_the_last_layers_or_copies_of_layers_are_trained() -> None:
    model = sample_model("llama", num_hidden_layers=4)
    layer = sum(weight.numel for weight in model.kinds[0].weights)
    last = with_trained_layers(model, 1)
    assert last.num_trainable_parameters == layer
    assert [last.kinds[kind].weights[0].frozen for kind in last.pattern] == [True] * 3 + [False]
    copied = with_trained_layers(model, 2, copies=True)
    assert copied.num_parameters == model.num_parameters + 2 * layer
    trained = [not copied.kinds[kind].weights[0].frozen for kind in copied.pattern]
    assert trained == [False, False, True] * 2
    assert not any(kind.forward_only for kind in (*last.kinds, *copied.kinds))
    ends = with_trained_layers(model, 4, ends=True)
    assert ends.num_trainable_parameters == model.num_parameters
    with pytest.raises(InputError, match=r"= 5 \(must be 1 to 4\)"):
        with_trained_layers(model, 5)
