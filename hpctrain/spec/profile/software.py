"""Software of a cluster profile: interpreter, modules, variables of the fabric.

Belongs here: what runs on the compute nodes before the trainer, and around it. Does not belong
here: options of sbatch (`slurm`).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from hpctrain.base.units import ByteSize, Duration
from hpctrain.spec.document import Document
from hpctrain.spec.engines.registry import EngineName
from hpctrain.spec.job_text import (
    JobText,
    SubmitText,
    expanded_names,
    literal_text,
    secret_reason,
)
from hpctrain.spec.run import VariableName

# -- Containers of a cluster profile: launcher, image, mounts and options -----------------------


Launcher = Literal["pyxis", "apptainer", "singularity", "edf", "uenv"]
# Sources: README of NVIDIA/pyxis (0.20), `apptainer exec --help` (1.4), the Container Engine and
# uenv of CSCS (docs.cscs.ch, software/container-engine and software/uenv).
_SRUN_LAUNCHERS = frozenset({"pyxis", "edf", "uenv"})
_APPTAINER_OPTIONS = frozenset({
    "--add-caps", "--apply-cgroups", "--cleanenv", "--disable-cache", "--dns", "--drop-caps",
    "--env-file", "--fakeroot", "--fusemount", "--home", "--hostname",
    "--keep-privs", "--mount", "--no-eval", "--no-home", "--no-init", "--no-mount", "--no-privs",
    "--no-umask", "--overlay", "--scratch", "--security", "--unsquash", "--underlay", "--userns",
    "--workdir", "--writable", "--writable-tmpfs",
})  # fmt: skip
_OPTIONS: dict[str, frozenset[str]] = {
    "pyxis": frozenset({
        "--container-name", "--container-mount-home", "--no-container-mount-home",
        "--container-remap-root", "--no-container-remap-root", "--container-entrypoint",
        "--no-container-entrypoint", "--container-entrypoint-log", "--container-writable",
        "--container-readonly",
    }),
    "apptainer": _APPTAINER_OPTIONS,
    "singularity": _APPTAINER_OPTIONS,
    "edf": frozenset(),
    "uenv": frozenset({"--view", "--repo"}),
}  # fmt: skip
# Options with the field, or the reason, in place of which they are refused.
_OURS = {
    "--container-image": "use `image`",
    "--container-mounts": "use `mounts`",
    "--container-workdir": "hpctrain sets it to the run directory",
    "--container-env": "hpctrain lists the variables of profile and spec there",
    "--container-save": "a run does not change its image",
    "--bind": "use `mounts`",
    "-B": "use `mounts`",
    "--nv": "use `gpu: nv`",
    "--rocm": "use `gpu: rocm`",
    "--pwd": "hpctrain sets it to the run directory",
    "--cwd": "hpctrain sets it to the run directory",
    "--env": "use `environment`: all users of a node can read a command line",
    # With each of the three a rank has a /dev/shm of its own, in spite of any `--bind` (1.4.5).
    "--compat": "ranks of one node share memory; use `--cleanenv` and `--no-mount=home,tmp`",
    "--contain": "ranks of one node share memory; use `--no-mount=home,tmp`",
    "--containall": "ranks of one node share memory and process ids; use `--no-mount=home,tmp`",
    "--ipc": "ranks of one node share memory",
    "--pid": "hpctrain reads the processes of its ranks",
    "--environment": "use `image`",
    "--uenv": "use `image`",
}


def container_option_problem(launcher: Launcher, option: str) -> str | None:
    """Return why a launcher of containers may not have an option; None if it may."""
    name = option.partition("=")[0]
    if name in _OURS:
        return f"`{name}` cannot be set here: {_OURS[name]}"
    if not name.startswith("--"):
        return f"`{option}` is no option: write `--name` or `--name=value`"
    if name not in _OPTIONS[launcher]:
        known = ", ".join(sorted(_OPTIONS[launcher])) or "none"
        return f"{launcher} takes no option `{name}`; it takes {known}"
    return None


class ContainerProfile(Document):
    """Image and launcher; the options go on the `srun` line, never on sbatch."""

    launcher: Launcher = Field(
        description="What starts the container: pyxis (with enroot), apptainer, singularity, or "
        "edf and uenv of CSCS"
    )
    image: JobText = Field(
        min_length=1,
        description="Image as the launcher takes it; edf: name or file of the environment "
        "definition; the job puts in `$NAME`",
    )
    mounts: tuple[JobText, ...] = Field(
        (), description="SOURCE:TARGET[:OPTIONS] for each mount; the job puts in `$NAME`"
    )
    site_mounts: tuple[SubmitText, ...] | None = Field(
        None,
        description="Directories that the site's own configuration mounts in every container; "
        "with this list an input that nothing mounts is refused, and without it a warning; "
        "`$NAME` is put in where you submit",
    )
    gpu: Literal["nv", "rocm", "none"] | None = Field(
        None, description="apptainer, singularity: option for GPUs; default: by the type of GPU"
    )
    options: tuple[JobText, ...] = Field(
        (),
        description="Further options of the launcher, as `--name` or `--name=value`; the job puts "
        "in `$NAME`",
    )
    cache: JobText | None = Field(
        None,
        description="pyxis: directory on a shared file system; an image of a registry is imported "
        "there once, and each node starts from that file; the job puts in `$NAME`",
    )
    python: JobText = Field(
        "python3", description="Interpreter inside the image; the job puts in `$NAME`"
    )

    @field_validator("options")
    @classmethod
    def _launcher_takes_them(
        cls, options: tuple[str, ...], info: ValidationInfo
    ) -> tuple[str, ...]:
        for option in options if "launcher" in info.data else ():
            if problem := container_option_problem(info.data["launcher"], option):
                raise ValueError(problem)
        return options

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gpu is not None and self.starts_by_srun:
            raise ValueError(f"`gpu` is for apptainer and singularity, not for {self.launcher}")
        if self.mounts and self.launcher in ("edf", "uenv"):
            where = "the environment definition" if self.launcher == "edf" else "the uenv"
            raise ValueError(f"`mounts` stand in {where} with launcher {self.launcher}")
        if self.cache is not None and self.launcher != "pyxis":
            raise ValueError("`cache` is for images that enroot imports, with launcher pyxis")
        return self

    @property
    def starts_by_srun(self) -> bool:
        """Whether options of srun start it; else a command in front of the trainer does."""
        return self.launcher in _SRUN_LAUNCHERS

    @property
    def registry_image(self) -> bool:
        """Whether enroot fetches the image from a registry (pyxis README: a path begins so)."""
        return self.launcher == "pyxis" and not self.image.startswith(("/", ".", "$"))

    @property
    def clean_environment(self) -> bool:
        """Whether variables outside the container are unset inside."""
        return "--cleanenv" in self.options

    @property
    def not_mounted(self) -> frozenset[str]:
        """List what apptainer is told not to mount: `home`, `tmp` and other words of it."""
        words = {"home"} if "--no-home" in self.options else set()
        for option in self.options:
            name, _, value = option.partition("=")
            words |= {*value.split(",")} if name == "--no-mount" else set()
        return frozenset(words)

    @property
    def mounted_directories(self) -> tuple[str, ...] | None:
        """List what has the same path inside and outside; None where that depends on the job."""
        found = []
        for mount in self.mounts:
            text = literal_text(mount)
            if text is None:
                assert expanded_names(mount)
                return None
            source, _, rest = text.partition(":")
            if source.rstrip("/") == (rest.partition(":")[0] or source).rstrip("/"):
                found.append(source)
        return (*found, *(self.site_mounts or ()))


# ----------------------------------------------------------------------------------------------


LimitValue = Annotated[int, Field(ge=0)] | Literal["unlimited"]


class ModulesProfile(Document):
    """Environment modules (Lmod or Tcl)."""

    init: JobText | None = Field(
        None,
        min_length=1,
        description="File that the job reads first, which makes `module` known; default: it looks "
        "where module systems are usually found; the job puts in `$NAME`",
    )
    purge: bool | Literal["force"] = Field(
        False,
        description="Run `module purge` first; force: `module --force purge`, which also unloads "
        "modules that a site has made sticky",
    )
    use: tuple[JobText, ...] = Field(
        (), description="Directories for `module use`, in this order; the job puts in `$NAME`"
    )
    load: tuple[JobText, ...] = Field(
        (), description="Modules to load, in this order; the job puts in `$NAME`"
    )


ActivateKind = Literal["conda", "mamba", "micromamba", "venv", "uv", "spack", "easybuild"]


class ActivateProfile(Document):
    """The software environment that a job activates after the modules: one of its kind."""

    conda: JobText | None = Field(
        None,
        min_length=1,
        description="`conda activate` of this name or directory; the job puts in `$NAME`",
    )
    mamba: JobText | None = Field(
        None,
        min_length=1,
        description="`mamba activate` of this name or directory; the job puts in `$NAME`",
    )
    micromamba: JobText | None = Field(
        None,
        min_length=1,
        description="`micromamba activate` of this name or directory; the job puts in `$NAME`",
    )
    venv: JobText | None = Field(
        None, min_length=1, description="Directory that has `bin/activate`; the job puts in `$NAME`"
    )
    uv: JobText | None = Field(
        None,
        min_length=1,
        description="Directory of a project of uv, which has `.venv/bin/activate`; the job puts in "
        "`$NAME`",
    )
    spack: JobText | None = Field(
        None,
        min_length=1,
        description="`spack env activate` of this name or directory; the job puts in `$NAME`",
    )
    easybuild: JobText | None = Field(
        None,
        min_length=1,
        description="Module that EasyBuild has made below `root`, such as "
        "`PyTorch/2.6.0-foss-2024a`; the job puts in `$NAME`",
    )
    root: JobText | None = Field(
        None,
        min_length=1,
        description="Where the tool itself is installed, such as `$WORK/miniforge3`, or "
        "EasyBuild's prefix; default: its command is on PATH, as a module puts it there; the "
        "job puts in `$NAME`",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [kind for kind, name in self._kinds().items() if name is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(self._kinds())}")
        if self.root is not None and given[0] in ("venv", "uv"):
            raise ValueError(f"`root` is not for {given[0]}, which is found by its directory")
        return self

    @property
    def chosen(self) -> tuple[ActivateKind, str]:
        """The kind of environment and its name."""
        return next((kind, name) for kind, name in self._kinds().items() if name is not None)

    def _kinds(self) -> dict[ActivateKind, str | None]:
        return {
            "conda": self.conda,
            "mamba": self.mamba,
            "micromamba": self.micromamba,
            "venv": self.venv,
            "uv": self.uv,
            "spack": self.spack,
            "easybuild": self.easybuild,
        }


class UlimitsProfile(Document):
    """Limits of each process (bash(1), ulimit); a limit that cannot be set ends the attempt."""

    core: LimitValue = Field(
        0, description="`-c`, 1024 B; 0: no core files, of which each rank would write one"
    )
    memlock: LimitValue | None = Field(
        None, description="`-l`, KiB; InfiniBand needs unlimited; absent: as it is"
    )
    nofile: int | None = Field(None, ge=256, description="`-n`, open files; absent: as it is")
    stack: LimitValue | None = Field(None, description="`-s`, KiB; absent: as it is")

    def options(self) -> tuple[tuple[str, str], ...]:
        """List the options of ulimit and their values."""
        given = (("-c", self.core), ("-l", self.memlock), ("-n", self.nofile), ("-s", self.stack))
        return tuple((option, str(value)) for option, value in given if value is not None)


Command = Annotated[tuple[JobText, ...], Field(min_length=1)]


class CommandsProfile(Document):
    """Commands of the site around the trainer.

    Each is a list of words and not evaluated by a shell; `$NAME` is put in where the command runs.
    One that fails, or takes too long, is named by `hpctrain why`.
    """

    time_limit: Duration = Field(
        Duration(300), gt=0, description="How long each command may take; the wrapper has no limit"
    )
    job: tuple[Command, ...] = Field(
        (),
        description="Once for each attempt, on the first node, before the first launch; one that "
        "fails stops the run; the job puts in `$NAME`",
    )
    node: tuple[Command, ...] = Field(
        (),
        description="Once on each node before the ranks of a launch, in a short job step, outside "
        "of any container, such as `[/sw/check-imex]`. Nodes on which it fails are avoided; where "
        "it fails on all, the run stops. Not on the node of a router; the job puts in `$NAME`",
    )
    task: tuple[Command, ...] = Field(
        (),
        description="In the shell that the trainer then replaces, in each task, such as `[source, "
        "/sw/rails.sh]`; outside of apptainer and singularity, inside of pyxis, EDF and uenv, "
        "which begin before the task. One that fails ends the task; the job puts in `$NAME`",
    )
    wrapper: tuple[JobText, ...] = Field(
        (),
        description="Words before each rank, such as `[numactl, --cpunodebind=$SLURM_LOCALID]`; "
        "inside or outside of a container as `task`. For ranks that srun starts: not with launcher "
        "torchrun, and not for services; the job puts in `$NAME`",
    )
    node_after: tuple[Command, ...] = Field(
        (),
        description="Once on each node after the ranks have ended, even if they failed; one that "
        "fails is a warning. Not while Slurm ends the job: that is what its epilog is for; the job "
        "puts in `$NAME`",
    )

    def commands(self) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Map the name of each list of commands to the list."""
        names = ("job", "node", "task", "node_after")
        return {name: getattr(self, name) for name in names}


