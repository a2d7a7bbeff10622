"""Assumptions in one line, without their reasons."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from planner.text.paragraphs import labelled, labelled_line

READ_AS: Final = re.compile(r"^(.*?) is taken as (.*?)(?::|;|$)")
SEARCHED: Final = re.compile(r"^plan .*\(searched: ")
PRICED: Final = re.compile(r"^\S+ (\$\S+ an hour) \((?!given)")
DEFAULT: Final = re.compile(r"^(\w+) (\S+) \(default")
# defaults that change the answer most, and their names; others are shown with --verbose only
SHOWN: Final = {
    "global_batch_size": "global batch {}",
    "concurrency": "{} at once",
    "seq_len": "{} tokens",
    "context_len": "{} tokens",
    "prompt_len": "prompts of {}",
    "precision": "{}",
    "optimizer": "{}",
    "weight_precision": "{} weights",
    "micro_batch_size": "micro-batch {}",
}
MORE: Final = " (-v: all)"


def assumed_line(assumptions: Sequence[str]) -> list[str]:
    """Return the assumptions that matter most in one line: names that were completed, defaults."""
    read, prices, defaults, others = [], [], {}, []
    for text in assumptions:
        if name := READ_AS.match(text):
            read.append(f"{name[1]} = {name[2]}")
        elif price := PRICED.match(text):
            prices.append(price[1])
        elif SEARCHED.match(text):
            others.append("a plan found by search")
        elif default := DEFAULT.match(text):
            if default[1] in SHOWN:
                value = f"{int(default[2]):,}" if default[2].isdigit() else default[2]
                defaults[default[1]] = SHOWN[default[1]].format(value)
        elif "(default" not in text:
            others.append(re.split(r"[:;(]", text)[0].strip())
    ordered = [defaults[name] for name in SHOWN if name in defaults]
    # of several clusters the table shows the dollars, -v the prices
    parts = [*read, *(prices if len(prices) == 1 else ()), *ordered, *others]
    return [labelled_line("Assumed", parts, MORE)] if parts else []


def assumed(assumptions: Sequence[str], *, verbose: bool) -> list[str]:
    """Return the assumptions in one line, or each with its reason below the other."""
    if not verbose:
        return assumed_line(assumptions)
    lines: list[str] = []
    for number, text in enumerate(assumptions):
        lines += labelled("Assumed" if number == 0 else "", text)
    return lines
