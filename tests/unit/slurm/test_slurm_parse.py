"""Parsers against output recorded from Slurm 22.05.8 (sacct: made after its documentation)."""

from __future__ import annotations

import math
import os
import time

import pytest

from hpctrain.slurm import JobState, RequeueResult, SlurmConfig
from hpctrain.slurm import parse as p

HEADER = (
    "JOBID^STATE^REASON^NODELIST^RESTART_COUNT^PREEMPT_TIME^START_TIME^END_TIME^SUBMIT_TIME"
    "^TIME_LIMIT^PARTITION^ACCOUNT^EXIT_CODE^REQUEUE^ARRAY_JOB_ID^NODES"
    "^CPUS^TRES_PER_NODE^QOS^RESERVATION^CLUSTER^WORK_DIR^NAME^COMMENT$\n"
)
HOSTILE_NAME = "evil | name $(touch /tmp/x) 'q' \"d\" A=b Comment=x"
HOSTILE_COMMENT = "hp train|run=a=b | JobState=FAILED $(id)"
ROWS = {
    "held": "5^PENDING^JobHeldUser^^0^N/A^N/A^N/A^2026-11-20T23:43:10^1-02:04:00^train^(null)^0^0"
    "^5^2^8^gres:gpu:2^(null)^(null)^sandbox^/runs/a^s.sh^(null)$\n",
    "preempted": "2^RUNNING^None^n0^0^2026-11-20T23:44:44^2026-11-20T23:43:10^2026-11-20T23:44:49"
    f"^2026-11-20T23:43:10^365-00:00:00^train^(null)^0^1^2^1^8^gres:gpu:2^(null)^(null)^sandbox^/runs/b\nc^{HOSTILE_NAME}^{HOSTILE_COMMENT}$\n",
    "newlines": "3^RUNNING^None^n0^0^N/A^2026-11-20T23:43:10^2027-11-20T23:43:10"
    "^2026-11-20T23:43:10^365-00:00:00^train^(null)^0^1^3^1^8^gres:gpu:2^(null)^(null)^sandbox^/^two\nlines^c1\nc2|x$\n",
    "failed": "9^FAILED^NonZeroExitCode^n0^0^N/A^2026-11-20T23:45:36^2026-11-20T23:45:36"
    "^2026-11-20T23:44:44^UNLIMITED^train^(null)^1792^1^9^1^8^gres:gpu:2^(null)^(null)^sandbox^/^f.sh^(null)$\n",
    "killed": "10^FAILED^JobLaunchFailure^n0^0^N/A^2026-11-20T23:45:36^2026-11-20T23:45:36"
    "^2026-11-20T23:44:44^UNLIMITED^train^(null)^9^1^10^1^8^gres:gpu:2^(null)^(null)^sandbox^/^k.sh^(null)$\n",
    "requeued": "12^PENDING^BeginTime^^1^N/A^2026-11-20T23:45:47^NONE^2026-11-20T23:44:44"
    "^UNLIMITED^train^(null)^9^1^12^1^8^gres:gpu:2^(null)^(null)^sandbox^/^st.sh^(null)$\n",
}


def recorded(*names: str) -> str:
    """Rows as squeue prints them; the separators are made visible above as ^ and $."""
    text = HEADER + "".join(ROWS[name] for name in names)
    return text.replace("^", p.UNIT).replace("$\n", f"{p.RECORD}\n")


def test_squeue_rows_of_every_kind() -> None:
    jobs = p.jobs_from_squeue(recorded(*ROWS))
    assert list(jobs) == [5, 2, 3, 9, 10, 12]
    held, failed = jobs[5], jobs[9]
    assert (held.state, held.reason, held.requeue) == (JobState.PENDING, "JobHeldUser", False)
    assert (held.node_list, held.start_time, held.account, held.comment) == (None,) * 4
    assert (held.cluster, held.work_directory) == ("sandbox", "/runs/a")
    assert (held.node_count, held.terms) == (2, p.JobTerms(cpu_count=8, gpus_per_node=2))
    assert jobs[2].work_directory == "/runs/b\nc"
    assert held.time_limit_seconds == 86400 + 2 * 3600 + 4 * 60
    assert (failed.exit_code, failed.exit_signal, failed.time_limit_seconds) == (7, 0, math.inf)
    assert failed.end_time == 1795218336.0  # date -u -d 2026-11-20T23:45:36 +%s


def test_preempt_time_and_hostile_free_text_stay_apart() -> None:
    job = p.jobs_from_squeue(recorded("preempted"))[2]
    assert (job.name, job.comment) == (HOSTILE_NAME, HOSTILE_COMMENT)
    assert job.state is JobState.RUNNING
    assert job.preempt_time == 1795218284.0


