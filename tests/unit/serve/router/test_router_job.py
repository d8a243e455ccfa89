"""The router's next job in time, and numbers of docs/serving-router.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import SlurmRefusedError
from hpctrain.records.layout import RunLayout
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.serve import start_router as module
from hpctrain.serve.router import decide, haproxy, rotation, scaling
from hpctrain.serve.start_router import Successor
from hpctrain.slurm.records import JobRecord

WARNING_SECONDS = 100.0


class OneJob:
    """Slurm, which knows the router's job: it began at 1000."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds

    def jobs(self, ids: list[int]) -> dict[int, JobRecord]:
        (job_id,) = ids
        limit = self.limit_seconds
        return {job_id: JobRecord(job_id, start_time=1000.0, time_limit_seconds=limit)}


@pytest.fixture
def service(tmp_path: Path) -> ServiceLayout:
    made = ServiceLayout(tmp_path / "s")
    made.create()
    for number in (1, 2):
        run = made.router_generation(number)
        run.create()
        config = SuperviseConfig(
            run_id=run.run_id,
            target_step=1,
            continuation="requeue",
            failures_without_progress=3,
            stall_seconds=1,
            setup_stall_seconds=1,
            kill_wait_seconds=1,
            warning_seconds=WARNING_SECONDS,
            verify="auto",
        )
        run.supervise_config.write_text(config.model_dump_json())
    return made


def of(service: ServiceLayout, limit_seconds: float, number: int = 1) -> Successor:
    run = service.router_generation(number)
    found = Successor(service, run, 7, OneJob(limit_seconds))  # type: ignore[arg-type]
    found.loaded_in(20.0)
    return found


def test_it_is_submitted_before_the_warning_and_once(
    service: ServiceLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[int] = []

    def start_next(service: ServiceLayout, number: int, slurm: object) -> int:
        submitted.append(number)
        if len(submitted) == 1:
            raise SlurmRefusedError("not now")
        return 8

    monkeypatch.setattr(module, "start_next_router", start_next)
    successor = of(service, 36_000.0, number=2)
    # the warning comes 100 s before the limit, a minute early; 300 s of queue, 30 s of start
    due = 1000 + 36_000 - 100 - 60 - 300 - 30
    successor.start_in_time(due - 1.0)
    assert (successor.due_at, submitted) == (due, [])
    successor.start_in_time(due + 1.0)
    assert (successor.job_id, submitted) == (None, [2]), "refused"
    successor.start_in_time(due + 2.0)
    assert submitted == [2], "not asked again at once"
    successor.start_in_time(due + 40.0)
    successor.start_in_time(due + 80.0)
    assert (successor.job_id, submitted) == (8, [2, 2])


def test_a_short_job_is_not_all_overlap(service: ServiceLayout) -> None:
    successor = of(service, 400.0)
    successor.start_in_time(1001.0)
    assert successor.due_at == 1000 + (400 - 160) / 2


def test_without_a_limit_there_is_none(service: ServiceLayout) -> None:
    successor = of(service, float("inf"))
    successor.start_in_time(1e12)
    assert successor.job_id is None


def test_names_of_the_router_s_jobs(tmp_path: Path, service: ServiceLayout) -> None:
    assert service.router_generations() == [1, 2]
    ids = [service.router_generation(number).run_id for number in (1, 2, 12)]
    assert ids == ["s-router", "s-router-g002", "s-router-g012"]
    assert RunLayout(tmp_path / "my-router-7f3a").run_id == "my-router-7f3a"


PAGE = Path(__file__).resolve().parents[4] / "docs" / "serving-router.md"


@pytest.mark.parametrize(
    ("words", "number", "expected"),
    [
        ("after 15 s", decide.FIRST_DELAY_SECONDS, 15),
        ("at most 10 min", decide.LONGEST_DELAY_SECONDS, 600),
        ("after six failures in an hour", decide.MOST_FAILURES, 6),
        ("more than half of its time", decide.MOST_OVERLAP_SHARE, 0.5),
        ("half as long again", decide.LOAD_MARGIN, 1.5),
        ("calm for ten minutes", scaling.LEAST_CALM_SECONDS, 600),
        ("with 30 % to spare", 1 - scaling.CALM_SHARE, 0.3),
        ("four times a second", 1 / rotation.PASS_SECONDS, 4),
        ("up to 512 KiB", haproxy.BUFFER_BYTES, 512 * 1024),
    ],
)
def test_a_number_of_the_page(words: str, number: float, expected: float) -> None:
    assert words in " ".join(PAGE.read_text().split())
    assert number == pytest.approx(expected)
