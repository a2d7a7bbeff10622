"""Gradients of the output projection that wait: by hand, and on the memory of a real torch step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cost_models.memory.head_gradients import HeadGradients, head_gradients
from cost_models.memory.ledger import first
from cost_models.partition.stages import even_split_contents
from cost_models.plan.plan import Plan, PlanTable
from cost_models.scenario import Scenario
from hardware_profiles.software.trainer import SoftwareProfile, software_profile
from tests.allocations import peak_allocated
from tests.samples import make_scenario, rank_view, sample_model

VOCABULARY, HIDDEN, TOKENS = 4096, 64, 8
TABLE = VOCABULARY * HIDDEN * 4  # bytes
LOGITS = VOCABULARY * TOKENS * 4


def waiting(
    name: str, software: SoftwareProfile, plan: Plan | None = None, logits: float = 0.0
) -> tuple[Scenario, HeadGradients]:
    scenario = make_scenario(sample_model(name), seq_len=8192, global_batch_size=1)
    table = PlanTable.from_plans([plan or Plan()])
    (rank,) = even_split_contents(scenario.model, 1, 1)
    found = head_gradients(
        rank_view(scenario.model, scenario.workload, software, table, rank), np.array([logits])
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
