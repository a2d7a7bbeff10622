from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from cost_models.compute.attention import CoreWork, attention_core_seconds, core_ratio
from cost_models.compute.elementwise import (
    ElementwiseWork,
    elementwise_bytes_per_token,
    optimizer_seconds,
)
from cost_models.compute.flops import layer_flops_per_token, linear_flops_per_token
from cost_models.compute.head import head_seconds
from cost_models.compute.layer import LayerWork, layer_seconds
from cost_models.compute.matrices import matrices_seconds
from cost_models.compute.one_hot_dispatch import one_hot_seconds
from cost_models.compute.rates import Rates
from cost_models.model.families import model_spec
from cost_models.model.presets import load_preset
from cost_models.model.spec import LayerKind, ModelSpec, Weight
from cost_models.partition.recomputed_layers import skipped_last_matrix
from hardware_profiles.software.trainer import software_profile
from tests.cost_models.model.test_families import tiny
from tests.samples import CONFIGS, GPT3, llama, sample_model

SOFTWARE = software_profile("shardplan")
# memory so fast that only operations count, and the other way round
COMPUTE_BOUND = Rates(matmul=1e12, memory=1e30, operator=0.0, host_is_device=False)
MEMORY_BOUND = Rates(matmul=1e30, memory=1e12, operator=0.0, host_is_device=False)
BOTH = Rates(matmul=1e12, memory=1e11, operator=0.0, host_is_device=False)


def layer(model: ModelSpec, rate: Rates, tokens: float, seq_len: int, **options):
    values = {
        "tensor_parallel": 1,
        "sequence_parallel": False,
        "recompute_full": False,
        "recompute_core": False,
        "kernel": "eager",
        "compute_bytes": 2.0,
        "software": SOFTWARE,
    }
    kind, hidden_size = model.kinds[0], model.hidden_size
    return layer_seconds(
        LayerWork(kind, hidden_size, seq_len, tokens, rate=rate, **values | options)
    )


@pytest.mark.parametrize("name", sorted(set(CONFIGS)))
def test_a_compute_bound_layer_takes_its_flops(name: str) -> None:
    """Time and FLOPs are two walks over the same matrices."""
    model = sample_model(name)
    seconds = layer(model, COMPUTE_BOUND, 512.0, 128)
    flops = 512 * float(layer_flops_per_token(model.kinds[0], 128))
    assert float(seconds.forward) == pytest.approx(flops / 1e12)
    assert float(seconds.backward) == pytest.approx(2 * flops / 1e12)
    assert float(seconds.recompute) == 0


@pytest.mark.parametrize("t", [2, 4, 8])
def test_tensor_parallel_ranks_share_the_flops(t: int) -> None:
    model = model_spec(GPT3, name="gpt3")
    one, shared = (
        float(layer(model, COMPUTE_BOUND, 2048.0, 2048, tensor_parallel=n).forward) for n in (1, t)
    )
    assert shared == pytest.approx(one / t)


def core(kernel: str, *, causal: bool = True, window: int | None = None) -> float:
    attention = replace(llama().kinds[0].attention, causal=causal, window=window)
    return float(
        attention_core_seconds(
            CoreWork(attention, 1024.0, 1024, 1, kernel, 2.0, COMPUTE_BOUND, SOFTWARE)
        )
    )


def test_flash_attention_skips_what_a_causal_mask_hides() -> None:
    seen = 64 * (1 - 64 / 2048)  # keys of 1024: the first tokens see less than the window
    for keys, seconds in ((512, core("flash")), (seen, core("flash", window=64))):
        assert seconds == pytest.approx(core("flash", causal=False) * keys / 1024)
    assert core("flash", window=1024) == core("flash"), "a window that hides nothing"
    assert core("flash", causal=False, window=64) == pytest.approx(core("flash", causal=False) / 16)
    assert core("eager") == core("eager", causal=False) == core("eager", window=64)


