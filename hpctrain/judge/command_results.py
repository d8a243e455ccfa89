"""Parse what the site's commands on nodes have given, and judge it. Pure.

Belongs here: the two lines that `commands.sh` prints on each node, and the verdict on them. Does
not belong here: the text of `commands.sh` (`hpctrain.job.render.shell_files`), running it
(`hpctrain.supervise.site_commands`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import Suspicion, Verdict

# First words of the lines. `BEGUN NODE`, then `ENDED NODE CODE`, tab, command, tab, its last line.
BEGUN, ENDED = "hpctrain-commands-begun", "hpctrain-commands-ended"
# First word of a line of the log before what a command prints.
RUNS = "hpctrain-runs"
_LINE = re.compile(rf"{BEGUN} (\S+)|{ENDED} (\S+) (\d+)\t([^\t]*)\t?(.*)")
# Of timeout(1); `commands.sh` gives it for a command that had to be killed, too.
TIMED_OUT = 124
_MOST_NAMED = 8


@dataclass(frozen=True)
class CommandFailure:
    """The command that failed on a node. `code` is its exit code, None: it never ended."""

    node: str
    command: str
    code: int | None
    last_line: str = ""

    def __str__(self) -> str:
        how = "timed out" if self.code in (None, TIMED_OUT) else f"exit code {self.code}"
        return f"`{self.command}`: {how}" + (f": {self.last_line}" if self.last_line else "")


def failures(lines: Iterable[str], *, ended: bool) -> tuple[CommandFailure, ...]:
    """List the failures by the lines of all nodes; `ended`: the step itself ended, in time.

    A node that has begun and printed no end counts as timed out unless the step has ended, which
    leaves open what became of it. A node without any line is left to the launch, which finds it.
    """
    open_nodes: dict[str, None] = {}
    found: list[CommandFailure] = []
    for line in lines:
        match = _LINE.search(line)
        if match is None:
            continue
        begun, node, code, command, last = match.groups()
        if begun is not None:
            open_nodes[begun] = None
            continue
        open_nodes.pop(node, None)
        if int(code):
            shown = "" if last.startswith(RUNS) else last.strip()
            found.append(CommandFailure(node, command or "commands.sh", int(code), shown))
    if not ended:
        found += [CommandFailure(node, "commands.sh", None) for node in open_nodes]
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
