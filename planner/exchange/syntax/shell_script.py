"""The commands that a shell script would run, with variables, arrays and conditions resolved.

The script is not run. Branches are taken as their tests say: files exist, commands succeed,
positional parameters are empty; a loop's body is read once, with the first value.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from planner.exchange.syntax.shell_expansion import Variables, expand, expand_to_text
from planner.exchange.syntax.shell_words import ShellToken, tokens

MAX_SCRIPTS: Final = 20  # of eval and bash -c inside each other
MAX_COMMANDS: Final = 5_000
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DECLARING: Final = frozenset(("export", "declare", "local", "readonly", "typeset"))
_FILE_TESTS: Final = frozenset(("-f", "-d", "-e", "-r", "-x", "-s", "-w"))
_NUMBERS: Final = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


@dataclass
class Script:
    """What a script would run, and what could not be resolved."""

    commands: list[list[str]] = field(default_factory=list)
    variables: Variables = field(default_factory=Variables)
    functions: dict[str, list[ShellToken]] = field(default_factory=dict)
    depth: int = 0


def read_script(text: str) -> Script:
    r"""Return the commands of a script.

    >>> read_script('N=${N:-2}\nA=(--x $N)\n[ $N = 2 ] && A+=(--y)\nrun "${A[@]}"').commands
    [['run', '--x', '2', '--y']]
    """
    script = Script()
    _Reader(tokens(text), script).block(())
    return script


class _Reader:
    """Reads tokens one statement at a time."""

    def __init__(self, found: list[ShellToken], script: Script):
        self.tokens, self.script, self.at = found, script, 0

    def word(self) -> str:
        """Return the text of the next token; "" at the end."""
        if self.at >= len(self.tokens):
            return ""
        token = self.tokens[self.at]
        return token.text if token.elements is None else f"{token.text}=("

    def skip(self, *texts: str) -> bool:
        """Pass the next token if it is one of these."""
        if self.at < len(self.tokens) and self.word() in texts:
            self.at += 1
            return True
        return False

    def block(self, ends: tuple[str, ...], *, runs: bool = True) -> bool:
        """Read statements up to one of the words ``ends``; return the last one's success."""
        succeeded = True
        while self.at < len(self.tokens) and len(self.script.commands) < MAX_COMMANDS:
            if self.word() in ends:
                break
            if self.tokens[self.at].is_operator and self.word() not in ("(", ")"):
                self.at += 1
                continue
            before = self.at
            succeeded = self.chain(runs=runs)
            if self.at == before:
                self.at += 1
        return succeeded

    def chain(self, *, runs: bool) -> bool:
        """Read commands that are joined by ``&&`` and ``||``."""
        succeeded = self.command(runs=runs)
        while self.word() in ("&&", "||") and self.tokens[self.at].is_operator:
            wanted = self.word() == "&&"
            self.at += 1
            while self.skip("\n"):
                pass
            if succeeded is wanted:
                succeeded = self.command(runs=runs)
            else:
                self.command(runs=False)
        return succeeded

    def command(self, *, runs: bool) -> bool:
        """Read one command or compound command; return whether it succeeds."""
        word = self.word()
        if word == "if":
            return self.condition(runs=runs)
        if word == "case":
            return self.case(runs=runs)
        if word in ("for", "while", "until", "select"):
            return self.loop(runs=runs)
        if word in ("{", "("):
            self.at += 1
            succeeded = self.block(("}", ")"), runs=runs)
            self.skip("}", ")")
            return succeeded
        if word == "!":
            self.at += 1
            return not self.command(runs=runs)
        if word == "function" or self.defines_function():
            return self.function()
        return self.simple(runs=runs)

    def condition(self, *, runs: bool) -> bool:
        """Read ``if`` to ``fi``; the first branch whose test holds is run."""
        taken = False
        while self.skip("if", "elif"):
            holds = self.block(("then",), runs=runs and not taken)
            self.skip("then")
            self.block(("elif", "else", "fi"), runs=runs and holds and not taken)
            taken = taken or holds
        if self.skip("else"):
            self.block(("fi",), runs=runs and not taken)
        self.skip("fi")
        return True

    def case(self, *, runs: bool) -> bool:
        """Read ``case`` to ``esac``; the first branch that matches is run."""
        self.at += 1
        value = expand_to_text(self.word(), self.script.variables)
        self.at += 1
        self.skip("in")
        taken = False
        while self.at < len(self.tokens) and self.word() != "esac":
            if self.skip("\n", ";", "(", ";;", ";&"):
                continue
            patterns = list[str]()
            while self.at < len(self.tokens) and not self.skip(")"):
                patterns.append(expand_to_text(self.word(), self.script.variables))
                self.at += 1
            matches = any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns)
            self.block((";;", ";&", "esac"), runs=runs and matches and not taken)
            taken = taken or matches
        self.skip("esac")
        return True

    def loop(self, *, runs: bool) -> bool:
        """Read a loop to ``done``; its body is run once at most."""
        kind = self.word()
        self.at += 1
        holds = True
        if kind in ("for", "select"):
            name = self.word()
            values = list[str]()
            while self.at < len(self.tokens) and self.word() != "do":
                if (token := self.tokens[self.at]) and not token.is_operator:
                    values += expand(token.text, self.script.variables)
                self.at += 1
            values = values[2:] if values[1:2] == ["in"] else []
            holds = bool(values)
            if runs and values and name.isidentifier():
                self.script.variables.assign(name, values[0])
        else:
            holds = self.block(("do",), runs=runs) is (kind == "while")
        self.skip("do")
        self.block(("done",), runs=runs and holds)
        self.skip("done")
        return True

    def defines_function(self) -> bool:
        """Whether ``name()`` comes next."""
        texts = [token.text for token in self.tokens[self.at + 1 : self.at + 3]]
        return texts == ["(", ")"] and self.word().isidentifier()

    def function(self) -> bool:
        """Keep the body of a function for its calls."""
        self.skip("function")
        name = self.word()
        self.at += 1
        while self.skip("(", ")", "\n"):
            pass
        start = self.at
        self.skip("{")
        self.block(("}",), runs=False)
        self.skip("}")
        self.script.functions[name] = self.tokens[start : self.at]
        return True

    def simple(self, *, runs: bool) -> bool:
        """Read a command up to the next separator, and keep or evaluate it."""
        start = self.at
        in_test = self.word() == "[["
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.is_operator and not in_test:
                break
            self.at += 1
            if token.text == "]]":
                break
        parts = self.tokens[start : self.at]
        if not runs or not parts:
            return True
        if parts[0].text in ("[[", "[", "test"):
            return self.test([part.text for part in parts[1:]])
        return self.run(parts)

    def run(self, parts: list[ShellToken]) -> bool:
        """Carry out assignments; keep other commands."""
        variables, words = self.script.variables, list[str]()
        declares = parts[0].text in _DECLARING
        for part in parts[1:] if declares else parts:
            if part.elements is not None:
                before = variables.arrays.get(part.text, []) if part.appends else []
                added = [word for raw in part.elements for word in expand(raw, variables)]
                variables.values.pop(part.text, None)
                variables.arrays[part.text] = [*before, *added]
            elif not words and (match := _ASSIGNMENT.fullmatch(part.text)) is not None:
                value = expand_to_text(match[3], variables)
                variables.assign(match[1], value, appends=match[2] == "+")
            elif not declares:
                words += expand(part.text, variables)
        if words:
            self.call(words)
        return words != ["false"]

    def call(self, words: list[str]) -> None:
        """Keep a command; read the scripts that ``eval`` and ``bash -c`` are given."""
        script = self.script
        inner: list[ShellToken] | None = None
        if words[0] in script.functions:
            inner = script.functions[words[0]]
        elif words[0] == "eval":
            inner = tokens(" ".join(words[1:]))
        else:
            for shell, option, text in zip(words, words[1:], words[2:], strict=False):
                if shell.split("/")[-1] in ("bash", "sh") and re.fullmatch(r"-[a-z]*c", option):
                    inner = tokens(text)
                    break
        script.commands.append(words)
        if inner is not None and script.depth < MAX_SCRIPTS:
            script.depth += 1
            _Reader(inner, script).block(())
            script.depth -= 1

    def test(self, raw: list[str]) -> bool:
        """Return whether a test holds."""
        words = [
            w if w in ("&&", "||", "(", ")") else expand_to_text(w, self.script.variables)
            for w in raw
            if w not in ("]", "]]")
        ]
        return _either(iter([{"&&": "-a", "||": "-o"}.get(word, word) for word in words]))


