"""The trainer of a row: its software profile with changed figures, and its usual settings."""

from __future__ import annotations

import re
from typing import Any, Final

from msgspec.structs import replace

from cost_models.legality.capabilities import capabilities_of
from cost_models.plan.plan import Plan
from cost_models.uncertainty import UNKNOWN
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import names_in
from hardware_profiles.software.engine import PLUS, engine
from hardware_profiles.software.trainer import (
    SoftwareProfile,
    names_engines,
    parent_of,
    software_profile,
)
from planner.validation.rows.counts import spaced
from planner.validation.rows.reading import Reading
from planner.validation.rows.runs_file import Row
from planner.validation.rows.vocabulary import ANYWHERE, terms_of
from planner.validation.rows.words import EngineEntry, SoftwareEntry, entry_of, look_up, words_table

# sections of words.toml whose engines change figures of any trainer
SWITCHES: Final = names_in("""
    tensor_traffic reductions reduction_precision gathers messages host_masters host_memory
    host_updates experts dispatch balance weighting flash accumulation split_loss projections
    linear_loss clipping early_updates norms
    widened_states batches checkpoints caches stages recipes rounding attention_bits
    activation_inputs weight_gathers megatron_casts megatron_layers
""")
DDP: Final = "ddp"
FUSED: Final = "adamw-fused"
DEEPSPEED: Final = "deepspeed"  # in the names of its engines
# terms of weights that something else casts, or that a compiled step does
SHARDED_OR_COMPILED: Final = {DEEPSPEED, "zero 1", "zero 2", "zero 3", "fsdp1", "fsdp2", "compile"}
CAPACITY: Final = re.compile(r"\bcapacity[ _-]factor[ =:]*(\d+(?:\.\d+)?)", re.IGNORECASE)
# sizes of DeepSpeed's configuration, in elements (deepspeedai/DeepSpeed: runtime/zero/config.py):
# "reduce_bucket_size=5e8", "buckets of 50M elements, overlap_comm"
ELEMENTS: Final = r"(?: size)?(?: of)?[ =:]*(\d+(?:\.\d+)?(?:e\d+)?) ?(m|million)?\b(?! ?[mg]i?b)"
BUCKETS: Final = tuple(
    re.compile(rf"\b{words}buckets?{ELEMENTS}")
    for words in ("reduce ", "(?<!gather )", "all ?gather ")
)
LIVE: Final = re.compile(rf"\bmax live param(?:eter)?s?{ELEMENTS}")
OVERLAPS: Final = re.compile(
    r"(?<!no )(?<!without )\boverlap\b(?! with)(?! ?(?:comm)?[ =:]*(?:false|off|0)\b)"
)
CHANGES = ";"  # between a profile and the figures that differ: "megatron; overlap.data_parallel=1"


def trainer_of(row: Row) -> SoftwareEntry:
    """Return what words.toml says of a row's trainer, with the profile of the row's own columns.

    A profile that does not shard as the row says is composed with an engine that does; one whose
    matmuls in 8 bits take whole matrices alone gets another recipe where tensor-parallel ranks cut
    them.
    """
    row = _with_autocast(row)
    entry = _named_trainer(row)
    if recipe := _missing_recipe(entry, row):
        entry = _with_figures(entry, recipe)
    wrapper = _missing_engine(entry, row)
    if wrapper is None:
        return entry
    replaced = (f"{DEEPSPEED}-", DDP)
    others = [part for part in entry.profile.split(PLUS) if not part.startswith(replaced)]
    return replace(entry, profile=PLUS.join((*others, wrapper)))


def _with_autocast(row: Row) -> Row:
    """Return a row that says autocast, where a trainer without a profile has 16 bits by it alone.

    On whole fp32 weights, alone or under torch's DDP, nothing else casts them (pytorch/pytorch:
    torch/amp/autocast_mode.py). Compiled ones keep less: ``torch-compile``.
    """
    table, terms = words_table(), terms_of(row, ANYWHERE)
    if row.software is not None or look_up(table.software, row) is not None:
        return row
    precision, masters = look_up(table.precision, row), look_up(table.master_weights, row)
    adapter, usual = look_up(table.adapter, row), look_up(table.zero_stage, row)
    wrapper, trainer = look_up(table.engines, row), entry_of(table.unnamed, row)
    stated = row.master_weights if row.master_weights is not None else masters and masters.value
    casts = (
        trainer.master_weights
        and stated is not False
        and (precision is None or precision.value in ("bf16", "fp16"))
        and (wrapper is None or wrapper.add == DDP)
        and not (row.zero_stage or (usual and usual.value) or terms.keys() & SHARDED_OR_COMPILED)
        and (row.tensor_parallel or 1) * (row.pipeline_parallel or 1) == 1
        and (row.peft is None or (adapter is not None and adapter.value == "none"))
    )
    return replace(row, notes=f"{row.notes or ''}; autocast") if casts else row


