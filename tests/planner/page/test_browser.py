"""The page in a real Chromium: load, change, plan, download, errors, narrow and dark screens.

Skipped without Playwright or a browser. AXE names a copy of axe.min.js (npm: axe-core), with which
accessibility is checked too.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
api = pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
PLAN = "/?model=llama-3-8b&cluster=8xA100-80GB&tp=2&pp=2&zero=1&recompute=full&mbs=1&batch=16"
WAIT = 120_000  # milliseconds


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    words = [sys.executable, "-m", "planner", "serve"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as server:
        assert server.stderr is not None
        try:
            found = re.search(r"http://\S+", server.stderr.readline())
            assert found is not None
            yield found[0]
        finally:
            server.terminate()
            server.wait(timeout=30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with api.sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture(params=["wide", "narrow", "dark"])
def page(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Any]:
    size = {"width": 375 if request.param == "narrow" else 1280, "height": 800}
    scheme = "dark" if request.param == "dark" else "light"
    base = address.split("/?")[0]
    context = browser.new_context(viewport=size, color_scheme=scheme, base_url=base)
    page = context.new_page()
    page.set_default_timeout(WAIT)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda one: problems.append(one.text) if "400" not in one.text else None)
    page.goto(address)
    assert "token" not in page.url
    yield page
    context.close()
    assert problems == []


def looks_right(page: Any) -> None:
    """Nothing is wider than the screen, and axe (where it is) finds nothing serious."""
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= page.viewport_size["width"]
    if "AXE" not in os.environ:
        return
    session = page.context.new_cdp_session(page)  # past the policy of the page
    script = Path(os.environ["AXE"]).read_text() + ";axe.run().then(r => JSON.stringify("
    script += "r.violations.map(v => [v.impact, v.id, v.nodes.map(n => n.html)])))"
    found = session.send("Runtime.evaluate", {"expression": script, "awaitPromise": True})
    assert [one for one in json.loads(found["result"]["value"]) if one[0] != "minor"] == []


def step(page: Any) -> str:
    return str(page.locator(".figures div", has_text="Step").locator("dd").inner_text())


def test_a_plan_is_moved(page: Any) -> None:
    page.goto(PLAN)
    looks_right(page)
    assert page.locator(".bar").count() == 2
    before = step(page)
    with page.expect_response(re.compile("pp=4")):
        page.get_by_label("Pipeline parallel").select_option("4")
    page.wait_for_function("document.querySelectorAll('.bar').length === 4")
    assert step(page) != before
    assert "pp=4" in page.url
    slider = page.get_by_label("Sequence length, powers of two")
    with page.expect_response(re.compile("seq_len=8192")):
        slider.focus()
        page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile("seq_len=8192"))
    page.wait_for_function("!document.querySelector('#answer[aria-busy]')")
    assert (
        page.locator("#status")
        .inner_text()
        .startswith(page.locator("#verdict strong").inner_text())
    )
    page.reload()  # the address carries the question
    assert page.locator(".bar").count() == 4
    with page.expect_download() as download:
        page.get_by_role("link", name="plan.json").click()
    assert json.loads(Path(download.value.path()).read_text())["plan"]["pipeline_parallel"] == 4


def test_a_search_and_an_error(page: Any) -> None:
    page.goto("/?model=gpt2&cluster=2xL4")
    page.get_by_role("button", name="Find the best").click()
    page.wait_for_url(re.compile("/best"))
    looks_right(page)
    page.locator("tbody a").first.click()
    page.wait_for_selector("#verdict")
    model = page.get_by_role("combobox", name="Model", exact=True)
    model.fill("lama-3-8b")
    model.press("Tab")
    page.wait_for_selector("[role=alert]")
    assert "model 'lama-3-8b' is not known" in page.locator("[role=alert]").inner_text()
    assert page.locator("[role=alert]").count() == 1
    looks_right(page)


def test_a_change_before_the_script_listens_is_asked(page: Any) -> None:
    delayed: list[Any] = []
    page.route("**/page.js", lambda route: delayed.append(route))
    page.goto(PLAN, wait_until="commit")
    page.wait_for_selector("#verdict")
    page.get_by_label("Global batch", exact=True).fill("32")
    page.get_by_label("Model", exact=True).focus()
    for route in delayed:
        route.continue_()
    page.wait_for_url(re.compile("batch=32"))


def test_a_question_without_script(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.set_default_timeout(WAIT)
    page.goto(address)
    page.get_by_label("Tensor parallel").select_option("2")
    page.get_by_role("button", name="Estimate this plan").click()
    page.wait_for_url(re.compile("tp=2"))
    assert "--tp 2" in page.locator("#verdict").inner_text()
    context.close()
