"""What is concluded from figures: agreement of losses, what to take, how a run scales."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from step_rows import trained_step

from hpctrain.records.run_records import RankTimes, StepMetrics
from hpctrain.trials.documents import (
    LossAgreement,
    Measured,
    Predicted,
    Stability,
    StepShares,
    StepSpread,
    TrialRecord,
    TrialResult,
)
from hpctrain.trials.judging import (
    agreement,
    bound_of,
    counted_steps,
    is_tie,
    lost_time,
    measure,
    recommend,
    recommend_size,
    scale_points,
    spread_of,
    warm_up_steps,
)

GIB = 2**30
MEMORY_BYTES = 80 * GIB


def record(name: str, *, gpus: int = 8, global_batch: int = 64) -> TrialRecord:
    return TrialRecord(
        name=name,
        overrides=(),
        gpus=gpus,
        global_batch=global_batch,
        sample_length=128,
        train_steps=1000,
        precision="bf16",
        training="same",
        run_id=f"run-{name}",
    )


def trial(
    name: str,
    step_seconds: float = 1.0,
    gib: float = 40.0,
    *,
    gpus: int = 8,
    jitter: float = 0.01,
    failures: Sequence[str] = (),
    drifts: bool = False,
    state: str = "DONE",
    eval_loss: float | None = None,
) -> TrialResult:
    """A trial that has made 18 steps of that many seconds, give or take `jitter` of them."""
    around = step_seconds * jitter
    spread = StepSpread(
        median=step_seconds,
        p10=step_seconds - around,
        p90=step_seconds + around,
        mean=step_seconds,
    )
    measured = Measured(
        steps=18,
        step_seconds=spread,
        samples_per_second=64 / step_seconds,
        peak_bytes=round(gib * GIB),
        peak_of_all_ranks=True,
        shares=None,
        eval_loss=eval_loss,
        eval_accuracy=None,
    )
    apart = LossAgreement(reference="first", steps=20, largest=0.02, bound=0.004, verdict="drifts")
    return TrialResult(
        record=record(name, gpus=gpus),
        state=state,
        over=True,
        measured=measured if state == "DONE" else None,
        stability=Stability(
            launches=1 + len(failures), failures=tuple(failures), preemptions=0, steps_again=0
        ),
        agreement=apart if drifts else None,
    )


def predicted(
    name: str,
    step_seconds: float,
    *,
    step_deviation: float | None = 0.1,
    layout_deviation: float | None = 0.1,
    fit_probability: float = 0.99,
) -> TrialResult:
    """A trial that only the planner knows, at 64 samples a step."""
    figures = Predicted(
        layout="tp 1",
        zero=1,
        offload="none",
        recompute="none",
        micro_batch=1,
        peak_bytes=40 * GIB,
        step_seconds=step_seconds,
        parts=None,
        step_deviation=step_deviation,
        layout_deviation=layout_deviation,
        fit_probability=fit_probability,
    )
    known = record(name).model_copy(update={"predicted": figures})
    return TrialResult(record=known, state="PLANNED", over=True)


# -- What is concluded from figures: agreement of losses, what to take, how a run scales --------


# -- agreement -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "precision", "verdict"),
    [
        ({1: 5.0, 2: 4.0}, "fp32", "same"),
        ({1: 5.0, 2: 4.0003}, "fp32", "same"),
        ({1: 5.0, 2: 4.002}, "fp32", "drifts"),
        ({1: 5.0, 2: 4.002}, "bf16", "same"),
        ({1: 5.0, 2: 4.1}, "bf16", "drifts"),
        ({1: 5.1, 2: 4.1}, "bf16", "other start"),
        ({2: 4.0, 3: 9.0}, "fp32", "same"),
    ],
)
def test_losses_agree_within_rounding_or_they_do_not(
    losses: dict[int, float], precision: str, verdict: str
) -> None:
    told = agreement("ddp", {1: 5.0, 2: 4.0}, losses, bound_of(precision, precision))
    assert told is not None and told.verdict == verdict


def test_what_trains_something_else_need_not_agree() -> None:
    told = agreement("ddp", {1: 5.0, 2: 4.0}, {1: 5.0, 2: 3.0}, 1e-4, same=False)
    assert told is not None and told.verdict == "other run"
    told = agreement("ddp", {1: 5.0}, {1: 5.0}, 1e-4, same=False)
    assert told is not None and told.verdict == "same"


def test_without_a_common_step_nothing_is_said_about_agreement() -> None:
    assert agreement("ddp", {1: 5.0}, {2: 5.0}, 0.1) is None


def test_the_coarser_precision_counts() -> None:
    assert bound_of("fp32", "bf16") == bound_of("bf16", "fp32") == bound_of("bf16", "bf16")
    assert bound_of("fp32", "fp32") < bound_of("fp32", "bf16")


# -- figures ---------------------------------------------------------------------------------


def steps(*seconds: float, launch: int = 1, first: int = 1) -> list[StepMetrics]:
    return [
        trained_step(first + number, epoch=launch, step_seconds=value, memory_bytes=100 + number)
        for number, value in enumerate(seconds)
    ]


def ranks(**columns: tuple[float, ...]) -> RankTimes:
    named = {"epoch": 1, "first_step": 1, "last_step": 2, "time": 0.0, "nodes": ("n0", "n0")}
    return RankTimes.model_validate(named | columns)


def test_the_first_steps_of_every_launch_do_not_count() -> None:
    rows = [*steps(9.0, 1.0, 1.0), *steps(8.0, 2.0, launch=2, first=4)]
    assert [row.step_seconds for row in counted_steps(rows, 1)] == [1.0, 1.0, 2.0]
    assert [row.step_seconds for row in counted_steps(steps(9.0, 3.0), 5)] == [3.0]
    assert measure(steps(9.0), 1, 8, None) is None, "one step says nothing"
    assert [warm_up_steps(count) for count in (3, 20, 100)] == [1, 2, 10]


def test_figures_of_a_trial() -> None:
    told = measure(steps(9.0, 1.0, 2.0, 3.0), 1, 8, None)
    assert told is not None
    assert told.step_seconds.median == told.step_seconds.mean == 2.0
    assert told.samples_per_second == 4.0 and told.steps == 3
    assert told.peak_bytes == 103 and not told.peak_of_all_ranks and told.shares is None


def test_quantiles_are_steps_that_were_seen() -> None:
    spread = spread_of([float(number) for number in range(1, 11)])
    assert (spread.p10, spread.median, spread.p90) == (1.0, 5.5, 9.0)
    assert spread_of([2.0]).p10 == spread_of([2.0]).p90 == 2.0


def test_ranks_say_where_the_step_goes() -> None:
    reported = ranks(
        compute_seconds=(0.4, 0.6),
        backward_seconds=(0.2, 0.2),
        data_seconds=(0.1, 0.3),
        optimizer_seconds=(0.05, 0.05),
        step_seconds=(1.0, 1.0),
        peak_memory_bytes=(500, 900),
    )
    told = measure(steps(9.0, 1.0), 1, 8, reported)
    assert told is not None and told.shares is not None
    shares = told.shares
    assert shares.compute == pytest.approx(0.7) and shares.data == pytest.approx(0.2)
    assert shares.update == pytest.approx(0.05) and shares.other == pytest.approx(0.05)
    assert shares.imbalance == pytest.approx(0.1), "the slowest rank against the mean one"
    assert told.peak_bytes == 900 and told.peak_of_all_ranks
    old = measure(steps(9.0, 1.0), 1, 8, ranks(compute_seconds=(0.4, 0.6)))
    assert old is not None and old.shares is not None
    assert old.shares.data is None and old.shares.other == pytest.approx(0.5)


# -- recommendation --------------------------------------------------------------------------

ROOMY, FAST = trial("roomy", 1.5, 20), trial("fast", 1.0, 40)


@pytest.mark.parametrize(
    ("trials", "choice", "words"),
    [
        ([ROOMY, FAST], "fast", ["fastest of 2", "roomy is 33 % slower and needs 20.0 GiB less"]),
        ([FAST], "fast", ["the only one that works"]),
        ([FAST, trial("full", 0.5, 78)], "fast", ["full is faster", "fills 98 % of the memory"]),
        ([FAST, trial("frail", 0.5, failures=["crash"])], "fast", ["frail is faster", "(crash)"]),
        (
            [FAST, trial("odd", 0.5, drifts=True)],
            "fast",
            ["odd is faster", "drifts from the losses of first by 2 %", "rounding explains 0.4 %"],
        ),
        ([trial("full", 0.5, 78)], "full", ["None is without a flaw", "fills 98 %"]),
        ([FAST, trial("near", 1.01, 20)], "fast", ["As fast within", "near (20.0 GiB less a GPU)"]),
        ([FAST, trial("near", 1.01, 41)], "fast", ["near (about the same memory)"]),
        ([FAST, trial("slow", 3.0, 40)], "fast", ["fastest of 2"]),
        ([FAST, trial("dead", 0.1, state="FAILED")], "fast", ["the only one that works"]),
        ([trial("dead", state="FAILED")], None, ["no variant has worked"]),
    ],
)
def test_what_to_take_and_why(
    trials: list[TrialResult], choice: str | None, words: list[str]
) -> None:
    told = recommend(trials, MEMORY_BYTES, measured=True)
    text = " ".join(told.sentences)
    assert told.choice == choice, text
    assert not [word for word in words if word not in text], text


def test_a_slower_one_that_saves_nothing_is_not_praised() -> None:
    told = recommend([FAST, trial("slow", 3.0, 39)], MEMORY_BYTES, measured=True)
    assert len(told.sentences) == 1


def test_predictions_are_ties_as_far_as_they_are_unsure() -> None:
    """The faster one is the faster one with 80 %: 0.84 deviations of their difference."""
    assert is_tie(predicted("a", 1.0), predicted("b", 1.08))
    assert not is_tie(predicted("a", 1.0), predicted("b", 1.1))
    doubtful = predicted("b", 1.1, step_deviation=0.2)
    assert is_tie(predicted("a", 1.0), doubtful), "an engine without own runs beside one with them"
    blind = predicted("b", 1.04, layout_deviation=None)
    assert is_tie(predicted("a", 1.0), blind)
    assert not is_tie(predicted("a", 1.0), predicted("b", 1.06, layout_deviation=None))


def test_what_is_not_sure_to_fit_is_not_recommended() -> None:
    found = recommend(
        [predicted("fast", 0.5, fit_probability=0.83), predicted("sure", 1.0)],
        MEMORY_BYTES,
        measured=False,
    )
    assert found.choice == "sure"
    assert any("fast is faster" in one and "fits with 83% only" in one for one in found.sentences)


def test_ties_depend_on_how_much_the_steps_differ() -> None:
    steady, other = trial("a", 1.0, jitter=0.01), trial("b", 1.1, jitter=0.01)
    assert not is_tie(steady, other)
    assert is_tie(trial("a", 1.0, jitter=0.6), trial("b", 1.1, jitter=0.6))


# -- scaling ---------------------------------------------------------------------------------

SIZES = [
    trial("gpus1", 8.0, gpus=1, eval_loss=3.0),
    trial("gpus2", 4.2, gpus=2, eval_loss=3.001),
    trial("gpus4", 2.9, gpus=4),
]


def test_efficiency_is_against_the_smallest_that_has_worked() -> None:
    points = scale_points(SIZES, measured=True)
    assert [(p.gpus, p.baseline) for p in points] == [(1, 1), (2, 1), (4, 1)]
    assert points[1].speedup == pytest.approx(8 / 4.2)
    assert points[2].efficiency == pytest.approx(8 / 2.9 / 4)
    assert points[1].eval_loss_difference == pytest.approx(0.001)
    dead = [trial("gpus1", gpus=1, state="FAILED"), *SIZES[1:]]
    later = scale_points(dead, measured=True)
    assert [(p.gpus, p.baseline) for p in later] == [(2, 2), (4, 2)]
    assert later[1].efficiency == pytest.approx(4.2 / 2.9 / 2)


def test_the_largest_size_that_is_used_well() -> None:
    told = recommend_size(SIZES, scale_points(SIZES, measured=True), weak=False)
    assert told.choice == "gpus2"
    text = " ".join(told.sentences)
    assert "2 GPUs: 1.90 times the pace of 1, 95 % efficient." in text
    assert "4 GPUs are used to 69 % only." in text and "Weak" not in text
    weak = recommend_size(SIZES, scale_points(SIZES, measured=True), weak=True)
    assert "learning rate" in weak.sentences[-1]
    assert recommend_size([], (), weak=False).choice is None


def test_more_than_linear_is_doubted() -> None:
    sizes = [trial("gpus1", 8.0, gpus=1), trial("gpus2", 3.0, gpus=2)]
    told = recommend_size(sizes, scale_points(sizes, measured=True), weak=False)
    assert "run it again" in " ".join(told.sentences)


def test_accuracy_is_against_the_smallest_size() -> None:
    sizes = [with_accuracy(trial("gpus1", 8.0, gpus=1), 0.9)]
    sizes.append(with_accuracy(trial("gpus2", 4.0, gpus=2), 0.88))
    points = scale_points(sizes, measured=True)
    assert points[1].eval_accuracy_difference == pytest.approx(-0.02)
    said = recommend_size(sizes, points, weak=False).sentences
    assert said[-1] == "Accuracies are within 2 points of 1 GPU."


def with_accuracy(made: TrialResult, accuracy: float) -> TrialResult:
    assert made.measured is not None
    told = made.measured.model_copy(update={"eval_accuracy": accuracy})
    return made.model_copy(update={"measured": told})


def test_what_is_lost_against_linear() -> None:
    one = with_shares(trial("gpus1", 8.0, gpus=1), data=0.4, imbalance=0.0)
    four = with_shares(trial("gpus4", 3.0, gpus=4), data=0.3, imbalance=0.2)
    lost = lost_time(four, one)
    assert lost is not None
    assert lost.total == pytest.approx(1.0), "a quarter of the work is two seconds"
    assert lost.data == pytest.approx(0.2) and lost.imbalance == pytest.approx(0.2)
    assert lost.messages == pytest.approx(0.6)
    faster = lost_time(with_shares(trial("gpus4", 1.0, gpus=4), data=0.0, imbalance=0.5), one)
    assert faster is not None and faster.total == faster.imbalance == faster.messages == 0.0
    told = recommend_size([one, four], scale_points([one, four], measured=True), weak=False)
    assert "4 GPUs lose 1 s a step against linear: 60 % messages" in " ".join(told.sentences)
    assert lost_time(trial("gpus4", gpus=4), one) is None


def with_shares(made: TrialResult, *, data: float, imbalance: float) -> TrialResult:
    assert made.measured is not None
    step = made.measured.step_seconds.mean
    shares = StepShares(data=data, compute=step - data, update=0.0, other=0.0, imbalance=imbalance)
    return made.model_copy(update={"measured": made.measured.model_copy(update={"shares": shares})})


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ({1: 5.0, 2: 4.0}, "All sizes learn the same: losses are at most 0 % apart."),
        ({1: 5.0, 2: 4.4}, "Losses of 2 GPUs are 10 % apart; rounding: 0.4 %."),
    ],
)
def test_more_gpus_must_not_change_what_is_learned(losses: dict[int, float], words: str) -> None:
    told = agreement("gpus1", {1: 5.0, 2: 4.0}, losses, bound_of("bf16", "bf16"))
    two = trial("gpus2", 4.0, gpus=2).model_copy(update={"agreement": told})
    sizes = [trial("gpus1", 8.0, gpus=1), two]
    said = recommend_size(sizes, scale_points(sizes, measured=True), weak=False).sentences
    assert said[-1] == words
