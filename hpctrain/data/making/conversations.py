"""Format `packed`, first half: conversations to tokens, with loss on the answers only.

Lines are `{"messages": [{"role": ..., "content": ...}, ...]}`, rendered by the tokenizer's chat
template, or `{"prompt": ..., "completion": ...}`, used verbatim. Belongs here: what is an answer,
and shards. Does not belong here: packing into sequences (see `merging`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.data.making.corpus import Source
from hpctrain.data.making.dataset_plan import Recipe
from hpctrain.data.making.hugging_face_tokenizer import HuggingFaceTokenizer, load_hugging_face
from hpctrain.data.making.jsonl import Line, read_lines
from hpctrain.data.making.shard_contents import DocumentCounts, ShardContents, token_type

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
ASSISTANT_ROLE = "assistant"
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
