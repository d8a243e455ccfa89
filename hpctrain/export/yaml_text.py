"""Writes documents of Kubernetes as YAML that every reader understands alike. Pure.

Belongs here: mappings, lists, scalars and texts of several lines. Does not belong here: what the
documents contain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.spec.positions import scalar_text


def yaml_documents(head: str, documents: tuple[Mapping[str, Any], ...]) -> str:
    """Write several documents into one file, below `head`, its comment.

    Kubernetes reads YAML 1.1 (`on` is true, `1:30` is 90), so every text that could be something
    else has quotes.
    """
    texts = ["\n".join([*_mapping(one), ""]) for one in documents]
    return head + "---\n" + "---\n".join(texts)


def _mapping(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        yield from _entry(f"{scalar_text(key)}:", value)


def _entry(head: str, value: Any) -> Iterator[str]:
    if isinstance(value, str) and "\n" in value:
        yield f"{head} |"
        assert value.endswith("\n") and not value.endswith("\n\n")
        yield from (f"  {line}" if line else "" for line in value.splitlines())
        return
    if not isinstance(value, dict | list) or not value:
        yield f"{head} {scalar_text(value)}"
        return
    if isinstance(value, dict):
        lines = [f"  {line}" for line in _mapping(value)]
    else:
        lines = [f"  {line}" for item in value for line in _entry("-", item)]
    if head == "-":  # the first key of an item stands behind the dash
        yield f"- {lines[0][2:]}"
        yield from lines[1:]
    else:
        yield head
        yield from lines
