"""Limits of silence: what is learned, what never is, and what does not count as silence."""

from __future__ import annotations

import pytest
from launch_evidence import config

from hpctrain.judge.silence_limits import SilenceMonitor, StallLimits
from hpctrain.records.supervise_config import SuperviseConfig

CAP, SETUP_CAP = 600.0, 1800.0
ALL_PHASES = ("starting", "loading", "training", "saving", "evaluating", "profiling", "leaving")


def settings(**changes: object) -> SuperviseConfig:
    values = {"stall_seconds": CAP, "setup_stall_seconds": SETUP_CAP, **changes}
    return config().model_copy(update=values)


def limits(**changes: object) -> StallLimits:
    return StallLimits(settings(**changes))


class Trainer:
    """A launch from step 10 whose clock moves by hand."""

    def __init__(self, known: StallLimits | None = None) -> None:
        self.limits = known or limits()
        self.now = 1000.0
        self.pulse = SilenceMonitor(self.limits, 10, self.now)
        self.step = 10

    def says(self, phase: str, after_seconds: float) -> None:
        self.now += after_seconds
        self.pulse.sign(phase, self.step, None, self.now)

    def trains(self, steps: int, step_seconds: float) -> None:
        for _ in range(steps):
            self.step += 1
            self.says("training", step_seconds)

    def begins(self, first_step_seconds: float = 300.0) -> None:
        self.says("loading", 60.0)
        self.says("training", 30.0)
        self.trains(1, first_step_seconds)

    def allowed(self, **seen: bool) -> float:
        """Seconds of further silence that are no stall yet, to the second."""
        silent = 0
        while self.pulse.stall(self.now + silent + 1, **seen) is None:
            silent += 1
            assert silent < 10_000
        return float(silent)


@pytest.mark.parametrize("phase", ALL_PHASES)
def test_nothing_is_learned_from_four(phase: str) -> None:
    known = limits()
    for _ in range(4):
        known.observe(phase, 1.0)
    assert known.limit(phase) == (CAP if phase == "training" else SETUP_CAP)
    known.observe(phase, 1.0)
    assert known.limit(phase) < (CAP if phase == "training" else SETUP_CAP)


@pytest.mark.parametrize(
    ("phase", "floor_seconds"),
    [
        *[("starting", 900.0), ("loading", 900.0), ("training", 90.0)],
        *[("saving", 300.0), ("evaluating", 600.0), ("leaving", 300.0), ("profiling", 900.0)],
    ],
)
def test_the_floor_of_each_phase(phase: str, floor_seconds: float) -> None:
    known = limits()
    for _ in range(5):
        known.observe(phase, 0.1)
    assert known.limit(phase) == floor_seconds


@pytest.mark.parametrize(
    ("seen_seconds", "limit_seconds"),
    [(0.1, 90.0), (17.9, 90.0), (20.0, 100.0), (100.0, 500.0), (119.0, 595.0), (130.0, CAP)],
)
def test_five_times_the_longest_between_floor_and_cap(
    seen_seconds: float, limit_seconds: float
) -> None:
    known = limits()
    for seconds in (1.0, 1.0, seen_seconds, 1.0, 1.0):
        known.observe("training", min(seconds, seen_seconds))
    assert known.limit("training") == pytest.approx(limit_seconds)


def test_what_the_spec_sets_is_the_most_even_below_a_floor() -> None:
    known = limits(stall_seconds=20.0, setup_stall_seconds=45.0)
    for phase in ALL_PHASES:
        for _ in range(9):
            known.observe(phase, 0.1)
        assert known.limit(phase) == (20.0 if phase == "training" else 45.0)


def test_learning_can_be_turned_off() -> None:
    known = limits(learn_stalls=False)
    for _ in range(9):
        known.observe("training", 0.1)
        known.observe("saving", 0.1)
    assert (known.limit("training"), known.limit("saving")) == (CAP, SETUP_CAP)


def test_a_rare_pause_is_remembered_over_many_steps_and_forgotten_in_the_end() -> None:
    known = limits()
    known.observe("training", 60.0)
    for _ in range(999):
        known.observe("training", 1.0)
    assert known.limit("training") == 300.0
    known.observe("training", 1.0)
    assert known.limit("training") == 90.0


def test_a_silence_taken_for_a_hang_makes_the_next_limit_longer() -> None:
    known = limits()
    for _ in range(5):
        known.observe("training", 0.1)
    known.stalled("training", 91.0)
    assert known.limit("training") == 455.0
    known.stalled("training", 456.0)
    assert known.limit("training") == CAP


