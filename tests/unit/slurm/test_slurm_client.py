"""The client without Slurm, and real child processes in place of its commands."""

from __future__ import annotations

import inspect
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.errors import SlurmError, SlurmRefusedError, SlurmUnreachableError
from hpctrain.slurm import JobRecord, JobState, RequeueResult, SlurmClient, parse
from hpctrain.slurm.client import Backoff
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.job_changes import job_changes, requested_job
from hpctrain.slurm.process import Command, CommandResult, accepted, hint_about, run_command
from hpctrain.slurm.records import JobTerms

ENVIRONMENT = {
    "PATH": "/usr/bin",
    "HOME": "/home/me",
    "SLURM_CONF": "/s/slurm.conf",
    "TZ": "Asia/Tokyo",
    "SLURM_CLUSTERS": "big",
    "SBATCH_PARTITION": "nonsense",
    "SQUEUE_FORMAT": "%i",
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "8",
    "SLURM_TIME_FORMAT": "%s",
    "SACCT_FORMAT": "x",
    "SCANCEL_INTERACTIVE": "1",
    "SINFO_FORMAT": "x",
}
KEPT = {"PATH": "/usr/bin", "HOME": "/home/me", "SLURM_CONF": "/s/slurm.conf"}
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NO_SUCH_JOB = CommandResult(1, "", "slurm_load_jobs error: Invalid job id specified\n")
EMPTY_SQUEUE = CommandResult(0, f"{parse.UNIT.join(parse.SQUEUE_FIELDS)}{parse.RECORD}\n", "")


class Script:
    """A runner that gives prepared answers and keeps the commands."""

    def __init__(self, *answers: CommandResult) -> None:
        self.answers = list(answers)
        self.commands: list[Command] = []

    def __call__(self, command: Command) -> CommandResult:
        self.commands.append(command)
        return self.answers.pop(0)


def asked(*answers: CommandResult) -> tuple[SlurmClient, Script]:
    script = Script(*answers)
    return SlurmClient(ENVIRONMENT, run=script), script


def test_all_ids_go_into_one_query() -> None:
    client, script = asked(EMPTY_SQUEUE)
    assert client.jobs(range(1, 201)) == {}
    assert len(script.commands) == 1
    assert f"--jobs={','.join(map(str, range(1, 201)))}" in script.commands[0].argv


def test_no_ids_need_no_query() -> None:
    client, script = asked()
    assert client.jobs([]) == client.history([]) == {}
    assert script.commands == []


def test_one_unknown_id_is_absent_but_silence_is_not_gone() -> None:
    assert asked(NO_SUCH_JOB)[0].jobs([9]) == {}
    for answer in (
        CommandResult(0, "", ""),
        CommandResult(1, "", AWAY),
        CommandResult(1, "", ""),
        CommandResult(-9, "", ""),
    ):
        with pytest.raises(SlurmUnreachableError):
            asked(answer)[0].jobs([9])
    with pytest.raises(SlurmUnreachableError):
        asked(NO_SUCH_JOB)[0].jobs([8, 9])


def test_an_answer_in_another_form_is_an_error_and_not_an_empty_one() -> None:
    for text in ("JOBID STATE\n1 RUNNING\n", EMPTY_SQUEUE.stdout.replace("Comment", "a\x1fb")):
        with pytest.raises(SlurmError, match="cannot read"):
            asked(CommandResult(0, text, ""))[0].jobs([1])


def test_queries_run_without_options_from_the_environment_and_in_utc() -> None:
    client, script = asked(EMPTY_SQUEUE)
    client.jobs([1])
    expected = {**KEPT, "SLURM_CLUSTERS": "big", "LC_ALL": "C", "TZ": "UTC0"}
    assert script.commands[0].environment == expected


def test_sbatch_gets_the_users_environment_because_the_job_inherits_it() -> None:
    client, script = asked(CommandResult(0, "14;big\n", ""))
    job = client.submit("#!/bin/sh\n", ["--hold"])
    assert (job.job_id, job.cluster) == (14, "big")
    command = script.commands[0]
    assert command.environment == {**KEPT, "SLURM_CLUSTERS": "big", "TZ": "Asia/Tokyo"}
    assert (command.argv, command.stdin) == (("sbatch", "--parsable", "--hold"), "#!/bin/sh\n")


