"""Run the stand-in with the words of vLLM's server: load, serve, drain on a signal, fail if told.

Belongs here: the command line, the end of the process and its failures. Options of vLLM that have
no effect here are accepted and left alone. Does not belong here: requests (`answers`), HTTP
(`http_server`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hpctrain.serve.stand_in.answers import RequestEngine
from hpctrain.serve.stand_in.http_server import HttpServer
from hpctrain.serve.stand_in.settings import Failure, StandInSettings, read_settings

_POLL_SECONDS = 0.02
# What engines write when they fail like this, for signatures to find (sources: the catalogue).
_LAST_LINES: dict[Failure, str] = {
    "crash": "RuntimeError: Engine core initialization failed. See root cause above.",
    "out_of_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. "
    "GPU 0 has a total capacity of 79.10 GiB of which 1.18 GiB is free.",
    "no_weights": "RuntimeError: Cannot find any model weights with `/weights`",
    "gpu_fault": "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
}


class _Process:
    """One process of the stand-in: from its arguments to its exit code."""

    def __init__(self, arguments: argparse.Namespace, settings: StandInSettings) -> None:
        self._arguments, self._settings = arguments, settings
        self._failure = settings.failure_here(os.environ.get("SLURMD_NODENAME", ""))
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal asks to end; returns the exit code."""
        arguments, settings = self._arguments, self._settings
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        await self._load()
        if self._stopping.is_set():
            return 0
        names = tuple(arguments.served_model_name or (arguments.model,))
        weights = Path(arguments.model)
        engine = RequestEngine(settings, names[0], weights, arguments.max_num_seqs, self._begun)
        http = HttpServer(engine, names, say if arguments.enable_log_requests else None)
        server = await asyncio.start_server(http.connected, arguments.host, arguments.port)
        say(f"Started server process [{os.getpid()}], {arguments.host}:{arguments.port}")
        await self._stopping.wait()
        http.refuses = True
        say(f"[shutdown] draining {engine.in_flight} requests, {arguments.shutdown_timeout} s")
        deadline = time.monotonic() + arguments.shutdown_timeout
        while engine.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        # The last bytes of answers are written before their connections are closed.
        await asyncio.sleep(_POLL_SECONDS)
        server.close()
        say(f"[shutdown] {engine.in_flight} requests aborted")
        return 0

    async def _load(self) -> None:
        """Wait as long as weights would take to load; fail in between if told to."""
        deadline = time.monotonic() + self._settings.load_seconds
        while (left := deadline - time.monotonic()) > 0 and not self._stopping.is_set():
            await asyncio.sleep(min(_POLL_SECONDS, left))
        if self._failure is not None and not self._settings.after_requests:
            self._fail(self._failure)

    def _begun(self, count: int) -> None:
        if self._failure is not None and count == self._settings.after_requests:
            self._fail(self._failure)

    def _fail(self, failure: Failure) -> None:
        """End this process as a real engine would, or stop answering for ever."""
        if failure == "hang":
            say("hanging, as told")
            while True:
                time.sleep(60)
        if failure == "exit":
            say("exiting with code 0, as told")
            os._exit(0)
        say("Traceback (most recent call last):")
        say(_LAST_LINES[failure])
        os._exit(1)


def say(text: str) -> None:
    """Write a line where vLLM writes its log."""
    print(text, file=sys.stderr, flush=True)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read those options of `vllm serve` that have an effect here; others are left alone."""
    parser = argparse.ArgumentParser(prog="python -m hpctrain.serve.stand_in", allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?", help="directory of the weights, as of `vllm serve`")
    parser.add_argument("--model", default="")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--shutdown-timeout", type=float, default=0.0)
    parser.add_argument("--enable-log-requests", action="store_true")
    arguments, _ = parser.parse_known_args(words)
    arguments.model = arguments.model or arguments.model_tag or ""
    return arguments


def main(words: Sequence[str]) -> int:
    """Run the stand-in; returns its exit code."""
    try:
        process = partial(_Process, parse(words), read_settings(os.environ))
        return asyncio.run(_started(process))
    except OSError as error:
        say(f"OSError: {error}")
        return 1


async def _started(process: partial[_Process]) -> int:
    """Make the process inside its event loop, and run it."""
    return await process().run()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # connections that are still open end with the process
