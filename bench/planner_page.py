"""Write the figures of docs/planner.md anew: nothing there is typed by hand.

    python -m bench.planner_page --runs FILE.csv --oom OOM.csv [--page docs/planner.md]

A block of the page between fences that follows a line `<!-- figures: NAME -->` is replaced by what
`bench/planner_accuracy.py` and `bench.peers` print under that name. Minutes: it leaves each source
out once. Belongs here: which figures have a name, and replacing them. Does not belong here: the
figures (`planner_accuracy`, `peers`), pictures (`planner_plots`).
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from bench import peers
from bench.accuracy_figures import Report, oom_report
from bench.planner_accuracy import OWN, PRODUCT, UNSEEN, Views, views_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "planner.md"
BLOCK = re.compile(r"(<!-- figures: ([^>]+?) -->\n+```text\n).*?(^```$)", re.DOTALL | re.MULTILINE)
SHARE = 0.7  # of the rows that the packaged constants were fitted to


def figures_of(views: Views, peer_reports: list[Report]) -> dict[str, str]:
    """The text of every named block."""
    product = list(views.figures(PRODUCT).values())[-1]  # the rows that were not fitted to
    unseen = list(views.figures(UNSEEN).values())[-1]
    named = {"product": product.text(), "leave one source out": unseen.text()}
    for title, part in zip(("seen", "not seen"), views.figures(OWN).values(), strict=True):
        named[f"own software, {title}"] = part.text()
    for view, failed in views.oom.items():
        named[f"out of memory, {view}"] = oom_report(views.runs[view], failed).text()
    named["peers"] = "\n\n".join(report.text() for report in peer_reports)
    return named


def written(page: str, figures: dict[str, str]) -> str:
    """The page with its blocks replaced. Raises KeyError for a name without figures."""

    def block(found: re.Match[str]) -> str:
        text = "\n".join(line.rstrip() for line in figures[found.group(2)].splitlines())
        return f"{found.group(1)}{text}\n{found.group(3)}"

    return BLOCK.sub(block, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, required=True, help="measured configurations (CSV)")
    parser.add_argument("--oom", type=Path, required=True, help="out of memory (CSV)")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    table = peers.compared(options.runs)
    reports = [peers.report(table, unit) for unit in ("seconds", "gib")]
    views = views_of(options.runs, options.oom, SHARE, quick=False)
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(written(page, figures_of(views, reports)), encoding="utf-8")
    print(f"wrote {options.page}")


if __name__ == "__main__":
    main()
