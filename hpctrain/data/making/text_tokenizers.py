"""The tokenizers of datasets: byte-level BPE of our own, and those of Hugging Face models.

Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909, as in GPT-2) is lossless, and its last id
ends a document. Tokenizers of models are loaded from a local directory or a tokenizer.json, never
downloaded. Belongs here: training, loading and using them, and the tokens that end and pad a text.
Does not belong here: what is tokenized. The libraries are imported on first use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.errors import InvalidInputError, Problem, UsageError
from hpctrain.records.datasets import END_OF_DOCUMENT
from hpctrain.train.engines.models.transformers_library import class_named, hide_optional_packages

TOKENIZER_NAME = "tokenizer.json"
# Optional files that affect token ids and chat templates as well.
_MORE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
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


def missing_package(error: ImportError, extra: str) -> UsageError:
    """Return the exception to raise; `extra` is the extra of `hpctrain` that installs it."""
    return UsageError(
        f"preparing a dataset needs a Python package that is not installed: {error}",
        hint=f"pip install 'hpctrain[{extra}]'",
    )


# -- Tokenizers of Hugging Face models ----------------------------------------------------------


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """`inner` is a fast tokenizer; `vocab_size` is above all of its ids."""

    inner: Any
    vocab_size: int
    end: str
    end_id: int
    pad_id: int

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Tokenize each text, without the tokenizer's own special tokens."""
        ids = self.inner(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [list(text_ids) for text_ids in ids]


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json of a directory, or the file itself."""
    return path / TOKENIZER_NAME if path.is_dir() else path


def tokenizer_digest(path: Path) -> str:
    """Digest (SHA-256) every file that affects ids and chat texts. Raises InvalidInputError."""
    files = [tokenizer_file(path)]
    if path.is_dir():
        files += [path / name for name in _MORE_FILES]
    digest = hashlib.sha256()
    for file in files:
        if file == files[0] or file.exists():
            file_digest = hashlib.sha256(_read_bytes(file)).hexdigest()
            digest.update(f"{file.name}\n{file_digest}\n".encode())
    return digest.hexdigest()


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        hint = None
        if not file.exists():
            hint = (
                "download the tokenizer beforehand, on a node with internet access: "
                "`AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY)` in Python; "
                "nothing is downloaded here"
            )
        problem = Problem(f"cannot be read: {error.strerror}", file=str(file), hint=hint)
        raise InvalidInputError([problem]) from error


def load_hugging_face(path: Path) -> HuggingFaceTokenizer:
    """Load a directory with tokenizer.json and its settings, or the file alone.

    Raises InvalidInputError when it is not a fast tokenizer, or has no token that ends a text.
    """
    _read_bytes(tokenizer_file(path))
    try:
        automatic, fast = class_named("AutoTokenizer"), class_named("PreTrainedTokenizerFast")
    except ImportError as error:
        raise missing_package(error, "data") from error
    try:
        if path.is_dir():
            # otherwise a config.json in the directory imports the model's module
            with hide_optional_packages():
                inner = automatic.from_pretrained(str(path), local_files_only=True, use_fast=True)
        else:
            inner = fast(tokenizer_file=str(path))
    except Exception as error:  # the library raises bare Exception, and much else
        message = f"is not a tokenizer that transformers can load: {error}"
        raise InvalidInputError([Problem(message, file=str(path))]) from error
    if not inner.is_fast:
        problem = Problem("is not a fast tokenizer, which is required here", file=str(path))
        raise InvalidInputError([problem])
    inner.model_max_length = 10**9  # no truncation unless the caller asks for it
    end = inner.eos_token or inner.sep_token
    if end is None and END_OF_DOCUMENT in inner.get_vocab():
        end = END_OF_DOCUMENT
    if end is None:
        hint = "set eos_token in tokenizer_config.json, and give the directory"
        problem = Problem("has no token that ends a text", file=str(path), hint=hint)
        raise InvalidInputError([problem])
    end_id = int(inner.convert_tokens_to_ids(end))
    pad_id = inner.pad_token_id if inner.pad_token_id is not None else end_id
    # the highest id matters, not the number of tokens: ids may have gaps
    highest = max(inner.get_vocab().values())
    return HuggingFaceTokenizer(inner, 1 + highest, end, end_id, int(pad_id))
