"""The comparison of prediction and measurement, and the folders of runs."""

from executor.records.report import ComparisonRow, as_text, compare


def _rank(stage, peak, weights, sent):
    return {
        "stage": stage,
        "memory": {
            "peak_bytes": peak,
            "parts": {"weights": weights, "activations": 7, "gradients": 2},
        },
        "communication": [{"axis": "pipeline", "kind": "send", "count": 1, "bytes": sent}],
    }


def test_prediction_and_measurement_are_set_side_by_side():
    measured = {
        "step_seconds": 2.0,
        "tokens_per_second": 50.0,
        "ranks": [_rank(0, 100, 40, 8), _rank(0, 90, 40, 6), _rank(1, 60, 20, 5)],
    }
    prediction = {
        "time": {"step_seconds": 1.0},
        "memory": {
            "stages": [
                {"stage": 0, "peak_bytes": 500, "allocated_bytes": 100, "parts": {"weights": 40}},
                {"stage": 1, "peak_bytes": 66},
            ]
        },
        "communication": [
            {"stage": 0, "axis": "pipeline", "kind": "send", "count": 1, "bytes": 8},
            {"stage": 1, "axis": "pipeline", "kind": "send", "count": 1, "bytes": 6},
        ],
    }
    rows = {row.name: row for row in compare(prediction, measured, 100)}
    assert rows["step time"].difference == -0.5
    assert rows["tokens per second"].predicted == 100.0
    assert rows["peak memory, pipeline rank 0"].difference == 0.0
    assert rows["peak memory, pipeline rank 1"] == ComparisonRow(
        "peak memory, pipeline rank 1", "bytes", 66, 60
    )
    assert rows["  weights"].predicted == rows["  weights"].measured == 40
    assert rows["  optimizer states"].predicted is None
    assert rows["  others"].measured == 7 + 2
    assert rows["send (pipeline)"].measured == 8 + 5
    assert rows["send (pipeline)"].predicted == 8 + 6
    text = as_text(rows.values(), on_gpu=False)
    assert "50.0 % low" in text
    assert "equal" in text
    assert all(row.predicted is None for row in compare({}, measured, 100))


def test_a_run_on_other_devices_is_compared_in_memory_alone():
    measured = {
        "step_seconds": 0.01,
        "tokens_per_second": 1e4,
        "ranks": [_rank(0, 100, 40, 8)],
    }
    prediction = {
        "time": {"step_seconds": 1.118},
        "memory": {"stages": [{"stage": 0, "peak_bytes": 110, "allocated_bytes": 110}]},
    }
    rows = compare(prediction, measured, 100, same_machine=False)
    differences = {row.name: row.difference for row in rows}
    assert differences["step time"] is differences["tokens per second"] is None
    assert abs(differences["peak memory"] - 0.1) < 1e-12
    other = "the plan was priced for 8 H100-SXM-80GB, the run used 2 CPU processes"
    text = as_text(rows, on_gpu=False, other=other)
    assert text.count("not comparable") == 3
    assert other in " ".join(text.split())
    assert "10.0 % high" in text
    # on the same machine a prediction that is far off is a factor, and a busy processor may be why
    same, busy = compare(prediction, measured, 100), "busy (load 5.3 on 2 cores)"
    assert "112 times as high" in as_text(same, on_gpu=False)
    assert busy in " ".join(as_text(same, on_gpu=False, busy=busy).split())
    for where in ({"on_gpu": True}, {"on_gpu": False, "other": other}):
        assert "busy" not in as_text(same, busy=busy, **where)
