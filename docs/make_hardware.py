"""Makes docs/reference/hardware/, the catalogue of accelerators and nodes: --write, or --check.

The figures are those of ``hardware_profiles/cluster/data``: a page for each vendor, one for nodes.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

DOCS: Final = Path(__file__).parent
ROOT: Final = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

from docstrings import prose  # noqa: E402
from generated import write_or_compare  # noqa: E402

from hardware_profiles.cluster.catalogue import accelerators, nodes  # noqa: E402
from hardware_profiles.cluster.catalogue_files import FOLDER  # noqa: E402
from hardware_profiles.cluster.schema import (  # noqa: E402
    PRECISIONS,
    Accelerator,
    Figure,
    Node,
)

PLACE: Final = DOCS / "reference" / "hardware"
# families of data/accelerators by vendor, in the order of the pages
VENDORS: Final[Mapping[str, tuple[str, ...]]] = {
    "NVIDIA": ("blackwell", "hopper", "ada", "ampere", "turing", "volta", "pascal"),
    "AMD": ("cdna", "rdna"),
    "Google": ("tpu",),
    "Amazon": ("trainium",),
    "Intel": ("gaudi", "arc"),
    "Huawei": ("ascend",),
    "Others": ("china",),
}
GB: Final = 1e9
TFLOP: Final = 1e12
HEAD: Final = """# Hardware catalogue

The accelerators and servers that shardplan knows by name, made of the files in
`hardware_profiles/cluster/data` (`python docs/make_hardware.py --write`). In a terminal: `shardplan
hardware`, `shardplan hardware H100`. A card or server that is not listed takes ten lines of TOML:
[clusters](../../how-to/clusters.md). Words: [glossary](../glossary.md).

Each figure has a letter for its kind:

| | kind | meaning |
| --- | --- | --- |
| <sup>m</sup> | measured | by shardplan on the machine itself |
| <sup>p</sup> | published | measured by others, or read from such a machine |
| <sup>d</sup> | datasheet | the vendor's figure |
| <sup>a</sup> | assumed | nobody's figure; the source says why |

Memory is in GiB (2<sup>30</sup> bytes), bandwidths in GB/s (10<sup>9</sup> bytes) one way, rates in
TFLOP/s (10<sup>12</sup>) without sparsity. The source of every figure stands below the tables of
its page.

"""


def toml(path: Path) -> dict[str, Any]:
    """Read a file of the catalogue."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def cell(figure: Figure | None, unit: float = 1.0) -> str:
    """Return a figure in a unit with the letter of its kind."""
    if figure is None:
        return "–"
    value = figure.value / unit
    shown = f"{value:,.0f}" if value >= 100 else f"{value:,.4g}"
    return f"{shown}<sup>{figure.kind[0]}</sup>"


def gib(figure: Figure | None) -> str:
    """Return bytes in GiB."""
    return cell(figure, 2.0**30)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    lines = [list(row) for row in rows]
    columns = zip(*lines, strict=True)
    numbers = [all(one[:1].isdigit() or one == "–" for one in column) for column in columns]
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---:' if number else '---' for number in numbers)} |"
    for row in lines:
        yield f"| {' | '.join(row)} |"
    yield ""


def link(name: str) -> str:
    """Return a link to the section of an entry."""
    anchor = "".join(letter for letter in name.lower() if letter.isalnum() or letter in "_-")
    return f"[{name}](#{anchor})"


