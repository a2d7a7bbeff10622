"""The page's server without a network: figures, refusals, hostile input, files."""

import io
import json
import re
import zipfile
from collections.abc import Iterator
from html import unescape
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

import planner
from cost_models.plan_file import plan_file_from_dict
from cost_models.units import format_bytes, format_seconds
from hardware_profiles.errors import InputError, ShardplanError
from planner.page.guard import SECURITY
from planner.page.question import PageQuestion
from planner.page.server import PageServer
from planner.page.tasks import TASKS
from planner.page.workers import Answers

PORT, TOKEN = 8765, "a-token"
BASE = f"http://127.0.0.1:{PORT}"
HELD = "model=llama-3-8b&cluster=8xA100-80GB&seq_len=2k&zero=3&recompute=full&mbs=1"


class InProcess(Answers):
    """Answers that are computed here, without worker processes."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def start(self) -> None:
        """Start nothing."""

    def stop(self) -> None:
        """End nothing."""

    async def get(self, task: str, question: PageQuestion, left: Any = None) -> Any:
        """Return the answer at once."""
        return TASKS[task](question)


@pytest.fixture(scope="module")
def stranger() -> Iterator[TestClient]:
    app = PageServer(InProcess()).app(port=PORT, token=TOKEN)
    with TestClient(app, base_url=BASE, follow_redirects=False) as client:
        yield client


@pytest.fixture
def client(stranger: TestClient) -> Iterator[TestClient]:
    stranger.cookies.set(f"shardplan-{PORT}", TOKEN, domain="127.0.0.1")
    yield stranger
    stranger.cookies.clear()


def shown(text: str) -> str:
    """Return the words of a page."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", text)).split())


@pytest.mark.parametrize("degrees", ["", "&tp=2&pp=2"])
def test_the_figures_are_those_of_fit(client: TestClient, degrees: str) -> None:
    page = client.get(f"/?{HELD}{degrees}")
    plan: dict[str, Any] = {"data_parallel": 8}
    if degrees:
        plan = {"data_parallel": 2, "tensor_parallel": 2, "pipeline_parallel": 2}
    answer = planner.fit(
        "llama-3-8b",
        "8xA100-80GB",
        seq_len=2048,
        zero_stage=3,
        recompute="full",
        micro_batch_size=1,
        **plan,
    )
    words = shown(page.text)
    assessment = answer.assessment
    assert page.status_code == 200
    assert f"Peak {format_bytes(assessment.memory.peak_bytes)}" in words
    assert f"Step {format_seconds(assessment.time.step_seconds)}" in words
    assert page.text.count('class="what"') == plan.get("pipeline_parallel", 1)
    for name, value in SECURITY.items():
        assert page.headers[name] == value
    assert not re.search(r"<script(?! src)|<style| style=| on[a-z]+=", page.text)


def test_the_script_gets_the_answer_without_the_form(client: TestClient) -> None:
    whole = client.get("/?model=gpt2&cluster=1xL40S&zero=0&recompute=none&mbs=1").text
    part = client.get(
        "/?model=gpt2&cluster=1xL40S&zero=0&recompute=none&mbs=1", headers={"X-Part": "answer"}
    ).text
    begin, end = '<section id="answer"', "</section>"
    assert whole[whole.index(begin) : whole.index(end)] == part[part.index(begin) : part.index(end)]
    assert [name in part for name in ("<title>", "<nav", 'id="status"', 'id="form"', "<body")] == [
        *(True, True, True),
        *(False, False),
    ]
    wrong = client.get("/?cluster=nonsense", headers={"X-Part": "answer"})
    assert wrong.status_code == 400
    assert 'role="alert"' in wrong.text


def test_a_stage_is_named_where_there_are_several(client: TestClient) -> None:
    ask = "model=gpt2&zero=0&recompute=none&mbs=1"
    assert "The peak comes" in client.get(f"/?{ask}&cluster=1xL40S").text
    assert "The peak is on stage" in client.get(f"/?{ask}&cluster=2xL40S&pp=2").text


def test_a_pasted_config_is_a_model(client: TestClient) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 512}
    query = PageQuestion.of({"config": json.dumps(config), "zero": "1"}).address(
        recompute="none", mbs="1"
    )
    page = client.get(f"/?{query}")
    assert page.status_code == 200
    assert "config.json (" in shown(page.text)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("model=lama-3-8b", "model 'lama-3-8b' is not known"),
        ("config={", "not JSON"),
        ("tp=two", "Tensor parallel: 'two' is not a whole number"),
        ("zero=9", "ZeRO stage: '9' (must be one of 0, 1, 2, 3)"),
        ("cluster=/etc/passwd", "files and this machine (here) are for the command line"),
        ("nothing=1", "no field is called 'nothing'"),
    ],
)
def test_an_error_is_one_message_in_the_page(client: TestClient, query: str, message: str) -> None:
    page = client.get(f"/?{query}")
    assert page.status_code == 400
    assert page.text.count('role="alert"') == 1
    assert message in shown(page.text)
    assert "Traceback" not in page.text


