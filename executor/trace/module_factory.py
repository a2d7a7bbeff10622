"""The function that ``module:package.path:factory`` names, imported. Imports no torch."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from hardware_profiles.arguments import names_arguments
from hardware_profiles.errors import InputError, ShardplanError

if TYPE_CHECKING:
    from torch import nn

PREFIX: Final = "module:"
Factory = Callable[[], "nn.Module"]


@names_arguments("executor.trace.module_factory.load_factory")
def load_factory(name: str) -> Factory:
    """Import the function that ``module:package.path:factory`` names."""
    path, _, function = name.removeprefix(PREFIX).partition(":")
    if not name.startswith(PREFIX) or not path or not function:
        raise InputError(f"{name}: not a module ({PREFIX}package.path:factory expected)")
    try:
        found = getattr(importlib.import_module(path), function)
    except ImportError as error:
        raise InputError(f"{name}: {path} cannot be imported: {error}") from None
    except AttributeError:
        raise InputError(f"{name}: {path} has no {function}") from None
    if not callable(found):
        raise InputError(f"{name}: {function} is not a function that returns an nn.Module")
    factory: Factory = found
    return factory


@contextmanager
def one_line(name: str) -> Iterator[None]:
    """Convert any error of the user's module to a one-line message."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ShardplanError as error:
        words = str(error)
        raise type(error)(words if words.startswith(name) else f"{name}: {words}") from None
    except SystemExit:
        raise InputError(f"{name}: ends Python instead of returning a module") from None
    except Exception as error:
        words = (str(error).strip().splitlines() or [""])[0][:200]
        kind = type(error).__name__
        if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
            words = f"its operators depend on the values of tensors ({words})"
        raise InputError(f"{name}: cannot be traced: {kind}: {words}") from error
