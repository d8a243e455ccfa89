"""Pages that are what descriptions say: of fields of specs and profiles, of metric families."""

from __future__ import annotations

import pytest
from reviewed_files import compare

from hpctrain.job.reference_text import reference_page
from hpctrain.observe.families import FAMILIES
from hpctrain.spec.reference import TITLES, Kind


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
