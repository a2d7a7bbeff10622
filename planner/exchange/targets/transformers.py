"""TrainingArguments of Hugging Face's Trainer as JSON, with a script that reads them.

The JSON may hold arguments alone (``HfArgumentParser.parse_json_file`` refuses any other key), so
the header is in the script.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from planner.exchange.job import Job
from planner.exchange.keys import OMIT, Key, Settings, Source, constant, same, without_effect
from planner.exchange.launch import torchrun
from planner.exchange.syntax import BARE_JSON, FileHeader
from planner.exchange.target import Target
from planner.exchange.targets.huggingface import (
    ARGUMENTS,
    deepspeed_key,
    fp32_without,
    fsdp_keys,
    legacy_fsdp,
    optimizer_key,
    precision_keys,
    truth,
    uses_fsdp,
    zero_of_wrapper,
)

FILE: Final = "training_args.json"
SCRIPT: Final = "train.py"
FSDP: Final = "fsdp_config."
LENGTHS: Final = ("max_length", "max_seq_length")  # of TRL's SFTConfig
MARKS: Final = ("per_device_train_batch_size", "output_dir", "gradient_accumulation_steps")
FSDP_MARKS: Final = (  # of a file that holds ``fsdp_config`` alone
    "transformer_layer_cls_to_wrap",
    "fsdp_transformer_layer_cls_to_wrap",
    "reshard_after_forward",
    "backward_prefetch",
    "fsdp_backward_prefetch",
    "auto_wrap_policy",
    "fsdp_auto_wrap_policy",
    "use_orig_params",
)


def _recompute(job: Job) -> Any:
    """Return the Trainer's own switch, which FSDP replaces by its own."""
    return OMIT if uses_fsdp(job) else job.plan.recompute == "full"


def read_recompute(value: Any, source: Source) -> Settings:
    """Return whether layers are checkpointed."""
    return {"recompute": "full" if truth(value) else "none"}


def prepare(source: Source) -> Mapping[str, Any]:
    """Return a document whose keys of FSDP stand in ``fsdp_config`` without their prefix."""
    document = dict(source.document)
    if not any(mark in document for mark in MARKS):
        document = {"fsdp": True, "fsdp_config": document}
    section = document.get("fsdp_config")
    if isinstance(section, Mapping):
        document["fsdp_config"] = {
            name.removeprefix("fsdp_"): value for name, value in section.items()
        }
        document.setdefault("fsdp", True)
    return document


def complete(settings: Settings, source: Source) -> Settings:
    """Return fp32, no checkpointing, and the ZeRO stage, where no key states them."""
    found = fp32_without(source, "bf16", "fp16") if source.get(MARKS[0]) is not None else {}
    found |= zero_of_wrapper(source, fsdp="fsdp", deepspeed="deepspeed")
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
        "from transformers import AutoModelForCausalLM, HfArgumentParser",
        "from transformers import Trainer, TrainingArguments",
        "",
        f'MODEL = "{job.model.name}"  # its id on the hub, or its folder',
        f"SEQ_LEN = {job.workload.seq_len}  # tokens of a sequence",
        'DATA = "data"  # a tokenized data set: load_from_disk',
        "",
        "(arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[1])",
        "data = load_from_disk(DATA)",
        "assert all(len(row) <= SEQ_LEN for row in data[:100]['input_ids'])",
        "model = AutoModelForCausalLM.from_pretrained(MODEL)",
        "Trainer(model=model, args=arguments, train_dataset=data).train()",
    ]
    return {SCRIPT: "\n".join(lines) + "\n"}


KEYS: Final = (
    constant("output_dir", "out"),
    same("per_device_train_batch_size", "micro_batch_size"),
    same("gradient_accumulation_steps", "num_microbatches"),
    *precision_keys(),
    optimizer_key("optim"),
    Key("gradient_checkpointing", read=read_recompute),
    Key("activation_checkpointing", ("recompute",), _recompute, read_recompute),
    Key("fsdp", (), lambda job: True if uses_fsdp(job) else OMIT, legacy_fsdp),
    *fsdp_keys(FSDP, f"{FSDP}version", recomputes=True, offload="cpu_offload"),
    deepspeed_key(),
    *(Key(name, read=lambda value, source: {"seq_len": int(value)}) for name in LENGTHS),
    *without_effect("tf32", "torch_compile", "use_liger_kernel", "packing", "dataset_text_field"),
    *without_effect("assistant_only_loss", "completion_only_loss", "dataset_num_proc"),
    *ARGUMENTS,
)

ELSEWHERE: Final = {
    "seq_len": f"SEQ_LEN in {SCRIPT}, and the tokenized data",
    "global_batch_size": "micro-batch x accumulation x processes",
    "attention_kernel": "attn_implementation of from_pretrained",
    "freeze": "requires_grad_(False) in the script",
    "lora": "peft.LoraConfig(r=…)",
    "qlora": "peft.LoraConfig(r=…) and BitsAndBytesConfig(load_in_4bit=True)",
    "lora_alpha": "peft.LoraConfig(lora_alpha=…)",
    "lora_targets": "peft.LoraConfig(target_modules=…)",
    "quantisation": "transformers.BitsAndBytesConfig",
}

TARGET: Final = Target(
    name="transformers",
    file=FILE,
    syntax=BARE_JSON,
    keys=KEYS,
    elsewhere=ELSEWHERE,
    recognises=recognises,
    launch=lambda job: torchrun(job, f"{SCRIPT} {FILE}"),
    more_files=script,
    companion=SCRIPT,
    prepare=prepare,
    complete=complete,
)
