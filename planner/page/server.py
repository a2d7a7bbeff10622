"""The routes of the page: every answer is a page that a plain form asks for.

``/``: memory and time of one plan; ``/why``: its explanation; ``/best``: the best plans;
``/compare``: several clusters; ``/plan.json``, ``/report.html``, ``/trace.json``, ``/export``:
files to save; ``/activity``: the progress of a search, as server-sent events, until its answer is
there.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import jinja2
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from cost_models.model.presets import preset_names
from hardware_profiles.cluster.catalogue import accelerators
from hardware_profiles.errors import InputError, ShardplanError
from planner.exchange.names import target_names
from planner.page.guard import Guard
from planner.page.question import (
    BY_NAME,
    COMMON_PLAN,
    DEFAULT_CLUSTER,
    DEFAULT_MODEL,
    FURTHER_PLAN,
    WORKLOAD_FIELDS,
    PageQuestion,
    read_question,
    with_labels,
)
from planner.page.workers import Answers, BusyError
from planner.request.divisors import divisors

FOLDER: Final = Path(__file__).parent
STATIC: Final = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
TITLES: Final = {
    "price": "Will it fit?",
    "best": "Best plan",
    "compare": "Clusters",
    "why": "Why this plan?",
}
PATHS: Final = {"price": "/", "best": "/best", "compare": "/compare", "why": "/why"}
USUAL_CLUSTERS: Final = (
    *("1xL40S-48GB", "8xL40S-48GB", "1xA100-80GB", "8xA100-80GB", "4x8xA100-80GB", "8xH100-SXM"),
    *("2x8xH100-SXM", "16x8xH100-SXM", "8xH200", "8xB200", "gb200-nvl72", "8xMI300X", "4xRTX-4090"),
)
MOST_DEGREE: Final = 64  # of a list of degrees; larger ones are typed into the address
EVERY: Final = 0.25  # seconds between two activities
Respond = Callable[[Request, PageQuestion], Awaitable[Response]]


class PageServer:
    """The page and its answers."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.shared = {
            "fields": BY_NAME,
            "titles": TITLES,
            "paths": PATHS,
            "workload_fields": WORKLOAD_FIELDS,
            "plan_fields": COMMON_PLAN,
            "further_fields": FURTHER_PLAN,
            "lists": _list("models", preset_names()) + _list("clusters", _known_clusters()),
            "targets": target_names(),
            "default_model": DEFAULT_MODEL,
            "default_cluster": DEFAULT_CLUSTER,
        }

    def app(self, *, port: int, token: str) -> Guard:
        """Return the guarded application."""
        pages = [
            Route(path, self._responder(self._page_of(task)), methods=["GET"])
            for task, path in PATHS.items()
        ]
        files = [
            Route(f"/{task}", self._responder(self._file_of(task)), methods=["GET"])
            for task in ("plan.json", "report.html", "trace.json", "export")
        ]
        routes = [
            *pages,
            *files,
            Route("/activity/{task}", self._responder(self._activity), methods=["GET"]),
            *(Route(f"/{name}", self._static(name), methods=["GET"]) for name in STATIC),
        ]
        inner = Starlette(
            routes=routes, lifespan=self._lifespan, exception_handlers={404: self._unknown}
        )
        return Guard(inner, port=port, token=token)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.answers.start()
        try:
            yield
        finally:
            self.answers.stop()

    def _responder(self, respond: Respond) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that shows every error of a user as one message in the page."""

        async def handle(request: Request) -> Response:
            question = PageQuestion()
            try:
                query = request.scope["query_string"].decode("ascii")
                question = read_question(query)
                return await respond(request, question)
            except UnicodeDecodeError:
                return self._refused(request, question, "the address holds bytes outside ASCII")
            except BusyError as error:
                return self._refused(request, question, str(error), 503)
            except ShardplanError as error:
                return self._refused(request, question, str(error))
            except RuntimeError as error:
                return self._refused(request, question, str(error), 500)

        return handle

    def _refused(
        self, request: Request, question: PageQuestion, message: str, status: int = 400
    ) -> Response:
        task = next((name for name, path in PATHS.items() if path == request.url.path), "price")
        part = _wants_part(request)
        return self._html(task, question, error=with_labels(message), status=status, part=part)

    async def _unknown(self, request: Request, _: Exception) -> Response:
        return self._refused(request, PageQuestion(), "no page has this address", 404)

    def _page_of(self, task: str) -> Respond:
        async def respond(request: Request, question: PageQuestion) -> Response:
            if task == "compare" and not question.get("clusters"):
                return self._html(task, question)  # the form alone
            answer = await self.answers.get(task, question, request.is_disconnected)
            return self._html(task, question, answer=answer, part=_wants_part(request))

        return respond

    def _file_of(self, task: str) -> Respond:
        async def respond(request: Request, question: PageQuestion) -> Response:
            file = await self.answers.get(task, question, request.is_disconnected)
            named = {"Content-Disposition": f'attachment; filename="{file.name}"'}
            return Response(file.data, media_type=file.kind, headers=named)

        return respond

    async def _activity(self, request: Request, question: PageQuestion) -> Response:
        task = request.path_params["task"]
        if task not in PATHS:
            raise InputError("no activity has this name")
        return StreamingResponse(
            self._activities(request, task, question), media_type="text/event-stream"
        )

    async def _activities(
        self, request: Request, task: str, question: PageQuestion
    ) -> AsyncIterator[str]:
        """Give activity and seconds until the answer is kept; a client that leaves ends it."""
        since = time.monotonic()
        if (task, question) not in self.answers.kept:
            asked = self.answers.begin(task, question)
            waiting = asyncio.ensure_future(self.answers.get(task, question))
            try:
                while not (await asyncio.wait([waiting], timeout=EVERY))[0]:
                    if await request.is_disconnected():
                        return
                    seconds = time.monotonic() - since
                    yield _event("activity", {**asked.activity.to_dict(), "seconds": seconds})
                waiting.exception()  # the page shows it
            finally:
                waiting.cancel()
        yield _event("done", {})

    def _static(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        data, kind = (FOLDER / "static" / name).read_bytes(), STATIC[name]

        async def handle(_: Request) -> Response:
            return Response(data, media_type=kind)

        return handle

    def _html(
        self,
        task: str,
        question: PageQuestion,
        *,
        answer: Any = None,
        error: str = "",
        status: int = 200,
        part: bool = False,
    ) -> Response:
        values = {
            **self.shared,
            "task": task,
            "question": question,
            "given": {name: question.get(name) for name in BY_NAME},
            "degrees": _degrees(question),
            "answer": answer,
            "error": error,
            "part": part,
        }
        return HTMLResponse(self.templates.get_template("page.html").render(values), status)


def _list(name: str, values: Iterable[str]) -> Markup:
    """Return a list that a field proposes."""
    options = (Markup('<option value="{}"></option>').format(value) for value in values)
    return Markup('<datalist id="{}">{}</datalist>\n').format(name, Markup().join(options))


def _known_clusters() -> list[str]:
    """Return clusters that the form proposes: usual ones, then a node of each accelerator."""
    each = (f"8x{one.name}" for one in accelerators() if one.device != "cpu")
    return list(dict.fromkeys((*USUAL_CLUSTERS, *each)))


def _wants_part(request: Request) -> bool:
    """Whether the page's script wants what follows a control, without the form."""
    wanted: str | None = request.headers.get("x-part")
    return wanted == "answer"


def _degrees(question: PageQuestion) -> list[str]:
    """Return the degrees that a list offers: divisors of the accelerators."""
    try:
        num_gpus = question.cluster.num_gpus
    except ShardplanError:
        num_gpus = MOST_DEGREE
    return [str(one) for one in divisors(num_gpus) if one <= MOST_DEGREE]


def _event(name: str, value: object) -> str:
    return f"event: {name}\ndata: {json.dumps(value)}\n\n"
