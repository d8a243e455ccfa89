"""`doctor --start` on a real Slurm: a start that works, and profiles with one trap each.

Each trap is one that a profile written from a site's web page had. It is told before the queue or
by the job, with the field to change, and no job of it stays behind.
"""

from __future__ import annotations

import json
import os
import shlex
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import hpctrain
from rehearsal import SPEC, four_nodes, patient_client, profile_text
from ruamel.yaml import YAML
from variants import varied

from hpctrain.records.first_starts import read_first_starts
from hpctrain.sandbox.processes import await_condition
from hpctrain.sandbox.sandbox import Sandbox

PATIENCE_SECONDS = 300.0
WAIT = ("--wait", f"{PATIENCE_SECONDS:.0f}s")
NO_MODULE = "some-site/1.0"

_TORCH = """
__version__ = "0.0"
class version:
    cuda = hip = None
class cuda:
    device_count = staticmethod(lambda: 0)
"""


@dataclass(frozen=True)
class Site:
    """A directory to work in, whose Slurm is the sandbox, and an interpreter with a small torch."""

    place: Path
    python: str

    def profile(self, changes: Mapping[str, Any], continuation: str = "requeue") -> str:
        """Write the profile of rehearsals with `changes`, and return its file."""
        document = YAML(typ="safe").load(profile_text(four_nodes(), self.python, continuation))
        merge(document, changes)
        (self.place / "site.yaml").write_text(json.dumps(document))
        return "site.yaml"


def merge(document: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(document.get(name), dict):
            merge(document[name], value)
        else:
            document[name] = value


@pytest.fixture
def site(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    for name, value in sandbox.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / "torch.py").write_text(_TORCH)
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\ncase $PYTHONPATH in {stub}*) ;; *) PYTHONPATH={stub}:$PYTHONPATH ;; esac\n"
        f'export PYTHONPATH\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    return Site(tmp_path, str(python))


def jobs(sandbox: Sandbox) -> str:
    return sandbox.command("squeue", "--noheader", "--states=PD,R").strip()


def test_a_start_that_works_is_proved(site: Site, sandbox: Sandbox) -> None:
    """All questions are answered, the job was requeued once, and nothing but the record stays."""
    name = site.profile({"software": {"scratch": f"{site.place}/$SLURM_JOB_ID"}})
    done = hpctrain("doctor", "--start", "-p", name, "--json", *WAIT)
    assert done.exit_code == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    found = {one["topic"]: one for one in told["findings"]}
    assert {"request", "interpreter", "supervisor", "torch", "step", "network", "CPUs"} <= {*found}
    assert found["warning"]["state"] == "works", "USR1 reaches the program"
    assert "Restarts=1" in found["requeue"]["sentence"]
    assert found["task environment"]["state"] == "works", found["task environment"]
    assert not [one for one in told["findings"] if one["state"] in ("fails", "unknown")]
    (proof,) = read_first_starts(site.place / "runs")
    assert (proof.event, proof.partition) == ("proved", "train")
    assert told["proof"]["profile_digest"] == proof.profile_digest
    assert [path.name for path in (site.place / "runs").iterdir()] == [".first-starts.jsonl"]
    assert not jobs(sandbox)


# -- One trap each --------------------------------------------------------------------------------


def foreign_interpreter(site: Site) -> dict[str, Any]:
    """An ELF header of a program for another processor (elf(5))."""
    machine = 62 if os.uname().machine == "aarch64" else 183
    head = (
        b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, *[0] * 10)
    )
    path = site.place / "foreign"
    path.write_bytes(head)
    path.chmod(0o755)
    return {"software": {"python": str(path)}}


def failing_setup(site: Site) -> dict[str, Any]:
    path = site.place / "setup.sh"
    path.write_text("export BEFORE=1\nno-such-command-here\nexport AFTER=1\n")
    return {"software": {"setup": str(path)}}


def unset_name(field: str) -> Callable[[Site], dict[str, Any]]:
    return lambda site: {"software": {field: "$NOWHERE/here"}}


def always(changes: dict[str, Any]) -> Callable[[Site], dict[str, Any]]:
    return lambda site: changes


