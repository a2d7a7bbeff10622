"""Hooks of mkdocs: folders in the navigation, links out of docs/, nothing loaded from elsewhere.

An entry of the navigation that ends with ``/`` stands for the pages of a folder: its ``README.md``,
then the others in the order in which that page links to them. A link such as
``../../examples/own_accelerator.toml`` is right in the repository. The site has a copy of each such
file under ``repository/``, and the link leads there.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
LOG: Final = logging.getLogger("mkdocs.plugins.shardplan")
LINK: Final = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)((?:#[^)\s]+)?\))")
LOADS: Final = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon))[^>]*"""
    r"""\bhref=["']?(?:https?:)?//[^"'\s>]+|@import\s+url\(["']?(?:https?:)?//[^)]+"""
)


def pages_of(folder: Path) -> list[str]:
    """Return the pages of a folder of docs/: its README first, then as that links to them."""
    index = folder / "README.md"
    if not index.exists():
        return []
    linked = [link for _, link, _ in LINK.findall(index.read_text(encoding="utf-8"))]
    there = {path.name for path in folder.glob("*.md")} - {"README.md"}
    order = [name for name in dict.fromkeys(linked) if name in there]
    names = ["README.md", *order, *sorted(there - set(order))]
    return [f"{folder.relative_to(ROOT / 'docs')}/{name}" for name in names]


def expanded(entry: Any) -> Any:
    """Return an entry of the navigation with its folders as lists of pages; None: without pages."""
    if isinstance(entry, list):
        return [one for each in entry if (one := expanded(each)) is not None]
    if isinstance(entry, dict):
        return {title: found for title, part in entry.items() if (found := expanded(part))} or None
    return pages_of(ROOT / "docs" / entry) if entry.endswith("/") else entry


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of the folders in the navigation."""
    config.nav = expanded(config.nav)
    return config


def outside(page: str, link: str) -> str | None:
    """Return the path in the repository that a page of docs/ links to, where it is not in docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") or path == "docs" else path


def copy_of(path: str) -> str:
    """Return where the site has a file: as text, where it would be a page or left out."""
    return f"repository/{path}" + (".txt" if path.endswith((".md", ".py")) else "")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages link to."""
    found = {
        path
        for file in files.documentation_pages()
        for _, link, _ in LINK.findall(file.content_string)
        if (path := outside(file.src_uri, link))
    }
    for path in sorted(found):
        if (ROOT / path).is_file():
            files.append(File.generated(config, copy_of(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to the copies of their files."""
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        path = outside(here, match[2])
        if path is None or not (ROOT / path).is_file():
            return match[0]
        return match[1] + posixpath.relpath(copy_of(path), posixpath.dirname(here) or ".") + ")"

    return LINK.sub(moved, markdown)


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Warn, which fails a strict build, of everything that a page would load from elsewhere."""
    for folder, _folders, names in os.walk(config.site_dir):
        for name in names:
            if name.endswith((".html", ".css")):
                path = Path(folder, name)
                for load in LOADS.findall(path.read_text(encoding="utf-8")):
                    LOG.warning("%s loads from elsewhere: %s", path.name, load)
