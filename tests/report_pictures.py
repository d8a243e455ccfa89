"""The pictures of docs/report.md: pages of made-up runs in a real Chromium.

python -m tests.report_pictures [DIRECTORY]     default: docs/images
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hpctrain.report.collect import collect_reports
from hpctrain.report.run_page import write_page
from tests.chromium import Chromium
from tests.reported_runs import LARGE, reported

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
# Name, page, width, height, dark, the section at the top.
PICTURES = (
    ("report-top", "one", 1200, 1440, False, ""),
    ("report-time", "one", 1200, 960, True, "time"),
    ("report-ranks", "one", 1200, 1150, False, "communication"),
    ("report-side-by-side", "both", 1200, 1250, True, ""),
    ("report-narrow", "one", 400, 1300, False, ""),
)


def main() -> None:
    """Make the runs, write their pages, and take the pictures."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        large = reported(directory, "gpt175b", of=LARGE, done=True)
        first = reported(directory, "llama-lr2e-5", steps=3000, done=True)
        second = reported(
            directory,
            "llama-lr4e-5",
            steps=3000,
            changes=("optimizer.lr=4e-5",),
            seed=3,
            done=True,
            loss_factor=0.93,
        )
        pages = {"one": directory / "one.html", "both": directory / "both.html"}
        pages["one"].write_text(write_page(collect_reports([large], None)))
        pages["both"].write_text(write_page(collect_reports([first, second], None)))
        with Chromium(directory / "profile") as browser:
            for name, page, width, height, dark, anchor in PICTURES:
                browser.open(pages[page], width=width, dark=dark, height=height)
                browser.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
                if anchor:
                    browser.evaluate(f"document.getElementById('{anchor}').scrollIntoView()")
                browser.picture(target / f"{name}.png")


if __name__ == "__main__":
    main()
