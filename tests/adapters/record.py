"""Run frameworks, and record what their adapters are held against, in tests/adapters/NAME.json.

    python -m tests.adapters.record --python PYTHON [NAME ...]

PYTHON has the frameworks. Each is trained by two ranks (of torchtitan one) to its end, then until
the signal by which it saves, then from what it has saved. A record has the files of a checkpoint in
the order in which they were written, the lines that its adapter reads, what the signal did, and
whether a resumed run has the losses of the first one.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoints.foreign import Found, find_checkpoints, what_is_missing
from hpctrain.spec.loader import load_adapter
from hpctrain.spec.trainer import Adapter, ProgressSource, filled_in
from hpctrain.trainer.progress import FileReader, OutputReader
from hpctrain.trainer.ranks import catching

HERE = Path(__file__).resolve().parent
EXAMPLES, PROGRAMS = HERE.parents[1] / "examples" / "any-trainer", HERE / "programs"
OWN_LINES = ProgressSource(output=r"^step (?P<step>\d+) loss (?P<loss>\S+)$")
TRANSFORMERS = (
    *("--save_steps", "10", "--lr_scheduler_type", "constant"),
    *("--logging_steps", "1", "--report_to", "tensorboard"),
    *(
        "--per_device_train_batch_size",
        "8",
        "--use_cpu",
        "True",
    ),
    *("--output_dir", "{output}", "--resume_from_checkpoint", "{resume}"),
)
TITAN = (
    *("--training.steps", "40", "--checkpoint.enable", "--checkpoint.interval", "10"),
    *("--training.seq_len", "64", "--training.local_batch_size", "2", "--validator.no-enable"),
)
PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class Framework:
    """How one is run; `signal`: that of the program, where the adapter names none."""

    package: str
    program: Path
    words: tuple[str, ...]
    target: int
    signal: str | None = None
    ranks: int = 2


OWN = ("--output", "{output}", "--resume", "{resume}")
FRAMEWORKS: Mapping[str, Framework] = {
    "hf": Framework(
        "transformers", EXAMPLES / "hf.py", (*TRANSFORMERS, "--max_steps", "60"), 60, "TERM"
    ),
    "trl": Framework(
        "trl",
        PROGRAMS / "trl_sft.py",
        (*TRANSFORMERS, "--max_steps", "60", "--bf16", "False", "--max_length", "32"),
        60,
    ),
    "lightning": Framework("lightning", EXAMPLES / "lightning_fit.py", OWN, 60, "TERM"),
    "accelerate": Framework("accelerate", EXAMPLES / "accelerate_loop.py", OWN, 60, "TERM"),
    "dcp": Framework("torch", EXAMPLES / "dcp_loop.py", OWN, 60, "TERM"),
    "deepspeed": Framework(
        "deepspeed", PROGRAMS / "deepspeed_loop.py", ("--output", "{output}"), 40, "TERM"
    ),
    "torchtitan": Framework(
        "torchtitan", PROGRAMS / "torchtitan_cpu.py", ("{output}", *TITAN), 40, ranks=1
    ),
}


class Launch:
    """The ranks of a framework, without a launcher."""

    def __init__(
        self, framework: Framework, python: str, output: Path, resume: Path | None, port: int
    ) -> None:
        output.mkdir(exist_ok=True)
        values = {"output": str(output), "resume": str(resume or "")}
        words = [python, str(framework.program), *filled_in(framework.words, values)]
        self.log = output.with_suffix(".log")
        self.ranks = []
        with self.log.open("wb") as log:
            for rank in range(framework.ranks):
                environment = {
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "GROUP_RANK": "0",
                    "WORLD_SIZE": str(framework.ranks),
                    "LOCAL_WORLD_SIZE": str(framework.ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "TORCHELASTIC_RUN_ID": "record",
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONUNBUFFERED": "1",
                }
                process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
                self.ranks.append(process)

    def wait(self, condition: Any = None) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(rank.poll() is None for rank in self.ranks):
            if condition is not None and condition():
                return
            if time.monotonic() > deadline:
                for rank in self.ranks:
                    rank.kill()
                raise TimeoutError(self.log.read_text(errors="replace")[-3000:])
            time.sleep(0.02)

    @property
    def codes(self) -> list[int | None]:
        return [rank.poll() for rank in self.ranks]

    def lines(self) -> list[str]:
        return re.split(r"[\r\n]+", self.log.read_text(errors="replace"))


def record(name: str, python: str, directory: Path) -> dict[str, Any]:
    """Run a framework three times, and return what was seen."""
    framework, adapter = FRAMEWORKS[name], load_adapter(name).document
    first = Launch(framework, python, directory / "first", None, 29511)
    first.wait()
    where = directory / "first"
    kept = _complete(adapter, where, framework.ranks)
    if not kept:
        text = first.log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"no complete checkpoint: {first.codes}\n{text}")
    losses = _losses(adapter, framework, where, first)
    found: dict[str, Any] = {
        "package": framework.package,
        "versions": _versions(python, framework.package),
        "ranks": framework.ranks,
        "target": framework.target,
        "codes": first.codes,
        "checkpoint": _checkpoint(adapter, kept[len(kept) // 2], where),
        "lines": _read_lines(adapter, framework, first),
        "files": _metric_files(adapter, where),
    }
    name_of_signal = adapter.signal.save if adapter.signal is not None else framework.signal
    resume = kept[len(kept) // 2]
    if name_of_signal is not None:
        found["signal"], resume = _signalled(
            adapter, framework, python, directory / "second", f"SIG{name_of_signal}"
        )
    output = directory / "third"
    if adapter.checkpoint is not None and adapter.checkpoint.found:
        _put(resume, output, adapter)
    third = Launch(framework, python, output, resume.path, 29513)
    third.wait()
    after = _losses(adapter, framework, output, third)
    later = {step: loss for step, loss in after.items() if step > resume.step}
    found["resume"] = {
        "step": resume.step,
        "first": min(after, default=None),
        "equal": sum(losses.get(step) == loss for step, loss in later.items()),
        "different": sum(losses.get(step) != loss for step, loss in later.items()),
    }
    return found


def _put(resume: Found, output: Path, adapter: Adapter) -> None:
    """Put a checkpoint where its trainer looks for it."""
    checkpoint = adapter.checkpoint
    assert checkpoint is not None
    target = Path(output, checkpoint.path).parent / resume.path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", str(resume.path), str(target)], check=True)
    tracker = checkpoint.complete.tracker
    if tracker is not None:
        (output / tracker.file).write_text(tracker.text.replace("{step}", str(resume.step)))


def _signalled(
    adapter: Adapter, framework: Framework, python: str, output: Path, name: str
) -> tuple[dict[str, Any], Found]:
    """Send the signal by which it saves after the first checkpoint; tell what came of it."""
    number = getattr(signal, name)
    launch = Launch(framework, python, output, None, 29512)
    launch.wait(lambda: _complete(adapter, output, framework.ranks))
    before = _complete(adapter, output, framework.ranks)[-1].step
    catch = [catching(rank.pid, number) for rank in launch.ranks]
    began = time.monotonic()
    for pid in (pid for pids in catch for pid in pids):
        os.kill(pid, number)
    launch.wait()
    newest = _complete(adapter, output, framework.ranks)[-1]
    return {
        "name": name,
        "ranks_that_catch_it": sum(map(bool, catch)),
        "step_before": before,
        "step_saved": newest.step,
        "seconds": round(time.monotonic() - began, 1),
        "codes": launch.codes,
    }, newest


def _complete(adapter: Adapter, output: Path, ranks: int) -> list[Found]:
    checkpoint = adapter.checkpoint
    assert checkpoint is not None
    try:
        found = find_checkpoints(output, checkpoint)
    except FileNotFoundError:
        return []
    rules = checkpoint.complete
    return [one for one in found if what_is_missing(one, rules, output, ranks) is None]


def _checkpoint(adapter: Adapter, found: Found, output: Path) -> dict[str, Any]:
    """The files of a checkpoint and its tracker by the time of their last write."""
    paths = {name: found.path if name == "." else found.path / name for name in found.files()}
    checkpoint = adapter.checkpoint
    assert checkpoint is not None
    files = sorted(paths, key=lambda name: paths[name].stat().st_mtime_ns)
    tracker = checkpoint.complete.tracker
    return {
        "name": str(found.path.relative_to(output)),
        "step": found.step,
        "files": [_file(name, paths[name]) for name in files],
        "tracker": tracker and tracker.text.replace("{step}", str(found.step)),
    }


def _file(name: str, path: Path) -> dict[str, Any]:
    """Size of a file, and of its bytes those that a rule may look at."""
    data = path.read_bytes()
    facts: dict[str, Any] = {"name": name, "bytes": len(data)}
    if name.endswith((".json", ".metadata")):
        facts["head"] = data
    elif name.endswith(".safetensors"):
        facts["head"] = data[: 8 + int.from_bytes(data[:8], "little")]
    elif data[:4] == b"PK\x03\x04":
        facts["tail"] = data[-22:]
    return {
        key: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for key, value in facts.items()
    }


def _read_lines(adapter: Adapter, framework: Framework, launch: Launch) -> list[str]:
    """Of each regular expression of the adapter, the first and the last line that it reads."""
    kept: list[str] = []
    for source in adapter.metrics:
        if source.output is not None:
            reader = OutputReader((source,), framework.target)
            read = [line for line in launch.lines() if any(reader.read(line))]
            kept += [read[0], read[-1]] if read else []
    return kept


def _metric_files(adapter: Adapter, output: Path) -> dict[str, Any]:
    """Of each other source of the adapter, the first rows as they were read."""
    kept = {}
    for source in adapter.metrics:
        pattern = source.csv or source.jsonl or source.json_files or source.tensorboard
        if pattern is not None:
            rows = list(FileReader(source, output).read())
            heads = [path.read_text().splitlines()[:3] for path in output.glob(source.csv or "-")]
            told = [row for row in rows if "loss" in row][:2]
            kept[f"{pattern} {source.loss}"] = {"rows": told, "heads": heads}
    return kept


def _losses(
    adapter: Adapter, framework: Framework, output: Path, launch: Launch
) -> dict[int, float]:
    def reports() -> Iterator[dict[str, float]]:
        reader = OutputReader((*adapter.metrics, OWN_LINES), framework.target)
        for line in launch.lines():
            yield from reader.read(line)
        for source in adapter.metrics:
            if source.output is None and source.json_files is None:  # which repeat earlier launches
                yield from FileReader(source, output).read()

    losses: dict[int, float] = {}
    for values in reports():
        if "loss" in values:
            losses.setdefault(int(values["step"]), values["loss"])
    return losses


def _versions(python: str, package: str) -> dict[str, str]:
    code = "import importlib.metadata as m, sys; print(*[m.version(one) for one in sys.argv[1:]])"
    names = [package, *({"torch"} - {package})]
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True)
    parser.add_argument("names", nargs="*", choices=[[], *FRAMEWORKS])
    arguments = parser.parse_args()
    for name in arguments.names or FRAMEWORKS:
        with tempfile.TemporaryDirectory() as directory:
            found = record(name, arguments.python, Path(directory))
        (HERE / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(name, found["codes"], found.get("signal"), found["resume"])


if __name__ == "__main__":
    main()
