"""A forecast in words: what is told, in 80 columns, and what is left out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpctrain.engines.verification import Verification, VerifiedStage
from hpctrain.job.plan_text import decision_lines, forecast_lines, spot_lines
from hpctrain.job.verify import verification_lines
from hpctrain.plan.forecast.documents import Budget, Forecast, RunFacts, SpotComparison
from hpctrain.plan.forecast.options import cheapest_plan, compare_spot
from hpctrain.plan.forecast.predict import forecast
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec

PROFILES = ["a100x64", "a100x1", "h100x16", "gb200nvl72", "sandbox"]


def spec(**changes: Any) -> RunSpec:
    document: dict[str, Any] = dict(
        name="specimen",
        model=dict(layers=4, hidden=128, heads=4, vocab=512, seq=64),
        batch={"global": 8, "micro": 1},
        budget={"steps": 10},
        optimizer={"lr": 1e-3},
        checkpoint={"every": "20min"},
        resources={"gpus": 4},
    )
    return RunSpec.model_validate({**document, **changes})


def facts(**changes: Any) -> RunFacts:
    given: dict[str, Any] = dict(
        step_seconds=40.0,
        gpus=8,
        nodes=1,
        parameters=6_738_415_616,
        tokens_per_step=524_288,
        train_steps=4320,
        walltime="1d",
    )
    return RunFacts.model_validate({**given, **changes})


def profile(name: str = "a100x64") -> ClusterProfile:
    return load_profile(find_profile(name)).document


def of_7b(name: str = "a100x64", **changes: Any) -> Forecast:
    return forecast(spec(), profile(name), facts(**changes))


def compared(name: str = "a100x1") -> SpotComparison:
    found = compare_spot(spec(), profile(name), facts())
    assert found is not None
    return found


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nodes": 2048, "gpus": 16384, "parameters": 10**10, "train_steps": 900_000},
        {"queue_seconds": 86400.0, "train_steps": 2_000_000},
    ],
    ids=["7b", "frontier", "years"],
)
def test_lines_fit_and_units_stay_with_their_numbers(name: str, changes: dict[str, Any]) -> None:
    lines = forecast_lines(of_7b(name, **changes))
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.search(r"\d$", line) and "steps" not in line]
    assert not re.search(r"e[+-]\d|nan|inf\b|\N{NO-BREAK SPACE}", "\n".join(lines))


def test_the_sentence_about_time_adds_up() -> None:
    """Waiting is no part of the allocated time, of which the percentage is."""
    found = of_7b("a100x1", queue_seconds=86400.0)
    text = " ".join(" ".join(forecast_lines(found)).split())
    figures = re.search(
        r"Time ([\d.]+) d on average = ([\d.]+) d of training .* at ([\d.]+)% effective time "
        r"\+ ([\d.]+) d of waiting",
        text,
    )
    assert figures is not None, text
    total, training, percent, waiting = map(float, figures.groups())
    assert abs(training / (percent / 100) + waiting - total) < 0.2


def test_tells_the_numbers_of_the_document() -> None:
    found = of_7b()
    text = " ".join(" ".join(forecast_lines(found)).split())
    assert f"at {found.ettr:.1%} effective time" in text
    assert "of waiting" not in text
    assert "(4,320 steps x 40 s)" in text and f"{found.slices} time slices" in text
    assert found.cost is not None
    assert f"{found.cost.amount:,.0f} USD = {found.gpu_hours:,.0f} GPU-hours" in text
    assert f"every {found.interval.steps} steps" in text
    assert f"best {found.interval.best_steps} " in text
    assert "0.013 expected, one per 154 d on 1 node" in text and "waiting" not in text


def test_no_prices_no_costs_and_assumptions_are_marked() -> None:
    text = "\n".join(forecast_lines(of_7b("sandbox")))
    assert "the profile has no prices" in text
    assert "Assumed   node failures: 6.5 per 1000 node-days" in text
    assert "Assumed   node failures" not in "\n".join(forecast_lines(of_7b()))


def test_preemptions_are_told_only_where_they_happen() -> None:
    assert "preemptions" in "\n".join(forecast_lines(of_7b("a100x1")))
    assert "preemptions" not in "\n".join(forecast_lines(of_7b()))


def test_spot_against_on_demand() -> None:
    found = compared()
    lines = spot_lines(found)
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("on demand") and lines[2].startswith("spot")
    assert lines[3].startswith(f"Take      {found.recommended}: it saves")
    assert "spot is cheaper while preemptions are rarer than one per" in " ".join(lines)


@pytest.mark.parametrize(
    ("limit", "said"),
    [(0.0, "however often"), (None, "dearer even without"), (7200.0, "one per 2 h")],
)
def test_break_even_in_words(limit: float | None, said: str) -> None:
    changed = compared().model_copy(update={"break_even_preemption_seconds": limit})
    assert said in " ".join(" ".join(spot_lines(changed)).split())


def test_spot_without_progress_has_no_row() -> None:
    lines = spot_lines(compared().model_copy(update={"spot": None, "recommended": "on demand"}))
    assert not [line for line in lines if line.startswith("spot")]


def test_decision_is_wrapped_under_one_label() -> None:
    decision = cheapest_plan([of_7b(), of_7b(gpus=16, nodes=2)], Budget(money=5, currency="USD"))
    lines = decision_lines(decision)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("Budget    no plan of 2 options meets 5 USD")
    assert all(line.startswith(" " * 10) for line in lines[1:])


# -- The lines of `plan --verify` ---------------------------------------------------------------


def stage(index: int, planned: int, built: int, kept: int | None = None) -> VerifiedStage:
    return VerifiedStage(
        index=index,
        rank=64 * index,
        planned_parameters=planned,
        built_parameters=built,
        equal=planned == built,
        planned_kept_bytes=None if kept is None else kept + kept // 100,
        measured_kept_bytes=kept,
    )


def lines(*stages: VerifiedStage, remarks: tuple[str, ...] = ()) -> list[str]:
    shown = verification_lines(
        Verification(
            run_name="tiny",
            megatron_core_version="0.16.1",
            torch_version="2",
            equal=all(one.equal for one in stages),
            stages=stages,
            remarks=remarks,
        )
    )
    assert all(len(line) <= 80 for line in shown), shown
    return shown


def test_equal() -> None:
    assert lines(stage(0, 2822731776, 2822731776, 2**30), stage(1, 5, 5, 2**30)) == [
        "Verify    one rank of each stage, built by megatron-core 0.16.1 on no GPU",
        "STAGE  RANK        PLANNED          BUILT            KEPT  MEASURED",
        "    0     0  2,822,731,776  2,822,731,776  equal  1.0 GiB   1.0 GiB",
        "    1    64              5              5  equal  1.0 GiB   1.0 GiB",
        "parameters are equal on all 2 stages; activations that one microbatch keeps are",
        "planned within 1.0% of what was measured",
    ]


def test_different_names_the_worst_stage() -> None:
    shown = " ".join(lines(stage(0, 10, 10), stage(1, 1000, 1001), stage(2, 900, 1000)))
    assert "parameters differ on 2 of 3 stages, most on stage 2: planned -100" in shown
    assert shown.count("DIFFERENT") == 2


def test_nothing_measured_is_a_dash_and_no_claim() -> None:
    shown = lines(stage(0, 10, 10), remarks=("activations are not measured: " + "why " * 30,))
    assert shown[2].endswith("equal     -         -")
    assert "planned within" not in " ".join(shown)
    assert shown[3] == "parameters are equal on the one stage"
    assert shown[4].startswith("- activations are not measured: why")
    assert shown[5].startswith("  why")


def test_the_largest_plans_still_fit() -> None:
    shown = lines(*(stage(n, 10**11 + n, 10**11, 10**14) for n in range(128)))
    assert max(len(line) for line in shown) <= 80
    assert sum("DIFFERENT" in line for line in shown) >= 127
