"""The model of a row: a preset, or the model family that matches its sizes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

from cost_models.model.families import model_spec
from cost_models.model.presets import (
    Preset,
    family_and_size,
    is_preset,
    letters,
    load_preset,
    preset_of_shape,
    preset_of_spelling,
    presets_of_size,
    similar_presets,
)
from cost_models.model.spec import ModelSpec, Weight
from planner.request.model import LARGEST, SMALLEST, VOCAB_SIZE, shape_of_size
from planner.validation.rows.reading import Reading, Unpriceable
from planner.validation.rows.runs_file import Row
from planner.validation.rows.vocabulary import terms_of
from planner.validation.rows.words import ArchitectureEntry, entry_of, kind_of, look_up, words_table

SIZES = ("num_layers", "hidden_size", "num_heads", "vocab_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # keys of the routed ones
GPT: Final = "gpt"
MEGATRON: Final = "megatron"  # "megatron-22b" is a GPT
WIDTH: Final = 256  # that a narrowed gated MLP is a multiple of
GATED: Final = re.compile(r"\b(?:swi|ge)glu\b")
HEAD: Final = 128  # elements of a head of most models
CLASSIFIER: Final = "encoder-classifier"
LABELS: Final = 2
# of a head in DeepSeek-V3 (arXiv:2412.19437, sec. 4.2)
ROPE_HEAD, VALUE_HEAD = 64, 128
VISION: Final = "vision"
PATCH: Final = 3 * 16 * 16  # values of a patch, which the embedding multiplies
ROUNDED: Final = 0.03  # of a size in the name of a published shape: 18.4 billion are 18B
# in names of models that have layers of other kinds, and of mixtures of experts
OTHERS: Final = re.compile(
    r"mamba|jamba|zamba|samba|bamba|hymba|rwkv|griffin|hyena|retnet|nemotron[-_ ]?(?:h|nano)\b"
    r"|swin|resnet|resnext|efficientnet|convnext|unet|diffusion|sdxl|\bflux|\bdit\b|yolo|lstm"
)
MIXTURES: Final = re.compile(r"moe|\d+x\d|\ba\d+(?:\.\d+)?b\b")
OTHER_KINDS: Final = re.compile(
    r"hybrid|ssm|state|diff|cnn|conv|u-?net|dit\b|gan\b|rnn|recurrent|moe|mla"
)
LAYERS: Final = re.compile(r"[\s,(_-]+(\d+)[\s_-]?(?:layers?|l)\)?$|[\s_-]l(\d+)$", re.IGNORECASE)
REMARK: Final = re.compile(r"\s*\([^)\d]*\)$")  # "Llama 8B (GQA)"
WINDOW: Final = re.compile(r"\bsliding[ -]window(?: size)?(?: of|:|=)? *(\d[\d,]*)\b", re.I)
OWN_SIZE: Final = re.compile(r"\s*\([\d.]+ ?[bm](?: param(?:eter)?s)?\)$", re.I)  # "ViT-G (1.8B)"
SCALED: Final = re.compile("dinov2")  # whose layers scale what attention and MLP put out
ENCODERS: Final = re.compile(r"\bvl\b|vision|llava")  # in names of models that see images
SEES: Final = re.compile(r"\w*vl\b|internvl|vision|llava|minicpm-(?:llama3-)?v\b|4v\b|paligemma")
DENSE_LAYERS: Final = "first_k_dense_replace"  # in a config.json
ASSUMED: Final = "its shape is not known, that of"  # a typical model is taken: see ``_typical``


def model_of(reading: Reading) -> tuple[ModelSpec, str]:
    """Return the model of a row and a key that is equal for equal models."""
    name = str(reading.row.get("model") or reading.row.name)
    reading = _with_kind(reading)
    config = _preset(reading, name)
    if config is None:
        reading = _with_typical_shape(_with_published_shape(reading, name), name)
        config = _config(reading, name)
        if rotary := look_up(words_table().rotary, reading.row):
            config = {**config, "_rotary": rotary.value}
    words = entry_of(words_table().architecture, reading.row)
    if words.untied:
        config = {**config, "tie_word_embeddings": False}
    normed = look_up(words_table().normed_outputs, reading.row)
    if (normed is not None and normed.value) or SCALED.search(name.lower()):
        config = {**config, "_normed_outputs": True}
    dropout = words.dropout if words.of_presets else None
    if reading.row.dropout is not None:
        dropout = reading.row.dropout
    if dropout is not None:
        config = {**config, "_dropout": dropout}
    if reading.row.words("model_kind") == CLASSIFIER:
        config = {**config, "_classifies": True}
    if window := WINDOW.search(reading.row.notes or ""):
        config = {**config, "_window": int(window[1].replace(",", ""))}
    key = json.dumps(config, sort_keys=True)
    return _spec(key, name), f"{name} {key}"


def positions_of_name(row: Row) -> int | None:
    """Return the learned positions of the model that a row names; None: it has none, or any many.

    Of a published encoder 512, as BERT has.
    """
    name = row.model or ""
    config = _preset(Reading(row), name)
    if config is None:
        shape = _shape(words_table().presets.get(letters(name), name), ROUNDED)
        return 512 if shape is not None and shape.get("model_kind") == "encoder" else None
    spec = _spec(json.dumps(config, sort_keys=True), name)
    return spec.max_seq_len if spec.max_seq_len_is_hard else None


@cache
def _spec(config: str, name: str) -> ModelSpec:
    values = json.loads(config)
    plain, dropout = values.pop("_plain_experts", False), values.pop("_dropout", None)
    classifies, window = values.pop("_classifies", False), values.pop("_window", None)
    normed, gated = values.pop("_normed_outputs", False), values.pop("_gates", False)
    rotary = values.pop("_rotary", None)
    spec = model_spec(values, name=name, where=name)
    if rotary is not None:
        kinds = (replace(k, attention=replace(k.attention, rotary=rotary)) for k in spec.kinds)
        spec = replace(spec, kinds=tuple(kinds))
    if gated:
        spec = _with_gates(spec)
    if normed:
        spec = _with_normed_outputs(spec)
    if window is not None:
        spec = _with_window(spec, window)
    if classifies:
        spec = _with_classifier(spec)
    if dropout is not None:
        spec = replace(
            spec, hidden_dropout=dropout, attention_dropout=dropout, embedding_dropout=dropout
        )
    return _without_gates(spec) if plain else spec


def _with_normed_outputs(spec: ModelSpec) -> ModelSpec:
    """Return the model with norms of what attention and MLP put out, besides those of their inputs.

    Peri-LN (Kim et al., arXiv:2502.02732), as in Gemma 2; the scales of DINOv2 keep the same
    tensors (timm: models/vision_transformer.py, LayerScale). Left out: the few weights of both.
    """
    kinds = (replace(kind, num_norms=4) if kind.num_norms == 2 else kind for kind in spec.kinds)
    return replace(spec, kinds=tuple(kinds))


def _with_window(spec: ModelSpec, window: int) -> ModelSpec:
    """Return the model with a sliding window in all layers, unless some have windows already."""
    if any(kind.attention.window for kind in spec.kinds):
        return spec
    kinds = [replace(kind, attention=replace(kind.attention, window=window)) for kind in spec.kinds]
    return replace(spec, kinds=tuple(kinds))


def _with_classifier(spec: ModelSpec) -> ModelSpec:
    """Return the model with a dense layer and two labels in the place of its projection.

    Both read one token of a sequence: no FLOP and no logits are counted. Source: transformers,
    BertPooler and the classifier of BertForSequenceClassification.
    """
    hidden = spec.hidden_size
    head = (
        Weight("pooler.dense.weight", (hidden, hidden), "linear", "replicate", "head"),
        Weight("classifier.weight", (LABELS, hidden), "linear", "replicate", "head"),
    )
    return replace(spec, head=head, head_multiply=0, vocab_size=LABELS, tie_embeddings=False)


def _with_gates(spec: ModelSpec) -> ModelSpec:
    """Return an encoder with gated MLPs: its first matrix gives gates and products at once."""
    kinds = []
    for kind in spec.kinds:
        width = kind.feed_forward.ffn_hidden_size
        weights = tuple(
            replace(w, shape=(2 * width, *w.shape[1:]))
            if w.part == "mlp" and w.shape[0] == width and w.sharding == "column"
            else w
            for w in kind.weights
        )
        gated = replace(kind.feed_forward, gated=True, activation="silu")
        kinds.append(replace(kind, weights=weights, feed_forward=gated))
    return replace(spec, kinds=tuple(kinds))


def _without_gates(spec: ModelSpec) -> ModelSpec:
    """Return the model with plain instead of gated experts: no transformers family has them."""
    kinds = []
    for kind in spec.kinds:
        weights = tuple(
            replace(w, shape=(w.shape[0], w.shape[1] // 2, w.shape[2]), parts=())
            if w.is_routed_expert and "gate_up" in w.name
            else w
            for w in kind.weights
        )
        experts = replace(kind.feed_forward, gated=False, activation="gelu")
        kinds.append(replace(kind, weights=weights, feed_forward=experts))
    return replace(spec, kinds=tuple(kinds))


def _preset(reading: Reading, name: str) -> Mapping[str, Any] | None:
    """Return the config of the preset that a row names, with its layers and experts.

    None without such a preset, or where the row's hidden size is not the preset's.
    """
    presets = words_table().presets
    known = presets.get(name.lower()) or presets.get(letters(name), name)
    found = load_preset(known) if is_preset(known) else preset_of_shape(known)
    if found is None and any(reading.row.get(size) is None for size in SIZES):
        found = preset_of_spelling(known) or _preset_of_size(reading, name)
    if found is None:
        cut = LAYERS.search(name)
        layers = None if cut is None else int(cut[1] or cut[2])
        plain, unknown = REMARK.sub("", name), any(reading.row.get(size) is None for size in SIZES)
        if layers is None and unknown and plain != name:
            return _preset(reading, plain)
        if layers is None or reading.row.num_layers not in (None, layers):
            return None
        return _preset(reading.changed(num_layers=layers), LAYERS.sub("", name))
    if SEES.search(name.lower()):
        reading.defaults.append(f"{name}: its language model {found.name} alone")
    row, spec = reading.row, _spec(json.dumps(found.config, sort_keys=True), name)
    if row.get("hidden_size") not in (None, spec.hidden_size):
        return None
    layers = row.get("num_layers")
    config = _with_kept_experts(reading, spec, _with_dense_layers(reading, found.config))
    if spec.bridge or layers in (None, spec.num_layers):  # two stacks: one number is not enough
        return config
    if layers > spec.num_layers:
        raise Unpriceable(f"{layers} layers of {name}, which has {spec.num_layers}")
    reading.defaults.append(f"{name} cut to its first {layers} layers")
    return _first_layers(config, spec.num_layers, layers)


def _with_dense_layers(reading: Reading, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the dense layers before the mixtures that a row or its trainer has."""
    entry = look_up(words_table().dense_layers, reading.row)
    own = config.get(DENSE_LAYERS)
    if own is None or (entry is None and reading.row.num_dense_layers is None):
        return config
    usual = own if entry is None else entry.value
    dense = reading.value("num_dense_layers", usual, "of that trainer's scripts")
    return {**config, DENSE_LAYERS: dense}


