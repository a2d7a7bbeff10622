"""TrainingArguments of Hugging Face's Trainer as JSON, with a script that reads them.

The JSON may hold arguments alone (``HfArgumentParser.parse_json_file`` refuses any other key), so
the header is in the script. Read are also the YAML files of TRL and of the alignment handbook, and
scripts that pass arguments as flags; with TRL's arguments of the model (trl/trainer/model_config.py
of 1.16: ``use_peft``, ``lora_r``, ``load_in_4bit``) and their names in other scripts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in, parse_json
from planner.exchange.job import Job
from planner.exchange.keys import (
    OMIT,
    Key,
    Settings,
    Source,
    UnknownWord,
    constant,
    integer,
    not_priced,
    same,
    without_effect,
    words,
)
from planner.exchange.launch import torchrun
from planner.exchange.syntax.documents import BARE_JSON, FileHeader, parse_yaml, syntax_of
from planner.exchange.syntax.flags import ENVIRONMENT, LAUNCHER, UNRESOLVED, parse_flags
from planner.exchange.target import ADAPTERS_IN_SCRIPT, ConfigReading, Target
from planner.exchange.targets import huggingface as hf

FILE: Final = "training_args.json"
SCRIPT: Final = "train.py"
FSDP: Final = "fsdp_config."
# of TRL's SFTConfig, of run_clm.py and of scripts after Alpaca's
LENGTHS: Final = ("max_length", "max_seq_length", "block_size", "model_max_length")
RANKS: Final = ("lora_r", "lora_rank")
DEFAULT_RANK, DEFAULT_ALPHA = 16, 32  # trl/trainer/model_config.py
# of ``accelerate launch``: its file, and flags that choose the sharding
ACCELERATE: Final = ("config-file", "use-fsdp", "use-deepspeed")
OF_DEEPSPEED: Final = ("zero_stage", "offload_", "deepspeed_config_file")
SHARDING: Final = names_in("""
    zero_stage offload offload_device software precision tensor_parallel sequence_parallel
    dp_replicate context_parallel context_parallel_method
""")
MARKS: Final = ("per_device_train_batch_size", "output_dir", "gradient_accumulation_steps")
# of a file that holds ``fsdp_config`` alone
FSDP_MARKS: Final = names_in("""
    transformer_layer_cls_to_wrap fsdp_transformer_layer_cls_to_wrap reshard_after_forward
    backward_prefetch fsdp_backward_prefetch auto_wrap_policy fsdp_auto_wrap_policy use_orig_params
""")


def _recompute(job: Job) -> Any:
    """Return the Trainer's own switch, which FSDP replaces by its own."""
    return OMIT if hf.uses_fsdp(job) else job.plan.recompute == "full"


def parse_arguments(text: str, where: str) -> dict[str, Any]:
    """Return the arguments of a JSON or YAML file, or of the flags of a script.

    >>> parse_arguments("torchrun --nnodes 1 a.py --bf16 True --output-dir x", "x")
    {'torchrun': {'nnodes': 1}, 'bf16': 'True', 'output_dir': 'x'}
    """
    kind = syntax_of(text)
    if kind == "json":
        return parse_json(text, where)
    if kind == "yaml":
        return parse_yaml(text, where)
    return {name.replace("-", "_"): value for name, value in parse_flags(text, where).items()}


def _read_adapter(source: Source) -> Settings:
    """Return the adapter that TRL's arguments of the model state, or those of other scripts."""
    given = next((source.get(name) for name in RANKS if source.get(name) is not None), None)
    if not hf.truth(source.get("use_peft", given is not None)):
        return {}
    rank = DEFAULT_RANK if given is None else int(given)
    in_4bit = any(hf.truth(source.get(name, False)) for name in ("load_in_4bit", "q_lora"))
    in_8bit = hf.truth(source.get("load_in_8bit", False))
    found: Settings = {"qlora" if in_4bit or in_8bit else "lora": rank}
    found["lora_alpha"] = float(source.get("lora_alpha", DEFAULT_ALPHA))
    if in_4bit or in_8bit:
        found["quantisation"] = "nf4" if in_4bit else "int8"
        if in_4bit and hf.truth(source.get("use_bnb_nested_quant", False)):
            found["quantisation"] = "nf4_double"
    # without them peft adapts the queries and values of a decoder
    found["lora_targets"] = hf.target_names_of(source.get("lora_target_modules", "q_proj,v_proj"))
    return found