def test_flash_backward_is_five_matmuls_for_two_at_a_lower_rate_on_gpus() -> None:
    """arXiv:2307.08691, sec. 3.1.2; the rate: arXiv:2407.08608, fig. 5 and 6."""
    model = llama()
    matrices = 512 * linear_flops_per_token(model.kinds[0]) / 1e12
    seconds = layer(model, COMPUTE_BOUND, 512.0, 128, kernel="flash")
    forward_core = float(seconds.forward) - matrices
    assert float(seconds.backward) == pytest.approx(2 * matrices + 2.5 / 0.85 * forward_core)
    assert core_ratio("flash", structs.replace(COMPUTE_BOUND, host_is_device=True)) == 2.5
    assert core_ratio("eager", COMPUTE_BOUND) == 2.0


def test_recomputation_is_the_forward_pass_or_the_core() -> None:
    model = llama()
    whole = SOFTWARE.changed({"kernels.recomputes_whole_layers": True})
    full = layer(model, BOTH, 512.0, 128, recompute_full=True, software=whole)
    assert float(full.recompute) == float(full.forward)
    kept = whole.changed({"kernels.recomputes_attention": False})
    without = layer(model, BOTH, 512.0, 128, recompute_full=True, software=kept)
    core = layer(model, BOTH, 512.0, 128, recompute_core=True, software=kept).recompute
    assert float(full.recompute - without.recompute) == pytest.approx(float(core))
    selective = layer(model, COMPUTE_BOUND, 512.0, 128, recompute_core=True)
    matrices = 512 * linear_flops_per_token(model.kinds[0]) / 1e12
    assert float(selective.recompute) == pytest.approx(float(selective.forward) - matrices)


def test_the_last_matrix_is_recomputed_only_where_somebody_reads_its_result() -> None:
    kind = llama().kinds[0]

    def left_out(kind: LayerKind, software: str = "shardplan", dropout: bool = False) -> list[str]:
        profile = software_profile(software)
        return [w.name for w in skipped_last_matrix(kind, hidden_dropout=dropout, software=profile)]

    assert left_out(kind) == left_out(kind, "torchtune") == ["mlp.down_proj.weight"]
    assert left_out(kind, "megatron") == left_out(kind, "hf-trainer") == []
    assert left_out(replace(kind, norms_after=True)) == left_out(kind, dropout=True) == []
    mixtral = model_spec(load_preset("mixtral-8x7b").config, name="mixtral")
    assert left_out(mixtral.kinds[0]) == []
    model = llama()
    full = layer(model, COMPUTE_BOUND, 512.0, 128, recompute_full=True)
    down = next(w for w in kind.weights if w.name == "mlp.down_proj.weight")
    saved = float(full.forward) - float(full.recompute)
    assert saved == pytest.approx(2 * 512 * down.numel / COMPUTE_BOUND.matmul)


def test_sequence_parallelism_splits_norms_and_residuals() -> None:
    model = llama()

    def moved(t: int, sequence: bool) -> float:
        return float(
            sum(
                elementwise_bytes_per_token(
                    ElementwiseWork(model.kinds[0], model.hidden_size, 2.0, t, sequence, SOFTWARE)
                )
            )
        )

    assert moved(4, True) == pytest.approx(moved(1, False) / 4)
    assert moved(4, True) < moved(4, False) < moved(1, False)


def test_experts_meet_the_tokens_that_the_router_sends() -> None:
    model = sample_model("mixtral")
    kind = model.kinds[0]
    seconds = float(
        matrices_seconds(kind.weights, 512.0, 1, 2.0, COMPUTE_BOUND, experts_per_token=2).forward
    )
    assert seconds == pytest.approx(512 * linear_flops_per_token(kind) / 1e12)
    # few tokens: every expert's weights are read all the same
    few = float(
        matrices_seconds(kind.weights, 4.0, 1, 2.0, MEMORY_BOUND, experts_per_token=2).forward
    )
    read = 2.0 * sum(w.numel for w in kind.weights if w.is_matrix) / 1e12
    assert few > read


