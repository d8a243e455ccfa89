"""Byte-level BPE tokenizers (Sennrich et al. 2016, arXiv:1508.07909, as in GPT-2).

Such a tokenizer is lossless, and its last id ends a document. Belongs here: training, loading and
using it. Does not belong here: tokenizers of Hugging Face models (see `hugging_face_tokenizer`).
The tokenizers library is imported on first use.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.data.making.optional_packages import missing_package
from hpctrain.records.datasets import END_OF_DOCUMENT

ALPHABET_TOKENS = 256
_MIN_PAIR_COUNT = 2


class ByteTokenizer:
    """A byte-level BPE tokenizer whose last id ends a document."""

    def __init__(self, tokenizer: Any) -> None:
        # `<|endoftext|>` spelled in a text is text: only the writer ends documents.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        # the highest id matters, not the number of tokens: ids may have gaps
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def end_of_document_id(self) -> int:
        return self.vocab_size - 1

    def to_json(self) -> str:
        return str(self._tokenizer.to_str(pretty=True)) + "\n"

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Tokenize each text, without the end of the document."""
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, sequences: list[list[int]]) -> list[str]:
        return list(self._tokenizer.decode_batch(sequences, skip_special_tokens=False))


def train_tokenizer(texts: Iterable[list[str]], vocab_size: int) -> ByteTokenizer:
    """Train a tokenizer of exactly `vocab_size` tokens, the last of them `<|endoftext|>`.

    Raises InvalidInputError if the text has too few repeated pairs for that many.
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
    token = library.AddedToken(END_OF_DOCUMENT, special=True, normalized=False)
    tokenizer.add_special_tokens([token])
    trained = ByteTokenizer(tokenizer)
    reached = trained.vocab_size
    if reached != vocab_size:
        problem = Problem(
            f"the text is too short for a vocabulary of {vocab_size}: it gives {reached} tokens",
            hint=f"add text, or use --vocab-size {reached} or less",
        )
        raise InvalidInputError([problem])
    return trained


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
        hint = (
            "the trainer ends documents with id vocabulary size - 1 (Megatron's null tokenizer); "
            "for another tokenizer give its directory, which has a tokenizer_config.json"
        )
        raise InvalidInputError([Problem(message, file=str(path), hint=hint)])
    return loaded


def encode_losslessly(texts: list[str], tokenizer: ByteTokenizer) -> list[list[int]]:
    """Tokenize each text. Raises InvalidInputError if decoding does not reproduce it."""
    sequences = tokenizer.encode(texts)
    decoded_texts = tokenizer.decode(sequences)
    for text, ids, decoded in zip(texts, sequences, decoded_texts, strict=True):
        if decoded != text:
            pairs = enumerate(zip(text, decoded, strict=False))
            shorter = min(len(text), len(decoded))
            start = next((index for index, (a, b) in pairs if a != b), shorter)
            got, expected = decoded[start : start + 20], text[start : start + 20]
            problem = Problem(
                f"the tokenizer does not give the text back: {got!r} instead of {expected!r}",
                hint="use a byte-level tokenizer without a normalizer",
            )
            raise InvalidInputError([problem])
        if tokenizer.end_of_document_id in ids:
            message = f"the tokenizer makes {END_OF_DOCUMENT} out of a text that spells it"
            raise InvalidInputError([Problem(message)])
    return sequences


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise missing_package(error, "megatron") from error
    return tokenizers
