"""The page about one run or several. Pure.

Belongs here: which parts it has, its footer. Does not belong here: sections (`run_sections`,
`side_by_side`), collecting (`hpctrain.report.collect`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.page.elements import Chapter, Page, Section
from hpctrain.page.words import made_line
from hpctrain.report.collect import RunReport
from hpctrain.report.run_sections import head_of, sections_of
from hpctrain.report.side_by_side import head_of_several, run_anchor, sections_of_several


def write_page(reports: Sequence[RunReport]) -> str:
    """Write the page about one run, or about several side by side and then one after the other."""
    if len(reports) == 1:
        title, head = reports[0].run_id, head_of(reports[0])
        return Page(title, head, sections_of(reports[0]), _footer(reports)).html()
    parts: list[Section | Chapter] = [*sections_of_several(reports)]
    for number, report in enumerate(reports):
        anchor = run_anchor(number)
        parts.append(Chapter(anchor, head_of(report), sections_of(report, f"{anchor}-")))
    title = f"{len(reports)} runs"
    return Page(title, head_of_several(reports), parts, _footer(reports)).html()


def _footer(reports: Sequence[RunReport]) -> list[str]:
    """Say when and from what the page was made, and what could not be read."""
    lines = [made_line(reports[0].made_time)]
    for report in reports:
        lines.append(f"Read from {report.directory}")
        several = f"{report.run_id}: " if len(reports) > 1 else ""
        lines += [f"{several}{one.part} cannot be read: {one.reason}" for one in report.unread]
    return lines
