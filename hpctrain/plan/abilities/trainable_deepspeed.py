"""List what hpctrain cannot train with DeepSpeed although it can be planned.

Belongs here: one message for each. Does not belong here: what DeepSpeed's settings exclude among
themselves (`hpctrain.spec.engines.deepspeed`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.plan.abilities import trainable_hugging_face
from hpctrain.spec.run import RunSpec


def untrainable(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield (dotted path of the field, what the trainer or the classes lack)."""
    yield from trainable_hugging_face.untrainable(spec)
    yield from untrainable_by_deepspeed(spec)


def untrainable_by_deepspeed(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield what only DeepSpeed lacks.

    Nothing is refused of `parallel: auto`: the planner chooses what can be trained.
    """
    homes = (spec.optimizer.offload, spec.engine.deepspeed.offload_parameters)
    if spec.resources.min_nodes is not None and "nvme" in homes:
        message = "what DeepSpeed keeps on NVMe belongs to one number of ranks"
        yield "resources.min_nodes", message
    if spec.parallel == "auto":
        return
    if spec.parallel.tp > 1:
        yield from untrainable_in_tensors(spec)
        if spec.model.key_value_heads % spec.parallel.tp:
            heads, tp = spec.model.key_value_heads, spec.parallel.tp
            message = "with DeepSpeed each rank of tp has whole key/value heads"
            yield "parallel.tp", f"{message}: {heads} of them cannot be divided by {tp}"
    if spec.parallel.pp > 1:
        yield from untrainable_in_a_pipeline(spec)


def untrainable_axes(spec: RunSpec) -> tuple[str, ...]:
    """Name the axes by which this model is not split."""
    refused = {"tp": untrainable_in_tensors(spec), "pp": untrainable_in_a_pipeline(spec)}
    return tuple(axis for axis, problems in refused.items() if any(problems))


def untrainable_in_tensors(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield what excludes tensor parallelism with DeepSpeed.

    DeepSpeed's layers replace the linear layers of a Llama, whose weights are trained
    (`hpctrain.train.engines.deepspeed.tensor_parallel`); GPT-2 has Conv1D instead, which
    module_inject/auto_tp.py of DeepSpeed 0.19.8 does not support.
    """
    splits = "with DeepSpeed hpctrain splits weights over tp"
    if spec.model.family != "llama":
        message = f"{splits} for a llama, not for a {spec.model.family}"
        yield "model.family", f"{message}: engine megatron has tp for gpt, llama and bert"
    if spec.lora is not None:
        yield "lora", f"{splits} for whole models: no `lora`"
    if spec.optimizer.zero == 3:
        yield "optimizer.zero", f"{splits} at ZeRO stages 0, 1 and 2: stage 3 divides them itself"


def untrainable_in_a_pipeline(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield what excludes a pipeline with DeepSpeed.

    Its layers are those of GPT-2 and Llama, and its loss is the mean over all words
    (`hpctrain.train.engines.deepspeed.engine`).
    """
    trains = "a pipeline of DeepSpeed's trains"
    if spec.model.family not in ("gpt", "llama"):
        yield "model.family", f"{trains} gpt and llama, not {spec.model.family}"
    if spec.learned_task != "language_modeling":
        yield "task", f"{trains} language_modeling, not {spec.learned_task}"
    if spec.data.format != "tokens":
        yield "data.format", f"{trains} on tokens, not on {spec.data.format}"
    if spec.lora is not None:
        yield "lora", f"{trains} whole models: no `lora`"
    if spec.optimizer.offload != "none":
        message = f"{trains} with the optimizer's state on the GPU, not on {spec.optimizer.offload}"
        yield "optimizer.offload", message
    if spec.optimizer.zero == 0:
        yield "optimizer.zero", f"{trains} at ZeRO stage 1"
