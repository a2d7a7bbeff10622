"""kbit preparation of peft: weights that are not quantised, a tied head included, are fp32."""

import numpy as np
import pytest

from cost_models.activations.operators import feed_forward_bytes
from cost_models.memory.model_states import rank_weights
from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.model.presets import load_preset
from cost_models.partition.frozen_weights import (
    dequantisation_buffers,
    frozen_bytes,
    kept_unpacked_bytes,
)
from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import software_profile
from tests.samples import rank_view


@pytest.mark.parametrize(("adapter", "more"), [("qlora", 2.0), ("lora", 0.0)])
def test_the_embedding_that_is_the_head_and_norms_become_fp32(adapter: str, more: float) -> None:
    workload = Workload(512, 1, precision="bf16", adapter=adapter, master_weights=False)  # type: ignore[arg-type]
    base = model_spec(load_preset("llama-3.2-1b").config, name="llama-3.2-1b")
    assert base.tie_embeddings
    model = adapted(base, workload, quantises_every_matrix=True)

    def stored(software: str) -> float:
        view = rank_view(model, workload, software_profile(software), Plan())
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


@pytest.mark.parametrize(("kind", "scales"), [("nf4", 4 / 64), ("nf4_double", 1 / 64), ("int4", 0)])
@pytest.mark.parametrize("offload", ["none", "weights"])
def test_sharding_leaves_the_scales_of_bitsandbytes_whole(
    kind: str, scales: float, offload: str
) -> None:
    workload = Workload(512, 1, adapter="qlora", quantisation=kind, master_weights=False)  # type: ignore[arg-type]
    base = model_spec(load_preset("llama-3.2-1b").config, name="llama-3.2-1b")
    model = adapted(base, workload, quantises_every_matrix=True)
    matrices = sum(w.numel for k in model.kinds for w in k.weights if w.quantised) * 16

    def stored(ranks: int) -> float:
        plan = Plan(data_parallel=ranks, zero_stage=3, offload=offload)  # type: ignore[arg-type]
        profile = software_profile("hf-trainer")
        view = rank_view(model, workload, profile, plan)
        frozen = [row for row in rank_weights(view) if "frozen" in row.name]
        if offload == "weights":
            frozen = [row for row in frozen if "scales" in row.name]
        return float(sum(np.ravel(row.size)[0] for row in frozen))

    if offload == "weights":
        assert stored(4) == pytest.approx(scales * matrices, rel=0.02)
        return
    shared = stored(1) - scales * matrices
    assert stored(4) == pytest.approx(shared / 4 + scales * matrices, rel=0.002)


def test_autograd_keeps_what_operators_unpacked() -> None:
    workload = Workload(512, 1, adapter="qlora", quantisation="int4", master_weights=False)
    base = model_spec(load_preset("llama-3.2-1b").config, name="llama-3.2-1b")
    model = adapted(base, workload, quantises_every_matrix=True)
    layer = sum(w.numel for w in model.kinds[0].weights if w.quantised)
    largest = max(w.numel for w in model.kinds[0].weights if w.quantised)

    def found(software: str, recompute: str) -> tuple[float, ...]:
        view = rank_view(model, workload, software_profile(software), Plan(recompute=recompute))
        used = (*dequantisation_buffers(view), kept_unpacked_bytes(view))
        return tuple(float(np.ravel(size)[0]) for size in used)

    gptq = "hf-trainer+gptq-operators"
    assert found(gptq, "full") == (2.0 * layer, 3.0 * largest, 0.0)
    assert found(gptq, "none") == (2.0 * layer, 3.0 * largest, 2.0 * 15 * layer)
    assert found("hf-trainer", "none")[::2] == (2.0 * largest, 0.0)
