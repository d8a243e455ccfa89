"""The live view with runs on disk and a Slurm in memory: what it shows, and every key."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, ended, fabricate, published, said
from rich.cells import cell_len
from textual import events
from textual.pilot import Pilot

from hpctrain.observe.top_screen import Lines, TopApp, TopOptions
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import run_comment
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import Progress, write_record
from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

EVIL = "evil-[red]x[@click=app.quit]"
PATIENCE_SECONDS = 60.0
Told = Callable[["Seat"], Awaitable[None]]


class Slurm(FakeSlurm):
    """Counts the questions, and answers none of them while it `hangs`."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = 0
        self.hangs = threading.Event()
        self.goes_on = threading.Event()

    def jobs_of_users(self, user_ids: Collection[int]) -> dict[int, JobRecord]:
        self.questions += 1
        if self.hangs.is_set():
            self.goes_on.wait(PATIENCE_SECONDS)
        return super().jobs_of_users(user_ids)


def begun(slurm: FakeSlurm, runs: Path, name: str, job_id: int, steps: int = 40) -> RunFiles:
    """A run that trains as this job."""
    entries = [said(kind, **{**fields, "job_id": job_id}) for kind, fields in
               (*SUBMITTED, STARTED, LAUNCHED)]  # fmt: skip
    run = fabricate(runs, name, entries, steps=steps)
    now = Progress(epoch=1, phase="training", step=steps, target_step=60, time=time.time())
    write_record(run.layout.progress, now.model_copy(update={"checkpoint_step": 20}))
    published(run, 20)
    slurm.records[job_id] = JobRecord(
        job_id,
        state=JobState.RUNNING,
        name=name,
        comment=run_comment(name),
        start_time=time.time(),
        restart_count=0,
        node_list="n[0-1]",
    )
    return run


class Seat:
    """Somebody in front of the screen."""

    def __init__(self, app: TopApp, pilot: Pilot[None], runs: Path, slurm: Slurm) -> None:
        self.app, self.pilot, self.runs, self.slurm = app, pilot, runs, slurm

    @property
    def lines(self) -> list[str]:
        view = self.app.query_one(Lines)
        return [view.render_line(y).text.rstrip() for y in range(self.app.size.height)]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def sees(self, *texts: str, without: str = "\0") -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(text in self.text for text in texts) or without in self.text:
            assert time.monotonic() < deadline, f"never {texts}:\n{self.text}"
            await self.pilot.pause(0.02)

    @property
    def chosen(self) -> str:
        [line] = [line for line in self.lines if line.startswith(">")]
        return line[2:].split()[0]


def sit(
    told: Told,
    runs: Path,
    slurm: Slurm,
    size: tuple[int, int] = (80, 24),
    *,
    over: bool = False,
    wanted_seconds: float = 10.0,
    dots: bool = True,
    colours: bool = True,
) -> None:
    options = TopOptions(runs, (), wanted_seconds, over, dots, colours)

    async def run() -> None:
        app = TopApp(cast(SlurmClient, slurm), options)
        async with app.run_test(size=size) as pilot:
            await told(Seat(app, pilot, runs, slurm))

    asyncio.run(run())


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


@pytest.fixture
def runs(tmp_path: Path, slurm: Slurm) -> Path:
    """Two that train, one that waits, one that failed, two that are done."""
    place = tmp_path / "runs"
    place.mkdir()
    fabricate(place, "old-0001", (*SUBMITTED, STARTED, LAUNCHED), steps=60, done=True)
    fabricate(place, "done-0002", (*SUBMITTED, STARTED, LAUNCHED), steps=60, done=True)
    why = ended("crash", "boom [bold]said\x1b[31m rank 1", "stop")
    fabricate(place, EVIL, (*SUBMITTED, STARTED, LAUNCHED, *why), steps=30)
    begun(slurm, place, "alpha-1111", 11)
    begun(slurm, place, "beta-2222", 12, steps=25)
    fabricate(place, "wait-3333", (said(EventKind.SUBMITTED, job_id=13),))
    slurm.records[13] = JobRecord(
        13, state=JobState.PENDING, name="wait-3333", comment=run_comment("wait-3333")
    )
    return place


