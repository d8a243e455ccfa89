"""First stage: find and read the input, get a tokenizer, and plan the shards.

Belongs here: the options, which combinations of them are valid, and from them to a plan. Does not
belong here: the command-line parser (see `__main__`), making shards and merging them (see
`stages`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from hpctrain.base.errors import InvalidInputError, Problem, UsageError
from hpctrain.data.making.corpus import (
    DEFAULT_SUFFIXES,
    LINES_SUFFIX,
    Corpus,
    batches,
    documents,
    find_files,
    find_stdlib,
    read_corpus,
)
from hpctrain.data.making.images import image_corpus
from hpctrain.data.making.labelled_text import find_classes
from hpctrain.data.making.publication import StagingDirectory, refuse_to_replace_tokenizer
from hpctrain.data.making.shards import (
    DatasetPlan,
    Recipe,
    ShardedFormat,
    cut_into_shards,
    read_plan,
)
from hpctrain.data.making.text_tokenizers import (
    load_hugging_face,
    load_tokenizer,
    tokenizer_digest,
    tokenizer_file,
    train_tokenizer,
)
from hpctrain.data.making.tokenized_text import BATCH_CHARACTERS
from hpctrain.records.datasets import DatasetFormat, DatasetRequest
from hpctrain.train.datasets.image_listing import list_images

DEFAULT_VOCAB_SIZE = 4096
BUILTIN_MAX_BYTES = 4_000_000
_SKIPPED_SHOWN = 20

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

Log = Callable[[str], None]


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


def find_corpus(options: PrepareOptions, log: Log) -> Corpus:
    """Find and read the input; logs what was skipped. Raises InvalidInputError if none is left."""
    if options.format == "images":
        return image_corpus(list_images(options.inputs[0]), options.inputs[0].absolute())
    if options.builtin:
        limit = options.max_bytes or BUILTIN_MAX_BYTES
        corpus = read_corpus(find_stdlib(), limit, options.shard_bytes, lines=False)
    else:
        files = find_files(options.inputs, options.effective_suffixes)
        lines = True if options.reads_lines else None
        corpus = read_corpus(files, options.max_bytes, options.shard_bytes, lines=lines)
    log(
        f"read {corpus.files} files, {corpus.text_bytes} bytes; "
        f"skipped {len(corpus.skipped)} files, {corpus.over_budget_files} beyond --max-bytes"
    )
    for skipped in corpus.skipped[:_SKIPPED_SHOWN]:
        log(f"skipped {skipped.name}: {skipped.reason}")
    if len(corpus.skipped) > _SKIPPED_SHOWN:
        log(f"skipped {len(corpus.skipped) - _SKIPPED_SHOWN} more, all named in the --json report")
    if not corpus.sources:
        counts = f"{len(corpus.skipped)} skipped, {corpus.over_budget_files} beyond --max-bytes"
        raise InvalidInputError([Problem(f"no text in the input ({counts})")])
    return corpus


def tokenizer_reference(options: PrepareOptions) -> str | None:
    """Return the tokenizer as the sidecar names it: relative if it lies beside the dataset."""
    if options.format == "images":
        return None
    path = tokenizer_file(options.tokenizer_target).absolute()
    return path.name if path.parent == options.output.absolute().parent else str(path)


def request_digest(options: PrepareOptions, corpus_sha256: str) -> str:
    """Digest everything that the dataset's files depend on. Raises InvalidInputError."""
    tokenizer = None
    if options.tokenizer is not None:
        path = options.tokenizer
        tokenizer = tokenizer_digest(path) if options.hugging_face else _digest_of_file(path)
    basic = [1, corpus_sha256, options.vocab_size, tokenizer, tokenizer_reference(options)]
    more = [
        *("" if options.format == "tokens" else options.format,),
        *("" if options.text_field == DEFAULT_FIELD else options.text_field,),
        *(options.seq_length, _template(options), list(options.classes)),
    ]
    # digests of plain tokens stay as they were before the other options existed
    text = json.dumps([*basic, *more] if any(more) else basic)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest_of_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        problem = Problem(f"cannot be read: {error.strerror}", file=str(path))
        raise InvalidInputError([problem]) from error


