"""One load test from its plan to its measurement: what `serve test` and the program both call.

Belongs here: putting sending and summarizing together. Does not belong here: either of them (see
`sending` and `summary`), the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpctrain.plan.serving.traffic import Traffic, draw_requests
from hpctrain.serving.load.measurement import Measurement, RequestRecord
from hpctrain.serving.load.prompts import PromptStyle
from hpctrain.serving.load.sending import LoadTarget, require_client, send_requests
from hpctrain.serving.load.summary import LoadAsked, summarize


@dataclass(frozen=True)
class LoadPlan:
    """What is sent: `requests` of the traffic at `rate` per second.

    Those planned in the first `warm_up_seconds` are not counted. The same seed sends the same.
    """

    traffic: Traffic
    rate: float
    requests: int = 10_000
    warm_up_seconds: float = 10.0
    seed: int = 0


def run_load_test(
    target: LoadTarget,
    style: PromptStyle,
    plan: LoadPlan,
    *,
    name: str = "load",
    on_record: Callable[[RequestRecord], None] | None = None,
) -> Measurement:
    """Send the load and measure it; `on_record` gets each request as it ends.

    Blocks until the last answer. Raises HpctrainError if the HTTP library is not installed.
    """
    require_client()
    requests = draw_requests(plan.traffic, plan.requests, plan.seed)
    planned = requests.arrivals(plan.rate)
    result = send_requests(target, style, requests, planned, name=name, on_record=on_record)
    asked = LoadAsked(
        url=target.url,
        model=target.model,
        rate=plan.rate,
        burstiness=plan.traffic.burstiness,
        seed=plan.seed,
        warm_up_seconds=plan.warm_up_seconds,
        began_seconds=result.began_seconds,
    )
    return summarize(asked, result.records, result.use)