def test_newlines_in_name_and_comment_do_not_break_the_row() -> None:
    jobs = p.jobs_from_squeue(recorded("newlines", "held"))
    assert (jobs[3].name, jobs[3].comment) == ("two\nlines", "c1\nc2|x")
    assert jobs[5].name == "s.sh"


def test_exit_of_an_earlier_attempt_is_not_told_for_a_pending_job() -> None:
    jobs = p.jobs_from_squeue(recorded("requeued", "killed"))
    assert (jobs[12].exit_code, jobs[12].restart_count) == (None, 1)
    assert (jobs[10].exit_code, jobs[10].exit_signal) == (0, 9)


def test_a_header_alone_is_an_answer_and_nothing_is_not() -> None:
    assert p.jobs_from_squeue(recorded()) == {}
    with pytest.raises(ValueError, match="not a table"):
        p.jobs_from_squeue("")


def test_a_cut_or_narrow_table_is_refused() -> None:
    whole = recorded("held")
    with pytest.raises(ValueError, match="not a table"):
        p.jobs_from_squeue(whole[:-30])
    with pytest.raises(ValueError, match="not a table"):
        p.jobs_from_squeue(whole.replace(f"{p.UNIT}ACCOUNT", ""))


def test_headers_of_several_clusters_are_taken_off() -> None:
    text = f"CLUSTER: one\n{recorded('held')}CLUSTER: two\n{recorded('failed')}"
    assert list(p.jobs_from_squeue(text)) == [5, 9]


def sacct_text(*rows: tuple[str, ...]) -> str:
    return "".join(p.UNIT.join(row) + "\n" for row in (p.SACCT_FIELDS, *rows))


def sacct_row(job: str, state: str, **changes: str) -> tuple[str, ...]:
    cell = {
        **dict.fromkeys(p.SACCT_FIELDS, ""),
        "JobIDRaw": job,
        "State": state,
        "NodeList": "n[0-1]",
        "ExitCode": "0:0",
        "Start": "2024-01-01T00:00:10",
        "End": "Unknown",
        "Timelimit": "00:01:00",
        "JobName": "a",
        "Cluster": "sandbox",
        **changes,
    }
    return tuple(cell[name] for name in p.SACCT_FIELDS)


def test_sacct_rows() -> None:
    text = sacct_text(
        sacct_row("7", "CANCELLED by 1000", ExitCode="0:15", End="2024-01-01T00:01:10"),
        sacct_row("8", "RUNNING", JobName="two\nlines", Comment="c\n9|x"),
        sacct_row("9", "PENDING", NodeList="None assigned", Start="Unknown"),
    )
    jobs = p.jobs_from_sacct(text)
    assert (jobs[7].state, jobs[7].exit_signal) == (JobState.CANCELLED, 15)
    assert jobs[7].start_time == 1704067210.0
    assert (jobs[8].name, jobs[8].comment, jobs[8].exit_code) == ("two\nlines", "c\n9|x", None)
    assert (jobs[9].node_list, jobs[9].start_time) == (None, None)
    assert jobs[8].restart_count is None
    element = p.jobs_from_sacct(sacct_text(sacct_row("9", "FAILED", JobID="7_2")))[9]
    assert (element.array_job_id, element.submitted_id) == (7, 7)


def test_sacct_without_rows_is_an_answer_and_nothing_is_not() -> None:
    assert p.jobs_from_sacct(sacct_text()) == {}
    for text in ("", "garbage", sacct_text(sacct_row("7", "FAILED"))[:-30]):
        with pytest.raises(ValueError, match="not a table"):
            p.jobs_from_sacct(text)


def test_times_are_read_as_utc_whatever_the_zone_of_this_process() -> None:
    before = os.environ.get("TZ")
    try:
        for zone in ("Asia/Tokyo", "UTC0", "America/New_York"):
            os.environ["TZ"] = zone
            time.tzset()
            assert p.epoch_seconds("2024-01-01T00:00:10") == 1704067210.0
    finally:
        os.environ.pop("TZ")
        os.environ.update({} if before is None else {"TZ": before})
        time.tzset()


@pytest.mark.parametrize("text", ["Unknown", "None", "N/A", "NONE", "", "(null)"])
def test_times_that_are_not_told(text: str) -> None:
    assert p.epoch_seconds(text) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5:00", 300.0),
        ("1:00:00", 3600.0),
        ("2-00:00:01", 172801.0),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
        ("Partition_Limit", None),
        ("NOT_SET", None),
    ],
)
def test_time_limits(text: str, seconds: float | None) -> None:
    assert p.limit_seconds(text) == seconds


