"""List the settings that hpctrain can plan but an external Megatron-LM cannot train.

Belongs here: one message for each such setting, with its field in the spec. Does not belong
here: settings that a spec passes to Megatron-LM by `engine.arguments`.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.plan.abilities import trainable_megatron
from hpctrain.spec.run import RunSpec

untrainable_axes = trainable_megatron.untrainable_axes


def untrainable(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield (dotted path of the field, what Megatron-LM lacks)."""
    checkpoint, rollback = spec.checkpoint, spec.supervise.rollback
    yield from trainable_megatron.untrainable(spec)
    if spec.model.reads_masked_text:
        yield "model.family", "its `pretrain_gpt.py` trains no encoders: say engine megatron"
    for field in trainable_megatron.added_parts(spec.model):
        message = "hpctrain adds this part to megatron-core, Megatron-LM has it not: say megatron"
        yield f"model.{field}", message
    if spec.model.attends.scale is not None:
        # arguments.py, _add_network_size_args: `softmax_scale` is excluded
        yield "model.attention.scale", "Megatron-LM has no argument for it: say megatron"
    sizes, graphs = spec.batch.sizes, spec.engine.arguments.get("cuda-graph-impl", "none")
    if spec.batch.ramp_up is not None and graphs != "none":
        yield "batch.ramp_up", "graphs are captured for one number of microbatches: remove either"
    if spec.train_steps <= sizes.stages[-1].first_step:
        # training.py, update_train_iters of core_v0.16 goes on to the end of the ramp
        message = (
            f"Megatron-LM ends no run before the batch has grown: after {spec.train_steps:,} steps "
            f"it has {sizes.size_after(spec.train_steps):,}, say fewer `samples`"
        )
        yield "batch.ramp_up", message
    if spec.precision in ("fp8", "fp4"):
        kind = "fp8-format: hybrid" if spec.precision == "fp8" else "fp4-format: e2m1"
        message = (
            f"Megatron-LM takes {spec.precision} by arguments of its own: say `precision: bf16`, "
            f"and `engine.arguments: {{{kind}}}`"
        )
        yield "precision", message
    if spec.engine.megatron.cuda_graph_impl != "none":
        message = "Megatron-LM's arguments for graphs are those of its version: say none, and give "
        yield "engine.megatron.cuda_graph_impl", f"{message}them by `engine.arguments`"
    if spec.model.pretrained is not None:
        message = "Megatron-LM starts from random weights: it reads no `model.pretrained`"
        yield "model.pretrained", message
    if spec.data.format != "tokens":
        message = f"Megatron-LM reads `data.format: tokens`, not {spec.data.format}"
        yield "data.format", message
    if spec.model.mtp_layers and spec.model.positions != "rope":
        # arguments.py, validate_args of core_v0.16
        yield "model.mtp_layers", "Megatron-LM predicts more tokens with `positions: rope` only"
    if checkpoint.every is not None:
        message = "Megatron-LM saves by steps, not by time: give `checkpoint.every_steps` instead"
        yield "checkpoint.every", message
    if rollback.spike is not None:
        message = "Megatron-LM does not stop at a loss spike: `spike` would have no effect"
        yield "supervise.rollback.spike", message
    if spec.supervise.speed_check.mode in ("report", "exclude"):
        message = "Megatron-LM makes its process groups itself: the check before training has none"
        yield "supervise.speed_check.mode", message
    if rollback.mode == "act" and rollback.skip_steps:
        # --iterations-to-skip names an iteration by the number before it in core_v0.16 and by its
        # own number in the main line (training.py, train)
        message = (
            "which batches Megatron-LM leaves out depends on its version: say `skip_steps: 0`, or "
            "`mode: observe`"
        )
        yield "supervise.rollback.skip_steps", message
