"""Build a :class:`ModelSpec` from the MODEL argument.

In this order: an existing file or folder; a preset, its alias or a hub id of its shape
(``Qwen/Qwen2.5-7B-Instruct``); another Hugging Face hub id; a size such as ``7b``; another spelling
of a preset (``GPT2 1.5B``). Of the hub only ``config.json`` is fetched, and code from the hub is
never run. A trainer's file (a launch script of Megatron-LM, a configuration of torchtitan) gives
the model that it describes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, structs

from cost_models.model.families import model_spec
from cost_models.model.presets import (
    Preset,
    is_preset,
    load_preset,
    preset_of_shape,
    preset_of_spelling,
    presets_of_size,
    similar_presets,
)
from cost_models.model.spec import ModelSpec
from hardware_profiles.errors import InputError
from hardware_profiles.fields import read_json

ModelLike = str | Path | Mapping[str, Any] | ModelSpec

CONFIG_FILE: Final = "config.json"
TRAINER_FILES: Final = (".sh", ".py", ".toml", ".yaml", ".yml")  # that may describe a model
HUB_TIMEOUT_SECONDS: Final = 10.0
MAX_NAME: Final = 4096  # longer texts are neither a path nor a name

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_SIZE: Final = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)([mbt])", re.IGNORECASE)
_UNITS: Final = {"m": 1e6, "b": 1e9, "t": 1e12}


class Shape(Struct, frozen=True):
    """The shape of a llama of about ``num_parameters``."""

    num_parameters: float
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int


# Published decoders as llamas. A size within NEAR of one takes its layers; any other size takes the
# nearest one's widths and as many layers, a multiple of LAYER_STEP, as it needs.
SHAPES: Final = (
    Shape(21e6, 6, 256, 688, 8, 8),
    Shape(58e6, 8, 512, 1376, 8, 8),
    Shape(134e6, 12, 768, 2048, 12, 12),  # GPT-3 small (arXiv:2005.14165, table 2.1)
    Shape(374e6, 24, 1024, 2816, 16, 16),  # GPT-3 medium
    Shape(1.1e9, 22, 2048, 5632, 32, 4),  # TinyLlama (arXiv:2401.02385)
    Shape(3.4e9, 26, 3200, 8640, 32, 32),  # OpenLLaMA 3B
    Shape(6.7e9, 32, 4096, 11008, 32, 32),  # Llama 2 7B (arXiv:2307.09288)
    Shape(13e9, 40, 5120, 13824, 40, 40),  # Llama 2 13B
    Shape(34e9, 48, 8192, 22016, 64, 8),  # Code Llama 34B (arXiv:2308.12950)
    Shape(69e9, 80, 8192, 28672, 64, 8),  # Llama 2 70B
    Shape(175e9, 96, 12288, 32768, 96, 96),  # width of GPT-3 175B, gated MLP
    Shape(402e9, 126, 16384, 53248, 128, 8),  # Llama 3.1 405B (arXiv:2407.21783)
    Shape(1.0e12, 128, 25600, 68352, 160, 160),  # width of 1T in arXiv:2104.04473, table 1
)
NEAR: Final = 0.1
LAYER_STEP: Final = 4
SMALLEST, LARGEST = 20e6, 2e12
VOCAB_SIZE: Final = 32000  # of Llama 2
MAX_SEQ_LEN: Final = 4096


def resolve_model(text: str) -> ModelSpec:
    """Return the model that ``text`` names: a path, a preset, a hub id or a size.

    >>> resolve_model("Meta-Llama-3-8B").num_parameters
    8030261248
    """
    text = _checked(text)
    if text.startswith("module:"):
        raise InputError(
            f"model {text!r}: an nn.Module has no config; it is priced from a trace by fit and plan"
        )
    if Path(text.partition("::")[0]).suffix in TRAINER_FILES and (found := _described(text)):
        return found
    path = _config_path(text)
    if path is not None:
        name = text if Path(text).name else str(Path(text).resolve())  # of ".": the folder's
        return model_spec(read_json(path, "a model's config.json"), name=name, where=str(path))
    return named_model(text)


def named_model(text: str) -> ModelSpec:
    """Return the model that ``text`` names: a preset, a hub id or a size, never a path."""
    text = _checked(text)
    if is_preset(text):
        return _from_preset(text, load_preset(text))
    if (preset := preset_of_shape(text)) is not None:
        return _from_preset(text, preset)
    if _HUB_ID.fullmatch(text):
        return _from_hub(text)
    size = _SIZE.fullmatch(text)
    if size:
        return approximate_model(text, float(size[1]) * _UNITS[size[2].lower()])
    if (preset := _spelled(text)) is not None:
        return _from_preset(text, preset)
    raise _unknown(text)


def _spelled(text: str) -> Preset | None:
    """Return the preset of another spelling of its name; None where it may be that of several."""
    if (preset := preset_of_spelling(text)) is not None:
        return preset
    found = presets_of_size(text)
    alike = len({preset.published_parameters for preset in found}) == 1
    return found[0] if alike else None


def _checked(text: str) -> str:
    text = text.strip()
    if not text or len(text) > MAX_NAME or not text.isprintable():
        raise InputError(f"model {text[:40]!r}: {_CHOICES}")
    return text


def _described(text: str) -> ModelSpec | None:
    """Return the model of a trainer's file, by its name or by its sizes; None for no such file."""
    if not Path(text.partition("::")[0]).expanduser().is_file():
        return None
    from planner.exchange.registry import read_config  # formulas, which help does without

    reading = read_config(text)
    if reading.config is not None and "vocab_size" in reading.config:
        return model_spec(reading.config, name=Path(text).stem, where=text)
    if reading.model is not None and Path(reading.model).suffix not in TRAINER_FILES:
        return resolve_model(reading.model)
    why = "".join(f" ({note})" for note in reading.notes if note.endswith("name the model"))
    raise InputError(
        f"model {text!r}: the file does not say which model it trains{why}. {_CHOICES}"
    )


