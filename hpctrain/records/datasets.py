"""The sidecar of a prepared dataset, `PREFIX.json`, and the report of the program that writes it.

Tokens for Megatron are a pair `PREFIX.bin` and `PREFIX.idx`; all other formats are one file of
arrays, `PREFIX.npz`, whose arrays `COLUMNS` names. Belongs here: these documents, which
`hpctrain.data.making` writes and `hpctrain.job` reads. Does not belong here: Megatron's
own `.bin`/`.idx` format, tokenizing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

END_OF_DOCUMENT = "<|endoftext|>"
NPZ_SUFFIX = ".npz"
ArrayFormat = Literal["packed", "examples", "images", "arrays"]
DatasetFormat = Literal["tokens", ArrayFormat]
Builtin = Literal["stdlib", "digits"]

# Format -> its arrays -> (kinds of NumPy's types, number of axes). The first axis counts samples.
COLUMNS: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    # tokens of several texts; 1 where the token that follows is learned; positions in each text
    "packed": {"tokens": ("ui", (2,)), "learned": ("ui", (2,)), "positions": ("ui", (2,))},
    # tokens with padding behind them; how many are no padding; the class
    "examples": {"tokens": ("ui", (2,)), "lengths": ("ui", (1,)), "labels": ("ui", (1,))},
    # the class; where the name of a file ends within `names`, which are relative to the sidecar's
    # `directory` and in UTF-8
    "images": {"labels": ("ui", (1,)), "ends": ("ui", (1,)), "names": ("u", (1,))},
    # pixels [sample, side, side] or [sample, colors, side, side], integers 0 to 255, or floating
    # point from 0 to 1; the class
    "arrays": {"x": ("uf", (3, 4)), "y": ("ui", (1,))},
}


def bin_path(prefix: Path) -> Path:
    """`PREFIX.bin`: the tokens. Appended, not replaced, since a prefix may contain dots."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`PREFIX.idx`: where documents and sequences begin."""
    return prefix.with_name(prefix.name + ".idx")


def npz_path(prefix: Path) -> Path:
    """`PREFIX.npz`, whether the suffix is given or not."""
    if prefix.suffix == NPZ_SUFFIX:
        return prefix
    return prefix.with_name(prefix.name + NPZ_SUFFIX)


def sidecar_path(prefix: Path) -> Path:
    """`PREFIX.json`: written last, so it stands for a complete dataset."""
    name = prefix.name.removesuffix(NPZ_SUFFIX)
    return prefix.with_name(name + ".json")


class DatasetDocument(BaseModel):
    """Base of the documents about datasets."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DatasetRequest(DatasetDocument):
    """The dataset to make; equal to the options of `python -m hpctrain.data.making`.

    Either `inputs` (files and directories) or `builtin` (`stdlib`: source of Python's standard
    library, `digits`: scikit-learn's). `vocab_size` includes the end of the document, whose id is
    `vocab_size - 1`. `seq_length` is the tokens of a sample, `shard_bytes` about the text of a
    shard, `max_bytes` the most text that is read. None or empty: not given.
    """

    output: Path
    inputs: tuple[Path, ...] = ()
    builtin: Builtin | None = None
    format: DatasetFormat = Field(
        default_factory=lambda given: "arrays" if given["builtin"] == "digits" else "tokens"
    )
    suffixes: tuple[str, ...] = ()
    max_bytes: int | None = None
    vocab_size: int | None = None
    tokenizer: Path | None = None
    tokenizer_output: Path | None = None
    field: str | None = None
    seq_length: int | None = None
    chat_template: Path | None = None
    classes: tuple[str, ...] = ()
    workers: int = 1
    shard_bytes: int = 64 << 20
    force: bool = False


class DatasetSidecar(DatasetDocument):
    """What lies in `PREFIX.bin` and `PREFIX.idx`, and what it was made from.

    With a tokenizer of our own `end_of_document_id` is `vocab_size - 1`: Megatron's null
    tokenizer, which the trainer uses, is made with `vocab_size - 1` ordinary tokens and ends
    documents with the id after the last one
    (megatron/core/tokenizers/text/libraries/null_tokenizer.py). `sources_sha256` is the SHA-256
    over the SHA-256 of every file's bytes, in document order; `request_sha256` adds the options,
    so that equal values mean equal files. `tokenizer` is relative to the sidecar if both lie in
    one directory. Sidecars of older versions have no `bin_sha256` and `idx_sha256`.
    """

    schema_version: Literal[1] = 1
    documents: int
    tokens: int
    dtype: str
    text_bytes: int
    vocab_size: int
    end_of_document: str
    end_of_document_id: int
    tokenizer: str
    tokenizer_sha256: str
    sources_sha256: str
    request_sha256: str
    bin_bytes: int
    idx_bytes: int
    bin_sha256: str | None = None
    idx_sha256: str | None = None


class SamplesSidecar(DatasetDocument):
    """What lies in `PREFIX.npz`; the digests are as in `DatasetSidecar`.

    `tokens` are those that are no padding, `learned` those of them that a loss is computed for;
    `shortened` samples were longer than `seq_length`, `dropped` ones had nothing to learn.
    `classes` are names by number. `directory` is where the names of image files begin.
    """

    schema_version: Literal[1] = 1
    format: ArrayFormat
    samples: int
    classes: tuple[str, ...] = ()
    seq_length: int | None = None
    tokens: int = 0
    learned: int = 0
    shortened: int = 0
    dropped: int = 0
    vocab_size: int | None = None
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    directory: str | None = None
    sources_sha256: str
    request_sha256: str
    npz_bytes: int
    npz_sha256: str


AnySidecar = DatasetSidecar | SamplesSidecar


class SkippedFile(DatasetDocument):
    """A file that was found but is not in the dataset."""

    name: str
    reason: str


class DatasetReport(DatasetDocument):
    """What `prepare_data` did. `over_budget_files`: left out because of the byte budget."""

    schema_version: Literal[1] = 1
    prefix: str
    status: Literal["written", "unchanged"]
    dataset: AnySidecar
    skipped: tuple[SkippedFile, ...]
    over_budget_files: int


class ShardsReport(DatasetDocument):
    """What `prepare_data` says where it did not make the dataset, but its plan or some shards."""

    schema_version: Literal[1] = 1
    directory: str
    shards: int
    missing: int


class ReportedProblem(DatasetDocument):
    """One problem of the input, as in `hpctrain.base.errors.Problem`."""

    message: str
    file: str | None = None
    line: int | None = None
    hint: str | None = None


class DatasetFailure(DatasetDocument):
    """Printed instead of a report when the program ends with `exit_code`."""

    schema_version: Literal[1] = 1
    exit_code: int
    problems: tuple[ReportedProblem, ...]
