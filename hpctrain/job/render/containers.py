"""Chooses the words that start a container around each rank. Pure.

Belongs here: options of srun for pyxis, EDF and uenv, the command of apptainer and singularity, and
the import of an image. Does not belong here: which options a site may add
(`hpctrain.spec.profile.software`), all other options of srun (`script`).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from hpctrain.plan.job import JobSpec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.software import ContainerProfile
from hpctrain.spec.run import ContainerSpec

# Slurm's name of AMD's accelerators: mi100, mi250x, mi300a.
_AMD = re.compile(r"(?i)^(amd_)?(instinct_)?mi\d{2,3}")
# The variables of a task that only the task has: Slurm's and the launch's. bash(1), `compgen -e`.
# apptainer.org, user guide, Environment and Metadata: APPTAINERENV_NAME sets NAME inside, whatever
# the image and apptainer themselves set, after a shell has evaluated the value: NO_EVAL prevents
# that, and versions that do not know it ignore it.
_PASS_ENVIRONMENT = (
    "export {prefix}_NO_EVAL=1; while read -r name; do case $name in {patterns}) "
    'export "{prefix}ENV_$name=${{!name}}";; esac; done < <(compgen -e); exec "$@"'
)
_TASK_VARIABLES = (
    *("SLURM_*", "SLURMD_*", "HPCTRAIN_*", "MASTER_*"),
    *("CUDA_*", "ROCR_*", "HIP_*", "NCCL_*"),
)
# The image's, and apptainer's.
_NOT_PASSED = frozenset({"PATH", "HOME"})


@dataclass(frozen=True)
class ContainerWords:
    """What the template adds for a container; all words are JobText.

    `srun` are options of srun, `command` is what stands in front of the trainer, `image_import` the
    arguments of the program that imports the image, None where there is nothing to import.
    """

    srun: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    image_import: tuple[str, ...] | None = None

    @property
    def in_shell(self) -> bool:
        """Whether a shell, which expands variables of its own, starts the container."""
        return self.command[:1] == ("bash",)


def container_problems(spec: JobSpec, profile: ClusterProfile) -> list[tuple[str, str, str]]:
    """List what the spec's container cannot be at this site: field, message and hint."""
    container, own = profile.software.container, spec.container
    if own is None:
        return []
    if container is None:
        message = f"profile {profile.name} has no `software.container` to start one"
        return [("container", message, "remove `container`, or ask the site")]
    if own.mounts and container.launcher in ("edf", "uenv"):
        message = f"launcher {container.launcher} takes no mounts"
        return [("container.mounts", message, "they stand in the file that `image` names")]
    return []


def run_container(
    own: ContainerSpec | None, container: ContainerProfile | None
) -> ContainerProfile | None:
    """Return the container of a run: the site's, with the image and mounts of the run's `own`.

    Of a spec without `container_problems`.
    """
    if own is None or container is None:
        return container
    changes = {
        "image": own.image or container.image,
        "python": own.python or container.python,
        "mounts": (*container.mounts, *own.mounts),
    }
    return container.model_copy(update=changes)


def has_amd_gpus(profile: ClusterProfile) -> bool:
    """Whether the GPUs are AMD's, by Slurm's name of their type."""
    return _AMD.match(profile.gpu.type) is not None


def container_words(
    container: ContainerProfile | None, profile: ClusterProfile, variables: tuple[str, ...]
) -> ContainerWords:
    """Choose the words for one container; `variables` are the names that ranks need.

    Dollar signs are those of JobText, so that `$PWD` is the run directory.
    """
    if container is None:
        return ContainerWords()
    if container.launcher == "pyxis":
        image, image_import = container.image, None
        if container.cache is not None and container.registry_image:
            # two images never share a file
            plain = re.sub(r"[^A-Za-z0-9._-]+", "+", re.sub(r"^[a-z]+://", "", image))
            digest = hashlib.sha256(image.encode()).hexdigest()[:8]
            file = f"{container.cache}/{plain}-{digest}.sqsh"
            address = image if "://" in image else f"docker://{image}"
            image, image_import = file, (address, file)
        options = container.options
        home = any("container-mount-home" in option for option in options)
        return ContainerWords(
            srun=(
                f"--container-image={image}",
                f"--container-mounts={','.join(('$PWD:$PWD', *container.mounts))}",
                "--container-workdir=$PWD",
                # variables of the image would override those of the job otherwise (pyxis README)
                f"--container-env={','.join(name for name in variables if name.isidentifier())}",
                *(() if home else ("--no-container-mount-home",)),
                *options,
            ),
            image_import=image_import,
        )
    if container.launcher == "edf":
        # The definition has a working directory of its own. env(1) of coreutils 8.28.
        return ContainerWords((f"--environment={container.image}",), ("env", "--chdir=$PWD"))
    if container.launcher == "uenv":
        return ContainerWords((f"--uenv={container.image}", *container.options))
    # apptainer and singularity
    default = "rocm" if has_amd_gpus(profile) else "nv"
    gpu = container.gpu or ("none" if profile.gpu.emulated else default)
    words = [container.launcher, "exec", *((f"--{gpu}",) if gpu != "none" else ())]
    words += [*container.options, "--bind", "$PWD", "--pwd", "$PWD"]
    words += [word for mount in container.mounts for word in ("--bind", mount)]
    words.append(container.image)
    # Without --cleanenv, too: else the image's variables win, and LD_LIBRARY_PATH never gets in.
    named = [name for name in variables if name not in _NOT_PASSED]
    patterns = "|".join((*(_TASK_VARIABLES if container.clean_environment else ()), *named))
    shell = _PASS_ENVIRONMENT.format(patterns=patterns, prefix=container.launcher.upper())
    command = ("bash", "-c", shell.replace("$", "$$"), "pass-environment", *words)
    return ContainerWords(command=command)
