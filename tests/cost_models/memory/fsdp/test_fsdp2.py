"""Blocks of weights and gradients on their way, each counted by hand."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from cost_models.activations.layer import LayerBackward
from cost_models.activations.live import LiveActivations, live_activations
from cost_models.memory.fsdp.fsdp2 import BlockPoints
from cost_models.memory.gradients import gradients_of
from cost_models.memory.ledger import Item, Ledger, Point, part_sums, total
from cost_models.model.families import model_spec
from cost_models.model.freezing import with_frozen_parts
from cost_models.model.lora import trainable_part
from cost_models.partition.rank_parameters import rank_parameters
from cost_models.partition.schedules import ranks_of_stages
from cost_models.partition.stages import contents_of_rank
from cost_models.plan.plan import Plan, PlanTable, split_layers
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import software_profile
from tests.samples import LLAMA, rank_view

SOFTWARE = software_profile("shardplan")
NOTHING = LayerBackward(0.0, 0.0, 0.0, 0.0, 0.0, -1.0, "reduced", False)
LAYERS = 6


class Case:
    """The first rank of a plan: its blocks, gradients and activations."""

    def __init__(
        self, plan: Plan, precision: str = "bf16", freeze: str = "", **config: Any
    ) -> None:
        changes = {"tie_word_embeddings": False, "num_hidden_layers": LAYERS, **config}
        model = with_frozen_parts(model_spec(LLAMA | changes, name="x"), freeze)
        workload = Workload(64, plan.global_batch_size, precision=precision)  # type: ignore[arg-type]
        table = PlanTable.from_plans([plan])
        ranges = split_layers(model.num_layers, plan.num_stages)
        rank = contents_of_rank(model, ranges, ranks_of_stages(plan), 0)
        self.sizes = rank_parameters(trainable_part(model), rank, table)
        view = rank_view(model, workload, SOFTWARE, table, rank)
        live = live_activations(view)
        self.blocks = BlockPoints(view, live.in_flight + live.pending)
        self.gradients = gradients_of(view, live.in_flight + live.pending)
        zeros = dict.fromkeys(LiveActivations.__struct_fields__, np.zeros(1))
        nothing = zeros | {"layer_backward": (NOTHING,), "saved_by_kind": (), "layers": ()}
        nothing["on_device"] = None
        self.empty = LiveActivations(**nothing)  # no activations at all

    @property
    def head(self) -> float:
        return number(self.sizes.head)

    @property
    def layer(self) -> float:
        return number(self.sizes.largest_layer)

    @property
    def embedding(self) -> float:
        return number(self.sizes.embedding)

    def layer_points(
        self, layer: LayerBackward, gradients: float = 0.0, saved: float = 0.0
    ) -> list[float]:
        """All bytes at the first layer, at the one behind it, and at the last but one.

        First at the last micro-batch, then at one before, if there is one: of the first layer, then
        of the others.
        """
        live = replace(self.empty, layer_backward=(layer,))
        kept, others = row("gradients", gradients), row("activations", saved)
        (found,) = self.blocks.at_layers(live, None, (kept, others, ()))
        return [bytes_at(point) for point in found]


def row(part: str, size: float) -> Item:
    return Item(part, "given", np.full(1, size))


def bytes_at(point: Point) -> float:
    return number(point.exists) * number(total(point.rows))


def number(value: Any) -> float:
    return float(np.ravel(value)[0])


def test_zero_3_gathers_the_head_and_the_layer_that_comes() -> None:
    case = Case(Plan(data_parallel=8, zero_stage=3))
    # two copies while it is gathered; at the loss's backward pass the last layer comes
    assert number(case.blocks.at_loss_forward().size) == 2 * 2 * case.head
    assert number(case.blocks.at_loss_backward().size) == 2 * (case.head + case.layer)
    below = Case(Plan(data_parallel=8, zero_stage=2))
    assert number(below.blocks.at_loss_backward().size) == 0.0


def test_a_layer_before_its_gradients_under_zero_3() -> None:
    """It and the next one are gathered; behind it: the head's fp32 copy, and its reduced shard."""
    case = Case(Plan(data_parallel=8, zero_stage=3))
    first, _, later = case.layer_points(NOTHING)
    assert first == 2 * 2 * case.layer + 4 * case.head + 4 * case.head / 8
    # nothing is kept by layers here: the last but one has the shards of all behind it
    behind = case.head + (LAYERS - 2) * case.layer
    assert later == 2 * 2 * case.layer + 4 * case.layer + 4 * behind / 8


