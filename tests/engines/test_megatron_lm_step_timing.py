"""Following the functions of somebody's own Megatron-LM: what lacks them trains all the same."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import RankTimes, read_record
from hpctrain.train.engines.megatron_lm.program_hooks import measure_steps, patch_on_import

TIMERS = """
class Timer:
    running = False
    def start(self, barrier=False):
        self.running = True
    def stop(self):
        self.running = False
    def elapsed(self):
        return 7.0

class Timers:
    def __init__(self):
        self.timer = Timer()
    def __call__(self, name, log_level=None):
        return self.timer
"""
LOOP = """
import time
from megatron.core.timers import Timers
from megatron.core.rerun_state_machine import RerunDataIterator
timers, batches = Timers(), RerunDataIterator()

def train_step(broken=False):
    timers("forward-compute", log_level=2).start()
    if broken:
        timers("forward-compute").start()
        timers("backward-compute").stop()
    timers("batch-generator").start()
    next(batches)
    timers("batch-generator").stop()
    time.sleep(0.02)
    timers("forward-compute").stop()
    timers("optimizer", log_level=1).start(barrier=True)
    time.sleep(0.01)
    if not broken:
        timers("optimizer").stop()
    return "trained"

def training_log(losses, iteration, more=None):
    return timers("interval-time").elapsed()
"""
READER = """
import time

class RerunDataIterator:
    def __next__(self):
        time.sleep(0.03)
        return "batch"
"""
FILES = {
    "core/timers.py": TIMERS,
    "core/rerun_state_machine.py": READER,
    "training/training.py": LOOP,
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program's packages; modules of this name that other tests have imported come back."""
    for name, text in FILES.items():
        path = tmp_path / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    (tmp_path / "megatron" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs = {name: sys.modules.pop(name) for name in [*sys.modules] if _of_megatron(name)}
    yield tmp_path
    for name in [name for name in sys.modules if _of_megatron(name)]:
        del sys.modules[name]
    sys.modules.update(theirs)


def _of_megatron(name: str) -> bool:
    return name == "megatron" or name.startswith("megatron.")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(tmp_path: Path, steps: int = 4, **keywords: Any) -> tuple[RankTimes | None, ModuleType]:
    """What the steps of the program leave, with windows of two."""
    run = RunLayout(tmp_path / "run")
    run.create()
    launch = SimpleNamespace(rank=0, node="node1", epoch=3)
    job: Any = SimpleNamespace(
        run=run, launch=launch, config=SimpleNamespace(rank_times_interval_steps=2)
    )
    with measure_steps(job):
        from megatron.training import training

        for step in range(1, steps + 1):
            assert training.train_step(**keywords) == "trained"
            time.sleep(0.01)
            if hasattr(training, "training_log"):
                assert training.training_log({}, step) == 7.0
    return read_record(run.rank_times, RankTimes), training


@pytest.mark.usefixtures("checkout", "one_rank")
def test_parts_count_for_themselves(tmp_path: Path) -> None:
    times, _ = trained(tmp_path)
    assert times is not None
    assert (times.epoch, times.first_step, times.last_step, times.nodes) == (3, 2, 3, ("node1",))
    (compute,), (data,), (optimizer,) = (
        times.compute_seconds,
        times.data_seconds,
        times.optimizer_seconds,
    )
    assert compute >= 0.02 and data >= 0.03 and optimizer >= 0.01
    assert times.step_seconds[0] >= compute + data + optimizer + 0.01
    assert times.backward_seconds == (0.0,)


@pytest.mark.usefixtures("checkout", "one_rank")
def test_timers_that_do_not_pair_are_left_alone(tmp_path: Path) -> None:
    times, training = trained(tmp_path, broken=True)
    assert times is not None and times.compute_seconds[0] >= 0.02
    assert training.timers("optimizer").running, "its own timers do what they did"


LOGGED = LOOP[LOOP.index("def training_log") :]
OTHERWISE = [
    ("def training_log", "def another_log"),
    ("losses, iteration", "losses, number"),
    ("megatron.core.timers", "megatron.training.own_timers"),
    ("forward-compute", "forward"),
    (LOGGED, "import functools\ntraining_log = functools.partial(lambda *given: 7.0)"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("words", "others"), OTHERWISE)
def test_a_fork_without_these_functions_trains(
    checkout: Path, tmp_path: Path, words: str, others: str
) -> None:
    loop = checkout / "megatron" / "training" / "training.py"
    loop.with_name("own_timers.py").write_text(TIMERS)
    loop.write_text(LOOP.replace(words, others))
    times, _ = trained(tmp_path)
    assert times is None


def test_modules_are_changed_when_they_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    (tmp_path / "imported_early.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import imported_early

    def change(module: ModuleType) -> None:
        vars(module)["value"] += 1

    names = ("imported_late", "imported_early", "never_imported")
    with patch_on_import(dict.fromkeys(names, change)):
        assert "imported_late" not in sys.modules, "nothing is imported before its time"
        import imported_late

    assert (imported_late.value, imported_early.value) == (2, 2)
    for module in (imported_late, imported_early):
        del sys.modules[module.__name__]
