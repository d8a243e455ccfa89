"""Whatever a user's overlay or `--set` has wrong is reported there, never inside the base.

Belongs here: the places of problems. Does not belong here: their words (see `test_spec_messages`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.spec.loader import load_profile, load_run_spec, load_service_spec
from hpctrain.spec.profile import ClusterProfile

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
BASE = "a100x64"
# Things of the base that lists with names are joined by.
JOINED = {"partitions": "gpu", "filesystems": "scratch", "environment": "NCCL_SOCKET_IFNAME"}


def problems_of(file: Path) -> tuple[Problem, ...]:
    try:
        load_profile(file)
    except InvalidInputError as error:
        return error.problems
    return ()


def sections_in(annotation: Any) -> Iterator[tuple[type[BaseModel], bool]]:
    """The documents that a field may have, and whether it is a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, False
        return
    for argument in get_args(annotation):
        for section, _ in sections_in(argument):
            yield section, get_origin(annotation) is tuple


def paths_of(
    model: type[BaseModel], above: tuple[str | int, ...] = ()
) -> Iterator[tuple[Any, ...]]:
    """The paths of all fields; `0` is the first thing of a list."""
    for name, field in model.model_fields.items():
        path = (*above, field.alias or name)
        yield path
        for section, many in sections_in(field.annotation):
            yield from paths_of(section, (*path, 0) if many else path)


def overlay(path: tuple[Any, ...], value: object) -> dict[str, Any]:
    """A profile that extends the base and sets the value at one path."""
    document: Any = value
    for index in range(len(path) - 1, -1, -1):
        if path[index] != 0:
            document = {path[index]: document}
        else:
            name = JOINED.get(path[index - 1])
            named = {"name": name, **document} if name and "name" not in document else document
            document = [named]
    return {"extends": BASE, "name": "own", **document}


PATHS = [path for path in paths_of(ClusterProfile) if path != ("extends",)]


@pytest.mark.parametrize("section", dict.fromkeys(path[0] for path in PATHS))
def test_each_field_of_an_overlay_with_a_wrong_value_is_named_in_it(
    section: str, tmp_path: Path
) -> None:
    """Another type or an unknown key, no value, out of range; of partitions the first."""
    file = tmp_path / "own.yaml"
    for path in (path for path in PATHS if path[0] == section):
        for value in ({"nonsense": 1}, None, -1)[: 1 if "partitions" in path else 3]:
            file.write_text(yaml.safe_dump(overlay(path, value), sort_keys=False))
            found = problems_of(file)
            assert found or value != {"nonsense": 1}, path
            for problem in found:
                assert problem.file == str(file) and problem.line, (path, value, str(problem))


# An overlay that contradicts its base, the line at which, and the line of the base if it is named.
CONTRADICTIONS = [
    ("islands10b", "nodes: {count: 5}", 3, "islands10b.yaml"),
    ("islands10b", "description: mine\nnodes:\n  prefix: g\n  count: 5", 6, "islands10b.yaml"),
    ("islands10b", "slurm:\n  constraint: a|b", 3, None),
    ("islands10b", "network:\n  nic_bandwidth: 1MB/s", 3, None),
    ("islands10b", "slurm:\n  partitions:\n    - name: gpu\n      constraint: '[a]'", 5, None),
    (BASE, "network:\n  ports: 20000-21000\n  interface: eth5", 5, "a100x64.yaml"),
    (BASE, "environment:\n  - name: NCCL_SOCKET_IFNAME\n    value: ib", 5, None),
    (BASE, "slurm:\n  memory: all\n  memory_per_gpu: 60GiB", 3, None),
    (BASE, "slurm:\n  partitions:\n    - {name: other, default: true}", 3, None),
    (BASE, "slurm:\n  partitions:\n    - {name: gpu, remove: true}", 3, None),
    (BASE, "network:\n  switches:\n    plugin: none", 4, None),
    (BASE, "filesystems:\n  - {name: scratch, stripe_size: 4MiB}", 4, None),
    (BASE, "nodes: null", 1, None),
]


