"""Load specs and profiles: a YAML file in, a frozen document or all its problems out.

Belongs here: finding and reading the files, and the order of the steps (parse, overrides, validate,
explain). Does not belong here: the fields (`run`, `profile`). pydantic and ruamel.yaml are imported
when a file is read, so that importing this module is cheap.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hpctrain.base.errors import InvalidInputError, Problem, RefusedPlanError
from hpctrain.spec.files import load_packaged, read_text, shown_name
from hpctrain.spec.merging import (
    OPTION,
    PARTITION_SECTIONS,
    apply_overrides,
    complete_partitions,
    fill_in_adapter,
    merged,
    option_place,
    removable,
    single_values,
    without,
)
from hpctrain.spec.positions import Parsed, SourcePlace, dotted, parse_yaml

if TYPE_CHECKING:
    from pydantic import BaseModel

    from hpctrain.spec.calibration import Calibration, ServingCalibration, Uncertainty
    from hpctrain.spec.catalogue import GpuCatalogue, ModelPresets
    from hpctrain.spec.model import ModelSpec
    from hpctrain.spec.profile import ClusterProfile
    from hpctrain.spec.reference import Kind
    from hpctrain.spec.run import RunSpec
    from hpctrain.spec.service import ServiceSpec
    from hpctrain.spec.trainer import Adapter, TrainerRunSpec


DocumentT = TypeVar("DocumentT", bound="BaseModel")
PACKAGED_PROFILES = Path(__file__).resolve().parent.parent / "cluster_profiles"
NAMED_CLUSTERS = PACKAGED_PROFILES / "sites"  # from public pages; `base/` there are their parts
# Files of a profile directory that are no profiles.
CATALOGUE_FILE, SIGNATURES_FILE, XIDS_FILE = "gpus.yaml", "signatures.yaml", "xids.yaml"
_NO_PROFILES = frozenset({CATALOGUE_FILE, SIGNATURES_FILE, XIDS_FILE})
CALIBRATION_SUFFIX = ".calibration.yaml"  # of the files that `hpctrain calibrate` writes
PACKAGED_CALIBRATION = Path(__file__).resolve().parent / "catalogue" / "calibration.yaml"
PACKAGED_UNCERTAINTY = Path(__file__).resolve().parent / "catalogue" / "uncertainty.yaml"
PACKAGED_SERVING = Path(__file__).resolve().parent / "catalogue" / "serving.yaml"
PACKAGED_CATALOGUE = Path(__file__).resolve().parent / "catalogue" / CATALOGUE_FILE
PACKAGED_ADAPTERS = Path(__file__).resolve().parent / "adapters"
EXTENDS = "extends"
SERVICE_KIND = "service"
TRAINER, ADAPTER = "trainer", "adapter"


@dataclass(frozen=True)
class Loaded(Generic[DocumentT]):
    """A valid document and the origin of its values.

    `file` is the base name only, which keeps users' paths out of records. `origin` maps the dotted
    path of every explicit value to `FILE:LINE` or `--set`; defaults are absent. `digest` is the
    SHA-256 (hex) of the canonical JSON of the whole document. `places` have the full path, for
    messages to the user who named the file.
    """

    document: DocumentT
    file: str
    origin: Mapping[str, str]
    digest: str
    places: Mapping[str, SourcePlace] = field(default_factory=dict)

    def problem(self, path: str, message: str, hint: str | None = None) -> Problem:
        """Report a problem of the value at a dotted path, or of its absence.

        Its position is that of the value, else of the nearest enclosing part in the file.
        """
        while path and path not in self.places:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        if path:
            return self.places[path].problem(message, hint)
        return Problem(message, file=self.file, hint=hint)

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Give the refusals of a plan that is made inside the places of their fields."""
        try:
            yield
        except RefusedPlanError as error:
            raise error.at(self.problem) from None


def load_run_spec(path: Path | str, overrides: Sequence[str] = ()) -> Loaded[RunSpec]:
    """Read a run spec; `-` is standard input. Raises InvalidInputError with all problems."""
    with _naming_other_tools(path):
        return _overridden(lambda given: _run_spec(path, given), overrides)


@contextmanager
def _naming_other_tools(path: Path | str) -> Iterator[None]:
    """Say of what tool a file is that is no spec, in place of all that is wrong with it as one."""
    try:
        yield
    except InvalidInputError as error:
        from hpctrain.spec.other_tools import recognised

        name = shown_name(path)
        try:
            found = recognised(read_text(path), name)
        except InvalidInputError:
            raise error from None
        if found is None:
            raise
        message = f"this is no spec of a run, but {found.tool.title}"
        if found.tool.hint is None:
            message = f"this is no spec of a run, but a configuration of {found.tool.title}"
        hint = found.tool.hint or f"`hpctrain init --from {name}` makes a spec of it"
        raise InvalidInputError([Problem(message, name, 1, 1, hint)]) from None


