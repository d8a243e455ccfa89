"""Keep the result of megatron-core's check of this rank's gradients, instead of raising it.

Belongs here: detecting a bad gradient. Does not belong here: how the ranks agree on it (see
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


class GradientCheck(RerunStateMachine):
    """megatron-core's check of local gradients; `rejection` is its first error message.

    The check runs before gradients are summed over data-parallel ranks, so it identifies the rank.
    An exception there would leave the other ranks waiting in that sum. Without one the step is
    completed and all ranks end together (see `Control.propose`).
    """

    def __init__(self) -> None:
        super().__init__(mode=RerunMode.DISABLED)
        self.rejection: str | None = None

    def validate_result(self, *args: Any, **keywords: Any) -> None:
        try:
            super().validate_result(*args, **keywords)
        except RuntimeError as error:
            self.rejection = self.rejection or keywords.get("message", str(error))


def install_gradient_check() -> GradientCheck:
    """Replace megatron-core's state machine by a `GradientCheck`, and silence its log."""
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    gradient_check = GradientCheck()
    destroy_rerun_state_machine()
    _set_rerun_state_machine(gradient_check)
    return gradient_check
