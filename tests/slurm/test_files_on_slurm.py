"""The files of a run on the real Slurm: logs and exit records by node, cleaning, archiving."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from rehearsal import PlannedFault, Stage

from hpctrain.base.errors import UsageError
from hpctrain.records.exit_records import read_exit_records
from hpctrain.records.find import find_run
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import read_metrics
from hpctrain.runs.archive import archive
from hpctrain.runs.clean import clean, plan_cleaning, remove
from hpctrain.runs.logs import rank_logs
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses

# Nobody but the log of the rank says why it ended, and Slurm cuts the line after 1024 bytes.
WORDS = "x" * 1000 + " RuntimeError: DataLoader worker (pid 11011) is killed by signal: Bus error."


@pytest.mark.stand_in
def test_a_run_with_logs_of_nodes(stage: Stage, tmp_path: Path) -> None:
    """Two ranks on one node: its log has the lines of both, and the evidence has the rank."""
    rehearsal = stage.start(
        *("name=files", "logging.files=node", "budget.steps=12", "checkpoint.every_steps=5"),
        planned=[PlannedFault(epoch=1, rank=1, step=7, do="leave", text=WORDS)],
        gpus_per_node=2,
    )
    run, layout = rehearsal.run, rehearsal.run.layout
    rehearsal.wait(layout.progress.exists, "training")
    with pytest.raises(UsageError, match="cannot be removed: job"):
        remove(run, rehearsal.slurm)
    row = rehearsal.wait_till_over()
    assert row.state is RunState.DONE, rehearsal.logs()
    failed, done = rehearsal.events(EventKind.LAUNCH_ENDED)
    assert (failed.cause, failed.rank, done.cause) == ("data_loader", 1, "done"), rehearsal.logs()
    assert failed.node == rehearsal.nodes()[0]
    # files
    logs = sorted(path.name for path in layout.logs.glob("*/*"))
    assert [name.partition("-")[2] for name in logs] == ["node0000.log"] * 2, logs
    of_rank_1 = [log.text() for log in rank_logs(run, 1)]
    assert WORDS in of_rank_1[0].splitlines(), "one line again, without its label"
    assert not any("event=step" in text for text in of_rank_1)
    assert "event=step step=12/12 " in rank_logs(run, 0)[-1].text()
    exits = [str(path.relative_to(layout.exits)) for path in layout.exits.glob("*/*")]
    assert {name.partition("/")[2] for name in exits} == {"node-000000.jsonl"}, exits
    assert [one.outcome for one in read_exit_records(layout, 2)] == ["done"]
    assert list(layout.checkpoints.glob("iter_*")), rehearsal.logs()
    # The manifest has them. The launch that ended could do so between the two.
    left = {path.parent.name for path in layout.checkpoints.glob("*/digests")}
    assert left <= {"iter_0000005"}, left
    # getting rid of them
    cleaning = plan_cleaning(run, rehearsal.slurm, keep_launches=1)
    assert cleaning.in_use is None and {"logs", "exit records"} & {w.kind for w in cleaning.waste}
    clean(run, cleaning)
    assert len(list(layout.logs.glob("*/*"))) == 1
    assert not list(layout.checkpoints.glob("*/digests"))
    packed = archive(run, rehearsal.slurm, tmp_path / "files.tar", "last")
    rows = read_metrics(layout)
    remove(run, rehearsal.slurm)
    assert not layout.directory.exists()
    with tarfile.open(packed.path) as tar:
        tar.extractall(stage.runs)
    again = find_run(stage.runs, run.run_id)
    assert statuses([again], rehearsal.slurm)[0].state is RunState.DONE
    assert read_metrics(again.layout) == rows
