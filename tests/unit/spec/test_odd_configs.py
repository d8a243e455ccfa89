"""A config.json of any shape is read, or ends in lines that name what is wrong in it.

Examples are configurations of families, changed in some places by hypothesis, which makes one that
fails as small as it can. The same examples are made each time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from command_line import hpctrain
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

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


@st.composite
def odd_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Make the configuration of a family with some names changed."""
    config: dict[str, Any] = json.loads(draw(st.sampled_from(_FAMILIES)).read_text())
    for _ in range(draw(st.integers(1, 5))):
        nested = [one for one in config.values() if isinstance(one, dict) and one]
        place = draw(st.sampled_from([config, config, *nested]))
        name = draw(st.sampled_from(sorted(place) or ["a"]))
        change = draw(st.sampled_from(("other", "other", "left out", "foreign", "unknown", "size")))
        if change == "left out":
            place.pop(name, None)
        elif change == "size" and isinstance(place.get(name), int):
            factor = draw(st.sampled_from((1, 2, 3, 1000)))
            place[name] = max(1, place[name] * factor + draw(st.integers(0, 1)))
        else:
            if change != "other":
                name = draw(st.sampled_from(_NAMES)) if change == "foreign" else "new_trick"
            place[name] = deepcopy(draw(st.sampled_from(ODD_VALUES)))
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
_EXAMPLES = settings(
    max_examples=BATCH, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


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


def check_problems(problems: Sequence[Problem]) -> None:
    """Every one has a place and one line of plain text."""
    assert problems
    for problem in problems:
        assert None not in (problem.file, problem.line, problem.column), problem
        assert str(problem).isprintable() and "pydantic" not in str(problem), problem


def check_example(config: dict[str, Any], engine: str, other: RunSpec, planned: bool) -> None:
    """Read one example as a spec, as `init` does, and as that of weights; plan what is accepted."""
    write(config, SPEC.replace("fsdp", engine))
    document = None
    try:
        document = load_run_spec(Path("spec.yaml")).document
    except InvalidInputError as error:
        check_problems(error.problems)
    try:
        load_model(Path("config.json"), 4096)
    except InvalidInputError as error:
        check_problems(error.problems)
    assert all(line.isprintable() for line in disagreements(other.model, config))
    if document is None:
        return
    assert all(line.isprintable() for _, line in untrainable_fields(document))
    if planned:
        site = load_named_profile("a100x64")
        with contextlib.suppress(RefusedPlanError):
            assert make_plan(document, site.document, load_knowledge(site)).parameters > 0


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=() if first < ORDINARY else pytest.mark.nightly("examples"))
        for first in range(0, NIGHTLY, BATCH)
    ],
)
def test_any_config_is_read_or_says_what_is_wrong(spec: Path, first: int) -> None:
    write(json.loads((_FAMILIES[0].parent / "llama.json").read_text()))
    other = load_run_spec(spec).document
    examples = itertools.count()

    @seed(first)
    @settings(
        max_examples=BATCH, database=None, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @given(config=odd_configs(), engine=st.sampled_from(ENGINES))
    def check(config: dict[str, Any], engine: str) -> None:
        check_example(config, engine, other, first >= ORDINARY or next(examples) % 8 == 0)

    check()


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
    ("mamba2", {"time_step_limit": [0.0, 0.1]}, "`time_step_limit` is [0.0, 0.1], and cannot be"),
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


def test_steps_of_any_length_are_written_as_infinity(spec: Path) -> None:
    config = json.loads((_FAMILIES[0].parent / "mamba2.json").read_text())
    write(config | {"time_step_limit": [0.0, float("inf")]})
    assert '"time_step_limit": [\n  0.0,\n  Infinity' in Path("config.json").read_text()
    assert load_run_spec(spec).document.model.mamba is not None


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