def _with_kept_experts(
    reading: Reading, spec: ModelSpec, config: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return a config with the routed experts of a layer that a row keeps, if it has fewer."""
    kept, whole = reading.row.num_experts, max(k.feed_forward.num_experts for k in spec.kinds)
    if not kept or kept >= whole:
        return config
    reading.defaults.append(f"{reading.row.model} cut to {kept} of its {whole} experts")
    return {**config, next(key for key in EXPERTS if key in config): kept}


def _preset_of_size(reading: Reading, name: str) -> Preset | None:
    """Return the preset of the family and size in a name, where a row has no other sizes.

    Of several releases the latest, also for a release that is not known. A published shape that has
    family and size comes first.
    """
    row = reading.row
    if None not in (row.num_layers, row.hidden_size) or _shape(name, 0.0) is not None:
        return None
    language = ENCODERS.sub("", name.lower())
    found = presets_of_size(language)
    family, size = family_and_size(language)
    if not found and _shape(name, ROUNDED) is None:
        found = presets_of_size(f"{family.rstrip('.0123456789')} {size / 1e6:.0f}m")
        if found:
            reading.defaults.append(f"{name} is not known: priced as {found[0].name}")
    elif len({preset.published_parameters for preset in found}) > 1:
        others = " or ".join(preset.name for preset in found[1:])
        reading.defaults.append(f"{name} is {found[0].name} (default: the latest, not {others})")
    return found[0] if found else None


def _with_kind(reading: Reading) -> Reading:
    """Return the reading with a kind that is priced in the place of its synonym.

    A vision transformer is an encoder with a few labels; a patch is a token. Source: Dosovitskiy et
    al. (arXiv:2010.11929), sec. 3.1 and table 1. So is an encoder without a vocabulary head.
    """
    row, kind = reading.row, kind_of(reading.row)
    if row.model_kind is None:  # a published shape may name it
        return reading
    if kind == "encoder" and "no vocabulary head" in terms_of(row, "notes"):
        return reading.changed(model_kind=CLASSIFIER)
    if kind != VISION:
        return reading if kind == row.words("model_kind") else reading.changed(model_kind=kind)
    vocabulary = row.vocab_size or PATCH
    dropout = 0.0 if row.dropout is None else row.dropout
    return reading.changed(model_kind=CLASSIFIER, vocab_size=vocabulary, dropout=dropout)


def _first_layers(config: Mapping[str, Any], whole: int, layers: int) -> Mapping[str, Any]:
    """Return a config whose number of layers, and whose lists of all layers, are cut."""
    key = "n_layer" if "n_layer" in config else "num_hidden_layers"
    lists = {
        name: value[:layers]
        for name, value in config.items()
        if isinstance(value, list) and len(value) == whole
    }
    return {**config, **lists, key: layers}


def _with_published_shape(reading: Reading, name: str) -> Reading:
    """Return the reading with the sizes of a published shape in the place of empty cells.

    Where everything else is given, the heads have 128 elements, and the vocabulary is that of
    Llama (gated MLP) or of GPT-2 padded to 51,200 columns.
    """
    row = reading.row
    named = words_table().presets.get(letters(name), name)
    shape = _shape(named, ROUNDED) or _shape(OWN_SIZE.sub("", named), ROUNDED)
    if shape is not None and row.hidden_size in (None, shape["hidden_size"]):
        sizes = {column: value for column, value in shape.items() if row.get(column) is None}
        if sizes:
            note = f"the published sizes of {name}: {', '.join(sizes)}"
            reading = reading.changed(note, **sizes)
            row = reading.row
    usual = {}
    if row.num_layers is not None and row.hidden_size is not None:
        if row.num_heads is None and row.hidden_size % HEAD == 0:
            usual["num_heads"] = row.hidden_size // HEAD
        if row.vocab_size is None:
            usual["vocab_size"] = 32_000 if row.gated_mlp else 51_200
    notes = (f"{column} {value} (default)" for column, value in usual.items())
    return reading.changed(*notes, **usual)


def _shape(name: str, rounded: float) -> Mapping[str, Any] | None:
    """Return the published shape of a name, or of its family and nearest size within ``rounded``.

    GPT-2 and GPT-3 of a size have the shape of a GPT.
    """
    shapes = _shapes()
    family, size = family_and_size(name)
    family = family or (GPT if MEGATRON in name.lower() else "")
    near = {
        abs(own / size - 1.0): shape
        for key, shape in shapes.items()
        for kin, own in (family_and_size(key),)
        if size and kin == (GPT if family in (f"{GPT}2", f"{GPT}3") else family)
    }
    nearest = min(near, default=math.inf)
    if "_patch" in name:  # timm's vit_base_patch16_224.augreg_in21k
        name = name.partition(".")[0].replace("_", "-")
    return shapes.get(letters(name)) or (near[nearest] if nearest <= rounded else None)


@cache
def _shapes() -> Mapping[str, Mapping[str, Any]]:
    """Return the published shapes by letters of names, without the word "base"."""
    return {key.replace("base", ""): shape for key, shape in words_table().shapes.items()}


def is_typical(defaults: Iterable[str]) -> bool:
    """Whether a typical model of the row's size stands for one of an unknown shape."""
    return any(ASSUMED in default for default in defaults)


def _with_typical_shape(reading: Reading, name: str) -> Reading:
    """Return the reading with the shape of a typical model of the parameters that a row gives.

    Of an unknown dense model alone: the shape that ``fit`` takes for a size; of a GPT the published
    shape that is nearest in parameters, with as many layers as they need.
    """
    row = reading.row
    family, size = family_and_size(row.model or "")
    parameters = (row.params_billion or 0.0) * 1e9 or size
    known = row.num_layers is not None or row.hidden_size is not None
    if known or kind_of(row) != "dense" or not SMALLEST <= parameters <= LARGEST:
        return reading
    if OTHERS.search(name.lower()) or MIXTURES.search(name.lower()):
        return reading
    shape = _typical_gpt(parameters) if family.startswith(GPT) else _typical_llama(name, parameters)
    cells = {column: value for column, value in shape.items() if row.get(column) is None}
    told = ", ".join(f"{column} {value}" for column, value in cells.items())
    reading.defaults.append(f"{name}: {ASSUMED} a typical model of its size is taken ({told})")
    return reading.changed(**cells)


def _typical_gpt(parameters: float) -> Mapping[str, Any]:
    sizes = {own: shape for key, shape in _shapes().items() if (own := _size_of_gpt(key))}
    shape = sizes[min(sizes, key=lambda own: abs(math.log(own / parameters)))]
    hidden = shape["hidden_size"]
    layers = (parameters - shape["vocab_size"] * hidden) / (12 * hidden**2)
    return {**shape, "num_layers": max(1, round(layers))}


def _size_of_gpt(key: str) -> float:
    family, size = family_and_size(key)
    return size if family == GPT else 0.0


def _typical_llama(name: str, parameters: float) -> Mapping[str, Any]:
    shape = shape_of_size(name, parameters)
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "gated_mlp": True,
        "vocab_size": VOCAB_SIZE,
    }


