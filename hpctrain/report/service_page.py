"""The page about one service as HTML: one file, no script, nothing loaded. Pure.

Belongs here: the frame, and a page with nothing but the picture of a test. Does not belong here:
sections (`service_sections`), collecting (`hpctrain.actions.service_report`).
"""

from __future__ import annotations

from hpctrain.actions.service_report import ServiceReport
from hpctrain.report.elements import Contents, fill, section
from hpctrain.report.service_sections import head_of_service, service_sections
from hpctrain.report.words import moment
from hpctrain.version import __version__


def write_service_page(report: ServiceReport) -> str:
    """Write the page about one service."""
    sections = service_sections(report)
    footer = [f"Made {moment(report.made_time)} by hpctrain {__version__}. Times are UTC."]
    footer.append(f"Read from {report.directory}")
    footer += [f"{one.part} cannot be read: {one.reason}" for one in report.unread]
    return str(
        fill(
            "page.html.j2",
            title=f"{report.service_id} · hpctrain report",
            head=fill("head.html.j2", head=head_of_service(report)),
            contents=[Contents(one.anchor, one.title) for one in sections],
            sections=[section(one) for one in sections],
            footer=footer,
        )
    )
