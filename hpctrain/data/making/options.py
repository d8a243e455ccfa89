"""The options of `python -m hpctrain.data.making`, and which combinations of them are valid.

Belongs here: contradictions that can be found without reading a file. Does not belong here: the
command-line parser (see `__main__`), reading the input.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hpctrain.base.errors import UsageError
from hpctrain.data.making.corpus import DEFAULT_SUFFIXES, LINES_SUFFIX
from hpctrain.records.datasets import DatasetFormat, DatasetRequest

PrepareStage = Literal["all", "plan", "merge"]
DEFAULT_FIELD = "text"

# Options that apply to some formats only: name of the field -> formats.
_ONLY_FOR: dict[str, tuple[DatasetFormat, ...]] = {
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


class PrepareOptions(DatasetRequest):
    """A dataset, and which stages of making it are done here."""

    stage: PrepareStage = "all"

    @property
    def text_field(self) -> str:
        return self.field or DEFAULT_FIELD

    @property
    def reads_lines(self) -> bool:
        """True if every input is JSONL, whatever its name."""
        return self.format in ("packed", "examples")

    @property
    def effective_suffixes(self) -> tuple[str, ...]:
        return self.suffixes or ((LINES_SUFFIX,) if self.reads_lines else DEFAULT_SUFFIXES)

    @property
    def hugging_face(self) -> bool:
        """True if transformers loads the tokenizer: a directory, or for labels and chats."""
        return self.tokenizer is not None and (self.tokenizer.is_dir() or self.reads_lines)

    @property
    def trains_tokenizer(self) -> bool:
        return self.format == "tokens" and self.tokenizer is None

    @property
    def tokenizer_target(self) -> Path:
        """Where the dataset's tokenizer is, or will be written."""
        chosen = self.tokenizer or self.tokenizer_output
        return chosen or self.output.with_name("tokenizer.json")


def check_usage(options: PrepareOptions) -> None:
    """Raise UsageError for options that contradict each other or are missing."""
    if bool(options.inputs) == (options.builtin is not None):
        raise UsageError("give either files and directories, or --builtin")
    if not options.output.name:
        raise UsageError("--output must end with the name of the dataset, such as data/text")
    expected = {"stdlib": "tokens", "digits": "arrays"}
    if options.builtin and options.format != expected[options.builtin]:
        message = f"--builtin {options.builtin} is for --format {expected[options.builtin]}"
        raise UsageError(f"{message}, not {options.format}")
    for name, formats in _ONLY_FOR.items():
        if getattr(options, name) and options.format not in formats:
            option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
            raise UsageError(f"{option} is for --format {' and '.join(formats)}")
    if options.tokenizer is not None and options.tokenizer_output is not None:
        raise UsageError("--tokenizer-output is for a trained tokenizer, not with --tokenizer")
    if options.max_bytes is not None and options.max_bytes < 1:
        raise UsageError("--max-bytes must be at least 1")
    if options.workers < 1 or options.shard_bytes < 1:
        raise UsageError("--workers and --shard-bytes must be at least 1")
    if options.reads_lines and options.tokenizer is None:
        raise UsageError(f"--format {options.format} needs --tokenizer, that of the model")
    if options.reads_lines and (options.seq_length or 0) < 2:
        raise UsageError(f"--format {options.format} needs --seq, tokens of a sample (at least 2)")
    if options.format == "images" and not (len(options.inputs) == 1 and options.inputs[0].is_dir()):
        raise UsageError("--format images needs one directory, with a directory for each class")
    if options.format == "arrays" and options.stage != "all":
        raise UsageError("--format arrays is made at once: it has no shards")
