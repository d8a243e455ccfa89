"""Charts of small data number by number, their axes, and colours that can be told apart."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import hpctrain.page
from hpctrain.page.charts import (
    Axis,
    Bar,
    Cells,
    Entry,
    Level,
    Line,
    Part,
    Row,
    Rule,
    Step,
    bar_chart,
    heat_map,
    legend,
    line_chart,
    stacked_bar,
    timeline,
    waterfall,
)
from hpctrain.page.scales import clock, compact_number, log_scale, percent, scale_of, time_scale
from tests.unit.page.markup_reader import Element, read

STEPS, LOSS = Axis("step"), Axis("loss")
EVIL = "<script>alert(1)</script>\"onload='x'&"


def line(points: list[tuple[float, float | None]], **more: object) -> str:
    return str(line_chart([Line("loss", points)], label="L", x=STEPS, y=LOSS, **more))  # type: ignore[arg-type]


def places(elements: list[Element], name: str) -> list[float]:
    return [float(one.attributes[name].rstrip("%")) for one in elements]


def path(markup: str) -> str:
    return read(markup).all("path")[0].attributes["d"]


def test_a_curve_goes_through_its_points() -> None:
    """From 0 to 10 in x, and from tick to tick in y: 1 to 3, on 100 pixels."""
    assert (
        path(line([(0, 1), (5, 3), (10, 2)], height=100)) == "M0.0 100.0h0L1000.0 0.0L2000.0 50.0"
    )


@pytest.mark.parametrize("gap", [None, math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_gap(gap: float | None) -> None:
    assert path(line([(0, 1), (1, 2), (2, gap), (3, 2), (4, 1)])).count("M") == 2


def test_one_point_is_a_dot() -> None:
    assert path(line([(7, 2.5)])) == "M1000.0 110.0h0"


@pytest.mark.parametrize(
    "points", [[], [(1, None)], [(1, math.nan), (2, math.inf)]], ids=["none", "unknown", "infinite"]
)
def test_without_a_value_a_sentence_stands_in_the_place(
    points: list[tuple[float, float | None]],
) -> None:
    found = read(line(points))
    assert not found.all("svg")
    assert found.all("p", "nothing")[0].text == "L: no values are known."


@pytest.mark.parametrize("size", [1e-290, 1e-9, 1e9, 1e15, 1e299])
def test_sizes_of_numbers_do_not_matter(size: float) -> None:
    markup = line([(0, size), (1, 2 * size), (2, -size)])
    assert "nan" not in markup and "inf" not in markup
    assert 3 <= len(read(markup).all("text", "end")) <= 9


def test_absurd_numbers_are_gaps_and_not_errors() -> None:
    assert path(line([(0, 1), (1, 1.7e308), (2, -1.7e308), (3, 2)])).count("M") == 2


def test_a_long_curve_keeps_its_spikes_and_stays_small() -> None:
    points: list[tuple[float, float | None]] = [(step, 1.0) for step in range(100_000)]
    points[70_001] = (70_001, 9.0)
    points[30_002] = (30_002, -5.0)
    markup = line(points, height=100)
    assert len(markup) < 60_000
    tops = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", path(markup))]
    assert min(tops) < 10 and max(tops) > 95


def test_events_and_levels_are_at_their_places_with_their_words() -> None:
    found = read(
        line(
            [(0, 0), (100, 4)],
            rules=[Rule(25, "launch 2 after: crash", "crash", "c8")],
            levels=[Level(3, "planned")],
            height=100,
        )
    )
    rule = found.all("line", "rule")[0]
    assert rule.attributes["x1"] == "25%" and "c8" in rule.attributes["class"]
    assert [one.text for one in found.all("text", "spare") if one.text == "crash"] == ["crash"]
    assert "launch 2 after: crash" in [one.text for one in found.all("title")]
    assert places(found.all("line", "level"), "y1") == [25.0]


def test_labels_of_events_that_are_near_each_other_do_not_overlap() -> None:
    rules = [Rule(x, "", f"cause {x}") for x in (20, 21, 22, 60)]
    found = read(line([(0, 0), (100, 4)], rules=rules))
    assert len(found.all("line", "rule")) == 4
    shown = [one.text for one in found.all("text", "label")]
    assert shown == ["cause 20", "cause 60"]


def test_bars_are_as_long_as_their_values() -> None:
    found = read(
        bar_chart([Bar("a", 2, mark=1), Bar("b", 4), Bar("c", None)], label="B", x=Axis("s"))
    )
    bars = found.all("rect", "fill")
    assert places(bars, "x") == [0, 0] and places(bars, "width") == [50, 100]
    assert places(found.all("line", "mark"), "x1") == [25]
    assert "unknown" in [one.text for one in found.all("text", "label")]


def test_bars_below_zero_begin_left_of_it() -> None:
    bars = read(bar_chart([Bar("a", -1), Bar("b", 1)], label="B", x=Axis("s"))).all("rect", "fill")
    assert places(bars, "x") == [0, 50] and places(bars, "width") == [50, 50]


def test_parts_of_a_total_fill_the_bar() -> None:
    parts = [(Entry("a", "c1"), 3.0), (Entry("b", "c2"), 1.0), (Entry("zero", "c3"), 0.0)]
    found = read(stacked_bar(parts, label="S"))
    assert places(found.all("rect", "fill"), "x") == [0, 75]
    assert places(found.all("rect", "fill"), "width") == [75, 25]
    assert [one.text for one in found.all("li")] == ["a 3", "b 1"]


def test_a_waterfall_ends_at_what_is_left() -> None:
    steps = [Step("wall", 100, is_total=True), Step("queue", 30), Step("saving", 20),
             Step("productive", 50, is_total=True)]  # fmt: skip
    bars = read(waterfall(steps, label="W", x=Axis("h"))).all("rect", "fill")
    assert places(bars, "x") == [0, 70, 50, 0]
    assert places(bars, "width") == [100, 30, 20, 50]


def test_a_timeline_shows_what_is_short_and_hides_nothing_behind_it() -> None:
    row = Row("attempt 1", [Part(50, 0.001, "c8", "crash", always=True), Part(0, 100, "c3", "on")])
    bars = read(timeline([row], label="T", end=100)).all("rect", "fill")
    assert [one.attributes["class"] for one in bars] == ["fill c3", "fill c8"]
    assert places(bars, "x") == [0, 50] and places(bars, "width") == [100, 0.15]


def test_a_heat_map_is_darkest_at_its_largest_value() -> None:
    cells = Cells(["r0", "r1"], ["c0", "c1"], [[0, 8], [4, None]])
    found = read(heat_map(cells, label="H"))
    drawn = found.all("rect", "heat")
    assert places(drawn, "x") == [50, 0]
    assert places(drawn, "fill-opacity") == [1.0, 0.56]
    assert [one.text for one in found.all("title")] == ["r0 → c1: 8", "r1 → c0: 4"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: bar_chart([], label="X", x=STEPS),
        lambda: stacked_bar([], label="X"),
        lambda: stacked_bar([(Entry("a", "c1"), math.nan)], label="X"),
        lambda: timeline([], label="X", end=0),
        lambda: waterfall([], label="X", x=STEPS),
        lambda: waterfall([Step("a", math.inf, is_total=True)], label="X", x=STEPS),
        lambda: heat_map(Cells([], [], []), label="X"),
        lambda: heat_map(Cells(["a"], ["b"], [[0]]), label="X"),
    ],
)
def test_every_chart_says_that_there_is_nothing(draw: Callable[[], str]) -> None:
    found = read(str(draw()))
    assert not found.all("svg") and found.all("p", "nothing")[0].text.startswith("X: ")


def test_texts_are_escaped_wherever_they_stand() -> None:
    charts = [
        line_chart([Line(EVIL, [(0, 1), (1, 2)]), Line("b", [(0, 1)])], label=EVIL,
                   x=Axis(EVIL), y=Axis(EVIL), rules=[Rule(0.5, EVIL, EVIL, "c8")],
                   levels=[Level(1.5, EVIL)]),
        bar_chart([Bar(EVIL, 1, EVIL, mark=2)], label=EVIL, x=Axis(EVIL, lambda _: EVIL)),
        stacked_bar([(Entry(EVIL, "c1"), 1.0)], label=EVIL),
        timeline([Row(EVIL, [Part(0, 1, "c1", EVIL)], EVIL)], label=EVIL, end=1,
                 entries=[Entry(EVIL, "c1")], unit=EVIL),
        waterfall([Step(EVIL, 1, is_total=True, detail=EVIL)], label=EVIL, x=Axis(EVIL)),
        heat_map(Cells([EVIL], [EVIL], [[1]], lambda _: EVIL, EVIL, EVIL), label=EVIL),
        legend([Entry(EVIL, "c1")]),
    ]  # fmt: skip
    for chart in charts:
        found = read(str(chart))
        assert not found.all("script")
        names = {name for one in found.elements for name in one.attributes}
        assert not [name for name in names if name.startswith("on")]
        texts = [one.text for one in found.elements]
        texts += [value for one in found.elements for value in one.attributes.values()]
        assert any(EVIL in text for text in texts)


# -- Ranges, ticks and numbers of axes ----------------------------------------------------------


GIB = 2**30


@pytest.mark.parametrize(
    "values, ticks",
    [
        ([0.3, 9.7], (0, 2, 4, 6, 8, 10)),
        ([5.0], (4.4, 4.6, 4.8, 5.0, 5.2, 5.4, 5.6)),
        ([], (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        ([None, float("nan")], (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        ([-1.0, 1.0], (-1, -0.5, 0, 0.5, 1)),
    ],
)
def test_ticks_are_round_numbers_around_the_data(values: list[float | None],
                                                 ticks: tuple[float, ...]) -> None:  # fmt: skip
    assert scale_of(values).ticks == pytest.approx(ticks)


def test_a_constant_has_a_place_in_the_middle() -> None:
    scale = scale_of([5.0, 5.0])
    assert scale.low < 5 < scale.high and 0.2 < scale.place(5.0) < 0.8


def test_ticks_of_bytes_and_of_time_are_round_in_their_units() -> None:
    bytes_ticks = scale_of([70 * GIB], from_zero=True, quantity="bytes").ticks
    assert [tick / GIB for tick in bytes_ticks] == [0, 20, 40, 60, 80]
    hours = scale_of([9 * 3600], from_zero=True, quantity="seconds").ticks
    assert [tick / 3600 for tick in hours] == [0, 2, 4, 6, 8, 10]


def test_elapsed_time_has_ticks_at_whole_units() -> None:
    assert time_scale(90).ticks == (0, 15, 30, 45, 60, 75, 90)
    assert [tick / 3600 for tick in time_scale(20 * 3600).ticks] == [0, 6, 12, 18]
    assert [tick / 86400 for tick in time_scale(40 * 86400).ticks] == [0, 10, 20, 30, 40]
    assert time_scale(0).high > 0 and time_scale(float("nan")).high > 0


def test_a_logarithmic_axis_has_powers_of_ten() -> None:
    scale = log_scale([0.02, 300.0, -1.0, 0.0])
    assert scale.ticks == pytest.approx((0.01, 0.1, 1, 10, 100, 1000))
    assert scale.place(1.0) == pytest.approx(0.4) and scale.place(0.0) == 0.0


@pytest.mark.parametrize(
    "number, text",
    [(0, "0"), (0.5, "0.5"), (999, "999"), (12_500, "12.5k"), (3e6, "3M"), (1.8e11, "180B"),
     (8e-05, "8e-5"), (1.2e20, "1.2e20"), (-2000, "-2k")],
)  # fmt: skip
def test_numbers_of_axes_are_short(number: float, text: str) -> None:
    assert compact_number(number) == text


def test_elapsed_time_and_shares_are_written_for_people() -> None:
    assert [clock(s) for s in (0, 0.25, 45, 300, 5400, 194_400)] == [
        *("0 s", "0.25 s", "45 s", "5 min", "1 h 30 min", "2 d 6 h"),
    ]
    assert [percent(v) for v in (0.005, 0.42, 0.992)] == ["0.5%", "42%", "99.2%"]


# -- Colours of charts can be told apart, in both themes and with each kind of colour blindness -


CSS = Path(hpctrain.page.__file__).parent / "templates" / "charts.css"
EYES = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
TO_CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
TO_LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


def times(matrix: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, values, strict=True)) for row in matrix]


def seen(colour: str, eyes: str) -> list[float]:
    """A colour such as `#465cdd` in OKLab, as these eyes see it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    found = [min(1.0, max(0.0, value)) for value in times(EYES[eyes], linear)]
    return times(TO_LAB, [value ** (1 / 3) for value in times(TO_CONES, found)])


def themes() -> list[dict[str, str]]:
    blocks = re.findall(r":root \{([^}]*)\}", CSS.read_text())
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_any_two_colours_are_far_apart(theme: int, eyes: str) -> None:
    colours = {name: value for name, value in themes()[theme].items() if re.match(r"c\d", name)}
    assert len(colours) == 8
    near = {
        (one, other): math.dist(seen(colours[one], eyes), seen(colours[other], eyes))
        for one, other in itertools.combinations(colours, 2)
    }
    assert min(near.values()) >= 0.09, sorted(near.items(), key=lambda item: item[1])[:3]


def test_paper_has_the_colours_of_the_light_theme() -> None:
    light, _, paper = themes()
    assert {name: paper[name] for name in paper if re.match(r"c\d", name)} == {
        name: light[name] for name in light if re.match(r"c\d", name)
    }
