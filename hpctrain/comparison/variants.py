"""What is compared, in words: `fsdp`, `deepspeed:zero3+offload`, `large: batch.micro=4`.

A variant is a name and overrides of the spec, the same as those of `--set`. The words of each
engine are a table. Belongs here: the grammar and the table. Does not belong here: whether an
engine can do it (validation and the planner say so, about the field).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpctrain.errors import UsageError
from hpctrain.spec.megatron_lm import MEGATRON_LM_ENTRY

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_:+-]{0,39}")
_OPTION = re.compile(r"(?P<name>[^=]*?):\s+(?P<fields>.*\S)\s*", re.DOTALL)
_NEXT_FIELD = re.compile(r",\s*(?=[A-Za-z_][\w.\[\]]*=)")

MODULES = ("fsdp", "deepspeed", "ddp")
MEGATRON = ("megatron", "megatron-lm")
ENGINES = (*MODULES, *MEGATRON)


@dataclass(frozen=True)
class Variant:
    """One thing to try: `overrides` are `PATH=VALUE`, applied after those of the user."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Word:
    """A word after an engine's name; `#` in it stands for a number, also in the overrides."""

    text: str
    engines: tuple[str, ...]
    overrides: tuple[str, ...]

    def match(self, word: str) -> tuple[str, ...] | None:
        """The overrides of `word`; None when it is another one."""
        pattern = re.escape(self.text).replace(r"\#", "([1-9][0-9]*)")
        found = re.fullmatch(pattern, word)
        if found is None:
            return None
        number = found[1] if found.groups() else ""
        return tuple(override.replace("#", number) for override in self.overrides)


def _zero(stage: int, *engines: str) -> Word:
    fields = (f"optimizer.zero={stage}", f"optimizer.distributed={str(stage > 0).lower()}")
    return Word(f"zero{stage}", engines, fields)


_MESH = ("deepspeed", *MEGATRON)
WORDS = (
    _zero(0, "deepspeed"),
    _zero(1, "deepspeed"),
    _zero(2, "deepspeed", "fsdp"),
    _zero(3, "deepspeed", "fsdp"),
    Word("zero0", MEGATRON, ("optimizer.distributed=false",)),
    Word("zero1", MEGATRON, ("optimizer.distributed=true",)),
    Word("shard#", ("fsdp",), ("optimizer.shard_gpus=#",)),
    Word("offload", ("fsdp", "deepspeed", "megatron-lm"), ("optimizer.offload=cpu",)),
    Word("offload-nvme", ("deepspeed",), ("optimizer.offload=nvme",)),
    Word("offload-weights", ("deepspeed",), ("engine.deepspeed.offload_parameters=cpu",)),
    Word("recompute", ENGINES, ("recompute=full",)),
    Word("no-recompute", ENGINES, ("recompute=none",)),
    Word("powersgd", ("ddp",), ("engine.ddp.hook=powersgd",)),
    Word("hierarchical", ("ddp",), ("engine.ddp.hook=hierarchical",)),
    Word("bf16-sums", ("ddp",), ("engine.ddp.hook=bf16",)),
    Word("fp16-sums", ("ddp",), ("engine.ddp.hook=fp16",)),
    Word("bf16", ENGINES, ("precision=bf16",)),
    Word("fp32", ENGINES, ("precision=fp32",)),
    Word("micro#", ENGINES, ("batch.micro=#",)),
    Word("tp#", _MESH, ("parallel.tp=#",)),
    Word("pp#", _MESH, ("parallel.pp=#",)),
    Word("cp#", MEGATRON, ("parallel.cp=#",)),
)
# An engine as it is without words: all GPUs data parallel, no offload. Stages: fsdp 3, deepspeed 1,
# megatron's optimizer distributed.
_PLAIN = (
    "optimizer.zero=",
    "optimizer.shard_gpus=",
    "optimizer.offload=none",
)
# What one engine only reads, and what takes it out of a spec: for another it would be refused.
_OWN_SETTINGS = {
    "ddp": ("engine.ddp={}",),
    "deepspeed": ("engine.deepspeed={}",),
    "megatron-lm": (
        "engine.checkout=",
        f"engine.entry={MEGATRON_LM_ENTRY}",
        "engine.arguments={}",
    ),
}
_ONLY_MEGATRON = (
    "engine.implementation=auto",
    "optimizer.overlap_grad_reduce=true",
    "optimizer.overlap_param_gather=true",
)


