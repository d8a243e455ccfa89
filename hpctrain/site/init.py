"""Writes a commented run spec to start from: a published model or a `config.json`, data, GPUs.

Belongs here: which fields a first spec has, and their values. Does not belong here: asking
(`hpctrain.adopt.init_command`), published shapes (`hpctrain.spec.catalogue`), planning
(`hpctrain.job.plan`, which is asked how many GPUs suffice).
"""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpctrain.base.errors import InvalidInputError, Problem, UsageError
from hpctrain.base.module_subprocess import ModuleProgram, run_module
from hpctrain.base.units import short_bytes
from hpctrain.job.plan import load, plan_option
from hpctrain.plan.abilities.trainable import builds
from hpctrain.plan.limits import usable_gpus
from hpctrain.plan.model.parameters import total_parameters
from hpctrain.spec.engines.registry import DEFAULT_ENGINE, ENGINES
from hpctrain.spec.families import countable, family_of, missing_part, read_config
from hpctrain.spec.fields import did_you_mean
from hpctrain.spec.loader import load_adapter, load_model, load_presets
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.open_questions import ASK

# Hoffmann et al. 2022 (arXiv 2203.15556), table 3: about 20 tokens for each parameter.
TOKENS_PER_PARAMETER = 20
# Brown et al. 2020 (arXiv 2005.14165), table 2.1: up to so many parameters, tokens of a batch and
# learning rate.
# Tokens of a sample that are proposed at most: longer ones are a choice of their own.
LONGEST_SEQ = 4096
_GPT3 = (
    (0.2e9, 0.5e6, 6e-4),
    (0.5e9, 0.5e6, 3e-4),
    (1.0e9, 0.5e6, 2.5e-4),
    (2.0e9, 1e6, 2e-4),
    (4.0e9, 1e6, 1.6e-4),
    (9.0e9, 2e6, 1.2e-4),
    (60e9, 2e6, 1e-4),
    (math.inf, 3.2e6, 0.6e-4),
)
# Parameters above which an engine that shards is proposed: at 16 bytes of training state, 16 GB.
MOST_ON_ONE_GPU = 1e9
_FINE_TUNING_TOKENS = 1e9
_FINE_TUNING_RATE = 2e-5  # Touvron et al. 2023 (arXiv 2307.09288), section 3.1
# A short budget takes smaller batches than these, for the sake of so many steps.
_LEAST_STEPS = 500
# Prints the figures of a model that the class of transformers alone knows.
_COUNT, _COUNT_SECONDS = "hpctrain.train.engines.models.count", 600
_IMAGE_STEPS, _IMAGE_BATCH, _IMAGE_RATE = 10_000, 1024, 1e-3


@dataclass(frozen=True)
class Model:
    """What a first spec says of its model. `text`: the YAML of `model`, `config`: a file."""

    name: str
    text: str
    about: str
    shape: ModelSpec
    pretrained: bool = False
    config: str | None = None


@dataclass(frozen=True)
class Wishes:
    """What somebody wants. `tokens` None: by the number of parameters; `data` None: made up."""

    model: Model
    gpus: int
    data: str | None = None
    tokenizer: str | None = None
    tokens: float | None = None
    engine: str | None = None
    name: str | None = None


def named_model(name: str, beside: Path = Path(), code: str | None = None) -> Model:
    """Return a published model, or the one that a directory of Hugging Face describes.

    `beside`: the directory of the spec, from which it names a config.json. `code`: the digest of
    the code beside that file, which may be run.

    Raises UsageError for an unknown name, InvalidInputError for a directory without a config.json
    that hpctrain understands.
    """
    path = Path(name)
    if path.name == "config.json" or path.is_dir():
        file = path if path.name == "config.json" else path / "config.json"
        return _described_model(file, beside, code)
    found = load_presets().named(name)
    if found is None:
        names = [one.name for one in load_presets().presets]
        hint = did_you_mean(name, names) or f"there are {', '.join(names)}"
        message = f"`{name}` is neither a published model nor a directory with a config.json"
        raise UsageError(message, hint=hint)
    shape = ModelSpec.model_validate(found.shape)
    return Model(found.name, found.name, f"{found.source}: {_summary(shape)}", shape)


def _described_model(path: Path, beside: Path, code: str | None) -> Model:
    figures: dict[str, Any] = {}
    try:
        shape = load_model(path, LONGEST_SEQ)
    except InvalidInputError as error:
        figures = _counted(path, error, code)
        shape = load_model(path, LONGEST_SEQ, figures)
    longest, seq = shape.max_seq, shape.seq
    with_weights = any(path.parent.glob("*.safetensors"))
    lines = [f"pretrained: {_scalar(str(path.parent))}"] if with_weights else []
    lines.append(f"config: {_scalar(os.path.relpath(path, beside).replace('$', '$$'))}")
    if not shape.reads_images:
        made_for = "" if longest in (None, seq) else f"  # the model is made for {longest:,}"
        lines.append(f"seq: {seq}{made_for}")
    lines += _nested(figures)
    text = "\n" + "\n".join(f"  {line}" for line in lines)
    name = "".join(
        char for char in path.absolute().parent.name.lower() if char.isalnum() or char in "-."
    )
    about = f"{path}: {_summary(shape)}"
    return Model(name or "model", text, about, shape, with_weights, str(path.absolute()))


