"""Which replicas are started and drained: by table, and by a service that is played."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hpctrain.records.service_layout import ReplicaName
from hpctrain.serve.router.decide import (
    FIRST_DELAY_SECONDS,
    MOST_FAILURES,
    Action,
    Decision,
    Drain,
    FinishRestart,
    Phase,
    ReplicaView,
    RollingRestart,
    Start,
    StopRestart,
    Timing,
    decide,
)

NOW = 1_000_000.0
TIMING = Timing(load_seconds=100.0, queue_seconds=50.0, drain_seconds=20.0)


def view(name: str, phase: Phase = "ready", **others: object) -> ReplicaView:
    parsed = ReplicaName.parse(name)
    assert parsed is not None
    begun = ReplicaView(
        parsed, phase, NOW - 5000, NOW - 4000, in_rotation=phase == "ready", walltime_ends=None
    )
    return replace(begun, **others)  # type: ignore[arg-type]


def words(decision: Decision) -> list[str]:
    return [short(action) for action in decision.actions]


def short(action: Action) -> str:
    if isinstance(action, Start):
        return f"+{action.name}" + (f" for {action.instead_of}" if action.instead_of else "")
    if isinstance(action, Drain):
        return f"-{action.name}"
    return type(action).__name__


SCALING = {
    "from nothing": ([], 2, ["+r001-g001", "+r002-g001"]),
    "as wanted": ([view("r001-g001"), view("r002-g001")], 2, []),
    "a gap is filled with the next generation": (
        [view("r001-g001", "ended"), view("r002-g001")],
        2,
        ["+r001-g002"],
    ),
    "what drains no longer counts": (
        [view("r001-g001", "draining"), view("r002-g001")],
        2,
        ["+r001-g002"],
    ),
    "what is asked to leave no longer counts": (
        [view("r001-g001", drain_asked=True), view("r002-g001")],
        2,
        ["+r001-g002"],
    ),
    "the least loaded leaves": (
        [view("r001-g001", load=5), view("r002-g001", load=1), view("r003-g001", load=3)],
        2,
        ["-r002-g001"],
    ),
    "one that loads leaves before one that answers": (
        [view("r001-g001", load=1), view("r002-g001", "loading")],
        1,
        ["-r002-g001"],
    ),
    "one that waits leaves before one that loads": (
        [view("r001-g001", "loading"), view("r002-g001", "queued"), view("r003-g001")],
        2,
        ["-r002-g001"],
    ),
    "one that nobody asks leaves before one in rotation": (
        [view("r001-g001"), view("r002-g001", in_rotation=False, load=9)],
        1,
        ["-r002-g001"],
    ),
    "to zero": ([view("r001-g001"), view("r002-g001", "queued")], 0, ["-r002-g001", "-r001-g001"]),
    "with its successor": (
        [view("r001-g001"), view("r001-g002", "loading"), view("r002-g001", load=1)],
        1,
        ["-r001-g001", "-r001-g002"],
    ),
}


@pytest.mark.parametrize("name", SCALING)
def test_the_number_of_replicas(name: str) -> None:
    replicas, wanted, expected = SCALING[name]
    assert words(decide(replicas, wanted, TIMING, now=NOW)) == expected


# 1.5 x 100 s of loading, 50 s of queue and 20 s of draining
LEAD_SECONDS = 220.0


def test_a_successor_is_submitted_when_it_can_just_be_ready_in_time() -> None:
    early = view("r001-g001", walltime_ends=NOW + LEAD_SECONDS + 1)
    late = view("r001-g001", walltime_ends=NOW + LEAD_SECONDS - 1)
    assert words(decide([early], 1, TIMING, now=NOW)) == []
    assert words(decide([late], 1, TIMING, now=NOW)) == ["+r001-g002 for r001-g001"]


@pytest.mark.parametrize("phase", ["queued", "loading"])
def test_there_is_one_successor_and_its_predecessor_stays_until_it_answers(phase: Phase) -> None:
    old = view("r001-g001", walltime_ends=NOW + 10)
    assert words(decide([old, view("r001-g002", phase)], 1, TIMING, now=NOW)) == []
    unasked = view("r001-g002", in_rotation=False)
    assert words(decide([old, unasked], 1, TIMING, now=NOW)) == []
    assert words(decide([old, view("r001-g002")], 1, TIMING, now=NOW)) == ["-r001-g001"]


def test_a_short_walltime_is_not_all_overlap() -> None:
    # submitted 100 s ago, ends in 101 s: the lead would be the whole of its time
    young = view("r001-g001", submitted_at=NOW - 100, walltime_ends=NOW + 101)
    assert words(decide([young], 1, TIMING, now=NOW)) == []
    assert words(decide([young], 1, TIMING, now=NOW + 2)) == ["+r001-g002 for r001-g001"]


def test_no_more_jobs_than_are_allowed() -> None:
    full = replace(TIMING, most_jobs=2)
    old = [view("r001-g001", walltime_ends=NOW + 10), view("r002-g001")]
    decision = decide(old, 3, full, now=NOW)
    assert words(decision) == []
    assert decision.waits == ("2 jobs are all that `resources.max_gpus` allows",)


def test_failures_slow_down_the_next_start_and_end_it() -> None:
    def after(failures: int, seconds: float) -> Decision:
        failed = [
            view(f"r001-g{n:03d}", "failed", since=NOW - n, problem="no weights")
            for n in range(1, failures + 1)
        ]
        return decide(failed, 1, TIMING, now=NOW - 1 + seconds)

    assert words(after(1, FIRST_DELAY_SECONDS - 1)) == []
    assert words(after(1, FIRST_DELAY_SECONDS + 1)) == ["+r001-g002"]
    assert words(after(3, 4 * FIRST_DELAY_SECONDS - 1)) == []
    assert words(after(3, 4 * FIRST_DELAY_SECONDS + 1)) == ["+r001-g004"]
    given_up = after(MOST_FAILURES, 3000)
    assert words(given_up) == []
    assert "no weights" in given_up.waits[0]
    assert words(after(MOST_FAILURES, 3600)) == ["+r001-g007"]


def test_a_drained_replica_has_not_failed() -> None:
    drained = view("r001-g001", "failed", since=NOW - 1, drain_asked=True)
    assert words(decide([drained], 1, TIMING, now=NOW)) == ["+r001-g002"]


class TestRollingRestart:
    """Three replicas of an old generation, and a person who wants them restarted."""

    OLD = (view("r001-g001"), view("r002-g001"), view("r003-g001"))

    @staticmethod
    def new(name: str, phase: Phase = "ready", **others: object) -> ReplicaView:
        return view(name, phase, submitted_at=NOW - 10, since=NOW - 5, **others)

    def decide(self, *new: ReplicaView, **differences: str) -> Decision:
        names = {name.replace("_", "-"): text for name, text in differences.items()}
        parsed = {ReplicaName.parse(name): text for name, text in names.items()}
        restart = RollingRestart(NOW - 20, {n: t for n, t in parsed.items() if n is not None})
        replaced = {one.name.number for one in new if one.name.generation == 3}
        old = [one for one in self.OLD if one.name.number not in replaced]
        return decide([*old, *new], 3, TIMING, now=NOW, restart=restart)

    def test_begins_with_one_more(self) -> None:
        assert words(self.decide()) == ["+r001-g002 for r001-g001"]

    @pytest.mark.parametrize("phase", ["queued", "loading"])
    def test_waits_for_it(self, phase: Phase) -> None:
        assert words(self.decide(self.new("r001-g002", phase))) == []

    def test_compares_before_the_old_one_leaves(self) -> None:
        decision = self.decide(self.new("r001-g002"))
        assert words(decision) == []
        assert decision.waits == ("r001-g002 is compared with r001-g001",)

    def test_the_old_one_leaves_when_the_answers_agree(self) -> None:
        assert words(self.decide(self.new("r001-g002"), r001_g002="")) == ["-r001-g001"]

    def test_goes_on_with_the_next(self) -> None:
        assert words(self.decide(self.new("r001-g003"))) == ["+r002-g002 for r002-g001"]

    def test_stops_at_other_answers(self) -> None:
        decision = self.decide(self.new("r001-g002"), r001_g002="token 3 is `a`, was `b`")
        assert words(decision) == ["-r001-g002", "StopRestart"]

    def test_stops_at_one_that_fails(self) -> None:
        assert words(self.decide(self.new("r001-g002", "failed"))) == ["StopRestart"]

    def test_does_not_end_before_the_last_one_answers(self) -> None:
        new = [self.new(f"r00{n}-g003") for n in (2, 3)]
        assert words(self.decide(*new, self.new("r001-g002", "loading"))) == []

    def test_ends(self) -> None:
        new = [self.new(f"r00{n}-g003") for n in (1, 2, 3)]
        assert words(self.decide(*new)) == ["FinishRestart"]


class Play:
    """A service that is played: jobs start, load, fail and end as a seed has it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.wanted = NOW, 3
        self.views: dict[ReplicaName, ReplicaView] = {}
        self.restart: RollingRestart | None = None

    def step(self) -> None:
        self.now += self.random.choice((1.0, 7.0, 60.0))
        if self.random.random() < 0.03:
            self.wanted = self.random.randint(0, 5)
        if self.random.random() < 0.02 and self.restart is None:
            self.restart = RollingRestart(self.now)
        for name, one in list(self.views.items()):
            self.views[name] = self._later(one)
        if self.restart is not None:
            same = {one.name: "" for one in self.views.values() if one.answers}
            self.restart = replace(self.restart, differences=same)
        before = {number for number, one in self.answering()}
        decision = decide(
            list(self.views.values()), self.wanted, TIMING, now=self.now, restart=self.restart
        )
        self._carry_out(decision, before)

    def answering(self) -> list[tuple[int, ReplicaView]]:
        return [(one.name.number, one) for one in self.views.values() if one.answers]

    def _later(self, one: ReplicaView) -> ReplicaView:
        chance = self.random.random()
        if one.phase == "queued" and (chance < 0.3 or one.drain_asked):
            phase: Phase = "ended" if one.drain_asked else "loading"
            ends = self.now + self.random.choice((400.0, 2000.0, 9000.0))
            return replace(one, phase=phase, since=self.now, walltime_ends=ends)
        if one.phase in ("loading", "ready"):
            if one.drain_asked:
                return replace(one, phase="draining", since=self.now, in_rotation=False)
            if self.now > (one.walltime_ends or 0) or chance < 0.005:
                return replace(one, phase="failed", since=self.now, in_rotation=False)
        if one.phase == "loading" and chance < 0.3:
            return replace(one, phase="ready", since=self.now, in_rotation=True)
        if one.phase == "draining" and chance < 0.5:
            return replace(one, phase="ended", since=self.now)
        return one

    def _carry_out(self, decision: Decision, before: set[int]) -> None:
        started = [action.name for action in decision.actions if isinstance(action, Start)]
        drained = [action.name for action in decision.actions if isinstance(action, Drain)]
        assert len({name.number for name in started}) == len(started), "one start for a number"
        assert len(set(drained)) == len(drained)
        for name in started:
            assert name not in self.views, "a generation is started once"
            self.views[name] = ReplicaView(name, "queued", self.now, self.now)
        for name in drained:
            assert self.views[name].is_live, "what leaves is not asked again"
            self.views[name] = replace(self.views[name], drain_asked=True)
        after = {number for number, _ in self.answering()}
        assert len(after) >= min(len(before), self.wanted), "what is needed stays"
        for number in {name.number for name in self.views}:
            live = [n for n, one in self.views.items() if n.number == number and one.is_live]
            assert len(live) <= 2, "one successor at a time"
        if any(isinstance(one, FinishRestart | StopRestart) for one in decision.actions):
            self.restart = None


