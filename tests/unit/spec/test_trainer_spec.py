"""A run with a trainer of its own: wrong specs in, exact places and hints out; levels; secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.spec.fields import field_types, is_model, members, section_of
from hpctrain.spec.loader import load_any_run_spec, load_trainer_spec
from hpctrain.spec.trainer import LEVELS, TrainerRunSpec, TrainerSpec, levels_of

VALID = """\
name: own
trainer:
  command: [python, train.py, --output, "{output}", --resume, "{resume}"]
  done: {step: 60}
  checkpoint: {path: "step-{step}", complete: {files: [done]}}
  signal: {save: TERM}
  metrics: [{output: '(?P<step>\\d+)'}]
resources: {gpus: 2}
"""
COMMAND = 'command: [python, train.py, --output, "{output}", --resume, "{resume}"]'
CHECKPOINT = 'checkpoint: {path: "step-{step}", complete: {files: [done]}}'
METRICS = "metrics: [{output: '(?P<step>\\d+)'}]"


def problems_of(tmp_path: Path, text: str) -> tuple[Problem, ...]:
    file = tmp_path / "spec.yaml"
    file.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        load_any_run_spec(file)
    assert caught.value.exit_code == 3
    return caught.value.problems


def shown(tmp_path: Path, text: str) -> list[str]:
    """`line:col: message | hint`, without the directory."""
    problems = problems_of(tmp_path, text)
    lines = [f"{one} | {one.hint}" if one.hint else str(one) for one in problems]
    return [line.replace(f"{tmp_path}/", "").removeprefix("spec.yaml:") for line in lines]


# (text in VALID, what replaces it, the one problem)
WRONG = [
    (COMMAND, "command: python train.py", "3:12: `trainer.command`: expected a list, got "
        "`python train.py` | write `[python, train.py]`"),
    (COMMAND, "command: []", "3:12: `trainer.command`: must not be empty"),
    (COMMAND, "command: [python, 5]",
        '3:21: `trainer.command[1]`: expected text, got `5` | put it in quotes: "5"'),
    (f"  {COMMAND}\n", "", "3:3: `trainer`: give exactly one of `command` and `script` | "
        "`command` is a list of words, `script` a text for bash"),
    (COMMAND, f"{COMMAND}\n  script: exit", "4:11: `trainer.script`: give exactly one of `command` "
        "and `script` | `command` is a list of words, `script` a text for bash"),
    (COMMAND, "script: python train.py", "3:11: `trainer.script`: nothing tells the trainer where "
        'to resume, so it would start over | add its option, such as `--resume, "{resume}"`, or '
        "`found: true` in `trainer.checkpoint` if it looks for its newest checkpoint itself"),
    ('--resume, "{resume}"', '--resume, "{reusme}"',
        "3:63: `trainer.command[5]`: nothing is put in place of `{reusme}` | "
        "did you mean `{resume}`?"),
    ("train.py", '"$(ls)"', "3:21: `trainer.command[1]`: only variables are expanded, `$NAME` or "
        "`${NAME}`, and no command or pattern is run: write `$$` for a dollar sign"),
    (f"  {CHECKPOINT}\n", "", "3:12: `trainer.command`: `{resume}` is always empty: nothing says "
        "what a checkpoint is | add `trainer.checkpoint`"),
    ("  done: {step: 60}\n", "", "2:1: `trainer.done`: required, but missing | done: When the run "
        "is done. An exit code of 0 alone is never the end."),
    ("done: {step: 60}", "done: 60",
        "4:9: `trainer.done`: expected a mapping, got `60` | write `{step: 60}`"),
    ("done: {step: 60}", "done: {}",
        "4:3: `trainer.done`: give exactly one of `step` and `file`"),
    ("done: {step: 60}", "done: {step: 60, file: a}",
        "4:3: `trainer.done`: give exactly one of `step` and `file`"),
    ("done: {step: 60}", "done: {stp: 60}",
        "4:10: `trainer.done.stp`: unknown key | did you mean `trainer.done.step`?"),
    ("step-{step}", "newest", "5:22: `trainer.checkpoint.path`: its last part needs one `{step}`: "
        "a checkpoint that is always written over is damaged by a failure while it is written"),
    ("step-{step}", "../step-{step}",
        "5:22: `trainer.checkpoint.path`: `..` leads out of `{output}`: write the whole path"),
    ("files: [done]", "file: [done]", "5:48: `trainer.checkpoint.complete.file`: unknown key | "
        "did you mean `trainer.checkpoint.complete.files`?"),
    ("files: [done]", "each_rank: [rng]", "5:59: `trainer.checkpoint.complete.each_rank`: `rng` "
        "has no `{rank}`: write a file of all in `files`"),
    ("files: [done]", "tracker: latest", "5:57: `trainer.checkpoint.complete.tracker`: expected a "
        "mapping, got `latest` | write `{file: latest}`"),
    ("signal: {save: TERM}", "signal: TERM",
        "6:11: `trainer.signal`: expected a mapping, got `TERM` | write `{save: TERM}`"),
    ("save: TERM", "save: SIGTERM", "6:18: `trainer.signal.save`: expected `TERM` or `USR1` or "
        "`USR2` or `INT` or `HUP`, got `SIGTERM` | did you mean `TERM`?"),
    (METRICS, "metrics: [{}]", "7:13: `trainer.metrics[0]`: give one of `output`, `csv`, `jsonl`, "
        "`json`, `tensorboard`"),
    (METRICS, "metrics: [{output: '('}]", "7:22: `trainer.metrics[0].output`: not a regular "
        "expression: missing ), unterminated subpattern at position 0"),
    (METRICS, "metrics: [{output: 'a'}]",
        "7:22: `trainer.metrics[0].output`: it has no group `(?P<step>...)`"),
    (METRICS, "metrics: [{output: '(?P<step>a)(?P<foo>b)'}]", "7:22: `trainer.metrics[0].output`: "
        "group `foo` is not known: step, loss, learning_rate, grad_norm, seconds, tokens, samples "
        "are"),
    (COMMAND, f"launch: torchrum\n  {COMMAND}", "3:11: `trainer.launch`: expected `srun` or "
        "`torchrun` or `accelerate` or `ray` or `self`, got `torchrum` | did you mean `torchrun`?"),
    (COMMAND, f"adapter: dpc\n  {COMMAND}",
        "3:12: `trainer.adapter`: no adapter is called `dpc` | did you mean `dcp`?"),
    (COMMAND, f"adapter: ./none.yaml\n  {COMMAND}", "3:12: `trainer.adapter`: no such file: "
        "none.yaml | paths are relative to the file that names it"),
    (METRICS, f"silence: 30min\n  {METRICS}", "7:12: `trainer.silence`: what tells its steps shows "
        "a hang sooner | leave it out: `supervise.stall` limits a step"),
    (METRICS, "talks: true\n  silence: 30min", "8:12: `trainer.silence`: what tells its steps "
        "shows a hang sooner | leave it out: `supervise.stall` limits a step"),
    (METRICS, "silence: 30", "7:12: `trainer.silence`: expected a duration such as `24:00:00`, "
        "`2-12:00:00`, `30min` or `90s`, got `30` | a bare number is refused because Slurm reads "
        "minutes and most others seconds: write `30s`, `30min` or `30h`"),
    (METRICS, "silence: 0s", "7:12: `trainer.silence`: must be above 0, got `0s`"),
    ("gpus: 2", "gpus: 2, min_nodes: 1", "8:33: `resources.min_nodes`: the trainer is not known to "
        "resume on another number of nodes | `trainer.elastic: true` says that it does"),
    ("resources:", "model: {layers: 4}\nresources:", "8:1: `model`: unknown key | `trainer` stands "
        "in place of `model`: give the one or the other"),
    ("resources:", "seed: 1\nresources:", "8:1: `seed`: unknown key | `trainer` stands in place of "
        "`seed`: give the one or the other"),
    ("resources:", "script: exit\nresources:", "8:1: `script`: unknown key | it belongs to a "
        "program of your own: `trainer: {script: ...}`"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), WRONG)
def test_wrong_value(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in VALID
    assert shown(tmp_path, VALID.replace(old, new, 1)) == [expected]


def test_a_misspelt_trainer_is_recognised(tmp_path: Path) -> None:
    lines = shown(tmp_path, VALID.replace("trainer:", "trianer:"))
    assert "2:1: `trianer`: unknown key | did you mean `trainer`?" in lines


# -- Every field with every wrong type: one problem, at the place of the value --------------------

VALUES = {int: 7, str: "some text", list: [{}], dict: {"zzz": {}}, type(None): None}


def takes(annotation: Any, value: object) -> bool:
    """Whether a value may be right for a field, or is refused by a rule of the field's own."""
    for member in members(annotation):
        kind = getattr(member, "__origin__", member)
        if is_model(member) and isinstance(value, dict):
            return True
        if kind in (tuple, dict) and isinstance(value, list if kind is tuple else dict):
            return True
        if isinstance(value, str) and (member is str or kind is str):
            return True
        if member is int and isinstance(value, int):
            return True
    return value is None and type(None) in get_args(annotation)


