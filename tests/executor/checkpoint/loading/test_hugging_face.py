"""Exports load with transformers and compute what was trained; runs start from such folders."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig

from cost_models.plan.plan import Plan
from cost_models.plan_file import PlanFile
from executor.checkpoint.export import newest_intact, write_hugging_face
from executor.checkpoint.format.hugging_face_names import stored_tensors
from executor.checkpoint.format.index import (
    WEIGHTS,
    CheckpointIndex,
    FileEntry,
    TensorEntry,
    TensorPart,
    file_name,
)
from executor.checkpoint.format.pieces import whole_tensor
from executor.checkpoint.format.tensor_file import write_tensors
from executor.checkpoint.loading.checkpoint_reader import Checkpoint
from executor.checkpoint.loading.hugging_face import HuggingFaceFolder
from executor.compat import causal_lm, hugging_face_config
from executor.data.batch import Batch
from executor.model import encoder_decoder
from executor.model.parameter_layout import parameter_layouts
from executor.parallel.tensor_parallel import UNSHARDED, TensorAxis
from executor.processes.fork import run_forked
from executor.support import FAMILIES
from executor.training.trainer import Trainer
from executor.verify.reference import reference_model
from hardware_profiles.errors import InputError
from tests.executor.checkpoint.saving import trained
from tests.executor.tiny import random_batch, tiny

PLAN = Plan(2, 2, zero_stage=3, sequence_parallel=True, micro_batch_size=2)
EXPERTS = Plan(2, 1, expert_parallel=2, zero_stage=1, micro_batch_size=2)
PIPELINE = Plan(1, 1, 2, micro_batch_size=2, num_microbatches=2)


def _exported(file: PlanFile, folder: Path, **options: Any) -> tuple[Any, float]:
    """Train, export and load; return the model and the loss of the next step of the run."""
    trained(file, folder / "checkpoints", 2, every=2)
    checkpoint, notes = newest_intact(folder)
    assert notes == []
    write_hugging_face(checkpoint, folder / "out", **options)
    next_loss = trained(file, folder / "checkpoints", 3)[0]["losses"][0]
    return _loaded(folder / "out", torch.float64), next_loss


def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, experts_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


def _loss(model: Any, file: PlanFile, seed: int) -> float:
    batch = random_batch(file, seed=seed)
    logits = model(input_ids=batch.inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).item()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "tied", "plan"),
    [
        ("llama", False, PLAN),
        ("gpt2", True, PIPELINE),
        pytest.param("gpt_neox", False, PIPELINE, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", False, EXPERTS, marks=pytest.mark.slow),
        pytest.param("mixtral", False, EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_an_export_computes_what_was_trained(family: str, tied: bool, plan: Plan, tmp_path: Path):
    dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0} if family == "gpt2" else {}
    file = tiny(plan, family, tied=tied, num_layers=2, optimizer="adamw", vocab_size=131, **dropout)
    model, next_loss = _exported(file, tmp_path, max_shard_bytes=100_000)
    # routers compute in float32
    assert _loss(model, file, 2) == pytest.approx(next_loss, rel=1e-7 if plan is EXPERTS else 1e-12)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id is not None
    checkpoint = Checkpoint(tmp_path / "checkpoints" / "step-00000002")
    reference = reference_model(file, 0)
    for name, layout in parameter_layouts(file.model, UNSHARDED).items():
        values = checkpoint.weights(name, layout.ranges(UNSHARDED))
        reference.get_parameter(name).data.copy_(values)
    inputs = random_batch(file).inputs
    assert torch.equal(model(input_ids=inputs).logits, reference.eval()(input_ids=inputs).logits)


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "plan", "adapter"),
    [
        ("qwen3", Plan(1, 2, micro_batch_size=2), "lora"),
        ("gpt2", Plan(1, 2), "lora"),
        ("gpt2", Plan(1, 2, micro_batch_size=2), "qlora"),
    ],
)
def test_an_export_has_its_adapters_multiplied_in(
    family: str, plan: Plan, adapter: str, tmp_path: Path
):
    dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0} if family == "gpt2" else {}
    options: dict[str, Any] = {adapter: 4, **dropout}
    file = tiny(plan, family, num_layers=2, optimizer="adamw", **options)
    model, next_loss = _exported(file, tmp_path)
    assert _loss(model, file, 2) == pytest.approx(next_loss, rel=1e-12)
    assert not any("lora" in name for name, _ in model.named_parameters())


SPANS = Plan(1, 1, 3, micro_batch_size=1, num_microbatches=3)


def _spans_loss(model: Any, batch: Batch) -> float:
    seen = encoder_decoder.source_mask(batch.inputs)
    found = model(input_ids=batch.inputs, attention_mask=seen, labels=batch.labels)
    loss: float = found.loss.item()
    return loss


@pytest.mark.slow
@pytest.mark.distributed
def test_an_export_of_an_encoder_and_a_decoder(tmp_path: Path):
    file = tiny(SPANS, "t5", num_layers=2, optimizer="adamw", dropout_rate=0.0)
    trained(file, tmp_path / "checkpoints", 2, every=2)
    write_hugging_face(newest_intact(tmp_path)[0], tmp_path / "out")
    next_loss = trained(file, tmp_path / "checkpoints", 3)[0]["losses"][0]
    model, report = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "out", dtype=torch.float64, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert _spans_loss(model, random_batch(file, 2)) == pytest.approx(next_loss, rel=1e-6)


@pytest.mark.distributed
def test_an_encoder_and_a_decoder_start_from_a_folder(tmp_path: Path):
    """Published files of T5 hold copies of the embedding, and a table that nothing reads."""
    file = tiny(Plan(1, 2, 2, num_microbatches=2), "t5", num_layers=2, dropout_rate=0.0)
    model: Any = causal_lm(
        file.model.config, device="cpu", dtype=torch.float32, attention_kernel="flash"
    )
    values = {name: values.contiguous() for name, values in model.state_dict().items()}
    values["encoder.embed_tokens.weight"] = values["shared.weight"].clone()
    values["decoder.embed_tokens.weight"] = values["shared.weight"].clone()
    values["lm_head.weight"] = values["shared.weight"].clone()
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    values[unread] = torch.ones(8, 8)
    model.config.save_pretrained(tmp_path)
    save_file(values, tmp_path / "model.safetensors")
    folder = HuggingFaceFolder(tmp_path)
    assert folder.check(file.model.config, parameter_layouts(file.model, UNSHARDED)) == []
    losses = run_forked(_first_loss, 4, file, str(tmp_path))
    expected = _spans_loss(model.double(), random_batch(file))
    assert losses[0] == pytest.approx(expected, rel=1e-6)
    values["lm_head.weight"] += 1.0  # Flan-T5's is a tensor of its own
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"lm_head\.weight is not shared\.weight, .* \(tied\)"):
        HuggingFaceFolder(tmp_path).check(
            file.model.config, parameter_layouts(file.model, UNSHARDED)
        )


@pytest.mark.distributed
def test_the_dtype_of_an_export(tmp_path: Path):
    file = tiny(Plan(), num_layers=1, precision="bf16")
    trained(file, tmp_path / "checkpoints", 1, every=1)
    checkpoint, _ = newest_intact(tmp_path / "checkpoints" / "step-00000001")
    notes = write_hugging_face(checkpoint, tmp_path / "bf16")
    assert notes == ["no tokenizer: the run was trained on bytes or on tokens"]
    write_hugging_face(checkpoint, tmp_path / "fp32", dtype=torch.float32)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] in str(dtype)
        weights = HuggingFaceFolder(tmp_path / name)
        layout = parameter_layouts(file.model, UNSHARDED)["lm_head.weight"]
        found = weights.start(layout, layout.ranges(UNSHARDED))
        assert found.dtype == dtype
        assert torch.equal(
            found, checkpoint.weights("lm_head.weight", layout.ranges(UNSHARDED)).to(dtype)
        )
    with pytest.raises(InputError, match="bf16: not empty; choose another -o"):
        write_hugging_face(checkpoint, tmp_path / "bf16")
    below_a_file = tmp_path / "bf16" / "config.json" / "model"
    with pytest.raises(InputError, match=r"config\.json/model: cannot be written: Not a directory"):
        write_hugging_face(checkpoint, below_a_file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "checkpoints", "fp32"]


def _first_loss(rank: int, file: PlanFile, folder: str) -> float:
    start = HuggingFaceFolder(Path(folder)).start
    return Trainer(file, start=start).step(random_batch(file)).loss


@pytest.mark.sampled(1)
@pytest.mark.distributed
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_run_starts_from_a_folder(family: str, tmp_path: Path):
    dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0} if family == "gpt2" else {}
    file = tiny(PLAN, family, tied=True, num_layers=2, vocab_size=131, **dropout)
    model = causal_lm(
        file.model.config, device="cpu", dtype=torch.float32, attention_kernel="flash"
    )
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    folder = HuggingFaceFolder(tmp_path)
    assert folder.check(file.model.config, parameter_layouts(file.model, UNSHARDED)) == []
    losses = run_forked(_first_loss, 4, file, str(tmp_path))
    assert losses[0] == pytest.approx(_loss(model.double(), file, 0), rel=1e-12)


def test_files_of_a_bare_model_have_shorter_names(tmp_path: Path):
    file = tiny(Plan(), "gpt2", tied=True, num_layers=1)
    model: Any = causal_lm(
        file.model.config, device="cpu", dtype=torch.float32, attention_kernel="flash"
    )
    model.transformer.save_pretrained(tmp_path)
    folder = HuggingFaceFolder(tmp_path)
    assert "wte.weight" in folder.file_of
    assert folder.check(file.model.config, parameter_layouts(file.model, UNSHARDED)) == []


def test_what_does_not_match_is_named(tmp_path: Path):
    file = tiny(Plan(), num_layers=2)
    model = causal_lm(
        file.model.config, device="cpu", dtype=torch.float32, attention_kernel="flash"
    )
    with pytest.raises(InputError, match=r"config\.json: no such file"):
        HuggingFaceFolder(tmp_path)
    model.config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match=r"neither model\.safetensors .*pickled weights are not"):
        HuggingFaceFolder(tmp_path)
    model.save_pretrained(tmp_path)
    folder = HuggingFaceFolder(tmp_path)

    def check(config: dict[str, Any], **options: Any) -> list[str]:
        other = tiny(Plan(), **{"num_layers": 2, **options}).model
        return folder.check(config or other.config, parameter_layouts(other, UNSHARDED))

    with pytest.raises(InputError, match=r"16 of 51 parameters .*model\.layers\.2\.\S+, .*13 more"):
        check({}, num_layers=3)
    with pytest.raises(InputError, match=r"16 of its 35 tensors have no place .*layers\.1\."):
        check({}, num_layers=1)
    with pytest.raises(InputError, match=r"tensors of other shapes: .*embed_tokens\.weight is \["):
        check({}, vocab_size=200)
    changed = {**file.model.config, "rms_norm_eps": 1e-4}
    assert check(changed) == [
        f"{tmp_path}/config.json differs from the plan's model: rms_norm_eps = 1e-06 in "
        "the checkpoint, 0.0001 in the plan"
    ]
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(InputError, match=r"model\.safetensors: cannot be read"):
        HuggingFaceFolder(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"w": 1}}', r"index\.json: weight_map: w = 1 \(must be a string\)"),
        ('{"metadata": {}}', r"index\.json: weight_map is missing"),
        ('{"weight_map"', r"index\.json: not JSON"),
    ],
)
def test_damaged_index(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=message):
        HuggingFaceFolder(tmp_path)


@pytest.mark.parametrize("name", ["pipe", "../outside", "/dev/zero"])
def test_weights_elsewhere_or_in_a_pipe_are_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(InputError, match=r"is not a regular file|names a file elsewhere"):
        HuggingFaceFolder(folder).files[name]


_MOE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 2,
    },
}


@pytest.mark.parametrize("family", sorted({*FAMILIES, *_EXPERTS} - {"bert", "t5"}))
def test_stored_names_are_those_of_save_pretrained(family: str, tmp_path: Path):
    if family in _EXPERTS:
        config: Any = {"model_type": family, **_MOE, **_EXPERTS[family]}
    else:
        config = tiny(Plan(), family, num_layers=1).model.config
    model: Any = AutoModelForCausalLM.from_config(hugging_face_config(config), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    folder = HuggingFaceFolder(tmp_path)
    found = set()
    for name, values in model.named_parameters():
        for part in stored_tensors(family, name, values.shape):
            found.add(part.key)
            piece = values
            for dim, ((start, stop),) in enumerate(part.pieces):
                piece = piece.narrow(dim, start, stop - start)
            assert torch.equal(
                folder.files[folder.file_of[part.key]].get_tensor(part.key), piece.view(part.shape)
            )
    assert found == set(folder.file_of) - {n for n, _ in model.named_buffers()}
    with (tmp_path / "config.json").open() as handle:
        assert json.load(handle)["model_type"] == family


class _Counted:
    """A tensor of a file that counts what is read of it."""

    def __init__(self, tensor: Any, read: list[int]) -> None:
        self.tensor, self.read = tensor, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def __getitem__(self, where: Any) -> torch.Tensor:
        found: torch.Tensor = self.tensor[where]
        self.read.append(found.numel())
        return found


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_rank_reads_no_more_than_it_holds(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tiny(Plan(), family, num_layers=1)
    model: Any = causal_lm(
        file.model.config, device="cpu", dtype=torch.float32, attention_kernel="flash"
    )
    model.save_pretrained(tmp_path)
    folder, read = HuggingFaceFolder(tmp_path), list[int]()
    real = folder.files.tensor
    monkeypatch.setattr(folder.files, "tensor", lambda *where: _Counted(real(*where), read))
    axis, held = TensorAxis(size=4, rank=1), 0
    for name, layout in parameter_layouts(file.model, axis).items():
        pieces = layout.ranges(axis)
        found = folder.start(layout, pieces)
        held += found.numel()
        expected = model.get_parameter(name).detach()
        for dim, ranges in enumerate(pieces):
            expected = torch.cat([expected.narrow(dim, a, b - a) for a, b in ranges], dim)
        assert torch.equal(found, expected), name
    assert sum(read) == held < file.model.num_parameters / 3


@pytest.mark.parametrize(("family", "adapted"), [("llama", "q_proj"), ("gpt2", "c_proj")])
def test_adapters_are_added_to_their_matrices(family: str, adapted: str, tmp_path: Path):
    file = tiny(Plan(), family, num_layers=1)
    reference: Any = reference_model(file, 0)
    tensors = {name: p.detach() for name, p in reference.named_parameters()}
    name = next(n for n in tensors if n.endswith(f"attn.{adapted}.weight"))
    path = name.removesuffix(".weight")
    first, second = torch.randn(2, 64, dtype=torch.float64), torch.randn(64, 2, dtype=torch.float64)
    saved = {**tensors, f"{path}.lora_A.weight": first, f"{path}.lora_B.weight": second}
    written = write_tensors(tmp_path / file_name(WEIGHTS, 0, 1), saved)
    workload = file.workload.to_dict() | {"adapter_rank": 2, "adapter_alpha": 3.0}
    index = CheckpointIndex(
        step=1,
        world_size=1,
        state=(),
        trainer={},
        files={file_name(WEIGHTS, 0, 1): FileEntry(written.size, written.sha256)},
        tensors={
            n: TensorEntry(tuple(t.shape), "F64", (TensorPart(0, whole_tensor(t.shape)),))
            for n, t in saved.items()
        },
        about={"model": {"config": dict(file.model.config)}, "workload": workload},
    )
    write_hugging_face(Checkpoint(tmp_path, index), tmp_path / "out")
    model = _loaded(tmp_path / "out", torch.float64)
    product = 1.5 * second @ first
    expected = tensors[name] + (product.t() if family == "gpt2" else product)
    assert torch.allclose(model.get_parameter(name), expected, rtol=1e-14)
    others = {n: p for n, p in model.named_parameters() if n != name}
    assert all(torch.equal(p, tensors[n]) for n, p in others.items())
