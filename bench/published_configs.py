"""Write docs/models.md: what becomes of published config.json files, brought as a user brings them.

    python -m bench.published_configs [--write]

Each is read, counted, planned on `a100x64` and compared with what the engines train and `convert`
converts. Nothing is trained here: `tests/engines/test_model_families.py` does that, with a tiny
model of each family. Belongs here: the table. Does not belong here: the files (`tests/families/`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpctrain.base.errors import HpctrainError, InvalidInputError
from hpctrain.engines.conversion import unconvertible
from hpctrain.job.plan import load, plan_option
from hpctrain.plan.abilities.trainable import untrainable_fields
from hpctrain.plan.model.parameters import total_parameters
from hpctrain.spec.families import (
    Reading,
    countable,
    family_of,
    missing_part,
    read_config,
)
from hpctrain.train.engines.models.count import count

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "families" / "published.jsonl"
PAGE = ROOT / "docs" / "models.md"
_TOKENS = 2048  # of a sample, where the model takes so many
_ENGINES = ("megatron", "fsdp", "ddp", "deepspeed")
_SPEC = """\
name: published
model: {{config: config.json{beside}}}
batch: {{global: 1024, micro: auto}}
budget: {{steps: 1000}}
optimizer: {{lr: 1.0e-4}}
checkpoint: {{every_steps: 100}}
engine: {{name: {engine}}}
resources: {{gpus: {gpus}}}
"""


@dataclass(frozen=True)
class Row:
    """One published file. `parameters`: as counted; `published`: as published, where exact."""

    name: str
    kind: str
    parameters: int | None = None
    published: int | None = None
    engines: tuple[str, ...] = ()
    plan: str = ""
    converts: bool = False
    remark: str = ""


def rows() -> Iterator[Row]:
    """Bring each published file."""
    for line in FILE.read_text().splitlines():
        entry = json.loads(line)
        if entry["asked"]:
            yield bring(entry["name"], entry["parameters"], entry["config"])


def bring(name: str, published: int | None, config: dict[str, Any]) -> Row:
    """Read, plan and judge one config.json."""
    family = family_of(config)
    kind = str(config.get("model_type")) if family is None else family.name
    reading = None if family is None else read_config(config, family)
    figures, remark = None, ""
    if reading is None or reading.refused:
        if not countable(config):
            return Row(name, kind, remark="not known")
        figures, refused = count(config), reading.refused if reading is not None else ()
        part = missing_part(config) or "; ".join(f"`{key}` {why}" for key, why in refused)
        reading, remark = None, f"counted: {part}"
    engines, parameters, plan = [], None, ""
    with TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "config.json").write_text(json.dumps(config))
        for engine in _ENGINES:
            try:
                found, text = _plan(place, engine, _beside(reading, figures, engine))
            except InvalidInputError as error:
                remark = remark or error.problems[0].message
                continue
            except HpctrainError as error:
                remark = remark or str(error)
                continue
            parameters = total_parameters(found.model)
            plan = plan or text
            if not untrainable_fields(found):
                engines.append(engine)
    unknown = ", ".join(f"`{key}`" for key, _ in reading.unknown) if reading else ""
    remark = remark or (f"kept for the class: {unknown}" if unknown else "")
    if reading is not None and reading.fields.get("mtp_layers"):
        remark = "; ".join(filter(None, [remark, "all but megatron with `mtp_layers: 0`"]))
    converts = not unconvertible(config)
    return Row(name, kind, parameters, published, tuple(engines), plan, converts, remark)


def _beside(reading: Reading | None, figures: dict[str, Any] | None, engine: str) -> str:
    """Fields beside the config: the length, figures of a count, and no prediction layers where the
    class has none."""
    if reading is None:
        assert figures is not None
        own = {"seq": min(_TOKENS, figures.get("max_seq", _TOKENS)), **figures}
        return "".join(f", {key}: {json.dumps(value)}" for key, value in own.items())
    if reading.family.name in ("vit", "resnet"):
        return ""
    seq = min(_TOKENS, int(reading.fields.get("max_seq", _TOKENS)))
    no_prediction = reading.fields.get("mtp_layers") and engine != "megatron"
    return f", seq: {seq}" + ", mtp_layers: 0" * bool(no_prediction)


def _plan(place: Path, engine: str, beside: str) -> tuple[Any, str]:
    """Load the spec and plan it on as many GPUs of a100x64 as it takes. Raises HpctrainError."""
    file = place / "spec.yaml"
    for gpus in (8, 64, 512):
        file.write_text(_SPEC.format(engine=engine, gpus=gpus, beside=beside))
        inputs = load(file, "a100x64")
        option = plan_option(inputs, "time", before_seconds=0)
        if option.plan is not None:
            return inputs.spec, f"{gpus} GPUs"
    return inputs.spec, "not on 512 GPUs"


def table(found: list[Row]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| model | family | parameters | as published | plan | trained by | converted | remark |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in found:
        same = "the same" if row.published == row.parameters else f"{row.published or 0:,}"
        cells = (
            row.name,
            row.kind,
            f"{row.parameters:,}" if row.parameters else "",
            same if row.published is not None else "",
            row.plan,
            ", ".join(row.engines),
            "yes" if row.converts else "",
            row.remark,
        )
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    made = list(rows())
    planned = sum(bool(row.plan) for row in made)
    counts = [f"{len(made)} published files, {planned} planned"]
    counts += [
        f"{sum(engine in row.engines for row in made)} trained by {engine}" for engine in _ENGINES
    ]
    counts += [f"{sum(row.converts for row in made)} converted"]
    lines = [*table(made), "", "; ".join(counts) + "."]
    if "--write" in sys.argv[1:]:
        head = PAGE.read_text().split("| model | family |")[0]
        PAGE.write_text(head + "\n".join(lines) + "\n")
    print("\n".join(lines))
