"""Multipliers in a case, their effects, and the intervals of plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpctrain.base.units import ByteSize
from hpctrain.plan.cost.case import Case, stack
from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.cost.memory import peak_bytes
from hpctrain.plan.cost.multipliers import (
    AXES,
    CLASSES,
    MEMORY,
    TIME,
    classes_of,
    corrected,
    memory_sensitivities,
    places_of,
    scaled,
    sensitivities,
)
from hpctrain.plan.cost.step import step_seconds
from hpctrain.plan.mesh.candidate import columns_of
from hpctrain.plan.planner import decide
from hpctrain.plan.request import Knowledge, PlanRequest
from hpctrain.plan.search.layouts import NEAR, deviations, rivals, search, winner_faster
from hpctrain.plan.search.space import freedom_of
from hpctrain.plan.uncertainty.belief import Belief, Observations, Rest, updated
from hpctrain.plan.uncertainty.intervals import (
    TIME_NAMES,
    Spread,
    as_learned,
    belief_of,
    interval_of,
    memory_spread,
    noise_of,
    prior_of,
    probability_faster,
    time_effects,
    time_spread,
    with_rates,
)
from hpctrain.spec.calibration import Learned, LearnedRest, OwnRun, SiteLearning
from hpctrain.spec.loader import load_run_spec, load_uncertainty
from hpctrain.spec.profile import ClusterProfile
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


# -- Intervals, probabilities and corrections, whatever the figures of the prior are ------------


DEVIATIONS = np.array([0.0, 0.01, 0.1, 0.5, 2.0])


def gpt_request(knowledge: Knowledge, profile: ClusterProfile) -> PlanRequest:
    spec = load_run_spec(EXAMPLES / "gpt175b.yaml").document
    return PlanRequest(spec, profile, knowledge)


def with_capacity(profile: ClusterProfile, gib: float) -> ClusterProfile:
    gpu = profile.gpu.model_copy(update={"memory": ByteSize(round(gib * 2**30))})
    return profile.model_copy(update={"gpu": gpu})


def test_an_interval_contains_its_median_and_grows_with_the_deviation() -> None:
    spread = Spread(np.full(5, 30.0), DEVIATIONS)
    assert (spread.low <= spread.median).all()
    assert (spread.median <= spread.high).all()
    width = spread.high / spread.low
    assert width[0] == 1.0
    assert (np.diff(width) > 0).all()


def test_a_tenth_of_all_sites_lies_beyond_each_end() -> None:
    spread = Spread(np.full(4, 30.0), DEVIATIONS[1:])
    assert spread.within(spread.high) == pytest.approx(0.9)
    assert spread.within(spread.low) == pytest.approx(0.1)
    assert spread.within(spread.median) == pytest.approx(0.5)


def test_more_memory_never_lowers_the_probability_of_fitting() -> None:
    for deviation in DEVIATIONS:
        limits = np.linspace(0.0, 200.0, 401)
        odds = Spread(np.full(401, 80.0), np.full(401, deviation)).within(limits)
        assert odds[0] == 0.0
        assert odds[-1] > 0.6
        assert (np.diff(odds) >= 0).all()
        assert odds[160] == pytest.approx(0.5), "as much as is predicted"


def test_more_memory_never_lets_fewer_layouts_fit() -> None:
    profile, knowledge = sure_knowledge("a100x64")
    fitting = []
    for gib in (30, 40, 60, 80, 120):
        request = gpt_request(knowledge, with_capacity(profile, gib))
        free = request.spec.model_copy(update={"parallel": "auto"})
        request = replace(request, spec=free)
        fitting.append(search(request, freedom_of(request)).counts.fitting)
    assert fitting == sorted(fitting)
    assert fitting[0] < fitting[-1]


def test_more_runs_never_widen_what_is_expected_of_any_layout() -> None:
    """With known noise; a site whose runs disagree has more noise than was believed."""
    random = np.random.default_rng(5)
    prior = prior_of(load_uncertainty().time, TIME_NAMES)
    effects = random.uniform(0, 1, (10, len(TIME_NAMES)))
    errors, noise = random.normal(0.1, 0.1, 10), np.full(10, 0.03)
    layouts = random.uniform(0, 1, (40, len(TIME_NAMES)))
    widths = []
    for count in range(11):
        seen = Observations(errors[:count], effects[:count], noise[:count])
        belief = updated(prior, seen, freedom=np.inf, trust=np.inf)
        widths.append(belief.deviation(layouts, 0.03))
    assert (np.diff(widths, axis=0) <= 1e-12).all()
    assert (widths[10] < 0.9 * widths[0]).all()


def test_runs_as_planned_correct_nothing() -> None:
    prior = prior_of(load_uncertainty().time, TIME_NAMES)
    effects = np.random.default_rng(6).uniform(0, 1, (4, len(TIME_NAMES)))
    belief = updated(prior, Observations(np.zeros(4), effects, np.full(4, 0.03)))
    assert np.array_equal(belief.mean, np.zeros(len(TIME_NAMES)))
    assert belief.noise_factor < 1.0
    assert (belief.variance(effects) < prior.variance(effects)).all()


def test_noise_and_widening_are_in_the_interval() -> None:
    uncertainty = load_uncertainty()
    case = the_case("moe/full", "h100x16")
    for doubt, names, spread_of in (
        (uncertainty.time, TIME_NAMES, time_spread),
        (uncertainty.memory, MEMORY, memory_spread),
    ):
        prior = prior_of(doubt, names)
        usual = spread_of(case, prior, doubt).deviation[0]
        twice = doubt.model_copy(update={"widening": 2 * doubt.widening})
        assert spread_of(case, prior, twice).deviation[0] == pytest.approx(2 * usual)
        noisy = doubt.model_copy(update={"noise": 3.0})
        assert spread_of(case, prior, noisy).deviation[0] > 3 * doubt.widening
        sparse = doubt.model_copy(update={"class_noise": {CLASSES[0]: 3.0}})
        assert spread_of(case, prior, sparse).deviation[0] > 3 * doubt.widening


def test_each_class_adds_its_own_noise() -> None:
    doubt = load_uncertainty().time
    doubt = doubt.model_copy(update={"noise": 0.3, "class_noise": {CLASSES[1]: 0.4}})
    assert noise_of(doubt, np.eye(3)) == pytest.approx([0.3, 0.5, 0.3])


def test_what_runs_teach_of_a_class_counts_for_its_models_alone() -> None:
    """Experts were 10 % slower: dense models are as before."""
    names = [*TIME_NAMES]
    mean = np.where(np.array(names) == "expert model", 0.1, 0.0)
    learned = as_learned(Belief(mean, 0.01 * np.eye(len(names))), TIME_NAMES)
    run = OwnRun(
        run="a", day="2026-11-01", steps=10, measured_seconds=1, before_seconds=1, after_seconds=1
    )
    lesson = SiteLearning(time=learned, runs=(run,), error=0.1, constants="0" * 16)
    for example, name, factor in (("moe/full", "h100x16", 1.1), ("gpt175b", "a100x64", 1.0)):
        profile, knowledge = sure_knowledge(name)
        spec = load_run_spec(EXAMPLES / f"{example}.yaml").document
        decision = decide(PlanRequest(spec, profile, replace(knowledge, uncertainty=None)))
        columns = columns_of(decision.found.candidate(decision.row))
        case = case_of(decision.request, columns)
        assert classes_of(case)[0, 0] == (factor > 1)
        taught = replace(knowledge, learned={spec.engine.name: lesson})
        slower = corrected(case, replace(decision.request, knowledge=taught))
        ratio = np.asarray(step_seconds(slower).total / step_seconds(case).total)
        assert ratio == pytest.approx(factor, rel=0.01)


def test_the_search_knows_how_sure_each_peak_is() -> None:
    """And takes peaks that are far from the capacity for certain."""
    profile, knowledge = sure_knowledge("a100x64")
    request = gpt_request(knowledge, profile)
    spec = request.spec.model_copy(update={"parallel": "auto"})
    request = replace(request, spec=spec)
    found = search(request, freedom_of(request))
    margin = np.abs(np.log(found.peak_bytes / found.capacity_bytes))
    rows = np.flatnonzero(margin < NEAR)[::10]
    case = case_of(request, found.columns.take(rows))
    expected = deviations(request, case, found.peak_bytes[rows])
    assert found.deviation[rows] == pytest.approx(expected)
    assert expected.max() / expected.min() > 1.05
    # beyond, the strictest bound of a spec is met or missed whatever the deviation is
    assert 2.33 * expected.max() < NEAR


def test_near_rivals_are_told_and_sure_winners_are_not() -> None:
    profile, knowledge = sure_knowledge("a100x64")
    request = gpt_request(knowledge, profile)
    free = request.spec.model_copy(update={"parallel": "auto"})
    decision = decide(replace(request, spec=free))
    found, row = decision.found, decision.row
    told = rivals(found, row)
    assert told is not None
    assert told.count > 0
    assert 0.2 < told.probability < 0.6
    assert told.nearest != str(found.candidate(row).layout)
    assert any("It cannot be told apart from" in reason for reason in decision.plan.reasons)
    others = found.columns.mesh != found.columns.mesh[row]
    far = np.where(others, 1.5 * found.step_seconds, found.step_seconds)
    assert rivals(replace(found, step_seconds=far), row) == type(told)(0, "", 0.0, 0.0)
    blind = replace(found, request=replace(found.request, knowledge=None))
    assert rivals(blind, row) is None


def test_the_slower_a_rival_the_surer_the_winner() -> None:
    profile, knowledge = sure_knowledge("a100x64")
    request = gpt_request(knowledge, profile)
    free = replace(request, spec=request.spec.model_copy(update={"parallel": "auto"}))
    found = search(free, freedom_of(free))
    some = np.flatnonzero(np.isfinite(found.step_seconds))[:1].repeat(5)
    seconds = np.array([1.0, 1.0, 1.02, 1.1, 2.0])
    odds = winner_faster(free, found.columns.take(some), seconds)
    assert odds[0] == odds[1] == 0.5
    assert (np.diff(odds[1:]) > 0).all()


def test_a_plan_for_a_gpu_without_published_rows_is_less_sure() -> None:
    profile, knowledge = sure_knowledge("a100x64")
    assert knowledge.uncertainty is not None
    others = knowledge.uncertainty.model_copy(update={"measured_gpus": ("B200-SXM",)})
    widths = []
    for one in (knowledge, replace(knowledge, uncertainty=others)):
        sure = decide(gpt_request(one, profile)).plan.certainty
        assert sure is not None
        assert sure.step_deviation is not None
        widths.append(sure.step_deviation)
    assert widths[1] > 1.02 * widths[0]


def test_a_plan_for_a_network_without_published_rows_is_less_sure() -> None:
    """Until its rate was measured here."""
    profile, knowledge = sure_knowledge("a100x64")
    network = profile.network.model_copy(update={"fabric": "ethernet"})
    other = profile.model_copy(update={"network": network})
    measured = replace(knowledge, measured=("network",))
    widths = []
    for one, cluster in ((knowledge, profile), (knowledge, other), (measured, other)):
        sure = decide(gpt_request(one, cluster)).plan.certainty
        assert sure is not None
        assert sure.step_deviation is not None
        widths.append(sure.step_deviation)
    assert widths[1] > widths[0] > widths[2]


def test_the_parts_of_the_doubt_are_all_of_it() -> None:
    """Before and after own runs, whose lesson some parts share."""
    random = np.random.default_rng(3)
    effects = random.uniform(0, 1, (4, 3))
    places = random.uniform(0, 2, (4, 2))
    rest = Rest(0.05, 1.5, np.zeros((0, 2)))
    prior = Belief(np.zeros(3), np.diag([0.01, 0.04, 0.0]), rest=rest)
    after = updated(prior, Observations(np.full(4, 0.1), effects, np.full(4, 0.02), places))
    for belief in (prior, after):
        parts = belief.parts(effects[:1], 0.02, places[:1])
        whole = belief.deviation(effects[:1], 0.02, places[:1])[0]
        assert parts.sum() == pytest.approx(whole**2)
        assert parts[2] == pytest.approx(0.0)
    assert after.parts(effects[:1], 0.02, places[:1])[3] < prior.parts(effects, 0.02, places)[3]


def test_a_plan_says_what_its_doubt_is_made_of() -> None:
    profile, knowledge = sure_knowledge("a100x64")
    network = profile.network.model_copy(update={"fabric": "ethernet"})
    assert knowledge.uncertainty is not None
    open_ = knowledge.uncertainty.model_copy(update={"other_network": 3.0})
    other = profile.model_copy(update={"network": network})
    sure = decide(gpt_request(replace(knowledge, uncertainty=open_), other)).plan.certainty
    assert sure is not None
    assert sure.doubt[0].name == "network"
    shares = [one.share for one in sure.doubt]
    assert shares == sorted(shares, reverse=True)
    assert 0.9 < sum(shares) < 1.05
