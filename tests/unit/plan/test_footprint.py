"""The table of a run's footprint, and the sums over it."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from hpctrain.actions.footprint import footprint_of, footprint_warnings
from hpctrain.actions.prepare import Prepared, prepare
from hpctrain.plan.footprint.file_rows import (
    FILE_ROWS,
    KEPT_STACKS,
    PLACES,
    RANK_TIMES_SECONDS,
    RANK_TIMES_STEPS,
    SNAPSHOT_SECONDS,
    STARTUP_POLL_SECONDS,
    place_of,
)
from hpctrain.plan.footprint.predict import run_size
from hpctrain.plan.footprint.quantities import OPERATIONS, Formula, RunSize
from hpctrain.plan.footprint.slurm_rows import (
    KILL_SECONDS_BEYOND_KILL_WAIT,
    PATIENCE_SECONDS,
    PAUSE_SECONDS,
    RPC_OF_COMMAND,
    SHORTER_PAUSES,
    SLURM_ROWS,
)
from hpctrain.slurm import backoff
from hpctrain.spec.profile.limits import LimitsProfile
from hpctrain.store.layout import RunLayout

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "run-directory.md").read_text()


def size(ranks: int) -> RunSize:
    return RunSize(
        ranks=ranks,
        nodes=ranks // 8,
        agents=0,
        logs=ranks,
        files=ranks + 3,
        kept=12,
        unverified=1,
        retired=1,
        sizes=0,
        jobs=1,
        chain=0,
        index_files=36,
        speed_checks=1,
        start_seconds=10.0,
        refusal_seconds=40.0,
    )


# -- the table is complete -----------------------------------------------------------------------


def documented() -> list[str]:
    """Paths of the first column of the tables of docs/run-directory.md, as they would be found."""
    found = []
    for line in PAGE.splitlines():
        cell = line.split("|")[1] if line.startswith("| `") else ""
        words = re.findall(r"`([^`]+)`", cell)
        directory = words[0].rpartition("/")[0] if words else ""
        found += [w if "/" in w or w == words[0] else f"{directory}/{w}".lstrip("/") for w in words]
    return [word.rstrip("/") for word in found]


def test_every_documented_file_has_a_place_with_rows() -> None:
    assert len(documented()) > 30
    assert {"train-n000003.json", "control/hold", "exits/e000001/node-000001.json"} <= {
        *documented()
    }
    places = {name: place_of(name) for name in documented()}
    assert not [name for name, place in places.items() if place is None]
    # whether data was put aside, and what people trace, is not of every run
    without = {place for place in places.values() if place not in {row.place for row in FILE_ROWS}}
    assert without <= {"traces"}


def test_every_path_of_the_layout_has_a_place() -> None:
    run = RunLayout(Path("/runs/one"))
    names = [name for name, value in vars(RunLayout).items() if isinstance(value, property)]
    paths = [value for name in names if isinstance(value := getattr(run, name), Path)]
    paths += [run.rank_log(7, 0, 1, 3), run.trace(1, 0, 2, 3), run.flops(4), run.stack_dump(1, 2)]
    paths += [run.train_config_for(3), run.ds_config_for(3), run.agent_record(1, 0)]
    assert len(paths) > 25
    missing = [p for p in paths if place_of(str(p.relative_to(run.directory))) is None]
    assert not missing


def test_every_source_exists() -> None:
    """As text: some of these modules import torch."""
    for source in {row.source for row in (*FILE_ROWS, *SLURM_ROWS)}:
        module, _, name = source.partition(":")
        found = importlib.util.find_spec(module)
        assert found is not None, source
        assert found.origin is not None
        body = ast.parse(Path(found.origin).read_text()).body
        for part in name.split(".") if name else ():
            named = [one for one in body if getattr(one, "name", None) == part]
            assert named, source
            body = getattr(named[0], "body", [])


def test_rows_name_known_places_and_commands() -> None:
    assert {row.place for row in FILE_ROWS} <= set(PLACES)
    assert {row.command for row in SLURM_ROWS} == set(RPC_OF_COMMAND)


def test_periods_are_those_of_the_code() -> None:
    from hpctrain.engines import training
    from hpctrain.supervise.act import requeue
    from hpctrain.supervise.evidence import job_facts, launch_watch, stack_files

    assert launch_watch._READ_SECONDS == SNAPSHOT_SECONDS
    assert launch_watch._RANK_TIMES_SECONDS == RANK_TIMES_SECONDS
    assert training._TIMES_INTERVAL_STEPS == RANK_TIMES_STEPS
    assert stack_files._KEPT_EPOCHS == KEPT_STACKS
    assert requeue._PATIENCE_SECONDS == job_facts._PATIENCE_SECONDS == PATIENCE_SECONDS
    text = (ROOT / "hpctrain/train/startup_stop.py").read_text()
    assert f"_POLL_SECONDS = {STARTUP_POLL_SECONDS}\n" in text
    text = Path(str(launch_watch.__file__)).read_text()
    assert f"kill_wait_seconds + {KILL_SECONDS_BEYOND_KILL_WAIT}\n" in text


def test_no_more_calls_than_with_the_shortest_pauses() -> None:
    """The bound of the table is never below what the pauses allow, and not far above."""
    for seconds in (10.0, 40.0, PATIENCE_SECONDS):
        pauses, waited, calls = backoff.Backoff(draw=lambda: 1.0), 0.0, 1
        while waited < seconds:
            waited += pauses.next_seconds()
            calls += 1
        bound = SHORTER_PAUSES + seconds / PAUSE_SECONDS
        assert calls - 1 <= bound + 1
        assert bound <= calls + 2


@pytest.mark.parametrize("row", FILE_ROWS, ids=lambda row: f"{row.per} {row.place} {row.source}")
def test_no_row_grows_faster_than_ranks(row: object) -> None:
    for name in ("inodes", *OPERATIONS):
        counts = [getattr(row, name).at(size(ranks)) for ranks in (512, 1024, 1536)]
        assert counts[2] - counts[1] <= counts[1] - counts[0]


def test_a_formula_is_its_own_text() -> None:
    formula = Formula(3, ranks=2, kept=1, retired_files=0.5)
    assert str(formula) == "3 + 2 ranks + kept + 0.5 retired x files"
    assert formula.at(size(64)) == 3 + 2 * 64 + 12 + 0.5 * 67
    assert str(Formula()) == "0"


# -- sums ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    runs = tmp_path_factory.mktemp("runs")
    return prepare(ROOT / "examples" / "gpt175b.yaml", "a100x64", runs=runs)


def limited(prepared: Prepared, **limits: object) -> Prepared:
    site = prepared.profile.document
    if "max_bytes" in limits:
        limits = {"max_bytes": f"{limits['max_bytes']}B"}
    site = site.model_copy(update={"limits": LimitsProfile.model_validate(limits)})
    return replace(prepared, profile=replace(prepared.profile, document=site))


def test_sums_of_the_largest_example(prepared: Prepared) -> None:
    found = footprint_of(prepared)
    ranks, files = 512, 512 + 3
    assert (found.ranks, found.nodes) == (ranks, 64)
    # shards, common.pt, metadata.json, .metadata, the manifest, a digest per rank, two directories
    assert found.inodes.per_checkpoint == files + 1 + ranks + 2
    # one log per rank; directory and job log, epoch, exit record and its directory, stacks
    assert found.inodes.per_launch == ranks + 6
    # and a record of each other rank and stacks of all
    assert found.inodes.per_failed_launch == found.inodes.per_launch + ranks - 1 + ranks
    # 95367 steps, every 10000th is kept for good, and three more
    assert found.inodes.kept_checkpoints == (3 + 9) * found.inodes.per_checkpoint
    assert found.bytes.peak_checkpoints == pytest.approx(13 * found.bytes.checkpoint)
    assert found.rpc.steady_per_hour == 0
    worst = found.rpc.per_failed_launch + found.rpc.step_refuses_to_die
    assert found.rpc.worst_hour == worst + found.rpc.controller_restart
    assert found.inodes.at_end > found.inodes.per_period > found.inodes.peak_checkpoints


def test_agents_write_one_log_per_node(prepared: Prepared) -> None:
    """torchrun's agents have a log each, not their ranks."""
    spec = prepared.spec.document.model_copy(update={"launcher": "torchrun"})
    by_agents = replace(prepared, spec=replace(prepared.spec, document=spec))
    assert footprint_of(by_agents).inodes.per_launch == 64 + 6


