"""Changes of one flag in the text of a shell script: literals, variables, defaults of variables.

A flag is looked for wherever it stands: in a command, an array or a string of flags.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any, Final

from planner.exchange.edits.changes import REMOVED, Parse, line_around
from planner.exchange.syntax.flags import ENVIRONMENT

MOST_ANCHORS: Final = 60  # places that are tried for a new flag
COMMON_WORDS: Final = frozenset(("use", "no", "num", "size", "model"))  # of flags of all kinds
MAX_DEPTH: Final = 4  # of variables that stand for variables
# a word in quotes, or one without: a quote behind it ends the string of flags that it is in
_QUOTED: Final = r"\"(?:\\.|[^\"\\\n])*\"|'[^'\n]*'"
_PIECE: Final = r"\$\(\([^\n]*?\)\)|\$\{[^}\n]*\}|\$\w+|[^\s\"'\\;|&()$`]"
_WORD: Final = re.compile(rf"(?:{_QUOTED}|(?:{_PIECE})+)")
_FLAG: Final = re.compile(r"(?<![\w$./-])--?[A-Za-z][\w.-]*")
_REFERENCE: Final = re.compile(r"\$\{?(?P<name>[A-Za-z_]\w*)")
_DEFAULT: Final = re.compile(r"(?P<before>\$\{\w+:?[-=])(?P<value>[^}$]*)\}")
_EXPORT: Final = re.compile(r"(?m)^[ \t]*export[ \t]+(?P<name>\w+)=(?P<value>\S*)[^\n]*\n?")


def with_exports(parse: Parse) -> Parse:
    """Return a function that reads a script's flags and the variables that it exports."""

    def read(text: str) -> dict[str, Any]:
        exported = {match["name"]: _default(match["value"]) for match in _EXPORT.finditer(text)}
        document = dict(parse(text))
        plain = {k: int(v) if v.isdigit() else v for k, v in exported.items()}
        return {**document, ENVIRONMENT: plain} if plain else document

    return read


def _default(word: str) -> str:
    """Return the value of a word, of ``${NAME:-default}`` its default."""
    match = re.fullmatch(r"\$\{\w+:?[-=](?P<value>[^}$]*)\}", word.strip("\"'"))
    return (word if match is None else match["value"]).strip("\"'")


def edit_shell(text: str, path: str, value: Any) -> Iterator[str]:
    r"""Yield texts in which a flag may have a value, or be gone.

    >>> next(edit_shell("TP=${TP:-2}\nrun a.py --tp $TP --b", "tp", 4))
    'TP=${TP:-4}\nrun a.py --tp $TP --b'
    >>> next(edit_shell("A=(\n  --tp 2\n  --b\n)", "tp-comm", True))
    'A=(\n  --tp 2\n  --tp-comm\n  --b\n)'
    """
    section, _, name = path.rpartition(".")
    if section == ENVIRONMENT:
        yield from _variable(text, name, value)
        return
    pattern = re.escape(name).replace(r"\-", "[-_]")
    every = re.finditer(rf"(?<![\w$./-])--?{pattern}(?![\w.-])", text)
    places = [found for found in every if not _is_comment(text, found.start())]
    for found in reversed(places):
        if value is REMOVED or value is False:
            yield from _without(text, found)
        else:
            yield from _with_value(text, found, value)
    if not places and value is not REMOVED:
        yield from _added(text, name, value)


def _is_comment(text: str, at: int) -> bool:
    start = text.rfind("\n", 0, at) + 1
    return re.search(r"(?:^|\s)#", text[start:at]) is not None


def _value_of(text: str, at: int) -> list[tuple[int, int]]:
    """Return where the words of a flag's value stand, which may go on on the next line."""
    found = list[tuple[int, int]]()
    if text[at : at + 1] == "=":
        match = _WORD.match(text, at + 1)
        return [] if match is None else [match.span()]
    while (space := re.compile(r"[ \t]+|[ \t]*\\\n[ \t]*").match(text, at)) is not None:
        match = _WORD.match(text, space.end())
        if match is None or _FLAG.match(text, match.start()) or match[0].startswith("#"):
            break
        found.append(match.span())
        at = match.end()
    return found


def _words(value: Any) -> str:
    each = value if isinstance(value, list) else [value]
    return " ".join(shlex.quote(str(one)) for one in each)


