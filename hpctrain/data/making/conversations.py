"""Format `packed`: conversations to tokens, with loss on the answers only, packed into sequences.

Lines are `{"messages": [{"role": ..., "content": ...}, ...]}`, rendered by the tokenizer's chat
template, or `{"prompt": ..., "completion": ...}`, used verbatim. Belongs here: what is an answer,
shards, and joining them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.making.corpus import Line, Source, read_lines
from hpctrain.data.making.shards import DocumentCounts, Recipe, ShardContents, token_type
from hpctrain.data.making.text_tokenizers import HuggingFaceTokenizer, load_hugging_face
from hpctrain.train.datasets.npz_arrays import Pieces, open_archive, write_archive

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
ASSISTANT_ROLE = "assistant"
_COLUMNS = ("tokens", "learned", "lengths")
_SEQUENCES_AT_ONCE = 256
_LINE_FORMATS = (
    f'lines are {{"{MESSAGES}": [{{"role": ..., "content": ...}}, ...]}} or '
    f'{{"{PROMPT}": ..., "{COMPLETION}": ...}}'
)

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation as one text; `answers` are character ranges [begin, end) of it.

    `ended`: the chat template writes the end, so that no end token is appended.
    """

    text: str
    answers: Spans
    ended: bool


def tokenize_conversations(recipe: Recipe, sources: Sequence[Source]) -> ShardContents:
    """Concatenate the tokens of all conversations, with a loss mask and the length of each.

    `learned` is 1 for a token whose successor belongs to an answer. Conversations longer than
    `seq_length` are truncated; one without an answer in the rest is dropped. Raises
    InvalidInputError.
    """
    assert recipe.tokenizer is not None and recipe.seq_length is not None
    tokenizer = load_hugging_face(recipe.tokenizer)
    dtype = token_type(recipe.vocab_size)
    tokens: list[np.ndarray] = []
    learned: list[np.ndarray] = []
    shortened = dropped = 0
    for line in read_lines(sources):
        ids, answers = _tokenize(tokenizer, _render(line, tokenizer, recipe.chat_template))
        shortened += len(ids) > recipe.seq_length
        ids, answers = ids[: recipe.seq_length], answers[: recipe.seq_length]
        if not any(answers[1:]):
            dropped += 1
            continue
        tokens.append(np.array(ids, dtype))
        learned.append(np.array([*answers[1:], False], np.uint8))
    counts = DocumentCounts(
        documents=len(tokens),
        tokens=sum(map(len, tokens)),
        learned=sum(int(mask.sum()) for mask in learned),
        shortened=shortened,
        dropped=dropped,
    )
    columns = {
        "tokens": np.concatenate(tokens) if tokens else np.zeros(0, dtype),
        "learned": np.concatenate(learned) if learned else np.zeros(0, np.uint8),
        "lengths": np.array([len(ids) for ids in tokens], np.int32),
    }
    return ShardContents(columns, counts)


def _tokenize(
    tokenizer: HuggingFaceTokenizer, conversation: RenderedConversation
) -> tuple[list[int], list[bool]]:
    """Return token ids, and whether each token ends within an answer.

    The end decides, because a token may begin with the space in front of the answer.
    """
    encoding = tokenizer.inner(
        conversation.text, add_special_tokens=False, return_offsets_mapping=True
    )
    ids = list(encoding["input_ids"])
    inside = [
        begin < end and any(first < end <= last for first, last in conversation.answers)
        for begin, end in encoding["offset_mapping"]
    ]
    if not conversation.ended:
        return [*ids, tokenizer.end_id], [*inside, True]
    return ids, inside


def _render(
    line: Line, tokenizer: HuggingFaceTokenizer, template: str | None
) -> RenderedConversation:
    if MESSAGES in line.fields:
        return _render_messages(line, tokenizer, template)
    if PROMPT in line.fields and COMPLETION in line.fields:
        prompt, completion = line.text(PROMPT), line.text(COMPLETION)
        _refuse_control_tokens(line, tokenizer, prompt, completion)
        span = (len(prompt), len(prompt) + len(completion))
        return RenderedConversation(prompt + completion, [span], ended=False)
    fields = ", ".join(line.fields) or "no fields"
    raise line.error(f"is not a conversation: it has {fields}", _LINE_FORMATS)


