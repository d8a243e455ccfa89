"""Containers of a cluster profile: launcher, image, mounts and options.

Belongs here: fields, and which options a launcher takes or hpctrain sets itself. Does not belong
here: the words on the command line (`hpctrain.job.render.containers`).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from hpctrain.spec.document import Document
from hpctrain.spec.job_text import JobText, expanded_names, literal_text

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
    site_mounts: tuple[str, ...] | None = Field(
        None,
        description="Directories that the site's own configuration mounts in every container; "
        "with this list an input that nothing mounts is refused, and without it a warning",
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
        "there once, and each node starts from that file",
    )
    python: str = Field("python3", description="Interpreter inside the image")

    @field_validator("options")
    @classmethod
    def _options_are_names(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            name = option.partition("=")[0]
            if name in _OURS:
                raise ValueError(f"`{name}` cannot be set here: {_OURS[name]}")
            if not name.startswith("--"):
                raise ValueError(f"`{option}` is no option: write `--name` or `--name=value`")
        return options

    @model_validator(mode="after")
    def _check(self) -> Self:
        for option in self.options:
            name = option.partition("=")[0]
            if name not in _OPTIONS[self.launcher]:
                known = ", ".join(sorted(_OPTIONS[self.launcher])) or "none"
                raise ValueError(f"{self.launcher} takes no option `{name}`; it takes {known}")
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
