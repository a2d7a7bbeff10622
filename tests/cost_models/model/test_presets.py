"""Presets: published counts, and every tensor against the real module."""

import pytest

from cost_models.model.families import model_spec
from cost_models.model.presets import is_preset, load_preset, preset_names, preset_of_shape
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


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("google/gemma-3-1b-it", "gemma-3-1b"),
        ("llama-3-8b-instruct", "llama-3-8b"),
    ],
)
def test_a_hub_id_of_another_training_stage_has_the_shape_of_the_preset(
    name: str, preset: str
) -> None:
    found = preset_of_shape(name)
    assert found is not None
    assert found is load_preset(preset)


@pytest.mark.parametrize(
    "name", ["other/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-8B-Instruct", "org/none", "instruct", ""]
)
def test_another_owner_or_size_is_no_preset(name: str) -> None:
    assert preset_of_shape(name) is None