def _run_spec(path: Path | str, overrides: Sequence[str]) -> Loaded[RunSpec]:
    from hpctrain.spec.open_questions import unanswered
    from hpctrain.spec.run import RunSpec

    parsed = _parse(path)
    if kind_of(parsed) == SERVICE_KIND:
        message, hint = "this is the spec of a service, not of a run", "`hpctrain serve plan FILE`"
        raise InvalidInputError([parsed.values["kind",].problem(message, hint)])
    if has_trainer(parsed):
        message = "this run has a trainer of its own, and hpctrain knows no model of it"
        hint = "this works for runs of hpctrain's engines: a spec with `model`"
        raise InvalidInputError([parsed.keys[TRAINER,].problem(message, hint)])
    if _names_a_preset(parsed):
        from hpctrain.spec.catalogue import expand_preset

        expand_preset(parsed, load_presets())
    apply_overrides(parsed, overrides)
    for where, problem in unanswered(parsed):
        parsed.broken.add(where)
        parsed.problems.append(problem)
    _expand_sources(parsed, Path(path).parent)
    model = parsed.data.get("model") if isinstance(parsed.data, dict) else None
    if isinstance(model, dict) and model.get("config") is not None:
        from hpctrain.spec.families.expand import expand_config

        expand_config(parsed, Path(path).parent)
    return _validated(RunSpec, parsed, shown_name(path))


def load_model(
    path: Path, most_tokens: int, figures: Mapping[str, object] | None = None
) -> ModelSpec:
    """Read a `config.json` as the model of a spec whose samples have `most_tokens` at most.

    `figures`: fields of `model` beside it, those of a count. Raises InvalidInputError with all
    problems, at their places in that file.
    """
    from hpctrain.spec.families.expand import expand_config
    from hpctrain.spec.model import ModelAlone

    start = SourcePlace(str(path), 1, 1)
    where = str(path).replace("$", "$$")
    data = {"model": {"config": where, **(figures or {})}}
    parsed = Parsed(data, values={("model", "config"): start, (): start})
    expand_config(parsed, Path())
    model = parsed.data["model"]
    if model.get("family") not in ("vit", "resnet"):  # their images say it
        limit = model.get("max_seq")
        fits = isinstance(limit, int) and 1 < limit < most_tokens
        model["seq"] = limit if fits else most_tokens
    return _validated(ModelAlone, parsed, str(path)).document.model


def load_any_run_spec(
    path: Path | str, overrides: Sequence[str] = ()
) -> Loaded[RunSpec] | Loaded[TrainerRunSpec]:
    """Read the spec of a run, of hpctrain's engines or of a trainer of its own.

    Raises InvalidInputError with all problems.
    """
    with _naming_other_tools(path):
        if has_trainer(_parse(path)):
            return load_trainer_spec(path, overrides)
        return load_run_spec(path, overrides)


def load_trainer_spec(path: Path | str, overrides: Sequence[str] = ()) -> Loaded[TrainerRunSpec]:
    """Read the spec of a run with a trainer of its own, its adapter filled in.

    Raises InvalidInputError with all problems.
    """
    return _overridden(lambda given: _trainer_spec(path, given), overrides)


def _trainer_spec(path: Path | str, overrides: Sequence[str]) -> Loaded[TrainerRunSpec]:
    from hpctrain.spec.open_questions import unanswered
    from hpctrain.spec.trainer import Adapter, TrainerRunSpec

    parsed = _parse(path)
    apply_overrides(parsed, overrides)
    for where, problem in unanswered(parsed):
        parsed.broken.add(where)
        parsed.problems.append(problem)
    trainer = parsed.data.get(TRAINER) if isinstance(parsed.data, dict) else None
    name = trainer.get(ADAPTER) if isinstance(trainer, dict) else None
    if isinstance(name, str):
        place = parsed.values[TRAINER, ADAPTER]
        try:
            layers = _adapter_layers(name, Path(path).absolute().parent, place, ())
            adapter = merged(layers)
            _validated(Adapter, adapter, layers[0].values[()].file)
        except InvalidInputError as error:
            raise InvalidInputError([*parsed.problems, *error.problems]) from None
        fill_in_adapter(parsed, name, adapter)
    return _validated(TrainerRunSpec, parsed, shown_name(path))


