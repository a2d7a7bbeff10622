"""Recipes of Megatron Bridge and NeMo: fields of Megatron Core in the sections of a configuration.

A field is read wherever it stands; YAML files of NeMo 1 have some under other names. Recipes use a
distributed optimizer and bf16 unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hardware_profiles.fields import names_in
from planner.exchange.job import Job
from planner.exchange.keys import Key, Settings, Source, leaves_of
from planner.exchange.launch import torchrun
from planner.exchange.megatron_fields import (
    CARRIES,
    Get,
    check_fields,
    fields_of,
    notes_of_fields,
    settings_of_fields,
)
from planner.exchange.megatron_model import config_of_fields
from planner.exchange.syntax.python_recipe import assignments
from planner.exchange.target import Target

# names of fields in configurations of NeMo 1
OLDER: Final = {
    "recompute_granularity": "activations_checkpoint_granularity",
    "recompute_method": "activations_checkpoint_method",
    "recompute_num_layers": "activations_checkpoint_num_layers",
    "seq_length": "encoder_seq_length",
}
DIRECT: Final = {
    "micro_batch_size": "micro_batch_size",
    "global_batch_size": "global_batch_size",
    "seq_length": "seq_len",
}
# fields that recipes set for some models
RESET: Final = names_in("""
    virtual_pipeline_model_parallel_size pipeline_model_parallel_layout recompute_granularity
    recompute_method recompute_num_layers recompute_modules
""")


def fields_in(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a document by their last name; the one nearest to the top wins."""
    found: dict[str, Any] = {}
    for path, value in sorted(
        leaves_of(document), key=lambda pair: pair[0].count("."), reverse=True
    ):
        if value is not None:
            found[path.rsplit(".", 1)[-1]] = value
    return found


def getter(document: Mapping[str, Any]) -> Get:
    """Return the fields that a recipe sets."""
    found = fields_in(document)
    precision = _precision(document, found)
    sharded = str(found.get("name", "")) == "distributed_fused_adam"

    def get(name: str) -> Any:
        value = found.get(name)
        if value is None and name in OLDER:
            value = found.get(OLDER[name])
        if name in ("bf16", "fp16", "fp8"):
            return name == precision or None
        if name == "use_distributed_optimizer" and value is None:
            return sharded or "optim" not in _mapping(document.get("model"))
        if name == "add_bias_linear" and value is None:
            return found.get("bias")
        if name == "gated_linear_unit" and value is None:
            return "swiglu" in str(found.get("activation", ""))
        if name == "untie_embeddings_and_output_weights" and value is None:
            return not found.get("share_embeddings_and_output_weights", True)
        if name == "optimizer":
            return value if isinstance(value, str) else None
        if name.endswith(("_size", "_length", "_layers", "_heads", "_groups", "_instances")):
            return value if type(value) is int else None
        return value

    return get


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _precision(document: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return bf16, fp16, fp32 or fp8 as the plugin, the recipe's word or the trainer says."""
    mixed = document.get("mixed_precision", "bf16_mixed")
    plugin = _mapping(document.get("trainer")).get("plugins")
    texts = [str(mixed), str(plugin or "")]
    if any("fp8" in text for text in texts) or found.get("fp8") not in (None, False):
        return "fp8"
    word = str(_mapping(document.get("trainer")).get("precision", "")).lower()
    if "fp16" in " ".join(texts) or word in ("16", "16-mixed", "fp16"):
        return "fp16"
    return "fp32" if mixed is None or word in ("32", "32-true", "fp32") else "bf16"


def read_fields_of_recipe(settings: Settings, source: Source) -> Settings:
    """Return the options that a recipe states."""
    get = getter(source.document)
    found = settings_of_fields(get)
    values = {ours: get(name) for name, ours in DIRECT.items()}
    return found | {ours: value for ours, value in values.items() if type(value) is int}


def restate(leaves: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return values at the places, and under the names, where a document has their fields."""
    there: dict[str, list[str]] = {}
    for path, _ in leaves_of(document):
        there.setdefault(path.rsplit(".", 1)[-1], []).append(path)
    found = {}
    for path, value in leaves.items():
        name = path.rsplit(".", 1)[-1]
        places = there.get(name) or there.get(OLDER.get(name, ""), [])
        nearest = min(places, key=lambda one: one.count("."), default=path)
        found[path if path in places else nearest] = value
    return found


def placed_fields(job: Job, sections: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the fields of a job by path; None only where a recipe may have another value."""
    fields = fields_of(job)
    return {
        f"{section}.{name}": fields[name]
        for section, names in sections.items()
        for name in names
        if fields[name] is not None or name in RESET
    }


def placed_keys(sections: Mapping[str, tuple[str, ...]]) -> tuple[Key, ...]:
    """Return the keys of the fields in the sections of a configuration."""
    return tuple(
        Key(f"{section}.{name}", CARRIES[name])
        for section, names in sections.items()
        for name in names
    )


def recipe(
    name: str,
    file: str,
    footer: Sequence[str],
    sections: Mapping[str, tuple[str, ...]],
    keys: Sequence[Key],
    **options: Any,
) -> Target:
    """Return the target of a Python recipe with fields in the sections of its configuration.

    ``footer``: lines that run it; ``keys``: other keys; ``options``: of ``Target``.
    """
    usual: dict[str, Any] = {"complete": read_fields_of_recipe}
    return Target(
        name=name,
        file=file,
        syntax=assignments(footer),
        keys=(*placed_keys(sections), *keys),
        launch=lambda job: torchrun(job, file),
        check=lambda document, job: check_fields(job),
        remarks=lambda source: list(notes_of_fields(getter(source.document))),
        model_config=lambda source: config_of_fields(getter(source.document))[0],
        restate=restate,
        **usual | options,
    )