@pytest.mark.parametrize(("capacity", "expected"), [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0)])
def test_one_hot_masks_multiply_every_slot_with_a_whole_sequence(
    capacity: float, expected: float
) -> None:
    """Two products forward and three backward of 2 f k s h FLOP a token; f rows for each expert."""
    model = sample_model("mixtral")
    kind, hidden = model.kinds[0], model.hidden_size
    tokens, seq_len, chosen = 512.0, 128, kind.feed_forward.experts_per_token
    sorted_ = layer(model, COMPUTE_BOUND, tokens, seq_len)
    software = SOFTWARE.changed({"kernels.one_hot_capacity": capacity})
    masked = layer(model, COMPUTE_BOUND, tokens, seq_len, software=software)
    experts = matrices_seconds(
        tuple(w for w in kind.weights if w.is_routed_expert),
        tokens,
        1,
        2.0,
        COMPUTE_BOUND,
        experts_per_token=chosen,
    )
    product = 2.0 * expected * chosen * seq_len * hidden * tokens / COMPUTE_BOUND.matmul
    padding = max(capacity, 1.0) - 1.0
    forward = sorted_.forward + 2.0 * product + padding * experts.forward
    assert float(masked.forward) == pytest.approx(float(forward))
    more = padding * (experts.inputs + experts.weights)
    assert float(masked.backward) == pytest.approx(float(sorted_.backward + 3.0 * product + more))


def test_rows_weighted_operator_by_operator_move_more() -> None:
    model = sample_model("mixtral")
    chosen, hidden = model.kinds[0].feed_forward.experts_per_token, model.hidden_size
    once = layer(model, MEMORY_BOUND, 512.0, 128)
    software = SOFTWARE.changed({"kernels.weighting_bytes": 18.0})
    found = layer(model, MEMORY_BOUND, 512.0, 128, software=software)
    more = 18.0 * chosen * hidden * 512.0 / MEMORY_BOUND.memory
    assert float(found.forward - once.forward) == pytest.approx(more)
    assert float(found.backward - once.backward) == pytest.approx(2.0 * more)


def test_one_hot_masks_are_written_in_place_of_sorted_tokens() -> None:
    model = sample_model("mixtral")
    chosen, hidden = model.kinds[0].feed_forward.experts_per_token, model.hidden_size
    filled, back = one_hot_seconds(1.25 * chosen, hidden, 512.0, 128, 1, 2.0, MEMORY_BOUND)
    slots = 1.25 * chosen * 128
    mask = 2.0 * 512.0 * slots
    product = mask + 2.0 * (4.0 * slots + 512.0) * hidden  # mask, slots of four sequences, tokens
    assert float(filled) == pytest.approx((2.0 * product + 2.0 * mask) / 1e12)
    assert float(back) == pytest.approx((3.0 * product + mask) / 1e12)


@pytest.mark.parametrize("narrow", [16, 32])
def test_the_projection_of_a_narrow_embedding_is_narrow(narrow: int) -> None:
    model = model_spec(tiny("opt", word_embed_proj_dim=narrow), name="opt")
    seconds = head_seconds(model, 64.0, 1, 2.0, COMPUTE_BOUND, SOFTWARE)
    project_out = 2 * 64 * 32 * narrow if narrow != 32 else 0
    assert float(seconds.forward) == pytest.approx((2 * 64 * 96 * narrow + project_out) / 1e12)


def test_checkpointed_chunks_multiply_the_projection_again() -> None:
    model = model_spec(tiny("opt"), name="opt")
    again = SOFTWARE.changed({"loss.repeats_chunks": True})
    once, twice = (head_seconds(model, 64.0, 1, 2.0, COMPUTE_BOUND, s) for s in (SOFTWARE, again))
    assert float(twice.backward - once.backward) == pytest.approx(2 * 64 * 96 * 32 / 1e12)
    assert float(twice.forward) == float(once.forward)


