"""Read a batch script line by line, and say of every line what becomes of it.

Nothing of the script is run, and no other file is read. Belongs here: what a statement means for a
run. Does not belong here: the grammar of bash (`bash_text`), options of Slurm (`slurm_requests`),
the words of the trainer's command (`trainer_command`), YAML (`draft`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from hpctrain.adopt.bash_text import Part, Statement, Word, statements_of
from hpctrain.adopt.draft import (
    AdoptedLine,
    Adoption,
    Draft,
    ProfileNeed,
    overlay_text,
    shown_value,
    spec_text,
)
from hpctrain.adopt.known_words import WORDS, AddedWords, Option, slurm_options
from hpctrain.adopt.slurm_requests import (
    Size,
    container_option,
    finish_size,
    read_directives,
    read_srun,
    run_name,
)
from hpctrain.adopt.trainer_command import (
    TrainerCommand,
    known_number,
    matching_adapter,
    taken_apart,
    trainer_options,
    with_value,
)
from hpctrain.adopt.variables import (
    Piece,
    Text,
    Variables,
    job_text,
    literal_of,
    names_in,
    shell_text,
    unknown_in,
)
from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.site.profile_text import Stated
from hpctrain.spec.job_text import secret_reason
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.trainer import Adapter

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?(\+?)=")
_DECLARING = frozenset({"export", "declare", "typeset", "readonly", "local"})
_STARTS_TRAINING = re.compile(r"\b(torchrun|accelerate launch|deepspeed|srun|torch\.distributed)\b")
_CONDA = re.compile(r"(conda|mamba|miniforge)", re.IGNORECASE)
_MODULE_INIT = re.compile(r"(^|/)(lmod|modules?)(/.*)?/?(\.sh|bash|sh|profile)$")
_MODULE_PRINTS = frozenset(["list", "avail", "show", "spider", "whatis", "help", "keyword"])
_MODULE_CHANGES = ("load", "add", "try-load", "purge", "use", "unload", "rm", "swap", "switch")
_MODULE_VERBS = {*_MODULE_PRINTS, *_MODULE_CHANGES, "reset", "restore", "save"}
_ULIMITS = {"-c": "core", "-l": "memlock", "-n": "nofile", "-s": "stack"}
# Of a task, so that the job cannot put them in.
_OF_TASK = frozenset({"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURMD_NODENAME", "RANDOM"})
# What the agent fills in.
_COUNTS = {
    **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "{nodes}"),
    **dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), "{gpus_per_node}"),
}
# What a job has without being told (profile, `slurm.export: clean`).
_OF_JOB = frozenset({"HOME", "LANG", "PATH", "USER", "PWD", "HOSTNAME", "TMPDIR"})
_ENDS = ("exit", "echo", "true", "return", "printf")
_FOR_ITSELF = "the value stays in the script: nothing that starts the training uses it"
_BLOCKS = {
    **dict.fromkeys(("if", "case"), "a decision of the shell: write what holds for this run"),
    **dict.fromkeys(("for", "while", "until", "select"), "a loop: a run has one command"),
    "function": "a function of the shell",
    **dict.fromkeys(("{", "("), "a group of commands of the shell"),
}


@dataclass(frozen=True)
class Source:
    """A script to adopt. `directory`: where it is submitted, absolute.

    `output`: the directory of the spec, where that is another one.
    """

    name: str
    text: str
    directory: str
    output: str | None = None


@dataclass
class _Reader:
    """The state of reading one script."""

    source: Source
    draft: Draft
    adapters: Mapping[str, Adapter]
    variables: Variables
    size: Size = field(default_factory=Size)
    candidates: list[TrainerCommand] = field(default_factory=list)
    commands: dict[int, set[str]] = field(default_factory=dict)  # used by each candidate
    assigned: list[tuple[int, str, bool]] = field(default_factory=list)
    activates: bool = False
    blocks: list[int] = field(default_factory=list)  # lines that start a trainer in a block
    inherit: dict[str, int] = field(default_factory=dict)
    inside: int = 0

    # -- statements ------------------------------------------------------------------------------

    def read(self, statement: Statement) -> None:
        """Report what becomes of one statement."""
        draft = self.draft
        if not self.inside:
            draft.line = statement.first_line
        defaults = dict(self.variables.defaults)
        first = statement.words[0].literal if statement.words else None
        if statement.broken is not None:
            draft.say("dropped", f"bash could not read this either: {statement.broken}")
        elif statement.block is not None:
            self._block(statement)
        elif statement.joined in ("|", "|&"):
            texts = [shell_text(text) for word in statement.words for text in self._split(word)]
            draft.say("needless", "hpctrain keeps what a run prints", part=" ".join(texts))
        elif statement.joined in ("&&", "||") and first in _ENDS:
            draft.say("needless", "the supervisor decides what follows a failure", part="|| ...")
        elif not statement.words:
            draft.say("dropped", "it only writes a file", part=None)
        elif all(self._assignment(word) for word in statement.words):
            for word in statement.words:
                self._assign(word, exported=False)
        else:
            self._command(statement)
        for name, value in self.variables.defaults.items():
            if name not in defaults:
                shown = "" if _secret(name, value) else f" `{value}`"
                reason = f"its default{shown} counts"
                draft.say("spec", reason, part=name)

    def _block(self, statement: Statement) -> None:
        lines = self.source.text.splitlines()[statement.first_line - 1 : statement.last_line]
        text = "\n".join(lines) if not self.inside else ""
        self.variables.doubt(text, statement.first_line)
        reason = _BLOCKS.get(statement.block or "", "a block of the shell")
        for number, line in enumerate(lines):
            if _STARTS_TRAINING.search(line) and not line.lstrip().startswith("#"):
                self.blocks.append(statement.first_line + number)
                reason += f"; line {statement.first_line + number} may start a trainer"
                break
        self.draft.say("dropped", reason)

    def _split(self, word: Word) -> list[Text]:
        return self.variables.split(word)

    # -- variables -------------------------------------------------------------------------------

    def _assignment(self, word: Word) -> re.Match[str] | None:
        first = word.parts[0] if word.parts else None
        if first is None or first.quoted or first.kind != "text":
            return None
        return _ASSIGNMENT.match(first.text)

    def _assign(self, word: Word, *, exported: bool) -> None:
        match = self._assignment(word)
        if match is None:  # `export NAME`
            name = word.literal
            if name and name.isidentifier() and exported:
                self.variables.export(name, self.draft.line)
                self.assigned.append((self.draft.line, name, True))
            elif name is None or not name.startswith("-"):
                self.draft.say("dropped", "no variable", part=name)
            return
        first = word.parts[0]
        rest = Part("text", first.text[match.end() :], first.quoted)
        value = Word((rest, *word.parts[1:]), word.items)
        name = match[1]
        self.variables.assign(
            name, value, line=self.draft.line, exported=exported, add=bool(match[2])
        )
        known = [old for old in self.assigned if old[:2] == (self.draft.line, name)]
        if not known:
            self.assigned.append((self.draft.line, name, exported))

    def finish_variables(self, used: set[str]) -> None:
        """Report what became of every variable, now that the trainer's command is known."""
        last = {name: line for line, name, _ in self.assigned}
        for line, name, exported in self.assigned:
            self.draft.line = line
            variable = self.variables.given.get(name)
            is_exported = exported or (variable is not None and variable.exported)
            if name in WORDS.own_variables:
                reason = "hpctrain sets it for each rank, anew for each launch"
                self.draft.say("needless", reason, part=name)
            elif variable is None:
                self._inherit(name, "it comes from where you submit")
            elif is_exported and last[name] == line:
                self._environment(name, variable.words, used)
            elif (
                name in used
                and not variable.is_array
                and unknown_in(variable.words[0])
                and not _has_spaces(variable.words[0])
            ):
                reason = "it was for the line that starts the training, which is taken apart"
                self.draft.say("needless", reason, part=name)
            elif name in used:
                reason = "its words stand there now, or were taken apart"
                self.draft.say("spec", reason, field="trainer", part=name)
            elif last[name] != line:
                self.draft.say("needless", "a later line has another value", part=name)
            else:
                self.draft.say("needless", _FOR_ITSELF, part=name)

    def _environment(self, name: str, words: tuple[Text, ...], used: set[str]) -> None:
        """Put an exported variable into the spec, or into the profile if it is of the fabric."""
        draft = self.draft
        text = words[0] if words else ()
        written = shell_text(text)
        unknown = unknown_in(text)
        literal = written if not unknown else "unknown"
        secret = _secret(name, literal)
        own = (Piece(name=name),)
        if secret is not None:
            self.draft.secrets.add(literal)
            self._inherit(name, f"{secret}: the value is left out")
        elif len(words) > 1 or (name in used and _has_spaces(text)):
            reason = "its words stand there now, or were taken apart"
            draft.say("spec", reason, field="trainer", part=name)
        elif unknown is not None and name in used:
            reason = "it was for the line that starts the training, which is taken apart"
            draft.say("needless", reason, part=name)
        elif unknown is not None and re.search(r"scontrol show hostname|SLURM_.*NODELIST", unknown):
            draft.say("needless", "the first node is chosen anew for each launch", part=name)
        elif unknown is not None:
            draft.say("dropped", f"`{unknown}` is not run: write a value", part=name)
        elif text[-1:] == own and len(text) == 2 and text[0].text.endswith(":"):
            draft.set_variable(name, job_text(text[:1]).removesuffix(":"), prepend=True)
        elif own[0] in text:
            draft.say("dropped", "only something before the old value can be added", part=name)
        elif name.startswith(tuple(WORDS.fabric)):
            draft.set_variable(name, job_text(text))
        else:
            self._needs(text)
            draft.put(f"environment.variables.{name}", job_text(text), part=name)

    def _inherit(self, name: str, reason: str) -> None:
        self.inherit[name] = self.draft.line
        self.draft.say("spec", reason, field="environment.inherit", part=name)

    def _needs(self, text: Text) -> None:
        """Pass on the variables that a text puts in, if the job would not have them."""
        profile = self.draft.profile
        has = {*_OF_JOB, *(profile.slurm.inherit if profile is not None else ())}
        if profile is not None:
            has |= {one.name for one in profile.environment}
        for name in names_in(text):
            given = self.variables.given.get(name)
            set_here = given is not None and given.exported
            if not set_here and name not in has and not name.startswith("SLURM"):
                self.inherit.setdefault(name, self.draft.line)

    # -- commands --------------------------------------------------------------------------------

    def _command(self, statement: Statement) -> None:
        draft = self.draft
        self.variables.touched.clear()
        words = [text for word in statement.words for text in self._split(word)]
        used = self.variables.used()
        if not words:
            draft.say("needless", "it is empty")
            return
        first = shell_text(words[0])
        name = first.rpartition("/")[2]
        rest = [shell_text(word) for word in words[1:]]
        if first in _DECLARING:
            flags = [word.literal or "" for word in statement.words[1:]]
            exported = first == "export" or any(re.match(r"-\w*x", flag) for flag in flags)
            for word in statement.words[1:]:
                if not (word.literal or "").startswith("-"):
                    self._assign(word, exported=exported)
            if not any(not flag.startswith("-") for flag in flags):
                draft.say("needless", "it is about the shell around the training")
        elif name in ("module", "ml"):
            self._modules(name, rest)
        elif first in ("source", "."):
            self._source(rest)
        elif name in ("conda", "mamba", "micromamba"):
            self._conda(name, rest)
        elif first == "cd" or first == "pushd":
            self._directory(words[1:])
        elif first == "eval":
            self._evaluated(words[1:])
        elif first == "ulimit":
            self._limit(rest)
        elif first == "unset":
            names = tuple(one for one in rest if one.isidentifier())
            draft.need_more("software.unset", *names)
            for one in names:
                self.variables.given.pop(one, None)
        elif name == "mkdir":
            self._makes_directories(rest)
        elif name == "scontrol" and rest[:1] in (["show"], ["requeue"]):
            printing = rest[0] == "show"
            draft.say(
                "needless", "it only prints" if printing else WORDS.slurm.sentences["requeue"]
            )
        elif name == "sbatch":
            self._submits(statement, rest)
        elif name == "spack" and rest[:2] == ["env", "activate"] and len(rest) > 2:
            draft.need("software.activate.spack", rest[-1])
        else:
            self._program(statement, words, used)

    def _program(self, statement: Statement, words: list[Text], used: set[str]) -> None:
        """Report a command that may start the training, or why it is not needed or lost."""
        draft = self.draft
        first = shell_text(words[0]).rpartition("/")[2]
        needless = next((one for one in WORDS.commands.needless if first in one.words), None)
        writes = any(one.operator.lstrip("12") in (">", ">>") for one in statement.redirections)
        if needless is not None and not (writes and first in ("echo", "printf")):
            draft.say("needless", needless.reason)
            return
        if any(one.operator in ("<<", "<<-") and writes for one in statement.redirections):
            reason = "a document that the job writes: write it once, where the trainer reads it"
            draft.say("dropped", reason)
            return
        command = taken_apart(words, draft.line)
        if command.script is not None:
            self._shell(command, used)
            return
        known_to = {name: one.commands for name, one in self.adapters.items()}
        command.adapter = matching_adapter(command.program, known_to)
        if command.adapter is None and command.launcher is not None:
            starts = [(Piece(one),) for one in command.launcher.programs[0].split()]
            command.adapter = matching_adapter(starts, known_to)
        program = shell_text(command.program[0]) if command.program else ""
        known = next((one for one in WORDS.commands.needless if program in one.words), None)
        if known is not None:
            draft.say("needless", known.reason)
        elif command.score > 0:
            self.candidates.append(command)
            self.commands[len(self.candidates) - 1] = used
        elif unknown_in(words[0]):
            draft.say("dropped", f"what is run here is not known: `{unknown_in(words[0])}`")
        else:
            draft.say("dropped", WORDS.commands.before)

    def _shell(self, command: TrainerCommand, used: set[str]) -> None:
        """Read the text of `bash -c` as a script; what is around it is around its training."""
        assert command.script is not None
        before = len(self.candidates)
        if self.inside > 3:
            self.draft.say("dropped", "too many shells inside each other")
            return
        self.inside += 1
        for statement in statements_of(command.script):
            self.read(statement)
        self.inside -= 1
        for number in range(before, len(self.candidates)):
            inner = self.candidates[number]
            inner.variables = [*command.variables, *inner.variables]
            inner.srun = [*(command.srun or ()), *(inner.srun or ())] or inner.srun
            if command.srun is not None and inner.srun is None:
                inner.srun = []
            inner.container = inner.container or command.container
            inner.image = inner.image or command.image
            inner.container_options = [*command.container_options, *inner.container_options]
            self.commands[number] = self.commands[number] | used
        if len(self.candidates) == before and self.draft.line not in self.draft.parts:
            self.draft.say("dropped", WORDS.commands.before)

    def _evaluated(self, words: list[Text]) -> None:
        text = " ".join(shell_text(word) for word in words)
        hook = re.search(r"(\S*?)(?:/bin/)?(micromamba|mamba|conda)\)? .*hook", text)
        if hook is None and re.search(r"conda|mamba", text) and "hook" in text:
            self.draft.say("needless", "hpctrain makes the tool of `software.activate` known")
        elif hook is not None:
            root = hook[1].removeprefix("$(").strip("\"'")
            if root:
                self.draft.need("software.activate.root", root)
            else:
                reason = "hpctrain makes the tool of `software.activate` known"
                self.draft.say("needless", reason)
        else:
            self._shell(TrainerCommand(self.draft.line, script=text), self.variables.used())

    def _modules(self, name: str, rest: list[str]) -> None:
        draft = self.draft
        force = [one for one in rest if one.startswith("-") and not re.match(r"-[A-Za-z]+/", one)]
        words = [one for one in rest if one not in force]
        verb = words[0] if words else "list"
        if name == "ml" and verb not in _MODULE_VERBS and words:
            verb, words = "load", ["load", *words]
        if any("$(" in one for one in words):
            draft.say("dropped", "the name of a module is printed by a command")
        elif verb in ("load", "add", "try-load"):
            draft.need_more("software.modules.load", *words[1:])
        elif verb == "use":
            draft.need_more("software.modules.use", *words[1:])
        elif verb == "purge":
            draft.need("software.modules.purge", "force" if "--force" in force else True)
        elif verb in _MODULE_PRINTS:
            draft.say("needless", "it only prints")
        elif verb == "reset":
            reason = "a job of hpctrain begins without modules of a login: `purge` in the profile"
            draft.need("software.modules.purge", True, why=reason)
        else:
            draft.say("dropped", f"no field does `module {verb}`: load what is to be there")

    def _source(self, rest: list[str]) -> None:
        draft, file = self.draft, rest[0] if rest else ""
        folder = re.sub(r"/?bin/activate$", "", file)
        name = PurePosixPath(file).name
        if "$(" in file and not _CONDA.search(file):
            draft.say("dropped", "the name of the file is printed by a command")
        elif name == "activate" and file == "activate":
            self.activates = True
            draft.need("software.activate.conda", rest[1] if len(rest) > 1 else "base")
        elif name == "activate" and _CONDA.search(folder) and "/envs/" not in folder:
            self.activates = True
            draft.need("software.activate.root", folder)
            if len(rest) > 1:
                draft.need("software.activate.conda", rest[1])
        elif name == "activate":
            self.activates = True
            draft.need("software.activate.venv", self._absolute(folder or "."))
        elif name in ("conda.sh", "mamba.sh", "micromamba.sh"):
            root = re.sub(r"/etc/profile\.d/\w+\.sh$", "", file)
            if root == file or "$(" in root:
                draft.say("needless", "hpctrain makes the tool of `software.activate` known")
            else:
                draft.need("software.activate.root", root.removeprefix('"'))
        elif _MODULE_INIT.search(file):
            draft.need("software.modules.init", file)
        elif file == "/etc/profile":
            draft.need("software.login_shell", True)
        elif name in (".bashrc", ".bash_profile", ".profile"):
            self.assigned.append((draft.line, ".bashrc", False))
        elif name.startswith(".env") or name.endswith(".env"):
            reason = "name its variables in `environment.inherit`, and export them as you submit"
            draft.say("dropped", reason)
        elif "software.setup" in draft.site or not file:
            draft.say("dropped", "a profile has one `software.setup`: read this file there")
        else:
            draft.need("software.setup", self._absolute(file))

    def _conda(self, name: str, rest: list[str]) -> None:
        draft = self.draft
        if rest[:1] == ["activate"]:
            self.activates = True
            draft.need(f"software.activate.{name}", rest[1] if len(rest) > 1 else "base")
        elif rest[:1] in (["deactivate"], ["info"], ["list"], ["env"]):
            draft.say("needless", "hpctrain activates one environment, in a shell of its own")
        elif rest[:1] == ["run"] or "run" in rest[:2]:
            draft.say("dropped", "activate the environment: `software.activate` of the profile")
        else:
            draft.say("dropped", WORDS.commands.before)

    def _directory(self, words: list[Text]) -> None:
        draft = self.draft
        text = words[0] if words else (Piece(name="HOME"),)
        if unknown_in(text):
            draft.say("dropped", f"`{unknown_in(text)}` is not run: set `trainer.directory`")
            return
        path = self._absolute(shell_text(text))
        self.variables.directory = path
        if path == self.source.directory:
            draft.say("needless", "a trainer runs in the directory of its spec")
            draft.spec.pop("trainer.directory", None)
        elif any(True for _ in names_in(text)):
            draft.ask(
                "trainer.directory", f"write out `{shell_text(text)}`, where the trainer runs"
            )
            draft.say("dropped", "its variables are not known here: a question in the spec")
        else:
            draft.put("trainer.directory", path)

    def _limit(self, rest: list[str]) -> None:
        option, value = (rest[0], rest[1] if len(rest) > 1 else "") if rest else ("", "")
        option = option.replace("S", "").replace("H", "")
        path = _ULIMITS.get(option)
        known = path is not None and (value.isdecimal() or value == "unlimited")
        if known and not (path == "nofile" and not value.isdecimal()):
            number = int(value) if value.isdecimal() else value
            self.draft.need(f"software.ulimits.{path}", number)
        elif not value:
            self.draft.say("needless", "it only prints")
        else:
            self.draft.say("dropped", "no field has this limit")

    def _makes_directories(self, rest: list[str]) -> None:
        names = [one for one in rest if not one.startswith("-")]
        if all(re.search(r"log|out|checkpoint|ckpt|result|save", one, re.I) for one in names):
            self.draft.say("needless", "hpctrain makes the directories of logs and of `{output}`")
        else:
            self.draft.say("dropped", "make them before you submit")

    def _submits(self, statement: Statement, rest: list[str]) -> None:
        own = any("$0" in one or PurePosixPath(one).name == self.source.name for one in rest)
        if own:
            reason = "hpctrain goes on by itself until `trainer.done`"
            self.draft.say("needless", reason)
        else:
            self.draft.say("dropped", "`hpctrain submit --after RUN` starts a run behind this one")

    def _absolute(self, path: str) -> str:
        joined = path if path.startswith(("/", "$")) else f"{self.variables.directory}/{path}"
        return re.sub(r"/\./|//+", "/", joined).removesuffix("/.").rstrip("/") or "/"


