"""The sidecar of a prepared dataset, `PREFIX.json`, and the report of the program that writes it.

Belongs here: these documents, which `hpctrain.train.prepare_data` writes and `hpctrain.actions`
reads. Does not belong here: Megatron's own `.bin`/`.idx` format, tokenizing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

END_OF_DOCUMENT = "<|endoftext|>"


def bin_path(prefix: Path) -> Path:
    """`PREFIX.bin`: the tokens. Appended, not replaced, since a prefix may contain dots."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`PREFIX.idx`: where documents and sequences begin."""
    return prefix.with_name(prefix.name + ".idx")


def sidecar_path(prefix: Path) -> Path:
    """`PREFIX.json`: written last, so it stands for a complete dataset."""
    return prefix.with_name(prefix.name + ".json")


class DatasetDocument(BaseModel):
    """Base of the documents about datasets."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DatasetSidecar(DatasetDocument):
    """What lies in `PREFIX.bin` and `PREFIX.idx`, and what it was made from.

    `end_of_document_id` is `vocab_size - 1`: Megatron's null tokenizer, which the trainer uses,
    is made with `vocab_size - 1` ordinary tokens and ends documents with the id after the last
    one (megatron/core/tokenizers/text/libraries/null_tokenizer.py). `sources_sha256` is the
    SHA-256 over the SHA-256 of every document's bytes, in document order; `request_sha256` adds
    the options, so that equal values mean equal files. `tokenizer` is relative to the sidecar
    if both lie in one directory.
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


class SkippedFile(DatasetDocument):
    """A file that was found but is not in the dataset."""

    name: str
    reason: str


class DatasetReport(DatasetDocument):
    """What `prepare_data` did. `over_budget_files`: left out because of the byte budget."""

    schema_version: Literal[1] = 1
    prefix: str
    status: Literal["written", "unchanged"]
    dataset: DatasetSidecar
    skipped: tuple[SkippedFile, ...]
    over_budget_files: int


class ReportedProblem(DatasetDocument):
    """One problem of the input, as in `hpctrain.errors.Problem`."""

    message: str
    file: str | None = None
    hint: str | None = None


class DatasetFailure(DatasetDocument):
    """Printed instead of a report when the program ends with `exit_code`."""

    schema_version: Literal[1] = 1
    exit_code: int
    problems: tuple[ReportedProblem, ...]