def test_sbatch_inherits_the_named_variables_and_what_it_needs_itself() -> None:
    client, script = asked(CommandResult(0, "14\n", ""), CommandResult(0, "", "Job 1\n"))
    client.submit("#!/bin/sh\n", variables=("PATH", "TZ", "ABSENT", "SBATCH_PARTITION"))
    expected = {"PATH": "/usr/bin", "TZ": "Asia/Tokyo", "SLURM_CONF": "/s/slurm.conf"}
    assert script.commands[0].environment == {**expected, "SLURM_CLUSTERS": "big"}


def test_a_script_file_is_handed_over_by_its_absolute_path() -> None:
    client, script = asked(CommandResult(0, "14\n", ""))
    client.submit(Path("-x.sh"))
    assert script.commands[0].argv[-1] == str(Path.cwd() / "-x.sh")


def test_refusals_keep_the_words_of_slurm() -> None:
    words = "sbatch: error: Batch job submission failed: Invalid partition name specified"
    with pytest.raises(SlurmRefusedError) as caught:
        asked(CommandResult(1, "", f"{words}\n"))[0].submit("#!/bin/sh\n")
    assert str(caught.value) == words
    with pytest.raises(SlurmUnreachableError):
        asked(CommandResult(1, "", f"sbatch: error: Batch job submission failed: {AWAY}"))[
            0
        ].submit("#!")


def test_a_submission_without_job_id_is_an_error() -> None:
    with pytest.raises(SlurmError, match="no job id"):
        asked(CommandResult(0, "\n", ""))[0].submit("#!/bin/sh\n")


def test_history_asks_sacct_once_for_all_when_accounting_is_on() -> None:
    config = CommandResult(0, "AccountingStorageType = accounting_storage/slurmdbd\n", "")
    table = CommandResult(0, parse.UNIT.join(parse.SACCT_FIELDS) + "\n", "")
    client, script = asked(config, table, table)
    assert client.history([1, 2]) == client.history([3]) == {}
    assert [command.argv[0] for command in script.commands] == ["scontrol", "sacct", "sacct"]
    assert "--jobs=1,2" in script.commands[1].argv


def test_history_asks_the_controller_when_accounting_is_off() -> None:
    config = CommandResult(0, "AccountingStorageType = accounting_storage/none\n", "")
    client, script = asked(config, EMPTY_SQUEUE)
    assert client.history([1, 2]) == {}
    assert script.commands[1].argv[0] == "squeue"


def test_elements_of_an_array_come_with_it() -> None:
    told = {"State": "PENDING", "NumNodes": "2-4", "RestartCnt": "0"}
    row = dict.fromkeys(parse.SQUEUE_FIELDS, "N/A") | told
    rows = [
        {**row, "JobID": job, "ArrayJobID": array}
        for job, array in (("7", "7"), ("8", "7"), ("9", "9"))
    ]
    text = "".join(f"{parse.UNIT.join(one.values())}{parse.RECORD}\n" for one in rows)
    answer = CommandResult(0, EMPTY_SQUEUE.stdout + text, "")
    found = asked(answer)[0].jobs([7])
    assert list(found) == [7, 8] and {job.submitted_id for job in found.values()} == {7}
    assert found[7].node_count == 2


def test_live_jobs_of_a_name() -> None:
    table = f"JOBID{parse.RECORD}\n14{parse.RECORD}\n15{parse.RECORD}\n"
    client, script = asked(CommandResult(0, table, ""))
    assert client.live_jobs_named("run-1") == (14, 15)
    argv = script.commands[0].argv
    assert "--me" in argv and "--name=run-1" in argv, "only of this user"


def test_requeue_never_raises_and_says_what_happened() -> None:
    def away(command: Command) -> CommandResult:
        raise SlurmUnreachableError("no answer from `scontrol requeue` within 20 s")

    answer = SlurmClient(ENVIRONMENT, run=away).requeue(7)
    assert answer.result is RequeueResult.UNREACHABLE and "20 s" in answer.text
    pending = asked(CommandResult(1, "", "Job is pending execution for job 7\n"))[0].requeue(7)
    assert pending.will_run_again and not answer.will_run_again