def _accelerated(source: Source) -> ConfigReading | None:
    """Return what ``accelerate launch`` states: its file, and the flags that override it."""
    from planner.exchange.targets.accelerate import DEEPSPEED, TARGET

    launcher = source.document.get(LAUNCHER)
    if not isinstance(launcher, Mapping) or not any(mark in launcher for mark in ACCELERATE):
        return None
    document: dict[str, Any] = {}
    if isinstance(file := launcher.get("config-file"), str):
        try:
            document = dict(hf.neighbour(file, source, "a configuration of Accelerate"))
        except InputError as error:
            raise UnknownWord(f"accelerate launch --config_file: {error}") from None
    for flag, kind in (("use-fsdp", "FSDP"), ("use-deepspeed", "DEEPSPEED")):
        if flag in launcher:
            document["distributed_type"] = kind
    flags = {name.replace("-", "_"): value for name, value in launcher.items()}
    for section, names in (
        ("fsdp_config", [name for name in flags if name.startswith("fsdp_")]),
        (DEEPSPEED, [name for name in flags if name.startswith(OF_DEEPSPEED)]),
    ):
        if names:
            stated = document.get(section)
            before = stated if isinstance(stated, Mapping) else {}
            document[section] = {**before, **{name: flags[name] for name in names}}
    if "mixed_precision" in flags:
        document["mixed_precision"] = flags["mixed_precision"]
    return TARGET.read_document(Source(document, source.folder))


def read_launcher(value: Any, source: Source) -> Settings:
    """Return how ``accelerate launch`` shards; batches are those of the arguments."""
    reading = _accelerated(source)
    if reading is None:
        return {}
    found = {name: reading.settings[name] for name in SHARDING if name in reading.settings}
    if reading.settings.get("recompute") == "full":
        found["recompute"] = "full"
    return found


def remarks(source: Source) -> list[str]:
    """Return what the arguments state that is not priced."""
    found = hf.deepspeed_remarks(source)
    with contextlib.suppress(UnknownWord):  # the key's own note
        if (reading := _accelerated(source)) is not None:
            found += [f"accelerate launch: {note}" for note in reading.notes]
    for name in ("torch_dtype", "dtype"):
        dtype = str(source.get(name, "")).removeprefix("torch.")
        if dtype in ("bfloat16", "float16") and not _read_adapter(source):
            found.append(
                f"{name} = {dtype}: priced with weights in fp32 (--no-master-weights prices "
                "weights in 16 bits alone)"
            )
    return found


def prepare(source: Source) -> Mapping[str, Any]:
    """Return a document whose keys of FSDP stand in ``fsdp_config`` without their prefix."""
    document = dict(source.document)
    if not any(mark in document for mark in MARKS):
        document = {"fsdp": True, "fsdp_config": document}
    for name in ("fsdp_config", "deepspeed"):  # of scripts: a file, or a mapping as JSON
        if isinstance(text := document.get(name), str) and text.startswith("{"):
            document[name] = parse_json(text, name)
    section = document.get("fsdp_config")
    if isinstance(section, str):
        with contextlib.suppress(InputError):  # else the key stays unknown
            section = hf.neighbour(section, source, "a configuration of FSDP")
    if isinstance(section, Mapping):
        document["fsdp_config"] = {
            name.removeprefix("fsdp_"): value for name, value in section.items()
        }
        document.setdefault("fsdp", True)
    return document


def complete(settings: Settings, source: Source) -> Settings:
    """Return fp32, no checkpointing, and the ZeRO stage, where no key states them."""
    found = hf.fp32_without(source, "bf16", "fp16") if source.get(MARKS[0]) is not None else {}
    if not any(source.get(f"{LAUNCHER}.{mark}") for mark in ACCELERATE):
        found |= hf.zero_of_wrapper(source, fsdp="fsdp", deepspeed="deepspeed")
    found |= _read_adapter(source)
    if source.get(MARKS[0]) is not None:
        found |= {"recompute": "none", "num_microbatches": 1}
    return found


