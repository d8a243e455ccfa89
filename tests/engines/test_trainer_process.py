"""The trainer as srun starts it: processes, devices, software, limits of collectives."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trial_runs import LIMIT_SECONDS, MODULE_GPT, MakeTrial, Trial, make_trial, once
from variants import varied
from waiting import wait_until

from bench import prefork
from bench.free_ports import free_port
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.run_records import TrainerExit
from hpctrain.records.software import (
    SoftwareLock,
    of_newest_launch,
    read_lock,
    read_software,
    write_lock,
)
from hpctrain.train import device
from hpctrain.train.launchers.nsight import UNDER_NSIGHT, nsight_command
from hpctrain.train.rank_environment import Launch
from hpctrain.train.startup import limit_collectives

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


TRAIN = ("-m", "hpctrain.train")


def _start(
    made: Trial, *program: str, rank: int = 0, ranks: int = 1, file: str = "train.json", **more: str
) -> subprocess.Popen[str]:
    """A rank with what srun sets, without any variable of another launcher."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    own = {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NTASKS": str(ranks),
        "SLURMD_NODENAME": f"node{rank}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HPCTRAIN_EPOCH": "0",
    }
    return subprocess.Popen(
        [sys.executable, *program, str(made.run.directory / file)],
        env=kept | own | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _ended(made: Trial, *program: str, **more: Any) -> tuple[int, str]:
    """Exit code and output of a rank."""
    rank = _start(made, *program, **more)
    output, problems = rank.communicate(timeout=LIMIT_SECONDS)
    print(problems)
    return rank.returncode, output


@pytest.mark.variant("test_signal_during_start_up")
def test_as_srun_starts_it(trial: MakeTrial) -> None:
    """Rank 0 also says what it has imported: see the tests below."""
    made = trial(train_steps=2, data_parallel_size=2, save_interval_steps=1)
    port = str(free_port())
    ranks = [
        _start(made, *program, rank=rank, ranks=2, MASTER_PORT=port)
        for rank, program in enumerate((("-c", _WHOLE), TRAIN))
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


def test_gloo_gets_the_one_interface_that_is_there(trial: MakeTrial) -> None:
    """It ends the launch itself for each name that is not, such as the beginning of one."""
    made = trial(train_steps=1, data_parallel_size=2, save_interval_steps=1)
    port = str(free_port())
    ranks = [
        _start(made, *TRAIN, rank=rank, ranks=2, MASTER_PORT=port, GLOO_SOCKET_IFNAME="ib,lo")
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=LIMIT_SECONDS) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs


@pytest.mark.parametrize("name", ["HPCTRAIN_INTERFACE", "GLOO_SOCKET_IFNAME"])
def test_an_interface_that_the_node_lacks_is_named_before_torch_is_imported(
    trial: MakeTrial, name: str
) -> None:
    made = trial(train_steps=1)
    code, _ = _ended(made, *TRAIN, **{name: "bond7"})
    assert code == TrainerExit.CONFIG_ERROR
    (record,) = made.exits()
    assert record.node_dependent and record.message is not None
    assert "is bond7" in record.message and "it has" in record.message


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
def test_a_rank_imports_nothing_that_it_does_not_use(trial: MakeTrial) -> None:
    """megatron-core would import loggers and the libraries of tokenizers, wherever they are
    installed, and torch's optimizers the compiler."""
    code, output = _ended(trial(), "-c", _IMPORTED)
    assert code == 0
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
def test_a_whole_run_imports_nothing_of_that(trial: MakeTrial, deterministic: bool) -> None:
    made = trial(train_steps=2, save_interval_steps=1, deterministic_mode=deterministic)
    code, output = _ended(made, "-c", _WHOLE)
    assert (code, output.splitlines()[-1]) == (0, f"imported [] {deterministic}")


@pytest.mark.variant("test_signal_during_start_up")
def test_a_signal_while_torch_is_imported(trial: MakeTrial) -> None:
    made = trial()
    program = _SIGNAL_WHILE_IMPORTING.replace("NAME", "SIGTERM")
    assert _ended(made, "-c", program)[0] == TrainerExit.YIELDED
    assert made.rows == []


@pytest.mark.variant("test_signal_during_start_up")
def test_stacks_while_torch_is_imported(trial: MakeTrial) -> None:
    """A rank may hang in an import from a file system that does not answer."""
    made = trial(train_steps=1)
    program = _SIGNAL_WHILE_IMPORTING.replace("NAME", "SIGQUIT")
    assert _ended(made, "-c", program)[0] == TrainerExit.DONE
    dump = made.run.stack_dump(0, 0).read_text()
    assert dump.startswith("rank=0 node=node0 pid=")
    assert "in find_spec" in dump


def test_a_port_in_use_is_named(trial: MakeTrial) -> None:
    made = trial(train_steps=1)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        variables = {"HPCTRAIN_EPOCH": "0", "MASTER_PORT": str(other.getsockname()[1])}
        ranks = prefork.start(made.run.train_config, 1, made.run.logs, environment=variables)
        assert ranks.wait(LIMIT_SECONDS) == [TrainerExit.CRASH], ranks.log()
    assert made.exits()[0].cause == "port"


def test_no_launcher(trial: MakeTrial) -> None:
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


# -- Nsight Systems, of which there is none here: the command, and that it is what is started ----

NSIGHT = dict(tool="nsys", steps=(2, 3), ranks=(1,))


def nsys(directory: Path, *lines: str) -> str:
    """Install a program of this name; returns the PATH with it."""
    program = directory / "bin" / "nsys"
    program.parent.mkdir()
    program.write_text("\n".join(("#!/bin/sh", *lines, "")))
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


@pytest.mark.variant("test_signal_during_start_up")
def test_a_rank_below_nsight_stops_when_slurm_says_so(trial: MakeTrial, tmp_path: Path) -> None:
    """Its task is signalled, before nsys is there, and hands that on once the rank listens."""
    window = dict(tool="nsys", steps=(4, 5), ranks=(0,))
    # more steps than it makes until a task that is paused hands the signal on
    made = trial(MODULE_GPT, profile=window, train_steps=40_000, lr_decay_steps=40_000)
    # it starts the program as a child, and would die of a signal
    find = 'while [ "$1" != -m ]; do program=$1; shift; done'
    task = _start(made, *TRAIN, PATH=nsys(tmp_path, find, '"$program" "$@"'))
    wait_until(lambda: made.run.traces.is_dir() or task.poll() is not None)
    assert task.poll() is None, "right before nsys is started"
    task.send_signal(signal.SIGUSR2)
    output = task.communicate(timeout=LIMIT_SECONDS)
    assert task.returncode == TrainerExit.YIELDED, output
    assert [record.outcome for record in made.exits()] == ["yielded"]


@pytest.fixture
def profiled(trial: MakeTrial) -> Trial:
    """Of two ranks, with the file of a launch that is not the planned one."""
    made = trial(MODULE_GPT, data_parallel_size=2, profile=NSIGHT)
    shutil.copy(made.run.train_config, made.run.directory / "train-n1.json")
    return made


@pytest.mark.variant("test_without_nsight_the_run_does_not_begin")
def test_a_chosen_rank_takes_its_place_below_nsight(profiled: Trial, tmp_path: Path) -> None:
    arguments, few = tmp_path / "arguments", "train-n1.json"
    path = nsys(
        tmp_path,
        """printf '%s\\n' "$@" > "$NSIGHT_ARGUMENTS\"""",
        'while [ "$1" != -m ]; do last=$1; shift; done',
        'exec "$last" "$@"',
    )
    given = dict(file=few, PATH=path, NSIGHT_ARGUMENTS=str(arguments))
    assert _ended(profiled, *TRAIN, rank=1, **given)[0] == 78
    assert "needs 2 processes, but 1 were started" in profiled.message(1), "begun below nsys"
    words = arguments.read_text().splitlines()
    assert words == [
        "profile",
        f"--output={profiled.run.traces}/e000000-rank-000001-steps-2-3",
        "--force-overwrite=true",
        "--trace=cuda,nvtx,cublas,cudnn",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--kill=none",
        sys.executable,
        *TRAIN,
        str(profiled.run.directory / few),
    ]
    arguments.unlink()
    _ended(profiled, *TRAIN, **given)
    assert not arguments.exists(), "rank 0 was not chosen"


def test_without_nsight_the_run_does_not_begin(profiled: Trial) -> None:
    assert _ended(profiled, *TRAIN, rank=1, PATH="/nowhere")[0] == 78
    assert "finds no `nsys` on its PATH" in profiled.message(1)


def test_no_rank_is_wrapped_for_torch(trial: MakeTrial) -> None:
    made = trial(MODULE_GPT, profile=dict(steps=(2,)))
    launch = Launch(rank=0, world_size=1, local_rank=0, node="n0", epoch=0, resume="")
    assert nsight_command(made.config, launch, made.run, ["train"]) is None
    assert UNDER_NSIGHT not in os.environ


# -- Which backend carries which tensors --------------------------------------------------------


def test_host_tensors_need_gloo_beside_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses tensors on the host, which FSDP with CPU offload sums and hands out."""
    assert device.backend() == device.backend(host_tensors=True) == "gloo"
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    assert device.backend() == "nccl"
    assert device.backend(host_tensors=True) == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"), [(0, 8, 0), (7, 8, 7), (3, 1, 0), (0, 1, 0)]
)
def test_a_rank_takes_its_gpu_or_the_only_one(local_rank: int, visible: int, index: int) -> None:
    """`--gpus-per-task` shows each task a single GPU. Ranks that would share one are refused before
    (test_software_agreement.py)."""
    assert device.gpu_index(local_rank, visible) == index


# -- How long a collective may take: long while ranks start, short once they train --------------


def _rank(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=600))
    other = dist.new_group(timeout=timedelta(seconds=600))
    dist.barrier(other)
    limit_collectives(2.0)
    if rank == 1:
        time.sleep(600)  # killed by the test
    for group in (None, other):
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.zeros(1), group=group)
    os._exit(7)


def test_the_limit_holds_for_all_groups_that_exist() -> None:
    context, port = get_context("fork"), free_port()
    ranks = [context.Process(target=_rank, args=(rank, port), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    ranks[0].join(300)
    ranks[1].kill()
    assert ranks[0].exitcode == 7


def test_without_groups_nothing_happens() -> None:
    """A process that is alone trains without any group, and gets none."""
    limit_collectives(2.0)
    assert not dist.is_initialized()


# -----------------------------------------------------------------------------------------------
# A run and the software that it began with: a launch that finds another one, on a real engine.

SHORT = dict(data_parallel_size=2, save_interval_steps=3, train_steps=6)
PARTS = {"hpctrain", "Python", "torch"}


def next_launch(trial: Trial, resume: int | None = None) -> list[int]:
    """The next launch, which owns the run."""
    number = len(list(trial.run.epochs.iterdir()))
    epoch = claim_epoch(trial.run.epochs, f"launch {number}")
    return trial.train(epoch=epoch, resume=resume)


def as_if_of_old_torch(trial: Trial) -> SoftwareLock:
    """The run was begun with another torch and one package more, and has not reached its end."""
    trial.run.done.unlink()
    lock = read_lock(trial.run)
    assert lock is not None
    old = lock.model_copy(
        update={
            "parts": {**lock.parts, "torch": "1.0"},
            "packages": {**lock.packages, "some-package": "7"},
        }
    )
    write_lock(trial.run, old)
    return lock


def begun_before(trial: Trial) -> None:
    """The run's first launch, which ended well."""

    def train(directory: Path) -> None:
        assert next_launch(make_trial(directory, MODULE_GPT, **SHORT)) == [0, 0]

    config = trial.run.train_config.read_text()
    first = once("software lock, first launch", train)
    shutil.copytree(first, trial.run.directory, dirs_exist_ok=True)
    trial.run.train_config.write_text(config)


@pytest.mark.parametrize("mode", varied(["locked", "warn", "any"], "locked"))
def test_what_follows_from_other_software(
    trial: MakeTrial, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trial(MODULE_GPT, **SHORT, software=mode)
    begun_before(run)
    lock = as_if_of_old_torch(run)
    assert set(lock.parts) >= PARTS and {"pydantic", "torch"} <= set(lock.packages)
    assert "hpctrain" not in lock.packages
    capsys.readouterr()
    codes = next_launch(run, resume=3)
    out = capsys.readouterr().out
    changed = (f"torch 1.0 -> {lock.parts['torch']}", "some-package 7 -> none")
    (record,) = of_newest_launch(read_software(run.run))
    assert record.changed == changed and record.epoch == 2
    words = f"software has changed{{}}: {changed[0]}, {changed[1]}"
    if mode == "locked":
        assert codes == [TrainerExit.CONFIG_ERROR] * 2
        (message,) = {end.message for end in run.exits(2)}
        assert message is not None and words.format(" since the run began") in message
        assert f"`hpctrain upgrade {run.run.run_id}`" in message
        assert {row.epoch for row in run.rows} == {1}, "it did not train on"
    else:
        assert codes == [0, 0]
        assert (f"warning: {words.format('')}" in out) == (mode == "warn")
        assert {row.epoch for row in run.rows if row.step > 3} == {1, 2}


@pytest.mark.variant("test_what_follows_from_other_software")
def test_before_the_first_step_the_software_may_still_change(trial: MakeTrial) -> None:
    """Who corrects what is installed after a first launch that failed has changed nothing."""
    run = trial(MODULE_GPT, **SHORT, software="locked")
    write_lock(run.run, SoftwareLock(epoch=0, parts={"torch": "1.0"}))
    assert next_launch(run) == [0, 0]
    lock = read_lock(run.run)
    assert lock is not None and lock.epoch == 1 and lock.parts["torch"] != "1.0"
