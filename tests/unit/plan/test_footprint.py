"""The table of a run's footprint, and the sums over it."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
from file_system_calls import FileSystemCalls
from pydantic import ValidationError

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.footprint import (
    PACKAGED_FOOTPRINT,
    footprint_of,
    footprint_warnings,
    load_footprint_table,
    size_of,
)
from hpctrain.job.prepare import Prepared, prepare
from hpctrain.plan.footprint.predict import KEPT_STACKS, KILL_SECONDS_BEYOND_KILL_WAIT
from hpctrain.plan.footprint.table import (
    CONSTANTS,
    OPERATIONS,
    FileRow,
    FootprintTable,
    Formula,
    RunSize,
)
from hpctrain.records.layout import Place, RunLayout
from hpctrain.records.old_launches import pack_old_launches
from hpctrain.records.supervise_config import TopologySettings
from hpctrain.slurm import client
from hpctrain.spec.loader import load_document
from hpctrain.spec.profile.hardware import LimitsProfile
from hpctrain.spec.profile.software import CommandsProfile

ROOT = Path(__file__).resolve().parents[3]
TABLE = load_footprint_table()
PAGE = (ROOT / "docs" / "run-directory.md").read_text()


def size(ranks: int) -> RunSize:
    return RunSize(
        ranks=ranks,
        nodes=ranks // 8,
        logs=ranks,
        kept_launches=10,
        located=1,
        files=ranks + 3,
        kept=12,
        unverified=1,
        retired=1,
        jobs=1,
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
    assert {"train-n000003.json", "control/hold", "exits/e000001/left-startup"} <= {*documented()}
    places = {name: TABLE.place_of(name) for name in documented()}
    assert not [name for name, place in places.items() if place is None]
    # whether data was put aside, and what people trace, is not of every run
    without = {
        place for place in places.values() if place not in {row.place for row in TABLE.file_rows}
    }
    assert without <= {"traces"}


def test_every_path_of_the_layout_has_a_place() -> None:
    run = RunLayout(Path("/runs/one"))
    names = [name for name, value in vars(RunLayout).items() if isinstance(value, property | Place)]
    paths = [value for name in names if isinstance(value := getattr(run, name), Path)]
    paths += [run.rank_log(7, 0, 1, 3), run.trace(1, 0, 2, 3), run.stack_dump(1, 2)]
    paths += [run.train_config_for(3), run.ds_config_for(3), run.exit_records(1, 0)]
    paths += [run.left_startup(1), run.host_file(7, 0, 1), run.log_archive(9)]
    assert len(paths) > 25
    missing = [p for p in paths if TABLE.place_of(str(p.relative_to(run.directory))) is None]
    assert not missing


def test_every_source_exists() -> None:
    """As text: some of these modules import torch."""
    for source in {row.source for row in (*TABLE.file_rows, *TABLE.slurm)}:
        module, _, name = source.partition(":")
        body = statements(module)
        for part in name.split(".") if name else ():
            named = [one for one in body if getattr(one, "name", None) == part]
            assert named, source
            body = getattr(named[0], "body", [])


def statements(module: str) -> list[ast.stmt]:
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, module
    return ast.parse(Path(found.origin).read_text()).body


def test_every_command_has_a_row() -> None:
    assert {row.command for row in TABLE.slurm} == set(TABLE.rpcs)


@pytest.mark.parametrize(
    ("row", "wrong", "message"),
    [
        ("place: ledger, per: run", "place: leger, per: run", "no place is called `leger`"),
        ("command: sinfo, per: failure, why: s", "command: info, per: failure, why: s", "`info`"),
        ("open: 2 + 2 kept launches", "open: 2 + 2 lunches", "`lunches` is neither"),
        ("stat: 2 kept launches", "stat: 2 kept launches / ranks", "`ranks` is neither"),
        ("open: 11", "open: 11 +", "`+` is neither"),
        ("keeps: four launches", "keeps: two launches", "`four launches`"),
        ("by: agents", "by: agent", "got `agent`"),
        ("mkdir: 3", "mkdirs: 3", "unknown key"),
        ("source: hpctrain.train.loop:Loop}", "sauce: hpctrain.train.loop:Loop}", "required"),
    ],
)
def test_a_wrong_row_is_reported_by_its_line(
    row: str, wrong: str, message: str, tmp_path: Path
) -> None:
    text, file = PACKAGED_FOOTPRINT.read_text(), tmp_path / "footprint.yaml"
    begin = text.index(row)
    file.write_text(text[:begin] + wrong + text[begin + len(row) :])
    with pytest.raises(InvalidInputError) as caught:
        load_document(FootprintTable, file)
    line = text[:begin].count("\n") + 1
    assert {problem.line for problem in caught.value.problems} == {line}
    assert message in " ".join(problem.message for problem in caught.value.problems)


# Where the code has the constants of the table; those of pauses are bounds, tested below.
SOURCES = {
    "snapshot seconds": ["supervise.evidence.launch_watch:_READ_SECONDS"],
    "rank times seconds": ["supervise.evidence.launch_watch:_RANK_TIMES_SECONDS"],
    "rank times steps": ["engines.training:_TIMES_INTERVAL_STEPS"],
    "messages steps": ["engines.training:MESSAGES_INTERVAL_STEPS"],
    "startup poll seconds": ["train.entry:_POLL_SECONDS"],
    "follow seconds": ["tracking.follower:FOLLOW_SECONDS"],
    "segment seconds": ["tracking.wandb_run:SEGMENT_SECONDS"],
    "pass seconds": ["observe.attempt_exporter:PASS_SECONDS"],
    "patience seconds": [
        "supervise.act.successor:_PATIENCE_SECONDS",
        "supervise.evidence.slurm_facts:_PATIENCE_SECONDS",
    ],
}


def test_constants_are_those_of_the_code() -> None:
    """As text: some of these modules import torch."""
    assert CONSTANTS.keys() - SOURCES.keys() == {"pause seconds", "shorter pauses"}
    for name, sources in SOURCES.items():
        for source in sources:
            assert value_at(source) == CONSTANTS[name], source
    assert value_at("supervise.evidence.stack_inquiry:_KEPT_EPOCHS") == KEPT_STACKS
    text = (ROOT / "hpctrain/supervise/evidence/launch_watch.py").read_text()
    assert f"kill_wait_seconds + {KILL_SECONDS_BEYOND_KILL_WAIT}\n" in text


def value_at(source: str) -> object:
    """The constant at `MODULE:NAME` below hpctrain."""
    module, _, name = source.partition(":")
    for statement in statements(f"hpctrain.{module}"):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name:
            return ast.literal_eval(statement.value)
    raise AssertionError(f"{source} is gone")


def test_no_more_calls_than_with_the_shortest_pauses() -> None:
    """The bound of the table is never below what the pauses allow, and not far above."""
    bound_at = Formula.parse("shorter pauses + start seconds / pause seconds").at
    for seconds in (10.0, 40.0, CONSTANTS["patience seconds"]):
        pauses, waited, calls = client.Backoff(draw=lambda: 1.0), 0.0, 1
        while waited < seconds:
            waited += pauses.next_seconds()
            calls += 1
        bound = bound_at(RunSize(start_seconds=seconds))
        assert calls - 1 <= bound + 1
        assert bound <= calls + 2


@pytest.mark.parametrize(
    "row", TABLE.file_rows, ids=lambda row: f"{row.per} {row.place} {row.source}"
)
def test_no_row_grows_faster_than_ranks(row: FileRow) -> None:
    for name in ("inodes", *OPERATIONS):
        counts = [getattr(row, name).at(size(ranks)) for ranks in (512, 1024, 1536)]
        assert counts[2] - counts[1] <= counts[1] - counts[0]


@pytest.mark.parametrize(
    "text", ["3 + 2 ranks + kept + 0.5 retired x files", "-1 + nodes", "7", "2 kept launches", "0"]
)
def test_a_formula_is_its_own_text(text: str) -> None:
    assert str(Formula.parse(text)) == text


def test_a_formula_is_a_sum_of_products() -> None:
    formula = Formula.parse("3 + 2 ranks + kept + 0.5 retired x files + archives")
    assert formula.at(size(64)) == 3 + 2 * 64 + 12 + 0.5 * 67 + 1 / 11
    assert Formula.parse(4).at(size(64)) == 4


def test_constants_of_a_formula_are_worked_out() -> None:
    assert str(Formula.parse("2 ranks / snapshot seconds")) == "ranks"
    assert str(Formula.parse("shorter pauses + patience seconds / pause seconds")) == "243"


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


def keeping(prepared: Prepared, launches: int) -> Prepared:
    spec = prepared.spec.document
    logging = spec.logging.model_copy(update={"keep_launches": launches})
    spec = spec.model_copy(update={"logging": logging})
    return replace(prepared, spec=replace(prepared.spec, document=spec))


def test_sums_of_the_largest_example(prepared: Prepared) -> None:
    found = footprint_of(prepared)
    ranks, files = 512, 512 + 3
    assert (found.ranks, found.nodes) == (ranks, 64)
    nodes = 64
    # shards, common.pt, metadata.json, .metadata, the manifest, a directory
    assert found.inodes.per_checkpoint == files + 1 + 1
    # while one is saved: all that are kept, it, and a digest per rank in a directory
    kept = found.inodes.kept_checkpoints
    assert found.inodes.peak_checkpoints == kept + found.inodes.per_checkpoint + ranks + 1
    # one log per node, for there are over 64 ranks; directory and job log, epoch, exit records of
    # a node and their directory, stacks, a host file where another order of nodes is better
    assert found.inodes.per_launch == nodes + 7
    # and records of each other node and stacks of all ranks
    assert found.inodes.per_failed_launch == found.inodes.per_launch + nodes - 1 + ranks
    # 95367 steps, every 10000th is kept for good, and three more
    assert found.inodes.kept_checkpoints == (3 + 9) * found.inodes.per_checkpoint
    assert found.bytes.peak_checkpoints == pytest.approx(13 * found.bytes.checkpoint)
    assert found.rpc.steady_per_hour == 0
    worst = found.rpc.per_failed_launch + found.rpc.step_refuses_to_die
    assert found.rpc.worst_hour == worst + found.rpc.controller_restart
    assert found.inodes.at_end > found.inodes.per_period + found.inodes.peak_checkpoints


@pytest.mark.parametrize(
    ("launcher", "files", "logs"),
    [
        ("srun", "auto", 64),
        ("srun", "rank", 512),
        ("torchrun", "node", 64),
        ("torchrun", "rank", 512 + 64),  # of ranks, and of their agents
    ],
)
def test_logs_of_a_launch(prepared: Prepared, launcher: str, files: str, logs: int) -> None:
    """By rank or by node, as the spec says."""
    spec = prepared.spec.document
    logging = spec.logging.model_copy(update={"files": files})
    spec = spec.model_copy(update={"launcher": launcher, "logging": logging})
    chosen = replace(prepared, spec=replace(prepared.spec, document=spec))
    assert size_of(chosen).logs == logs
    assert footprint_of(chosen).inodes.per_launch == logs + 7


def test_what_is_packed_does_not_stay(prepared: Prepared) -> None:
    """Logs and exit records of twice as many launches as are kept are there at the end."""
    few, many = (footprint_of(keeping(prepared, launches)).inodes for launches in (5, 50))
    size, nodes = size_of(prepared), 64
    launches = (50 - 5) * 2
    assert few.per_run == many.per_run
    # of each failed launch: logs, exit records and their directory; fewer archives
    most = launches * (size.logs + nodes + 1)
    assert 0 < many.at_end - few.at_end <= most
    rows = [row for row in TABLE.file_rows if row.keeps == "until packed"]
    assert {row.place for row in rows} == {"logs", "exit records"}


def test_packing_asks_as_much_as_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file that is packed is opened once; renames and removals are not heard here."""
    run, launches, logs = RunLayout(tmp_path / "run"), 3, 4
    run.create()
    run.supervise_config.write_text("{}")
    for epoch in range(1, launches + 1):
        run.attempt_logs(7, epoch).mkdir()
        for rank in range(logs):
            run.rank_log(7, epoch, 0, rank).write_text("step 1")
        run.exits_of(epoch).mkdir()
        run.exit_records(epoch, 0).write_text("")
    calls = FileSystemCalls(monkeypatch)
    with calls.counted(run.logs) as found:
        assert pack_old_launches(run, keep=1, epoch=3) is not None
    size_of_run = replace(size(8), logs=logs, kept_launches=1)
    packed = [
        row for row in TABLE.file_rows if row.place == "logs" and "old_launches" in row.source
    ]
    one_archive = [(row, 1 if row.source.endswith("by_launch") else launches - 1) for row in packed]
    predicted = sum(row.open.at(size_of_run) * times for row, times in one_archive)
    heard = found["open"] + found["os.listdir"] + found["os.scandir"]
    assert 0.5 * predicted <= heard <= predicted + launches


