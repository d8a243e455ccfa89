"""The documents of a diagnosis: question, answer, measurements, remedies and their predicted gain.

Belongs here: these documents. Does not belong here: judging, formatting tables.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Topic = Literal[
    "data", "communication", "imbalance", "pipeline", "buckets", "memory", "saves", "warm_up",
    "unsteady", "hardware",
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
    "hardware": "Was a GPU or a link slow before training?",
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Measurement(_Frozen):
    """Measured numbers as text, and the file that they come from."""

    words: str
    source: str


class Price(_Frozen):
    """The planner's predictions with the changes and without them."""

    step_seconds: float | None
    step_seconds_now: float | None
    peak_bytes: int
    peak_bytes_now: int


class Suggestion(_Frozen):
    """A recommended action; `changes` are values of `--set`, `price` is their predicted effect."""

    words: str
    changes: tuple[str, ...] = ()
    price: Price | None = None


class TopicFinding(_Frozen):
    """The answer to one question.

    `gain_seconds`: time per step that a remedy can save at most; with `at_least`, at least.
    """

    topic: Topic
    answer: Answer
    words: str
    evidence: tuple[Measurement, ...] = ()
    remedies: tuple[Suggestion, ...] = ()
    gain_seconds: float | None = None
    at_least: bool = False

    @property
    def question(self) -> str:
        return QUESTIONS[self.topic]


def unknown(topic: Topic, words: str) -> TopicFinding:
    return TopicFinding(topic=topic, answer="unknown", words=words)


def fine(topic: Topic, words: str, *evidence: Measurement) -> TopicFinding:
    return TopicFinding(topic=topic, answer="no", words=words, evidence=evidence)
