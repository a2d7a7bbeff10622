"""Lightning: a Python script with a Trainer, and the YAML files of LightningCLI.

Source: Lightning-AI/pytorch-lightning 2.6.6, src/lightning/pytorch/trainer/trainer.py (arguments of
Trainer), strategies/fsdp.py, deepspeed.py, ddp.py, model_parallel.py (arguments and the names under
which strategies are registered), src/lightning/fabric/connector.py (words of ``precision``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from hardware_profiles.errors import InputError
from planner.exchange.job import Job
from planner.exchange.keys import (
    OMIT,
    Key,
    Settings,
    Source,
    UnknownWord,
    integer,
    placed,
    reads_nothing,
    same,
    without_effect,
)
from planner.exchange.launch import torchrun
from planner.exchange.syntax.documents import FileHeader, Syntax, parse_yaml, stated_in_comments
from planner.exchange.syntax.python_document import CALL, parse_calls
from planner.exchange.syntax.python_recipe import Code, PythonTuple, expression, import_lines
from planner.exchange.target import ADAPTERS_IN_SCRIPT, Target
from planner.exchange.targets import huggingface as hf

FILE: Final = "lightning_trainer.py"
MODEL_FILE: Final = "lightning_model.py"
TRAINER: Final = "trainer"
STRATEGY: Final = "trainer.strategy"
MODULE: Final = "lightning.pytorch.strategies"
LAYER_MODULE: Final = "transformers.modeling_layers"
LAYER: Final = "GradientCheckpointingLayer"  # base class of the layers of transformers' models
LAYERS: Final = Code(f"{{{LAYER}}}", LAYER_MODULE, LAYER)
PRECISIONS: Final = {  # fabric/plugins/precision/utils.py, its older words too
    "bf16-mixed": ("bf16", True),
    "bf16": ("bf16", True),
    "bf16-true": ("bf16", False),
    "16-mixed": ("fp16", True),
    "16": ("fp16", True),
    "16-true": ("fp16", False),
    "32-true": ("fp32", True),
    "32": ("fp32", True),
    "transformer-engine": ("fp8", True),
}
STAGE_3_OFFLOAD: Final = {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
# registered names: class and arguments
REGISTERED: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "ddp": ("DDPStrategy", {}),
    "ddp_find_unused_parameters_true": ("DDPStrategy", {}),
    "ddp_find_unused_parameters_false": ("DDPStrategy", {}),
    "ddp_spawn": ("DDPStrategy", {}),
    "fsdp": ("FSDPStrategy", {}),
    "fsdp_cpu_offload": ("FSDPStrategy", {"cpu_offload": True}),
    "deepspeed": ("DeepSpeedStrategy", {}),
    "deepspeed_stage_1": ("DeepSpeedStrategy", {"stage": 1}),
    "deepspeed_stage_2": ("DeepSpeedStrategy", {"stage": 2}),
    "deepspeed_stage_2_offload": ("DeepSpeedStrategy", {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3": ("DeepSpeedStrategy", {"stage": 3}),
    "deepspeed_stage_3_offload": ("DeepSpeedStrategy", STAGE_3_OFFLOAD),
    "deepspeed_stage_3_offload_nvme": (
        "DeepSpeedStrategy",
        {**STAGE_3_OFFLOAD, "offload_params_device": "nvme", "offload_optimizer_device": "nvme"},
    ),
    "auto": ("DDPStrategy", {}),
}
PACKAGES: Final = ("lightning", "pytorch_lightning", "litgpt")
OF_NEMO_1: Final = ("exp_manager", "restore_from_path")
Read = Callable[[Any, Source], Settings]


def kind(job: Job) -> str:
    """Return the class of a plan's strategy."""
    plan = job.plan
    if plan.tensor_parallel > 1:
        return "ModelParallelStrategy"
    if plan.zero_stage == 1 or plan.offload == "optimizer":
        return "DeepSpeedStrategy"
    return "FSDPStrategy" if plan.zero_stage >= 2 else "DDPStrategy"


def _on(strategy: str, value: Callable[[Job], Any]) -> Callable[[Job], Any]:
    return lambda job: value(job) if kind(job) == strategy else OMIT


def _fsdp(
    name: str, value: Callable[[Job], Any], carried: str = "", read: Read = reads_nothing
) -> Key:
    carries = (carried,) if carried else ()
    return Key(f"{STRATEGY}.{name}", carries, _on("FSDPStrategy", value), read)


def _deepspeed(
    name: str, value: Callable[[Job], Any], carried: str, read: Read = reads_nothing
) -> Key:
    return Key(f"{STRATEGY}.{name}", (carried,), _on("DeepSpeedStrategy", value), read)


