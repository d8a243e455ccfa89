"""The page about one run or several as HTML: one file, no script, nothing loaded. Pure.

Belongs here: the frame of the page. Does not belong here: sections (`run_sections`,
`side_by_side`), collecting (`hpctrain.actions.report`).
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from hpctrain.actions.report import RunReport
from hpctrain.report.elements import Contents, Section, fill, section
from hpctrain.report.run_sections import head_of, sections_of
from hpctrain.report.side_by_side import head_of_several, run_anchor, sections_of_several
from hpctrain.report.words import moment
from hpctrain.version import __version__


def write_page(reports: Sequence[RunReport]) -> str:
    """Write the page about one run, or about several side by side and then one after the other."""
    if len(reports) == 1:
        sections = sections_of(reports[0])
        return _frame(
            reports[0].run_id,
            fill("head.html.j2", head=head_of(reports[0])),
            _contents(sections),
            [section(one) for one in sections],
            _footer(reports),
        )
    together = sections_of_several(reports)
    contents, written = _contents(together), [section(one) for one in together]
    for number, report in enumerate(reports):
        anchor = run_anchor(number)
        contents.append(Contents(anchor, report.run_id))
        name = fill("run_name.html.j2", anchor=anchor, head=head_of(report))
        parts = [section(one) for one in sections_of(report, f"{anchor}-")]
        written += [name, *parts]
    head = fill("head.html.j2", head=head_of_several(reports))
    return _frame(f"{len(reports)} runs", head, contents, written, _footer(reports))


def _frame(
    title: str,
    head: Markup,
    contents: Sequence[Contents],
    sections: Sequence[Markup],
    footer: Sequence[str],
) -> str:
    return str(
        fill(
            "page.html.j2",
            title=f"{title} · hpctrain report",
            head=head,
            contents=contents,
            sections=sections,
            footer=footer,
        )
    )


def _contents(sections: Sequence[Section]) -> list[Contents]:
    return [Contents(one.anchor, one.title) for one in sections]


def _footer(reports: Sequence[RunReport]) -> list[str]:
    """Say when and from what the page was made, and what could not be read."""
    lines = [f"Made {moment(reports[0].made_time)} by hpctrain {__version__}. Times are UTC."]
    for report in reports:
        lines.append(f"Read from {report.directory}")
        several = f"{report.run_id}: " if len(reports) > 1 else ""
        lines += [f"{several}{one.part} cannot be read: {one.reason}" for one in report.unread]
    return lines