def computes_in_fp32_by_default(row: Row) -> bool:
    """Whether a row states no precision, and its trainer then multiplies in fp32.

    torch makes weights in fp32 and casts under autocast alone, which Hugging Face's Trainer enters
    with ``fp16`` or ``bf16`` (huggingface/transformers: training_args.py, both False). For
    accelerators without bf16: on others most authors who state no precision turn it on.
    """
    named, adapter = terms_of(row, "framework").keys(), look_up(words_table().adapter, row)
    return (
        row.precision is None
        and row.software is None
        and bool(named & {"hugging face", "torch loop"})
        and not (row.zero_stage or named & SHARDED_OR_COMPILED)
        and not terms_of(row, ANYWHERE).keys() & {"autocast", "apex o2", "compile"}
        and look_up(words_table().usual_precision, row) is None
        and (row.peft is None or (adapter is not None and adapter.value == "none"))
    )


def _missing_recipe(entry: SoftwareEntry, row: Row) -> str | None:
    """Return a recipe of matmuls in 8 bits for cut matrices, which the profile lacks; or None."""
    precision = look_up(words_table().precision, row)
    if (row.tensor_parallel or 1) == 1 or precision is None or precision.value != "fp8":
        return None
    return "fp8-tensorwise" if profile_of_trainer(entry)[0].fp8.whole_matrices else None


def _missing_engine(entry: SoftwareEntry, row: Row) -> str | None:
    """Return an engine that shards at the row's ZeRO stage, which the profile does not; or None."""
    stage, (software, _) = _stated_stage(row), profile_of_trainer(entry)
    if stage <= software.sharding.largest_zero_stage:
        return None
    return f"deepspeed-zero{stage}" if DEEPSPEED in row.words("framework") else "fsdp2"


def _stated_stage(row: Row) -> int:
    """Return the ZeRO stage that a row states, in its column or in words; 0: none."""
    said = look_up(words_table().zero_stage, row)
    usual = 0 if said is None or said.usual else said.value
    return usual if row.zero_stage is None else row.zero_stage


def _named_trainer(row: Row) -> SoftwareEntry:
    """Return the trainer that a row names: the column ``software`` counts before ``framework``."""
    table = words_table()
    named = look_up(table.software, row)
    entry = named or entry_of(table.unnamed, row)
    if not table.software:  # as if no profile described a trainer: engines are no trainers
        return _with_switches(_with_engine(entry, row), row)
    if row.software is not None:
        profile, figures = _parsed(row.software)
        return replace(entry, profile=profile, figures=figures)
    if names_engines(row.words("framework")):
        entry = replace(entry, profile=row.words("framework"), figures={})
    elif named is None or named.takes_engines:
        entry = _with_engine(entry, row)
    else:
        entry = _with_stated_update(entry, row)
    entry = _with_switches(entry, row)
    launches = look_up(table.launches, row)
    if launches is None or not launches.add:
        return entry
    return replace(entry, profile=f"{entry.profile}{PLUS}{launches.add}")


def _with_stated_update(entry: SoftwareEntry, row: Row) -> SoftwareEntry:
    """Return a described trainer with the kernels of the update that a row states.

    But for fused ones, of which trainers have their own.
    """
    stated = look_up(words_table().updates, row)
    if stated is None or stated.usual or stated.add == FUSED:
        return entry
    return _with_figures(entry, stated.add)


def _with_switches(entry: SoftwareEntry, row: Row) -> SoftwareEntry:
    """Return an entry with the figures of the switches that a row states.

    Its profile keeps its name, and so the errors of its compared runs.
    """
    for section in SWITCHES:
        found: EngineEntry | None = look_up(getattr(words_table(), section), row)
        if found is not None and found.add:
            entry = _with_figures(entry, found.add)
    stated, kernels = CAPACITY.search(row.notes or ""), entry.figures.get("kernels", {})
    if stated and "one_hot_capacity" in kernels:
        kernels = kernels | {"one_hot_capacity": float(stated[1])}
        entry = replace(entry, figures=entry.figures | {"kernels": kernels})
    return _with_deepspeed_sizes(entry, row)


