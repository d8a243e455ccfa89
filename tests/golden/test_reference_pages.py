"""docs/spec-reference.md and docs/profile-reference.md are what the descriptions of fields say."""

from __future__ import annotations

import pytest
from reviewed_files import compare

from hpctrain.cli.reference_text import reference_page
from hpctrain.spec.reference import Kind


@pytest.mark.parametrize("kind", ["spec", "profile"])
def test_page(kind: Kind, request: pytest.FixtureRequest) -> None:
    compare(request.config, f"docs/{kind}-reference.md", reference_page(kind))
