"""Software profiles that inherit others."""

from typing import Any

import pytest

from hardware_profiles.errors import InputError
from hardware_profiles.software.profile import profile_of
from hardware_profiles.software.trainer import SoftwareProfile, software_profile


def test_a_profile_inherits_values_with_their_sources() -> None:
    base, child = software_profile("hf-trainer"), software_profile("hf-trainer-early")
    assert child.loss.fp32_logits_copies == base.loss.fp32_logits_copies
    assert child.sources["loss.fp32_logits_copies"] == base.sources["loss.fp32_logits_copies"]
    assert (base.loss.logits_copies, child.loss.logits_copies) == (0.0, 1.0)
    assert child.sources["loss.logits_copies"] != base.sources["loss.logits_copies"]


def profile(**values: Any) -> SoftwareProfile:
    document = {"name": "x", "description": "y", **values}
    return profile_of(SoftwareProfile, document, "x.toml", software_profile)


def test_a_profile_without_a_parent_says_everything() -> None:
    assert profile(inherits="hf-trainer").name == "x"
    with pytest.raises(InputError, match="software profile 'hf' is unknown"):
        profile(inherits="hf")
    with pytest.raises(InputError, match=r"x\.toml: precision: autocasts_weights is missing"):
        profile()
    with pytest.raises(InputError, match=r"x\.toml: unknown key 'parent'"):
        profile(inherits="hf-trainer", parent="hf-trainer")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"value": -1.0, "source": "s"}, "x.toml: loss: chunk_tokens = -1.0 (must be a number"),
        ({"value": True, "source": "s"}, "x.toml: loss: chunk_tokens = true (must be a number"),
        ({"value": float("nan"), "source": "s"}, "chunk_tokens = NaN (must be a number from 0"),
        ({"value": 1.0}, "x.toml: loss: chunk_tokens: source is missing"),
        ({"value": 1.0, "sauce": "s"}, "chunk_tokens: unknown key 'sauce'. Did you mean source"),
        (1.0, "x.toml: loss: chunk_tokens = 1.0 (must be an object with keys)"),
    ],
)
def test_a_wrong_figure_is_named(entry: Any, words: str) -> None:
    with pytest.raises(InputError) as caught:
        profile(inherits="hf-trainer", loss={"chunk_tokens": entry})
    assert words in str(caught.value)


def test_an_unknown_figure_gets_a_hint() -> None:
    entry = {"value": 1.0, "source": "s"}
    with pytest.raises(InputError, match=r"x\.toml: loss: unknown key 'chunk_token'. Did you mean"):
        profile(inherits="hf-trainer", loss={"chunk_token": entry})
