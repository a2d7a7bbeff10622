"""Numbers in the words of trainer and notes, and the words that are not understood."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from planner.validation.rows.reading import Reading
from planner.validation.rows.runs_file import Row
from planner.validation.rows.vocabulary import READ_COLUMNS, Token, terms_of, tokens_of, vocabulary
from planner.validation.rows.words import look_up, words_table

# recipes of matmuls in 8 bits, which Megatron Core takes next to --bf16
RECIPES: Final = frozenset(
    {"delayed", "tensorwise", "rowwise", "rowwise, 16-bit weight gradients", "blockwise", "mx"}
    | {"fp8 format", "fp8 gathers"}
)
BASELINE: Final = re.compile(
    r"\b(?:bf16|bfloat16) baseline\b|\b(?:no|without|not) (?:float8|fp8)\b"
)
FP8: Final = re.compile(r"fp8|float8")
OF_PRECISION: Final = re.compile(r"^(?:torch_?)?(?:dtype|precision|mixed_precision) ?[=:] ?")
SWITCHED: Final = re.compile(r"(?:bf16|fp16|tf32) ?= ?(?:true|false|yes|no|[01])")
ALONE: Final = 3  # words, in which a precision stands alone: "torchao 0.8 float8"
PRECISIONS: Final = frozenset({"bf16", "fp16", "fp8", "fp4"})
IN_FULL: Final = frozenset({"fp32", "tf32"})
# numbers by column, in trainer and notes: "TP8", "pp_size=4", "8-way tensor parallel", "MBS 1",
# "TP2PP1SH2SP4": a ZeRO stage and the ranks that share (FlagOpen/FlagPerf: training/nvidia/
# gpt3-13b-paddle/config)
COUNTS: Final = {
    column: re.compile(
        rf"(?<!virtual )\b(?:{words})(?: (?:size|degree|world size))?(?: of)?[ =:]*(\d+)\b"
        rf"|\b(\d+) way (?:{words}|{column.partition('_')[0]})\b"
    )
    for column, words in {
        "tensor_parallel": r"(?:auto ?)?tp|tensor (?:model )?parallel(?:ism)?|tensor|mp"
        r"|(?<!pipeline )(?<!expert )model parallel(?:ism)?",
        "pipeline_parallel": r"pp|pipeline (?:model )?parallel(?:ism)?|pipeline",
        "context_parallel": r"cp|context parallel(?:ism)?|(?<!sh\d )sp|sequence parallel|ulysses",
        "expert_parallel": r"ep|expert (?:model )?parallel(?:ism)?",
        "expert_tensor_parallel": r"etp|expert tensor parallel(?:ism)?",
        # LBS and MPE of FlagPerf's tables (FlagOpen/FlagPerf: training/benchmarks/*/README.md)
        "micro_batch_size": r"[ml]bs|micro ?(?:batch|bsz)|(?:local|per device(?: train)?) batch"
        r"|batch size per (?:gpu|device|card)|micro batch size per gpu"
        r"|b(?= ?= ?\d+ (?:per|a) (?:gpu|device|card)\b)|samples per (?:gpu|device|card)"
        r"|(?=\d+ (?:sequence|sample)s? (?:per|a|each) (?:gpu|device|card)\b)",
        "global_batch_size": r"gbs|(?:global|effective|total)(?: train(?:ing)?)? ?batch(?:size)?",
        "virtual_stages": r"vpp?|num (?:model )?chunks|interleaving"
        r"|virtual (?:pp|pipeline)(?: model)?(?: parallel)?"
        r"|interleaved(?: (?:1f1b|schedule|pipeline))?[ ,(]*(?:vp?p?|chunks)?"
        r"|(?=\d+ (?:model|virtual|pipeline) (?:chunk|stage)s? (?:per|a|each)\b)",
        "dp_shard": r"dp shard|data parallel shard|fsdp shard|sharding parallel|(?<=sh\d )sp",
        "seq_len": r"(?:model )?max (?:seq(?:uence)? )?len(?:gth)?|seq(?:uence)?(?: ?len(?:gth)?)?"
        r"|mpe|(?:context|input) (?:len(?:gth)?|window)|cutoff len(?:gth)?"
        r"|(?:ctx|sl)(?=[ =:]*\d{3})|s(?= ?= ?\d{3})|sequences(?= of \d+ tokens)"
        r"|(?:packed|padded|truncated|cut) to(?= \d+ tokens)|block size(?=[ =:]*\d{4})"
        r"|inputs?(?: (?:padded|truncated|cut) to)?"
        r"(?= (?:of )?\d+(?: tokens)?,? (?:and )?targets?\b)"
        r"|(?=\d{3,} (?:(?:tokens? )?(?:context|ctx)\b(?! parallel)|tokens? (?:(?:per|a|each) )?"
        r"(?:seq|sample)))",
        "zero_stage": r"sh(?=\d sp\d)",
        # variables of a script; not those of a part: "first stage num layers"
        "num_layers": r"n ?layers|(?<![a-z] )num (?:hidden )?layers",
        "hidden_size": r"n ?hidden|(?<![a-z] )(?:hidden(?: size)?|n embd)",
        "num_heads": r"n ?heads|(?<![a-z] )num (?:attention )?heads",
        "num_kv_heads": r"num (?:kv|key value) heads|num query groups",
        "ffn_hidden_size": r"(?:ffn hidden|intermediate) size",
    }.items()
}
# "targets of 128", "targets padded to 129", "max_target_length 128", "114 tokens of targets"
TARGETS: Final = re.compile(
    r"\b(?:targets?|(?:targets?|decoder|output) (?:seq(?:uence)? ?)?len(?:gth)?s?)"
    r"(?: (?:padded|truncated|cut))?(?: (?:of|to|about|are|is))*[ =:]*(\d{2,})\b"
    r"(?! ?[.%]| ?(?:gi?b|steps|epochs|hours|days)\b| tokens? ?(?:/ ?|per |a )s(?:ec|econd)?\b)"
    r"|\b(\d{2,}) (?:target tokens|tokens (?:of|in|for|a|per) (?:the )?targets?)\b"
)
CONTEXT: Final = re.compile(r"\b(?:cp|context parallel|ulysses)")
# "(TP, PP, DP) = (4, 2, 1)", "TP/PP = 2/2"
RANKS: Final = r"(?:tp|pp|dp|cp|ep|[tpd])"
TUPLE: Final = re.compile(
    rf"[(\[]?\b({RANKS}(?:\s?[,/x×]\s?{RANKS})+)[)\]]?\s?[=:]?\s?[(\[]?"
    r"(\d+(?:\s?[,/x×]\s?\d+)+)\b[)\]]?"
)
# "T=4 P=2", "T8P1D1"
LETTERS: Final = re.compile(
    r"\b[tpd] ?= ?\d{1,3}(?:[\s,;/x]+[tpd] ?= ?\d{1,3})+\b(?!\.\d)"
    r"|\b[tpd]\d{1,3}(?:[tpd]\d{1,3})+\b"
)
# tokens of a step: "gbs=4M tokens", "batch of 1048576 tokens" (huggingface/nanotron:
# scripts/scaling_benchmarks.py, gbs)
TOKENS: Final = re.compile(
    r"\b(?:gbs|(?:global )?batch(?: size)?)(?: of)?[ =:~]*(?P<number>\d+(?:\.\d+)?) ?"
    r"(?P<million>m|million)? ?tok(?:en)?s?\b"
)
IN_TOKENS: Final = re.compile(r"\b(?:gbs|batch(?: size)?) (?:is |are )?(?:given )?in tokens\b")
MOST_TOKENS: Final = 2.5e8  # of a step: four times those of the largest known (arXiv:2412.19437)
COMMAS: Final = re.compile(r"(?:(?<=\b\d)|(?<=\b\d\d)),(?=\d{3}\b)")  # "4,096"
THOUSANDS: Final = re.compile(r"\b(\d+)k\b")  # "seq 4k"
# both ways to share a sequence: "sequence parallel size 8 (ulysses 2, ring 4)"
WITHIN: Final = re.compile(r"\bulysses\b.*\bring\b|\bring\b.*\bulysses\b")
NUMBERS: Final = {"single": 1, "one": 1, "two": 2, "four": 4, "eight": 8, "sixteen": 16}
# "2x A100", "8 GPUs", "single A100 80G"; of one node, since cards and nodes multiply
CARDS: Final = re.compile(
    r"\b(\d+) ?[x×*] ?(?=[a-z][a-z ]*\d)|\b(\d+) (?:gpu|card|accelerator)s?\b(?! (?:per|a|each)\b)"
    rf"|\b({'|'.join(NUMBERS)}) (?=gpu|card|[a-z]+ ?\d)|\bnproc per node[ =:]*(\d+)"
    r"|\b(?:(?:num|number of|n) gpus?[ =:]*|gpus? ?[=:] ?)(\d+)\b(?! ?g)"
    r"|(?<![a-z] )\bworld size[ =:]*(\d+)|\b[a-z]+\d+ ?x(\d+)\b"
)
# a micro-batch, as Hugging Face's trainers count: "batch_size 4", "bsz 1"
BATCH: Final = re.compile(
    r"(?<!global )(?<!total )(?<!effective )(?<!total train )(?<!effective train )"
    r"\b(?:batch(?: ?size)?|bsz?)[ =:]*(\d+)\b"
)
# trainers and suites whose batch is that of a card (BATCHSIZE of MLPerf's BERT; FlagOpen/FlagPerf:
# training/benchmarks/*/pytorch/config/_base.py, train_batch_size)
BY_CARD: Final = frozenset({"hugging face", "mlperf", "flagperf"})
# cards that take turns: "2 MP + 2 DDP", "model parallel 2", "MP"
TURNS: Final = re.compile(
    r"(?:(?<![=:])\b(\d+) ?)?\b(?<!tensor )(?<!pipeline )(?<!fp16 )(?<!bf16 )(?<!int8 )(?<!fp8 )"
    r"(?:mp|model parallel(?:ism)?)\b(?!\.)"
    r"(?: size)?[ =:]*(\d+)?"
)
# patches of an image's side: "vit_base_patch16_224", "ViT-L/16", "ViT-H"
VIT: Final = re.compile(
    r"\bvit[\s_/-]*(?P<size>tiny|small|base|large|huge|gigantic|giant|[tsblhg](?![a-z]))?"
    r"[\s_/-]*(?:patch)?(?P<patch>\d{1,2})?(?!\d)"
)
IMAGE: Final = re.compile(
    r"\bpatch\d+ (\d{3})\b|\bim(?:g|age) (?:size|resolution)[ =:]*(\d{2,4})\b"
    r"|\b(\d{3,4}) ?[x×] ?\d{3,4}\b"
)
# usual patches (Dosovitskiy et al., arXiv:2010.11929; of giants Zhai et al., arXiv:2106.04560) and
# images
USUAL_PATCH, LARGE_PATCH, USUAL_IMAGE = 16, 14, 224
# of a data rank's step: MINIBS (mlcommons/training_results_v4.1: NVIDIA/benchmarks/llama2_70b_lora)
SAMPLES: Final = re.compile(r"\bmini ?bs[ =:]*(\d+)\b")
LISTED: Final = re.compile(r"\[[^\[\]]*\]")
BETWEEN: Final = re.compile(r"[,;|]|(?:^|\s)--(?=[a-z])|\s(?=[a-z_][\w-]*=)")
NAME: Final = re.compile(r"^(?:--)?optim(?:izer)?(?:[_ ](?:name|type))?(?:\s*[=:]|\s)\s*")
OPTIMIZER: Final = re.compile(r"optim|ada|galore|lomo|\b(?:sgd|lion|lamb|muon|apollo|sophia)")
# options that name what is trained: --train_type hqq_dora (AnswerDotAI/fsdp_qlora: train.py),
# tuner_type=lora (modelscope/ms-swift: swift/arguments/base_args), finetuning_type: lora
TRAINED: Final = re.compile(r"\b(?:train|tuner|sft|peft|adapter|fine ?tuning) (?:type|method)\b")
ADAPTED: Final = frozenset({"lora", "qlora", "adapter", "adapter v2"})
OF_ADAPTERS: Final = re.compile(r"\b(?:lora|target|quant\w*|bnb|load in|n bits)(?!\w)")
WITH_TENSOR_PARALLELISM: Final = frozenset({"deepspeed", "megatron", "megatron core", "nemo rl"})
SEVERAL_NODES: Final = re.compile(r"(?<!single )(?<!one )\bnodes?\b(?<!per node)")
# "2 nodes, 8 GPUs each", "4 nodes x 8 H100", "8 GPUs per node, 2 nodes", "2x8xA100"; "16 GPUs on 2
# nodes" are all
OF_NODES: Final = (
    re.compile(
        r"\b(\d+) nodes?[ ,:(]*(?:x|of|with|each|having)? ?(\d+) ?x? ?(?:gpu|card|accelerator"
        r"|[a-z][a-z ]*\d)(?![^,;]*\b(?:in total|total|altogether))"
    ),
    re.compile(r"\b(\d+) ?(?:[a-z]\w* )?(?:gpu|card)s? (?:per|a|each) node[ ,;x(]*(\d+) nodes?\b"),
    re.compile(r"\b(\d+) ?x ?(\d+) ?x? ?(?=[a-z][a-z ]*\d)"),
    re.compile(r"\bn?nodes[ =:]*(\d+)\b.*\b(?:(?:nproc|gpus) per node|devices)[ =:]*(\d+)"),
)
TOTAL: Final = re.compile(
    r"\b(\d+) ?x? ?(?:gpu|card|accelerator|[a-z]+ ?\d+\w*)s? "
    r"(?:(?:in )?total\b|(?:on|across|over|in) (?:\d+|two|four) nodes?)"
)
# around a name in a cell of its own: "4 A100s", "16x H100 (2 nodes)", "H100 x 4", "H100 (8x)"
BESIDE: Final = re.compile(
    r"^(\d+) ?[x*\N{MULTIPLICATION SIGN}]? ?(?=[a-wyz])|[ )][x*\N{MULTIPLICATION SIGN}] ?(\d+)$"
    r"|\((\d+) ?x\)$"
)
# the data ranks that share states (InternEvo: configs/7B_sft.py, parallel.zero1.size)
GLUED: Final = re.compile(r"(?<=\d)x?(?=(?:e?tp|[pdces]p|vpp?|[mg]bs|mbc|acc|sh)\d)")
SIZE: Final = r"[ .,:=_(-]*(?:dict\(?)?[ .,:=_-]*(?:group[ _-]?)?size"
STATE_RANKS: Final = re.compile(
    rf"\bzero1?(?:[ _-]parallel)?(?:{SIZE}|[ _-]group|(?= (?!1\b)|[=:]))[ =:]+(-?\d+)"
)
WEIGHT_RANKS: Final = re.compile(rf"\b(?:wp|weight(?:[ _-]parallel)?)(?:{SIZE})?[ =:]*(\d+)")
# nanotron: batch_accumulation_per_replica, "acc8"; InternEvo: micro_num; SimuMax: mbc
ACCUMULATION: Final = re.compile(
    r"\b(?:(?:grad(?:ient)? ?acc|(?:grad(?:ient)? |batch )?accum(?:ulation|ulate)?"
    r"|acc(?=\d|[=:] ?\d| \d{1,3} (?:mbs|micro ?(?:batch|bsz))))"
    r"(?: steps?| per replica| over)?"
    r"|gas?|update freq|num micro ?batch(?:es)?|micro (?:batch )?num|mbc)"
    r"[ =:x×]*(\d+)\b(?![ .]?(?:bit|\d|%))"
    r"|\b(\d+) (?:(?:gradient )?accumulation steps|micro ?batches)"
)


def accumulation(row: Row) -> int | None:
    """Return the micro-batches of a step that the notes give; None without any."""
    said = spaced(row.words("notes"))
    if samples := SAMPLES.search(said):
        return max(1, int(samples[1]) // (row.micro_batch_size or 1))
    if "accuracy" in said:
        said = re.sub(r"\bacc\b", "accuracy", said)
    found = ACCUMULATION.search(said)
    return None if found is None else max(1, int(found[1] or found[2]))


def with_counts_in_words(reading: Reading) -> Reading:
    """Return the reading with the counts of trainer and notes in the place of empty cells.

    Words that give several numbers of one kind are of several runs.
    """
    row = reading.row
    text = spaced(f"{row.words('framework')}; {row.words('notes')}")
    text = COMMAS.sub("", text)
    text = THOUSANDS.sub(lambda found: str(1024 * int(found[1])), text)
    text = LETTERS.sub(_ranks_by_letter, TUPLE.sub(_spelled_out, text))
    if "train micro batch" in text:  # DeepSpeed's train_batch_size is that of all cards
        text = text.replace("train batch", "global batch")
    found: dict[str, Any] = {}
    if (batch := _batch_of_tokens(row, text)) is not None:
        note = f"global_batch_size {batch}: the batch is given in tokens"
        reading = reading.changed(note, global_batch_size=batch)
        row = reading.row
    text = TOKENS.sub(" ", text)
    for column, pattern in COUNTS.items():
        numbers = {int(one or other) for one, other in pattern.findall(text)} - {0}
        if column == "context_parallel" and WITHIN.search(text):
            numbers = {max(numbers, default=0)} - {0}
        if row.get(column) is None and len(numbers) == 1:
            found[column] = numbers.pop()
    sizes = {int(number) for number in BATCH.findall(text)}
    unsaid = row.micro_batch_size is None and row.global_batch_size is None
    if unsaid and len(sizes) == 1 and BY_CARD & terms_of(row, "framework").keys():
        found.setdefault("micro_batch_size", sizes.pop())
    if row.num_gpus is None and (cards := _cards_in(spaced(row.words("gpu")), text)):
        found["num_gpus"] = cards
    tensor = row.tensor_parallel or found.get("tensor_parallel")
    # "SP=1" and "TP8 + SP8" are Megatron's
    if found.get("context_parallel", 0) in (1, tensor) and not CONTEXT.search(text):
        del found["context_parallel"]
    if row.optimizer is None and (optimizer := _optimizer_in(row)):
        found["optimizer"] = optimizer
    if row.precision is None and (precision := _precision_in(row.words("notes"))):
        found["precision"] = precision
    if row.precision is not None and _is_in_8_bits(row):
        found["precision"] = f"fp8, {row.precision}"
    if not found:
        return reading
    words = [f"{column} {value} (default: as the words say)" for column, value in found.items()]
    return reading.changed(*words, **found)


def _spelled_out(found: re.Match[str]) -> str:
    """Return ranks by name of a tuple of names and a tuple of numbers, if these are as many.

    >>> _spelled_out(TUPLE.search("tp/pp=4/2"))
    ' tp 4 pp 2 '
    """
    names, numbers = re.findall(RANKS, found[1]), re.findall(r"\d+", found[2])
    if len(names) != len(numbers):
        return found[0]
    words = (f"{name[0]}p {number}" for name, number in zip(names, numbers, strict=True))
    return f" {' '.join(words)} "


def _ranks_by_letter(found: re.Match[str]) -> str:
    """Return ranks by name of their letters, where tensor- and pipeline-parallel ones are among.

    >>> _ranks_by_letter(LETTERS.search("t=4 p=2"))
    ' tp 4 pp 2 '
    """
    ranks = dict(re.findall(r"([tpd])\D*(\d+)", found[0]))
    if not {"t", "p"} <= ranks.keys():
        return found[0]
    return f" {' '.join(f'{letter}p {number}' for letter, number in ranks.items())} "


def _batch_of_tokens(row: Row, text: str) -> int | None:
    """Return the sequences of a step whose batch the cell or the words give in tokens.

    A million is 1024 x 1024 where sequences divide it.
    """
    if row.seq_len is None:
        return None
    given, stated = row.global_batch_size, TOKENS.search(text)
    if given is not None:
        many = IN_TOKENS.search(text) or given * row.seq_len > MOST_TOKENS
        return max(1, round(given / row.seq_len)) if many and given >= row.seq_len else None
    if stated is None:
        return None
    whole = 1024**2 if 1024**2 % row.seq_len == 0 else 1e6
    tokens = float(stated["number"]) * (whole if stated["million"] else 1.0)
    return max(1, round(tokens / row.seq_len))


def target_seq_len(row: Row) -> int | None:
    """Return the tokens of a target by its cell, else by the words; None: they do not say it."""
    if row.target_seq_len is not None:
        return row.target_seq_len
    text = COMMAS.sub("", spaced(f"{row.words('framework')}; {row.words('notes')}"))
    found = {int(one or other) for one, other in TARGETS.findall(text)}
    return found.pop() if len(found) == 1 else None


def with_patches(reading: Reading) -> Reading:
    """Return the reading of a vision transformer with the tokens of an image in an empty seq_len.

    A patch is a token, and one more is the class. Source: Dosovitskiy et al. (arXiv:2010.11929),
    sec. 3.1.
    """
    row, found = reading.row, VIT.search(reading.row.words("model"))
    if row.seq_len is not None or found is None:
        return reading
    large = (found["size"] or "").startswith(("h", "g"))
    patch = int(found["patch"] or (LARGE_PATCH if large else USUAL_PATCH))
    named = IMAGE.search(spaced(f"{row.words('model')}; {row.words('notes')}"))
    image = int(next(filter(None, named.groups()))) if named else USUAL_IMAGE
    tokens = (image // patch) ** 2 + 1
    note = f"seq_len {tokens} (default: patches of {patch}, an image of {image} pixels a side)"
    return reading.changed(note, seq_len=tokens)


def with_layers_in_turn(row: Row) -> Row:
    """Return a row of Hugging Face's modules whose model parallelism is that of a device map."""
    trainer, words = terms_of(row, "framework").keys(), spaced(row.words("notes"))
    found = TURNS.search(words)
    if found is None or "hugging face" not in trainer or trainer & WITH_TENSOR_PARALLELISM:
        return row
    if (row.tensor_parallel or 1) > 1 or (row.pipeline_parallel or 1) > 1 or row.num_gpus == 1:
        return row
    stages = int(found[1] or found[2] or 0) or None
    return replace(row, pipeline_parallel=stages, notes=TURNS.sub(" device map", words, count=1))


