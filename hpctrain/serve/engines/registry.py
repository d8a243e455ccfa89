"""The table of engines that serve: the only list of them besides the names in the spec.

Belongs here: the table and its look-up, and what is checked of every engine alike. Does not belong
here: any engine.
"""

from __future__ import annotations

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.serve.engines import sglang, tensorrt_llm, transformers_serve, vllm
from hpctrain.serve.engines.contract import EngineCommand, EngineStart, ServingEngine
from hpctrain.spec.service import ServingEngineName

SERVING_ENGINES: dict[ServingEngineName, ServingEngine] = {
    module.ENGINE.name: module.ENGINE for module in (vllm, sglang, tensorrt_llm, transformers_serve)
}
# Options of any engine that would put a secret where other users of the node can read it.
_SECRET_OPTIONS = frozenset({"--api-key", "--admin-api-key", "--hf-token"})


def refusals_of(name: ServingEngineName, start: EngineStart) -> tuple[str, ...]:
    """List what an engine cannot do of a start, and what `engine.arguments` must not contain."""
    engine = SERVING_ENGINES[name]
    given = {_spelled(word) for word in start.extra_arguments if word.startswith("-")}
    found = list(engine.refusals(start))
    for option in sorted(given):
        if _means(option, _SECRET_OPTIONS):
            found.append(f"engine.arguments: {option} would put a secret into the process list")
        elif _means(option, engine.own_options):
            found.append(f"engine.arguments: {option} is set from the spec's own fields")
    return tuple(found)


def _spelled(word: str) -> str:
    """Return an option as its documentation spells it: engines take `_` and `-` alike."""
    return word.partition("=")[0].replace("_", "-")


def _means(given: str, options: frozenset[str]) -> bool:
    """Tell whether an option is one of these, or short for one as argparse allows."""
    spelled = {_spelled(option) for option in options}
    long = given.startswith("--") and len(given) > 2
    return given in spelled or (long and any(option.startswith(given) for option in spelled))


def command_of(name: ServingEngineName, start: EngineStart) -> EngineCommand:
    """Build the command of an engine. Raises InvalidInputError with all that it cannot do."""
    refused = refusals_of(name, start)
    if refused:
        raise InvalidInputError([Problem(line) for line in refused])
    return SERVING_ENGINES[name].command(start)
