"""Collect the stacks of all ranks of a silent launch and name the ranks that stand out.

Belongs here: the order (signal, wait, read, compare) and the message for the ledger. Does not
belong here: when, and what follows (`launch_watch`), the files (`stack_files`), what stacks mean
(`judge.odd_stacks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.base.errors import SlurmError
from hpctrain.judge.documents import OddRank
from hpctrain.judge.odd_stacks import odd_ranks, places
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.evidence import stack_files
from hpctrain.supervise.evidence.srun_steps import OwnSteps
from hpctrain.supervise.timeouts import run_with_timeout

# Time limits for listing the files of all ranks, ...
_FINDING_SECONDS = 15.0
# ... for the ranks to dump their stacks, ...
_DUMP_SECONDS = 5.0
# ... and for reading them: `stack_files` stops by itself a little earlier.
_READING_SECONDS = 10.0
_READING_AT_THE_END_SECONDS = 1.0
_LONGEST_EVIDENCE = 8


@dataclass(frozen=True)
class OddRanks:
    """The ranks that stand out, a message about them, and where all ranks are, most first."""

    odd: tuple[OddRank, ...]
    reason: str
    evidence: tuple[str, ...]


class StackInquiry:
    """The inquiry of one launch; may be opened again after a silence that ended by itself.

    `tasks` and `nodes` as for `LaunchWatch`; `give_up` is called while waiting for ranks.
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
        """Have all ranks dump their stacks, and wait until they have.

        QUIT is sent only if a rank has opened its file, because it would kill other processes.
        """
        run, epoch, found = self._run, self._epoch, list[dict[int, int]]()
        run_with_timeout(
            lambda: found.append(stack_files.sizes(run, epoch)),
            _FINDING_SECONDS,
            give_up=self._give_up,
        )
        before = self._before = found[0] if found else {}
        if not before:
            return
        OwnSteps(self._context).signal("QUIT")
        run_with_timeout(
            lambda: stack_files.wait_for_dumps(run, epoch, before, _DUMP_SECONDS),
            _DUMP_SECONDS,
            give_up=self._give_up,
        )

    def close(self, phase: str) -> OddRanks | None:
        """Read the dumps; None if no rank was signalled, or nothing could be read.

        Best called after the ranks' end, because an NFS client may keep what a process writes until
        it ends. In the phase `leaving`, a rank without a file has exited already; otherwise it has
        never started.
        """
        run, epoch, before, found = (
            self._run,
            self._epoch,
            self._before,
            list[stack_files.StackDumps](),
        )
        final = self._context.signals.final
        run_with_timeout(
            lambda: found.append(stack_files.read_dumps(run, epoch, before)),
            _READING_AT_THE_END_SECONDS if final else _READING_SECONDS,
        )
        if not before or not found or not found[0].texts:
            return None
        all_count = found[0].complete and phase != "leaving"
        texts = found[0].texts
        nodes = {**self._planned_nodes(), **found[0].nodes}
        packages = found[0].packages
        odd = odd_ranks(texts, nodes, self._tasks if all_count else 0, packages)
        dumped = sum(bool(text) for text in texts.values())
        reason = f"{dumped} of {self._tasks or len(texts)} ranks gave their stacks"
        names = [f"rank {rank.rank} on {rank.node or 'an unknown node'}" for rank in odd]
        if len(names) > _LONGEST_EVIDENCE:
            names[_LONGEST_EVIDENCE:] = [f"{len(names) - _LONGEST_EVIDENCE} more"]
        reason += f"; unlike the others: {', '.join(names)}" if names else ""
        return OddRanks(odd, reason, places(texts, packages)[:_LONGEST_EVIDENCE])

    def _planned_nodes(self) -> dict[int, str]:
        """The node of each rank as `--distribution=block` places it; empty if not known."""
        try:
            nodes = self._nodes or self._context.slurm.hostnames(self._context.attempt.nodes)
        except SlurmError:
            return {}
        per_node, rest = divmod(self._tasks, len(nodes)) if nodes else (0, 0)
        return {} if rest else {rank: nodes[rank // per_node] for rank in range(self._tasks)}
