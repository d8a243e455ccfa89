"""A service of three replicas under load while its replicas are taken away, one way after another.

    python -m bench.serving_night [--engine vllm|stand-in] [--rate 2] [--minutes 0] [--write]

Real are Slurm (a sandbox), router, controller, supervisors and, with `vllm`, the engines: a tiny
Llama on this machine's cores. One replica is preempted, one engine killed, one node lost; the
service is scaled up and down, restarted one replica at a time, and a replica outlives its time
limit by its successor. Printed: what each event did to the requests. Exit code 1 if a request
failed although a drain was possible, or was not on the replica that died. `--write` puts records,
picture and page into docs/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.rehearsals import ServiceRehearsal, serving_python
from bench.serving_night.account import (
    Asked,
    Event,
    Latencies,
    NightAccount,
    NightRequest,
    account,
    kinds,
)
from bench.serving_night.cluster import (
    GRACE_SECONDS,
    REPLICAS,
    night_sandbox,
    night_service,
    served_address,
)
from bench.serving_night.events import EVENTS, parsed
from bench.serving_night.load import NightLoad, RotationWatch
from bench.serving_night.picture import draw
from hpctrain.records.run_records import read_record
from hpctrain.records.service_records import Endpoint

_ROOT = Path(__file__).resolve().parents[2]
_PAGE = _ROOT / "docs" / "serving-night.md"
_IMAGES = _ROOT / "docs" / "images"
_LATENCY_HEADS = ("ttft p50/p99", "e2e p50/p99")
_PROMPT_TOKENS, _OUTPUT_TOKENS = 16, 24


@dataclass(frozen=True)
class Night:
    """All that was seen."""

    events: tuple[Event, ...]
    requests: tuple[NightRequest, ...]
    asked: tuple[Asked, ...]
    account: NightAccount
    load_seconds: float
    unfinished: str | None = None

    @property
    def objections(self) -> tuple[str, ...]:
        """What must not have happened."""
        return (*self.account.objections, *([self.unfinished] if self.unfinished else []))


def main() -> int:
    """Run the night; 0 only if nothing was lost that could be kept."""
    options = _parsed()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    python = serving_python() if options.engine == "vllm" else None
    with tempfile.TemporaryDirectory(prefix="night-", dir="/tmp") as name, night_sandbox() as box:
        place = Path(name)
        with night_service(box, place, vllm_python=python, router=options.router) as service:
            night = spend(service, options)
    lines = [*report(night), _closing(options, night, time.monotonic() - began)]
    for line in lines:
        _say(line)
    for words in night.objections:
        _say(f"WRONG: {words}")
    if options.write:
        write(options, night, lines)
    return 1 if night.objections else 0


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--engine", choices=("vllm", "stand-in"), default="vllm")
    add("--router", choices=("vllm-router", "haproxy"), default="vllm-router")
    add("--rate", type=float, default=2.0, help="requests per second (default: 2)")
    add("--pause", type=float, default=30.0, help="seconds between events (default: 30)")
    add("--minutes", type=float, default=0.0, help="least time under load")
    add("--only", action="append", choices=sorted(EVENTS), help="not all events, but these")
    add("--write", action="store_true", help="write docs/serving-night.md and its picture")
    return parser.parse_args()


def spend(service: ServiceRehearsal, options: argparse.Namespace) -> Night:
    """Bring the service up, do everything to it under load, and add up."""
    began = time.monotonic()
    url = served_address(service)
    _say(f"{time.monotonic() - began:5.0f} s  {REPLICAS} replicas are asked, at {url}")
    events: list[Event] = []
    unfinished: str | None = None
    lengths = {"prompt_tokens": _PROMPT_TOKENS, "output_tokens": _OUTPUT_TOKENS}
    with (
        RotationWatch(service.service) as watch,
        NightLoad(url, "tiny", options.rate, **lengths) as load,
    ):
        until = time.monotonic() + 60 * options.minutes
        for name, do in EVENTS.items():
            if options.only and name not in options.only:
                continue
            time.sleep(options.pause)
            _say(f"{time.monotonic() - began:5.0f} s  {name}: {load.answers} answers so far")
            try:
                events.append(do(service))
            except AssertionError as error:  # it never came to its end: what there is counts
                unfinished = f"{name}: {error}"
                break
        time.sleep(max(options.pause, until - time.monotonic()))
    requests = load.requests(service.service)
    return Night(
        events=tuple(events),
        requests=requests,
        asked=tuple(watch.asked),
        account=account(events, requests, watch.asked, sent=load.sent),
        load_seconds=longest_load(service),
        unfinished=unfinished,
    )


def longest_load(service: ServiceRehearsal) -> float:
    """How long the slowest of the replicas that answer now has taken to load."""
    found = (
        read_record(service.service.endpoint(parsed(name)), Endpoint) for name in service.ready
    )
    return max((one.load_seconds for one in found if one is not None), default=0.0)


def report(night: Night) -> list[str]:
    """The table, the account of failures, and the sums."""
    head = ("event", "replica", "drain", "in flight", "failed", "answered again")
    rows: list[tuple[str, ...]] = [(*head, *_LATENCY_HEADS, "least asked", "restored")]
    for one in night.account.events:
        event = one.event
        again = sum(len(request.replicas) > 1 for request in one.in_flight)
        rows.append(
            (
                event.name,
                ", ".join(event.replicas) or "-",
                "yes" if event.drain_possible else "no",
                str(len(one.in_flight)) if event.moments else "-",
                kinds(one.failed) or "0",
                str(again),
                *_latency_cells(one.latencies),
                str(one.least),
                f"{event.ended - event.began:.1f} s",
            )
        )
    rows.append(("between them", *["-"] * 5, *_latency_cells(night.account.quiet), "-", "-"))
    found = night.account
    lines = table(rows)
    lines += [
        f"lost: {one.request_id}, {one.failure} after {one.ended - one.planned:.2f} s, on "
        f"{' then '.join(one.replicas) or 'no replica'}: {one.detail.partition(': <')[0]}"
        for one in found.failed
    ]
    kept = sum(one.failed == () for one in found.events if one.event.drain_possible)
    possible = sum(one.event.drain_possible for one in found.events)
    lines.append(
        f"{found.requests} requests, {len(found.failed)} failed, {found.without_end} without an "
        f"end; {kept} of {possible} events with a drain lost nothing"
    )
    return lines


def _latency_cells(found: Latencies) -> tuple[str, str]:
    return (
        f"{found.ttft_p50 * 1e3:.0f}/{found.ttft_p99 * 1e3:.0f} ms",
        f"{found.e2e_p50 * 1e3:.0f}/{found.e2e_p99 * 1e3:.0f} ms",
    )


def _closing(options: argparse.Namespace, night: Night, seconds: float) -> str:
    return (
        f"{options.engine} behind {options.router}, {options.rate:g} requests/s of "
        f"{_PROMPT_TOKENS} + {_OUTPUT_TOKENS} tokens, a replica loads for up to "
        f"{night.load_seconds:.0f} s; wall time {seconds:.0f} s, load {os.getloadavg()[0]:.0f} on "
        f"{os.cpu_count()} cores"
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def write(options: argparse.Namespace, night: Night, lines: Sequence[str]) -> None:
    """Write records, picture and page."""
    began = night.requests[0].planned
    with (_IMAGES / "serving-night.jsonl").open("w") as file:
        for event in night.events:
            file.write(json.dumps({"event": asdict(event)}) + "\n")
        for one in night.asked:
            file.write(json.dumps({"asked": asdict(one)}) + "\n")
        for request in night.requests:
            file.write(json.dumps(_short(request, began), separators=(",", ":")) + "\n")
    title = (
        f"Three replicas of {options.engine} behind {options.router}, {options.rate:g} requests/s; "
        "green: a drain is possible, red: it is not"
    )
    paths = [_IMAGES / f"serving-night.{suffix}" for suffix in ("png", "svg")]
    draw(night.requests, night.events, night.asked, title, paths)
    _PAGE.write_text(document(lines, night))


def _short(request: NightRequest, began: float) -> dict[str, object]:
    """A request with milliseconds, and times since the first one; what is empty is left out."""
    fields = asdict(request)
    fields["planned"] -= began
    fields["ended"] -= began
    short = {key: round(v, 4) if isinstance(v, float) else v for key, v in fields.items()}
    return {key: value for key, value in short.items() if value not in (None, "", ())}


def document(lines: Sequence[str], night: Night) -> str:
    """docs/serving-night.md: the figures as they were printed, and where they come from."""
    return _TEXT.format(
        text="\n".join(lines),
        machine=f"{os.cpu_count()} cores, Python {platform.python_version()}",
        arguments=" ".join(sys.argv[1:]),
        grace=GRACE_SECONDS,
    )


_TEXT = """\
# A night of a service

