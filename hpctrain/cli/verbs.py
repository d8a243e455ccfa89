"""The table of commands for programs: what each changes, its exit codes, the JSON it prints.

Belongs here: one row for each command, and the JSON Schemas that follow. Does not belong
here: commands (they lie in their rooms), documents (the rows name their classes, which are imported
when their schema is asked for).
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

from hpctrain.base.errors import UsageError
from hpctrain.page.output import SCHEMA_VERSION, ErrorDocument

Effect = Literal["reads", "writes", "acts"]
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Verb(BaseModel):
    """One command as a program sees it, a row of `hpctrain schema --json`.

    `effect`: it reads (nothing changes), writes (files that you name, no run and no job), or acts
    (jobs, runs or services change). `unless`: options with which the effect is another one.
    `again`: the same command a second time does no harm. `codes`: exit codes besides 0, 1, 2 and
    130. `output`: the keys of its JSON and the documents behind them as `module:Class`, with `[]`
    for a list and `?` for a key that may be absent.
    """

    model_config = ConfigDict(frozen=True)

    verb: str
    effect: Effect
    codes: tuple[int, ...] = ()
    output: dict[str, str] = Field({}, exclude=True)
    again: bool = True
    unless: dict[str, Effect] = {}

    @computed_field  # type: ignore[prop-decorator]  # mypy 1362
    @property
    def prints_json(self) -> bool:
        """Whether it has `--json`."""
        return bool(self.output)


_READS_WITH_DRY_RUN: dict[str, Effect] = {"--dry-run": "reads"}
_OF_RUN = (6, 7)
_TABLE = (
    Verb(verb="init", effect="writes", codes=(3,)),
    Verb(
        verb="adopt",
        effect="writes",
        codes=(3,),
        output={"adoption": "adopt.draft:Adoption"},
    ),
    Verb(
        verb="validate",
        effect="reads",
        codes=(3, 4, 5, 7),
        output={"checks": "job.preflight:Check[]"},
    ),
    Verb(
        verb="plan",
        effect="reads",
        codes=(3, 4),
        output={
            "plan": "plan.documents:Plan|plan.trainer_plan:TrainerPlan",
            "forecast": "plan.forecast.documents:Forecast?",
            "pace": "job.trainer_forecast:KnownPace?",
            "levels": "spec.trainer:Level[]?",
            "advice": "job.plan:Advice[]?",
            "spot": "plan.forecast.documents:SpotComparison?",
            "budget": "plan.forecast.documents:BudgetDecision?",
            "explanation": "plan.documents:Explanation?",
            "verification": "engines.verification:Verification?",
        },
        unless={"--apply": "writes"},
    ),
    Verb(
        verb="footprint",
        effect="reads",
        codes=(3, 4),
        output={"footprint": "plan.footprint.predict:Footprint"},
    ),
    Verb(
        verb="compare",
        effect="acts",
        codes=(3, 4, 5, 7, 8),
        output={"comparison": "trials.documents:Comparison"},
        again=False,
        unless={"--predict": "reads"},
    ),
    Verb(
        verb="scale",
        effect="acts",
        codes=(3, 4, 5, 7, 8),
        output={"comparison": "trials.documents:Comparison"},
        again=False,
        unless={"--predict": "reads"},
    ),
    Verb(
        verb="simulate",
        effect="reads",
        codes=(3, 4),
        output={"simulation": "job.simulation:Simulation"},
    ),
    Verb(
        verb="try",
        effect="acts",
        codes=(3, 4, 5, 7, 8),
        output={"rehearsal": "records.rehearsals:RehearsalRecord"},
    ),
    Verb(
        verb="submit",
        effect="acts",
        codes=(3, 4, 5, 7),
        output={"submitted": "job.job_submission:Submitted"},
        again=False,
        unless={"--dry-run": "reads", "--check": "reads", "--prepare": "writes"},
    ),
    Verb(
        verb="sweep submit",
        effect="acts",
        codes=(3, 4, 5, 8),
        output={"sweep": "records.sweeps:SweepRecord"},
        again=False,
        unless=_READS_WITH_DRY_RUN,
    ),
    Verb(
        verb="sweep status",
        effect="reads",
        codes=(5, 6),
        output={
            "sweep": "trials.sweep_table:SweepTable?",
            "sweeps": "trials.sweep_table:SweepSummary[]?",
        },
    ),
    Verb(verb="sweep cancel", effect="acts", codes=(5, 6, 8)),
    Verb(
        verb="status", effect="reads", codes=(5, 6, 7), output={"runs": "runs.status:RunStatus[]"}
    ),
    Verb(verb="top", effect="reads", codes=(5,)),
    Verb(verb="logs", effect="reads", codes=_OF_RUN),
    Verb(
        verb="watch",
        effect="reads",
        codes=(5, 7),
        output={"watch": "runs.watch:WatchPass"},
        unless={"--act": "acts"},
    ),
    Verb(verb="exporter", effect="reads", codes=(5,)),
    Verb(
        verb="notify",
        effect="reads",
        codes=(3, 6),
        output={"notices": "runs.notify:NoticeState[]?", "tests": "runs.notify:ChannelTest[]?"},
        unless={"--test": "acts"},
    ),
    Verb(
        verb="serve plan",
        effect="reads",
        codes=(3, 4),
        output={"service_plan": "serve.make_plan:PlannedService"},
    ),
    Verb(verb="serve up", effect="acts", codes=(3, 4, 5, 7, 8), again=False),
    Verb(
        verb="serve status",
        effect="reads",
        codes=(6,),
        output={
            "service": "runs.service_status:ServiceStatus?",
            "services": "runs.service_status:ServiceStatus[]?",
        },
    ),
    Verb(verb="serve scale", effect="acts", codes=(3, 4, 5, 6)),
    Verb(verb="serve restart", effect="acts", codes=(5, 6), again=False),
    Verb(verb="serve down", effect="acts", codes=(5, 6, 8)),
    Verb(
        verb="serve test",
        effect="reads",
        codes=(5, 6, 7),
        output={"service_test": "serve.load.measurement:ServiceTest"},
        again=False,
    ),
    Verb(verb="save", effect="acts", codes=_OF_RUN),
    Verb(verb="stop", effect="acts", codes=(5, *_OF_RUN)),
    Verb(verb="hold", effect="acts", codes=(5, *_OF_RUN)),
    Verb(verb="resume", effect="acts", codes=(3, 5, *_OF_RUN)),
    Verb(verb="upgrade", effect="acts", codes=(3, *_OF_RUN)),
    Verb(verb="cancel", effect="acts", codes=(5, 6, 8)),
    Verb(verb="why", effect="reads", codes=(3, 5, *_OF_RUN), output={"why": "runs.why:Why"}),
    Verb(
        verb="describe",
        effect="reads",
        codes=(3, *_OF_RUN),
        output={"run": "runs.describe:RunStory"},
    ),
    Verb(
        verb="goodput",
        effect="reads",
        codes=(3, *_OF_RUN),
        output={"goodput": "telemetry.goodput:Goodput"},
    ),
    Verb(
        verb="diagnose",
        effect="reads",
        codes=(3, *_OF_RUN),
        output={"diagnose": "diagnose.of_run:Diagnosis"},
    ),
    Verb(
        verb="checkpoints",
        effect="reads",
        codes=(3, *_OF_RUN),
        output={"checkpoints": "runs.checkpoint_list:CheckpointReport"},
    ),
    Verb(
        verb="report",
        effect="writes",
        codes=_OF_RUN,
        output={"team_report": "report.team_report:TeamReport"},
    ),
    Verb(verb="export", effect="writes", codes=(3, 4, *_OF_RUN)),
    Verb(
        verb="nodes",
        effect="reads",
        codes=(7,),
        output={"nodes": "runs.node_evidence:NodeRow[]"},
        unless={"--forgive": "acts"},
    ),
    Verb(verb="clean", effect="acts", codes=(*_OF_RUN, 8), unless=_READS_WITH_DRY_RUN),
    Verb(verb="archive", effect="writes", codes=(*_OF_RUN, 8)),
    Verb(verb="rm", effect="acts", codes=(5, *_OF_RUN, 8)),
    Verb(
        verb="profiles",
        effect="reads",
        codes=(3,),
        output={
            "profile": "spec.profile:ClusterProfile?",
            "profiles": "spec.profile:ClusterProfile[]?",
        },
    ),
    Verb(verb="profile detect", effect="writes", codes=(5, 7), unless={"--in-job": "acts"}),
    Verb(
        verb="profile check",
        effect="reads",
        codes=(3, 5),
        output={"differences": "site.differences:Difference[]"},
    ),
    Verb(
        verb="doctor",
        effect="reads",
        codes=(3, 5, 8),
        output={
            "findings": "site.doctor:SiteFinding[]",
            "proof": "records.first_starts:FirstStart?",
        },
        unless={"--start": "acts"},
    ),
    Verb(
        verb="calibrate",
        effect="writes",
        codes=(3, 6, 7),
        output={
            "learning": "site.calibrate_runs:LearningResult?",
            "service_calibration": "site.calibrate_service:ServiceCalibrationResult?",
            "calibration": "site.calibrate:CalibrationResult?",
        },
    ),
    Verb(verb="monitoring", effect="writes", codes=(7,)),
    Verb(verb="sandbox up", effect="acts", codes=(3, 5, 7)),
    Verb(verb="sandbox down", effect="acts", codes=(5,)),
    Verb(verb="sandbox env", effect="reads", codes=(5,)),
    Verb(verb="sandbox run", effect="acts", codes=(5,), again=False),
    Verb(verb="sandbox status", effect="reads", codes=(5,)),
    Verb(verb="sandbox kill", effect="acts", codes=(5,)),
    Verb(verb="sandbox revive", effect="acts", codes=(5,)),
    Verb(verb="examples", effect="reads", codes=()),
    Verb(verb="explain", effect="reads", codes=(3,)),
    Verb(
        verb="adapters",
        effect="reads",
        codes=(3,),
        output={"adapters": "spec.trainer:NamedAdapter[]"},
    ),
    Verb(
        verb="data prepare",
        effect="writes",
        codes=(3, 5, 7),
        output={"dataset": "records.datasets:DatasetReport"},
        unless={"--slurm": "acts"},
    ),
    Verb(
        verb="data show",
        effect="reads",
        codes=(3, 7),
        output={"dataset": "job.datasets:DatasetDescription|job.datasets:SamplesDescription"},
    ),
    Verb(
        verb="data verify",
        effect="reads",
        codes=(3, 7),
        output={"verified": "job.datasets:VerifiedDataset"},
    ),
    Verb(
        verb="convert",
        effect="writes",
        codes=(3, 7),
        output={"conversion": "records.conversions:ConversionReport"},
    ),
    Verb(
        verb="schema",
        effect="reads",
        output={"verbs": "cli.verbs:Verb[]"},
        unless={"--skill": "writes"},
    ),
)
VERBS = {one.verb: one for one in _TABLE}


def output_schema(name: str) -> str:
    """Write the JSON Schema of what `hpctrain NAME --json` prints on standard output.

    Raises UsageError for a command that is not there, or prints no JSON.
    """
    verb = VERBS.get(name)
    if verb is None:
        raise UsageError(f"no command `{name}`", hint="`hpctrain schema` lists them")
    if not verb.output:
        having = ", ".join(one for one in VERBS if VERBS[one].output)
        raise UsageError(f"`hpctrain {name}` prints no JSON", hint=f"these do: {having}")
    definitions: dict[str, Any] = {}
    documents: dict[str, Any] = {}
    for key, words in verb.output.items():
        text = words.removesuffix("?")
        parts = []
        for place in text.removesuffix("[]").split("|"):
            module, own = place.split(":")
            document = getattr(importlib.import_module(f"hpctrain.{module}"), own)
            parts.append(_definition(document, definitions))
        part = parts[0] if len(parts) == 1 else {"anyOf": parts}
        documents[key] = {"type": "array", "items": part} if text.endswith("[]") else part
    required = [key for key, words in verb.output.items() if not words.endswith("?")]
    version = {"const": SCHEMA_VERSION}
    result = {
        "type": "object",
        "properties": {"schema_version": version, **documents},
        "required": ["schema_version", *required],
        "minProperties": 2,
        "additionalProperties": False,
    }
    failure = {
        "type": "object",
        "properties": {
            "schema_version": version,
            "error": _definition(ErrorDocument, definitions),
        },
        "required": ["schema_version", "error"],
        "additionalProperties": False,
    }
    schema = {
        "$schema": _DIALECT,
        "title": f"hpctrain {name} --json",
        "oneOf": [result, failure],
        "$defs": dict(sorted(definitions.items())),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _definition(document: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    """Add a document and all in it to the definitions; returns a reference to it."""
    schema = document.model_json_schema(mode="serialization", ref_template="#/$defs/{model}")
    definitions |= _with_nulls(schema.pop("$defs", {}))
    definitions[document.__name__] = _with_nulls(schema)
    return {"$ref": f"#/$defs/{document.__name__}"}


def _with_nulls(node: Any) -> Any:
    """Let every number be null, which NaN and infinity are in JSON (RFC 8259)."""
    if isinstance(node, list):
        return [_with_nulls(one) for one in node]
    if not isinstance(node, dict):
        return node
    changed = {key: _with_nulls(one) for key, one in node.items()}
    return changed | {"type": ["number", "null"]} if node.get("type") == "number" else changed


# -- The skill: the same for assistants, in the open format of agentskills.io --------------------


def skill_text() -> str:
    """Write SKILL.md: what stands in `skill.md`, with states and commands in their places."""
    from hpctrain.runs.state import RunState

    text = (Path(__file__).parent / "skill.md").read_text(encoding="utf-8")
    rows = ["| verb | effect | with an option | twice is harmless | JSON | exit codes |"]
    rows.append("|---|---|---|---|---|---|")
    for one in VERBS.values():
        otherwise = ", ".join(f"`{name}` {effect}" for name, effect in one.unless.items())
        again, json_words = "yes" if one.again else "**no**", "yes" if one.output else ""
        codes = " ".join(map(str, one.codes))
        cells = (f"`{one.verb}`", one.effect, otherwise, again, json_words, codes)
        rows.append(f"| {' | '.join(cells)} |")
    places = {
        "verbs": "\n".join(rows),
        "states": ", ".join(RunState),
        "over": ", ".join(one for one in RunState if one.over),
    }
    for name, words in places.items():
        text = text.replace("{{" + name + "}}", words)
    return text