def _cards_in(gpu: str, text: str) -> int | None:
    """Return the accelerators that a cell or the words give one number of."""
    if beside := BESIDE.search(gpu):
        return int(next(filter(None, beside.groups())))
    words = f"{gpu}; {text}"
    if total := TOTAL.search(words):
        return int(total[1])
    if several := next(filter(None, (one.search(words) for one in OF_NODES)), None):
        return int(several[1]) * int(several[2])
    found = {next(filter(None, one)) for one in CARDS.findall(words)}
    numbers = {NUMBERS.get(one) or int(one) for one in found}
    return numbers.pop() if len(numbers) == 1 and not SEVERAL_NODES.search(words) else None


def _optimizer_in(row: Row) -> str | None:
    """Return the optimizer that stands alone between commas in the notes, if one does."""
    parts = {NAME.sub("", part) for part in _parts(row.words("notes"))}
    found = [
        part
        for part in parts
        if OPTIMIZER.search(part)
        and not vocabulary().read("optimizer", part).rest
        and look_up(words_table().optimizer, replace(row, optimizer=part, notes=None))
    ]
    return found[0] if len(found) == 1 else None


def _parts(words: str) -> list[str]:
    """Return what stands between commas, semicolons and options (``--name value``, name=value)."""
    words = LISTED.sub(lambda found: found[0].replace(",", " "), words)
    return [part.strip() for part in BETWEEN.split(words) if part.strip()]


