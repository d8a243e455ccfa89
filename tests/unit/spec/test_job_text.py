"""Values that exist in the job only: what is expanded, and that nothing else is evaluated."""

from __future__ import annotations

import subprocess

import pytest

from hpctrain.job.render.quoting import sh_expanded
from hpctrain.spec.job_text import expanded_names, job_text_parts, literal_text

HOSTILE = [
    "plain",
    "two words",
    "$SCRATCH/cache",
    "${SCRATCH}_x/$NAME",
    "$$(touch pwned)",
    "$$HOME and $$$$",
    "`touch pwned`/$SCRATCH",
    "quote \" and ' and \\ and $NAME",
    "semi; touch pwned # $NAME",
    "line\nbreak $NAME",
    "!! ~ * ? {a,b} $NAME",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_bash_puts_in_variables_and_nothing_else(text: str, tmp_path: object) -> None:
    values = {"SCRATCH": "/scratch/$(touch pwned)", "NAME": 'a "b" `c`'}
    expected = "".join(
        part if isinstance(part, str) else values[part.name] for part in job_text_parts(text)
    )
    script = f'set -eu; X={sh_expanded(text)}; printf %s "$X"; ls -A >&2'
    done = subprocess.run(
        ["bash", "-c", script], env=values, cwd=str(tmp_path), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_a_variable_that_the_job_lacks_ends_it() -> None:
    script = f"X={sh_expanded('$SCRATCH/cache')}; echo after"
    done = subprocess.run(["bash", "-c", script], env={}, capture_output=True, text=True)
    assert done.returncode != 0
    assert "SCRATCH: is not set in this job" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("text", ["$(id)", "$", "${X:-y}", "${X", "$1", "a$ b", "$((1))"])
def test_other_dollar_signs_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="only variables are expanded"):
        job_text_parts(text)


def test_names_and_literals() -> None:
    assert expanded_names("$A/${B}/$A") == ("A", "B")
    assert literal_text("100$$") == "100$"
    assert literal_text("$A") is None