def fields_below(model: type[BaseModel], above: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield path, annotation of every field of a trainer, but those inside of lists."""
    for name, annotation in field_types(model).items():
        yield (*above, name), annotation
        section = section_of(annotation)
        if section is not None and is_model(members(annotation)[0]):
            yield from fields_below(section, (*above, name))


CASES = [
    pytest.param(path, value, id=f"{'.'.join(path)}={value!r}")
    for path, annotation in fields_below(TrainerSpec, ())
    for value in VALUES.values()
    if not takes(annotation, value) and not (value is None and path[0] == "adapter")
]


@pytest.mark.parametrize(("path", "value"), CASES)
def test_a_wrong_type_is_one_problem_at_its_place(
    tmp_path: Path, path: tuple[str, ...], value: object
) -> None:
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 4096
    document = yaml.load(VALID)
    here = document["trainer"]
    for name in path[:-1]:
        here = here.setdefault(name, {})
    here[path[-1]] = value
    required = {"tracker": "file"}
    for section, name in required.items():
        if section in path[:-1] and path[-1] != name:
            document["trainer"]["checkpoint"]["complete"][section][name] = "latest"
    if path[0] == "script":
        del document["trainer"]["command"]
    file = tmp_path / "spec.yaml"
    with file.open("w") as stream:
        yaml.dump(document, stream)
    with pytest.raises(InvalidInputError) as caught:
        load_any_run_spec(file)
    first, *others = caught.value.problems
    assert not others, caught.value.problems
    assert first.line is not None and first.column is not None
    assert f"`trainer.{'.'.join(path)}" in first.message, first.message
    assert "expected" in first.message
    line = file.read_text().splitlines()[first.line - 1]
    assert path[-1] in line or isinstance(value, list | dict)


# -- Files of adapters ----------------------------------------------------------------------------

ADAPTERS = {
    "itself": ("extends: ./mine.yaml\ntitle: me\n",
        "mine.yaml:1:10: `extends`: adapters extend each other: mine.yaml -> mine.yaml"),
    "unknown": ("extends: dpc\ntitle: me\n",
        "mine.yaml:1:10: `extends`: no adapter is called `dpc` | did you mean `dcp`?"),
    "key": ("title: me\nlaunhc: srun\n",
        "mine.yaml:2:1: `launhc`: unknown key | did you mean `launch`?"),
    "run": ("title: me\ndone: {step: 5}\n", "mine.yaml:2:1: `done`: unknown key | known here: "
        "checked, checkpoint, commands, elastic, environment, launch, launcher_arguments, metrics, "
        "needs, signal, sources, talks, title, unset"),
    "value": ("title: me\nsignal: {save: TERM, seconds: 5}\n",
        "mine.yaml:2:31: `signal.seconds`: expected a duration such as `24:00:00`, `2-12:00:00`, "
        "`30min` or `90s`, got `5` | a bare number is refused because Slurm reads minutes and most "
        "others seconds: write `5s`, `5min` or `5h`"),
    "list": ("- a\n",
        "mine.yaml:1:1: expected a mapping of `key: value` lines, got a list"),
    "title": ("launch: srun\n",
        "mine.yaml:1:1: `title`: required, but missing | title: As people call it"),
    "syntax": ("title: [a\n",
        "mine.yaml:1:8: a list that is opened with `[` is not closed | add `]` or a comma"),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTERS)
def test_wrong_adapter(tmp_path: Path, name: str) -> None:
    text, expected = ADAPTERS[name]
    (tmp_path / "mine.yaml").write_text(text)
    spec = VALID.replace(COMMAND, f"adapter: ./mine.yaml\n  {COMMAND}")
    lines = [line.replace(f"{tmp_path}/", "") for line in shown(tmp_path, spec)]
    assert lines == [expected]


def test_values_of_a_spec_win_over_those_of_its_adapter(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "extends: dcp\ntitle: me\nsignal: {save: USR1, to: ranks}\n"
    )
    file = tmp_path / "spec.yaml"
    file.write_text(
        "name: own\ntrainer:\n  adapter: ./mine.yaml\n  signal: {save: TERM}\n"
        '  command: [python, a.py, "{resume}"]\n  done: {step: 5}\nresources: {gpus: 2}\n'
    )
    trainer = load_trainer_spec(file).document.trainer
    assert trainer.framework == "./mine.yaml" and trainer.adapter is None
    assert trainer.checkpoint is not None and trainer.checkpoint.complete.dcp
    assert trainer.signal is not None and trainer.signal.save == "TERM"


# -- Secrets --------------------------------------------------------------------------------------

SECRETS = [
    "--wandb-key, abc123def456",
    "--wandb-key=abc123def456",
    "--hub_token, abcdefgh",
    "trainer.logger.api_key=abcd1234",
    "WANDB_API_KEY=abcdefgh1234",
    "--password, correct-horse",
    "hf_abcdefghijklmnopqrst",
    "--x=hf_abcdefghijklmnopqrst",
]
HARMLESS = [
    '--pad-token, "<pad>"',
    "--json-keys, text",
    "--text_key=content",
    "--hub_token, $HF_TOKEN",
    "--wandb_api_key=$WANDB_API_KEY",
    '--max_tokens, "100"',
    "--push-to-hub-token, --other",
    "--tokenizer, hf",
]


@pytest.mark.parametrize("words", SECRETS)
def test_secret_among_the_words_of_a_command(tmp_path: Path, words: str) -> None:
    first, *others = problems_of(tmp_path, VALID.replace("train.py", f"train.py, {words}"))
    assert not others and first.line == 3 and "`trainer.command[" in first.message
    assert "secret" in first.message and "environment.inherit" in (first.hint or "")
    value = re.split("[=, ]+", words)[-1]
    assert value not in first.message


@pytest.mark.parametrize("words", HARMLESS)
def test_words_that_are_no_secrets(tmp_path: Path, words: str) -> None:
    (tmp_path / "spec.yaml").write_text(VALID.replace("train.py", f"train.py, {words}"))
    assert load_any_run_spec(tmp_path / "spec.yaml")


@pytest.mark.parametrize(
    ("script", "is_secret"),
    [
        ("export WANDB_API_KEY=abcdefgh1234", True),
        ('python a.py --wandb-key "abcdefgh1234"', True),
        ("huggingface-cli login --token hf_abcdefghijklmnopqrst", True),
        ("export WANDB_API_KEY=$(cat ~/key)", False),
        ("python a.py --pad-token x --wandb-key $KEY", False),
    ],
)
def test_secret_in_a_script(tmp_path: Path, script: str, *, is_secret: bool) -> None:
    text = f"script: |\n    {script}\n    python a.py $HPCTRAIN_CHECKPOINT"
    (tmp_path / "spec.yaml").write_text(VALID.replace(COMMAND, text))
    if not is_secret:
        assert load_any_run_spec(tmp_path / "spec.yaml")
        return
    first, *others = problems_of(tmp_path, VALID.replace(COMMAND, text))
    assert not others and "`trainer.script`" in first.message and "secret" in first.message


def test_secret_of_an_adapter_is_refused(tmp_path: Path) -> None:
    lines = shown(tmp_path, VALID.replace(COMMAND, f"environment: {{HF_TOKEN: abcd}}\n  {COMMAND}"))
    assert lines[0].startswith("3:27: `trainer.environment.HF_TOKEN`: HF_TOKEN is named like")


# -- Levels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(LEVELS)))
@pytest.mark.parametrize("beyond", [False, True])
def test_levels_need_those_before(number: int, *, beyond: bool) -> None:
    """Every set of fields: the level is that of the first one that is missing."""
    parts: dict[str, Any] = {
        "checkpoint": {"path": "step-{step}"},
        "signal": {"save": "TERM"},
        "metrics": [{"csv": "a.csv"}],
    }
    names = list(parts)
    given = dict(list(parts.items())[: min(number, 3)])
    if beyond and number < 2:
        given |= {names[2]: parts[names[2]]}
    command = ["python", "{resume}"] if "checkpoint" in given else ["python"]
    trainer = TrainerSpec.model_validate(
        {"command": command, "done": {"step": 1}, "talks": number == 4, **given}
    )
    assert trainer.level == number
    reached, above = levels_of(trainer)
    assert [level.number for level in reached] == list(range(number + 1))
    assert [level.number for level in above] == ([3] if beyond and number < 2 else [])


def test_every_level_names_a_field() -> None:
    for level in LEVELS:
        assert level.field.partition(".")[2] in field_types(TrainerSpec)
    assert [level.number for level in LEVELS] == [0, 1, 2, 3, 4]
    assert set(TrainerRunSpec.model_fields) >= {"name", "trainer", "resources"}
