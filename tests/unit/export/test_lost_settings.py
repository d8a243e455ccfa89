"""Nothing of a spec disappears without a word when it leaves Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from exported_specs import ROOT, planned

from hpctrain.export.lost_settings import (
    CARRIED_RESOURCES,
    LOST_RESOURCES,
    Destination,
    lost_settings,
)
from hpctrain.spec.run import ResourcesSpec


def test_every_field_of_resources_is_carried_or_lost() -> None:
    """A new field has to be put into one of the two tables."""
    fields = set(ResourcesSpec.model_fields)
    assert fields == CARRIED_RESOURCES | LOST_RESOURCES.keys()
    assert not CARRIED_RESOURCES & LOST_RESOURCES.keys()


ASKED = (
    ("resources.spare_nodes=1", "resources.spare_nodes 1"),
    ("resources.qos=high", "resources.qos high"),
    ("resources.exclude=n7", "resources.exclude n7"),
    ("tracking.tensorboard=true", "tracking"),
    ("metrics.endpoint=true", "metrics.endpoint"),
    ("after=base-1a2b", "after base-1a2b"),
)


@pytest.mark.parametrize(("override", "name"), ASKED)
@pytest.mark.parametrize("destination", ["kubernetes", "hosts"])
def test_what_a_spec_asks_of_slurm(
    override: str, name: str, destination: Destination, tmp_path: Path
) -> None:
    def names(*overrides: str) -> set[str]:
        job = planned(tmp_path, *overrides).job
        return {one.name for one in lost_settings(job, destination)}

    assert name in names(override) - names()


def test_sections_that_the_supervisor_carries_out(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "llama7b.yaml").read_text()
    job = "  jobs: [{name: mmlu, command: [eval, '{checkpoint}', '{output}']}]\n"
    assert "\nevaluation:\n" in text
    changed = tmp_path / "changed.yaml"
    changed.write_text(
        text.replace("\nevaluation:\n", f"\nevaluation:\n{job}")
        + "\nnotify: {channels: [{kind: slurm}]}\n"
    )
    job = planned(tmp_path, spec=str(changed)).job
    found = {one.name for one in lost_settings(job, "hosts")}
    assert {"evaluation.jobs", "notify"} <= found
