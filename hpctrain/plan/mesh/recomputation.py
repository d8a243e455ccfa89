"""Ways to compute activations again, or to keep them on the host, that a search tries.

Belongs here: which modules and how many layers, and their words. Does not belong here: what that
saves or costs (`hpctrain.plan.cost`), or which way is taken (`ranking`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from hpctrain.plan.documents import RECOMPUTES, Recompute
from hpctrain.spec.engines.abilities import RecomputeModule
from hpctrain.spec.run import RunSpec

MODULES: tuple[RecomputeModule, ...] = get_args(RecomputeModule)
# Layers of each model chunk that `full` may cover instead of all, in quarters of the chunk.
QUARTERS = (1, 2, 3)


@dataclass(frozen=True)
class Recomputation:
    """One way: a position in RECOMPUTES, and what of it.

    `modules`: what `selective` computes again, one bit for each of MODULES. `full` covers `layers`
    of each chunk, or so many `quarters` of it; all where both are 0. `offloaded`: layers whose
    activations wait on the host, or so many `offloaded_quarters` of the model.
    """

    mode: int
    modules: int
    layers: int = 0
    quarters: int = 0
    offloaded: int = 0
    offloaded_quarters: int = 0


def module_bits(modules: Iterable[RecomputeModule]) -> int:
    """Write modules as one number, a bit for each of MODULES."""
    return sum(1 << MODULES.index(module) for module in set(modules))


def modules_of(bits: int) -> tuple[RecomputeModule, ...]:
    """Read the modules of such a number, in the order of MODULES."""
    return tuple(module for index, module in enumerate(MODULES) if bits >> index & 1)


def whole_recomputations(spec: RunSpec, modes: Iterable[Recompute]) -> tuple[Recomputation, ...]:
    """List these modes, each as the spec has it: what a hint can name in one word."""
    modules, layers = module_bits(spec.recompute_modules), spec.recompute_layers or 0
    numbers = (RECOMPUTES.index(mode) for mode in modes)
    full = RECOMPUTES.index("full")
    away = spec.offloaded_layers
    return tuple(
        Recomputation(n, modules, layers if n == full else 0, offloaded=away) for n in numbers
    )


def recomputations(spec: RunSpec, modes: Iterable[Recompute]) -> tuple[Recomputation, ...]:
    """List what a search tries of these modes; what the spec says itself is fixed.

    With `auto`, `selective` also computes whole MLPs again (MoE blocks where all layers have
    experts), and `full` some layers of each chunk, where the engine can. Modules whose outputs
    alone are discarded, such as norms, need newer libraries and are left to the spec.
    """
    found = list(whole_recomputations(spec, modes := tuple(modes)))
    given = module_bits(spec.recompute_modules)
    if spec.recompute == "auto" and "recompute_modules" not in spec.model_fields_set:
        dense = spec.model.moe is None or spec.model.moe.dense_layers > 0
        more = module_bits(["mlp" if dense else "moe"])
        found += [Recomputation(RECOMPUTES.index("selective"), more)] * ("selective" in modes)
    some = spec.engine.abilities.recomputes_some and spec.recompute_layers is None
    if spec.recompute == "auto" and some and "full" in modes:
        number = RECOMPUTES.index("full")
        found += [Recomputation(number, given, quarters=quarters) for quarters in QUARTERS]
    engine = spec.engine
    # transformer_block.py: TransformerEngine offloads; transformer_config.py: not with CUDA graphs
    able = engine.implementation != "local" and engine.megatron.cuda_graph_impl == "none"
    if spec.activation_offload_layers == "auto" and "none" in modes and able:
        number = RECOMPUTES.index("none")
        found += [
            Recomputation(number, given, offloaded_quarters=quarters) for quarters in QUARTERS
        ]
    return tuple(found)


def recompute_words(
    mode: Recompute, modules: tuple[RecomputeModule, ...], layers: int | None
) -> str:
    """Name one way: `selective (mlp)`, `full of 3 layers a chunk`, or the mode alone."""
    if mode == "selective" and modules != ("core_attn",):
        return f"{mode} ({', '.join(modules)})"
    if mode == "full" and layers:
        return f"{mode} of {layers} layer{'s' if layers > 1 else ''} a chunk"
    return mode