def adopt(
    source: Source,
    adapters: Mapping[str, Adapter],
    profile: ClusterProfile | None = None,
    profile_name: str | None = None,
    extends: str | None = None,
) -> Adoption:
    """Make a spec of a batch script, and the differences of a profile; raises InvalidInputError.

    `extends`: what the overlay names as its base, where that is not the profile's name.
    """
    if "\0" in source.text:
        raise InvalidInputError([Problem("this is no script: it contains NUL", source.name)])
    draft = Draft(profile, profile_name)
    reader = _Reader(source, draft, adapters, Variables(source.directory))
    text = source.text.replace("\r\n", "\n")
    statements = statements_of(text)
    _directive_lines(reader, text, statements)
    for statement in statements:
        reader.read(statement)
    used = _training(reader)
    for number, (line, name, _) in enumerate(reader.assigned):
        if name == ".bashrc":
            draft.line = line
            if reader.activates:
                draft.say("needless", "it made conda known, which `software.activate` does")
            else:
                draft.say("dropped", "jobs of hpctrain do not read it: name what it sets")
            reader.assigned[number] = (line, "", False)
    reader.assigned = [one for one in reader.assigned if one[1]]
    reader.finish_variables(used)
    for name, line in draft.names.items():
        draft.line = line
        reader._needs((Piece(name=name),))
    for name, line in reader.inherit.items():
        draft.spec.setdefault("environment.inherit", Stated((), f"line {line}"))
        stated = draft.spec["environment.inherit"]
        assert isinstance(stated.value, tuple)
        draft.spec["environment.inherit"] = replace(stated, value=(*stated.value, name))
    draft.line = 0
    finish_size(draft, reader.size)
    if source.output is not None:
        submitted = Stated(source.directory, "the directory where the script is submitted")
        draft.spec.setdefault("trainer.directory", submitted)
    draft.spec.setdefault(
        "name", Stated(run_name(PurePosixPath(source.name).stem), "the name of the script")
    )
    return _adoption(reader, text, statements, extends)


