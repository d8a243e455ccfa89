"""What `adopt` makes of a script, as documents, and the draft that they are gathered in.

Belongs here: lines with what became of each part, fields of spec and profile with the line that
they are from, and both as YAML. Does not belong here: reading the script (`adoption`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hpctrain.base.frozen import Frozen
from hpctrain.site.profile_text import Stated, Tree, Value, profile_text, stated_values
from hpctrain.spec.job_text import expanded_names, secret_reason
from hpctrain.spec.profile import ClusterProfile

# spec, profile: it is in that file now; needless: hpctrain does it; dropped: it is lost.
Outcome = Literal["spec", "profile", "needless", "dropped"]


class AdoptedPart(Frozen):
    """What became of a part of a line. `part`: which, where there are several.

    `field`: dotted path in the spec or in the profile.
    """

    outcome: Outcome
    reason: str
    field: str | None = None
    part: str | None = None


class AdoptedLine(Frozen):
    """Lines of the script that belong together, as they are, but for values that look secret."""

    line: int
    last_line: int
    text: str
    parts: tuple[AdoptedPart, ...]


class ProfileNeed(Frozen):
    """A field that a profile for this script needs, and the value."""

    field: str
    value: str
    line: int | None


class Adoption(Frozen):
    """A script, line by line, and what was written.

    `spec` and `overlay` are the texts of the files; no overlay: no profile was given, or it needs
    no change. `questions`: what only its author knows. `adapter_needs`: what the adapter needs of
    the command, in sentences.
    """

    script: str
    name: str
    profile: str | None
    lines: tuple[AdoptedLine, ...]
    spec: str
    overlay: str | None
    profile_needs: tuple[ProfileNeed, ...]
    questions: tuple[str, ...]
    adapter_needs: tuple[str, ...]

    @property
    def dropped(self) -> tuple[tuple[AdoptedLine, AdoptedPart], ...]:
        """The parts of the script that are lost."""
        return tuple(
            (line, part) for line in self.lines for part in line.parts if part.outcome == "dropped"
        )


@dataclass(frozen=True)
class SiteVariable:
    """A variable of the fabric, which a profile sets."""

    value: str
    line: int
    prepend: bool = False


@dataclass
class Draft:
    """The fields that were found so far. `line`: the line that is being read."""

    profile: ClusterProfile | None
    profile_name: str | None
    spec: dict[str, Stated] = field(default_factory=dict)
    site: dict[str, Stated] = field(default_factory=dict)
    site_lines: dict[str, int] = field(default_factory=dict)
    site_variables: dict[str, SiteVariable] = field(default_factory=dict)
    partition: str | None = None
    new_partition: bool = False
    parts: dict[int, list[AdoptedPart]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)  # that the profile's fields put in
    secrets: set[str] = field(default_factory=set)
    line: int = 0

    def say(
        self,
        outcome: Outcome,
        reason: str,
        *,
        field: str | None = None,
        part: str | None = None,
        line: int | None = None,
    ) -> None:
        """Report what became of a part of the line that is being read, or of another one."""
        shown = without_secrets(part) if part else None
        reason = without_secrets(reason)
        found = AdoptedPart(outcome=outcome, reason=reason, field=field, part=shown)
        known = self.parts.setdefault(self.line if line is None else line, [])
        if found not in known:
            known.append(found)

    def hidden(self, text: str) -> str:
        """Return a text without the values that were found to be secrets, wherever they stand."""
        for one in self.secrets:
            text = text.replace(one, "...")
        return without_secrets(text)

    def put(self, path: str, value: Value, *, part: str | None = None, why: str = "") -> None:
        """Set a field of the spec from the line that is being read."""
        self.spec[path] = Stated(value, f"line {self.line}{': ' if why else ''}{why}")
        self.say("spec", why or shown_value(value), field=path, part=part)

    def ask(self, path: str, question: str) -> None:
        """Set a field of the spec to a value that must be replaced."""
        self.spec[path] = Stated("ASK", question, is_ask=True)

    def need(self, path: str, value: Value, *, part: str | None = None, why: str = "") -> None:
        """Set a field of the profile, unless the profile has that value."""
        try:
            texts = value if isinstance(value, tuple) else (value,)
            found = [name for one in texts if isinstance(one, str) for name in expanded_names(one)]
        except ValueError:
            self.say("dropped", "its value is not known before the job", field=path, part=part)
            return
        for name in found:
            self.names.setdefault(name, self.line)
        path = self._path(path)
        current = value_at(self.profile, path, self.partition)
        same = self.profile is not None and _plain(current) == _plain(value)
        if same:
            reason = f"profile {self.profile_name} has it"
            self.say("needless", reason, field=path, part=part)
            self.site.pop(path, None)
            for line, parts in self.parts.items():  # where a list came together line by line
                self.parts[line] = [
                    one.model_copy(update={"outcome": "needless", "reason": reason})
                    if one.field == path
                    else one
                    for one in parts
                ]
            return
        self.site[path] = Stated(value, f"line {self.line}{': ' if why else ''}{why}")
        self.site_lines[path] = self.line
        self.say("profile", why or shown_value(value), field=path, part=part)

    def need_more(self, path: str, *words: str, part: str | None = None) -> None:
        """Add words to a list of the profile, behind those that earlier lines have asked for."""
        before = self.site.get(path)
        known = before.value if before is not None and isinstance(before.value, tuple) else ()
        self.need(path, (*known, *words), part=part)

    def set_variable(self, name: str, value: str, *, prepend: bool = False) -> None:
        """Set a variable of the fabric, unless the profile sets it to the same."""
        has = self.profile.for_partition(self.partition) if self.profile is not None else None
        for one in has.environment if has is not None else ():
            if one.name == name and one.value == value and one.prepend == prepend:
                self.say("needless", f"profile {self.profile_name} sets it", part=name)
                return
        self.site_variables[name] = SiteVariable(value, self.line, prepend)
        self.say("profile", value, field="environment", part=name)

    def _path(self, path: str) -> str:
        """Put an option into the partition where that has a value of its own."""
        name = path.removeprefix("slurm.")
        if self.profile is None or name not in ("account", "qos", "constraint"):
            return path
        partition = self.profile.slurm.partition(self.partition)
        if partition is not None and getattr(partition, name) is not None:
            return f"slurm.partitions[{partition.name}].{name}"
        return path


def value_at(profile: ClusterProfile | None, path: str, partition: str | None) -> object:
    """Return the value of a profile at a dotted path, as jobs of a partition have it."""
    found: object = profile.for_partition(partition) if profile is not None else None
    if path.startswith("slurm.partitions["):
        path = f"slurm.{path.rpartition('.')[2]}"
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
    return found


def _plain(value: object) -> object:
    return value if isinstance(value, bool | tuple | None) else str(value)


_DEFAULT = re.compile(r"([A-Za-z_]\w*)(:?[-=])([^}\"']+)(?=\})")
_LISTED = re.compile(r"(?<=,)([A-Za-z_]\w*)(=)([^\s;&|},]+)")
_GIVEN = re.compile(r"([A-Za-z_][\w-]*)(=)(\"[^\"]*\"|'[^']*'|[^\s;&|}]+)")
_OPTION = re.compile(r"(--?[A-Za-z][\w-]*)(\s+)(\"[^\"]*\"|'[^']*'|[^\s;&|]+)")


def without_secrets(text: str) -> str:
    """Replace the values of variables and options that look secret, by name or by form."""

    def hidden(match: re.Match[str]) -> str:
        value = match[3].strip("\"'")
        name = match[1].lstrip("-").replace("-", "_")
        known = not value or value.startswith("$") or value == "ASK"
        secret = None if known else secret_reason(name, value.replace("$", "$$"))
        return f"{match[1]}{match[2]}..." if secret else match[0]

    for pattern in (_DEFAULT, _LISTED, _GIVEN, _OPTION):
        text = pattern.sub(hidden, text)
    return re.sub(
        r"[\w.-]{16,}", lambda one: "..." if secret_reason("word", one[0]) else one[0], text
    )


def shown_value(value: Value) -> str:
    """Write a value for people."""
    if isinstance(value, tuple):
        return " ".join(value)
    if value == "":
        return "empty"
    return str(value) if not isinstance(value, bool) else "true" if value else "false"


# -- The files ----------------------------------------------------------------------------------


_ORDER = (
    *("name", "trainer.adapter", "trainer.launch", "trainer.launcher_arguments"),
    *("trainer.directory", "trainer.command", "trainer.done", "trainer.checkpoint"),
    *("trainer.signal", "resources.gpus", "resources"),
    "environment",
)


def spec_text(draft: Draft, script: str) -> tuple[str, tuple[str, ...]]:
    """Write the spec; returns it with the questions in it."""

    def rank(item: tuple[str, Stated]) -> int:
        places = (n for n, name in enumerate(_ORDER) if f"{item[0]}.".startswith(f"{name}."))
        return next(places, len(_ORDER))

    fields = dict(draft.spec)
    if "trainer.signal.save" not in fields:
        fields.pop("trainer.signal.seconds", None)
    tree = tree_of(dict(sorted(fields.items(), key=rank)))
    head = [
        f"Adopted from {script} by `hpctrain adopt`, which ran nothing of it. What became of each "
        "line: that command again.",
        "Fields: `hpctrain explain trainer`, docs/adopt.md. A rehearsal: `hpctrain try`.",
    ]
    asked = [(path, one.source) for path, one in stated_values(tree) if one.is_ask]
    if asked:
        head.append("`ASK` is a question to you: put your value, and remove the comment.")
    return profile_text(tree, head), tuple(f"{path}: {question}" for path, question in asked)


def overlay_text(draft: Draft, script: str, name: str, extends: str) -> str:
    """Write a profile that extends another one by what the script does and that one does not."""
    fields: dict[str, Stated] = {
        "extends": Stated(extends, f"the profile that {script} was compared with"),
        "name": Stated(f"{name}-site"[:63], "its own name"),
    }
    partitions: dict[str, dict[str, Tree]] = {}
    for path, stated in draft.site.items():
        found = re.fullmatch(r"slurm\.partitions\[(.*)\]\.(\w+)", path)
        if found is not None:
            partitions.setdefault(found[1], {})[found[2]] = stated
        else:
            fields[path] = stated
    if draft.new_partition:
        stated = draft.spec["resources.partition"]
        partitions.setdefault(str(stated.value), {})
    tree: dict[str, Any] = dict(tree_of(dict(sorted(fields.items(), key=_site_rank))))
    if partitions:
        source = draft.spec.get("resources.partition", Stated("", "the profile's default"))
        tree.setdefault("slurm", {})["partitions"] = [
            {"name": Stated(one, source.source), **more} for one, more in partitions.items()
        ]
    if draft.site_variables:
        tree["environment"] = [
            _variable(key, one, script) for key, one in draft.site_variables.items()
        ]
    head = [f"What {script} asks of its site, and {extends} does not do. By `hpctrain adopt`."]
    return profile_text(tree, head)


def _variable(name: str, variable: SiteVariable, script: str) -> Mapping[str, Tree]:
    source = f"line {variable.line}"
    found: dict[str, Tree] = {"name": Stated(name, source), "value": Stated(variable.value, source)}
    if variable.prepend:
        found["prepend"] = Stated(True, source)
    return {**found, "reason": Stated(f"{script} sets it", source)}


def _site_rank(item: tuple[str, Stated]) -> int:
    section = item[0].partition(".")[0]
    return ("extends", "name", "gpu", "slurm", "software").index(section)


def tree_of(fields: Mapping[str, Stated]) -> dict[str, Tree]:
    """Nest dotted paths. Names of variables have no dots."""
    tree: dict[str, Any] = {}
    for path, stated in fields.items():
        *above, last = path.split(".")
        here = tree
        for name in above:
            here = here.setdefault(name, {})
        here[last] = stated
    return tree
