"""The pictures of docs/report.md: pages of made-up runs, services and a team in a real Chromium.

python -m tests.report_pictures                         # all of them, into docs/images
python -m tests.report_pictures --into DIRECTORY
python -m tests.report_pictures RUNS/SERVICE OUT.png    # latency of a service through all events
python -m tests.report_pictures RUNS/SERVICE OUT.png --test test-2 --dark --width 1000

The last forms draw the newest test whose requests have records, and the replicas below it. Tests
are those of the directory `tests/` of a service: NAME.json with NAME.jsonl beside it.
"""

from __future__ import annotations

import argparse
import tempfile
from datetime import UTC
from pathlib import Path
from unittest.mock import patch

from hpctrain.base.errors import UsageError
from hpctrain.records.find import RunFiles
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.report.collect import collect_reports
from hpctrain.report.report_windows import last_days
from hpctrain.report.run_page import write_page
from hpctrain.report.service_page import write_service_page
from hpctrain.report.service_report import collect_service_report
from hpctrain.report.team_report import team_report
from hpctrain.report.week_page import write_week_page
from hpctrain.serve.service_files import ServiceFiles
from tests.chromium import Chromium
from tests.fabricated_services import NOW, fabricate_service, fabricate_test
from tests.reported_runs import LARGE, reported
from tests.team_runs import NOW as TEAM_NOW
from tests.team_runs import team

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
# Name, page, width, height, dark, the section at the top.
PICTURES = (
    ("report-top", "one", 1200, 1440, False, ""),
    ("report-time", "one", 1200, 960, True, "time"),
    ("report-ranks", "one", 1200, 1150, False, "communication"),
    ("report-side-by-side", "both", 1200, 1250, True, ""),
    ("report-narrow", "one", 400, 1300, False, ""),
    ("service-top", "service", 1200, 1180, False, ""),
    ("service-latency", "service", 1200, 1150, True, "latency"),
    ("report-week", "week", 1280, 1180, False, ""),
)
_CARD = """
(() => { const place = document.querySelector('#latency .card').getBoundingClientRect();
return [place.x + scrollX, place.y + scrollY, place.width, place.height]; })()
"""
_OWNERS = {
    "llama7b-base": "ada",
    "llama7b-code": "ada",
    "llama7b-long": "bob",
    "protein-lm": "chen",
}


def main() -> None:
    """Take the pictures that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.report_pictures")
    parser.add_argument("service", type=Path, nargs="?", help="directory of a service")
    parser.add_argument("picture", type=Path, nargs="?", help="PNG to write")
    parser.add_argument("--into", type=Path, default=IMAGES, help="directory of all pictures")
    parser.add_argument("--test", help="name of a load test  [default: the newest with records]")
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--dark", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        if asked.service is None:
            pages = {}
            for name, text in made_up_pages(place).items():
                pages[name] = place / f"{name}.html"
                pages[name].write_text(text)
            with Chromium(place / "profile") as browser:
                for name, page, width, height, dark, anchor in PICTURES:
                    browser.open(pages[page], width=width, dark=dark, height=height)
                    browser.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
                    if anchor:
                        browser.evaluate(f"document.getElementById('{anchor}').scrollIntoView()")
                    browser.picture(asked.into / f"{name}.png")
            return
        if asked.picture is None:
            parser.error("give the PNG to write")
        service = ServiceFiles(ServiceLayout(asked.service.absolute()))
        report = collect_service_report(service)
        drawn = [one for one in report.tests if one.latencies and asked.test in (None, one.name)]
        if not drawn:
            hint = ", ".join(one.name for one in report.tests) or "no test was made"
            raise UsageError("no test with records of its requests", hint=hint)
        of_one = report.model_copy(update={"tests": drawn[-1:]})
        (place / "page.html").write_text(write_service_page(of_one))
        with Chromium(place / "profile") as browser:
            browser.open(place / "page.html", width=asked.width, dark=asked.dark)
            x, y, wide, high = browser.evaluate(_CARD)
            browser.picture(asked.picture, part=(x, y, wide, high))


def made_up_pages(place: Path) -> dict[str, str]:
    """Make runs, a service and a team, and write their pages."""
    large = reported(place, "gpt175b", of=LARGE, done=True)
    first = reported(place, "llama-lr2e-5", steps=3000, done=True)
    changes = ("optimizer.lr=4e-5",)
    second = reported(
        place, "llama-lr4e-5", steps=3000, changes=changes, seed=3, done=True, loss_factor=0.93
    )
    service = fabricate_service(place / "services")
    fabricate_test(service)
    of_service = collect_service_report(service, NOW).model_copy(update={"owner": "ada"})

    def owner(run: RunFiles) -> str:
        return _OWNERS.get(run.run_id.rpartition("-")[0], "dana")

    with patch.object(RunFiles, "owner_name", property(owner)):
        of_team = team_report(team(place / "team"), last_days(TEAM_NOW, UTC), TEAM_NOW)
    shown = {"directories": ("/scratch/a100/runs", "/scratch/h100/runs")}
    return {
        "one": write_page(collect_reports([large], None)),
        "both": write_page(collect_reports([first, second], None)),
        "service": write_service_page(of_service),
        "week": write_week_page(of_team.model_copy(update=shown)),
    }


if __name__ == "__main__":
    main()
