"""Choices of a spec, outside of `engine`, that its engine would not read.

Belongs here: one contradiction for each, decided by abilities. Does not belong here: settings in
`engine` (see `hpctrain.spec.engine`), what an engine cannot combine (its own contradictions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hpctrain.spec.contradiction import Contradiction
from hpctrain.spec.engines.abilities import Choices, EngineAbilities
from hpctrain.spec.engines.registry import ENGINES


def unread_choices(engine: EngineAbilities, choices: Choices) -> Iterator[Contradiction]:
    """Find layer counts, expert tensor parallelism and precisions that the engine lacks."""
    if choices.precision not in engine.precisions:
        yield _unread(
            engine,
            ("precision",),
            f"{engine.title} has no {choices.precision}",
            lambda other: choices.precision in other.precisions,
        )
    if choices.recompute_layers is not None and not engine.recomputes_some:
        message = f"{engine.title} computes all layers again, or none"
        yield _unread(engine, ("recompute_layers",), message, lambda other: other.recomputes_some)
    if choices.activation_offload_layers and not engine.offloads_activations:
        message = f"{engine.title} keeps activations on the GPU"
        yield _unread(
            engine,
            ("activation_offload_layers",),
            message,
            lambda other: other.offloads_activations,
        )
    if choices.parallel.etp is None:
        return
    path = ("parallel", "etp")
    if not engine.splits_experts:
        message = f"{engine.title} reads no `parallel.etp`"
        yield _unread(engine, path, message, lambda other: other.splits_experts)
    elif choices.model is not None and choices.model.moe is None:
        # megatron-core 0.16.1 builds groups of experts that no layer would use
        message = "etp splits experts, and the model has none"
        yield Contradiction(path, message, "remove it, or give `model.moe`")


def _unread(
    engine: EngineAbilities,
    path: tuple[str, ...],
    message: str,
    able: Callable[[EngineAbilities], bool],
) -> Contradiction:
    names = " or ".join(f"`{other.name}`" for other in ENGINES.values() if able(other))
    return Contradiction(path, message, f"remove it, or set `engine.name` to {names}")