def _directive_lines(reader: _Reader, text: str, statements: Sequence[Statement]) -> None:
    """Read `#SBATCH` lines before the first command (sbatch(1)), and the line `#!`."""
    first = min((one.first_line for one in statements), default=1 << 30)
    inside = {n for one in statements for n in range(one.first_line, one.last_line + 1)}
    found: list[tuple[int, Option]] = []
    for number, line in enumerate(text.splitlines(), 1):
        reader.draft.line = number
        if number == 1 and line.startswith("#!"):
            if re.search(r"\s-\w*l\b|--login", line):
                reader.draft.need("software.login_shell", True)
            else:
                reader.draft.say("needless", "the script of hpctrain is one for bash, too")
        elif line.startswith("#SBATCH") and number not in inside:
            if number > first:
                reason = "sbatch reads no such line behind the first command"
                reader.draft.say("dropped", reason)
                continue
            words = [
                word
                for one in statements_of(line.removeprefix("#SBATCH").replace("$", r"\$"))
                for word in one.words
            ]
            options, rest = slurm_options(
                [text for word in words for text in reader.variables.split(word)], "sbatch"
            )
            found += [(number, option) for option in options]
            if rest or not options:
                shown = " ".join(shell_text(word) for word in rest)
                reader.draft.say("dropped", "sbatch knows no such words", part=shown or None)
    read_directives(reader.draft, reader.size, found)


