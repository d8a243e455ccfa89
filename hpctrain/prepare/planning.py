"""From a request to a plan: find and read the input, get a tokenizer, cut it into shards.

Belongs here: the first stage. Does not belong here: shards (see `shards`), putting them together
(see `joining`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.prepare.corpus import (
    Corpus,
    batches,
    find_files,
    find_stdlib,
    read_corpus,
)
from hpctrain.prepare.hugging_face import digest_of, load_hugging_face, tokenizer_file
from hpctrain.prepare.labelled import find_classes
from hpctrain.prepare.lines import documents
from hpctrain.prepare.pictures import picture_corpus
from hpctrain.prepare.plan import Plan, Recipe, ShardedFormat, cut_into_shards, read_plan
from hpctrain.prepare.publication import Workplace, refuse_to_replace_tokenizer
from hpctrain.prepare.request import DEFAULT_FIELD, Request
from hpctrain.prepare.texts import BATCH_CHARACTERS
from hpctrain.prepare.tokens import load_tokenizer, sha256_of, train_tokenizer
from hpctrain.train.datasets.listing import list_images

DEFAULT_VOCAB_SIZE = 4096
BUILTIN_MAX_BYTES = 4_000_000
_SKIPPED_SHOWN = 20
_SHARDED: dict[str, ShardedFormat] = {
    "tokens": "tokens", "packed": "packed", "examples": "examples", "images": "images"
}  # fmt: skip

Say = Callable[[str], None]


def find_corpus(request: Request, say: Say) -> Corpus:
    """Find and read the input; says what was left out. Raises InvalidInputError if none is left."""
    if request.format == "images":
        return picture_corpus(list_images(request.inputs[0]), request.inputs[0].absolute())
    if request.builtin:
        limit = request.max_bytes or BUILTIN_MAX_BYTES
        corpus = read_corpus(find_stdlib(), limit, request.shard_bytes, lines=False)
    else:
        files = find_files(request.inputs, request.wanted_suffixes)
        lines = True if request.reads_lines else None
        corpus = read_corpus(files, request.max_bytes, request.shard_bytes, lines=lines)
    _say_what_was_read(corpus, say)
    if not corpus.sources:
        counts = f"{len(corpus.skipped)} skipped, {corpus.over_budget_files} beyond --max-bytes"
        raise InvalidInputError([Problem(f"no text in the input ({counts})")])
    return corpus


def _say_what_was_read(corpus: Corpus, say: Say) -> None:
    say(
        f"read {corpus.files} files, {corpus.text_bytes} bytes; "
        f"skipped {len(corpus.skipped)} files, {corpus.over_budget_files} beyond --max-bytes"
    )
    for skipped in corpus.skipped[:_SKIPPED_SHOWN]:
        say(f"skipped {skipped.name}: {skipped.reason}")
    if len(corpus.skipped) > _SKIPPED_SHOWN:
        say(f"skipped {len(corpus.skipped) - _SKIPPED_SHOWN} more, all named in the --json report")


def tokenizer_reference(request: Request) -> str | None:
    """The tokenizer as the sidecar names it: relative if it lies beside the dataset."""
    if request.format == "images":
        return None
    path = tokenizer_file(request.tokenizer_target).absolute()
    return path.name if path.parent == request.output.absolute().parent else str(path)


def request_digest(request: Request, corpus_sha256: str) -> str:
    """A digest of everything that the files depend on. Raises InvalidInputError."""
    tokenizer = None
    if request.tokenizer is not None:
        path = request.tokenizer
        tokenizer = digest_of(path) if request.hugging_face else _digest_of_file(path)
    wanted = [1, corpus_sha256, request.vocab_size, tokenizer, tokenizer_reference(request)]
    more = [
        *("" if request.format == "tokens" else request.format,),
        *("" if request.text_field == DEFAULT_FIELD else request.text_field,),
        *(request.seq_length, _template(request), list(request.classes)),
    ]
    # plain tokens are as they were before there was anything else
    return sha256_of(json.dumps([*wanted, *more] if any(more) else wanted))


def _digest_of_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        problem = Problem(f"cannot be read: {error.strerror}", file=str(path))
        raise InvalidInputError([problem]) from error


def _template(request: Request) -> str | None:
    """The text of a chat template. Raises InvalidInputError."""
    path = request.chat_template
    if path is None:
        return None
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError([Problem(f"cannot be read: {error}", file=str(path))]) from error


def obtain_plan(request: Request, corpus: Corpus, digest: str, place: Workplace, say: Say) -> Plan:
    """The plan of an earlier attempt at the same, or a new one. Raises InvalidInputError."""
    earlier = read_plan(place.shards)
    if earlier is not None and earlier.request_sha256 == digest and _tokenizer_is_there(earlier):
        say("going on with what an earlier attempt has made")
        return earlier
    recipe = _recipe(request, corpus, place, say)
    return Plan(
        recipe=recipe,
        shards=cut_into_shards(recipe, corpus.sources, request.shard_bytes),
        request_sha256=digest,
        sources_sha256=corpus.sha256,
        text_bytes=corpus.text_bytes,
        skipped=corpus.skipped,
        over_budget_files=corpus.over_budget_files,
        tokenizer_reference=tokenizer_reference(request),
        tokenizer_target=request.tokenizer_target.absolute() if request.trains_tokenizer else None,
    )


def _tokenizer_is_there(plan: Plan) -> bool:
    """A trained one may have got its final name before the attempt ended."""
    path = plan.recipe.tokenizer
    return path is None or path.exists()


def _recipe(request: Request, corpus: Corpus, place: Workplace, say: Say) -> Recipe:
    kind = _SHARDED[request.format]
    if kind == "images":
        return Recipe(format=kind, directory=request.inputs[0].absolute())
    if request.hugging_face:
        assert request.tokenizer is not None
        say(f"using the tokenizer {request.tokenizer}")
        path, theirs = request.tokenizer.absolute(), load_hugging_face(request.tokenizer)
        vocab_size, digest = theirs.vocab_size, digest_of(path)
    else:
        path, vocab_size = _our_tokenizer(request, corpus, place, say)
        digest = _digest_of_file(path)
    _check_vocab_size(request, vocab_size)
    return Recipe(
        format=kind,
        tokenizer=path,
        tokenizer_sha256=digest,
        hugging_face=request.hugging_face,
        vocab_size=vocab_size,
        field=request.text_field,
        seq_length=request.seq_length,
        chat_template=_template(request),
        classes=_classes(request, corpus),
    )


def _check_vocab_size(request: Request, found: int) -> None:
    if request.vocab_size not in (None, found):
        message = f"has {found} tokens, but --vocab-size is {request.vocab_size}"
        raise InvalidInputError([Problem(message, file=str(request.tokenizer))])


def _classes(request: Request, corpus: Corpus) -> tuple[str, ...]:
    if request.format != "examples":
        return ()
    return request.classes or find_classes(corpus.sources)


def _our_tokenizer(
    request: Request, corpus: Corpus, place: Workplace, say: Say
) -> tuple[Path, int]:
    """A tokenizer.json of our own kind, given or trained now, and its number of tokens."""
    if request.tokenizer is not None:
        say(f"using the tokenizer {request.tokenizer}")
        return request.tokenizer.absolute(), load_tokenizer(request.tokenizer).vocab_size
    vocab_size = DEFAULT_VOCAB_SIZE if request.vocab_size is None else request.vocab_size
    say(f"training a tokenizer of {vocab_size} tokens")
    texts = batches(documents(corpus.sources, request.text_field), BATCH_CHARACTERS)
    text = train_tokenizer(texts, vocab_size).to_json()
    if not request.force:
        refuse_to_replace_tokenizer(request.tokenizer_target, text)
    place.tokenizer.write_text(text, "utf-8")
    return place.tokenizer.absolute(), vocab_size