def test_shielding_is_a_matter_of_the_client_or_of_the_call() -> None:
    client, script = asked(CommandResult(0, "", ""), CommandResult(0, "", ""))
    client.requeue(7)
    client.requeue(7, shielded=True)
    assert [command.shielded for command in script.commands] == [False, True]
    script = Script(EMPTY_SQUEUE)
    SlurmClient(ENVIRONMENT, shielded=True, run=script).jobs([1, 2])
    assert script.commands[0].shielded


@pytest.mark.parametrize(
    ("act", "argv"),
    [
        (lambda c: c.cancel(7), "scancel 7"),
        (lambda c: c.hold(7), "scontrol uhold 7"),
        (lambda c: c.cancel_all([9, 7]), "scancel 7 9"),
        (lambda c: c.cancel_all([7], pending_only=True), "scancel --state=PENDING 7"),
        (lambda c: c.update_job(7, nodes=(2, 4)), "scontrol update JobId=7 NumNodes=2-4"),
        (lambda c: c.release(7), "scontrol release 7"),
        (lambda c: c.requeue_hold(7), "scontrol requeuehold 7"),
        (lambda c: c.signal_step(7, "0", "USR1"), "scancel --signal=USR1 7.0"),
        (lambda c: c.kill_step(7, "0"), "scancel --signal=KILL 7.0"),
        (
            lambda c: c.update_job(7, start_now=True, exclude_nodes=["n1", "n2"], requeue=False),
            "scontrol update JobId=7 StartTime=now ExcNodeList=n1,n2 Requeue=0",
        ),
        (lambda c: c.update_job(7, exclude_nodes=[]), "scontrol update JobId=7 ExcNodeList="),
    ],
)
def test_commands(act: Callable[[SlurmClient], object], argv: str) -> None:
    client, script = asked(CommandResult(0, "", ""))
    act(client)
    assert " ".join(script.commands[0].argv) == argv


def test_nothing_to_change_needs_no_command() -> None:
    client, script = asked()
    client.update_job(7)
    assert script.commands == []


def test_bad_host_list_is_refused_although_the_exit_code_is_zero() -> None:
    with pytest.raises(SlurmRefusedError, match="Invalid hostlist"):
        asked(CommandResult(0, "", "Invalid hostlist: n[0-2]x,b\n"))[0].hostnames("n[0-2]x,b")
    assert asked()[0].hostnames("") == ()


def public_methods(kind: type) -> dict[str, inspect.Signature]:
    members = inspect.getmembers(kind, inspect.isfunction)
    return {name: inspect.signature(member) for name, member in members if name[0] != "_"}


def test_the_fake_has_the_public_methods_of_the_client() -> None:
    assert public_methods(FakeSlurm) == public_methods(SlurmClient)
    assert len(public_methods(SlurmClient)) >= 18


def test_the_fake_tells_the_story_of_a_preempted_job() -> None:
    fake = FakeSlurm()
    job_id = fake.submit("#!/bin/sh\n").job_id
    fake.records[job_id] = replace(fake.records[job_id], state=JobState.RUNNING)
    assert fake.requeue(job_id).result is RequeueResult.DONE
    assert fake.requeue(job_id).result is RequeueResult.ALREADY_PENDING
    fake.update_job(job_id, exclude_nodes=["n1"], requeue=False)
    record = fake.show_job(job_id)
    assert record is not None
    assert (record.state, record.restart_count) == (JobState.PENDING, 1)
    assert (record.exclude_nodes, record.requeue) == ("n1", False)
    assert fake.requeue(job_id).result is RequeueResult.DISABLED
    fake.cancel(job_id)
    assert fake.jobs([job_id, 99])[job_id].state is JobState.CANCELLED


def test_the_fake_can_be_away_and_can_refuse() -> None:
    fake = FakeSlurm()
    fake.refusal = "sbatch: error: no"
    with pytest.raises(SlurmRefusedError, match="no"):
        fake.submit("#!/bin/sh\n")
    fake.away = True
    assert fake.requeue(1).result is RequeueResult.UNREACHABLE
    with pytest.raises(SlurmUnreachableError):
        fake.jobs([1])


def test_the_fake_expands_a_range() -> None:
    assert FakeSlurm().hostnames("n[08-10]") == ("n08", "n09", "n10")
    assert FakeSlurm().hostnames("a,b") == ("a", "b")


