"""``shardplan serve``: starts the page on this machine."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import socket
from typing import Annotated, Final

from msgspec import Meta

from hardware_profiles.errors import InputError
from hardware_profiles.options import Option
from hardware_profiles.terminal import say

HOST: Final = "127.0.0.1"
PORT: Final = 8765  # the same for everybody, so that an address can be passed on
TRIED: Final = 20  # ports after the usual one
NEEDED: Final = ("starlette", "uvicorn", "jinja2")
MAX_REQUEST: Final = 128 * 1024  # bytes of the head of a request: a config.json in the address
MOST_CONNECTIONS: Final = 512
INSTALL: Final = 'pip install "shardplan[page]"'


def serve(
    port: Annotated[
        int | None,
        Meta(ge=1024, le=65535),
        Option(metavar="NUMBER", help="port on this machine (default: 8765, or the next free one)"),
    ] = None,
) -> None:
    """Serve the page until it is interrupted; print its address with a new token."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"the page needs {', '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed: {INSTALL}"
        )
    import uvicorn

    from planner.page.server import PageServer
    from planner.page.workers import Answers

    with listening(port) as listener:
        number, token = listener.getsockname()[1], secrets.token_urlsafe(24)
        cores = max(1, min(4, os.cpu_count() or 1))
        server = PageServer(Answers(cores, max(1, cores // 2)))
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        config = uvicorn.Config(
            server.app(port=number, token=token),
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,  # it would hold the token
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_REQUEST,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=120,
            timeout_graceful_shutdown=1,
        )
        say(f"open http://{HOST}:{number}/?token={token}")
        say("the page answers on this machine only; Ctrl-C ends it")
        uvicorn.Server(config).run(sockets=[listener])


def listening(port: int | None) -> socket.socket:
    """Return a socket on the port that was given, else on the first free one from the usual one."""
    tried = [port] if port is not None else [*range(PORT, PORT + TRIED), 0]
    for number in tried:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, number))
        except OSError as error:
            listener.close()
            reason = error.strerror or str(error)
            continue
        return listener
    raise InputError(f"--port {port}: {reason}")