def test_steps_of_plain_array_and_het_jobs() -> None:
    rows = ["STEPID^STATE^NAME$\n", "12.0^RUNNING^python$\n", "12_3.1^RUNNING^a b$\n"]
    rows.append("12.batch^RUNNING^batch$\n")
    text = "".join(rows).replace("^", p.UNIT).replace("$", p.RECORD)
    steps = p.steps_from_squeue(text)
    assert [step.step_id for step in steps] == ["0", "1", "batch"]
    assert [step.name for step in steps] == ["python", "a b", "batch"]


@pytest.mark.parametrize(
    ("word", "state", "said"),
    [
        ("allocated", "allocated", ""),
        ("ALLOCATED*", "allocated", "silent"),
        ("down*", "down", "silent down"),
        ("drained", "drained", "planned"),
        ("draining@", "draining", "planned leaving"),
        ("idle~", "idle", ""),
        ("fail", "fail", "down"),
        ("unknown*", "unknown", "silent down"),
        ("draining", "draining", "planned"),
        ("drained*", "drained", "silent planned"),
        ("maint", "maint", "planned"),
        ("reboot^", "reboot", "planned leaving"),
        ("allocated@", "allocated", "planned leaving"),
        ("down^", "down", "down planned leaving"),
        ("mixed$", "mixed", "planned"),
        ("planned-", "planned", ""),
        ("mixed", "mixed", ""),
        ("allocated*", "allocated", "silent"),
        ("mixed-", "mixed", ""),
        ("reserved$", "reserved", "planned"),
        ("allocated^", "allocated", "planned leaving"),
        ("mixed*^", "mixed", "silent planned leaving"),
        ("idle%", "idle", "leaving"),
        ("idle!", "idle", "leaving"),
        ("reboot_issued", "reboot_issued", "planned leaving"),
        ("powering_down", "powering_down", "down leaving"),
    ],
)
def test_node_states(word: str, state: str, said: str) -> None:
    """sinfo(1): `@` and `^` are reboots that scontrol has asked for, `$` is maintenance.

    `planned`: somebody takes it out of service; `leaving`: it is on its way out. Two partitions
    list the node twice.
    """
    rows = ["NODELIST^STATE$\n", f"n7^{word}$\n", f"n7^{word}$\n"]
    # the circumflex of a row is a separator, that of a state is not
    text = "".join(row.replace("^", p.UNIT, 1).replace("$\n", f"{p.RECORD}\n") for row in rows)
    (one,) = p.node_states(text)
    found = {
        "silent": not one.responding,
        "down": one.is_down,
        "planned": one.planned,
        "leaving": one.leaving,
    }
    assert (one.node, one.state) == ("n7", state)
    assert " ".join(name for name, holds in found.items() if holds) == said


def test_submitted_job_with_and_without_cluster() -> None:
    assert p.submitted("14\n").job_id == 14
    job = p.submitted("14;big\n", "sbatch: be nice\n")
    assert (job.job_id, job.cluster, job.messages) == (14, "big", ("sbatch: be nice",))


def test_what_a_command_in_the_place_of_sbatch_prints() -> None:
    text = "Welcome\n2 jobs of yours run\nSubmitted batch job 14 on cluster big\nbye\x1b[2J\n"
    job = p.submitted(text, "\n".join(f"line {n}" for n in range(30)))
    assert (job.job_id, job.cluster) == (14, "big")
    assert job.messages[:4] == ("Welcome", "2 jobs of yours run", "bye?[2J", "line 0")
    assert (len(job.messages), job.messages[-1]) == (21, "and 13 more lines")
    assert p.submitted("sbatch: Submitted batch job 15\n").job_id == 15
    for text in ("", "job 14\n", "14 jobs\n"):
        with pytest.raises(ValueError, match="no job id"):
            p.submitted(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("N/A", 0),
        ("gres:gpu", 1),
        ("gres:gpu:a100:8", 8),
        ("gres/gpu:8", 8),
        ("gres/gpu:a100_3g.20gb:2(S:0-1),gres/nic:4", 2),
        ("gres:gpu:a:2,gres:gpu:b:1", 3),
    ],
)
def test_gpus_that_a_job_asks_of_a_node(text: str, count: int) -> None:
    assert p.gpus_per_node(text) == count


@pytest.mark.parametrize("stray", ["", " a"], ids=["22.05 and 24.11", "26.05"])
def test_test_only_sentence(stray: str) -> None:
    answer = p.test_only_answer(
        f"sbatch: Job 7 to start at 3387-11-28T16:21:10{stray} using 2 processors on nodes n[0-1]"
        " in partition train\n"
    )
    assert (answer.start_time_text, answer.processors) == ("3387-11-28T16:21:10", 2)
    assert (answer.nodes, answer.partition) == ("n[0-1]", "train")
    assert p.test_only_answer("something new\n").text == "something new"