def _write_sharding(job: Job) -> str:
    replicated = job.plan.dp_replicate > 1
    if job.plan.zero_stage == 3:
        return "HYBRID_SHARD" if replicated else "FULL_SHARD"
    return "_HYBRID_SHARD_ZERO2" if replicated else "SHARD_GRAD_OP"


def _read_sharding(value: Any, source: Source) -> Settings:
    word = str(value).lower().rpartition(".")[2].lstrip("_")
    if word not in hf.STRATEGIES:
        raise UnknownWord(f"sharding_strategy = {str(value)[:60]!r}")
    found: Settings = {"zero_stage": hf.STRATEGIES[word]}
    if "hybrid" in word and source.get(f"{STRATEGY}.device_mesh") is None:
        found["dp_replicate"] = int(source.get(f"{TRAINER}.num_nodes", 1))  # shards in a node
    return found


def _read_mesh(value: Any, source: Source) -> Settings:
    if not isinstance(value, list) or len(value) != 2:
        raise UnknownWord(f"device_mesh = {str(value)[:60]!r} (known: a pair of sizes)")
    return {"dp_replicate": int(value[0])}


def _read_cpu_offload(value: Any, source: Source) -> Settings:
    if isinstance(value, Mapping):
        value = value.get("offload_params", value.get("0", False))
    return {"offload": "weights"} if hf.truth(value) else {}


def _write_precision(job: Job) -> str:
    found = {pair: word for word, pair in reversed(PRECISIONS.items())}
    pair = (job["precision"], bool(job["master_weights"]) or job["precision"] == "fp32")
    return found[pair]


def _read_precision(value: Any, source: Source) -> Settings:
    word = str(value)
    if word not in PRECISIONS:
        raise UnknownWord(f"precision = {word[:60]!r} (known: {', '.join(PRECISIONS)})")
    precision, master = PRECISIONS[word]
    return {"precision": precision} | ({} if master else {"master_weights": False})


def _read_kind(value: Any, source: Source) -> Settings:
    """Return the ZeRO stage that a strategy has unless an argument states another one."""
    name = str(value).rpartition(".")[2]
    if name == "DDPStrategy":
        return {"zero_stage": 0}
    if name == "FSDPStrategy":
        return {"zero_stage": 3, "recompute": "none"}
    if name == "DeepSpeedStrategy":
        return {"zero_stage": 2}
    if name != "ModelParallelStrategy":
        raise UnknownWord(f"strategy = {name[:60]!r} is not known: only other values were read")
    return {"software": "torch-trainer+fsdp2"}


def _read_devices(source: Source) -> int | None:
    devices = source.get(f"{TRAINER}.devices")
    count = len(devices) if isinstance(devices, list) else devices
    return count if type(count) is int and count > 0 else None


def _model_parallel(settings: Settings, source: Source) -> Settings:
    """Return the degrees of a ModelParallelStrategy, whose sizes may be automatic."""
    tensor = source.get(f"{STRATEGY}.tensor_parallel_size", "auto")
    data = source.get(f"{STRATEGY}.data_parallel_size", "auto")
    nodes = source.get(f"{TRAINER}.num_nodes", 1)
    found: Settings = {"dp_replicate": 1}
    if type(tensor) is int or (devices := _read_devices(source)) is not None:
        found["tensor_parallel"] = tensor if type(tensor) is int else devices
    sharded = data if type(data) is int else nodes
    return found | {"zero_stage": 3 if sharded > 1 else 0}


def complete(settings: Settings, source: Source) -> Settings:
    """Return Trainer's defaults for arguments that are not there."""
    found: Settings = {"precision": "fp32", "num_microbatches": 1}
    name = str(source.get(f"{STRATEGY}.{CALL}", ""))
    if name.endswith("ModelParallelStrategy"):
        return found | _model_parallel(settings, source)
    found |= {"tensor_parallel": 1, "dp_replicate": 1}
    return found if name else found | {"zero_stage": 0}


def prepare(source: Source) -> Mapping[str, Any]:
    """Return a document whose strategy is a call: of a registered name, or of a class path."""
    document = dict(source.document)
    trainer = dict(document.get(TRAINER) or {})
    strategy = trainer.get("strategy")
    if isinstance(strategy, str):
        name, arguments = REGISTERED.get(strategy.lower(), (strategy, {}))
        strategy = {CALL: f"{MODULE}.{name}", **arguments}
    elif isinstance(strategy, Mapping) and "class_path" in strategy:
        strategy = {CALL: strategy["class_path"], **(strategy.get("init_args") or {})}
    if strategy is not None:
        trainer["strategy"] = strategy
    document[TRAINER] = trainer
    data = document.get("data")
    if isinstance(data, Mapping) and isinstance(data.get("init_args"), Mapping):
        document["data"] = data["init_args"]
    return document


