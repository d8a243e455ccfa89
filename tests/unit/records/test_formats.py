"""Files of a newer hpctrain are refused by name; what a newer one only adds is left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import hpctrain
from old_runs import NOVEMBER_2026, unpack
from trainer_documents import train_json

from hpctrain.base.errors import InvalidInputError
from hpctrain.base.formats import NewerFormatError
from hpctrain.engines.train_json import train_config_of
from hpctrain.records.data_identity import read_identity
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import BufferedLedger, EventKind
from hpctrain.records.manifest import MANIFEST_NAME, read_manifest
from hpctrain.records.node_record import NodeLedger
from hpctrain.records.run_records import (
    DoneMarker,
    ExitRecord,
    Progress,
    RankTimes,
    SkipList,
    read_metrics,
    read_record,
    read_saves,
    tail_metrics,
)
from hpctrain.records.supervise_config import (
    SuperviseConfig,
    known_supervise_config,
    read_supervise_config,
)
from hpctrain.runs.run_documents import known_plan, known_train_config
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.supervise.preflight import read_inputs
from hpctrain.version import __version__

# Every reader of a document that carries a version, and the file that it reads.
READERS: dict[str, Callable[[RunLayout], object]] = {
    "supervise.json": lambda run: read_supervise_config(run.supervise_config),
    "supervise.json, if known": lambda run: known_supervise_config(run.supervise_config),
    "plan.json": known_plan,
    "train.json": known_train_config,
    "data.json": lambda run: read_identity(run.data_identity),
    "progress.json": lambda run: read_record(run.progress, Progress),
    "ranks.json": lambda run: read_record(run.rank_times, RankTimes),
    "done.json": lambda run: read_record(run.done, DoneMarker),
    "skips.json": lambda run: read_record(run.skips, SkipList),
    "exits/e000001/rank-000000.json": lambda run: read_record(run.exit_record(1, 0), ExitRecord),
}


LINES: dict[str, Callable[[RunLayout], list[Any]]] = {
    "ledger.jsonl": lambda run: RunFiles(run).ledger.events(),
    "ledger.jsonl, its end": lambda run: RunFiles(run).ledger.last_events(10_000)[0],
    "ledger.jsonl, buffered": lambda run: BufferedLedger(run).events(),
    "metrics.jsonl": read_metrics,
    "metrics.jsonl, its end": lambda run: tail_metrics(run, 10),
    "saves.jsonl": read_saves,
}


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    return unpack(NOVEMBER_2026, tmp_path)


def make_newer(path: Path) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, "schema_version": 2, "unheard_of": 1}))


@pytest.mark.parametrize("reader", READERS)
def test_a_document_of_a_newer_version_is_refused(run: RunFiles, reader: str) -> None:
    path = run.layout.directory / reader.partition(",")[0]
    make_newer(path)
    with pytest.raises(NewerFormatError) as refused:
        READERS[reader](run.layout)
    (problem,) = refused.value.problems
    assert str(problem) == (f"{path}: has format version 2; this hpctrain knows versions up to 1")
    assert problem.hint is not None and __version__ in problem.hint
    assert refused.value.exit_code == 3


@pytest.mark.parametrize("reader", LINES)
def test_a_line_of_a_newer_version_is_refused(run: RunFiles, reader: str) -> None:
    path = run.layout.directory / reader.partition(",")[0]
    known = len(LINES[reader](run.layout))
    assert known
    with path.open("a") as stream:
        stream.write('{"torn\n{"unheard_of": 1}\n{"event": "unheard_of", "time": 1.0}\n')
        if reader.startswith("ledger"):
            stream.write('{"event": "watch", "time": 1.0, "unheard_of": 1}\n')
    added = LINES[reader](run.layout)[known:] if "end" not in reader else []
    assert [event.event for event in added] == [EventKind.WATCH] * len(added)
    with path.open("a") as stream:
        stream.write('{"event": "watch", "time": 1.0, "schema_version": 2}\n')
    with pytest.raises(NewerFormatError, match=path.name):
        LINES[reader](run.layout)


def test_a_checkpoint_of_a_newer_version_is_not_an_unfinished_one(run: RunFiles) -> None:
    checkpoint = run.layout.checkpoints / "iter_0000214"
    make_newer(checkpoint / MANIFEST_NAME)
    with pytest.raises(NewerFormatError, match=r"iter_0000214/manifest\.json"):
        read_manifest(checkpoint)


def test_evidence_of_a_newer_version_is_advice_that_is_not_understood(run: RunFiles) -> None:
    path = run.layout.directory.parent / "nodes.jsonl"
    line = json.loads(path.read_text())
    with path.open("a") as stream:
        stream.write(json.dumps({**line, "schema_version": 2, "node": "n2"}) + "\n")
        stream.write(json.dumps({**line, "unheard_of": 1, "node": "n1"}) + "\n")
    assert [one.node for one in NodeLedger(path).read()] == ["n3", "n1"]


def test_settings_that_are_not_known_are_refused_also_without_a_newer_version(
    tmp_path: Path,
) -> None:
    """Unlike facts in records: nobody would act on such a setting."""
    path = tmp_path / "train.json"
    with pytest.raises(InvalidInputError, match="unheard_of") as refused:
        train_config_of(path, train_json(unheard_of=1).encode())
    assert not isinstance(refused.value, NewerFormatError)


def test_files_of_a_run_name_their_version(run: RunFiles) -> None:
    """Lines name it from version 2 on, and so do files that hold defaults only where needed."""
    for name in ("supervise.json", "plan.json", "train.json", "data.json", "signatures.json"):
        text = (run.layout.directory / name).read_text()
        assert name == "signatures.json" or json.loads(text)["schema_version"] == 1, name
    done = DoneMarker(step=1, epoch=1, checkpoint="iter_0000001", time=1.0)
    assert json.loads(done.model_dump_json())["schema_version"] == 1


@pytest.mark.parametrize("file", ["ledger.jsonl", "progress.json", "supervise.json"])
def test_a_newer_run_hides_no_other_run(
    run: RunFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setattr("hpctrain.slurm.client.SlurmClient", FakeSlurm)
    newer = unpack(NOVEMBER_2026, tmp_path / "other")
    newer.layout.directory.rename(run.layout.directory.with_name("newer-1"))
    path = run.layout.directory.with_name("newer-1") / file
    if file == "ledger.jsonl":
        with path.open("a") as stream:
            stream.write('{"event": "watch", "time": 1.0, "schema_version": 2}\n')
    else:
        make_newer(path)
    shown = hpctrain("status", "--all", "--json", "--runs", str(run.layout.directory.parent))
    rows = {row["run_id"]: row for row in json.loads(shown.stdout)["runs"]}
    assert rows["old-e255"]["state"] == "STOPPED"
    assert rows["newer-1"]["state"] == "UNKNOWN" and "format version 2" in rows["newer-1"]["reason"]
    ledger = path.with_name("ledger.jsonl")  # a run of another cluster is not looked at
    ledger.write_text(ledger.read_text().replace('"cluster":"sandbox"', '"cluster":"fake"'))
    watched = hpctrain("watch", "--runs", str(run.layout.directory.parent))
    assert watched.exit_code == 1 and "format version 2" in watched.stderr, watched


def test_the_check_of_a_node_reads_the_same_inputs(tmp_path: Path) -> None:
    path = tmp_path / "supervise.json"
    config = SuperviseConfig(
        run_id="r1",
        target_step=1,
        continuation="none",
        failures_without_progress=1,
        stall_seconds=1.0,
        setup_stall_seconds=1.0,
        kill_wait_seconds=1.0,
        verify="auto",
        inputs=("/data/a", "/data/b"),
    )
    path.write_text(config.model_dump_json())
    assert read_inputs(path) == config.inputs
    for broken in ("[", "[]"):
        path.write_text(broken)
        assert read_inputs(path) == ()
