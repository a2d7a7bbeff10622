"""Listings of presets, accelerators and trainers, and details of one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from cost_models.compute.flops import (
    forward_flops_per_token,
    model_flops_per_step,
    rule_of_thumb_ratio,
)
from cost_models.legality.capabilities import capabilities
from cost_models.model.parameters import active_parameters, parameters_by_part
from cost_models.model.presets import all_presets, is_preset, load_preset
from cost_models.units import format_bytes, format_count
from hardware_profiles.cluster.catalogue import accelerators, accelerators_named, match_accelerator
from hardware_profiles.cluster.schema import Accelerator
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.software.engine import engine, engine_names
from hardware_profiles.software.trainer import profile_names, software_profile
from planner.exchange.names import target_names
from planner.request.model import resolve_model
from planner.text.answer import SCHEMA_VERSION
from planner.text.paragraphs import hanging, plain
from planner.text.tables import narrowed

# where the size begins in a preset's name: llama-3.1-8b, mixtral-8x7b, gpt2-medium
_SIZE: Final = re.compile(r"-(?:[\dx.]+[bm]|tiny|mini|small|base|medium|large|xl|xxl)")


def model_listing(start: str = "") -> dict[str, Any]:
    """The presets whose names begin so, by their names without the size, then by size."""
    presets = [one for one in all_presets() if one.name.startswith(start.lower())]
    presets.sort(key=lambda one: (_SIZE.split(one.name)[0], one.published_parameters))
    models = [
        {
            "name": preset.name,
            "family": preset.config["model_type"],
            "parameters": preset.published_parameters,
            "source": preset.source,
        }
        for preset in presets
    ]
    return {"schema_version": SCHEMA_VERSION, "models": models}


def names_one_model(text: str) -> bool:
    """Whether a text is a preset, an alias, a file or a folder; not the beginning of several."""
    return is_preset(text) or Path(text).exists()


def models_text(document: Mapping[str, Any]) -> str:
    """The presets, one a line, with the family of transformers whose layers they are priced as.

    Some have code of their own, such as DBRX: the source, which stands with one model, says so.
    """
    rows = [("preset", "parameters", "layers as in")]
    for entry in document["models"]:
        rows.append((entry["name"], format_count(entry["parameters"]), entry["family"]))
    longest = max(len(name) for name, _, _ in rows)
    return "\n".join(f"{name:<{longest}} {size:>10}  {family}" for name, size, family in rows)


def one_model(name: str) -> dict[str, Any]:
    """Structure and parameters of one model."""
    model = resolve_model(name)
    seq_len = min(model.max_seq_len or 4096, 4096)
    forward = float(forward_flops_per_token(model, seq_len))
    return {
        "schema_version": SCHEMA_VERSION,
        "name": model.name,
        "family": model.family,
        "parameters": model.num_parameters,
        "active_parameters": round(active_parameters(model)),
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "tie_embeddings": model.tie_embeddings,
        "max_seq_len": model.max_seq_len,
        "parts": parameters_by_part(model),
        "flops_per_token": {
            "seq_len": seq_len,
            "convention": "attention scores in full; a multiply and an add are two",
            "forward": forward,
            "backward": float(model_flops_per_step(model, seq_len, 1)) / seq_len - forward,
            "over_6n": float(rule_of_thumb_ratio(model, seq_len)),
        },
        "assumptions": list(model.assumptions),
        "source": load_preset(name).source if is_preset(name) else None,
    }


def model_text(document: Mapping[str, Any]) -> str:
    """One model as text."""
    flops = document["flops_per_token"]
    active = ""
    if document["active_parameters"] != document["parameters"]:
        active = f", {document['active_parameters']:,} active"
    tied = ", tied embeddings" if document["tie_embeddings"] else ""
    lines = [
        *hanging(f"{document['name']}  ", f"{document['parameters']:,} parameters{active}"),
        *hanging(
            f"  {document['family']}: ",
            f"{document['num_layers']} layers, hidden size {document['hidden_size']:,}, "
            f"vocabulary {document['vocab_size']:,}{tied}",
        ),
    ]
    lines += [f"  {part:<14} {count:>18,}" for part, count in document["parts"].items()]
    lines += hanging(
        "  FLOP a token ",
        f"at {flops['seq_len']:,} tokens: forward {flops['forward'] / 1e9:,.2f} G, "
        f"backward {flops['backward'] / 1e9:,.2f} G ({flops['over_6n']:.3f} x 6 N)",
    )
    for words in document["assumptions"]:
        lines += plain(words, "  ")
    if document["source"]:
        lines += hanging("  source ", document["source"])
    return "\n".join(lines)


def hardware_listing() -> dict[str, Any]:
    """All accelerators."""
    return {
        "schema_version": SCHEMA_VERSION,
        "accelerators": [_short(accelerator) for accelerator in accelerators()],
    }


def hardware_named(name: str) -> dict[str, Any] | None:
    """The accelerators that a name covers, and the usual one; None where it names a single one."""
    found = accelerators_named(name)
    if len(found) == 1:
        return None
    try:
        note = match_accelerator(name).note
        usual = None if note is None else note.partition("; the others:")[0]  # they are listed
    except InputError:
        usual = None
    return {
        "schema_version": SCHEMA_VERSION,
        "accelerators": [_short(accelerator) for accelerator in found],
        "usual": usual or f"no usual one: write the name of the one that is meant, not {name}",
    }


def _short(accelerator: Accelerator) -> dict[str, Any]:
    peak = accelerator.peak_flops.get("bf16") or accelerator.peak_flops.get("fp16")
    return {
        "name": accelerator.name,
        "memory_bytes": accelerator.memory_capacity.value,
        "memory_bytes_per_second": accelerator.memory_bandwidth.value,
        "peak_16_bit_flops": None if peak is None else peak.value,
        "link": accelerator.link,
        "link_bytes_per_second": accelerator.link_bandwidth.value,
    }


def accelerators_text(document: Mapping[str, Any]) -> str:
    """The accelerators, one a line; TFLOP/s are those in 16 bits."""
    rows = [("name", "memory", "GB/s", "TFLOP/s", "link", "link GB/s")]
    for entry in document["accelerators"]:
        peak = entry["peak_16_bit_flops"]
        rows.append(
            (
                entry["name"],
                format_bytes(entry["memory_bytes"]),
                f"{entry['memory_bytes_per_second'] / 1e9:,.0f}",
                "unknown" if peak is None else f"{peak / 1e12:,.0f}",
                entry["link"],
                f"{entry['link_bytes_per_second'] / 1e9:,.0f}",
            )
        )
    lines = narrowed(rows, ("link",), ("name", "link"))
    if "usual" in document:
        lines += plain(document["usual"])
    return "\n".join(lines)


def one_accelerator(name: str) -> dict[str, Any]:
    """Every figure of one accelerator with its source."""
    (accelerator,) = accelerators_named(name)
    figures = {
        "memory_capacity_bytes": accelerator.memory_capacity,
        "usable_memory_bytes": accelerator.usable_memory,
        "memory_bandwidth_bytes_per_second": accelerator.memory_bandwidth,
        "link_bandwidth_bytes_per_second": accelerator.link_bandwidth,
        "link_share": accelerator.link_share,
        "host_bandwidth_bytes_per_second": accelerator.host_bandwidth,
        "host_memory_bandwidth_bytes_per_second": accelerator.host_memory_bandwidth,
        "power_watts": accelerator.power,
        "price_dollars_per_hour": accelerator.price,
        "compute_units": accelerator.compute_units,
        "l2_cache_bytes": accelerator.l2_cache,
        "systolic_array_rows": accelerator.systolic_array,
        **{f"peak_{p}_flops": f for p, f in accelerator.peak_flops.items()},
        **{f"achievable_{p}_flops": f for p, f in accelerator.achievable_flops.items()},
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "name": accelerator.name,
        "architecture": accelerator.architecture,
        "link": accelerator.link,
        "aliases": list(accelerator.aliases),
        "figures": {key: asdict(f) for key, f in figures.items() if f is not None},
    }


def accelerator_text(document: Mapping[str, Any]) -> str:
    """One accelerator as text."""
    lines = [f"{document['name']}  {document['architecture']}, {document['link']}"]
    for key, entry in document["figures"].items():
        lines.append(f"  {key:<38} {entry['value']:>12.6g}")
        lines += plain(f"{entry['kind']}: {entry['source']}", "      ")
    return "\n".join(lines)


def software_listing(text: str = "") -> dict[str, Any]:
    """The trainers with a text in name or description, and the engines with it in the name."""
    wanted = text.lower()
    described = {name: software_profile(name).description for name in profile_names()}
    for name in target_names():
        one = capabilities(name)
        also = f" ({', '.join(one.also)})" if one.also else ""
        described.setdefault(name, f"{one.title}{also}: the profile of each ZeRO stage")
    trainers = [
        {"name": name, "description": words}
        for name, words in described.items()
        if wanted in name or wanted in words.lower()
    ]
    engines = [
        {"name": name, "subject": engine(name).subject, "description": engine(name).description}
        for name in engine_names()
        if wanted in name
    ]
    if not trainers and not engines:
        names = [*described, *engine_names()]
        hint = did_you_mean(text, names) or "shardplan software lists all"
        raise InputError(f"software {text!r}: no trainer or engine has this in its name. {hint}")
    return {"schema_version": SCHEMA_VERSION, "trainers": trainers, "engines": engines}


def software_text(document: Mapping[str, Any]) -> str:
    """Trainers, then engines by subject, each with its description."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in document["trainers"]:
        groups.setdefault("trainers", []).append(entry)
    for entry in document["engines"]:
        groups.setdefault(f"engines: {entry['subject']}", []).append(entry)
    lines: list[str] = []
    for title, entries in groups.items():
        lines += [*([""] if lines else []), title]
        for entry in entries:
            lines += hanging(f"  {entry['name']}  ", entry["description"])
    return "\n".join(lines)
