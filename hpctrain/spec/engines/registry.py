"""The table of engines: the only list of engines in hpctrain.

Another distribution adds an engine with an entry point of the group `hpctrain.engines`: its name is
the engine's, its object an `EngineAbilities`. Only these and the built-in ones are ever imported:
no document can name a module. Belongs here: the table, its look-up, the type of a name. Does not
belong here: any engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hpctrain.base.errors import HpctrainError
from hpctrain.spec.engines import deepspeed, megatron, megatron_lm, native
from hpctrain.spec.engines.abilities import EngineAbilities

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "hpctrain.engines"
ENGINES: dict[str, EngineAbilities] = {
    one.name: one
    for one in (
        megatron.ABILITIES,
        megatron_lm.ABILITIES,
        native.FSDP,
        deepspeed.ABILITIES,
        native.DDP,
    )
}
DEFAULT_ENGINE = megatron.ABILITIES.name


class UnknownEngineError(HpctrainError):
    """A name that is neither in the table nor an installed entry point."""


def abilities_of(name: str) -> EngineAbilities:
    """Look up an engine, also an installed one.

    Raises UnknownEngineError, or HpctrainError if an installed engine is unusable.
    """
    if name not in ENGINES:
        entry_point = next((point for point in _installed() if point.name == name), None)
        if entry_point is None:
            raise UnknownEngineError(f"no engine `{name}`: known are {', '.join(engine_names())}")
        try:
            found = entry_point.load()
        except Exception as error:
            message = f"the installed engine `{name}` cannot be imported: {error}"
            raise HpctrainError(message, hint="uninstall or repair its distribution") from error
        if not isinstance(found, EngineAbilities) or found.name != name:
            message = f"entry point `{name}` is not the abilities of an engine of that name"
            raise HpctrainError(message, hint=f"see {EngineAbilities.__module__}")
        _add(found)
    return ENGINES[name]


def engine_names() -> tuple[str, ...]:
    """List all engines, built-in ones first."""
    return tuple(dict.fromkeys((*ENGINES, *(point.name for point in _installed()))))


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
    """List entry points of installed distributions without importing their modules."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=ENTRY_POINTS))


if TYPE_CHECKING:
    EngineName = str
else:

    class EngineName:
        """The type of an engine's name in documents, checked against the table when read."""

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