def test_one_screen_of_80_columns_and_24_lines(runs: Path, slurm: Slurm) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("2 running, 1 pending, 1 failed", "step 1", "Enter why", "f: all")
        head, columns, first, *_ = seat.lines
        assert head.startswith("hpctrain") and " old  " in head
        assert columns.split()[:2] == ["RUN", "STATE"] and "RISK" in columns
        assert first.startswith("> alpha-1111") and "RUNNING" in first and "40/60 67%" in first
        assert "job 11 · attempt 1 · step 20 saved" in seat.text
        assert "lose 40 s if it dies now" in seat.text
        assert any("⠀" in line for line in seat.lines), "the curve"
        assert seat.lines[-1].endswith("q quit")
        assert "2 finished not shown" in seat.text, seat.text

    sit(told, runs, slurm)


@pytest.mark.parametrize("size", [(60, 15), (40, 10), (20, 5), (10, 2), (120, 40), (200, 60)])
def test_every_size_has_a_screen(runs: Path, slurm: Slurm, size: tuple[int, int]) -> None:
    async def told(seat: Seat) -> None:
        for keys in ((), ("?",), ("q", "l"), ("q", "S"), ("x", "enter")):
            await seat.press(*keys)
            await seat.pilot.pause()
            assert len(seat.lines) == size[1]
            assert all(cell_len(line) <= size[0] for line in seat.lines)
        if size == (60, 15):
            await seat.press("escape", "n")
            await seat.sees("> alpha-1111", "25/60", "PENDING", "step 1", "q quit")

    sit(told, runs, slurm, size)


def test_a_terminal_that_changes_its_size(runs: Path, slurm: Slurm) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("alpha")
        assert " TRY " not in seat.text
        for size in ((200, 50), (30, 6), (80, 24)):
            await seat.pilot.resize_terminal(*size)
            await seat.pilot.pause()
            assert (" TRY " in seat.text) == (size == (200, 50))
        await seat.sees("alpha-1111", "q quit")

    sit(told, runs, slurm)


def test_keys_choose_runs(runs: Path, slurm: Slurm) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("> alpha-1111", "step 1")
        steps = [("j", "beta"), ("down", "wait"), ("k", "beta"), ("up", "alpha"), ("up", "alpha")]
        jumps = [("pagedown", "evil"), ("home", "alpha"), ("end", "evil"), ("pageup", "alpha")]
        for key, run in steps + jumps:
            await seat.press(key)
            assert seat.chosen.startswith(run), key
        await seat.press("j")
        await seat.sees("job 12", "                  25", without="job 11")

    sit(told, runs, slurm)


def test_why_history_errors_and_help_are_pages(runs: Path, slurm: Slurm) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("alpha-1111")
        for key, text in [("enter", "Ended     no launch has ended yet"), ("w", "Policy"),
                          ("d", "Attempt 1"), ("?", "how much longer")]:  # fmt: skip
            await seat.press(key)
            if key == "?":
                await seat.sees("Keys")
                await seat.press("end")
            await seat.sees(text, "q back")
            await seat.press("q")
            await seat.sees("> alpha-1111", "q quit")
        await seat.press("e")
        await seat.sees("q back", without="reading")
        await seat.press("escape")
        await seat.sees("> alpha-1111")

    sit(told, runs, slurm)


def test_a_log_is_followed_until_somebody_scrolls(runs: Path, slurm: Slurm) -> None:
    log = runs / "alpha-1111" / "logs" / "slurm-11.out"
    log.write_text("".join(f"line {n} [red]\x1b[32mred\x1b]0;title\x07\n" for n in range(100)))

    async def told(seat: Seat) -> None:
        await seat.sees("alpha-1111")
        await seat.press("l")
        await seat.sees("line 99 [red]red?]0;title?", "lines 79-100 of 100, followed")
        with log.open("a") as stream:
            stream.write("one more\n")
        await seat.sees("one more", "of 101, followed")
        await seat.press("pageup")
        await seat.sees("line 60 ", "not followed", without="one more")
        with log.open("a") as stream:
            stream.write("and another\n")
        await seat.sees("of 102, not followed", without="another")
        await seat.press("home")
        await seat.sees("line 0 ")
        await seat.press("G")
        await seat.sees("and another", ", followed")

    sit(told, runs, slurm)


def test_nothing_in_a_text_is_a_command(runs: Path, slurm: Slurm) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("alpha-1111")
        await seat.press("/", *"evil", "enter")
        await seat.sees(f"> {EVIL}", "FAILED", f"── {EVIL} ──")
        await seat.press("d")
        await seat.sees("boom [bold]said rank 1", EVIL)
        assert "\x1b" not in seat.text

    sit(told, runs, slurm, (120, 30))