def has_trainer(parsed: Parsed) -> bool:
    """Whether a parsed document is the spec of a run with a trainer of its own."""
    return isinstance(parsed.data, dict) and TRAINER in parsed.data


def load_adapter(name: str, directory: Path = Path()) -> Loaded[Adapter]:
    """Read an adapter by its name, or by its path relative to `directory`, with what it extends.

    Raises InvalidInputError with all problems.
    """
    from hpctrain.spec.trainer import Adapter

    place = SourcePlace(name)
    layers = _adapter_layers(name, directory.absolute(), place, ())
    return _validated(Adapter, merged(layers), layers[0].values[()].file)


def adapter_names() -> list[str]:
    """List the packaged adapters."""
    return sorted(file.stem for file in PACKAGED_ADAPTERS.glob("*.yaml"))


def _adapter_layers(
    name: str, directory: Path, place: SourcePlace, above: tuple[Path, ...]
) -> tuple[Parsed, ...]:
    """Parse an adapter and those that it extends, itself first; `place`: where it is named."""
    file = directory / name if "/" in name else PACKAGED_ADAPTERS / f"{name}.yaml"
    if not file.is_file() or file.resolve() in above:
        from hpctrain.spec.fields import did_you_mean

        known = adapter_names()
        hint: str | None = (
            did_you_mean(name, known) or f"known: {', '.join(known)}; a path has a `/`"
        )
        message = f"no adapter is called `{name}`"
        if "/" in name:
            message, hint = f"no such file: {file}", "paths are relative to the file that names it"
        if file.resolve() in above:
            message = "adapters extend each other: " + " -> ".join(
                one.name for one in (*above, file)
            )
            hint = None
        field = f"{TRAINER}.{ADAPTER}" if not above else EXTENDS
        raise InvalidInputError([place.problem(f"`{field}`: {message}", hint)])
    parsed = _parse(file)
    if not isinstance(parsed.data, dict) or not isinstance(parsed.data.get(EXTENDS), str):
        return (parsed,)
    base, named = parsed.data.pop(EXTENDS), parsed.values.pop((EXTENDS,))
    chain = (*above, file.resolve())
    return (parsed, *_adapter_layers(base, file.parent, named, chain))


def load_service_spec(path: Path | str, overrides: Sequence[str] = ()) -> Loaded[ServiceSpec]:
    """Read the spec of a service; `-` is standard input.

    Raises InvalidInputError with all problems.
    """
    return _overridden(lambda given: _service_spec(path, given), overrides)


def _service_spec(path: Path | str, overrides: Sequence[str]) -> Loaded[ServiceSpec]:
    from hpctrain.spec.service import ServiceSpec

    parsed = _parse(path)
    if kind_of(parsed) is None:
        message = "this is no spec of a service: it has no line `kind: service`"
        hint = "runs are planned by `hpctrain plan` and started by `hpctrain submit`"
        raise InvalidInputError([SourcePlace(shown_name(path), 1, 1).problem(message, hint)])
    if _names_a_preset(parsed):
        from hpctrain.spec.catalogue import expand_preset

        expand_preset(parsed, load_presets())
    apply_overrides(parsed, overrides)
    return _validated(ServiceSpec, parsed, shown_name(path))


def _overridden(
    load: Callable[[Sequence[str]], Loaded[DocumentT]], overrides: Sequence[str]
) -> Loaded[DocumentT]:
    """Load a spec; a value of its file that an override contradicts is reported at that one."""
    try:
        return load(overrides)
    except InvalidInputError as error:
        problems = list(error.problems)
        for number, text in enumerate(overrides):
            try:
                load([*overrides[:number], *overrides[number + 1 :]])
                others: Sequence[Problem] = ()
            except InvalidInputError as without_it:
                others = without_it.problems
            messages = {other.message for other in others}
            if messages <= {problem.message for problem in error.problems}:  # it hides no others
                problems = [
                    problem
                    if problem.line is None or problem.message in messages
                    else _moved(problem, option_place(text))
                    for problem in problems
                ]
        raise InvalidInputError(problems) from None


def _moved(problem: Problem, place: SourcePlace) -> Problem:
    """Put a problem to what has caused it, and name the value that it was found at."""
    message = f"{problem.message} ({Path(problem.file or '').name}:{problem.line})"
    return replace(problem, message=message, file=place.file, line=place.line, column=place.column)