class SoftwareProfile(Document):
    """Where hpctrain and the engine live on the compute nodes."""

    login_shell: bool = Field(
        False,
        description="Run jobs in a login shell (`#!/bin/bash -l`), which reads /etc/profile and "
        "files of the user, where only such a shell has what jobs need",
    )
    python: JobText | None = Field(
        None,
        min_length=1,
        description="Interpreter; default: with `activate` the `python3` that it puts on PATH, "
        "else the submitting one; the job puts in `$NAME`",
    )
    container: ContainerProfile | None = Field(None, description="Absent: no container")
    modules: ModulesProfile | None = Field(None, description="Absent: no environment modules")
    activate: ActivateProfile | None = Field(
        None,
        description="Environment of conda, mamba, micromamba, venv, uv, spack or EasyBuild that "
        "the job activates after the modules, such as `{conda: ml, root: $WORK/miniforge3}`",
    )
    setup: SubmitText | None = Field(
        None,
        min_length=1,
        description="Absolute path of a shell file that the job reads after the modules and "
        "`activate`; the job ends at a line of it that fails. Its SHA-256 is in the script; "
        "`$NAME` is put in where you submit",
    )
    unset: tuple[VariableName, ...] = Field((), description="Variables to remove from the job")
    ulimits: UlimitsProfile = UlimitsProfile()
    scratch: JobText | None = Field(
        None,
        description="Local directory of each node for TMPDIR and the caches of compilers, such as "
        "`/tmp/$USER-$SLURM_JOB_ID`; the job puts in `$NAME`; removing it is up to the site's "
        "epilog",
    )
    scratch_capacity: ByteSize | None = Field(
        None,
        gt=0,
        description="Room for copies of data (`data.stage`) on the disk behind `scratch`; absent: "
        "it is no disk, or too small, and specs that ask for copies are refused",
    )
    commands: CommandsProfile = CommandsProfile()
    transformer_engine: bool = Field(
        True,
        description="TransformerEngine is installed there: `engine.implementation: auto` uses it",
    )

    def interpreter(self, submitting: str) -> str:
        """Return the interpreter of jobs, as JobText; `submitting` is the path of this one."""
        if self.python is not None:
            return self.python
        return "python3" if self.activate is not None else submitting.replace("$", "$$")

    @model_validator(mode="after")
    def _capacity_is_of_something(self) -> Self:
        if self.scratch_capacity is not None and self.scratch is None:
            raise ValueError("`scratch_capacity` needs `scratch`, the directory that it is about")
        return self


