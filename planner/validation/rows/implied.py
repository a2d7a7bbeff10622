"""Cells of a row that its other cells imply: adapters, engines, the case of a suite, samples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from planner.validation.rows.counts import WEIGHT_RANKS, adapters_in
from planner.validation.rows.reading import Reading
from planner.validation.rows.runs_file import Row
from planner.validation.rows.trainer import shards_nothing
from planner.validation.rows.vocabulary import ANYWHERE, terms_of, vocabulary
from planner.validation.rows.words import look_up, spelled, words_table

# tasks, suites and trainers after a model's name: "BERT-Large pretraining", "llama2_7b-deepspeed"
AROUND_MODEL: Final = re.compile(
    r"(?:[\s,(_-]+(?:mlperf|pre-?training|pretrain|phase[\s_-]?\d|fine-?tun(?:ing|e)"
    r"|continuetrain|container|in|pytorch|torch|paddle|megatron|pai|deepspeed|flagscale"
    r"|transformers|tr\d+[a-z]?(?:-[\w.]+)*)\)?)+$",
    re.IGNORECASE,
)
# by accelerator, whose submissions have settings of their own
VENDORS: Final = {
    "rocm mi300x": re.compile(r"\bmi300x"),
    "rocm": re.compile(r"\bmi\d{3}|instinct"),
    "blackwell": re.compile(r"\bg?b[23]00\b"),
    "gaudi": re.compile(r"gaudi|\bhl-?\d"),
    "xla": re.compile("tpu"),
}
ADAPTED: Final = re.compile(r"(?<![a-z])q?lora(?![a-z])")  # "llama2_70b_lora"
UNHIDDEN: Final = re.compile(
    r"(?<![a-z_])overlap ?[=:]? ?(?:false|off|0\b)|\b(?:no|without) overlap\b"
)
# runs of BigScience, whose fork of Megatron-DeepSpeed is of 2021 and 2022
OF_BIGSCIENCE: Final = re.compile(r"\bbloom|\bbig ?science|\btr(?:1|8|11)[a-z]?\b")
LATER: Final = frozenset({"bigscience", "since 2023", "since 2024"})
# words beside which AMP is automatic mixed precision, or that name the trainer themselves
OTHERS_WITH_AMP: Final = re.compile(r"py ?torch|\btorch|lightning|fabric|fsdp|\bddp")
# FlagPerf's images of these are NVIDIA's containers (training/nvidia/docker_image/*/Dockerfile)
OF_NVIDIA: Final = re.compile(r"(?:nvidia[ _-])?[ah](?:100|800)\b")
# FlagPerf's cases that DeepSpeed alone trains (FlagOpen/FlagPerf: training/benchmarks)
ITS_DEEPSPEED: Final = re.compile("llava|baichuan|chatglm3")
# "llama1_13B-paddle TP2PP4SH1SP1"
RANKS_AT_END: Final = re.compile(r"[\s_-]+(tp\d+pp\d+\w*)$", re.IGNORECASE)
# a script of MLPerf: nodes, cards, samples of a data rank's step (MINIBS), ranks:
# "DGXH100_64x8x128x4x8_mbs2", "GB200_128x4x144xtp4pp8cp2_cg_fp4" (mlcommons/training_results_v4.0
# and v5.1: NVIDIA/benchmarks, config_*.sh)
OF_SCRIPT: Final = re.compile(
    r"(?<![\dx])\d+x\d+x(\d+)x(?:tp)?(\d+)(?:x|pp)(\d+)(?:cp(\d+))?(?:\w*?_(fp[48]))?"
)
# "stage: 2" of a DeepSpeed configuration
STAGE: Final = re.compile(r"(?:^|[,;{(]\s*)stage\s*[=:]\s*(?=[0-3]\b)")
PEFT: Final = re.compile(r"\bpeft\b")
# of torchao, whose runs in 8 bits are torchtitan's (pytorch/ao: benchmarks/float8/training)
ITS_OWN: Final = frozenset(
    {"torchao", "torch loop", "fsdp2", "zero 3", "compile", "tensorwise", "rowwise"}
)


def with_adapters(row: Row) -> Row:
    """Return a row whose empty cell of adapters is what the trainer's name or other cells say."""
    if row.peft is None and (told := adapters_in(row)):
        stated = replace(row, peft=told)
        found = look_up(words_table().adapter, stated)
        return stated if found is not None and found.value != "none" else row
    if row.peft is None and "kinds of adapters" in terms_of(row, "framework"):
        row = replace(row, peft=row.framework)
    kind = look_up(words_table().adapter, row)
    if row.peft is None and kind is None and (named := ADAPTED.search(row.words("model"))):
        return replace(row, peft=named[0])
    return replace(row, peft=kind.value) if row.peft is None and kind is not None else row


