"""The house rules, as tests. CONTRIBUTING.md gives the reasons; every failure says what to do."""

from __future__ import annotations

import ast
import configparser
import functools
import glob
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from command_line import hpctrain as command
from pydantic import BaseModel

import hpctrain
from bench.house import counts
from bench.house.pictures import reachable
from bench.house.sources import Source, imports, read_package
from hpctrain.base import errors
from hpctrain.records.ledger import EventKind
from hpctrain.spec.engines.abilities import EngineAbilities
from hpctrain.spec.engines.registry import ENGINES
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hpctrain"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "__pycache__" not in p.parts)
# What stays as it is or becomes less; a class that mirrors another one is that one.
RATCHETS = {
    "pairs of classes that share five fields": 79,
    "lines that hand on a field": 606,
    "small modules of one other": 14,
    "short functions that one place calls": 26,
}
# Classes that share five fields with another one, and why the two are not one.
WRITTEN = "people write it, and leave out what the other one has decided"
SHOWN = "an answer that people and programs see, of several records"
EVERY_KIND = "one class for all kinds of its events, each of which has some of its fields"
ON_DISK = "a file whose fields stand in this order"
ARRAYS = "its fields are arrays over candidates"
TWO_LIKE_EACH_OTHER = {
    "data/making/shards.py:Recipe": "a request whose tokenizer and classes have been found",
    "engines/verification.py:Verification": SHOWN,
    "job/render/environment.py:JobEnvironment": "the quoted words that fields of a profile become",
    "judge/documents.py:Verdict": "a judgement; the others tell somebody about it",
    "notify/notices.py:Notice": "an event with what somebody is told about it",
    "plan/cost/case.py:Machine": ARRAYS,
    "plan/cost/case.py:Shape": ARRAYS,
    "plan/cost/case.py:Software": ARRAYS,
    "plan/documents.py:Plan": "what is decided, of which a spec may say some",
    "plan/footprint/table.py:FileRow": "formulas, whose values are the other's",
    "plan/forecast/predict.py:_Totals": "sums for one interval, among which the best is found",
    "plan/job.py:ServicePart": "a part of a service in the place of the spec and plan of a job",
    "plan/mesh/axes.py:Axes": "a base of tables, of values of any type",
    "records/datasets.py:DatasetSidecar": ON_DISK,
    "records/datasets.py:SamplesSidecar": ON_DISK,
    "records/evaluations.py:EvaluationEvent": EVERY_KIND,
    "records/ledger.py:Event": EVERY_KIND,
    "records/service_records.py:ServiceEvent": EVERY_KIND,
    "report/collect.py:RunReport": "all that a page has",
    "report/measures.py:Curves": "its fields are sequences over steps",
    "report/team_tally.py:Tally": "a sum that still grows",
    "runs/notify.py:NoticeState": SHOWN,
    "runs/service_status.py:ServiceStatus": SHOWN,
    "runs/status.py:RunStatus": SHOWN,
    "sandbox/shape.py:AlikeNodes": "nodes to make, where the other ones have been seen",
    "serve/plan/candidates.py:ReplicaShape": "a candidate, and what it costs",
    "serve/router/programs.py:Counts": "of one process; the record has those before it, too",
    "simulate/monte_carlo.py:Outcome": "its fields are distributions over runs",
    "slurm/arrays.py:ArrayOptions": "parameters that submitit takes",
    "spec/engines/abilities.py:Choices": "fields of a spec that is still being read",
    "spec/engines/megatron.py:MegatronSpec": WRITTEN,
    "spec/notify.py:ChannelSpec": WRITTEN,
    "spec/profile/__init__.py:ClusterProfile": "the whole site, whose sections are named alike",
    "spec/profile/slurm.py:PartitionProfile": WRITTEN,
    "spec/run.py:ParallelSpec": WRITTEN,
    "spec/run.py:RunSpec": "three kinds of specs that people write, with sections of one name",
    "spec/run.py:WandbSpec": WRITTEN,
    "spec/service.py:RouterSpec": WRITTEN,
    "spec/service.py:ServingEngineSpec": WRITTEN,
    "spec/supervision.py:SuperviseSpec": WRITTEN,
    "supervise/context.py:JobAttempt": "what a job knows of itself without Slurm's commands",
    "train/report.py:StepResult": "what a rank has measured, numbers that are not finite included",
    "trials/documents.py:Predicted": "a record that comparisons of later versions read",
    "trials/sweep_table.py:SweepRow": SHOWN,
    "trials/sweep_table.py:SweepTable": SHOWN,
}

