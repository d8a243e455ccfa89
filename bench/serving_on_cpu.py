"""Predicted and measured latencies of a real vLLM with a tiny Llama, on this machine's processors.

A vLLM is started by the command of our contract. Its iterations are timed by a micro-benchmark
(prompts alone, decoding batches, prompts beside decoding ones) and fitted; the simulator of the
planner then predicts P50 and P99 at five rates, before anything is measured at them; the load
generator measures them. A measured P99 is predicted if it lies in the band: the simulation with
iterations faster and slower by the error of the fit, with the interval of its order statistics.
Afterwards iterations are timed again, to say how much the machine itself has changed, and what
other processes took of it is printed with each rate; before each, some minutes are waited for
others to leave the machine alone. Exit code 1 unless at least four of five measured P99 of the time
to the first token, and of the whole answer, lie in their bands.

    python -m bench.serving_on_cpu [--requests 10000] [--rates 0.15,0.3,0.45,0.6,0.75] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench.serving_iteration_fit import IterationFit, TimedIteration, fit_iterations
from hpctrain.serve.load.measurement import LoadPlan, LoadTarget, Measurement, RequestRecord
from hpctrain.serve.load.sending import PromptStyle, send_requests
from hpctrain.serve.load.summary import sample_quantile, summarize
from hpctrain.serve.plan.batching import BatchLimits
from hpctrain.serve.plan.routing import SimulatedService, Window, simulate_arrivals
from hpctrain.serve.plan.step_time import IterationLoad, IterationTable
from hpctrain.serve.plan.traffic import Floats, Lengths, Requests, Traffic, draw_requests
from hpctrain.serve.tiny_llama import TinyShape
from tests.serving_environment import RunningEngine, running_engine, serving_python, tiny_start

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 8
MAX_SEQUENCES, BATCH_TOKENS, MAX_MODEL_TOKENS = 64, 2048, 1024
KV_TOKENS = 500_000  # more than ever run at a time: 1 GiB of this model's keys
# Large enough for an iteration to take longer than what the front end does for its tokens.
SHAPE = TinyShape(384, 1024, 8, 6, 3, vocab_size=512)
STYLE = PromptStyle(lowest_id=3, highest_id=511)
WARM_UP_SECONDS = 5.0
LATENCIES = ("ttft", "tpot", "e2e")
PERCENTILES = {"p50": 0.5, "p99": 0.99}
_QUIET_SECONDS = 5.0
NEEDED = 4  # measured P99 in their bands, of five
_NORMAL_975 = 1.959963984540054
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


# -- timing iterations -----------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """What the micro-benchmark found.

    `overheads`: seconds of single requests outside of iterations, one each. `token_noises`: what
    the time per further token of single requests was above its median, one each.
    """

    fit: IterationFit
    overheads: tuple[float, ...]
    token_noises: tuple[float, ...]


def ask(
    engine: RunningEngine, planned: Sequence[float], prompts: Sequence[int], outputs: Sequence[int]
) -> list[RequestRecord]:
    """Send requests of these lengths at these times; all have to succeed."""
    requests = Requests(np.asarray(planned), np.asarray(prompts), np.asarray(outputs))
    target = LoadTarget(engine.url, "tiny", timeout_seconds=300)
    records = list(send_requests(target, STYLE, requests, np.asarray(planned)).records)
    failed = [record for record in records if record.failure is not None]
    assert not failed, failed[:3]
    return records


def calibrate(engine: RunningEngine, repeats: int) -> Calibration:
    """Time single requests, decoding batches, and prompts beside decoding sequences."""
    ask(engine, [0.0] * 8, [64] * 8, [16] * 8)  # what is allocated once
    timed: list[TimedIteration] = []
    for _ in range(max(2, repeats // 10)):
        timed += (decoding(engine, sequences) for sequences in (1, 2, 4, 8, 16, 32))
        timed += (one for sequences in (1, 4, 12) for one in prompts_beside(engine, sequences))
    fit = fit_iterations(timed)
    overheads, token_seconds = [], []
    for record in single(engine, repeats * 5):
        assert record.first_token_seconds is not None and record.tpot_seconds is not None
        alone = IterationLoad(record.prompt_tokens, 0.0, 0, 0.0)
        overheads.append(
            record.first_token_seconds - record.sent_seconds - float(fit.seconds(alone))
        )
        token_seconds.append(record.tpot_seconds)
    usual = statistics.median(token_seconds)
    return Calibration(fit, tuple(overheads), tuple(one - usual for one in token_seconds))


def single(engine: RunningEngine, count: int) -> list[RequestRecord]:
    """Requests that were alone: those that met another one are left out."""
    planned = [0.3 * number for number in range(count)]
    records = ask(engine, planned, [PROMPT_TOKENS] * count, [OUTPUT_TOKENS] * count)
    ends = [0.0, *(record.last_token_seconds or 0.0 for record in records)]
    return [record for record, end in zip(records, ends, strict=False) if record.sent_seconds > end]


def decoding(engine: RunningEngine, sequences: int) -> TimedIteration:
    """The median time per token while this many sequences decode.

    Single gaps are no such times: an engine whose front end is busy sends several tokens at once.
    """
    prompt, output = 16, 48
    records = ask(engine, [0.0] * sequences, [prompt] * sequences, [output] * sequences)
    # those that began last decoded beside all others from their first token on
    last = sorted(records, key=lambda record: record.first_token_seconds or 0.0)[-1]
    assert last.tpot_seconds is not None
    return TimedIteration(0, sequences, sequences * (prompt + output / 2), last.tpot_seconds)


def prompts_beside(engine: RunningEngine, sequences: int) -> Iterator[TimedIteration]:
    """Iterations that computed a prompt beside decoding sequences.

    The prompt's first token, and one of each sequence, end such an iteration together: it lasted
    as long as the gaps of the sequences that end then.
    """
    prompt, output, prompts = 16, 120, (16, 64, 32, 128)
    records = ask(
        engine,
        [0.0] * sequences + [0.4 + 0.2 * number for number in range(len(prompts))],
        [prompt] * sequences + list(prompts),
        [output] * sequences + [1] * len(prompts),
    )
    for record in records[sequences:]:
        assert record.first_token_seconds is not None
        found = [gap_ending_at(record.first_token_seconds, one) for one in records[:sequences]]
        gaps = [gap for gap in found if gap is not None]
        if len(gaps) > sequences // 2:
            context = sequences * (prompt + output / 2)
            seconds = statistics.median(gaps)
            yield TimedIteration(record.prompt_tokens, sequences, context, seconds)


def gap_ending_at(seconds: float, decoding_one: RequestRecord) -> float | None:
    """The gap between two tokens of a sequence that ended then; None if it did not decode then."""
    assert decoding_one.first_token_seconds is not None
    gaps = decoding_one.gap_seconds
    ends = decoding_one.first_token_seconds + np.cumsum(gaps)
    sent_singly = len(gaps) == decoding_one.answered_tokens - 1
    if not sent_singly or not decoding_one.first_token_seconds < seconds < ends[-1]:
        return None
    return float(gaps[int(np.argmin(np.abs(ends - seconds)))])


# -- predicting ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """A predicted quantile in seconds and where the measured one should be."""

    value: float
    low: float
    high: float


def traffic() -> Traffic:
    lengths = Lengths(PROMPT_TOKENS, PROMPT_TOKENS), Lengths(OUTPUT_TOKENS, OUTPUT_TOKENS)
    return Traffic(*lengths)


def capacity(fit: IterationFit) -> float:
    """Requests per second at which iterations with all sequences have no pause."""
    context = PROMPT_TOKENS + OUTPUT_TOKENS / 2
    decoding = float(fit.seconds(IterationLoad(0, 0.0, MAX_SEQUENCES, context)))
    prompt = fit.prompt_seconds + fit.prompt_token_seconds * PROMPT_TOKENS
    return 1 / (decoding * (OUTPUT_TOKENS - 1) / MAX_SEQUENCES + prompt)


def simulated(
    calibration: Calibration, requests: Requests, arrivals: Floats, factor: float
) -> dict[str, Floats]:
    """Latencies of the requests after the warm-up, with iterations `factor` times as long.

    Each gets the overhead and the noise of a single request that was timed.
    """
    table = IterationTable(
        calibration.fit.seconds, BATCH_TOKENS, MAX_SEQUENCES, PROMPT_TOKENS + OUTPUT_TOKENS / 2
    )
    service = SimulatedService(
        table.slower(factor), BatchLimits(MAX_SEQUENCES, BATCH_TOKENS, KV_TOKENS), replicas=1
    )
    outcome = simulate_arrivals(service, requests, arrivals, Window(warm_up=0.0), patient=True)
    draws = np.random.default_rng(11)
    picked = draws.integers(0, len(calibration.overheads), requests.count)
    overhead = np.asarray(calibration.overheads)[picked]
    noise = np.asarray(calibration.token_noises)[picked]
    counted = arrivals >= WARM_UP_SECONDS
    tpot = outcome.tpot_seconds + noise
    return {
        "ttft": (outcome.ttft_seconds + overhead)[counted],
        "tpot": tpot[counted],
        "e2e": (outcome.e2e_seconds + overhead + noise * (OUTPUT_TOKENS - 1))[counted],
    }


def predict(
    calibration: Calibration, requests: Requests, arrivals: Floats
) -> dict[tuple[str, str], Band]:
    error = math.exp(_NORMAL_975 * calibration.fit.log_deviation)
    usual, fast, slow = (
        simulated(calibration, requests, arrivals, factor) for factor in (1.0, 1 / error, error)
    )
    found = {}
    for latency in LATENCIES:
        for percentile, share in PERCENTILES.items():
            middle = sample_quantile(usual[latency].tolist(), share)
            low = sample_quantile(fast[latency].tolist(), share).low
            high = sample_quantile(slow[latency].tolist(), share).high
            found[latency, percentile] = Band(middle.value, low, high)
    return found


# -- the machine -----------------------------------------------------------------------------


class MachineUse:
    """What processes that are neither the engine's nor ours took of all cores."""

    def __init__(self, engine: RunningEngine) -> None:
        self._session = engine.process.pid
        self.others_share = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        all_before, own_before = self._busy_ticks()
        total_before = sum(self._cpu_ticks())
        yield
        all_after, own_after = self._busy_ticks()
        total = sum(self._cpu_ticks()) - total_before
        others = (all_after - all_before) - (own_after - own_before)
        self.others_share = max(0.0, others / max(1, total))

    @staticmethod
    def _cpu_ticks() -> list[int]:
        """user nice system idle iowait irq softirq steal: proc(5), /proc/stat."""
        line = Path("/proc/stat").read_text().splitlines()[0]
        return [int(word) for word in line.split()[1:9]]

    def wait_until_quiet(self, most_share: float, patience_seconds: float) -> None:
        """Wait until others leave the machine alone for some seconds; go on anyway in the end."""
        deadline = time.monotonic() + patience_seconds
        while time.monotonic() < deadline:
            with self.measured():
                time.sleep(_QUIET_SECONDS)
            if self.others_share <= most_share:
                return
        print(f"others still use {self.others_share:.0%} of the machine", file=sys.stderr)

    def _busy_ticks(self) -> tuple[int, int]:
        ticks = self._cpu_ticks()
        own = round(time_of_this_process() * _TICKS_PER_SECOND)
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            if int(fields[3]) == self._session:
                own += int(fields[11]) + int(fields[12])
        return sum(ticks) - ticks[3] - ticks[4], own