def test_where_nodes_are_is_asked_where_slurm_knows(prepared: Prepared) -> None:
    topology = TopologySettings(plugin="tree", gpus_per_node=8)
    for settings, asked in ((None, 0), (topology, 1)):
        supervise = prepared.supervise.model_copy(update={"topology": settings})
        found = footprint_of(replace(prepared, supervise=supervise))
        commands = [line.command for line in found.slurm if line.per == "launch"]
        assert commands.count("scontrol show topology") == asked


def test_commands_on_nodes_are_steps_of_their_own(prepared: Prepared) -> None:
    site, nodes = prepared.profile.document, 64
    commands = CommandsProfile(job=(("x",),), node=(("x",), ("y",)), node_after=(("z",),))
    site = site.model_copy(
        update={"software": site.software.model_copy(update={"commands": commands})}
    )
    changed = replace(prepared, profile=replace(prepared.profile, document=site))
    before, found = footprint_of(prepared), footprint_of(changed)
    assert found.rpc.per_launch - before.rpc.per_launch == 2 * (2 + nodes)
    assert found.inodes.per_launch - before.inodes.per_launch == 2


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
    monkeypatch.setattr("hpctrain.job.footprint.footprint_of", lambda _: 1 / 0)
    assert footprint_warnings(prepared) == ()


@pytest.mark.parametrize("name", ["max_inodes", "max_bytes", "max_rpc_per_hour"])
def test_a_limit_is_above_zero(name: str) -> None:
    with pytest.raises(ValidationError):
        LimitsProfile.model_validate({name: 0})


def test_checkpoint_files_depend_on_the_engine(tmp_path: Path) -> None:
    overrides = ("engine.name=deepspeed", "parallel=auto")
    made = prepare(ROOT / "examples/gpt-tiny.yaml", "sandbox", overrides, runs=tmp_path)
    plan = made.plan
    predicted = footprint_of(made)
    assert size_of(made).files == 3 * plan.layout.world_size + 1
    assert predicted.checkpoint_files == 3 * plan.layout.world_size + 1 + 1
