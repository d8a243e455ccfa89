"""The trainer as srun starts it: `python -m hpctrain.train`, real processes, no fork launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from trial_runs import LIMIT_SECONDS, MODULE_GPT, Trial

from bench import prefork
from bench.free_ports import free_port
from hpctrain.records.run_records import TrainerExit

# Sends itself a signal at the moment when torch begins to be imported.
_SIGNAL_WHILE_IMPORTING = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.NAME)
        return None

sys.meta_path.insert(0, Finder())
sys.argv = ["train", sys.argv[1]]
runpy.run_module("hpctrain.train", run_name="__main__")
"""


def _environment(rank: int, world_size: int) -> dict[str, str]:
    """What srun sets, without any variable of another launcher."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return kept | {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(world_size),
        "SLURMD_NODENAME": f"node{rank}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HPCTRAIN_EPOCH": "0",
    }


def _start(
    program: list[str], path: Path, rank: int, world_size: int, **changes: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, str(path)],
        env=_environment(rank, world_size) | changes,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.variant("test_signal_during_start_up")
def test_as_srun_starts_it(trial: Callable[..., Trial]) -> None:
    """Rank 0 also says what it has imported: see the tests below."""
    made = trial(train_steps=2, data_parallel_size=2, save_interval_steps=1)
    port = str(free_port())
    ranks = [
        _start(program, made.run.train_config, rank, 2, MASTER_PORT=port)
        for rank, program in enumerate((["-c", _WHOLE], ["-m", "hpctrain.train"]))
    ]
    outputs = [rank.communicate(timeout=LIMIT_SECONDS) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    log = outputs[0][0].splitlines()
    assert log[0] == "event=start step=0 world_size=2"
    assert [line.split()[1] for line in log if line.startswith("event=step")] == [
        "step=1/2",
        "step=2/2",
    ]
    assert log[-1] == "imported [] False"
    assert outputs[1] == ("", "")
    assert outputs[0][1] == ""
    assert made.exits()[0].node == "node0"


# Prints what the rank has imported of packages that it does not use.
_IMPORTED = """
import sys
from pathlib import Path
from hpctrain.train.job import read_config
from hpctrain.train.startup import room_of

