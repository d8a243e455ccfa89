"""Starting the process that builds a plan, and saying how it ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planned_job import planned_job
from stand_ins import python_program

from hpctrain.base.errors import HpctrainError, InvalidInputError, UsageError
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.train_json import parse_train_config
from hpctrain.engines.verification import BuiltModel, BuiltStage
from hpctrain.job.verify import verify_plan
from hpctrain.plan.job import TrainingJob
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def planned() -> TrainingJob:
    return tiny()


def tiny(*overrides: str) -> TrainingJob:
    spec = load_run_spec(ROOT / "examples" / "gpt-tiny.yaml", overrides).document
    return planned_job(spec, load_profile(find_profile("sandbox")).document)


def interpreter(directory: Path, body: str) -> str:
    """A program that is started in place of Python, with the same arguments."""
    return str(python_program(directory / "python", f"import sys\n{body}"))


@pytest.mark.parametrize(
    "overrides",
    [(), ("engine.name=megatron-lm", "engine.checkout=/opt/lm")],
    ids=["megatron", "megatron-lm"],
)
def test_the_process_is_given_the_training_configuration(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    job = tiny(*overrides)
    stages = tuple(
        BuiltStage(index=s.index, rank=0, parameters=s.parameters_per_gpu, kept_bytes=None)
        for s in job.plan.stages
    )
    answer = BuiltModel(
        megatron_core_version="1", torch_version="2", stages=stages
    ).model_dump_json()
    told = tmp_path / "told.json"
    python = interpreter(
        tmp_path,
        "import os, shutil\n"
        "assert sys.argv[1:4] == ['-P', '-m', 'hpctrain.train.engines.megatron.verify'], sys.argv\n"
        "assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
        f"shutil.copy(sys.argv[4], {str(told)!r})\n"
        f"print({answer!r})",
    )
    verification = verify_plan(job, python=python)
    assert verification.equal and verification.megatron_core_version == "1"
    config = parse_train_config(told.read_text())
    assert isinstance(config, MegatronConfig) and config.model == job.spec.model


def test_missing_packages_are_named_with_what_to_install(
    planned: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real process, in front of whose torch there is one that says it is not there."""
    absent = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    (tmp_path / "torch.py").write_text(absent)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(HpctrainError, match="has no torch") as caught:
        verify_plan(planned)
    assert caught.value.hint == "pip install 'hpctrain[megatron]'"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("sys.exit('[rank0]: ValueError: no')", HpctrainError, r"\(exit code 1\): ValueError: no"),
        ("import os; os.kill(os.getpid(), 9)", HpctrainError, r"\(signal 9\): no message"),
        ("print('{}')", HpctrainError, r"\(exit code 0\)"),
        ("print('wrong', file=sys.stderr); sys.exit(3)", InvalidInputError, "^wrong$"),
        ("import time; time.sleep(600)", HpctrainError, "longer than 2 seconds"),
    ],
    ids=["crash", "killed", "no document", "wrong input", "too slow"],
)
def test_how_it_ended_is_told(
    planned: TrainingJob,
    tmp_path: Path,
    body: str,
    kind: type[HpctrainError],
    words: str,
) -> None:
    timeout_seconds = 2 if "seconds" in words else 300
    with pytest.raises(kind, match=words):
        verify_plan(planned, python=interpreter(tmp_path, body), timeout_seconds=timeout_seconds)


def test_an_interpreter_that_is_not_there(planned: TrainingJob, tmp_path: Path) -> None:
    with pytest.raises(HpctrainError, match=r"cannot start .*: No such file"):
        verify_plan(planned, python=str(tmp_path / "python"))


def test_other_engines_and_families_are_refused(planned: TrainingJob) -> None:
    fsdp = planned.plan.model_copy(update={"engine": "fsdp"})
    with pytest.raises(UsageError, match="the engine is fsdp"):
        verify_plan(replace(planned, plan=fsdp))
    vit = planned.spec.model.model_copy(update={"family": "vit"})
    with pytest.raises(UsageError, match="the family is vit"):
        verify_plan(replace(planned, spec=planned.spec.model_copy(update={"model": vit})))
