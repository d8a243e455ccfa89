"""The page of dashboards: what each kind of panel shows; no text becomes a part of HTML."""

from __future__ import annotations

import math

import pytest

from hpctrain.observe.dashboard_data import (
    AnnotationData,
    Answer,
    DashboardData,
    PanelData,
    PrometheusServer,
    Series,
    collect_dashboards,
    packaged_dashboards,
)
from hpctrain.observe.dashboard_page import shown, write_dashboards
from hpctrain.observe.families import FAMILIES
from hpctrain.observe.grafana_dashboard import (
    Annotation,
    Column,
    Dashboard,
    DashboardVariable,
    Panel,
    PanelRow,
    Query,
    Threshold,
    ValueMapping,
)

END = 1_800_000_000.0
STEP_SECONDS = 60.0
LIMITS = (Threshold("green"), Threshold("red", 10.0))


def series(*values: float, start: float = END - 3600, **labels: str) -> Series:
    return Series(
        labels, tuple((start + number * STEP_SECONDS, one) for number, one in enumerate(values))
    )


def page(panel: Panel, *answers: Answer, annotations: tuple[AnnotationData, ...] = ()) -> str:
    """The page of one panel with these answers."""
    dashboard = Dashboard(
        "hpctrain-test",
        "Test",
        "A test.",
        (DashboardVariable("run", "Run", "x", "run"),),
        (PanelRow("Row", (panel,)),),
        tuple(one.annotation for one in annotations),
    )
    data = DashboardData(
        dashboard,
        ((PanelData(panel, answers),),),
        annotations,
        {"run": ["a"]},
        END - 3600,
        END,
        STEP_SECONDS,
    )
    return write_dashboards([data])


def answer(*found: Series) -> Answer:
    return Answer(found)


def panel(kind: str, *queries: Query, **more: object) -> Panel:
    return Panel("Title", "Text.", kind, queries, **more)  # type: ignore[arg-type]


STATES = (ValueMapping(1, "RUNNING", "green"), ValueMapping(2, "FAILED", "red"))
X = Query("x")
SHOWN = [
    (panel("stat", X), Answer(), ["No data."]),
    (panel("timeseries", X, needs="DCGM exporter"), Answer(), ["Needs DCGM exporter."]),
    (
        panel("bargauge", X),
        Answer(refusal="parse error"),
        ["Prometheus refuses the query: parse"],
    ),
    (
        panel("stat", X, unit="percentunit", thresholds=LIMITS),
        answer(series(0.5)),
        ['<p class="figure tone c3">50%</p>'],
    ),
    (panel("stat", X, thresholds=LIMITS), answer(series(15.0)), ['<p class="figure tone c8">']),
    (
        panel("stat", X, mappings=STATES),
        answer(series(2.0)),
        ['<p class="figure tone c8">FAILED</p>'],
    ),
    (
        panel("bargauge", Query("x", "{{cause}}"), unit="s"),
        answer(series(600.0, cause="hang"), series(150.0, cause="crash")),
        ["width: 100.0%", "width: 25.0%", "10 min", "hang"],
    ),
    *(
        (
            panel("stat", X, thresholds=(Threshold(colour),)),
            answer(series(1.0)),
            [f'<p class="figure tone {style}">'],
        )
        for colour, style in (
            *(("dark-red", "c8"), ("super-light-blue", "c1"), ("#8e8e8e", "neutral")),
            ("text", "neutral"),
        )
    ),
]


@pytest.mark.parametrize(("one", "found", "texts"), SHOWN)
def test_a_panel_shows_its_figures_or_why_there_are_none(
    one: Panel, found: Answer, texts: list[str]
) -> None:
    text = page(one, found)
    assert not [words for words in texts if words not in text]


def test_a_curve_has_a_gap_where_points_are_missing() -> None:
    one = series(1.0, 2.0, 3.0)
    late = series(4.0, 5.0, start=END - 600)
    text = page(panel("timeseries", Query("x")), answer(Series({}, one.points + late.points)))
    path = text.split(' d="')[1].split('"')[0]
    assert path.count("M") == 2 and path.count("L") == 3


def test_the_dashed_curve_has_the_colour_of_its_solid_one() -> None:
    text = page(
        panel("timeseries", Query("x", "{{run}}"), Query("y", "{{run}} planned", dashed=True)),
        answer(series(1.0, 1.0, run="a"), series(2.0, 2.0, run="b")),
        answer(series(3.0, 3.0, run="b")),
    )
    assert 'class="line c2 dashed"' in text and 'class="line c1 dashed"' not in text


def test_many_curves_are_counted_and_not_drawn() -> None:
    found = [series(float(number), 1.0 * number, run=str(number)) for number in range(15)]
    text = page(panel("timeseries", Query("x", "run {{run}}")), answer(*found))
    assert text.count('class="line ') == 12 and "3 more are not drawn." in text
    assert "run 14" in text and "run 2<" not in text