class FabricVariable(Document):
    """One environment variable of the fabric and why the site sets it."""

    name: VariableName = Field(description="Name of the variable")
    value: JobText | None = Field(
        None,
        description="Text, so put numbers in quotes; the job puts in `$NAME`, `$$` is a dollar",
    )
    per_local_rank: tuple[JobText, ...] = Field(
        (),
        description="Instead of `value`: one for each task of a node, by SLURM_LOCALID; "
        "the job puts in `$NAME`",
    )
    prepend: bool = Field(
        False, description="Put the value before the one that the job has, with a `:` between"
    )
    reason: str = Field(min_length=3, description="Why the site sets it")
    engines: tuple[EngineName, ...] = Field(
        (), description="Only for runs of these engines; default: for all"
    )

    @model_validator(mode="after")
    def _one_value(self) -> Self:
        if (self.value is None) != bool(self.per_local_rank):
            raise ValueError(f"{self.name}: give exactly one of `value` and `per_local_rank`")
        for value in (self.value or "", *self.per_local_rank):
            if reason := secret_reason(self.name, value):
                raise ValueError(f"{reason}, which everybody sees: specs `inherit` it by name")
        if self.per_local_rank and self.prepend:
            raise ValueError(f"{self.name}: `prepend` and `per_local_rank` exclude each other")
        return self

    def concerns(self, engine: str) -> bool:
        """Whether the site sets it for runs of this engine."""
        return not self.engines or engine in self.engines
