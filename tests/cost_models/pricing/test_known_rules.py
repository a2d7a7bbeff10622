"""Rules of thumb and published tables of memory, each with its source, against our formulas.

The figures of the ZeRO paper and of Korthikanti et al. that are formulas of their own stand in
``test_model_states`` and ``test_activations``; here whole plans are priced.
"""

from dataclasses import replace
from typing import Any

import pytest

import planner
from cost_models.activations.saved import layer_regions, saved_bytes_per_token
from cost_models.memory.parts import MemoryParts
from cost_models.model.families import model_spec
from cost_models.model.lora import QUANTISED_BYTES, adapted
from cost_models.model.parameters import kind_numel
from cost_models.model.presets import load_preset
from cost_models.plan.plan import Plan, PlanTable
from cost_models.plan.recompute import FULL, NONE, SELECTIVE
from cost_models.plan.workload import Workload
from cost_models.pricing.estimate import price
from cost_models.scenario import Scenario
from hardware_profiles.software.trainer import software_profile
from tests.samples import GPT3, make_scenario, sample_model, zero_states

GB, GIB, MIB = 1e9, 2.0**30, 2.0**20


def memory_of(scenario: Scenario, plan: Plan) -> MemoryParts:
    return price(scenario, PlanTable.from_plans([plan])).memory


def states_of(model: str, plan: Plan, *, software: str = "megatron") -> float:
    """Weights, gradients and optimizer of a whole plan, with next to no activations."""
    scenario = make_scenario(
        model, "1xA100-80GB", seq_len=1, global_batch_size=plan.global_batch_size, software=software
    )
    memory = memory_of(scenario, plan)
    return float((memory.weights + memory.gradients + memory.optimizer)[0])  # type: ignore[index]


