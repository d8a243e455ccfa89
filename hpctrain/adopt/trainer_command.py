"""Take the line that starts a trainer apart: srun, container, launcher, and the program itself.

Belongs here: which words are whose. Does not belong here: options of Slurm (`slurm_requests`), the
spec's fields (`adoption`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.adopt.known_words import (
    WORDS,
    ContainerWords,
    LauncherWords,
    Option,
    container_options,
    launcher_options,
    slurm_options,
)
from hpctrain.adopt.variables import Piece, Text, literal_of, shell_text

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=")
_PYTHON = re.compile(r"python[0-9.]*|ipython|uv|pixi|poetry|hatch")
_IN_FRONT = frozenset({"exec", "time", "nohup", "command", "unbuffer", "sudo"})
_TRAINS = re.compile(r"train|sft|dpo|grpo|finetun|fine_tun|main|run", re.IGNORECASE)
_PREPARES = re.compile(
    r"prep|convert|download|eval|test|merge|infer|serve|install|tokeniz|-c$|pip$|venv$|generate",
    re.IGNORECASE,
)


@dataclass
class TrainerCommand:
    """A command that may start the training, as far as it is taken apart.

    `program`: the words of the trainer, without its launcher. `interpreter`: the Python of a
    launcher that starts the script itself. `script`: the text of `bash -c`, for whoever reads it as
    a script. `others`: words in front that mean nothing for a run.
    """

    line: int
    variables: list[tuple[str, Text]] = field(default_factory=list)
    srun: list[Option] | None = None
    container: ContainerWords | None = None
    image: Text | None = None
    container_options: list[Option] = field(default_factory=list)
    launcher: LauncherWords | None = None
    launcher_options: list[Option] = field(default_factory=list)
    program: list[Text] = field(default_factory=list)
    script: str | None = None
    others: list[str] = field(default_factory=list)
    adapter: str | None = None

    @property
    def name(self) -> str:
        """What it is called in messages."""
        shown = " ".join(shell_text(word) for word in self.program[:3])
        return f"{self.launcher.title} {shown}" if self.launcher is not None else shown

    @property
    def score(self) -> float:
        """How likely this is the training: by its launcher, then by what it is called."""
        if not self.program:
            return 0.0
        words = [shell_text(word) for word in self.program]
        python = _PYTHON.fullmatch(words[0].rpartition("/")[2]) is not None
        script = any(word.endswith((".py", ".sh")) or word == "-m" for word in words[:6])
        base = 4.0 if self.launcher is not None else 3.0 if self.adapter is not None else 0.0
        base = base or (1.0 if python else 0.5 if script else 0.0)
        if base and (self.srun is not None or self.container is not None):
            base += 1.0
        files = (word for word in words if word.endswith((".py", ".sh")))
        called = next(files, " ".join(words[:4])).rpartition("/")[2]
        prepares = _PREPARES.search(called) or any(_PREPARES.fullmatch(w) for w in words[:4])
        more = (0.3 if _TRAINS.search(called) else 0.0) - (0.8 if prepares else 0.0)
        return base + more if base else 0.0


def taken_apart(words: Sequence[Text], line: int) -> TrainerCommand:
    """Take a command apart from its front."""
    found = TrainerCommand(line)
    left = list(words)
    while left:
        head = shell_text(left[0])
        base = head.rpartition("/")[2]
        assigned = _ASSIGNED.match(head)
        container = next((one for one in WORDS.containers if one.program == base), None)
        if assigned:
            value = left[0]
            rest = value[0].text[assigned.end() :]
            found.variables.append((assigned[1], (*((Piece(rest),) * bool(rest)), *value[1:])))
            left = left[1:]
        elif base in _IN_FRONT:
            found.others.append(head)
            left = left[1:]
        elif base == "env":
            left = left[1:]
            while left and shell_text(left[0]).startswith("-"):
                left = left[1:]
        elif base == "stdbuf":
            left = left[1:]
            while left and shell_text(left[0]).startswith("-"):
                found.others.append(f"stdbuf {shell_text(left[0])}")
                left = left[1:]
        elif base == "srun":
            found.srun, left = slurm_options(left[1:], "srun")
        elif container is not None and len(left) > 1:
            found.container = container
            options, left = container_options(left[2:])
            found.container_options = options
            found.image, left = (left[0], left[1:]) if left else (None, left)
        elif base in ("bash", "sh") and (place := _script_place(left)) is not None:
            found.script = shell_text(left[place])
            return found
        else:
            _launched(found, left)
            return found
    return found


def _script_place(words: Sequence[Text]) -> int | None:
    """Return the place of the text behind `-c`, with other letters or options around it."""
    for number, word in enumerate(words[1:], 1):
        text = shell_text(word)
        if not text.startswith("-"):
            return None
        if re.fullmatch(r"-[a-zA-Z]*c", text) and number + 1 < len(words):
            return number + 1
    return None


def _launched(found: TrainerCommand, words: list[Text]) -> None:
    """Find the launcher among the first words, such as in `uv run torchrun OPTIONS train.py`."""
    for begin in range(min(len(words), 6)):
        for launcher in WORDS.launchers:
            for program in launcher.programs:
                end = _program_end(words, begin, program)
                if end is None:
                    continue
                found.launcher = launcher
                found.launcher_options, rest = launcher_options(words[end:], launcher)
                found.program = _program(words[:begin], words[begin], rest, found)
                return
        text = shell_text(words[begin])
        if text.endswith((".py", ".sh")) or text == "--launcher":
            break
    found.program = words


def _program_end(words: Sequence[Text], begin: int, program: str) -> int | None:
    """Return the place behind a program that begins at one: by name, or as a module of Python."""
    names = program.split()
    texts = [shell_text(word) for word in words[begin : begin + 6]]
    if [texts[0].rpartition("/")[2], *texts[1 : len(names)]] == names:
        return begin + len(names)
    if not re.fullmatch(r"python[0-9.]*", texts[0].rpartition("/")[2]):
        return None
    for number, text in enumerate(texts[1:], 1):
        if text == "-m" and number + 1 < len(texts):
            return begin + number + 2 if texts[number + 1] == program else None
        if not text.startswith("-"):
            return None
    return None


def _program(before: list[Text], head: Text, rest: list[Text], found: TrainerCommand) -> list[Text]:
    """Return the trainer's own words: with its interpreter, where the launcher starts one."""
    launcher, names = found.launcher, {option.name for option in found.launcher_options}
    assert launcher is not None
    if not rest or not launcher.interpreter or names & {"no-python", "run-path"}:
        return [*before, *rest]
    folder, slash, base = shell_text(head).rpartition("/")
    python, *flags = launcher.interpreter
    python = f"{folder}{slash}{base if base.startswith('python') else python}"
    # torch/distributed/run.py: `cmd_args.append("-u")`, and `-m` for a module
    flags += ["-m"] if names & {"m", "module"} else []
    return [*before, *((Piece(one),) for one in (python, *flags)), *rest]


