r"""Docstrings as Markdown: formulas and tables as blocks, doctests as Python, symbols, sources.

Docstrings of this project are plain text. Indented lines and lines with columns are formulas or
tables, ``>>>`` begins an example, ``Source:`` and ``Leaves out:`` begin the origin and the limits.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

COLUMNS: Final = re.compile(r"\S {2,}\S")
PIECES: Final = re.compile(r"(``.+?``|:\w+:`[^`]+`|`[^`]+`)")
NAMED: Final = re.compile(r"\b(Units|Sources?|Leaves\s+out):\s")
LETTER: Final = r"(?:[A-Za-z]'?|dp|ep|in|out|[a-z]+_[a-z0-9]|alpha|beta|gamma|tau)"
ENTRY: Final = re.compile(rf"\(?({LETTER}(?:, {LETTER})*)\)? +(.+)")
SYMBOLS: Final = re.compile(
    r"^Symbols {2,}(.*?)(?=\s+Units\b|^\S|\Z|\n\n)", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Described:
    """A docstring in parts, in Markdown; ``formulas`` and ``examples`` are the text of blocks."""

    summary: str
    body: tuple[str, ...]  # paragraphs and blocks, in order, without the parts below
    formulas: tuple[str, ...]
    examples: tuple[str, ...]
    symbols: tuple[tuple[str, str], ...]  # letters, and their meaning
    units: str
    source: str
    leaves_out: str


def prose(text: str) -> str:
    r"""Return plain text as Markdown: names in code, signs that Markdown would read escaped.

    >>> prose("``a_b``: 2 * x of :func:`f`, see <b> [s]")
    '`a_b`: 2 \\* x of `f`, see &lt;b> [s]'
    """
    done = []
    for piece in PIECES.split(" ".join(text.split())):
        if piece.endswith("`"):
            done.append("`" + piece.strip("`").rpartition("`")[2].lstrip("~") + "`")
        else:
            words = re.sub(r"(?<!\w)\*(\w[\w ]*)\*(?!\w)", r"\1", piece)  # emphasis
            done.append(words.replace("*", r"\*").replace("<", "&lt;"))
    return "".join(done)


def symbols_of(docstring: str) -> Iterator[tuple[str, str]]:
    r"""Yield letters and meanings of a ``Symbols`` paragraph: entries apart by three blanks.

    >>> list(symbols_of("Symbols   a, k heads   c bytes, w master_bytes Units\nbytes"))
    [('a, k', 'heads'), ('c', 'bytes'), ('w', 'master_bytes')]
    """
    match = SYMBOLS.search(docstring)
    for line in match[1].splitlines() if match else ():
        for entry in re.split(
            rf" {{3,}}|(?<=[\w)\]]{{3}}), (?={LETTER} [a-z_]{{3,}})", line.strip()
        ):
            if found := ENTRY.fullmatch(entry):
                yield found[1], found[2].strip(" ,")


def paragraphs(text: str) -> Iterator[tuple[str, str]]:
    """Yield the kind of each paragraph (``example``, ``block`` or ``text``) and its lines."""
    for part in re.split(r"\n[ \t]*\n", text.strip("\n")):
        lines = part.split("\n")
        if part.lstrip().startswith(">>>"):
            yield "example", textwrap.dedent(part)
            continue
        aligned = any(COLUMNS.search(line) for line in lines)
        start = 0
        for number, line in enumerate([*lines[1:], ""], start=1):
            block = _indented(lines[start]) or aligned
            if number == len(lines) or (_indented(line) or aligned) != block:
                rows = "\n".join(lines[start:number])
                yield ("block", textwrap.dedent(rows)) if block else ("text", rows)
                start = number


def _indented(line: str) -> bool:
    return line.startswith("    ")


def describe(docstring: str) -> Described:
    """Split a docstring into its parts."""
    first, _, rest = docstring.partition("\n\n")
    if limits := NAMED.search(first):  # a summary that ends with units or a source
        first, rest = first[: limits.start()], f"{first[limits.start() :]}\n\n{rest}"
    rest = re.sub(r"^\s*Units\s+(?=\w)", "\nUnits: ", SYMBOLS.sub("", rest), flags=re.MULTILINE)
    body: list[str] = []
    blocks: dict[str, list[str]] = {"example": [], "block": []}
    named: dict[str, list[str]] = {}
    previous = ""
    for kind, part in paragraphs(rest):
        if kind != "text":
            blocks[kind].append(part)
            if kind == "block":
                part = f"```text\n{part}\n```"
                (named[previous] if previous and not _ended(named[previous]) else body).append(part)
            continue
        before, *rest_of = NAMED.split(part)
        if before.strip():
            body.append(prose(before))
        previous = ""
        for name, words in zip(rest_of[::2], rest_of[1::2], strict=True):
            previous = " ".join(name.split()).removesuffix("s")
            named.setdefault(previous, []).append(prose(words))
    words_of = {name: "\n\n".join(found) for name, found in named.items()}
    return Described(
        prose(first),
        tuple(body),
        tuple(blocks["block"]),
        tuple(blocks["example"]),
        tuple(symbols_of(docstring)),
        words_of.get("Unit", ""),
        words_of.get("Source", ""),
        words_of.get("Leaves out", ""),
    )


def symbols_in(symbol: str, words: Described) -> bool:
    """Whether a formula of a docstring uses a symbol, such as ``a, k``."""
    text = "\n".join(words.formulas) or _inline(words.summary)
    return any(re.search(rf"(?<!\w){one}(?![\w'])", text) for one in symbol.split(", "))


def _inline(summary: str) -> str:
    """Return the formula at the end of a summary, if any.

    >>> _inline("Micro-batches in flight under 1F1B: min(m, p - r)."), _inline("Bytes: a sum.")
    ('min(m, p - r).', '')
    """
    _, _, formula = summary.partition(": ")
    return formula if re.search(r"[-+/(^]|\d", formula) else ""


def _ended(words: list[str]) -> bool:
    return not words[-1].endswith(":")


def markdown(docstring: str) -> str:
    """Return a whole docstring as Markdown."""
    found = describe(docstring)
    lines = [found.summary, *found.body]
    if found.symbols:
        lines.append(
            "Symbols: " + "; ".join(f"`{one}` {prose(text)}" for one, text in found.symbols)
        )
    for title, words in (
        ("Units", found.units),
        ("Source", found.source),
        ("Leaves out", found.leaves_out),
    ):
        lines += [f"{title}: {words}"] if words else []
    lines += [f"```pycon\n{example}\n```" for example in found.examples]
    return "\n\n".join(lines)
