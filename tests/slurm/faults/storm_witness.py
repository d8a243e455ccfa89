"""Listens to what hpctrain says while a storm rages, and keeps what was not so.

Belongs here: whom to ask, how often, and what has come of it. Does not belong here: what is true
(see `oracle`).
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from oracle import Falsehood, Statement, Truth, falsehoods, look
from targets import Field, Target, command

from hpctrain.runs.status import statuses
from hpctrain.slurm.client import SlurmClient

_PAUSE_SECONDS = 0.7
# A process of Python each: a third of a second of a core.
_COMMAND_EVERY = 8


class Witness:
    """Asks in a thread of its own until it is dismissed."""

    def __init__(self, field: Field, targets: Callable[[], Sequence[Target]]) -> None:
        self._field = field
        self._targets = targets
        self._dismissed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="witness", daemon=True)
        self._said: Counter[tuple[str, str]] = Counter()
        self._first: dict[tuple[str, str], Falsehood] = {}
        self.statements = 0
        self.failures: Counter[str] = Counter()

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._dismissed.set()
        self._thread.join()

    @property
    def false_statements(self) -> int:
        return sum(self._said.values())

    def words(self) -> list[str]:
        """Each false claim about each run once, with how often it was made."""
        return [
            f"{self._first[key]} (said {count} times)" for key, count in sorted(self._said.items())
        ]

    def _listen(self) -> None:
        sources = itertools.cycle(self._sources())
        while not self._dismissed.wait(_PAUSE_SECONDS):
            source, here = next(sources)
            try:
                self._hear(source, here)
            except Exception as error:
                self.failures[f"status died: {type(error).__name__}: {error}"] += 1

    def _sources(self) -> list[tuple[Callable[[Sequence[Target]], list[Statement]], bool]]:
        often = [(self._from_python, True)] * (_COMMAND_EVERY - 1)
        found = [*often, (self._from_command_line, True)]
        if self._field.other is not None:
            found += [*often, (self._from_elsewhere, False)]
        return found

    def _hear(self, source: Callable[[Sequence[Target]], list[Statement]], here: bool) -> None:
        targets = [target for target in self._targets() if target.directory.exists()]
        before = look(targets)
        said = {str(row["run_id"]): row for row in source(targets)}
        after = look(targets)
        for target in targets:
            row = said.get(target.run_id)
            if row is not None:
                self._compare(target, row, before[target.run_id], after[target.run_id], here)

    def _compare(
        self, target: Target, row: Statement, before: Truth, after: Truth, here: bool
    ) -> None:
        self.statements += 1
        for falsehood in falsehoods(row, before, after, list(target.deeds), here=here):
            key = (falsehood.run_id, falsehood.claim)
            self._said[key] += 1
            self._first.setdefault(key, falsehood)

    # -- whom to ask -----------------------------------------------------------------------------

    def _from_python(self, targets: Sequence[Target]) -> list[Statement]:
        slurm = SlurmClient({**os.environ, **self._field.sandbox.environment()})
        rows = statuses([target.rehearsal.run for target in targets], slurm)
        return [row.model_dump(mode="json") for row in rows]

    def _from_command_line(self, targets: Sequence[Target]) -> list[Statement]:
        return self._typed(self._field.sandbox.environment())

    def _from_elsewhere(self, targets: Sequence[Target]) -> list[Statement]:
        assert self._field.other is not None
        return self._typed(self._field.other.sandbox.environment())

    def _typed(self, client: dict[str, str]) -> list[Statement]:
        answer = command(["status", "-a", "--json", "--runs", str(self._field.stage.runs)], client)
        if answer.exit_code != 0:
            self.failures[f"`hpctrain status` ended with {answer.exit_code}: {answer.stderr}"] += 1
            return []
        rows: list[Statement] = json.loads(answer.stdout)["runs"]
        return rows
