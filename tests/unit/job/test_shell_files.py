"""The shell files around the trainer, run by bash: the site's commands, the wrapper, the words."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from planned_job import planned_job
from specimen_scripts import PROFILE, SPEC, profile_with, render, shell_texts

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.render.shell_files import site_commands
from hpctrain.job.supervisor_settings import command_settings
from hpctrain.judge.causes import Cause
from hpctrain.judge.command_results import (
    CommandFailure,
    CommandResults,
    job_verdict,
    node_verdict,
)
from hpctrain.judge.documents import Suspicion
from hpctrain.plan.job import Job
from hpctrain.records.supervise_config import CommandSettings
from hpctrain.spec.profile import ClusterProfile

TASK = {"PATH": os.environ["PATH"], "SLURMD_NODENAME": "n7", "SLURM_LOCALID": "1"}


def with_commands(**commands: object) -> ClusterProfile:
    return profile_with(software={"commands": commands})


def read(*lines: str, interrupted: bool = False) -> tuple[tuple[CommandFailure, ...], list[str]]:
    results = CommandResults()
    kept = [text for line in lines if (text := results.add_line(line)) is not None]
    return results.failures(interrupted=interrupted), kept


def run_part(
    directory: Path, part: str, profile: ClusterProfile, **environment: str
) -> tuple[tuple[CommandFailure, ...], list[str]]:
    """The failures of one part of `commands.sh` as the supervisor reads them, and its log."""
    (directory / "commands.sh").write_text(shell_texts(SPEC, profile)["commands.sh"])
    done = subprocess.run(
        ["bash", "commands.sh", part],
        cwd=directory,
        env={**TASK, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return read(*done.stdout.splitlines(keepends=True))


def test_commands_run_in_order_and_no_shell_evaluates_their_words(tmp_path: Path) -> None:
    profile = with_commands(
        node=[["echo", "it's $$(touch pwned) `touch pwned`; $WHERE"], ["touch", "second"]],
        node_after=[["touch", "after"]],
    )
    found, log = run_part(tmp_path, "node", profile, WHERE="a b")
    assert found == ()
    assert log == ["n7: it's $(touch pwned) `touch pwned`; a b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["commands.sh", "second"]
    assert run_part(tmp_path, "node_after", profile)[0] == ()
    assert (tmp_path / "after").exists()


def test_the_first_command_that_fails_is_the_last_and_is_named(tmp_path: Path) -> None:
    words = ["bash", "-c", "echo 12: first; echo the last\tline >&2; printf end; exit 3"]
    found, _ = run_part(tmp_path, "job", with_commands(job=[["true"], words, ["touch", "third"]]))
    assert found == (CommandFailure("n7", " ".join(words).replace("\t", " "), 3, "end"),)
    assert not (tmp_path / "third").exists()
    silent, _ = run_part(tmp_path, "job", with_commands(job=[["false"]]))
    assert silent == (CommandFailure("n7", "false", 1),), "no line of an earlier command"
    missing, _ = run_part(tmp_path, "job", with_commands(job=[["/no/such"]]))
    assert (missing[0].code, "No such file" in missing[0].last_line) == (127, True)


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    profile = with_commands(time_limit="1s", node=[["sleep", "60"]])
    (found,) = run_part(tmp_path, "node", profile)[0]
    assert str(found) == "`sleep 60`: timed out"


def test_a_variable_that_the_job_does_not_have_is_named(tmp_path: Path) -> None:
    found, _ = run_part(tmp_path, "node", with_commands(node=[["echo", "$NOWHERE"]]))
    assert found[0].code and "NOWHERE" in found[0].last_line


def test_the_wrapper_stands_before_the_rank(tmp_path: Path) -> None:
    profile = with_commands(wrapper=["env", "BOUND=node$SLURM_LOCALID"])
    (tmp_path / "prologue.sh").write_text(shell_texts(SPEC, profile)["prologue.sh"])
    show = ["bash", "prologue.sh", "bash", "-c", "echo $BOUND"]
    done = subprocess.run(show, cwd=tmp_path, env=TASK, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "node1\n"), done.stderr
    (tmp_path / "prologue.sh").write_text(
        shell_texts(SPEC, with_commands(wrapper=["/no such/bind"]))["prologue.sh"]
    )
    done = subprocess.run(show, cwd=tmp_path, env=TASK, capture_output=True, text=True)
    assert done.returncode == 78
    assert done.stderr == "hpctrain: software.commands.wrapper: `/no such/bind` on n7: not found\n"
    below_agents = SPEC.model_copy(update={"launcher": "torchrun"})
    with pytest.raises(InvalidInputError, match=r"commands.wrapper.*use launcher srun"):
        render(below_agents, profile)


def test_a_command_of_a_task_that_takes_too_long_ends_the_task(tmp_path: Path) -> None:
    (tmp_path / "slow.sh").write_text("while :; do sleep 0.1; done\n")
    profile = with_commands(time_limit="1s", task=[["source", "./slow.sh"]])
    (tmp_path / "prologue.sh").write_text(shell_texts(SPEC, profile)["prologue.sh"])
    words = ["bash", "prologue.sh", "echo", "trained"]
    done = subprocess.run(words, cwd=tmp_path, env=TASK, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert "`source ./slow.sh` on n7: not done after 1 s" in done.stderr


def test_the_trainer_inherits_no_process_of_the_commands(tmp_path: Path) -> None:
    profile = with_commands(task=[["true"], ["export", "OWN=1"]])
    (tmp_path / "prologue.sh").write_text(shell_texts(SPEC, profile)["prologue.sh"])
    show = ["bash", "prologue.sh", "bash", "-c", "echo $OWN; exec cat /proc/$$/task/$$/children"]
    done = subprocess.run(show, cwd=tmp_path, env=TASK, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_what_runs_outside_and_inside_of_a_container() -> None:
    commands = {"task": [["true"]], "wrapper": ["numactl", "--localalloc"]}
    for launcher, order in {
        "apptainer": ["prologue.sh", "container.sh", "apptainer", "hpctrain.train"],
        "pyxis": ["--container-image=x", "prologue.sh", "hpctrain.train"],
        "edf": ["--environment=x", "--chdir", "prologue.sh", "hpctrain.train"],
    }.items():
        software = {"commands": commands, "container": {"launcher": launcher, "image": "x"}}
        script = render(profile=profile_with(software=software))
        launch = script[script.index("exec ") :]
        places = [launch.index(word) for word in order]
        assert places == sorted(places), launch
        assert "bash -c" not in script


def test_a_job_without_gpus_has_no_commands_of_nodes() -> None:
    commands = {"job": [["true"]], "node": [["check-gpus"], ["x"]], "node_after": [["y"]]}
    job = planned_job(SPEC, with_commands(**commands))
    assert command_settings(job) == CommandSettings(
        limit_seconds=300.0, job=1, node=2, node_after=1
    )
    assert command_settings(planned_job(SPEC, PROFILE)) is None
    nodes = job.plan.nodes.model_copy(update={"gpus_per_node": 0})
    router = Job(job.spec, job.profile, job.plan.model_copy(update={"nodes": nodes}))
    assert (site_commands(router).node, site_commands(router).job) == ((), (("true",),))


# -- what the supervisor makes of it -----------------------------------------------------------


NODES = ("n0", "n1", "n2")
FAILED = CommandFailure("n1", "/sw/check-imex", 3, "no domain")


def test_lines_of_several_nodes_in_one_stream() -> None:
    lines = ["1: hpctrain-commands-begun n1", "0: hpctrain-commands-begun n0", "0: of the first"]
    lines += [" 1: of the second", "0: hpctrain-commands-ended 0 true", "srun: error: other words"]
    failed, kept = read(*lines)
    assert kept == ["n0: of the first", "n1: of the second", "srun: srun: error: other words"]
    assert [(one.node, str(one)) for one in failed] == [
        ("n1", "`commands.sh`: did not end: of the second")
    ]
    assert read(*lines, interrupted=True)[0] == ()


def test_some_nodes_are_unfit_and_all_are_a_wrong_setting() -> None:
    assert node_verdict((), NODES) is None
    some = node_verdict([FAILED], NODES)
    assert some is not None
    assert (some.cause, some.suspicion, some.unfit_nodes) == (
        *(Cause.NODE_COMMAND, Suspicion.UNFIT),
        ("n1",),
    )
    assert some.reason == (
        "software.commands.node on n1 alone: `/sw/check-imex`: exit code 3: no domain"
    )
    every = node_verdict([CommandFailure(node, "x", 1) for node in NODES], NODES)
    assert every is not None and every.cause is Cause.SITE_COMMAND and not every.nodes
    assert "on all 3 nodes: `x`: exit code 1" in every.reason
    assert job_verdict(FAILED).cause is Cause.SITE_COMMAND
