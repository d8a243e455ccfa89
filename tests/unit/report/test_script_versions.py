"""Which scripts the jobs of a run had: one copy of each text, and the lines that differ."""

from __future__ import annotations

from pathlib import Path

from hpctrain.records.find import RunFiles
from hpctrain.records.kept_code import keep_script
from hpctrain.records.ledger import EventKind
from hpctrain.report.collect import script_versions
from tests.fabricated_runs import fabricate, said

FIRST = "#!/bin/bash\n#SBATCH --nodes=2\nsrun train\n"


def submit(run: RunFiles, text: str, job_id: int) -> None:
    run.layout.script.write_text(text)
    run.ledger.append(EventKind.SUBMITTED, job_id=job_id, script_sha256=keep_script(run.layout))


def made(runs: Path) -> RunFiles:
    return fabricate(runs, entries=(said(EventKind.SUBMITTING),))


def test_the_same_script_is_kept_once(tmp_path: Path) -> None:
    run = made(tmp_path)
    submit(run, FIRST, 1)
    submit(run, FIRST, 2)
    kept = list((run.layout.directory / "scripts").iterdir())
    assert [path.stat().st_mode & 0o777 for path in kept] == [0o600]
    (one,) = script_versions(run.layout, run.ledger.events())
    assert (one.job_ids, one.text, one.changes) == ((1, 2), FIRST, ())


def test_an_edited_script_is_another_version(tmp_path: Path) -> None:
    run = made(tmp_path)
    submit(run, FIRST, 1)
    submit(run, FIRST.replace("=2", "=3"), 2)
    run.layout.script.write_text(FIRST)
    first, second, edited = script_versions(run.layout, run.ledger.events())
    assert (first.job_ids, second.job_ids, edited.job_ids) == ((1,), (2,), ())
    assert second.changes[1:4] == (" #!/bin/bash", "-#SBATCH --nodes=2", "+#SBATCH --nodes=3")
    assert edited.sha256 == first.sha256 and "+#SBATCH --nodes=2" in edited.changes


def test_a_run_of_an_older_hpctrain_has_kept_none(tmp_path: Path) -> None:
    run = fabricate(tmp_path)  # its ledger has the digest of another text
    old, now = script_versions(run.layout, run.ledger.events())
    assert (old.text, now.text, now.changes) == (None, "#!/bin/bash\n", ())


def test_a_submission_does_not_fail_for_its_copy(tmp_path: Path) -> None:
    run = made(tmp_path)
    (run.layout.directory / "scripts").write_text("in the way")
    assert keep_script(run.layout) is None
    run.layout.script.unlink()
    assert keep_script(run.layout) is None
