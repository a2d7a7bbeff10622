"""A page printed to PDF by a Chromium of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from hardware_profiles.errors import InputError, RunError

BROWSERS: Final = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
)
TIMEOUT_SECONDS: Final = 120.0


def browser() -> str | None:
    """Return the first Chromium on the path."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def find_browser() -> str:
    """Return the first Chromium on the path, or raise an InputError."""
    if (found := browser()) is not None:
        return found
    raise InputError(
        f"--pdf: needs a Chromium ({', '.join(BROWSERS)}), and none is on the path; install one, "
        "or open the page in any browser and print it"
    )


def write_pdf(html: str, path: Path) -> None:
    """Print a page to a file, in place of an older one."""
    program = find_browser()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, target = folder / "report.html", folder / "report.pdf"
        source.write_text(html, encoding="utf-8")
        command = [program, "--headless", "--disable-gpu", "--no-pdf-header-footer"]
        command += [f"--user-data-dir={folder / 'profile'}", f"--print-to-pdf={target}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--no-sandbox")  # Chromium's sandbox does not start as root
        try:
            done = subprocess.run(
                [*command, source.as_uri()],
                capture_output=True,
                check=False,
                timeout=TIMEOUT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"{program}: no PDF within {TIMEOUT_SECONDS:.0f} s") from None
        if done.returncode or not target.exists():
            raise RunError(f"{program}: printed no PDF (exit code {done.returncode})")
        try:
            copy = path.with_name(f".{path.name}.part")
            shutil.copyfile(target, copy)
            os.replace(copy, path)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