def load_spec(path: Path) -> Loaded[RunSpec] | Loaded[TrainerRunSpec] | Loaded[ServiceSpec]:
    """Load the spec of a run or of a service, whichever it is. Raises InvalidInputError."""
    return load_service_spec(path) if kind_of_file(path) == "service" else load_any_run_spec(path)


def kind_of_file(path: Path) -> Kind:
    """Tell what a file describes by its unindented keys; the loader reports all problems.

    Raises InvalidInputError for a file that cannot be read.
    """
    lines = read_text(path).splitlines()
    keys = {line.partition(":")[0] for line in lines if line and line[0].isalpha()}
    if keys & {"nodes", "gpu", "nvlink", "slurm", "extends"}:
        return "profile"
    return "service" if "kind" in keys else "spec"


def kind_of(parsed: Parsed) -> str | None:
    """Return what a file says it describes; None for a run, whose spec has no `kind`."""
    kind = parsed.data.get("kind") if isinstance(parsed.data, dict) else None
    return None if kind is None else str(kind)


def load_profile(path: Path | str, search_path: Sequence[Path] = ()) -> Loaded[ClusterProfile]:
    """Read a cluster profile with what it extends, and the file that its `calibration` names.

    Without that line it is NAME.calibration.yaml beside it, after the profile's name, if there is
    one.
    `extends` is a profile beside this one, in the search path or packaged, or a path relative to
    this file. The digest covers the whole document, the measured figures included, and a copy of
    the profile needs no second file. Raises InvalidInputError with all problems, each at the place
    of the file that contains it.
    """
    profile = load_plain_profile(path, search_path)
    file = calibration_file(profile, path)
    if file is None:
        return profile
    if not file.is_file():
        hint = "`hpctrain calibrate` writes it; without the line the packaged figures are used"
        raise InvalidInputError([profile.problem("calibration", f"no such file: {file}", hint)])
    return calibrated_profile(profile, file)


def load_plain_profile(
    path: Path | str, search_path: Sequence[Path] = ()
) -> Loaded[ClusterProfile]:
    """Read a cluster profile as `load_profile` does, but not the file that its site has measured.

    For who writes that file: it need not be there yet.
    """
    layers = _parse_extended(path, search_path, ())
    try:
        return _profile_of(layers)
    except InvalidInputError as error:
        found, file = _at_their_causes(error.problems, layers), layers[0].values[()].file
        raise InvalidInputError(sorted(found, key=lambda one: _position(one, file))) from None


def _profile_of(layers: Sequence[Parsed]) -> Loaded[ClusterProfile]:
    """Make the profile of a file and of those that it extends. Raises InvalidInputError."""
    from hpctrain.spec.profile import ClusterProfile

    parsed = merged(layers)
    complete_partitions(parsed)
    profile = _validated(ClusterProfile, parsed, layers[0].values[()].file)
    assert profile.document.extends is None, "what it extends has been merged"
    problems = [
        problem
        for partition in profile.document.slurm.partitions
        for problem in _partition_problems(profile, partition.name)
    ]
    if problems:
        raise InvalidInputError(problems)
    return profile


def _at_their_causes(problems: Sequence[Problem], layers: Sequence[Parsed]) -> list[Problem]:
    """Put problems with values of a base to the value of the file that contradicts them.

    That is the one without which the problem is gone. What is wrong in a base alone stays there.
    """
    own, *base = layers
    file = own.values[()].file
    if not base:
        return list(problems)
    below = _problems_of(base)
    messages = (problem.message for problem in below)
    of_base = dict(zip(messages, _at_their_causes(below, base), strict=True))
    # A section of the file may have a problem of its base alone; a value has its own.
    paths = single_values(own)
    places = [those.get(path) for path in paths for those in (own.values, own.keys)]
    exact = {(place.line, place.column) for place in places if place is not None}
    found = []
    for problem in problems:
        here = problem.file == file
        if here and (problem.line, problem.column) in exact:
            found.append(problem)
        elif problem.message in of_base:
            found.append(of_base[problem.message])
        else:
            found.append(problem if here else _at_the_cause(problem, own, base, problems))
    return found


def _at_the_cause(
    problem: Problem, own: Parsed, base: Sequence[Parsed], known: Sequence[Problem]
) -> Problem:
    """Put a problem to the value of a file without which its bases do not have it.

    Others than the `known` ones, or else those of the bases alone, would only hide it.
    """
    left = {
        path: {other.message for other in _problems_of((without(own, path), *base))}
        for path in removable(own)
    }
    for allowed in (known, (*known, *_problems_of(base))):
        others = {other.message for other in allowed} - {problem.message}
        for path, messages in left.items():
            if messages <= others:
                return _moved(problem, own.values[path])
    return _moved(problem, own.keys[EXTENDS,])