def _has_spaces(text: Text) -> bool:
    """Whether a text is several words, outside of what is not known."""
    return any(re.search(r"\s", piece.text) for piece in text)


def _secret(name: str, value: str) -> str | None:
    """Return why a variable or an option has a secret; None where it has none, or takes one."""
    if not value or value.startswith("$"):
        return None
    return secret_reason(name.replace("-", "_"), value.replace("$", "$$"))


def _training(reader: _Reader) -> set[str]:
    """Choose the command that trains, and fill in the spec from it; returns the variables used."""
    draft = reader.draft
    order = sorted(
        range(len(reader.candidates)), key=lambda number: -reader.candidates[number].score
    )
    for number in order[1:]:
        other = reader.candidates[number]
        draft.line = other.line
        chosen = reader.candidates[order[0]]
        likely = other.score >= chosen.score - 0.5
        reason = WORDS.commands.before
        if likely:
            reason = f"a run has one command, that of line {chosen.line}: make a second spec"
        draft.say("dropped", reason, part=other.name)
    if not order:
        question = "which command trains? No line starts it outside of blocks"
        if reader.blocks:
            question += f"; line {' or '.join(map(str, reader.blocks))} may do so"
        draft.spec["trainer.command"] = Stated(("ASK",), question, is_ask=True)
        draft.ask("trainer.done.step", _DONE)
        return set()
    command = reader.candidates[order[0]]
    draft.line = command.line
    _start(reader, command)
    _program_words(reader, command)
    return reader.commands[order[0]]