def test_everything_is_escaped(client: TestClient) -> None:
    evil = "\"><script>alert(1)</script>'{{7*7}}"
    for path, name in [("/", "model"), ("/", "config"), ("/best", "require"), ("/compare", "tp")]:
        page = client.get(path, params={"clusters": "1xL4,2xL4", name: evil})
        assert page.status_code == 400, name
        assert "<script>" not in page.text
        assert "49" not in shown(page.text).split("Model and cluster")[0]


REFUSED = [
    ({"headers": {"host": "evil.example:8765"}}, 421),
    ({"headers": {"host": "127.0.0.1:9999"}}, 421),
    ({"headers": {"origin": "http://evil.example"}}, 403),
    ({"headers": {"origin": "null"}}, 403),
    ({"headers": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}}, 403),
    ({"method": "POST"}, 405),
    ({"content": b"x"}, 413),
    ({"content": iter([b"x"])}, 413),
    ({"cookies": {f"shardplan-{PORT}": "another"}}, 403),
    ({"cookies": {}}, 403),
    ({"url": "/?token=another"}, 403),
    ({"url": "/?token=a-token&token=a-token"}, 403),
    ({"url": "/page.js", "cookies": {}}, 403),
]


@pytest.mark.parametrize(("request_", "status"), REFUSED)
def test_a_request_is_refused(stranger: TestClient, request_: dict[str, Any], status: int) -> None:
    given = {"method": "GET", "url": "/", **request_}
    stranger.cookies.clear()
    cookies = given.pop("cookies", {f"shardplan-{PORT}": TOKEN})
    for name, value in cookies.items():
        stranger.cookies.set(name, value, domain="127.0.0.1")
    answer = stranger.request(**given)
    stranger.cookies.clear()
    assert answer.status_code == status
    assert "<" not in answer.text
    assert answer.headers["content-security-policy"] == SECURITY["Content-Security-Policy"]


@pytest.mark.parametrize("path", ["/?model=gpt2&tp=2", "//evil.example/?"])
def test_the_token_becomes_a_cookie(stranger: TestClient, path: str) -> None:
    answer = stranger.get(f"{BASE}{path}&token={TOKEN}")
    stranger.cookies.clear()
    assert answer.status_code == 303
    assert answer.headers["location"] in ("/?model=gpt2&tp=2", "/evil.example/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie


def test_a_long_address_is_refused() -> None:
    scope = {"method": "GET", "headers": [(b"host", b"127.0.0.1:8765")]}
    guard = PageServer(InProcess()).app(port=PORT, token=TOKEN)
    assert guard.refusal({**scope, "query_string": b"a" * 100_000}) is None
    answer = guard.refusal({**scope, "query_string": b"a" * 101_000})
    assert answer is not None
    assert answer.status_code == 414


def test_a_link_from_elsewhere_leads_here(client: TestClient) -> None:
    elsewhere = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/compare", headers=elsewhere).status_code == 200


def test_files(client: TestClient) -> None:
    saved = client.get(f"/plan.json?{HELD}")
    assert saved.headers["content-disposition"] == 'attachment; filename="plan.json"'
    assert plan_file_from_dict(saved.json(), "plan.json").plan.zero_stage == 3
    archive = client.get(f"/export?{HELD}&to=deepspeed")
    with zipfile.ZipFile(io.BytesIO(archive.content)) as file:
        assert {"README.txt", "ds_config.json"} <= set(file.namelist())
    assert client.get(f"/export?{HELD}").status_code == 400
    assert "traceEvents" in client.get(f"/trace.json?{HELD}").json()


def test_no_other_address(client: TestClient) -> None:
    for path in ("/docs", "/../pyproject.toml", "/%2e%2e/pyproject.toml", "/templates/page.html"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "no page has this address" in answer.text


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.page import serve

    monkeypatch.setattr(serve, "NEEDED", ("starlette", "no_such_package"))
    with pytest.raises(InputError, match=r'no_such_package, which is not installed: pip install "'):
        serve.serve()


def test_a_port_in_use_is_named() -> None:
    from planner.page.serve import listening

    with listening(None) as taken:
        taken.listen()
        with pytest.raises(ShardplanError, match="--port"):
            listening(taken.getsockname()[1])
