import numpy as np
import pytest

from cost_models.activations.operators import activation_copies, norm_bytes
from cost_models.activations.saved import layer_regions, saved_bytes_per_token
from cost_models.model.families import model_spec
from cost_models.model.spec import ModelSpec
from cost_models.plan.recompute import FULL, NONE, SELECTIVE
from cost_models.plan.workload import Workload
from hardware_profiles.software.trainer import software_profile
from tests.samples import GPT3, llama, sample_model

S, B = 2048, 1  # GPT-3 175B, as in Korthikanti et al., table 3
H, A = 12288, 96


def layer_bytes(
    model: ModelSpec,
    seq_len: int,
    tensor_parallel: object = 1,
    *,
    software: str,
    kernel: str,
    keeps_gathered_inputs: bool = False,
    sequence_parallel: bool = False,
    recompute: int = NONE,
    layer: int = 0,
) -> np.ndarray:
    """Saved bytes a token of one layer, in 16 bits."""
    profile = software_profile(software)
    regions = layer_regions(
        model,
        Workload(seq_len, 1, attention_kernel=kernel),  # type: ignore[arg-type]
        profile,
        model.kinds[model.pattern[layer]],
    )
    return saved_bytes_per_token(  # type: ignore[return-value]
        regions,
        model.hidden_size,
        compute_bytes=2.0,
        tensor_parallel=tensor_parallel,  # type: ignore[arg-type]
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        keeps_gathered_inputs=keeps_gathered_inputs,
    )


def gpt3_bytes(tensor_parallel: int = 1, **options: object) -> float:
    """Bytes of one layer for s b tokens."""
    model = model_spec(GPT3, name="gpt-3")
    per_token = layer_bytes(
        model,
        S,
        tensor_parallel,
        software="megatron",
        kernel="eager",
        **options,  # type: ignore[arg-type]
    )
    return float(per_token) * S * B


def test_korthikanti_eq_1_without_parallelism() -> None:
    """arXiv:2205.05198, eq. 1: s b h (34 + 5 a s / h)."""
    assert gpt3_bytes() == S * B * H * (34 + 5 * A * S / H)


@pytest.mark.parametrize("t", [2, 4, 8, 16])
def test_korthikanti_eq_2_with_tensor_parallelism(t: int) -> None:
    expected = S * B * H * (10 + 24 / t + 5 * A * S / (H * t))
    assert gpt3_bytes(t) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("t", [2, 4, 8, 16])
def test_korthikanti_eq_4_with_sequence_parallelism(t: int) -> None:
    expected = S * B * H / t * (34 + 5 * A * S / H)
    assert gpt3_bytes(t, sequence_parallel=True) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("t", [1, 8])
def test_korthikanti_eq_6_with_selective_recomputation(t: int) -> None:
    saved = gpt3_bytes(t, sequence_parallel=t > 1, recompute=SELECTIVE)
    assert saved == pytest.approx(34 * S * B * H / t, rel=1e-12)


def test_korthikanti_table_2_full_recomputation() -> None:
    assert gpt3_bytes(8, recompute=FULL) == 2 * S * B * H


def test_selective_recomputation_saves_70_percent_of_gpt3() -> None:
    """arXiv:2205.05198, sec. 5: 5 a s / h = 80 for GPT-3, 70 % of the activations."""
    assert 1 - gpt3_bytes(recompute=SELECTIVE) / gpt3_bytes() == pytest.approx(0.70, abs=0.005)


# --- torch's own layers: traced equalities for a Llama layer under FSDP2 (bf16, SDPA) ----------
# 20 H + 4 Hkv + 8 F + 4 a + 8 bytes a token: two fp32 inputs and 16-bit copies of RMS norms (12 H),
# two inputs of matrices (4 H), queries and outputs (4 H), keys and values (4 Hkv), four 16-bit
# tensors of the MLP (8 F), the log-sum-exp (4 a), and the statistics of two norms (8)

LLAMA3_8B = {"H": 4096, "Hkv": 1024, "F": 14336, "a": 32}