_DONE = (
    "the step at which the training is done, or `{file: NAME}` below {output} that it writes at "
    "its end: an exit code of 0 alone is no end"
)


def _start(reader: _Reader, command: TrainerCommand) -> None:
    """Report srun, container and launcher around the trainer."""
    draft, size = reader.draft, reader.size
    for name, value in command.variables:
        if name in WORDS.own_variables:
            draft.say("needless", "hpctrain sets it for each rank", part=name)
        else:
            reader._environment(name, (value,), set())
    _exported(reader, command)
    read_srun(draft, size, command.srun or ())
    if command.container is not None and command.image is not None:
        launcher = command.container.launcher
        draft.need("software.container.launcher", launcher)
        if unknown := unknown_in(command.image):
            draft.say("dropped", f"the image `{unknown}` is not known", part="image")
        else:
            draft.need("software.container.image", job_text(command.image))
        for option in command.container_options:
            part = " ".join(shell_text(word) for word in option.written)
            if option.name == "env" and option.value:
                name = shell_text(option.value).partition("=")[0]
                reader.inherit[name] = draft.line
                draft.say("spec", "by name", field="environment.inherit", part=f"--env {name}")
            else:
                container_option(draft, launcher, option, part)
    for word in command.others:
        draft.say("needless", "it means nothing for a run", part=word)
    _launch(reader, command)