def test_a_launch_of_a_fast_run() -> None:
    """Steps of 0.1 s, a sign each second: a file system that pauses for a minute is no hang."""
    trainer = Trainer()
    assert trainer.allowed() == SETUP_CAP
    trainer.begins()
    assert trainer.allowed() == CAP
    trainer.trains(4, 1.0)
    assert trainer.allowed() == CAP, "four steps are not enough"
    trainer.trains(1, 1.0)
    assert trainer.allowed() == 90.0


def test_a_launch_of_a_slow_run() -> None:
    trainer = Trainer()
    trainer.begins()
    trainer.trains(5, 40.0)
    assert trainer.allowed() == 200.0


def test_the_first_step_has_the_long_limit_and_teaches_nothing() -> None:
    trainer = Trainer()
    trainer.says("loading", 60.0)
    trainer.says("training", 30.0)
    assert trainer.allowed() == SETUP_CAP
    trainer.trains(1, 400.0)
    trainer.trains(5, 2.0)
    assert trainer.allowed() == 90.0


def test_a_step_that_was_slower_than_its_neighbours_is_not_overlooked() -> None:
    """Looks may come seconds after the sign; the trainer's own word on the step counts too."""
    trainer = Trainer()
    trainer.begins()
    trainer.trains(5, 2.0)
    trainer.step += 1
    trainer.now += 2.0
    trainer.pulse.sign("training", trainer.step, 60.0, trainer.now)
    assert trainer.allowed() == 300.0


def test_each_launch_has_to_show_five_steps_of_its_own() -> None:
    """Another size or other nodes may be slower: an old limit must not meet a new speed."""
    first = Trainer()
    first.begins()
    first.trains(50, 1.0)
    second = Trainer(first.limits)
    second.begins()
    second.trains(4, 100.0)
    assert second.allowed() == CAP
    second.trains(1, 100.0)
    assert second.allowed() == 500.0


def test_a_pause_of_an_earlier_launch_is_remembered() -> None:
    first = Trainer()
    first.begins()
    first.trains(5, 1.0)
    first.trains(1, 50.0)
    second = Trainer(first.limits)
    second.begins()
    second.trains(5, 1.0)
    assert second.allowed() == 250.0


def test_steps_of_earlier_attempts_lengthen_only() -> None:
    known = limits()
    known.relearn([0.5] * 100)
    trainer = Trainer(known)
    trainer.begins()
    assert trainer.allowed() == CAP
    known.relearn([60.0])
    trainer.trains(5, 1.0)
    assert trainer.allowed() == 300.0


def test_a_batch_that_grows_lengthens_steps_at_once() -> None:
    trainer = Trainer(limits(ramp=((10, 0.25), (10, 0.5))))
    trainer.begins()
    trainer.trains(5, 20.0)
    assert trainer.allowed() == 5 * 2 * 20.0


@pytest.mark.parametrize("phase", ["loading", "saving", "evaluating", "leaving"])
def test_other_phases_have_limits_of_their_own(phase: str) -> None:
    trainer = Trainer()
    trainer.begins()
    trainer.trains(9, 1.0)
    trainer.says(phase, 1.0)
    assert trainer.allowed() == SETUP_CAP
    for _ in range(5):
        trainer.says("training", 150.0)
        trainer.trains(1, 1.0)
        trainer.says(phase, 1.0)
    assert trainer.allowed() == {"loading": 900, "evaluating": 750}.get(phase, 750)
    trainer.says("training", 1.0)
    assert trainer.allowed() == 90.0, "a slow save is no slow step"


def test_a_save_beside_training_lengthens_and_never_shortens() -> None:
    trainer = Trainer()
    trainer.begins()
    trainer.trains(5, 1.0)
    for _ in range(5):
        trainer.says("saving", 1.0)
        trainer.says("training", 0.5)
        trainer.trains(1, 1.0)
    assert trainer.allowed() == 90.0
    assert trainer.allowed(save_in_flight=True) == 300.0
    trainer.trains(1, 110.0)
    assert trainer.allowed() == 550.0
    assert trainer.allowed(save_in_flight=True) == 550.0


