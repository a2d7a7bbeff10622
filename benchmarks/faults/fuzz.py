"""Mutate files and requests that strangers may write; every reader answers or refuses in one line.

    python -m benchmarks.faults.fuzz --cases 100000         all readers, in turn
    python -m benchmarks.faults.fuzz --guided               by coverage (pip install atheris)
    python -m benchmarks.faults.fuzz --commands --cases 200 shardplan itself, one process each

A case takes a real file, replaces a few of its tokens or bytes, and reads the result. Anything but
an answer or an ``InputError`` of one line is a finding: another exception, a second of CPU time,
300 MB, a file written elsewhere, a process, a connection. Findings are printed with their seed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import re
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import benchmarks.faults.fuzz_readers as readers
from hardware_profiles.errors import ShardplanError

MAX_SECONDS = 1.0  # of CPU, of one case
MAX_BYTES = 300_000_000  # of address space beyond that of the loaded program
MOST_CHARACTERS = 6000  # of a message
ALLOWED_CODES = (2, 3)
GUIDED_SECONDS = 60  # of a reader
SLOWER = 5.0  # than elsewhere, where every branch is counted
INSTRUMENTED = ("hardware_profiles", "cost_models", "planner", "executor", "tomllib", "json")
FORBIDDEN = ("subprocess.Popen", "socket.connect", "socket.getaddrinfo", "os.system", "os.exec")
FORBIDDEN_PREFIXES = ("pickle.", "os.posix_spawn", "os.fork")

_TOKEN = re.compile(rb"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|-?\d[\d.eE+-]*|[A-Za-z_][\w-]*")
_WORDS = rb"""
0 -1 1 3 1e308 1e-308 NaN Infinity -0.0 2147483648 9223372036854775808 1_000 0x10 1:30 2026-01-01
null true false ~ [] {} "" inf "\u001b[31m\u0007" "\ud800" "a\nb" "../../x" "/etc/passwd" `id`
"$(touch${IFS}x)" !!python/name:os.system &a[*a] *a <script> =cmd() {{7*7}} %s%n , : = - -- # ' " \
( ) [ ] { } """
_BYTES = (b"\n", b"\t", b" ", b"\r\n", b"\x1b[31m", b"\x00", b"\xff", b"\xe2\x80\xae")
_LONG = (b"1" + b"0" * 40, b"9" * 5000, b"[" * 3000, b'{"a":' * 1500, b"x" * 70000)
_VALUES = (*_WORDS.split(), *_BYTES, *_LONG)


def mutated(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Return a text with one to four changes."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        data = chance.choices(_MUTATIONS, (6, 2, 1, 1, 1, 1))[0](data, others, chance)
    return data[: readers.MAX_CASE]


def _token(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Replace a number, a string or a word by a strange value, or by another one of the text."""
    tokens = [found.span() for found in _TOKEN.finditer(data)]
    if not tokens:
        return data + chance.choice(_VALUES)
    start, end = chance.choice(tokens)
    value = chance.choice(_VALUES)
    if chance.random() < 0.2:
        first, last = chance.choice(tokens)
        value = data[first:last]
    return data[:start] + value + data[end:]


