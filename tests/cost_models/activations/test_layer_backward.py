"""Points of the backward pass of a layer, each counted by hand from the operators that run."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cost_models.activations.layer_backward import (
    BackwardPoint,
    backward_points,
    norm_working_bytes,
)
from cost_models.activations.live import LiveActivations, live_activations
from cost_models.activations.saved import Regions, due_bytes_per_token
from cost_models.memory.ledger import first
from cost_models.model.families import model_spec
from cost_models.model.freezing import with_frozen_parts
from cost_models.model.lora import adapted, trainable_part
from cost_models.model.spec import ModelSpec
from cost_models.partition.plan_stages import default_layer_ranges, pipeline_rank
from cost_models.partition.rank_view import RankView
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import software_profile
from tests.allocations import peak_allocated
from tests.samples import LLAMA, make_scenario, rank_view

SOFTWARE = software_profile("shardplan")
H, F, A, K, D = 64, 256, 8, 2, 8  # widths, heads of queries and keys, their size
EVERYTHING = 1e9  # what the layer saved: more than is given back on the way
DENSE: dict[str, Any] = {
    **LLAMA,
    "hidden_size": H,
    "intermediate_size": F,
    "num_attention_heads": A,
    "num_key_value_heads": K,
    "head_dim": D,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": H,
    "n_layer": 2,
    "n_head": A,
    "vocab_size": 128,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.0,
}
MIXTRAL: dict[str, Any] = {
    **DENSE,
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def walked(config: dict[str, Any], *plans: Plan, **workload: Any) -> list[BackwardPoint]:
    """Return the points of the first layer, one row a plan."""
    model = model_spec(config, name="x")
    table = PlanTable.from_plans(plans or (Plan(),))
    return of_model(model, table, Workload(128, 8, **workload))


def of_model(model: ModelSpec, table: PlanTable, workload: Workload) -> list[BackwardPoint]:
    kind = model.kinds[0]
    everything = np.full(len(table), EVERYTHING)
    trained = trainable_part(model).kinds[0]
    return backward_points(view_of(model, table, workload), kind, trained, everything)


def view_of(model: ModelSpec, table: PlanTable, workload: Workload) -> RankView:
    return rank_view(model, workload, SOFTWARE, table, even_split_contents(model, 1, 1)[0])


def there(place: BackwardPoint, row: int = 0) -> float:
    """Bytes a token beside what the layer saved."""
    working, freed = np.broadcast_arrays(place.working, place.freed)
    return float(np.ravel(working)[row] - np.ravel(freed)[row])


def elements(place: BackwardPoint, row: int = 0) -> float:
    column = np.ravel(place.gradients)
    return float(column[row if len(column) > 1 else 0])


def with_adapters(
    config: dict[str, Any], targets: str, kind: str, **plan: Any
) -> list[BackwardPoint]:
    workload = Workload(128, 8, adapter=kind, adapter_rank=4, adapter_targets=targets)  # type: ignore[arg-type]
    model = adapted(model_spec(config, name="x"), workload)
    return of_model(model, PlanTable.from_plans([Plan(**plan)]), workload)


def test_an_adapter_beside_the_last_matrix_gives_a_summand_of_its_inputs_gradient() -> None:
    alone = with_adapters(GPT2, "up", "lora")
    beside = with_adapters(GPT2, "down", "lora")
    # dropout's gradient has gone by then; a third tensor takes the sum
    assert there(beside[0]) - there(alone[0]) == 2.0 * 4 * H - 2.0 * H
    assert there(beside[1]) - there(alone[1]) == 2.0 * 4 * H
    assert [there(place) for place in beside[2:]] == [there(place) for place in alone[2:]]
    packed, others = with_adapters(GPT2, "down", "qlora"), with_adapters(GPT2, "up", "qlora")
    assert there(packed[0]) == there(others[0])  # the unpacked matrix has gone by then


@pytest.mark.parametrize(("shape", "tensors"), [((512,), 3.0), ((4, 128), 4.0)])
def test_torch_holds_both_summands(shape: tuple[int, ...], tensors: float) -> None:
    """A frozen matrix and an adapter read relu's result: it, and two gradients of its size.

    Of sequences they are views of what the matmuls gave: then the sum is a third tensor.
    """
    tokens, wide, narrow = 512, 1024, 16
    matrix = torch.randn(narrow, wide)
    first, second = (torch.nn.Parameter(torch.randn(s)) for s in ((4, wide), (narrow, 4)))
    x = torch.randn(*shape, wide, requires_grad=True)
    linear = torch.nn.functional.linear
    seen: list[int] = []

    def step() -> None:
        y = x.relu()
        y.register_hook(lambda _: seen.append(1))
        out = linear(2.0 * linear(y, first), second)
        (out + linear(y, matrix)).sum().backward()

    peak = peak_allocated(step, x, first, second)
    assert seen == [1, 1]
    assert peak / (4.0 * tokens * wide) == pytest.approx(tensors, abs=0.1)


def test_a_norm_behind_the_mlp_comes_first() -> None:
    """OLMo 2: five fp32 tensors and the gradient that passes it by; nothing was given back."""
    olmo = {**DENSE, "model_type": "olmo2"}
    closing, last, *_ = with_adapters(olmo, "all", "lora")
    assert there(closing) == 5 * 4 * H + 2 * H
    # a frozen norm keeps its input and one number, not the normalised copy
    assert there(last) == 2 * H + 2 * 2 * F - (4 * H + 4)
    trained = walked(olmo)[0]
    assert there(trained) == there(closing) - 4 * H


def test_packed_matrices_are_computed_again_beside_the_gradient() -> None:
    """QLoRA and full recomputation: two results, an adapter's, both sums, and that gradient."""
    for config, matrices in ((DENSE, 2), (GPT2, 1)):
        again = with_adapters(config, "all", "qlora", recompute="full")
        never = with_adapters(config, "all", "qlora")
        freed = float(np.ravel(again[3].freed)[0])
        one = 2 * (F if matrices == 2 else 4 * H)
        assert float(np.ravel(again[3].working)[0]) == 4 * H + (2 * matrices + 2) * one
        assert freed == float(np.ravel(never[3].freed)[0]) > 0.0


