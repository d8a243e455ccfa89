"""Clients of the night: an open loop that goes on until it is stopped, and what the router asks.

Belongs here: threads that send and watch. Does not belong here: sending itself
(`hpctrain.serve.load`), what is done to the service (`events`).
"""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from dataclasses import replace
from typing import Self

from bench.serving_night.account import Asked, NightRequest
from hpctrain.records.run_records import read_record
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import Rotation
from hpctrain.serve.load.measurement import LoadResult, LoadTarget, RequestRecord
from hpctrain.serve.load.sending import PromptStyle, send_requests
from hpctrain.serve.plan.traffic import Lengths, Traffic, draw_requests

_NAME = "night"
# vLLM's line of --enable-log-requests, and the stand-in's: `cmpl-`, the client's id, the prompt.
_RECEIVED = re.compile(rb"Received request cmpl-(night-\d+)-\d+:")
_LONGEST_SECONDS = 6 * 3600.0
_TIMEOUT_SECONDS = 180.0
_LOOK_SECONDS = 0.1


class NightLoad:
    """Requests at their planned times, in a thread, from `__enter__` to `stop`."""

    def __init__(
        self, url: str, model: str, rate: float, *, prompt_tokens: int, output_tokens: int
    ) -> None:
        prompt, output = (Lengths(float(n), float(n)) for n in (prompt_tokens, output_tokens))
        traffic = Traffic(prompt=prompt, output=output)
        self._requests = draw_requests(traffic, int(rate * _LONGEST_SECONDS), seed=1)
        self._rate = rate
        self._target = LoadTarget(url, model, timeout_seconds=_TIMEOUT_SECONDS)
        self._stopping = threading.Event()
        self._ends: dict[str, float] = {}
        self._failed = 0
        self._result: LoadResult | None = None
        self._thread = threading.Thread(target=self._send, daemon=True, name="night-load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send nothing more, and wait for the ends of all requests."""
        self._stopping.set()
        self._thread.join()

    @property
    def answers(self) -> int:
        return len(self._ends) - self._failed

    @property
    def failed(self) -> int:
        return self._failed

    def requests(self, service: ServiceLayout) -> tuple[NightRequest, ...]:
        """All requests, with the replicas that have begun them; after `stop`."""
        assert self._result is not None, "stop it first"
        began, received = self._result.began_seconds, received_by(service)
        return tuple(
            replace(
                _night_request(record, began, self._ends[record.request_id]),
                replicas=received.get(record.request_id, ()),
            )
            for record in self._result.records
        )

    @property
    def sent(self) -> int:
        assert self._result is not None, "stop it first"
        return len(self._result.records)

    def _send(self) -> None:
        self._result = send_requests(
            self._target,
            # Ids that the tiny Llama has.
            PromptStyle(lowest_id=3, highest_id=511),
            self._requests,
            self._requests.arrivals(self._rate),
            name=_NAME,
            on_record=self._note,
            goes_on=lambda: not self._stopping.is_set(),
        )

    def _note(self, record: RequestRecord) -> None:
        self._ends[record.request_id] = time.time()
        self._failed += record.failure is not None


def _night_request(record: RequestRecord, began: float, ended: float) -> NightRequest:
    return NightRequest(
        request_id=record.request_id,
        planned=began + record.planned_seconds,
        ended=ended,
        ttft_seconds=record.ttft_seconds,
        e2e_seconds=record.e2e_seconds,
        failure=record.failure,
        detail=record.detail,
    )


def received_by(service: ServiceLayout) -> dict[str, tuple[str, ...]]:
    """Which replicas have begun each request, as their engines' logs show."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for name in service.replica_names():
        for path in sorted(service.replica(name).logs.rglob("*.log")):
            for match in _RECEIVED.finditer(path.read_bytes()):
                found[match[1].decode()][str(name)] = None
    return {request_id: tuple(names) for request_id, names in found.items()}


class RotationWatch:
    """Notes which replicas the router asks, whenever that changes."""

    def __init__(self, service: ServiceLayout) -> None:
        self._service = service
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="rotation-watch")
        self.asked: list[Asked] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            rotation = read_record(self._service.rotation, Rotation)
            if rotation is None:
                continue
            if not self.asked or self.asked[-1].replicas != rotation.replicas:
                self.asked.append(Asked(time.time(), rotation.replicas))