def split(H: int, Hkv: int, F: int, a: int) -> int:
    return 4 * H + 4 * Hkv + 8 * F + 4 * a


def llama_bytes(t: int = 1, **options: object) -> float:
    model = sample_model("llama-3-8b")
    return float(
        layer_bytes(model, 4096, t, software="shardplan", kernel="flash", **options)  # type: ignore[arg-type]
    )


def test_llama_layer_as_traced() -> None:
    H = LLAMA3_8B["H"]
    assert llama_bytes() == 16 * H + split(**LLAMA3_8B) + 8
    assert llama_bytes() * 4096 / 2**20 == pytest.approx(784.53, abs=0.01)  # traced MiB


@pytest.mark.parametrize("t", [2, 8])
def test_llama_layer_with_tensor_parallelism_as_traced(t: int) -> None:
    H = LLAMA3_8B["H"]
    assert llama_bytes(t) == 16 * H + split(**LLAMA3_8B) / t + 8
    # DTensor keeps the gathered inputs of the matrices
    gathered = llama_bytes(t, sequence_parallel=True, keeps_gathered_inputs=True)
    assert gathered == 12 * H / t + 4 * H + (split(**LLAMA3_8B) + 8) / t
    # the executor keeps the split ones and gathers them again
    assert llama_bytes(t, sequence_parallel=True) == llama_bytes() / t


def test_llama_tensor_parallel_8_in_traced_mebibytes() -> None:
    gathered = llama_bytes(8, sequence_parallel=True, keeps_gathered_inputs=True)
    assert gathered * 4096 / 2**20 == pytest.approx(154.07, abs=0.01)
    assert llama_bytes(8) * 4096 / 2**20 == pytest.approx(322.09, abs=0.01)


def test_fully_recomputed_llama_layer_as_traced() -> None:
    assert llama_bytes(recompute=FULL) * 4096 / 2**20 == 32
    assert llama_bytes(8, sequence_parallel=True, recompute=FULL) * 4096 / 2**20 == 4


def test_values_that_are_a_view_keep_queries_and_keys_before_their_rotation() -> None:
    """litgpt's fused matrix: 2 (a + k) d bytes more, whether its weights are trained or not."""
    fused, apart = (
        layer_bytes(llama(), 4096, software=f"torch-trainer{words}", kernel="flash")
        for words in ("+fused-qkv", "")
    )
    attention = llama().kinds[0].attention
    heads = attention.num_heads + attention.num_kv_heads
    assert fused - apart == 2.0 * heads * attention.head_dim


def test_flash_attention_grows_with_tokens_and_eager_with_their_square() -> None:
    model = llama()

    def total(seq_len: int, kernel: str) -> float:
        return float(layer_bytes(model, seq_len, software="shardplan", kernel=kernel)) * seq_len

    assert total(512, "flash") == 2 * total(256, "flash")
    assert total(4096, "eager") > 2.5 * total(2048, "eager")


def test_dropout_masks_are_kept_only_where_there_is_dropout() -> None:
    with_dropout = model_spec(GPT3, name="x")
    without = model_spec(GPT3 | {"resid_pdrop": 0, "attn_pdrop": 0}, name="x")

    def per_token(model: ModelSpec) -> float:
        return float(layer_bytes(model, S, software="megatron", kernel="eager"))

    # two masks of h bytes; of each head and pair of tokens a mask and the dropped scores (1 + 2)
    assert per_token(with_dropout) - per_token(without) == 2 * H + 3 * A * S


@pytest.mark.parametrize(
    ("name", "softmax", "dropped"),
    [
        ("llama-3-8b", 4 + 2, 0),  # fp32, and a 16-bit copy
        ("gpt2", 2, 1 + 2),  # 16 bits; a mask and what is left
        ("bert-base", 2, 1 + 2),
        ("t5-large", 2, 1 + 2),
        ("opt-6.7b", 4 + 2, 0),
    ],
)
def test_eager_scores_are_kept_as_each_family_computes_them(
    name: str, softmax: int, dropped: int
) -> None:
    model = sample_model(name)
    shorter, longer = (
        float(layer_bytes(model, s, software="shardplan", kernel="eager")) for s in (256, 512)
    )
    heads = model.kinds[0].attention.num_heads
    assert longer - shorter == 256 * heads * (softmax + dropped)


