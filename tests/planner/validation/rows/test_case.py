"""One row becomes model, cluster, workload, plan and software profile, or says why it cannot."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cost_models.legality.rules import legality_codes
from cost_models.partition.plan_stages import default_layer_ranges
from cost_models.plan.plan import PlanTable
from cost_models.pricing.estimate import price
from planner.assessment.verdict import budget_bytes
from planner.validation.measurement import denied_by, measured_memory, measured_step, rates
from planner.validation.rows.case import Case, case_of
from planner.validation.rows.implied import with_named_ends
from planner.validation.rows.reading import Unpriceable
from planner.validation.rows.runs_file import PUBLISHED, Row, read_runs

GPT = {
    "model": "a GPT",
    "num_layers": 24,
    "hidden_size": 2048,
    "num_heads": 16,
    "vocab_size": 51200,
    "tie_embeddings": True,
    "seq_len": 2048,
    "gpu": "A100-SXM",
    "gpu_mem_gb": 80.0,
    "num_gpus": 16,
    "framework": "Megatron-LM",
    "precision": "fp16",
}


def case(**cells: Any) -> Case:
    return case_of(Row(line=2, **{**GPT, **cells}))


def test_a_length_of_targets_needs_a_decoder_of_its_own() -> None:
    with pytest.raises(Unpriceable, match=r"target_seq_len 128: .* has no decoder of its own"):
        case(target_seq_len=128)


def test_an_unsaid_micro_batch_is_the_largest_that_fits() -> None:
    found = case(global_batch_size=256)  # 16 sequences of each rank
    fits = price(found.scenario, PlanTable.from_plans([found.plan])).peak[0]
    assert found.plan.micro_batch_size * found.plan.num_microbatches == 16
    assert fits <= budget_bytes(found.scenario.cluster)
    twice = replace(found.plan, micro_batch_size=2 * found.plan.micro_batch_size)
    too_much = price(found.scenario, PlanTable.from_plans([twice])).peak[0]
    assert found.plan.micro_batch_size == 16 or too_much > budget_bytes(found.scenario.cluster)
    assert 1 < found.plan.micro_batch_size < 16  # this model's logits and scores are large
    assert any("the largest that fits" in default for default in found.defaults)
    assert case(global_batch_size=240).plan.num_microbatches == 15  # divides what there is
    # smaller ones shorten the bubble of a pipeline; what is said is taken
    assert case(global_batch_size=256, pipeline_parallel=2).plan.micro_batch_size == 1
    assert case(global_batch_size=256, micro_batch_size=1).plan.micro_batch_size == 1
    assert case(global_batch_size=32, num_layers=400).plan.micro_batch_size == 1  # nothing fits


def test_every_default_is_listed() -> None:
    named = " ".join(case().defaults)
    for column in (
        "gpus_per_node",
        "tensor_parallel",
        "pipeline_parallel",
        "data_parallel",
        "micro_batch_size",
        "global_batch_size",
        "zero_stage",
        "recompute",
        "optimizer",
        "attention",
        "gated_mlp",
        "ffn_hidden_size",
    ):
        assert column in named
    assert "recompute" not in " ".join(case(recompute="full").defaults)


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "told"),
    [
        ("gpt-2-1.5b", 48, 1600, ""),
        ("GPT-2 XL (1.5B)", 48, 1600, ""),
        ("GPT2-762M", 36, 1280, ""),
        ("megatron-gpt2-345m", 24, 1024, "the published sizes"),
        ("GPT-2 8.3B", 72, 3072, "the published sizes"),
        ("39.1 billion GPT", 48, 8192, "the published sizes"),
        ("GPT-J", 28, 4096, "the published sizes"),
        ("command-r-35b", 40, 8192, ""),
        ("DeepSeek-Coder-6.7B-base", 32, 4096, ""),
        ("llama 8B", 32, 4096, ""),
        ("Llama 70B", 80, 8192, "llama-3.1-70b (default: the latest, not llama-3-70b or llama-2"),
        ("granite-3.3-8b", 40, 4096, "not known: priced as granite-3.0-8b"),
        ("Qwen2.5-VL-7B", 28, 3584, "its language model qwen2.5-7b alone"),
        ("flan-t5-base", 24, 768, "the published sizes"),
        ("turing-nlg-17b", 52, 5120, "its shape is not known"),
        ("gpt-25b", 54, 6144, "its shape is not known"),
    ],
)
def test_other_spellings_and_sizes_name_a_model(
    name: str, layers: int, hidden: int, told: str
) -> None:
    unsaid = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "vocab_size"))
    found = case(model=name, **unsaid)
    assert (found.scenario.model.num_layers, found.scenario.model.hidden_size) == (layers, hidden)
    assert told in " ".join(found.defaults)
    assert found.is_typical == ("its shape is not known" in told)


def test_a_typical_model_has_the_parameters_of_the_row() -> None:
    unsaid = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "vocab_size"))
    for name, params, kind in (("mine", 9.0, "llama"), ("gpt", 9.0, "gpt2")):
        spec = case(model=name, params_billion=params, **unsaid).scenario.model
        assert spec.family == kind
        assert spec.num_parameters == pytest.approx(params * 1e9, rel=0.1)
    for name in ("mine", "mine-3m", "mixture 8x9b", "my-moe-9b"):
        with pytest.raises(Unpriceable, match="the architecture is not given"):
            case(model=name, **unsaid)
    for name in ("mamba-2.8b", "Stable Diffusion", "swin-large"):
        with pytest.raises(Unpriceable, match="has other layers than a transformer"):
            case(model=name, **unsaid)


def test_dropout_experts_and_stages_are_as_their_columns_say() -> None:
    mixture = {
        "model_kind": "moe",
        "num_experts": 8,
        "experts_per_token": 2,
        "num_kv_heads": 8,
        "tensor_parallel": 2,
        "expert_parallel": 4,
    }
    for ranks, cut in ((2, True), (1, False), (None, False)):
        found = case(dropout=0.1, expert_tensor_parallel=ranks, **mixture)
        assert found.plan.expert_tensor_parallel is cut
        model = found.scenario.model
        assert (model.family, model.hidden_dropout, model.attention_dropout) == (
            "mixtral",
            0.1,
            0.1,
        )
    assert case(gated_mlp=True).scenario.model.attention_dropout == 0.0
    with pytest.raises(Unpriceable, match="experts cut over 2 of 4"):
        case(**mixture | {"tensor_parallel": 4, "expert_tensor_parallel": 2})
    stages = {"num_layers": 12, "pipeline_parallel": 4}
    uneven = case(layers_by_stage="2 4 4 2", **stages)
    assert uneven.scenario.layer_ranges == ((0, 2), (2, 6), (6, 10), (10, 12))
    assert case(**stages).scenario.layer_ranges is None
    with pytest.raises(Unpriceable, match="must be 4 numbers that add up to 12 layers"):
        case(layers_by_stage="2 4 4 3", **stages)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"num_layers": None}, "the architecture is not given (num_layers)"),
        ({"gpu": "Z9"}, "gpu 'Z9' is not in the catalogue, which"),
        ({"num_gpus": None}, "num_gpus is empty"),
        ({"tensor_parallel": 3}, "3 model-parallel ranks do not divide 16"),
        ({"data_parallel": 3}, "3 x 1 ranks for 16 accelerators"),
        ({"global_batch_size": 24}, "a batch of 24 is not near a multiple of 16"),
        ({"optimizer": "MeZO"}, "optimizer 'MeZO' is not priced"),
        ({"peft": "adapter_v2"}, "peft 'adapter_v2' is not priced"),
        ({"model_kind": "hybrid-mamba"}, "model_kind 'hybrid-mamba' is not priced"),
        ({"gpu": "A1000", "gpu_mem_gb": 8.0}, "not in the catalogue"),
        ({"gpu": "Biren BR106"}, "Biren BR106: it is not priced"),
        ({"not_priced": "two figures contradict"}, "two figures contradict"),
        ({"software": "megatrom"}, "Did you mean megatron?"),
        ({"software": "megatron; overlap"}, "'overlap' (must be group.figure=value)"),
        ({"software": "megatron; overlap.tensor=1"}, "'overlap.tensor' is no figure of megatron"),
        ({"software": "megatron; overlap.data_parallel=x"}, "must be a number or true, false"),
    ],
)
def test_what_cannot_be_priced_says_why(cells: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unpriceable, match=reason.replace("(", r"\(").replace(")", r"\)")):
        case(**cells)


def test_torchtitan_casts_nothing_where_no_data_rank_shards_weights() -> None:
    def precision(**cells: Any) -> str:
        return case(framework="torchtitan", precision="bf16", **cells).scenario.workload.precision

    whole = {"tensor_parallel": 8, "pipeline_parallel": 2}
    assert precision(**whole) == "fp32"
    assert precision(tensor_parallel=8) == "bf16"
    assert precision(**whole, optimizer="adamw, no fp32 master") == "bf16"
    cells: dict[str, Any] = {"framework": "torchtitan", "precision": "bf16", "mfu_pct": 2.0}
    cells |= {"flops_definition": "model FLOP, full attention", **whole}
    found = case(**cells)
    step = measured_step(Row(line=2, **{**GPT, **cells}), found)
    assert step is not None
    _, of_fp32 = rates(found, step)
    fp32, bf16 = (found.scenario.cluster.accelerator.peak_flops[name] for name in ("fp32", "bf16"))
    assert of_fp32 == pytest.approx(0.02 * bf16.value / fp32.value)


def test_precisions_of_moments_and_gradients_are_as_the_optimizer_is_described() -> None:
    told = case(precision="bf16", optimizer="adam, bf16 states, bf16 main gradients")
    assert told.scenario.workload.optimizer_state_precision == "bf16"
    assert told.scenario.workload.gradient_precision == "bf16"
    plain = case(precision="bf16", optimizer="adam")
    less = price(told.scenario, PlanTable.from_plans([told.plan])).peak[0]
    assert less < price(plain.scenario, PlanTable.from_plans([plain.plan])).peak[0]


def test_stages_are_interleaved_as_recipes_say() -> None:
    assert published("llama3-paper-0001").plan.pipeline_schedule == "interleaved_1f1b"
    assert published("llama3-paper-0001").scenario.software.name == "nemo"
    assert case(pipeline_parallel=4).plan.virtual_stages == 1


def test_sequence_parallelism_is_assumed_of_recipes_that_have_it() -> None:
    nemo, core, before = (
        case(framework=framework, tensor_parallel=2)
        for framework in ("NeMo", "Megatron-Core", "Megatron-DeepSpeed (2021)")
    )
    assert nemo.plan.sequence_parallel
    assert not core.plan.sequence_parallel
    assert not before.plan.sequence_parallel
    assert any("this trainer has none" in default for default in before.defaults)


@pytest.mark.parametrize(
    ("framework", "cells", "ranks"),
    [
        ("Megatron-Core", {}, 8),
        ("NeMo / Megatron-Bridge", {}, 8),
        ("Megatron-Core", {"tensor_parallel": 2}, 4),
        ("Megatron-Core", {"num_gpus": 4}, 4),
        ("Megatron-Core", {"expert_parallel": 2}, 2),
        ("Megatron-LM FSDP", {}, 1),
        ("PyTorch FSDP2", {}, 1),
    ],
)
def test_experts_are_shared_over_a_node_where_trainers_do(
    framework: str, cells: dict[str, Any], ranks: int
) -> None:
    sizes = {"num_gpus": 16, "gpus_per_node": 8, "tensor_parallel": 1, "data_parallel": None}
    mixture = {"model_kind": "moe", "num_experts": 8, "experts_per_token": 2}
    row = case(framework=framework, **{**mixture, **sizes, **cells})
    assert row.plan.expert_parallel == ranks
    assert any("expert_parallel" in text for text in row.defaults) is (ranks in (4, 8))


def test_a_board_may_have_other_memory_than_the_catalogues() -> None:
    """A stated size is the board's own, unless it is that of the catalogue in GB or rounded."""

    def capacity(**cells: Any) -> float:
        return case(**cells).scenario.cluster.accelerator.memory_capacity.value / 2**30

    assert capacity(gpu="RTX 4090", gpu_mem_gb=48.0) == 48.0
    assert capacity(gpu="RTX 4090", gpu_mem_gb=24.0) < 24.0
    assert capacity(gpu="B200", gpu_mem_gb=192.0) < 180.0


