"""Memory under autocast over fp32 weights, beside transformers' own Llama, counted by torch."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cost_models.legality.rules import require_legal
from cost_models.memory.autocast_copies import autocast_rows
from cost_models.memory.ledger import MOMENTS, first, total
from cost_models.memory.model_states import MASTER, rank_weights
from cost_models.memory.peak import rank_timeline
from cost_models.model.families import model_spec
from cost_models.model.lora import adapted
from cost_models.plan.plan import Plan
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
    view = rank_view(case.model, case.workload, case.software, plan)
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


class Adapted(torch.nn.Module):
    """A frozen matrix beside an adapter of rank 4."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, base.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(hidden) + self.up(self.down(hidden))
        return found


def counted_beside_a_frozen_base(layers: int, *, reentrant: bool | None) -> float:
    """Bytes that a step of adapters allocates beside frozen weights in fp32."""
    config = LlamaConfig(num_hidden_layers=layers, attn_implementation="sdpa", **SIZES)  # type: ignore[arg-type]
    config.use_cache = False
    model = LlamaForCausalLM(config).train().requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    ids = torch.randint(0, SIZES["vocab_size"], (1, 8))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    return peak_allocated(step, *model.parameters())


def predicted_copies(layers: int, plan: Plan, software: str, gpus: int) -> float:
    """The most bytes of autocast's copies at once."""
    config = {"model_type": "llama", "num_hidden_layers": layers, **SIZES}
    workload = Workload(8, gpus, adapter="lora", adapter_rank=4, adapter_targets="q")
    model = adapted(model_spec(config, name="llama"), workload)
    case = Scenario(model, parse_cluster(f"{gpus}xA100-80GB"), workload, software_profile(software))
    rows = autocast_rows(rank_view(case.model, case.workload, case.software, plan))
    return max(
        sum(first(row.size) for row in rows if row.created == moment)
        for moment in range(len(MOMENTS))
    )


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize(
    ("reentrant", "recompute"), [(None, "none"), (True, "full"), (False, "full")]
)
def test_copies_of_a_frozen_base_are_kept_by_autograd_alone(
    *, reentrant: bool | None, recompute: str
) -> None:
    software = "hf-trainer+autocast+fp32-frozen"
    plan = Plan(recompute=recompute)  # type: ignore[arg-type]
    few, many = (counted_beside_a_frozen_base(n, reentrant=reentrant) for n in (2, 6))
    layer = 4 * 128**2 + 3 * 128 * 352
    grown = predicted_copies(6, plan, software, 1) - predicted_copies(2, plan, software, 1)
    assert grown == pytest.approx(4 * 2 * layer if recompute == "none" else 0.0, rel=0.01, abs=1.0)
    assert (many - few) / (4 * 2 * layer) == pytest.approx(grown / (4 * 2 * layer), abs=0.15)


def test_sharded_adapters_apart_leave_no_copy_of_a_recomputed_base() -> None:
    plan = Plan(data_parallel=2, zero_stage=3, recompute="full")
    software = "hf-trainer+fsdp1-adapters+autocast+fp32-frozen"
    few, many = (predicted_copies(layers, plan, software, 2) for layers in (2, 6))
    assert few == pytest.approx(many, rel=0.02)
