"""Recognises secrets among variables by their names and by the form of their values.

Belongs here: which names and forms are those of secrets. Does not belong here: which fields are
checked, and anything that would print a value.

A job script is copied to the nodes, shown by `scontrol write batch_script`, and kept by accounting
(AccountingStoreFlags=job_script): who can read one of these reads the secret.
"""

from __future__ import annotations

import re

from hpctrain.spec.job_text import job_text_parts

HINT = (
    "name it in `environment.inherit` and export it where you submit: the value stays out of files"
)
_WORDS = frozenset(
    {"APIKEY", "CREDENTIAL", "CREDENTIALS", "KEY", "KEYS", "PASSPHRASE", "PASSWD", "PASSWORD"}
    | {"SECRET", "SECRETS", "TOKEN"}
)
# Last parts of names whose values are no secrets themselves: SSH_KEY_PATH, MAX_TOKEN_LENGTH.
_HARMLESS_ENDS = frozenset(
    {"BITS", "COUNT", "DIR", "DIRECTORY", "FILE", "LENGTH", "LIMIT", "NAME", "PATH", "SIZE"}
    | {"TYPE", "URL"}
)
# Names that hold the path of a file by convention.
_PATHS = frozenset({"AWS_SHARED_CREDENTIALS", "GOOGLE_APPLICATION_CREDENTIALS"})
# A switch or a small number, as of HF_HUB_DISABLE_IMPLICIT_TOKEN.
_SWITCH = re.compile(r"|\d{1,4}|true|false|yes|no|on|off", re.IGNORECASE)
# Tokens of Hugging Face, OpenAI and others, GitHub, GitLab, AWS, Slack, NVIDIA; JSON Web Tokens;
# private keys.
_FORMS = re.compile(
    r"hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}|xox[abprs]-[\w-]{10,}|nvapi-[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.|-----BEGIN [A-Z ]{0,20}PRIVATE KEY"
)


def secret_reason(name: str, value: str) -> str | None:
    """Return why a variable looks like a secret, without its value; None if it does not.

    A value that the job takes from another variable (`$HF_TOKEN`) is none.
    """
    literal = "".join(part for part in job_text_parts(value) if isinstance(part, str))
    if _FORMS.search(literal):
        return f"the value of {name} has the form of a secret"
    parts = name.upper().split("_")
    named = not _WORDS.isdisjoint(parts) and parts[-1] not in _HARMLESS_ENDS
    if not named or name.upper() in _PATHS or _SWITCH.fullmatch(literal):
        return None
    return f"{name} is named like a secret"
