"""List what hpctrain cannot train on megatron-core although it can be planned.

Belongs here: one message for each, with its field. Does not belong here: what holds for any engine
(see `trainable`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.spec.run import RunSpec

_LEARNED_FROM_TOKENS = ("language_modeling", "masked_language_modeling")


def untrainable(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield (dotted path of the field, what the trainer lacks)."""
    bert = spec.model.family == "bert"
    if spec.model.mla is not None and spec.engine.implementation == "local":
        message = (
            "latent attention needs TransformerEngine, megatron-core's own layers cannot do it"
        )
        yield "engine.implementation", message
    yield from _untrainable_options(spec)
    learned = spec.model.classes is None and spec.learned_task in _LEARNED_FROM_TOKENS
    for field, given in (("lora", spec.lora), ("task", None if learned else spec.learned_task)):
        if given is not None:
            yield field, f"{spec.engine.name} trains whole models from tokens: no `{field}`"
    if spec.parallel != "auto" and spec.parallel.cp > 1 and untrainable_axes(spec):
        sizes = f"{spec.model.query_key_size} and {spec.model.value_size}"
        message = "only fused kernels of attention divide a sequence, and they take heads of "
        yield "parallel.cp", f"{message}multiples of 8 up to 256, not of {sizes}: say 1"
    if bert and spec.model.pretrained is not None:
        yield "model.pretrained", "hpctrain converts no BERT to megatron-core"
    if bert and spec.parallel != "auto" and spec.parallel.cp > 1:
        yield "parallel.cp", "megatron-core's BERT has no context parallelism: say 1"


def untrainable_axes(spec: RunSpec) -> tuple[str, ...]:
    """Name the axes by which this model is not split.

    TransformerEngine's attention that is not fused does not know context parallelism
    (dot_product_attention/utils.py, get_attention_backend).
    """
    return () if spec.model.takes_fused_attention() else ("cp",)


def _untrainable_options(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield options of `engine.megatron` that the trainer would ignore or compute wrongly.

    The trainer has the same conditions with their reasons
    (`hpctrain.train.engines.megatron.preflight`); those of a layout that the planner chooses
    are found there.
    """
    own, model, section = spec.engine.megatron, spec.model, "engine.megatron"
    if own.fp8_param_gather:
        message = "hpctrain draws and saves weights of 16 or 32 bits, not of 8: say false"
        yield f"{section}.fp8_param_gather", message
    if spec.precision == "fp32" and own.cross_entropy_loss_fusion:
        message = "the fused loss rounds its gradient to bf16: say false, or `precision: bf16`"
        yield f"{section}.cross_entropy_loss_fusion", message
    if spec.engine.deterministic and own.cross_entropy_loss_fusion:
        message = "the fused loss is not deterministic: say false"
        yield f"{section}.cross_entropy_loss_fusion", message
    if own.defer_embedding_wgrad_compute and model.mtp_layers:
        message = "the gradients of prediction layers would be wrong: say false"
        yield f"{section}.defer_embedding_wgrad_compute", message
    parts = {"latent attention": model.mla is not None, "prediction layers": model.mtp_layers > 0}
    for part, built in parts.items():
        if built and own.tp_comm_overlap:
            message = f"userbuffers do not know the projections of {part}: say false"
            yield f"{section}.tp_comm_overlap", message
    if model.family == "bert" and own.cuda_graph_impl != "none":
        yield f"{section}.cuda_graph_impl", "it is for gpt and llama, not bert"
