"""Chooses the environment of a job: which shell, what it inherits, software, variables. Pure.

`JobEnvironment` is all of it, made from a profile and, if there is one, from the spec of the job;
the blocks `modules` and `environment` of the templates show it, in the order in which things
happen: the shell with what it inherits, modules, `activate`, `setup`, variables. Does not belong
here: the text around (`script`), what runs beside the trainer (`shell_files`).

A command that fails ends the attempt with exit code 78 (sysexits.h, EX_CONFIG): training on with
other software, or without locked memory, would cost more than the attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hpctrain.base.printable_text import printable_line
from hpctrain.job.render.containers import has_amd_gpus, run_container
from hpctrain.job.render.job_options import srun_options
from hpctrain.job.render.quoting import sh_expanded
from hpctrain.plan.job import Job
from hpctrain.spec.job_text import expanded_names
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.software import ActivateKind, FabricVariable, ModulesProfile
from hpctrain.spec.run import EnvironmentSpec

if TYPE_CHECKING:
    from hpctrain.spec.catalogue import GpuVariable


# Read by `hpctrain.train.network_interface`.
RANK_INTERFACE = "HPCTRAIN_INTERFACE"
# bash(1), Shell Variables; sbatch(1), OUTPUT ENVIRONMENT VARIABLES: every batch script has these.
_ALWAYS_SET = frozenset(
    {"BASHPID", "EUID", "HOSTNAME", "OSTYPE", "PPID", "PWD", "RANDOM", "SECONDS", "UID"}
    | {"SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST"}
    | {"SLURM_JOB_PARTITION", "SLURM_JOB_USER", "SLURM_NNODES", "SLURM_SUBMIT_DIR"}
)
# Directories of caches below `software.scratch`: of Triton, torch.compile, CUDA's and ROCm's JIT.
_CACHES = (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor"))
_CACHES_OF_NVIDIA = (("CUDA_CACHE_PATH", "cuda"),)
_CACHES_OF_AMD = (("MIOPEN_USER_DB_PATH", "miopen"), ("MIOPEN_CUSTOM_CACHE_DIR", "miopen"))


@dataclass(frozen=True)
class SetupFile:
    """A shell file of the site, and its SHA-256 (hex) when the script was rendered."""

    path: str
    sha256: str

    @property
    def checksum_line(self) -> str:
        """The line that `sha256sum --check` reads."""
        return f"{self.sha256}  {self.path}"


# Ends the job where a command fails, and says which.
MUST = 'must() { "$@" || { echo "hpctrain: \\`$*\\` failed on $HOSTNAME" >&2; exit 78; }; }'
# Ends the job where a variable that a field of profile or spec contains has no value.
NEEDS = """\
needs() {
  local name
  for name in "${@:2}"; do
    [[ -n ${!name-} ]] || { echo "hpctrain: $1: $name is not set in this job" >&2; exit 78; }
  done
}"""
# Where module systems are found: by the variables with which a login names them, then where Debian
# (lmod 8.6.19, environment-modules 5.2.0), RHEL (module(1) of Fedora) and HPE install them (whose
# places were not checked). One that knows no directory of modules was set up by another file than
# this: Lmod's own init/bash sets none.
_FIND_MODULES = """\
for init in "${MODULESHOME-}"/init/bash "${LMOD_PKG-}"/init/bash \\
    /etc/profile.d/*{lmod,modules}.sh \\
    /usr/share/{lmod/lmod,modules,Modules}/init/bash \\
    /opt/cray/pe/{lmod/lmod,modules/default}/init/bash
do
  if command -v module > /dev/null && [ -n "${MODULEPATH-}" ]; then break; fi
  # shellcheck source=/dev/null
  if [ -r "$init" ]; then source "$init"; fi
done
command -v module > /dev/null || {
  echo "hpctrain: software.modules: no module system was found on $HOSTNAME:" \\
    "name the file that makes 'module' known in software.modules.init" >&2
  exit 78
}"""
# Variables of a login by which a module system is found. Not MODULEPATH: where nodes and login
# nodes have different processors, that of a login has the modules of the wrong ones.
_MODULE_SYSTEM = ("MODULESHOME", "LMOD_PKG")
# How an environment is activated: commands for its name, and for where the tool is installed
# (None: on PATH). Read: mamba-org/mamba pull request 1075 (mamba.sh), reframe-hpc/reframe 2123
# (Spack, also without a root), Gentoo's package of EasyBuild (`modules/all`), Python's venv. The
# rows of conda, uv and of mamba 2 were compared with nothing, and of these only venv was run.
_ACTIVATE: Mapping[ActivateKind, tuple[str, ...]] = {
    "conda": ("source {root}/etc/profile.d/conda.sh", "conda activate {name}"),
    "mamba": (
        "source {root}/etc/profile.d/conda.sh",
        "source {root}/etc/profile.d/mamba.sh",
        "mamba activate {name}",
    ),
    "micromamba": (
        "export MAMBA_ROOT_PREFIX={root}",  # below which it looks for names
        'eval "$({root}/bin/micromamba shell hook --shell bash)"',
        "micromamba activate {name}",
    ),
    "venv": ("source {name}/bin/activate",),
    "uv": ("source {name}/.venv/bin/activate",),
    "spack": ("source {root}/share/spack/setup-env.sh", "spack env activate {name}"),
    "easybuild": ("module use {root}/modules/all", "module load {name}"),
}
# Where the tool is, if it is on PATH.
_ROOT_ON_PATH: Mapping[ActivateKind, str] = {
    "conda": '"$(conda info --base)"',
    "mamba": '"$(conda info --base)"',
    "spack": '"$(spack location --spack-root)"',
}


def module_commands(profile: ClusterProfile) -> tuple[tuple[str, ...], ...]:
    """List the commands that load the site's environment modules, already quoted."""
    software = profile.software
    modules = software.modules
    if modules is None:
        if software.activate is None or software.activate.easybuild is None:
            return ()
        modules = ModulesProfile()
    commands: list[tuple[str, ...]] = []
    if modules.init is None:
        commands.append((_FIND_MODULES,))
    else:
        init = sh_expanded(modules.init)
        commands += needed_names("software.modules.init", modules.init)
        commands.append(("must", "test", "-r", init))
        commands += [("# shellcheck source=/dev/null",), ("source", init)]
    if modules.purge:
        force = ("--force",) if modules.purge == "force" else ()
        commands.append(("must", "module", *force, "purge"))
    for field, words in (("use", modules.use), ("load", modules.load)):
        for word in words:
            commands += needed_names(f"software.modules.{field}", word)
            commands.append(("must", "module", field, sh_expanded(word)))
    return (*commands, ("module", "list")) if modules.load else tuple(commands)


def activate_commands(profile: ClusterProfile) -> tuple[tuple[str, ...], ...]:
    """List the commands that activate the environment of `software.activate`, already quoted."""
    activate = profile.software.activate
    if activate is None:
        return ()
    kind, name = activate.chosen
    field, commands = f"software.activate.{kind}", _ACTIVATE[kind]
    root = _ROOT_ON_PATH.get(kind)
    if activate.root is not None:
        root = sh_expanded(activate.root)
    elif kind == "micromamba":
        commands = tuple(command.replace("{root}/bin/", "") for command in commands[1:])
    elif kind == "easybuild":
        commands = commands[1:]
    filled = [command.format(root=root, name=sh_expanded(name)) for command in commands]
    return (
        *needed_names("software.activate.root", activate.root or ""),
        *needed_names(field, name),
        *(("must", command) for command in filled),
    )


def ulimit_commands(profile: ClusterProfile) -> tuple[tuple[str, ...], ...]:
    """List the commands that set limits of processes; srun takes them along to all tasks."""
    return tuple(("ulimit", *words) for words in profile.software.ulimits.options())


def cache_directories(profile: ClusterProfile) -> tuple[tuple[str, str], ...]:
    """List the variables that name directories below `software.scratch`, TMPDIR first."""
    scratch = profile.software.scratch
    if scratch is None:
        return ()
    own = _CACHES_OF_AMD if has_amd_gpus(profile) else _CACHES_OF_NVIDIA
    caches = (*_CACHES, *(() if profile.gpu.emulated else own))
    return (("TMPDIR", scratch), *((name, f"$TMPDIR/{leaf}") for name, leaf in caches))


def per_rank_variables(job: Job) -> tuple[FabricVariable, ...]:
    """List the site's variables that differ between the tasks of a node, of which one is none."""
    spec = job.spec
    if spec.launcher == "node":
        return ()
    return tuple(
        fabric
        for fabric in job.profile.environment
        if fabric.per_local_rank
        and fabric.concerns(spec.engine.name)
        and fabric.name not in spec.environment.variables
    )


# -- What a job inherits, the variables that its script sets, and all of its environment ---------


# What a clean job inherits besides the names of `environment.inherit`.
INHERITED = ("HOME", "LANG", "PATH", "USER")
# bash(1), Shell Variables; `export UID=0` would end the job after its time in the queue.
_READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
# Settings of a site for the supervisor (see `hpctrain.supervise.preflight`).
_SITE_HOOKS = frozenset({"HPCTRAIN_KERNEL_LOG"})
# srun(1), INPUT ENVIRONMENT VARIABLES: what a site may choose for all of its jobs.
_SRUN_SETTINGS = frozenset(
    {"SLURM_ACCEL_BIND", "SLURM_CPU_BIND", "SLURM_CPU_FREQ_REQ", "SLURM_GPU_BIND"}
    | {"SLURM_HINT", "SLURM_MEM_BIND", "SLURM_NETWORK", "SLURM_THREADS_PER_CORE"}
)
# What ranks have whatever a document says, and whose choice it is; a test finds them in the code.
_OF_RANKS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
)
OWN_VARIABLES: Mapping[str, str] = {
    "MASTER_ADDR": "each launch sets it, in the form of `network.master_address` of the profile",
    "MASTER_PORT": "each launch sets it, to one of `network.ports` of the profile",
    "CUDA_VISIBLE_DEVICES": "each rank has the GPUs that Slurm gives it",
    "RAY_ADDRESS": "it is that of the Ray that the job starts",
    **dict.fromkeys(_OF_RANKS, "each rank has its own, by its place in the job"),
}
FIXED_VARIABLES: Mapping[str, tuple[str, str]] = {
    "HF_HUB_OFFLINE": ("1", "for nothing is downloaded while a job runs"),
    "TRANSFORMERS_OFFLINE": ("1", "for nothing is downloaded while a job runs"),
    "NCCL_GRAPH_REGISTER": ("0", "without which CUDA graphs fail"),
}
# srun(1), --export: [ALL,]<variables>, NIL or NONE. A variable of that name would be read as one of
# these words.
_EXPORT_WORDS = frozenset({"ALL", "NIL", "NONE"})


@dataclass(frozen=True)
class Variable:
    """One exported variable and the reason that is written above it."""

    name: str
    value: str
    reason: str
    prepend: bool = False


_UNBUFFERED = Variable("PYTHONUNBUFFERED", "1", "log lines appear when they are written")


@dataclass(frozen=True)
class JobEnvironment:
    """What a job of a site has before it starts anything: shell, software, limits, variables.

    `bash` stands behind `#!`. Commands are lists of words that are quoted already. `needed` checks
    that what profile and spec contain as `$NAME` has a value, field by field; `must` and `needs`
    (None: nothing to check) are the functions that end the job with exit code 78.
    """

    bash: str
    inheritance_note: str
    must: str
    needs: str | None
    modules: tuple[tuple[str, ...], ...]
    activate: tuple[tuple[str, ...], ...]
    setup: SetupFile | None
    ulimits: tuple[tuple[str, ...], ...]
    unset: tuple[str, ...]
    needed: tuple[tuple[str, ...], ...]
    variables: tuple[Variable, ...]
    scratch: str | None

    @property
    def software_lines(self) -> tuple[str, ...]:
        """List the lines that load software and check names, for scripts of another program."""
        commands = [" ".join(command) for command in (*self.modules, *self.activate, *self.needed)]
        return (*filter(None, (self.needs, self.must)), *commands) if commands else ()


def job_environment(
    profile: ClusterProfile,
    *,
    setup: SetupFile | None = None,
    variables: tuple[Variable, ...] | None = None,
    own: EnvironmentSpec | None = None,
    words: Iterable[tuple[str, str]] = (),
) -> JobEnvironment:
    """Choose the environment of a job of this site, as it is in one partition.

    Of a job without a spec only `setup` need be given. `variables` (None: the site's) are all that
    its script sets, of which a spec has set some (`own`); `words` are fields with the JobText that
    stands behind them.
    """
    software = profile.software
    if variables is None:
        variables = tuple(site_variables(profile).values())
    needed: list[tuple[str, ...]] = []
    given: list[str] = []
    for variable in variables:
        from_spec = own is not None and variable.name in own.variables
        field = f"environment{'.variables' if from_spec else ''}.{variable.name}"
        if not from_spec and variable.value == software.scratch:
            field = "software.scratch"
        needed += needed_names(field, variable.value, given=given)
        given.append(variable.name)
    for field, text in words:
        needed += needed_names(field, text, given=given)
    modules, activate = module_commands(profile), activate_commands(profile)
    checks = any(command[0] == "needs" for command in (*modules, *activate, *needed))
    return JobEnvironment(
        bash="/bin/bash -l" if software.login_shell else "/bin/bash",
        inheritance_note=inheritance_note(profile, own),
        must=MUST,
        needs=NEEDS if checks else None,
        modules=modules,
        activate=activate,
        setup=setup,
        ulimits=ulimit_commands(profile),
        unset=software.unset,
        needed=tuple(dict.fromkeys(needed)),
        variables=variables,
        scratch=software.scratch,
    )


def environment_of(
    job: Job,
    python: str,
    setup: SetupFile | None = None,
    gpu_variables: tuple[GpuVariable, ...] = (),
    more_words: Iterable[tuple[str, str]] = (),
) -> JobEnvironment:
    """Choose the environment of a job; `python` is the interpreter of the submitting process."""
    return job_environment(
        job.profile,
        setup=setup,
        variables=script_variables(job, gpu_variables),
        own=job.spec.environment,
        words=(*_words(job, python), *more_words),
    )


def _words(job: Job, python: str) -> Iterator[tuple[str, str]]:
    """List the fields whose JobText the script has after its variables, with that text."""
    software, own = job.profile.software, job.spec.container
    yield "software.python", software.interpreter(python)
    for name, value in srun_options(job).items():
        for one in value if isinstance(value, tuple) else (value,):
            yield f"slurm.options.srun.{name}", str(one)
    container = run_container(own, software.container)
    if container is None:
        return
    site = "software.container"
    yield "container.image" if own and own.image else f"{site}.image", container.image
    yield "container.python" if own and own.python else f"{site}.python", container.python
    for mount in container.mounts:
        yield "container.mounts" if own and mount in own.mounts else f"{site}.mounts", mount
    for option in container.options:
        yield f"{site}.options", option
    if container.registry_image:  # else nothing is imported
        yield f"{site}.cache", container.cache or ""


def needed_names(field: str, *texts: str, given: Collection[str] = ()) -> list[tuple[str, ...]]:
    """Return the command that checks the names in the texts of a field; none without names."""
    found = dict.fromkeys(name for text in texts for name in expanded_names(text))
    names = [name for name in found if name not in _ALWAYS_SET and name not in given]
    return [("needs", field, *names)] if names else []


def login_names(job: Job, environment: JobEnvironment) -> list[tuple[str, str, bool]]:
    """List fields, names that only a login can give them, and whether the job inherits the name.

    Nothing is listed where the job may have it from elsewhere: from all variables of a login, from
    modules, `activate`, `setup` or a login shell.
    """
    software = job.profile.software
    others = (software.login_shell, software.modules, software.activate, software.setup)
    if job.profile.slurm.export != "clean" or any(others):
        return []
    passed = submit_variables(job) or ()
    return [
        (command[1], name, any(fnmatchcase(name, one) for one in passed))
        for command in environment.needed
        for name in command[2:]
        if not name.startswith("SLURM_") and name not in software.unset
    ]


def submit_variables(job: Job) -> tuple[str, ...] | None:
    """List names and patterns of what sbatch inherits, and so the job does; None: everything."""
    return passed_variables(job.profile, job.spec.environment)


def passed_variables(
    profile: ClusterProfile, own: EnvironmentSpec | None = None
) -> tuple[str, ...] | None:
    """List them for a site's jobs, and of a spec that has such an `environment`."""
    if profile.slurm.export == "all":
        return None
    modules = profile.software.modules
    finds = modules is not None and modules.init is None
    system = _MODULE_SYSTEM if finds else ()
    named = (*profile.slurm.inherit, *(own.inherit if own is not None else ()))
    return tuple(dict.fromkeys((*INHERITED, *system, *named)))


def inherited_names(job: Job) -> tuple[str, ...]:
    """List the variables that site and spec name to be passed on, each once."""
    return tuple(dict.fromkeys((*job.profile.slurm.inherit, *job.spec.environment.inherit)))


def inheritance_note(profile: ClusterProfile, own: EnvironmentSpec | None = None) -> str:
    """Describe what a job inherits, for a person who calls sbatch by hand."""
    names = ", ".join(passed_variables(profile, own) or ())
    note = {
        "none": "It inherits no variable of that shell, but those of a login",
        "all": "It then inherits all variables of that shell, as it does from hpctrain",
        "clean": f"It then inherits all variables of that shell; from hpctrain only {names}",
    }[profile.slurm.export]
    if profile.software.login_shell:
        note += "; its login shell (-l) then sets what /etc/profile and the user's own files set"
    return note


def inheritance_problems(job: Job) -> list[str]:
    """List names that the spec wants the job to inherit, and that it cannot inherit here."""
    names, profile = inherited_names(job), job.profile
    if profile.slurm.export != "none" or not names:
        return []
    return [
        f"environment.inherit: jobs inherit nothing at {profile.name} (slurm.export none), so "
        f"{', '.join(names)} would be missing: read it from a file in the job"
    ]


def script_variables(job: Job, gpu_variables: tuple[GpuVariable, ...] = ()) -> tuple[Variable, ...]:
    """List the exported variables, the site's first.

    A variable of the spec replaces the site's, and one that the site lists replaces the GPU
    catalogue's and what follows from `network.interface`. Nodes have to reach each other only if
    there are several.
    """
    several, per_rank = job.plan.nodes.nodes > 1, {one.name for one in per_rank_variables(job)}
    site = site_variables(job.profile, job.spec.engine.name, gpu_variables, several_nodes=several)
    site = {name: variable for name, variable in site.items() if name not in per_rank}
    own = job.spec.environment.variables
    if "GLOO_SOCKET_IFNAME" in own:
        site.pop(RANK_INTERFACE, None)
    return (
        *(variable for name, variable in site.items() if name not in own),
        *(Variable(name, value, "from the run spec") for name, value in sorted(own.items())),
        *(() if _UNBUFFERED.name in own else (_UNBUFFERED,)),
    )


def site_variables(
    profile: ClusterProfile,
    engine: str | None = None,
    gpu_variables: tuple[GpuVariable, ...] = (),
    *,
    several_nodes: bool = True,
) -> dict[str, Variable]:
    """List the variables of a site by their names; for an engine, those that concern it."""
    site = {
        fabric.name: Variable(
            fabric.name, fabric.value, printable_line(fabric.reason), fabric.prepend
        )
        for fabric in profile.environment
        if fabric.value is not None and (engine is None or fabric.concerns(engine))
    }
    interface = profile.network.interface if several_nodes else None
    if interface is not None:
        reason = "network.interface of the profile: all nodes reach each other over it"
        site.setdefault("NCCL_SOCKET_IFNAME", Variable("NCCL_SOCKET_IFNAME", interface, reason))
        if "GLOO_SOCKET_IFNAME" not in site:
            # gloo wants a whole name: each rank chooses that of its node
            reason = "network.interface for gloo: each rank sets GLOO_SOCKET_IFNAME, a whole name"
            site[RANK_INTERFACE] = Variable(RANK_INTERFACE, interface, reason)
    for wanted in gpu_variables:
        reason = printable_line(wanted.reason)
        site.setdefault(wanted.name, Variable(wanted.name, wanted.value, reason))
    for name, directory in cache_directories(profile):
        reason = "software.scratch of the profile: caches on each node, not on a shared disk"
        site.setdefault(name, Variable(name, directory, reason))
    return site


def variable_problems(
    own: EnvironmentSpec, profile: ClusterProfile
) -> Iterator[tuple[bool, str, str]]:
    """List names that bash, Slurm or hpctrain would not take as a variable.

    Yields whether it is of the spec, else of the profile; the field; and the message.
    """
    inherited = (
        *((True, "environment", name) for name in own.inherit),
        *((False, "slurm", name) for name in profile.slurm.inherit),
    )
    named: list[tuple[bool, str, str, str | None]] = [
        *(
            (True, f"environment.variables.{name}", name, text)
            for name, text in own.variables.items()
        ),
        *((of_spec, f"{section}.inherit", name, None) for of_spec, section, name in inherited),
        *(
            (False, f"environment[{number}].name", one.name, one.value)
            for number, one in enumerate(profile.environment)
        ),
    ]
    for of_spec, field, name, value in named:
        reason = _reserved(name, value, site=field.startswith("environment["))
        if reason is not None:
            yield of_spec, field, f"`{field}`: `{name}` cannot be set in a job script: {reason}"


def _reserved(name: str, value: str | None, *, site: bool) -> str | None:
    """Say why a variable cannot be set; None if it can, or would have the value that it gets."""
    if name in _READ_ONLY:
        return "it is read-only in bash"
    if name.upper() in _EXPORT_WORDS:
        return "sbatch and srun read it as a word of `--export`"
    if site and name in _SRUN_SETTINGS:
        return None
    if name.startswith(("SLURM_", "HPCTRAIN_")) and name not in _SITE_HOOKS:
        return "Slurm and hpctrain set these themselves"
    if name in FIXED_VARIABLES and value is not None:
        fixed, reason = FIXED_VARIABLES[name]
        return None if value == fixed else f"it is {fixed} in ranks, {reason}"
    return OWN_VARIABLES.get(name)
