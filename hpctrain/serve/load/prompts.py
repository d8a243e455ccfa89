"""What is asked: bodies of requests whose lengths in tokens are exact where engines allow it.

Belongs here: bodies for OpenAI's completions and chat. Does not belong here: lengths and times
(see `hpctrain.serve.plan.traffic`), sending.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import numpy as np

Interface = Literal["completions", "chat"]


@dataclass(frozen=True)
class PromptStyle:
    """How prompts are made.

    `exact`: random token ids between `lowest_id` and `highest_id`, and answers that go on after the
    end-of-text token; otherwise words, of which each is about one token, and answers that may be
    shorter than asked. Chat has words always: its template adds tokens of its own.
    """

    interface: Interface = "completions"
    exact: bool = True
    lowest_id: int = 100
    highest_id: int = 30_000
    seed: int = 0
    shared_prefix_tokens: int = 0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.interface == "chat" else "/v1/completions"

    @property
    def exact_lengths(self) -> bool:
        return self.exact and self.interface == "completions"


def request_body(
    style: PromptStyle, model: str, number: int, prompt_tokens: int, output_tokens: int
) -> bytes:
    """Build the body of request `number`; the same style and number give the same bytes."""
    ids = _token_ids(style, number, prompt_tokens)
    fields: dict[str, object] = {
        "model": model,
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if style.exact:
        # vLLM, SGLang and TensorRT-LLM take both; others ignore or refuse them
        fields |= {"ignore_eos": True, "min_tokens": output_tokens}
    if style.exact_lengths:
        fields["prompt"] = ids
    else:
        words = " ".join(f"w{one}" for one in ids)
        if style.interface == "chat":
            fields["messages"] = [{"role": "user", "content": words}]
        else:
            fields["prompt"] = words
    return json.dumps(fields, separators=(",", ":")).encode()


def _token_ids(style: PromptStyle, number: int, count: int) -> list[int]:
    """Draw ids: first those that all requests share, then this request's own."""
    shared = min(style.shared_prefix_tokens, count)
    bounds = style.lowest_id, style.highest_id + 1
    prefix = np.random.default_rng([style.seed, 0]).integers(*bounds, shared)
    own = np.random.default_rng([style.seed, 1, number]).integers(*bounds, count - shared)
    return [*prefix.tolist(), *own.tolist()]