def _problems_of(layers: Sequence[Parsed]) -> Sequence[Problem]:
    try:
        _profile_of(layers)
    except InvalidInputError as error:
        return error.problems
    return ()


def calibration_file(profile: Loaded[ClusterProfile], path: Path | str) -> Path | None:
    """Name the file that a profile read from `path` takes what its site has measured from.

    That of its line `calibration`, whether it exists or not, else the one beside it, if there is
    one. None where the profile contains the figures, as the copies of runs do.
    """
    name = profile.document.calibration
    if isinstance(name, str):
        return Path(profile.places["calibration"].file).parent / name
    beside = Path(path).parent / f"{profile.document.name}{CALIBRATION_SUFFIX}"
    return beside if name is None and str(path) != "-" and beside.is_file() else None


def calibrated_profile(profile: Loaded[ClusterProfile], file: Path) -> Loaded[ClusterProfile]:
    """Put what a site has measured into its profile, each value with its place in `file`."""
    from hpctrain.spec.calibration import SiteCalibration

    measured = _load(SiteCalibration, file, ())
    document = profile.document.model_copy(update={"calibration": measured.document})
    inside = {f"calibration.{name}": place for name, place in measured.places.items()}
    places = MappingProxyType({**profile.places, **inside})
    return replace(profile, document=document, digest=document_digest(document), places=places)


def partition_profile(
    profile: Loaded[ClusterProfile], partition: str | None
) -> Loaded[ClusterProfile]:
    """Return the profile as it is for jobs of one partition (None: the default one).

    Nodes, GPUs, links, options and limits that the partition has of its own stand in their
    sections, with their places. Of a partition that does not exist: the profile unchanged.
    """
    document = profile.document.for_partition(partition)
    chosen = profile.document.slurm.partition(partition)
    if chosen is None or document == profile.document:
        return profile
    index = profile.document.slurm.partitions.index(chosen)
    origin, places = dict(profile.origin), dict(profile.places)
    sections = {name: name for name in PARTITION_SECTIONS} | {
        name: f"slurm.{name}" for name in ("qos", "account", "constraint")
    }
    for name, section in sections.items():
        own = f"slurm.partitions[{index}].{name}"
        if own not in places:
            continue
        for known in (origin, places):
            for path in [path for path in known if _is_below(path, section)]:
                del known[path]
        origin |= {
            section + path.removeprefix(own): text
            for path, text in profile.origin.items()
            if _is_below(path, own)
        }
        places |= {
            section + path.removeprefix(own): place
            for path, place in profile.places.items()
            if _is_below(path, own)
        }
    return replace(
        profile,
        document=document,
        digest=document_digest(document),
        origin=MappingProxyType(origin),
        places=MappingProxyType(places),
    )


def _is_below(path: str, section: str) -> bool:
    return path == section or path.startswith((f"{section}.", f"{section}["))


def _partition_problems(profile: Loaded[ClusterProfile], partition: str) -> list[Problem]:
    """Validate the profile as it is for one partition: its parts have to fit together, too."""
    from pydantic import ValidationError

    from hpctrain.spec.profile import ClusterProfile

    document = profile.document.for_partition(partition)
    if document == profile.document:
        return []
    try:
        ClusterProfile.model_validate_json(document.model_dump_json(by_alias=True), strict=True)
    except ValidationError as error:
        from hpctrain.spec.explain import explain

        names = [other.name for other in profile.document.slurm.partitions]
        path = f"slurm.partitions[{names.index(partition)}]"
        return [
            profile.problem(path, f"partition `{partition}`: {found.message}", found.hint)
            for found in explain(error, ClusterProfile, Parsed())
        ]
    return []


