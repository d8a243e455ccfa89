"""Move a run to the hpctrain that is installed, and let it begin anew with the software it finds.

Belongs here: what has to hold before, and the order of the steps. Does not belong here: packing the
code (`kept_code`), comparing the software of attempts (`hpctrain.train.software_agreement`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import UsageError
from hpctrain.engines.train_json import train_config_of
from hpctrain.job.kept_code import keep_checkout_changes, keep_code
from hpctrain.records.find import RunFiles
from hpctrain.records.kept_code import current_archive, parse_archive_name
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import printable_reason, user_name
from hpctrain.records.supervise_config import read_supervise_config


@dataclass(frozen=True)
class Upgrade:
    """What the next attempt of a run imports, and what it has imported before."""

    run_id: str
    before: str
    after: str

    @property
    def moved(self) -> bool:
        return self.before != self.after


def upgrade(run: RunFiles, reason: str = "") -> Upgrade:
    """Make the next attempt of a run import the installed hpctrain, and write a new software lock.

    The attempt that runs goes on with what it has begun with. The script stays as it is.

    Raises UsageError for a run that is done or keeps no code, InvalidInputError
    (NewerFormatError) where this hpctrain cannot read the run's settings, OSError.
    """
    layout = run.layout
    before = current_archive(layout)
    if before is None:
        raise UsageError(
            f"run `{run.run_id}` keeps no code of hpctrain",
            hint="its script is of an hpctrain that kept none: each of its attempts imports the "
            "installed one",
        )
    if layout.done.exists():
        raise UsageError(f"run `{run.run_id}` is done: it has no next attempt")
    # What the next attempt will read with the new code.
    read_supervise_config(layout.supervise_config)
    run.ledger.events()
    config = train_config_of(layout.train_config, layout.train_config.read_bytes())
    for path in sorted(layout.directory.glob("train-n*.json")):
        train_config_of(path, path.read_bytes())
    after = keep_code(layout)
    if config.checkout_directory is not None:
        keep_checkout_changes(layout, Path(config.checkout_directory))
    layout.software_lock.unlink(missing_ok=True)
    found = Upgrade(run.run_id, _code_words(before), _code_words(after))
    run.ledger.append(
        EventKind.UPGRADED,
        user=user_name(),
        reason=printable_reason(reason) or None,
        evidence=(f"{found.before} -> {found.after}",),
    )
    return found


def _code_words(archive: str) -> str:
    """Describe an archive of code as people read it: version and digest."""
    parsed = parse_archive_name(archive)
    return archive if parsed is None else f"hpctrain {parsed[0]} ({parsed[1]})"
