"""MODEL as a path, a preset, a hub id, a size; the hub is a small server on this machine."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cost_models.model.presets import load_preset, preset_names
from hardware_profiles.errors import InputError
from planner.request.model import SHAPES, approximate_model, resolve_model

TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TINY_PARAMETERS = 2 * 96 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32


def write_config(folder: Path, values: object = TINY, name: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


# --- paths and presets -----------------------------------------------------------------------


def test_presets_and_aliases() -> None:
    assert resolve_model("Llama-3-8B").name == "llama-3-8b"
    assert resolve_model(" gpt2 ").assumptions == ()
    from_id = resolve_model("meta-llama/Meta-Llama-3-8B")
    assert from_id.name == "llama-3-8b"
    assert "without access to the hub" in from_id.assumptions[0]
    chat = resolve_model("Qwen/Qwen2.5-7B-Instruct")
    assert chat.name == "qwen2.5-7b"
    assert chat.assumptions[0].startswith(
        "Qwen/Qwen2.5-7B-Instruct: the shape of the preset qwen2.5-7b was used"
    )


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("Llama 2 7B chat", "llama-2-7b"),
        ("GPT2 1.5B", "gpt2-xl"),
        ("command-r-35b", "command-r"),
        ("llama 8b", "llama-3.1-8b"),
    ],
)
def test_another_spelling_is_the_preset(text: str, preset: str) -> None:
    spec = resolve_model(text)
    assert spec.name == preset
    assert spec.assumptions[0].startswith(f"{text}: the shape of the preset {preset} was used")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_and_alias_resolves(name: str) -> None:
    preset = load_preset(name)
    for text in (name, name.upper(), *preset.aliases):
        assert resolve_model(text).num_parameters == preset.published_parameters


def test_a_config_and_a_folder_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_config(tmp_path / "mine")
    assert resolve_model(str(path)).num_parameters == TINY_PARAMETERS
    assert resolve_model(str(path.parent)).name == str(path.parent)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("mine").num_parameters == TINY_PARAMETERS
    assert resolve_model("mine/config.json").num_parameters == TINY_PARAMETERS
    other = write_config(tmp_path, name="other.json")
    assert resolve_model(other.name).num_parameters == TINY_PARAMETERS


def test_an_existing_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "gpt2")
    write_config(tmp_path / "meta-llama" / "Meta-Llama-3-8B")
    (tmp_path / "gpt2-xl").mkdir()  # holds no config: the preset is meant
    assert resolve_model("gpt2").num_parameters == TINY_PARAMETERS
    assert resolve_model("meta-llama/Meta-Llama-3-8B").num_parameters == TINY_PARAMETERS
    assert resolve_model("gpt2-xl").num_parameters == 1_557_611_200


def test_what_is_wrong_with_a_path(tmp_path: Path) -> None:
    wrong = {
        str(tmp_path / "no.json"): "no such file",
        str(tmp_path): "no such file",
        "./no/such/folder": "no such file",
        "a/b/c": "No such file or folder",
        str(write_config(tmp_path / "a", "{")): "not JSON",
        str(write_config(tmp_path / "b", "[]")): "JSON object",
        str(write_config(tmp_path / "c", '{"model_type": NaN}')): "NaN",
        str(write_config(tmp_path / "d", {**TINY, "hidden_size": -1})): "hidden_size = -1",
        str(
            write_config(tmp_path / "e", {**TINY, "model_type": "x"})
        ): "is not known.*any_module.md",
    }
    for text, message in wrong.items():
        with pytest.raises(InputError, match=message):
            resolve_model(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lama-3-8b", "Did you mean llama-3-8b"),
        ("Llama 70B", "Did you mean llama-3.1-70b or llama-3-70b or llama-2-70b"),
        ("turing-nlg-17b", "is not known"),
        ("nothing like it", "Give a preset"),
        ("", "Give a preset"),
        ("a\0b", "Give a preset"),
        ("x" * 300, "is not known"),
        ("x" * 9999, "Give a preset"),
        ("module:package.models:build", "priced from a trace by fit and plan"),
        ("19m", "from 20m to 2t"),
        ("3t", "from 20m to 2t"),
        ("0b", "from 20m to 2t"),
    ],
)
def test_what_is_no_model(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        resolve_model(text)
    assert "\n" not in str(caught.value)
    assert "\0" not in str(caught.value)


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["7b", "7B", "1.5b", "350M", "13b", "70b", "175b", "1t"])
def test_a_size_is_an_approximate_shape(text: str) -> None:
    spec = resolve_model(text)
    wanted = float(text[:-1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[text[-1].lower()]
    assert spec.num_parameters == pytest.approx(wanted, rel=0.1)
    assert spec.name == text
    assert spec.assumptions[0].startswith("approximate shape")


def test_known_sizes_are_known_shapes() -> None:
    assert resolve_model("7b").num_parameters == 6_738_415_616
    assert resolve_model("70b").num_parameters == 68_976_648_192
    for shape in SHAPES:
        spec = approximate_model("x", shape.num_parameters)
        assert spec.num_layers == shape.num_layers
        assert spec.num_parameters == pytest.approx(shape.num_parameters, rel=0.05)


# --- the hub ------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"
AGENT_REGISTRY = "/api/agent-harnesses"  # what huggingface_hub itself may ask for


class Hub(BaseHTTPRequestHandler):
    """Serves config.json of a few repositories as the hub does, and notes what is asked."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        self.asked.append(self.path)
        repository, _, file = self.path.lstrip("/").partition("/resolve/main/")
        bodies = {"org/good": json.dumps(TINY), "org/broken": "{", "org/custom": CUSTOM}
        errors = {"org/gated": (403, "GatedRepo"), "org/empty": (404, "EntryNotFound")}
        if file == "config.json" and repository in bodies:
            self.reply(
                200,
                bodies[repository].encode() if with_body else b"",
                {
                    "X-Repo-Commit": COMMIT,
                    "ETag": f'"{repository}"',
                    "Content-Length": str(len(bodies[repository])),
                },
            )
            return
        status, code = errors.get(repository, (401, "RepoNotFound"))
        if repository == "org/down":
            status, code = 503, ""
        self.reply(status, b"", {"X-Error-Code": code, "Content-Length": "0"})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