def adapters_in(row: Row) -> str | None:
    """Return the parts of the notes that name adapters, and their settings; None without any.

    A part is of adapters where their vocabulary knows all of its words.
    """
    parts = _parts(row.words("notes"))
    read = {part: vocabulary().read("peft", part) for part in parts}
    typed = [part for part in parts if TRAINED.search(spaced(part))]
    named = [part for part in parts if not read[part].rest and read[part].terms.keys() & ADAPTED]
    if not (typed or named):
        return None
    settings = [part for part in parts if OF_ADAPTERS.search(spaced(part)) and read[part].terms]
    told = dict.fromkeys((*typed, *named, *settings))
    if any("qlora" in read[part].terms for part in named):  # --use_lora --q_lora
        told = {part: None for part in told if part not in ("use_lora", "use-lora", "lora")}
    return ", ".join(told)


def _is_in_8_bits(row: Row) -> bool:
    """Whether a cell with 16 bits, or with a recipe alone, is that of a run in 8 bits."""
    named = vocabulary().read("precision", row.words("precision")).terms.keys()
    if named & PRECISIONS != {"bf16"}:
        return bool(RECIPES & named) and look_up(words_table().precision, row) is None
    said = terms_of(row, "notes").keys()
    notes = {*vocabulary().read("precision", _precision_in(row.words("notes")) or "").terms}
    if FP8.search(row.words("optimizer")):  # "AdamWFp8" and "ao fp8": of its states
        notes -= {"fp8"}
    if notes & PRECISIONS == {"bf16"} or (
        BASELINE.search(row.words("notes")) and not said & RECIPES
    ):
        return False
    return bool(RECIPES & said) or "fp8" in notes


