"""The spec of a run whose trainer is somebody's own program, and the adapters of known frameworks.

`trainer:` stands in place of model, data, batch, optimizer and engine. What is known of a framework
(how its checkpoints look, when one is complete, which signal saves, what tells its steps) is an
adapter, a file of the same fields, which stand under those of the spec. Belongs here: the fields,
and how far a run is supervised by them. Does not belong here: reading files (see `loader`), what
the agent does with them (`hpctrain.trainer`), any framework's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from hpctrain.base.units import Duration
from hpctrain.spec.document import Contradiction, Document
from hpctrain.spec.fields import nearest
from hpctrain.spec.job_text import (
    HINT,
    JobText,
    secret_in_script,
    secret_in_words,
    secret_reason,
)
from hpctrain.spec.notify import NotifySpec
from hpctrain.spec.run import (
    ContainerSpec,
    EnvironmentSpec,
    LoggingSpec,
    MetricsSpec,
    Name,
    ResourcesSpec,
    TrackingSpec,
    VariableName,
)
from hpctrain.spec.supervision import SuperviseSpec

Launch = Literal["srun", "torchrun", "accelerate", "ray", "self"]
SignalName = Literal["TERM", "USR1", "USR2", "INT", "HUP"]
PLACEHOLDERS = ("output", "resume", "resume_step", "run", "nodes", "gpus_per_node")
_PLACE = re.compile(r"\{([a-z_]+)\}")
# Values of one step that a trainer may report, and groups of a regular expression.
REPORTED = ("step", "loss", "learning_rate", "grad_norm", "seconds", "tokens", "samples")
Glob = Annotated[str, Field(min_length=1, pattern=r"^[^\x00\n]+$")]


def _without_nul(word: str) -> str:
    if "\0" in word:
        raise ValueError("a word contains a NUL character")
    return word


# The job puts in `$NAME`; the agent, `{output}` and its kin.
CommandWord = Annotated[JobText, AfterValidator(_without_nul)]


def placeholders_of(text: str) -> tuple[str, ...]:
    """List the placeholders in a word that the agent fills in, in their order."""
    return tuple(name for name in _PLACE.findall(text) if name in PLACEHOLDERS)


class DoneSpec(Document):
    """When the run is done. An exit code of 0 alone is never the end."""

    step: int | None = Field(None, ge=1, description="It has reported or saved this step")
    file: str | None = Field(
        None, min_length=1, description="It has written this file, relative to `{output}`"
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.step is None) == (self.file is None):
            raise ValueError("give exactly one of `step` and `file`")
        return self


class TrackerSpec(Document):
    """A file beside the checkpoints that names the newest complete one."""

    file: str = Field(min_length=1, description="Its name, relative to `{output}`")
    text: str = Field("{step}", min_length=1, description="What it says of the step `{step}`")


class CompleteSpec(Document):
    """What shows that a checkpoint is complete; all that is given must hold.

    In any case the sizes of its files stand still before it counts.
    """

    files: tuple[Glob, ...] = Field((), description="These are there")
    absent: tuple[Glob, ...] = Field((), description="These are not, such as a mark of the writer")
    each_rank: tuple[Glob, ...] = Field(
        (), description="With several ranks: one for each, with its number in place of `{rank}`"
    )
    json_files: tuple[Glob, ...] = Field((), alias="json", description="These are whole JSON")
    safetensors: tuple[Glob, ...] = Field(
        (), description="These are as long as their headers say (format of safetensors)"
    )
    zip: tuple[Glob, ...] = Field(
        (),
        description="These have their directory at the end, as torch.save writes it; `.`: itself",
    )
    dcp: bool = Field(
        False, description="Each file that `.metadata` of torch.distributed.checkpoint names"
    )
    tracker: TrackerSpec | None = Field(
        None, description="A file beside it names it or a later one"
    )

    @property
    def says_when(self) -> bool:
        """Whether there is any rule."""
        return self != CompleteSpec()

    @field_validator("each_rank")
    @classmethod
    def _has_a_rank(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            if "{rank}" not in pattern:
                raise ValueError(f"`{pattern}` has no `{{rank}}`: write a file of all in `files`")
        return patterns


class ForeignCheckpointSpec(Document):
    """Level 1: what a checkpoint of the trainer is, so that the run can resume."""

    path: Glob = Field(
        description="Directory or file with `{step}`, such as `checkpoint-{step}`, relative to "
        "`{output}` or absolute; `*` stands for anything"
    )
    complete: CompleteSpec = Field(
        CompleteSpec(), description="What shows that it is complete; all that is given must hold"
    )
    found: bool = Field(
        False,
        description="The trainer looks for its newest checkpoint itself: the chosen one is put "
        "into `{output}` before it starts",
    )
    keep: int = Field(2, ge=1, description="Newest verified ones that hpctrain keeps")
    keep_every_steps: int | None = Field(None, ge=1, description="Keep these steps for good")
    verify: Literal["auto", "size", "sha256"] = Field(
        "auto", description="Read before a launch, as of other runs"
    )

    @field_validator("path")
    @classmethod
    def _has_a_step(cls, path: str) -> str:
        if PurePosixPath(path).name.count("{step}") != 1 or path.count("{step}") != 1:
            raise ValueError(
                "its last part needs one `{step}`: a checkpoint that is always written over is "
                "damaged by a failure while it is written"
            )
        if ".." in PurePosixPath(path).parts:
            raise ValueError("`..` leads out of `{output}`: write the whole path")
        return path

    @model_validator(mode="after")
    def _can_be_put_back(self) -> Self:
        """Where else it would be put beside those of earlier launches, or nobody knows where."""
        above = str(PurePosixPath(self.path).parent)
        if self.found and (above.startswith("/") or any(char in above for char in "*?[")):
            raise ValueError(
                "`found: true` needs a path below `{output}` whose directories are named in full: "
                "the chosen checkpoint is put there, alone"
            )
        return self


class SaveSignalSpec(Document):
    """Level 2: the signal by which the trainer saves and leaves."""

    save: SignalName = Field(description="Sent to each process as soon as it catches it")
    to: Literal["ranks", "launcher"] = Field(
        "ranks", description="Every rank, or the process of `command`, which hands it on"
    )
    seconds: Duration = Field(Duration(120), gt=0, description="A save and the end after it take")


class ProgressSource(Document):
    """Level 3: one source of steps and what belongs to them. Exactly one of the first five."""

    output: str | None = Field(
        None, description="Regular expression for a line of output, with a group `(?P<step>...)`"
    )
    csv: Glob | None = Field(None, description="Files with a line of names, relative to `{output}`")
    jsonl: Glob | None = Field(None, description="Files with a JSON object a line")
    json_files: Glob | None = Field(
        None, alias="json", description="JSON files, such as in checkpoints"
    )
    tensorboard: Glob | None = Field(None, description="Event files, if TensorBoard is installed")
    rows: str | None = Field(None, description="json: the key of the list of rows")
    step: str = Field("step", min_length=1, description="Name of the step")
    loss: str | None = Field(None, description="Name of the loss; absent: not reported")
    learning_rate: str | None = Field(None, description="Name of the learning rate")
    grad_norm: str | None = Field(None, description="Name of the norm of gradients")
    seconds: str | None = Field(None, description="Name of the seconds of a step")
    tokens: str | None = Field(None, description="Name of the tokens of a step")
    samples: str | None = Field(None, description="Name of the samples since the beginning")
    add: int = Field(0, description="Added to its steps: 1 where it counts from 0")

    @field_validator("output")
    @classmethod
    def _names_a_step(cls, output: str | None) -> str | None:
        if output is None:
            return None
        try:
            found = re.compile(output)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        if "step" not in found.groupindex:
            raise ValueError("it has no group `(?P<step>...)`")
        unknown = sorted(found.groupindex.keys() - {*REPORTED})
        if unknown:
            raise ValueError(f"group `{unknown[0]}` is not known: {', '.join(REPORTED)} are")
        return output

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [self.output, self.csv, self.jsonl, self.json_files, self.tensorboard]
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("give one of `output`, `csv`, `jsonl`, `json`, `tensorboard`")
        return self

    @property
    def names(self) -> dict[str, str]:
        """The name that the source has for each value that it reports."""
        return {one: name for one in REPORTED if (name := getattr(self, one)) is not None}


class TrainerPart(Document):
    """What a spec and an adapter may both say about a trainer."""

    launch: Launch | None = Field(
        None,
        description="srun: a task for each GPU is a rank; torchrun: an agent on each node starts "
        "one for each GPU, with its variables; accelerate: `accelerate launch` on each node; ray: "
        "a cluster of Ray, and the command on its head; self: the command on each node. Default: "
        "torchrun",
    )
    launcher_arguments: tuple[CommandWord, ...] = Field(
        (), description="accelerate, ray: more words for the launcher, such as `--config_file F`"
    )
    checkpoint: ForeignCheckpointSpec | None = Field(
        None, description="Absent: nothing resumes, each launch starts from the beginning"
    )
    signal: SaveSignalSpec | None = Field(
        None, description="Absent: a stop costs the work since the last checkpoint"
    )
    metrics: tuple[ProgressSource, ...] = Field((), description="What tells steps and losses")
    environment: dict[VariableName, str] = Field(
        {}, description="Variables of the trainer, by its adapter"
    )
    unset: tuple[VariableName, ...] = Field((), description="Variables that it must not see")
    needs: tuple[str, ...] = Field((), description="What the command must have, in sentences")
    elastic: bool = Field(False, description="It resumes on another number of nodes")
    talks: bool = Field(False, description="It calls `hpctrain.trainer` (level 4)")

    @property
    def level(self) -> int:
        """How far a run is supervised, from 0 to 4: each level needs the ones before."""
        if self.talks and self.checkpoint is not None:
            return 4
        parts = (self.checkpoint, self.signal, self.metrics)
        return next((number for number, part in enumerate(parts) if not part), len(parts))

    @property
    def tells_steps(self) -> bool:
        """Whether anything tells its steps: then a step that does not come is a hang."""
        return self.talks or bool(self.metrics)


class CheckedPart(Document):
    """With which version of a package an adapter was checked, and how each part of it."""

    package: str = Field(min_length=1)
    version: str = Field(min_length=1)
    resume: Literal["run", "read"] | None = None
    save: Literal["run", "read"] | None = None
    progress: Literal["run", "read"] | None = None
    complete: Literal["run", "read"] | None = None


class Adapter(TrainerPart):
    """What is known of a framework. A file of yours may extend one."""

    title: str = Field(min_length=2, description="As people call it")
    commands: tuple[str, ...] = Field(
        (), description="Words of a command that show it, for `hpctrain adopt`"
    )
    checked: tuple[CheckedPart, ...] = Field(
        (), description="run: seen to work; read: read in the source"
    )
    sources: tuple[str, ...] = Field((), description="Where the rest is from")


class NamedAdapter(Adapter):
    """An adapter as programs get it, with the name by which specs have it."""

    name: str


class TrainerSpec(TrainerPart):
    """Somebody's own program, and what hpctrain may know of it."""

    adapter: str | None = Field(
        None, min_length=1, description="A framework (`hpctrain adapters`), or the path of a file"
    )
    framework: str | None = Field(
        None, description="The adapter that has filled in the rest, as a run records it"
    )
    command: tuple[CommandWord, ...] | None = Field(
        None,
        min_length=1,
        description="Program and arguments, without a shell. `{output}` becomes the directory of "
        "this launch, `{resume}` the checkpoint to resume from; a word with it is left out of a "
        "fresh start, with the option before it. The job puts in `$NAME`",
    )
    script: str | None = Field(
        None,
        min_length=1,
        description="In place of `command`: text for bash, which has `$HPCTRAIN_OUTPUT`, "
        "`$HPCTRAIN_CHECKPOINT` (empty in a fresh start) and `$HPCTRAIN_RESUME_STEP`",
    )
    directory: str = Field(
        ".", min_length=1, description="Where it runs, relative to the directory of the spec"
    )
    done: DoneSpec
    silence: Duration | None = Field(
        None,
        gt=0,
        description="A trainer that tells no steps: neither a line of output of any rank nor a "
        "change of a file below `{output}` for so long counts as a hang. Longer than its longest "
        "pause, and minutes at least, because nodes see each other's files late. Absent: a hang "
        "is not noticed",
    )

    @model_validator(mode="after")
    def _silence_only_without_steps(self) -> Self:
        if self.silence is not None and self.tells_steps:
            message = "what tells its steps shows a hang sooner"
            hint = "leave it out: `supervise.stall` limits a step"
            raise Contradiction(("trainer", "silence"), message, hint)
        return self

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        if (self.command is None) == (self.script is None):
            hint = "`command` is a list of words, `script` a text for bash"
            path = ("trainer",) if self.command is None else ("trainer", "script")
            raise Contradiction(path, "give exactly one of `command` and `script`", hint)
        for field, words in self._words_by_field:
            for number, word in enumerate(words):
                for name in re.findall(r"\{([a-z_]{3,20})\}", word):
                    near = nearest(name, PLACEHOLDERS, cutoff=0.75)
                    if name not in PLACEHOLDERS and near:
                        message = f"nothing is put in place of `{{{name}}}`"
                        hint = f"did you mean `{{{near[0]}}}`?"
                        raise Contradiction(("trainer", field, number), message, hint)
        return self

    @property
    def _words_by_field(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return ("command", self.command or ()), ("launcher_arguments", self.launcher_arguments)

    @model_validator(mode="after")
    def _has_no_secret(self) -> Self:
        """Refuse secrets, which would be in the files of the run and in lists of processes."""
        hint = f"{HINT}; the program reads it from there"
        for field, words in self._words_by_field:
            secret = secret_in_words(words)
            if secret is not None:
                raise Contradiction(("trainer", field, secret[0]), secret[1], hint)
        reason = secret_in_script(self.script or "")
        if reason is not None:
            raise Contradiction(("trainer", "script"), reason, hint)
        for name, value in self.environment.items():
            if reason := secret_reason(name, value):
                raise Contradiction(("trainer", "environment", name), reason, HINT)
        return self

    @model_validator(mode="after")
    def _resumes_somehow(self) -> Self:
        """Refuse checkpoints of which the trainer is never told."""
        script, field = self.script or "", "command" if self.script is None else "script"
        told = any({"resume", "resume_step"} & {*placeholders_of(w)} for w in self.command or ())
        told = told or any(name in script for name in ("HPCTRAIN_CHECKPOINT", "HPCTRAIN_RESUME_"))
        where = self.checkpoint
        if where is not None and not where.found and not told and not self.talks:
            message = "nothing tells the trainer where to resume, so it would start over"
            hint = (
                'add its option, such as `--resume, "{resume}"`, or `found: true` in '
                "`trainer.checkpoint` if it looks for its newest checkpoint itself"
            )
            raise Contradiction(("trainer", field), message, hint)
        if told and where is None:
            message = "`{resume}` is always empty: nothing says what a checkpoint is"
            raise Contradiction(("trainer", field), message, "add `trainer.checkpoint`")
        return self

    @property
    def words(self) -> tuple[str, ...]:
        """The command as words, also a script for bash."""
        if self.script is not None:
            return ("bash", "-euo", "pipefail", "-c", self.script)
        assert self.command is not None, "the spec was checked for a command"
        return self.command

    @property
    def starts_by(self) -> Launch:
        return self.launch or "torchrun"


class Level(Document):
    """One level of supervision: the field that brings it, what a run then does, what that gives."""

    number: int
    field: str
    does: str
    gives: str


LEVELS = (
    Level(
        number=0,
        field="trainer.done",
        does="restarts",
        gives="starts again after a failure",
    ),
    Level(
        number=1,
        field="trainer.checkpoint",
        does="resumes",
        gives="continues at its newest checkpoint",
    ),
    Level(
        number=2,
        field="trainer.signal",
        does="saves when asked",
        gives="saves before preemption or time limit",
    ),
    Level(
        number=3,
        field="trainer.metrics",
        does="reports steps",
        gives="progress, loss and time to go are known",
    ),
    Level(
        number=4,
        field="trainer.talks",
        does="agrees on stops",
        gives="all ranks save and stop at the same step",
    ),
)


def levels_of(trainer: TrainerSpec) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """Return the levels that a spec reaches, and above them those whose fields it has as well."""
    given = (True, trainer.checkpoint, trainer.signal, trainer.metrics, trainer.talks)
    above = [level for level in LEVELS[trainer.level + 1 :] if given[level.number]]
    return LEVELS[: trainer.level + 1], tuple(above)


class TrainerRunSpec(Document):
    """A run of somebody's own trainer."""

    name: Name = Field(description="First part of the run id")
    trainer: TrainerSpec = Field(
        description="A program of your own, in place of model, data, batch, optimizer and engine"
    )
    resources: ResourcesSpec
    environment: EnvironmentSpec = EnvironmentSpec()
    container: ContainerSpec | None = Field(
        None, description="Absent: the container of the profile, if there is one"
    )
    logging: LoggingSpec = LoggingSpec()
    tracking: TrackingSpec = TrackingSpec()
    metrics: MetricsSpec = MetricsSpec()
    supervise: SuperviseSpec = SuperviseSpec()
    notify: NotifySpec | None = Field(
        None, description="Whom the run tells about its events; absent: as the profile says"
    )
    after: str | None = Field(
        None, min_length=1, description="Id of a run that has to be done before this one starts"
    )

    @property
    def launcher(self) -> Literal["srun", "node"]:
        """What srun starts: a task for each GPU, or one for each node."""
        return "srun" if self.trainer.starts_by == "srun" else "node"

    @property
    def engine(self) -> TrainerName:
        """What trains, for variables of a site that are for some engines only."""
        return TRAINER

    @model_validator(mode="after")
    def _elastic_only_where_borne(self) -> Self:
        if self.resources.min_nodes is not None and not self.trainer.elastic:
            message = "the trainer is not known to resume on another number of nodes"
            hint = "`trainer.elastic: true` says that it does"
            raise Contradiction(("resources", "min_nodes"), message, hint)
        return self


class TrainerName:
    """The name of a trainer that is no engine of hpctrain."""

    name = "trainer"


TRAINER = TrainerName()


# -- The words of a command, with what a launch has in place of their names. Pure ----------------


def without_resume(words: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out what names a checkpoint, as a launch from the beginning does.

    A word that is nothing but the name takes the option before it along: `--resume {resume}`.
    """
    kept: list[str] = []
    for word in words:
        if not {"resume", "resume_step"} & {*placeholders_of(word)}:
            kept.append(word)
        elif _PLACE.fullmatch(word) and kept and kept[-1].startswith("-") and "=" not in kept[-1]:
            kept.pop()
    return tuple(kept)


def filled_in(words: tuple[str, ...], values: Mapping[str, str]) -> tuple[str, ...]:
    """Put the values of a launch in place of their names; an empty `resume` is left out."""
    if not values.get("resume"):
        words = without_resume(words)
    return tuple(_PLACE.sub(lambda found: values.get(found[1], found[0]), word) for word in words)
