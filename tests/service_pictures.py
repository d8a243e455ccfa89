"""Pictures of services in a real Chromium: those of docs/report.md, and that of one real service.

python -m tests.service_pictures                              # docs/images/service-*.png, made up
python -m tests.service_pictures RUNS/SERVICE OUT.png         # latency through all that happened
python -m tests.service_pictures RUNS/SERVICE OUT.png --test test-2 --dark --width 1000

The second form draws the newest test whose requests have records, and the replicas below it. Tests
are those of the directory `tests/` of a service: NAME.json with NAME.jsonl beside it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from hpctrain.base.errors import UsageError
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.report.service_page import write_service_page
from hpctrain.report.service_report import ServiceReport, collect_service_report
from hpctrain.serve.service_files import ServiceFiles
from tests.chromium import Chromium
from tests.fabricated_services import NOW, fabricate_service, fabricate_test

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
# Name, width, height, dark, the section at the top.
PICTURES = (
    ("service-top", 1200, 1180, False, ""),
    ("service-latency", 1200, 1150, True, "latency"),
)
_CARD = """
(() => { const place = document.querySelector('#latency .card').getBoundingClientRect();
return [place.x + scrollX, place.y + scrollY, place.width, place.height]; })()
"""


def main() -> None:
    """Take the pictures that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.service_pictures")
    parser.add_argument("service", type=Path, nargs="?", help="directory of a service")
    parser.add_argument("picture", type=Path, nargs="?", help="PNG to write")
    parser.add_argument("--test", help="name of a load test  [default: the newest with records]")
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--dark", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        if asked.service is None:
            _made_up(directory)
        elif asked.picture is None:
            parser.error("give the PNG to write")
        else:
            service = ServiceFiles(ServiceLayout(asked.service.absolute()))
            report = _with_one_test(collect_service_report(service), asked.test)
            _picture_of(report, asked.picture, directory, asked.width, dark=asked.dark)


def _with_one_test(report: ServiceReport, name: str | None) -> ServiceReport:
    drawn = [one for one in report.tests if one.latencies and name in (None, one.name)]
    if not drawn:
        hint = ", ".join(one.name for one in report.tests) or "no test was made"
        raise UsageError("no test with records of its requests", hint=hint)
    return report.model_copy(update={"tests": drawn[-1:]})


def _picture_of(
    report: ServiceReport, target: Path, directory: Path, width: int, *, dark: bool
) -> None:
    """Take the picture of the card with latencies and replicas."""
    page = directory / "page.html"
    page.write_text(write_service_page(report))
    with Chromium(directory / "profile") as browser:
        browser.open(page, width=width, dark=dark)
        x, y, wide, high = browser.evaluate(_CARD)
        browser.picture(target, part=(x, y, wide, high))


def _made_up(directory: Path) -> None:
    """Take the pictures of the page about a service that never was."""
    service = fabricate_service(directory)
    fabricate_test(service)
    page = directory / "page.html"
    report = collect_service_report(service, NOW).model_copy(update={"owner": "ada"})
    page.write_text(write_service_page(report))
    with Chromium(directory / "profile") as browser:
        for name, width, height, dark, anchor in PICTURES:
            browser.open(page, width=width, dark=dark, height=height)
            browser.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
            if anchor:
                browser.evaluate(f"document.getElementById('{anchor}').scrollIntoView()")
            browser.picture(IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
