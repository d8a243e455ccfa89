"""Write a run for a cluster without Slurm, from the plan that `submit` would use.

Belongs here: planning by `prepare`, facts of both documents for the files, and writing them. Does
not belong here: the text of the files (`hpctrain.export`), metrics of runs (see `export`).
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import UsageError
from hpctrain.export.exported_run import ExportedFile, ExportInputs, exported_run
from hpctrain.export.host_files import HostSettings, host_files, missing_on_hosts
from hpctrain.export.jobset import jobset_text
from hpctrain.export.lost_settings import LostSetting
from hpctrain.export.pod import missing_in_pods
from hpctrain.export.pod_settings import (
    PodSettings,
    check_label,
    claim_mount,
    gpu_resource,
    node_label,
    registry_image,
    resource_count,
    run_label,
)
from hpctrain.export.trainjob import trainjob_text
from hpctrain.job.prepare import Prepared, input_paths
from hpctrain.job.render.containers import run_container
from hpctrain.slurm.parse import expand_hosts
from hpctrain.version import __version__

# The same as `name` of a spec.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TEXTS = {"jobset": jobset_text, "trainjob": trainjob_text}


@dataclass(frozen=True)
class PodOptions:
    """Options of the command line about Kubernetes, as they were written."""

    name: str | None = None
    image: str | None = None
    run_claim: str | None = None
    volumes: tuple[str, ...] = ()
    secret: str | None = None
    namespace: str | None = None
    queue: str | None = None
    resources: tuple[str, ...] = ()
    node_labels: tuple[str, ...] = ()
    host_network: bool = False
    most_restarts: int | None = None


@dataclass(frozen=True)
class Export:
    """The files of an export, and what the run loses by it."""

    files: tuple[ExportedFile, ...]
    lost: tuple[LostSetting, ...]


def export_pods(prepared: Prepared, kind: str, options: PodOptions) -> Export:
    """Write a run for Kubernetes, as a `jobset` or a `trainjob`.

    Raises UsageError for options that Kubernetes would refuse, InvalidInputError for a run without
    an image of a registry, LimitError for settings that are too large.
    """
    settings = _pod_settings(prepared, options)
    inputs = _inputs(prepared)
    run = exported_run(inputs, "kubernetes", host_network=options.host_network)
    text = _TEXTS[kind](run, settings)
    lost = (*run.lost, *missing_in_pods(run, settings))
    return Export((ExportedFile(f"{settings.name}-{kind}.yaml", text),), lost)


def export_hosts(
    prepared: Prepared, hosts: str | None, directory: Path, runs: Path, name: str | None = None
) -> Export:
    """Write a run for hosts; the files are to be in `directory`, the run in RUNS/NAME.

    Raises UsageError for another number of hosts than nodes, and for names that are none.
    """
    if hosts is None:
        raise UsageError(
            f"the plan has {prepared.plan.nodes}: which hosts are these?",
            hint="--hosts node[1-4], the nearest neighbours beside each other",
        )
    try:
        names = expand_hosts(hosts)
    except ValueError as error:
        raise UsageError(f"--hosts: {error}") from error
    run_name = name or prepared.spec.document.name
    if not _NAME.fullmatch(run_name):
        raise UsageError(f"--name: `{run_name}` is no name of a run")
    run = exported_run(_inputs(prepared), "hosts")
    settings = HostSettings(
        hosts=names,
        directory=str(directory.absolute()),
        run_directory=str(runs.absolute() / run_name),
        python=prepared.profile.document.software.python or prepared.facts.python,
    )
    return Export(host_files(run, settings), (*run.lost, *missing_on_hosts(run)))


def write_files(export: Export, directory: Path) -> list[Path]:
    """Write all files into `directory`, which is made. Raises UsageError where that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in export.files:
            replace_text(directory / file.name, file.text)
    except OSError as error:
        raise UsageError(f"{directory} cannot be written: {error.strerror}") from error
    return [directory / file.name for file in export.files]


def _pod_settings(prepared: Prepared, options: PodOptions) -> PodSettings:
    spec, profile = prepared.spec.document, prepared.profile.document
    nodes = prepared.plan.nodes.nodes
    if options.run_claim is None:
        raise UsageError(
            "--run-claim is missing: checkpoints have to outlive the pods",
            hint="name a PersistentVolumeClaim with access mode ReadWriteMany",
        )
    container = run_container(spec.container, profile.software.container)
    named = {
        "--namespace": options.namespace,
        "--secret": options.secret,
        "--queue": options.queue,
    }
    for option, given in named.items():
        if given is not None:
            check_label(option, given)
    return PodSettings(
        name=check_label("--name", options.name, nodes)
        if options.name is not None
        else run_label(spec.name, nodes),
        image=options.image or registry_image(container, profile.name),
        python=container.python if container is not None else "python3",
        run_claim=check_label("--run-claim", options.run_claim),
        gpu_resource=gpu_resource(profile),
        namespace=options.namespace,
        volumes=tuple(map(claim_mount, options.volumes)),
        secret=options.secret,
        queue=options.queue,
        resources=tuple(map(resource_count, options.resources)),
        node_labels=tuple(map(node_label, options.node_labels)),
        host_network=options.host_network,
        most_restarts=options.most_restarts,
    )


def _inputs(prepared: Prepared) -> ExportInputs:
    # copies of data lie below the scratch directory of a Slurm job
    train = prepared.train.model_copy(update={"stage_data": False})
    settings = json.loads(train.model_dump_json())
    weights = prepared.spec.document.model.pretrained
    initial = os.path.abspath(weights) if weights else None
    read = (*input_paths(train), train.data_cache, initial)
    return ExportInputs(
        job=prepared.job,
        gpu_variables=prepared.facts.gpu_variables,
        # only ASCII, which every reader of YAML takes as it is
        train_json=json.dumps(settings, indent=1) + "\n",
        inputs=tuple(dict.fromkeys(path for path in read if path)),
        measures_interval=train.save_interval_auto,
        mttf_seconds=prepared.supervise.mttf_seconds,
        stop_seconds=prepared.supervise.warning_seconds,
        origin=f"hpctrain {__version__} · spec {prepared.spec.digest[:12]} · profile "
        f"{prepared.profile.document.name} {prepared.profile.digest[:12]}",
    )
