"""Software profiles that inherit others."""

from __future__ import annotations

import pytest

from hardware_profiles.errors import InputError
from hardware_profiles.fields import Fields
from hardware_profiles.software.trainer import _from_fields, software_profile


def test_a_profile_inherits_values_with_their_sources() -> None:
    base, child = software_profile("hf-trainer"), software_profile("hf-trainer-early")
    assert child.loss.fp32_logits_copies == base.loss.fp32_logits_copies
    assert child.sources["loss.fp32_logits_copies"] == base.sources["loss.fp32_logits_copies"]
    assert (base.loss.logits_copies, child.loss.logits_copies) == (0.0, 1.0)
    assert child.sources["loss.logits_copies"] != base.sources["loss.logits_copies"]


def test_a_profile_without_a_parent_says_everything() -> None:
    values = {"name": "x", "description": "y", "inherits": "hf-trainer"}
    assert _from_fields(Fields(values, "x.toml")).name == "x"
    with pytest.raises(InputError, match="software profile 'hf' is unknown"):
        _from_fields(Fields({**values, "inherits": "hf"}, "x.toml"))
    with pytest.raises(InputError, match="is missing"):
        _from_fields(Fields({"name": "x", "description": "y"}, "x.toml"))
    with pytest.raises(InputError, match="unknown key 'parent'"):
        _from_fields(Fields({**values, "parent": "hf-trainer"}, "x.toml"))