def parse_engines(text: str, own_engine: str) -> list[Variant]:
    """`fsdp,deepspeed:zero2`: one variant for each word; `own_engine` is that of the spec.

    Raises UsageError with what is known, for what is not.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(
            f"--engines {text}: an empty name", hint="for example fsdp,deepspeed:zero2"
        )
    return [Variant(word, engine_overrides(word, own_engine)) for word in words]


def engine_overrides(expression: str, own_engine: str) -> tuple[str, ...]:
    """Overrides of `ENGINE[:WORD][+WORD...]`.

    The bare name of the spec's own engine is the spec as it is. Anything else says all about
    sharding and offload, and starts from the plain form of its engine.
    """
    engine, *words = re.split(r"[:+]", expression)
    if engine not in ENGINES:
        raise UsageError(f"no engine `{engine}`{_nearest(engine, ENGINES)}", hint=_known(ENGINES))
    found = [override for word in words for override in _word_overrides(engine, word, expression)]
    if not words and engine == own_engine:
        return ()
    return (f"engine.name={engine}", *_plain(engine, own_engine, found), *found)


def _plain(engine: str, own_engine: str, found: Sequence[str]) -> list[str]:
    fields = list(_PLAIN)
    for owner, taken_out in _OWN_SETTINGS.items():
        fields += taken_out if owner != engine else ()
    if engine == "deepspeed":
        fields.append("engine.deepspeed.offload_parameters=none")
        on_nvme = "optimizer.offload=nvme" in found
        fields += [] if on_nvme else ["engine.deepspeed.nvme_path="]
    if engine in MODULES:  # an explicit layout: with `auto`, offload is an offer and no order
        fields += ["parallel=auto", "parallel.pp=1"]
        fields += _ONLY_MEGATRON if own_engine in MEGATRON else ()
    elif own_engine in MODULES:
        fields.append("parallel=auto")
    if (engine in MODULES) != (own_engine in MODULES):
        fields.append("recompute=auto")  # `selective` is for megatron only
    return fields


def _word_overrides(engine: str, word: str, expression: str) -> tuple[str, ...]:
    for known in WORDS:
        fields = known.match(word) if engine in known.engines else None
        if fields is not None:
            return fields
    of_engine = [known.text for known in WORDS if engine in known.engines]
    raise UsageError(
        f"`{expression}`: engine {engine} knows no word `{word}`{_nearest(word, of_engine)}",
        hint=f"{_known(of_engine)}; anything else: `--variant 'NAME: FIELD=VALUE'`",
    )


def parse_variant(text: str, own_engine: str) -> Variant:
    """`NAME: [ENGINE...,] FIELD=VALUE, FIELD=VALUE`; a comma within a list is no separator."""
    match = _OPTION.fullmatch(text)
    name = match["name"].strip() if match else ""
    if match is None or not _NAME.fullmatch(name):
        raise UsageError(
            f"--variant {text}: expected `NAME: FIELD=VALUE, FIELD=VALUE`",
            hint="for example --variant 'large: fsdp:zero2, batch.micro=4'",
        )
    overrides: list[str] = []
    for number, part in enumerate(_fields(match["fields"])):
        if number == 0 and "=" not in part:
            overrides += engine_overrides(part, own_engine)
        else:
            overrides.append(part)
    return Variant(name, tuple(overrides))


def _fields(text: str) -> list[str]:
    return [part.strip() for part in _NEXT_FIELD.split(text)]


def parse_variants(engines: str, others: Sequence[str], own_engine: str) -> tuple[Variant, ...]:
    """All that the command line asks for. Raises UsageError for nothing, or one name twice."""
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
