"""Makes the picture of the page about a team from made-up runs.

`python -m tests.week_picture FILE.png`
"""

from __future__ import annotations

import base64
import sys
import tempfile
from datetime import UTC
from pathlib import Path
from unittest.mock import patch

from hpctrain.records.find import RunFiles
from hpctrain.report.report_windows import last_days
from hpctrain.report.team_report import team_report
from hpctrain.report.week_page import write_week_page
from tests.chromium import Chromium
from tests.team_runs import NOW, team

WIDTH, HEIGHT = 1280, 1180
OWNERS = {"llama7b-base": "ada", "llama7b-code": "ada", "llama7b-long": "bob", "protein-lm": "chen"}


def owner_of(run: RunFiles) -> str:
    return OWNERS.get(run.run_id.rpartition("-")[0], "dana")


def picture() -> bytes:
    """Write the page and return how it looks at its top."""
    with (
        tempfile.TemporaryDirectory() as place,
        patch.object(RunFiles, "owner_name", property(owner_of)),
    ):
        report = team_report(team(Path(place)), last_days(NOW, UTC), NOW)
        shown = report.model_copy(
            update={"directories": ("/scratch/a100/runs", "/scratch/h100/runs")}
        )
        page = Path(place) / "week.html"
        page.write_text(write_week_page(shown))
        with Chromium(Path(place) / "profile") as browser:
            browser.open(page, width=WIDTH, height=HEIGHT, dark=False)
            taken = browser.call("Page.captureScreenshot", format="png")
    return base64.b64decode(taken["data"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(picture())