def _config(reading: Reading, name: str) -> Mapping[str, Any]:
    """Return a config.json with the row's sizes."""
    row = reading.row
    if any(row.get(name) is None for name in SIZES):
        if OTHERS.search(name.lower()):
            raise Unpriceable(f"{name} has other layers than a transformer: they are not priced")
        missing = [name for name in SIZES if row.get(name) is None]
        hint = f". {similar}" if (similar := similar_presets(name)) else ""
        if is_preset(words_table().presets.get(name.lower(), name)):
            hint = f". hidden_size {row.get('hidden_size')} is not that of {name}"
        raise Unpriceable(f"the architecture is not given ({', '.join(missing)}){hint}")
    words = entry_of(words_table().architecture, row)
    kind = kind_of(row)
    grouped = row.get("num_kv_heads") not in (None, row.get("num_heads"))
    width = row.get("ffn_hidden_size")
    llama = grouped or width not in (None, 4 * row.get("hidden_size"))
    why = "as Llama: grouped queries, or not 4 x hidden_size" if llama else "a plain MLP"
    if not llama and (llama := bool(GATED.search(f"{name} {row.words('notes')}".lower()))):
        why = "as the words say"
    gated = reading.value("gated_mlp", llama and kind not in ("encoder", CLASSIFIER), why)
    if gated and words.narrows_gated and width in (None, 4 * row.get("hidden_size")):
        whole = 4 * row.get("hidden_size")
        width = -(-(2 * whole // 3) // WIDTH) * WIDTH
        reading.defaults.append(f"ffn_hidden_size {width}: gated, two thirds of {whole}")
        reading = reading.changed(ffn_hidden_size=width)
    if kind.startswith("moe"):
        return _mixture(reading, kind, gated)
    if kind in ("encoder", CLASSIFIER):
        return {**_bert(reading, words), "_gates": gated}
    if kind == "encoder-decoder":
        return _t5(reading)
    if kind != "dense":
        if OTHERS.search(kind) or OTHER_KINDS.search(kind):
            raise Unpriceable(f"model_kind {kind!r} is not priced")
        reading.defaults.append(f"model_kind {kind!r} is priced as dense layers of a transformer")
    if gated:
        return {"model_type": "llama", **_sizes(reading)}
    if grouped:
        return {"model_type": "starcoder2", **_sizes(reading)}
    return _gpt(reading, words)


def _sizes(reading: Reading) -> dict[str, Any]:
    row = reading.row
    heads, hidden = row.get("num_heads"), row.get("hidden_size")
    config = {
        "num_hidden_layers": row.get("num_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": reading.value("num_kv_heads", heads, "num_heads"),
        "intermediate_size": reading.value("ffn_hidden_size", 4 * hidden, "4 x hidden_size"),
        "vocab_size": row.get("vocab_size"),
        "max_position_embeddings": row.get("seq_len"),
        "tie_word_embeddings": bool(reading.value("tie_embeddings", False, "two matrices")),
    }
    if row.get("head_dim") not in (None, hidden / heads):
        config["head_dim"] = row.get("head_dim")
    return config


def _gpt(reading: Reading, words: ArchitectureEntry) -> Mapping[str, Any]:
    """GPT-2 with learned positions, as Megatron-LM trains it; BLOOM where there are none."""
    row = reading.row
    dropout = words.dropout
    hidden = row.get("hidden_size")
    config = {
        "n_layer": row.get("num_layers"),
        "n_head": row.get("num_heads"),
        "vocab_size": row.get("vocab_size"),
        "tie_word_embeddings": bool(reading.value("tie_embeddings", True, "as GPT-2")),
    }
    if words.family == "bloom":
        return {"model_type": "bloom", "hidden_size": hidden, **config}
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_inner": reading.value("ffn_hidden_size", 4 * hidden, "4 x hidden_size"),
        "n_positions": row.get("seq_len"),
        "activation_function": words.activation,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
        **config,
    }


def _bert(reading: Reading, words: ArchitectureEntry) -> Mapping[str, Any]:
    row = reading.row
    return {
        "model_type": "bert",
        "num_hidden_layers": row.get("num_layers"),
        "hidden_size": row.get("hidden_size"),
        "num_attention_heads": row.get("num_heads"),
        "intermediate_size": reading.value(
            "ffn_hidden_size", 4 * row.get("hidden_size"), "4 x hidden_size"
        ),
        "vocab_size": row.get("vocab_size"),
        "max_position_embeddings": max(512, row.get("seq_len") or 0),
        "hidden_dropout_prob": words.dropout,
        "attention_probs_dropout_prob": words.dropout,
    }


def _t5(reading: Reading) -> Mapping[str, Any]:
    """T5; ``num_layers`` counts one of the two stacks, which have as many."""
    row = reading.row
    gated = reading.value("gated_mlp", False, "a plain MLP")
    config = {
        "model_type": "t5",
        "num_layers": row.get("num_layers"),
        "d_model": row.get("hidden_size"),
        "num_heads": row.get("num_heads"),
        "d_ff": reading.value("ffn_hidden_size", 4 * row.get("hidden_size"), "4 x hidden_size"),
        "vocab_size": row.get("vocab_size"),
        "feed_forward_proj": "gated-gelu" if gated else "relu",
    }
    config["d_kv"] = row.get("head_dim") or row.get("hidden_size") // row.get("num_heads")
    return config


def _mixture(reading: Reading, kind: str, gated: bool) -> Mapping[str, Any]:
    row = reading.row
    if kind == "moe-mla":
        return _latent_mixture(reading)
    if kind != "moe":
        raise Unpriceable(f"model_kind {kind!r} is not priced")
    experts = reading.need("num_experts")
    config = {**_sizes(reading), "num_experts_per_tok": reading.need("experts_per_token")}
    if not gated:
        config["_plain_experts"] = True
    expert = reading.value("moe_ffn_hidden_size", config["intermediate_size"], "ffn_hidden_size")
    shared = row.get("num_shared_experts") or 0
    if shared:
        return {
            **config,
            "model_type": "qwen2_moe",
            "num_experts": experts,
            "moe_intermediate_size": expert,
            "shared_expert_intermediate_size": shared * expert,
        }
    return {
        **config,
        "model_type": "mixtral",
        "num_local_experts": experts,
        "intermediate_size": expert,
    }


def _latent_mixture(reading: Reading) -> Mapping[str, Any]:
    """DeepSeek-V3 with the row's sizes: latent attention, dense layers, then mixtures."""
    row, config = reading.row, _sizes(reading)
    if row.kv_lora_rank is None:
        raise Unpriceable("latent attention of unknown ranks (kv_lora_rank is empty)")
    queries = reading.value("q_lora_rank", 0, "queries are not compressed")
    rope = reading.value("rope_head_dim", ROPE_HEAD, "DeepSeek-V3's")
    value = reading.value("value_head_dim", VALUE_HEAD, "DeepSeek-V3's")
    whole = reading.value("head_dim", value + rope, "value_head_dim + rope_head_dim")
    if whole <= rope:
        raise Unpriceable(f"head_dim {whole} includes rope_head_dim {rope} (must be larger)")
    config.pop("head_dim", None)
    return {
        **config,
        "model_type": "deepseek_v3",
        "q_lora_rank": queries or None,
        "kv_lora_rank": row.kv_lora_rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": whole - rope,
        "v_head_dim": value,
        "n_routed_experts": reading.need("num_experts"),
        "num_experts_per_tok": reading.need("experts_per_token"),
        "n_shared_experts": row.num_shared_experts or 0,
        "moe_intermediate_size": reading.value(
            "moe_ffn_hidden_size", config["intermediate_size"], "ffn_hidden_size"
        ),
        DENSE_LAYERS: reading.value("num_dense_layers", 0, "every layer is a mixture"),
    }
