"""What a judgement says: a question, its answer, what it rests on, what to do and what it brings.

Belongs here: these documents. Does not belong here: any judgement, any column of text.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Topic = Literal[
    "data", "communication", "imbalance", "pipeline", "buckets", "memory", "saves", "warm_up",
    "unsteady",
]  # fmt: skip
Answer = Literal["yes", "no", "unknown"]
QUESTIONS: dict[Topic, str] = {
    "data": "Is it data loading?",
    "communication": "Is it communication?",
    "imbalance": "Are some ranks slower than others?",
    "pipeline": "Is it the pipeline's bubble?",
    "buckets": "Is it the shape of the gradient buckets?",
    "memory": "Is memory the limit?",
    "saves": "Is it saving?",
    "warm_up": "Is it starting again and again?",
    "unsteady": "Are some steps slower than others?",
}


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True)


class Evidence(_Said):
    """Numbers in words, and the file that they are from."""

    words: str
    source: str


class Price(_Said):
    """What the planner predicts with the changes, and without them."""

    step_seconds: float | None
    step_seconds_now: float | None
    peak_bytes: int
    peak_bytes_now: int


class Remedy(_Said):
    """What to do; `changes` are what `--set` takes, `price` is what they bring by the plan."""

    words: str
    changes: tuple[str, ...] = ()
    price: Price | None = None


class Finding(_Said):
    """The answer to one question. `gain_seconds`: what a step loses by it, at most what its
    removal brings; with `at_least` more may come with it."""

    topic: Topic
    answer: Answer
    words: str
    evidence: tuple[Evidence, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    gain_seconds: float | None = None
    at_least: bool = False

    @property
    def question(self) -> str:
        return QUESTIONS[self.topic]


def unknown(topic: Topic, words: str) -> Finding:
    return Finding(topic=topic, answer="unknown", words=words)


def fine(topic: Topic, words: str, *evidence: Evidence) -> Finding:
    return Finding(topic=topic, answer="no", words=words, evidence=evidence)
