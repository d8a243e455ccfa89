"""megatron-core's check of this rank's gradients, as something that is remembered.

Belongs here: noticing. Does not belong here: how the ranks agree (see
`hpctrain.train.step_agreement`).
"""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.rerun_state_machine import (
    RerunMode,
    RerunStateMachine,
    _set_rerun_state_machine,
    destroy_rerun_state_machine,
)


class GradientWitness(RerunStateMachine):
    """megatron-core's check of local gradients, remembered instead of raised.

    The check runs before gradients are summed over data-parallel ranks, so it knows whose they
    are. An exception there would leave the other ranks waiting in that sum; remembered, the step
    is finished and all ranks end together (see `Control.propose`).
    """

    def __init__(self) -> None:
        super().__init__(mode=RerunMode.DISABLED)
        self.rejection: str | None = None

    def validate_result(self, *args: Any, **keywords: Any) -> None:
        try:
            super().validate_result(*args, **keywords)
        except RuntimeError as error:
            self.rejection = self.rejection or keywords.get("message", str(error))


def install_witness() -> GradientWitness:
    """Put a witness in the place of megatron-core's state machine, and quiet that one's log."""
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    witness = GradientWitness()
    destroy_rerun_state_machine()
    _set_rerun_state_machine(witness)
    return witness
