"""The events of a trace as tables: what lasts, and the memory, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pandas as pd

MICRO: Final = 1e6  # units of a trace in a second
MEASURED: Final = 100_000  # process of the run's rank 0
BY_PART: Final = "device memory by part"
TIMES: Final = ("side", "rank", "lane", "kind", "stage", "micro_batch")
Event = dict[str, Any]


def timeline_table(events: Sequence[Event]) -> pd.DataFrame:
    """Return a row for each event that lasts."""
    import pandas as pd

    lanes = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    rows = []
    for event in events:
        if event["ph"] != "X":
            continue
        measured, about = event["pid"] >= MEASURED, event.get("args", {})
        micro_batch = about.get("micro_batch")
        rows.append(
            (
                "measured" if measured else "simulated",
                event["pid"] - MEASURED * measured,
                lanes[event["pid"], event["tid"]],
                event["name"].removesuffix(f" {micro_batch}"),
                about.get("stage"),
                micro_batch,
                event["ts"] / MICRO,
                (event["ts"] + event["dur"]) / MICRO,
            )
        )
    found = pd.DataFrame(rows, columns=[*TIMES, "begin_seconds", "end_seconds"])
    return found.astype({"stage": "Int64", "micro_batch": "Int64"})


def memory_table(events: Sequence[Event]) -> pd.DataFrame:
    """Return a row for each sample of a rank's memory."""
    import pandas as pd

    rows = [
        {"rank": event["pid"], "seconds": event["ts"] / MICRO, **event["args"]}
        for event in events
        if event["ph"] == "C" and event["name"] == BY_PART
    ]
    return pd.DataFrame(rows)
