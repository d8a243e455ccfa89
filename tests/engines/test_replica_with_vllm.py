"""A replica with a real vLLM: Slurm's SIGTERM to all of its processes costs no request.

vLLM refuses requests from its first SIGTERM on, and its workers end by it; Python's multiprocessing
opens the shield, which a stand-in does not show. So this is tried with vLLM itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import replica_process
from replica_process import NAME, Task, config_of, make_service, task_of
from router_programs import SERVED_NAME, request

from hpctrain.records.run_records import TrainerExit
from hpctrain.serve.engines.contract import CpuEngine
from hpctrain.serve.tiny_llama import write_tiny_llama

pytestmark = pytest.mark.nightly("a real vLLM, in an environment of its own")

ROOT = Path(__file__).resolve().parents[2]
_TOKENS, _CLIENTS = 400, 2


def serving_python() -> Path:
    """The Python of the serving environment; without it the test is skipped."""
    given = os.environ.get("HPCTRAIN_SERVING_ENVIRONMENT", str(ROOT / ".venv" / "serving"))
    python = Path(given) / "bin" / "python"
    if not python.exists():
        pytest.skip("NOT TRIED with vLLM: `scripts/serving-environment` installs it")
    return python


def descendants(pid: int) -> list[int]:
    """A process and all that descend from it, as proctrack/linuxproc finds them."""
    found = [pid]
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += descendants(int(child))
    return found


def term_all(task: Task) -> None:
    processes = descendants(task.process.pid)
    assert len(processes) > 3, "the server, its engine and a worker"
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


@pytest.mark.variant("test_vllm_from_its_start_to_its_drain")
def test_sigterm_to_all_processes_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = serving_python()
    monkeypatch.setattr(replica_process, "PATIENCE_SECONDS", 400.0)
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
    service = make_service(tmp_path)
    write_tiny_llama(tmp_path / "llama")
    start = {"python": str(python), "model_path": str(tmp_path / "llama"), "cpu": CpuEngine()}
    start |= {"max_model_tokens": 1024, "precision": "fp32", "drain_seconds": 60}
    limits = {"notice_seconds": 20.0, "drain_seconds": 60.0, "term_seconds": 120.0}
    config = config_of(
        service, start=start, load_limit_seconds=400.0, health_timeout_seconds=10.0, **limits
    )
    codes: list[int] = []
    with task_of(service, config) as task:
        url = f"{task.await_endpoint().url}/v1/completions"

        def ask(tokens: int) -> None:
            wanted = {"model": SERVED_NAME, "prompt": "a", "max_tokens": tokens, "ignore_eos": True}
            code, text = request(url, wanted)
            assert json.loads(text)["usage"]["completion_tokens"] == tokens
            codes.append(code)

        clients = [threading.Thread(target=ask, args=(_TOKENS,)) for _ in range(_CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(0.5)  # they are computed by then, or still to come: both must be answered
        task.rotate(str(NAME))
        term_all(task)
        task.wait(lambda: task.endpoint is None, "an endpoint that is removed")
        ask(3)  # a router that is late
        task.rotate()
        assert task.await_exit() == TrainerExit.YIELDED, task.log
        for client in clients:
            client.join()
    assert codes == [200] * (_CLIENTS + 1), task.log
    assert task.drain is not None and task.drain.broken_off == 0, task.log