def test_llama_on_one_rank() -> None:
    """16 bits: 2 bytes an element; the gradient of the hidden state (2 H) is there all the way."""
    last, mlp, columns, norm, core, queries, end, done = walked(DENSE)
    # the last matrix: the gradient of its input; its own
    assert there(last) == 2 * H + 2 * F
    assert elements(last) == H * F
    # the product is given back; gradients of product, activation and up projection
    assert there(mlp) == 2 * H + 3 * 2 * F - 2 * F
    # one of the two matrices is left; both have given a gradient of the input
    inside = 4 * 2 * F
    assert there(columns) == 2 * H + 2 * F + 2 * 2 * H - inside
    assert elements(columns) == 3 * H * F
    # five fp32 tensors of the norm; the input of the matrices is gone
    assert there(norm) == 5 * 4 * H - inside - 2 * H
    saved_by_norm = 6 * H + 4
    heads = 2 * 2 * (A + K) * D  # of the output, queries, keys and values
    assert there(core) == heads + 2 * 2 * H - inside - 2 * H - saved_by_norm
    assert core.has_core
    assert elements(core) == 3 * H * F + H * A * D
    weights = 3 * H * F + 2 * H * A * D + 2 * H * K * D + 2 * H
    assert elements(queries) == elements(end) == elements(done) == weights
    assert there(queries) == 2 * H + 2 * A * D + 2 * 2 * H - EVERYTHING + saved_by_norm + 2 * H
    assert there(end) == 5 * 4 * H - EVERYTHING + saved_by_norm
    assert (there(done), done.done) == (2 * H - EVERYTHING, True)


def test_layer_norms_dropout_and_relu() -> None:
    """A layer norm is one kernel; a mask is given back, and dropout has a gradient of its own."""
    last, mlp, columns, norm, *_ = walked(GPT2 | {"activation_function": "relu"})
    inner, mask = 4 * H, H
    assert there(last) == 2 * H + 2 * H + 2 * inner - mask
    assert there(mlp) == 2 * H + 2 * 2 * inner - mask  # relu keeps what the last matrix read
    assert there(columns) == 2 * H + 2 * inner + 2 * H - 2 * inner - mask
    assert there(norm) == 3 * 2 * H - 2 * inner - mask - 2 * H
    assert norm_working_bytes(model_spec(GPT2, name="x").kinds[0], H, 2.0, SOFTWARE) == 6 * H
    closed = walked(GPT2 | {"activation_function": "gelu"})[1]
    assert there(closed) == there(mlp) - 2 * inner


