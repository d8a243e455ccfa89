"""The table of engines: the only place where hpctrain lists which engines there are.

An engine of another distribution joins by an entry point of the group `hpctrain.engines`, whose
name is the engine's and whose object is its `EngineAbilities`. Only these and the built-in ones are
ever imported: no document can name a module.
Belongs here: the table, looking a name up, the type of a name. Does not belong here: any engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hpctrain.errors import HpctrainError
from hpctrain.spec.engines import ddp, deepspeed, fsdp, megatron, megatron_lm
from hpctrain.spec.engines.abilities import EngineAbilities

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "hpctrain.engines"
ENGINES: dict[str, EngineAbilities] = {
    module.ABILITIES.name: module.ABILITIES
    for module in (megatron, megatron_lm, fsdp, deepspeed, ddp)
}
DEFAULT_ENGINE = megatron.ABILITIES.name


class UnknownEngineError(HpctrainError):
    """A name that neither the table nor an installed distribution has."""


def abilities_of(name: str) -> EngineAbilities:
    """Look up an engine, also an installed one. Raises UnknownEngineError."""
    if name not in ENGINES:
        found = next((one for one in _installed() if one.name == name), None)
        if found is None:
            raise UnknownEngineError(f"no engine `{name}`: known are {', '.join(engine_names())}")
        _add(_loaded(found))
    return ENGINES[name]


def engine_names() -> tuple[str, ...]:
    """List all engines, built-in ones first."""
    return tuple(dict.fromkeys((*ENGINES, *(one.name for one in _installed()))))


@contextmanager
def registered(abilities: EngineAbilities) -> Iterator[EngineAbilities]:
    """Add an engine to the table of this process for a while; other processes do not see it."""
    _add(abilities)
    try:
        yield abilities
    finally:
        del ENGINES[abilities.name]


def resolve(place: str) -> Any:
    """Import `module` or `module:name`, as an engine's abilities name them."""
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def _add(abilities: EngineAbilities) -> None:
    if abilities.name in ENGINES:
        raise ValueError(f"there is an engine `{abilities.name}` already")
    ENGINES[abilities.name] = abilities


def _installed() -> tuple[EntryPoint, ...]:
    """Entry points of installed distributions; their modules are not imported."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=ENTRY_POINTS))


def _loaded(entry_point: EntryPoint) -> EngineAbilities:
    """Import the abilities of an installed engine. Raises HpctrainError if they are unusable."""
    try:
        found = entry_point.load()
    except Exception as error:
        message = f"the installed engine `{entry_point.name}` cannot be imported: {error}"
        raise HpctrainError(message, hint="uninstall or repair its distribution") from error
    if not isinstance(found, EngineAbilities) or found.name != entry_point.name:
        message = f"entry point `{entry_point.name}` is not the abilities of an engine of that name"
        raise HpctrainError(message, hint=f"see {EngineAbilities.__module__}")
    return found


if TYPE_CHECKING:
    EngineName = str
else:

    class EngineName:
        """The type of an engine's name in documents: a text of the table, checked when read."""

        @classmethod
        def known_words(cls) -> tuple[str, ...]:
            return engine_names()

        @classmethod
        def accept(cls, value: object) -> str:
            from pydantic_core import PydanticKnownError

            if isinstance(value, str) and (value in ENGINES or value in engine_names()):
                return abilities_of(value).name
            *others, last = (f"'{name}'" for name in engine_names())
            expected = f"{', '.join(others)} or {last}"
            raise PydanticKnownError("literal_error", {"expected": expected})

        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
            from pydantic_core import core_schema

            return core_schema.no_info_plain_validator_function(cls.accept)

        @classmethod
        def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
            return {"enum": list(engine_names()), "type": "string"}