# Rooms that compute: what they are about is handed to them.
PURE = ("plan", "simulate", "engines", "job/render", "spec", "judge", "diagnose", "site")
PURE = (*PURE, "page", "trials", "report", "adopt", "export", "serve/plan", "serve/engines")
# Of those rooms, the files around that read, beside their commands.
READING = (
    *(
        "spec/files.py",
        "spec/loader.py",
        "spec/families/expand.py",
        "spec/reference.py",
        "diagnose/of_run.py",
    ),
    "spec/families/remote_code.py",
    *("export/metrics.py", "export/exported_run.py", "report/collect.py"),
    *("report/service_report.py", "report/team_report.py"),
    *("site/calibrate.py", "site/calibrate_service.py", "site/init.py"),
    *("site/node_survey.py", "site/read_site.py", "site/survey.py"),
    *("site/first_start.py", "site/start_survey.py"),
    *("trials/compare.py", "trials/sweep.py", "trials/sweep_plans.py", "trials/sweep_table.py"),
    *("trials/run_trials.py", "trials/rehearsal.py", "page/options.py", "page/output.py"),
)
# Modules of ours that do what a pure room does not. Records are data, whoever reads them.
DOING = ("base.clock", "base.durable", "base.reserved_ports", "slurm.client", "slurm.process")
DOING = (*DOING, "records.find", "checkpoints")
PURE_FILES = (
    *("notify/message_text.py", "notify/notices.py"),
    *("judge/blame.py", "sandbox/shape.py", "records/jobs.py"),
    *("sandbox/monitoring.py", "observe/families.py", "observe/samples.py"),
    *("observe/grafana_dashboard.py", "observe/dashboard_page.py", "telemetry/scraped_text.py"),
    *("serve/load/summary.py", "serve/load/measurement.py"),
    *("serve/router/decide.py", "serve/router/scaling.py"),
    *("runs/state.py", "runs/run_problems.py", "runs/watch_rules.py"),
    *("telemetry/rates.py", "telemetry/goodput.py", "telemetry/timeline.py"),
)
# Rooms that run as processes of their own, with torch: they print, exit and unpickle.
PROGRAMS = ("train/", "trainer/", "data/making/", "convert/")
# A program (started with -m), and the two places where the supervisor writes the job's log: its
# own lines, and the stderr of srun that it reads along.
SPEAKERS = ("supervise/__main__.py", "supervise/srun_process.py")
# Another program: on each node it answers the supervisor's probe.
SPEAKERS = (*SPEAKERS, "supervise/preflight.py")
# A program that the script of an evaluation job calls.
SPEAKERS = (*SPEAKERS, "supervise/evaluation_result.py")
# A program for a node on which hpctrain is not installed.
SPEAKERS = (*SPEAKERS, "site/survey.py")
# The programs of a job that tries a first start.
SPEAKERS = (*SPEAKERS, "site/start_survey.py")
# A program beside training, which says on stderr what it could not write.
SPEAKERS = (*SPEAKERS, "tracking/__main__.py")
# Another one, which exports metrics.
SPEAKERS = (*SPEAKERS, "observe/attempt_exporter.py")
# The model that tests and demos serve, a program of its own.
SPEAKERS = (*SPEAKERS, "serve/tiny_llama.py")
# The load generator, another one.
SPEAKERS = (*SPEAKERS, "serve/load/__main__.py")
# An engine for rehearsals, a program of its own.
SPEAKERS = (*SPEAKERS, "serve/stand_in.py")
# The program of a replica: its lines in the log of its task, and its shield before exec.
SPEAKERS = (*SPEAKERS, "serve/replica/__main__.py", "serve/replica/life.py")
SPEAKERS = (*SPEAKERS, "serve/replica/shield.py")
# The program of the router's job.
SPEAKERS = (*SPEAKERS, "serve/router/__main__.py")
# Long-lived children: these modules watch over time limits and signals themselves.
POPEN = ("slurm/process.py", "supervise/srun_process.py", "sandbox/processes.py")
POPEN = (*POPEN, "supervise/evidence/probe.py", "supervise/site_commands.py")
# The processes that copy and export metrics, beside all launches of an attempt.
POPEN = (*POPEN, "supervise/side_processes.py")
# A converter that runs while its rank goes on answering the others.
POPEN = (*POPEN, "train/engines/deepspeed/snapshot.py")
# The writer of checkpoints of a rank with a GPU: a child that ends with its rank.
POPEN = (*POPEN, "train/saving/writer.py")
# An engine that answers requests for as long as its replica lives.
POPEN = (*POPEN, "serve/replica/engine_process.py")
# The router of a service, which lives as long as its job; or without one, on a login node.
POPEN = (*POPEN, "serve/router/programs.py", "serve/start_router.py")
# A profiler that lives as long as the rank below it.
POPEN = (*POPEN, "train/launchers/nsight.py")
# The ranks of a node, which live as long as their agent at most.
POPEN = (*POPEN, "train/launchers/rank_processes.py")

# Who has a time of his own beside `hpctrain.base.clock`.
OWN_TIME = {
    "base/clock.py": "it is the place",
    "base/beside_training.py": "waits in select(2) for its stdin",
    "supervise/timeouts.py": "waits for a thread that may be stuck in a system call",
    "serve/load/": "a program that measures, in asyncio",
    "serve/stand_in.py": "a program for rehearsals, in asyncio and threads",
    "site/start_survey.py": "a program for an interpreter that may lack hpctrain, which measures",
    "train/": "programs with torch, which measure",
    "trainer/": "an agent beside foreign processes, and calls for an interpreter without hpctrain",
}

# Unit tests that sleep, beside programs in strings, which are other processes.
SLEEPERS = {
    "checkpoints/test_manifest.py": "leaves other threads the time to come, if they may",
    "observe/test_service_metrics.py": "a server that answers slowly",
    "serve/router/test_router_programs.py": "clients that come one after the other",
    "serve/test_load_sending.py": "an engine that answers slowly",
    "supervise/acting_rank.py": "a process that stands still",
    "supervise/acting_srun.py": "a process that takes its time",
    "supervise/test_node_probe.py": "would see a signal that comes afterwards",
    "supervise/test_srun_process.py": "a signal must not interrupt a sleep",
    "supervise/test_launch_watch.py": "waits without using the processor, which is measured",
    "trainer/misbehaving_trainer.py": "a trainer whose steps and saves take their time",
    "test_quick.py": "a test that is still running when the time is up",
}

# Where a spec and a profile are read together and there is no plan yet, so no `Job` either.
BEFORE_A_PLAN = {
    "job/preflight.py": "looks at inputs of runs that cannot be planned, too",
    "job/prepare.py": "plans, and makes the job",
    "report/team_report.py": "reads runs of which any document may be missing",
}

