"""Documents to tokens for Megatron: shards, and the `.bin/.idx` pair of all of them.

Belongs here: tokens of whole documents, each ended by one token; megatron-core's indexed dataset.
Does not belong here: which files are the text, tokenizers.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.errors import HpctrainError
from hpctrain.prepare.contents import Contents, Counts, token_type
from hpctrain.prepare.corpus import Source, batches
from hpctrain.prepare.hugging_face import load_hugging_face
from hpctrain.prepare.lines import documents
from hpctrain.prepare.plan import Plan, Recipe
from hpctrain.prepare.shards import sha256_of_file
from hpctrain.prepare.tokens import encoded_exactly, load_tokenizer, missing
from hpctrain.store.datasets import bin_path, idx_path
from hpctrain.train.datasets.archive import open_archive

BATCH_CHARACTERS = 4 << 20
_COLUMNS = ("tokens", "lengths")


def tokenize_texts(recipe: Recipe, sources: Sequence[Source]) -> Contents:
    """Tokens of all documents one behind the other, and the length of each.

    Raises InvalidInputError for a tokenizer of our own that loses text.
    """
    assert recipe.tokenizer is not None
    kind = token_type(recipe.vocab_size)
    tokens: list[np.ndarray] = []
    lengths: list[int] = []
    encode, end = _encoder(recipe)
    for texts in batches(documents(sources, recipe.field), BATCH_CHARACTERS):
        for ids in encode(texts):
            tokens.append(np.array([*ids, end], kind))
            lengths.append(len(ids) + 1)
    flat = np.concatenate(tokens) if tokens else np.zeros(0, kind)
    counts = Counts(documents=len(lengths), tokens=len(flat))
    return Contents({"tokens": flat, "lengths": np.array(lengths, np.int32)}, counts)


def _encoder(recipe: Recipe) -> tuple[Any, int]:
    """A function from texts to ids, and the id that ends a document."""
    assert recipe.tokenizer is not None
    if recipe.hugging_face:
        theirs = load_hugging_face(recipe.tokenizer)
        # what spells a special token in a text is text
        theirs.inner.backend_tokenizer.encode_special_tokens = True
        return theirs.encode, theirs.end_id
    ours = load_tokenizer(recipe.tokenizer)
    return lambda texts: encoded_exactly(texts, ours), ours.end_of_document_id


def join_texts(
    plan: Plan, archives: Sequence[Path], expected: Counts, prefix: Path
) -> dict[str, Any]:
    """Write `PREFIX.bin` and `PREFIX.idx`, one sequence per document, and read them back.

    Returns the fields of a `DatasetSidecar` that say what lies there. The same bytes whatever the
    shards are. Raises HpctrainError if megatron-core or the disk has something else than was
    written.
    """
    mcore = _indexed_dataset()
    kind = mcore.DType.optimal_dtype(plan.recipe.vocab_size)
    assert kind is token_type(plan.recipe.vocab_size)
    builder = mcore.IndexedDatasetBuilder(mcore.get_bin_path(str(prefix)), dtype=kind)
    digest = hashlib.sha256()
    for path in archives:
        columns = open_archive(path, _COLUMNS)
        digest.update(np.ascontiguousarray(columns["tokens"]).data)
        _append(builder, columns["tokens"], columns["lengths"])
    builder.finalize(mcore.get_idx_path(str(prefix)))
    on_disk = sha256_of_file(bin_path(prefix))
    if on_disk != digest.hexdigest():
        raise HpctrainError(f"{bin_path(prefix)} reads back as other bytes than were written")
    dataset = mcore.IndexedDataset(str(prefix), mmap=True)
    _compare(dataset, plan, expected)
    return dict(
        documents=expected.documents,
        tokens=expected.tokens,
        dtype=kind.__name__,
        bin_bytes=bin_path(prefix).stat().st_size,
        idx_bytes=idx_path(prefix).stat().st_size,
        bin_sha256=on_disk,
        idx_sha256=sha256_of_file(idx_path(prefix)),
    )


def _append(builder: Any, tokens: np.ndarray, lengths: np.ndarray) -> None:
    """As IndexedDatasetBuilder.add_index does it with files: without a loop over documents."""
    builder.data_file.write(tokens.tobytes())
    first = len(builder.sequence_lengths) + 1
    builder.sequence_lengths.extend(lengths.tolist())
    builder.document_indices.extend(range(first, first + len(lengths)))


def _compare(dataset: Any, plan: Plan, expected: Counts) -> None:
    """By what megatron-core itself reads: counts, and the text of the first and last document."""
    found = Counts(
        documents=len(dataset.document_indices) - 1, tokens=int(dataset.sequence_lengths.sum())
    )
    if found != expected:
        raise HpctrainError(f"megatron-core reads {found}, but {expected} was written")
    encode, end = _encoder(plan.recipe)
    sources = [source for shard in plan.shards for source in shard.sources]
    first = next(documents(sources, plan.recipe.field))
    for index, text in ((0, first), (len(dataset) - 1, _last_text(sources, plan.recipe.field))):
        if dataset[index].tolist() != [*encode([text])[0], end]:
            raise HpctrainError(f"document {index} reads back as other text than was written")


def _last_text(sources: Sequence[Source], field: str) -> str:
    """The last pieces of a JSONL file may be blank lines only."""
    found = ([*documents([source], field)] for source in reversed(sources))
    return next(texts[-1] for texts in found if texts)


def _indexed_dataset() -> Any:
    try:
        with warnings.catch_warnings():
            # megatron-core warns about absent Transformer Engine and Apex; no use of them here
            warnings.simplefilter("ignore")
            from megatron.core.datasets import indexed_dataset
    except ImportError as error:
        raise missing(error, "megatron") from error
    return indexed_dataset
