"""The node ledger: one append-only file of evidence about nodes, shared by all runs of a user.

Belongs here: the kinds of evidence with what each of them weighs, the format, appending, reading.
Does not belong here: adding the weights up (see `blame`).

Sources of the weights: a hard error of the hardware stands alone, because NVIDIA's catalogue of
XIDs (docs.nvidia.com/deploy/xid-errors) asks for a reset or a repair after 48, 64, 74, 79 and 95
and calls 94 contained; ByteRobust (arXiv 2509.16293) and Meta (arXiv 2410.21680, "lemon nodes")
find that nodes which fail once for such a reason fail again, and that a few nodes cause most of
the failures. Weights of soft evidence are chosen so that it takes several independent hints. An
exception of the program, a setting that is wrong, and memory that the program has used up are no
evidence against a node at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hpctrain.base.durable import append_line
from hpctrain.base.printable_text import printable_line

DAY_SECONDS = 86400.0
_SOFT_SECONDS, _HARD_SECONDS = DAY_SECONDS, 7 * DAY_SECONDS
NODE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$"
_LONGEST_REASON = 300
# About 20,000 entries: years of a team's failures, read in a fraction of a second.
_MOST_BYTES = 4 * 2**20


class EvidenceKind(StrEnum):
    """What was seen; see `KINDS` for what it weighs."""

    HARDWARE = "hardware"
    LOST = "lost"
    PROLOG = "prolog"
    UNHEALTHY = "unhealthy"
    DOUBTFUL = "doubtful"
    GPU_ERROR_CONTAINED = "gpu_error_contained"
    GPU_ERROR = "gpu_error"
    FIRST_FAILED = "first_failed"
    SIGNALLED = "signalled"
    ODD_STACK = "odd_stack"
    SLOW = "slow"
    SLOW_CHECKED = "slow_checked"
    SHORT_ATTEMPT = "short_attempt"
    FORGIVEN = "forgiven"


@dataclass(frozen=True)
class KindFacts:
    """Weight (100 excludes a node), half-life, and whether the same again by one run adds up.

    A state that each probe finds again (`repeats` False) is one piece of evidence per run and GPU.
    `of_machine`: only a machine can be the reason. Without it a program may be: then the same
    from one program, however often, does not suffice for a word to the administrators.
    """

    weight: float
    half_life_seconds: float
    words: str
    repeats: bool = True
    of_machine: bool = False


def _machine(weight: float, half_life_seconds: float, words: str) -> KindFacts:
    return KindFacts(weight, half_life_seconds, words, repeats=False, of_machine=True)


KINDS: dict[EvidenceKind, KindFacts] = {
    # XID 48, 64, 74, 79, 95, failed row remapping, a GPU that is missing.
    EvidenceKind.HARDWARE: _machine(100, _HARD_SECONDS, "broken hardware"),
    EvidenceKind.LOST: _machine(100, _SOFT_SECONDS, "did not answer"),
    EvidenceKind.PROLOG: _machine(100, _SOFT_SECONDS, "its prolog failed"),
    # A check failed on this node and not on the others: one without which nothing can run, such as
    # writing into the run directory, or one that a launch may survive, such as a fabric port.
    EvidenceKind.UNHEALTHY: _machine(100, _SOFT_SECONDS, "failed a check"),
    EvidenceKind.DOUBTFUL: _machine(50, _SOFT_SECONDS, "failed a check"),
    # XID 94: the GPU goes on, but two on one node within a week are no chance.
    EvidenceKind.GPU_ERROR_CONTAINED: KindFacts(
        50, _HARD_SECONDS, "contained GPU error", of_machine=True
    ),
    # XID 13, 31 and the like: the program as a rule, the node when it comes twice on one.
    EvidenceKind.GPU_ERROR: KindFacts(50, _SOFT_SECONDS, "GPU error"),
    EvidenceKind.FIRST_FAILED: KindFacts(30, _SOFT_SECONDS, "its rank failed first"),
    # KILL, TERM and the like without a line of any kernel: what people do to their own processes.
    EvidenceKind.SIGNALLED: KindFacts(
        10, _SOFT_SECONDS, "its rank was killed, and no kernel says why", repeats=False
    ),
    EvidenceKind.ODD_STACK: KindFacts(30, _SOFT_SECONDS, "odd one out in a hang"),
    EvidenceKind.SLOW: KindFacts(10, _SOFT_SECONDS, "slow rank", repeats=False),
    # A GPU or link that two measurements before training have shown to be slower than its peers.
    EvidenceKind.SLOW_CHECKED: _machine(50, _SOFT_SECONDS, "slow before training"),
    # Divided by the number of nodes of the job: a failed job of 64 nodes says nothing about one.
    EvidenceKind.SHORT_ATTEMPT: KindFacts(10, _SOFT_SECONDS, "in a short failed launch"),
    EvidenceKind.FORGIVEN: KindFacts(0, _HARD_SECONDS, "forgiven"),
}


class NodeEvidence(BaseModel):
    """One line of the node ledger. `time` is seconds since the epoch, `gpu` an UUID.

    FORGIVEN voids what was said about the node before it; `user` is who forgave. Lines of a newer
    format are left out: the file is shared by runs of several versions, and is advice only.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    schema_version: Literal[1] = 1
    time: float
    cluster: str
    node: str = Field(pattern=NODE_NAME)
    kind: EvidenceKind
    weight: float = Field(ge=0, le=1000)
    reason: str = ""
    run_id: str = ""
    job_id: int | None = None
    gpu: str | None = None
    user: str | None = None


class NodeLedger:
    """Appends to and reads one node ledger; the file is private to its user (mode 600)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, evidence: Iterable[NodeEvidence]) -> None:
        """Write evidence durably, all of it in one call, so that writers do not interleave."""
        lines = [one.model_dump_json(exclude_defaults=True) for one in evidence]
        if lines:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            append_line(self.path, "\n".join(lines), mode=0o600)

    def read(self) -> tuple[NodeEvidence, ...]:
        """Read all evidence in the order written, without torn, foreign and very old lines.

        Raises OSError when the file exists and cannot be read: then nothing is known.
        """
        try:
            with self.path.open("rb") as stream:
                size_bytes = stream.seek(0, 2)
                stream.seek(max(0, size_bytes - _MOST_BYTES))
                lines = stream.read().splitlines()
        except FileNotFoundError:
            return ()
        evidence = []
        for line in lines:
            with contextlib.suppress(ValidationError):
                evidence.append(NodeEvidence.model_validate_json(line))
        return tuple(evidence)


def forgiveness(now: float, cluster: str, node: str, user: str, reason: str) -> NodeEvidence:
    """The entry that clears a node from `now` on (seconds since the epoch), in `user`'s name."""
    return NodeEvidence(
        time=now,
        cluster=cluster,
        node=node,
        kind=EvidenceKind.FORGIVEN,
        weight=0,
        reason=short(reason),
        user=user,
    )


def short(text: str) -> str:
    """One printable line: reasons are often lines of logs, which may hold anything."""
    return printable_line(text, _LONGEST_REASON)
