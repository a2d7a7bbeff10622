"""``shardplan fit``: its options and its output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from hardware_profiles.command_line.help import OUTPUT
from hardware_profiles.errors import InputError
from hardware_profiles.options import Option
from hardware_profiles.terminal import say, show
from planner.cli.numpy_threads import import_numpy
from planner.cli.options import Force, Json, Verbose
from planner.cli.outputs import print_answer, refuse_existing
from planner.request.requests import FitRequest

DRAWINGS: Final = (".html", ".svg")
EXIT_VERDICT: Final = {"fits": 0, "does_not_fit": 3, "tight": 4}
EXIT_ANOTHER_PLAN: Final = 7  # the given plan does not fit, another one does


def fit(
    request: FitRequest,
    explain: Annotated[
        bool, Option("--explain", group=OUTPUT, help="explain the peak, moment by moment")
    ] = False,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            group=OUTPUT,
            help="draw the moments of a step: FILE.html or FILE.svg",
        ),
    ] = None,
    force: Force = False,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Print whether it fits; return the exit code of the verdict."""
    import_numpy()
    from hardware_profiles.fields import write_text_atomically
    from planner.answer.fit_answer import FitAnswer
    from planner.api.fit import fit as ask
    from planner.request.executor_process import cluster_or_measure, refuse_for_modules

    if request.inference:
        _refuse_drawings(explain=explain, output=output)
    refuse_for_modules(str(request.model), output, explain=explain)
    if output is not None:
        _check_drawing(output, force=force)  # before any work is done
    answer = ask(**{**vars(request), "cluster": cluster_or_measure(str(request.cluster), say)})
    trained = answer if isinstance(answer, FitAnswer) else None
    for note in () if trained is None else trained.notes:
        say(f"note: {note}")
    if output is not None and trained is not None:
        drawn = trained.to_svg() if output.suffix.lower() == ".svg" else trained.to_html()
        write_text_atomically(output, drawn, force=force)
    print_answer(answer, json=json, verbose=verbose)
    if explain and not json and trained is not None:
        show(f"\n{trained.explain()}")
    if output is not None:
        say(f"{'':<11}wrote {output}")
    if trained is not None and answer.verdict == "does_not_fit" and trained.fits_with_another_plan:
        return EXIT_ANOTHER_PLAN
    return EXIT_VERDICT[answer.verdict]


def _check_drawing(path: Path, *, force: bool) -> None:
    """Raise, before any computation, if a drawing could not be written."""
    if path.suffix.lower() not in DRAWINGS:
        raise InputError(f"{path}: the name of a drawing ends in {' or '.join(DRAWINGS)}")
    refuse_existing(path, force=force)


def _refuse_drawings(*, explain: bool, output: Path | None) -> None:
    """Raise if a drawing of a training step is requested together with --inference."""
    given = ["--explain"] * explain + ["--output"] * (output is not None)
    if given:
        raise InputError(
            f"--inference and {', '.join(given)}: they show a training step, which a server does "
            "not have; leave out one or the other"
        )
