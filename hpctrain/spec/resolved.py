"""Write a document in full, each value with its origin as a comment.

Belongs here: YAML output that loads again to an equal document. Does not belong here: where the
text is stored. Only base names of files appear, no path of the user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpctrain.spec.positions import Path, dotted

if TYPE_CHECKING:
    from hpctrain.spec.loader import DocumentT, Loaded

# Text that needs no quotes under YAML 1.1 and 1.2: no leading digit, no special value.
_PLAIN = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*")
_SPECIAL = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def write_resolved(loaded: Loaded[DocumentT]) -> str:
    """Write all values of the document, each with `# FILE:LINE`, `# --set` or `# default`."""
    values = loaded.document.model_dump(mode="json", by_alias=True)
    lines = [*_mapping(values, (), loaded), ""]
    return "\n".join(lines)


def _mapping(values: dict[str, Any], path: Path, loaded: Loaded[DocumentT]) -> Iterator[str]:
    for key, value in values.items():
        yield from _entry(f"{scalar_text(key)}:", value, (*path, key), loaded)


def _entry(head: str, value: Any, path: Path, loaded: Loaded[DocumentT]) -> Iterator[str]:
    if not isinstance(value, dict | list) or not value:
        origin = loaded.origin.get(dotted(path), "default")
        yield f"{head} {scalar_text(value)}  # {origin}"
        return
    if isinstance(value, dict):
        lines = [f"  {line}" for line in _mapping(value, path, loaded)]
    else:
        items = (_entry("-", item, (*path, index), loaded) for index, item in enumerate(value))
        lines = [f"  {line}" for entry in items for line in entry]
    if head == "-":  # the first key of an item stands behind the dash
        yield f"- {lines[0][2:]}"
        yield from lines[1:]
    else:
        yield head
        yield from lines


def scalar_text(value: Any) -> str:
    """Write one value so that YAML 1.1 and 1.2 read the same."""
    if isinstance(value, float):
        mantissa, exponent, power = repr(value).partition("e")
        return (mantissa if "." in mantissa else f"{mantissa}.0") + exponent + power
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _SPECIAL and not value.startswith("."):
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(
        char if char.isprintable() and char != "\ufeff" else f"\\U{ord(char):08X}"
        for char in quoted
    )
