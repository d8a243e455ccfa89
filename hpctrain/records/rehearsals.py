"""Remember what `hpctrain try` has proved of a spec, beside the runs that follow.

One line per event in `.rehearsals.jsonl` of the directory of runs, private and append-only. The
rehearsal's own runs lie in `rehearsals/`, a directory of runs of its own, so that no list of runs
has them. Belongs here: files, lines, what a level is. Does not belong here: rehearsing
(`hpctrain.trials.rehearsal`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hpctrain.base.durable import append_line
from hpctrain.records.find import users_file
from hpctrain.records.run_records import Record, RecordPart, parse_record

Verdict = Literal["yes", "no", "not tried"]
# What a trainer may promise, level by level, as docs/rehearsal.md has them.
LEVELS = ("starts, and starts again", "resumes", "saves when asked to leave", "the same losses")


class Proof(RecordPart):
    """One question, its answer, and what was measured. `level`: the one that it belongs to.

    `promised` is False for what the run does not promise, so that its absence is no failure.
    """

    topic: str
    level: int
    verdict: Verdict
    fact: str
    promised: bool = True

    @property
    def is_missing(self) -> bool:
        """Whether a promise was not seen kept."""
        return self.promised and self.verdict != "yes"


class RehearsalRecord(Record):
    """One rehearsal, or (`event` told) that somebody was told that there was none.

    `spec_digest` and `profile_digest` are those that `submit` has of the same files. `run_ids` are
    directories below `rehearsals/`. `seconds` is what all of it took, the queue included.
    """

    event: Literal["rehearsed", "told"]
    spec_name: str
    spec_digest: str
    profile: str
    profile_digest: str
    event_time: float
    run_ids: tuple[str, ...] = ()
    nodes: str | None = None
    seconds: float | None = None
    proofs: tuple[Proof, ...] = ()

    @property
    def missing(self) -> tuple[Proof, ...]:
        """The promises that were not seen kept."""
        return tuple(one for one in self.proofs if one.is_missing)

    @property
    def promised_level(self) -> int:
        """The highest level of which something is promised."""
        return max((one.level for one in self.proofs if one.promised), default=0)

    @property
    def proved_level(self) -> int | None:
        """The highest level up to which every promise was seen kept; None if not even the first."""
        broken = min((one.level for one in self.missing), default=self.promised_level + 1)
        return broken - 1 if broken else None

    @property
    def level_words(self) -> str:
        """Format the level that was proved, and what is missing of the promised one."""
        proved, promised = self.proved_level, self.promised_level
        words = "no level" if proved is None else f"level {proved} ({LEVELS[proved]})"
        failed = [one.topic for one in self.missing if one.verdict == "no"]
        missing = ", ".join(failed or [one.topic for one in self.missing])
        label = "failed" if failed else "not tried"
        return f"{words} of {promised}" + (f"; {label}: {missing}" if missing else "")


def rehearsals_directory(runs: Path) -> Path:
    """Return the directory of the runs of rehearsals."""
    return runs / "rehearsals"


def read_rehearsals(runs: Path) -> tuple[RehearsalRecord, ...]:
    """Read all lines, oldest first; none where there is no file, and without a torn line.

    Raises NewerFormatError.
    """
    path = users_file(runs, ".rehearsals")
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return ()
    found = (parse_record(path, line, RehearsalRecord) for line in lines)
    return tuple(one for one in found if one is not None)


def record_rehearsal(runs: Path, record: RehearsalRecord) -> None:
    """Append one event, and make the directory of runs if it is not there. Raises OSError."""
    runs.mkdir(parents=True, exist_ok=True)
    append_line(users_file(runs, ".rehearsals"), record.model_dump_json(), mode=0o600)
