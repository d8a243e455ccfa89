"""From two files to a run directory and a job; what is on disk when something goes wrong."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fabricated_runs import SUBMITTED, fabricate
from token_files import write_tokens

from hpctrain.base.errors import (
    InvalidInputError,
    RunFailedError,
    SlurmRefusedError,
    SlurmUnreachableError,
    UsageError,
)
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.job.job_submission import resubmit
from hpctrain.job.prepare import Prepared, input_paths, load_inputs, prepare
from hpctrain.job.run_directory import write_run_directory
from hpctrain.job.submit import check, submit
from hpctrain.plan.documents import Plan
from hpctrain.records.find import RunFiles, all_runs
from hpctrain.records.jobs import cluster_of, slurm_cluster_of
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.supervise_config import SubmitSettings, SuperviseConfig
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord, SubmittedJob
from hpctrain.spec.loader import load_profile, load_run_spec, profile_search_path

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "examples/gpt-tiny.yaml"


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """The tiny example, ready, with a dataset."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write_tokens(tmp_path / "data/text")
    (tmp_path / "data/tokenizer.json").write_text("{}")
    return prepare(TINY, "sandbox", runs=tmp_path / "runs")


class Looking(FakeSlurm):
    """Looks into the run directory at the moment of sbatch."""

    def submit(
        self,
        script: Path | str,
        extra_args: Sequence[str] = (),
        *,
        variables: Collection[str] | None = None,
    ) -> SubmittedJob:
        assert isinstance(script, Path)
        self.seen = {path.name for path in script.parent.iterdir()}
        run = RunFiles(RunLayout(script.parent))
        self.ledger = [event.event for event in run.ledger.events()]
        self.extra_args = list(extra_args)
        return super().submit(script, extra_args, variables=variables)


def test_the_run_directory_is_complete_before_sbatch(prepared: Prepared, tmp_path: Path) -> None:
    slurm = Looking()
    submitted = submit(prepared, tmp_path / "runs", slurm)  # type: ignore[arg-type]
    documents = {"spec.yaml", "profile.yaml", "plan.json", "train.json", "supervise.json"}
    directories = {"control", "epochs", "exits", "logs", "stacks", "checkpoints", "software"}
    directories.add("scripts")
    documents |= {"signatures.json", "job.sbatch", "ledger.jsonl", "data.json"}
    assert slurm.seen == documents | directories
    assert slurm.ledger == [EventKind.RENDERED, EventKind.SUBMITTING]
    assert slurm.extra_args == [f"--chdir={submitted.directory}"]
    assert slurm.scripts[submitted.job_id] == prepared.script


def test_what_lies_in_the_run_directory(prepared: Prepared, tmp_path: Path) -> None:
    layout = write_run_directory(prepared, tmp_path / "runs")
    assert load_run_spec(layout.spec).document == prepared.spec.document
    assert load_profile(layout.profile).document == prepared.profile.document
    assert Plan.model_validate_json(layout.plan.read_bytes()) == prepared.plan
    train = MegatronConfig.model_validate_json(layout.train_config.read_bytes())
    assert train == prepared.train
    assert [path for _, path in train.data_blend] == [str(tmp_path / "data/text")]
    config = SuperviseConfig.model_validate_json(layout.supervise_config.read_bytes())
    assert (config.run_id, config.target_step) == (layout.run_id, 60)
    assert f"--signal=B:USR1@{config.warning_seconds:.0f}\n" in prepared.script
    (event,) = RunFiles(layout).ledger.events()
    assert event.script_sha256 == hashlib.sha256(prepared.script.encode()).hexdigest()


def test_the_run_directory_is_private(prepared: Prepared, tmp_path: Path) -> None:
    layout = write_run_directory(prepared, tmp_path / "runs")
    assert layout.directory.stat().st_mode & 0o077 == 0
    open_files = [p for p in layout.directory.rglob("*") if p.stat().st_mode & 0o077]
    assert not open_files


