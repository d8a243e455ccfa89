"""Derive the short run of a spec: a few steps, otherwise unchanged.

Belongs here: the overrides. Does not belong here: applying them (`hpctrain.spec.merging`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

from hpctrain.base.errors import UsageError
from hpctrain.base.units import Duration
from hpctrain.spec.run import RunSpec
from hpctrain.trials.variants import Variant

_LONGEST_NAME = 63  # of a run: spec.run.Name
FEWEST_STEPS = 3  # one to warm up, two for a spread
# Fields of the optimizer that change the computed numbers; the others place them.
_OPTIMIZER_NUMBERS = {
    *("name", "lr", "min_lr", "beta1", "beta2", "epsilon", "weight_decay", "clip_grad")
}


def trial_name(run_name: str, variant: str) -> str:
    """Name the run of a variant, such as `gpt-fsdp-zero2`."""
    word = re.sub(r"[^A-Za-z0-9]+", "-", variant).strip("-")
    return f"{run_name[: _LONGEST_NAME - len(word) - 1]}-{word}"


def trial_overrides(spec: RunSpec, name: str, steps: int, walltime: Duration) -> tuple[str, ...]:
    """List overrides for `steps` steps of `spec` with the learning rates of the whole run.

    One checkpoint at the end, as in every run, with one evaluation if the spec evaluates. A failure
    of the program is a result and not retried; failures of machines are handled as in any run.
    """
    decay_steps = spec.schedule.decay_steps or spec.train_steps
    return (
        f"name={name}",
        f"budget.steps={steps}",
        "budget.tokens=",
        f"schedule.decay_steps={decay_steps}",
        f"checkpoint.every_steps={steps}",
        "checkpoint.every=",
        "checkpoint.keep=1",
        "checkpoint.keep_every_steps=",
        *([f"evaluation.every_steps={steps}"] if spec.evaluation.every_steps else []),
        f"resources.walltime={walltime}",
        "resources.spare_nodes=0",
        "resources.min_nodes=",
        "supervise.failures_without_progress=1",
        "supervise.budgets.host_oom=0",
        "supervise.budgets.gpu_oom=0",
        "supervise.budgets.data_loader=0",
    )


def training_digest(spec: RunSpec) -> str:
    """Digest the fields that decide the computed numbers, apart from rounding.

    Sharding, offload, recomputation, micro-batches and precision change the rounding only. Megatron
    draws other initial weights than the classes of transformers.
    """
    parts = {
        "weights": spec.engine.abilities.model_classes,
        "batch": spec.batch.global_,
        "task": spec.learned_task,
        "seed": spec.seed,
        "model": spec.model.model_dump(mode="json"),
        "lora": spec.lora and spec.lora.model_dump(mode="json"),
        "data": spec.data.model_dump(mode="json"),
        "optimizer": spec.optimizer.model_dump(mode="json", include=_OPTIMIZER_NUMBERS),
        "schedule": spec.schedule.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def sizes(spec: RunSpec, gpus: Sequence[int], *, weak: bool) -> tuple[Variant, ...]:
    """Vary the number of GPUs of a spec, fewest first.

    Strong scaling keeps the global batch, so that every size trains the same steps. `weak` keeps
    the samples per GPU: the batch grows with the GPUs, and the learning rate does not change.
    Raises UsageError if a batch would not be a whole number.
    """
    variants, batch, base = [], spec.batch.global_, spec.resources.gpus
    for count in sorted(set(gpus)):
        overrides = [f"resources.gpus={count}"]
        if weak and batch * count % base:
            raise UsageError(
                f"--weak: {count} GPUs would get {batch} x {count}/{base} samples, which is no "
                "whole number",
                hint="`batch.global` is what `resources.gpus` of the spec train in one step",
            )
        if weak:
            overrides.append(f"batch.global={batch * count // base}")
        variants.append(Variant(f"gpus{count}", tuple(overrides)))
    return tuple(variants)
