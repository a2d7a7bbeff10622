"""HTML without scripts: one style for screens of every width, dark ones, paper and notebooks.

Text becomes part of a page through ``element`` alone, which escapes whatever is not ``Html``.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Final

from hardware_profiles.message import escaped

# of pages and of answers in notebooks: selectors, and what is declared for them
RULES: Final = (
    ("svg", "max-width:100%;height:auto"),
    (".scroll", "overflow-x:auto"),
    (".scroll svg", "min-width:600px"),
    ("table", "border-collapse:collapse"),
    (".scroll td,.scroll th", "overflow-wrap:normal"),
    ("td,th", "padding:.25em .8em .25em 0;text-align:left;vertical-align:top"),
    ("td:first-child", "text-align:right;white-space:nowrap"),
    ("tr", "border-top:1px solid var(--line)"),
    ("table.named td:first-child", "text-align:left;white-space:normal"),
    ("td.short", "white-space:nowrap"),
    ("pre", "white-space:pre-wrap;background:var(--panel);padding:1em;font-size:13px"),
    (".verdict", "font-size:1.1em"),
    (".note", "color:var(--soft)"),
    (".bar", "display:grid;grid-template-columns:1fr auto;column-gap:1em;margin:.5em 0"),
    (".bar .fill", "grid-column:1/3;height:.7em;background:var(--panel)"),
    (".bar .fill i", "display:block;height:100%;background:#0072b2"),
    (".bar small", "grid-column:1/3;color:var(--soft)"),
)


def rules(scope: str = "") -> str:
    """Return the rules for everything, or for what is inside elements of a class.

    >>> rules(".answer ")[:48]
    '.answer svg{max-width:100%;height:auto}.answer .'
    """
    return "".join(
        ",".join(f"{scope}{one}" for one in selectors.split(",")) + f"{{{declared}}}"
        for selectors, declared in RULES
    )


STYLE: Final = (
    ":root{color-scheme:light dark;--ink:#222;--soft:#555;--ground:#fff;--line:#ddd;"
    "--panel:#f5f5f5;--alarm:#b00000;--good:#00704a}"
    "@media screen and (prefers-color-scheme:dark){:root{--ink:#e8e8e8;--soft:#b5b5b5;"
    "--ground:#161616;--line:#3d3d3d;--panel:#242424;--alarm:#ff8080;--good:#5fd3a6}}"
    "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--ground);"
    "max-width:940px;margin:2em auto;padding:0 1em;overflow-wrap:anywhere}"
    "h1{font-size:1.3em}h2{font-size:1.05em;margin-top:2em}"
    ".fits b{color:var(--good)}.does_not_fit b,.tight b{color:var(--alarm)}" + rules() + "@media "
    "print{body{font-size:11pt;max-width:none;margin:0}.scroll{overflow:visible}"
    ".scroll svg{min-width:0}h2{break-after:avoid}svg,tr,.bar{break-inside:avoid}"
    "*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}"
)

SHORT: Final = 14  # characters of a cell that stays in one line


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(text: str) -> str:
    r"""Return a text as it stands in a page and in its attributes, without control characters.

    >>> escape('a < "b"\x1b')
    'a &lt; &quot;b&quot;\\u001b'
    """
    return html.escape(escaped(text))


def element(name: str, *inside: str, css: str = "", style: str = "") -> Html:
    """Return an element; what is inside is escaped unless it is HTML.

    >>> element("p", "a < b ", element("b", "c"), css="note")
    '<p class="note">a &lt; b <b>c</b></p>'
    """
    classes = f' class="{escape(css)}"' if css else ""
    styled = f' style="{escape(style)}"' if style else ""
    return Html(f"<{name}{classes}{styled}>{joined(inside)}</{name}>")


def note(words: str) -> Html:
    """Return a paragraph in a softer colour."""
    return element("p", words, css="note")


def joined(parts: Iterable[str]) -> Html:
    """Return parts of a page one after another, escaped unless they are HTML."""
    return Html("".join(p if isinstance(p, Html) else escape(p) for p in parts))


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = (), css: str = "named") -> Html:
    """Return a table, which scrolls on narrow screens."""
    lines = [element("tr", *(element("th", cell) for cell in head))] if head else []
    lines += [element("tr", *(_cell(cell) for cell in row)) for row in rows]
    return scrolling(element("table", *lines, css=css))


def scrolling(wide: Html) -> Html:
    """Return a part that scrolls on narrow screens, by keyboard, too."""
    return Html(f'<div class="scroll" tabindex="0">{wide}</div>')


def _cell(text: str) -> Html:
    return element("td", text, css="short" if len(text) <= SHORT else "")


def listed(items: Iterable[str]) -> Html:
    """Return a list."""
    return element("ul", *(element("li", item) for item in items))


def bar(name: str, value: str, share: float, words: str = "") -> Html:
    """Return a horizontal bar: its name, its value, and what it means."""
    percent = 100.0 * min(1.0, max(0.0, share))
    filled = element("span", element("i", style=f"width:{percent:.2f}%"), css="fill")
    below = [element("small", words)] if words else []
    return element("div", element("span", name), element("span", value), filled, *below, css="bar")


def page(title: str, *body: str) -> str:
    """Return a whole page; the title is its first heading, too."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"{element('main', element('h1', title), *body)}</body></html>\n"
    )