def matching_adapter(words: Sequence[Text], known: Mapping[str, Sequence[str]]) -> str | None:
    """Choose the adapter whose words stand in a command: that of the longest match."""
    texts = [shell_text(word) for word in words]
    forms = [{one, one.rpartition("/")[2], _option(one)} for one in texts]
    best: tuple[int, int, str] | None = None
    for name, entries in known.items():
        for entry in entries:
            parts = entry.split()
            wanted = [{part, _option(part)} for part in parts]
            for begin in range(len(forms) - len(parts) + 1):
                if all(forms[begin + number] & one for number, one in enumerate(wanted)):
                    rank = (len(parts), len(entry), name)
                    best = max(best, rank) if best is not None else rank
    return best[2] if best is not None else None


def _option(word: str) -> str:
    """Return the name of an option as all ways of writing it have in common."""
    name = word.partition("=")[0]
    return f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name


def trainer_options(
    words: Sequence[Text], names: Sequence[str]
) -> Iterator[tuple[int, str, Text | None]]:
    """Find options of a trainer: the place of the value's word, the name, and the value.

    `--max-steps 5`, `--max_steps=5` and `trainer.max_steps=5` are alike. None: without a value.
    """
    wanted = {one.replace("-", "_") for one in names}
    for place, word in enumerate(words):
        text = shell_text(word)
        name, equals, _ = text.partition("=")
        plain = name.lstrip("-+").replace("-", "_")
        if plain not in wanted or not (equals or name.startswith("-")):
            continue
        if equals:
            rest = word[0].text[len(name) + 1 :]
            yield place, name, (*((Piece(rest),) * bool(rest)), *word[1:])
        elif place + 1 < len(words) and not shell_text(words[place + 1]).startswith("--"):
            yield place + 1, name, words[place + 1]
        else:
            yield place, name, None


def with_value(word: Text, name: str, value: str) -> Text:
    """Return the word of an option with another value."""
    text = shell_text(word)
    return (Piece(f"{name}={value}" if text.startswith(f"{name}=") else value),)


def known_number(text: Text | None) -> int | None:
    """Return the whole number that a text is; None for any other."""
    plain = literal_of(text) if text is not None else None
    digits = plain.replace("_", "") if plain is not None else ""
    return int(digits) if digits.isdecimal() else None