def _either(words: Iterator[str]) -> bool:
    """Return whether a test of parts joined by ``-o`` and ``-a`` holds."""
    parts: list[list[list[str]]] = [[[]]]
    for word in words:
        if word == "-o":
            parts.append([[]])
        elif word == "-a":
            parts[-1].append([])
        elif word not in ("(", ")"):
            parts[-1][-1].append(word)
    return any(all(_holds(part) for part in each) for each in parts)


def _holds(words: list[str]) -> bool:
    if words[:1] == ["!"]:
        return not _holds(words[1:])
    if len(words) == 2 and words[0] in _FILE_TESTS:
        return True
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") is (words[0] == "-z")
    if len(words) == 2 and words[0] == "-v":
        return False
    if len(words) == 3 and words[1] in ("=", "==", "!="):
        return fnmatch.fnmatchcase(words[0], words[2]) is (words[1] != "!=")
    if len(words) == 3 and words[1] == "=~":
        return _found(words[2], words[0])
    if len(words) == 3 and words[1] in _NUMBERS:
        numbers = [int(w) if re.fullmatch(r"-?\d{1,18}", w) else 0 for w in (words[0], words[2])]
        return bool(_NUMBERS[words[1]](*numbers))
    return any(words)


def _found(pattern: str, text: str) -> bool:
    """Whether a plain pattern is in a text; patterns with repetition are not matched."""
    if len(text) > 1000 or len(pattern) > 200 or re.search(r"[*+{]", pattern):
        return False
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return False