def test_t5_keeps_the_16_bit_input_of_its_norms_too() -> None:
    """It multiplies the input itself; the fp32 copy was only squared."""
    model = sample_model("t5-large")
    kind, software = model.kinds[0], software_profile("shardplan")
    assert norm_bytes(kind, 1.0, 2.0, software) == 4 + 2 + 2 + 4
    llama_kind = sample_model("llama-3-8b").kinds[0]
    assert norm_bytes(llama_kind, 1.0, 2.0, software) == 4 + 2 + 4
    # one tensor in fp32
    assert norm_bytes(kind, 1.0, 4.0, software) == norm_bytes(llama_kind, 1.0, 4.0, software)


def test_experts_keep_what_their_tokens_need() -> None:
    """Twice the experts a token visits, twice what lies between their matrices."""
    base = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
        "num_local_experts": 8,
    }
    one, two, four = (
        float(
            layer_bytes(
                model_spec(base | {"num_experts_per_tok": k}, name="x"),
                128,
                software="shardplan",
                kernel="flash",
            )
        )
        for k in (1, 2, 4)
    )
    assert four - two == 2 * (two - one)
    # an expert's token: 4 tensors of F in 16 bits, its copy and its output
    assert two - one == 4 * 2 * 96 + 2 * 2 * 64


def test_what_swiglu_reads_is_saved_in_8_bits_where_the_trainer_is_told_to() -> None:
    """Gate and up projection in a byte each, their product in 16 bits."""
    model = sample_model("llama")
    sizes = [
        float(layer_bytes(model, S, software=software, kernel="flash"))
        for software in ("nemo", "nemo+fp8-activation-inputs")
    ]
    assert sizes[0] - sizes[1] == 2 * model.kinds[0].feed_forward.ffn_hidden_size


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_new_gelu_keeps_what_autograd_saves(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch.autograd.graph import saved_tensors_hooks
    from transformers.activations import ACT2FN

    if autocast:  # as on a GPU; on a CPU autocast leaves powers in 16 bits
        power = torch.pow
        monkeypatch.setattr(torch, "pow", lambda x, exponent: power(x.float(), exponent))
    x = torch.randn(4, 32, dtype=torch.bfloat16, requires_grad=True)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = ACT2FN["gelu_new"](x.clone())
    assert result is not None
    model = sample_model("gpt2")
    profile = software_profile("hf-trainer+autocast" if autocast else "hf-trainer")
    copies = activation_copies(model.kinds[0].feed_forward, profile)
    assert sum(saved.values()) == 2.0 * copies * x.numel()


TRACED = {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("software", "kv_heads", "expected"),
    [("nanotron", 8, 44.0), ("internevo", 8, 48.0), ("internevo", 2, 43.5)],
)
def test_layers_of_trainers_as_traced(software: str, kv_heads: int, expected: float) -> None:
    """By torch's saved tensors; InternEvo keeps the fused matrix's output for its values."""
    model = llama(**TRACED, num_key_value_heads=kv_heads)
    found = layer_bytes(model, 256, software=software, kernel="flash")
    statistics = 2 * 4 + 8 * 4  # of both norms, and of the softmax of each head, in fp32
    assert float(found) == pytest.approx(expected * 512 + statistics)


def test_norms_of_internevo_that_run_again_keep_their_inputs_once() -> None:
    model = llama(**TRACED, num_key_value_heads=8)
    found = layer_bytes(model, 256, 8, software="internevo", kernel="flash")
    assert float(found) == pytest.approx(8 * 512 + 40 * 512 / 8 + 8 * 4 / 8 + 2 * 4)
