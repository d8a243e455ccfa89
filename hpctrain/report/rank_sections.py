"""What ranks, nodes and pipeline stages have measured: computation, memory, messages. Pure.

Belongs here: figures by rank, node, stage and axis. Does not belong here: curves over steps
(`curve_sections`).
"""

from __future__ import annotations

from hpctrain.page.charts import (
    Axis,
    Bar,
    Cells,
    Entry,
    bar_chart,
    heat_map,
    legend,
    stacked_bar,
)
from hpctrain.page.elements import Card, Section, Table
from hpctrain.page.words import count, counted, duration, number, size, words_of
from hpctrain.report.collect import RunReport
from hpctrain.report.measures import NodeTimes, RankWindow
from hpctrain.report.missing import missing

_PART_COLOURS = {"passes": "c3", "data": "c4", "optimizer": "c7", "rest": "pale"}
_SLOW = 1.05
_MOST_BARS = 24
# Columns of stages that half a page has room for.
_STAGES_BESIDE = 4


def rank_cards(report: RunReport) -> list[Card]:
    """Show where the time of a step goes, and how long each node computes."""
    window = report.window
    if window is None:
        return [missing("Nodes", report, "ranks", "Ranks have not written their times yet.")]
    where = f"Steps {window.first_step:,} to {window.last_step:,}, means of ranks."
    parts = [(Entry(name, _PART_COLOURS[name]), value) for name, value in window.shares]
    bar = stacked_bar(parts, label="Parts of a step", format=duration)
    cards = [Card("Parts of a step", bar, where)]
    return [*cards, _nodes_card(window)] if window.nodes else cards


def _nodes_card(window: RankWindow) -> Card:
    """Show how long each node computes: bars, or cells where there are many nodes."""
    slow = [one for one in window.nodes if one.relative >= _SLOW]
    names = ", ".join(f"{one.node} ({one.relative - 1:+.1%})" for one in slow[:8])
    more = f" and {len(slow) - 8:,} more" if len(slow) > 8 else ""
    note = f"Time that ranks compute in a step, steps {window.first_step:,} to "
    note += f"{window.last_step:,}. "
    note += f"Slower than the middle node: {names}{more}." if slow else "All within 5 %."
    if len(window.nodes) <= _MOST_BARS:
        bars = [
            Bar(
                one.node, one.own_seconds, _node_words(one), "c8" if one.relative >= _SLOW else "c1"
            )
            for one in window.nodes
        ]
        chart = bar_chart(
            bars, label="Computation by node", x=Axis("time per step", duration, "seconds")
        )
        if slow:
            chart += legend(
                (Entry("within 5 % of the middle node or faster", "c1"), Entry("slower", "c8"))
            )
        return Card("Nodes", chart, note, wide=len(window.nodes) > 8)
    width = 32
    rows = [window.nodes[start : start + width] for start in range(0, len(window.nodes), width)]
    fastest = min(one.own_seconds for one in window.nodes)
    slowest = max(one.own_seconds for one in window.nodes)
    blank: list[NodeTimes | None] = [None] * width
    padded = [[*row, *blank][:width] for row in rows]
    cells = Cells(
        rows=[row[0].node for row in rows],
        columns=[f"+{index}" for index in range(width)],
        values=[
            [None if one is None else one.own_seconds - fastest * 0.999 for one in row]
            for row in padded
        ],
        tooltips=[["" if one is None else _node_words(one) for one in row] for row in padded],
        row_word="first node of the row",
        column_word="nodes in the order of ranks",
        largest=f"{slowest / fastest - 1:+.1%} slower than the fastest" if fastest else "",
    )
    return Card(
        "Nodes", heat_map(cells, label="Computation by node", row_pixels=16), note, wide=True
    )


def _node_words(one: NodeTimes) -> str:
    words = f"{one.node}, {counted(one.ranks, 'rank')}: computes {duration(one.own_seconds)} a step"
    return f"{words} ({one.relative - 1:+.1%}), waits {duration(one.data_seconds)} for data"


