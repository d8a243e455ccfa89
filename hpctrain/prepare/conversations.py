"""Conversations and prompts with answers to tokens, of which the answers alone are learned.

Lines are `{"messages": [{"role": ..., "content": ...}, ...]}`, written out by the tokenizer's chat
template, or `{"prompt": ..., "completion": ...}`, written as they are. Belongs here: what is an
answer, and shards. Does not belong here: packing (see `packing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.prepare.contents import Contents, Counts, token_type
from hpctrain.prepare.corpus import Source
from hpctrain.prepare.hugging_face import HuggingFaceTokenizer, load_hugging_face
from hpctrain.prepare.lines import Line, read_lines
from hpctrain.prepare.plan import Recipe

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
ANSWERER = "assistant"
_SHAPES = (
    f'lines are {{"{MESSAGES}": [{{"role": ..., "content": ...}}, ...]}} or '
    f'{{"{PROMPT}": ..., "{COMPLETION}": ...}}'
)

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Talk:
    """A conversation as one text; `answers` are ranges of its characters. `ended`: by a template,
    so that no token has to be added."""

    text: str
    answers: Spans
    ended: bool


def tokenize_conversations(recipe: Recipe, sources: Sequence[Source]) -> Contents:
    """Tokens of all conversations one behind the other, which of them are learned, and lengths.

    `learned` is 1 for a token whose successor belongs to an answer. Conversations longer than
    `seq_length` are cut off; one without an answer in what is left is dropped. Raises
    InvalidInputError.
    """
    assert recipe.tokenizer is not None and recipe.seq_length is not None
    tokenizer = load_hugging_face(recipe.tokenizer)
    tokens: list[np.ndarray] = []
    learned: list[np.ndarray] = []
    shortened = dropped = 0
    for line in _lines(sources):
        ids, answers = _encoded(tokenizer, _talk(line, tokenizer, recipe.chat_template))
        shortened += len(ids) > recipe.seq_length
        ids, answers = ids[: recipe.seq_length], answers[: recipe.seq_length]
        if not any(answers[1:]):
            dropped += 1
            continue
        tokens.append(np.array(ids, token_type(recipe.vocab_size)))
        learned.append(np.array([*answers[1:], False], np.uint8))
    counts = Counts(
        documents=len(tokens),
        tokens=sum(map(len, tokens)),
        learned=sum(int(one.sum()) for one in learned),
        shortened=shortened,
        dropped=dropped,
    )
    columns = {
        "tokens": _joined(tokens, token_type(recipe.vocab_size)),
        "learned": _joined(learned, np.uint8),
        "lengths": np.array([len(one) for one in tokens], np.int32),
    }
    return Contents(columns, counts)


def _joined(parts: list[np.ndarray], kind: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, kind)


def _lines(sources: Sequence[Source]) -> Iterator[Line]:
    for source in sources:
        yield from read_lines(source)


def _encoded(tokenizer: HuggingFaceTokenizer, talk: Talk) -> tuple[list[int], list[bool]]:
    """Ids, and which of them end in an answer: one may begin with the space in front of it."""
    encoding = tokenizer.inner(talk.text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(encoding["input_ids"])
    inside = [
        begin < end and any(first < end <= last for first, last in talk.answers)
        for begin, end in encoding["offset_mapping"]
    ]
    if not talk.ended:
        return [*ids, tokenizer.end_id], [*inside, True]
    return ids, inside


def _talk(line: Line, tokenizer: HuggingFaceTokenizer, template: str | None) -> Talk:
    if MESSAGES in line.fields:
        return _by_template(line, tokenizer, template)
    if PROMPT in line.fields and COMPLETION in line.fields:
        prompt, completion = line.text(PROMPT), line.text(COMPLETION)
        _refuse_control_tokens(line, tokenizer, prompt, completion)
        span = (len(prompt), len(prompt) + len(completion))
        return Talk(prompt + completion, [span], ended=False)
    raise line.wrong(f"is no conversation: it has {', '.join(line.fields) or 'no fields'}", _SHAPES)


def _by_template(line: Line, tokenizer: HuggingFaceTokenizer, template: str | None) -> Talk:
    """An answer begins behind what the template writes to ask for one.

    It ends with what the template writes behind it: the model has to learn to end, too.
    """
    messages = _messages(line)
    _refuse_control_tokens(line, tokenizer, *(one["content"] for one in messages))
    if template is None and tokenizer.inner.chat_template is None:
        hint = "give one by --chat-template FILE, or lines with prompt and completion"
        raise line.wrong("has messages, but the tokenizer has no chat template", hint)
    text = _written(line, tokenizer, template, messages, asks=False)
    answers: Spans = []
    for number, message in enumerate(messages):
        if message["role"] == ANSWERER:
            before = _written(line, tokenizer, template, messages[:number], asks=True)
            so_far = _written(line, tokenizer, template, messages[: number + 1], asks=False)
            if not so_far.startswith(before) or not text.startswith(so_far):
                hint = "a template must write a message the same, whatever follows it"
                raise line.wrong(f"message {number + 1} cannot be found in the text", hint)
            answers.append((len(before), len(so_far)))
    return Talk(text, answers, ended=True)


def _messages(line: Line) -> list[dict[str, str]]:
    messages = line.fields[MESSAGES]
    if not isinstance(messages, list) or not messages:
        raise line.wrong(f"`{MESSAGES}` is no list of messages", _SHAPES)
    for number, message in enumerate(messages, 1):
        fields: dict[str, Any] = message if isinstance(message, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise line.wrong(f"message {number} has no `role` or no `content`", _SHAPES)
    return messages


def _refuse_control_tokens(line: Line, tokenizer: HuggingFaceTokenizer, *texts: str) -> None:
    """What a person wrote must not end a message or begin one."""
    for token in tokenizer.inner.all_special_tokens:
        if any(token in text for text in texts):
            raise line.wrong(f"spells the control token {token}, which a template alone may write")


def _written(
    line: Line,
    tokenizer: HuggingFaceTokenizer,
    template: str | None,
    messages: list[dict[str, str]],
    *,
    asks: bool,
) -> str:
    """`asks`: with what makes a model answer behind it."""
    try:
        written = tokenizer.inner.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=asks
        )
    except Exception as error:  # of Jinja, or raised by the template itself
        raise line.wrong(f"the chat template refuses it: {error}") from error
    return str(written)