def _parse_extended(
    path: Path | str, search_path: Sequence[Path], above: tuple[Path, ...]
) -> tuple[Parsed, ...]:
    """Parse a profile and those that it extends, itself first. Raises InvalidInputError."""
    parsed = _parse(path)
    rename_former_fields(parsed)
    if not isinstance(parsed.data, dict) or EXTENDS not in parsed.data:
        return (parsed,)
    place, base = parsed.values[EXTENDS,], parsed.data.pop(EXTENDS)
    parsed.values = {where: found for where, found in parsed.values.items() if where != (EXTENDS,)}
    if base is None and (EXTENDS,) not in parsed.broken:
        return (parsed,)
    if not isinstance(base, str) or not base:
        problem = place.problem(f"`{EXTENDS}`: expected the name of a profile")
        raise InvalidInputError([*parsed.problems, problem])
    here = Path(path).absolute()
    beside = here.parent / (base if base.endswith((".yaml", ".yml")) else f"{base}.yaml")
    # A site's own copy may have the name of the packaged profile that it extends.
    known = beside.is_file() and beside.resolve() != here.resolve()
    file = beside
    if not known:
        try:
            places = [found for found in search_path if (found / f"{base}.yaml").resolve() != here]
            file = find_profile(base, places)
        except InvalidInputError as error:
            found = error.problems[0]
            problem = place.problem(f"`{EXTENDS}`: {found.message}", found.hint)
            raise InvalidInputError([*parsed.problems, problem]) from None
    chain = (*above, here.resolve())
    if file.resolve() in chain:
        names = " -> ".join(link.name for link in (*chain, file))
        raise InvalidInputError(
            [place.problem(f"`{EXTENDS}`: profiles extend each other: {names}")]
        )
    if "name" not in parsed.data:
        message = f"`name`: a profile that extends `{base}` needs a name of its own"
        parsed.problems.append(place.problem(message))
    return (parsed, *_parse_extended(file, search_path, chain))


def load_document(model: type[DocumentT], path: Path) -> Loaded[DocumentT]:
    """Read any document, from YAML or JSON. Raises InvalidInputError with all problems."""
    return _load(model, path, ())


def load_catalogue(search_path: Sequence[Path] = ()) -> GpuCatalogue:
    """Load the packaged GPUs, and those of a `gpus.yaml` in directories of profiles.

    Earlier directories override later ones, as with profiles. The packaged file is read once per
    process. Raises InvalidInputError with all problems of a site's file.
    """
    from hpctrain.spec.catalogue import GpuCatalogue

    catalogue = _packaged_catalogue()
    for directory in reversed(search_path):
        if (directory / CATALOGUE_FILE).is_file():
            own = _load(GpuCatalogue, directory / CATALOGUE_FILE, ()).document
            catalogue = catalogue.extended(own)
    return catalogue


@cache
def _packaged_catalogue() -> GpuCatalogue:
    from hpctrain.spec.catalogue import GpuCatalogue

    return load_packaged(GpuCatalogue, PACKAGED_CATALOGUE)


@cache
def load_calibration() -> Calibration:
    """Load the packaged constants of the cost model, once per process."""
    from hpctrain.spec.calibration import Calibration

    return load_packaged(Calibration, PACKAGED_CALIBRATION)


@cache
def load_uncertainty() -> Uncertainty:
    """Load how far the cost model may be off on an unknown site, once per process."""
    from hpctrain.spec.calibration import Uncertainty

    return load_packaged(Uncertainty, PACKAGED_UNCERTAINTY)


@cache
def load_serving_calibration() -> ServingCalibration:
    """Load the packaged constants of inference, once per process."""
    from hpctrain.spec.calibration import ServingCalibration

    return load_packaged(ServingCalibration, PACKAGED_SERVING)


def document_digest(document: BaseModel) -> str:
    """Compute the SHA-256 (hex) of the canonical JSON: sorted keys, no spaces, units as text.

    Without the section `site` of a profile: where values are from changes no job.
    """
    values = document.model_dump(mode="json", by_alias=True, exclude={"site"})
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def profile_names(search_path: Sequence[Path] = ()) -> list[str]:
    """List the names of all profiles, of the search path and packaged."""
    return sorted(_profiles(search_path))


def find_profile(name: str, search_path: Sequence[Path] = ()) -> Path:
    """Find the file of a profile: a path as given, else NAME.yaml, earlier directories first.

    A name is a path when it contains a `/` or ends in `.yaml` or `.yml`.
    Raises InvalidInputError for an unknown name.
    """
    from hpctrain.spec.fields import did_you_mean

    if "/" in name or name.endswith((".yaml", ".yml")):
        return Path(name)
    known = _profiles(search_path)
    if name in known:
        return known[name]
    names = ", ".join(sorted(known.keys() - {*site_names(search_path)}))
    hint = did_you_mean(name, known)
    hint = f"{hint} Known profiles: {names}" if hint else f"known profiles: {names}"
    hint += ", and those of `hpctrain profiles --sites`"
    raise InvalidInputError([Problem(f"no cluster profile is called `{name}`", hint=hint)])


def site_names(search_path: Sequence[Path] = ()) -> list[str]:
    """List the named clusters whose packaged profile is the one that their name finds."""
    found = _profiles(search_path).items()
    return sorted(name for name, file in found if file.parent == NAMED_CLUSTERS)


