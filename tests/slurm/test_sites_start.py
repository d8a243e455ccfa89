"""Every profile of tests/sites and of named clusters starts and ends a tiny run, as it is written.

In the sandbox of its shape, with two nodes of each kind, its modules, features, reservations and
options; what one machine lacks is changed by the profile that `sandbox up` writes, and listed by
it. Ranks compute nothing, but for a few sites in the night. Belongs here: that a site starts. Does
not belong here: how its script looks (`tests/sites`), what the sandbox of a profile has
(`test_site_sandbox`).
"""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest
from started_sites import STEPS, site_sandbox
from variants import varied

from hpctrain.records.run_records import read_metrics
from hpctrain.runs.state import RunState
from hpctrain.spec.loader import find_profile, load_profile, site_names

KINDS = Path(__file__).resolve().parents[1] / "sites"
# Most unlike each other: modules and QOS without a partition; typed GPUs of several partitions, of
# which one has slices; masks of CPUs and dies of MI250X; one GPU on a node and none in GRES.
ALWAYS = ("jean-zay-h100", "rorqual", "vista")
SITES = (*site_names(), *sorted(file.stem for file in KINDS.glob("*.yaml")))


@pytest.mark.parametrize("name", varied(SITES, *ALWAYS))
def test_a_site_starts_and_ends_a_tiny_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_starts(name, monkeypatch, stand_in=True)


@pytest.mark.nightly("ranks of torch take a minute; on as many as two cores can bear")
@pytest.mark.parametrize("name", ["jean-zay-h100", "mila", "viper-gpu", "vista"])
def test_a_site_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_starts(name, monkeypatch, stand_in=False)


def assert_starts(name: str, monkeypatch: pytest.MonkeyPatch, *, stand_in: bool) -> None:
    own = KINDS / f"{name}.yaml"
    profile = str(own) if own.exists() else name
    document = load_profile(find_profile(profile)).document
    with site_sandbox(profile) as site:
        # a login sets these
        monkeypatch.setenv("USER", getpass.getuser())
        for variable in document.slurm.inherit:
            if "*" not in variable:
                monkeypatch.setenv(variable, str(site.place))
        run = site.start(stand_in=stand_in)
        row = run.wait_till_over()
        assert row.state is RunState.DONE, f"{row}\n{run.logs()}\n{site.said}"
        steps = [metrics.step for metrics in read_metrics(run.run.layout)]
        assert steps == [*range(1, STEPS + 1)]
