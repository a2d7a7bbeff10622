"""Flash attention of one H200 (hardware_profiles/cluster/measured) by head and length."""

import csv
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

import hardware_profiles
from cost_models.compute.attention import CoreWork, attention_core_seconds, core_ratio
from cost_models.compute.rates import rates
from cost_models.model.spec import Attention
from hardware_profiles.cluster.parse import parse_cluster
from hardware_profiles.software.trainer import software_profile

FOLDER = Path(hardware_profiles.__file__).parent / "cluster/measured/H200-SXM-141GB-2026-11-27"


def _errors(head: int, op: str = "attention") -> Iterator[float]:
    """Yield the errors of the times of heads of a size."""
    software = software_profile("shardplan")
    accelerator = parse_cluster("1xH200-SXM").accelerator
    rate = rates(accelerator, "bf16", software, long_run=False)
    with (FOLDER / "kernels.csv").open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if not row["op"].startswith(op):
                continue
            sequences, heads, groups, tokens, size = map(int, re.findall(r"\d+", row["shape"]))
            if size != head:
                continue
            kind = Attention(heads, groups, size, size, causal="True" in row["shape"])
            shape = sequences * tokens, tokens, 1, "flash", 2.0, rate, software
            seconds = float(attention_core_seconds(CoreWork(kind, *shape)))
            if "backward" in row["op"]:
                seconds *= core_ratio("flash", rate, size)
            yield seconds / float(row["seconds"]) - 1.0


@pytest.mark.parametrize("head", [64, 80, 128, 256])
def test_heads_and_lengths_have_the_times_of_an_h200(head: int) -> None:
    errors = list(_errors(head))
    assert statistics.median(map(abs, errors)) < 0.15
    assert max(map(abs, errors)) < 0.28