def test_sequence_parallelism_gathers_what_matrices_need_whole() -> None:
    alone = walked(DENSE, Plan(tensor_parallel=2))
    split = walked(DENSE, Plan(tensor_parallel=2, sequence_parallel=True))
    many = walked(DENSE, Plan(tensor_parallel=2, sequence_parallel=True, micro_batch_size=4))
    # the gradient of the MLP's output comes whole; sequences are put together in a copy
    assert there(split[0]) - there(alone[0]) == 2 * H - H
    assert there(many[0]) - there(split[0]) == 2 * H
    # both outputs, the gradient of the input; with sp the input again, and this rank's part
    assert there(alone[2]) == 2 * H + 2 * F + 2 * H - 4 * F
    assert there(split[2]) == H + 2 * F + 2 * H + 2 * H + H - 4 * F


@pytest.mark.parametrize(
    ("config", "each"),
    [
        (DENSE, 3 * 4 - 2),  # fp32: gradient, product, result; the 16-bit copy is gone
        (GPT2, 3 * 2),  # 16 bits
        (GPT2 | {"attn_pdrop": 0.1}, 2 * 2),  # what was dropped out is given back
    ],
)
def test_eager_scores_are_whole_rows(config: dict[str, Any], each: int) -> None:
    def core(seq_len: int) -> float:
        model, table = model_spec(config, name="x"), PlanTable.from_plans([Plan()])
        found = of_model(model, table, Workload(seq_len, 8, attention_kernel="eager"))
        return there(next(place for place in found if place.has_core))

    assert core(512) - core(256) == 256 * A * each


@pytest.mark.parametrize(
    ("config", "software", "each"),
    [
        (DENSE, "torch-trainer", 3 * 4 - 2),
        (DENSE, "torch-compile", 2 * 4 - 2),  # one compiled kernel
        (DENSE, "megatron", 2),  # in place
        (GPT2, "hf-trainer", 3 * 2),
        (GPT2, "hf-trainer-autocast", 3 * 4 - 2),  # autocast's softmax is fp32
        (GPT2 | {"attn_pdrop": 0.1}, "hf-trainer-autocast", 3 * 4 - 2 - 1),
    ],
)
def test_other_trainers_have_gradients_of_eager_scores(
    config: dict[str, Any], software: str, each: int
) -> None:
    def working(seq_len: int) -> float:
        workload = Workload(seq_len, 8, attention_kernel="eager")
        case = make_scenario(model_spec(config, name="x"), software=software)
        case = replace(case, workload=workload)
        rank = pipeline_rank(case, Plan(), default_layer_ranges(case, Plan()), 0)
        view = RankView(case, PlanTable.from_plans([Plan()]), rank)
        return float(first(live_activations(view).working)) / seq_len

    assert working(4096) - working(2048) == pytest.approx(2048 * A * each, rel=1e-12)


def test_bert_has_no_norm_in_front() -> None:
    bert = {"model_type": "bert", "hidden_size": H, "num_attention_heads": A, "vocab_size": 128}
    bert |= {"intermediate_size": F, "num_hidden_layers": 2, "hidden_dropout_prob": 0.0}
    *_, queries, end, done = walked(bert)
    # what the first matrices read is all that is left
    assert there(queries) == 2 * H + 2 * H + 4 * H - EVERYTHING + 2 * H
    assert there(end) == -EVERYTHING < there(done)


def test_experts_are_gathered_fresh_and_reduced() -> None:
    found = walked(MIXTRAL, Plan(data_parallel=8, expert_parallel=8, zero_stage=1))
    states = [place.experts for place in found]
    assert states[:6] == ["gathered", "gathering", "fresh", "reducing", "fresh", "fresh"]
    assert set(states[6:]) == {"reduced"}
    rows = 2 * 2 * H  # two experts a token, 16 bits
    weighted, gathering, opened, reducing, last, _ = found[:6]
    assert there(weighted) == (4 + 2) * 2 * H + 2 * 2 * H  # fp32 products, and their copy
    assert there(gathering) == rows + 2 * 2 * H - rows
    assert there(opened) - there(reducing) == 2 * 2 * 2 * F + rows
    # one of the eight experts is here; its last matrix is a third of it
    assert elements(last) == pytest.approx(H * F)
    assert elements(reducing) == 3 * H * F + 8 * H  # and the router


