"""List what hpctrain cannot train on megatron-core although it can be planned.

Belongs here: one message for each, with its field. Does not belong here: what holds for any engine
(see `trainable`).
"""

from __future__ import annotations

from hpctrain.spec.run import RunSpec

_LEARNED_FROM_TOKENS = ("language_modeling", "masked_language_modeling")

Problems = list[tuple[str, str]]


def untrainable(spec: RunSpec) -> Problems:
    """List (dotted path of the field, what the trainer lacks)."""
    problems: Problems = []
    optimizer = spec.optimizer
    if optimizer.zero is not None:
        wanted = optimizer.zero > 0
        if wanted != optimizer.distributed:
            required = "true" if wanted else "false"
            problems.append(
                ("optimizer.zero", f"hpctrain reads `optimizer.distributed`: say {required}")
            )
    if spec.model.mla is not None and spec.engine.implementation == "local":
        message = (
            "latent attention needs TransformerEngine, megatron-core's own layers cannot do it"
        )
        problems.append(("engine.implementation", message))
    problems += _untrainable_options(spec)
    learned = spec.model.classes is None and spec.learned_task in _LEARNED_FROM_TOKENS
    for field, given in (("lora", spec.lora), ("task", None if learned else spec.learned_task)):
        if given is not None:
            message = f"{spec.engine.name} trains whole models from tokens: no `{field}`"
            problems.append((field, message))
    if spec.model.family == "bert" and spec.model.pretrained is not None:
        problems.append(("model.pretrained", "hpctrain converts no BERT to megatron-core"))
    if spec.model.family == "bert" and spec.parallel != "auto" and spec.parallel.cp > 1:
        message = "megatron-core's BERT has no context parallelism: say 1"
        problems.append(("parallel.cp", message))
    return problems


def _untrainable_options(spec: RunSpec) -> Problems:
    """List options of `engine.megatron` that the trainer would ignore or compute wrongly.

    The trainer has the same conditions with their reasons
    (`hpctrain.train.engines.megatron.preflight`); those of a layout that the planner chooses
    are found there.
    """
    own = spec.engine.megatron
    problems: Problems = []
    if own.fp8_param_gather:
        message = "hpctrain draws and saves weights of 16 or 32 bits, not of 8: say false"
        problems.append(("engine.megatron.fp8_param_gather", message))
    if spec.precision == "fp32" and own.cross_entropy_loss_fusion:
        message = "the fused loss rounds its gradient to bf16: say false, or `precision: bf16`"
        problems.append(("engine.megatron.cross_entropy_loss_fusion", message))
    if spec.engine.deterministic and own.cross_entropy_loss_fusion:
        message = "the fused loss is not deterministic: say false"
        problems.append(("engine.megatron.cross_entropy_loss_fusion", message))
    if own.defer_embedding_wgrad_compute and spec.model.mtp_layers:
        message = "the gradients of prediction layers would be wrong: say false"
        problems.append(("engine.megatron.defer_embedding_wgrad_compute", message))
    unknown = {
        "latent attention": spec.model.mla is not None,
        "prediction layers": spec.model.mtp_layers > 0,
    }
    for part in (part for part, built in unknown.items() if built and own.tp_comm_overlap):
        message = f"userbuffers do not know the projections of {part}: say false"
        problems.append(("engine.megatron.tp_comm_overlap", message))
    if spec.model.family == "bert" and own.cuda_graph_impl != "none":
        problems.append(("engine.megatron.cuda_graph_impl", "it is for gpt and llama, not bert"))
    return problems
