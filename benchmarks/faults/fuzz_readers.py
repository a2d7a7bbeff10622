"""What ``benchmarks.faults.fuzz`` reads: every kind of file or request, and real samples."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlencode

MAX_CASE = 200_000  # bytes
os.environ["HF_HUB_OFFLINE"] = "1"  # whoever names a model of the hub asks for its config.json
TESTS = Path(__file__).parents[2] / "tests"
REAL = TESTS / "planner" / "exchange" / "real"  # files of other trainers


@dataclass(frozen=True)
class Reader:
    """A reader of files; ``in_one_line``: its messages have one line."""

    name: str
    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes, Path], object]
    in_one_line: bool = True


@cache
def readers() -> tuple[Reader, ...]:
    """Return all readers."""
    return (
        Reader("config.json", _configs, _read_config),
        Reader("cluster words", _cluster_words, _read_cluster_words),
        Reader("cluster.toml", _cluster_files, _read_cluster_file),
        Reader("plan.json", _plans, _read_plan),
        Reader("run.json", _runs, _read_run),
        Reader("RUNS.csv", _tables, _read_table, in_one_line=False),
        Reader("trainer's config", _trainer_files, _read_trainer_file),
        Reader("log", _logs, _read_log),
        Reader("out-of-memory error", _memory_errors, _read_memory_error),
        Reader("software.toml", _profiles, _read_profile),
        Reader("token file", _token_files, _read_token_file),
        Reader("array.npy", _arrays, _read_array),
        Reader("rows.jsonl", _rows, _read_rows),
        Reader("checkpoint index", _indexes, _read_index),
        Reader("weight index", _weight_indexes, _read_weight_index),
        Reader("safetensors", _weights, _read_weights),
        Reader("request", _requests, _read_request),
    )


def _file(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def _json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()


# --- models, clusters, plans, runs ---


def _configs() -> list[bytes]:
    from tests.samples import CONFIGS

    return [_json(config) for config in CONFIGS.values()]


def _read_config(data: bytes, folder: Path) -> object:
    from planner.request.model import resolve_model

    return resolve_model(str(_file(folder, "config.json", data))).num_parameters


def _cluster_words() -> list[bytes]:
    return [
        *(b"8xA100-80GB", b"4x8xH100-SXM", b"16xDGX-H100", b"2xp5.48xlarge", b"36xGB200"),
        *(b"8xA100-80GB,1..4x8xH100-SXM", b"1..2xL40S", b"TPU v5p-64", b"8xMI300X@2x4"),
    ]


def _read_cluster_words(data: bytes, folder: Path) -> object:
    from planner.request.clusters import clusters_of

    text = data[:400].decode(errors="replace")
    return None if "here" in text.lower() else clusters_of(text)


def _cluster_files() -> list[bytes]:
    import tempfile

    from hardware_profiles.cluster.calibration import write_cluster_toml
    from hardware_profiles.cluster.parse import parse_cluster

    found = []
    with tempfile.TemporaryDirectory() as folder:
        for text in ("8xA100-80GB", "2x8xH100-SXM", "18x4xGB200"):
            path = Path(folder) / f"{text}.toml"
            write_cluster_toml(path, parse_cluster(text))
            found.append(path.read_bytes())
    own = b'nodes = 2\ngpus_per_node = 8\naccelerator = "A100-SXM-80GB"\n[network]\n'
    return [*found, own + b'bandwidth = "200 Gbit/s"\n']


def _read_cluster_file(data: bytes, folder: Path) -> object:
    from planner.request.clusters import cluster_of

    return cluster_of(str(_file(folder, "cluster.toml", data)))


@cache
def _plans() -> list[bytes]:
    import planner

    stages = {"tensor_parallel": 3, "pipeline_parallel": 2}
    experts = {"expert_parallel": 4, "zero_stage": 1}
    options = {"seq_len": 512, "micro_batch_size": 1}
    answers = (
        planner.fit("smollm2-135m", "6xA100-80GB", **options, **stages),
        planner.fit("mixtral-8x7b", "2x8xH100-SXM", **options, **experts),
    )
    return [_json(answer.plan_file().to_dict()) for answer in answers]


def _read_plan(data: bytes, folder: Path) -> object:
    from cost_models.legality.rules import require_legal
    from cost_models.plan_file import read_plan_file
    from cost_models.pricing.prediction import scenario_of

    file = read_plan_file(_file(folder, "plan.json", data))
    require_legal(scenario_of(file), file.plan)
    return file.to_dict()


def _runs() -> list[bytes]:
    plan = json.loads(_plans()[0])
    rank = {"rank": 0, "stage": 0, "memory": {"peak_bytes": 9, "parts": {"weights": 5}}}
    rank |= {"communication": [{"axis": "data", "kind": "all_reduce", "count": 1, "bytes": 8}]}
    measured = {"step_seconds": 0.5, "phase_seconds": {"data": 0.1}, "timed_steps": 4}
    run = {"status": "finished", "plan": {"contents": plan}, "environment": {"device": "cpu"}}
    return [_json({**run, "measured": {**measured, "ranks": [rank]}})]


def _read_run(data: bytes, folder: Path) -> object:
    from planner.runs.run_record import read_run

    return read_run(_file(folder, "run.json", data)).busiest


def _tables() -> list[bytes]:
    from planner.validation.rows.runs_file import PUBLISHED

    lines = PUBLISHED.read_bytes().splitlines(keepends=True)
    return [b"".join([lines[0], *lines[start : start + 3]]) for start in (1, 200, 900)]


def _read_table(data: bytes, folder: Path) -> object:
    from planner.validation.rows.runs_file import read_runs_file

    return read_runs_file(_file(folder, "RUNS.csv", data))


# --- other trainers ---


def _trainer_files() -> list[bytes]:
    paths = sorted(p for p in REAL.iterdir() if p.suffix in (".json", ".yaml", ".yml", ".toml"))
    paths += [*sorted(REAL.glob("*.sh")), *sorted(REAL.glob("*.py"))]
    return [path.read_bytes() for path in paths]


def _read_trainer_file(data: bytes, folder: Path) -> object:
    from planner.exchange.registry import read_config

    return read_config(str(_file(folder, "trainer.txt", data)))


def _logs() -> list[bytes]:
    megatron = (
        " [2026-01-01 10:00:00] iteration {0}/ 100 | consumed samples: 64 | elapsed time per "
        "iteration (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 401.2 | global batch size: 64 |"
        " lm loss: 2.0E+00 |\n"
    )
    torchtitan = "[rank0]:[titan] - INFO - step: {0}  loss: 9.1  memory: 47.5GiB(50.0%)  tps: 800\n"
    deepspeed = "[INFO] [logging.py:96:log_dist] [Rank 0] step={0}, skipped=0, lr=[0.001]\n"
    history = [{"step": n, "loss": 2.0, "grad_norm": 1.0} for n in range(1, 9)]
    state = {"log_history": history, "global_step": 8, "train_batch_size": 4, "max_steps": 8}
    lines = [text.format(n) for text in (megatron, torchtitan, deepspeed) for n in range(1, 9)]
    texts = ["".join(lines[start : start + 8]) for start in (0, 8, 16)]
    return [*(text.encode() for text in texts), _json(state)]


def _read_log(data: bytes, folder: Path) -> object:
    from planner.observation.logs.reading import read_log

    return read_log(_file(folder, "log", data)).measured(1, 4096.0, 64)


def _memory_errors() -> list[bytes]:
    return [
        b'Traceback (most recent call last):\n  File "/a/train.py", line 7, in step\n'
        b"    loss.backward()\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 "
        b"GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.2 GiB is free. Including "
        b"non-PyTorch memory, this process has 77.9 GiB memory in use. Of the allocated memory "
        b"70.1 GiB is allocated by PyTorch, and 5.2 GiB is reserved by PyTorch but unallocated.\n"
    ]


def _read_memory_error(data: bytes, folder: Path) -> object:
    from planner.out_of_memory.explanation import explain_out_of_memory

    return str(explain_out_of_memory(data.decode(errors="replace")))


def _profiles() -> list[bytes]:
    from hardware_profiles.software.trainer import FOLDER

    return [(FOLDER / f"{name}.toml").read_bytes() for name in ("torch-trainer", "megatron")]


def _read_profile(data: bytes, folder: Path) -> object:
    from hardware_profiles.software.trainer import software_profile

    software_profile.cache_clear()  # by the name of the file
    return software_profile(str(_file(folder, "own.toml", data)))


# --- data and checkpoints ---


def _token_files() -> list[bytes]:
    import numpy as np

    header = {"dtype": "uint8", "tokens": 64, "documents": 2, "largest": 5, "vocabulary": "bytes"}
    header |= {"vocabulary_fingerprint": "bytes", "end": 0, "sha256": "0" * 64, "skipped_rows": 0}
    line = json.dumps({**header, "format": "shardplan tokens", "version": 1}).encode()
    ends = np.array([20, 64], dtype="<u8").tobytes()
    return [line.ljust(4095) + b"\n" + bytes([5] * 64) + ends]


def _read_tokens(path: Path) -> object:
    from executor.config.data_options import DataOptions
    from executor.data.opening import open_corpus

    found = []
    for packing in ("concat", "documents", "none"):
        options = DataOptions(sources=(str(path),), packing=packing)
        found.append(open_corpus(options, vocab_size=256, seq_len=8, seed=0).batch(0, 2))
    return found


def _read_token_file(data: bytes, folder: Path) -> object:
    return _read_tokens(_file(folder, "tokens.bin", data))


def _arrays() -> list[bytes]:
    import io

    import numpy as np

    kept = []
    for array in (np.arange(64, dtype=np.uint16), np.zeros((2, 2), np.float32)):
        buffer = io.BytesIO()
        np.save(buffer, array)
        kept.append(buffer.getvalue())
    return kept


def _read_array(data: bytes, folder: Path) -> object:
    return _read_tokens(_file(folder, "tokens.npy", data))


def _rows() -> list[bytes]:
    return [b'{"text": "a line"}\n{"text": "two", "n": [1, {"a": null}]}\n{"input_ids": [1, 2]}\n']


def _read_rows(data: bytes, folder: Path) -> object:
    from executor.data.sources import rows_of

    return list(rows_of(_file(folder, "rows.jsonl", data), "text"))


def _indexes() -> list[bytes]:
    part = {"rank": 0, "ranges": [[[0, 2]], [[0, 3]]]}
    tensors = {"w": {"shape": [2, 3], "dtype": "F32", "parts": [part]}}
    files = {"weights-00000-of-00001.safetensors": {"bytes": 8, "sha256": "0" * 64}}
    index = {"schema_version": 1, "step": 3, "world_size": 1, "state": ["step"], "files": files}
    about = {"trainer": {"steps_done": 3}, "plan": {"data_parallel": 1}, "tensors": tensors}
    return [_json({**index, **about})]


def _read_index(data: bytes, folder: Path) -> object:
    from executor.checkpoint.format.index import check_file, read_index

    _file(folder, "index.json", data)
    index = read_index(folder)
    for name, entry in index.files.items():
        check_file(folder / name, entry)
    return index.to_dict()


def _weight_indexes() -> list[bytes]:
    return [_json({"metadata": {"total_size": 8}, "weight_map": {"w": "model.safetensors"}})]


def _read_weight_index(data: bytes, folder: Path) -> object:
    from executor.checkpoint.loading.hugging_face import HuggingFaceFolder

    _file(folder, "config.json", b'{"model_type": "llama"}')
    path = _file(folder, "model.safetensors.index.json", data)
    try:
        found = HuggingFaceFolder(folder)
        return [found.files.tensor(file, key) for key, file in list(found.file_of.items())[:20]]
    finally:
        path.unlink()


def _weights() -> list[bytes]:
    import torch
    from safetensors.torch import save

    return [save({"w": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, dtype=torch.bfloat16)})]


def _read_weights(data: bytes, folder: Path) -> object:
    from executor.checkpoint.loading.hugging_face import HuggingFaceFolder

    _file(folder, "config.json", b'{"model_type": "llama"}')
    path = _file(folder, "model.safetensors", data)
    try:
        found = HuggingFaceFolder(folder)
        return [found.files.tensor(file, key).get_shape() for key, file in found.file_of.items()]
    finally:
        path.unlink()


# --- requests of the page ---


def _requests() -> list[bytes]:
    config = json.dumps({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2})
    questions = [
        {"model": "llama-3-8b", "cluster": "8xA100-80GB", "tp": "2", "pp": "2", "seq_len": "4k"},
        {"config": config, "clusters": "1..2xL40S,8xH100-SXM", "precision": "bf16"},
    ]
    return [urlencode(question).encode() for question in questions]


def _read_request(data: bytes, folder: Path) -> object:
    from planner.page.guard import Guard
    from planner.page.question import read_question

    text = data.decode("latin-1")
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": data}
    scope |= {"headers": [(b"host", b"127.0.0.1:1"), (b"cookie", data[:4000]), (b"origin", data)]}
    guard = Guard(None, port=1, token="t")  # type: ignore[arg-type]
    assert guard.refusal(scope) or guard.entrance(scope)
    question = read_question(text)
    if "here" in text.lower():
        return None
    return question.model, question.cluster, question.plan, question.workload, question.clusters
