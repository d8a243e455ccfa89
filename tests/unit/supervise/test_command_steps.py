"""The supervisor runs the site's commands: when, on which nodes, for how long, and what follows."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launch_evidence import config
from stand_ins import python_program
from supervise_stage import Stage

from hpctrain.records.ledger import EventKind
from hpctrain.records.supervise_config import CommandSettings

BEGUN, ENDED = "hpctrain-commands-begun", "hpctrain-commands-ended"
# What srun prints for the part that is the last word: a file of the run directory, if there is one.
SRUN = """\
import sys, time
from pathlib import Path
run = Path({run!r})
part = sys.argv[-1]
said, hangs = run / f"{{part}}.said", (run / f"{{part}}.hangs").exists()
print(said.read_text() if said.exists() else "0: {begun} n0\\n0: {ended} 0 x", flush=True)
with (run / "steps").open("a") as stream:
    stream.write(" ".join(sys.argv[1:]) + "\\n")
time.sleep(60 if hangs else 0)
"""


@pytest.fixture
def site(stage: Stage, tmp_path: Path) -> Stage:
    """A run with one command for each part; srun is a stand-in."""
    run = stage.layout.directory
    source = SRUN.format(run=str(run), begun=BEGUN, ended=ENDED)
    python_program(tmp_path / "bin/srun", source)
    stage.environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    commands = CommandSettings(limit_seconds=60.0, job=1, node=1, node_after=1)
    stage.configure(config().model_copy(update={"commands": commands}))
    stage.layout.commands.write_text(f"echo {BEGUN} n0; cat job.said 2>/dev/null; echo {ENDED} 0\n")
    return stage


def parts(stage: Stage) -> list[str]:
    return [
        line.split()[-1] for line in (stage.layout.directory / "steps").read_text().splitlines()
    ]


def test_nodes_are_served_before_and_after_each_launch(site: Stage) -> None:
    assert site.play("save:20 crash", "done") == 0
    assert parts(site) == ["node", "node_after", "node", "node_after"]
    words = (site.layout.directory / "steps").read_text().splitlines()[0].split()
    for word in ("--nodelist=n0", "--overlap", "--no-kill", "--ntasks-per-node=1", "--label"):
        assert word in words


def test_a_command_of_the_job_that_fails_stops_the_run(site: Stage) -> None:
    site.layout.commands.write_text(
        f"echo {BEGUN} n0; echo no licence; echo {ENDED} 3 /sw/licence\n"
    )
    assert site.play("done") == 1
    (ended,) = site.events(EventKind.LAUNCH_ENDED)
    assert (ended.cause, site.actions) == ("site_command", ["stop"])
    assert ended.reason == ("software.commands.job on n0: `/sw/licence`: exit code 3: no licence")
    assert not site.events(EventKind.LAUNCH_STARTED)


def test_a_command_that_fails_on_the_only_node_stops_the_run(site: Stage) -> None:
    said = site.layout.directory / "node.said"
    said.write_text(f"0: {BEGUN} n0\n0: no domain\n0: {ENDED} 124 /sw/imex\n")
    assert site.play("done") == 1
    (ended,) = site.events(EventKind.LAUNCH_ENDED)
    assert ended.reason == "software.commands.node on n0: `/sw/imex`: timed out: no domain"
    assert parts(site) == ["node", "node_after"], "what it has begun is cleared away"
    log = site.layout.attempt_logs(5, 0) / "node-commands.log"
    assert not log.parent.exists() or log.read_text() == "n0: no domain\n"


def test_a_failure_afterwards_is_a_warning(site: Stage) -> None:
    said = site.layout.directory / "node_after.said"
    said.write_text(f"0: {BEGUN} n0\n0: {ENDED} 1 /sw/clear\n")
    assert site.play("done") == 0
    (warning,) = site.events(EventKind.OBSERVED)
    assert warning.reason == "software.commands.node_after on n0: `/sw/clear`: exit code 1"
    assert site.causes == ["done"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_commands_and_is_no_failure_of_theirs(
    site: Stage, number: signal.Signals
) -> None:
    run = site.layout.directory
    (run / "node.hangs").touch()
    (run / "node.said").write_text(f"0: {BEGUN} n0\n")

    def strike() -> None:
        for name in ("node.hangs", "node.said"):  # the next launch, if there is one, meets none
            (run / name).unlink()
        os.kill(os.getpid(), number)

    site.once((run / "steps").exists, strike)
    site.play("await-stop", "done")
    assert "node_command" not in site.causes and "site_command" not in site.causes
    assert site.causes, "the launch has seen to it"
