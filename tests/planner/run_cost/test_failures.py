"""A whole run by the clock: failures, checkpoints, CO2, and where they are said."""

import json
import shlex
from functools import cache
from typing import Any

import pytest

import planner
from cost_models.plan.plan import Plan
from hardware_profiles.errors import InputError
from hardware_profiles.software.failures import failure_profile, parse_failures
from planner.answer.fit_answer import FitAnswer
from planner.cli.app import main
from planner.run_cost.failures import FailureEstimate, failure_estimate, writers_of

RUN = "llama-3-8b 8xA100-80GB --seq-len 4096 --global-batch-size 64 --tokens 100B"


def printed(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(shlex.split(words))
    return capsys.readouterr().out


@cache
def fitted(**options: Any) -> FitAnswer:
    answer = planner.fit("llama-3-8b", "8xA100-80GB", seq_len=4096, global_batch_size=64, **options)
    assert isinstance(answer, FitAnswer)
    return answer


def failing(said: str | None) -> FailureEstimate:
    answer = fitted()
    return failure_estimate(answer.scenario, answer.plan, parse_failures(said), 2.0)


def test_fit_says_a_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(printed(f"fit {RUN} --price 2 --carbon 400 --json", capsys))
    job, time = answer["job"], answer["time"]
    assert job["steps"] == -(-100_000_000_000 // (64 * 4096))
    assert job["seconds"] == pytest.approx(job["steps"] * time["step_seconds"])
    assert job["dollars"] == pytest.approx(2 * job["gpu_hours"])
    assert job["joules"] == pytest.approx(job["seconds"] * 8 * 400)
    assert job["co2_kg"] == pytest.approx(job["joules"] / 3.6e6 * 0.4)
    run = job["with_failures"]
    assert run["seconds_between_failures"] == pytest.approx(50_677 / 8 * 3600)
    assert 0.99 < run["goodput"] < 1.0
    for name in ("seconds", "gpu_hours", "dollars", "joules", "co2_kg"):
        assert run[name] == pytest.approx(job[name] / run["goodput"])
    steps = run["checkpoint_every_steps"]
    assert run["checkpoint_interval_seconds"] == pytest.approx(steps * time["step_seconds"])
    assert time["tokens_per_second"] == pytest.approx(8 * time["tokens_per_second_per_gpu"])
    assert "6 N + 12 L h s" in time["utilisation_convention"]


def test_fit_without_tokens_says_nothing_of_runs() -> None:
    answer = fitted()
    assert answer.job is None
    assert "Failures" not in str(answer)
    assert "tokens/s together" in answer.text(verbose=True)


def test_plan_says_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan {RUN} --fix tp=1,pp=1,zero=3 --failures mtbf=500,stall=30"
    assert "(with failures)" in " ".join(printed(words, capsys).split())
    text = printed(f"{words} -v", capsys)
    assert "Failures   one in 2.6 days" in text
    assert "(given)" in text


def test_a_limit_that_failures_break_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"plan {RUN} --fix tp=1,pp=1,zero=3,recompute=none --top 1"
    job = json.loads(printed(f"{words} --json", capsys))["plans"][0]["job"]
    days = job["seconds"] * 1.0001 / 86_400
    words = f"{words} --days {days:.6f} --failures mtbf=100"
    run = json.loads(printed(f"{words} --json", capsys))["plans"][0]["job"]
    assert run["within_days"] is True
    assert run["with_failures"]["within_days"] is False
    assert run["with_failures"]["within_budget"] is None
    assert "more than --days" in " ".join(printed(words, capsys).split())


def test_worse_machines_make_less_progress() -> None:
    shares = [
        failing(said).goodput
        for said in (None, "mtbf=5000", "mtbf=500", "mtbf=500,restart=120", "mtbf=500,stall=600")
    ]
    assert shares[0] > shares[1] > shares[2] > shares[3]
    assert shares[2] > shares[4]


def test_who_writes() -> None:
    scenario = fitted().scenario
    assert writers_of(scenario, Plan(data_parallel=8, zero_stage=3)) == (8, 1)
    assert writers_of(scenario, Plan(data_parallel=8, zero_stage=0)) == (1, 1)
    assert writers_of(scenario, Plan(data_parallel=4, tensor_parallel=2, zero_stage=0)) == (2, 1)


def test_slow_storage_spaces_checkpoints_out() -> None:
    slow, fast = (failing(f"mtbf=50,storage={gb}") for gb in (0.01, 10))
    assert slow.checkpoint_interval_seconds >= slow.checkpoint_write_seconds
    assert slow.goodput < fast.goodput


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"failures": "mtbf=1"}, "needs --tokens"),
        ({"carbon": 400}, "needs --tokens"),
        ({"price": 2}, "needs --tokens"),
        ({"tokens": "1T", "failures": "mtbv=1"}, "Did you mean mtbf"),
        ({"tokens": "1T", "failures": "restart=-1"}, "minutes until a run goes on"),
        ({"tokens": "1T", "failures": "restart"}, "must be some of mtbf=HOURS"),
        ({"tokens": "many"}, "--tokens 'many'"),
        ({"tokens": "1T", "carbon": "-4"}, "--carbon '-4'"),
        ({"tokens": "1T", "inference": True}, "--inference and --tokens"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options: dict[str, Any], said: str) -> None:
    options = {"tokens": None, **options}
    with pytest.raises(InputError) as error:
        planner.fit("llama-3-8b", "8xA100-80GB", **options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_every_figure_has_a_source() -> None:
    profile = failure_profile()
    assert 16_384 * 54 * 24 / profile.hours_between_failures.value == pytest.approx(419, rel=1e-3)
    assert "2407.21783" in profile.hours_between_failures.source
    said = parse_failures("mtbf=100")
    assert said.hours_between_failures.source == "given"
    assert said.restart_seconds == profile.restart_seconds