# Who decides in what state a run is, and who asks the same of something else.
# Who compares kinds of events, states of jobs, causes and actions; what all others show they ask.
JUDGES = {
    "judge/": "from the evidence of a launch to its cause, and what a ledger means",
    "supervise/": "acts in the job, and reads what it has decided itself",
    "runs/state.py": "the state of a run",
    "runs/watch_rules.py": "what is wrong with a run that no supervisor looks after",
    "records/": "reads which jobs and checkpoints a ledger names",
    "slurm/": "what Slurm calls the states of jobs",
    "simulate/": "plays what the policy has decided",
    "notify/notices.py": "which event is told to people, and in which words",
    "runs/describe.py": "how each request of a person was answered",
    "serve/": "replicas, which have a life of their own",
}
JUDGED = ("JobState.", "EventKind.", "Cause.", "ActionKind.")

# Rooms of engines, which may name them; all others ask `EngineAbilities` what an engine can do.
ENGINE_ROOMS = ("spec/engines/", "engines/", "train/engines/")
# Names that are an engine's and something else's.
NOT_THE_ENGINE = {
    ("data/making/tokenized_text.py", "megatron"): "the extra of pip that has the tokenizers",
    ("data/making/text_tokenizers.py", "megatron"): "the extra of pip that has the tokenizers",
    ("train/startup.py", "megatron"): "the logger of the Python package",
}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """All modules, parsed by the first test of a process that needs them."""
    return {path: ast.parse(path.read_text(), str(path)) for path in MODULES}


@functools.cache
def sources() -> list[Source]:
    return read_package(PACKAGE)


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


@pytest.fixture(scope="module", autouse=True)
def _no_trees_stay() -> Iterator[None]:
    """They are millions of objects: what later tests of this process fork and collect would take
    twice as long, and `plan --verify` ten times."""
    yield
    trees.cache_clear()
    sources.cache_clear()
    nodes.cache_clear()


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name


def where(path: Path, node: ast.AST) -> str:
    return f"hpctrain/{name(path)}:{getattr(node, 'lineno', 1)}"


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with its dotted name, such as `subprocess.run`; `?.x` for a method of anything."""
    for node in nodes(tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def tracked_files() -> list[Path]:
    """Tracked files and new ones that git does not ignore."""
    command_line = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(
        command_line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    paths = [ROOT / line for line in done.stdout.split("\0") if line]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


# -- words and shape -------------------------------------------------------------------------


def test_no_drawer_for_odds_and_ends() -> None:
    bad = [name(p) for p in MODULES if p.stem in {"utils", "util", "helpers", "common", "misc"}]
    assert not bad, f"two files that share a helper are missing a noun: name it. {bad}"


@pytest.mark.parametrize("directory", ["templates", "cluster_profiles", "examples"])
def test_the_package_has_what_stands_beside_it_by_a_link(directory: str) -> None:
    """A wheel copies what the link leads to; a file with the link's text gives it nothing."""
    link = PACKAGE / directory
    wish = f"hpctrain/{directory} has to be a symbolic link: `ln -s ../{directory} hpctrain/`"
    assert link.is_symlink() and link.resolve() == ROOT / directory, wish