@pytest.mark.parametrize("seed", range(40))
def test_a_played_service_keeps_what_it_needs(seed: int) -> None:
    play = Play(seed)
    for _ in range(300):
        play.step()


@pytest.mark.parametrize("seed", range(10))
def test_a_quiet_service_comes_to_what_is_wanted(seed: int) -> None:
    play = Play(seed)
    for _ in range(100):
        play.step()
    play.wanted, play.restart = 2, None
    for name, one in list(play.views.items()):
        if one.phase == "failed":
            play.views[name] = replace(one, phase="ended")
    seen = set()
    for _ in range(200):
        play.now += 1.0
        for name, one in list(play.views.items()):
            if one.phase == "queued":
                phase: Phase = "ended" if one.drain_asked else "ready"
                play.views[name] = replace(one, phase=phase, in_rotation=not one.drain_asked)
            elif one.drain_asked and one.phase not in ("ended", "failed"):
                play.views[name] = replace(one, phase="ended", in_rotation=False)
            elif one.phase == "loading":
                play.views[name] = replace(one, phase="ready", in_rotation=True)
            play.views[name] = replace(play.views[name], walltime_ends=None)
        decision = decide(list(play.views.values()), 2, TIMING, now=play.now)
        play._carry_out(decision, set())
        seen = {number for number, _ in play.answering()}
    assert len(seen) == 2