`python -m bench.serving_night {arguments}` has written this page on one machine
({machine}), which was shared with other work: read the latencies as upper bounds (the last line
has the load). Real are a Slurm of seven nodes, the router with its controller in a job of its own,
three replicas as jobs that `serve up` has submitted, their supervisors, and a client that sends
each request at its planned time, whatever became of those before it. The engines serve a tiny
Llama.

![Latency of each request through all events](images/serving-night.png)

```text
{text}
```

- `in flight`: requests that the replica computed when it was withdrawn or died, by its engine's own
  log. `answered again`: those of them that another replica has answered, because not a byte of the
  answer had gone out.
- `drain`: whether there is time to leave in order: out of the router first, then what has begun,
  then the engine. An event with one that loses a request makes the command fail. Where there is
  none, a request may be lost only if it was on that replica at that moment.
- `ttft`, `e2e`: of requests that were planned between the beginning of the event and its end,
  `restored` later, when as many replicas as wanted are asked again. `least asked`: the lowest
  number of replicas that the router asked meanwhile.
- **Preemption**: a job of a higher tier takes the node, with a grace of {grace} s; the replica is
  requeued and loads on another node. **Engine killed**: SIGKILL to its largest process, as the
  out-of-memory killer chooses; the supervisor starts the engine again in place. **Node lost**: all
  its processes are gone at once, slurmd too. Here its ports are closed from then on; on a real
  network a dead node is silent, and what was sent to it waits for TCP. **Walltime successor**: the
  limit of a job is shortened by `scontrol update`, as an administrator may; its successor is
  started and answers before it leaves.
- An engine that loads takes the cores on which the others answer: most peaks of the P99 are that,
  and would not be there with nodes of their own.
- The records are in [serving-night.jsonl](images/serving-night.jsonl).
"""


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
