"""Parse what to try: `fsdp`, `deepspeed:zero3+offload`, `large: batch.micro=4`; derive its trial.

A variant is a name and overrides of the spec, as for `--set`; a trial is its run, but short.
Belongs here: the grammar, sizes, overrides of a trial. Does not belong here: the words of an engine
(see `hpctrain.spec.engines`), whether the engine supports them (validation and the planner report
that), applying overrides (`hpctrain.spec.merging`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpctrain.base.errors import UsageError
from hpctrain.base.units import Duration
from hpctrain.spec.engines.abilities import MEGATRON_CORE
from hpctrain.spec.engines.registry import ENGINES, abilities_of, engine_names
from hpctrain.spec.run import RunSpec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_:+-]{0,39}")
_OPTION = re.compile(r"(?P<name>[^=]*?):\s+(?P<fields>.*\S)\s*", re.DOTALL)
_NEXT_FIELD = re.compile(r",\s*(?=[A-Za-z_][\w.\[\]]*=)")


@dataclass(frozen=True)
class Variant:
    """One thing to try: `overrides` are `PATH=VALUE`, applied after those of the user."""

    name: str
    overrides: tuple[str, ...]


# The plain form of an engine: all GPUs data parallel, no offload. ZeRO stages: fsdp 3, deepspeed 1,
# megatron's optimizer distributed.
_PLAIN = (
    "optimizer.zero=",
    "optimizer.shard_gpus=",
    "optimizer.offload=none",
)
# Defaults of fields that only megatron-core reads: other engines refuse any other value.
_ONLY_MEGATRON = (
    "engine.implementation=auto",
    "optimizer.overlap_grad_reduce=true",
    "optimizer.overlap_param_gather=true",
)


def parse_engines(text: str, own_engine: str) -> list[Variant]:
    """Parse `fsdp,deepspeed:zero2` into one variant each; `own_engine` is that of the spec.

    Raises UsageError with the known names for an unknown one.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(
            f"--engines {text}: an empty name", hint="for example fsdp,deepspeed:zero2"
        )
    return [Variant(word, engine_overrides(word, own_engine)) for word in words]


def engine_overrides(expression: str, own_engine: str) -> tuple[str, ...]:
    """Translate `ENGINE[:WORD][+WORD...]` to overrides.

    The bare name of the spec's own engine is the unchanged spec. Any other expression replaces all
    settings of sharding and offload, starting from the plain form of its engine.
    """
    engine, *words = re.split(r"[:+]", expression)
    known = sorted(engine_names(), key=_trains_megatron_core)
    if engine not in known:
        raise UsageError(f"no engine `{engine}`{_nearest(engine, known)}", hint=_known(known))
    overrides: list[str] = []
    for word in words:
        matches = (known.match(word) for known in abilities_of(engine).words)
        fields = next((fields for fields in matches if fields is not None), None)
        if fields is None:
            texts = [known.text for known in abilities_of(engine).words]
            raise UsageError(
                f"`{expression}`: engine {engine} knows no word `{word}`{_nearest(word, texts)}",
                hint=f"{_known(texts)}; anything else: `--variant 'NAME: FIELD=VALUE'`",
            )
        overrides += fields
    if not words and engine == own_engine:
        return ()
    return (f"engine.name={engine}", *_plain(engine, own_engine, overrides), *overrides)


def _trains_megatron_core(engine: str) -> bool:
    return abilities_of(engine).model_classes == MEGATRON_CORE


def _plain(engine: str, own_engine: str, overrides: Sequence[str]) -> list[str]:
    """List overrides that turn a spec of `own_engine` into the plain form of `engine`."""
    fields, abilities = list(_PLAIN), abilities_of(engine)
    for other in ENGINES.values():
        # settings of one engine are refused for another
        settings = other.settings if other.name != engine else {}
        fields += [f"engine.{field}={default}" for field, default in settings.items()]
    fields += abilities.plain
    if abilities.nvme_directory is not None and "optimizer.offload=nvme" not in overrides:
        fields.append(f"{abilities.nvme_directory}=")
    was, becomes = _trains_megatron_core(own_engine), _trains_megatron_core(engine)
    if not becomes:  # an explicit layout, because `auto` may ignore the offload
        fields += ["parallel=auto", "parallel.pp=1"]
        fields += _ONLY_MEGATRON if was else ()
    elif not was:
        fields.append("parallel=auto")
    if abilities.recomputes != abilities_of(own_engine).recomputes:
        fields.append("recompute=auto")
    return fields


def parse_variant(text: str, own_engine: str) -> Variant:
    """Parse `NAME: [ENGINE...,] FIELD=VALUE, FIELD=VALUE`; commas in lists do not separate."""
    match = _OPTION.fullmatch(text)
    name = match["name"].strip() if match else ""
    if match is None or not _NAME.fullmatch(name):
        raise UsageError(
            f"--variant {text}: expected `NAME: FIELD=VALUE, FIELD=VALUE`",
            hint="for example --variant 'large: fsdp:zero2, batch.micro=4'",
        )
    overrides: list[str] = []
    for number, part in enumerate(_NEXT_FIELD.split(match["fields"])):
        part = part.strip()
        if number == 0 and "=" not in part:
            overrides += engine_overrides(part, own_engine)
        else:
            overrides.append(part)
    return Variant(name, tuple(overrides))


def parse_variants(engines: str, others: Sequence[str], own_engine: str) -> tuple[Variant, ...]:
    """Parse all variants of the command line. Raises UsageError for none, or a repeated name."""
    variants = parse_engines(engines, own_engine) if engines else []
    variants += [parse_variant(text, own_engine) for text in others]
    names = [variant.name for variant in variants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two variants are named `{twice[0]}`")
    if not variants:
        raise UsageError(
            "nothing to compare", hint="give --engines fsdp,deepspeed:zero2 or --variant"
        )
    return tuple(variants)


def _nearest(word: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(names), n=1)
    return f"; did you mean `{near[0]}`?" if near else ""


def _known(names: Iterable[str]) -> str:
    return f"known: {', '.join(dict.fromkeys(names))}"


# -- Derive the short run of a spec: a few steps, otherwise unchanged ---------------------------


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
    """List overrides for `steps` whole steps of `spec` with the learning rates of the whole run.

    One checkpoint at the end, as in every run, with one evaluation if the spec evaluates. A failure
    of the program is a result and not retried; failures of machines are handled as in any run.
    """
    decay_steps = spec.schedule.decay_steps or spec.train_steps
    return (
        f"name={name}",
        f"budget.steps={steps}",
        "budget.tokens=",
        f"schedule.decay_steps={decay_steps}",
        *(["batch.ramp_up="] if spec.batch.ramp_up else []),
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
            overrides += ["batch.ramp_up="] if spec.batch.ramp_up else []
        variants.append(Variant(f"gpus{count}", tuple(overrides)))
    return tuple(variants)
