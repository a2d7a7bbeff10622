"""Commands that are built from dataclasses of options."""

from dataclasses import dataclass
from typing import Annotated, Literal

import click
import pytest
from msgspec import Meta

from hardware_profiles.command_line.declarations import command
from hardware_profiles.command_line.group import LazyGroup
from hardware_profiles.command_line.usage import parse
from hardware_profiles.errors import InputError
from hardware_profiles.options import Option


def read_even(text: str) -> int:
    """Read an even number."""
    if not text.isdecimal() or int(text) % 2:
        raise InputError(f"{text!r} (must be even)")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A part of the options."""

    kilometres: Annotated[
        int, Meta(ge=1, le=300), Option(group="speed", help="default: {default}")
    ] = 90
    gear: Annotated[Literal["low", "high"], Option(group="speed")] = "low"


@dataclass(frozen=True, kw_only=True)
class Drive:
    """Options of a command."""

    place: Annotated[str, Option("PLACE", help="where to")]
    speed: Speed
    via: Annotated[tuple[str, ...], Option(help="on the way")] = ("nothing",)
    stops: Annotated[list[str] | None, Option("--stop")] = None
    even: Annotated[int, Option(read=read_even)] = 2
    music: Annotated[str | None, Option(optional_value="any")] = None
    belts: Annotated[bool, Option("--belts/--no-belts", short="b")] = True


def drive(*words: str) -> Drive:
    made = parse(command(Drive, name="drive", help="Go."), words, "drive")
    assert isinstance(made, Drive)
    return made


def test_a_command_returns_its_dataclass() -> None:
    assert drive("home") == Drive(place="home", speed=Speed())
    given = drive("home", "--via", "a", "--via=b", "--stop", "c", "--gear", "high", "--even", "4")
    assert given == Drive(
        place="home", speed=Speed(gear="high"), via=("a", "b"), stops=["c"], even=4
    )
    assert drive("home", "--music").music == "any"
    assert drive("--music", "--even", "8", "home").even == 8
    assert drive("home", "--music", "loud").music == "loud"


def test_words_with_an_equals_sign_are_options() -> None:
    given = drive("home", "b=off", "kilometres=200", "stop=a", "stops=b", "--via", "c")
    assert given == Drive(
        place="home", speed=Speed(kilometres=200), stops=["a", "b"], belts=False, via=("c",)
    )


@dataclass(frozen=True, kw_only=True)
class Cargo:
    """A part of the load."""

    crates: Annotated[int, Option(short="cr")] = 0


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """Options of a command that collects words."""

    place: Annotated[str, Option("PLACE")]
    stops: Annotated[int, Option()] = 0
    load: Annotated[str | None, Option(collects=Cargo)] = None


def deliver(*words: str) -> Delivery:
    made = parse(command(Delivery, name="deliver", help="Go."), words, "deliver")
    assert isinstance(made, Delivery)
    return made


def test_an_option_collects_the_words_of_another_dataclass() -> None:
    assert deliver("home", "cr=3", "stops=2k").load == "cr=3"
    assert deliver("stops=2k", "cr=3", "home") == Delivery(place="home", stops=2048, load="cr=3")
    assert deliver("home", "--load", "stops=2").load == "stops=2"  # the value of an option
    assert deliver("home", "stops=2k").stops == 2048
    assert deliver("home", "--load", "crates=1", "cr=3").load == "crates=1,cr=3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["home", "crate=3"], "crate=3: no option is called crate. Did you mean crates"),
        (["home", "stops=2", "--stops", "3"], "stops=2: --stops is given twice"),
        (["home", "stops=two"], "'two' (must be a whole number"),
        (["home", "3"], "Got unexpected extra argument (3)"),
    ],
)
def test_a_wrong_word_after_the_arguments_is_an_input_error(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as raised:
        deliver(*words)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kilometers", "3"], "No such option: --kilometers. Did you mean --kilometres?"),
        (["--kilometres", "0"], "'--kilometres': 0 (must be a whole number from 1 to 300)"),
        (["--kilometres", "x"], "'--kilometres': 'x' (must be a whole number from 1 to 300)"),
        (["--gear", "hihg"], "'hihg' (must be one of low, high). Did you mean high?"),
        (["--even", "3"], "'3' (must be even)"),
        ([], "Missing argument 'PLACE'"),
    ],
)
def test_a_wrong_word_is_an_input_error(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as raised:
        drive(*words, *(["home"] if words else []))
    assert message in str(raised.value)
    assert str(raised.value).endswith(("; see drive --help", "? See drive --help"))
    assert "\n" not in str(raised.value)


def test_help_shows_groups_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        drive("--help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "Speed:\n" in text
    assert "default: 90" in text


def test_the_commands_of_a_group_share_an_epilog(capsys: pytest.CaptureFixture[str]) -> None:
    table = {"drive": (f"{__name__}:Drive", "Go.")}
    group = LazyGroup(table, name="car", epilog_of_commands="Exit codes: 0.")
    assert parse(group, ["drive", "home"], "car") == Drive(place="home", speed=Speed())
    with pytest.raises(SystemExit):
        parse(group, ["drive", "-h"], "car")
    assert "Exit codes: 0." in capsys.readouterr().out
    with pytest.raises(InputError, match=r"No such command 'driv'\. Did you mean drive"):
        parse(group, ["driv"], "car")


def test_a_command_may_also_be_a_function() -> None:
    def add(a: Annotated[int, Option("A")], b: Annotated[int, Option()] = 2) -> list[int]:
        return [a + b]

    made = command(add, name="add", help="Add.")
    assert isinstance(made, click.Command)
    assert parse(made, ["3"], "add") == [5]


@dataclass(frozen=True, kw_only=True)
class Haul:
    """Options with names in other tools, and an argument that a second one replaces."""

    goods: Annotated[str, Option("GOODS", help="of what kind")]
    place: Annotated[str, Option("PLACE", help="home, away", elsewhere=("town",), replaceable=True)]
    gear: Annotated[Literal["low", "high"], Option(elsewhere=("fast=high", "speed"))] = "low"
    wheel_count: Annotated[int, Option("--wheels", short="w", help="turning")] = 4


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--fast", "Did you mean --gear high?"),
        ("--speed", "Did you mean --gear?"),
        ("--high", "Did you mean --gear high?"),
        ("--wheel-count", "Did you mean --wheels?"),
        ("--wheels6", "Did you mean --wheels 6?"),
        ("--town", "PLACE gives it: home, away"),
        ("--wheel", "Did you mean --wheels?"),
        ("--gears", "Did you mean --gear?"),
        ("--xy", "No such option: --xy; see"),
        ("--gear", "--gear needs a value: low, high"),
        ("--wheels", "--wheels needs a value, --wheels N: turning"),
    ],
)
def test_a_word_of_another_tool_names_the_option(word: str, message: str) -> None:
    made = command(Haul, name="haul", help="Go.")
    with pytest.raises(InputError) as error:
        parse(made, ["coal", "home", word], "haul")
    assert message in str(error.value)


def test_a_second_argument_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    made = command(Haul, name="haul", help="Go.")
    assert parse(made, ["coal", "home", "--wheels", "6", "away"], "haul").place == "away"
    assert capsys.readouterr().err == "away instead of home\n"
    with pytest.raises(InputError, match="the arguments are GOODS PLACE"):
        parse(made, ["coal", "home", "away", "far"], "haul")
