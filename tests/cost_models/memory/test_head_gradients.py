"""Gradients of the output projection that wait: by hand, and on the memory of a real torch step."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cost_models.memory.head_gradients import HeadGradients, head_gradients, loss_copy_bytes
from cost_models.memory.ledger import LOSS_BACKWARD, OPTIMIZER, first
from cost_models.memory.peak import rank_ledger
from cost_models.model.lora import adapted
from cost_models.plan.plan import Plan
from cost_models.scenario import Scenario
from hardware_profiles.software.trainer import SoftwareProfile, software_profile
from tests.allocations import peak_allocated
from tests.samples import make_scenario, rank_view, sample_model

VOCABULARY, HIDDEN, TOKENS = 4096, 64, 8
TABLE = VOCABULARY * HIDDEN * 4  # bytes
LOGITS = VOCABULARY * TOKENS * 4
WIDE, CHUNK = 512, 16  # of losses in checkpointed chunks


def waiting(
    name: str, software: SoftwareProfile, plan: Plan | None = None, logits: float = 0.0
) -> tuple[Scenario, HeadGradients]:
    scenario = make_scenario(sample_model(name), seq_len=8192, global_batch_size=1)
    found = head_gradients(
        rank_view(scenario.model, scenario.workload, software, plan or Plan()), np.array([logits])
    )
    return scenario, found


def at_head(found: HeadGradients) -> list[tuple[float, float]]:
    return [(first(gradients.size), first(logits.size)) for gradients, logits in found.head]


def test_a_tied_table_waits_for_the_embedding() -> None:
    scenario, found = waiting("llama tied", software_profile("torchtune"), logits=7.0)
    model = scenario.model
    table = 2.0 * model.vocab_size * model.hidden_size
    assert (first(found.layers.size), first(found.embedding.size)) == (table, 3.0 * table)
    assert at_head(found) == [(table + 2.0 * model.hidden_size, 7.0)]  # and the last norm
    _, apart = waiting("llama", software_profile("torchtune"))
    assert (first(apart.layers.size), first(apart.embedding.size)) == (0.0, 0.0)


def test_a_loss_in_chunks_makes_it_once_more() -> None:
    """Eight chunks: with the second one's gradient and their sum, two chunks' logits are gone."""
    chunked = software_profile("torchtune-chunked")
    scenario, found = waiting("llama tied", chunked, logits=800.0)
    model = scenario.model
    head = 2.0 * (model.vocab_size + 1) * model.hidden_size
    assert at_head(found) == [(head, 800.0), (2.0 * head, 700.0), (3.0 * head, 600.0)]
    assert first(found.embedding.size) == 2.0 * 2.0 * model.vocab_size * model.hidden_size
    one_chunk = chunked.changed({"loss.chunk_tokens": 8192.0})
    assert at_head(waiting("llama tied", one_chunk, logits=800.0)[1]) == 3 * [(head, 800.0)]


@pytest.mark.parametrize(
    ("software", "plan"),
    [("megatron", Plan()), ("torchtune-chunked", Plan(data_parallel=4, zero_stage=3))],
)
def test_sharded_gradients_and_whole_buffers_have_their_own_terms(
    software: str, plan: Plan
) -> None:
    _, found = waiting("llama tied", software_profile(software), plan)
    assert not any(first(part.size) for part in (found.layers, found.embedding))
    assert not any(sum(at_head(found), ()))


def peak_of_loss(chunks: int) -> float:
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    x = torch.randn(TOKENS, HIDDEN)

    def step() -> None:
        outs = [head(part) for part in x.chunk(chunks)]
        sum(out.sum() for out in outs).backward()

    return peak_allocated(step, head.weight)


def test_torch_holds_three_of_them_in_a_loss_of_chunks() -> None:
    close = 3.0 * LOGITS / TABLE
    assert peak_of_loss(1) / TABLE == pytest.approx(1.0, abs=close)
    assert peak_of_loss(8) / TABLE == pytest.approx(3.0, abs=close)


def test_torch_keeps_a_tied_gradient_until_the_embedding_has_its_own() -> None:
    table = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN))
    came: list[str] = []
    table.register_hook(lambda _: came.append("table"))

    def step() -> None:
        hidden = torch.nn.functional.embedding(torch.arange(TOKENS), table).tanh()
        hidden.register_hook(lambda _: came.append("layer"))
        (hidden @ table.T).sum().backward()

    peak = peak_allocated(step, table)
    assert came == ["layer", "table"] * 2  # once a step, when both uses have theirs
    assert peak / TABLE == pytest.approx(3.0, abs=2.0 * LOGITS / TABLE)


def chunk_loss(hidden: torch.Tensor, weight: torch.Tensor, *, in_fp32: bool) -> torch.Tensor:
    """Cross-entropy and entropy of a chunk as TRL's chunked_nll computes them."""
    cast = (hidden.float(), weight.float()) if in_fp32 else (hidden, weight.to(hidden.dtype))
    logs = torch.log_softmax((cast[0] @ cast[1].T).float(), dim=-1)
    entropy = (logs.exp() * logs).sum(dim=-1)
    assert entropy.requires_grad
    return -logs[:, 0].sum()


def checkpointed_peak(*, in_fp32: bool, trained: bool) -> float:
    """Bytes for each element of the projection at the peak of four checkpointed chunks."""
    weight = torch.randn(VOCABULARY, WIDE, dtype=torch.bfloat16).requires_grad_(trained)
    inputs = torch.randn(4 * CHUNK, WIDE, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        hidden, losses = inputs * 1.0, []
        with torch.autocast("cpu", torch.bfloat16):
            for part in hidden.split(CHUNK):
                args = (part, weight)
                run = partial(chunk_loss, in_fp32=in_fp32)
                losses.append(checkpoint(run, *args, use_reentrant=False))
        sum(losses).backward()

    return peak_allocated(step, weight, inputs) / (VOCABULARY * WIDE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["checkpointed-loss", "checkpointed-fp32-loss"])
@pytest.mark.parametrize("trained", [False, True])
def test_checkpointed_chunks_hold_what_torch_holds(name: str, trained: bool) -> None:
    """With few tokens logits are small: copies of the projection and its gradients are left."""
    software = software_profile(f"torch-trainer+{name}")
    adapters = {} if trained else {"adapter": "lora", "adapter_rank": 1}
    scenario = make_scenario(sample_model("llama"), seq_len=8192, global_batch_size=1, **adapters)
    model = adapted(scenario.model, scenario.workload)
    view = rank_view(model, scenario.workload, software, Plan())
    head = head_gradients(view, np.zeros(1)).head
    norm = 2.0 * scenario.model.hidden_size * trained  # whose gradient is the head block's, too
    held = max(first(own.size) + first(left.size) for own, left in head) - norm
    each = held / scenario.model.head_multiply
    found = checkpointed_peak(in_fp32="fp32" in name, trained=trained)
    logits = 16.0 * CHUNK / WIDE  # of a chunk, for each element of the projection
    assert 0.0 <= found - each <= 1.5 * logits
    copies = first(loss_copy_bytes(view)) / scenario.model.head_multiply
    assert copies == (6.0 if "fp32" in name else 0.0)
    names = [{row.name for row in rank_ledger(view).live(at)} for at in (LOSS_BACKWARD, OPTIMIZER)]
    assert ["copies of the projection for the loss" in each for each in names] == [
        copies > 0,
        False,
    ]
