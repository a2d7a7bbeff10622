"""Keeps the README honest: ``python -m benchmarks.readme [--write]``.

Every console block that begins with ``$ shardplan fit``, ``plan`` or ``models`` must be what that
command prints now (durations of the search aside). ``--write`` puts today's output in; without it
the command fails where a block differs. Blocks of ``run`` depend on the machine and are left alone.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"```console\n\$ (shardplan (?:fit|plan|models)[^\n]*)\n(.*?)```", re.DOTALL)


def output_of(command: str) -> str:
    """What a command prints, with files that it writes kept out of the repository."""
    words = shlex.split(command)[1:]
    with tempfile.TemporaryDirectory() as folder:
        if "-o" in words:
            position = words.index("-o") + 1
            words[position] = str(Path(folder) / words[position])
        done = subprocess.run(
            [sys.executable, "-m", "planner.cli.app", *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"


def comparable(text: str) -> str:
    """The text without the seconds that a search took, and as one paragraph a label."""
    return " ".join(re.sub(r"in [\d.]+ (ms|s):", "in some time:", text).split())


def differences(text: str) -> list[str]:
    """The commands whose blocks are not what they print."""
    return [
        match[1]
        for match in BLOCK.finditer(text)
        if comparable(match[2]) != comparable(output_of(match[1]))
    ]


def main() -> None:
    text = README.read_text(encoding="utf-8")
    if "--write" in sys.argv[1:]:
        text = BLOCK.sub(lambda m: f"```console\n$ {m[1]}\n{output_of(m[1])}```", text)
        README.write_text(text, encoding="utf-8")
    wrong = differences(text)
    for command in wrong:
        print(f"README.md differs from: {command}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