def recognises(document: Mapping[str, Any]) -> bool:
    """Whether a document has a Trainer of Lightning, and none of NeMo's."""
    trainer = document.get(TRAINER)
    if not isinstance(trainer, Mapping) or any(name in document for name in OF_NEMO_1):
        return False
    if CALL in trainer:
        return str(trainer[CALL]).split(".")[0] in PACKAGES
    sections = [document.get(name) for name in ("model", "data", "optimizer")]
    sections.append(trainer.get("strategy"))
    named = any(isinstance(one, Mapping) and "class_path" in one for one in sections)
    model = document.get("model")
    megatron = isinstance(model, Mapping) and "micro_batch_size" in model
    return (named or "seed_everything" in document or "model" not in document) and not megatron


def parse_script(text: str, where: str) -> dict[str, Any]:
    """Return the Trainer of a script and the batch size of its training data.

    Several data loaders: the one that shuffles or that a function of training makes comes first.
    A file that is no Python is a YAML file of LightningCLI.
    """
    try:
        calls = parse_calls(text, where)
    except InputError:
        return parse_yaml(text, where)
    trainers = [call for call in calls if call[CALL].rpartition(".")[2] == "Trainer"]
    if not trainers:
        if ":" in text and not calls:
            return parse_yaml(text, where)
        raise InputError(f"{where}: no Trainer(…) is made in the script")
    document: dict[str, Any] = {TRAINER: trainers[-1]}
    loaders = [call for call in calls if call[CALL].rpartition(".")[2] == "DataLoader"]
    loaders.sort(key=lambda call: call.get("shuffle") is not True)  # stable
    if loaders and (size := loaders[0].get("batch_size", loaders[0].get("1"))) is not None:
        document["data"] = {"batch_size": size}
    return document


