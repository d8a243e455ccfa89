"""All that people see of this checkout, as one tree of files to compare with another's.

python -m tests.freeze DIRECTORY

A change that is none for people leaves the tree as it was: `diff -r BEFORE AFTER` shows the rest.
It holds the help of every command; plan, script and run directory of each example on each profile;
plans and scripts of services; and what commands say of made-up runs and services, as text, as JSON
and as pages. tests/golden has the same for a few, reviewed. Two runs of one checkout are equal, and
so are two checkouts in different places.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import time
from contextlib import chdir
from pathlib import Path

import click

from hpctrain.base import clock
from hpctrain.base.errors import HpctrainError
from hpctrain.cli.main import cli
from tests.command_line import hpctrain
from tests.fabricated_services import NOW, fabricate_service
from tests.judged_runs import submitted
from tests.reported_runs import reported
from tests.team_runs import team
from tests.virtual_clock import VirtualClock

ROOT = Path(__file__).resolve().parents[1]
# One place for all checkouts, as paths are shown, and lines are broken by their length.
HERE = Path("/tmp/hpctrain-freeze")
# Digests of the code that a run keeps and of a script, in which the checkout's Python is named;
# and what the disk has left.
_OF_THE_PLACE = re.compile(
    r"(?<=hpctrain-\d\.\d\.\d-)[0-9a-f]{12}|(?<=script_sha256\":\")[0-9a-f]{64}"
    r"|(?<=Script \(SHA-256\)</dt><dd><code>)[0-9a-f]{12}"
    r"|[\d.]+ .iB free, room for [\d,]+ more|(?<=\"free_bytes\": )\d+|(?<=\"fits\": )\d+"
)
OF_RUNS = (
    "status --all",
    "status --json",
    "nodes",
    "nodes --json",
    "profiles",
)
OF_A_RUN = ("status", "describe", "why", "goodput", "diagnose", "checkpoints")


def main() -> None:
    """Make the tree."""
    os.environ.update(NO_COLOR="1", COLUMNS="80", TZ="UTC0")
    time.tzset()
    target = Path(sys.argv[1]).resolve()
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir(mode=0o700)
    shutil.copytree(ROOT / "examples", HERE / "examples")
    with chdir(HERE), clock.replaced(VirtualClock(NOW)):
        tree = Tree(target)
        helps(tree)
        planned(tree)
        services(tree)
        made_up(tree)
    shutil.rmtree(HERE)
    print(f"{tree.files} files, sha256 {tree.digest.hexdigest()}")


class Tree:
    """Files below a directory, and the digest of all of them in the order of their making."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self.files = 0
        self.digest = hashlib.sha256()

    def add(self, name: str, text: str) -> None:
        """A file, without what is of this checkout alone."""
        text = _OF_THE_PLACE.sub("OURS", text.replace(str(ROOT), "CHECKOUT"))
        file = self._target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        self.files += 1
        self.digest.update(f"{name}\0{text}\0".encode())

    def command(self, name: str, *arguments: str) -> None:
        """What a command shows."""
        self.add(name, hpctrain(*arguments).transcript())

    def directory(self, name: str, of: Path) -> None:
        """All files of a directory but the code of hpctrain that a run keeps."""
        for file in sorted(one for one in of.rglob("*") if one.is_file()):
            if file.resolve().suffix != ".zip":
                text = file.read_text(errors="backslashreplace")
                self.add(f"{name}/{file.relative_to(of)}", text)


def helps(tree: Tree, group: click.Group = cli, path: tuple[str, ...] = ()) -> None:
    """The help of a group, and of all below it."""
    tree.command(f"help/{'-'.join(('hpctrain', *path))}", *path, "--help")
    for name in group.list_commands(context := click.Context(group)):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            helps(tree, command, (*path, name))
        else:
            tree.command(f"help/{'-'.join(('hpctrain', *path, name))}", *path, name, "--help")


def profiles_beside(spec: Path) -> list[str]:
    """The packaged profiles, and those in the directory of an example."""
    packaged = sorted(file.stem for file in (ROOT / "cluster_profiles").glob("*.yaml"))
    return [*packaged, *map(str, sorted(spec.parent.glob("*profile.yaml")))]


def specs(served: bool) -> list[Path]:
    """The examples: of runs, or of services."""
    found = (one for one in Path("examples").rglob("*.yaml") if "profile" not in one.name)
    return sorted(one for one in found if ("serve" in one.parent.name) is served)


def planned(tree: Tree) -> None:
    """Each example on each profile."""
    for spec in specs(served=False):
        for profile in profiles_beside(spec):
            name = f"planned/{str(spec).replace('/', '-')}/{Path(profile).stem}"
            of = (str(spec), "-p", profile)
            tree.command(f"{name}/plan.json", "plan", *of, "--json")
            tree.command(f"{name}/submit", "submit", *of, "--dry-run")
            tree.command(f"{name}/footprint", "footprint", *of)
            try:
                run, _ = submitted(HERE / "planned", str(spec.with_suffix(""))[9:], profile)
            except HpctrainError as error:
                tree.add(f"{name}/refused", str(error))
            else:
                tree.directory(f"{name}/run", run.layout.directory)
                shutil.rmtree(HERE / "planned")


def services(tree: Tree) -> None:
    """Each example of a service on each profile; a made-up one."""
    for spec in specs(served=True):
        for profile in profiles_beside(spec):
            name = f"services/{spec.stem}/{Path(profile).stem}"
            of = (str(spec), "-p", profile)
            tree.command(f"{name}/plan", "serve", "plan", *of)
            tree.command(f"{name}/plan.json", "serve", "plan", *of, "--json")
            tree.command(f"{name}/up", "serve", "up", *of, "--dry-run")
    service = fabricate_service(HERE / "runs")
    for words in ("", "--json", "chat-7f3a", "chat-7f3a --json"):
        tree.command(f"services/status{words.replace(' ', '')}", "serve", "status", *words.split())
    tree.directory("services/made-up", service.layout.directory)


def made_up(tree: Tree) -> None:
    """Runs with a long history."""
    runs = HERE / "runs"
    names = [reported(runs, "first", done=True).run_id, reported(runs, "second", seed=3).run_id]
    for words in OF_RUNS:
        tree.command(f"runs/{words.replace(' ', '')}", *words.split())
    for name, words in ((name, words) for name in names for words in OF_A_RUN):
        tree.command(f"runs/{name}/{words}", words, name)
        tree.command(f"runs/{name}/{words}.json", words, name, "--json")
        tree.command(f"runs/{name}/export", "export", name, "--csv")
        tree.command(f"runs/{name}/clean", "clean", name, "--dry-run")
    tree.command("runs/one.html", "report", names[0], "--offline", "-o", "-")
    tree.command("runs/both.html", "report", *names, "--offline", "-o", "-")
    tree.directory("runs/made-up", runs)
    places = team(HERE / "teams")
    week = ["report", "--week", *(word for one in places for word in ("--runs", str(one)))]
    tree.command("week/text", *week)
    tree.command("week/json", *week, "--json")
    tree.command("week/html", *week, "-o", "-", "--csv", "week.csv")
    tree.add("week/csv", Path("week.csv").read_text())


if __name__ == "__main__":
    main()