def sources(figures: Iterable[tuple[str, Figure | None]]) -> Iterator[str]:
    """Yield a list of sources: the figures of one kind and source in one line."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, figure in figures:
        if figure is not None:
            found.setdefault((figure.kind, figure.source), []).append(name)
    for (kind, source), names in found.items():
        yield f"- {', '.join(names)}: {kind}, {prose(source)}"
    yield ""


def figures_of(one: Accelerator) -> list[tuple[str, Figure | None]]:
    """Return the named figures of an accelerator."""
    return [
        ("memory", one.memory_capacity),
        ("usable memory", one.usable_memory),
        ("memory bandwidth", one.memory_bandwidth),
        *((f"peak {name}", figure) for name, figure in one.peak_flops.items()),
        *((f"best matmul {name}", figure) for name, figure in one.achievable_flops.items()),
        ("link", one.link_bandwidth),
        ("share of the link", one.link_share),
        ("link to the host", one.host_bandwidth),
        ("host memory bandwidth", one.host_memory_bandwidth),
        ("power", one.power),
        ("price", one.price),
        ("units", one.compute_units),
        ("L2 cache", one.l2_cache),
        ("rows of a systolic array", one.systolic_array),
    ]


def vendor_page(vendor: str, entries: list[Accelerator]) -> str:
    """Return the page of a vendor."""
    lines = [f"# {vendor}", "", "Kinds of figures and units: [catalogue](README.md).", ""]
    lines += ["## Peak rates", "", "Dense TFLOP/s by precision.", ""]
    used = [name for name in PRECISIONS if any(name in one.peak_flops for one in entries)]
    lines += table(
        ["accelerator", *used],
        (
            [link(one.name), *(cell(one.peak_flops.get(name), TFLOP) for name in used)]
            for one in entries
        ),
    )
    best = [name for name in PRECISIONS if any(name in one.achievable_flops for one in entries)]
    if best:
        lines += ["## Best matmul", ""]
        lines += ["TFLOP/s of the best large matmul, where somebody measured it.", ""]
        lines += table(
            ["accelerator", *best],
            (
                [link(one.name), *(cell(one.achievable_flops.get(name), TFLOP) for name in best)]
                for one in entries
                if one.achievable_flops
            ),
        )
    lines += ["## Memory, links, power", ""]
    lines += ["Links in GB/s one way, power in watts, prices in dollars an hour on demand.", ""]
    lines += table(
        [
            "accelerator",
            "architecture",
            "memory GiB",
            "usable GiB",
            "memory GB/s",
            "link",
            "link GB/s",
            "host GB/s",
            "power W",
            "$/h",
        ],
        (
            [
                link(one.name),
                one.architecture,
                gib(one.memory_capacity),
                gib(one.usable_memory),
                cell(one.memory_bandwidth, GB),
                one.link,
                cell(one.link_bandwidth, GB),
                cell(one.host_bandwidth, GB),
                cell(one.power),
                cell(one.price),
            ]
            for one in entries
        ),
    )
    lines += ["## Sources", ""]
    for one in entries:
        lines += [f"### {one.name}", ""]
        if one.aliases:
            lines += [f"Also {', '.join(one.aliases)}.", ""]
        lines += sources(figures_of(one))
    return "\n".join(lines).rstrip() + "\n"


def nodes_page(entries: Iterable[Node]) -> str:
    """Return the page of servers, cloud instances and racks."""
    found = list(entries)
    lines = ["# Servers, cloud instances, racks", ""]
    lines += ["Kinds of figures and units: [catalogue](README.md). Network bandwidths are those of"]
    lines += ["one accelerator to other nodes; the domain is the number of accelerators that reach"]
    lines += ["each other over the inner link.", ""]
    lines += table(
        ["node", "accelerators", "domain", "network", "network GB/s", "host GiB", "NVMe TB"],
        (
            [
                link(one.name),
                f"{one.gpus_per_node} × {one.accelerator}",
                str(one.domain_size),
                one.network,
                cell(one.network_bandwidth, GB),
                gib(one.host_memory),
                cell(one.nvme, 1e12),
            ]
            for one in found
        ),
    )
    lines += ["## Sources", ""]
    for one in found:
        lines += [f"### {one.name}", ""]
        if one.aliases:
            lines += [f"Also {', '.join(one.aliases)}.", ""]
        lines += sources(
            [
                ("network", one.network_bandwidth),
                ("inner link", one.link_bandwidth),
                ("link to one peer", one.peer_bandwidth),
                ("power", one.power),
                ("host memory", one.host_memory),
                ("NVMe", one.nvme),
            ]
        )
    return "\n".join(lines).rstrip() + "\n"


def not_priced() -> Iterator[str]:
    """Yield the names of devices that are not priced, and why."""
    data = toml(FOLDER / "not_priced.toml")
    yield from ("## Not priced", "")
    for entry in data["not_priced"]:
        reason = entry["reason"]
        yield f"- {', '.join(entry['names'])}: {prose(reason)}."
    yield ""


def pages() -> dict[str, str]:
    """Return the text of every page."""
    by_name = {one.name: one for one in accelerators()}
    families = {path.stem: path for path in (FOLDER / "accelerators").glob("*.toml")}
    if left := set(families) - {name for names in VENDORS.values() for name in names}:
        raise SystemExit(f"docs/make_hardware.py: no vendor has {', '.join(sorted(left))}.toml")
    made: dict[str, str] = {}
    rows = []
    for vendor, names in VENDORS.items():
        entries = [
            by_name[entry["name"]]
            for name in names
            for entry in toml(families[name])["accelerator"]
        ]
        page = f"{vendor.lower()}.md"
        made[page] = vendor_page(vendor, entries)
        kinds = ", ".join(dict.fromkeys(one.architecture for one in entries))
        rows.append([f"[{vendor}]({page})", str(len(entries)), kinds])
    made["nodes.md"] = nodes_page(nodes())
    rows.append(["[Servers, cloud instances, racks](nodes.md)", str(len(nodes())), ""])
    lines = [HEAD + "\n".join(table(["page", "entries", "architectures"], rows)), *not_priced()]
    return {"README.md": "\n".join(lines).rstrip() + "\n"} | made


def main() -> None:
    """Write the pages, or exit with 1 where one differs from the data."""
    made = {PLACE / name: text for name, text in pages().items()}
    write_or_compare(made, PLACE.glob("*.md"))


if __name__ == "__main__":
    main()
