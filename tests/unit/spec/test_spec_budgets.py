"""The causes that a spec may give a budget are those that the policy counts."""

from __future__ import annotations

from typing import get_args

from hpctrain.judge.causes import FAILURE_CAUSES, Cause
from hpctrain.spec.run import BudgetName


def test_every_cause_with_a_budget_has_a_name_in_the_spec() -> None:
    assert set(get_args(BudgetName)) == {str(cause) for cause in FAILURE_CAUSES} | {
        str(Cause.TIME_LIMIT)
    }