def _config_path(text: str) -> Path | None:
    """Return the config.json that ``text`` points at; None where it is no path."""
    path = Path(text).expanduser()
    looks_like_path = text.endswith(".json") or text.startswith((".", "/", "~", os.sep))
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError:  # longer than a file name can be
        return None
    if is_folder:
        config = path / CONFIG_FILE
        if config.exists() or looks_like_path or not is_preset(text):
            return config
        return None
    separated = os.sep in text or "/" in text
    if looks_like_path or (exists and separated):
        return path
    return None


def _from_preset(text: str, preset: Preset) -> ModelSpec:
    spec = model_spec(preset.config, name=preset.name, where=f"preset {preset.name}")
    if not is_preset(text):
        note = (
            f"{text}: the shape of the preset {preset.name} was used, without access to the "
            "hub (a config.json is read as it is)"
        )
    elif "/" in text:
        note = f"{text}: the config that comes with shardplan was used, without access to the hub"
    else:
        return spec
    return replace(spec, assumptions=(note, *spec.assumptions))


def _unknown(text: str) -> InputError:
    several = " or ".join(preset.name for preset in presets_of_size(text))
    hint = f"Did you mean {several}?" if several else similar_presets(text)
    hint = "No such file or folder." if text.count("/") > 1 else hint
    return InputError(f"model {text[:80]!r} is not known. {hint} {_CHOICES}".replace("  ", " "))


_CHOICES: Final = (
    "Give a preset (shardplan models lists them), a config.json or a folder with one, "
    "a Hugging Face id (org/name), a size such as 7b, or module:package.path:factory for any other "
    "torch module"
)


# --- Hugging Face hub ---------------------------------------------------------------------------


def _from_hub(repository: str) -> ModelSpec:
    """Fetch config.json of a hub repository (or take it from the cache), and read it."""
    path = _config_of_hub(repository)
    return model_spec(
        read_json(path, f"the config.json of {repository}"),
        name=repository,
        where=f"{repository}/{CONFIG_FILE}",
    )


def _download_config(repository: str) -> str:
    """Return the path of the cached file.

    A first look at the hub without retries keeps an unreachable hub from costing half a minute.
    """
    from huggingface_hub import (
        constants,
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )

    cached = isinstance(try_to_load_from_cache(repository, CONFIG_FILE), str)
    if not cached and not constants.HF_HUB_OFFLINE:
        get_hf_file_metadata(hf_hub_url(repository, CONFIG_FILE), timeout=HUB_TIMEOUT_SECONDS)
    return str(hf_hub_download(repository, CONFIG_FILE, etag_timeout=HUB_TIMEOUT_SECONDS))


