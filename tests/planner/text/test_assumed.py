"""Assumptions in one line: what a reader must know first."""

from planner.text.assumed import assumed_line

BATCH = "global_batch_size 2048 (default: of comparisons)"


def test_the_price_behind_the_dollars_comes_before_other_defaults() -> None:
    (line,) = assumed_line([BATCH, "H100 $3.99 an hour (published: a list of prices)"])
    assert line.split(None, 1)[1] == "$3.99 an hour, global batch 2,048 (-v: all)"


def test_prices_of_several_clusters_and_given_ones_are_not_picked_out() -> None:
    several = [f"{name} $3.99 an hour (published: a list)" for name in ("H100", "A100")]
    (line,) = assumed_line([BATCH, *several])
    assert line.split(None, 1)[1] == "global batch 2,048 (-v: all)"
    (line,) = assumed_line([BATCH, "H100 $2.5 an hour (given)"])
    assert line.split(None, 1)[1].startswith("global batch 2,048, H100 $2.5 an hour")
