"""Judge the check of GPUs and links that a launch has made before training.

Belongs here: that question. Does not belong here: ranks that are slow while they train (`waiting`).
"""

from __future__ import annotations

from hpctrain.diagnose.facts import SpeedFacts
from hpctrain.diagnose.findings import Measurement, Suggestion, TopicFinding, fine


def hardware(speed: SpeedFacts) -> TopicFinding:
    """Judge whether a GPU or a link was slow before training, measured twice."""
    if not speed.slow:
        return fine("hardware", f"{speed.ranks} ranks were as fast as their peers and the plan")
    parts = "1 part was" if len(speed.slow) == 1 else f"{len(speed.slow)} parts were"
    if speed.nodes:
        where = f" on {', '.join(speed.nodes[:4])}"
        remedies = [
            Suggestion(words="have these nodes looked at: clocks, temperature, cables, other jobs"),
            Suggestion(
                words="let the supervisor replace such nodes",
                changes=("supervise.speed_check.mode=exclude",),
            ),
        ]
    else:
        where = ", and no single node is the reason"
        compare = (
            "compare the profile's figures and variables with what the site has: "
            "`hpctrain describe` lists all measurements"
        )
        remedies = [Suggestion(words=compare)]
    return TopicFinding(
        topic="hardware",
        answer="yes",
        words=f"{parts} slow{where}",
        evidence=tuple(Measurement(words=one, source=speed.source) for one in speed.slow),
        remedies=tuple(remedies),
    )