def _precision_in(words: str) -> str | None:
    """Return the precision that stands alone between commas and the like, if one does.

    One of 16 bits or fewer; where there is none, fp32 or TF32, which other things have, too.
    """
    parts = {part.strip() for part in re.split(r"[,;|+()]|\bwith\b|\s(?=--)", words)}
    parts = {OF_PRECISION.sub("", part) for part in parts}
    parts = {part for part in parts if "=" not in part or SWITCHED.fullmatch(part)}
    read = {part: vocabulary().read("precision", part) for part in parts}
    for kind in (PRECISIONS, IN_FULL):
        if found := [part for part in parts if read[part].terms.keys() & kind]:
            alone = [part for part in found if not read[part].rest and len(part.split()) <= ALONE]
            return alone[0] if len(alone) == len(found) == 1 else None
    return None


def not_understood(row: Row) -> list[str]:
    """Return the words of a row that have no meaning here, by column; of notes, settings only."""
    found = []
    for column in READ_COLUMNS:
        rest = vocabulary().read(column, row.words(column)).rest
        words = [token.text for token in rest]
        if column == "notes":
            settings = row.words(column).replace("=dict(", "_")
            words = [text for text in SETTING.findall(settings) if _is_unknown(text, rest)]
        if words:
            found.append(f"{column}: {' '.join(words)}")
    return found


SETTING: Final = re.compile(r"(?:\bbatch )?[a-z_][\w-]*=[\w.+-]+")


def spaced(words: str) -> str:
    """Return words with spaces for hyphens, underscores and ``=dict(``, and within "tp1pp2mbs1".

    The sign of "=-1" stays: all ranks are no single one.
    """
    return GLUED.sub(" ", re.sub(r"_+|[\"'](?= ?:)|(?<![=:])(?<![=:] )-+|=dict\(", " ", words))


def _is_unknown(setting: str, rest: Sequence[Token]) -> bool:
    """Whether the name of a setting, as ``name=value``, is in no phrase."""
    name = tokens_of(setting.partition("=")[0])
    known = (*COUNTS.values(), STATE_RANKS, WEIGHT_RANKS, ACCUMULATION, BATCH, SAMPLES)
    words = spaced(setting)
    if any(one.end() == len(words) for pattern in known for one in pattern.finditer(words)):
        return False
    if NAME.match(setting):
        return bool(vocabulary().read("optimizer", NAME.sub("", setting)).rest)
    if OF_ADAPTERS.search(words) and vocabulary().read("peft", setting).terms:
        return False
    return bool(name) and name[-1].word in {token.word for token in rest}