@pytest.mark.parametrize(("base", "text", "line", "other"), CONTRADICTIONS)
def test_what_contradicts_the_base_is_named_in_the_overlay(
    base: str, text: str, line: int, other: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(f"extends: {base}\nname: own\n{text}\n")
    (problem,) = problems_of(file)
    assert (problem.file, problem.line) == (str(file), line)
    assert problem.column
    named = re.search(r"\(([\w.]+):\d+\)$", problem.message)
    assert (named[1] if named else None) == other


def test_only_what_is_wrong_in_a_base_alone_stays_there(tmp_path: Path) -> None:
    """Three files: the one in the middle contradicts its base, the last one another value."""
    middle, own = tmp_path / "middle.yaml", tmp_path / "own.yaml"
    middle.write_text("extends: islands10b\nname: middle\nnodes:\n  count: 5\n")
    own.write_text("extends: middle\nname: own\nnetwork:\n  ports: 20000-21000\n")
    (problem,) = problems_of(own)
    assert (problem.file, problem.line, problem.column) == (str(middle), 4, 10)
    own.write_text("extends: middle\nname: own\nnodes:\n  count: 6\n")
    (problem,) = problems_of(own)
    assert (problem.file, problem.line) == (str(own), 4), "another number, another contradiction"
    own.write_text("extends: middle\nname: own\nnodes: {count: 8}\nnetwork: {interface: x}\n")
    (problem,) = problems_of(own)
    assert (problem.file, problem.line) == (str(own), 4)


def test_where_no_single_value_is_the_cause_the_section_around_is(tmp_path: Path) -> None:
    """Two values that each contradict the base in the same words."""
    file = tmp_path / "own.yaml"
    file.write_text(
        "extends: a100x64\nname: own\nnetwork:\n  interface: ib0\n  islands:\n"
        "    - {nodes: 3, uplink: 1Gb/s}\n    - {nodes: 4, uplink: 1Gb/s}\n"
    )
    places = {(problem.file, problem.line) for problem in problems_of(file)}
    assert places <= {(str(file), line) for line in (3, 4, 5)} and places


SPEC = """\
name: tiny
model: {layers: 2, hidden: 64, heads: 4, vocab: 256, seq: 64}
batch: {global: 32}
budget: {steps: 4}
optimizer: {lr: 1e-3}
checkpoint: {every_steps: 2}
resources: {gpus: 2}
"""


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("model.heads=5", 2),
        ("model.family=vit", 2),
        ("budget.tokens=1e9", 4),
        ("optimizer.min_lr=1", 5),
        ("schedule.warmup_steps=9", 1),
        ("model.hidden=3", None),
        ("model.nonsense=1", None),
        ("engine=3", None),
        ("resources.gpus=null", None),
    ],
)
def test_what_contradicts_the_file_is_named_at_the_option(
    option: str, line: int | None, tmp_path: Path
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(SPEC)
    with pytest.raises(InvalidInputError) as caught:
        load_run_spec(file, ["name=mine", option])
    (problem,) = caught.value.problems
    assert problem.file == f"--set {option}"
    assert problem.line is None
    assert problem.message.endswith(f"(spec.yaml:{line})") == (line is not None)


def test_what_is_wrong_in_the_file_alone_stays_there(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(SPEC.replace("heads: 4", "heads: 5"))
    with pytest.raises(InvalidInputError) as caught:
        load_run_spec(file, ["name=mine", "optimizer.min_lr=1"])
    places = [(problem.file, problem.line) for problem in caught.value.problems]
    assert places == [(str(file), 2), ("--set optimizer.min_lr=1", None)]


def test_an_option_contradicts_the_spec_of_a_service(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text((EXAMPLES / "serve70b" / "tiny.yaml").read_text())
    with pytest.raises(InvalidInputError) as caught:
        load_service_spec(file, ["traffic.trace=x"])
    (problem,) = caught.value.problems
    assert problem.file == "--set traffic.trace=x"
    assert problem.message.endswith("(service.yaml:12)")
