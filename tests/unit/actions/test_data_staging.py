"""Runs that copy their data to the nodes: what is refused or said before they wait in the queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.actions.site_warnings import staging_warnings
from hpctrain.errors import InvalidInputError, LimitError
from hpctrain.plan.job import TrainingJob
from hpctrain.plan.planner import make_plan
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec
from hpctrain.spec.profile import ClusterProfile

SPEC = """\
name: staged
model: {family: gpt, layers: 4, hidden: 64, heads: 4, seq: 32, vocab: 256}
resources: {gpus: 4}
parallel: {tp: 2, pp: 2}
batch: {global: 8}
budget: {steps: 10}
optimizer: {lr: 1.0e-3}
checkpoint: {every: 10min}
data:
  stage: true
  sources: [{path: SOURCE}]
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(b"0" * 4000)
    return path


def site(capacity: str | None, place: Path | None = None, rate: str = "1GB/s") -> ClusterProfile:
    changes: dict[str, Any] = {}
    if capacity is not None:
        changes["software"] = {"scratch": "/local/$USER", "scratch_capacity": capacity}
    if place is not None:
        shared = {"name": "home", "path": "/", "kind": "nfs"}
        near = {"name": "work", "path": str(place), "kind": "gpfs"}
        speed = {"read_bandwidth": rate, "write_bandwidth": rate}
        own = {"read_bandwidth": "1TB/s", "write_bandwidth": "1TB/s"}
        changes["filesystems"] = [{**shared, **own}, {**near, **speed}]
    return ClusterProfile.model_validate(
        {
            **load_profile(find_profile("a100x64")).document.model_dump(mode="json", by_alias=True),
            **changes,
        }
    )


def warnings(profile: ClusterProfile, data: Path, **engine: str) -> tuple[str, ...]:
    file = data.parent / "spec.yaml"
    text = SPEC.replace("SOURCE", str(data.with_suffix("")))
    file.write_text(text)
    spec = load_run_spec(file, [f"engine.{name}={value}" for name, value in engine.items()])
    plain = spec.document.model_copy(update={"engine": load_run_spec(file, []).document.engine})
    job = TrainingJob(spec.document, profile, make_plan(plain, profile))
    return staging_warnings(job, spec, [str(data)])


def test_a_disk_with_room_takes_the_data_in_silence(data: Path) -> None:
    assert warnings(site("4kB", data.parent), data) == ()


def test_a_profile_without_a_disk_is_refused_at_the_line_of_the_spec(data: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"spec\.yaml:10:.*no disk on its nodes"):
        warnings(site(None), data)


def test_more_data_than_the_disk_holds_is_refused(data: Path) -> None:
    with pytest.raises(LimitError, match="scratch_capacity"):
        warnings(site("3.9kB"), data)


def test_minutes_of_copying_are_said_and_more_than_the_startup_timeout_refused(data: Path) -> None:
    (said,) = warnings(site("1MB", data.parent, "10B/s"), data)
    assert "copying 3.9 KiB to 1 nodes, about 6.67 min at the read bandwidth of work" in said
    with pytest.raises(LimitError, match=r"longer than `engine\.startup_timeout`"):
        warnings(site("1MB", data.parent, "10B/s"), data, startup_timeout="6min")


def test_an_engine_with_a_reader_of_its_own_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="a program of its own"):
        warnings(site("1MB"), data, name="megatron-lm", checkout=str(tmp_path))