def test_a_row_may_name_its_kind_of_node() -> None:
    four = {"gpu": "H200-SXM", "gpu_mem_gb": 141, "gpus_per_node": 4, "num_gpus": 8}
    usual = case(**four).scenario.cluster
    own = case(**four, node="HGX-H200-4GPU").scenario.cluster
    assert usual.tiers[0].peer_bandwidth is None
    assert own.tiers[0].peer_bandwidth is not None
    assert own.tiers[0].peer_bandwidth.value == 150e9
    assert own.tiers[0].bandwidth == usual.tiers[0].bandwidth


@pytest.mark.parametrize(("layers", "alone"), [(30, {0, 31}), (31, {31}), (32, set())])
def test_embedding_and_head_may_be_stages_of_their_own(layers: int, alone: set[int]) -> None:
    some = case(num_layers=layers, pipeline_parallel=4, virtual_stages=8)
    assert some.plan.virtual_stages == 8
    ranges = default_layer_ranges(some.scenario, some.plan)
    assert {stage for stage, (first, last) in enumerate(ranges) if first == last} == alone
    assert ranges[-1][1] == layers
    if alone == {0, 31}:
        assert (
            case(
                num_layers=30, pipeline_parallel=4, virtual_stages=8, layers_by_stage="1 " * 32
            ).scenario.layer_ranges
            == ranges
        )
    told = any("they are stages of their own" in default for default in some.defaults)
    assert told == bool(alone)