def _profiles(search_path: Sequence[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for directory in (NAMED_CLUSTERS, PACKAGED_PROFILES, *reversed(search_path)):
        if directory.is_dir():
            files = sorted(directory.glob("*.yaml"))
            found |= {
                file.stem: file
                for file in files
                if (file.name not in _NO_PROFILES and not file.name.endswith(CALIBRATION_SUFFIX))
            }
    return found


@cache
def load_presets() -> ModelPresets:
    """Load the published models, once per process."""
    from hpctrain.spec.catalogue import CATALOGUE, ModelPresets

    return load_packaged(ModelPresets, CATALOGUE)


def _expand_sources(parsed: Parsed, directory: Path) -> None:
    """Replace the path in `data.sources` by what stands in that file: weights and prefixes.

    A relative path is one from the spec's directory.
    """
    from hpctrain.spec.job_text import UnsetNameError, expanded_text

    data = parsed.data.get("data") if isinstance(parsed.data, dict) else None
    given = data.get("sources") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(given, str):
        return
    place = parsed.values["data", "sources"]
    parsed.broken.add(("data", "sources"))
    try:
        words = read_text(directory / expanded_text(given, os.environ)).split()
    except UnsetNameError as error:
        parsed.problems.append(place.problem(f"`data.sources`: {error}"))
        return
    except InvalidInputError as error:
        found = error.problems[0].message
        hint = "a list of `path: PREFIX`, or a file with weights and prefixes by turns"
        parsed.problems.append(place.problem(f"`data.sources`: {given}: {found}", hint))
        return
    paths = words if len(words) == 1 else words[1::2]
    weights = ["1"] if len(words) == 1 else words[::2]
    try:
        blend = [
            {"path": path, "weight": float(weight)}
            for path, weight in zip(paths, weights, strict=True)
        ]
    except ValueError:
        message = f"`data.sources`: {given} has no weights and prefixes by turns"
        parsed.problems.append(place.problem(message, "as in `0.3 data/a 0.7 data/b`"))
        return
    data["sources"] = blend
    parsed.broken.discard(("data", "sources"))


def _names_a_preset(parsed: Parsed) -> bool:
    model = parsed.data.get("model") if isinstance(parsed.data, dict) else None
    return isinstance(model, str) or (isinstance(model, dict) and "preset" in model)


def _load(model: type[DocumentT], path: Path | str, overrides: Sequence[str]) -> Loaded[DocumentT]:
    parsed = _parse(path)
    apply_overrides(parsed, overrides)
    return _validated(model, parsed, shown_name(path))


def _parse(path: Path | str) -> Parsed:
    """Parse one file. Raises InvalidInputError if there is nothing in it."""
    file = shown_name(path)
    parsed = parse_yaml(read_text(path), file)
    if parsed.data is None:
        parsed.problems = parsed.problems or [SourcePlace(file, 1, 1).problem("the file is empty")]
        raise InvalidInputError(parsed.problems)
    return parsed


def _validated(model: type[DocumentT], parsed: Parsed, file: str) -> Loaded[DocumentT]:
    """Make the document of parsed values. Raises InvalidInputError with all problems."""
    from pydantic import ValidationError

    from hpctrain.spec.job_text import ENVIRONMENT

    problems = parsed.problems
    forget_former_fields(parsed.data, only_defaults=True)
    _forget_distributed(parsed.data)
    try:
        # strict JSON: pydantic then turns neither "8" nor true into a number, but still accepts a
        # list for a tuple and an integer for a float
        document = model.model_validate_json(
            json.dumps(parsed.data), strict=True, context={ENVIRONMENT: os.environ}
        )
    except ValidationError as error:
        from hpctrain.spec.explain import explain

        problems = problems + explain(error, model, parsed)
    if problems:
        raise InvalidInputError(sorted(problems, key=lambda found: _position(found, file)))
    places = {dotted(path): place for path, place in parsed.values.items() if path}
    origins = {
        path: OPTION if place.line is None else f"{Path(place.file).name}:{place.line}"
        for path, place in places.items()
    }
    digest = document_digest(document)
    name = Path(file).name
    return Loaded(document, name, MappingProxyType(origins), digest, MappingProxyType(places))


def _position(problem: Problem, file: str) -> tuple[bool, bool, str, int, int]:
    """Order problems: those of the file that was named first, then by file and line."""
    other = problem.line is not None and problem.file != file
    named = (problem.file or "") if other else ""
    return problem.line is None, other, named, problem.line or 0, problem.column or 0


# -- Read fields that earlier versions had, copies of which are in run directories --------------


# Fields that have gone, with the default that each run directory has of them: in specs, profiles,
# `train.json` and `supervise.json`, where some have one path.
GONE: Mapping[str, object] = {
    **dict.fromkeys(("profile.shapes", "profile.allocations", "profile.stacks"), False),
    "profile.start": None,
    "profile.count": 1,
    "profile.largest": "512MiB",
    "profile.flops": False,
    "flops_steps": [],
    **dict.fromkeys(("notify.channels.url_env", "notify.channels.token_env"), None),
    "supervise.storm_window": "00:30:00",
    "supervise.rollback.other_nodes": True,
    "engine.ddp.powersgd_rank": 4,
    "ddp.powersgd_rank": 4,
    "optimizer.name": "adamw",
    "limits.short_grace": "warn",
    "network.islands.gpu": None,
    "slurm.partitions.network.islands.gpu": None,
    "traffic.burstiness": 1.0,
}


def forget_former_fields(values: Any, *, only_defaults: bool) -> None:
    """Remove fields that have gone from the values of a document.

    `only_defaults`: those with another value stay, to be refused as unknown, because nobody would
    act on them. What an earlier version has written for a run that goes on is read in any case.
    """
    for path, default in GONE.items():
        *sections, name = path.split(".")
        for section in _sections(values, sections):
            found = section.get(name, default)
            if not only_defaults or (type(found), found) == (type(default), default):
                section.pop(name, None)


def _forget_distributed(values: Any) -> None:
    """Read `optimizer.distributed` as the specs in run directories have it, beside `zero`.

    `zero` says it now. Whatever else a spec has, such as false alone, stays to be refused as
    unknown.
    """
    optimizer = values.get("optimizer") if isinstance(values, dict) else None
    if not isinstance(optimizer, dict):
        return
    sharded, zero = optimizer.get("distributed"), optimizer.get("zero")
    if sharded is True and zero != 0:
        del optimizer["distributed"]
    elif sharded is False and "zero" in optimizer and (zero is None or zero == 0):
        del optimizer["distributed"]
        optimizer["zero"] = 0


def _sections(values: Any, path: list[str]) -> Iterator[dict[str, Any]]:
    """List the sections at a path, also those of each item of a list."""
    if isinstance(values, list):
        for item in values:
            yield from _sections(item, path)
    elif isinstance(values, dict) and path:
        yield from _sections(values.get(path[0]), path[1:])
    elif isinstance(values, dict):
        yield values


def rename_former_fields(parsed: Parsed) -> None:
    """Replace `slurm.all_memory` by `slurm.memory`, `software.prologue` by `commands.task`.

    A file that has the new one, too, has a problem.
    """
    _rename_prologue(parsed)
    slurm = parsed.data.get("slurm") if isinstance(parsed.data, dict) else None
    if not isinstance(slurm, dict) or not isinstance(slurm.get("all_memory"), bool):
        return
    place = parsed.values.pop(("slurm", "all_memory"))
    if "memory" in slurm:
        parsed.problems.append(place.problem("`slurm.all_memory` is `slurm.memory` now: remove it"))
    parsed.values["slurm", "memory"] = place
    slurm["memory"] = "auto" if slurm.pop("all_memory") else "none"


def _rename_prologue(parsed: Parsed) -> None:
    software = parsed.data.get("software") if isinstance(parsed.data, dict) else None
    if not isinstance(software, dict) or not isinstance(software.get("prologue"), list):
        return
    former, new = ("software", "prologue"), ("software", "commands", "task")
    commands = software.setdefault("commands", {})
    if not isinstance(commands, dict) or "task" in commands:
        return  # the former one is an unknown key beside it
    commands["task"] = software.pop("prologue")
    moved = [path for path in parsed.values if path[:2] == former]
    parsed.values |= {(*new, *path[2:]): parsed.values.pop(path) for path in moved}


# -- Finds cluster profiles by name: those of $HPCTRAIN_PROFILE_PATH, then the packaged ones ----


PROFILE_PATH_VARIABLE = "HPCTRAIN_PROFILE_PATH"


def profile_search_path() -> list[Path]:
    """List the directories of $HPCTRAIN_PROFILE_PATH; packaged profiles come after them."""
    entries = os.environ.get(PROFILE_PATH_VARIABLE, "").split(os.pathsep)
    return [Path(entry) for entry in entries if entry]


def load_named_profile(name: str) -> Loaded[ClusterProfile]:
    """Read a profile by its name or path. Raises InvalidInputError with all problems."""
    search_path = profile_search_path()
    return load_profile(find_profile(name, search_path), search_path)
