"""Suggestions where a public function is called with arguments that it does not take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from hardware_profiles.errors import InputError, did_you_mean

Called = TypeVar("Called", bound=Callable[..., Any])


def names_arguments(where: str) -> Callable[[Called], Called]:
    """Turn a wrong argument of a function, or of a class, into an InputError with a suggestion.

    ``where``: the name under which it is imported, such as ``planner.explain``.
    """

    def decorate(called: Called) -> Called:
        if isinstance(called, type):
            called.__init__ = _checked(where, called.__init__)  # type: ignore[misc]
            return called
        return _checked(where, called)  # type: ignore[return-value]

    return decorate


def _checked(where: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    known = [name for name in signature.parameters if name != "self"]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_call(where, signature, args, kwargs, lambda given: suggestion(given, known))
        return function(*args, **kwargs)

    return call


def check_call(
    where: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    instead: Callable[[str], str],
) -> None:
    """Raise an InputError unless the arguments are those of a signature.

    ``where``: the imported name; ``instead``: the hint for a name that is not known.
    """
    name = where.rpartition(".")[2]
    for given in kwargs:
        if given not in signature.parameters:
            raise InputError(f"{name}: unknown option {given!r}. {instead(given)}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{name}: {error}; see help({where})") from None


def suggestion(given: str, known: Sequence[str]) -> str:
    """Return the similar names, or all where none is similar.

    >>> suggestion("whynot", ["plan", "why_not"]), suggestion("x", ["plan", "why_not"])
    ('Did you mean why_not?', 'Known: plan, why_not')
    """
    return did_you_mean(given, known) or f"Known: {', '.join(known)}"
