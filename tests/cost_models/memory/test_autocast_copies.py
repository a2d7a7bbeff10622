"""Memory under autocast over fp32 weights, beside transformers' own Llama, counted by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cost_models.legality.rules import require_legal
from cost_models.memory.ledger import MOMENTS, first, total
from cost_models.memory.model_states import MASTER, rank_weights
from cost_models.memory.peak import rank_timeline
from cost_models.model.families import model_spec
from cost_models.partition.plan_stages import default_layer_ranges, pipeline_rank
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.workload import Workload
from cost_models.scenario import Scenario
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile
from tests.allocations import peak_allocated
from tests.samples import rank_view

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SOFTWARE = {True: "hf-trainer-autocast", False: "hf-trainer"}


def counted(layers: int, tokens: int, recompute: str, *, autocast: bool) -> float:
    """Bytes that one step allocates at its peak beside weights and optimizer states."""
    config = LlamaConfig(num_hidden_layers=layers, attn_implementation="sdpa", **SIZES)  # type: ignore[arg-type]
    config.use_cache = False
    model = LlamaForCausalLM(config).train()
    if not autocast:
        model = model.to(torch.bfloat16)
    if recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
    ids = torch.randint(0, SIZES["vocab_size"], (1, tokens))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    return peak_allocated(step, *model.parameters())


def scenario(layers: int, tokens: int, *, autocast: bool) -> Scenario:
    config = {"model_type": "llama", "num_hidden_layers": layers, **SIZES}
    workload = Workload(tokens, 1, master_weights=autocast)
    software = software_profile(SOFTWARE[autocast])
    return Scenario(
        model_spec(config, name="llama"), parse_cluster("1xA100-80GB"), workload, software
    )


def predicted(layers: int, tokens: int, recompute: str, *, autocast: bool) -> float:
    case = scenario(layers, tokens, autocast=autocast)
    plan = Plan(recompute=recompute)  # type: ignore[arg-type]
    rank = pipeline_rank(case, plan, default_layer_ranges(case, plan), 0)
    table = PlanTable.from_plans([plan])
    view = rank_view(case.model, case.workload, case.software, table, rank)
    moments = rank_timeline(view)
    masters = first(total(row for row in rank_weights(view) if row.name == MASTER))
    beside = [
        parts.gradients
        + parts.activations
        + parts.logits
        + parts.buffers
        # 16-bit copies are allocated as they are used, fp32 and 16-bit weights are there before
        + (parts.weights - masters if autocast else 0.0)
        for parts in moments[: MOMENTS.index("optimizer")]
    ]
    return float(np.max(beside))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("width", "layers", "tokens", "recompute", "autocast"),
    [
        (128, 4, 512, "none", True),
        (128, 4, 512, "none", False),
        (128, 8, 512, "none", False),
        (256, 4, 1024, "full", True),
    ],
)
def test_a_step_of_transformers_allocates_what_is_predicted(
    width: int,
    layers: int,
    tokens: int,
    recompute: str,
    *,
    autocast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"hidden_size": width, "intermediate_size": width * 11 // 4}
    for name, size in sizes.items():
        monkeypatch.setitem(SIZES, name, size)
    found = counted(layers, tokens, recompute, autocast=autocast)
    assert predicted(layers, tokens, recompute, autocast=autocast) == pytest.approx(found, rel=0.05)


def test_replicas_hold_copies_and_no_rank_shards() -> None:
    model = scenario(4, 1024, autocast=True).model
    software = software_profile("hf-trainer-autocast")
    eight = Scenario(model, parse_cluster("8xA100-80GB"), Workload(1024, 8), software)
    require_legal(eight, Plan(data_parallel=8))
    with pytest.raises(InputError, match="this trainer shards up to stage 0"):
        require_legal(eight, Plan(data_parallel=8, zero_stage=1))