def test_refused_by_slurm(prepared: Prepared, tmp_path: Path) -> None:
    """Nobody looks for a run that never was; one that Slurm refuses later keeps its history."""
    slurm, runs = FakeSlurm(), tmp_path / "runs"
    slurm.refusal = "Invalid account"
    with pytest.raises(SlurmRefusedError, match="Invalid account"):
        submit(prepared, runs, slurm)  # type: ignore[arg-type]
    assert list(runs.iterdir()) == []
    slurm.refusal = ""
    run = RunFiles(RunLayout(submit(prepared, runs, slurm).directory))  # type: ignore[arg-type]
    slurm.records.clear()
    slurm.refusal = "Invalid account"
    with pytest.raises(SlurmRefusedError, match="Invalid account"):
        resubmit(run, slurm)  # type: ignore[arg-type]
    last = run.ledger.events()[-1]
    assert (last.event, last.reason) == (EventKind.SUBMIT_FAILED, "Invalid account")


def test_an_older_slurm_without_segments(prepared: Prepared, tmp_path: Path) -> None:
    nodes = prepared.plan.nodes.model_copy(update={"segment": 2})
    plan = prepared.plan.model_copy(update={"nodes": nodes})
    prepared, slurm = replace(prepared, plan=plan), FakeSlurm()
    for ask in (lambda: check(prepared, slurm), lambda: submit(prepared, tmp_path, slurm)):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"`--segment=2`.* since 24\.05; this is 22\.05\.8"):
            ask()
    assert not slurm.records
    slurm.settings["SLURM_VERSION"] = "24.05.0"
    assert submit(prepared, tmp_path / "runs", slurm).job_id == 1  # type: ignore[arg-type]


def test_two_submissions_of_one_spec_are_two_runs(prepared: Prepared, tmp_path: Path) -> None:
    slurm = FakeSlurm()
    submit(prepared, tmp_path / "runs", slurm)  # type: ignore[arg-type]
    again = submit(prepared, tmp_path / "runs", slurm)  # type: ignore[arg-type]
    assert again.run_id != prepared.run_id
    layout = RunLayout(again.directory)
    config = SuperviseConfig.model_validate_json(layout.supervise_config.read_bytes())
    script = layout.script.read_text()
    assert config.run_id == again.run_id
    assert prepared.run_id not in script and f"--comment=hpctrain:{again.run_id}" in script


def test_missing_data_is_found_before_anything_is_written(
    prepared: Prepared, tmp_path: Path
) -> None:
    (tmp_path / "data/text.idx").unlink()
    (tmp_path / "data/tokenizer.json").unlink()
    with pytest.raises(InvalidInputError) as caught:
        submit(prepared, tmp_path / "runs", FakeSlurm())  # type: ignore[arg-type]
    assert len(caught.value.problems) == 2
    assert not (tmp_path / "runs").exists()


def test_check_submits_nothing(prepared: Prepared, tmp_path: Path) -> None:
    slurm = FakeSlurm()
    assert check(prepared, slurm).text == "Job would start"  # type: ignore[arg-type]
    assert not slurm.records and not (tmp_path / "runs").exists()