# what is wrong: the change of the profile, the field that is named, a word of the sentence
TRAPS: dict[str, tuple[Callable[[Site], dict[str, Any]], str, str]] = {
    "no module system": (
        always({"software": {"modules": {"load": [NO_MODULE]}}}),
        "software.modules",
        "module",
    ),
    "unset name in python": (unset_name("python"), "software.python", "NOWHERE"),
    "unset name in scratch": (unset_name("scratch"), "software.scratch", "NOWHERE"),
    "failing line of setup": (failing_setup, "software.setup", "no-such-command-here"),
    "an option of ours": (
        always({"slurm": {"options": {"sbatch": {"array": "1-3"}}}}),
        "slurm.options.sbatch",
        "use `continuation`",
    ),
    "no such interface": (
        always({"network": {"interface": "ib9"}, "environment": []}),
        "network.interface",
        "no interface of `network.interface` (ib9)",
    ),
    "threads for cores": (
        always(
            {"nodes": {"cpus": 16}, "slurm": {"options": {"sbatch": {"hint": "nomultithread"}}}}
        ),
        "nodes.cpus",
        "cpus",
    ),
    "no such interpreter": (
        always({"software": {"python": "/nowhere/bin/python3"}}),
        "software.python",
        "/nowhere/bin/python3",
    ),
    "foreign interpreter": (foreign_interpreter, "software.python", "built for"),
    "no torch": (
        lambda site: {"software": {"python": str(bare_python(site))}},
        "software.python",
        "torch",
    ),
    "no such file system": (
        lambda site: {
            "filesystems": [
                {
                    "name": "work",
                    "path": "/nowhere/work",
                    "kind": "lustre",
                    "write_bandwidth": "1GB/s",
                    "read_bandwidth": "1GB/s",
                }
            ]
        },
        "filesystems[0].path",
        "is not there on the node",
    ),
}


def bare_python(site: Site) -> Path:
    (site.place / "stub" / "torch.py").write_text("raise ImportError('no torch in this one')\n")
    return Path(site.python)


@pytest.mark.parametrize(
    "trap", varied([*TRAPS], "no module system", "no such interface", "foreign interpreter")
)
def test_a_trap_is_told_with_its_field(site: Site, sandbox: Sandbox, trap: str) -> None:
    changes, field, words = TRAPS[trap]
    name = site.profile(changes(site))
    done = hpctrain("doctor", "--start", "-p", name, *WAIT)
    printed = " ".join((done.stdout + done.stderr).split())
    assert done.exit_code == 3, printed
    assert field in printed and words in printed, printed
    assert not read_first_starts(site.place / "runs") and not jobs(sandbox)


def test_a_job_that_does_not_start_is_cancelled_and_explained(site: Site, sandbox: Sandbox) -> None:
    name = site.profile({})
    sandbox.command("scontrol", "update", "PartitionName=train", "State=DOWN")
    try:
        done = hpctrain("doctor", "--start", "-p", name, "--wait", "1s")
    finally:
        sandbox.command("scontrol", "update", "PartitionName=train", "State=UP")
    assert done.exit_code == 8 and "the partition is down" in done.stdout, done.stdout
    assert "was cancelled" in done.stderr and not jobs(sandbox)


@pytest.mark.variant("test_a_start_that_works_is_proved")
def test_a_job_that_slurm_refuses(site: Site) -> None:
    name = site.profile({"slurm": {"account": "nobody", "qos": "none-of-this-site"}})
    done = hpctrain("doctor", "--start", "-p", name, "--partition", "elsewhere")
    assert done.exit_code == 2 and "has no partition" in done.stderr
    changes = {"slurm": {"partitions": [{"name": "elsewhere", "default": True}]}}
    done = hpctrain("doctor", "--start", "-p", site.profile(changes), *WAIT)
    assert done.exit_code == 5 and "Slurm refuses what a run asks for" in done.stdout
    assert not list((site.place / "runs").glob(".start*"))


# -- What a run does that cannot start ------------------------------------------------------------


@pytest.mark.parametrize(
    "continuation", varied(("requeue", "chain", "singleton", "array"), "array")
)
def test_jobs_behind_one_that_cannot_start_are_cancelled(
    site: Site, sandbox: Sandbox, continuation: str
) -> None:
    """One start with exit code 78, and no other: nothing is requeued, nobody is next."""
    changes: dict[str, Any] = {"software": {"modules": {"load": [NO_MODULE]}}}
    if continuation in ("singleton", "array"):
        changes["continuation_jobs"] = 4
    name = site.profile(changes, continuation=continuation)
    (site.place / "spec.yaml").write_text(SPEC)
    done = hpctrain("submit", "-p", name, "spec.yaml", "-y", "--set", "data.made_up=true")
    assert done.exit_code == 0, done.stderr
    assert await_condition(lambda: not jobs(sandbox), PATIENCE_SECONDS), jobs(sandbox)
    texts = [path.read_text() for path in (site.place / "runs").glob("*/logs/slurm-*.out")]
    assert len(texts) == 1 and "module" in texts[0], texts
    assert patient_client(os.environ).live_jobs_named("rehearsal") == ()
