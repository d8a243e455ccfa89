"""Multipliers in a case, their effects, and the intervals of plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpctrain.plan.cost.case import Case, stack
from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.cost.memory import peak_bytes
from hpctrain.plan.cost.multipliers import (
    AXES,
    CLASSES,
    MEMORY,
    TIME,
    classes_of,
    memory_sensitivities,
    places_of,
    scaled,
    sensitivities,
)
from hpctrain.plan.cost.step import step_seconds
from hpctrain.plan.planner import decide
from hpctrain.plan.request import PlanRequest
from hpctrain.plan.search.layouts import search
from hpctrain.plan.search.space import freedom_of
from hpctrain.plan.uncertainty.intervals import (
    TIME_NAMES,
    belief_of,
    interval_of,
    memory_spread,
    prior_of,
    probability_faster,
    time_effects,
    with_rates,
)
from hpctrain.spec.loader import load_run_spec, load_uncertainty
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.uncertainty import Learned, LearnedRest, OwnRun, SiteLearning
from tests.unit.plan.uncertainty.uncertain_cases import EXAMPLES, sure_knowledge, the_case


def total(case: Case) -> float:
    return float(np.asarray(step_seconds(case).total).reshape(-1)[0])


def test_every_multiplier_moves_time_or_memory_as_its_effect_says() -> None:
    case = the_case("gpt175b", "a100x64")
    effects = dict(zip(TIME, sensitivities(case)[0], strict=True))
    for name, effect in effects.items():
        more = total(scaled(case, {name: 0.01}))
        assert np.log(more / total(case)) == pytest.approx(0.01 * effect, abs=2e-4), name
    # what is not proportional: starts of messages; and what is counted twice: nothing
    assert sum(effects[name] for name in TIME[:-1]) == pytest.approx(1.0, abs=0.06)


def test_no_logarithm_changes_nothing() -> None:
    case = the_case("gpt175b", "a100x64")
    assert scaled(case, dict.fromkeys((*TIME, *MEMORY), 0.0)) == case


def test_the_experts_multiplier_moves_only_models_with_experts() -> None:
    dense, sparse = the_case("gpt175b", "a100x64"), the_case("moe/full", "h100x16")
    at = TIME.index("experts")
    assert sensitivities(dense)[0, at] == 0
    assert sensitivities(sparse)[0, at] > 0.005
    of = CLASSES.index("expert model")
    assert classes_of(dense)[0, of] == 0
    assert classes_of(sparse)[0, of] == 1


def test_memory_moves_with_what_is_kept_and_what_is_outside() -> None:
    case = the_case("gpt175b", "a100x64")
    kept, allocator, outside = memory_sensitivities(case)[0]
    assert kept == allocator, "one factor in a case: what was allocated tells them apart"
    gib3 = float(np.asarray(case.software.context_bytes))
    assert outside == pytest.approx(gib3 / float(np.asarray(peak_bytes(case))[0]), rel=1e-3)
    software = replace(case.software, communicator_bytes=gib3)
    more = replace(case, software=software)
    # NCCL's buffers of each of three groups or more move with it too
    outside = memory_sensitivities(more)[0][-1]
    assert outside > 3 * gib3 / float(np.asarray(peak_bytes(more))[0])
    exact = np.log(peak_bytes(scaled(more, {"outside": 0.01})) / peak_bytes(more)) / 0.01
    assert outside == pytest.approx(float(exact[0]), rel=0.01)


def test_intervals_are_wider_where_less_is_known() -> None:
    uncertainty = load_uncertainty()
    case = the_case("gpt175b", "a100x64")
    low, high = interval_of(case, uncertainty)
    assert low[0] < total(case) < high[0]
    strange = interval_of(case, uncertainty, known_gpu=False)
    assert strange[0][0] < low[0]
    assert high[0] < strange[1][0]
    memory = memory_spread(case, prior_of(uncertainty.memory, MEMORY), uncertainty.memory)
    assert memory.low[0] < float(np.asarray(peak_bytes(case))[0]) < memory.high[0]


def test_layouts_of_one_model_are_told_apart_better_than_their_intervals_say() -> None:
    """Two nearly equal layouts: what both share cancels out."""
    uncertainty = load_uncertainty()
    case = the_case("gpt175b", "a100x64")
    belief, doubt = prior_of(uncertainty.time, TIME_NAMES), uncertainty.time
    effects = np.repeat(time_effects(case), 2, axis=0)
    seconds = total(case)
    places = np.repeat(places_of(case), 2, axis=0)
    even = probability_faster(np.array([seconds, seconds]), effects, places, belief, doubt)
    assert even == pytest.approx([0.5, 0.5])
    slower = 1.25 * seconds
    odds = probability_faster(np.array([seconds, slower]), effects, places, belief, doubt)[1]
    assert odds > 0.95
    assert interval_of(case, uncertainty)[1][0] > 0.8 * slower, "the intervals overlap"


def test_a_measured_rate_settles_its_multiplier() -> None:
    prior = prior_of(load_uncertainty().time, TIME_NAMES)
    after = with_rates(prior, {"network": 0.0, "attention": 0.0})
    before_of, after_of = (np.sqrt(np.diag(one.covariance)) for one in (prior, after))
    for number, name in enumerate(TIME_NAMES):
        if name in ("network", "attention"):
            assert after_of[number] < 0.07 < before_of[number]
        else:
            assert after_of[number] == before_of[number]


def test_fits_is_a_probability_that_a_spec_can_set() -> None:
    from hpctrain.base.errors import DoesNotFitError

    spec = load_run_spec(EXAMPLES / "gpt175b.yaml").document
    profile, knowledge = sure_knowledge("a100x64")
    roomy = decide(PlanRequest(spec, profile, knowledge)).plan
    assert roomy.certainty is not None
    assert roomy.certainty.fit_probability > 0.99
    peak = roomy.memory[roomy.peak_stage].total_bytes

    def with_memory(share: float) -> ClusterProfile:
        gpu = profile.gpu.model_copy(update={"memory": type(profile.gpu.memory)(share * peak)})
        return profile.model_copy(update={"gpu": gpu})

    smaller, tiny = with_memory(1.04), with_memory(0.96)
    plan = decide(PlanRequest(spec, smaller, knowledge)).plan
    assert plan.certainty is not None
    assert 0.5 < plan.certainty.fit_probability < 0.9
    assert any("fits with a probability" in line for line in plan.warnings)
    wary = spec.model_copy(update={"fit_probability": 0.9})
    for one, fitting in ((spec, 2), (wary, 0)):  # in two orders of axes
        request = PlanRequest(one, smaller, knowledge)
        assert search(request, freedom_of(request)).counts.fitting == fitting
    odds = f"which fits with {plan.certainty.fit_probability:.0%}; `fit_probability` asks for 90%"
    with pytest.raises(DoesNotFitError, match=odds):
        decide(PlanRequest(wary, smaller, knowledge))
    bold = spec.model_copy(update={"fit_probability": 0.1})
    with pytest.raises(DoesNotFitError):
        decide(PlanRequest(spec, tiny, knowledge))
    taken = decide(PlanRequest(bold, tiny, knowledge)).plan.certainty
    assert taken is not None
    assert 0.1 <= taken.fit_probability < 0.5


def test_without_a_prior_there_is_no_interval() -> None:
    profile, knowledge = sure_knowledge("a100x64")
    spec = load_run_spec(EXAMPLES / "gpt175b.yaml").document
    blind = replace(knowledge, uncertainty=None)
    assert decide(PlanRequest(spec, profile, blind)).plan.certainty is None
    assert belief_of(PlanRequest(spec, profile, blind)) is None


def test_effects_of_many_cases_are_those_of_each() -> None:
    one, other = the_case("gpt175b", "a100x64"), the_case("llama7b", "h100x16")
    parts = ("shape", "mesh", "machine", "software")

    def flat(record: object) -> object:
        values = {name: np.asarray(value).reshape(-1)[0] for name, value in vars(record).items()}
        return replace(record, **values)  # type: ignore[type-var]

    both = Case(*(stack([flat(getattr(case, part)) for case in (one, other)]) for part in parts))
    assert sensitivities(both) == pytest.approx(
        np.concatenate([sensitivities(one), sensitivities(other)]), abs=1e-9
    )


def test_a_search_prices_layouts_with_what_runs_like_them_have_shown() -> None:
    """One configuration was measured 10 % slower: it, and less so its neighbours, cost more."""
    profile, knowledge = sure_knowledge("h100x16")
    spec = load_run_spec(EXAMPLES / "moe/full.yaml").document
    request = PlanRequest(spec.model_copy(update={"parallel": "auto"}), profile, knowledge)
    found = search(request, freedom_of(request))
    row = int(np.nanargmin(found.step_seconds))
    place = places_of(case_of(request, found.columns.take(np.array([row]))))
    rest = LearnedRest(deviation=0.1, reach=0.3, axes=AXES, places=(tuple(place[0]),))
    names = (*TIME_NAMES, "like one")
    mean, covariance = np.append(np.zeros(len(TIME_NAMES)), np.log(1.1)), 0.01 * np.eye(len(names))
    time = Learned(
        names=names, mean=tuple(mean), covariance=tuple(map(tuple, covariance)), rest=rest
    )
    run = OwnRun(
        run="one", day="", steps=9, measured_seconds=1.1, before_seconds=1, after_seconds=1.1
    )
    site = SiteLearning(time=time, runs=(run,), error=0.02, constants="0" * 16)
    taught = replace(request, knowledge=replace(knowledge, learned={spec.engine.name: site}))
    dearer = search(taught, freedom_of(taught)).step_seconds / found.step_seconds
    assert dearer[row] == pytest.approx(1.1, abs=0.005)
    timed = np.isfinite(dearer)
    assert np.median(dearer[timed]) == pytest.approx(1.0, abs=0.001)
    assert dearer[timed].min() > 0.999
