"""Families of transformers: a :class:`ModelSpec` from the keys of a config.json.

A family is a ``model_type`` of transformers. Its spec lists the parameters of the module that
transformers builds for training it (ForCausalLM, ForMaskedLM or ForConditionalGeneration).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Final

from cost_models.model.families.reader import Config, Defaults
from cost_models.model.spec import ModelSpec
from hardware_profiles.errors import InputError, did_you_mean
from hardware_profiles.fields import wrong_value

Builder = Callable[[Config], ModelSpec]

# model_type, which is the builder's name: its module, which is loaded where it is used, and the
# defaults of its config class
_FAMILIES: Final = {
    "bert": ("encoder", "BERT"),
    "bloom": ("gpt_like", "BLOOM"),
    "cohere": ("cohere", "COHERE"),
    "deepseek_v2": ("mla", "DEEPSEEK_V2"),
    "deepseek_v3": ("mla", "DEEPSEEK_V3"),
    "falcon": ("falcon", "FALCON"),
    "gemma": ("gemma", "GEMMA"),
    "gemma2": ("gemma", "GEMMA2"),
    "gemma3": ("gemma", "GEMMA3"),
    "gemma3_text": ("gemma", "GEMMA3"),
    "glm4": ("glm4", "GLM4"),
    "glm4_moe": ("glm4", "GLM4_MOE"),
    "gpt2": ("gpt_like", "GPT2"),
    "gpt_neox": ("gpt_like", "GPT_NEOX"),
    "gpt_oss": ("moe", "GPT_OSS"),
    "granite": ("llama_like", "GRANITE"),
    "llama": ("llama_like", "LLAMA"),
    "llama4": ("llama4", "LLAMA4"),
    "llama4_text": ("llama4", "LLAMA4"),
    "mistral": ("llama_like", "MISTRAL"),
    "mixtral": ("moe", "MIXTRAL"),
    "nemotron": ("nemotron", "NEMOTRON"),
    "olmo2": ("llama_like", "OLMO2"),
    "olmoe": ("moe", "OLMOE"),
    "opt": ("opt", "OPT"),
    "phi": ("phi", "PHI"),
    "phi3": ("phi3", "PHI3"),
    "qwen2": ("llama_like", "QWEN2"),
    "qwen2_moe": ("qwen_moe", "QWEN2_MOE"),
    "qwen3": ("llama_like", "QWEN3"),
    "qwen3_moe": ("qwen_moe", "QWEN3_MOE"),
    "qwen3_5": ("qwen3_next", "QWEN3_5"),
    "qwen3_5_moe": ("qwen3_next", "QWEN3_5_MOE"),
    "qwen3_5_moe_text": ("qwen3_next", "QWEN3_5_MOE"),
    "qwen3_5_text": ("qwen3_next", "QWEN3_5"),
    "qwen3_next": ("qwen3_next", "QWEN3_NEXT"),
    "roberta": ("encoder", "ROBERTA"),
    "smollm3": ("llama_like", "SMOLLM3"),
    "starcoder2": ("starcoder2", "STARCODER2"),
    "t5": ("t5", "T5"),
}
FAMILIES: Final = tuple(sorted(_FAMILIES))
# a model_type whose custom code is that of a family of transformers with other sizes: the family
# Source: huggingface.co/moonshotai/Kimi-K2-Instruct: modeling_deepseek.py; transformers:
# modeling_mt5.py has the layers of modeling_t5.py
_SAME_AS: Final = {"kimi_k2": "deepseek_v3", "mt5": "t5"}
# in the names of classes whose head is not a projection onto the vocabulary
_OTHER_HEADS: Final = (
    "Classification",
    "QuestionAnswering",
    "Embedding",
    "Reward",
    "MultipleChoice",
)


def model_spec(config: Mapping[str, Any], *, name: str, where: str = "config.json") -> ModelSpec:
    """Build the spec of the model that ``config`` (the contents of a config.json) describes.

    Raises :class:`InputError`: one line with ``where``, the key, its value and what is allowed.

    >>> model_spec({"model_type": "llama"}, name="llama").num_parameters
    6738415616
    """
    family = _family(config, where)
    build, defaults = builder_of(family)
    given = config["model_type"]
    reader = Config({**config, "model_type": family}, where, family, defaults)
    spec = build(reader)
    return replace(
        spec,
        name=name,
        config=dict(spec.config),
        assumptions=(*_read_as(given, family), *_assumptions(reader), *spec.assumptions),
    )


def builder_of(family: str) -> tuple[Builder, Defaults]:
    """Return the builder of a family's specs, and the defaults of its config class."""
    name, defaults = _FAMILIES[family]
    module = import_module(f"{__name__}.{name}")
    return getattr(module, family), getattr(module, defaults)


def _read_as(given: str, family: str) -> tuple[str, ...]:
    """Return a note where a model_type is read as another family."""
    return () if given == family else (f"model_type {given} is read as {family}: the same layers",)


def _family(config: Mapping[str, Any], where: str) -> str:
    """Return the model type; an unknown one is an error that lists the known ones."""
    family = config.get("model_type")
    if family is None:
        raise InputError(f"{where}: model_type is missing{_guess(config)}")
    if not isinstance(family, str):
        raise wrong_value(where, "model_type", family, "a string")
    if family in _FAMILIES or family in _SAME_AS:
        return _SAME_AS.get(family, family)
    custom = " (its custom code is never run)" if config.get("auto_map") is not None else ""
    hint = did_you_mean(family, FAMILIES)
    listed = ", ".join(name for name in FAMILIES if not name.endswith("_text"))
    raise InputError(
        f"{where}: model_type = {family[:60]!r} is not known{custom}. "
        + (f"{hint} " if hint else "")
        + f"Known: {listed}. Any other model is traced: module:package.path:factory "
        "(docs/how-to/any_module.md)"
    )


def _guess(config: Mapping[str, Any]) -> str:
    """Return a hint: the model_type of the class in ``architectures``, or what else it is."""
    if {"schema_version", "model", "plan"} <= config.keys():
        return ": it is a plan.json, not a model's config.json; explain, run and export take it"
    classes = config.get("architectures")
    first = classes[0] if isinstance(classes, (list, tuple)) and classes else ""
    wanted = str(first).lower()
    for family in FAMILIES:
        stem = family.replace("_", "")
        if wanted.startswith((f"{stem}for", f"{stem}lmhead")):
            return f'; architectures names {str(first)[:60]}: add "model_type": "{family}"'
    return f" (one of {', '.join(FAMILIES)})"


def _assumptions(config: Config) -> tuple[str, ...]:
    """Return the defaults taken and the keys ignored, in words."""
    lines = []
    if config.defaulted:
        taken = ", ".join(f"{key} = {value}" for key, value in config.defaulted.items())
        lines.append(f"not in the config, taken from the defaults of {config.family}: {taken}")
    if config.has("auto_map"):
        lines.append("the config names custom code (auto_map): custom code is not executed")
    classes = config.values.get("architectures")
    first = str(classes[0])[:60] if isinstance(classes, (list, tuple)) and classes else ""
    if any(task in first for task in _OTHER_HEADS):
        lines.append(
            f"priced with a head over the vocabulary, not with that of architectures: {first}"
        )
    if config.has("quantization_config"):
        lines.append(
            "the config names a quantization: weights are counted in the training precision"
        )
    return tuple(lines)