def restate(leaves: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as a file of LightningCLI has them: class paths and their arguments."""
    trainer, data = document.get(TRAINER), document.get("data")
    if not isinstance(trainer, Mapping) or CALL in trainer:
        return dict(leaves)
    nested = isinstance(data, Mapping) and "class_path" in data
    found: dict[str, Any] = {}
    for path, value in leaves.items():
        if value == LAYERS:
            value = [f"{LAYER_MODULE}.{LAYER}"]
        if path == f"{STRATEGY}.{CALL}":
            found[f"{STRATEGY}.class_path"] = value
        elif path.startswith(f"{STRATEGY}."):
            found[f"{STRATEGY}.init_args.{path[len(STRATEGY) + 1 :]}"] = value
        elif path == "data.batch_size" and nested:
            found["data.init_args.batch_size"] = value
        elif path != f"{TRAINER}.{CALL}":
            found[path] = value
    return found


# --- writing ---


def _model(job: Job) -> list[str]:
    """Return the lines that make the model: whole, or cut for a ModelParallelStrategy."""
    plan = job.plan
    loaded = "MODEL" if job["master_weights"] else "MODEL, dtype=torch.bfloat16"
    if job["precision"] == "fp16" and not job["master_weights"]:
        loaded = "MODEL, dtype=torch.float16"
    if plan.tensor_parallel == 1:
        return [f"        model = {hf.auto_class(job)}.from_pretrained({loaded})"]
    lines = [
        "        mesh = self.device_mesh",
        '        arguments = {"tp_plan": "auto", "device_mesh": mesh["tensor_parallel"]}',
        f"        model = {hf.auto_class(job)}.from_pretrained({loaded}, **arguments)",
    ]
    if plan.zero_stage:
        options = f"mesh=mesh['data_parallel'], reshard_after_forward={plan.zero_stage == 3}"
        lines += [
            "        for layer in model.modules():",
            "            if isinstance(layer, GradientCheckpointingLayer):",
            f"                fully_shard(layer, {options})",
            f"        fully_shard(model, {options})",
        ]
    return lines


def model_file(job: Job, header: FileHeader) -> dict[str, str]:
    """Return a module with a model of the hub and its data, which a user's own may replace."""
    sharded = job.plan.tensor_parallel > 1 and job.plan.zero_stage > 0
    again = job.plan.recompute == "full" and kind(job) != "FSDPStrategy"
    labels = "labels" if job.model.bridge else "input_ids"
    lines = [
        '"""A language model and its data; replace both by yours."""',
        "",
        "import torch",
        "from datasets import load_from_disk",
        "from lightning.pytorch import LightningModule",
        *(["from torch.distributed.fsdp import fully_shard"] if sharded else []),
        f"from transformers import {hf.auto_class(job)}",
        *([f"from {LAYER_MODULE} import {LAYER}"] if sharded else []),
        "",
        f"MODEL = {json.dumps(job.hub_name)}  # its id on the hub, or its folder",
        f"SEQ_LEN = {job.workload.seq_len}  # tokens of a sequence",
        'DATA = "data"  # a tokenized data set: load_from_disk',
        "",
        "",
        "def rows():",
        '    found = load_from_disk(DATA).with_format("torch")',
        '    assert all(len(row) <= SEQ_LEN for row in found[:100]["input_ids"])',
        "    return found",
        "",
        "",
        "class LanguageModel(LightningModule):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.model = None",
        "",
        "    def configure_model(self):",
        "        if self.model is not None:",
        "            return",
        *_model(job),
        *(["        model.gradient_checkpointing_enable()"] if again else []),
        "        self.model = model.train()",
        "",
        "    def training_step(self, batch, index):",
        f'        return self.model(input_ids=batch["input_ids"], labels=batch["{labels}"]).loss',
        "",
        "    def configure_optimizers(self):",
        "        return torch.optim.AdamW(self.parameters(), lr=3e-4)",
    ]
    return {MODEL_FILE: "\n".join(lines) + "\n"}


def _render(leaves: Mapping[str, Any], comments: Mapping[str, str], header: FileHeader) -> str:
    """Return the script: a function that makes the Trainer, and one that makes the data loader."""
    document = placed(leaves)
    start = f"{TRAINER}."
    inner = {k.removeprefix(start): v for k, v in comments.items() if k.startswith(start)}
    trainer = expression(document[TRAINER], inner, indent="    ").replace("'", '"')
    loader = {CALL: "torch.utils.data.DataLoader"}
    lines = [
        *header.comments(),
        *import_lines({TRAINER: document[TRAINER], "data": loader}),
        "",
        "",
        "def make_trainer() -> Trainer:",
        f"    return {trainer}",
        "",
        "",
        "def make_loader(rows) -> DataLoader:",
        f"    batch = {document['data']['batch_size']}  # {comments['data.batch_size']}",
        "    return DataLoader(rows, batch_size=batch, shuffle=True)",
        "",
        "",
        'if __name__ == "__main__":',
        f"    from {MODEL_FILE.removesuffix('.py')} import LanguageModel, rows",
        "",
        "    make_trainer().fit(LanguageModel(), make_loader(rows()))",
    ]
    return "\n".join(lines) + "\n"


def _read_recompute(value: Any, source: Source) -> Settings:
    return {"recompute": "full" if value not in (None, False) else "none"}


def _read_offload(part: str) -> Callable[[Any, Source], Settings]:
    device = "offload_optimizer_device" if part == "optimizer" else "offload_params_device"

    def read(value: Any, source: Source) -> Settings:
        if not hf.truth(value):
            return {}
        word = str(source.get(f"{STRATEGY}.{device}", "cpu"))
        return {"offload": part, "offload_device": word}

    return read


def _device(job: Job) -> Any:
    return "nvme" if job.plan.offload_device == "nvme" else OMIT


KEYS: Final = (
    Key(f"{TRAINER}.{CALL}", (), lambda job: "lightning.pytorch.Trainer"),
    Key(f"{TRAINER}.accelerator", (), lambda job: "cpu" if hf.on_cpu(job) else "gpu"),
    Key(f"{TRAINER}.devices", ("data_parallel",), lambda job: job.cluster.gpus_per_node),
    Key(f"{TRAINER}.num_nodes", ("data_parallel",), lambda job: job.cluster.num_nodes),
    Key(f"{TRAINER}.precision", ("precision", "master_weights"), _write_precision, _read_precision),
    same(f"{TRAINER}.accumulate_grad_batches", "num_microbatches"),
    Key(f"{STRATEGY}.{CALL}", ("zero_stage",), lambda job: f"{MODULE}.{kind(job)}", _read_kind),
    _fsdp("sharding_strategy", _write_sharding, "zero_stage", _read_sharding),
    _fsdp("auto_wrap_policy", lambda job: LAYERS),
    _fsdp(
        "activation_checkpointing_policy",
        lambda job: LAYERS if job.plan.recompute == "full" else OMIT,
        "recompute",
        _read_recompute,
    ),
    Key(f"{STRATEGY}.activation_checkpointing", read=_read_recompute),
    _fsdp(
        "cpu_offload",
        lambda job: True if job.plan.offloads_weights else OMIT,
        "offload",
        _read_cpu_offload,
    ),
    _fsdp(
        "device_mesh",
        lambda job: (
            PythonTuple((job.plan.dp_replicate, job.plan.dp_shard))
            if job.plan.dp_replicate > 1
            else OMIT
        ),
        "dp_replicate",
        _read_mesh,
    ),
    Key(
        f"{STRATEGY}.config",
        read=lambda value, source: {
            name: each
            for name, each in hf.read_deepspeed(value, source).items()
            if name != "software"
        },
    ),
    _deepspeed("stage", lambda job: job.plan.zero_stage, "zero_stage", integer("zero_stage")),
    _deepspeed(
        "offload_optimizer",
        lambda job: True if job.plan.offload == "optimizer" else OMIT,
        "offload",
        _read_offload("optimizer"),
    ),
    _deepspeed("offload_optimizer_device", _device, "offload_device"),
    Key(f"{STRATEGY}.offload_parameters", read=_read_offload("weights")),
    Key(
        f"{STRATEGY}.tensor_parallel_size",
        ("tensor_parallel",),
        _on("ModelParallelStrategy", lambda job: job.plan.tensor_parallel),
        integer("tensor_parallel"),
    ),
    Key(
        f"{STRATEGY}.data_parallel_size",
        ("data_parallel",),
        _on("ModelParallelStrategy", lambda job: job.plan.data_parallel),
    ),
    same("data.batch_size", "micro_batch_size"),
    *without_effect(
        """
        state_dict_type mixed_precision process_group_backend timeout find_unused_parameters
        gradient_as_bucket_view static_graph save_distributed_checkpoint use_orig_params
        limit_all_gathers
        """,
        section=f"{STRATEGY}.",
    ),
    *without_effect(
        """
        logger callbacks fast_dev_run max_epochs min_epochs max_steps min_steps max_time
        limit_train_batches limit_val_batches plugins limit_test_batches limit_predict_batches
        overfit_batches profiler val_check_interval check_val_every_n_epoch num_sanity_val_steps
        log_every_n_steps enable_checkpointing enable_progress_bar enable_model_summary
        gradient_clip_val gradient_clip_algorithm deterministic benchmark inference_mode
        use_distributed_sampler detect_anomaly barebones sync_batchnorm default_root_dir
        reload_dataloaders_every_n_epochs model_registry resume_from_checkpoint
        logger.* callbacks.* plugins.* profiler.*
        """,
        section=f"{TRAINER}.",
    ),
    *without_effect("""
        data.* model.* optimizer.* lr_scheduler.* model data ckpt_path seed_everything
        seed_everything_default optimizer lr_scheduler
    """),
)

_CONFIGURE: Final = "configure_model of the LightningModule"
ELSEWHERE: Final = {
    "seq_len": f"SEQ_LEN in {MODEL_FILE}, and the tokenized data",
    "target_seq_len": "the labels of the tokenized data",
    "global_batch_size": "micro-batch x accumulate_grad_batches x data-parallel ranks",
    "zero_stage": f"fully_shard(…, reshard_after_forward=…) in {_CONFIGURE}",
    "sequence_parallel": f"the plan of parallelize_module in {_CONFIGURE}",
    "recompute": f"model.gradient_checkpointing_enable() in {_CONFIGURE}",
    "offload": f"the policy of fully_shard in {_CONFIGURE}",
    "optimizer": "configure_optimizers of the LightningModule",
    "optimizer_state_precision": "configure_optimizers of the LightningModule",
    "gradient_precision": "the model's dtype",
    "master_weights": "the model's dtype",
    "attention_kernel": "attn_implementation of from_pretrained",
    "freeze": f"requires_grad_(False) in {_CONFIGURE}",
    **ADAPTERS_IN_SCRIPT,
    "offload_device": "offload_optimizer_device of DeepSpeedStrategy",
}
SYNTAX: Final = Syntax("python", parse_script, _render, stated_in_comments, also=("yaml",))

TARGET: Final = Target(
    name="lightning",
    file=FILE,
    syntax=SYNTAX,
    keys=KEYS,
    elsewhere=ELSEWHERE,
    processes=(f"{TRAINER}.devices", f"{TRAINER}.num_nodes"),
    recognises=recognises,
    launch=lambda job: torchrun(job, FILE),
    more_files=model_file,
    prepare=prepare,
    complete=complete,
    restate=restate,
)
