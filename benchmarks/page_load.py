"""How fast the page answers a change while 50 people use it.

    shardplan serve --port 8799                       # prints an address with a token
    python -m benchmarks.page_load http://127.0.0.1:8799/?token=…

Every client keeps one connection and moves one control at a time: sequence length, batch, tensor
and pipeline parallelism of a plan that is held, as the page's script does. Between two moves it
thinks for ``--think`` seconds on average. Most questions are new: sequence lengths differ by
client. Times are from the request to the last byte of the page.
"""

from __future__ import annotations

import argparse
import http.client
import random
import threading
import time
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
    """Move controls until the time is over."""
    host, port, cookie = address
    chance = random.Random(number)
    connection = http.client.HTTPConnection(host, port, timeout=60)
    model, cluster = MODELS[number % len(MODELS)]
    question = {"model": model, "cluster": cluster, "zero": 1, "recompute": "full", "mbs": 1}
    question |= {"seq_len": 512, "batch": 64, "tp": 1, "pp": 1}
    time.sleep(chance.random() * think)
    while time.time() < until:
        moved = chance.choice(("seq_len", "batch", "tp", "pp"))
        choices = {"seq_len": range(256, 1024, 8), "batch": range(64, 1024, 64)}
        question[moved] = chance.choice(choices.get(moved, DEGREES[:2]))
        started = time.perf_counter()
        connection.request("GET", f"/?{urlencode(question)}", headers={"Cookie": cookie})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, (answer.status, question)
        times.append(time.perf_counter() - started)
        time.sleep(chance.expovariate(1.0 / think))


def main() -> None:
    """Print the quantiles of all times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="as shardplan serve prints it")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--think", type=float, default=2.0, help="seconds between two moves")
    options = parser.parse_args()
    parts = urlsplit(options.address)
    assert parts.hostname
    assert parts.port
    cookie = enter(parts.hostname, parts.port, parts.query)
    times: list[float] = []
    until = time.time() + options.seconds
    address = (parts.hostname, parts.port, cookie)
    threads = [
        threading.Thread(target=client, args=(n, address, until, options.think, times))
        for n in range(options.clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times.sort()
    for share in (0.5, 0.9, 0.99):
        print(f"p{100 * share:g}: {1e3 * times[int(share * (len(times) - 1))]:.0f} ms")
    print(f"{len(times)} changes of {options.clients} clients in {options.seconds:g} s")


if __name__ == "__main__":
    main()
