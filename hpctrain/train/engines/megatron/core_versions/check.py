"""Check megatron-core before any process group exists: its version, and the names that are used.

Belongs here: what is refused and what is warned about. Does not belong here: the agreement of all
ranks (see `hpctrain.train.software_agreement`), the names (see `names`).
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from hpctrain.train import megatron_on_cpu, software
from hpctrain.train.engines.megatron.core_versions.names import names_of_all_versions
from hpctrain.train.engines.megatron.core_versions.record import CoreName
from hpctrain.train.engines.megatron.core_versions.supported import (
    SUPPORTED,
    is_tested,
    release_numbers,
    row_of,
    tested_numbers,
)
from hpctrain.train.software import LibraryFindings, LibraryProblem

_MOST_NAMES = 5
_HINT = f"containers with {tested_numbers()} are fine, too; see docs/engines.md"


def library_findings() -> LibraryFindings:
    """Find why the installed megatron-core cannot train, and what to warn about.

    Imports megatron-core, unless its version is refused anyway.
    """
    version = software.megatron_core()
    if version is None:
        message = f"megatron-core is not installed: {_install_command()}"
        return LibraryFindings((LibraryProblem(message, _HINT),))
    remarks, problem = check_core(version)
    if problem is not None:
        return LibraryFindings((problem,))
    row = row_of(version)
    missing = missing_names((*names_of_all_versions(), *row.names))
    if not missing:
        return LibraryFindings(remarks=remarks)
    more = len(missing) - _MOST_NAMES
    listed = "; ".join(missing[:_MOST_NAMES]) + (f"; and {more} more" if more > 0 else "")
    message = f"megatron-core {version} lacks what hpctrain uses: {listed}"
    hint = f"{_install_command()}; {_HINT}"
    return LibraryFindings((LibraryProblem(message, hint),), remarks)


def check_core(version: str) -> tuple[tuple[str, ...], LibraryProblem | None]:
    """Return warnings about a version of megatron-core, and why it is refused (None: it is not)."""
    oldest = SUPPORTED[0].number
    if release_numbers(version) < release_numbers(oldest):
        message = f"megatron-core {version} is older than {oldest}, the oldest supported version"
        return (), LibraryProblem(f"{message}: {_install_command()}", _HINT)
    if is_tested(version):
        return (), None
    row = row_of(version)
    remark = (
        f"megatron-core {version} is not tested with hpctrain, {tested_numbers()} are: it is used "
        f"as {row.number}; compare the losses of a known run first"
    )
    return (remark,), None


def missing_names(names: Iterable[CoreName]) -> list[str]:
    """Import the modules of `names`; return what is missing, in words, each module once."""
    try:
        megatron_on_cpu.import_core()
    except Exception as error:  # importing may raise anything
        return [f"megatron.core cannot be imported ({_in_one_line(error)})"]
    return list(dict.fromkeys(_missing(names)))


def _missing(names: Iterable[CoreName]) -> Iterator[str]:
    for name in names:
        try:
            found = _find(importlib.import_module(name.module), name.path)
        except AttributeError:
            yield f"no {name}"
            continue
        except Exception as error:
            yield f"{name.module} cannot be imported ({_in_one_line(error)})"
            continue
        # the code of a function has the names of attributes that it assigns (Python's data model,
        # `co_names`)
        if name.attribute and name.attribute not in found.__init__.__code__.co_names:
            yield f"no {name}"


def _find(module: ModuleType, path: str) -> Any:
    found: Any = module
    for word in path.split(".") if path else ():
        found = getattr(found, word)
    return found


def _install_command() -> str:
    """Return the command that installs the newest tested version for this Python."""
    python = tuple(map(int, platform.python_version_tuple()[:2]))
    usable = [row for row in SUPPORTED if row.oldest_python <= python]
    return f"`pip install megatron-core=={usable[-1].number}`"


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