room = room_of(read_config(Path(sys.argv[1])))
print(room.__name__, sorted(name for name in sys.modules if name in ("wandb", "tensorboard")))
import tensorboard, wandb
from hpctrain.train.engines.megatron.core_versions.supported import current
print(current().null_tokenizer(250).vocab_size, "transformers" in sys.modules)
import torch
for kind in (torch.optim.AdamW, torch.optim.SGD):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = kind([weight], lr=0.5, weight_decay=0.0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    (3 * weight).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    print(round(weight.item(), 4), weight.requires_grad, "torch._dynamo" in sys.modules)
import transformers
"""


@pytest.mark.variant("test_signal_during_start_up")
def test_a_rank_imports_nothing_that_it_does_not_use(
    trial: Callable[..., Trial],
) -> None:
    """megatron-core would import loggers and the libraries of tokenizers, wherever they are
    installed, and torch's optimizers the compiler."""
    rank = _start(["-c", _IMPORTED], trial().run.train_config, 0, 1)
    output, problems = rank.communicate(timeout=LIMIT_SECONDS)
    assert rank.returncode == 0, problems
    room, tokenizer, *optimizers = output.splitlines()
    assert room == "hpctrain.train.engines.megatron.assembly []" and tokenizer == "250 False"
    assert optimizers == ["0.5 True False", "-0.5 True False"]


# Runs the rank, and says at its end what it has imported of that.
_WHOLE = """
import os, runpy, sys

def leave(code, real=os._exit):
    named = ("wandb", "tensorboard", "transformers", "torch._dynamo", "torch._inductor")
    deterministic = sys.modules["torch"].are_deterministic_algorithms_enabled()
    print("imported", [name for name in named if name in sys.modules], deterministic, flush=True)
    real(code)

os._exit = leave
sys.argv = ["train", sys.argv[1]]
runpy.run_module("hpctrain.train", run_name="__main__")
"""


@pytest.mark.variant("test_signal_during_start_up")
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_whole_run_imports_nothing_of_that(
    trial: Callable[..., Trial], deterministic: bool
) -> None:
    made = trial(train_steps=2, save_interval_steps=1, deterministic_mode=deterministic)
    rank = _start(["-c", _WHOLE], made.run.train_config, 0, 1)
    output, problems = rank.communicate(timeout=LIMIT_SECONDS)
    assert rank.returncode == 0, problems
    assert output.splitlines()[-1] == f"imported [] {deterministic}"


@pytest.mark.variant("test_signal_during_start_up")
def test_a_signal_while_torch_is_imported(trial: Callable[..., Trial]) -> None:
    made = trial()
    program = _SIGNAL_WHILE_IMPORTING.replace("NAME", "SIGTERM")
    rank = _start(["-c", program], made.run.train_config, 0, 1)
    output = rank.communicate(timeout=LIMIT_SECONDS)
    assert rank.returncode == TrainerExit.YIELDED, output
    assert made.rows == []


@pytest.mark.variant("test_signal_during_start_up")
def test_stacks_while_torch_is_imported(trial: Callable[..., Trial]) -> None:
    """A rank may hang in an import from a file system that does not answer."""
    made = trial(train_steps=1)
    program = _SIGNAL_WHILE_IMPORTING.replace("NAME", "SIGQUIT")
    rank = _start(["-c", program], made.run.train_config, 0, 1)
    output = rank.communicate(timeout=LIMIT_SECONDS)
    assert rank.returncode == TrainerExit.DONE, output
    dump = made.run.stack_dump(0, 0).read_text()
    assert dump.startswith("rank=0 node=node0 pid=")
    assert "in find_spec" in dump


def test_a_port_in_use_is_named(trial: Callable[..., Trial]) -> None:
    made = trial(train_steps=1)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        variables = {"HPCTRAIN_EPOCH": "0", "MASTER_PORT": str(other.getsockname()[1])}
        ranks = prefork.start(made.run.train_config, 1, made.run.logs, environment=variables)
        assert ranks.wait(LIMIT_SECONDS) == [TrainerExit.CRASH], ranks.log()
    assert made.exits()[0].cause == "port"


def test_no_launcher(trial: Callable[..., Trial]) -> None:
    made = trial()
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.train", str(made.run.train_config)],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == TrainerExit.CONFIG_ERROR
    assert done.stderr == "none of RANK, SLURM_PROCID is set: start this with srun\n"


# It starts the program as a child, and would die of a signal.
_PROFILER = """#!/bin/sh
while [ "$1" != -m ]; do program=$1; shift; done
"$program" "$@"
"""


@pytest.mark.variant("test_signal_during_start_up")
def test_a_rank_below_nsight_stops_when_slurm_says_so(
    trial: Callable[..., Trial], tmp_path: Path
) -> None:
    """Its task is signalled, before nsys is there, and hands that on once the rank listens."""
    window = dict(tool="nsys", steps=(4, 5), ranks=(0,))
    # more steps than it makes until a task that is paused hands the signal on
    made = trial(MODULE_GPT, profile=window, train_steps=40_000, lr_decay_steps=40_000)
    profiler = tmp_path / "bin" / "nsys"
    profiler.parent.mkdir()
    profiler.write_text(_PROFILER)
    profiler.chmod(0o755)
    path = f"{profiler.parent}:{os.environ['PATH']}"
    task = _start(["-m", "hpctrain.train"], made.run.train_config, 0, 1, PATH=path)
    deadline = time.monotonic() + LIMIT_SECONDS
    while not made.run.traces.is_dir():  # right before nsys is started
        assert time.monotonic() < deadline and task.poll() is None
        time.sleep(0.01)
    task.send_signal(signal.SIGUSR2)
    output = task.communicate(timeout=LIMIT_SECONDS)
    assert task.returncode == TrainerExit.YIELDED, output
    assert [record.outcome for record in made.exits()] == ["yielded"]
