"""Skip samples that made a run diverge, as decided by a person or the supervisor.

Belongs here: which sample comes next. Does not belong here: reading samples (see `data`), deciding
what to skip. The list is part of the run: the same list gives the same samples after every restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.formats import refuse_newer
from hpctrain.records.run_records import SkipList, SkippedData


@dataclass(frozen=True)
class Skips:
    """The skipped ranges, in the order of the samples; they may overlap."""

    skips: tuple[SkippedData, ...] = ()

    def next_sample(self, consumed_samples: int) -> int:
        """Return the first sample of the batch that follows `consumed_samples` samples.

        A batch that would begin inside a skipped range begins at its end.
        """
        for skip in self.skips:
            if skip.from_samples <= consumed_samples < skip.to_samples:
                consumed_samples = skip.to_samples
        return consumed_samples

    def pinned(self, consumed_of_steps: dict[int, int]) -> set[int]:
        """Return for each range the last step before it: the last one before an anomaly."""
        before = [
            [step for step, consumed in consumed_of_steps.items() if consumed <= skip.from_samples]
            for skip in self.skips
        ]
        return {max(steps) for steps in before if steps}


def read_skips(path: Path) -> str | None:
    """Read the text of the run's list; None when there is none.

    Raises InvalidInputError when it cannot be read: data that should be skipped must never be
    trained on silently.
    """
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        problem = Problem(f"cannot be read: {error}", str(path), node_dependent=True)
        raise InvalidInputError([problem]) from error


def parse_skips(text: str | None, path: Path) -> Skips:
    """Parse the run's list. Raises InvalidInputError when it is not a list of valid ranges.

    It raises NewerFormatError, which is one, when a newer hpctrain has written the list.
    """
    if text is None:
        return Skips()
    try:
        listed = SkipList.model_validate_json(text).skips
    except ValidationError as error:
        refuse_newer(path, text, SkipList)
        reason = f"is no list of skipped data: {error.errors()[0]['msg']}"
        raise InvalidInputError([Problem(reason, str(path))]) from error
    problems = [
        Problem(f"skips from sample {skip.from_samples} to {skip.to_samples}", str(path))
        for skip in listed
        if not 0 <= skip.from_samples < skip.to_samples
    ]
    if problems:
        raise InvalidInputError(problems)
    return Skips(tuple(sorted(listed, key=lambda skip: skip.from_samples)))
