"""Asking all ranks of a silent launch where they are, and naming those who are elsewhere.

Belongs here: the order (ask, wait, read, compare) and its words for the ledger. Does not belong
here: when to ask and what follows (`launch_watch`), the files (`stack_files`), what stacks mean
(`odd_stacks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.errors import SlurmError
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.evidence import stack_files
from hpctrain.supervise.evidence.run_dir_snapshot import in_time
from hpctrain.supervise.evidence.srun_steps import OwnSteps
from hpctrain.supervise.judge.documents import OddRank
from hpctrain.supervise.judge.odd_stacks import odd_ranks, places

# What finding the files of all ranks may take, ...
_FINDING_SECONDS = 15.0
# ... the ranks to write down their stacks, ...
_DUMP_SECONDS = 5.0
# ... and reading them: `dumps` stops by itself a little earlier.
_READING_SECONDS = 10.0
_READING_AT_THE_END_SECONDS = 1.0
_LONGEST_EVIDENCE = 8


@dataclass(frozen=True)
class Findings:
    """Who is odd, in one sentence, and where all ranks are, most of them first."""

    odd: tuple[OddRank, ...]
    reason: str
    evidence: tuple[str, ...]


class Inquiry:
    """One launch; may be opened again after a silence that ended by itself.

    `tasks` and `nodes` as for `LaunchWatch`; `give_up` is asked while ranks are waited for.
    """

    def __init__(
        self,
        context: AttemptContext,
        epoch: int,
        tasks: int,
        nodes: Sequence[str],
        give_up: Callable[[], bool],
    ) -> None:
        self._context = context
        self._run = context.run_layout
        self._epoch = epoch
        self._tasks = tasks
        self._nodes = tuple(nodes)
        self._give_up = give_up
        self._before: Mapping[int, int] = {}

    def open(self) -> None:
        """Have all ranks write, and wait until they have.

        QUIT is sent only if a rank has opened its file: others might end of it.
        """
        run, epoch, found = self._run, self._epoch, list[dict[int, int]]()
        in_time(
            lambda: found.append(stack_files.sizes(run, epoch)),
            _FINDING_SECONDS,
            give_up=self._give_up,
        )
        before = self._before = found[0] if found else {}
        if not before:
            return
        OwnSteps(self._context).signal("QUIT")
        in_time(
            lambda: stack_files.wait_for_dumps(run, epoch, before, _DUMP_SECONDS),
            _DUMP_SECONDS,
            give_up=self._give_up,
        )

    def close(self, phase: str) -> Findings | None:
        """Read what they have written, best after their end: an NFS client may keep what a process
        writes until it ends. None if nobody was asked, or nothing could be read.

        While all leave, a rank without a file has left already; else it has never come up.
        """
        run, epoch, before, found = self._run, self._epoch, self._before, list[stack_files.Dumps]()
        final = self._context.signals.final
        in_time(
            lambda: found.append(stack_files.read_dumps(run, epoch, before)),
            _READING_AT_THE_END_SECONDS if final else _READING_SECONDS,
        )
        if not before or not found or not found[0].texts:
            return None
        all_count = found[0].complete and phase != "leaving"
        nodes = {**self._planned_nodes(), **found[0].nodes}
        dumps = found[0]
        odd = odd_ranks(dumps.texts, nodes, self._tasks if all_count else 0, dumps.packages)
        return self._findings(odd, dumps)

    def _planned_nodes(self) -> dict[int, str]:
        """Node by rank as `--distribution=block` places them; nothing if that is not known."""
        try:
            nodes = self._nodes or self._context.slurm.hostnames(self._context.attempt.nodes)
        except SlurmError:
            return {}
        per_node, rest = divmod(self._tasks, len(nodes)) if nodes else (0, 0)
        return {} if rest else {rank: nodes[rank // per_node] for rank in range(self._tasks)}

    def _findings(self, odd: tuple[OddRank, ...], dumps: stack_files.Dumps) -> Findings:
        gave = sum(bool(text) for text in dumps.texts.values())
        reason = f"{gave} of {self._tasks or len(dumps.texts)} ranks gave their stacks"
        words = [f"rank {rank.rank} on {rank.node or 'an unknown node'}" for rank in odd]
        if len(words) > _LONGEST_EVIDENCE:
            words[_LONGEST_EVIDENCE:] = [f"{len(words) - _LONGEST_EVIDENCE} more"]
        reason += f"; unlike the others: {', '.join(words)}" if words else ""
        return Findings(odd, reason, places(dumps.texts, dumps.packages)[:_LONGEST_EVIDENCE])
