"""Pages that are what descriptions say: of fields of specs and profiles, of metric families."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from reviewed_files import compare

from hpctrain.job.reference_command import default_text
from hpctrain.observe.families import FAMILIES
from hpctrain.spec.reference import TITLES, Field, Kind, fields_of


def reference_page(kind: Kind) -> str:
    """Write a page of the reference in Markdown: one section for each section of the document."""
    lines = [f"# {TITLES[kind].capitalize()}s: every field", ""]
    lines += [
        "Made from the descriptions that `hpctrain explain` and editors show (`make golden`).",
        "`required` stands where a file must have the field, `absent` where it has no default.",
        "",
    ]
    fields = fields_of(kind)
    alone = [one for path, one in fields.items() if "." not in path and not one.fields]
    lines += [*_table(alone), ""]
    for path, one in fields.items():
        if one.fields:
            lines += [f"## `{path}`", "", one.description, ""]
            lines += [*_table([fields[name] for name in one.fields]), ""]
    return "\n".join(lines)


def _table(fields: list[Field]) -> Iterator[str]:
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    for one in fields:
        default = "required" if one.required else default_text(one)
        meaning = one.description
        if one.engines:
            meaning += f" (engines {', '.join(one.engines)})"
        words = (f"`{one.name}`", one.type, default, meaning)
        yield "| " + " | ".join(word.replace("|", "\\|") for word in words) + " |"


@pytest.mark.parametrize("kind", TITLES)
def test_page(kind: Kind, request: pytest.FixtureRequest) -> None:
    compare(request.config, f"docs/{kind}-reference.md", reference_page(kind))


def metric_families_page() -> str:
    """Write the table of metric families as a page."""
    lines = [
        "# Metric families",
        "",
        "Written by `make golden` from `hpctrain/observe/families.yaml`. Each family of runs has "
        "the label `run`,",
        "and none has one for ranks; each family of services has the label `service`. More:",
        "[metrics.md](metrics.md).",
        "",
        "| metric | type | further labels | meaning |",
        "|---|---|---|---|",
    ]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        meaning = family.help.replace("|", "\\|")
        lines.append(f"| `{family.sample_name}` | {family.type} | {labels} | {meaning} |")
    return "\n".join(lines) + "\n"


def test_page_of_metric_families(request: pytest.FixtureRequest) -> None:
    compare(request.config, "docs/metric-families.md", metric_families_page())