def test_both_ends_of_a_group_are_points() -> None:
    """What layers keep goes, what they leave comes: whichever is more decides which is fuller."""
    case = Case(Plan(data_parallel=8, zero_stage=3))
    shard, saved = 4 * case.layer / 8, 1e8
    beside = saved + 2 * 2 * case.layer + 4 * case.layer + 4 * case.head / 8
    for kept in (0.5 * shard, 2.0 * shard):
        layer = replace(NOTHING, saved=np.full(1, kept))
        _, second, last_but_one = case.layer_points(layer, saved=saved)
        assert second == pytest.approx(beside + shard - kept)
        assert last_but_one == pytest.approx(beside + (LAYERS - 2) * (shard - kept))


def test_fresh_gradients_and_their_reduction() -> None:
    """16 bits until a layer is done; then beside an fp32 copy: c + g of each element."""
    case = Case(Plan(data_parallel=8, zero_stage=2))
    half = replace(NOTHING, gradients=np.full(1, 0.5 * case.layer))
    done = replace(NOTHING, gradients=np.full(1, case.layer), complete=True)
    freed = 2 * case.head  # gathered weights of the head, which is done for this step
    shard = 4 * case.head / 8
    first, *_ = case.layer_points(half)
    assert first == 4 * case.head + 2 * 0.5 * case.layer + shard - freed
    first, *_ = case.layer_points(done)
    assert first == (2 + 4) * case.layer + shard - freed - 2 * case.layer


def test_one_precision_on_one_rank_reduces_nothing() -> None:
    case = Case(Plan(), precision="fp32")
    done = replace(NOTHING, gradients=np.full(1, case.layer), complete=True)
    first, *_ = case.layer_points(done)
    assert first == 4 * (case.layer + case.head)  # the gradients themselves
    several = Case(Plan(num_microbatches=2), precision="fp32")
    # only two matrices of a layer have theirs before they are added up
    waiting = several.layer_points(done)[1]
    assert waiting == 4 * number(several.sizes.largest_pair)


def test_the_embedding_is_accumulated_while_others_are_in_flight() -> None:
    """The gradient in 16 bits, beside the fp32 sum that it has just begun."""
    case = Case(Plan(pipeline_parallel=2, num_microbatches=4, pipeline_schedule="gpipe"))
    saved = row("activations", 50.0)
    place = case.blocks.at_embedding_of_others(case.gradients.later, saved)
    parts = {part: number(size) for part, size in part_sums(place.rows).items()}
    assert (parts["gradients"], parts["activations"]) == (4 * number(case.sizes.total), 50.0)
    assert parts["buffers"] == 2 * case.embedding
    alone = Case(Plan())
    assert bytes_at(alone.blocks.at_embedding_of_others(row("gradients", 1.0), saved)) == 0.0


def test_a_frozen_tied_table_has_no_gradient() -> None:
    tied = {"tie_word_embeddings": True}
    trained = Case(Plan(), **tied)
    assert number(trained.blocks.tied_table) == trained.embedding > 0.0
    frozen = Case(Plan(), freeze="embedding,head", **tied)
    assert frozen.blocks.tied_table == 0.0


def test_replicas_copy_once_more() -> None:
    """ZeRO-0 in mixed precision: in and out of the reduction, and the quotient."""
    done = LayerBackward(0.0, 0.0, 0.0, np.ones(1), 0.0, -1.0, "reduced", True)
    replicas, shards = Case(Plan(data_parallel=8)), Case(Plan(data_parallel=8, zero_stage=1))
    assert number(replicas.blocks._reduced(done.gradients, True).size) == 4 + 4 + 4
    assert number(shards.blocks._reduced(done.gradients, True).size) == 2 + 4


def test_accumulated_gradients_are_copied_and_reduced_beside_themselves() -> None:
    """The fp32 copy of the head's, and the result: a shard of it, or a whole one of a replica."""
    for zero_stage, share in ((1, 1 / 8), (0, 1.0)):
        case = Case(Plan(data_parallel=8, zero_stage=zero_stage, num_microbatches=2))
        found = number(case.blocks._reduced(case.blocks.head, True).size)
        assert found == 4 * case.head * (1 + share)


def test_whole_gradients_leave_block_by_block() -> None:
    """ZeRO-1 with several micro-batches: the last pass leaves shards behind it."""
    case = Case(Plan(data_parallel=8, zero_stage=1, num_microbatches=4))
    whole = number(case.gradients.later.size)
    everything = number(case.sizes.total)
    assert whole == 4 * everything
    last, before, *_ = case.layer_points(NOTHING, whole)
    done = case.head
    assert before == whole
    assert last == pytest.approx(
        4 * (everything - done) + 4 * done / 8 + 4 * done - 2 * done  # left over; weights freed
    )


