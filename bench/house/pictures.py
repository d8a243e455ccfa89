"""Draw a picture of a room from the imports of its files, as a Mermaid graph.

Folders are boxes; loose files of one floor share a box. A floor is the longest way down to a file
that imports nothing of the room, so arrows lead down; where files or folders import each other in
a circle, they share a floor. Arrows that others imply are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.house.sources import Source, imports

ROOMS = ("job", "runs", "serve", "plan", "supervise", "train")
MAX_BOXES = 15
HEADER = """\
# Pictures of the big rooms

Drawn by `make house` from the imports; change the code, not this page. A box with a slash is a
folder, other boxes hold the loose files of one floor or of neighbouring floors. An arrow means
"imports"; arrows that follow from others are left out.
"""
Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Picture:
    """Boxes by their members, from the top floor down, and the arrows between boxes."""

    boxes: Mapping[str, tuple[str, ...]]
    arrows: frozenset[tuple[str, str]]


def room_graph(sources: Sequence[Source], room: str) -> Graph:
    """Read who imports whom among the folders (`name/`) and loose files of a room."""
    modules = {source.name for source in sources}
    unit_of = {
        source.name: _unit(source, room) for source in sources if source.path.is_relative_to(room)
    }
    graph: dict[str, set[str]] = {unit: set() for unit in unit_of.values() if unit}
    for source in sources:
        unit = unit_of.get(source.name, "")
        if unit:
            below = {unit_of.get(name, "") for name in imports(source, modules)}
            graph[unit] |= below - {"", unit}
    return {unit: frozenset(below) for unit, below in graph.items()}


def _unit(source: Source, room: str) -> str:
    """Name the box member a file belongs to; empty for the room's own `__init__.py`."""
    inside = source.path.relative_to(room)
    if len(inside.parts) > 1:
        return f"{inside.parts[0]}/"
    return "" if inside.stem == "__init__" else inside.stem


def reachable(graph: Graph) -> dict[str, frozenset[str]]:
    """List for each node all nodes below it."""
    found = {}
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting.extend(graph[node])
        found[start] = frozenset(seen)
    return found


def floors(graph: Graph) -> dict[str, int]:
    """Number the floors from 0 at the bottom; nodes of a circle share one."""
    below = reachable(graph)
    levels: dict[str, int] = {}
    # Whoever is below a node, and not in a circle with it, reaches fewer nodes.
    for node in sorted(graph, key=lambda node: (len(below[node]), node)):
        circle = {other for other in below[node] if node in below[other]} | {node}
        under = set().union(*(graph[other] for other in circle)) - circle
        level = max((levels[other] + 1 for other in under), default=0)
        levels.update(dict.fromkeys(circle, level))
    return levels


def draw(graph: Graph, max_boxes: int = MAX_BOXES) -> Picture:
    """Put folders into boxes of their own and loose files into one box per floor.

    While there are more than `max_boxes`, the two smallest neighbouring boxes of loose files
    become one. Files of a merged box may import each other.
    """
    levels = floors(graph)
    folders = sorted((n for n in graph if n.endswith("/")), key=lambda n: (-levels[n], n))
    loose: list[tuple[int, tuple[str, ...]]] = []
    for level in sorted({levels[n] for n in graph if not n.endswith("/")}, reverse=True):
        files = tuple(sorted(n for n in graph if not n.endswith("/") and levels[n] == level))
        loose.append((level, files))
    while len(loose) > 1 and len(loose) + len(folders) > max_boxes:
        first = min(range(len(loose) - 1), key=lambda i: len(loose[i][1]) + len(loose[i + 1][1]))
        upper, lower = loose[first], loose.pop(first + 1)
        loose[first] = (upper[0], (*upper[1], *lower[1]))
    ordered = [(levels[folder], folder, (folder,)) for folder in folders]
    ordered += [(level, f"files{number}", files) for number, (level, files) in enumerate(loose, 1)]
    boxes = {name: members for _, name, members in sorted(ordered, key=lambda box: -box[0])}
    box_of = {member: name for name, members in boxes.items() for member in members}
    between = {
        name: frozenset(box_of[below] for member in members for below in graph[member]) - {name}
        for name, members in boxes.items()
    }
    return Picture(boxes, frozenset(_reduced(between)))


def _reduced(graph: Graph) -> set[tuple[str, str]]:
    """Leave out arrows that a longer way implies, except between two folders and in circles."""
    below = reachable(graph)
    kept = set()
    for node, targets in graph.items():
        for target in targets:
            others = targets - {target}
            implied = any(target in below[other] and node not in below[other] for other in others)
            if not implied or (node.endswith("/") and target.endswith("/")):
                kept.add((node, target))
    return kept


def folder_lines(page: str) -> list[str]:
    """Pick the lines of a page that name rooms and folders only: these a test compares."""
    return [line for line in page.splitlines() if line.startswith("## ") or _of_folders(line)]


def _of_folders(line: str) -> bool:
    ends = line.strip().split(" --> ")
    if len(ends) == 2:
        return all(end.endswith("_") for end in ends)
    return line.strip().endswith('/"]')


def page(sources: Sequence[Source], rooms: Sequence[str] = ROOMS) -> str:
    """Write docs/rooms.md: one picture for each room."""
    parts = [HEADER]
    for room in rooms:
        picture = draw(room_graph(sources, room))
        lines = [f"## {room}/", "", "```mermaid", "flowchart TD"]
        for name, members in picture.boxes.items():
            lines.append(f'    {_id(name)}["{_label(members)}"]')
        order = list(picture.boxes)
        for upper, lower in sorted(picture.arrows, key=lambda a: (order.index(a[0]), a[1])):
            lines.append(f"    {_id(upper)} --> {_id(lower)}")
        parts.append("\n".join([*lines, "```", ""]))
    return "\n".join(parts)


def _id(name: str) -> str:
    """Make an identifier for Mermaid; those of folders end in an underscore."""
    return name.replace("/", "_")


def _label(members: Sequence[str], per_line: int = 3) -> str:
    """Set the names of a box, a few in each line."""
    rows = [members[at : at + per_line] for at in range(0, len(members), per_line)]
    return "<br>".join(", ".join(row) for row in rows)
