"""Messages between stages that a rank holds, and positions that nobody trains."""

from typing import Any

import numpy as np

from cost_models.activations.encoder_decoder import positions_gradient_bytes
from cost_models.activations.live import messages
from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.model.presets import load_preset
from cost_models.model.spec import ModelSpec
from cost_models.partition.stages import contents_of_rank
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from tests.samples import llama, rank_view

WORKLOAD = Workload(seq_len=512, global_batch_size=8)  # bf16


def states(model: ModelSpec, rank: int, in_flight: float, **plan: Any) -> float:
    """Messages in hidden states, of one of two stages; full recomputation."""
    half = model.num_layers // 2
    contents = contents_of_rank(model, [(0, half), (half, model.num_layers)], range(2), rank)
    table = PlanTable.from_plans(
        [Plan(pipeline_parallel=2, num_microbatches=4, recompute="full", **plan)]
    )
    found = messages(rank_view(model, WORKLOAD, None, table, contents), np.array([in_flight]))
    return float(found[0]) / (2 * model.hidden_size)  # type: ignore[index]


def test_the_next_gradient_comes_while_the_first_stage_is_fullest() -> None:
    """It sent an output, and a backward pass follows the one in which most is in flight."""
    model = llama()
    assert states(model, 0, 2.0) == 2.0
    assert states(model, 0, 1.0) == 1.0  # nothing is left to follow
    assert states(model, 0, 4.0, pipeline_schedule="gpipe") == 2.0
    # its weight gradients follow there
    assert states(model, 0, 2.0, pipeline_schedule="zero_bubble") == 1.0
    assert states(model, 1, 1.0) == 2.0


def test_a_gradient_that_a_norm_turned_is_kept_as_it_came() -> None:
    """BERT's layers end with a norm; others hand what they received on to the first sum."""
    bert = model_spec(dict(load_preset("bert-base").config), name="bert")
    assert states(bert, 0, 2.0) == 3.0
    olmo = model_spec(dict(load_preset("olmo-2-7b").config), name="olmo")
    assert states(olmo, 0, 2.0) == 2.0


def test_tables_of_positions_have_no_gradient_beside_adapters() -> None:
    model = model_spec(dict(load_preset("t5-large").config), name="t5")
    workload = Workload(512, 8, adapter="lora", adapter_rank=4)
    table = PlanTable.from_plans([Plan()])
    for kind, frozen in zip(model.kinds, adapted(model, workload).kinds, strict=True):
        assert np.all(positions_gradient_bytes(kind, WORKLOAD, table) > 0.0)
        assert not np.any(positions_gradient_bytes(frozen, workload, table))
