"""The measures of the code base count what they claim, on packages written for the purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.house import counts, pictures
from bench.house.sources import Source, imports, read_package
from bench.house.spec_walk import walk_of_spec

ROOT = Path(__file__).resolve().parents[3]
Package = Callable[[dict[str, str]], list[Source]]


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """Write files of a package `p` and read them back."""

    def write(files: dict[str, str]) -> list[Source]:
        for name, text in files.items():
            path = tmp_path / "p" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return read_package(tmp_path / "p")

    return write


def test_engine_names_count_where_they_are_values(package: Package) -> None:
    sources = package(
        {
            "plan/limits": '"""fsdp"""\nif name == "fsdp": say("with fsdp", f"fsdp {name}")\n',
            "spec/engines/fsdp": 'NAME = "fsdp"\n',
            "engines/native": 'NAME = "ddp"\n',
            "train/engines/native/mesh": 'NAME = "ddp"\n',
            "train/startup": 'ROOMS = {"ddp": 1, "megatron-lm": 2, "other": 3}\n',
        }
    )
    assert counts.engine_literals(sources) == [
        "plan/limits.py:1 fsdp",  # a docstring that is nothing else
        "plan/limits.py:2 fsdp",
        "train/startup.py:1 ddp",
        "train/startup.py:1 megatron-lm",
    ]


def test_one_use_functions(package: Package) -> None:
    sources = package(
        {
            "a": (
                "def _once(): pass\n"
                "def _twice(): pass\n"
                "def _never(): pass\n"
                "@register\ndef _decorated(): pass\n"
                "def public(): _once(); _twice(); return _twice\n"
                "class C:\n    def __init__(self): self._method()\n    def _method(self): pass\n"
            ),
            "b": "from p.a import _once\n_once()\n_once()\n",
        }
    )
    assert counts.one_use_functions(sources) == [
        *("a.py:1 _once", "a.py:3 _never", "a.py:9 _method")
    ]
    assert str(counts.one_use_share(sources)) == "3 of 7 = 42.9%"


def test_short_functions_that_one_place_calls(package: Package) -> None:
    sources = package(
        {
            "a": (
                "def _called(): pass\n"
                "def _handed_on(): pass\n"
                "def _long():\n    a = 1\n    b = 2\n    return a + b\n"
                "def public(): _called(); _long(); return sorted([], key=_handed_on)\n"
            )
        }
    )
    assert counts.one_use_functions(sources, max_lines=3) == ["a.py:1 _called"]
    assert counts.one_use_functions(sources, max_lines=4) == ["a.py:1 _called", "a.py:3 _long"]


def test_docstrings_and_repeated_classes(package: Package) -> None:
    sources = package(
        {
            "a": 'def f():\n    "F."\n    def inner(): pass\nclass Mesh:\n    def g(self): pass\n',
            "b": "def _f(): pass\nclass _Own:\n    def g(self): pass\nclass Mesh: pass\n",
        }
    )
    assert str(counts.documented_share(sources)) == "1 of 2 = 50.0%"
    assert counts.repeated_classes(sources) == {"Mesh": ["a.py", "b.py"]}
    assert counts.line_count(sources) == 9


def test_imports_of_a_file(package: Package) -> None:
    sources = package(
        {
            "room/__init__": "",
            "room/a": "from p.room import b\nimport p.room.c\nimport os\n",
            "room/b": "def f():\n    from p.room.c import x\n",
            "room/c": "from . import b\nfrom .d import y\n",
            "room/d": "from p.room import NAME\n",
        }
    )
    modules = {source.name for source in sources}
    assert {s.name: sorted(imports(s, modules)) for s in sources} == {
        "p.room": [],
        "p.room.a": ["p.room.b", "p.room.c"],
        "p.room.b": ["p.room.c"],
        "p.room.c": ["p.room.b", "p.room.d"],
        "p.room.d": ["p.room"],
    }


def test_the_walk_of_the_spec(package: Package) -> None:
    sources = package(
        {
            "spec/run": "class RunSpec: pass\n",
            "job/command": (
                "def submit(path):\n"
                "    from p.job import prepare as action\n"
                "    action.prepare(path)\n"
            ),
            "job/prepare": (
                "from p.spec.run import RunSpec\n"
                "from p.plan.make import Inputs, make, RULES\n"
                "def prepare(path):\n"
                "    inputs = Inputs(load(path))\n"
                "    return make(inputs.spec), inputs.gpus(), RULES\n"
                "def load(path) -> RunSpec: pass\n"
                "def other(spec: RunSpec): pass\n"
            ),
            "plan/make": (
                "from p.spec.run import RunSpec\n"
                "class Inputs:\n"
                "    spec: RunSpec\n"
                "    def gpus(self): return 1\n"
                "    def nobody_calls(self): pass\n"
                "def make(spec: RunSpec | None, by=None): return [by(spec)]\n"
                "def rule(spec: 'RunSpec'): pass\n"
                "def price(inputs: Inputs): pass\n"
                "RULES = (rule, price)\n"
            ),
        }
    )
    walk = walk_of_spec(sources)
    assert sorted(walk.receivers) == ["p.plan.make:make", "p.plan.make:rule"]
    assert sorted(walk.carried_to) == ["p.plan.make:Inputs.gpus", "p.plan.make:price"]
    assert walk.files == 1


GRAPH = {
    "top": frozenset({"judge/", "middle", "bottom"}),
    "middle": frozenset({"judge/", "bottom"}),
    "judge/": frozenset({"bottom", "data/"}),
    "data/": frozenset({"judge/"}),
    "bottom": frozenset[str](),
}


def test_floors_are_the_longest_ways_down_and_circles_share_one() -> None:
    assert pictures.floors(GRAPH) == {"bottom": 0, "judge/": 1, "data/": 1, "middle": 2, "top": 3}


def test_arrows_lead_down_and_those_implied_are_left_out() -> None:
    drawn = pictures.draw(GRAPH)
    assert list(drawn.boxes.values()) == [
        *(("top",), ("middle",), ("data/",), ("judge/",), ("bottom",))
    ]
    assert drawn.arrows == {
        *(("files1", "files2"), ("files2", "judge/")),
        *(("judge/", "data/"), ("data/", "judge/"), ("judge/", "files3")),
    }


def test_neighbouring_floors_share_a_box_when_there_are_too_many() -> None:
    drawn = pictures.draw(GRAPH, max_boxes=4)
    assert ("top", "middle") in drawn.boxes.values()
    assert len(drawn.boxes) == 4


def test_the_pictures_show_the_rooms_of_today() -> None:
    """Folders and the arrows between them; files may move between floors without a new picture."""
    sources = read_package(ROOT / "hpctrain")
    drawn = pictures.page(sources)
    kept = (ROOT / "docs/rooms.md").read_text()
    expected, found = pictures.folder_lines(drawn), pictures.folder_lines(kept)
    assert sorted(found) == sorted(expected), "`make house` draws docs/rooms.md anew"
    assert any("-->" in line for line in expected)
    for room in pictures.ROOMS:
        graph = pictures.room_graph(sources, room)
        assert len(pictures.draw(graph).boxes) <= pictures.MAX_BOXES