def test_annotations_are_lines_with_a_tooltip() -> None:
    ends = Annotation("x", "Ended: {{cause}}", "red", 60)
    data = AnnotationData(ends, answer(series(1.0, start=END - 1800, cause="hang")))
    text = page(panel("timeseries", Query("x")), answer(series(1.0, 2.0)), annotations=(data,))
    assert 'class="rule c8"' in text and "Ended: hang, 2027-01-15 07:30" in text


def test_states_are_stretches() -> None:
    text = page(
        panel("state-timeline", Query("x", "{{run}}"), mappings=STATES),
        answer(series(1, 1, 1, 2, 2, run="a")),
    )
    assert text.count('class="fill c3"') == 1 and text.count('class="fill c8"') == 1
    assert "RUNNING, 2027-01-15 07:00 to 2027-01-15 07:02" in text


def test_columns_of_equal_labels_are_one_row() -> None:
    table = Panel(
        "Title",
        "Text.",
        "table",
        labels={"run": "Run", "user": "Who"},
        columns=(
            Column("a"),
            Column("b", "Speed", thresholds=LIMITS),
            Column("c", "Silent", "s"),
        ),
    )
    text = page(
        table,
        answer(series(1, run="r1", user="u1"), series(1, run="r2", user="u2")),
        answer(series(11.0, run="r2")),
        answer(series(30.0, run="r1"), series(7.0, run="r3")),
    )
    rows = [" ".join(one.split()) for one in text.split("<tbody>")[1].split("<tr>")[1:]]
    assert len(rows) == 3
    assert text.index("Run</th>") < text.index("Who</th>") < text.index("Speed</th>")
    assert "r1" in rows[0] and "u1" in rows[0] and "30 s" in rows[0]
    assert "r2" in rows[1] and '<span class="tone c8">11</span>' in rows[1]
    assert "r3" in rows[2] and "7 s" in rows[2]


@pytest.mark.parametrize("kind", ["stat", "bargauge", "timeseries", "state-timeline"])
def test_labels_are_escaped(kind: str) -> None:
    bad = '<script>alert("x")</script>'
    text = page(
        panel(kind, Query("x", "{{run}}"), Query("y", "{{run}}!")),
        answer(series(1.0, 2.0, run=bad)),
        answer(series(1.0, 2.0, run=bad)),
    )
    assert "<script" not in text and "&lt;script&gt;" in text


def test_cells_are_escaped() -> None:
    table = Panel("T", "T.", "table", columns=(Column("a", "A"),), labels={"run": "Run"})
    assert "<b>" not in page(table, answer(series(1.0, run="<b>")))


def test_values_that_are_not_numbers_are_drawn() -> None:
    found = answer(series(math.nan, math.inf, run="a"), series(1.0, run="b"))
    for kind in ("stat", "bargauge", "timeseries", "state-timeline"):
        page(panel(kind, Query("x", "{{run}}")), found)
    assert [shown(value, "s") for value in (math.nan, math.inf, -math.inf)] == ["NaN", "∞", "-∞"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.25, "s", "250 ms"),
        (59.0, "s", "59 s"),
        (1139.0, "s", "19 min"),
        (86400 * 21 + 7300.0, "s", "21 d 2 h"),
        (2.4e12, "bytes", "2.18 TiB"),
        (1.8e11, "Bps", "180 GB/s"),
        (0.925, "percentunit", "92.5%"),
        (97.0, "percent", "97%"),
        (1280.0, "watt", "1.28 kW"),
        (79.0, "none", "79"),
    ],
)
def test_units_are_those_of_grafana(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


class _OneOfEach(PrometheusServer):
    """Answers every query with one series that has every label."""

    labels = dict.fromkeys((one for family in FAMILIES for one in family.all_labels), "here")

    def label_values(self, selector: str, label: str, begin: float, end: float) -> list[str]:
        return ["here"]

    def now(self, query: str, time: float) -> tuple[Series, ...]:
        return (Series(self.labels, ((time, 1.0),)),)

    def over(self, query: str, begin: float, end: float, step: float) -> tuple[Series, ...]:
        return (Series(self.labels, ((begin, 1.0), (begin + step, 1.0))),)


def test_every_packaged_panel_is_drawn() -> None:
    server, dashboards = _OneOfEach("http://127.0.0.1:1"), packaged_dashboards()
    text = write_dashboards(collect_dashboards(server, dashboards, END))
    assert "No data." not in text and "refuses" not in text
    for dashboard in dashboards:
        assert f'<header id="{dashboard.short_name}">' in text and dashboard.description in text
        for panel in dashboard.panels():
            assert f"<h3>{panel.title}</h3>" in text
            for heading in (*panel.labels.values(), *(one.name for one in panel.columns)):
                assert f"{heading}</th>" in text
