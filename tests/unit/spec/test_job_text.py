"""Values that exist in the job only: what is expanded, and that nothing else is evaluated."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from wrong_specs import VALID, problems_of, shown

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.render.quoting import sh_expanded
from hpctrain.spec.job_text import expanded_names, job_text_parts, literal_text
from hpctrain.spec.loader import load_profile, load_run_spec

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
    assert "SCRATCH: parameter null or not set" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("text", ["$(id)", "$", "${X:-y}", "${X", "$1", "a$ b", "$((1))"])
def test_other_dollar_signs_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="only variables are expanded"):
        job_text_parts(text)


def test_names_and_literals() -> None:
    assert expanded_names("$A/${B}/$A") == ("A", "B")
    assert literal_text("100$$") == "100$"
    assert literal_text("$A") is None


# -- Secrets by value are refused in specs and profiles, and no message shows one ---------------


VALUE = "0123abcd" * 4
SECRETS = {
    "WANDB_API_KEY": VALUE,
    "HF_TOKEN": VALUE,
    "MY_PASSWORD": "hunter2",
    "AWS_SECRET_ACCESS_KEY": f"/{VALUE}",
    "AWS_ACCESS_KEY_ID": VALUE,
    "db_credentials": "u:p",
    "HARMLESS": f"hf_{VALUE}",
    "ALSO": f"https://x:ghp_{VALUE}@host",
    "ANOTHER": f"sk-proj-{VALUE}",
    "ID": "AKIA" + "ABCD1234" * 2,
}
HARMLESS = {
    "TOKENIZERS_PARALLELISM": "false",
    "SSH_KEY_PATH": "/etc/site/key",
    "MAX_TOKEN_LENGTH": "2048",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "GOOGLE_APPLICATION_CREDENTIALS": "/etc/key.json",
    "HF_TOKEN": "$SITE_TOKEN",
    "KEYBOARD": "qwerty",
    "TASK": "sk-1",
}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_by_value_is_refused_and_not_shown(tmp_path: Path, name: str) -> None:
    value = SECRETS[name]
    found = problems_of(tmp_path, f"{VALID}environment: {{variables: {{{name}: '{value}'}}}}\n")
    (line,) = shown(tmp_path, found)
    assert "secret" in line and "`environment.inherit`" in line
    assert line.startswith("8:") and value not in line
    option = f"environment.variables.{name}={value}"
    assert all(value not in one for one in shown(tmp_path, problems_of(tmp_path, VALID, option)))
    text = (
        f"extends: sandbox\nname: o\nenvironment: [{{name: {name}, value: '{value}', reason: r e}}]"
    )
    (tmp_path / "o.yaml").write_text(f"{text}\n")
    with pytest.raises(InvalidInputError, match="secret") as caught:
        load_profile(tmp_path / "o.yaml")
    assert value not in str(caught.value)


def test_what_only_looks_like_a_secret_is_taken(tmp_path: Path) -> None:
    lines = "".join(f"    {name}: '{value}'\n" for name, value in HARMLESS.items())
    (tmp_path / "spec.yaml").write_text(f"{VALID}environment:\n  variables:\n{lines}")
    document = load_run_spec(tmp_path / "spec.yaml").document
    assert document.environment.variables == HARMLESS
