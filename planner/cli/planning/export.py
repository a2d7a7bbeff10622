"""``shardplan export plan.json --to TARGET``: the configuration of another trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hardware_profiles.command_line.help import OUTPUT
from hardware_profiles.options import Option
from hardware_profiles.terminal import say, show
from planner.cli.options import Force, Json, PlanPath
from planner.exchange.names import target_names


def export_plan(
    plan: PlanPath,
    to: Annotated[str, Option("--to", metavar="TARGET", values=target_names, help="{values}")],
    output: Annotated[
        Path,
        Option(
            "--output",
            "-o",
            metavar="DIR|FILE",
            group=OUTPUT,
            help="folder of the files, or the file's name where there is one",
        ),
    ] = Path("."),
    force: Force = False,
    json: Json = False,
) -> None:
    """Write the files, and print what they do not hold and the launch command."""
    from hardware_profiles.errors import InputError
    from hardware_profiles.fields import write_text_atomically
    from planner.api.export import export
    from planner.cli.outputs import refuse_existing
    from planner.text.answer import json_text

    answer = export(plan, to)
    folder, names = output, list(answer.files)
    if output.suffix in {Path(name).suffix for name in names} and not output.is_dir():
        if len(names) > 1:
            raise InputError(f"{output}: name a folder: {to} takes {' and '.join(names)}")
        folder, names = output.parent, [output.name]
        answer = answer.renamed(output.name)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file; name a folder")
    paths = {folder / name: text for name, text in zip(names, answer.files.values(), strict=True)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror or error}") from None
    for path in paths:
        refuse_existing(path, force=force)
    for path, text in paths.items():
        write_text_atomically(path, text, force=force)
    show(json_text(answer.to_dict()) if json else str(answer))
    say(f"wrote {', '.join(map(str, paths))}")