@pytest.mark.parametrize("name", ["llama-2-7b", "gpt2-xl", "mistral-7b", "llama-3-8b"])
def test_16_bytes_a_parameter_and_2_more_for_gradients_in_fp32(name: str) -> None:
    """ZeRO (arXiv:1910.02054), sec. 3.1: 2 + 2 + 12 = 16 bytes with 16-bit gradients.

    Megatron-LM adds gradients up in fp32: 2 + 4 + 12 = 18 (its docs, "Distributed optimizer": 18
    bytes without it).
    """
    parameters = sample_model(name).num_parameters
    assert float(zero_states(parameters, 1, 0)) == 16 * parameters
    accumulating = Plan(num_microbatches=2)
    assert states_of(name, accumulating) == pytest.approx(18 * parameters, rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_6_plus_12_over_d_bytes_with_a_distributed_optimizer(ranks: int) -> None:
    """Megatron-LM, docs "Distributed optimizer": 6 + 12 / d bytes a parameter (fp32 gradients)."""
    plan = Plan(data_parallel=ranks, zero_stage=1, num_microbatches=2)
    parameters = sample_model("llama-3-8b").num_parameters
    expected = (6 + 12 / ranks) * parameters
    assert states_of("llama-3-8b", plan) == pytest.approx(expected, rel=1e-3)


def test_a_llama_of_7_billion_has_112_gb_of_states() -> None:
    """The rule 7 x 16 = 112 GB for full training in mixed precision with Adam.

    Stated so in many places, e.g. datawhalechina/llm-algo-leetcode issue 149, and
    saurabhblog.pages.dev/blog/fit-large-language-models-on-small-gpus.
    """
    assert float(zero_states(7e9, 1, 0)) / GB == 112
    exact = sample_model("llama-2-7b").num_parameters
    assert exact == 6_738_415_616  # so that the real model has 4 % less
    assert float(zero_states(exact, 1, 0)) / GB == pytest.approx(107.8, abs=0.05)


# Hugging Face's Model Memory Calculator, as its robot posted it to the models' own pages:
# "Training using Adam (Peak vRAM)", float32: model, gradients, optimizer, all of it
CALCULATOR = {
    # huggingface.co/google/gemma-2b/discussions/55
    "gemma-2b": (10_024_689_664, 10_024_689_664, 20_049_379_328, 40_098_758_656),
}


@pytest.mark.parametrize("name", sorted(CALCULATOR))
def test_model_memory_calculator_adam_in_fp32(name: str) -> None:
    weights, gradients, optimizer, step = CALCULATOR[name]
    scenario = make_scenario(name, "1xA100-80GB", seq_len=1, global_batch_size=1, precision="fp32")
    memory = memory_of(scenario, Plan())
    assert float(memory.weights[0]) == weights  # type: ignore[index]
    assert float(memory.gradients[0]) == gradients  # type: ignore[index]
    assert float(memory.optimizer[0]) == optimizer  # type: ignore[index]
    assert weights + gradients + optimizer == step


def test_model_memory_calculator_bert_base_cased() -> None:
    """Accelerate's docs (usage_guides/model_size_estimator), bert-base-cased.

    float16: largest layer 42.47 MB, total 206.59 MB, training with Adam 826.36 MB (4 x: 16-bit
    states). Its MB are MiB. float32: largest layer 84.95 MB, Adam 1.61 GB.
    """
    config = dict(load_preset("bert-base").config) | {"vocab_size": 28_996}
    model = model_spec(config, name="bert-base-cased")
    assert model.embedding[0].numel * 4 / MIB == pytest.approx(84.95, abs=0.005)
    # the calculator loads no head of a task, but the pooler, which ours has not
    body = model.num_parameters - sum(w.numel for w in model.head) + 768 * 768 + 768
    assert body * 2 / MIB == pytest.approx(206.59, abs=0.01)
    assert 4 * body * 2 / MIB == pytest.approx(826.36, abs=0.03)
    assert 4 * body * 4 / GIB == pytest.approx(1.61, abs=0.005)


BAICHUAN = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def test_baichuan_7b() -> None:
    """Its model card (huggingface.co/baichuan-inc/Baichuan-7B): Llama's structure, 7000559616.

    With the calculator's rules: float32 26.08 GiB, with Adam 104.3 GiB; the largest module is the
    embedding (1000 MiB). The calculator's own table is on its page (discussions/24).
    """
    model = model_spec(BAICHUAN, name="Baichuan-7B")
    assert model.num_parameters == 7_000_559_616
    scenario = make_scenario(model, "1xA100-80GB", seq_len=1, global_batch_size=1, precision="fp32")
    memory = memory_of(scenario, Plan())
    states = memory.weights + memory.gradients + memory.optimizer
    assert float(memory.weights[0]) / GIB == pytest.approx(26.08, abs=0.005)  # type: ignore[index]
    assert float(states[0]) / GIB == pytest.approx(104.3, abs=0.05)  # type: ignore[index]
    assert float(kind_numel(model.kinds[0], 1)) * 4 / MIB == pytest.approx(772.03, abs=0.01)


# Korthikanti et al. (arXiv:2205.05198), table 2 for the models of table 3: bytes of one layer
KORTHIKANTI = {  # name: (heads, hidden size, tensor parallel)
    "22B": (64, 6144, 8),
    "175B": (96, 12288, 8),
    "530B": (128, 20480, 8),
    "1T": (160, 25600, 8),
}
S, B = 2048, {"22B": 4, "175B": 1, "530B": 1, "1T": 1}


@pytest.mark.parametrize("name", sorted(KORTHIKANTI))
def test_korthikanti_table_2(name: str) -> None:
    a, h, t = KORTHIKANTI[name]
    b = B[name]
    config = GPT3 | {"n_embd": h, "n_head": a, "n_layer": 1}
    model, software = model_spec(config, name=name), software_profile("megatron")
    workload = Workload(S, 1, attention_kernel="eager")
    regions = layer_regions(model, workload, software, model.kinds[0])

    def layer(ranks: int, sequence: bool, recompute: int) -> float:
        per_token = saved_bytes_per_token(
            regions,
            h,
            compute_bytes=2.0,
            tensor_parallel=ranks,
            sequence_parallel=sequence,
            recompute=recompute,
            keeps_gathered_inputs=software.activations.keeps_gathered_inputs,
        )
        return float(per_token) * S * b

    sbh, scores = S * b * h, 5 * a * S / h
    assert layer(1, False, NONE) == pytest.approx(sbh * (34 + scores))
    assert layer(t, False, NONE) == pytest.approx(sbh * (10 + 24 / t + scores / t))
    assert layer(t, True, NONE) == pytest.approx(sbh * (34 + scores) / t)
    assert layer(t, False, SELECTIVE) == pytest.approx(sbh * (10 + 24 / t))
    assert layer(t, True, SELECTIVE) == pytest.approx(sbh * 34 / t)
    assert layer(t, False, FULL) == pytest.approx(2 * sbh)


def test_korthikanti_figure_1_the_baseline_of_four_models_is_above_80_gb() -> None:
    """Figure 1: without recomputation or sequence parallelism none of the four fits in 80 GB.

    With both (selective recomputation) all do; tensor parallel 8, table 3's pipeline sizes.
    """
    for name, layers, pipeline, batch in (
        ("22B", 48, 1, 4),
        ("175B", 96, 8, 1),
        ("530B", 105, 35, 1),
        ("1T", 128, 64, 1),
    ):
        a, h, t = KORTHIKANTI[name]
        config = GPT3 | {"n_embd": h, "n_head": a, "n_layer": layers}
        count = max(1, pipeline)
        plan = Plan(
            tensor_parallel=t,
            pipeline_parallel=pipeline,
            micro_batch_size=batch,
            num_microbatches=4 * count,
        )
        scenario = make_scenario(
            model_spec(config, name=name),
            f"{pipeline}x8xA100-80GB",
            seq_len=S,
            global_batch_size=plan.global_batch_size,
            software="megatron",
            attention_kernel="eager",
        )
        baseline = float(memory_of(scenario, plan).peak[0])  # type: ignore[index]
        both = replace(plan, sequence_parallel=True, recompute="selective")
        lean = float(memory_of(scenario, both).peak[0])  # type: ignore[index]
        assert baseline > 80 * GIB, name
        assert lean < 80 * GIB, name


# LLaMA (arXiv:2302.13971), table 2; the feed-forward sizes of its config.json files
LLAMA_1 = BAICHUAN | {"vocab_size": 32000, "max_position_embeddings": 2048}
LLAMA_33B = LLAMA_1 | {
    "hidden_size": 6656,
    "intermediate_size": 17920,
    "num_attention_heads": 52,
    "num_hidden_layers": 60,
}
LLAMA_65B = LLAMA_1 | {
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("model", "cluster", "options", "verdict"),
    [
        # QLoRA (arXiv:2305.14314), abstract: a 65B model is tuned on a single GPU of 48 GB, and
        # fig. 6: a 33B one on 24 GB, both with paged optimizers and a second quantisation of the
        # scales. Our executor keeps scales in fp32 and adapters' master weights beside them, so
        # that it reaches this with smaller adapters (rank 8, not 64).
        (LLAMA_65B, "1xRTX-A6000", {"qlora": 8, "seq_len": 512}, "fits"),
        (LLAMA_65B, "1xRTX-A6000", {"lora": 8, "seq_len": 512}, "does_not_fit"),
        (LLAMA_33B, "1xRTX-3090", {"qlora": 8, "seq_len": 512}, "fits"),
        (LLAMA_33B, "1xRTX-3090", {"lora": 8, "seq_len": 512}, "does_not_fit"),
        # axolotl's examples/llama-3 trains QLoRA of 70B with FSDP on two cards of 24 GB, not on one
        ("llama-3-70b", "1xRTX-4090", {"qlora": 8, "seq_len": 512}, "does_not_fit"),
        # LLaMA-Factory's README, "Hardware requirement": 7B LoRA 16 GB, QLoRA 6 GB, full 120 GB;
        # 13B LoRA 32 GB, QLoRA 12 GB, full 240 GB; 70B LoRA 160 GB, QLoRA 48 GB
        ("llama-2-7b", "1xRTX-4090", {"lora": 8, "seq_len": 512}, "fits"),
        ("llama-2-7b", "1xRTX-4090", {"qlora": 8, "seq_len": 512}, "fits"),
        ("llama-2-7b", "1xT4", {"qlora": 8, "seq_len": 512, "precision": "fp16"}, "fits"),
        ("llama-2-7b", "1xRTX-4090", {"seq_len": 512}, "does_not_fit"),
        ("llama-2-7b", "1xA100-80GB", {"seq_len": 512}, "does_not_fit"),
        ("llama-2-7b", "2xA100-80GB", {"seq_len": 512}, "fits"),
        ("llama-2-13b", "1xRTX-4090", {"lora": 8, "seq_len": 512}, "does_not_fit"),
        ("llama-2-13b", "1xRTX-4090", {"qlora": 8, "seq_len": 512}, "fits"),
        ("llama-2-13b", "1xA100-80GB", {"lora": 8, "seq_len": 512}, "fits"),
        ("llama-2-13b", "4xA100-80GB", {"seq_len": 512}, "fits"),
        ("llama-2-70b", "1xA100-80GB", {"lora": 8, "seq_len": 512}, "does_not_fit"),
        ("llama-2-70b", "1xA100-80GB", {"qlora": 8, "seq_len": 512}, "fits"),
        # the same table: full training of 70B takes 1200 GB, so that 640 GB are not enough
        ("llama-2-70b", "8xA100-80GB", {"seq_len": 512}, "does_not_fit"),
        ("llama-2-70b", "4x8xA100-80GB", {"seq_len": 512}, "fits"),
    ],
)
def test_what_is_known_to_fit_on_24_48_and_80_gb(
    model: Any, cluster: str, options: dict[str, Any], verdict: str
) -> None:
    answer = planner.fit(model, cluster, **options)
    assert answer.verdict == verdict


def test_a_frozen_base_has_two_bytes_or_half_a_byte_a_parameter() -> None:
    """LoRA (arXiv:2106.09685), sec. 4.2; QLoRA, sec. 3: 4 bits and a scale for each block of 64.

    So that a 65B base takes 33 GB and its scales 4 GB (QLoRA, fig. 6: double quantisation, which
    bitsandbytes has and this executor has not, would save 3 GB of them).
    """
    assert QUANTISED_BYTES == 0.5 + 4 / 64
    base = sample_model("llama-2-7b")
    for adapter, low, high in (("lora", 2.0, 2.05), ("qlora", 0.56, 0.65)):
        workload = Workload(1, 1, adapter=adapter, adapter_rank=8, adapter_alpha=16.0)  # type: ignore[arg-type]
        scenario = make_scenario(adapted(base, workload), "1xA100-80GB", global_batch_size=1)
        scenario = replace(scenario, workload=workload)
        memory = memory_of(scenario, Plan())
        each = float(memory.weights[0]) / base.num_parameters  # type: ignore[index]
        assert low <= each <= high
