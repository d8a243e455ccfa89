"""A config.json of any shape is read, or ends in lines that name what is wrong in it.

Examples are configurations of families, changed in some places at random. The number of an example
says all of it, so that one that fails can be made again.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from command_line import hpctrain

from hpctrain.base.errors import InvalidInputError, Problem, RefusedPlanError
from hpctrain.job.prepare import load_knowledge
from hpctrain.plan.abilities.trainable import untrainable_fields
from hpctrain.plan.planner import make_plan
from hpctrain.spec.families.settings import disagreements, unknown_note
from hpctrain.spec.loader import load_model, load_named_profile, load_run_spec
from hpctrain.spec.run import RunSpec

_FAMILIES = sorted((Path(__file__).parents[2] / "families").glob("*.json"))
_NESTED: Any = "x"
for _level in range(30):
    _NESTED = {"a": [_NESTED]}
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 33, 320, 4096, 10**6, 10**12, 10**29, 10**40),
    *(0.5, -0.5, 0.0, 1.0, 4096.0, 1e-30, 1e30, 1e308, float("inf"), float("nan")),
    *("", "4096", "gelu", "foo", "Infinity", "\0", "$HOME", "x" * 300, "\u202e\x1b[2J"),
    *([], [1, 2], ["x"], [None], [[1], {"a": 2}], ["full_attention", 3], [0, 1, 1]),
    *({}, {"a": 1}, {"rope_type": "foo"}, {"type": "yarn", "factor": -1}, _NESTED),
    *({"full_attention": 3}, {"rope_type": "linear", "factor": "8"}, {"rope_theta": None}),
)
# Names of any family, which another one does not know or knows otherwise.
_NAMES = sorted({name for file in _FAMILIES for name in json.loads(file.read_text())})


def odd_config(number: int) -> dict[str, Any]:
    """Make the example of a number."""
    chance = random.Random(number)
    config: dict[str, Any] = json.loads(chance.choice(_FAMILIES).read_text())
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 5))):
        places = [config, *(one for one in config.values() if isinstance(one, dict) and one)]
        place = chance.choice(places) if chance.random() < 0.3 else config
        name = chance.choice(sorted(place) or ["a"])
        kind = chance.random()
        if kind < 0.1:
            place.pop(name, None)
        elif kind < 0.25:
            place[chance.choice(_NAMES)] = deepcopy(chance.choice(ODD_VALUES))
        elif kind < 0.3:
            place[f"name_{chance.randrange(9)}"] = deepcopy(chance.choice(ODD_VALUES))
        elif kind < 0.4 and isinstance(place.get(name), int):
            factor, more = chance.choice((1, 2, 3, 1000)), chance.choice((0, 1))
            place[name] = max(1, place[name] * factor + more)
        else:
            place[name] = deepcopy(chance.choice(ODD_VALUES))
    return config


SPEC = """\
name: odd
engine: {name: fsdp}
model: {config: config.json, seq: 64}
data: {made_up: true}
batch: {global: 64}
budget: {steps: 100}
optimizer: {lr: 1e-4}
checkpoint: {every_steps: 50}
resources: {gpus: 8}
"""
ENGINES = ("fsdp", "ddp", "megatron", "deepspeed")
ORDINARY, NIGHTLY, BATCH = 500, 10_000, 500
PLANNED = 60  # of the ordinary ones; nightly all of them


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(SPEC)
    return Path("spec.yaml")


def write(config: dict[str, Any], text: str = SPEC) -> None:
    """Write a configuration and a spec that names it."""
    Path("config.json").write_text(json.dumps(config, indent=1))
    if config.get("model_type") in ("vit", "resnet"):
        text = text.replace(", seq: 64", "")
    Path("spec.yaml").write_text(text)


def check_problems(problems: Sequence[Problem], number: int) -> None:
    """Every one has a place and one line of plain text."""
    assert problems
    for problem in problems:
        assert None not in (problem.file, problem.line, problem.column), (number, problem)
        assert str(problem).isprintable() and "pydantic" not in str(problem), (number, problem)


def check_example(number: int, other: RunSpec, planned: bool) -> RunSpec:
    """Read one example as a spec, as `init` does, and as that of weights; plan what is accepted."""
    config = odd_config(number)
    engine = random.Random(number).choice(ENGINES)
    write(config, SPEC.replace("fsdp", engine))
    document = None
    try:
        document = load_run_spec(Path("spec.yaml")).document
    except InvalidInputError as error:
        check_problems(error.problems, number)
    try:
        load_model(Path("config.json"), 4096)
    except InvalidInputError as error:
        check_problems(error.problems, number)
    for line in disagreements(other.model, config):
        assert line.isprintable(), (number, line)
    if document is None:
        return other
    for _, line in untrainable_fields(document):
        assert line.isprintable(), (number, line)
    if planned:
        site = load_named_profile("a100x64")
        with contextlib.suppress(RefusedPlanError):
            plan = make_plan(document, site.document, load_knowledge(site))
            assert plan.parameters > 0, number
    return document


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=() if first < ORDINARY else pytest.mark.nightly("examples"))
        for first in range(0, NIGHTLY, BATCH)
    ],
)
def test_any_config_is_read_or_says_what_is_wrong(spec: Path, first: int) -> None:
    write(json.loads(_FAMILIES[0].read_text()))
    other = load_run_spec(spec).document
    for number in range(first, first + BATCH):
        try:
            other = check_example(number, other, first >= ORDINARY or number < PLANNED)
        except Exception as error:
            error.add_note(f"example {number}: {json.dumps(odd_config(number))}")
            raise


# Family, what is changed, and the beginning of the line about it.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"num_hidden_layers": -1}, "`num_hidden_layers`: must be at least 1, got `-1`"),
    ("llama", {"vocab_size": None}, "`vocab_size`: required, but missing"),
    ("llama", {"hidden_size": "4096"}, "`hidden_size`: expected an integer, got `4096`"),
    ("llama", {"hidden_act": "foo"}, '`hidden_act` is "foo", known here is "silu" or'),
    ("llama", {"num_attention_heads": 3}, "`num_attention_heads`: heads 3 is not divisible by kv"),
    ("llama", {"rope_scaling": 8, "rope_parameters": None}, "`rope_scaling` is 8"),
    ("llama", {"model_type": "lama"}, '`model_type`: hpctrain does not know models of type "lama"'),
    (
        "llama",
        {"model_type": "whisper"},
        '`model_type`: hpctrain does not know models of type "whisper": its decoder attends to',
    ),
    ("llama", {"model_type": None}, "this is no config.json: it has no `model_type`"),
    ("umt5", {"d_model": -512}, "`d_model`: must be at least 8, got `-512`"),
    ("mbart", {"d_model": -512}, "`d_model`: must be at least 8, got `-512`"),
    ("mixtral", {"num_experts_per_tok": 99}, "`num_experts_per_tok`: top_k 99 is above"),
    ("gpt", {"scale_attn_by_inverse_layer_idx": True}, "`scale_attn_by_inverse_layer_idx` is true"),
    ("gemma3", {"text_config": {"num_hidden_layers": 0}}, "`num_hidden_layers`: must be at least"),
]


@pytest.mark.parametrize(("family", "changes", "words"), WRONG)
def test_a_wrong_value_is_named_as_in_its_file(
    spec: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    config = json.loads((_FAMILIES[0].parent / f"{family}.json").read_text()) | changes
    write(config)
    (name,) = [*changes][:1]
    lines = Path("config.json").read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if f'"{name}"' in line)
    for read in (lambda: load_run_spec(spec), lambda: load_model(Path("config.json"), 64)):
        with pytest.raises(InvalidInputError) as caught:
            read()
        found = [one for one in caught.value.problems if one.message.startswith(words)]
        assert found, [str(one) for one in caught.value.problems]
        near = at + (1 if name == "text_config" else 0)
        assert found[0].file == "config.json"
        assert found[0].line == near


def test_names_that_nobody_knows_are_told(spec: Path) -> None:
    config = json.loads((_FAMILIES[0].parent / "llama.json").read_text())
    write(config | {"new_trick": 3, "other_trick": "x", "_note": 1, "off": False})
    document = load_run_spec(spec).document
    note = unknown_note(document.model)
    assert note is not None and "new_trick, other_trick" in note and "_note" not in note
    site = load_named_profile("a100x64")
    assert note in make_plan(document, site.document).warnings
    for words in (("validate", "spec.yaml"), ("init", "-", "--model", "config.json")):
        assert "new_trick" in hpctrain(*words).stderr
    submitted = hpctrain("submit", "-p", "a100x64", "spec.yaml", "--dry-run")
    assert submitted.exit_code == 0 and "new_trick" in submitted.stderr
