"""What a person says about their Kubernetes: image, volumes, queue, limits of names. Pure.

Belongs here: these settings, and checks of each that need no cluster. Does not belong here: the
documents (see `pod`, `jobset`, `trainjob`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from hpctrain.base.errors import InvalidInputError, Problem, UsageError
from hpctrain.job.render.containers import has_amd_gpus
from hpctrain.spec.job_text import literal_text
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.software import ContainerProfile

RUNS_PATH = "/runs"
# RFC 1123, section 2.1, and RFC 1035 for the service of the pods, which begins with a letter.
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_LABEL = 63
# A pod of an indexed Job is NAME-node-0-INDEX-SUFFIX, with five characters for the suffix.
_POD_SUFFIX = len("-node-0-") + len("-abcde")
_RESOURCE = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9][A-Za-z0-9._-]*=[1-9][0-9]*")
_PAIR = re.compile(r"[A-Za-z0-9./_-]+=[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class ClaimMount:
    """A PersistentVolumeClaim and the directory at which pods have it."""

    claim: str
    path: str


@dataclass(frozen=True)
class PodSettings:
    """Settings of the documents that no spec and no profile has.

    `run_claim` holds the run directory. `resources` are further ones of each node, such as
    `rdma/hca`. `secret` has the variables that a spec inherits, under their names.
    """

    name: str
    image: str
    python: str
    run_claim: str
    gpu_resource: str
    namespace: str | None = None
    volumes: tuple[ClaimMount, ...] = ()
    secret: str | None = None
    queue: str | None = None
    resources: tuple[tuple[str, str], ...] = ()
    node_labels: tuple[tuple[str, str], ...] = ()
    host_network: bool = False
    most_restarts: int | None = None

    @property
    def run_directory(self) -> str:
        return f"{RUNS_PATH}/{self.name}"


def run_label(name: str, nodes: int) -> str:
    """Make the name of a spec one that Kubernetes takes for a JobSet of so many nodes."""
    longest = _LONGEST_LABEL - _POD_SUFFIX - len(str(nodes - 1))
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return plain[:longest].rstrip("-")


def check_label(option: str, name: str, nodes: int | None = None) -> str:
    """Return `name` if it is a label; of a JobSet of so many nodes it has to be shorter."""
    suffix = 0 if nodes is None else _POD_SUFFIX + len(str(nodes - 1))
    if not _LABEL.fullmatch(name) or len(name) > _LONGEST_LABEL - suffix:
        raise UsageError(
            f"{option}: `{name}` is no name for Kubernetes",
            hint=f"small letters, digits and `-`, at most {_LONGEST_LABEL - suffix} characters",
        )
    return name


def claim_mount(text: str) -> ClaimMount:
    """Read `CLAIM:/PATH`. Raises UsageError."""
    claim, _, path = text.partition(":")
    whole = PurePosixPath(path)
    if not whole.is_absolute() or ":" in path or whole in (PurePosixPath("/"), PurePosixPath("//")):
        raise UsageError(f"--volume: `{text}`", hint="write CLAIM:/PATH, such as `data:/data`")
    if whole.is_relative_to(RUNS_PATH):
        raise UsageError(f"--volume: {path} is the place of `--run-claim`")
    return ClaimMount(check_label("--volume", claim), str(whole))


def resource_count(text: str) -> tuple[str, str]:
    """Read `NAME=COUNT`. Raises UsageError."""
    if not _RESOURCE.fullmatch(text):
        raise UsageError(f"--resource: `{text}`", hint="write NAME=COUNT, such as `rdma/hca=8`")
    name, _, count = text.rpartition("=")
    return name, count


def node_label(text: str) -> tuple[str, str]:
    """Read `LABEL=VALUE`. Raises UsageError."""
    if not _PAIR.fullmatch(text):
        hint = "write LABEL=VALUE, such as `nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3`"
        raise UsageError(f"--node-selector: `{text}`", hint=hint)
    label, _, value = text.partition("=")
    return label, value


def gpu_resource(profile: ClusterProfile) -> str:
    """Return the name under which device plugins offer the GPUs of the profile."""
    return "amd.com/gpu" if has_amd_gpus(profile) else "nvidia.com/gpu"


def registry_image(container: ContainerProfile | None, profile_name: str) -> str:
    """Return the image of the container of a run as Kubernetes names it.

    enroot writes `REGISTRY#IMAGE`, apptainer `docker://REGISTRY/IMAGE` (their manuals). Raises
    InvalidInputError where the run has no image of a registry.
    """
    hint = "name one by `--image`: with hpctrain, the engine, and what the profile's nodes have"
    if container is None:
        message = f"neither the spec nor profile {profile_name} has a container image"
        raise InvalidInputError([Problem(message, hint=hint)])
    image = literal_text(container.image) or ""
    plain = image.removeprefix("docker://")
    pulled = container.registry_image or image != plain
    if not pulled or not plain or container.launcher in ("edf", "uenv"):
        message = f"image {container.image} is no image of a registry, and pods pull theirs"
        raise InvalidInputError([Problem(message, hint=hint)])
    return plain.replace("#", "/", 1)
