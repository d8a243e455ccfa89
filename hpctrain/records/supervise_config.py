"""The settings of the supervisor (`supervise.json`), written once when a run is submitted.

Belongs here: the document and its reader. Does not belong here: what the settings lead to (see
`hpctrain.judge`), and waiting for the file (`hpctrain.supervise.loop`).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpctrain.base.errors import InvalidInputError, Problem, StorageError
from hpctrain.base.formats import refuse_newer

DEFAULT_POLL_SECONDS = 10.0
# Fields of earlier versions, by which nobody acts any more.
_FORMER = frozenset({"url_env", "token_env", "other_nodes", "storm_window_seconds"})


class Settings(BaseModel):
    """Base of settings; unlike in records, an unknown field is an error: nobody would act on it."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _without_former_fields(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in _FORMER}


_Kind = TypeVar("_Kind", bound=Settings)


class SubmitSettings(Settings):
    """How jobs are submitted: the words in the place of `sbatch`.

    `cluster`: the one that Slurm's commands have to name from outside of a job (`--clusters`); None
    where they need not.
    """

    words: tuple[str, ...] = ("sbatch",)
    cluster: str | None = None


class LaunchShape(Settings):
    """One size at which the run can be launched: the planned one, or a smaller one."""

    nodes: int
    tasks: int
    train_config: str


class RollbackSettings(Settings):
    """What is done about a loss that is not finite or jumps; see `spec.run.RollbackSpec`."""

    act: bool = False
    checkpoints: int = 1
    skip_steps: int = 1


class GroupSettings(Settings):
    """An axis whose groups ought to be under one leaf: so many `ranks`, `stride` apart."""

    axis: str
    stride: int
    ranks: int


class TopologySettings(Settings):
    """What the supervisor compares with the nodes of its job.

    `groups`: axes of several nodes that the plan has under one leaf switch or in one block.
    `thin_uplinks`: leaves have less bandwidth up than down, so rings ought to cross few borders.
    Seconds of a step as planned, and with no two nodes together; None where time is not predicted.
    """

    plugin: Literal["tree", "block"]
    gpus_per_node: int
    groups: tuple[GroupSettings, ...] = ()
    thin_uplinks: bool = False
    step_seconds: float | None = None
    scattered_step_seconds: float | None = None


class ChannelSettings(Settings):
    """One way to tell people; the paths are absolute. `name` is unique among those of a run."""

    name: str
    kind: Literal["slack", "webhook", "mail"]
    url_file: str | None = None
    token_file: str | None = None
    to: tuple[str, ...] = ()
    sendmail: str = "/usr/sbin/sendmail"


class NotifySettings(Settings):
    """Whom the run tells about which events; see `spec.notify.NotifySpec`.

    `quiet_minutes` are begin and end of the quiet hours in minutes after midnight of `time_zone`.
    At most `most_messages` are sent per channel within `window_seconds`.
    """

    channels: tuple[ChannelSettings, ...]
    on: tuple[str, ...]
    quiet_minutes: tuple[int, int] | None = None
    time_zone: str = "UTC"
    even_at_night: tuple[str, ...] = ()
    most_messages: int = 6
    window_seconds: float = 3600.0
    queue_limit_seconds: float | None = None


class MetricsSettings(Settings):
    """Where a job exports metrics: a directory of node_exporter, an endpoint, or both.

    `ports`: the first and the last that the endpoint may take; None: any. `address`: what it
    listens on; None: every address of its node.
    """

    textfile: str | None = None
    endpoint: bool = False
    ports: tuple[int, int] | None = None
    address: str | None = None


class CommandSettings(Settings):
    """How many commands of the site `commands.sh` has for each part, and how long each may take."""

    limit_seconds: float
    job: int = 0
    node: int = 0
    node_after: int = 0


