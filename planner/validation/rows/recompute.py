"""What a row computes again: its setting, and the layers of a stage."""

from __future__ import annotations

import re
from math import prod
from typing import Any, Final

from cost_models.model.spec import ModelSpec
from cost_models.plan.recompute import MODULES, PREFIX, RECOMPUTE, read_setting
from planner.validation.rows.counts import spaced
from planner.validation.rows.reading import Reading
from planner.validation.rows.runs_file import Row
from planner.validation.rows.vocabulary import terms_of, vocabulary
from planner.validation.rows.words import look_up, words_table

SHARE: Final = re.compile(
    r"every (?P<every>\d+)(?:nd|rd|th)?[ -]*(?:layer|block)"
    r"|(?P<part>\d+) ?(?:of|in|/) ?(?P<whole>\d+) ?(?:layer|block)"
    # Modalities, torchtitan
    r"|\b(?:(?:ac[ _-])?freq(?:uency)?|(?:selective_)?ac[ _-]option)[ =:]*(?P<freq>\d+)"
    r"|(?P<of_layers>\d+) ?% of (?:the |all )?(?:layer|block)s"
    # InternEvo: activation_ckpt takes a share of the layers (configs/7B_sft.py, model.checkpoint)
    r"|^(?:[\w -]+[=:]|[\w -]*\b(?:ratio|fraction|ckpt|checkpoint))? *"
    r"(?P<share>[01]?\.\d+|[01]|(?P<percent>\d+) ?%)$"
)
ORDINALS: Final = {"third": "3rd", "fourth": "4th", "sixth": "6th", "eighth": "8th"}
ORDINAL: Final = re.compile("|".join(ORDINALS))
NOTED_SHARE: Final = re.compile(
    r"(?:checkpoint|recomput)[^,;]*\bevery (?P<every>\d+)(?:nd|rd|th)?[ -]*\w*(?:layer|block)"
    r"|(?<![a-z])ac[ _-](?:freq(?:uency)?|option)[ =:]*(?P<freq>\d+)"
    r"|(?:\bactivation[ _-](?:ckpt|checkpoint\w*)(?:[ _-](?:ratio|fraction|share))?[ =:]*"
    r"|\bcheckpoint ?[=:] ?)(?P<share>[01]?\.\d+|(?P<percent>\d+) ?%)"
)
# --recompute-modules of Megatron Core and its forks, a list that replaces its default (core_attn)
OF_FORKS: Final = {"moe_expert": "experts", "moe_experts": "experts"}
NAMES: Final = "(?:{})\\b".format(
    "|".join(sorted((*MODULES, *OF_FORKS), reverse=True)).replace("_", "[_ ]")
)
NOTED_MODULES: Final = re.compile(
    r"(?<![a-z])recompute(?:[-_ ](?:modules?|selective))?(?: of)?\W+"
    rf"((?:{NAMES}(?:[^\w=;]|and\b|;\s*(?={NAMES}\s*(?:[,;]|$)))*)+)"
)
# SimuMax: mla_rms_recompute, mlp_recompute=true
SWITCHED_MODULES: Final = re.compile(
    r"(?<![a-z])(?:[a-z]+[_-])+recompute\b(?!\s*[=:]\s*(?:false|0|no))"
)
# of a stage, in chunks of the method "block" (Megatron Core: --recompute-num-layers; NeMo's ACL in
# MLPerf; SimuMax: recompute_layer_num); "uniform" recomputes all of them
RECOMPUTED_LAYERS: Final = re.compile(
    r"\b(?:recompute|checkpoint|ckpt)\w* (?:num layers|layers? num|layers)\b\W*(\d+)|\bacl\W+(\d+)"
)
BLOCK: Final = re.compile(
    r"\bacl\W+\d|(?<!each )(?<!every )(?<!per )(?<!fp8 )\bblock\b(?! (?:wise|scal))"
)
BLOCK_LAYERS: Final = re.compile(r"\bblock\W+(\d+)\b|\b(\d+) layers?\b")  # in a cell of its own