def _exported(reader: _Reader, command: TrainerCommand) -> None:
    """Take over the variables of `srun --export=ALL,NAME=VALUE,NAME`."""
    for option in [one for one in command.srun or () if one.name == "export" and one.value]:
        words = set(shell_text(option.value or ()).split(",")) - {"ALL", "NONE", "NIL"}
        for word in sorted(words):
            name, equals, value = word.partition("=")
            if equals:
                reader._environment(name, ((Piece(value),),), set())
            else:
                reader._inherit(name, "it comes from where you submit")
        if words and command.srun is not None:
            command.srun.remove(option)


def _launch(reader: _Reader, command: TrainerCommand) -> None:
    draft, size, launcher = reader.draft, reader.size, command.launcher
    if launcher is not None:
        draft.put("trainer.launch", launcher.launch, part=launcher.title, why=launcher.remark or "")
        _launcher_options(reader, command)
        return
    tasks, gpus, adapter = (
        size.node_tasks,
        size.per_node,
        reader.adapters.get(command.adapter or ""),
    )
    if command.srun is not None and (tasks or 1) > 1 and gpus in (None, tasks):
        draft.put("trainer.launch", "srun", part="srun", why="each task is a rank")
    elif (gpus or 1) == 1 and (command.srun is not None or size.all_nodes == 1):
        draft.put("trainer.launch", "srun", part="srun", why="one rank on each node")
    elif adapter is not None and adapter.launch is not None:
        draft.say("needless", f"adapter {command.adapter} says how it is launched", part="srun")
    else:
        why = "one task on each node: the command starts its own processes"
        draft.put(
            "trainer.launch", "self", part="srun" if command.srun is not None else None, why=why
        )


