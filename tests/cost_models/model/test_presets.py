"""Presets: published counts, and every tensor against the real module."""

from __future__ import annotations

import pytest

from cost_models.model.families import model_spec
from cost_models.model.presets import is_preset, load_preset, preset_names
from cost_models.model.spec import ModelSpec
from hardware_profiles.errors import InputError
from tests.cost_models.model.real_modules import assert_same_tensors


def spec_of(name: str) -> ModelSpec:
    preset = load_preset(name)
    return model_spec(preset.config, name=name, where=f"preset {name}")


@pytest.mark.parametrize("name", preset_names())
def test_published_number_of_parameters(name: str) -> None:
    assert spec_of(name).num_parameters == load_preset(name).published_parameters


@pytest.mark.parametrize("name", preset_names())
def test_presets_say_every_size(name: str) -> None:
    assert not any("taken from the defaults" in line for line in spec_of(name).assumptions)
    assert load_preset(name).source.startswith("https://huggingface.co/")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", preset_names())
def test_tensors_are_those_of_the_real_module(name: str) -> None:
    assert_same_tensors(load_preset(name).config, spec_of(name))


def test_names_and_aliases() -> None:
    assert len(preset_names()) >= 40
    assert load_preset("META-LLAMA/Meta-Llama-3-8B").name == "llama-3-8b"
    assert load_preset("Llama-3-8B").name == "llama-3-8b"
    assert not is_preset("llama-3-9b")
    with pytest.raises(InputError, match="Did you mean llama-3-8b"):
        load_preset("llama-3-9b")


def test_every_name_and_alias_is_found_in_any_case() -> None:
    for preset in map(load_preset, preset_names()):
        for name in (preset.name, *preset.aliases):
            assert load_preset(name.upper()) is preset
    assert not is_preset("")


def test_no_name_or_alias_is_given_twice() -> None:
    names = [n.lower() for p in map(load_preset, preset_names()) for n in (p.name, *p.aliases)]
    assert sorted(names) == sorted(set(names))
