"""Facts about a cluster from texts of scontrol and sacctmgr, and the pass that asks for them."""

from __future__ import annotations

import pytest
from foreign_clusters import (
    DGX_H100,
    GB200,
    MI250X,
    UNIVERSITY,
    Answers,
    config,
    node,
    partition,
)
from virtual_clock import VirtualClock

from hpctrain.base import clock
from hpctrain.base.errors import SlurmRefusedError, SlurmUnreachableError
from hpctrain.slurm import cluster_queries, settings
from hpctrain.slurm.cluster_queries import ATTEMPTS, ClusterQueries
from hpctrain.slurm.cluster_records import ClusterFacts, Leaf
from hpctrain.slurm.parse import config_values, expand_hosts
from hpctrain.slurm.process import Command, CommandResult
from hpctrain.slurm.records import SlurmConfig


def facts(answers: Answers) -> ClusterFacts:
    with clock.replaced(VirtualClock(begins_at=0.0)):
        return ClusterQueries("me", {}, run=answers).facts()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n0", ["n0"]),
        ("n[0-2],x", ["n0", "n1", "n2", "x"]),
        ("gpu[008-010,12]", ["gpu008", "gpu009", "gpu010", "gpu12"]),
        ("r[1-2]n[0-1]-ib", ["r1n0-ib", "r1n1-ib", "r2n0-ib", "r2n1-ib"]),
        ("", []),
    ],
)
def test_host_lists_are_expanded(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize("text", ["n[0-2", "n[a-b]", "n[0-99999999999]"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:h100:8(S:0-1)", [("h100", 8)]),
        ("gpu:4", [("", 4)]),
        ("gpu:4090:2", [("4090", 2)]),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1),nvme:1", [("a100", 2), ("a100", 2)]),
        ("gpu:1g.10gb:7,shard:16", [("1g.10gb", 7)]),
        ("gpu:v100:2(S:0,1)", [("v100", 2)]),
        ("(null)", []),
    ],
)
def test_gpus_of_gres(gres: str, gpus: list[tuple[str, int]]) -> None:
    assert list(cluster_queries.gpus(gres)) == gpus


def test_free_text_of_a_node_does_not_change_its_values() -> None:
    text = node("n1", "gpu:h100:8", partitions="a", reserved=1024, features="x,y")
    (one,) = cluster_queries.nodes(text)
    assert one.gpus == (("h100", 8),), "the reason at the end names others"
    assert (one.cpus, one.job_memory_mib) == (224, 2063937 - 1024)
    assert (one.features, one.partitions) == ({"x", "y"}, ("a",))
    assert not one.is_out_of_service
    assert cluster_queries.nodes(node("n", "(null)", partitions="", state="DOWN*"))[
        0
    ].is_out_of_service


def test_a_partition_without_limits_and_one_with_all() -> None:
    setting = SlurmConfig({"PreemptType": "preempt/partition_prio", "PreemptMode": "CANCEL"})
    text = partition("open", Default="YES", PreemptMode="") + partition(
        "closed",
        MaxTime="1-12:00:00",
        MaxNodes="4",
        AllowAccounts="a,b",
        AllocNodes="login[1-2]",
        OverSubscribe="EXCLUSIVE",
        PreemptMode="GANG,SUSPEND",
        DefMemPerNode="4000",
    )
    first, second = cluster_queries.partitions(text, setting)
    assert (first.max_seconds, first.max_nodes, first.allow_accounts) == (None, None, ())
    assert (first.default, first.preemption, first.submit_hosts) == (True, "cancel", ())
    assert (second.max_seconds, second.max_nodes, second.allow_accounts) == (
        129600,
        4,
        ("a", "b"),
    )
    assert (second.preemption, second.submit_hosts) == ("suspend", ("login1", "login2"))
    assert second.whole_nodes
    quiet = SlurmConfig({"PreemptType": "preempt/none", "PreemptMode": "REQUEUE"})
    assert cluster_queries.partitions(text, quiet)[0].preemption == "off"


@pytest.mark.parametrize(
    ("version", "key", "sent"),
    [
        ("22.05.8", "SlurmctldParameters", True),
        ("24.11.5", "SlurmctldParameters", False),
        ("24.11.5", "PreemptParameters", True),
        # a Slurm that prints the key has it, whatever its release
        ("22.05.8", "PreemptParameters", True),
    ],
)
def test_the_signal_at_preemption_is_spelled_as_told(version: str, key: str, sent: bool) -> None:
    words = "x,preempt_send_user_signal,send_user_signal"
    assert settings.sends_user_signal(SlurmConfig({"SLURM_VERSION": version, key: words})) == sent


@pytest.mark.parametrize(
    ("info", "seconds"),
    [("(null)", 121), ("socket=/x,cred_expire=5", 6), ("cred_expire=3", 121)],
)
def test_how_long_a_requeued_job_waits(info: str, seconds: int) -> None:
    assert settings.requeue_delay_seconds(SlurmConfig({"AuthInfo": info})) == seconds