# -- Pauses between calls of the controller -----------------------------------------------------


def test_pauses_double_up_to_the_longest() -> None:
    pauses = Backoff(draw=lambda: 0.0)
    assert [pauses.next_seconds() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_pause_is_shortened_by_up_to_a_half() -> None:
    shortest = Backoff(draw=lambda: 1.0)
    assert [shortest.next_seconds() for _ in range(5)] == [0.25, 0.5, 1.0, 2.0, 2.5]


def test_jobs_that_begin_together_do_not_stay_together() -> None:
    assert len({Backoff().next_seconds() for _ in range(100)}) > 90


def test_every_command_names_the_cluster_of_its_client() -> None:
    """Also where squeue and sinfo print the name first; sbatch by the site's own words."""
    header = "CLUSTER: far\n"
    named = CommandResult(0, header + EMPTY_SQUEUE.stdout, "")
    client, script = asked(CommandResult(0, "14;far\n", ""), named, CommandResult(0, "", ""))
    far = client.at(cluster="far", submit_command=["site_sbatch", "--project", "x"])
    assert far.submit("#!/bin/sh\n", ["--hold"]).cluster == "far"
    assert far.jobs([1, 2]) == {}
    far.cancel(14)
    first, *others = [list(command.argv) for command in script.commands]
    where = "--clusters=far"
    assert first == ["site_sbatch", "--project", "x", where, "--parsable", "--hold"]
    assert [words[:2] for words in others] == [["squeue", where], ["scancel", where]]
    script.answers = [CommandResult(0, f"{header}n0\n", "")]
    far.hostnames("n[0-1]")
    assert where not in script.commands[-1].argv, "which needs no cluster"


def test_the_same_client_for_the_same_cluster() -> None:
    client, _ = asked()
    far = client.at(cluster="far")
    assert client.at() is client and client.at(submit_command=["sbatch"]) is client
    assert client.at(cluster="far") is far is far.at(cluster="far") and far is not client
    here = SlurmClient({**ENVIRONMENT, "SLURM_CLUSTER_NAME": "far"})
    assert here.at(cluster="far") is here, "in a job of it, slurmdbd may be out of reach"


def test_a_command_of_a_site_that_is_not_there() -> None:
    """There is no job then, as there may be after an sbatch without an answer."""
    client = SlurmClient({"PATH": "/nowhere"})
    with pytest.raises(SlurmRefusedError, match="cannot run `no_such_sbatch` on") as refused:
        client.at(submit_command=["no_such_sbatch"]).submit("#!/bin/sh\n")
    assert "slurm.submit_command" in str(refused.value.hint)
    with pytest.raises(SlurmUnreachableError, match="cannot run `sbatch`"):
        client.submit("#!/bin/sh\n")


# -- Real child processes in place of Slurm commands: hanging, missing, signalled --------------


def shim(directory: Path, name: str, body: str) -> dict[str, str]:
    """An environment in which `name` is a shell script."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return {"PATH": f"{directory}:/usr/bin:/bin"}


def test_a_hanging_command_ends_with_the_time_limit_and_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, started = shim(tmp_path, "squeue", "exec sleep 600"), time.monotonic()
    begun: list[subprocess.Popen[str]] = []

    def popen(*words: Any, **options: Any) -> subprocess.Popen[str]:
        begun.append(real(*words, **options))
        return begun[-1]

    real = subprocess.Popen
    monkeypatch.setattr("hpctrain.slurm.process.subprocess.Popen", popen)
    with pytest.raises(SlurmUnreachableError, match=r"`squeue --states=all` within 0\.5 s"):
        SlurmClient(environment, timeout_seconds=0.5).jobs([1])
    assert time.monotonic() - started < 300
    assert [process.returncode for process in begun] == [-signal.SIGKILL]


def test_a_hanging_submission_warns_that_the_job_may_exist(tmp_path: Path) -> None:
    environment = shim(tmp_path, "sbatch", "exec sleep 600")
    with pytest.raises(SlurmUnreachableError) as caught:
        SlurmClient(environment, timeout_seconds=0.3).submit("#!/bin/sh\n")
    assert "may have been accepted" in (caught.value.hint or "")


def test_a_hanging_requeue_is_unreachable(tmp_path: Path) -> None:
    environment = shim(tmp_path, "scontrol", "exec sleep 600")
    answer = SlurmClient(environment, timeout_seconds=0.3).requeue(7)
    assert answer.result is RequeueResult.UNREACHABLE


def test_a_missing_command_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SlurmUnreachableError, match="cannot run `scontrol`") as caught:
        SlurmClient({"PATH": str(tmp_path)}).config()
    assert "login node" in (caught.value.hint or "")


def test_output_that_is_not_utf8_is_still_read(tmp_path: Path) -> None:
    environment = shim(tmp_path, "x", r"printf 'a\377b'; printf e >&2; exit 3")
    answer = run_command(Command(("x",), environment, 300.0))
    assert (answer.returncode, answer.stdout, answer.stderr) == (3, "a�b", "e")


def test_a_script_is_handed_over_on_standard_input(tmp_path: Path) -> None:
    environment = shim(tmp_path, "sbatch", f"cat > {tmp_path}/got; echo 5")
    text = "#!/bin/sh\necho 'a b' \"$(id)\" ü\n"
    assert SlurmClient(environment, timeout_seconds=300.0).submit(text).job_id == 5
    assert (tmp_path / "got").read_text() == text


SENDER = "for s in TERM HUP INT USR1 USR2; do kill -$s $$; done; echo survived"


def test_a_shielded_command_survives_the_signals_of_a_job_end(tmp_path: Path) -> None:
    environment = shim(tmp_path, "x", SENDER)
    shielded = run_command(Command(("x",), environment, 300.0, shielded=True))
    assert (shielded.returncode, shielded.stdout) == (0, "survived\n")
    assert run_command(Command(("x",), environment, 300.0)).returncode == -signal.SIGTERM


def test_the_shield_leaves_our_own_signals_as_they_were(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    run_command(Command(("x",), shim(tmp_path, "x", "exit 0"), 10.0, shielded=True))
    with pytest.raises(SlurmUnreachableError):
        run_command(Command(("missing",), {"PATH": str(tmp_path)}, 10.0, shielded=True))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_the_room_is_light() -> None:
    code = "import sys, hpctrain.slurm, hpctrain.slurm.fake; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.split())
    assert not loaded & {"pydantic", "click", "jinja2", "rich", "torch", "json", "asyncio"}
    ours = {name for name in loaded if name.startswith("hpctrain.")}
    allowed = {
        "hpctrain.base",
        "hpctrain.base.errors",
        "hpctrain.base.units",
        "hpctrain.base.durable",
        "hpctrain.base.printable_text",
        "hpctrain.version",
    }
    assert {name for name in ours if not name.startswith("hpctrain.slurm")} <= allowed


# -- Hints about refusals, by Slurm's words -----------------------------------------------------


_FAILED = "sbatch: error: Batch job submission failed: "


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("Invalid account or account/partition combination specified", "sacctmgr show assoc"),
        ("Invalid qos specification", "`resources.qos`"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "resources.walltime"),
        ("Requested node configuration is not available", "profile check"),
        ("Invalid generic resource (gres) specification", "slurm.gpu_request"),
    ],
)
def test_a_refusal_says_what_helps(words: str, hint: str) -> None:
    with pytest.raises(SlurmRefusedError) as refused:
        accepted(["sbatch"], CommandResult(1, "", f"{_FAILED}{words}\n"))
    assert words in str(refused.value) and hint in str(refused.value.hint)
    assert refused.value.__notes__ == [f"hint: {refused.value.hint}"], "a traceback has it, too"


def test_no_configuration_is_no_login_node() -> None:
    words = "sbatch: fatal: Could not establish a configuration source"
    with pytest.raises((SlurmRefusedError, SlurmUnreachableError)) as refused:
        accepted(["sbatch"], CommandResult(1, "", words))
    assert "login node" in str(refused.value.hint)


def test_unknown_words_have_no_hint() -> None:
    assert hint_about("the moon is full") is None


# -- What a script asks of Slurm beside what its job is ----------------------------------------


SCRIPT = """#!/bin/bash
# a comment
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=a100:8
#SBATCH --time=1-00:00:00
#SBATCH --partition=gpu
#SBATCH --account=Mine --qos=normal  # two on one line
#SBATCH --comment="hpctrain:run 1"
#SBATCH --job-name=run-1
#SBATCH --requeue

true
#SBATCH --nodes=99
"""
ASKED = requested_job(SCRIPT)
MADE = replace(
    ASKED, job_id=7, account="mine", terms=replace(ASKED.terms, cpu_count=1024), source="squeue"
)
TERMS = {field.name for field in fields(JobTerms)}


def made(**changes: object) -> JobRecord:
    """The job with changes, of its terms as well."""
    terms = {name: value for name, value in changes.items() if name in TERMS}
    others = {name: value for name, value in changes.items() if name not in TERMS}
    return replace(MADE, terms=replace(MADE.terms, **terms), **others)  # type: ignore[arg-type]


def test_what_a_script_asks_for() -> None:
    asked = requested_job(SCRIPT, ["--chdir=/runs/1", "--partition=other"])
    assert (asked.partition, asked.account, asked.node_count) == ("other", "Mine", 4)
    assert asked.terms == JobTerms("normal", None, 512, 8)
    assert (asked.time_limit_seconds, asked.requeue) == (86400.0, True)
    assert (asked.comment, asked.name) == ("hpctrain:run 1", "run-1")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400.0),
        ("90:30", 5430.0),
        ("1:30:00", 5400.0),
        ("2-0", 172800.0),
        ("1-12:30", 131400.0),
        ("UNLIMITED", math.inf),
        ("soon", None),
    ],
)
def test_times_as_sbatch_reads_them(text: str, seconds: float | None) -> None:
    assert requested_job(f"#SBATCH --time={text}\n").time_limit_seconds == seconds


def test_a_job_as_it_was_asked_for() -> None:
    asked = replace(requested_job(SCRIPT), comment="hpctrain:run-1")
    assert job_changes(asked, replace(MADE, comment="site hpctrain:run-1")) == ()
    listed = replace(asked, partition="gpu,long", time_limit_seconds=86399.0)
    assert job_changes(listed, replace(MADE, comment=asked.comment)) == ()


@pytest.mark.parametrize("unknown", ["qos", "account", "gpus_per_node", "cpu_count", "requeue"])
def test_what_slurm_does_not_report_is_not_compared(unknown: str) -> None:
    assert job_changes(requested_job(SCRIPT), made(**{unknown: None})) == ()


def test_what_was_not_asked_for_is_the_sites_to_choose() -> None:
    asked = JobRecord(0)
    assert job_changes(asked, MADE) == ()
    (bound,) = job_changes(asked, made(reservation="maint"))
    assert str(bound) == "Slurm changed the reservation: asked none, is maint"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"partition": "gpu-long"}, "partition: asked gpu, is gpu-long"),
        ({"qos": "low"}, "QOS: asked normal, is low"),
        ({"account": "other"}, "account: asked mine, is other"),
        ({"time_limit_seconds": 14400.0}, "time limit: asked 24 h, is 4 h"),
        ({"time_limit_seconds": math.inf}, "time limit: asked 24 h, is none"),
        ({"node_count": 2}, "number of nodes: asked 4, is 2"),
        ({"gpus_per_node": 0}, "GPUs per node: asked 8, is 0"),
        ({"cpu_count": 256}, "CPUs: asked 512, is 256"),
        ({"comment": None}, "comment: asked hpctrain:run 1, is none"),
        ({"name": "other"}, "job name: asked run-1, is other"),
        ({"requeue": False}, "requeue flag: asked on, is off"),
    ],
)
def test_each_change_is_a_sentence(changes: dict[str, object], sentence: str) -> None:
    found = job_changes(requested_job(SCRIPT), made(**changes))
    assert [str(one) for one in found] == [f"Slurm changed the {sentence}"]


def test_options_that_count_cores_otherwise() -> None:
    """Neither CPUs nor a range of nodes are compared then."""
    for line in ("#SBATCH --hint=nomultithread", "#SBATCH --threads-per-core=1"):
        assert requested_job(f"{line}\n{SCRIPT}").terms.cpu_count is None
    assert requested_job("#SBATCH --nodes=2-4 --ntasks-per-node=2\n").node_count is None