def _flip(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    if not data:
        return b"\xff"
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def _cut(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    first, last = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
    return data[:first] + data[min(last, first + 200) :] if chance.random() < 0.7 else data[:first]


def _repeat(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    first, last = sorted((chance.randint(0, len(data)), chance.randint(0, len(data))))
    return data[:last] + data[first:last] * chance.choice((1, 1, 20)) + data[last:]


def _insert(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    place = chance.randint(0, len(data))
    return data[:place] + chance.choice(_VALUES) + data[place:]


def _splice(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    other = chance.choice(others)
    return data[: chance.randint(0, len(data))] + other[chance.randint(0, len(other)) :]


_MUTATIONS: tuple[Callable[[bytes, Sequence[bytes], random.Random], bytes], ...]
_MUTATIONS = (_token, _flip, _cut, _repeat, _insert, _splice)


class Trespass(BaseException):
    """A reader did what no file may make it do."""


@dataclass
class Watch:
    """Refuses events of Python's audit hooks while a case is read."""

    folder: Path
    active: bool = False
    seen: list[str] = field(default_factory=list)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take an event."""
        if not self.active:
            return
        bad = event in FORBIDDEN or event.startswith(FORBIDDEN_PREFIXES)
        if event == "open" and isinstance(arguments[0], str) and _writes(arguments[1:]):
            bad = not Path(arguments[0]).absolute().is_relative_to(self.folder)
            bad &= "__pycache__" not in arguments[0]
        if bad:
            self.seen.append(f"{event} {arguments[:2]!r}"[:200])
            raise Trespass(self.seen[-1])


def _writes(how: tuple[Any, ...]) -> bool:
    mode, flags = (*how, 0)[:2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wxa+")
    return isinstance(flags, int) and bool(flags & 3)


@cache
def watch() -> Watch:
    """Return the watch of this process, which Python cannot remove again."""
    made = Watch(Path(tempfile.gettempdir()).resolve())
    sys.addaudithook(made)
    return made


@dataclass(frozen=True)
class Finding:
    """A case that did not end as it must."""

    reader: str
    seed: int
    what: str
    data: bytes

    def __str__(self) -> str:
        return f"{self.reader} seed {self.seed}: {self.what}\n    {self.data[:300]!r}"


def read_case(
    reader: readers.Reader, data: bytes, folder: Path, most: float = MAX_SECONDS
) -> str | None:
    """Read a case; return what is wrong with the outcome, or None; ``most``: seconds of CPU."""
    seconds = [0.0]
    wrong = _read_once(reader, data, folder, seconds)
    if wrong is None and seconds[0] > most:  # the first time, it may have imported modules
        wrong = _read_once(reader, data, folder, seconds)
    if wrong is None and seconds[0] > most:
        wrong = f"{seconds[0]:.1f} s"
    return wrong


def _read_once(
    reader: readers.Reader, data: bytes, folder: Path, seconds: list[float]
) -> str | None:
    watched, began = watch(), time.process_time()
    watched.folder, watched.active = folder.resolve(), True
    watched.seen.clear()
    wrong = None
    try:
        reader.read(data, folder)
    except ShardplanError as error:
        said = str(error)
        if error.exit_code not in ALLOWED_CODES:
            wrong = f"exit code {error.exit_code}: {said[:200]}"
        elif reader.in_one_line and "\n" in said:
            wrong = f"a message of several lines: {said[:300]!r}"
        elif not 0 < len(said) < MOST_CHARACTERS:
            wrong = f"a message of {len(said):,} characters: {said[:200]!r}"
    except (Exception, Trespass, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        wrong = f"{type(error).__name__}: {str(error)[:160]} ({place.filename}:{place.lineno})"
    finally:
        watched.active = False
    seconds[0] = time.process_time() - began
    if wrong is None and watched.seen:
        wrong = f"trespassed: {watched.seen[0]}"
    return wrong


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let the process grow by at most MAX_BYTES."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MAX_BYTES, before[1]))
    except OSError:  # not Linux
        pass
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(cases: int, *, first_seed: int = 0, only: str = "") -> list[Finding]:
    """Read mutated files, each reader in turn; return the findings, one of a kind."""
    chosen = [one for one in readers.readers() if only in one.name]
    seeds = {one.name: one.seeds() for one in chosen}
    findings: dict[tuple[str, str], Finding] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for one in chosen:
            for data in seeds[one.name]:
                read_case(one, data, folder)  # loads what is loaded lazily
                wrong = read_case(one, data, folder)
                if wrong is not None:
                    findings[one.name, wrong[:60]] = Finding(one.name, -1, wrong, data)
                    print(findings[one.name, wrong[:60]], flush=True)
        with limited_memory():
            for number in range(cases):
                seed, one = first_seed + number, chosen[number % len(chosen)]
                chance = random.Random(seed)
                data = mutated(chance.choice(seeds[one.name]), seeds[one.name], chance)
                wrong = read_case(one, data, folder)
                if wrong is not None:
                    kind = re.sub(r"\d+", "0", wrong)[-70:]
                    if (one.name, kind) not in findings:
                        findings[one.name, kind] = Finding(one.name, seed, wrong, data)
                        print(findings[one.name, kind], flush=True)
    return list(findings.values())


COMMANDS: dict[str, tuple[str, ...]] = {  # by reader; "{}": the file
    "config.json": ("fit", "{}", "8xA100-80GB", "--zero", "1", "--recompute", "full"),
    "cluster.toml": ("fit", "gpt2", "{}", "--zero", "1", "--recompute", "full"),
    "plan.json": ("explain", "{}"),
    "run.json": ("compare", "{}"),
    "trainer's config": ("fit", "gpt2", "8xA100-80GB", "--from", "{}"),
    "log": ("observe", "{}"),
    "out-of-memory error": ("oom", "{}"),
    "software.toml": ("fit", "gpt2", "8xA100-80GB", "--software", "{}"),
}


def run_commands(cases: int, *, first_seed: int = 0) -> list[Finding]:
    """Run shardplan on mutated files; return the findings, and print what the runs needed."""
    chosen = [one for one in readers.readers() if one.name in COMMANDS]
    findings, seconds, sizes, codes = [], [], [], Counter[int]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(cases):
            one, chance = chosen[number % len(chosen)], random.Random(first_seed + number)
            seeds = one.seeds()
            data = mutated(chance.choice(seeds), seeds, chance)
            path = folder / one.name.replace(" ", "-")
            path.write_bytes(data)
            words = [str(path) if word == "{}" else word for word in COMMANDS[one.name]]
            code, said, used = _run_command(words)
            codes[code] += 1
            seconds.append(used.ru_utime + used.ru_stime)
            sizes.append(1024 * used.ru_maxrss)
            errors = [line for line in said.splitlines() if line.startswith("shardplan: ")]
            wrong = code not in (0, *ALLOWED_CODES, 4) or "Traceback" in said
            if wrong or len(errors) != (code == 2):
                words = [*words, f"exit code {code}", said[-500:]]
                findings.append(Finding(one.name, first_seed + number, " ".join(words), data))
                print(findings[-1], flush=True)
    print(f"exit codes {dict(sorted(codes.items()))}")
    for what, used_, unit in (("s of CPU", seconds, 1.0), ("MB", sizes, 1e6)):
        ordered = sorted(used_)
        middle, most = ordered[len(ordered) // 2] / unit, ordered[-1] / unit
        print(f"{middle:.3g} {what} (median), {most:.3g} at most")
    return findings


def _run_command(words: Sequence[str]) -> tuple[int, str, resource.struct_rusage]:
    """Return exit code, errors and resources of a command; no core and no file above 10 MB."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
                resource.setrlimit(resource.RLIMIT_FSIZE, (10**7, 10**7))
                os.dup2(os.open(os.devnull, os.O_RDWR), 0)
                os.dup2(os.open(os.devnull, os.O_RDWR), 1)
                os.dup2(said.fileno(), 2)
                os.execv(sys.executable, [sys.executable, "-m", "planner", *words])
            finally:
                os._exit(1)
        _, status, used = os.wait4(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read().decode(errors="replace"), used


def guided(cases: int, only: str) -> list[str]:
    """Fuzz each reader by coverage, in a process of its own; return those with a finding."""
    if importlib.util.find_spec("atheris") is None:
        sys.exit(
            "--guided needs atheris: pip install atheris (Linux and macOS, Python 3.11 to 3.13)"
        )
    found = []
    for one in readers.readers():
        if only not in one.name:
            continue
        child = os.fork()
        if child == 0:
            try:
                _guided(one, cases)
            finally:
                os._exit(1)
        _, status, used = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        found += [one.name] if code else []
        print(f"{one.name}: exit code {code}, {used.ru_utime + used.ru_stime:.0f} s", flush=True)
    return found


def _guided(one: readers.Reader, cases: int) -> None:
    """Fuzz one reader; libFuzzer ends the process."""
    import atheris

    folder = Path(tempfile.mkdtemp())
    corpus = folder / "corpus"
    corpus.mkdir()
    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        seeds = one.seeds()
        for number, data in enumerate(seeds):
            read_case(one, data, folder)
            (corpus / str(number)).write_bytes(data)

    def test(data: bytes) -> None:
        wrong = read_case(one, data, folder, SLOWER * MAX_SECONDS)
        if wrong is not None:
            case = folder / "case"
            case.write_bytes(data)
            print(f"{Finding(one.name, -1, wrong, data)}\n    {case}", flush=True)
            raise AssertionError(wrong)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        return mutated(data, seeds, random.Random(seed))[:most]

    options = [
        f"-runs={cases}",
        f"-max_total_time={GUIDED_SECONDS}",
        "-timeout=10",
        "-print_final_stats=1",
    ]
    options += [f"-max_len={readers.MAX_CASE}", f"-artifact_prefix={folder}/", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], test, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> int:
    """Run the cases; return 1 if there are findings."""
    parser = argparse.ArgumentParser(description="Mutate files that strangers may write.")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--only", default="", help="readers with this text in their name")
    parser.add_argument("--guided", action="store_true", help="by coverage, with atheris")
    parser.add_argument("--commands", action="store_true", help="run shardplan for each file")
    given = parser.parse_args()
    if given.guided:
        return bool(guided(given.cases, given.only))
    if given.commands:
        return bool(run_commands(given.cases, first_seed=given.seed))
    began = time.process_time()
    findings = fuzz(given.cases, first_seed=given.seed, only=given.only)
    seconds = time.process_time() - began
    found = dict(Counter(finding.reader for finding in findings))
    print(f"{given.cases:,} cases, {len(findings)} findings {found}, {seconds:.0f} s of CPU")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