def test_chunks_of_ligers_loss_add_to_the_whole_gradient_of_the_projection() -> None:
    """64 tokens, a vocabulary of 96 and 32 features: 3 shares of 22 tokens, 2 chunks of 32."""
    model = model_spec(tiny("opt"), name="opt")
    moves = Rates(1e30, 1e12, 0.0, False)
    whole = SOFTWARE.changed({"loss.forward_bytes": 0.0})
    chunked = whole.changed({"loss.hidden_sized_chunks": True})
    autocast = chunked.changed({"precision.autocasts_weights": True})
    one, two, cast = (
        float(head_seconds(model, 64.0, 1, 2.0, moves, s).forward)
        for s in (whole, chunked, autocast)
    )
    projection = 96 * 32 / 1e12
    assert cast - two == pytest.approx(2 * (12 - 2) * projection)
    assert two - one >= 2 * 2 * projection


def test_an_odd_vocabulary_triples_the_projection_unless_it_is_padded() -> None:
    """On a GPU, in 16 bits; half of an odd vocabulary is not one."""
    gpu = structs.replace(COMPUTE_BOUND, units=108.0)
    heads = {v: model_spec({**GPT3, "vocab_size": v}, name="gpt") for v in (50256, 50257)}

    def over(rate: Rates, t: int, compute_bytes: float = 2.0, *, pads: bool = False) -> float:
        software = SOFTWARE.changed({"loss.pads_vocabulary": pads})
        odd, even = (
            head_seconds(heads[v], 4096.0, t, compute_bytes, rate, software) for v in (50257, 50256)
        )
        assert float(odd.backward / even.backward) == pytest.approx(
            float(odd.forward / even.forward), rel=1e-3
        )
        return float(odd.forward / even.forward)

    assert over(gpu, 1) == pytest.approx(3.0, rel=1e-3)
    assert over(gpu, 1, pads=True) == pytest.approx(1.0, rel=1e-3)
    assert over(gpu, 2) == pytest.approx(1.0, rel=1e-3)
    assert over(gpu, 1, compute_bytes=4.0) == pytest.approx(1.0, rel=1e-3)
    assert over(COMPUTE_BOUND, 1) == pytest.approx(1.0, rel=1e-3)


def test_the_optimizer_moves_its_bytes() -> None:
    seconds = float(optimizer_seconds(1e9, MEMORY_BOUND, 40.0))
    assert seconds == pytest.approx(40.0 * 1e9 / 1e12)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_cut_dimension_shrinks_whichever_way_a_matrix_is_stored(transposed: bool) -> None:
    """GPT-2 stores (in, out), the others (out, in)."""
    wide, narrow, t, tokens = 4096, 512, 8, 64.0
    column, row = (wide, narrow), (narrow, wide)
    if transposed:
        column, row = column[::-1], row[::-1]
    cut = (
        Weight("a", column, "linear", "column", transposed=transposed),
        Weight("b", row, "linear", "row", transposed=transposed),
    )
    for weight in cut:  # both are cut along the wide side
        seconds = float(matrices_seconds((weight,), tokens, t, 2.0, MEMORY_BOUND).forward)
        moved = 2.0 * (tokens * narrow + narrow * wide / t + tokens * wide / t)
        assert seconds == pytest.approx(moved / 1e12)


def test_a_flash_core_takes_its_flops_at_the_rate_that_the_kernel_reaches() -> None:
    attention = replace(llama().kinds[0].attention, window=None)

    def seconds(rate: Rates, software: Any = SOFTWARE) -> float:
        return float(
            attention_core_seconds(
                CoreWork(attention, 1024.0, 1024, 1, "flash", 2.0, rate, software)
            )
        )

    usual = seconds(COMPUTE_BOUND)
    assert seconds(structs.replace(COMPUTE_BOUND, flash=0.6)) == pytest.approx(usual / 0.6)
    half = SOFTWARE.changed({"kernels.flash_efficiency": SOFTWARE.kernels.flash_efficiency / 2})
    assert seconds(COMPUTE_BOUND, half) == pytest.approx(2 * usual)