def test_a_wheel_has_every_file_of_the_package() -> None:
    """A checkout finds files that no pattern of package-data names, and a wheel does not."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packed: set[str] = set()
    for pattern in settings["package-data"]["hpctrain"]:
        files = glob.glob(pattern, root_dir=PACKAGE, recursive=True)
        assert files, f"a pattern of nothing: {pattern}"
        packed.update(files)
    beside = ("hpctrain/", "templates/", "cluster_profiles/", "examples/")
    tracked = [path.relative_to(ROOT).as_posix() for path in tracked_files()]
    needed = {one.removeprefix("hpctrain/") for one in tracked if one.startswith(beside)}
    missing = sorted(one for one in needed - packed if not one.endswith((".py", ".md")))
    assert not missing, f"name them in package-data of pyproject.toml: {missing}"


def test_every_module_says_what_belongs_into_it() -> None:
    mute = [name(p) for p, tree in trees().items() if tree.body and not ast.get_docstring(tree)]
    assert not mute, f"no module docstring: {mute}"


def test_what_belongs_elsewhere_is_said_to_be_where_it_is() -> None:
    """A name in "Does not belong here" is a file, a folder or a room, and not the file itself."""
    dotted_names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in MODULES}
    dotted_names |= {one.rpartition(".")[0] for one in dotted_names}
    known = dotted_names | {one.rpartition(".")[2] for one in dotted_names}
    wrong = []
    for path, tree in trees().items():
        elsewhere = (ast.get_docstring(tree) or "").partition("Does not belong here")[2]
        for said in re.findall(r"`([a-z_]+|hpctrain\.[\w.]+)`", elsewhere.partition(". ")[0]):
            if said not in known or said == path.stem:
                wrong.append(f"{name(path)}: {said}")
    assert not wrong, f"files have moved: {wrong}"


def test_nothing_is_left_for_later() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    sources = [*MODULES, *(ROOT / "templates").rglob("*.j2"), *(ROOT / "scripts").glob("*")]
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources
        if path.is_file()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"finish it, or open an issue and refuse it with a message: {found}"


def test_what_is_said_twice_becomes_less() -> None:
    """`python -m bench.house --list` shows what is counted; a lower number is written here."""
    assert {
        "pairs of classes that share five fields": len(counts.mirrored_classes(sources())),
        "lines that hand on a field": len(counts.copied_fields(sources())),
        "small modules of one other": len(counts.small_modules_of_one(sources())),
        "short functions that one place calls": len(counts.one_use_functions(sources(), 5)),
    } == RATCHETS


def test_classes_that_are_like_each_other_are_two_for_a_reason() -> None:
    """A pair that is new is one class, or has its reason in `TWO_LIKE_EACH_OTHER`."""
    found = counts.mirrored_classes(sources())
    pairs = {pair: {*pair.rpartition(":")[0].split(" ~ ")} for pair in found}
    without = [pair for pair, classes in pairs.items() if not classes & TWO_LIKE_EACH_OTHER.keys()]
    assert not without, f"use one of them, or hold it as a field: {without}"
    idle = TWO_LIKE_EACH_OTHER.keys() - {one for classes in pairs.values() for one in classes}
    assert not idle, f"reasons that nothing needs: {sorted(idle)}"


def test_few_functions_are_a_piece_of_one_other() -> None:
    """A private function that one place names cuts a thought in two, unless it has a noun."""
    share = counts.one_use_share(sources())
    assert share.part / share.whole <= 0.18, f"join them with who calls them: {share}"


def test_no_files_import_each_other_in_a_circle() -> None:
    """An import within a function is one, too; those of annotations alone are none."""
    modules = {source.name for source in sources()}
    graph = {one.name: frozenset(imports(one, modules, annotations=False)) for one in sources()}
    below = reachable(graph)
    circles = {frozenset(o for o in below[one] if one in below[o]) for one in below}
    assert not circles - {frozenset()}, f"move what ties them below both: {circles}"


def test_names_of_test_files_are_unique() -> None:
    """pytest puts the directories of tests into one sys.path, so a second file would be lost."""
    # packages and programs that tests put into a path of their own
    apart = {"__pycache__", "stubs", "held_ranks", "held_trainers"}
    found = Counter(p.name for p in (ROOT / "tests").rglob("*.py") if not apart & {*p.parts})
    twice = [file for file, count in found.items() if count > 1 and file != "conftest.py"]
    assert not twice, f"give one of them a name with its room in it: {twice}"
    installed = [file for file in found if (PACKAGE.parent / file).exists()]
    assert not installed, f"a test file hides a module: {installed}"


# -- who may do what -------------------------------------------------------------------------


def test_a_program_begins_when_all_of_it_is_there() -> None:
    """What stands below `if __name__ == "__main__"` does not exist yet when the program runs."""
    early = [
        where(path, node)
        for path, tree in trees().items()
        for node in tree.body[:-1]
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
    ]
    assert not early, f"the last lines of a module start it: {early}"


def test_only_the_command_line_prints_and_exits() -> None:
    forbidden = {"print", "sys.exit", "exit", "quit", "os._exit", "click.echo"}
    forbidden |= {"sys.stdout.write", "sys.stderr.write"}
    found = [
        f"{where(path, node)} {called}"
        for path, tree in trees().items()
        if not name(path).startswith(("cli/", "page/", *PROGRAMS))
        and not name(path).endswith("command.py")
        and name(path) not in SPEAKERS
        for called, node in calls(tree)
        if called in forbidden
    ]
    assert not found, f"return a value or raise an HpctrainError instead: {found}"


def test_commands_lie_in_the_rooms_of_what_they_show() -> None:
    """`cli/` finds commands and reports errors; it has no document, quantity or state to show."""
    shown = re.compile(r"(?<![\w-])([KMGT]i?B|GPU-hours|ms|s|min|steps?|PENDING|RUNNING|FAILED)\b")
    found = []
    for path, tree in trees().items():
        cli = name(path).startswith("cli/")
        for node in nodes(tree):
            if isinstance(node, ast.FunctionDef) and not cli:
                kinds = {dotted(getattr(one, "func", one)) for one in node.decorator_list}
                command = any(kind.endswith((".command", ".group")) for kind in kinds)
                if command and not re.search(r"(^|[/_])command\.py$", name(path)):
                    found.append(f"{where(path, node)} {node.name} is a command")
            elif cli and isinstance(node, ast.ImportFrom):
                room = (node.module or "").partition("hpctrain.")[2].partition(".")[0]
                if room in ("records", "plan", "serve"):
                    found.append(f"{where(path, node)} imports {node.module}")
            elif cli and isinstance(node, ast.JoinedStr):
                texts = [str(one.value) for one in node.values if isinstance(one, ast.Constant)]
                if any(map(shown.search, texts)):
                    found.append(f"{where(path, node)} {ast.unparse(node)}")
    assert not found, f"`command.py` or `*_command.py` of the room that knows: {found}"


def test_nothing_is_run_by_a_shell_or_evaluated() -> None:
    forbidden = {"os.system", "os.popen", "eval", "exec", "yaml.load", "subprocess.getoutput"}
    unpickling = {"pickle.load", "pickle.loads"}
    found = []
    for path, tree in trees().items():
        here = forbidden if name(path).startswith(PROGRAMS) else forbidden | unpickling
        for called, node in calls(tree):
            shell = any(k.arg == "shell" and not _is(k.value, False) for k in node.keywords)
            if called in here or shell:
                found.append(f"{where(path, node)} {called}")
    assert not found, f"commands are lists of words, documents are data: {found}"


def _is(node: ast.AST, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_no_command_runs_without_a_time_limit() -> None:
    waiting = {"subprocess.run", "subprocess.call", "subprocess.check_call"}
    waiting.add("subprocess.check_output")
    found = []
    for path, tree in trees().items():
        for called, node in calls(tree):
            limited = any(keyword.arg == "timeout" for keyword in node.keywords)
            if called in waiting and not limited:
                found.append(f"{where(path, node)} {called} has no timeout=")
            if called.endswith("Popen") and name(path) not in POPEN:
                found.append(f"{where(path, node)} Popen outside of {POPEN}")
    assert not found, found


# Elements of HTML and SVG, whole or as the beginning of one with attributes.
ELEMENT = re.compile(
    r"(?<!\(\?P)</?(?:p|a|i|b|div|span|table|t[rhd]|ul|ol|li|h[1-6]|code|pre|br|svg|g|path|rect|line|text|small)"
    r"(?:>| [a-z-]+=)"
)
# Rooms that know how things are shown, and the screen of `top`, which is made of rich's text.
SHOWING = ("page/", "cli/", "observe/top_text.py", "observe/top_screen.py")


def test_only_the_room_of_pages_writes_markup_and_colours() -> None:
    found = []
    for path, tree in trees().items():
        if name(path).startswith(SHOWING):
            continue
        docs = {id(one) for node in nodes(tree) if (one := _docstring(node)) is not None}
        for node in nodes(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in docs else None
            if isinstance(text, str) and ELEMENT.search(text):
                found.append(f"{where(path, node)} {text[:60]!r}")
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            if any(f"{one}.".startswith("rich.") for one in modules):
                found.append(f"{where(path, node)} imports rich")
            if isinstance(node, ast.Attribute) and dotted(node) in ("click.style", "click.secho"):
                found.append(f"{where(path, node)} {dotted(node)}")
    assert not found, f"`hpctrain.page` has elements, tables and colours: {found}"


# A cell that is padded to a width: `<20`, `>9`, `13`, `{width}`; not digits such as `02d`.
PADDED = re.compile(r"[^{0]?[<>^]|[1-9{]")
# What is laid out by hand, beside `hpctrain.page`.
OWN_COLUMNS = {
    "checkpoints/resume_shares.py": "a format of files, whose lines are equally long",
    "cli/main.py": "click's own columns of --help",
    "job/footprint_command.py": "four tables whose numbers stand below each other",
    "job/plan_text.py": "shares and prices before texts that are wrapped",
    "report/week_page.py": "bars of characters",
    "runs/files_command.py": "a line that is written over",
    "runs/goodput.py": "bars of characters",
    "runs/run_page.py": "a curve of characters with its axes",
    "site/init.py": "comments beside fields of a YAML file",
}


def test_only_the_room_of_pages_aligns_columns() -> None:
    found, needed = [], set()
    for path, tree in trees().items():
        if name(path).startswith("page/"):
            continue
        for node in nodes(tree):
            spec = node.format_spec if isinstance(node, ast.FormattedValue) else None
            text = ast.unparse(spec)[2:-1] if spec is not None else ""
            called = node.func.attr if isinstance(getattr(node, "func", 0), ast.Attribute) else ""
            if PADDED.match(text) or called in ("ljust", "rjust", "center"):
                needed.add(name(path))
                found += [f"{where(path, node)} {text}"] if name(path) not in OWN_COLUMNS else []
    assert not found, f"`facts`, `grid` and `columns_text` of `hpctrain.page.text`: {found}"
    assert needed == {*OWN_COLUMNS}, "not all of them align anything any more"


def test_only_the_room_of_pages_prints_documents() -> None:
    """`json_out` says the version, and which documents a command prints (`hpctrain schema`)."""
    found = [
        f"{where(path, one)} {called}"
        for path, tree in trees().items()
        if name(path).endswith("command.py")
        for printed, node in calls(tree)
        if printed in ("click.echo", "say")
        for called, one in calls(node)
        if called.rpartition(".")[2] in ("model_dump_json", "dumps")
    ]
    assert not found, f"`json_out` of `hpctrain.page.output`: {found}"


def test_the_pure_rooms_touch_nothing() -> None:
    forbidden_calls = {"open", "input", "os.getcwd", "os.getenv", "datetime.now", "Path.cwd"}
    methods = {"read_text", "read_bytes", "write_text", "write_bytes", "exists", "mkdir", "unlink"}
    attributes = {"os.environ", "sys.argv", "sys.stdin"}
    modules = {"subprocess", "socket", "time", "random", "tempfile", "shutil"}
    found, seeded = [], {"random"}
    for path, tree in trees().items():
        if not name(path).startswith(tuple(f"{room}/" for room in PURE)):
            if name(path) not in PURE_FILES:
                continue
        elif name(path) in READING or name(path).endswith("command.py"):
            continue
        for called, node in calls(tree):
            if called in forbidden_calls or called.rpartition(".")[2] in methods:
                found.append(f"{where(path, node)} {called}()")
        for node in nodes(tree):
            if isinstance(node, ast.Attribute) and dotted(node) in attributes:
                found.append(f"{where(path, node)} {dotted(node)}")
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
                names -= seeded if name(path).startswith("simulate/") else set()
                found.extend(f"{where(path, node)} import {one}" for one in names & modules)
            if isinstance(node, ast.ImportFrom):
                package, _, module = (node.module or "").partition(".")
                imported = {f"{module}.{alias.name}".lstrip(".") for alias in node.names}
                doing = any(f"{one}.".startswith(f"{d}.") for one in imported for d in DOING)
                if node.module in modules or (package == "hpctrain" and doing):
                    found.append(f"{where(path, node)} from {node.module}")
    assert not found, f"hand it in as an argument; the shell around does the reading: {found}"


def test_time_comes_from_one_clock() -> None:
    forbidden = {"time.sleep", "time.time", "time.monotonic"}
    found, needed = [], set()
    for path, tree in trees().items():
        own = next((one for one in OWN_TIME if name(path).startswith(one)), None)
        for node in nodes(tree):
            direct = isinstance(node, ast.Attribute) and dotted(node) in forbidden
            if direct or (isinstance(node, ast.ImportFrom) and node.module == "time"):
                needed.add(own)
                found += [where(path, node)] if own is None else []
    assert not found, f"`hpctrain.base.clock`, which a test can replace: {found}"
    assert needed == {*OWN_TIME}, "not all of them have a time of their own any more"


def test_only_judges_compare_what_a_run_has_recorded() -> None:
    """One by one, or in a set to compare with; a mapping to words decides nothing."""
    found, needed = [], set()
    for path, tree in trees().items():
        judge = next((one for one in JUDGES if name(path).startswith(one)), None)
        for node in nodes(tree):
            parts: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                parts = [node.left, *node.comparators]
            elif isinstance(node, ast.Tuple | ast.Set | ast.List):
                parts = node.elts
            elif isinstance(node, ast.MatchValue):
                parts = [node.value]
            if any(dotted(part).startswith(JUDGED) for part in parts):
                needed.add(judge)
                found += [where(path, node)] if judge is None else []
    assert not found, f"ask `hpctrain.runs.state` or `hpctrain.judge.attempts`: {found}"
    assert needed == {*JUDGES}, "not all of them decide anything any more"


def test_unit_tests_do_not_sleep() -> None:
    found = set()
    for path in (ROOT / "tests/unit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Attribute) and dotted(node) in ("time.sleep", "asyncio.sleep"):
                found.add(path.relative_to(ROOT / "tests/unit").as_posix())
    assert found == {*SLEEPERS}, "advance a virtual clock, or wait for a condition (tests/waiting)"


# What Slurm prints, whole or in part. `hpctrain.slurm` has a typed value for each.
SLURM_PHRASES = re.compile(
    r"JobHeld|JobHold|requeued.held|in.held.state|special exit state|launch.failed.requeued"
    r"|ReqNodeNotAvail|BadConstraints|BeginTime|NodeDown|NodeFail|TimeLimit|PartitionNodeLimit"
    r"|Nodes required for|QOSMax|AssocGrp"
    r"|Invalid job id|pending execution|presently disabled|already completing or completed"
    r"|Unable to contact slurm|Unable to create step|Task launch for|Node failure on"
    r"|DUE TO |slurmstepd: error|srun: error|srun: forcing|Exited with exit code|Out Of Memory"
    r"|step creation|Invalid generic resource"
)
SLURM_STATES = {"NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "COMPLETING", "PREEMPTED", "DEADLINE"}


def test_only_one_room_knows_what_slurm_prints() -> None:
    found = []
    for path, tree in trees().items():
        if name(path).startswith("slurm/"):
            continue
        texts = {id(one) for node in nodes(tree) if (one := _docstring(node)) is not None}
        for node in nodes(tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if id(node) in texts:
                continue
            if SLURM_PHRASES.search(node.value) or node.value in SLURM_STATES:
                found.append(f"{where(path, node)} {node.value[:60]!r}")
    assert not found, f"use the typed values of hpctrain.slurm (reasons, messages): {found}"


def _docstring(node: ast.AST) -> ast.Constant | None:
    """The docstring below `node`, if it can have one and has one."""
    scopes = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if not isinstance(node, scopes) or not node.body or not isinstance(node.body[0], ast.Expr):
        return None
    first = node.body[0].value
    return first if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def test_names_of_quantities_say_their_unit() -> None:
    bare = {"time", "mem", "size", "timeout", "duration", "bandwidth", "interval"}
    kinds = {"int", "float", "int | None", "float | None"}
    # `time` in a record is seconds since the epoch, everywhere in the run directory.
    allowed = {("records/ledger.py", "time"), ("records/run_records.py", "time")}
    allowed |= {("records/manifest.py", "time"), ("records/speed_checks.py", "time")}
    allowed |= {("records/node_record.py", "time"), ("judge/blame.py", "time")}
    allowed |= {("telemetry/timeline.py", "time"), ("records/communication.py", "time")}
    allowed |= {("records/gpu_report.py", "time"), ("records/evaluations.py", "time")}
    allowed.add(("records/step_times.py", "time"))
    allowed.add(("records/service_records.py", "time"))
    allowed |= {("records/service_ledger.py", "time"), ("records/service_records.py", "time")}
    # a group's number of ranks
    allowed |= {("plan/documents.py", "size"), ("train/datasets/sample_order.py", "size")}
    allowed.add(("train/data.py", "size"))
    allowed |= {
        ("train/engines/native/engine.py", "size"),
        ("train/engines/deepspeed/mesh.py", "size"),
    }
    found = []
    for path, tree in trees().items():
        for node in nodes(tree):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                target, annotation = node.target.id, ast.unparse(node.annotation)
                if target in bare and annotation in kinds and (name(path), target) not in allowed:
                    found.append(f"{where(path, node)} {target}: {annotation}")
    assert not found, f"step_seconds, memory_bytes, ...: {found}"


def test_who_needs_the_documents_of_a_job_takes_the_job() -> None:
    """Else each function finds the partition, the limits and the notices of the job anew."""
    documents, found, early = {"RunSpec", "ClusterProfile", "Plan"}, [], set()
    for path, tree in trees().items():
        for node in nodes(tree) if not name(path).startswith(("spec/", "plan/")) else ():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            kinds = [ast.walk(one.annotation) for one in _arguments(node) if one.annotation]
            named = {one.id for kind in kinds for one in kind if isinstance(one, ast.Name)}
            taken = named & documents
            if taken == {"RunSpec", "ClusterProfile"} and name(path) in BEFORE_A_PLAN:
                early.add(name(path))
            elif len(taken) > 1:
                found.append(f"{where(path, node)} {node.name} takes {sorted(taken)}")
    assert not found, f"take `hpctrain.plan.job.TrainingJob`: {found}"
    assert early == {*BEFORE_A_PLAN}, "not all of them take both documents any more"


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def test_engines_are_named_in_their_rooms_only() -> None:
    """What an engine can do is a field of its abilities, not a comparison with its name."""
    found: dict[tuple[str, str], str] = {}
    for path, tree in trees().items():
        if name(path).startswith(ENGINE_ROOMS):
            continue
        for node in nodes(tree):
            if isinstance(node, ast.Constant) and node.value in ENGINES:
                found[name(path), node.value] = where(path, node)
    wrong = [place for key, place in found.items() if key not in NOT_THE_ENGINE]
    assert not wrong, f"{len(wrong)} names of engines: ask `spec.engine.abilities`: {wrong}"
    assert not NOT_THE_ENGINE.keys() - found.keys(), "an exception that nothing needs"


def test_every_ability_is_read() -> None:
    """A field of the abilities that no room reads would promise what nothing keeps."""
    read = {
        node.attr
        for path, tree in trees().items()
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    unread = {one.name for one in fields(EngineAbilities)} - read
    assert not unread, f"use it, or remove it: {unread}"


# -- light on the login node -----------------------------------------------------------------

HEAVY = ("torch", "megatron", "pandas", "scipy", "tokenizers", "textual", "prometheus_client")
DUMP = "\nimport sys; print(*sorted(sys.modules), file=sys.stderr)"


@pytest.mark.parametrize(
    ("code", "plans"),
    [
        ("import hpctrain.cli.main", False),
        ("from hpctrain.cli.main import run; run(['--help'])", False),
        ("from hpctrain.cli.main import run; run(['status'])", False),
        ("from hpctrain.cli.main import run; run(['profiles'])", False),
        (
            "from hpctrain.cli.main import run; "
            f"run(['submit', '-p', 'a100x64', {str(ROOT / 'examples/gpt175b.yaml')!r}, "
            "'--set', 'data.sources=[]', '--set', 'data.tokenizer=null', "
            "'--set', 'data.made_up=true', '--dry-run'])",
            True,
        ),
    ],
    ids=["import", "help", "status", "profiles", "dry-run"],
)
def test_the_command_line_imports_nothing_heavy(tmp_path: Path, code: str, plans: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code + DUMP],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    loaded = done.stderr.splitlines()[-1].split()
    assert "hpctrain.cli.main" in loaded
    heavy = [module for module in loaded if module in HEAVY]
    heavy += ["numpy"] * ("numpy" in loaded and not plans)
    assert not heavy, f"imported on a login node: {heavy}"


def test_submitting_loads_no_supervisor() -> None:
    code = "import hpctrain.job.submit" + DUMP
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(done.stderr.splitlines()[-1].split())
    assert not {name for name in loaded if name.startswith("hpctrain.supervise")}


def test_help_needs_neither_documents_nor_tables() -> None:
    code = "from hpctrain.cli.main import run; run(['--help'])" + DUMP
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(done.stderr.splitlines()[-1].split())
    assert not loaded & {"pydantic", "rich", "ruamel.yaml", "jinja2", "subprocess"}


# -- what users and admins rely on -----------------------------------------------------------


def error_classes(base: type[errors.HpctrainError]) -> Iterator[type[errors.HpctrainError]]:
    yield base
    for derived in base.__subclasses__():
        yield from error_classes(derived)


def test_every_exit_code_is_documented() -> None:
    told = command("--help").stdout.partition("Exit codes:")[2]
    documented = {int(number) for number in re.findall(r"(?:^|\s|·)(\d+) [a-zS]", told)}
    used = {kind.exit_code for kind in error_classes(errors.HpctrainError)} | {0, 130}
    assert used == documented, f"`hpctrain --help` explains {sorted(documented)}"
    rows = re.findall(r"^\| *`?(\d+)`? *\|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert not rows or used == {int(row) for row in rows}, f"README.md explains {rows}"


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    drawn = dict(re.findall(r"(\w+Error) +(\d)", errors.__doc__ or ""))
    real = {k.__name__: str(k.exit_code) for k in error_classes(errors.HpctrainError)}
    assert {key: value for key, value in real.items() if key in vars(errors)} == drawn


def test_public_surface() -> None:
    assert "__version__" in hpctrain.__all__
    for public in hpctrain.__all__:
        item = getattr(hpctrain, public)
        assert not callable(item) or item.__doc__, f"hpctrain.{public} has no docstring"


def test_templates_only_fill_in() -> None:
    """Nothing deeper than an if or a for, no arithmetic: what is decided is decided in Python."""
    allowed = {"if", "for", "endif", "endfor", "else", "block", "endblock", "extends"}
    templates = list((ROOT / "templates").rglob("*.j2"))
    assert templates
    for template in templates:
        text = template.read_text()
        file = template.relative_to(ROOT)
        words = re.findall(r"\{%-?\s*(\w+)", text)
        assert set(words) <= allowed, f"{file}: {set(words) - allowed}"
        depth = 0
        for word in words:
            depth += (word in ("if", "for")) - (word in ("endif", "endfor"))
            assert depth <= 2, f"{file}: blocks inside blocks inside blocks"
        for expression in re.findall(r"\{[{%](.*?)[}%]\}", text):
            bare = re.sub(r"'[^']*'", "''", expression)
            assert not re.search(r"[+*/%~]| - |==|[<>]", bare), f"{file}: {expression}"
        shown = re.findall(r"^export .*\{\{(.*?)\}\}$", text, re.MULTILINE)
        assert all("| sh" in expression for expression in shown), f"{file}: unquoted {shown}"


# -- nothing that a user sets or reads is without effect --------------------------------------


# Merged before there is a document (spec/loader.py).
READ_BY_THE_LOADER = {"ClusterProfile.extends"}


def test_every_field_of_spec_and_profile_has_a_reader() -> None:
    """Outside of spec/, or in a method of the document that is itself read there."""
    read = {
        node.attr
        for path, tree in trees().items()
        if not name(path).startswith("spec/")
        for node in nodes(tree)
        if isinstance(node, ast.Attribute)
    }
    for method in document_methods():
        if method.name in read:
            read |= {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
    unread = [
        f"{kind.__name__}.{field}"
        for kind in sorted(document_kinds(RunSpec, ClusterProfile), key=lambda kind: kind.__name__)
        for field in kind.model_fields
        if field not in read and f"{kind.__name__}.{field}" not in READ_BY_THE_LOADER
    ]
    assert not unread, f"a field that nothing reads is a bug: use it, or delete it: {unread}"


def document_kinds(*types: object) -> set[type[BaseModel]]:
    """All documents that these ones consist of."""
    found: set[type[BaseModel]] = set()
    left = list(types)
    while left:
        one = left.pop()
        left.extend(get_args(one))
        if isinstance(one, type) and issubclass(one, BaseModel) and one not in found:
            found.add(one)
            left.extend(field.annotation for field in one.model_fields.values())
    return found


def document_methods() -> Iterator[ast.FunctionDef]:
    """Methods in spec/ that are no validators."""
    for path, tree in trees().items():
        if name(path).startswith("spec/"):
            for node in nodes(tree):
                if isinstance(node, ast.FunctionDef):
                    decorators = ast.unparse(ast.Tuple(node.decorator_list, ast.Load()))
                    if "validator" not in decorators:
                        yield node


# Kinds of older ledgers that are still read: none. An unknown kind is passed over.
ONLY_READ: dict[EventKind, str] = {}


def test_every_kind_of_event_has_a_writer() -> None:
    """The kind is an argument of a call that writes, or one of two that are chosen for it.

    A program beside training has the kind that is written when it fails.
    """
    writers = {"append", "note", "_note", "SideProgram"}
    written = set()
    for tree in trees().values():
        for node in nodes(tree):
            chosen = isinstance(node, ast.IfExp)
            if chosen or (
                isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in writers
            ):
                written |= {dotted(part) for part in ast.walk(node)}
    unwritten = {kind for kind in EventKind if f"EventKind.{kind.name}" not in written}
    assert unwritten == ONLY_READ.keys(), "delete the kind, or give the reason why it is only read"


def test_the_map_of_the_rooms_is_that_of_the_contract() -> None:
    """In the same order: a room imports those below it."""
    contract = configparser.ConfigParser()
    contract.read(ROOT / "setup.cfg")
    column = contract["importlinter:contract:column"]["layers"].split()
    page = (ROOT / "CONTRIBUTING.md").read_text()
    told = re.findall(r"^\| `hpctrain/(\w+)/` \|", page, re.MULTILINE)
    assert told == [room for room in column if (PACKAGE / room).is_dir()]


def test_links_lead_somewhere() -> None:
    """Files of links are there, and so are their headings, as GitHub names them."""

    def headings(page: Path) -> set[str]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}

    broken = []
    for document in [path for path in tracked_files() if path.suffix == ".md"]:
        for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", document.read_text()):
            name, _, heading = link.partition("#")
            outside = "://" in link or link.startswith("mailto:")
            target = document.parent / name if name else document
            if not outside and (
                not target.exists() or (heading and heading not in headings(target))
            ):
                broken.append(f"{document.relative_to(ROOT)}: {link}")
    assert not broken, broken


def test_references_to_our_modules_resolve() -> None:
    """Dotted names of our modules, and of what is in them, in code and documents."""
    broken = []
    for path in tracked_files():
        if path.suffix not in (".py", ".md"):
            continue
        for reference in re.findall(r"(?<![\w./-])hpctrain(?:\.[^\W\d]\w*)+", path.read_text()):
            names, place = reference.split(".")[1:], PACKAGE
            while names and (place / names[0]).is_dir():
                place /= names.pop(0)
            module = place / "__init__.py"
            if names and (place / f"{names[0]}.py").is_file():
                module = place / f"{names.pop(0)}.py"
            source = module.read_text() if module.is_file() else ""
            if names and not re.search(rf"\b{names[0]}\b", source) and names != ["__file__"]:
                broken.append(f"{path.relative_to(ROOT)}: {reference}")
    assert not broken, broken


def test_no_path_of_anybodys_machine() -> None:
    # Put together from parts, so that this file does not find itself.
    pattern = re.compile(rf"(?<![\w.])/({'work'}|{'root'}|{'home'}/(?!\$|<)\w+)/")
    found = []
    for path in tracked_files():
        text = path.read_text(errors="ignore")
        found.extend(
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(text.splitlines(), 1)
            if pattern.search(line)
        )
    assert not found, f"a path of one machine is of no use on another: {found}"


def test_every_dependency_is_pinned() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for group in project["optional-dependencies"].values():
        wanted.extend(group)
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            package, _, version = line.partition("==")
            pinned[_normal(package)] = version
    assert all(pinned.values()), "constraints.txt pins with `==`"
    names = {_normal(re.split(r"[<>=!~;\[ ]", entry)[0]) for entry in wanted}
    names.discard("hpctrain")  # one extra names another
    assert not names - pinned.keys(), f"missing in constraints.txt: {names - pinned.keys()}"


def _normal(package: str) -> str:
    """PEP 503"""
    return re.sub(r"[-_.]+", "-", package).lower().strip()
