"""The table of words that job scripts consist of, `words.yaml`, and how options are read by it.

Belongs here: names and arity of options, and the sentences about them. Does not belong here: what
is made of a line (`adoption`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from hpctrain.adopt.variables import Piece, Text, literal_of, shell_text
from hpctrain.spec.document import Document
from hpctrain.spec.files import load_packaged

PACKAGED_WORDS = Path(__file__).with_name("words.yaml")


class SlurmWords(Document):
    """Options of sbatch and srun: `short` names, those without a value, reasons of our own."""

    short: dict[str, str]
    other_names: dict[str, str]
    flags: tuple[str, ...]
    optional: tuple[str, ...]
    sentences: dict[str, str]


class LauncherWords(Document):
    """A program that starts ranks, its options without a value, and those that hpctrain sets.

    `interpreter`: the words with which it starts the script itself. `keeps`: other options stay,
    as `launcher_arguments`.
    """

    title: str
    programs: tuple[str, ...]
    launch: Literal["srun", "torchrun", "accelerate"]
    like: str | None = None
    flags: tuple[str, ...] = ()
    two_values: tuple[str, ...] = ()
    interpreter: tuple[str, ...] = ()
    keeps: bool = False
    remark: str | None = None
    ours: dict[str, str] = Field({})


class ContainerWords(Document):
    """A program that runs a command in an image."""

    program: str
    launcher: Literal["apptainer", "singularity"]


class NeedlessWords(Document):
    """Commands without which a run is the same."""

    words: tuple[str, ...]
    reason: str


class CommandWords(Document):
    """What is known of commands beside the trainer."""

    needless: tuple[NeedlessWords, ...]
    before: str


class TrainerOptions(Document):
    """Options by which trainers are told where to resume, where to write and when to stop."""

    resume: tuple[str, ...]
    output: tuple[str, ...]
    steps: tuple[str, ...]


class AddedWords(Document):
    """Words for the trainer of an adapter, where its command has none of that kind."""

    output: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()


class KnownWords(Document):
    """`words.yaml`."""

    slurm: SlurmWords
    launchers: tuple[LauncherWords, ...]
    containers: tuple[ContainerWords, ...]
    container_flags: tuple[str, ...]
    container_short: dict[str, str]
    own_variables: tuple[str, ...]
    fabric: tuple[str, ...]
    commands: CommandWords
    options: TrainerOptions
    added: dict[str, AddedWords]


# Of a variable whose words are options.
_OPTIONS_NAME = re.compile(r"^\$\{?\w*(ARG|OPT|FLAG|EXTRA|PARAM)", re.IGNORECASE)
WORDS = load_packaged(KnownWords, PACKAGED_WORDS)


@dataclass(frozen=True)
class Option:
    """An option that a command got: its long name, its value (None: without), and as written."""

    name: str
    value: Text | None
    written: tuple[Text, ...]


def slurm_options(words: Sequence[Text], command: str) -> tuple[list[Option], list[Text]]:
    """Read the options of `sbatch` or `srun`; the rest is what srun starts."""
    table = WORDS.slurm
    flags = (*table.flags, *table.optional, *(("wait",) if command == "sbatch" else ()))
    return _read(words, flags, table.short, table.other_names)


def launcher_options(
    words: Sequence[Text], launcher: LauncherWords
) -> tuple[list[Option], list[Text]]:
    """Read the options of a launcher; the rest is the script with its arguments."""
    like = next((one for one in WORDS.launchers if one.title == launcher.like), launcher)
    return _read(words, (*launcher.flags, *like.flags), None, {}, launcher.two_values)


def container_options(words: Sequence[Text]) -> tuple[list[Option], list[Text]]:
    """Read the options of apptainer; the rest is the image and the command in it."""
    return _read(words, WORDS.container_flags, WORDS.container_short, {})


def _read(
    words: Sequence[Text],
    flags: Sequence[str],
    short: Mapping[str, str] | None,
    names: Mapping[str, str],
    two_values: Sequence[str] = (),
) -> tuple[list[Option], list[Text]]:
    """Split words into options and the rest; `short` None: a single dash is like two.

    A word of which nothing is known is an option without a name.
    """
    found: list[Option] = []
    at = 0
    while at < len(words):
        word, text = words[at], shell_text(words[at])
        at += 1
        if len(word) == 1 and _OPTIONS_NAME.search(word[0].unknown):
            found.append(Option("", None, (word,)))
            continue
        if text == "--":
            return found, list(words[at:])
        if not text.startswith("-") or text == "-":
            return found, list(words[at - 1 :])
        name, equals, _ = text.partition("=")
        value = _without(word, len(name) + 1) if equals else None
        if short is None:
            name = name.lstrip("-").replace("_", "-")
        elif text.startswith("--"):
            name = names.get(name[2:], name[2:])
        else:
            letters, name = text[1:], short.get(text[1], text[1])
            if len(letters) > 1 and name in flags and letters.isalpha():
                found += [Option(short.get(one, one), None, (word,)) for one in letters]
                continue
            rest = 3 if letters[1:2] == "=" else 2
            value = _without(word, rest) if len(letters) > 1 else None
        written = [word]
        for _ in range(0 if name in flags else 1 + (name in two_values)):
            if value is None and at < len(words):
                written.append(words[at])
                at += 1
        if value is None and len(written) > 1:
            value = written[-1]
        found.append(Option(name, value, tuple(written)))
    return found, []


def _without(word: Text, count: int) -> Text:
    """Return a word without its first characters, which are literal."""
    rest = word[0].text[count:]
    return (Piece(rest), *word[1:]) if rest else word[1:]


def value_text(option: Option) -> str | None:
    """Return the literal value of an option; None where it has none, or where it is not known."""
    return None if option.value is None else literal_of(option.value)
