"""Secrets by value are refused in specs and profiles, and no message shows one."""

from __future__ import annotations

from pathlib import Path

import pytest
from wrong_specs import VALID, problems_of, shown

from hpctrain.base.errors import InvalidInputError
from hpctrain.spec.loader import load_profile, load_run_spec

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
