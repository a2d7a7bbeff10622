"""``shardplan serve``: its options."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from hardware_profiles.options import Option


def serve(
    port: Annotated[
        int | None,
        Meta(ge=1024, le=65535),
        Option(metavar="NUMBER", help="port on this machine (default: 8765, or the next free one)"),
    ] = None,
) -> None:
    """Open a page in the browser: the questions of fit and plan, with their answers drawn."""
    from planner.page.serve import serve as start

    start(port)
