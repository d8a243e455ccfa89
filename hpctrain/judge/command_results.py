"""Parse what the site's commands on nodes have given, and judge it. Pure.

Belongs here: reading the lines of `commands.sh` on each node, and the verdict on them. Does not
belong here: the text of `commands.sh` (`hpctrain.job.render.shell_files`), running it
(`hpctrain.supervise.site_commands`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import Suspicion, Verdict

# `BEGUN NODE` is the first line of a node, `ENDED CODE COMMAND` its last one.
BEGUN, ENDED = "hpctrain-commands-begun", "hpctrain-commands-ended"
# Of timeout(1); `commands.sh` gives it for a command that had to be killed, too.
TIMED_OUT = 124
# srun(1), --label: the number of the task before each line.
_LABELLED = re.compile(r"(?:\s*(\d+): ?)?(.*)", re.DOTALL)
_ENDED = re.compile(rf"(.*){ENDED} (\d+) ?(.*)", re.DOTALL)
_MOST_NAMED, _LONGEST_LINE = 8, 300


@dataclass(frozen=True)
class CommandFailure:
    """The command that failed on a node. `code` is its exit code, None: it never ended."""

    node: str
    command: str
    code: int | None
    last_line: str = ""

    def __str__(self) -> str:
        how = "timed out" if self.code == TIMED_OUT else f"exit code {self.code}"
        how = how if self.code is not None else "did not end"
        return f"`{self.command}`: {how}" + (f": {self.last_line}" if self.last_line else "")


@dataclass
class CommandResults:
    """Collects what the nodes of a step print, line by line."""

    _nodes: dict[str, str] = field(default_factory=dict)
    _last: dict[str, str] = field(default_factory=dict)
    _ended: dict[str, CommandFailure | None] = field(default_factory=dict)

    def add_line(self, line: str) -> str | None:
        """Read one line of srun; return what is to be kept of it, with the name of its node."""
        match = _LABELLED.fullmatch(line.rstrip("\n"))
        assert match is not None, "it matches every text"
        label, text = match[1] or "", match[2]
        if label not in self._nodes and not text.startswith(BEGUN):
            label, text = "", match[0]
        if text.startswith(f"{BEGUN} "):
            self._nodes[label] = text.removeprefix(f"{BEGUN} ")
            return None
        node, ended = self._nodes.get(label, label), _ENDED.fullmatch(text)
        shown = ended[1] if ended is not None else text
        if shown.strip():
            self._last[label] = shown.strip()[:_LONGEST_LINE]
        if ended is not None:
            code, command = int(ended[2]), ended[3] or "commands.sh"
            failed = CommandFailure(node, command, code, self._last.get(label, ""))
            self._ended[label] = failed if code else None
        return f"{node or 'srun'}: {shown}" if shown else None

    def failures(self, *, interrupted: bool) -> tuple[CommandFailure, ...]:
        """List the failures; a node that has begun and not ended is one, unless `interrupted`.

        A node without any line is left to the launch, which finds out what it has.
        """
        found = [failed for failed in self._ended.values() if failed is not None]
        for label, node in () if interrupted else self._nodes.items():
            if label not in self._ended:
                found.append(CommandFailure(node, "commands.sh", None, self._last.get(label, "")))
        return tuple(found)


def job_verdict(failed: CommandFailure) -> Verdict:
    """Judge a failure of the job's own commands: a retry cannot help."""
    reason = f"software.commands.job on {failed.node}: {failed}"
    return Verdict(Cause.SITE_COMMAND, reason, suspicion=Suspicion.NONE)


def node_verdict(failed: Sequence[CommandFailure], nodes: Sequence[str]) -> Verdict | None:
    """Judge failures on `nodes`; None without any.

    What fails on all nodes is wrong in the profile. Nodes on which it fails alone are unfit.
    """
    if not failed:
        return None
    affected = tuple(dict.fromkeys(one.node for one in failed))
    lines = tuple(f"{one.node}: {one}" for one in failed)
    if set(nodes) <= set(affected):
        where = f"on all {len(nodes)} nodes" if len(nodes) > 1 else f"on {affected[0]}"
        return Verdict(Cause.SITE_COMMAND, f"software.commands.node {where}: {failed[0]}", lines)
    named = ", ".join(affected[:_MOST_NAMED])
    more = f" and {len(affected) - _MOST_NAMED} more" if len(affected) > _MOST_NAMED else ""
    reason = f"software.commands.node on {named}{more} alone: {failed[0]}"
    return Verdict(Cause.NODE_COMMAND, reason, lines, nodes=affected, suspicion=Suspicion.UNFIT)
