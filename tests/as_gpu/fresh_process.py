"""A Python of its own for tests that need other imports than pytest's process.

megatron-core decides while it is imported whether there is TransformerEngine, and pytest's process
has imported it without. A fresh process imports it once with the stub of `tests/stubs`; each call
runs in a fork of it, so calls share the imports and nothing else. Belongs here: that process and
its calls. Does not belong here: what is called.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 240
# What forks share that train with megatron-core: its room, the reader of tokens, and what torch's
# optimizers import at their first step.
IMPORTS = [
    "hpctrain.train.engines.megatron.assembly",
    "hpctrain.train.datasets.token_samples",
    "torch._dynamo",
    "trial_runs",
]


class RemoteError(AssertionError):
    """A call has raised; the message is its traceback."""


class FreshProcess:
    """A process with `extra_paths` before all others; `imports` are loaded at its start.

    An import of the form `module:function` also calls the function. `variables` are added to the
    environment.
    """

    def __init__(self, extra_paths: list[Path], imports: list[str], **variables: str) -> None:
        paths = [*extra_paths, _TESTS.parent, _TESTS, _TESTS / "engines", _TESTS / "as_gpu"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        environment.update(variables)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, *imports],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Run a function of an importable module there; arguments and result are JSON.

        Raises RemoteError with the traceback if it raises or exceeds LIMIT_SECONDS.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        name = f"{function.__module__}:{function.__qualname__}"
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RemoteError(f"the process ended with {self._process.wait()} in {name}")
        answer = json.loads(line)
        if "error" in answer:
            raise RemoteError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def place_of_call(*roots: str) -> str:
    """Return file and function of the innermost frame below one of the roots, two frames up."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        for root in roots:
            if root in path:
                return f"{path.rpartition(root)[2]} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _answer_in_fork(name: str, arguments: dict[str, Any]) -> str:
    """Return the JSON of the result, or of the traceback."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            signal.alarm(LIMIT_SECONDS)
            os.dup2(2, 1)  # prints must not mix with answers
            module, _, function = name.partition(":")
            result = getattr(importlib.import_module(module), function)(**arguments)
            answer = json.dumps({"result": result})
        except BaseException:
            answer = json.dumps({"error": traceback.format_exc()})
        with os.fdopen(writing, "w") as pipe:
            pipe.write(answer)
        sys.stderr.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        code = os.waitstatus_to_exitcode(status)
        return json.dumps({"error": f"{name} ended with {code} (limit {LIMIT_SECONDS} s)"})
    return answer


def serve(imports: list[str]) -> None:
    """Answer calls from stdin on stdout until stdin ends."""
    for name in imports:
        module, _, function = name.partition(":")
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()
    for line in sys.stdin:
        print(_answer_in_fork(*json.loads(line)), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1:])