def _render_messages(
    line: Line, tokenizer: HuggingFaceTokenizer, template: str | None
) -> RenderedConversation:
    """Render with the chat template.

    An answer begins after the generation prompt. It includes what the template writes after the
    answer, because the model has to learn to stop.
    """
    messages = line.fields[MESSAGES]
    if not isinstance(messages, list) or not messages:
        raise line.error(f"`{MESSAGES}` is not a list of messages", _LINE_FORMATS)
    for number, message in enumerate(messages, 1):
        fields: dict[str, Any] = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise line.error(f"message {number} has no `role` or no `content`", _LINE_FORMATS)
    _refuse_control_tokens(line, tokenizer, *(message["content"] for message in messages))
    if template is None and tokenizer.inner.chat_template is None:
        hint = "give one by --chat-template FILE, or lines with prompt and completion"
        raise line.error("has messages, but the tokenizer has no chat template", hint)

    def render(count: int, *, prompt: bool) -> str:
        """Render the first `count` messages, with a generation prompt after them if `prompt`."""
        try:
            rendered = tokenizer.inner.apply_chat_template(
                messages[:count],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except Exception as error:  # from Jinja, or raised by the template itself
            raise line.error(f"the chat template refuses it: {error}") from error
        return str(rendered)

    text = render(len(messages), prompt=False)
    answers: Spans = []
    for number, message in enumerate(messages):
        if message["role"] == ASSISTANT_ROLE:
            before = render(number, prompt=True)
            through = render(number + 1, prompt=False)
            if not through.startswith(before) or not text.startswith(through):
                hint = "a template must render a message the same, whatever follows it"
                raise line.error(f"message {number + 1} cannot be found in the text", hint)
            answers.append((len(before), len(through)))
    return RenderedConversation(text, answers, ended=True)


def _refuse_control_tokens(line: Line, tokenizer: HuggingFaceTokenizer, *texts: str) -> None:
    """Raise InvalidInputError if a text could end or begin a message."""
    for token in tokenizer.inner.all_special_tokens:
        if any(token in text for text in texts):
            message = f"spells the control token {token}, which a template alone may write"
            raise line.error(message)


# -- Pack conversations into sequences of one length --------------------------------------------
# Best-fit decreasing (Ding et al. 2024, arXiv 2404.10830): each conversation goes whole into the
# fullest sequence with enough free space, the longest conversation first.


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Assign conversations to sequences; returns the conversation numbers of each sequence.

    All `lengths` are at most `capacity`. Deterministic; time n log n.
    """
    sequences: list[list[int]] = []
    free_sizes: list[int] = []  # distinct free spaces, sorted
    by_free: dict[int, list[int]] = {}  # the sequences with that free space
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        index = bisect_left(free_sizes, length)
        if index == len(free_sizes):
            sequence, free = len(sequences), capacity
            sequences.append([])
        else:
            free = free_sizes[index]
            sequence = by_free[free].pop()
            if not by_free[free]:
                del by_free[free], free_sizes[index]
        sequences[sequence].append(number)
        left = free - length
        if left:
            if left not in by_free:
                insort(free_sizes, left)
            by_free.setdefault(left, []).append(sequence)
    return sequences


def join_conversations(archives: Sequence[Path], capacity: int, pad_id: int, target: Path) -> int:
    """Pack the conversations of all shards; returns the number of sequences.

    The bytes do not depend on how the input was cut into shards.
    """
    shards = [open_archive(path, _COLUMNS) for path in archives]
    # the offsets of the conversations of each shard in its token columns
    begins = [np.cumsum(columns["lengths"]) - columns["lengths"] for columns in shards]
    # conversation number -> (its shard, its number within the shard)
    places = [(s, number) for s, offsets in enumerate(begins) for number in range(len(offsets))]
    lengths = np.concatenate([columns["lengths"] for columns in shards])
    sequences = best_fit(lengths, capacity)

    def row(name: str, numbers: list[int]) -> np.ndarray:
        """One sequence of a column. Padding has positions from 0 like a text of its own, and no
        loss."""
        values = []
        for shard, number in map(places.__getitem__, numbers):
            length, begin = int(shards[shard]["lengths"][number]), int(begins[shard][number])
            if name == "positions":
                values.append(np.arange(length))
            else:
                values.append(shards[shard][name][begin : begin + length])
        padding = capacity - sum(map(len, values))
        fill = pad_id if name == "tokens" else 0
        filler = np.arange(padding) if name == "positions" else np.full(padding, fill)
        return np.concatenate([*values, filler])

    def blocks(name: str) -> Iterator[np.ndarray]:
        for first in range(0, len(sequences), _SEQUENCES_AT_ONCE):
            chosen = sequences[first : first + _SEQUENCES_AT_ONCE]
            yield np.stack([row(name, numbers) for numbers in chosen])

    shape = (len(sequences), capacity)
    dtypes = {name: shards[0][name].dtype for name in ("tokens", "learned")}
    dtypes["positions"] = np.dtype(np.uint16 if capacity <= 2**16 else np.int32)
    write_archive(target, {name: Pieces(dtypes[name], shape, blocks(name)) for name in dtypes})
    return len(sequences)
