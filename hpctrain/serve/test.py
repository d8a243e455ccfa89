"""Measures a service by its own address, and puts the plan's promises beside what came out.

Belongs here: what is sent where, and the files of a test. Does not belong here: sending and
counting (`hpctrain.serve.load`), deciding whether an objective is met
(`hpctrain.serve.load.measurement`).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem, StorageError, UsageError
from hpctrain.checkpoints.staged import CONFIG_NAME
from hpctrain.records.run_records import read_record
from hpctrain.records.service_layout import ServiceLayout
from hpctrain.records.service_records import Address
from hpctrain.serve.engines.registry import SERVING_ENGINES
from hpctrain.serve.plan.documents import ServicePlan
from hpctrain.spec.loader import load_service_spec
from hpctrain.spec.service import ServiceSpec

if TYPE_CHECKING:
    from hpctrain.serve.load.measurement import RequestRecord, ServiceTest
    from hpctrain.serve.load.sending import PromptStyle

# Ids below are what tokenizers use for special tokens; few vocabularies are smaller.
_LOWEST_TOKEN_ID, _HIGHEST_TOKEN_ID = 100, 30_000
_LONGEST_WAIT_SECONDS = 600.0


def run_service_test(
    service: ServiceLayout,
    rate: float | None = None,
    requests: int = 10_000,
    warm_up_seconds: float = 30.0,
    seed: int = 0,
    ca: Path | None = None,
    token_file: Path | None = None,
) -> tuple[ServiceTest, Path]:
    """Send requests, write result and records into the service, and return the result.

    `rate`: requests per second, None: the planned rate. Those of the first `warm_up_seconds` are
    not counted. `ca`: certificates to trust instead of the system's. `token_file`: its first line
    is the bearer token; None: that of the router's spec. Also returns the path of the result; the
    records lie beside it, as JSON lines. Raises UsageError for a service without an address or
    without a token, HpctrainError where a package is missing.
    """
    from hpctrain.serve.load.measurement import LoadPlan, LoadTarget, compare
    from hpctrain.serve.load.sending import run_load_test
    from hpctrain.serve.load.trace_file import read_trace
    from hpctrain.serve.plan.traffic import Traffic

    spec = load_service_spec(service.spec).document
    try:
        plan = ServicePlan.model_validate_json(service.plan.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"{service.plan} cannot be read: {error}") from error
    address = read_record(service.address, Address)
    if address is None:
        raise UsageError(
            f"service `{service.service_id}` has no address yet",
            hint=f"`hpctrain serve status {service.service_id}` says what it waits for",
        )
    file = spec.traffic.trace
    load = LoadPlan(
        Traffic.of(spec.traffic, None if file is None else read_trace(Path(file))),
        rate or plan.rate,
        requests,
        warm_up_seconds,
        seed,
    )
    style = _style(spec, plan, seed)
    target = LoadTarget(
        address.url,
        spec.served_name,
        _token(spec, address, token_file),
        None if ca is None else str(ca),
        _LONGEST_WAIT_SECONDS,
    )
    name = time.strftime("%Y%m%dT%H%M%S")
    records = service.tests / f"{name}.jsonl"
    try:
        with records.open("x", encoding="utf-8") as lines:

            def keep(record: RequestRecord) -> None:
                lines.write(record.to_line() + "\n")

            measured = run_load_test(target, style, load, name=name, on_record=keep)
    except OSError as error:
        raise StorageError(f"{records} cannot be written: {error.strerror}") from error
    found = compare(plan.promises, measured)
    path = records.with_suffix(".json")
    replace_text(path, found.model_dump_json(indent=1), mode=0o600)
    return found, path


def _style(spec: ServiceSpec, plan: ServicePlan, seed: int) -> PromptStyle:
    """Choose random token ids of the vocabulary where the engine takes them, else words."""
    from hpctrain.serve.load.sending import PromptStyle

    highest = _HIGHEST_TOKEN_ID
    if spec.model is not None:
        highest = min(highest, spec.model.vocab - 1)
    elif spec.weights.path is not None:
        config = Path(spec.weights.path) / CONFIG_NAME
        try:
            highest = min(highest, int(json.loads(config.read_text())["vocab_size"]) - 1)
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = Problem(f"has no `vocab_size`: {error}", str(config))
            raise InvalidInputError([problem]) from error
    return PromptStyle(
        exact=SERVING_ENGINES[plan.replica.engine].exact_lengths,
        lowest_id=min(_LOWEST_TOKEN_ID, highest // 2),
        highest_id=highest,
        seed=seed,
        shared_prefix_tokens=spec.traffic.shared_prefix_tokens,
    )


def _token(spec: ServiceSpec, address: Address, given: Path | None) -> str | None:
    path = given or (Path(spec.router.token_file) if spec.router.token_file else None)
    if not address.needs_token:
        return None
    if path is None:
        raise UsageError("the service wants a token", hint="`--token-file FILE`")
    try:
        return path.read_text("utf-8").splitlines()[0].strip()
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise HpctrainError(f"{path} has no token in its first line: {error}") from error