def test_a_step_time_is_assumed_where_none_is_predicted(tmp_path: Path) -> None:
    found = footprint_of(prepare(ROOT / "examples/gpt-tiny.yaml", "sandbox", runs=tmp_path))
    assert found.rates.assumed
    assert found.rates.period_seconds == found.rates.run_seconds < 86400
    assert any(line.startswith("step: 10 s") for line in found.assumptions)


@pytest.mark.parametrize("name", ["max_inodes", "max_bytes", "max_rpc_per_hour"])
def test_a_limit_is_compared_with_the_most_there_can_be(prepared: Prepared, name: str) -> None:
    free = footprint_of(prepared)
    most = {
        "max_inodes": free.inodes.at_end,
        "max_bytes": free.bytes.peak_checkpoints,
        "max_rpc_per_hour": free.rpc.worst_hour,
    }[name]
    assert footprint_of(limited(prepared, **{name: most})).exceeded == ()
    (said,) = footprint_of(limited(prepared, **{name: most - 1})).exceeded
    assert f"limits.{name}" in said
    assert footprint_warnings(limited(prepared, **{name: most - 1})) == (said,)


def test_without_limits_submit_predicts_nothing(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpctrain.actions.footprint.footprint_of", lambda _: 1 / 0)
    assert footprint_warnings(prepared) == ()


@pytest.mark.parametrize("name", ["max_inodes", "max_bytes", "max_rpc_per_hour"])
def test_a_limit_is_above_zero(name: str) -> None:
    with pytest.raises(ValidationError):
        LimitsProfile.model_validate({name: 0})


def test_checkpoint_files_depend_on_the_engine(tmp_path: Path) -> None:
    overrides = ("engine.name=deepspeed", "parallel=auto")
    made = prepare(ROOT / "examples/gpt-tiny.yaml", "sandbox", overrides, runs=tmp_path)
    plan, spec = made.plan, made.spec.document
    predicted = footprint_of(made)
    found = run_size(spec, made.profile.document, plan, _forecast(made))
    assert found.files == 3 * plan.layout.world_size + 1
    assert predicted.checkpoint_files == found.files + 1 + plan.layout.world_size


def _forecast(prepared: Prepared):  # type: ignore[no-untyped-def]
    from hpctrain.actions.footprint import ASSUMED_STEP_SECONDS
    from hpctrain.actions.plan import run_facts
    from hpctrain.plan.forecast.predict import forecast

    plan = prepared.plan.model_copy(update={"step_seconds": ASSUMED_STEP_SECONDS})
    spec, site = prepared.spec.document, prepared.profile.document
    facts = run_facts(spec, site, plan)
    assert facts is not None
    return forecast(spec, site, facts)