def test_before_any_rank_has_shown_itself() -> None:
    trainer = Trainer(limits(setup_stall_seconds=45.0))
    assert trainer.allowed(ranks_seen=True) == 45.0
    assert trainer.allowed(ranks_seen=True, srun_waits=True) == 45.0
    assert trainer.allowed(ranks_seen=False) == 75.0
    assert trainer.allowed(ranks_seen=False, srun_waits=True) == 300.0
    trainer = Trainer(limits(setup_stall_seconds=45.0))
    trainer.says("starting", 1.0)
    assert trainer.allowed(ranks_seen=False, srun_waits=True) == 45.0


def test_ranks_are_silent_only_since_they_are_there() -> None:
    """While slurmctld is away srun waits, often without a word, longer than a start may take."""
    trainer = Trainer(limits(setup_stall_seconds=45.0))
    began_at = trainer.now
    for seconds, srun_waits in ((20.0, False), (60.0, True), (70.0, False)):
        late = began_at + seconds
        assert trainer.pulse.stall(late, ranks_seen=False, srun_waits=srun_waits) is None
    assert trainer.pulse.silent_seconds(began_at + 80.0) == 10.0
    assert trainer.pulse.stall(began_at + 115.0) is None
    stall = trainer.pulse.stall(began_at + 116.0)
    assert stall is not None and stall.silent_seconds == 46.0
    never = trainer.pulse.stall(began_at + 117.0, ranks_seen=False)
    assert never is not None and never.silent_seconds == 117.0, "srun is waited for, too"
    forever = trainer.pulse.stall(began_at + 301.0, ranks_seen=False, srun_waits=True)
    assert forever is not None and forever.silent_seconds == 301.0


def test_a_step_that_cannot_be_created_has_a_name_of_its_own() -> None:
    trainer = Trainer(limits(setup_stall_seconds=400.0))
    late = trainer.now + 401
    for srun_waits, phase in ((False, "starting"), (True, "launching")):
        stall = trainer.pulse.stall(late, ranks_seen=False, srun_waits=srun_waits)
        assert stall is not None
        assert (stall.phase, stall.limit_seconds) == (phase, 400.0)


def test_time_that_could_not_be_seen_is_no_silence() -> None:
    trainer = Trainer()
    trainer.begins()
    trainer.trains(5, 1.0)
    trainer.now += 500.0
    trainer.pulse.unseen(450.0)
    assert trainer.pulse.silent_seconds(trainer.now) == 50.0
    assert trainer.allowed() == 40.0
    trainer.trains(1, 1.0)
    assert trainer.allowed() == 255.0, "51 s of it counted, 450 s did not"
    trainer.trains(1, 1.0)
    assert trainer.pulse.silent_seconds(trainer.now + 7) == 7.0


def test_more_unseen_than_silent() -> None:
    trainer = Trainer()
    trainer.pulse.unseen(99.0)
    assert trainer.pulse.silent_seconds(trainer.now + 5) == 0.0


def test_late_is_half_of_the_limit() -> None:
    trainer = Trainer()
    trainer.begins()
    trainer.trains(5, 1.0)
    assert not trainer.pulse.is_late(trainer.now + 45)
    assert trainer.pulse.is_late(trainer.now + 46)


def test_a_stall_says_what_was_waited_for() -> None:
    trainer = Trainer()
    trainer.begins()
    stall = trainer.pulse.stall(trainer.now + 601)
    assert stall is not None
    assert (stall.phase, stall.silent_seconds, stall.limit_seconds) == ("training", 601.0, CAP)
    assert stall.odd == ()


# -- Without steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("silence", "starting"), [(600.0, 1800.0), (7200.0, 7920.0)])
def test_output_is_missed_as_long_as_the_spec_says(silence: float, starting: float) -> None:
    """A tenth more, because it is seen late; until the first line, as long as a start may take."""
    trainer = Trainer(limits(life="output", stall_seconds=silence))
    assert trainer.allowed() == starting and trainer.pulse.in_startup
    trainer.says("loading", 1.0)  # the agent is up
    assert trainer.allowed() == starting
    assert not trainer.pulse.in_startup, "it may train all the same: a stop gives it time to save"
    trainer.says("training", 1.0)
    assert trainer.allowed() == silence + silence / 10
    stall = trainer.pulse.stall(trainer.now + silence * 1.2)
    assert stall is not None and stall.phase == "running"


def test_nothing_is_learned_of_output() -> None:
    """A trainer that prints each second may compute for minutes."""
    trainer = Trainer(limits(life="output"))
    for _ in range(50):
        trainer.says("training", 1.0)
    assert trainer.allowed() == CAP + 60
    assert trainer.allowed(save_in_flight=True) == CAP + 60
