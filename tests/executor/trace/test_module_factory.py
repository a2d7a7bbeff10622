"""Importing a factory."""

import pytest

from executor.trace.module_factory import load_factory, one_line
from hardware_profiles.errors import InputError


def test_a_factory_that_ends_python_is_refused() -> None:
    said = "module:sys:exit: ends Python instead of returning"
    with pytest.raises(InputError, match=said), one_line("module:sys:exit"):
        load_factory("module:sys:exit")()
