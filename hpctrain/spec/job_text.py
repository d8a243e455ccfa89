"""Text with variables in it, `$SCRATCH/cache/${SLURM_JOB_ID}`, and where their values are put in.

There are two kinds of fields. What stands in the script of the job is a `JobText`: the job puts in
the values. What hpctrain opens itself before the queue, or what stands in settings that are written
then, is a `SubmitText`: the values are those of where the document is read, and are recorded.
Belongs here: which texts are allowed, and their parts. Does not belong here: quoting for bash
(`hpctrain.job.render.quoting`). Nothing else is ever evaluated: no command, no arithmetic, no
pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, PlainSerializer, ValidationInfo

# POSIX.1-2017, 2.6.2 Parameter Expansion: only the two plain forms of a name.
_PARTS = re.compile(
    r"\$(?P<bare>[A-Za-z_][A-Za-z0-9_]*)|\$\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)\}|(?P<dollar>\$\$)"
)


@dataclass(frozen=True)
class Expansion:
    """A variable whose value the job puts in its place."""

    name: str


def job_text_parts(text: str) -> tuple[str | Expansion, ...]:
    """Split a text into literal parts and variables; `$$` is one literal dollar sign.

    Raises ValueError for any other dollar sign.
    """
    parts: list[str | Expansion] = []
    end = 0
    for found in _PARTS.finditer(text):
        parts.append(_literal(text[end : found.start()]))
        name = found["bare"] or found["braced"]
        parts.append(Expansion(name) if name else "$")
        end = found.end()
    parts.append(_literal(text[end:]))
    return tuple(part for part in parts if part != "")


def expanded_names(text: str) -> tuple[str, ...]:
    """List the variables of a text in their order, each once."""
    names = [part.name for part in job_text_parts(text) if isinstance(part, Expansion)]
    return tuple(dict.fromkeys(names))


def literal_text(text: str) -> str | None:
    """Return the text that the job will see, or None where it depends on the job."""
    parts = job_text_parts(text)
    return None if any(isinstance(part, Expansion) for part in parts) else "".join(map(str, parts))


def _literal(text: str) -> str:
    if "$" in text:
        raise ValueError(
            "only variables are expanded, `$NAME` or `${NAME}`, and no command or pattern is run: "
            "write `$$` for a dollar sign"
        )
    return text


class UnsetNameError(ValueError):
    """A name in a text that has no value where it is put in, and what to do about it."""

    hint = "export it, or write its value"


def expanded_text(text: str, environment: Mapping[str, str]) -> str:
    """Put in the values of an environment. Raises UnsetNameError for one that is unset or empty."""
    parts = []
    for part in job_text_parts(text):
        if isinstance(part, Expansion) and not environment.get(part.name):
            raise UnsetNameError(f"{part.name} is not set here")
        parts.append(environment[part.name] if isinstance(part, Expansion) else part)
    return "".join(parts)


def _checked(text: str) -> str:
    job_text_parts(text)
    return text


# Key of pydantic's validation context: the environment of who reads a document.
ENVIRONMENT = "environment"


def expanded_here(text: str, info: ValidationInfo) -> str:
    """Put in the values while a file is read; without a file, such as in a copy, they are there."""
    context: Mapping[str, Any] = info.context or {}
    if ENVIRONMENT in context:
        return expanded_text(text, context[ENVIRONMENT])
    return text.replace("$$", "$")


JobText = Annotated[str, AfterValidator(_checked)]
# Copies of documents are read by the loader again, to which a dollar sign is `$$`.
SubmitText = Annotated[
    str,
    AfterValidator(expanded_here),
    PlainSerializer(lambda text: text.replace("$", "$$"), return_type=str, when_used="json"),
]


# -- Recognises secrets among variables by their names and by the form of their values ----------


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


# Options of programs that take a secret. Others end alike: `--pad-token`, `--json-keys`.
_SECRET_OPTION = re.compile(
    r"(?:^|_)(?:(?:access|api|auth|aws|github|gitlab|hf|hub|login|openai|private|secret|wandb)_?"
    r"(?:key|token)|credentials?|passphrase|passwd|password|secret)$",
    re.IGNORECASE,
)
_NAMED_VALUES = (
    re.compile(r"(?<![\w.-])([\w.-]+)=['\"]?([^\s'\";]+)"),
    re.compile(r"(?<![\w.-])(--?[A-Za-z][\w.-]*)\s+['\"]?([^\s'\";]+)"),
)


def secret_in_words(words: Sequence[str]) -> tuple[int, str] | None:
    """Find a secret among the words of a command; returns the number of the word and the reason.

    It follows an option that is named like one (`--wandb-key VALUE`, `api_key=VALUE`), or has the
    form of one. What the job takes from a variable (`$HF_TOKEN`) is none.
    """
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not equals:
            name, value = (words[number - 1] if number else ""), word
        reason = _secret_of_option(name, value)
        if reason is not None:
            return number, reason
    return None


def secret_in_script(text: str) -> str | None:
    """Return why a text for bash looks like one with a secret in it; None if it does not."""
    found = (
        _secret_of_option(one[1], one[2])
        for pattern in _NAMED_VALUES
        for one in pattern.finditer(text)
    )
    form = "it has a text of the form of a secret" if _FORMS.search(text) else None
    return next((reason for reason in found if reason is not None), form)


def _secret_of_option(name: str, value: str) -> str | None:
    option = name.lstrip("-").replace("-", "_").replace(".", "_")
    literal = re.sub(r"\$\{?\w+\}?", "", value)
    if _FORMS.search(literal):
        return "a word has the form of a secret"
    if not _SECRET_OPTION.search(option) or value[:1] in ("-", "$") or _SWITCH.fullmatch(literal):
        return None
    return f"`{name}` is named like a secret"


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
