"""Ask a Slurm about its cluster in one pass of few queries, each with a time limit.

Eight at most, beside those that are repeated: `scontrol show` config, node, partition, topology,
licenses and reservation, each one RPC to slurmctld, and two of sacctmgr to slurmdbd. A query
without an answer is repeated after a pause that doubles; optional ones may stay unanswered.
Belongs here: which commands are run, and counting them. Does not belong here: their texts
(`cluster_parse`), queries about jobs (`client`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from typing import TypeVar

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError, SlurmRefusedError, SlurmUnreachableError
from hpctrain.slurm import cluster_parse, parse
from hpctrain.slurm.answers import accepted, parsed
from hpctrain.slurm.capabilities import capabilities
from hpctrain.slurm.cluster_records import Accounting, ClusterFacts, Leaf, TopologyKind
from hpctrain.slurm.environment import for_queries
from hpctrain.slurm.process import Command, Runner, run_command
from hpctrain.slurm.records import SlurmConfig

ATTEMPTS = 3
FIRST_PAUSE_SECONDS = 1.0
_Parsed = TypeVar("_Parsed")


class ClusterQueries:
    """One pass over a cluster. `count` is the number of commands that were run.

    `run` is a seam for tests.
    """

    def __init__(
        self,
        user: str,
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float = 30.0,
        *,
        run: Runner = run_command,
    ) -> None:
        self.count = 0
        self._user = user
        self._environment = for_queries(os.environ if environment is None else environment)
        self._timeout_seconds = timeout_seconds
        self._run = run
        self._unanswered: dict[str, str] = {}

    def facts(self) -> ClusterFacts:
        """Read everything. Raises SlurmError without configuration, nodes or partitions."""
        began = clock.now()
        text = self._ask("scontrol", "show", "config")
        config_seconds, told = clock.now() - began, cluster_parse.controller_time(text)
        config = SlurmConfig(parse.config_values(text))
        kind = cluster_parse.topology_kind(config)
        nodes = self._shown("node", cluster_parse.nodes)
        partitions = self._shown("partition", lambda text: cluster_parse.partitions(text, config))
        topology: tuple[TopologyKind, tuple[Leaf, ...]] | None = (kind, ())
        if kind != "none" or capabilities(config).hides_topology:
            topology = self._shown_if_answered("topology", cluster_parse.topology)
        return ClusterFacts(
            config=config,
            nodes=nodes,
            partitions=partitions,
            topology=kind if topology is None or not topology[1] else topology[0],
            leaves=topology[1] if topology is not None else (),
            licenses=self._shown_if_answered("licenses", cluster_parse.licenses) or (),
            reservations=self._shown_if_answered("reservation", cluster_parse.reservations) or (),
            accounting=self._accounting(config) if config.accounting_enabled else None,
            unanswered=dict(self._unanswered),
            queries=self.count,
            config_seconds=config_seconds,
            # scontrol prints whole seconds, so the middle of that second
            clock_ahead_seconds=None if told is None else told + 0.5 - began - config_seconds / 2,
        )

    def _accounting(self, config: SlurmConfig) -> Accounting | None:
        where = [f"name={self._user}", f"cluster={config.cluster_name}"]
        rights = f"format={','.join(cluster_parse.ASSOCIATION_FIELDS)}"
        try:
            associations = self._ask(
                *("sacctmgr", "-nP", "show", "user", "where", *where, "withassoc", rights)
            )
            kinds = f"format={','.join(cluster_parse.QOS_FIELDS)}"
            qos = self._ask("sacctmgr", "-nP", "show", "qos", kinds)
            return parsed("sacctmgr", lambda: cluster_parse.accounting(associations, qos))
        except SlurmError as error:
            self._unanswered["sacctmgr"] = str(error)
            return None

    def _shown(self, what: str, read: Callable[[str], _Parsed]) -> _Parsed:
        # -a: hidden partitions, too, whose jobs may take nodes away
        text = self._ask("scontrol", "-a", "-o", "show", what)
        return parsed(f"scontrol show {what}", lambda: read(text))

    def _shown_if_answered(self, what: str, read: Callable[[str], _Parsed]) -> _Parsed | None:
        try:
            return self._shown(what, read)
        except SlurmError as error:
            self._unanswered[f"scontrol show {what}"] = str(error)
            return None

    def _ask(self, *argv: str) -> str:
        """Run a command. Raises SlurmUnreachableError after ATTEMPTS without an answer, and
        SlurmRefusedError at once.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.count += 1
                answer = self._run(Command(argv, self._environment, self._timeout_seconds))
                return accepted(argv, answer).stdout
            except SlurmUnreachableError:
                if attempt == ATTEMPTS:
                    raise
            # jitter: many users begin to ask again when a controller comes back
            clock.sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
        raise AssertionError("the last attempt returns or raises")


def step_output(
    job_id: str,
    program: str,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 300.0,
    run: Runner = run_command,
) -> str:
    """Run a Python program, given as text, on one node of a running job; return its stdout.

    Raises SlurmRefusedError if srun fails, SlurmUnreachableError if it takes too long.
    """
    argv = ("srun", f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", "python3", "-")
    shell = for_queries(os.environ if environment is None else environment)
    answer = run(Command(argv, shell, timeout_seconds, program))
    if answer.returncode != 0:
        words = answer.stderr.strip() or f"`srun` ended with exit code {answer.returncode}"
        raise SlurmRefusedError(words)
    return answer.stdout
