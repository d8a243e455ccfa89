"""What a stand-in is told beside its command line: its times, and how it is to fail.

A test writes the file that the variable STAND_IN_ENGINE names; without it the defaults hold. Does
not belong here: the words of the command line, which are vLLM's (`__main__`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

VARIABLE = "STAND_IN_ENGINE"

Failure = Literal["crash", "exit", "hang", "out_of_memory", "no_weights", "gpu_fault"]


class StandInSettings(BaseModel):
    """Times in seconds, and one failure.

    A request takes `first_token_seconds`, `prompt_token_seconds` for each token of its prompt, and
    `token_seconds` for each further token of its answer, whatever else runs: batching costs
    nothing here. `fails` is what happens after `after_requests` requests have begun (0: while the
    weights are loaded). It happens on `nodes` only (empty: on all), and only as often as a file of
    `tickets` can be removed (empty: always), so that a test can let one start fail and the next one
    succeed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    load_seconds: float = 0.0
    first_token_seconds: float = 0.01
    prompt_token_seconds: float = 0.0
    token_seconds: float = 0.002
    fails: Failure | None = None
    after_requests: int = 0
    nodes: tuple[str, ...] = ()
    tickets: tuple[str, ...] = ()

    def failure_here(self, node: str) -> Failure | None:
        """Return the failure of this process, taking a ticket for it; None if it is to work."""
        if self.fails is None or (self.nodes and node not in self.nodes):
            return None
        if not self.tickets:
            return self.fails
        return self.fails if any(map(_taken, self.tickets)) else None


def _taken(ticket: str) -> bool:
    """Remove a file; False if another process was first."""
    try:
        Path(ticket).unlink()
    except FileNotFoundError:
        return False
    return True


def read_settings(environment: Mapping[str, str]) -> StandInSettings:
    """Read the settings that a test has written. Raises OSError and ValidationError."""
    path = environment.get(VARIABLE)
    return (
        StandInSettings.model_validate_json(Path(path).read_bytes()) if path else StandInSettings()
    )