def _with_deepspeed_sizes(entry: SoftwareEntry, row: Row) -> SoftwareEntry:
    """Return an entry with the sizes of DeepSpeed's configuration that the notes give.

    Reduce buckets are made whole, whatever the model, and a second one with overlap_comm at stages
    1 and 2 (runtime/zero/stage_1_and_2.py, setup_buckets). A size of gathers alone stands for both,
    which configurations set alike; stage 3 has none.
    """
    if DEEPSPEED not in entry.profile:
        return entry
    notes = spaced(row.words("notes"))
    shards_weights = software_profile(entry.profile).sharding.largest_zero_stage > 2.0
    found: dict[str, bool | float | str] = {}
    for pattern in BUCKETS[:2] if shards_weights else BUCKETS:
        if bucket := pattern.search(notes):
            two = not shards_weights and OVERLAPS.search(notes)
            found = {"bucket_elements": _elements(bucket) * (2.0 if two else 1.0)}
            found["bucket_hidden_squares"] = 0.0
            break
    if shards_weights and (live := LIVE.search(notes)):
        found["live_elements"] = _elements(live)
    sharding = entry.figures.get("sharding", {}) | found
    return replace(entry, figures=entry.figures | {"sharding": sharding}) if found else entry


def _elements(found: re.Match[str]) -> float:
    return float(found[1]) * (1e6 if found[2] else 1.0)


def _with_figures(entry: SoftwareEntry, name: str) -> SoftwareEntry:
    """Return an entry with the figures of an engine."""
    figures = dict(entry.figures)
    for group, values in engine(name).figures.items():
        stated = {figure: one.value for figure, one in values.items()}
        figures[group] = figures.get(group, {}) | stated
    return replace(entry, figures=figures)


def _with_engine(entry: SoftwareEntry, row: Row) -> SoftwareEntry:
    """Return an entry with the engines that a row names, if they shard as the row says."""
    profile, wrapper = entry.profile, look_up(words_table().engines, row)
    if wrapper is not None and wrapper.usual and shards_nothing(row):
        wrapper = None
    if wrapper is not None and wrapper.add:
        sharded = f"{profile}{PLUS}{wrapper.add}"
        largest = software_profile(sharded).sharding.largest_zero_stage
        profile = sharded if (row.zero_stage or 0) <= largest else profile
    table = words_table()
    casts = look_up(table.autocast, row)
    shards = wrapper is not None and wrapper.add != DDP
    if casts is None and not shards and _casts_alone(entry, row):
        terms = terms_of(row, ANYWHERE)
        around = "liger-" if "liger" in terms else "compiled-" if "compile" in terms else ""
        casts = EngineEntry(add=f"{around}autocast")
    logits = table.whole_logits if (row.tensor_parallel or 1) > 1 else ()
    sections = (table.updates, table.zeroed, table.frozen, logits)
    found = (look_up(section, row) for section in sections)
    written = look_up(table.written_out, row)
    adds = [each.add for each in (*found, casts, written) if each is not None and each.add]
    # DeepSpeed updates fp32 partitions (deepspeed/runtime/zero)
    partitions = profile != entry.profile and DEEPSPEED in profile
    masters = partitions or bool(casts is not None and casts.add) or entry.master_weights
    return replace(entry, profile=PLUS.join((profile, *adds)), master_weights=masters)


def shards_nothing(row: Row) -> bool:
    """Whether a row is of one card, and names no engine and no stage."""
    named = {DEEPSPEED, "zero 1", "zero 2", "zero 3"} & terms_of(row, ANYWHERE).keys()
    return row.num_gpus == 1 and row.zero_stage is None and not named


def _casts_alone(entry: SoftwareEntry, row: Row) -> bool:
    """Whether fp32 weights of Hugging Face's modules are cast by autocast: by nothing else.

    bf16=True and fp16=True of its Trainer are torch.autocast (accelerate: accelerator.py,
    prepare_model), which DeepSpeed, sharding and peft's 16-bit base leave nothing to cast. Its
    gradients of fp16 are scaled, which torch refuses of weights in fp16 (pytorch/pytorch:
    torch/amp/grad_scaler.py, "Attempting to unscale FP16 gradients").
    """
    table, terms = words_table(), terms_of(row, ANYWHERE)
    precision, masters = look_up(table.precision, row), look_up(table.master_weights, row)
    adapter = look_up(table.adapter, row)
    stated = row.master_weights if row.master_weights is not None else masters and masters.value
    kept = {"16-bit weights", "not autocast"} & terms.keys()
    scaled = precision is not None and precision.value == "fp16" and not kept
    return (
        entry.takes_engines
        and not entry.master_weights
        and precision is not None
        and precision.value in ("bf16", "fp16")
        and bool(stated or "fp32 weights" in terms or (scaled and stated is None))
        and not (row.zero_stage or {"zero 2", "zero 3", "deepspeed"} & terms.keys())
        and (row.peft is None or (adapter is not None and adapter.value == "none"))
    )