def recompute_of(reading: Reading, model: ModelSpec, stages: int) -> tuple[Any, int]:
    """Return the recompute setting and the recomputed layers of a stage (0: all)."""
    row = reading.row
    entry = look_up(words_table().recompute, row)
    if setting := _modules(row):
        return setting, 0
    share = _share_of_layers(row)
    if entry is None and row.recompute is not None and share is None:
        reading.stand_in("recompute", "none", "full")
    usual = "none" if share is None else "full"  # "every 3rd layer"
    word = entry.value if entry else usual
    if entry and entry.full_from is not None and model.num_parameters >= entry.full_from:
        word = "full"
    if entry is None and row.recompute is None and share is None:
        reading.value("recompute", "none", "not given")
    first = row.recompute_layers
    if first is not None and "full" in terms_of(row, "recompute"):  # whole layers, some of them
        word = "full"
    if first is None and (first := _recomputed_layers(row)) is not None and word == "full":
        reading.defaults.append(f"recompute of {first} layers of each stage")
    if first is not None and word == "full":
        if not first:
            return "none", 0
        # the first n of each (virtual) stage: all of them where it has no more
        # (NVIDIA/Megatron-LM: core/transformer/transformer_block.py, _checkpointed_forward)
        return "full", 0 if first >= -(-model.num_layers // stages) else first
    if share is None:
        share = entry.layers if entry else None
    if share is None or word == "none":
        return word, 0
    if share in (0.0, 1.0):
        return ("full" if share else "none"), 0
    reading.defaults.append(f"recompute of {share:.3g} of the layers")
    return "full", max(1, round(share * model.num_layers / stages))


def _recomputed_layers(row: Row) -> int | None:
    """Return the layers of a stage that the method "block" recomputes; None if nothing says so."""
    cell, notes = (spaced(row.words(column)) for column in ("recompute", "notes"))
    said = f"{cell}; {notes}"
    found = RECOMPUTED_LAYERS.search(said)
    if found and found[1] == "0":
        return 0
    if not BLOCK.search(said) or "uniform" in said or _share_of_layers(row) is not None:
        return None
    if found is None and BLOCK.search(cell):
        found = BLOCK_LAYERS.search(cell)
    return None if found is None else int(found[1] or found[2])


def _share_of_layers(row: Row) -> float | None:
    """Return the share in "every 3rd layer", "2 of 5 layers" and the like; None without one."""
    column, pattern = ("notes", NOTED_SHARE) if row.recompute is None else ("recompute", SHARE)
    found = pattern.search(ORDINAL.sub(lambda one: ORDINALS[one[0]], row.words(column)))
    if found is None:
        return None
    counts = found.groupdict()
    if percent := counts["percent"] or counts.get("of_layers"):
        return float(percent) / 100.0
    if counts["share"]:
        return float(counts["share"])
    counts = found.groupdict("1")
    part = int(counts.get("part", 1))
    whole = prod(int(counts.get(name, 1)) for name in ("whole", "every", "freq"))
    return part / whole if 0 < part <= whole else None


def _modules(row: Row) -> str | None:
    """Return the setting of the modules that a row names, as ``--recompute`` takes it."""
    text = row.words("recompute")
    if ":" in text and (text in RECOMPUTE or text.startswith(PREFIX)):
        return read_setting(text)
    terms = terms_of(row, "recompute")
    if "full" in terms or "none" in terms:
        return None
    if noted := NOTED_MODULES.search(row.words("notes")):
        names = [name.replace(" ", "_") for name in re.findall(NAMES, noted[1])]
        return read_setting(PREFIX + "+".join(OF_FORKS.get(name, name) for name in names))
    switches = "; ".join(SWITCHED_MODULES.findall(row.words("notes")))
    terms = {**terms, **vocabulary().read("recompute", switches).terms}
    named = [module for module in MODULES if f"module {module}" in terms]
    return read_setting(PREFIX + "+".join(named)) if named else None