def _config_of_hub(repository: str) -> Path:
    """Return the path of the cached file; raise each failure as one line with a remedy."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repository}"
    by_hand = (
        f"Download {page}/resolve/main/{CONFIG_FILE} by hand and pass its path, "
        f"for example ./{CONFIG_FILE}"
    )
    try:
        return Path(_download_config(repository))
    except errors.GatedRepoError:
        reason = f"is gated: accept its terms at {page} and log in (hf auth login). Or: {by_hand}"
    except errors.RepositoryNotFoundError:
        similar = similar_presets(repository.split("/")[1])
        reason = (
            f"is no folder here, and not on the hub, or private (then: hf auth login). {similar}"
        ).rstrip()
    except errors.LocalEntryNotFoundError:
        reason = f"is no folder here, not in the cache, and the hub was not reached. {by_hand}"
    except errors.EntryNotFoundError:
        reason = f"has no {CONFIG_FILE}: it is not a transformers model"
    except errors.HFValidationError:
        reason = f"is not a valid name on the hub. {_CHOICES}"
    except Exception as error:  # network, disk, a broken address: whatever the client raises
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        reason = f"is no folder here, and not fetched from the hub ({first_line}). {by_hand}"
    raise InputError(f"model {repository!r} {reason}")


# --- a size -------------------------------------------------------------------------------------


def approximate_model(text: str, num_parameters: float) -> ModelSpec:
    """Return a llama of about ``num_parameters``, shaped after the nearest of SHAPES.

    >>> approximate_model("7b", 7e9).num_parameters  # Llama 2 7B
    6738415616
    """
    shape = shape_of_size(text, num_parameters)
    layers = shape.num_layers
    spec = model_spec(
        {
            "model_type": "llama",
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.ffn_hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": MAX_SEQ_LEN,
        },
        name=text,
        where=f"size {text}",
    )
    note = (
        f"approximate shape: {text} stands for a llama of {layers} layers, hidden size "
        f"{shape.hidden_size}, {shape.num_heads} heads ({shape.num_kv_heads} key-value), MLP "
        f"{shape.ffn_hidden_size}, vocabulary {VOCAB_SIZE}: {spec.num_parameters:,} parameters"
    )
    return replace(spec, assumptions=(note, *spec.assumptions))


def shape_of_size(text: str, num_parameters: float) -> Shape:
    """Return the nearest of SHAPES with as many layers as ``num_parameters`` need."""
    if not SMALLEST <= num_parameters <= LARGEST:
        raise InputError(f"model {text!r}: a size must be from 20m to 2t parameters")
    shape = min(SHAPES, key=lambda s: abs(math.log(s.num_parameters / num_parameters)))
    return structs.replace(shape, num_layers=_layers(shape, num_parameters))


def _layers(shape: Shape, num_parameters: float) -> int:
    """Return the shape's own layers where it is near enough, else a multiple of LAYER_STEP."""
    if abs(shape.num_parameters / num_parameters - 1) <= NEAR:
        return shape.num_layers
    in_layers = num_parameters - 2 * VOCAB_SIZE * shape.hidden_size
    return max(1, round(in_layers / _layer_parameters(shape) / LAYER_STEP)) * LAYER_STEP


def _layer_parameters(shape: Shape) -> float:
    """Matmul weights of one layer: q and o, k and v, gate, up and down."""
    grouped = shape.num_kv_heads / shape.num_heads
    return shape.hidden_size**2 * (2 + 2 * grouped) + 3 * shape.hidden_size * shape.ffn_hidden_size


def model_of(model: ModelLike) -> ModelSpec:
    """Return the model of a name, a path or the values of a config.json."""
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, (str, Path)):
        return resolve_model(str(model))
    if isinstance(model, Mapping):
        return model_spec(model, name=str(model.get("_name_or_path") or "config"), where="model")
    raise InputError(
        f"model = {model!r} (must be a name, a path, the values of a config.json or a ModelSpec)"
    )
