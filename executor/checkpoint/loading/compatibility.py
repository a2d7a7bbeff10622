"""Compatibility of a resumed run with the saved one: model, data, plan and options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cost_models.plan.plan import Plan
from cost_models.plan.workload import Workload
from cost_models.plan_file import PlanFile
from executor.checkpoint.format.index import CheckpointIndex
from executor.compat import hugging_face_config
from executor.data import Corpus, require_same
from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in

# config keys that do not affect the function of the weights
_NOT_THE_MODEL: Final = names_in("""
    _name_or_path architectures attn_pdrop attention_dropout bos_token_id chunk_size_feed_forward
    dtype embd_pdrop eos_token_id hidden_dropout_prob attention_probs_dropout_prob dropout
    dropout_rate initializer_range pretraining_tp resid_pdrop return_dict torch_dtype
    transformers_version use_cache
""")
# options that shape every step; others (output folder, intervals) may change freely
_OF_A_STEP: Final = names_in("""
    learning_rate lr_schedule warmup_steps decay_steps min_lr_ratio weight_decay beta1 beta2 epsilon
    max_grad_norm
""")
_OF_ADAPTERS: Final = ("adapter", "adapter_rank", "adapter_alpha", "adapter_targets", "freeze")
_OF_A_DECAY: Final = ("linear", "cosine", "wsd")  # schedules that depend on the last step
_ABSENT: Final = "absent"


def first_config_difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first difference between two models' configs; None: the same model.

    Keys that a config omits have the default of its family.
    """
    if saved.get("model_type") != now.get("model_type"):
        return _words("model_type", saved.get("model_type"), now.get("model_type"))
    one, other = _with_defaults(saved), _with_defaults(now)
    for key in sorted({*one, *other} - set(_NOT_THE_MODEL)):
        before, after = one.get(key, _ABSENT), other.get(key, _ABSENT)
        if _text(before) != _text(after):
            return _words(key, before, after)
    return None


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        values: dict[str, Any] = hugging_face_config(config).to_dict()
    except KeyError:  # not a family of transformers: a custom module
        return dict(config)
    return values


def require_same_model(index: CheckpointIndex, file: PlanFile, where: str) -> None:
    """Raise an InputError if a checkpoint is of another model than the plan's."""
    difference = first_config_difference(index.about["model"]["config"], file.model.config)
    saved, now = index.about["workload"], file.workload.to_dict()
    for key in _OF_ADAPTERS:
        if difference is None and saved.get(key) != now.get(key):
            difference = _words(key, saved.get(key), now.get(key))
    if difference is not None:
        raise InputError(f"{where}: a checkpoint of another model: {difference}")


def require_same_data(index: CheckpointIndex, file: PlanFile, corpus: Corpus, where: str) -> None:
    """Raise an InputError if the next batches are not those of the saved run."""
    saved, now = index.about["workload"]["global_batch_size"], file.workload.global_batch_size
    if saved != now:
        raise InputError(
            f"{where}: global_batch_size was {saved}, is {now}: a step would read other samples "
            "(--allow-other-data continues nevertheless)"
        )
    if (identity := index.about.get("data")) is None:
        return
    try:
        require_same(identity, corpus)
    except InputError as error:
        raise InputError(
            f"{where}: {error} (--allow-other-data continues with it at the same step)"
        ) from None


def describe_changes(
    index: CheckpointIndex, file: PlanFile, options: Mapping[str, Any]
) -> Iterator[str]:
    """Yield descriptions of all other differences from the saved run."""
    about = index.about
    layout = {**Plan().to_dict(), **about["plan"], "layer_ranges": about["layer_ranges"]}
    now = {**file.plan.to_dict(), "layer_ranges": [list(pair) for pair in file.layer_ranges]}
    layout["stage_recompute_layers"] = about.get("stage_recompute_layers")
    numbers = file.stage_recompute_layers
    now["stage_recompute_layers"] = None if numbers is None else list(numbers)
    differing = [key for key in now if layout.get(key) != now[key] and key != "layer_ranges"]
    if differing:
        words = ", ".join(f"{key} {layout.get(key)} -> {now[key]}" for key in differing)
        yield f"resharded: {words}"
        if file.model.hidden_dropout or file.model.attention_dropout:
            yield "dropout draws other masks than it would have under the saved plan"
    elif layout != now:
        yield "resharded: layers are cut into stages at other places"
    usual = Workload(1, 1)  # defaults for keys that older files lack
    for key in ("precision", "optimizer", "master_weights"):
        before = about["workload"].get(key, getattr(usual, key))
        after = file.workload.to_dict()[key]
        if before != after:
            yield f"{key}: {before} -> {after}"
    saved = about.get("options", {})
    names = list(_OF_A_STEP)
    if options.get("lr_schedule") in _OF_A_DECAY:
        names.append("steps")
    for key in names:
        if key in saved and saved[key] != options.get(key):
            yield f"--{key.replace('_', '-')}: {saved[key]} -> {options.get(key)}"


def _words(key: str, saved: Any, now: Any) -> str:
    return f"{key} = {_short(saved)} in the checkpoint, {_short(now)} in the plan"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
