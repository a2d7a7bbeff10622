"""What the embedding and the head save, by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cost_models.activations.embedding_and_head import (
    embedding_bytes_per_token,
    head_backward_bytes_per_token,
    head_bytes_per_token,
)
from cost_models.activations.encoder_decoder import shared_bytes_per_token
from cost_models.model.families import model_spec
from cost_models.model.freezing import with_frozen_parts
from cost_models.model.presets import load_preset
from cost_models.model.spec import ModelSpec
from cost_models.partition.stages import contents_of_rank
from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import software_profile
from tests.samples import rank_view

WORKLOAD = Workload(seq_len=512, global_batch_size=8)  # bf16
SOFTWARE = software_profile("shardplan")
H = 768
STATISTICS = 8  # of a layer norm, a token
OPT_350M: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 1024,
    "ffn_dim": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
    "dropout": 0.1,
}


def outer(model: ModelSpec, plan: Plan, stages: int = 1, rank: int = 0) -> tuple[float, float]:
    """Bytes a token: what the embedding saves, and norm and projection."""
    size = model.num_layers // stages
    ranges = [(size * s, size * (s + 1)) for s in range(stages)]
    contents = contents_of_rank(model, ranges, range(stages), rank)
    embedding = embedding_bytes_per_token(rank_view(model, WORKLOAD, SOFTWARE, plan, contents))
    tail, *_ = head_bytes_per_token(rank_view(model, WORKLOAD, SOFTWARE, plan, contents))
    return float(np.ravel(embedding)[0]), float(np.ravel(tail)[0])


def preset(name: str, **changes: Any) -> ModelSpec:
    return model_spec(dict(load_preset(name).config) | changes, name=name)


def test_llama_saves_a_norm_and_the_input_of_the_projection() -> None:
    model = preset("llama-3-8b")
    assert outer(model, Plan()) == (0.0, (4 + 2) * 4096 + 4 + 2 * 4096)


def test_bert_saves_a_norm_of_the_embedding_and_a_dense_layer_of_the_head() -> None:
    """Embedding: norm, mask. Head: input, activation, norm and its result: 2 bytes each."""
    model = preset("bert-base")
    norm = 2 * H + STATISTICS
    assert outer(model, Plan()) == (norm + H, 2 * H + 2 * H + norm + 2 * H)
    without = preset("bert-base", hidden_dropout_prob=0.0)
    assert outer(without, Plan())[0] == norm


def test_sequence_parallelism_splits_them() -> None:
    model = preset("bert-base")
    whole = outer(model, Plan())
    split = outer(model, Plan(tensor_parallel=4, sequence_parallel=True))
    assert split == (whole[0] / 4, whole[1] / 4)
    assert outer(model, Plan(tensor_parallel=4)) == whole


def test_each_is_on_its_stage_only() -> None:
    model = preset("bert-base")
    whole, plan = outer(model, Plan()), Plan(pipeline_parallel=3, num_microbatches=4)
    assert [outer(model, plan, 3, rank) for rank in range(3)] == [
        (whole[0], 0.0),
        (0.0, 0.0),
        (0.0, whole[1]),
    ]


def test_opt_saves_the_inputs_of_its_narrow_projections() -> None:
    """Of 512 features up, of 1024 down (no norm between), of 512 to the vocabulary."""
    model = model_spec(OPT_350M, name="opt-350m")
    assert outer(model, Plan())[1] == 2 * 1024 + 2 * 512
    assert outer(model, Plan())[0] == 2 * 512 + 1024 * (model.embedding_dropout > 0)


@pytest.mark.parametrize("stages", [1, 2])
def test_t5_drops_out_at_both_ends_of_both_stacks(stages: int) -> None:
    h = 1024
    model = preset("t5-large")
    plan = Plan(pipeline_parallel=stages, num_microbatches=4)
    found = [outer(model, plan, stages, rank) for rank in range(stages)]
    assert sum(embedding for embedding, _ in found) == 3 * h
    assert found[-1][0] >= 2 * h  # where the decoder begins
    norm = (4 + 2 + 2) * h + 4
    assert found[-1][1] == norm + h + 2 * h


def test_nothing_asks_a_norm_above_frozen_layers_for_its_inputs_gradient() -> None:
    """Its weight needs what it multiplies (2 h); the fp32 copy and its number are not kept."""
    model = with_frozen_parts(preset("llama-3-8b"), "embedding,layers:0-1")
    assert outer(model, Plan()) == (-(4 * 4096 + 4), outer(preset("llama-3-8b"), Plan())[1])
    assert outer(model, Plan(recompute="full"))[0] == 0.0


def test_a_frozen_norm_before_a_trained_projection() -> None:
    h = 4096
    frozen = with_frozen_parts(preset("llama-3-8b"), "norms")
    assert outer(frozen, Plan())[1] == 4 * h + 4 + 2 * h
    alone = with_frozen_parts(preset("llama-3-8b"), "all-but-head,norms")
    assert outer(alone, Plan())[1] == 2 * h  # nothing below it is trained
    tied = with_frozen_parts(preset("llama-3.2-1b"), "norms")
    assert outer(tied, Plan())[1] == 4 * 2048 + 4 + 2 * 2048  # the table is trained


def test_the_projection_gives_the_gradient_of_its_input() -> None:
    """In bf16; with sequence parallelism beside that input, gathered."""
    model = preset("llama-3-8b")

    def size(plan: Plan, rank: int) -> float:
        contents = contents_of_rank(model, [(0, 16), (16, 32)], range(2), rank)
        view = rank_view(model, WORKLOAD, SOFTWARE, plan, contents)
        return float(np.ravel(head_backward_bytes_per_token(view))[0])

    plan = Plan(pipeline_parallel=2)
    assert [size(plan, rank) for rank in range(2)] == [0.0, 2 * 4096]
    shared = Plan(pipeline_parallel=2, tensor_parallel=2, sequence_parallel=True)
    assert size(shared, 1) == 2 * 2 * 4096


@pytest.mark.parametrize(("kernel", "saved"), [("flash", 1.0), ("eager", 0.0)])
def test_scores_get_t5s_position_table_once(kernel: str, saved: float) -> None:
    """An encoder's table of every sequence, c a s a token; eager attention saves none itself."""
    model = preset("t5-small")
    workload = replace(WORKLOAD, attention_kernel=kernel)  # type: ignore[arg-type]
    contents = contents_of_rank(model, [(0, model.num_layers)], range(1), 0)
    attention = model.kinds[0].attention

    def tables(recompute: str) -> float:
        plan = Plan(micro_batch_size=4, recompute=recompute)  # type: ignore[arg-type]
        view = rank_view(model, workload, SOFTWARE, plan, contents)
        size = float(np.ravel(shared_bytes_per_token(view))[0])
        without = replace(workload, attention_kernel="eager")
        plain = rank_view(model, without, SOFTWARE, Plan(), contents)
        size -= float(np.ravel(shared_bytes_per_token(plain))[0])
        return size / (2 * attention.num_heads * WORKLOAD.seq_len)

    one_for_each_sequence = 1 + 1 / 4  # and the decoder's for all four
    assert tables("none") == saved * one_for_each_sequence
    assert tables("full") == one_for_each_sequence
