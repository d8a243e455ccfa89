"""Format `tokens`: documents to token shards, and shards to one Megatron `.bin/.idx` pair.

Belongs here: tokens of whole documents, each ended by one token; megatron-core's indexed dataset.
Does not belong here: which files are the text, tokenizers.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.base.errors import HpctrainError
from hpctrain.data.making.corpus import Source, batches, documents
from hpctrain.data.making.shards import (
    DatasetPlan,
    DocumentCounts,
    Recipe,
    ShardContents,
    sha256_of_file,
    token_type,
)
from hpctrain.data.making.text_tokenizers import (
    encode_losslessly,
    load_hugging_face,
    load_tokenizer,
    missing_package,
)
from hpctrain.records.datasets import bin_path, idx_path
from hpctrain.train.datasets.npz_arrays import open_archive

BATCH_CHARACTERS = 4 << 20
_COLUMNS = ("tokens", "lengths")


def tokenize_texts(recipe: Recipe, sources: Sequence[Source]) -> ShardContents:
    """Concatenate the tokens of all documents, and list the length of each.

    Raises InvalidInputError for a tokenizer.json that does not reproduce the text.
    """
    dtype = token_type(recipe.vocab_size)
    tokens: list[np.ndarray] = []
    lengths: list[int] = []
    encode, end = _encoder(recipe)
    for texts in batches(documents(sources, recipe.field), BATCH_CHARACTERS):
        for ids in encode(texts):
            tokens.append(np.array([*ids, end], dtype))
            lengths.append(len(ids) + 1)
    flat = np.concatenate(tokens) if tokens else np.zeros(0, dtype)
    counts = DocumentCounts(documents=len(lengths), tokens=len(flat))
    return ShardContents({"tokens": flat, "lengths": np.array(lengths, np.int32)}, counts)


def _encoder(recipe: Recipe) -> tuple[Callable[[list[str]], list[list[int]]], int]:
    """Return a function from texts to ids, and the id that ends a document."""
    assert recipe.tokenizer is not None
    if recipe.hugging_face:
        model_tokenizer = load_hugging_face(recipe.tokenizer)
        # a text that spells a special token is encoded as text
        model_tokenizer.inner.backend_tokenizer.encode_special_tokens = True
        return model_tokenizer.encode, model_tokenizer.end_id
    tokenizer = load_tokenizer(recipe.tokenizer)
    return lambda texts: encode_losslessly(texts, tokenizer), tokenizer.end_of_document_id


def join_texts(
    plan: DatasetPlan, archives: Sequence[Path], expected: DocumentCounts, prefix: Path
) -> dict[str, Any]:
    """Write `PREFIX.bin` and `PREFIX.idx`, one sequence per document, and read them back.

    Returns the fields of a `DatasetSidecar` that describe these files. The bytes do not depend on
    how the input was cut into shards. Raises HpctrainError if megatron-core or the disk returns
    something else than was written.
    """
    try:
        with warnings.catch_warnings():
            # megatron-core warns about absent Transformer Engine and Apex; no use of them here
            warnings.simplefilter("ignore")
            from hpctrain.train.megatron_on_cpu import import_core_to_read

            import_core_to_read()
            from megatron.core.datasets import indexed_dataset as mcore
    except ImportError as error:
        raise missing_package(error, "megatron") from error
    dtype = mcore.DType.optimal_dtype(plan.recipe.vocab_size)
    assert dtype is token_type(plan.recipe.vocab_size)
    builder = mcore.IndexedDatasetBuilder(mcore.get_bin_path(str(prefix)), dtype=dtype)
    digest = hashlib.sha256()
    for path in archives:
        columns = open_archive(path, _COLUMNS)
        tokens, lengths = columns["tokens"], columns["lengths"]
        digest.update(np.ascontiguousarray(tokens).data)
        # What IndexedDatasetBuilder.add_index does with files: no loop over documents.
        builder.data_file.write(tokens.tobytes())
        first = len(builder.sequence_lengths) + 1
        builder.sequence_lengths.extend(lengths.tolist())
        builder.document_indices.extend(range(first, first + len(lengths)))
    builder.finalize(mcore.get_idx_path(str(prefix)))
    on_disk = sha256_of_file(bin_path(prefix))
    if on_disk != digest.hexdigest():
        raise HpctrainError(f"{bin_path(prefix)} reads back as other bytes than were written")
    _verify_with_megatron(mcore.IndexedDataset(str(prefix), mmap=True), plan, expected)
    return dict(
        documents=expected.documents,
        tokens=expected.tokens,
        dtype=dtype.__name__,
        bin_bytes=bin_path(prefix).stat().st_size,
        idx_bytes=idx_path(prefix).stat().st_size,
        bin_sha256=on_disk,
        idx_sha256=sha256_of_file(idx_path(prefix)),
    )


def _verify_with_megatron(dataset: Any, plan: DatasetPlan, expected: DocumentCounts) -> None:
    """Compare what megatron-core reads: counts, and the text of the first and last document."""
    counts = DocumentCounts(
        documents=len(dataset.document_indices) - 1, tokens=int(dataset.sequence_lengths.sum())
    )
    if counts != expected:
        raise HpctrainError(f"megatron-core reads {counts}, but {expected} was written")
    encode, end = _encoder(plan.recipe)
    field = plan.recipe.field
    sources = [source for shard in plan.shards for source in shard.sources]
    # The last pieces of a JSONL file may hold only blank lines.
    nonempty = ([*documents([source], field)] for source in reversed(sources))
    last = next(texts[-1] for texts in nonempty if texts)
    for index, text in ((0, next(documents(sources, field))), (len(dataset) - 1, last)):
        if dataset[index].tolist() != [*encode([text])[0], end]:
            raise HpctrainError(f"document {index} reads back as other text than was written")
