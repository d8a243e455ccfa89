"""`python -m hpctrain.serve.load`: measure the latencies of a service under an open load.

    python -m hpctrain.serve.load --url http://127.0.0.1:8000 --model tiny --rate 5 \\
        --requests 10000 --prompt-tokens 512 --output-tokens 128 --records load.jsonl

Exit codes: 0 measured; 1 something unexpected; 2 usage; 3 a wrong trace; 7 the client could not
keep up, so that nothing was measured. Belongs here: the command line, and printing. Does not belong
here: sending (see `sending`), computing (see `summary`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem
from hpctrain.page.text import columns_text
from hpctrain.serve.load.measurement import (
    LoadPlan,
    LoadTarget,
    MeasuredLatency,
    Measurement,
    RequestRecord,
)
from hpctrain.serve.load.sending import Interface, PromptStyle, run_load_test
from hpctrain.serve.load.trace_file import read_trace
from hpctrain.serve.plan.traffic import Lengths, Traffic

_REFUSED_EXIT_CODE = 7


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpctrain.serve.load",
        description="Send requests at their planned times, and measure latencies from those.",
    )
    add = parser.add_argument
    add("--url", required=True, help="of a router or an engine, without /v1")
    add("--model", required=True, help="`model` of the requests")
    add("--rate", type=_positive, required=True, help="requests per second")
    add("--requests", type=int, default=10_000, help="how many (default: 10000)")
    add("--warm-up", type=float, default=10.0, metavar="SECONDS", help="not counted (default: 10)")
    add("--prompt-tokens", type=_lengths, metavar="N|P50:P99", help="log-normal, or one number")
    add("--output-tokens", type=_lengths, metavar="N|P50:P99", help="the same for answers")
    add("--trace", type=Path, metavar="CSV", help="lengths and times; scaled to the rate")
    add("--burstiness", type=_positive, default=1.0, help="squared variation; 1: Poisson")
    add("--shared-prefix-tokens", type=int, default=0, help="that all prompts begin with")
    add("--interface", choices=get_args(Interface), default="completions")
    add("--words", action="store_true", help="words instead of token ids; lengths are about right")
    add("--token-ids", type=_id_range, default=(100, 30_000), metavar="LOW:HIGH")
    add("--token-file", type=Path, metavar="FILE", help="its first line is the bearer token")
    add("--ca", metavar="FILE", help="certificates to trust instead of the system's")
    add("--timeout", type=_positive, default=600.0, metavar="SECONDS", help="of one request")
    add("--seed", type=int, default=0)
    add("--name", default="load", help="first part of the requests' ids")
    add("--records", type=Path, metavar="FILE", help="one line of JSON per request")
    add("--json", action="store_true", help="print the measurement as JSON")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _lengths(text: str) -> Lengths:
    p50, _, p99 = text.partition(":")
    try:
        lengths = Lengths(float(p50), float(p99 or p50))
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not like 512 or 400:3000") from None
    if not 1 <= lengths.p50 <= lengths.p99:
        raise argparse.ArgumentTypeError("needs 1 <= P50 <= P99")
    return lengths


def _id_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not low.isdigit() or not high.isdigit() or int(low) > int(high):
        raise argparse.ArgumentTypeError(f"`{text}` is not like 100:30000")
    return int(low), int(high)


def measure(options: argparse.Namespace) -> Measurement:
    """Send what the options say, and summarize it."""
    trace = None if options.trace is None else read_trace(options.trace)
    traffic = Traffic(
        prompt=options.prompt_tokens,
        output=options.output_tokens,
        trace=trace,
        burstiness=options.burstiness,
        shared_prefix_tokens=options.shared_prefix_tokens,
    )
    low, high = options.token_ids
    style = PromptStyle(
        interface=options.interface,
        exact=not options.words,
        lowest_id=low,
        highest_id=high,
        seed=options.seed,
        shared_prefix_tokens=options.shared_prefix_tokens,
    )
    token = None if options.token_file is None else _first_line(options.token_file)
    target = LoadTarget(options.url, options.model, token, options.ca, options.timeout)
    plan = LoadPlan(traffic, options.rate, options.requests, options.warm_up, options.seed)
    with ExitStack() as stack:
        write = None
        if options.records is not None:
            file = stack.enter_context(options.records.open("w", encoding="utf-8"))

            def write(record: RequestRecord) -> None:
                file.write(record.to_line() + "\n")

        return run_load_test(target, style, plan, name=options.name, on_record=write)


def _first_line(path: Path) -> str:
    try:
        return path.read_text("utf-8").splitlines()[0].strip()
    except (OSError, IndexError, UnicodeDecodeError) as error:
        problem = Problem(f"has no token in its first line: {error}", file=str(path))
        raise InvalidInputError([problem]) from error


def print_measurement(found: Measurement) -> None:
    """Print what was measured as a table of milliseconds."""
    print(
        f"{found.counted} of {found.requests} requests after {found.warm_up_seconds:g} s, planned "
        f"{found.rate:g}/s, answered {found.answered_rate:.2f}/s, "
        f"{found.output_tokens_rate:.0f} tokens/s, {found.failed} failed"
    )
    rows = []
    for latency in get_args(MeasuredLatency):
        quantiles = [one for one in found.quantiles if one.latency == latency]
        cells = [
            f"{_ms(one.seconds)} ({_ms(one.low_seconds)}-{_ms(one.high_seconds)})"
            for one in quantiles
        ]
        rows += [[latency, *cells]] if cells else []
    headers = ("ms", "p50", "p90", "p95", "p99")
    print("\n".join(columns_text(headers, rows, [False, True, True, True, True])))
    for one in found.failures:
        print(f"{one.count} {one.kind}: {one.detail}")
        for request_id, planned in zip(one.request_ids, one.planned_seconds, strict=True):
            print(f"    {request_id} planned at {planned:.3f} s")
    client = found.client
    print(
        f"client: {client.cpu_share:.0%} of a core, late p50 {_ms(client.late_p50_seconds)} ms, "
        f"p99 {_ms(client.late_p99_seconds)} ms, most {_ms(client.late_max_seconds)} ms, "
        f"{client.most_outstanding} requests at once"
    )


def _ms(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds * 1e3:.1f}"


def main(words: Sequence[str]) -> int:
    """Measure, print, and return the exit code."""
    parser = _parser()
    options = parser.parse_args(words)
    lengths = options.prompt_tokens is not None, options.output_tokens is not None
    if options.trace is None and not all(lengths):
        parser.error("give --prompt-tokens and --output-tokens, or a --trace")
    if options.trace is not None and any(lengths):
        parser.error("a --trace has the lengths")
    try:
        found = measure(options)
    except HpctrainError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(found.model_dump(mode="json"), indent=2))
    else:
        print_measurement(found)
    for reason in found.refused:
        print(f"error: not measured: {reason}", file=sys.stderr)
    return _REFUSED_EXIT_CODE if found.refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
