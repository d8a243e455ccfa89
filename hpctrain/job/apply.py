"""Writes a planned layout into the YAML of its spec; comments and order of the file stay.

Belongs here: which fields are written, and that the file then plans the same. Does not belong
here: choosing (`hpctrain.plan`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from io import StringIO
from pathlib import Path
from typing import Any

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import HpctrainError, InvalidInputError, UsageError
from hpctrain.job.plan import Option, load, plan_option
from hpctrain.plan.documents import Plan
from hpctrain.plan.layout_words import DEFAULT_ORDER

# (mapping, sequence, offset) as files are indented; the one that changes fewest lines is taken.
_INDENTS = tuple(
    (mapping, sequence, offset)
    for mapping in (2, 4)
    for sequence, offset in ((2, 0), (4, 2), (4, 0), (6, 4))
)
_WIDTH = 4096  # a long line stays one


def chosen_fields(option: Option) -> dict[str, Any]:
    """Return what the plan has decided, by the fields of the spec."""
    decision = option.decision
    assert decision is not None
    candidate = decision.found.candidate(decision.row)
    given = candidate.parallel.model_dump(mode="json", exclude_defaults=True)
    if given.get("order") == DEFAULT_ORDER:
        del given["order"]
    if given.get("sequence_parallel") == (candidate.layout.tp > 1):
        del given["sequence_parallel"]
    axes = {"tp": candidate.layout.tp, "pp": candidate.layout.pp}
    return {
        "parallel": {**axes, **given},
        "batch": {"micro": candidate.micro_batch},
        "resources": {"gpus": option.gpus},
    }


def apply_plan(spec: Path, profile: str, option: Option, overrides: Sequence[str] = ()) -> str:
    """Write layout, micro-batch and number of GPUs of `option` into the file.

    Returns a sentence about it. Raises UsageError for a spec that is not a file that can be
    written; and, with the file as it was, UsageError where only `overrides` make it plan so, and
    HpctrainError if it would not plan the same for another reason.
    """
    if str(spec) == "-" or not spec.is_file():
        raise UsageError(f"--apply writes into a file, and {spec} is none")
    before = spec.read_text(encoding="utf-8")
    fields = chosen_fields(option)
    after = changed_text(before, fields)
    changes = [*_changes(_read(before), fields)]
    if not changes:
        return f"{spec} has this layout already"
    target = spec.resolve()
    mode = target.stat().st_mode & 0o777
    try:
        replace_text(target, after, mode=mode)
    except OSError as error:
        raise UsageError(f"--apply: {spec} cannot be written: {error.strerror}") from error
    try:
        _check_written(spec, profile, option, overrides)
    except HpctrainError:
        replace_text(target, before, mode=mode)
        raise
    return f"{spec}: wrote {', '.join(f'`{change}`' for change in changes)}"


def _check_written(spec: Path, profile: str, option: Option, overrides: Sequence[str]) -> None:
    """Raise UsageError or HpctrainError unless the file plans as `option`, also on its own."""
    again = plan_option(load(spec, profile, overrides), "time")
    if again.plan is None or option.plan is None or again.plan.layout != option.plan.layout:
        raise HpctrainError(f"{spec} is unchanged: it would plan {again.plan or again.refusal}")
    absent = [name for one in overrides if not _is_written(name := one.partition("=")[0])]
    if not absent:
        return
    try:
        alone = plan_option(load(spec, profile), "time")
        if alone.plan is not None and _figures(alone.plan) == _figures(again.plan):
            return
        reason = str(alone.refusal or "it would plan other batches or another memory")
    except InvalidInputError as error:
        reason = str(error)
    named = " and ".join(f"`--set {name}`" for name in absent)
    hint = f"{named} {'is' if len(absent) == 1 else 'are'} not in the file: write it there first"
    raise UsageError(f"{spec} is unchanged: without {named}, {reason}", hint=hint)


def _is_written(field: str) -> bool:
    return field.partition(".")[0] == "parallel" or field in ("batch.micro", "resources.gpus")


def _figures(plan: Plan) -> tuple[object, ...]:
    return plan.layout, plan.batch, plan.memory


def changed_text(text: str, fields: Mapping[str, Any]) -> str:
    """Return the YAML `text` with `fields`, and with as few other changes as possible."""
    written = [_written(text, fields, indent) for indent in _INDENTS]

    def kept(other: str) -> int:
        matcher = SequenceMatcher(None, text.splitlines(), other.splitlines(), autojunk=False)
        return sum(block.size for block in matcher.get_matching_blocks())

    return max(written, key=kept)


def _written(text: str, fields: Mapping[str, Any], indent: tuple[int, int, int]) -> str:
    from ruamel.yaml import YAML

    # ruamel's round trip keeps tags as text and makes no objects of them.
    round_trip, stream = YAML(typ="rt", pure=True), StringIO()
    round_trip.preserve_quotes, round_trip.width = True, _WIDTH
    round_trip.indent(mapping=indent[0], sequence=indent[1], offset=indent[2])
    document = round_trip.load(text)
    _update(document, fields)
    round_trip.dump(document, stream)
    return stream.getvalue()


def _update(document: Any, fields: Mapping[str, Any]) -> None:
    """Set every field; a layout replaces all keys of the one before."""
    for name, value in fields.items():
        inner = document.get(name)
        if not isinstance(value, Mapping):
            if inner != value:
                document[name] = value
        elif not hasattr(inner, "get"):
            document[name] = dict(value)
        else:
            if name == "parallel":
                for gone in [key for key in inner if key not in value]:
                    del inner[gone]
            _update(inner, value)


def _changes(document: Any, fields: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield `parallel.tp 4` for each field that is not so yet, and `no parallel.vpp`."""
    known = document if hasattr(document, "get") else {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _changes(known.get(name), value, f"{above}{name}.")
        elif known.get(name) != value:
            yield f"{above}{name} {value}"
    if above == "parallel.":
        yield from (f"no {above}{name}" for name in known if name not in fields)


def _read(text: str) -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(text)
