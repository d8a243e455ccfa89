"""Which tests `make quick` chooses, on a small tree and on this one; and what ends their time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import time_limit
from quick import ROOT, Reached, changed_files, choose, reached_tests, told

TREE = {
    "made/__init__.py": "",
    "made/plan/rules.py": "",
    "made/plan/cost.py": "from made.plan import rules",
    "made/plan/late.py": "def f():\n    import made.plan.rules",
    "made/plan/typed.py": "if TYPE_CHECKING:\n    from made.plan.rules import Rule",
    "made/plan/quoted.py": "'import made.plan.rules'",
    "made/plan/unfinished.py": "from made.plan.rules import (",
    "made/spec/catalogue.py": "",
    "made/spec/files/gpus.yaml": "",
    "hpctrain/train/loop.py": "",
    "templates/job.j2": "",
    "tests/rehearsal.py": "from made.plan.rules import Rule",
    "tests/fixtures.py": "import made.spec.catalogue",
    "tests/rig/rank.py": "",
    "tests/test_house.py": "",
    "tests/golden/test_scripts.py": "",
    "tests/unit/cost/conftest.py": "import made.plan.cost\ndef f():\n    import fixtures",
    "tests/unit/cost/deep/test_prices.py": "",
    "tests/unit/plan/test_rules.py": "import made.plan.rules as rules",
    "tests/unit/plan/test_any.py": "from made.plan.rules import Rule",
    "tests/unit/plan/test_cost.py": "from made.plan.cost import price",
    "tests/unit/plan/test_late.py": "from made.plan.late import f",
    "tests/unit/plan/test_typed.py": "import made.plan.typed",
    "tests/unit/plan/test_quoted.py": "import made.plan.quoted, made.plan.unfinished",
    "tests/unit/spec/test_catalogue.py": "from made.spec import catalogue",
    "tests/unit/spec/test_gpu_names.py": "open('gpus.yaml')",
    "tests/engines/test_rehearsed.py": "def test_it():\n    from rehearsal import run",
    "tests/engines/test_loop.py": "from hpctrain.train import loop",
    "tests/engines/test_rank.py": "from tests.rig.rank import run",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    return tmp_path


def git(tree: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=tree, check=True, timeout=60)


def names(tree: Path, *changed: str, seconds: Mapping[str, float] | None = None) -> list[str]:
    """What a change reaches, but the house rules, which every change reaches."""
    found = [Path(test.file).stem for test in reached_tests(tree, changed, seconds or {})]
    return [name.removeprefix("test_") for name in found if name != "test_house"]


def test_the_test_of_a_module_comes_first_and_then_the_nearest_and_shortest(tree: Path) -> None:
    in_order = ["rules", "any", "rehearsed", "cost", "late", "prices"]
    assert names(tree, "made/plan/rules.py") == in_order
    slow = {"tests/unit/plan/test_cost.py": 9.0, "tests/unit/plan/test_rules.py": 9.0}
    in_order = ["rules", "any", "rehearsed", "late", "cost", "prices"]
    assert names(tree, "made/plan/rules.py", seconds=slow) == in_order


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("tests/rehearsal.py", ["rehearsed"]),
        ("tests/rig/rank.py", ["rank"]),
        ("made/plan/cost.py", ["cost", "prices"]),
        ("made/plan/late.py", ["late"]),
        ("made/plan/typed.py", ["typed"]),
        ("made/spec/files/gpus.yaml", ["gpu_names", "catalogue"]),
        ("templates/job.j2", ["scripts"]),
        ("tests/engines/test_loop.py", ["loop"]),
        ("tests/fixtures.py", []),
        ("made/plan/new.py", []),
        ("tests/unit/plan/test_gone.py", []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reached(tree: Path, changed: str, reached: list[str]) -> None:
    assert names(tree, changed) == reached


def test_a_deleted_module_reaches_who_still_imports_it(tree: Path) -> None:
    (tree / "made/plan/late.py").unlink()
    assert names(tree, "made/plan/late.py") == ["late"]


def test_imports_are_read_again_when_a_file_changes(tree: Path) -> None:
    assert names(tree, "made/plan/late.py") == ["late"]
    (tree / "tests/unit/plan/test_any.py").write_text("from made.plan import late, rules")
    assert names(tree, "made/plan/late.py") == ["late", "any"]


def test_changed_files_are_those_of_the_branch_and_new_ones(tree: Path) -> None:
    (tree / ".gitignore").write_text("/ignored.py")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "a")
    assert changed_files(tree) == set()
    git(tree, "update-ref", "refs/remotes/origin/HEAD", "HEAD")
    git(tree, "mv", "made/plan/late.py", "made/plan/early.py")
    git(tree, "commit", "-qm", "b")
    moved = {"made/plan/late.py", "made/plan/early.py"}
    assert changed_files(tree) == moved
    (tree / "made/plan/cost.py").unlink()
    (tree / "made/plan/new.py").touch()
    (tree / "ignored.py").touch()
    uncommitted = {"made/plan/cost.py", "made/plan/new.py"}
    assert changed_files(tree) == moved | uncommitted
    assert changed_files(tree, "HEAD") == uncommitted


def test_what_fits_into_the_time_of_both_processes(tree: Path) -> None:
    def chosen(*tests: Reached) -> list[str]:
        return [test.file.rpartition("test_")[2] for test in choose(tests, 10.0)]

    def plain(name: str, seconds: float) -> Reached:
        return Reached(f"tests/unit/test_{name}", 1, seconds)

    def engine(name: str, seconds: float, near: bool) -> Reached:
        return Reached(f"tests/engines/test_{name}", 1, seconds, near=near)

    assert chosen(plain("a", 9), plain("b", 8), plain("c", 4), plain("d", 3)) == ["a", "b", "d"]
    assert chosen(plain("long", 99), plain("a", 9)) == ["long", "a"], "begun, and stopped in time"
    assert chosen(engine("a", 9, True), engine("b", 9, False), engine("c", 11, True)) == ["a"]
    reached = reached_tests(tree, ["hpctrain/train/loop.py"], {})
    assert chosen(*reached) == ["loop.py", "house.py"]


def test_what_is_told_fits_on_a_terminal() -> None:
    reached = [Reached(f"tests/unit/plan/test_number_{n}.py", 1, 1.0) for n in range(30)]
    reached += [Reached("tests/slurm/test_a.py", 1, 1.0)]
    text = told(2, reached, reached[:20], 60.0)
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()) == (
        "2 changed files reach 31 test files; 20 of them fit into 60 s, nearest first: "
        "test_number_0.py, test_number_1.py, test_number_2.py and so on. Left out: 10 for want of "
        "time, 1 that train or need Slurm. `make test` runs all."
    )


@pytest.mark.variant("test_the_test_of_a_module_comes_first_and_then_the_nearest_and_shortest")
def test_a_rule_of_the_mesh_reaches_its_own_test_first() -> None:
    reached = reached_tests(ROOT, ["hpctrain/plan/mesh/rules.py"], {})
    assert reached[0].file == "tests/unit/plan/test_rules.py"


def item(seconds_left: float, file: str = "a.py") -> Any:
    until = time.time() + seconds_left
    return SimpleNamespace(
        nodeid=f"{file}::f", config=SimpleNamespace(getoption=lambda name: until)
    )


def test_when_the_time_is_up_no_test_begins_and_the_running_one_is_skipped() -> None:
    assert time_limit.pytest_runtest_protocol(item(60)) is None
    assert time_limit.pytest_runtest_protocol(item(-1)) is True, "the others are not asked"
    running = time_limit.pytest_runtest_call(item(0.05))
    next(running)
    with pytest.raises(pytest.skip.Exception, match="time is up"):
        time.sleep(60)
    running.close()


def test_a_test_with_a_clock_of_its_own_keeps_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one = item(60)
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert time_limit.pytest_runtest_protocol(one) is None


def test_files_run_in_the_order_of_the_command_line() -> None:
    items = [item(1, file) for file in ("c.py", "a.py", "b.py")]
    config: Any = SimpleNamespace(args=["b.py", "c.py", "a.py"])
    time_limit.pytest_collection_modifyitems(config, items)
    assert [one.nodeid for one in items] == ["b.py::f", "c.py::f", "a.py::f"]


@pytest.mark.parametrize(
    ("times", "code", "said"),
    [
        ([100, 100], 1, "no test has ended"),
        ([0, 100], 0, "1 passed"),
        ([0, 0], 0, "2 passed"),
    ],
)
def test_a_run_that_shows_nothing_has_failed(
    times: list[int], code: int, said: str, tmp_path: Path
) -> None:
    """By the time before the first test and after it."""
    (tmp_path / "test_some.py").write_text(
        f"import time_limit\n\n\ntime_limit.now = lambda: {times[0]}\n\n\n"
        f"def test_first():\n    time_limit.now = lambda: {times[1]}\n\n\n"
        "def test_second():\n    pass\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "time_limit", "--until=60"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(time_limit.__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, said in ended.stdout) == (code, True), ended.stdout
    assert ("time is up" in ended.stdout) == (100 in times)
