"""Islands and switches of a profile: what is refused, where, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.base.units import Duration
from hpctrain.spec.loader import find_profile, load_profile

TEXT = Path(find_profile("islands10b")).read_text()


def test_the_example() -> None:
    profile = load_profile(find_profile("islands10b")).document
    assert [island.feature for island in profile.network.islands] == ["east", "west"]
    assert sum(island.nodes for island in profile.network.islands) == profile.nodes.count
    assert profile.network.switches.request and profile.network.switches.wait is None


def changed(tmp_path: Path, old: str, new: str) -> Path:
    assert old in TEXT
    file = tmp_path / "site.yaml"
    file.write_text(TEXT.replace(old, new, 1))
    return file


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        (
            "    - nodes: 4\n",
            "    - nodes: 3\n",
            "network:",
            "islands add up to 3 + 4 = 7 nodes, not 8",
        ),
        (
            "uplink: 100Gb/s # one",
            "uplink: 1000GB/s # one",
            "network:",
            "islands.0: uplink 1000 GB/s is more than all network cards of its nodes send, "
            "800 GB/s",
        ),
        ("feature: west", "# none", "- nodes:", "give every island a `feature`, or none of them"),
        ("feature: west", "feature: east", "- nodes:", "two islands have one feature: east, east"),
        ("feature: west", "feature: a b", "feature: a b", "expected a name of letters"),
        ("uplink: 100Gb/s\n", "uplink: 0Gb/s\n", "uplink: 0Gb/s", "must be above 0"),
        (
            "gpu_request: gres\n",
            "gpu_request: gres\n  constraint: ib|roce\n",
            "slurm:",
            "constraint `ib|roce` cannot be joined with the features of network.islands: "
            "use names joined by `&` only",
        ),
        (
            "plugin: none",
            "plugin: none\n    wait: 10min",
            "switches:",
            "`wait` goes together with plugin `tree` and `request: true`",
        ),
        (
            "plugin: none",
            "plugin: tree\n    nodes_per_leaf: 4\n    request: false\n    wait: 10min",
            "switches:",
            "`wait` goes together with plugin `tree` and `request: true`",
        ),
        (
            "plugin: none",
            "plugin: tree\n    nodes_per_leaf: 4\n    segment: force",
            "switches:",
            "`segment` goes together with plugin `block`",
        ),
        (
            "plugin: none",
            "plugin: block\n    nodes_per_leaf: 4\n    segment: force\n    request: false",
            "switches:",
            "`segment: force` contradicts `request: false`",
        ),
        (
            "plugin: none",
            "plugin: tree\n    nodes_per_leaf: 4\n    usable_per_leaf: 5",
            "switches:",
            "`usable_per_leaf` is at most `nodes_per_leaf`",
        ),
    ],
)
def test_refusals(tmp_path: Path, old: str, new: str, place: str, message: str) -> None:
    file = changed(tmp_path, old, new)
    with pytest.raises(InvalidInputError) as caught:
        load_profile(file)
    (problem,) = caught.value.problems
    lines = file.read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.strip().startswith(place))
    assert message in problem.message
    assert (problem.file, problem.line) == (str(file), line)


def test_a_single_island_is_none(tmp_path: Path) -> None:
    second = TEXT[TEXT.index("    - nodes: 4\n      uplink: 100Gb/s\n") :]
    second = second[: second.index("\nfilesystems")]
    file = changed(tmp_path, second, "")
    with pytest.raises(InvalidInputError, match="nobody behind its uplink"):
        load_profile(file)


def test_names_joined_by_and_are_taken(tmp_path: Path) -> None:
    file = changed(tmp_path, "gpu_request: gres\n", "gpu_request: gres\n  constraint: ib&a100\n")
    assert load_profile(file).document.slurm.constraint == "ib&a100"


def test_how_long_to_wait_for_leaves(tmp_path: Path) -> None:
    tree = "plugin: tree\n    nodes_per_leaf: 4\n    wait: 2h"
    switches = load_profile(changed(tmp_path, "plugin: none", tree)).document.network.switches
    assert switches.wait == Duration(7200)