def memory(report: RunReport) -> Section | None:
    window, plan = report.window, report.plan
    stages = window.stages if window else ()
    if not stages and plan is None:
        return None
    if plan is not None and not stages:
        bars = [Bar(f"stage {n}", None, mark=one.total_bytes) for n, one in enumerate(plan.memory)]
    else:
        bars = [
            Bar(
                f"stage {one.stage}",
                one.allocated_bytes,
                f"stage {one.stage}: {size(one.allocated_bytes)} allocated, "
                f"{size(one.reserved_bytes)} taken, {size(one.predicted_bytes)} predicted",
                mark=one.predicted_bytes,
            )
            for one in stages
        ]
    on_gpu = plan is None or plan.accelerator == "cuda"
    note = "The fullest GPU of each pipeline stage." if on_gpu else "Trained on CPUs: the largest "
    note += "" if on_gpu else "resident set of a process, which says nothing of a GPU."
    limit = plan.gpu_memory_bytes if plan and on_gpu else 0
    axis = Axis("memory", size, "bytes", values=(limit,) if limit else ())
    chart = bar_chart(bars, label="Memory by stage", x=axis)
    chart += legend((Entry("measured", "c1"), Entry("predicted (line)", "dark")))
    many = plan is not None and len(plan.memory) > _STAGES_BESIDE
    cards = [Card("Memory by pipeline stage", chart, note, wide=many)]
    if plan is not None:
        cards.append(_memory_table(report))
    return Section("memory", "Memory", cards)


def _memory_table(report: RunReport) -> Card:
    plan = report.plan
    assert plan is not None
    names = [
        name
        for name in type(plan.memory[0]).model_fields
        if any(getattr(one, name) for one in plan.memory)
    ]
    stages = list(enumerate(plan.memory))[:8]
    columns = {"Predicted": "", **{f"Stage {n}": "number" for n, _ in stages}}
    rows = [
        [words_of(name.removesuffix("_bytes")), *(size(getattr(one, name)) for _, one in stages)]
        for name in names
    ]
    rows.append(["total", *(size(one.total_bytes) for _, one in stages)])
    left = len(plan.memory) - len(stages)
    note = f"The first {len(stages)} of {len(plan.memory)} stages." if left else ""
    wide = len(plan.memory) > _STAGES_BESIDE
    return Card("What it is made of", Table(columns, rows), note, wide=wide)


def messages(report: RunReport) -> Section:
    found = report.messages
    if found is None:
        words = "No step's messages have been measured (communication.json)."
        card = missing("Messages between ranks", report, "messages", words, wide=True)
        return Section("communication", "Communication", [card])
    note = f"Step {found.step:,}, {duration(found.step_seconds)} long"
    note += f", measured with {found.source}." if found.source else "."
    seconds = [
        Bar(
            one.axis,
            one.mean_seconds,
            f"{one.axis}: {duration(one.mean_seconds)} (most: {duration(one.most_seconds)})",
            mark=one.planned_seconds,
        )
        for one in found.axes
    ]
    chart = bar_chart(
        seconds, label="Time in messages by axis", x=Axis("time per step", duration, "seconds")
    )
    if any(one.planned_seconds is not None for one in found.axes):
        chart += legend(
            (Entry("measured, mean of ranks", "c1"), Entry("planned, not hidden (line)", "dark"))
        )
    amounts = [Bar(one.axis, one.mean_bytes, colour="c6") for one in found.axes]
    cards = [
        Card("Time in messages", chart, note),
        Card(
            "Bytes in messages",
            bar_chart(
                amounts, label="Bytes by axis", x=Axis("bytes per step and rank", size, "bytes")
            ),
            "What a rank hands to collectives and sends, mean of ranks.",
        ),
    ]
    table = Table.of(
        found.axes,
        {
            "Axis": ("name", lambda one: one.axis),
            "Groups": ("number", lambda one: count(one.groups)),
            "Ranks": ("number", lambda one: count(one.ranks_per_group)),
            "Calls": ("number", lambda one: number(one.calls)),
            "Bytes": ("number", lambda one: size(one.mean_bytes)),
            "Mean": ("number", lambda one: duration(one.mean_seconds)),
            "Most": ("number", lambda one: duration(one.most_seconds)),
            "Planned": ("number", lambda one: duration(one.planned_seconds)),
        },
    )
    cells = Cells(
        found.names, found.names, found.matrix, size, f"from {found.unit}", f"to {found.unit}"
    )
    matrix = heat_map(cells, label="Bytes between ranks")
    note = "Bytes in the step. Of a collective, what a ring would send."
    cards.append(Card(f"Who sends to whom, by {found.unit}", matrix, note))
    cards.append(Card("Messages by axis", table))
    return Section("communication", "Communication", cards)