def _nested(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        inside = isinstance(value, dict)
        yield f"{name}:" if inside else f"{name}: {_scalar(value)}"
        yield from (f"  {line}" for line in (_nested(value) if inside else ()))


def _counted(path: Path, refusal: InvalidInputError, code: str | None) -> dict[str, Any]:
    """Count a model whose parts cannot be read, by its class of transformers, in a process apart.

    Raises `refusal` for what no class can be either, HpctrainError without the trainer's packages.
    """
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError):
        raise refusal from None
    family = family_of(config) if isinstance(config, dict) else None
    readable = family is not None and not read_config(config, family).refused
    if not isinstance(config, dict) or readable or not countable(config):
        raise refusal
    if code is None and family is None and missing_part(config) is None:
        raise refusal  # neither a class of transformers nor code that may be run
    program = ModuleProgram(_COUNT, "init --model", "huggingface", sys.executable)
    arguments = [str(path), *([code] if code is not None else [])]
    ended = run_module(program, *arguments, timeout_seconds=_COUNT_SECONDS)
    if ended.returncode:
        why = [Problem(f"it cannot be counted: {ended.last_line}", str(path))]
        raise InvalidInputError([*refusal.problems, *why]) from None
    return dict(json.loads(ended.stdout))


def trainer_text(name: str, run: str, gpus: int) -> str:
    """Write a first spec of a program of somebody's own, with its questions.

    `name`: the adapter. Raises InvalidInputError for one that is not there.
    """
    adapter = load_adapter(name, Path()).document
    words = ["train.py"] if adapter.launch == "accelerate" else ["python", "train.py"]
    if not adapter.talks:
        words += ["--output", '"{output}"']
        resumes = adapter.checkpoint is not None and not adapter.checkpoint.found
        words += ["--resume", '"{resume}"'] if resumes else []
    lines = [
        f"# A program of your own; `hpctrain adapters {name}` has what it needs.",
        f"name: {run}",
        "trainer:",
        f"  adapter: {name}",
        f"  # {ASK} your program; {{output}} and {{resume}} stand where it takes these directories",
        f"  command: [{', '.join(words)}]",
        f"  done: {{step: 1000}}  # {ASK} the last step",
        f"resources: {{gpus: {gpus}}}",
    ]
    return "\n".join(lines) + "\n"


