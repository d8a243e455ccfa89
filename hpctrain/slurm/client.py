"""Query and control Slurm through its commands; no other module calls them.

Belongs here: which command serves a query, and what its exit codes mean. Does not belong here:
decisions (`supervise`, `runs`). Text formats only: the JSON of squeue changed
its schema in 22.05, 23.11 and 24.05 and ignores filters in 22.05.

Every call has a timeout. Every method may raise SlurmUnreachableError (no response) and
SlurmRefusedError (with Slurm's own message). No response never means that a job is gone.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from hpctrain.base.errors import SlurmRefusedError, SlurmUnreachableError
from hpctrain.slurm import parse
from hpctrain.slurm.process import (
    Command,
    CommandResult,
    Runner,
    accepted,
    for_queries,
    parsed,
    run_command,
    with_only,
)
from hpctrain.slurm.records import (
    JobRecord,
    NodeState,
    RequeueAnswer,
    RequeueResult,
    SlurmConfig,
    StepRecord,
    SubmittedJob,
    TestOnlyAnswer,
)

# slurmd refuses a job that starts again in the second in which its first start was ended: times of
# credentials are whole seconds (seen on 22.05.8: exit code 1, no log). Wait so long before
# `start_now`.
REVOKED_SECONDS = 3.0


class SlurmClient:
    """Slurm as seen from a login node or from inside a job.

    `environment` replaces os.environ. With `shielded`, commands survive the signals with which
    Slurm ends a job: the supervisor queries and requeues while they arrive. `run` is the seam for
    tests. `at` gives the client of another cluster, or one that submits by another command.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float = 20.0,
        *,
        shielded: bool = False,
        run: Runner = run_command,
    ) -> None:
        self._environment = dict(os.environ if environment is None else environment)
        self._timeout_seconds = timeout_seconds
        self._shielded = shielded
        self._run = run
        self._settled: SlurmConfig | None = None
        self._cluster: str | None = None
        self._submit_command: tuple[str, ...] = ("sbatch",)
        self._others: dict[object, Self] = {}

    def at(self, *, cluster: str | None = None, submit_command: Sequence[str] = ()) -> Self:
        """Return a client that asks the Slurm of `cluster`, and submits by `submit_command`.

        Commands get `--clusters` (sbatch(1), --clusters), for which they ask slurmdbd where that
        cluster is: from a node inside a job slurmdbd may be out of reach, so the job's own cluster
        is asked without. What is left out stays as it is here.
        """
        if cluster is None:
            cluster = self._cluster
        elif cluster == self._environment.get("SLURM_CLUSTER_NAME"):
            cluster = None
        command = tuple(submit_command) or self._submit_command
        if (cluster, command) == (self._cluster, self._submit_command):
            return self
        other = self._others.get((cluster, command))
        if other is None:
            other = copy.copy(self)
            other._cluster, other._submit_command = cluster, command
            other._settled, other._others = None, {}
            self._others[cluster, command] = other
        return other

    # Submitting ---------------------------------------------------------------------------------

    def submit(
        self,
        script: Path | str,
        extra_args: Sequence[str] = (),
        *,
        variables: Collection[str] | None = None,
    ) -> SubmittedJob:
        """Submit a script: a Path is a file, a str is the text itself (sent on stdin).

        `variables` are those that sbatch and so the job inherit; None: all.
        """
        answer = self._sbatch(["--parsable", *extra_args], script, variables)
        return parsed("sbatch", lambda: parse.submitted(answer.stdout, answer.stderr))

    def submit_with(
        self,
        script: Path,
        arguments: Sequence[str],
        extra_args: Sequence[str] = (),
        *,
        variables: Collection[str] | None = None,
    ) -> SubmittedJob:
        """Submit a script with arguments of its own; see `submit`."""
        answer = self._sbatch(["--parsable", *extra_args], script, variables, arguments)
        return parsed("sbatch", lambda: parse.submitted(answer.stdout, answer.stderr))

    def test_only(self, script: Path | str, extra_args: Sequence[str] = ()) -> TestOnlyAnswer:
        """Let the controller check a script without submitting it."""
        answer = self._sbatch(["--test-only", *extra_args], script, None)
        return parse.test_only_answer(answer.stderr)

    def _sbatch(
        self,
        options: list[str],
        script: Path | str,
        variables: Collection[str] | None,
        arguments: Sequence[str] = (),
    ) -> CommandResult:
        argv, stdin = [*self._submit_command, *self._where(), *options], ""
        if isinstance(script, Path):
            argv += [os.path.abspath(script), *arguments]
        else:
            stdin = script
        environment = with_only(self._environment, variables)
        return accepted(argv, self._call(argv, environment, stdin, submits=True))

    # Queries ------------------------------------------------------------------------------------

    def jobs(self, ids: Collection[int]) -> dict[int, JobRecord]:
        """Query the controller about `ids` at once: live jobs, and ended ones for MinJobAge (300 s
        by default). The controller does not know an absent id (any more).
        An array given by its id yields all elements that run or have run, each under its own
        id, and one record under the array's id for all that wait.
        """
        if not ids:
            return {}
        argv = ["squeue", "--states=all", f"--jobs={_joined(ids)}"]
        argv.append(f"--Format={parse.long_format(parse.SQUEUE_FIELDS)}")
        answer = self._ask(argv)
        # For one unknown id squeue fails; of several it prints the known ones.
        if answer.returncode != 0 and len(ids) == 1 and parse.is_unknown_job(answer.stderr):
            return {}
        text = _answered(argv, answer)
        found = parsed("squeue", lambda: parse.jobs_from_squeue(text))
        wanted = frozenset(ids)
        return {job_id: record for job_id, record in found.items() if record.belongs_to(wanted)}

    def jobs_of_users(self, user_ids: Collection[int]) -> dict[int, JobRecord]:
        """Query all jobs of these users that the controller knows; see `jobs`.

        It costs as much as a query for several ids, for which squeue reads all jobs and filters.
        """
        if not user_ids:
            return {}
        argv = ["squeue", "--states=all", f"--user={_joined(user_ids)}"]
        argv.append(f"--Format={parse.long_format(parse.SQUEUE_FIELDS)}")
        text = _answered(argv, self._ask(argv))
        return parsed("squeue", lambda: parse.jobs_from_squeue(text))

    def live_jobs_named(self, name: str) -> tuple[int, ...]:
        """List the ids of this user's waiting and running jobs of that name (see `singleton`)."""
        argv = ["squeue", "--me", f"--name={name}", f"--Format={parse.long_format(('JobID',))}"]
        text = _answered(argv, self._ask(argv))
        rows = parsed("squeue", lambda: parse.table(text, 1))
        return tuple(int(job_id) for (job_id,) in rows)

    def show_job(self, job_id: int) -> JobRecord | None:
        """Query one job with its excluded nodes and what it waits for; None when the controller
        does not know it.

        Not by `scontrol show job`, because a job name may have the form of its `Key=value` text.
        squeue's -O has no field for excluded nodes in 22.05, its -o has.
        """
        record = self.jobs([job_id]).get(job_id)
        if record is None:
            return None
        fields = parse.UNIT.join(("%A", "%x", "%E"))
        argv = ["squeue", "--states=all", f"--jobs={job_id}", f"--format={fields}"]
        for line in _answered(argv, self._ask(argv)).splitlines():
            number, excluded, dependency = line.split(parse.UNIT)
            if number == str(job_id):
                waits_for = parse.dependencies(dependency)
                return replace(record, exclude_nodes=excluded, dependencies=waits_for)
        return record

    def history(self, ids: Collection[int]) -> dict[int, JobRecord]:
        """Query the last attempt of each job in the accounting database; without one, query what
        the controller still remembers.
        """
        if not ids:
            return {}
        if not self.accounting_enabled():
            return self.jobs(ids)
        argv = ["sacct", "-X", "-P", f"--delimiter={parse.UNIT}", f"--jobs={_joined(ids)}"]
        argv.append(f"--format={','.join(parse.SACCT_FIELDS)}")
        text = _answered(argv, self._ask(argv))
        return parsed("sacct", lambda: parse.jobs_from_sacct(text))

    def past_jobs(self, ids: Collection[int]) -> dict[int, JobRecord]:
        """Query ids that squeue does not know: only the accounting database may have them."""
        return self.history(ids) if ids and self.accounting_enabled() else {}

    def steps(self, job_id: int) -> tuple[StepRecord, ...]:
        """List the live steps of a job; empty for a job without any and for an unknown job."""
        argv = ["squeue", "--steps", f"--jobs={job_id}"]
        argv.append(f"--Format={parse.long_format(parse.STEP_FIELDS)}")
        text = _answered(argv, self._ask(argv))
        return parsed("squeue --steps", lambda: parse.steps_from_squeue(text))

    def hostnames(self, node_list: str) -> tuple[str, ...]:
        """Expand `n[0-2]` to (n0, n1, n2). Needs no controller."""
        if not node_list:
            return ()
        # scontrol prints `Invalid hostlist` with exit code 0, so the output decides.
        argv = ["scontrol", "show", "hostnames", node_list]
        answer = accepted(argv, self._call(argv, for_queries(self._environment)))
        if not answer.stdout.split():
            raise SlurmRefusedError(answer.stderr.strip() or f"no host names in `{node_list}`")
        return tuple(answer.stdout.split())

    def leaves(self) -> dict[str, str]:
        """Query the leaf switch or block of each node; empty where Slurm's topology has none.

        One query of the controller, and one call for all node lists, which needs no controller.
        """
        argv = ["scontrol", "show", "topology"]
        lists = parsed(
            "scontrol show topology",
            lambda: parse.leaf_lines(accepted(argv, self._ask(argv)).stdout),
        )
        if not lists:
            return {}
        end = "end-of-leaf.invalid"  # RFC 2606: no host has such a name
        found, leaf = {}, iter(lists)
        name = next(leaf)
        for node in self.hostnames(",".join(f"{nodes},{end}" for nodes in lists.values())):
            if node == end:
                name = next(leaf, "")
            else:
                found[node] = name
        return found

    def node_address(self, node: str) -> str:
        """Query the address at which Slurm itself reaches a node (NodeAddr)."""
        argv = ["scontrol", "-o", "show", "node", node]
        text = accepted(argv, self._ask(argv)).stdout
        return parsed("scontrol show node", lambda: parse.node_address(text))

    def node_states(self, nodes: Collection[str]) -> dict[str, NodeState]:
        """Query the states of `nodes` at once; an unknown node is absent.

        A dead node is listed as responding for minutes (SlurmdTimeout, 300 s by default).
        """
        if not nodes:
            return {}
        argv = ["sinfo", "--Node", f"--nodes={','.join(sorted(nodes))}"]
        argv.append(f"--Format={parse.long_format(parse.NODE_FIELDS)}")
        text = _answered(argv, self._ask(argv))
        return {one.node: one for one in parsed("sinfo", lambda: parse.node_states(text))}

    def boot_times(self, nodes: Collection[str]) -> dict[str, float]:
        """Query when each of `nodes` booted, in seconds since the epoch of the controller's clock.

        slurmd reports it when it registers: a node that is booting still has the time before.
        """
        if not nodes:
            return {}
        argv = ["scontrol", "-o", "show", "node", ",".join(sorted(nodes))]
        text = accepted(argv, self._ask(argv)).stdout
        return parsed("scontrol show node", lambda: parse.boot_times(text))

    def config(self) -> SlurmConfig:
        """Query the configuration in force."""
        argv = ["scontrol", "show", "config"]
        return SlurmConfig(parse.config_values(_answered(argv, self._ask(argv))))

    def accounting_enabled(self) -> bool:
        """True if sacct has a database to query; queried once per client."""
        return self._unchanging().accounting_enabled

    def cluster_name(self) -> str | None:
        """Query ClusterName, None if it has none; queried once per client."""
        return self._unchanging().cluster_name or None

    def _unchanging(self) -> SlurmConfig:
        """Cache the configuration for values that stay the same while a controller lives."""
        if self._settled is None:
            self._settled = self.config()
        return self._settled

    # Changes ------------------------------------------------------------------------------------

    def requeue(self, job_id: int, *, shielded: bool = False) -> RequeueAnswer:
        """Put a job back into the queue. Never raises: the caller is often about to be killed."""
        argv = ["scontrol", "requeue", str(job_id)]
        return self._requeued(argv, shielded)

    def requeue_hold(self, job_id: int, *, shielded: bool = False) -> RequeueAnswer:
        """As `requeue`, but held until `release`. Never raises."""
        argv = ["scontrol", "requeuehold", str(job_id)]
        return self._requeued(argv, shielded)

    def hold(self, job_id: int) -> None:
        """Keep a pending job from starting until its owner releases it (scontrol(1), `uhold`).

        Slurm 22.05.8 silently accepts this for a running job too: query the job again afterwards.
        """
        self._do(["scontrol", "uhold", str(job_id)])

    def release(self, job_id: int) -> None:
        """Let a held job start. While it is still COMPLETING this undoes the hold too."""
        self._do(["scontrol", "release", str(job_id)])

    def update_job(
        self,
        job_id: int,
        *,
        start_now: bool = False,
        exclude_nodes: Sequence[str] | None = None,
        requeue: bool | None = None,
        nodes: tuple[int, int] | None = None,
        dependency: str | None = None,
    ) -> None:
        """Change a job.

        `start_now` ends the wait after a requeue, but only once the job is PENDING: while it is
        COMPLETING Slurm 22.05.8 accepts it and sets the whole wait again afterwards.
        `exclude_nodes` (only while pending, or completing after a requeue) replaces the list; an
        empty one clears it. `nodes` are the least and the most nodes of a pending job. `dependency`
        replaces what a pending job waits for (scontrol(1), Dependency).
        """
        changes = ["StartTime=now"] if start_now else []
        if exclude_nodes is not None:
            changes.append(f"ExcNodeList={','.join(exclude_nodes)}")
        if requeue is not None:
            changes.append(f"Requeue={int(requeue)}")
        if nodes is not None:
            changes.append(f"NumNodes={nodes[0]}-{nodes[1]}")
        if dependency is not None:
            changes.append(f"Dependency={dependency}")
        if changes:
            self._do(["scontrol", "update", f"JobId={job_id}", *changes])

    def cancel(self, job_id: int) -> None:
        """End a job. Slurm 22.05 is silent about unknown and ended jobs, and also does nothing
        for an element of an array by its own id: see `cancel_all` with the array's.
        """
        self._do(["scancel", str(job_id)])

    def cancel_all(self, ids: Collection[int], *, pending_only: bool = False) -> None:
        """End jobs, or only those that wait; of an array by its id all elements, or those."""
        if ids:
            options = ["--state=PENDING"] if pending_only else []
            self._do(["scancel", *options, *(str(job_id) for job_id in sorted(ids))])

    def cancel_waiting(self, job_id: int) -> None:
        """End a job that has not started; one that runs is left alone (scancel(1), `--state`)."""
        self._do(["scancel", "--state=PENDING", str(job_id)])

    def signal_step(self, job_id: int, step_id: str, signal_name: str) -> None:
        """Send a signal such as `USR1` to all tasks of a numbered step. Slurm says nothing when
        the step has already ended.
        """
        self._do(["scancel", f"--signal={signal_name}", f"{job_id}.{step_id}"])

    def signal_batch(self, job_id: int, signal_name: str) -> None:
        """Signal the batch shell alone, as Slurm's own warning does (scancel(1), --batch)."""
        self._do(["scancel", f"--signal={signal_name}", "--batch", str(job_id)])

    def run_on_node(self, job_id: int, node: str, step_name: str, words: Sequence[str]) -> str:
        """Run a short command beside what a job of this user runs on `node`; return its output.

        It shares the resources of the job's other steps (srun(1), --overlap, since 20.11).
        """
        argv = ["srun", f"--jobid={job_id}", f"--job-name={step_name}", "--overlap", "--nodes=1"]
        argv += ["--ntasks=1", f"--nodelist={node}", "--mpi=none", "--input=none", "--chdir=/"]
        argv += ["--export=PATH", "--cpu-bind=none", "--quiet", *words]
        return accepted(argv, self._ask(argv)).stdout

    def kill_step(self, job_id: int, step_id: str) -> None:
        """KILL all tasks of a numbered step at once."""
        self.signal_step(job_id, step_id, "KILL")

    # Calling ------------------------------------------------------------------------------------

    def _requeued(self, argv: list[str], shielded: bool) -> RequeueAnswer:
        try:
            answer = self._ask(argv, shielded=shielded)
        except SlurmUnreachableError as error:
            return RequeueAnswer(RequeueResult.UNREACHABLE, str(error))
        text = answer.stderr.strip()
        return RequeueAnswer(parse.requeue_result(answer.returncode, text), text)

    def _do(self, argv: list[str]) -> None:
        accepted(argv, self._ask(argv))

    def _ask(self, argv: list[str], *, shielded: bool = False) -> CommandResult:
        """Ask the Slurm of the cluster; every command but sbatch goes through here."""
        argv = [argv[0], *self._where(), *argv[1:]]
        answer = self._call(argv, for_queries(self._environment), shielded=shielded)
        return answer._replace(stdout=parse.without_cluster(answer.stdout))

    def _where(self) -> list[str]:
        return [] if self._cluster is None else [f"--clusters={self._cluster}"]

    def _call(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        stdin: str = "",
        *,
        shielded: bool = False,
        submits: bool = False,
    ) -> CommandResult:
        return self._run(
            Command(
                tuple(argv),
                environment,
                self._timeout_seconds,
                stdin,
                shielded or self._shielded,
                submits,
            )
        )