def _with_value(text: str, flag: re.Match[str], value: Any) -> Iterator[str]:
    spans = _value_of(text, flag.end())
    if value is True:
        for start, end in reversed(spans):
            text = text[:start].rstrip(" ") + text[end:]
        yield text
        return
    if not spans:
        yield f"{text[: flag.end()]} {_words(value)}{text[flag.end() :]}"
        return
    start, end = spans[0]
    if not isinstance(value, list):
        yield from _through(text, start, end, _words(value))
        yield text[:start] + _words(value) + text[end:]
    yield text[:start] + _words(value) + text[spans[-1][1] :]


def _through(text: str, start: int, end: int, new: str, depth: int = 0) -> Iterator[str]:
    """Yield texts with another value of what stands there: a default, or a variable elsewhere."""
    word = text[start:end]
    for name in dict.fromkeys(m["name"] for m in _REFERENCE.finditer(word)):
        if depth >= MAX_DEPTH:
            break
        pattern = re.compile(rf"(?:^|(?<=[\s;]))(?:export[ \t]+)?{name}=(?P<value>{_WORD.pattern})")
        for found in reversed(list(pattern.finditer(text))):
            if _is_comment(text, found.start()):
                continue
            span = found.span("value")
            if _REFERENCE.search(found["value"]):
                yield from _through(text, *span, new, depth + 1)
            else:
                yield text[: span[0]] + _quoted(found["value"], new) + text[span[1] :]
    if (default := _DEFAULT.search(word)) is not None:
        inner = word[: default.start("value")] + new + word[default.end("value") :]
        yield text[:start] + inner + text[end:]


def _quoted(old: str, new: str) -> str:
    return f"{old[0]}{new}{old[0]}" if old[:1] in "\"'" and old[-1:] == old[:1] else new


def _without(text: str, flag: re.Match[str]) -> Iterator[str]:
    """Yield texts without a flag; a line that held nothing else goes with it."""
    spans = _value_of(text, flag.end())
    ends = [spans[-1][1]] if spans else []
    for end in (*ends, flag.end()):
        first, after = line_around(text, flag.start())
        if end > after:
            after = line_around(text, end)[1]
        rest = text[first : flag.start()] + text[end:after]
        if rest.strip(" \t\n\\"):
            yield text[: flag.start()].rstrip(" \t") + text[end:]
            yield text[: flag.start()] + text[end:].lstrip(" \t")
            continue
        if "\\" not in rest and text[:first].endswith("\\\n"):  # it was the command's last line
            yield text[: first - 2].rstrip(" \t") + "\n" + text[after:]
        yield text[:first] + text[after:]


def _added(text: str, name: str, value: Any) -> Iterator[str]:
    """Yield texts with a new flag behind one that is there, the most alike first."""
    new = f"--{name}" if value is True else f"--{name} {_words(value)}"
    parts = set(name.split("-")) - COMMON_WORDS
    anchors = [one for one in _FLAG.finditer(text) if not _is_comment(text, one.start())]

    def alike(one: re.Match[str]) -> tuple[int, bool, bool]:
        found = one[0].lstrip("-").replace("_", "-").split("-")
        return -len(parts & set(found)), "parallel" not in found, not _alone(text, one)[0]

    for anchor in sorted(anchors, key=alike)[:MOST_ANCHORS]:
        alone, end, spans = _alone(text, anchor)
        first, after = line_around(text, anchor.start())
        before, behind = text[first : anchor.start()], text[end:after]
        if alone:
            last = "" if text[:after].endswith("\n") else "\n"
            yield f"{text[:after]}{last}{before}{new}{behind}{text[after:]}"
        yield f"{text[:end]} {new}{text[end:]}"
        for _, one in spans[:1]:
            yield f"{text[:one]} {new}{text[one:]}"


def _alone(text: str, flag: re.Match[str]) -> tuple[bool, int, list[tuple[int, int]]]:
    """Return whether a flag has a line of its own, its end, and where its value stands."""
    spans = _value_of(text, flag.end())
    end = spans[-1][1] if spans else flag.end()
    first, after = line_around(text, flag.start())
    is_first = not text[first : flag.start()].strip()
    return is_first and end <= after and text[end:after].strip() in ("", "\\"), end, spans


def _variable(text: str, name: str, value: Any) -> Iterator[str]:
    """Yield the text with an exported variable, or without it."""
    found = next((one for one in _EXPORT.finditer(text) if one["name"] == name), None)
    if value is REMOVED:
        if found is not None:
            yield text[: found.start()] + text[found.end() :]
    elif found is not None:
        yield text[: found.start("value")] + str(value) + text[found.end("value") :]
    else:
        lines = text.splitlines(keepends=True)
        at = next((n for n, line in enumerate(lines) if line.strip() and line[0] != "#"), 0)
        yield "".join([*lines[:at], f"export {name}={value}\n", *lines[at:]])