def _template(options: PrepareOptions) -> str | None:
    """Read the chat template. Raises InvalidInputError."""
    path = options.chat_template
    if path is None:
        return None
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError([Problem(f"cannot be read: {error}", file=str(path))]) from error


def obtain_plan(
    options: PrepareOptions, corpus: Corpus, digest: str, staging: StagingDirectory, log: Log
) -> DatasetPlan:
    """Reuse the plan of an earlier attempt, or make a new one. Raises InvalidInputError."""
    earlier = read_plan(staging.shards)
    if earlier is not None and earlier.request_sha256 == digest:
        path = earlier.recipe.tokenizer
        # a trained tokenizer may have been renamed to its target before the attempt ended
        if path is None or path.exists():
            log("resuming with the shards of an earlier attempt")
            return earlier
    recipe = _recipe(options, corpus, staging, log)
    return DatasetPlan(
        recipe=recipe,
        shards=cut_into_shards(recipe, corpus.sources, options.shard_bytes),
        request_sha256=digest,
        sources_sha256=corpus.sha256,
        text_bytes=corpus.text_bytes,
        skipped=corpus.skipped,
        over_budget_files=corpus.over_budget_files,
        tokenizer_reference=tokenizer_reference(options),
        tokenizer_target=options.tokenizer_target.absolute() if options.trains_tokenizer else None,
    )


def _recipe(options: PrepareOptions, corpus: Corpus, staging: StagingDirectory, log: Log) -> Recipe:
    assert options.format != "arrays", "has no shards"
    sharded_format: ShardedFormat = options.format
    if sharded_format == "images":
        return Recipe(format=sharded_format, directory=options.inputs[0].absolute())
    if options.hugging_face:
        assert options.tokenizer is not None
        log(f"using the tokenizer {options.tokenizer}")
        path = options.tokenizer.absolute()
        vocab_size, digest = load_hugging_face(options.tokenizer).vocab_size, tokenizer_digest(path)
    else:
        path, vocab_size = _byte_tokenizer(options, corpus, staging, log)
        digest = _digest_of_file(path)
    if options.vocab_size not in (None, vocab_size):
        message = f"has {vocab_size} tokens, but --vocab-size is {options.vocab_size}"
        raise InvalidInputError([Problem(message, file=str(options.tokenizer))])
    classes: tuple[str, ...] = ()
    if options.format == "examples":
        classes = options.classes or find_classes(corpus.sources)
    return Recipe(
        format=sharded_format,
        tokenizer=path,
        tokenizer_sha256=digest,
        hugging_face=options.hugging_face,
        vocab_size=vocab_size,
        field=options.text_field,
        seq_length=options.seq_length,
        chat_template=_template(options),
        classes=classes,
    )


def _byte_tokenizer(
    options: PrepareOptions, corpus: Corpus, staging: StagingDirectory, log: Log
) -> tuple[Path, int]:
    """Load or train a byte-level tokenizer; returns its path and its number of tokens."""
    if options.tokenizer is not None:
        log(f"using the tokenizer {options.tokenizer}")
        return options.tokenizer.absolute(), load_tokenizer(options.tokenizer).vocab_size
    vocab_size = DEFAULT_VOCAB_SIZE if options.vocab_size is None else options.vocab_size
    log(f"training a tokenizer of {vocab_size} tokens")
    texts = batches(documents(corpus.sources, options.text_field), BATCH_CHARACTERS)
    text = train_tokenizer(texts, vocab_size).to_json()
    if not options.force:
        refuse_to_replace_tokenizer(options.tokenizer_target, text)
    staging.tokenizer.write_text(text, "utf-8")
    return staging.tokenizer.absolute(), vocab_size
