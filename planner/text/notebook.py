"""An answer as a part of a notebook: self-contained HTML without scripts.

A notebook has its own colours, light or dark, which a page inside it does not know: text takes the
notebook's colour, lines and grounds are grey and half transparent, and verdicts have grounds of
their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from planner.text.html_page import Html, element, escape, rules

CLASS: Final = "shardplan"
SCOPE: Final = f".{CLASS} "
STYLE: Final = (
    f".{CLASS}{{--ink:currentColor;--soft:color-mix(in srgb,currentColor 75%,transparent);"
    "--ground:transparent;--line:rgba(128,128,128,.4);--panel:rgba(128,128,128,.16);"
    "--alarm:#d33a2c;max-width:940px;line-height:1.45;overflow-wrap:anywhere}"
    + rules(SCOPE)
    + f"{SCOPE}.judged b{{color:#fff;background:#b00000;padding:.1em .5em;border-radius:.2em}}"
    f"{SCOPE}.fits b{{background:#00704a}}{SCOPE}.tight b{{background:#8a5200}}"
    f"{SCOPE}pre{{margin:.5em 0}}{SCOPE}p{{margin:.5em 0}}"
    f"{SCOPE}table{{font-size:13px;margin:.5em 0}}{SCOPE}tr{{background:none}}"
    f"{SCOPE}summary{{cursor:pointer}}{SCOPE}.bar{{max-width:640px}}"
)
PAGE_HEIGHT: Final = "min(80vh,900px)"


def notebook_html(parts: Iterable[str], text: str) -> str:
    """Return an answer: its parts, and its whole text, which is folded where there are parts."""
    shown = list(parts)
    whole = element("pre", text)
    if shown:
        whole = element("details", element("summary", "As text"), whole)
    return element("div", Html(f"<style>{STYLE}</style>"), *shown, whole, css=CLASS)


def framed(page: str, title: str) -> str:
    """Return a whole page in a frame, whose style does not reach the notebook around it."""
    return (
        f'<iframe sandbox="" title="{escape(title)}" srcdoc="{escape(page)}" '
        f'style="width:100%;height:{PAGE_HEIGHT};border:1px solid rgba(128,128,128,.4)"></iframe>'
    )


def headline(strong: str, words: str, verdict: str = "") -> Html:
    """Return the first sentence of an answer; ``verdict``: fits, tight or does_not_fit."""
    css = f"verdict judged {verdict}" if verdict else "verdict"
    return element("p", element("b", strong), f" {words}", css=css)
