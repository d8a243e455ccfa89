"""What somebody asks for: the options of the program, and which of them go together.

Belongs here: contradictions that need no file to be found. Does not belong here: the command
line's words (see `hpctrain.prepare`), reading the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.errors import UsageError
from hpctrain.prepare.corpus import DEFAULT_SUFFIXES, LINES_SUFFIX
from hpctrain.spec.data import DataFormat

Builtin = Literal["stdlib", "digits"]
Stage = Literal["all", "plan", "merge"]
DEFAULT_FIELD = "text"

# Options that mean something for some formats only: name of the field -> formats.
_ONLY_FOR: dict[str, tuple[DataFormat, ...]] = {
    "suffixes": ("tokens", "packed", "examples"),
    "max_bytes": ("tokens",),
    "vocab_size": ("tokens",),
    "tokenizer": ("tokens", "packed", "examples"),
    "tokenizer_output": ("tokens",),
    "seq_length": ("packed", "examples"),
    "chat_template": ("packed",),
    "classes": ("examples",),
    "field": ("tokens", "examples"),
}
_OPTIONS = {"suffixes": "--suffix", "seq_length": "--seq"}


@dataclass(frozen=True)
class Request:
    """The options. `None` and empty values were not given."""

    output: Path
    inputs: tuple[Path, ...]
    builtin: Builtin | None
    format: DataFormat
    suffixes: tuple[str, ...]
    max_bytes: int | None
    vocab_size: int | None
    tokenizer: Path | None
    tokenizer_output: Path | None
    field: str | None
    seq_length: int | None
    chat_template: Path | None
    classes: tuple[str, ...]
    workers: int
    shard_bytes: int
    force: bool
    stage: Stage

    @property
    def text_field(self) -> str:
        return self.field or DEFAULT_FIELD

    @property
    def reads_lines(self) -> bool:
        """True if every input is JSONL, whatever its name."""
        return self.format in ("packed", "examples")

    @property
    def wanted_suffixes(self) -> tuple[str, ...]:
        return self.suffixes or ((LINES_SUFFIX,) if self.reads_lines else DEFAULT_SUFFIXES)

    @property
    def hugging_face(self) -> bool:
        """True if transformers has to load the tokenizer: a directory, or for labels and chats."""
        return self.tokenizer is not None and (self.tokenizer.is_dir() or self.reads_lines)

    @property
    def trains_tokenizer(self) -> bool:
        return self.format == "tokens" and self.tokenizer is None

    @property
    def tokenizer_target(self) -> Path:
        """Where the dataset's tokenizer is, or will be."""
        chosen = self.tokenizer or self.tokenizer_output
        return chosen or self.output.with_name("tokenizer.json")


def check_usage(request: Request) -> None:
    """Raise UsageError for options that contradict each other."""
    if bool(request.inputs) == (request.builtin is not None):
        raise UsageError("give either files and directories, or --builtin")
    if not request.output.name:
        raise UsageError("--output must end with the name of the dataset, such as data/text")
    expected = {"stdlib": "tokens", "digits": "arrays"}
    if request.builtin and request.format != expected[request.builtin]:
        words = f"--builtin {request.builtin} is for --format {expected[request.builtin]}"
        raise UsageError(f"{words}, not {request.format}")
    _check_options(request)
    _check_what_is_needed(request)


def _check_options(request: Request) -> None:
    for name, formats in _ONLY_FOR.items():
        if getattr(request, name) and request.format not in formats:
            option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
            raise UsageError(f"{option} is for --format {' and '.join(formats)}")
    if request.tokenizer is not None and request.tokenizer_output is not None:
        raise UsageError("--tokenizer-output is for a trained tokenizer, not with --tokenizer")
    if request.max_bytes is not None and request.max_bytes < 1:
        raise UsageError("--max-bytes must be at least 1")
    if request.workers < 1 or request.shard_bytes < 1:
        raise UsageError("--workers and --shard-bytes must be at least 1")


def _check_what_is_needed(request: Request) -> None:
    if request.reads_lines and request.tokenizer is None:
        raise UsageError(f"--format {request.format} needs --tokenizer, that of the model")
    if request.reads_lines and (request.seq_length or 0) < 2:
        raise UsageError(f"--format {request.format} needs --seq, tokens of a sample (at least 2)")
    if request.format == "images" and not (len(request.inputs) == 1 and request.inputs[0].is_dir()):
        raise UsageError("--format images needs one directory, with a directory for each class")
    if request.format == "arrays" and request.stage != "all":
        raise UsageError("--format arrays is made at once: it has no shards")