def test_resubmit(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.submit("")
    run = fabricate(tmp_path, entries=SUBMITTED)
    with pytest.raises(UsageError, match="job 1 in state PENDING"):
        resubmit(run, slurm)  # type: ignore[arg-type]
    slurm.cancel(1)
    assert resubmit(run, slurm).job_id == 2  # type: ignore[arg-type]
    slurm.away = True
    with pytest.raises(SlurmUnreachableError):
        resubmit(run, slurm)  # type: ignore[arg-type]
    done = fabricate(tmp_path, "done-0001", done=True)
    with pytest.raises(RunFailedError, match="nothing left to train"):
        resubmit(done, FakeSlurm())  # type: ignore[arg-type]


def test_problems_of_both_files_at_once(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("nonsense: 1\n")
    (tmp_path / "profile.yaml").write_text("rubbish: 1\n")
    with pytest.raises(InvalidInputError) as caught:
        load_inputs(tmp_path / "spec.yaml", str(tmp_path / "profile.yaml"))
    files = {Path(str(problem.file)).name for problem in caught.value.problems}
    assert files == {"spec.yaml", "profile.yaml"}


def test_profiles_of_the_site_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "cluster_profiles/sandbox.yaml").read_text()
    (tmp_path / "sandbox.yaml").write_text(text.replace("count: 4", "count: 3"))
    monkeypatch.setenv("HPCTRAIN_PROFILE_PATH", f":{tmp_path}:")
    assert profile_search_path() == [tmp_path]
    _, profile = load_inputs(TINY, "sandbox")
    assert profile.document.nodes.count == 3


def test_overrides_reach_every_document(tmp_path: Path) -> None:
    changed = prepare(TINY, "sandbox", ["budget.steps=7", "name=other"], runs=tmp_path)
    assert changed.train.train_steps == changed.supervise.target_step == 7
    assert changed.run_id.startswith("other-") and changed.run_id in changed.script
    assert json.loads(changed.plan.model_dump_json())["batch"]["train_steps"] == 7


def test_a_grace_that_is_too_short_is_warned_of(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    text = (ROOT / "cluster_profiles/a100x1.yaml").read_text()
    assert "grace: 30s" in text
    text = text.replace("grace: 30s", "grace: 0s")
    site.write_text(text)
    warnings = prepare(TINY, str(site), runs=tmp_path).plan.warnings
    assert "no grace" in "".join(warnings)
    assert "a preemption costs the work since" in "".join(warnings)


def test_an_sbatch_without_an_answer_may_have_been_accepted(
    prepared: Prepared, tmp_path: Path
) -> None:
    """The controller took the job, and the client's time was up."""

    class Late(FakeSlurm):
        def submit(
            self,
            script: Path | str,
            extra_args: Sequence[str] = (),
            *,
            variables: Collection[str] | None = None,
        ) -> SubmittedJob:
            super().submit(script, extra_args, variables=variables)
            raise SlurmUnreachableError("no answer within 20 s")

    class Silent(FakeSlurm):
        def submit(
            self,
            script: Path | str,
            extra_args: Sequence[str] = (),
            *,
            variables: Collection[str] | None = None,
        ) -> SubmittedJob:
            raise SlurmUnreachableError("no answer within 20 s")

    late = submit(prepared, tmp_path / "runs", Late())  # type: ignore[arg-type]
    assert late.job_id == 1
    last = RunFiles(RunLayout(late.directory)).ledger.events()[-1]
    assert (last.event, last.job_id) == (EventKind.ADOPTED, 1)
    with pytest.raises(SlurmUnreachableError):
        submit(prepared, tmp_path / "other", Silent())  # type: ignore[arg-type]
    (run,) = all_runs(tmp_path / "other")
    last = run.ledger.events()[-1]
    assert (last.event, last.answered) == (EventKind.SUBMIT_FAILED, False)


# -- What every node has to see: the files that the trainer's own checks look for ---------------


def train(directory: Path, *overrides: str) -> TrainConfig:
    prepared = prepare(TINY, "sandbox", overrides, runs=directory / "runs")
    assert prepared.supervise.inputs == input_paths(prepared.train)
    return prepared.train


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.sources=[]"], []),
        (["data.sources=[{path: a},{path: b}]"], ["a.bin", "a.idx", "b.bin", "b.idx"]),
        # token numbers need no tokenizer
        (["data.sources=[{path: a}]", "data.tokenizer=t.json"], ["a.bin", "a.idx"]),
    ],
)
def test_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], expected: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(input_paths(train(tmp_path, *overrides))) == [str(tmp_path / p) for p in expected]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data_format": "arrays", "data_validation": "/v"}, ["/a.npz", "/b.npz", "/v.npz"]),
        ({"data_format": "packed"}, ["/a.npz", "/b.npz"]),
        ({"task": "masked_language_modeling"}, ["/a.bin", "/a.idx", "/b.bin", "/b.idx", "/t.json"]),
    ],
)
def test_other_formats(tmp_path: Path, changes: dict[str, object], expected: list[str]) -> None:
    settings = train(
        tmp_path, "engine.name=ddp", "parallel.tp=1", "parallel.pp=1", "data.sources=[]"
    )
    assert isinstance(settings, ModuleConfig)
    given = {"data_blend": ((1.0, "/a"), (1.0, "/b")), "tokenizer": "/t.json"}
    assert list(input_paths(settings.model_copy(update={**given, **changes}))) == expected


