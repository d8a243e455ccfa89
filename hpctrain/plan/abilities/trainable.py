"""List what a plan may contain but hpctrain's own trainer cannot train or read.

Belongs here: one message for each thing that no engine can, and the call of the engine's own
rules. Does not belong here: these (`trainable_*`), what cannot be planned at all (`mesh.rules`,
`sharding`), whether files are there (`hpctrain.job.input_checks`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, cast

from hpctrain.plan.documents import Plan
from hpctrain.spec.data import DataFormat
from hpctrain.spec.engines.abilities import EngineAbilities
from hpctrain.spec.engines.registry import ENGINES, abilities_of, resolve
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.run import RunSpec

Problems = list[tuple[str, str]]


class Rules(Protocol):
    """The module that an engine's abilities name as its `rules`.

    It may also have `untrainable_axes(spec)`: axes by which this model is not split, and
    `missing_parts(model)`: fields of parts that it has not, each with the reason.
    """

    def untrainable(self, spec: RunSpec) -> Iterable[tuple[str, str]]:
        """List (dotted path of the field, what the trainer lacks)."""
        ...


def untrainable(spec: RunSpec) -> tuple[str, ...]:
    """List why `submit` refuses this spec, the field first; empty when it can be trained."""
    return tuple(
        f"{message}: this can be planned, but not submitted"
        for _, message in untrainable_fields(spec)
    )


def untrainable_fields(spec: RunSpec) -> Problems:
    """List (dotted path of the field, what the trainer lacks)."""
    engine, family, abilities = spec.engine.name, spec.model.family, spec.engine.abilities
    problems: Problems = []
    if abilities.families is not None and family not in abilities.families:
        trained = _joined(abilities.families)
        problems.append(("model.family", f"hpctrain trains {trained} with {engine}, not {family}"))
    if spec.precision not in abilities.trained_precisions:
        trained = _joined(abilities.trained_precisions)
        able = [one.name for one in ENGINES.values() if spec.precision in one.trained_precisions]
        does = f"; engine {' and '.join(able)} does" if able else ""
        message = f"hpctrain trains in {trained} with {engine}, not in {spec.precision}{does}"
        problems.append(("precision", message))
    if spec.optimizer.offload not in abilities.trained_offloads:
        place = f"the optimizer's state on {spec.optimizer.offload}"
        problems.append(("optimizer.offload", f"hpctrain does not train {engine} with {place}"))
    rules = _rules(abilities)
    own = list(rules.untrainable(spec)) if rules else []
    named = {field for field, _ in own}
    # an engine may have a message of its own about the format of data or numbers
    formats = unreadable(spec)
    return [problem for problem in (*problems, *formats) if problem[0] not in named] + own


def _joined(names: Sequence[str]) -> str:
    """Format as `gpt, llama and bert`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def builds(abilities: EngineAbilities, model: ModelSpec) -> bool:
    """Tell whether an engine has all parts of a model."""
    if abilities.families is not None and model.family not in abilities.families:
        return False
    if model.reads_images and not abilities.reads_images:
        return False
    missing = getattr(_rules(abilities), "missing_parts", None)
    return missing is None or not any(missing(model))


def untrainable_axes(spec: RunSpec) -> Collection[str]:
    """Name the axes that the engine trains, but not for this model."""
    refuse = getattr(_rules(spec.engine.abilities), "untrainable_axes", None)
    return refuse(spec) if refuse is not None else ()


def untrainable_layout(plan: Plan) -> Problems:
    """List the axes of a plan that this engine cannot train."""
    trained = abilities_of(plan.engine).trained_axes
    chosen = {"tp": plan.layout.tp, "pp": plan.layout.pp, "cp": plan.layout.cp}
    return [
        ("parallel", f"hpctrain trains {plan.engine} without {axis}, the plan has {axis} {size}")
        for axis, size in chosen.items()
        if size > 1 and axis not in trained
    ]


def _rules(abilities: EngineAbilities) -> Rules | None:
    return cast(Rules, resolve(abilities.rules)) if abilities.rules else None


# -- Data formats that a model can be trained on --------------------------------------------------


def readable_formats(spec: RunSpec) -> tuple[DataFormat, ...]:
    """List the formats of data for the spec's task; synthetic data have the first."""
    task = spec.learned_task
    if task == "language_modeling":
        return ("tokens", "packed") if spec.engine.abilities.reads_packed else ("tokens",)
    if task in ("masked_language_modeling", "span_corruption"):
        return ("tokens",)
    return ("images", "arrays") if spec.model.reads_images else ("examples",)


def data_format(spec: RunSpec) -> DataFormat:
    """Find the format that the run reads; synthetic data need none to be given."""
    data = spec.data
    return data.format if data.sources or data.format != "tokens" else readable_formats(spec)[0]


def unreadable(spec: RunSpec) -> list[tuple[str, str]]:
    """List (dotted path of the field, why the model cannot learn from that data)."""
    chosen, formats = data_format(spec), readable_formats(spec)
    if chosen in formats:
        return []
    what = f"{spec.learned_task} of a {spec.model.family} by {spec.engine.name}"
    return [("data.format", f"{what} reads {' or '.join(formats)}, not {chosen}")]