@pytest.mark.parametrize(
    ("returncode", "text", "result"),
    [
        (0, "", RequeueResult.DONE),
        (1, "Job is pending execution for job 12", RequeueResult.ALREADY_PENDING),
        (1, "Requested operation is presently disabled for job 5", RequeueResult.DISABLED),
        (1, "Invalid job id specified for job 999", RequeueResult.UNKNOWN_JOB),
        (1, "Unexpected message received for job 14", RequeueResult.UNREACHABLE),
        (1, "Access/permission denied for job 3", RequeueResult.REFUSED),
    ],
)
def test_requeue_results(returncode: int, text: str, result: RequeueResult) -> None:
    assert p.requeue_result(returncode, text) is result


def test_config_of_22_05() -> None:
    config = SlurmConfig(
        p.config_values(
            "Configuration data as of 2026-11-20T23:45:42\n"
            "AccountingStorageType   = accounting_storage/none\n"
            "AuthInfo                = socket=/s/run/munge.socket,cred_expire=5\n"
            "JobRequeue              = 1\n"
            "KillWait                = 5 sec\n"
            "PowerPlugin             = \n"
            "RequeueExitHold         = (null)\n"
            "SLURM_VERSION           = 22.05.8\n"
            "SlurmctldParameters     = idle_on_node_suspend,preempt_send_user_signal\n"
            "Slurmctld(primary) at vm is UP\n"
        )
    )
    assert config.version == (22, 5, 8)
    assert (config.get("KillWait"), config.get("JobRequeue")) == ("5 sec", "1")
    assert not config.accounting_enabled
    assert config.get("RequeueExitHold", "no") == "no"
    assert SlurmConfig().get("KillWait", "none") == "none"


def test_boot_times() -> None:
    text = (
        "NodeName=n0 Arch=x86_64 BootTime=1970-01-01T00:01:40 SlurmdStartTime=1970-01-01T00:09:00\n"
        "NodeName=n1 State=UNKNOWN BootTime=None SlurmdStartTime=None\n"
        "NodeName=n2 State=FUTURE\n"
    )
    assert p.boot_times(text) == {"n0": 100.0}


def test_node_address() -> None:
    text = "NodeName=n0 Arch=x86_64 CoresPerSocket=1 NodeAddr=127.0.0.1 NodeHostName=localhost\n"
    assert p.node_address(text) == "127.0.0.1"
    with pytest.raises(ValueError, match="NodeAddr"):
        p.node_address("NodeName=n0\n")


def test_free_text_of_a_node_is_not_taken_for_its_boot_time() -> None:
    """As `scontrol -o show node` prints it (24.11.5), shortened."""
    line = (
        "NodeName=n1 Arch=x86_64 CPUAlloc=0 NodeAddr=127.0.0.1 NodeHostName=localhost "
        "BootTime=2026-11-22T01:00:00 SlurmdStartTime=2026-11-22T01:01:00 "
        "Comment=BootTime=2001-01-01T00:00:00 NodeName=n3 NodeAddr=10.9.8.7 "
        "Reason=NodeName=n4 [root@2026-11-22T02:00:00]"
    )
    assert p.boot_times(line) == {"n1": p.epoch_seconds("2026-11-22T01:00:00")}
    assert p.node_address(line) == "127.0.0.1"


def test_leaves_of_a_tree_and_blocks() -> None:
    """22.05.8 and 24.11.5."""
    tree = (
        "SwitchName=odd Level=0 LinkSpeed=1 Nodes=n[0,2] \n"
        "SwitchName=even Level=0 LinkSpeed=1 Nodes=n[1,3] \n"
        "SwitchName=spine Level=1 LinkSpeed=1 Nodes=n[0-3] Switches=odd,even \n"
    )
    assert p.leaf_lines(tree) == {"odd": "n[0,2]", "even": "n[1,3]"}
    blocks = (
        "BlockName=b0 BlockIndex=0 Nodes=n[0-1] BlockSize=2\n"
        "BlockName=b1 BlockIndex=1 Nodes=n[2-3] BlockSize=2\n"
        "AggregatedBlock=b[0-1] BlockIndex=2 Nodes=n[0-3] BlockSize=4\n"
    )
    assert p.leaf_lines(blocks) == {"b0": "n[0-1]", "b1": "n[2-3]"}
    assert p.leaf_lines("") == {}
    assert p.has_leaves("switch.switch.node") and p.has_leaves("block.node")
    assert not p.has_leaves("node")


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("(null)", ()),
        ("", ()),
        ("afterok:7(unfulfilled)", ("afterok:7",)),
        ("afterok:7(failed),afterany:9_*(unfulfilled)", ("afterok:7", "afterany:9_*")),
        ("singleton(unfulfilled)", ("singleton",)),
    ],
)
def test_dependencies(text: str, terms: tuple[str, ...]) -> None:
    """squeue(1), %E; texts of 22.05.8 and 24.11.5."""
    assert p.dependencies(text) == terms