def recognises(document: Mapping[str, Any]) -> bool:
    """Whether a document is one of TrainingArguments, or of FSDP's arguments alone."""
    return any(mark in document for mark in (*MARKS, *FSDP_MARKS))


def script(job: Job, header: FileHeader) -> dict[str, str]:
    """Return a script that trains with the arguments."""
    lines = [
        *header.comments(),
        '"""Train with the arguments of the JSON file on a tokenized data set."""',
        "",
        "import sys",
        "",
        "from datasets import load_from_disk",
        f"from transformers import {hf.auto_class(job)}, HfArgumentParser",
        "from transformers import Trainer, TrainingArguments",
        "",
        f"MODEL = {json.dumps(job.model.name)}  # its id on the hub, or its folder",
        f"SEQ_LEN = {job.workload.seq_len}  # tokens of a sequence",
        'DATA = "data"  # with input_ids and labels, saved by save_to_disk',
        "",
        "(arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[1])",
        "data = load_from_disk(DATA)",
        "assert all(len(row) <= SEQ_LEN for row in data[:100]['input_ids'])",
        f"model = {hf.auto_class(job)}.from_pretrained(MODEL)",
        "trainer = Trainer(model=model, args=arguments, train_dataset=data)",
        "trainer.train()",
        "trainer.save_state()  # trainer_state.json, which shardplan observe reads",
    ]
    return {SCRIPT: "\n".join(lines) + "\n"}


KEYS: Final = (
    Key(LAUNCHER, read=read_launcher),  # first: arguments of the script override it
    constant("output_dir", "out"),
    same("per_device_train_batch_size", "micro_batch_size"),
    same("gradient_accumulation_steps", "num_microbatches"),
    *hf.PRECISIONS,
    words("optim", "optimizer", hf.OPTIMIZERS, also=hf.MORE_OPTIMIZERS),
    Key("gradient_checkpointing", read=hf.read_recompute),
    Key("activation_checkpointing", ("recompute",), _recompute, hf.read_recompute),
    Key("use_cpu", (), lambda job: True if hf.on_cpu(job) else OMIT),
    Key("fsdp", (), lambda job: True if hf.uses_fsdp(job) else OMIT, hf.legacy_fsdp),
    *hf.fsdp_keys(FSDP, f"{FSDP}version", recomputes=True, offload="cpu_offload"),
    hf.deepspeed_key(),
    *(Key(name, read=integer("seq_len")) for name in LENGTHS),
    Key("attn_implementation", read=hf.read_kernel),
    Key("model_name_or_path"),
    *without_effect(f"""
        lora_r lora_rank lora_alpha lora_dropout lora_target_modules use_peft load_in_4bit
        load_in_8bit q_lora use_bnb_nested_quant dtype torch_dtype model_revision trust_remote_code
        max_prompt_length fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params chat_template tf32
        packing dataset_text_field assistant_only_loss completion_only_loss dataset_num_proc
        {LAUNCHER}.* {ENVIRONMENT}.* {UNRESOLVED}
    """),
    *not_priced("use_liger_kernel", advice=hf.LIGER),
    *not_priced("torch_compile", "use_dora", "use_unsloth"),
    *hf.ARGUMENTS,
)

ELSEWHERE: Final = {
    "seq_len": f"SEQ_LEN in {SCRIPT}, and the tokenized data",
    "target_seq_len": "the labels of the tokenized data",
    "global_batch_size": "micro-batch x accumulation x processes",
    "attention_kernel": "attn_implementation of from_pretrained",
    "freeze": "requires_grad_(False) in the script",
    **ADAPTERS_IN_SCRIPT,
}

TARGET: Final = Target(
    name="transformers",
    file=FILE,
    syntax=replace(BARE_JSON, parse=parse_arguments, also=("shell", "yaml")),
    keys=KEYS,
    elsewhere=ELSEWHERE,
    recognises=recognises,
    launch=lambda job: torchrun(job, f"{SCRIPT} {FILE}"),
    more_files=script,
    companion=SCRIPT,
    prepare=prepare,
    complete=complete,
    remarks=remarks,
    model="model_name_or_path",
)