def _launcher_options(reader: _Reader, command: TrainerCommand) -> None:
    """Report the launcher's options: what hpctrain sets, and what stays."""
    draft, size, launcher = reader.draft, reader.size, command.launcher
    assert launcher is not None
    like = next((one for one in WORDS.launchers if one.title == launcher.like), launcher)
    kept: list[Text] = []
    module = {"m", "module", "no-python", "run-path"}
    for option in command.launcher_options:
        part = " ".join(shell_text(word) for word in option.written)
        reason = launcher.ours.get(option.name) or like.ours.get(option.name)
        count = known_number(option.value)
        if option.name in ("nproc-per-node", "num-gpus") and count and size.per_node is None:
            size.gpus_per_node = count
            size.lines.append(draft.line)
        if option.name in ("nnodes", "num-machines", "num-nodes") and count and size.nodes is None:
            size.nodes = count
            size.lines.append(draft.line)
        if option.name == "num-processes" and count and size.total is None:
            size.gpus = count
            size.lines.append(draft.line)
        if reason is not None:
            draft.say("needless", reason, part=part)
        elif option.name in module:
            draft.say("spec", "as it is", field="trainer.command", part=part)
        elif not option.name:
            draft.say("dropped", "options that a block of the script decides", part=part)
        elif launcher.keeps:
            kept += option.written
            draft.say("spec", "as it is", field="trainer.launcher_arguments", part=part)
        else:
            draft.say("dropped", "hpctrain starts ranks without it", part=part)
    if kept:
        words = _words(reader, kept, "trainer.launcher_arguments")
        draft.spec["trainer.launcher_arguments"] = Stated(words, f"line {draft.line}")


def _program_words(reader: _Reader, command: TrainerCommand) -> None:
    """Fill in command, adapter, checkpoint and end from the words of the trainer."""
    draft, words, options = reader.draft, list(command.program), WORDS.options
    adapter = reader.adapters.get(command.adapter or "")
    finds_itself = False
    saved: str | None = None
    for place, name, value in list(trainer_options(words, options.output)):
        if value is None or saved is not None or (name.lstrip("-") == "output" and adapter is None):
            continue
        saved = shell_text(value)
        words[place] = with_value(words[place], name, "{output}")
        draft.say("spec", f"{{output}} in place of {saved}: a directory for each launch",
                  field="trainer.command", part=name)  # fmt: skip
    resumes = False
    found = adapter is not None and adapter.checkpoint is not None and adapter.checkpoint.found
    for place, name, value in list(trainer_options(words, options.resume)):
        if resumes:
            continue
        resumes = True
        if value is None or shell_text(value).startswith("-"):
            finds_itself = adapter is None
            draft.say("spec", "the trainer looks for its newest checkpoint itself",
                      field="trainer.checkpoint.found", part=name)  # fmt: skip
            continue
        new, reason = "{resume}", "the newest verified checkpoint, and nothing in a fresh start"
        if found:
            new, reason = "{output}", "the chosen checkpoint is put there before it starts"
        words[place] = with_value(words[place], name, new)
        draft.say("spec", f"{new} in place of {shell_text(value)}: {reason}",
                  field="trainer.command", part=name)  # fmt: skip
    added = WORDS.added.get(command.adapter or "", AddedWords())
    if adapter is not None and not resumes and not found and not added.resume:
        draft.say("dropped", f"adapter {command.adapter} fits, but nothing in the command says "
                  "where to resume: add its option with {resume}", part="adapter")  # fmt: skip
        adapter = None
    if adapter is not None:
        more = (*(added.output if saved is None else ()), *(() if resumes else added.resume))
        words += [(Piece(word),) for word in more]
        why = "by the words of the command"
        why += f"; {' '.join(more)} was added" if more else ""
        draft.put("trainer.adapter", command.adapter, part="adapter", why=why)
    elif resumes:
        question = (
            "name of a checkpoint below {output}, with {step} for its number, such as "
            "`checkpoint-{step}` or `step={step}.ckpt`"
        )
        draft.ask("trainer.checkpoint.path", question)
    if finds_itself:
        draft.spec["trainer.checkpoint.found"] = Stated(True, f"line {draft.line}")
    _done(reader, words)
    written = _words(reader, words, "trainer.command")
    text = f"line {draft.line}"
    changed = sorted(
        f"{name} (line {one.changed_at})"
        for name in reader.commands[reader.candidates.index(command)]
        if (one := reader.variables.given.get(name)) is not None and one.changed_at is not None
    )
    if changed:
        text += f"; blocks of the script may change {', '.join(changed)}"
    draft.spec["trainer.command"] = Stated(written, text)
    draft.say("spec", " ".join(written[:4]), field="trainer.command")


def _done(reader: _Reader, words: list[Text]) -> None:
    """Say when the run is done, if the command says it."""
    draft = reader.draft
    for _, name, value in trainer_options(words, WORDS.options.steps):
        number = known_number(value)
        if number:
            draft.put("trainer.done.step", number, part=name)
            return
    draft.ask("trainer.done.step", _DONE)