def test_a_filter_and_what_is_finished(runs: Path, slurm: Slurm) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("alpha-1111", "2 finished not shown")
        await seat.press("/", *"bexx", "backspace", "backspace", "enter")
        await seat.sees("> beta-2222", "only with `be` (Esc: all)", without="alpha")
        await seat.press("escape")
        await seat.sees("alpha-1111", "> beta-2222")
        await seat.press("f")
        await seat.sees("old-0001", "done-0002", EVIL[:6])
        await seat.press("f")
        await seat.sees("alpha-1111", without="old-0001")
        await seat.press("/")
        seat.app.post_message(events.Paste("no such\nrun"))
        await seat.sees("show runs with: no such run_")
        await seat.press("enter")
        await seat.sees("no run is shown")
        await seat.press("/", "x", "ctrl+u", "escape")
        await seat.sees("nothing was done")

    sit(told, runs, slurm)


def test_a_shows_only_ones_own(runs: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    def owner(self: RunFiles) -> str | None:
        return "somebody" if self.run_id.startswith("beta") else "me"

    monkeypatch.setattr(RunFiles, "owner_name", property(owner))
    monkeypatch.setattr("hpctrain.observe.top_screen.user_name", lambda: "me")

    async def told(seat: Seat) -> None:
        await seat.sees("beta-2222", "somebody", "USER")
        await seat.press("a")
        await seat.sees("only your own (a: all)", without="beta")
        await seat.press("a")
        await seat.sees("beta-2222")

    sit(told, runs, slurm, (120, 30))


def test_a_save_is_asked_for_and_only_after_a_yes(runs: Path, slurm: Slurm) -> None:
    wish = runs / "alpha-1111" / "control" / "save"

    async def told(seat: Seat) -> None:
        await seat.sees("alpha-1111")
        await seat.press("s", "enter", "q")
        await seat.sees("make `alpha-1111` save now? y/n")
        await seat.press("n")
        await seat.sees("nothing was done")
        assert not wish.exists()
        await seat.press("s", "y")
        await seat.sees("Asked run `alpha-1111` to save at the next step boundary")
        assert wish.exists()
        await seat.press("s", "y")
        await seat.sees("was asked to save already")

    sit(told, runs, slurm)


@pytest.mark.parametrize(("key", "verb"), [("S", "stop"), ("h", "hold")])
def test_a_run_is_stopped_with_a_reason(runs: Path, slurm: Slurm, key: str, verb: str) -> None:
    wish = runs / "beta-2222" / "control" / verb

    async def told(seat: Seat) -> None:
        await seat.sees("alpha-1111")
        await seat.press("j", key, *"too slow", "enter")
        await seat.sees(f"make `beta-2222` save and {verb} (too slow)? y/n")
        assert not wish.exists()
        await seat.press("escape")
        await seat.sees("nothing was done")
        await seat.press(key, *"too slow", "enter", "y")
        await seat.sees(f"Asked run `beta-2222` to {verb}")
        assert wish.exists() and not (runs / "alpha-1111" / "control" / verb).exists()
        last = (runs / "beta-2222" / "ledger.jsonl").read_text().splitlines()[-1]
        assert '"too slow"' in last

    sit(told, runs, slurm)


def test_a_refusal_is_one_line(runs: Path, slurm: Slurm) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("alpha-1111")
        await seat.press("f", "/", *"done-0002", "enter", "s", "y")
        await seat.sees("run `done-0002` is done: there is nothing to save")
        assert "Traceback" not in seat.text
        (runs / "done-0002" / "ledger.jsonl").unlink()
        await seat.press("w")
        await seat.sees("no run `done-0002`")

    sit(told, runs, slurm)


def test_slurm_that_does_not_answer_leaves_the_last_rows(runs: Path, slurm: Slurm) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("2 running")
        slurm.away = True
        await seat.sees("SLURM SILENT, states", "2 running, 1 pending", "RUNNING")
        slurm.away = False
        await seat.sees(" old  ", "RUNNING", without="SILENT")

    configured(runs, poll_seconds=0.1)
    sit(told, runs, slurm, (100, 24), wanted_seconds=0.2)


def test_before_slurms_first_answer_states_are_unknown(runs: Path, slurm: Slurm) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("SLURM DOES NOT ANSWER", "UNKNOWN", "alpha-1111")

    slurm.away = True
    sit(told, runs, slurm)


def test_the_screen_answers_while_slurm_hangs(runs: Path, slurm: Slurm) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("> alpha-1111")
        slurm.hangs.set()
        asked = slurm.questions
        await seat.press("r")
        while slurm.questions == asked:
            await seat.pilot.pause(0.02)
        await seat.press("j")
        assert seat.chosen == "beta-2222"
        await seat.sees("OLD DATA")
        await seat.press("q")

    configured(runs, poll_seconds=0.0)
    begun_at = time.monotonic()
    sit(told, runs, slurm, wanted_seconds=0.2)
    assert time.monotonic() - begun_at < PATIENCE_SECONDS, "it waits for Slurm to end"
    slurm.goes_on.set()


def test_slurm_is_asked_once_per_look_and_no_more_often_than_allowed(
    runs: Path, slurm: Slurm
) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("> alpha-1111", "step 1")
        assert slurm.questions == 1, "for all runs"
        write_record(
            layout(runs, "alpha-1111").progress,
            Progress(epoch=1, phase="training", step=41, target_step=60, time=time.time()),
        )
        await seat.press("r")
        await seat.sees("41/60")
        assert slurm.questions == 1, "the site allows one in ten seconds"

    sit(told, runs, slurm)


def test_a_run_with_a_problem_is_marked_and_told(runs: Path, slurm: Slurm) -> None:
    now = Progress(epoch=1, phase="training", step=25, target_step=60, time=time.time() - 7200)
    write_record(layout(runs, "beta-2222").progress, now)

    async def told(seat: Seat) -> None:
        await seat.sees(" !beta-2222")
        await seat.press("j")
        await seat.sees(">!beta-2222", "! silent: no sign of life for 2 h")
        slurm.records[12] = replace(
            slurm.records[12], state=JobState.NODE_FAIL, start_time=1.0, end_time=100.0
        )
        await seat.sees("! orphaned: ", "`hpctrain watch --act` would")

    configured(runs, poll_seconds=0.1)
    sit(told, runs, slurm, wanted_seconds=0.2)


def test_runs_that_cannot_be_read_any_more(runs: Path, slurm: Slurm) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("> alpha-1111")
        moved = runs.rename(runs.with_name("away"))
        await seat.sees("no runs here")
        moved.rename(runs)
        await seat.press("r")  # where no run says how often, Slurm is asked every ten seconds
        await seat.sees("> alpha-1111")

    configured(runs, poll_seconds=0.1)
    sit(told, runs, slurm, wanted_seconds=0.2)


def test_an_error_of_a_look_is_one_line_and_the_rows_stay(
    runs: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("> alpha-1111")

        def broken(*_: object, **__: object) -> None:
            raise OSError(116, "Stale file handle", str(runs))

        monkeypatch.setattr("hpctrain.observe.live_view.all_runs", broken)
        await seat.sees("Stale file handle", "> alpha-1111")
        monkeypatch.undo()
        await seat.sees("> alpha-1111", without="Stale")

    configured(runs, poll_seconds=0.1)
    sit(told, runs, slurm, (200, 30), wanted_seconds=0.2)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_two_keys_quit(runs: Path, slurm: Slurm, key: str) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("alpha-1111")
        await seat.press("l" if key == "ctrl+c" else "j", key)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while seat.app.is_running:
            assert time.monotonic() < deadline, "never quit"
            await seat.pilot.pause(0.02)
        assert seat.app.return_code == 0

    sit(told, runs, slurm)


def test_without_braille_and_without_colours(runs: Path, slurm: Slurm) -> None:
    async def told(seat: Seat) -> None:
        await seat.sees("-- alpha-1111 ---", "* **")
        view = seat.app.query_one(Lines)
        styles = [
            segment.style for y in range(24) for segment in view.render_line(y) if segment.style
        ]
        assert styles and not any(style.color or style.bgcolor for style in styles)

    sit(told, runs, slurm, dots=False, colours=False)


def layout(runs: Path, name: str) -> RunLayout:
    return RunLayout(runs / name)


def configured(runs: Path, **settings: object) -> None:
    """Change the settings of all runs."""
    for name in os.listdir(runs):
        path = layout(runs, name).supervise_config
        config = SuperviseConfig.model_validate_json(path.read_bytes())
        path.write_text(config.model_copy(update=settings).model_dump_json())