def spec_text(wishes: Wishes) -> str:
    """Write the spec, with a comment on everything that somebody may want to change."""
    model, shape = wishes.model, wishes.model.shape
    engine = wishes.engine or _default_engine(model)
    evaluation = []
    if wishes.data is not None:
        steps = _IMAGE_STEPS if shape.reads_images else _training(wishes)[2]
        every = max(1, min(1000, steps // 10))
        evaluation = ["evaluation:", f"  every_steps: {every}", ""]
    lines = [
        *textwrap.wrap(f"{model.about}.", 78, initial_indent="# ", subsequent_indent="# "),
        "# What a field means: `hpctrain explain FIELD`. Written by `hpctrain init`.",
        f"name: {wishes.name or model.name}",
        "",
        f"model:{model.text}" if model.text.startswith("\n") else f"model: {model.text}",
        "",
        *_data(wishes),
        "",
        *(_images(wishes) if shape.reads_images else _language(wishes)),
        "",
        "precision: bf16",
        "",
        "parallel: auto            # `hpctrain plan --apply` writes the layout here",
        "recompute: auto",
        "",
        "checkpoint:",
        "  every: 30min            # or `every_steps`; `hpctrain plan` says what is best",
        "  keep: 3",
        "",
        *evaluation,
        *(["engine:", f"  name: {engine}", ""] if engine is not None else []),
        "resources:",
        f"  gpus: {wishes.gpus}",
        "",
    ]
    return "\n".join(lines)


def fitting_gpus(wishes: Wishes, profile: str) -> int:
    """Double the GPUs of `wishes` until their spec plans; unchanged where no number helps."""
    with TemporaryDirectory() as directory:
        file, gpus, config = Path(directory, "spec.yaml"), wishes.gpus, wishes.model.config
        place = [] if config is None else [f"model.config={_scalar(config.replace('$', '$$'))}"]
        while True:
            file.write_text(spec_text(replace(wishes, gpus=gpus)), encoding="utf-8")
            inputs = load(file, profile, place)
            # of runs that last longer than nothing, no forecast is made
            if plan_option(inputs, "time", before_seconds=0).plan is not None:
                return gpus
            gpus *= 2
            if gpus > usable_gpus(inputs.spec, inputs.profile):
                return wishes.gpus


def _data(wishes: Wishes) -> Iterator[str]:
    shape = wishes.model.shape
    yield "data:"
    if wishes.data is None:
        yield "  made_up: true           # a trial of cluster and layout; then name `sources`"
        return
    if shape.reads_images:
        yield "  format: images"
        yield "  sources:                # a directory with one directory for each class"
    else:
        yield "  sources:                # prefixes of .bin and .idx: `hpctrain data prepare`"
    yield f"    - path: {_scalar(wishes.data)}"
    if wishes.tokenizer is not None:
        yield f"  tokenizer: {_scalar(wishes.tokenizer)}"


def _training(wishes: Wishes) -> tuple[float, int, int, float]:
    """Choose tokens of the run, sequences of a batch, steps, and the learning rate."""
    shape = wishes.model.shape
    parameters = total_parameters(shape)
    _, batch_tokens, rate = next(row for row in _GPT3 if parameters <= row[0])
    tokens: float = TOKENS_PER_PARAMETER * parameters
    if wishes.model.pretrained:
        batch_tokens, rate = min(batch_tokens, 0.5e6), _FINE_TUNING_RATE
        tokens = _FINE_TUNING_TOKENS
    tokens = wishes.tokens or tokens
    sequences = _power_of_two(min(batch_tokens, tokens / _LEAST_STEPS) / shape.seq, wishes.gpus)
    return tokens, sequences, math.ceil(tokens / (sequences * shape.seq)), rate


def _language(wishes: Wishes) -> Iterator[str]:
    shape, fine_tuning = wishes.model.shape, wishes.model.pretrained
    tokens, sequences, steps, rate = _training(wishes)
    yield "batch:"
    yield f"  global: {sequences:<15} # sequences in a step, {sequences * shape.seq:,} tokens"
    yield "  micro: auto"
    yield ""
    yield "budget:"
    why = "20 for each parameter (arXiv 2203.15556)"
    if wishes.tokens is not None:
        why = "as asked for"
    elif fine_tuning:
        why = "your choice: epochs times tokens of the data"
    yield f"  tokens: {_tokens(tokens):<15} # {why}; {steps:,} step{'' if steps == 1 else 's'}"
    yield ""
    yield "optimizer:"
    source = "of GPT-3 at this size (arXiv 2005.14165, table 2.1)"
    if fine_tuning:
        source = "for weights that are trained already"
    yield f"  lr: {rate:<19g} # {source}"
    yield f"  min_lr: {rate / 10:<15g} # a tenth of it at the end"
    yield "  beta2: 0.95"
    yield "  weight_decay: 0.1"
    yield "  clip_grad: 1.0"
    yield ""
    yield "schedule:"
    yield "  style: cosine"
    yield f"  warmup_steps: {min(2000, steps // 100)}"


def _images(wishes: Wishes) -> Iterator[str]:
    batch = _power_of_two(_IMAGE_BATCH, wishes.gpus)
    yield "batch:"
    yield f"  global: {batch:<15} # images in a step"
    yield "  micro: auto"
    yield ""
    yield "budget:"
    yield f"  steps: {_IMAGE_STEPS}"
    yield ""
    yield "optimizer:"
    yield f"  lr: {_IMAGE_RATE}"
    yield "  weight_decay: 0.05"
    yield ""
    yield "schedule:"
    yield "  style: cosine"
    yield f"  warmup_steps: {_IMAGE_STEPS // 20}"


def _default_engine(model: Model) -> str | None:
    """Choose an engine that shards, for weights and for large models, else the plainest one.

    None where the default engine trains the model.
    """
    sharded = model.pretrained or total_parameters(model.shape) > MOST_ON_ONE_GPU
    able = [one for one in ENGINES.values() if builds(one, model.shape)]
    if model.pretrained:
        able = [one for one in able if one.weights == "hugging_face" and one.shards]
    elif any(one.name == DEFAULT_ENGINE for one in able):
        return None
    return min(able, key=lambda one: (one.shards is not sharded, len(one.axes))).name


def _power_of_two(wanted: float, gpus: int) -> int:
    """Return the power of two nearest to `wanted`, at least one for each GPU, as a multiple."""
    count = 1 << max(0, round(math.log2(max(1.0, wanted))))
    odd = gpus // (gpus & -gpus)  # a number of GPUs such as 24 divides no power of two
    return max(count, gpus & -gpus) * odd if odd > 1 else max(count, gpus)


def _tokens(count: float) -> str:
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= scale:
            return f"{count / scale:.4g}{suffix}"
    return str(int(count))


def _summary(shape: ModelSpec) -> str:
    parameters = total_parameters(shape)
    large = parameters >= 1e9
    count = f"{parameters / (1e9 if large else 1e6):.3g} {'billion' if large else 'million'}"
    return f"{count} parameters, {short_bytes(2 * parameters)} of weights in bf16"


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.1e}" if abs(value) < 1e-3 else repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if not _is_plain(value) else value
    return json.dumps(value)


def _is_plain(text: str) -> bool:
    return (
        bool(text) and all(char.isalnum() or char in "/._-" for char in text) and text[0].isalpha()
    )
