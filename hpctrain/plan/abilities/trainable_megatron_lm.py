"""What an external Megatron-LM cannot do for hpctrain, out of all that can be planned.

Belongs here: one sentence for each such thing, with the field that asks for it. Does not belong
here: what Megatron-LM can do of itself and a spec asks for by `engine.arguments`.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.plan.abilities import trainable_megatron
from hpctrain.spec.run import RunSpec

Found = list[tuple[str, str]]


def untrainable(spec: RunSpec) -> Found:
    """List (dotted path of the field, what Megatron-LM lacks)."""
    return [*trainable_megatron.untrainable(spec), *_of_model_and_data(spec), *_of_saving(spec)]


def _of_model_and_data(spec: RunSpec) -> Iterator[tuple[str, str]]:
    if spec.model.pretrained is not None:
        words = "Megatron-LM starts from random weights: it reads no `model.pretrained`"
        yield "model.pretrained", words
    if spec.data.format != "tokens":
        words = f"Megatron-LM reads `data.format: tokens`, not {spec.data.format}"
        yield "data.format", words
    if spec.model.mtp_layers and spec.model.positions != "rope":
        # arguments.py, validate_args of core_v0.16
        yield "model.mtp_layers", "Megatron-LM predicts more tokens with `positions: rope` only"


def _of_saving(spec: RunSpec) -> Iterator[tuple[str, str]]:
    checkpoint, rollback = spec.checkpoint, spec.supervise.rollback
    if checkpoint.every is not None:
        words = "Megatron-LM saves by steps, not by time: give `checkpoint.every_steps` instead"
        yield "checkpoint.every", words
    if rollback.spike is not None:
        words = "Megatron-LM does not leave at a loss spike: nothing would read `spike`"
        yield "supervise.rollback.spike", words
    if rollback.mode == "act" and rollback.skip_steps:
        # --iterations-to-skip names an iteration by the number before it in core_v0.16 and by its
        # own number in the main line (training.py, train)
        words = (
            "which batches Megatron-LM leaves out depends on its version: say `skip_steps: 0`, or "
            "`mode: observe`"
        )
        yield "supervise.rollback.skip_steps", words