def test_one_pass_takes_few_queries() -> None:
    answers = Answers(DGX_H100)
    found = facts(answers)
    assert found.queries == len(answers.asked) == 6
    assert (len(found.nodes), found.topology, len(found.leaves)) == (64, "tree", 4)
    assert len(found.leaves[0].nodes) == 16 and found.accounting is None
    assert found.clock_ahead_seconds is not None
    # 2026-03-01T12:00:00 UTC; our clock stands at 0
    assert found.clock_ahead_seconds == 1772366400.5


def test_blocks_are_leaves_and_their_aggregates_are_not() -> None:
    found = facts(Answers(GB200))
    assert found.topology == "block"
    assert [(leaf.name, len(leaf.nodes)) for leaf in found.leaves] == [("rack1", 18), ("rack2", 18)]


def test_a_topology_file_that_the_configuration_does_not_mention_is_found() -> None:
    told = "SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=n[0-1]\n"
    answers = {
        "config": config(version="26.05.5", topology="topology/flat"),
        "node": node("n0", "gpu:4", partitions="a"),
        "partition": partition("a"),
        "topology": told,
    }
    found = facts(Answers(answers))
    assert (found.topology, found.leaves) == ("tree", (Leaf("leaf0", ("n0", "n1")),))
    assert facts(Answers({**answers, "topology": ""})).topology == "none"


def test_rights_come_from_the_accounting_database() -> None:
    found = facts(Answers(MI250X))
    assert found.accounting is not None and found.queries == 7
    assert found.accounting.accounts == ("project_1", "project_2")
    assert found.accounting.associations[0].limits["GrpTRES"] == "gres/gpu=1024"
    assert found.accounting.qos[1].max_seconds == 1800


def test_a_database_without_answer_is_named_and_holds_nothing_up() -> None:
    found = facts(Answers(MI250X, {"user": "away", "licenses": "Access/permission denied"}))
    assert found.accounting is None
    assert found.unanswered == {
        "sacctmgr": "no answer from `sacctmgr`",
        "scontrol show licenses": "Access/permission denied",
    }


def test_licenses_and_reservations() -> None:
    found = facts(Answers(UNIVERSITY))
    assert [(one.name, one.total) for one in found.licenses] == [("matlab", 10)]
    (one,) = found.reservations
    assert one.is_maintenance and one.node_count == 3 and one.users == ("root",)
    assert one.end_time is not None and one.start_time is not None
    assert one.end_time - one.start_time == 36 * 3600


def test_a_query_without_answer_is_repeated_with_growing_pauses(
    virtual_clock: VirtualClock,
) -> None:
    pauses = virtual_clock.pauses
    answers = Answers(DGX_H100, {"node": "away"})
    queries = ClusterQueries("me", {}, run=answers)
    with pytest.raises(SlurmUnreachableError):
        queries.facts()
    assert queries.count == 1 + ATTEMPTS == len(answers.asked)
    assert len(pauses) == ATTEMPTS - 1 and pauses[1] > pauses[0]


def test_a_refusal_is_not_repeated() -> None:
    queries = ClusterQueries("me", {}, run=Answers(DGX_H100, {"config": "Access denied"}))
    with pytest.raises(SlurmRefusedError):
        queries.facts()
    assert queries.count == 1


def test_queries_do_not_obey_variables_of_the_shell() -> None:
    seen: list[Command] = []
    inner = Answers(DGX_H100)

    def run(command: Command) -> CommandResult:
        seen.append(command)
        return inner(command)

    shell = {"PATH": "/bin", "SLURM_CONF": "/s", "SLURM_TIME_FORMAT": "%s", "TZ": "Asia/Tokyo"}
    ClusterQueries("me", shell, run=run).facts()
    assert seen[0].environment == {
        "PATH": "/bin",
        "SLURM_CONF": "/s",
        "LC_ALL": "C",
        "TZ": "UTC0",
    }
    assert all(command.timeout_seconds == 30 for command in seen)


def test_the_configuration_is_read_like_that_of_any_cluster() -> None:
    values = SlurmConfig(config_values(config(submit="lua,job_submit/all_partitions")))
    assert settings.plugins(values, "JobSubmitPlugins") == ("lua", "all_partitions")
    assert settings.plugins(values, "CliFilterPlugins") == ()
    assert settings.seconds_of(values, "KillWait") == 30


def test_queries_name_a_cluster() -> None:
    """All of scontrol; sacctmgr asks slurmdbd, which knows all clusters."""
    seen: list[tuple[str, ...]] = []
    inner = Answers(DGX_H100)

    def run(command: Command) -> CommandResult:
        seen.append(command.argv)
        kept = tuple(word for word in command.argv if word != "--clusters=far")
        return inner(command._replace(argv=kept))

    ClusterQueries("me", {}, cluster="far", run=run).facts()
    assert {argv[1] for argv in seen if argv[0] == "scontrol"} == {"--clusters=far"}
    assert all("--clusters=far" not in argv for argv in seen if argv[0] != "scontrol")
