"""How fast the page answers a change while 50 people use it, and whether its memory grows.

    python -m benchmarks.speed.page_load                    # starts ``shardplan serve`` itself

Every client keeps one connection and moves one control at a time: sequence length, batch, tensor
and pipeline parallelism of a plan that is held, as the page's script does. Between two moves it
thinks for ``--think`` seconds on average. Most questions are new: sequence lengths differ by
client. The minute begins with the first answer, which waits for the server's processes to start.
Times are from the request to the last byte of the page; an answer that is not a page ends the
benchmark. Memory and processor time are those of the server's processes (Linux): memory after the
first third and at the end, processor time for a change, which other programs change little.
``--address``: of a page that runs already, as shardplan serve prints it; without these.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode, urlsplit

DEGREES = (1, 2, 4)
MODELS = (("llama-3-8b", "8xA100-80GB"), ("llama-2-13b", "8xH100-SXM"), ("llama-2-7b", "8xL40S"))


def enter(host: str, port: int, query: str) -> str:
    """Return the cookie that the address with the token gives."""
    connection = http.client.HTTPConnection(host, port)
    connection.request("GET", f"/?{query}")
    cookie = connection.getresponse().headers["set-cookie"]
    return str(cookie).split(";")[0]


def client(
    number: int, address: tuple[str, int, str], until: float, think: float, times: list[float]
) -> None:
    """Move controls until the time is over, at least once."""
    host, port, cookie = address
    chance = random.Random(number)
    connection = http.client.HTTPConnection(host, port, timeout=60)
    model, cluster = MODELS[number % len(MODELS)]
    question = {"model": model, "cluster": cluster, "zero": 1, "recompute": "full", "mbs": 1}
    question |= {"seq_len": 512, "batch": 64, "tp": 1, "pp": 1}
    headers = {"Cookie": cookie, "X-Part": "answer"}
    time.sleep(chance.random() * think)
    while not times or time.time() < until:
        moved = chance.choice(("seq_len", "batch", "tp", "pp"))
        choices = {"seq_len": range(256, 1024, 8), "batch": range(64, 1024, 64)}
        question[moved] = chance.choice(choices.get(moved, DEGREES[:2]))
        started = time.perf_counter()
        connection.request("GET", f"/?{urlencode(question)}", headers=headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, (answer.status, question)
        times.append(time.perf_counter() - started)
        time.sleep(chance.expovariate(1.0 / think))


@contextlib.contextmanager
def served() -> Iterator[tuple[str, int]]:
    """Start a page; yield its address and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "planner", "serve", "--port", str(port)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as page:
        try:
            assert page.stdout
            for line in page.stdout:
                if found := re.search(r"http://\S+", line):
                    _wait_for(port)
                    yield found[0], page.pid
                    break
        finally:
            page.terminate()


def _wait_for(port: int) -> None:
    for _ in range(600):
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.1", port)),
        ):
            return
        time.sleep(0.1)


def folders(process: int) -> Iterator[Path]:
    """Yield the folders in /proc of a process and of those that it started."""
    waiting = [process]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        with contextlib.suppress(OSError):
            yield folder
            for children in folder.glob("task/*/children"):
                waiting += [int(number) for number in children.read_text().split()]


def memory(process: int) -> float:
    """Return the resident bytes of a process and of those that it started."""
    size = 0.0
    for folder in folders(process):
        with contextlib.suppress(OSError):
            size += 1024.0 * int(re.findall(r"VmRSS:\s+(\d+)", (folder / "status").read_text())[0])
    return size


def processor_seconds(process: int) -> float:
    """Return the processor time of a process and of those that it started."""
    ticks = 0
    for folder in folders(process):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # in user mode, and in the kernel
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the quantiles of all times, and the memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="of a page that runs already")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--think", type=float, default=2.0, help="seconds between two moves")
    options = parser.parse_args()
    if options.address:
        measure(options.address, options, None)
        return
    with served() as (address, process):
        measure(address, options, process)


def measure(page: str, options: argparse.Namespace, process: int | None) -> None:
    """Let the clients work, and print what they saw."""
    parts = urlsplit(page)
    assert parts.hostname
    assert parts.port
    cookie = enter(parts.hostname, parts.port, parts.query)
    times: list[float] = []
    address = (parts.hostname, parts.port, cookie)
    client(0, address, time.time(), 0.001, [])
    worked = 0.0 if process is None else -processor_seconds(process)
    until = time.time() + options.seconds
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            client(number, address, until, options.think, times)
        except (AssertionError, OSError, http.client.HTTPException) as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(options.clients)]
    for thread in threads:
        thread.start()
    sizes = []
    while process is not None and any(thread.is_alive() for thread in threads):
        sizes.append(memory(process))
        time.sleep(0.5)
    for thread in threads:
        thread.join()
    if process is not None:
        worked += processor_seconds(process)
        print(f"processor: {1e3 * worked / len(times):.1f} ms a change")
    times.sort()
    for share in (0.5, 0.9, 0.99):
        print(f"p{100 * share:g}: {1e3 * times[int(share * (len(times) - 1))]:.0f} ms")
    print(f"{len(times)} changes of {options.clients} clients in {options.seconds:g} s")
    print(f"{len(failed)} errors{': ' if failed else ''}{failed[0] if failed else ''}")
    if sizes:
        early, late = sizes[len(sizes) // 3], sizes[-1]
        print(f"memory: {early / 2**20:.0f} MiB after a third, {late / 2**20:.0f} MiB at the end")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