def with_named_ends(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a table; "LoRA" beside "LoRA (emb)" leaves embedding and head frozen.

    Whatever the script of their trainer does by itself, for a base model for instance.
    """

    def names_ends(row: Row) -> bool:
        return "embedding" in terms_of(row, "peft") or "trained ends" in terms_of(row, "notes")

    named = {(row.group, row.framework) for row in rows if row.peft is not None and names_ends(row)}
    return [
        replace(row, peft=f"{row.peft}, no emb")
        if (row.group, row.framework) in named
        and "lora" in terms_of(row, "peft")
        and not names_ends(row)
        else row
        for row in rows
    ]


def with_modules_of_peft(row: Row) -> Row:
    """Return a row of peft and no other trainer as one of transformers, whose modules it adapts."""
    if not PEFT.search(row.words("framework")) or look_up(words_table().software, row) is not None:
        return row
    return replace(row, framework=f"{row.framework} transformers")


def with_sharding(row: Row) -> Row:
    """Return a row of Hugging Face's modules with the library that shards, which its notes name.

    A stage of ZeRO is DeepSpeed's, unless the row says FSDP. ms-swift takes a stage for DeepSpeed's
    itself, and FSDP for the first version, as accelerate does (``fsdp_version``); Qwen's scripts
    have a stage but on one card. Megatron-SWIFT, which comes with ms-swift, shards as Megatron.
    """
    named = terms_of(row, "framework").keys()
    if "deepspeed" in named and row.zero_stage is None and STAGE.search(row.words("notes")):
        row = replace(row, notes=STAGE.sub("; ZeRO stage ", row.words("notes"), count=1))
    words = f"{row.words('notes')}; {row.words('offload')}"
    if {"megatron swift", "swift"} <= named:
        release = " ".join(re.findall(r"\d[\w.]*", row.framework or ""))
        return replace(row, framework=f"Megatron-SWIFT {release}")
    staged = row.zero_stage or {"zero 2", "zero 3"} & terms_of(row, ANYWHERE).keys()
    if {"deepspeed", "swift"} <= named and staged:
        return replace(row, framework=re.sub("(?i)deep ?speed", "", row.framework or ""))
    if "qwen" in named and not shards_nothing(row):
        stage = look_up(words_table().zero_stage, row)
        return row if stage is None or row.zero_stage else replace(row, zero_stage=stage.value)
    if "hugging face" not in named or {"deepspeed", "qwen", "mlperf"} & named:
        return row
    fsdp = "fsdp2" in named or re.search(
        "fsdp|full(y|_| )?shard", f"{row.words('framework')} {words}"
    )
    if "swift" in named:
        first = fsdp and "fsdp2" not in terms_of(row, ANYWHERE)
        return replace(row, notes=f"{row.notes or ''}; fsdp1") if first else row
    said = vocabulary().read("notes", words).terms.keys() | (named & {"zero 2", "zero 3"})
    if fsdp or not {"deepspeed", "zero 2", "zero 3"} & said:
        return row
    return replace(row, framework=f"{row.framework} with DeepSpeed")


def with_case_of_suite(row: Row) -> Row:
    """Return a row of a suite of benchmarks with the model and the trainer of the case it names."""
    if ranks := RANKS_AT_END.search(row.model or ""):
        notes = f"{row.notes or ''}; {ranks[1]}"
        row = replace(row, model=(row.model or "")[: ranks.start()], notes=notes)
    if "mlperf" in terms_of(row, "framework") and (script := OF_SCRIPT.search(row.words("notes"))):
        samples, tensor, pipeline, context, bits = script.groups()
        sizes = f"minibs {samples} tp{tensor} pp{pipeline} cp{context or 1}"
        row = replace(row, notes=f"{row.notes}; {sizes}", precision=row.precision or bits)
    words = row.model and AROUND_MODEL.sub("", row.model)
    row = replace(row, framework=_trainer_of_case(row), model=words or row.model)
    if "flagperf" in terms_of(row, "framework") and OF_NVIDIA.match(row.words("gpu")):
        row = replace(row, framework=f"{row.framework}, NGC")
    own = look_up(words_table().suite_trainers, row)
    if own is not None:
        stated = re.search(r"\d", row.peft or "")
        peft = row.peft if stated else f"{row.peft} {own.adapters}"
        row = replace(row, framework=own.value, peft=peft)
    named = look_up(words_table().suite_models, row)
    if named is not None and re.fullmatch(spelled(named.when["model"][0]), row.words("model")):
        row = replace(row, model=named.value)
    return row


def _trainer_of_case(row: Row) -> str | None:
    """Return the trainer of a row, with that of its case where it names no trainer of its own.

    Suites are none, nor is torchao, nor AMP, which plans for Megatron-LM v1.1.5 under DeepSpeed
    (DachengLi1/AMP: amp_utils.py, simulate). BLOOM's authors had a fork of Megatron-DeepSpeed.
    """
    named, framework = terms_of(row, "framework").keys(), row.words("framework")
    found = ""
    if "mlperf" in named:
        found = _submission_of_mlperf(row)
    elif "torchao" in named:
        trainer = re.search("torchtitan|torchtune", row.words("notes"))
        eights = "fp8" in terms_of(row, "precision") and named <= ITS_OWN
        found = trainer[0] if trainer else "torchtitan" if eights else ""
    elif "megatron deepspeed" in named and OF_BIGSCIENCE.search(
        f"{framework} {row.words('model')} {row.words('notes')}"
    ):
        found = "" if named & LATER else "bigscience"
    elif re.match(r"amp\b", framework) or (
        re.search(r"\bamp\b", framework)
        and ({"megatron", "deepspeed"} <= named or "megatron deepspeed" in named)
    ):
        others = OTHERS_WITH_AMP.search(framework) or named & {"hugging face", "own code", "xla"}
        found = "" if others else "amp planner, Megatron-LM v1.1.5, DeepSpeed"
    elif "flagperf" in named and (
        {"megatron", "megatron core"} & named or not look_up(words_table().software, row)
    ):
        found = _case_of_flagperf(row)
    return f"{row.framework} {found}" if found else row.framework


def _submission_of_mlperf(row: Row) -> str:
    """Return the vendor whose settings a submission has, or the trainer where it differs."""
    found = next((word for word, gpu in VENDORS.items() if gpu.search(row.words("gpu"))), "")
    if found == "gaudi" and "gpt" in row.words("model"):
        own = "megatron deepspeed" in terms_of(row, "framework")
        return "" if own else "Megatron-DeepSpeed"
    return found


def _case_of_flagperf(row: Row) -> str:
    """Return the trainer that words name ("llama2_7b-deepspeed"); of its own, Megatron cuts models.

    Others are of torch: the empty word.
    """
    said = " ".join(map(row.words, ("framework", "model", "notes")))
    if trainer := re.search("megatron-deepspeed|deepspeed|megatron|paddle|torchtitan", said):
        return f"{trainer[0]} 2023" if trainer[0] == "megatron-deepspeed" else trainer[0]
    if "flagscale" in said:
        return "Megatron"
    if ITS_DEEPSPEED.search(row.words("model")):
        return "deepspeed"
    sizes = (row.tensor_parallel, row.pipeline_parallel, row.expert_parallel)
    cut = any((size or 1) > 1 for size in sizes)
    return "Megatron" if cut or "aquila" in said else ""


def without_padding(reading: Reading) -> Reading:
    """Return the reading with full sequences in the place of samples whose padding is left out.

    A step computes as many tokens in fewer sequences; attention stays inside of a sample. Of packed
    samples the micro-batch counts sequences (mlcommons: training_results_v3.1, BATCHSIZE), the
    global batch samples.
    """
    row, entry = reading.row, look_up(words_table().samples_a_sequence, reading.row)
    if entry is None or entry.value == 1.0 or row.document_length or row.seq_len is None:
        return reading
    micro, batch = row.micro_batch_size, row.global_batch_size
    if micro and "packed samples" in terms_of(row, ANYWHERE):
        least = micro * (row.num_gpus or 1)
        batch = max(least, round(batch / entry.value / least) * least) if batch else None
    elif micro:
        fewer = max(1, round(micro / entry.value))
        batch = round(batch * fewer / micro) if batch else None
        micro = fewer
    elif batch:
        batch = max(1, round(batch / entry.value))
    length = round(row.seq_len / entry.value)
    return reading.changed(
        f"sequences of {row.seq_len} tokens hold {entry.value} samples: no padding is computed",
        micro_batch_size=micro,
        global_batch_size=batch,
        document_length=length,
    )


def with_mode(reading: Reading) -> Reading:
    """Return a row of InternEvo with ranks that no mode but ISP has as one of that mode.

    They share weights, or a sequence alone (internlm/initialize/launch.py, parallel.tensor.mode).
    Its weights are gathered as they are needed where ``overlap`` of parallel.weight is off
    (internlm/core/parallel/comm/isp.py, weight_hook).
    """
    row, terms = reading.row, terms_of(reading.row, ANYWHERE)
    if "internevo" not in terms_of(row, "framework"):
        return reading
    weight = WEIGHT_RANKS.search(f"{row.words('framework')} {row.words('notes')}")
    others = {"sequence parallel", "plain tensor parallel"} & terms.keys()
    shared = (row.context_parallel or 1) > 1 or (weight and int(weight[1]) > 1 and not others)
    if not ("isp" in terms or shared):
        return reading
    waits = "; overlap_comm=False" if UNHIDDEN.search(row.words("notes")) else ""
    return reading.changed(notes=f"{row.notes or ''}; isp{waits}")


def without_repeated_ranks(reading: Reading) -> Reading:
    """Return a run of TRL with tensor-parallel ranks as one of a rank of each group.

    TRL loads whole models (trl/scripts/sft.py has no ``tp_plan``; huggingface/trl#5331), whose
    weights Accelerate replicates over the ranks of ``tp_size`` (accelerate/accelerator.py,
    _prepare_tp): each rank of a group has the same weights, states and samples. FSDP shards over
    the other ranks. Tokens are counted on every rank (trl/trainer/sft_trainer.py, num_tokens).
    """
    row, terms = reading.row, terms_of(reading.row, "framework").keys()
    ranks, total = row.tensor_parallel or 1, row.num_gpus or 1
    loaded = "tensor plan" in terms_of(row, ANYWHERE)
    if ranks == 1 or total % ranks or "trl" not in terms or loaded or "deepspeed" in terms:
        return reading
    node = row.gpus_per_node
    return reading.changed(
        f"tensor_parallel {ranks}: TRL cuts no weights without tp_plan, ranks of a group repeat "
        f"each other; {total // ranks} of {total} accelerators are priced",
        tensor_parallel=1,
        num_gpus=total // ranks,
        gpus_per_node=max(1, node // ranks) if node else None,
    )


def with_kind_of_name(row: Row) -> Row:
    """Return a row whose empty kind is that of a BERT, by which trainers differ."""
    named = re.search(r"(?<![a-z])(?:mosaic)?bert(?![a-z])", row.words("model"))
    if row.model_kind is None and named:
        return replace(row, model_kind="encoder")
    return row


def with_stage_of_offload(reading: Reading) -> Reading:
    """Return a row whose weights are offloaded with the stage that shards them, if it gives none.

    One card has nothing to shard, and offloads under any stage.
    """
    row, entry = reading.row, look_up(words_table().offload, reading.row)
    if entry is None or not entry.value.startswith("weights"):
        return reading
    stage = look_up(words_table().zero_stage, row)
    if (stage is not None and stage.value == 3) or row.zero_stage == 3:
        return reading
    said = row.zero_stage or (stage is not None and not stage.usual and stage.value)
    if said and (row.num_gpus or 1) > 1:
        return reading
    note = "zero_stage 3 (default: shards of the weights are offloaded)"
    if row.offload not in (None, "optimizer") and (row.num_gpus or 1) > 1:
        reading.also.append({"offload": "optimizer"})  # as under ZeRO stage 2
    return reading.changed(note, zero_stage=3)
