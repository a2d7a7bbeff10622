"""The page of a plan or a run: well-formed, complete, safe, and never written over another file."""

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cost_models.units import format_bytes, format_gib, format_rate, format_seconds
from hardware_profiles.errors import InputError
from hardware_profiles.fields import names_in
from planner.assessment.confidence import confidence_words
from planner.assessment.verdict import WORDS
from planner.cli import app as cli
from planner.reports import pdf
from planner.reports.report import Report, report
from planner.reports.reported_plan import read_reported
from tests.planner.reports.test_trace import PLANS
from tests.planner.runs.recorded import machine, plan_file, write_plan, write_run

VOID = {"meta"}
ALLOWED = set(
    names_in("""
        html head meta title style body main h1 h2 p b i ul li pre div span small
        details summary table tr th td svg g path rect circle line text
    """)
)
HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """Collects text and elements, and fails where elements are not nested."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def check_safe(page: Page, html: str) -> None:
    """No element, attribute or address that loads or runs anything."""
    assert page.tags <= ALLOWED
    assert not any(name.startswith("on") or name in ("src", "href") for name in page.attributes)
    assert "url(" not in html
    assert "@import" not in html


def check_report(path: Path) -> Page:
    """The page is well-formed and has the figures of the answer."""
    html, reported = report(path).html, read_reported(path)
    page, found = Page(html), reported.assessment
    check_safe(page, html)
    figures = [
        WORDS[found.verdict],
        format_gib(found.memory.peak_bytes),
        format_gib(found.memory.low_bytes),
        format_gib(found.memory.high_bytes),
        format_bytes(found.budget.size),
        format_seconds(found.time.step_seconds),
        format_seconds(found.time.low_seconds),
        format_seconds(found.time.high_seconds),
        format_rate(found.time.tokens_per_second),
        confidence_words(reported.scenario),
        *(("MFU",) if found.time.mfu is not None else ()),
    ]
    assert [each for each in figures if each not in page.text] == []
    headings = "Memory over the step|Where the step goes|The passes|Roofline|Memory against time"
    assert [each for each in headings.split("|") if each not in page.text] == []
    return page


@pytest.mark.slow(seconds=30)
@pytest.mark.parametrize("name", PLANS)
def test_the_page_is_well_formed_and_has_the_figures_of_the_answer(
    name: str, tmp_path: Path
) -> None:
    plan, cluster = PLANS[name]
    check_report(write_plan(tmp_path / "plan.json", plan_file(cluster, plan)))


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    file = plan_file(PLANS["one rank"][1], PLANS["one rank"][0])
    file = replace(
        file,
        model=replace(file.model, name=HOSTILE),
        cluster=replace(file.cluster, name=HOSTILE),
        created_by=HOSTILE,
    )
    page = check_report(write_plan(tmp_path / "<b>&plan.json", file))
    assert HOSTILE in page.text
    assert "<b>&plan.json" in page.text


@pytest.mark.slow
def test_a_run_shows_what_was_measured(tmp_path: Path) -> None:
    file = plan_file()
    folder = write_run(tmp_path / "run", file, machine())
    page = Page(report(folder).html)
    assert "Predicted and measured" in page.text
    assert "inside the stated interval" in page.text
    assert "equal" in page.text
    assert "0.0 %" not in page.text.partition("Predicted and measured")[2].partition("The plan")[0]


def test_a_page_is_kept_and_errors_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_plan(tmp_path / "plan.json", plan_file())
    output = tmp_path / "report.html"
    output.write_text("mine")
    monkeypatch.setattr(pdf.shutil, "which", lambda _: None)
    for words in (
        ["report", str(path), "-o", str(output)],
        ["report", str(tmp_path / "none.json"), "-o", str(tmp_path / "x.html")],
        ["report", str(path), "-o", str(tmp_path / "none" / "x.html")],
        ["report", str(path), "-o", str(tmp_path / "x.html"), "--pdf"],
        ["report", str(path), "-o", str(tmp_path / "x.pdf"), "--pdf"],
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == 2
        message = capsys.readouterr().err
        assert message.startswith("shardplan: ")
        assert "Traceback" not in message
    assert output.read_text() == "mine"
    with pytest.raises(InputError, match="exists already"):
        Report("name", "page").save(output)


@pytest.mark.slow
def test_a_chromium_prints_the_page(tmp_path: Path) -> None:
    try:
        pdf.find_browser()
    except InputError:
        pytest.skip("no Chromium")
    pdf.write_pdf("<!doctype html><p>x</p>", tmp_path / "x.pdf")
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")
