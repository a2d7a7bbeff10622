"""Hooks of mkdocs: folders in the navigation, links out of docs/, notebooks, nothing loaded.

An entry of the navigation that ends with ``/`` stands for the pages of a folder: its ``README.md``,
then the others in the order in which that page links to them. A link such as
``../../examples/own_accelerator.toml`` is right in the repository: the site has a copy of each such
file under ``repository/``, and the link leads there. Notebooks become pages. A page that loads
something from another site fails the build.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
NOTEBOOKS: Final = "notebooks"
LOG: Final = logging.getLogger("mkdocs.plugins.shardplan")
LINK: Final = re.compile(r"(\]\()(?!https?:|mailto:|data:|#)([^)#\s]+)((?:#[^)\s]+)?\))")
LOADS: Final = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon))[^>]*"""
    r"""\bhref=["']?(?:https?:)?//[^"'\s>]+|@import\s+url\(["']?(?:https?:)?//[^)]+"""
)


def pages_of(entry: str) -> list[str]:
    """Return the pages of a folder of docs/: its README first, then as that links to them."""
    if entry.startswith(NOTEBOOKS):
        return [page_of(path) for path in notebooks()]
    folder = ROOT / "docs" / entry
    index = folder / "README.md"
    if not index.exists():
        return []
    linked = [link for _, link, _ in LINK.findall(index.read_text(encoding="utf-8"))]
    there = {path.name for path in folder.glob("*.md")} - {"README.md"}
    order = [name for name in dict.fromkeys(linked) if name in there]
    return [f"{entry}{name}" for name in ["README.md", *order, *sorted(there - set(order))]]


def expanded(entry: Any) -> Any:
    """Return an entry of the navigation with its folders as lists of pages; None: without pages."""
    if isinstance(entry, list):
        return [one for each in entry if (one := expanded(each)) is not None]
    if isinstance(entry, dict):
        return {title: found for title, part in entry.items() if (found := expanded(part))} or None
    return pages_of(entry) if entry.endswith("/") else entry


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of the folders in the navigation."""
    config.nav = expanded(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebooks, and the files outside docs/ that pages link to."""
    for path in notebooks():
        files.append(File.generated(config, page_of(path), content=notebook_markdown(path)))
    found = {
        path
        for file in files.documentation_pages()
        for _, link, _ in LINK.findall(file.content_string)
        if not (path := target_of(file.src_uri, link)).startswith(("docs/", f"{NOTEBOOKS}/"))
    }
    for path in sorted(found):
        if (ROOT / path).is_file():
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to the copies of their files."""
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        path = target_of(here, match[2])
        if not (ROOT / path).is_file():
            return match[0]
        anchor = "" if site_path(path).startswith("repository/") else match[3][:-1]
        place = posixpath.relpath(site_path(path), posixpath.dirname(here) or ".")
        return f"{match[1]}{place}{anchor})"

    return LINK.sub(moved, markdown)


def target_of(page: str, link: str) -> str:
    """Return the path in the repository to which a page of the site links."""
    folder = posixpath.dirname(page)
    place = folder if folder == NOTEBOOKS else posixpath.join("docs", folder)
    return posixpath.normpath(posixpath.join(place, link))


def site_path(path: str) -> str:
    """Return where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith(f"{NOTEBOOKS}/") and path.endswith(".ipynb"):
        return page_of(ROOT / path)
    # as text, where it would be a page or left out
    return f"repository/{path}" + (".txt" if path.endswith((".md", ".py")) else "")


def notebooks() -> list[Path]:
    """Return the notebooks in their order."""
    return sorted((ROOT / NOTEBOOKS).glob("*.ipynb"))


def page_of(notebook: Path) -> str:
    """Return the page of a notebook."""
    return f"{NOTEBOOKS}/{notebook.stem}.md"


def notebook_markdown(path: Path) -> str:
    """Return a notebook as Markdown: its texts, its code, and the outputs that it holds."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts: list[str] = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source.strip():
            parts += [f"```python\n{source}\n```", *map(_shown, cell.get("outputs", ()))]
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    """Return an output of a cell: the richest form that a page can hold."""
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
    if "image/png" in data:
        picture = data["image/png"].replace("\n", "")
        return f'<p><img alt="figure" src="data:image/png;base64,{picture}"></p>'
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:
            body = "\n".join(line for line in data[kind].splitlines() if line.strip())
            return f'<div class="output">\n{body}\n</div>'
    text = "".join(output.get("text", ())) or data.get("text/plain", "")
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Name the dialog of the search, which the theme leaves without a name."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Warn, which fails a strict build, of everything that a page would load from elsewhere."""
    for path in _built(Path(config.site_dir)):
        for load in LOADS.findall(path.read_text(encoding="utf-8")):
            LOG.warning("%s loads from elsewhere: %s", path.name, load)


def _built(site: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(site):
        yield from (Path(folder, name) for name in names if name.endswith((".html", ".css")))