CUSTOM = json.dumps({**TINY, "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}})


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    handler = type("Handler", (Hub,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


ASK = """
import sys
from hardware_profiles.errors import InputError
from planner.request.model import resolve_model
for text in sys.argv[1:]:
    try:
        spec = resolve_model(text)
        print(text, spec.num_parameters, *spec.assumptions, sep="|")
    except InputError as error:
        print(text, "error", error, sep="|")
loaded = [name for name in ("torch", "transformers") if name in sys.modules]
print("loaded", *loaded, sep="|")
"""


def ask(tmp_path: Path, endpoint: str, *texts: str, offline: bool = False) -> dict[str, str]:
    """Resolve in a process of its own: huggingface_hub reads its settings when it is imported."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": endpoint}
    environment |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    done = subprocess.run(
        [sys.executable, "-c", ASK, *texts],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition("|") for line in done.stdout.splitlines()]
    return {text: rest for text, _, rest in lines}


def test_hub(tmp_path: Path, hub: tuple[str, list[str]]) -> None:
    endpoint, asked = hub
    repositories = ("good", "custom", "gated", "none", "empty", "broken", "down")
    said = ask(tmp_path, endpoint, *(f"org/{name}" for name in repositories))
    assert said["org/good"].startswith(f"{TINY_PARAMETERS}|")
    assert "custom code is not executed" in said["org/custom"]
    assert "is gated" in said["org/gated"]
    assert "is no folder here, and not on the hub" in said["org/none"]
    assert "has no config.json" in said["org/empty"]
    assert "not JSON" in said["org/broken"]
    assert "is no folder here, and not fetched" in said["org/down"]
    assert "503" in said["org/down"]
    assert said["loaded"] == ""
    files = {path for path in asked if path != AGENT_REGISTRY}
    assert files == {f"/org/{name}/resolve/main/config.json" for name in repositories}


def test_offline_the_cache_answers_and_nothing_is_asked(
    tmp_path: Path, hub: tuple[str, list[str]]
) -> None:
    endpoint, asked = hub
    ask(tmp_path, endpoint, "org/good")
    asked.clear()
    said = ask(tmp_path, endpoint, "org/good", "org/custom", offline=True)
    assert said["org/good"].startswith(f"{TINY_PARAMETERS}|")
    assert "is no folder here, not in the cache" in said["org/custom"]
    assert f"{endpoint}/org/custom/resolve/main/config.json" in said["org/custom"]
    assert "pass its path" in said["org/custom"]
    assert asked == []


def test_a_hub_that_cannot_be_reached(tmp_path: Path, hub: tuple[str, list[str]]) -> None:
    ask(tmp_path, hub[0], "org/good")
    nowhere = "http://127.0.0.1:9"
    said = ask(tmp_path, nowhere, "org/good", "org/custom", "not a name/x", "llama-3-8b")
    assert said["org/good"].startswith(f"{TINY_PARAMETERS}|")
    assert "not fetched" in said["org/custom"]
    assert f"{nowhere}/org/custom/resolve/main/config.json" in said["org/custom"]
    assert "is not known" in said["not a name/x"]
    assert said["llama-3-8b"].startswith("8030261248")


def test_a_byte_order_mark_is_read_over_and_a_key_that_stands_twice_is_named(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"model_type": "llama"}')
    assert resolve_model(str(file)).family == "llama"
    file.write_text('{"model_type": "llama", "hidden_size": 64, "hidden_size": 128}')
    with pytest.raises(InputError, match="'hidden_size' stands twice"):
        resolve_model(str(file))


def test_a_class_with_another_head_is_said(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}')
    assert any("ForSequenceClassification" in a for a in resolve_model(str(file)).assumptions)