def test_folders_of_images_and_weights_to_start_from(tmp_path: Path) -> None:
    settings = train(
        tmp_path, "engine.name=ddp", "parallel.tp=1", "parallel.pp=1", "data.sources=[]"
    )
    assert isinstance(settings, ModuleConfig)
    folder = tmp_path / "pictures"
    folder.mkdir()
    model = settings.model.model_copy(update={"pretrained": "/weights"})
    blend = ((1.0, str(folder)), (1.0, "/listed"))
    changes = {"data_format": "images", "data_blend": blend, "model": model}
    found = input_paths(settings.model_copy(update=changes))
    assert found == (str(folder), "/listed.npz", "/weights")


def test_what_slurm_makes_of_a_job_is_kept_and_told(prepared: Prepared, tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.messages = ("sbatch: be nice",)
    slurm.makes = {"partition": "other", "time_limit_seconds": 60.0, "comment": None, "name": "x"}
    done = submit(prepared, tmp_path / "runs", slurm)  # type: ignore[arg-type]
    assert done.answer.messages == slurm.messages
    follows = [change.partition("; ")[2] for change in done.answer.changes]
    assert follows == [
        "the profile does not describe it, so the plan knows nothing of its preemption",
        follows[1],
        "hpctrain knows the job by neither comment nor name, and may lose it",
        "hpctrain finds the job by its comment",
    ]
    assert "no time is left to train" in follows[1]
    last = RunFiles(RunLayout(done.directory)).ledger.events()[-1]
    assert (last.event, last.job_id, last.evidence) == (
        EventKind.JOB_CHANGED,
        1,
        done.answer.changes,
    )


def test_a_job_that_comes_back_no_more(prepared: Prepared, tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.makes = {"requeue": False}
    (change,) = submit(prepared, tmp_path / "runs", slurm).answer.changes  # type: ignore[arg-type]
    assert change.startswith("Slurm changed the requeue flag: asked on, is off; Slurm does not")


@pytest.mark.parametrize("gone", [True, False])
def test_nothing_is_told_of_a_job_that_nobody_knows(
    gone: bool, prepared: Prepared, tmp_path: Path
) -> None:
    class Forgetful(FakeSlurm):
        def jobs(self, ids: Collection[int]) -> dict[int, JobRecord]:
            if gone:
                return {}
            raise SlurmUnreachableError("Socket timed out")

    slurm = Forgetful()
    slurm.makes = {"partition": "other"}
    done = submit(prepared, tmp_path / "runs", slurm)  # type: ignore[arg-type]
    assert (done.job_id, done.answer.changes) == (1, ())


def test_submit_commands_and_clusters_of_a_profile(prepared: Prepared, tmp_path: Path) -> None:
    """Each is in the settings of the run; the name of the cluster in its ledger as well."""
    words = ("site_sbatch", "--project", "x")
    wanted = SubmitSettings(words=words, cluster="far")
    config = prepared.supervise.model_copy(update={"submission": wanted})
    slurm, far = FakeSlurm(), FakeSlurm()
    slurm.clusters["far"] = far
    done = submit(replace(prepared, supervise=config), tmp_path / "runs", slurm)  # type: ignore[arg-type]
    assert (list(far.scripts), slurm.scripts, far.commands) == ([1], {}, [words])
    events = RunFiles(RunLayout(done.directory)).ledger.events()
    assert {event.slurm_cluster for event in events} == {"far"}
    assert slurm_cluster_of(events) == cluster_of(events) == "far"
