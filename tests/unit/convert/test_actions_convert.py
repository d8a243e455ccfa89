"""Starting the process that converts weights, and saying how it ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stand_ins import python_program

from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem, UsageError
from hpctrain.convert.of_spec import convert_weights
from hpctrain.records.conversions import ConversionFailure, ConversionReport

REPORT = ConversionReport(
    source="a", target="b", form="megatron-core", model_type="gpt2", parameters=7, dtype="float32"
)


def interpreter(directory: Path, body: str) -> str:
    """A program that is started in place of Python, with the same arguments."""
    return str(python_program(directory / "python", f"import os, sys\n{body}"))


def test_the_program_is_told_both_directories(tmp_path: Path) -> None:
    python = interpreter(
        tmp_path,
        "assert sys.argv[1:] == ['-P', '-m', 'hpctrain.convert', 'a', 'b'], sys.argv\n"
        "assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
        f"print({REPORT.model_dump_json()!r})",
    )
    assert convert_weights(Path("a"), Path("b"), python=python) == REPORT


def test_what_is_wrong_with_the_weights_comes_through(tmp_path: Path) -> None:
    problem = Problem("has no weight x", file="a", hint="stage it")
    told = ConversionFailure.of(InvalidInputError([problem])).model_dump_json()
    python = interpreter(tmp_path, f"print({told!r}); sys.exit(3)")
    with pytest.raises(InvalidInputError) as caught:
        convert_weights(Path("a"), Path("b"), python=python)
    assert caught.value.problems == (problem,)


@pytest.mark.parametrize(
    ("body", "words", "hint"),
    [
        ("sys.exit(\"No module named 'peft'\")", "has no peft", "huggingface"),
        ("os.kill(os.getpid(), 9)", "was killed", "memory"),
        ("sys.exit('boom')", r"\(exit code 1\): boom", ""),
    ],
)
def test_other_endings(tmp_path: Path, body: str, words: str, hint: str) -> None:
    with pytest.raises(HpctrainError, match=words) as caught:
        convert_weights(Path("a"), Path("b"), python=interpreter(tmp_path, body))
    assert hint in (caught.value.hint or "")


def test_what_is_missing_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real program, in front of whose torch there is one that says it is not there."""
    absent = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    (tmp_path / "torch.py").write_text(absent)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(UsageError, match="has no torch"):
        convert_weights(tmp_path / "a", Path("/proc/b"))


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(HpctrainError, match="cannot start"):
        convert_weights(Path("a"), Path("b"), python=str(tmp_path / "none"))
