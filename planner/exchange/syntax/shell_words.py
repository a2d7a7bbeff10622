"""Words of a shell script: raw words with their quotes, and the operators between them.

Comments and line continuations are dropped, here-documents and redirections too. An array
assignment is one token. Words keep quotes and expansions (``shell_expansion`` resolves them).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

OPERATORS: Final = ("&&", "||", ";;", ";&", "|&", "\n", ";", "|", "&", "(", ")")
_ARRAY: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")
_HERE: Final = re.compile(r"<<(-?)\s*(['\"]?)([A-Za-z_]\w*)\2")
_REDIRECTION: Final = re.compile(r"(?:\d+|&)?(?:>>|>\||>&|<>|<<<|<&|>|<)[ \t]*")
_MARK: Final = re.compile(r"[\\'\"`(){}]")  # what the end of an expansion depends on
_CLOSING: Final = {"(": ")", "{": "}"}


@dataclass(frozen=True, slots=True)
class ShellToken:
    """A word, an operator, or an assignment of an array."""

    text: str  # raw text; of an array its name
    is_operator: bool = False
    elements: tuple[str, ...] | None = None  # raw words of an array
    appends: bool = False  # to the array


def end_of_quotes(text: str, start: int) -> int:
    """Return the position after the quoted string that starts there.

    >>> end_of_quotes('"a $(echo ")") b" c', 0)
    17
    """
    quote, at = text[start], start + 1
    while at < len(text) and text[at] != quote:
        if quote != "'" and text[at] == "\\":
            at += 2
        elif quote == '"' and text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = end_of_expansion(text, at)
        else:
            at += 1
    return min(at + 1, len(text))


def end_of_expansion(text: str, start: int) -> int:
    """Return the position after the ``${...}`` or ``$(...)`` that starts there."""
    opening = text[start + 1]
    closing, depth, at = _CLOSING[opening], 1, start + 2
    if text.find(closing, at) < 0:  # as the loop finds, mark by mark
        return len(text)
    while depth:
        mark = _MARK.search(text, at)
        if mark is None:
            return len(text)
        char, at = mark[0], mark.start()
        if char == "\\":
            at += 2
        elif char in "'\"`":
            at = end_of_quotes(text, at)
        else:
            depth += (char == opening) - (char == closing)
            at += 1
    return min(at, len(text))


def end_of_word(text: str, start: int, stop: str = " \t\n;|&()<>") -> int:
    """Return the position after the word that starts there."""
    at = start
    while at < len(text) and text[at] not in stop:
        if text[at] == "\\":
            at += 2
        elif text[at] in "'\"`":
            at = end_of_quotes(text, at)
        elif text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at = end_of_expansion(text, at)
        else:
            at += 1
    return min(at, len(text))


def tokens(text: str) -> list[ShellToken]:
    r"""Return the tokens of a script.

    >>> [t.text for t in tokens("A=1 # one\ntorchrun x.py --a $A > log | tee b")]
    ['A=1', '\n', 'torchrun', 'x.py', '--a', '$A', '|', 'tee', 'b']
    """
    found, at = list[ShellToken](), 0
    text = text.replace("\r\n", "\n")
    here = list[tuple[str, bool]]()  # terminators of here-documents that start on this line
    while at < len(text):
        if text.startswith("\\\n", at):
            at += 2
        elif text[at] in " \t":
            at += 1
        elif text[at] == "#":
            at = _line_end(text, at)
        elif text[at] == "\n" and here:
            found.append(ShellToken("\n", is_operator=True))
            at = _after_here_documents(text, at + 1, here)
            here = []
        elif (match := _HERE.match(text, at)) is not None:
            here.append((match[3], match[1] == "-"))
            at = match.end()
        elif text.startswith("[[", at) and text[at + 2 : at + 3] in (" ", "\t"):
            at = _conditional(text, at, found)
        elif (match := _REDIRECTION.match(text, at)) is not None:
            at = end_of_word(text, match.end())
        elif (match := _ARRAY.match(text, at)) is not None:
            words, at = _array(text, match.end())
            found.append(ShellToken(match[1], elements=words, appends=match[2] == "+"))
        elif operator := next((o for o in OPERATORS if text.startswith(o, at)), ""):
            found.append(ShellToken(operator, is_operator=True))
            at += len(operator)
        else:
            end = max(end_of_word(text, at), at + 1)
            found.append(ShellToken(text[at:end]))
            at = end
    return found


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _after_here_documents(text: str, at: int, terminators: list[tuple[str, bool]]) -> int:
    for terminator, strips_tabs in terminators:
        while at < len(text):
            end = _line_end(text, at)
            line = text[at:end]
            at = min(end + 1, len(text))
            if (line.lstrip("\t") if strips_tabs else line) == terminator:
                break
    return at


def _conditional(text: str, at: int, found: list[ShellToken]) -> int:
    """Add ``[[ ... ]]`` as words, its operators included; return the position after it."""
    while at < len(text):
        if text[at] in " \t\n":
            at += 1
            continue
        operators = ("]]", "&&", "||", "(", ")", "<", ">")
        operator = next((each for each in operators if text.startswith(each, at)), "")
        end = at + len(operator) if operator else max(end_of_word(text, at, " \t\n()"), at + 1)
        found.append(ShellToken(text[at:end]))
        at = end
        if found[-1].text == "]]":
            break
    return at


def _array(text: str, at: int) -> tuple[tuple[str, ...], int]:
    """Return the raw words of an array, and the position after its closing parenthesis."""
    words = list[str]()
    while at < len(text) and text[at] != ")":
        if text.startswith("\\\n", at):
            at += 2
        elif text[at] in " \t\n":
            at += 1
        elif text[at] == "#":
            at = _line_end(text, at)
        else:
            end = max(end_of_word(text, at, " \t\n)"), at + 1)
            words.append(text[at:end])
            at = end
    return tuple(words), at + 1
