"""List the data formats that a model can be trained on.

Belongs here: one message for each impossible combination. Does not belong here: whether
the files are there (see `hpctrain.job.input_checks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.spec.data import DataFormat

if TYPE_CHECKING:
    from hpctrain.spec.run import RunSpec


def readable_formats(spec: RunSpec) -> tuple[DataFormat, ...]:
    """List the formats of data for the spec's task; synthetic data have the first."""
    task = spec.learned_task
    if task == "language_modeling":
        return ("tokens", "packed") if spec.engine.abilities.reads_packed else ("tokens",)
    if task == "masked_language_modeling":
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
