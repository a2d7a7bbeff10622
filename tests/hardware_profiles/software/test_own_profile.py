"""Software profiles in a file of one's own."""

from pathlib import Path

import pytest

from cost_models.uncertainty import memory_spread, peak_was_compared, time_spread
from hardware_profiles.cluster.catalogue import find_accelerator
from hardware_profiles.errors import InputError
from hardware_profiles.software.trainer import software_profile

FILE = """
inherits = "{parent}"
kernels.rate_share = {{ value = 0.5, source = "mine" }}
[learned]
runs = 3
accelerator = "H100-SXM-80GB"
time = {{ below = 0.03, above = 0.04, source = "here" }}
memory = {{ below = 0.02, above = 0.02, source = "here" }}
"""


def own(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_file_changes_figures_of_the_profile_that_it_inherits(tmp_path: Path) -> None:
    name = own(tmp_path, FILE.format(parent="torchtitan"))
    found, parent = software_profile(name), software_profile("torchtitan")
    assert (found.name, found.inherits) == (name, "torchtitan")
    assert (found.kernels.rate_share, parent.kernels.rate_share) == (0.5, 1.0)
    assert found.sources["kernels.rate_share"] == "mine"
    assert found.overlap == parent.overlap


def test_intervals_of_a_file_are_learned_ones_on_their_accelerator(tmp_path: Path) -> None:
    name = own(tmp_path, FILE.format(parent="torchtitan"))
    ours, other = find_accelerator("H100-SXM-80GB"), find_accelerator("A100-SXM-80GB")
    assert time_spread(name, ours).below == 0.03
    assert time_spread(name, other) == time_spread("torchtitan", other)
    assert memory_spread(name).below == 0.02
    compared = own(tmp_path / "new", FILE.format(parent="fms-fsdp"))
    assert peak_was_compared(compared)
    assert not peak_was_compared("fms-fsdp")
    without = own(tmp_path / "plain", 'inherits = "torchtitan"\n')
    assert memory_spread(without) == memory_spread("torchtitan")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FILE.format(parent="torchtitn"), "'torchtitn' is unknown. Did you mean torchtitan"),
        (FILE.format(parent="my.toml"), "inherits = 'my.toml' (must be a profile of shardplan)"),
        ("kernels.rate_share = { value = 0.0, source = '' }", "rate_share = 0.0 (must be"),
        ("kernel.rate_share = 1", "unknown key 'kernel'"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, words: str) -> None:
    name = own(tmp_path, text)
    with pytest.raises(InputError) as found:
        software_profile(name)
    assert words in str(found.value)
    assert name in str(found.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match=r"none\.toml: no such file \(a software profile"):
        software_profile("none.toml")


@pytest.mark.parametrize("name", ["x" * 70_000 + ".toml", "fsdp2+" + "x" * 5000])
def test_a_very_long_name_is_refused_in_a_short_message(name: str) -> None:
    with pytest.raises(InputError, match="at most 1,000 characters") as found:
        software_profile(name)
    assert len(str(found.value)) < 200