def test_rows_weighted_operator_by_operator_have_three_gradients_in_fp32() -> None:
    model, table = model_spec(MIXTRAL, name="x"), PlanTable.from_plans([Plan()])
    software = SOFTWARE.changed({"activations.weighting_gradient_bytes": 12.0})
    contents = even_split_contents(model, 1, 1)[0]
    view = rank_view(model, Workload(128, 8), software, table, contents)
    weighted = backward_points(view, model.kinds[0], model.kinds[0], np.full(1, EVERYTHING))[0]
    assert there(weighted) == 12 * 2 * H + 2 * 2 * H


def test_a_table_is_priced_as_each_row_alone() -> None:
    plans = [
        Plan(),
        Plan(tensor_parallel=2),
        Plan(tensor_parallel=4, sequence_parallel=True, micro_batch_size=2),
        Plan(context_parallel=4),
        Plan(recompute="full"),
    ]
    together = walked(DENSE, *plans)
    for row, plan in enumerate(plans):
        for place, alone in zip(together, walked(DENSE, plan), strict=True):
            assert there(place, row) == there(alone)
            assert elements(place, row) == elements(alone)


def test_no_more_is_given_back_than_was_saved() -> None:
    model, table = model_spec(DENSE, name="x"), PlanTable.from_plans([Plan(recompute="full")])
    kind, little = model.kinds[0], np.full(1, 3.0)
    for place in backward_points(view_of(model, table, Workload(128, 8)), kind, kind, little):
        assert 0.0 <= float(np.max(place.freed)) <= 3.0


def test_of_adapters_only_what_reads_a_blocks_input_waits_for_its_weights_gradient() -> None:
    """Two inputs, and gradients of five small outputs (q, k, v, gate, up); frozen: nothing."""
    workload = Workload(128, 8, adapter="lora", adapter_rank=4)
    whole = model_spec(DENSE, name="x")
    kinds = [adapted(whole, workload).kinds[0], with_frozen_parts(whole, "layers:0-0").kinds[0]]
    regions = Regions(0.0, 0.0, 2 * 2.0 * H, 0.0, 0.0)
    found = [due_bytes_per_token(kind, regions, H, 2.0, 1, False) for kind in kinds]
    assert [float(np.ravel(size)[0]) for size in found] == [2 * 2 * H + 2 * 5 * 4, 0.0]


def live_of_rank(software: str, plan: Plan, rank: int, precision: str = "bf16") -> LiveActivations:
    case = make_scenario("llama", "4xH100-SXM", software=software, precision=precision)
    contents = pipeline_rank(case, plan, default_layer_ranges(case, plan), rank)
    return live_activations(RankView(case, PlanTable.from_plans([plan]), contents))


def test_operands_of_pending_weight_gradients_are_in_8_bits_where_matmuls_are() -> None:
    """A byte instead of two: Transformer Engine keeps what the matmul reads."""
    plan = Plan(pipeline_parallel=4, pipeline_schedule="zero_bubble", num_microbatches=8)
    wide, narrow = (
        live_of_rank("nemo+any-plan", plan, 3, precision).operands_per_token
        for precision in ("bf16", "fp8")
    )
    assert float(first(narrow)) == float(first(wide)) / 2.0 > 0.0


def test_a_trainer_that_caches_rotary_tables_has_one_for_each_stage() -> None:
    plan = Plan(pipeline_parallel=4, pipeline_schedule="1f1b", num_microbatches=8)
    cached, each = (
        float(first(live_of_rank(software, plan, 0).tables)) for software in ("nemo", "shardplan")
    )
    assert each == 4 * cached > 0.0  # micro-batches in flight on the first of four ranks


def test_the_cache_keeps_keys_and_values_of_recomputed_layers() -> None:
    """Without recomputation autograd has them anyway."""
    for plan, added in ((Plan(recompute="full"), True), (Plan(), False)):
        plain, kept = (
            [float(first(each.per_token)) for each in live_of_rank(software, plan, 0).layers]
            for software in ("torch-trainer", "torch-trainer+kept-cache")
        )
        attention = make_scenario().model.kinds[0].attention
        keys_and_values = 2.0 * 2 * attention.num_kv_heads * attention.head_dim
        assert np.subtract(kept, plain) == pytest.approx(keys_and_values if added else 0.0)