def note_trainer(reading: Reading) -> None:
    """Record an unknown trainer, or one that does not shard as the row says, and its stand-in."""
    row = reading.row
    entry = _named_trainer(row)
    if wrapper := _missing_engine(entry, row):
        words = f"{entry.profile} has no ZeRO stage {_stated_stage(row)}: sharded as by {wrapper}"
        reading.defaults.append(words)
    if recipe := _missing_recipe(entry, row):
        reading.defaults.append(f"{entry.profile} has no cut matrices in fp8: priced as {recipe}")
    if is_described(row):
        return
    name = "framework is not given" if row.framework is None else f"framework {row.framework!r}"
    known = look_up(words_table().software, row)
    like = "an ordinary torch loop" if known is None else known.profile
    reading.defaults.append(f"{name}: trainer unknown, priced as {like}")


def that_runs(
    plan: Plan, trainer: SoftwareEntry, reading: Reading, *, experts: bool
) -> SoftwareEntry:
    """Return the trainer with a profile that runs a plan: the next that a guessed one inherits.

    Its engines stay.
    """

    def problem(profile: str) -> str:
        limits = capabilities_of(software_profile(profile))
        problems = [] if limits is None else limits.problems_of_plan(plan, experts=experts)
        said = (one for one in problems if getattr(reading.row, one.split()[0], None) is not None)
        return next(said, "")

    why = problem(trainer.profile)
    base, plus, engines = trainer.profile.partition(PLUS)
    while base and problem(f"{base}{plus}{engines}"):
        base = parent_of(base)
    if not why or not base or reading.row.software is not None:
        return trainer
    profile = f"{base}{plus}{engines}"
    reading.defaults.append(f"{trainer.profile} does not run {why}: priced as {profile}")
    return replace(trainer, profile=profile)


def is_described(row: Row) -> bool:
    """Whether a profile, engines or the words "a torch loop" describe a row's trainer.

    Nothing describes a loop of its author's own, whatever modules or engines it calls.
    """
    if row.software is not None or names_engines(row.words("framework")):
        return True
    terms = terms_of(row, "framework")
    if "own code" in terms:
        return False
    return look_up(words_table().software, row) is not None or "torch loop" in terms


def compared_trainer(row: Row, software: str) -> str:
    """Return the profile whose errors give a row's intervals: UNKNOWN where none describes it."""
    return software if is_described(row) else UNKNOWN


def profile_of_trainer(
    trainer: SoftwareEntry,
) -> tuple[SoftwareProfile, tuple[tuple[str, Any], ...]]:
    """Return the profile of a trainer, and the changed figures by "group.figure"."""
    profile = software_profile(trainer.profile)
    changes = {
        f"{group}.{name}": value
        for group, figures in trainer.figures.items()
        for name, value in figures.items()
    }
    for name in changes.keys() - profile.sources.keys():
        hint = did_you_mean(name, profile.sources)
        raise InputError(f"software: {name!r} is no figure of {trainer.profile}. {hint}".strip())
    return profile.changed(changes), tuple(sorted(changes.items()))


def _parsed(text: str) -> tuple[str, dict[str, dict[str, bool | float | str]]]:
    """Return profile (or engines) and figures of a cell: ``megatron; loss.chunk_tokens=1024``."""
    profile, *changes = (part.strip() for part in text.split(CHANGES))
    figures: dict[str, dict[str, bool | float | str]] = {}
    for change in changes:
        name, equals, value = (part.strip() for part in change.partition("="))
        group, dot, figure = name.partition(".")
        if not (equals and dot and value):
            raise InputError(f"software: {change!r} (must be group.figure=value)")
        figures.setdefault(group, {})[figure] = _value(name, value)
    return profile, figures


def _value(name: str, text: str) -> bool | float:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        raise InputError(f"software: {name} = {text!r} (must be a number or true, false)") from None
