"""What a Slurm does, by its own words where they tell and by its release where they do not."""

from __future__ import annotations

import pytest

from hpctrain.slurm.records import SlurmConfig
from hpctrain.slurm.settings import capabilities, capabilities_of_release


def config(version: str, **values: str) -> SlurmConfig:
    return SlurmConfig({"SLURM_VERSION": version, **values})


@pytest.mark.parametrize(
    ("version", "comes_back"),
    [("22.05.8", False), ("23.11.10", False), ("24.05.0", True), ("24.11.5", True)],
)
def test_from_24_05_on_who_leaves_in_a_grace_comes_back(version: str, comes_back: bool) -> None:
    assert capabilities(config(version)).requeues_who_leaves_in_a_grace is comes_back


def test_a_key_that_slurm_prints_counts_more_than_its_release() -> None:
    carried_back = config("22.05.8", PreemptParameters="(null)")
    assert capabilities(carried_back).has_preempt_parameters
    assert not capabilities(config("22.05.8")).has_preempt_parameters
    assert not capabilities_of_release((22, 5)).has_preempt_parameters
    assert capabilities_of_release((23, 2)).has_preempt_parameters


def test_what_changed_with_the_daemons() -> None:
    old, middle, new = map(capabilities_of_release, ((23, 2), (23, 11), (26, 5)))
    assert (old.replaces_daemons, middle.replaces_daemons) == (False, True)
    assert (middle.needs_cgroup_plugin, new.needs_cgroup_plugin) == (False, True)


def test_a_slurm_that_does_not_tell_its_release_is_taken_for_an_old_one() -> None:
    assert not capabilities(SlurmConfig({})).requeues_who_leaves_in_a_grace


def test_what_changed_with_topologies() -> None:
    old, middle, new = map(capabilities_of_release, ((23, 2), (24, 11), (25, 5)))
    assert (old.has_blocks, middle.has_blocks) == (False, True)
    assert (middle.hides_topology, new.hides_topology) == (False, True)
