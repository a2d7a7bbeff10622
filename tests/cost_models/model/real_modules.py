"""The modules of transformers on the meta device, for comparison with our specs."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from cost_models.model.spec import ModelSpec

AUTO_CLASSES = {
    "bert": AutoModelForMaskedLM,
    "roberta": AutoModelForMaskedLM,
    "t5": AutoModelForSeq2SeqLM,
}


def real_module(config: Mapping[str, Any]) -> PreTrainedModel:
    """Build the module that transformers trains, without memory for its tensors."""
    values = dict(config)
    family = values.pop("model_type")
    auto_class = AUTO_CLASSES.get(family, AutoModelForCausalLM)
    with torch.device("meta"):
        return auto_class.from_config(CONFIG_MAPPING[family](**values))


def real_shapes(module: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}


def our_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    outside = (*spec.embedding, *spec.bridge, *spec.head)
    inside = {
        f"{prefix}.{weight.name}": weight.shape
        for prefix, index in zip(spec.layer_prefixes, spec.pattern, strict=True)
        for weight in spec.kinds[index].weights
    }
    return {weight.name: weight.shape for weight in outside} | inside


def real_layers(module: PreTrainedModel, spec: ModelSpec) -> Iterator[torch.nn.Module]:
    return (module.get_submodule(prefix) for prefix in spec.layer_prefixes)


def assert_same_tensors(config: Mapping[str, Any], spec: ModelSpec) -> PreTrainedModel:
    """Compare name by name, shape by shape, and the total; return the real module."""
    module = real_module(config)
    assert our_shapes(spec) == real_shapes(module)
    assert spec.num_parameters == module.num_parameters()
    return module
