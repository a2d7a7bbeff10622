"""``shardplan completion``: completion of options, models, clusters and values in a shell.

click's own completion: the script that a shell loads calls ``shardplan`` with the words typed so
far in the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from hardware_profiles.options import Option
from hardware_profiles.terminal import show

VARIABLE: Final = "_SHARDPLAN_COMPLETE"  # of the environment, as click names it
WORDS: Final = "COMP_WORDS"


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Option("SHELL", help="{values}")],
) -> None:
    """Print the script that a shell loads."""
    import click
    from click.shell_completion import get_completion_class

    app = click.get_current_context().find_root().command
    found = get_completion_class(shell)
    assert found is not None
    show(found(app, {}, "shardplan", VARIABLE).source().rstrip())


def complete_in_executor(commands: Sequence[str]) -> None:
    """Replace this process by the executor where a shell completes one of its commands."""
    if not os.environ.get(VARIABLE, "").endswith("_complete"):
        return
    words = os.environ.get(WORDS, "").split()
    if len(words) > 2 and words[1] in commands:
        os.execv(sys.executable, [sys.executable, "-m", "executor"])
