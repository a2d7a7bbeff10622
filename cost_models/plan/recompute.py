"""Settings of recomputation, and what each computes again.

    none               nothing
    selective          the attention core (Korthikanti et al., arXiv:2205.05198, sec. 5)
    full               the layer: only its input is kept
    selective_ops      all but results of matmuls, fused attention and collectives
    ops:every-2nd-mm   the same, and every second matmul without a bias, and all with one
    modules:A+B        the modules A and B, as Megatron Core's --recompute-modules names them:

    core_attn          the attention core            mlp              a dense MLP
    mla_up_proj        matrices behind the latents   moe              router and all experts
    layernorm          both norms' outputs           shared_experts   the experts of every token
                                                     moe_act          the routed experts' activation

    and by name in forks of it:

    attn               attention as a whole          experts          the routed experts, between
                                                                      their inputs and outputs

A table of plans holds the position of a setting in ``RECOMPUTE``. Sources: pytorch/torchtitan
(torchtitan/distributed/activation_checkpoint.py: the policy counts ``aten.mm`` and saves every
other result); NVIDIA/Megatron-LM (megatron/core/transformer/transformer_config.py,
recompute_modules).
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

from hardware_profiles.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CORE: Final = "core_attn"
# of Megatron Core
SINGLE: Final = (CORE, "mla_up_proj", "layernorm", "mlp", "moe", "shared_experts", "moe_act")
# others, with what they contain
CONTAINED: Final = {"attn": (CORE, "mla_up_proj"), "experts": ("moe_act",)}
MODULES: Final = (*SINGLE, *CONTAINED)
PREFIX: Final = "modules:"
EVERY_SECOND: Final = "ops:every-2nd-mm"
# a layer as a whole, or its operators by kind
WORDS: Final = ("none", "selective", "full", "selective_ops", EVERY_SECOND)
_SETS: Final = sorted(
    (modules for size in range(1, len(MODULES) + 1) for modules in combinations(MODULES, size)),
    key=lambda modules: not CONTAINED.keys().isdisjoint(modules),
)
RECOMPUTE: Final = WORDS + tuple(PREFIX + "+".join(modules) for modules in _SETS)
BY_OPERATOR: Final = ("selective_ops", EVERY_SECOND)
# codes of the column ``recompute``; from FIRST_SET on, sets of modules
NONE, SELECTIVE, FULL, SELECTIVE_OPS, EVERY_SECOND_MM = range(len(WORDS))
FIRST_SET: Final = len(WORDS)
# the settings as a help text names them
SHOWN: Final = (*WORDS, f"{PREFIX}{CORE}+mlp")
# settings of Megatron Core's own modules, which come first
OF_MEGATRON: Final = RECOMPUTE[: FIRST_SET + 2 ** len(SINGLE) - 1]


def _codes(module: str) -> list[int]:
    """Return the codes of the sets that compute a module again, alone or inside another one."""
    found = {module, *(outer for outer, inner in CONTAINED.items() if module in inner)}
    return [FIRST_SET + code for code, modules in enumerate(_SETS) if found.intersection(modules)]


_CODES: Final = {module: _codes(module) for module in MODULES}


def read_setting(text: str, where: str = "") -> str:
    """Return a setting as ``RECOMPUTE`` spells it: modules in order, with plus signs.

    >>> read_setting("modules:mlp,core_attn"), read_setting("modules:core_attn")
    ('modules:core_attn+mlp', 'selective')
    """
    if text in RECOMPUTE and text != PREFIX + CORE:
        return text
    if not text.startswith(PREFIX):
        hint = did_you_mean(text, RECOMPUTE[:FIRST_SET])
        raise InputError(
            f"{where}recompute = {text[:60]!r} (must be one of {', '.join(WORDS)}, or "
            f"{PREFIX} and some of {', '.join(MODULES)} with + between them)"
            + f". {hint}"
            * bool(hint)
        )
    given = text[len(PREFIX) :].replace("+", ",").split(",")
    for module in given:
        if module not in MODULES:
            hint = did_you_mean(module, MODULES)
            raise InputError(
                f"{where}recompute = {text[:60]!r}: {module[:30]!r} is no module that is computed "
                f"again (must be some of {', '.join(MODULES)}){'. ' * bool(hint)}{hint}"
            )
    if set(given) == {CORE}:
        return WORDS[SELECTIVE]
    return PREFIX + "+".join(module for module in MODULES if module in given)


def modules_of(setting: str) -> tuple[str, ...]:
    """Return the modules that a setting computes again one by one.

    >>> modules_of("selective"), modules_of("modules:core_attn+mlp"), modules_of("full")
    (('core_attn',), ('core_attn', 'mlp'), ())
    """
    if setting == WORDS[SELECTIVE]:
        return (CORE,)
    return tuple(setting[len(PREFIX) :].split("+")) if setting.startswith(PREFIX) else ()


def repeats_module(recompute: Any, module: str) -> NDArray[np.bool_]:
    """Return whether settings compute a module again, but not the whole layer; by code."""
    import numpy as np

    found: NDArray[np.bool_] = np.equal(recompute, SELECTIVE if module == CORE else -1)
    several = repeats_modules(recompute)
    if not (several.any() if isinstance(several, np.ndarray) else np.any(several)):
        return found
    return found | np.isin(recompute, _CODES[module])


def repeats_modules(recompute: Any) -> NDArray[np.bool_]:
    """Return whether settings are sets of modules; by code."""
    found: NDArray[np.bool_] = recompute >= FIRST_SET
    return found


def by_operator(recompute: Any) -> NDArray[np.bool_]:
    """Return whether settings keep results operator by operator; by code."""
    found: NDArray[np.bool_] = (recompute == SELECTIVE_OPS) | (recompute == EVERY_SECOND_MM)
    return found
