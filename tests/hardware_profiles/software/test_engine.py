"""Engines, and trainers composed of them by name."""

import pytest

from hardware_profiles.errors import InputError
from hardware_profiles.software.engine import engine, engine_names
from hardware_profiles.software.trainer import names_engines, profile_names, software_profile


@pytest.mark.parametrize("name", engine_names())
def test_each_engine_changes_figures_of_a_profile_and_names_their_sources(name: str) -> None:
    found, composed = engine(name), software_profile(name)
    assert found.name == composed.name == name
    assert found.description
    assert found.figures or found.capabilities is not None
    for group, figures in found.figures.items():
        for figure, entry in figures.items():
            assert getattr(getattr(composed, group), figure) == entry.value
            assert composed.sources[f"{group}.{figure}"] == entry.source


def test_no_engine_has_the_name_of_a_profile() -> None:
    assert not set(engine_names()) & set(profile_names())


def test_later_figures_override_earlier_ones() -> None:
    assert not software_profile("hf-trainer").optimizer.fused
    changed = software_profile("hf-trainer+adamw-fused")
    assert changed.optimizer.fused
    assert changed.sharding == software_profile("hf-trainer").sharding
    assert changed.name == "hf-trainer+adamw-fused"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_stages_have_buckets_instead_of_megatrons_buffer(stage: int) -> None:
    composed = software_profile(f"megatron-deepspeed+deepspeed-zero{stage}")
    assert software_profile("megatron-deepspeed").gradients.whole_buffer
    assert not composed.gradients.whole_buffer
    assert composed.memory.buffer_bytes == 0.0
    assert composed.sharding.bucket_elements > 0.0


def test_an_expression_without_a_profile_is_an_ordinary_training_loop() -> None:
    assert software_profile("compiled-loss").host == software_profile("torch-trainer").host


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "fsdp2+adamw-fusd",
            "'adamw-fusd' of 'fsdp2+adamw-fusd' is unknown. Did you mean adamw-fu",
        ),
        ("fsdp2+hf-trainer", "'hf-trainer' of 'fsdp2+hf-trainer' is unknown"),
        ("fsdp1+fsdp2", "engines fsdp1 and fsdp2 are both wrappers"),
        ("fsdp2+", "software profile '' of 'fsdp2+' is unknown"),
    ],
)
def test_a_wrong_expression_is_named(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        software_profile(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["Megatron-LM v1.1.5 + DeepSpeed ZeRO-3", "", "fsdp2+own loss"])
def test_free_text_is_no_expression(text: str) -> None:
    assert not names_engines(text)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp1", "fsdp2"])
def test_gradients_under_torchs_wrappers_are_not_in_megatrons_buffer(wrapper: str) -> None:
    gradients = software_profile(f"nemo+{wrapper}").gradients
    assert not gradients.whole_buffer
    assert not gradients.whole_replica_buffer