def _words(reader: _Reader, words: Sequence[Text], path: str) -> tuple[str, ...]:
    """Write words for a spec: counts that the agent fills in, questions for what is not known."""
    draft = reader.draft
    found = []
    for number, word in enumerate(words):
        pieces = [Piece(_COUNTS[one.name]) if one.name in _COUNTS else one for one in word]
        unknown = unknown_in(tuple(pieces))
        of_task = next((one for one in names_in(tuple(pieces)) if one in _OF_TASK), None)
        before = shell_text(words[number - 1]) if number else ""
        if unknown in ("$@", "$*", "${@}", "${*}") or (unknown or "").startswith("${@"):
            draft.say("dropped", "arguments of `sbatch`: write them into `trainer.command`",
                      part=unknown)  # fmt: skip
            continue
        if unknown is not None or of_task is not None:
            shown = unknown or f"${of_task}"
            reason = f"`{shown}` is not known before the job: a question in the spec"
            draft.say("dropped", reason, part=shell_text(word))
            known = (Piece("ASK") if one.unknown or one.name in _OF_TASK else one for one in pieces)
            found.append(job_text(tuple(known)))
            continue
        text = literal_of(tuple(pieces))
        name = before.lstrip("-") if before.startswith("-") else ""
        key, equals, value = (text or "").lstrip("-").partition("=")
        secret = _secret(*((key, value) if equals else (name or "word", text or "")))
        if text is not None and secret is not None and "{" not in text:
            draft.secrets.add(value if equals else text)
            draft.say("dropped", f"{secret}: the value is left out, a question in the spec",
                      part=f"{key if equals else name}")  # fmt: skip
            found.append(f"{(text or '').partition('=')[0]}=ASK" if equals else "ASK")
            continue
        reader._needs(tuple(pieces))
        found.append(job_text(tuple(pieces)))
    return tuple(found)


# -- The result ----------------------------------------------------------------------------------


def _adoption(
    reader: _Reader, text: str, statements: Sequence[Statement], extends: str | None
) -> Adoption:
    draft = reader.draft
    if any("ASK" in word for word in _command_of(draft)) and "trainer.command" in draft.spec:
        stated = draft.spec["trainer.command"]
        if not stated.is_ask:
            question = f"put your values for ASK ({stated.source})"
            draft.spec["trainer.command"] = replace(stated, source=question, is_ask=True)
    spec, questions = spec_text(draft, reader.source.name)
    name = str(draft.spec["name"].value)
    needs = [
        ProfileNeed(field=path, value=shown_value(one.value), line=draft.site_lines.get(path))
        for path, one in draft.site.items()
    ]
    needs += [
        ProfileNeed(field=f"environment.{key}", value=one.value, line=one.line)
        for key, one in draft.site_variables.items()
    ]
    if draft.new_partition:
        value = str(draft.spec["resources.partition"].value)
        needs.append(ProfileNeed(field="slurm.partitions", value=value, line=None))
    overlay = None
    if draft.profile is not None and needs:
        overlay = overlay_text(draft, reader.source.name, name, extends or draft.profile.name)
    chosen = draft.spec.get("trainer.adapter")
    adapter = reader.adapters[str(chosen.value)] if chosen is not None else None
    return Adoption(
        script=reader.source.name,
        name=name,
        profile=draft.profile_name,
        lines=tuple(_lines(reader, text, statements)),
        spec=spec,
        overlay=overlay,
        profile_needs=tuple(needs),
        questions=questions,
        adapter_needs=adapter.needs if adapter is not None else (),
    )


def _command_of(draft: Draft) -> tuple[str, ...]:
    found: tuple[str, ...] = ()
    for path in ("trainer.command", "trainer.launcher_arguments"):
        stated = draft.spec.get(path)
        if stated is not None and isinstance(stated.value, tuple):
            found += stated.value
    return found


def _lines(reader: _Reader, text: str, statements: Sequence[Statement]) -> Iterator[AdoptedLine]:
    """Join what stands on the same lines, and yield each line once with what became of it."""
    lines = text.splitlines()
    inside = {n for one in statements for n in range(one.first_line, one.last_line + 1)}
    spans = [(one.first_line, one.last_line) for one in statements]
    spans += [
        (number, number)
        for number, line in enumerate(lines, 1)
        if number not in inside
        and (line.startswith("#SBATCH") or (number == 1 and line[:2] == "#!"))
    ]
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    for first, last in joined:
        parts = [one for n in range(first, last + 1) for one in reader.draft.parts.get(n, ())]
        shown = "\n".join(map(reader.draft.hidden, lines[first - 1 : last]))
        hidden = [
            one.model_copy(update={"reason": reader.draft.hidden(one.reason)}) for one in parts
        ]
        assert parts, f"line {first} was read, and nothing was said of it"
        yield AdoptedLine(line=first, last_line=last, text=shown, parts=tuple(hidden))
