"""Who reads which file of this repository: by its imports, or by a table.

The table has what imports do not show: data, and modules that are imported by names in strings.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

HOUSE = "tests/test_house.py"
_GOLDEN, _SITES = "tests/golden/test_*.py", "tests/sites/test_*.py"
# Files, and who reads them without an import.
READERS: tuple[tuple[str, Collection[str]], ...] = (
    # Golden scripts are what templates make of specs and profiles.
    ("templates/*", ("tests/unit/job/test_*.py", _GOLDEN, _SITES)),
    ("cluster_profiles/*", (_GOLDEN, _SITES)),
    ("examples/*", (_GOLDEN,)),
    ("man/*", ("tests/golden/test_man_pages.py",)),
    ("bench/*.[cy]*", ("tests/unit/bench/test_*.py",)),  # tables of published runs
    ("scripts/test_slurms.py", ("tests/unit/test_slurms_report.py",)),  # loads it by its path
    # Contracts, pins and links are house rules.
    *((pattern, (HOUSE,)) for pattern in ("setup.cfg", "pyproject.toml", "constraints*", "*.md")),
    # Commands and engines are imported by names in strings, so that starting stays quick.
    ("hpctrain/cli/*.py", ("hpctrain/cli/main.py",)),
    ("hpctrain/engines/*.py", ("hpctrain/spec/engines/registry.py",)),
)


def is_test(file: str) -> bool:
    return file.startswith("tests/") and PurePosixPath(file).match("test_*.py")


def importers_of(root: Path, changed: Collection[str]) -> defaultdict[str, set[str]]:
    """Map each file to the files that import or read it; changed files may be deleted."""
    listed = git(root, "ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    present = [file for file in listed if (root / file).exists()]
    files = {*present, *changed}
    modules = {name: file for file in files for name in _module_names(file)}
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for file, names in _imported_names(root, present).items():
        for name in names:
            while name:  # a package is imported before its modules
                if name in modules:
                    importers[modules[name]].add(file)
                name = name.rpartition(".")[0]
        for folder in PurePosixPath(file).parents if is_test(file) else ():
            importers[f"{folder}/conftest.py"].add(file)
    for pattern, readers in READERS:
        for file in (file for file in files if fnmatch(file, pattern)):
            importers[file].update(f for f in present if any(fnmatch(f, r) for r in readers))
    for file in (file for file in changed if not file.endswith(".py")):
        importers[file].update(_readers_of_data(root, file, present))
    return importers


def _readers_of_data(root: Path, data: str, present: Collection[str]) -> Iterator[str]:
    """The code beside a data file or, if there is none, above it; and tests that name the file."""
    for folder in list(PurePosixPath(data).parents)[:-2]:
        beside = [file for file in present if PurePosixPath(file).parent == folder]
        yield from beside
        if beside:
            break
    name = PurePosixPath(data).name
    yield from (f for f in present if f.startswith("tests/") and name in (root / f).read_text())


def _module_names(file: str) -> list[str]:
    """The names that imports use; pytest puts the folders of tests into sys.path."""
    path = PurePosixPath(file).with_suffix("")
    if not file.endswith(".py"):
        return []
    dotted = ".".join(path.parts).removesuffix(".__init__")
    apart = path.parts[0] == "tests" and path.name not in ("__init__", "conftest")
    return [dotted, path.name] if apart else [dotted]


def _imported_names(root: Path, files: Collection[str]) -> dict[str, list[str]]:
    """Read the imports of all files; what was read of one before is kept while it is the same."""
    kept_file = root / ".pytest_cache" / "imports.json"
    try:
        old_reader = kept_file.stat().st_mtime < Path(__file__).stat().st_mtime
        kept = {} if old_reader else json.loads(kept_file.read_text())
    except (OSError, ValueError):
        kept = {}
    read = {}
    for file in files:
        stat = (root / file).stat()
        state = [stat.st_mtime_ns, stat.st_size]
        known = file in kept and kept[file][0] == state
        read[file] = kept[file] if known else [state, _parsed(root / file)]
    if read != kept:
        kept_file.parent.mkdir(exist_ok=True)
        kept_file.write_text(json.dumps(read))
    return {file: names for file, (_, names) in read.items()}


def _parsed(file: Path) -> list[str]:
    """Every name that a file imports, inside functions too, but not for types only.

    Imports inside functions of a conftest.py are a fixture's: who takes that imports its type.
    """
    try:
        nodes: list[ast.AST] = [ast.parse(file.read_bytes())]
    except SyntaxError:  # pytest says so
        return []
    names = set()
    for node in nodes:  # grows
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if for_types or (isinstance(node, ast.FunctionDef) and file.name == "conftest.py"):
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        inner = (ast.stmt, ast.excepthandler, ast.match_case)
        nodes.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, inner))
    return sorted(names)


def git(root: Path, *arguments: str, may_fail: bool = False) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=60)
    if done.returncode and not may_fail:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.splitlines()
