"""kbit preparation of peft: weights that are not quantised, a tied head included, are fp32."""

from __future__ import annotations

import numpy as np
import pytest

from cost_models.activations.saved import feed_forward_bytes
from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.model.presets import load_preset
from cost_models.partition.frozen_weights import frozen_bytes
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import software_profile
from tests.samples import rank_view


@pytest.mark.parametrize(("adapter", "more"), [("qlora", 2.0), ("lora", 0.0)])
def test_the_embedding_that_is_the_head_and_norms_become_fp32(adapter: str, more: float) -> None:
    workload = Workload(512, 1, precision="bf16", adapter=adapter, master_weights=False)  # type: ignore[arg-type]
    base = model_spec(load_preset("llama-3.2-1b").config, name="llama-3.2-1b")
    assert base.tie_embeddings
    model = adapted(base, workload, quantises_every_matrix=True)
    (rank,) = even_split_contents(model, 1, 1)
    table = PlanTable.from_plans([Plan()])

    def stored(software: str) -> float:
        view = rank_view(model, workload, software_profile(software), table, rank)
        return float(np.ravel(frozen_bytes(view))[0])

    plain = (128_256 + 2 * 16 + 1) * 2048.0  # embedding, two norms a layer, the last norm
    found = stored("hf-trainer+kbit-preparation") - stored("hf-trainer")
    assert found == pytest.approx(more * plain)


def test_matrices_in_4_bits_give_the_mlp_fp32() -> None:
    """bitsandbytes, Linear4bit.forward: ``.to(inp_dtype)``; allocated peaks of fms-acceleration."""
    spec = model_spec(load_preset("llama-3.2-1b").config, name="llama-3.2-1b")
    mlp, width = spec.kinds[0].feed_forward, 8192.0
    plain, prepared = (
        feed_forward_bytes(mlp, 2.0, software_profile(name))
        for name in ("hf-trainer", "hf-trainer+kbit-preparation")
    )
    assert plain == 2.0 * 4 * width  # gate, activation, up projection, product
    assert prepared == (4.0 * 3 + 2.0) * width
