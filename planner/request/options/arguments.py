"""Python functions whose arguments are the fields of a request.

The arguments, their types and the documentation of ``planner.fit`` and ``planner.plan`` follow from
the declared options, as the options of the command line do; so does the stub
``planner/__init__.pyi``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce, wraps
from operator import or_
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from hardware_profiles.arguments import check_call, suggestion
from hardware_profiles.options import Declared, declared, named_elsewhere, read_texts, spellings

P = ParamSpec("P")
Request = TypeVar("Request")
Answer = TypeVar("Answer")


def takes(
    request: Callable[P, Request],
) -> Callable[[Callable[[Request], Answer]], Callable[P, Answer]]:
    """Turn a function of a request into one that takes the request's fields as arguments."""

    def decorate(answer: Callable[[Request], Answer]) -> Callable[P, Answer]:
        signature_of_request = cache(inspect.signature)

        @wraps(answer)
        def call(*args: P.args, **kwargs: P.kwargs) -> Answer:
            known, signature = declared(request), signature_of_request(request)
            where = f"planner.{answer.__name__}"
            check_call(where, signature, args, kwargs, lambda given: instead(given, known))
            made: Any = request(*args, **kwargs)
            return answer(replace(made, **read_texts(type(made), vars(made))))

        call.request = request  # type: ignore[attr-defined]
        return call

    return decorate


def documented(function: Any) -> Any:
    """Return a public function with the signature and the documentation of its request, if any.

    The command line needs neither, and they take time.
    """
    request = getattr(function, "request", None)
    if request is not None and not hasattr(function, "__signature__"):
        function.__signature__ = signature_of(request)
        function.__doc__ = f"{function.__doc__}{options_text(request)}"
    return function


def instead(given: str, known: Mapping[str, Declared]) -> str:
    """Return what to write instead of an argument that does not exist.

    >>> from planner.request.requests import FitRequest
    >>> instead("dp", declared(FitRequest))
    'It is data_parallel (on the command line --dp)'
    >>> instead("seqlen", declared(FitRequest))
    'Did you mean seq_len or target_seq_len?'
    """
    for name, one in known.items():
        if given in spellings(one) and one.flags:
            return f"It is {name} (on the command line {one.flags[0]})"
    for name, one in known.items():
        if one.option is None or one.option.collects is None:
            continue
        for field in declared(one.option.collects).values():
            if given in spellings(field):
                return f'It is a part of the plan: pin it with {name}="{field.short}=…"'
    own = {name: one for name, one in known.items() if one.option is not None}
    return named_elsewhere(given, own) or suggestion(given, list(own))


def signature_of(request: type) -> inspect.Signature:
    """Return the signature of a function that takes the fields of a request.

    Types are those a caller may give: whole numbers also as text (``"8k"``), no annotations of
    options.
    """
    hints = get_type_hints(request, include_extras=True)
    known = declared(request)
    parameters = [
        parameter.replace(annotation=_given_type(known[name], hints[name]))
        for name, parameter in inspect.signature(request).parameters.items()
        if known[name].option is not None
    ]
    return inspect.Signature(parameters)


def _given_type(one: Declared, hint: Any) -> Any:
    """Return the types that a caller may give a field."""
    kinds = list(_kinds(hint))
    as_text = one.option is not None and one.option.as_text
    if as_text or (one.type is int and not one.choices):
        kinds.append(str)
    if as_text and one.type is int:
        kinds.append(Sequence[int])
    kinds = [
        kind for kind in dict.fromkeys(kinds) if not (get_origin(kind) is Literal and str in kinds)
    ]
    if type(None) in kinds:
        kinds = [*(kind for kind in kinds if kind is not type(None)), None]
    return reduce(or_, kinds[1:], kinds[0])


def _kinds(hint: Any) -> list[Any]:
    """Return the members of a union without the annotations of options."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _kinds(hint.__origin__)
    if origin in (Union, types.UnionType):
        return [kind for member in get_args(hint) for kind in _kinds(member)]
    if origin is not None and origin is not Literal:
        parts = get_args(hint)
        return [origin[tuple(reduce(or_, _kinds(part)) for part in parts)]]
    return [hint]


def options_text(request: type) -> str:
    """Return the options of a request, one a line, for the documentation of a function."""
    lines = [
        f"    {name}: {one.help}"
        for name, one in declared(request).items()
        if one.option is not None and one.help
    ]
    return "\n".join(["\n\n    Options:\n", *lines, ""])