def time_of_this_process() -> float:
    used = os.times()
    return used.user + used.system


# -- all together ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One rate: prediction and measurement in seconds, by latency and percentile."""

    rate: float
    predicted: dict[tuple[str, str], Band]
    measurement: Measurement
    others_share: float

    def holds(self, latency: str, percentile: str) -> bool:
        """Whether the measured quantile lies in a band that has an end."""
        band, measured = self.predicted[latency, percentile], self.seconds(latency, percentile)
        bounded = math.isfinite(band.high)
        return measured is not None and bounded and band.low <= measured <= band.high

    def seconds(self, latency: str, percentile: str) -> float | None:
        found = self.measurement.quantile(latency, percentile)  # type: ignore[arg-type]
        return None if found is None else found.seconds


def measure(
    engine: RunningEngine, requests: Requests, arrivals: Floats, rate: float
) -> tuple[Measurement, float]:
    use = MachineUse(engine)
    target = LoadTarget(engine.url, "tiny", timeout_seconds=300)
    with use.measured():
        result = send_requests(target, STYLE, requests, arrivals)
    plan = LoadPlan(Traffic(), rate, len(arrivals), WARM_UP_SECONDS)
    return summarize(target, plan, result), use.others_share


def run(options: argparse.Namespace) -> tuple[list[Row], Calibration, Calibration]:
    with tempfile.TemporaryDirectory(prefix="hpctrain-serving-") as place:
        start = replace(
            tiny_start(serving_python(), Path(place) / "model", SHAPE),
            max_model_tokens=MAX_MODEL_TOKENS,
            max_sequences=MAX_SEQUENCES,
            max_batched_tokens=BATCH_TOKENS,
            extra_arguments=("--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
        )
        with running_engine("vllm", start, Path(place)) as engine:
            machine = MachineUse(engine)
            machine.wait_until_quiet(options.quiet, options.patience)
            print("timing iterations ...", file=sys.stderr, flush=True)
            before = calibrate(engine, options.repeats)
            most = capacity(before.fit)
            requests = draw_requests(traffic(), options.requests, seed=0)
            rows = []
            for share in options.rates:
                rate = share * most
                arrivals = requests.arrivals(rate)
                predicted = predict(before, requests, arrivals)
                machine.wait_until_quiet(options.quiet, options.patience)
                print(f"measuring {rate:.1f}/s ...", file=sys.stderr, flush=True)
                measurement, others = measure(engine, requests, arrivals, rate)
                rows.append(Row(rate, predicted, measurement, others))
                print_row(rows[-1])
            after = calibrate(engine, options.repeats)
    return rows, before, after


def print_heading() -> None:
    print(
        "| requests/s | latency | P50 predicted ms | P50 measured ms | P99 predicted ms (band) "
        "| P99 measured ms (interval) | in band | others |"
    )
    print("|---|---|---|---|---|---|---|---|")


def print_row(row: Row) -> None:
    for latency in LATENCIES:
        p50, p99 = row.predicted[latency, "p50"], row.predicted[latency, "p99"]
        measured = row.measurement.quantile(latency, "p99")  # type: ignore[arg-type]
        assert measured is not None
        print(
            f"| {row.rate:.1f} | {latency} | {ms(p50.value)} | {ms(row.seconds(latency, 'p50'))} "
            f"| {ms(p99.value)} ({ms(p99.low)} to {ms(p99.high)}) "
            f"| {ms(measured.seconds)} ({ms(measured.low_seconds)} to "
            f"{ms(measured.high_seconds)}) "
            f"| {'yes' if row.holds(latency, 'p99') else 'no'} | {row.others_share:.0%} |",
            flush=True,
        )


def ms(seconds: float | None) -> str:
    return "never" if seconds is None or not math.isfinite(seconds) else f"{seconds * 1e3:.1f}"


def rates(text: str) -> tuple[float, ...]:
    return tuple(float(share) for share in text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving_on_cpu")
    parser.add_argument("--requests", type=int, default=10_000, help="at each rate")
    parser.add_argument("--rates", type=rates, default=(0.15, 0.3, 0.45, 0.6, 0.75))
    parser.add_argument("--repeats", type=int, default=40, help="of single requests, when timing")
    parser.add_argument("--quiet", type=float, default=0.1, help="most that others use; it waits")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for that")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    print_heading()
    rows, before, after = run(options)
    for name, found in (("before", before), ("after", after)):
        fit, overhead = found.fit, statistics.median(found.overheads)
        print(
            f"{name}: iteration {ms(fit.iteration_seconds)} ms, with a prompt "
            f"+{ms(fit.prompt_seconds)} ms, prompt token {fit.prompt_token_seconds * 1e6:.1f} us, "
            f"sequence {fit.sequence_seconds * 1e6:.1f} us, key {fit.key_seconds * 1e9:.1f} ns, "
            f"error {fit.log_deviation:.1%}, outside of iterations {ms(overhead)} ms"
        )
    in_band = {
        latency: sum(row.holds(latency, "p99") for row in rows) for latency in ("ttft", "e2e")
    }
    for latency, count in in_band.items():
        print(f"P99 of {latency}: {count} of {len(rows)} measured ones are in their bands")
    for row in rows:
        for reason in row.measurement.refused:
            print(f"{row.rate:.1f}/s: no measurement of the engine: {reason}")
    if options.json is not None:
        options.json.write_text(json.dumps(as_document(rows, before, after), indent=2) + "\n")
    refused = any(row.measurement.refused for row in rows)
    return 0 if min(in_band.values()) >= min(NEEDED, len(rows)) and not refused else 1


def as_document(rows: Sequence[Row], before: Calibration, after: Calibration) -> dict[str, object]:
    return {
        "rates": [
            {
                "rate": row.rate,
                "others_share": row.others_share,
                "predicted": {
                    f"{percentile} of {latency}": asdict(band)
                    for (latency, percentile), band in row.predicted.items()
                },
                "measured": row.measurement.model_dump(mode="json"),
            }
            for row in rows
        ],
        "before": asdict(before.fit),
        "after": asdict(after.fit),
    }


if __name__ == "__main__":
    sys.exit(main())
