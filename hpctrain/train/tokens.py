"""Text to tokens to Megatron's `.bin/.idx`, and reading them back with Megatron's own reader.

Belongs here: the byte-level BPE tokenizer (Sennrich et al. 2016, arXiv:1508.07909, on bytes as
in GPT-2) and megatron-core's indexed dataset. Does not belong here: which files are the text, and
where the results go. The tokenizers library and megatron-core are imported on first use.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError, InvalidInputError, Problem
from hpctrain.store.datasets import END_OF_DOCUMENT

ALPHABET_TOKENS = 256
_MIN_PAIR_COUNT = 2


@dataclass(frozen=True)
class Written:
    """What lies in a `.bin/.idx` pair."""

    documents: int
    tokens: int
    dtype: str


class ByteTokenizer:
    """A byte-level BPE tokenizer whose last id ends a document."""

    def __init__(self, tokenizer: Any) -> None:
        # `<|endoftext|>` spelled in a text is text: only the writer ends documents.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        # the highest id counts, not the number of tokens: ids of others' tokenizers may have gaps
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def end_of_document_id(self) -> int:
        return self.vocab_size - 1

    def to_json(self) -> str:
        return str(self._tokenizer.to_str(pretty=True)) + "\n"

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without the end of the document."""
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, sequences: list[list[int]]) -> list[str]:
        return list(self._tokenizer.decode_batch(sequences, skip_special_tokens=False))


def train_tokenizer(texts: Iterable[list[str]], vocab_size: int) -> ByteTokenizer:
    """Train a tokenizer of exactly `vocab_size` tokens, the last of them `<|endoftext|>`.

    Raises InvalidInputError if the text does not hold enough repeated pairs for that many.
    """
    if vocab_size < ALPHABET_TOKENS + 1:
        least = f"{ALPHABET_TOKENS + 1} ({ALPHABET_TOKENS} bytes and {END_OF_DOCUMENT})"
        raise InvalidInputError([Problem(f"vocabulary size {vocab_size} is below {least}")])
    library = _tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    # the end of the document is added after training, so that its id comes last
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=_MIN_PAIR_COUNT,
        show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    _add_end_of_document(library, tokenizer)
    trained = ByteTokenizer(tokenizer)
    if trained.vocab_size != vocab_size:
        raise InvalidInputError([_too_little_text(trained.vocab_size, vocab_size)])
    return trained


def _add_end_of_document(library: Any, tokenizer: Any) -> None:
    token = library.AddedToken(END_OF_DOCUMENT, special=True, normalized=False)
    tokenizer.add_special_tokens([token])


def _too_little_text(reached: int, wanted: int) -> Problem:
    return Problem(
        f"the text is too little for a vocabulary of {wanted}: it gives {reached} tokens",
        hint=f"add text, or ask for --vocab-size {reached} or less",
    )


def load_tokenizer(path: Path) -> ByteTokenizer:
    """Read a `tokenizer.json`. Raises InvalidInputError unless `<|endoftext|>` has the last id."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError([Problem(f"cannot be read: {error}", file=str(path))]) from error
    library = _tokenizers()
    try:
        tokenizer = library.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        problem = Problem(f"is not a tokenizer of the tokenizers library: {error}", file=str(path))
        raise InvalidInputError([problem]) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    loaded = ByteTokenizer(tokenizer)
    last = tokenizer.token_to_id(END_OF_DOCUMENT)
    if last != loaded.end_of_document_id:
        expected = loaded.end_of_document_id
        message = f"{END_OF_DOCUMENT} has id {last}, but must have the last one, {expected}"
        hint = "the trainer ends documents with id vocabulary size - 1 (Megatron's null tokenizer)"
        raise InvalidInputError([Problem(message, file=str(path), hint=hint)])
    return loaded


def _encoded(
    texts: Iterable[list[str]], tokenizer: ByteTokenizer
) -> Iterator[tuple[str, list[int]]]:
    """Each text with its ids. Raises InvalidInputError if decoding does not give it back."""
    for batch in texts:
        sequences = tokenizer.encode(batch)
        decoded = tokenizer.decode(sequences)
        for text, ids, again in zip(batch, sequences, decoded, strict=True):
            if again != text:
                raise InvalidInputError([_lossy(text, again)])
            if tokenizer.end_of_document_id in ids:
                message = f"the tokenizer makes {END_OF_DOCUMENT} out of a text that spells it"
                raise InvalidInputError([Problem(message)])
            yield text, ids


def _lossy(text: str, again: str) -> Problem:
    pairs = enumerate(zip(text, again, strict=False))
    start = next((at for at, (a, b) in pairs if a != b), min(len(text), len(again)))
    got, wanted = again[start : start + 20], text[start : start + 20]
    return Problem(
        f"the tokenizer does not give the text back: {got!r} instead of {wanted!r}",
        hint="use a byte-level tokenizer without a normalizer",
    )


def write_dataset(texts: Iterable[list[str]], tokenizer: ByteTokenizer, prefix: Path) -> Written:
    """Write `PREFIX.bin` and `PREFIX.idx`, one sequence per document, and read them back.

    Raises InvalidInputError if the tokenizer loses text, HpctrainError if what
    megatron.core.datasets.indexed_dataset.IndexedDataset reads is not what was written.
    """
    mcore = _indexed_dataset()
    dtype = mcore.DType.optimal_dtype(tokenizer.vocab_size)
    builder = mcore.IndexedDatasetBuilder(mcore.get_bin_path(str(prefix)), dtype=dtype)
    first = last = ""
    documents = tokens = 0
    for text, ids in _encoded(texts, tokenizer):
        builder.add_document([*ids, tokenizer.end_of_document_id], [len(ids) + 1])
        first, last = (text if documents == 0 else first), text
        documents += 1
        tokens += len(ids) + 1
    builder.finalize(mcore.get_idx_path(str(prefix)))
    written = Written(documents, tokens, dtype.__name__)
    _read_back(mcore.IndexedDataset(str(prefix), mmap=True), written, tokenizer, first, last)
    return written


def _read_back(
    dataset: Any, written: Written, tokenizer: ByteTokenizer, first: str, last: str
) -> None:
    found = Written(
        len(dataset.document_indices) - 1,
        int(dataset.sequence_lengths.sum()),
        dataset.index.dtype.__name__,
    )
    if found != written:
        raise HpctrainError(f"megatron-core reads {found}, but {written} was written")
    for index, text in ((0, first), (len(dataset) - 1, last)):
        ids = dataset[index].tolist()
        if ids[-1] != tokenizer.end_of_document_id or tokenizer.decode([ids[:-1]]) != [text]:
            raise HpctrainError(f"document {index} reads back as other text than was written")


def sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise _missing(error) from error
    return tokenizers


def _indexed_dataset() -> Any:
    try:
        with warnings.catch_warnings():
            # megatron-core warns about absent Transformer Engine and Apex; no use of them here
            warnings.simplefilter("ignore")
            from megatron.core.datasets import indexed_dataset
    except ImportError as error:
        raise _missing(error) from error
    return indexed_dataset


def _missing(error: ImportError) -> HpctrainError:
    return HpctrainError(
        f"preparing a dataset needs a Python package that is not here: {error}",
        hint="pip install 'hpctrain[megatron]'",
    )