class SuperviseConfig(Settings):
    """Written once at submit time; durations in seconds.

    `launcher`: what srun's tasks are: ranks, agents of our engines, or agents of a trainer of its
    own. These follow files: some plugins of Slurm send a signal to every process of a step
    (proctrack/linuxproc), and a trainer that does not catch it would die.
    `target_step`: None where the run ends with a file and not at a step. `ramp`: where the batch
    grows, (number of steps, their time as a share of a whole step's) of each smaller batch.
    `life`: what shows that ranks are alive, and is missing for `stall_seconds` in a hang: their
    steps, or anything that a trainer without steps prints or writes.
    `shapes` is ordered from the planned size to the smallest; empty means the size in the script
    only. `budgets` holds only the numbers that the spec sets (see
    `hpctrain.judge.policy.RETRIES` for the others). `mttf_seconds` is the expected time
    between failures of the whole run, before it has had any. `inputs` are the files and directories
    that every node must be able to read. `warning_seconds` is how long before the time limit Slurm
    warns, which is what a stop may take; 0 if it is not known. No command that waits for the run
    asks Slurm more often than every `poll_seconds`. Logs and exit records of the newest
    `keep_launches` are not packed (0: of all launches). `topology`: None where Slurm knows
    neither leaves nor blocks, or the job has one node. The jobs of
    the run inherit `submit_variables` from where they are submitted; None: all. `master_address` is
    the form of MASTER_ADDR (`ip`, or a name with `{node}`), `master_ports` the first and the last
    MASTER_PORT. `image` is the image of the container in which the ranks run, as the script names
    it. `notify`: None where the run tells nobody. `tracking`: a process beside the launches copies
    metrics to TensorBoard or W&B; `metrics`: another one exports them from the job. `commands`:
    None where the site has none around the trainer. `serves`: the launches are those of a replica
    of a service: they have no checkpoints, and a launch is progress once it has answered requests
    for `served_progress_seconds`.
    """

    schema_version: Literal[1] = 1
    run_id: str
    target_step: int | None
    ramp: tuple[tuple[int, float], ...] = Field((), exclude_if=lambda ramp: not ramp)
    launcher: Literal["srun", "torchrun", "agent"] = "srun"
    continuation: Literal["requeue", "chain", "singleton", "array", "none"]
    continuation_jobs: int = 8
    failures_without_progress: int
    stall_seconds: float
    setup_stall_seconds: float
    life: Literal["steps", "output"] = "steps"
    kill_wait_seconds: float
    warning_seconds: float = 0.0
    verify: Literal["auto", "size", "sha256"]
    cluster: str = ""
    budgets: dict[str, int] = Field(default_factory=dict)
    storm_failures: int = 5
    storm_window_seconds: ClassVar[float] = 1800.0
    learn_stalls: bool = True
    slow_rank: float = 1.2
    speed_check: Literal["off", "report", "exclude"] = "off"
    exclude_nodes: Literal["observe", "act"] = "observe"
    rollback: RollbackSettings = RollbackSettings()
    shapes: tuple[LaunchShape, ...] = ()
    spare_nodes: int = 0
    cluster_nodes: int = 0
    node_ledger: str | None = None
    mttf_seconds: float | None = None
    inputs: tuple[str, ...] = ()
    submit_variables: tuple[str, ...] | None = None
    submission: SubmitSettings = SubmitSettings()
    master_address: str | None = None
    master_ports: tuple[int, int] | None = None
    poll_seconds: float = DEFAULT_POLL_SECONDS
    keep_launches: int = 0
    topology: TopologySettings | None = None
    image: str | None = None
    notify: NotifySettings | None = None
    tracking: bool = False
    metrics: MetricsSettings | None = None
    commands: CommandSettings | None = None
    serves: bool = False
    served_progress_seconds: float = 600.0

    @property
    def step_growth(self) -> float:
        """How many times as long as the step before it a step may be, because the batch grows."""
        shares = [share for _, share in self.ramp] + [1.0]
        return max((after / before for before, after in pairwise(shares)), default=1.0)


def read_supervise_config(path: Path) -> SuperviseConfig:
    """Read the settings of the supervisor.

    Raises StorageError when the file cannot be read, NewerFormatError when a newer hpctrain has
    written it, InvalidInputError when it is no such file.
    """
    return read_settings(path, SuperviseConfig, "supervise.json")


def read_settings(path: Path, schema: type[_Kind], name: str) -> _Kind:
    """Read settings whose file is called `name`; raises as `read_supervise_config` does."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return schema.model_validate_json(text)
    except ValidationError as error:
        refuse_newer(path, text, schema)
        problem = Problem(f"cannot be read: not a {name}", str(path))
        raise InvalidInputError([problem]) from error


def known_supervise_config(path: Path) -> SuperviseConfig | None:
    """The settings where they only add to an answer; None when they cannot be read.

    Raises NewerFormatError when a newer hpctrain has written them.
    """
    try:
        text = path.read_bytes()
    except OSError:
        return None
    try:
        return SuperviseConfig.model_validate_json(text)
    except ValidationError:
        refuse_newer(path, text, SuperviseConfig)
        return None
