"""Parse the variants to compare: `fsdp`, `deepspeed:zero3+offload`, `large: batch.micro=4`.

A variant is a name and overrides of the spec, as for `--set`. Belongs here: the grammar. Does not
belong here: the words of an engine (see `hpctrain.spec.engines`), whether the engine supports them
(validation and the planner report that).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpctrain.base.errors import UsageError
from hpctrain.spec.engines.abilities import MEGATRON_CORE
from hpctrain.spec.engines.registry import ENGINES, abilities_of, engine_names

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
