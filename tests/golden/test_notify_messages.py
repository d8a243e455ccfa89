"""What people read in a channel, and what programs get, for the events of one made-up run."""

from __future__ import annotations

import json

from fabricated_runs import LAUNCHED, NOW, STARTED, SUBMITTED, ended, said
from golden_files import Golden

from hpctrain.notify.message_text import compose, write_test_message
from hpctrain.notify.notices import RunFacts, notices_of
from hpctrain.records.ledger import Event, EventKind

FACTS = RunFacts("gpt175b-7f3a", "/scratch/ada/runs", "ada", "a100x64", 50_000)
OOM = "rank 3 on n12: torch.OutOfMemoryError: tried to allocate 2.0 GiB"
LEDGER = (
    *SUBMITTED,
    STARTED,
    LAUNCHED,
    *ended("crash", "rank 3 on n12: ValueError: bad batch", "relaunch"),
    said(EventKind.SLOW_RANK, rank=5, node="n13", reason="computes 1.4 times longer"),
    *ended("diverged", "the loss of step 1,841 is not finite", "relaunch"),
    said(
        EventKind.ROLLED_BACK,
        checkpoint_step=1800,
        failed_step=1841,
        reason="samples 58880 to 58912 are left out",
    ),
    said(EventKind.CHECKPOINT_REJECTED, checkpoint_step=1840, reason="shard 3 is truncated"),
    *ended("node_failure", "1 of 64 nodes does not answer: n12", "requeue"),
    said(
        EventKind.WATCH, action="tell", symptom="waits long", reason="waits long: 1.2 d", job_id=1
    ),
    *ended("yielded", "asked to hold by grace (maintenance)", "hold"),
    *ended("gpu_oom", OOM, "stop"),
    *ended("done", "target reached", "finish"),
)


def events() -> list[Event]:
    """The ledger, with the causes and codes that the supervisor writes beside its actions."""
    found = []
    cause = None
    for number, (kind, fields) in enumerate(LEDGER):
        more: dict[str, object] = {}
        if kind is EventKind.LAUNCH_ENDED:
            cause = fields["cause"]
            more = {"node": "n12"} if cause in ("crash", "gpu_oom") else {}
            more |= {"evidence": [f"rank {n}: line {n}" for n in range(4)]} if more else {}
        elif kind is EventKind.ACTION:
            more = {"cause": cause, "exit_code": int(fields["action"] == "stop"), "job_id": 4711}
            more |= {"excluded": ["n12"]} if cause == "node_failure" else {}
        values = {"event": kind, "time": NOW + number, **fields, **more}
        found.append(Event.model_validate(values))
    return found


def test_each_message(golden: Golden) -> None:
    notices = notices_of(events(), FACTS)
    parts = []
    for notice in notices:
        message = compose([notice], FACTS)
        parts.append(f"Subject: {message.subject}\n\n{message.text}\n")
    kinds = {notice.kind for notice in notices}
    assert len(kinds) >= 11, kinds
    digest = compose(notices[-4:], FACTS, repeated=True)
    parts.append(f"Subject: {digest.subject}\n\n{digest.text}\n")
    test = write_test_message(FACTS, "test on login1")
    parts.append(f"Subject: {test.subject}\n\n{test.text}\n")
    golden("transcripts/notify-messages.txt", f"\n{'-' * 72}\n".join(parts))


def test_the_document_of_a_webhook(golden: Golden) -> None:
    failed = [notice for notice in notices_of(events(), FACTS) if notice.kind == "failed"]
    document = json.loads(compose(failed, FACTS).document)
    golden("transcripts/notify-webhook.json", json.dumps(document, indent=2) + "\n")