def test_a_stage_of_the_head_alone_lies_between_neighbouring_depths() -> None:
    def step(layers: int) -> float:
        found = case(num_layers=layers, pipeline_parallel=4, virtual_stages=8, global_batch_size=32)
        table = PlanTable.from_plans([found.plan])
        assert legality_codes(found.scenario, table).tolist() == [0]
        return float(price(found.scenario, table).step[0])

    seconds = [step(layers) for layers in (30, 31, 32)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0.85 * seconds[-1]


def test_more_stages_than_layers_embedding_and_head_are_no_run() -> None:
    found = case(num_layers=20, pipeline_parallel=4, virtual_stages=8)
    assert found.scenario.layer_ranges is None
    assert legality_codes(found.scenario, PlanTable.from_plans([found.plan])).tolist() != [0]


@pytest.mark.parametrize(
    "word", ["gpt", "GPT-like", "decoder-only", "causal LM", "LLM", "dense", ""]
)
def test_words_for_a_decoder_name_a_dense_model(word: str) -> None:
    usual = case().scenario.model
    assert case(model_kind=word or None).scenario.model == usual


def test_words_for_other_kinds_of_models() -> None:
    experts = {"num_experts": 8, "experts_per_token": 2, "gated_mlp": True, "ffn_hidden_size": 4096}
    mixture = case(model_kind="moe", **experts).scenario.model
    for word in ("mixture of experts", "sparse", "LLM", None):
        assert case(model_kind=word, **experts).scenario.model == mixture
    encoder = case(model_kind="encoder").scenario.model
    assert case(model_kind="BERT-like").scenario.model == encoder
    with pytest.raises(Unpriceable, match="model_kind 'diffusion' is not priced"):
        case(model_kind="diffusion")


def test_a_vision_transformer_is_an_encoder_of_patches() -> None:
    sizes = {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocab_size": None}
    for word in ("ViT", "vision transformer"):
        found = case(model_kind=word, tie_embeddings=None, **sizes, seq_len=197).scenario.model
        assert found.num_parameters == pytest.approx(86e6, rel=0.02)  # arXiv:2010.11929, table 1
        assert found.hidden_dropout == 0.0


@pytest.mark.parametrize(
    ("model", "notes", "tokens"),
    [
        ("vit_base_patch16_224.augreg_in21k", None, 197),
        ("vit_giant_patch14_dinov2.lvd142m", None, 257),
        ("ViT-H/14", None, 257),
        ("ViT-L/16", "image size 384", 577),
        ("ViT-Giant", "448x448", 1025),
    ],
)
def test_tokens_of_an_image(model: str, notes: str | None, tokens: int) -> None:
    found = case_of(Row(line=2, model=model, gpu="H100-SXM", num_gpus=1, notes=notes))
    assert found.scenario.workload.seq_len == tokens
    assert any(default.startswith(f"seq_len {tokens} (") for default in found.defaults)


@pytest.mark.parametrize(
    ("cells", "windows"),
    [
        ({"notes": "sliding window of 2,048 tokens in every layer"}, {2048}),
        ({"notes": "sliding-window 512"}, {512}),
        ({"notes": "no sliding window"}, {None}),
    ],
)
def test_windows_of_attention_in_notes(cells: dict[str, Any], windows: set[int | None]) -> None:
    found = case(**{"model": "llama-3-8b", "framework": "own loop, FlexAttention", **cells})
    kinds = found.scenario.model.kinds
    assert {kind.attention.window for kind in kinds} == windows
    assert found.scenario.software.activations.window_needs_mask is False


def test_models_with_windows_of_their_own_keep_them() -> None:
    rows = [
        Row(line=2, model="gemma-3-4b", gpu="H100-SXM", num_gpus=1, notes=notes)
        for notes in (None, "sliding window of 2048")
    ]
    plain, noted = ({k.attention.window for k in case_of(row).scenario.model.kinds} for row in rows)
    assert plain == noted != {None}


def test_dinov2_has_scales_and_its_giant_gates() -> None:
    names = ("vit_giant_patch14_dinov2.lvd142m", "vit_giant_patch14_224")
    rows = [Row(line=2, model=name, gpu="H100-SXM", num_gpus=1) for name in names]
    giant, plain = (case_of(row).scenario.model for row in rows)
    assert giant.num_parameters == pytest.approx(1136e6, rel=0.002)  # timm's own count
    assert giant.kinds[0].feed_forward.gated
    assert not plain.kinds[0].feed_forward.gated
    assert (giant.kinds[0].num_norms, plain.kinds[0].num_norms) == (4, 2)


@pytest.mark.parametrize(
    ("model", "parameters"),  # of flax's T5 1.1, whose head is a matrix of its own: a tied one less
    [("t5-v1.1-large", 783e6 - 32128 * 1024), ("google/flan-t5-xl", 2850e6 - 32128 * 2048)],
)
@pytest.mark.parametrize("word", ["encoder-decoder", "seq2seq", "T5", None])
def test_an_encoder_decoder_is_a_t5(model: str, parameters: float, word: str | None) -> None:
    found = case_of(
        Row(line=2, model=model, model_kind=word, gpu="H100-SXM", num_gpus=8, seq_len=512)
    )
    spec = found.scenario.model
    assert spec.num_layers == 48
    assert spec.num_parameters == pytest.approx(parameters, rel=0.01)
    assert any("published sizes" in default for default in found.defaults)
    own = {"num_layers": 6, "hidden_size": 512, "num_heads": 8, "vocab_size": 32128}
    tiny = case(model_kind=word or "t5", tie_embeddings=None, **own).scenario.model
    assert tiny.num_parameters == 60506624  # of t5-small


def test_a_graph_of_mindspore_needs_no_host_and_fewer_passes_over_scores() -> None:
    graph, eager = (
        case(framework=name, gpu="Ascend-910B", zero_stage=None, precision="fp16").scenario
        for name in ("MindFormers (MindSpore 2.2 on Ascend), parallel optimizer", "own loop")
    )
    of_graph, of_eager = graph.software.kernels, eager.software.kernels
    assert of_graph.eager_scores_accesses < of_eager.eager_scores_accesses
    assert graph.software.host.layer_operators_forward < 2.0
    assert not graph.workload.master_weights
    sharded = case(framework="MindSpore, optimizer parallel", zero_stage=None)
    assert sharded.plan.zero_stage == 1
    waits = case(framework="MindFormers", notes="no fine-grain interleave").scenario
    assert graph.software.overlap.chunked_tensor_traffic
    assert not waits.software.overlap.chunked_tensor_traffic


@pytest.mark.parametrize(
    ("words", "taken", "other"),
    [
        ("activations of 5 layers to CPU", "none", "activations"),
        ("activations, cpu_offloading_num_layers=5", "none", "activations"),
        ("activations of 20 of 32 layers", "activations", "none"),
        ("activations of 32 layers", "activations", None),
        ("activations", "activations", None),
    ],
)
def test_activations_of_few_layers_stay(words: str, taken: str, other: str | None) -> None:
    found = case(model="llama-2-7b", framework="Megatron-LM core", offload=words)
    assert found.plan.offload == taken
    assert [one.plan.offload for one in found.others] == [other] * bool(other)


def test_fp32_weights_may_leave_with_offloaded_states() -> None:
    fsdp = {"framework": "own trainer (FSDP2)", "zero_stage": 3, "precision": "bf16"}
    states = case(**fsdp, offload="optimizer states to CPU")
    masters = case(**fsdp, offload="fp32 master weights and optimizer states to CPU")
    assert states.plan.offload == masters.plan.offload == "optimizer"
    assert not states.scenario.software.optimizer.offloads_masters
    assert masters.scenario.software.optimizer.offloads_masters
    assert masters.scenario.software.name == states.scenario.software.name

    def weights(found: Case) -> float:
        plan = PlanTable.from_plans([found.plan])
        return float(price(found.scenario, plan).memory.weights[0])

    assert weights(masters) == pytest.approx(weights(states) / 2)  # shards in 16 bits


def test_batches_of_changing_shapes_leave_more_free_blocks() -> None:
    even = case(framework="TRL")
    ragged = case(framework="TRL", notes="batches padded to their longest sample")
    assert not even.scenario.software.memory.ragged_batches
    assert ragged.scenario.software.memory.ragged_batches
    assert ragged.scenario.software.name == even.scenario.software.name


def test_cards_that_take_turns_hold_layers_and_one_micro_batch() -> None:
    cells = {"framework": "HF Trainer, device_map auto", "num_gpus": 2, "global_batch_size": 16}
    found = case(**cells, micro_batch_size=1, step_time_s=8.0)
    assert (found.plan.pipeline_parallel, found.plan.num_microbatches) == (2, 1)
    assert found.scenario.software.pipeline.stages == "parameters"
    assert measured_step(found.row, found) == pytest.approx(0.5)
    copies = case(**cells, micro_batch_size=1, data_parallel=2)
    assert copies.plan.pipeline_parallel == 1
    sharded = case(**cells, micro_batch_size=1, zero_stage=3)
    assert (sharded.plan.data_parallel, sharded.plan.pipeline_parallel) == (2, 1)


def test_recipes_of_megatron_bridge_differ_in_their_kernels() -> None:
    def kernels(**cells: Any) -> tuple[float, float]:
        software = case(**{"framework": "Megatron-Bridge", **cells}).scenario.software
        return software.loss.fp32_logits_copies, software.activations.activation_saved["silu"]

    assert kernels() == (2.0, 0.0)  # cross_entropy_loss_fusion, in one more buffer
    assert kernels(notes="unfused SwiGLU") == (2.0, 1.0)
    assert kernels(notes="performance recipe") == (0.0, 0.0)
    assert kernels(notes="cross_entropy_fusion_impl te") == (0.0, 0.0)
    assert kernels(framework="Megatron-LM 2025") == (1.0, 0.0)


def test_attention_of_transformers_in_2023_is_eager() -> None:
    def kernel(**cells: Any) -> str:
        return case(
            **{"framework": "HF Trainer (2023)", **cells}
        ).scenario.workload.attention_kernel

    assert kernel() == kernel(framework="transformers 4.31") == "eager"
    assert kernel(flash_attention="1") == kernel(framework="transformers 4.40") == "flash"


def test_torchtitan_has_its_loss_of_columns_in_eager_mode() -> None:
    def copies(**cells: Any) -> tuple[float, str]:
        software = case(zero_stage=3, **{"framework": "torchtitan", **cells}).scenario.software
        return software.loss.fp32_logits_copies, software.name

    assert copies(tensor_parallel=8) == (4.0, "eager-fsdp2")  # torch's loss_parallel
    assert copies()[0] < 4.0
    # layers alone were compiled before the loss was, in April 2025
    assert copies(tensor_parallel=8, notes="torch.compile") == (4.0, "torchtitan")
    later = {"framework": "torchtitan (May 2025, FSDP2)", "notes": "torch.compile"}
    assert copies(tensor_parallel=8, **later)[0] < 4.0


def test_packed_samples_and_cells_of_other_runs_have_columns() -> None:
    packed = case(document_length=200)
    assert packed.scenario.workload.document_mask
    assert packed.scenario.workload.document_length == 200
    assert not case().scenario.workload.document_mask
    rows = {row.row_id: row for row in read_runs(PUBLISHED)}
    whys = {name: denied_by(row) or "" for name, row in rows.items()}
    apart = {name for name, why in whys.items() if why.startswith(("faster", "slower"))}
    cells = {"dgxc-benchmarking-0057", "dgxc-benchmarking-0060"}
    cells |= {f"dgxc-benchmarking-{number:04}" for number in range(149, 153)}
    slow = {name for name, row in rows.items() if row.get("model") == "mosaicgpt-760m"}
    assert len(slow) == 36
    assert apart == cells | slow
    # the reasons, from the rows themselves
    seconds = {name: row.get("step_time_s") for name, row in rows.items()}
    assert seconds["dgxc-benchmarking-0149"] < seconds["dgxc-benchmarking-0033"]
    assert seconds["dgxc-benchmarking-0060"] > seconds["dgxc-benchmarking-0058"]
    assert seconds["mosaic-llm-foundry-0665"] > 1.2 * seconds["mosaic-llm-foundry-0433"]


def test_what_litgpt_does_otherwise_is_in_the_words() -> None:
    lit = {"model": "llama2-7b", "framework": "lit-gpt", "precision": "bf16", "num_gpus": 1}
    prompts = case(**lit, peft="adapter")
    assert [
        prompts.scenario.model.kinds[k].forward_only for k in prompts.scenario.model.pattern[:4]
    ] == [*(True, True, False, False)]
    assert prompts.scenario.software.adapters.input_bytes == 0.0
    lora = case(**lit, peft="lora r=8 q,v")
    assert lora.scenario.software.activations.longest_sequences_first
    assert not any(kind.forward_only for kind in lora.scenario.model.kinds)
    newer = case(**lit | {"framework": "litgpt"}, peft="lora r=8 q,v")
    assert not newer.scenario.software.activations.longest_sequences_first


def test_time_is_taken_as_it_was_measured() -> None:
    one = case(micro_batch_size=1)
    tokens = 2048.0 * 16

    def seconds(**cells: Any) -> float | None:
        return measured_step(Row(line=2, **cells), one)

    assert seconds(step_time_s=2.0, tokens_per_second_per_gpu=1.0) == 2.0
    assert seconds(tokens_per_second_per_gpu=1024.0) == tokens / (1024.0 * 16)
    by_rate = seconds(tflops_per_gpu=156.0, flops_definition="model TFLOPS/GPU")
    by_share = seconds(mfu_pct=50.0, flops_definition="model TFLOPS/GPU")
    assert by_rate == pytest.approx(by_share)  # of 312 TFLOP/s
    masked = seconds(tflops_per_gpu=156.0, flops_definition="model FLOP, causal attention")
    assert 0.8 * by_rate < masked < by_rate  # half of the attention scores
    assert seconds(tflops_per_gpu=156.0) is None  # nobody says what was counted
    assert seconds(step_time_s=2.0, outcome="oom") is None


def test_memory_is_compared_with_its_own_kind() -> None:
    def kind(definition: str) -> Any:
        cells = {"peak_memory_gib": 2.0, "memory_definition": definition}
        return measured_memory(Row(line=2, **cells))

    assert kind("torch peak allocated (rank 0)").kind == "allocated"
    assert kind("torch peak memory reserved, GB in source -> GiB").kind == "reserved"
    assert kind("nvidia-smi GB").kind == "device"
    assert kind("nvidia-smi GB").size == 2.0 * 2**30
    assert kind("max_memory_allocated of the last rank").rank == "last"
    assert kind("somebody's guess") is None


@pytest.mark.slow
def test_every_published_row_is_a_case_or_says_why() -> None:
    def reason(row: Row) -> str | None:
        try:
            case_of(row)
        except Unpriceable as why:
            return str(why)
        return None

    reasons = [reason(row) for row in read_runs(PUBLISHED)]
    assert "" not in reasons
    assert reasons.count(None) > 1700


@cache
def published(row_id: str) -> Case:
    return next(case_of(row) for row in read_runs(PUBLISHED) if row.row_id == row_id)


def test_zero_3_of_megatron_deepspeed_shards_gradients_and_keeps_checkpoints_in_host_memory() -> (
    None
):
    """bigscience: experiments/gpt2-meg-ds-zero/meg_ds_zero_gpt2_perf_n16_nbs48_ms48.out.

    52 billion parameters, micro-batches of 48 on 64 V100 of 32 GB: "max allocated" 26,118 MiB. What
    its profile leaves out (16-bit shards beside the fp32 ones) and what it adds (gathered layers)
    are of a size.
    """
    found = published("bigscience-v100-0046")
    assert (found.plan.zero_stage, found.plan.offload) == (3, "activations")
    priced = price(found.scenario, PlanTable.from_plans([found.plan]))
    assert float(priced.memory.allocated[0]) == pytest.approx(26_118 * 2**20, rel=0.03)
    assert priced.peak[0] < budget_bytes(found.scenario.cluster)
    assert published("bigscience-v100-0066").plan.offload == "weights+activations"
    assert published("bigscience-v100-0067").plan.offload == "weights"  # PA_CPU=N


def test_what_a_recipe_says_of_sharding_counts() -> None:
    assert published("nemo-launcher-0011").plan.zero_stage == 1  # distributed_fused_adam
    assert published("nemo-launcher-0014").plan.zero_stage == 0
    fsdp = published("nemo-perf-0141")
    assert (fsdp.plan.zero_stage, fsdp.scenario.software.sharding.largest_zero_stage) == (3, 3.0)
    assert not fsdp.scenario.software.gradients.whole_buffer


def test_vtrains_sums_of_layers_neither_recompute_nor_pad_nor_hide() -> None:
    """The table of one node says full recomputation and 51200; that of many holds runs."""
    one, many = published("vtrain-single-4"), published("vtrain-multi-0")
    assert one.row.left_out == "sums of 32 measured layers, not measured steps"
    assert (one.plan.recompute, many.plan.recompute) == ("none", "full")
    assert (one.scenario.model.vocab_size, many.scenario.model.vocab_size) == (50257, 51200)
    software, usual = one.scenario.software, many.scenario.software
    assert (software.loss.pads_vocabulary, usual.loss.pads_vocabulary) == (False, True)
    assert (software.overlap.tensor_reduction, usual.overlap.tensor_reduction) == (False, True)


def preset(**cells: Any) -> Case:
    """Return a row that names a preset and gives no sizes but those in ``cells``."""
    usual = {"gpu": "H100-SXM", "num_gpus": 8, "seq_len": 2048, "precision": "bf16"}
    return case_of(Row(line=2, **{**usual, **cells}))


@pytest.mark.parametrize(
    ("model", "layers"), [("llama-3-8b", 4), ("deepseek-v3", 8), ("gemma-3-27b", 10), ("gpt2", 6)]
)
def test_a_preset_is_cut_to_the_layers_of_the_row(model: str, layers: int) -> None:
    whole, cut = preset(model=model).scenario.model, preset(model=model, num_layers=layers)
    assert cut.scenario.model.num_layers == layers
    assert cut.scenario.model.pattern == whole.pattern[:layers]
    assert f"{model} cut to its first {layers} layers" in cut.defaults
    assert preset(model=model, num_layers=whole.num_layers).scenario.model == whole


@pytest.mark.parametrize(
    ("model", "kept"), [("mixtral-8x7b", 4), ("qwen3-30b-a3b", 16), ("deepseek-v2-lite", 16)]
)
def test_a_preset_is_cut_to_the_experts_of_the_row(model: str, kept: int) -> None:
    """All experts are of one size, with their row of the router."""

    def experts(case: Case) -> int:
        return max(kind.feed_forward.num_experts for kind in case.scenario.model.kinds)

    whole = preset(model=model)
    fewer, more = (preset(model=model, num_experts=number) for number in (kept, kept + 2))
    assert (experts(fewer), experts(more)) == (kept, kept + 2)
    assert f"{model} cut to {kept} of its {experts(whole)} experts" in fewer.defaults
    sizes = [case.scenario.model.num_parameters for case in (fewer, more, whole)]
    assert sizes[2] - sizes[1] == (experts(whole) - kept - 2) * (sizes[1] - sizes[0]) / 2
    with_shared = preset(model=model, num_experts=experts(whole) + 1)
    assert with_shared.scenario.model == whole.scenario.model


def test_a_row_that_contradicts_its_preset_is_not_priced_as_the_preset() -> None:
    with pytest.raises(Unpriceable, match="40 layers of llama-3-8b, which has 32"):
        preset(model="llama-3-8b", num_layers=40)
    with pytest.raises(Unpriceable, match="hidden_size 2048 is not that of llama-3-8b"):
        preset(model="llama-3-8b", hidden_size=2048)
    sizes = {"num_layers": 16, "hidden_size": 2048, "num_heads": 16, "vocab_size": 128256}
    found = preset(model="llama-3-8b", **sizes, gated_mlp=True).scenario.model
    assert (found.num_layers, found.hidden_size) == (16, 2048)


def test_adapters_of_a_mixture_are_those_of_its_attention() -> None:
    found = preset(model="mixtral-8x7b", peft="lora r=8 (all-linear)", framework="HF Trainer")
    assert found.scenario.workload.adapter_targets == "attention"
    assert any("routed experts are left out" in default for default in found.defaults)
    dense = preset(model="llama-2-7b", peft="lora r=8 (all-linear)", framework="HF Trainer")
    assert dense.scenario.workload.adapter_targets == "all"


def test_a_changed_profile_says_why() -> None:
    rows = [row for row in read_runs(PUBLISHED) if row.software is not None]
    assert len(rows) > 1000
    assert [row.name for row in rows if "software" not in (row.assumed or "")] == []


def test_a_row_may_say_the_watts_that_its_boards_are_held_to() -> None:
    cells = {"gpu": "H100-SXM", "num_gpus": 8, "precision": "bf16"}
    held = case(**cells, power=500.0).scenario.cluster
    assert held.accelerator.words == "H100-SXM-80GB@500W"
    with pytest.raises(Unpriceable, match="takes 175 to 700 watts"):
        case(**cells, power=900.0)


@pytest.mark.parametrize(
    ("name", "layers", "hidden"),
    [
        ("Llama 2 7B chat", 32, 4096),
        ("Qwen/Qwen1.5-14B-Chat", 40, 5120),
        ("InternLM2-20B", 48, 6144),
        ("internlm2_5-7b-chat", 32, 4096),
        ("internlm-7b", 32, 4096),
        ("ChatGLM3-6B", 28, 4096),
        ("Yi-34B", 60, 7168),
        ("GPT-3 175B", 96, 12288),
        ("1.3B GPT", 24, 2048),
        ("ViT-L/16", 24, 1024),
        ("Mixtral 8x7B (LoRA)", 32, 4096),
        ("InternVL2-2B", 24, 2048),
        ("internvl-chat-v1_5", 48, 6144),
        ("DeepSeek-R1-Distill-Qwen-7B", 28, 3584),
        ("yi-34b-200k", 60, 7168),
        ("bert-base-cased", 12, 768),
        ("longformer-base-4096", 12, 768),
        ("glm", 24, 1024),
    ],
)
def test_models_by_the_names_that_tables_give_them(name: str, layers: int, hidden: int) -> None:
    sizes = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "vocab_size"))
    model = case(model=name, **sizes).scenario.model
    assert (model.num_layers, model.hidden_size) == (layers, hidden)


