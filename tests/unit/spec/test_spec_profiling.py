"""`profile:` says steps, ranks and a tool; what would never happen is refused where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from wrong_specs import VALID, problems_of, shown

from hpctrain.spec.loader import load_run_spec
from hpctrain.spec.profiling import ProfileSpec

WRONG = [
    ("{steps: []}", "8:18: `profile.steps`: must not be empty"),
    ("{steps: [0]}", "8:19: `profile.steps[0]`: must be at least 1, got `0`"),
    ("{steps: [3, 5], tool: nsys}",
     "8:1: `profile`: nsys takes one range of steps, such as `[10, 11, 12]`"),
    ("{steps: [3], ranks: [0, 4]}",
     "8:30: `profile.ranks`: there is no rank 4 among 4 GPUs | ranks are 0 to 3"),
    ("{steps: [50, 61]}",
     "8:18: `profile.steps`: step 61 is after the last one, 60 | choose earlier steps"),
    ("{steps: [3], flops: true}",
     "8:23: `profile.flops`: unknown key | known here: ranks, steps, tool"),
    ("{steps: [3]}\nengine: {name: megatron-lm, checkout: /m}",
     "8:10: `profile`: an external Megatron-LM is not looked into from outside"
     " | remove it, and give Megatron-LM's own `engine.arguments`: {profile: true, "
     "profile-step-start: 3, profile-step-end: 4, use-pytorch-profiler: true}"),
]  # fmt: skip


@pytest.mark.parametrize(("profile", "expected"), WRONG)
def test_what_is_wrong_has_a_place(tmp_path: Path, profile: str, expected: str) -> None:
    problems = problems_of(tmp_path, f"{VALID}profile: {profile}\n")
    assert shown(tmp_path, problems) == [expected]


FINE: list[tuple[str, tuple[tuple[int, int], ...]]] = [
    ("{steps: [10, 12]}", ((10, 10), (12, 12))),
    ("{steps: [12, 11, 5]}", ((5, 5), (11, 12))),
    ("{steps: [10, 11, 12], tool: nsys, ranks: [0, 3]}", ((10, 12),)),
]


@pytest.mark.parametrize(("profile", "windows"), FINE)
def test_ranges_without_gaps_are_one_trace(
    tmp_path: Path, profile: str, windows: tuple[tuple[int, int], ...]
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(f"{VALID}profile: {profile}\n")
    told: Any = load_run_spec(file).document.profile
    assert told.windows == windows


def test_the_last_step_of_a_token_budget_is_known(tmp_path: Path) -> None:
    text = VALID.replace("{steps: 60}", "{tokens: 10240}") + "profile: {steps: [11]}\n"
    (problem,) = problems_of(tmp_path, text)
    assert "step 11 is after the last one, 10" in problem.message


def test_the_number_of_traces_is_bounded() -> None:
    assert len(ProfileSpec(steps=tuple(range(1, 21))).chosen) == 20
    with pytest.raises(ValueError, match="at most 20 items"):
        ProfileSpec(steps=tuple(range(1, 22)))