def test_experts_by_themselves() -> None:
    """Fresh, then beside the copy for their reduction, then what is left of that."""
    config = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    case = Case(Plan(data_parallel=16, expert_parallel=8, zero_stage=2), **config)
    experts = number(case.sizes.expert_layer)
    assert 0.0 < experts < case.layer

    def buffers(experts_are: str) -> float:
        layer = replace(NOTHING, gradients=np.full(1, experts), experts=experts_are)
        block = replace(case.blocks.groups[0].block, before=case.head, ahead=0.0)
        return sum(abs(number(row.size)) for row in case.blocks._buffers(layer, block, True))

    assert buffers("fresh") == 2 * experts + 4 * case.head
    rearranged = number(case.blocks.rearranged) * experts
    freed = 2 * experts
    assert buffers("reducing") == pytest.approx((2 + 4) * experts + rearranged + freed)
    assert buffers("reduced") == pytest.approx(4 * (1 + 1 / 2) * experts + freed)


def test_zero_3_copies_experts_out_of_what_was_gathered() -> None:
    config = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    case = Case(Plan(data_parallel=8, expert_parallel=4, zero_stage=3), **config)
    experts = number(case.sizes.expert_layer)
    block = case.blocks.groups[1].block  # between layers of its size
    assert number(block.ahead) == case.layer - experts

    def gathered(experts_are: str) -> float:
        layer = replace(NOTHING, gradients=np.zeros(1), experts=experts_are)
        left = 4 * number(block.before)
        return number(case.blocks._buffers(layer, block, True)[0].size) - left

    cut_inside = number(case.blocks.rearranged) > 0.0
    assert gathered("gathering") == 2 * (case.layer + (1 + cut_inside) * experts)
    # the next layer is asked for by the experts, once they are there
    assert gathered("gathered") == 2 * case.layer
    assert gathered("fresh") == 2 * (case.layer + case.layer - experts)


def test_a_packed_matrix_is_there_where_it_is_used() -> None:
    case = Case(Plan())
    none, matrix, helping = row("gradients", 0.0), np.full(1, 100.0), np.full(1, 30.0)

    def more(product: float) -> float:
        live = replace(case.empty, layer_backward=(replace(NOTHING, product=np.full(1, product)),))
        packed, plain = (
            case.blocks.at_layers(live, used, (none, none, ()))[0][0]
            for used in ((matrix, helping), None)
        )
        return bytes_at(packed) - bytes_at(plain)

    assert more(-1.0) == 0.0
    assert more(10.0) == 100.0 + 30.0 - 10.0
    assert more(50.0) == 100.0


def test_dualpipev_of_few_steps_has_not_all_at_once() -> None:
    def turn(microbatches: int) -> list[tuple[float, float]]:
        plan = Plan(
            pipeline_parallel=2,
            virtual_stages=2,
            num_microbatches=microbatches,
            pipeline_schedule="dualpipev",
        )
        case = Case(plan, num_hidden_layers=8)
        live = replace(case.empty, tables=np.full(1, 50.0), stage=np.full(1, 10.0))
        found = case.blocks.at_loss(row("gradients", 8.0), live)
        return [(number(gradients.size), number(saved.size)) for gradients, _, saved in found]

    assert turn(8) == [(8.0, 50.0)]
    (later, saved), whole = turn(4)
    assert later < 8.0
    assert saved == 50.0
    assert whole == (8.0, 40.0)


def test_a_rank_without_a_trained_parameter_has_no_gradients() -> None:
    plan = Plan(pipeline_parallel=2, num_microbatches=4)
    case = Case(plan, freeze="embedding,layers:0-2")
    assert number(case.sizes.total) == 0.0
    assert number(case.blocks.later_share) == 0.0


def test_the_largest_point_is_taken_plan_by_plan() -> None:
    one = Point(
        (
            Item("gradients", "", np.array([1.0, 5.0])),
            Item("weights", "", np.array([0, -4.5])),
        )
    )
    other = Item("gradients", "", np.array([2.0, 2.0]))
    found = Ledger((), [[one, Point((other,))]]).parts(0)
    assert np.array_equal(found["gradients"], [2.0, 2.0])
    assert np.array_equal(found["weights"], [0.0, 0.0])
    absent = Ledger((), [[one, Point((other,), np.array([False, True]))]]).parts(0)
    assert np.array_equal(absent["gradients"], [1.0, 2.0])