def _answered(argv: list[str], answer: CommandResult) -> str:
    """Return the output of a query; one that fails or prints nothing counts as no response."""
    if answer.returncode == 0 and answer.stdout.strip():
        return answer.stdout
    words = answer.stderr.strip() or f"exit code {answer.returncode} and no output"
    raise SlurmUnreachableError(f"`{argv[0]}` did not answer: {words}")


def _joined(ids: Collection[int]) -> str:
    return ",".join(str(job_id) for job_id in sorted(ids))


# -- Space out repeated calls of Slurm's controller, which serves every user of the site --------
# slurmctld answers one user's calls from a bucket of 30 that refills by 2 per second where the site
# limits them (slurm.conf(5), SlurmctldParameters=rl_enable, rl_bucket_size, rl_refill_rate), and a
# controller that comes back is asked by all jobs at once. So pauses double, and each is shortened
# at random by up to a half ("equal jitter": M. Brooker, Exponential Backoff And Jitter, AWS, 2015).


FIRST_SECONDS, LONGEST_SECONDS = 0.5, 5.0


class Backoff:
    """The pauses of one series of calls; `draw` gives numbers from 0 up to 1."""

    def __init__(
        self,
        first_seconds: float = FIRST_SECONDS,
        longest_seconds: float = LONGEST_SECONDS,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._draw = draw

    def next_seconds(self) -> float:
        """The length of the next pause."""
        full, self._seconds = self._seconds, min(2 * self._seconds, self._longest_seconds)
        return full * (1.0 - self._draw() / 2.0)