def test_what_a_source_rounds_or_leaves_out_is_priced_and_listed() -> None:
    rounded = case(global_batch_size=17)  # 16 data ranks of one sequence
    assert rounded.scenario.workload.global_batch_size == 16
    assert "global_batch_size 16: 17 is no multiple of 16" in rounded.defaults
    odd = case(num_gpus=12, gpus_per_node=None, global_batch_size=12)
    assert odd.scenario.cluster.gpus_per_node == 6
    mixed = case(precision="mixed")
    assert mixed.scenario.workload.precision == "bf16"
    assert any(line.startswith("precision bf16") for line in mixed.defaults)
    usual = case(num_heads=None, vocab_size=None)
    assert {"num_heads", "vocab_size"} <= {line.split()[0] for line in usual.defaults}


def test_lora_beside_lora_emb_leaves_embedding_and_head_frozen() -> None:
    cells = {**GPT, "framework": "Qwen finetune.py", "num_gpus": 1, "precision": "bf16"}
    alone, plain, with_ends, other = (
        Row(line=2, **{**cells, "peft": peft, "source_group": group})
        for peft, group in (("LoRA", "a"), ("LoRA", "b"), ("LoRA (emb)", "b"), ("full", "b"))
    )
    read = with_named_ends([alone, plain, with_ends, other])
    assert read[2:] == [with_ends, other]
    models = [case_of(row).scenario.model for row in read[:3]]
    assert models[0] == models[2] != models[1]
