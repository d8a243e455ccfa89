"""Wrong YAML in, exact places and words out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml.error import MarkedYAMLError
from wrong_specs import VALID, problems_of, shown

from hpctrain.base.errors import InvalidInputError
from hpctrain.records.supervise_config import ChannelSettings, RollbackSettings
from hpctrain.spec.files import MAX_FILE_BYTES
from hpctrain.spec.loader import GONE, forget_former_fields, load_profile, load_run_spec
from hpctrain.spec.profile.software import CommandsProfile

# (text in VALID, what replaces it, all problems)
WRONG_VALUES = [
    ("layers: 4", "layer: 4", [
        "2:1: `model.layers`: required, but missing"
        " | layers: Number of transformer layers; resnet: 18, 34, 50, 101 or 152",
        "2:9: `model.layer`: unknown key | did you mean `model.layers`?"]),
    ("name: tiny", "name: tiny\ntp: 8", [
        "2:1: `tp`: unknown key | did you mean `parallel.tp`?"]),
    ("name: tiny", "name: tiny\nzzz: 8", [
        "2:1: `zzz`: unknown key | known here: activation_offload_layers, after, batch, budget, "
        "checkpoint, container, data, engine, environment, evaluation, fit_probability, "
        "launcher, logging, lora, metrics, model, name, notify, optimizer, parallel, precision, "
        "profile, recompute, recompute_layers, recompute_modules, resources, schedule, seed, "
        "supervise, task, tracking"]),
    ("name: tiny", "name: tiny\nlauncher: torchrum", [
        "2:11: `launcher`: expected `srun` or `torchrun`, got `torchrum`"
        " | did you mean `torchrun`?"]),
    ("name: tiny", "name: tiny\nParallel: {}", [
        "2:1: `Parallel`: unknown key | did you mean `parallel`?"]),
    ("name: tiny", "name: a b", [
        "1:7: `name`: expected a name of letters, digits, `.`, `_` and `-`, 63 characters at most, "
        "beginning with a letter or digit, got `a b`"]),
    ("name: tiny", "name: 175", ['1:7: `name`: expected text, got `175` | put it in quotes: "175"'],
     ),
    ("layers: 4", "layers: 8x", ["2:17: `model.layers`: expected an integer, got `8x`"]),
    ("layers: 4", 'layers: "4"', [
        "2:17: `model.layers`: expected an integer, got `4` | remove the quotes"]),
    ("layers: 4", "layers: 1_000", [
        "2:17: `model.layers`: expected an integer, got `1_000` | write `1000`"]),
    ("layers: 4", "layers: true", ["2:17: `model.layers`: expected an integer, got `true`"]),
    ("layers: 4", "layers: 4.5", ["2:17: `model.layers`: expected an integer, got `4.5`"]),
    ("layers: 4", "layers: 0", ["2:17: `model.layers`: must be at least 1, got `0`"]),
    ("layers: 4", "layers: [4]", ["2:17: `model.layers`: expected an integer, got a list"]),
    ("layers: 4", "layers: {a: 4}", ["2:17: `model.layers`: expected an integer, got a mapping"]),
    ("layers: 4", "layers: 012", [
        "2:17: `model.layers`: `012` starts with a zero, which some YAML readers take as octal"
        ' | write `12` for the number, or `"012"` for the text']),
    ("hidden: 128", "hidden: 130", ["2:1: `model`: hidden 130 is not divisible by heads 4"]),
    ("seq: 128", "seq: 128, tied: yes", [
        "2:72: `model.tied`: expected `true` or `false`, got `yes`"
        " | write `true`: YAML 1.2 has only true and false"]),
    ("seq: 128", "seq: 128, tied: off", [
        "2:72: `model.tied`: expected `true` or `false`, got `off`"
        " | write `false`: YAML 1.2 has only true and false"]),
    ("seq: 128", "seq: 128, dropout: 1", ["2:75: `model.dropout`: must be below 1.0, got `1`"]),
    ("seq: 128", "seq: 128, family: lama", [
        "2:74: `model.family`: no family is called `lama` | did you mean `llama` or `llama4` or "
        "`bamba`?"]),
    ("batch: {global: 8}", "batch: {global: 8, micro: many}", [
        "3:27: `batch.micro`: expected an integer or `auto`, got `many`"]),
    ("batch: {global: 8}", "batch: {global: 8, micro: atuo}", [
        "3:27: `batch.micro`: expected an integer or `auto`, got `atuo` | did you mean `auto`?"]),
    ("batch: {global: 8}", "batch: {global: 8, micro: 0}", [
        "3:1: `batch`: micro must be at least 1, or `auto`"]),
    ("batch: {global: 8}", "parallel: {tp: 0, pipline: 2}", [
        "1:1: `batch`: required, but missing"
        " | batch: How many sequences make one optimizer step.",
        "3:16: `parallel.tp`: must be at least 1, got `0`",
        "3:19: `parallel.pipline`: unknown key | known here: count_embedding, count_loss, cp, ep, "
        "etp, order, pp, sequence_parallel, stages, tp, vpp"]),
    ("name: tiny", "name: tiny\nparallel: 8", [
        "2:11: `parallel`: expected a mapping or `auto`, got `8`"]),
    ("name: tiny", "name: tiny\nparallel: [8]", [
        "2:11: `parallel`: expected a mapping or `auto`, got a list"]),
    ("name: tiny", "name: tiny\nparallel: {vpp: 2}", [
        "2:1: `parallel`: vpp needs pp of at least 2"]),
    ("name: tiny", "name: tiny\nparallel:\n", [
        "2:1: `parallel`: expected a mapping or `auto`, got nothing"]),
    ("name: tiny", "name: tiny\nengine:\n", [
        "2:1: `engine`: expected a mapping, got nothing"
        " | give a value, or remove the key to get the default"]),
    ("{steps: 60}", "{steps: 60, tokens: 3B}", [
        "4:1: `budget`: give exactly one of `steps` and `tokens`"]),
    ("{steps: 60}", "{tokens: 3b}", [
        "4:18: `budget.tokens`: expected a number of tokens such as `300B` or `20M`, got `3b`"]),
    ("{steps: 60}", "{tokens: 0}", ["4:18: `budget.tokens`: must be above 0, got `0`"]),
    ("lr: 1e-3", "lr: .inf", [
        "5:17: `optimizer.lr`: `.inf` is not a usable number | write a finite number"]),
    ("lr: 1e-3", "lr: 1e-3, min_lr: 1", ["5:1: `optimizer`: min_lr 1 is above lr 0.001"]),
    ("lr: 1e-3", "lr: 1e-3, momentum: 0.9", [
        "5:1: `optimizer`: momentum is for `kind: muon`, not for adamw"]),
    ("gpus: 4", "gpus: 4, walltime: 1440", [
        "7:32: `resources.walltime`: expected a duration such as `24:00:00`, `2-12:00:00`, "
        "`30min` or `90s`, got `1440` | a bare number is refused because Slurm reads minutes and "
        "most others seconds: write `1440s`, `1440min` or `1440h`"]),
    ("gpus: 4", "gpus: 4, walltime: 0s", [
        "7:32: `resources.walltime`: must be above 0, got `0s`"]),
    ("gpus: 4", "gpus: 4, gpus: 8, gpus: 9", [
        "7:22: `resources.gpus`: given twice, first on line 7 | keep one of the two",
        "7:31: `resources.gpus`: given twice, first on line 7 | keep one of the two"]),
    ("name: tiny", "name: tiny\ndata:\n  split: a\n  sources:\n    - path: ''\n    - 3", [
        "3:10: `data.split`: expected three shares such as `98,2,0`, got `a`",
        "5:13: `data.sources[0].path`: must not be empty",
        "6:7: `data.sources[1]`: expected a mapping, got `3`"]),
    ("name: tiny", "name: tiny\nenvironment: {variables: {A: 1, 'B C': x}, inherit: D}", [
        '2:30: `environment.variables.A`: expected text, got `1` | put it in quotes: "1"',
        "2:33: `environment.variables.B C`: "
        "expected the name of a variable such as `NCCL_DEBUG`",
        "2:53: `environment.inherit`: expected a list, got `D` | write `[D]`"]),
    ("name: tiny", "name: tiny\nsupervise: {speed_check: exclude}", [
        "2:26: `supervise.speed_check`: expected a mapping, got `exclude`"
        " | write `{mode: exclude}`"]),
    ("name: tiny", "name: tiny\nsupervise: {speed_check: {mode: evict, slow_gpu: 1.2}}", [
        "2:33: `supervise.speed_check.mode`: expected `auto` or `off` or `report` or "
        "`exclude`, got `evict`",
        "2:50: `supervise.speed_check.slow_gpu`: must be below 1.0, got `1.2`"]),
    ("name: tiny", "name: tiny\n1: 2\n[a]: 3\n<<: {seed: 1}", [
        "2:1: keys must be text, got `1` | put the key in quotes if it is a name",
        "3:1: keys must be text, got a list | put the key in quotes if it is a name",
        "4:1: merge keys (`<<`) are not part of YAML 1.2"
        " | write the keys out, or alias a whole value"]),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), WRONG_VALUES)
def test_wrong_value(tmp_path: Path, old: str, new: str, expected: list[str]) -> None:
    assert old in VALID
    assert shown(tmp_path, problems_of(tmp_path, VALID.replace(old, new, 1))) == expected


WRONG_SYNTAX = [
    ("", "1:1: the file is empty"),
    ("# only a comment\n", "1:1: the file is empty"),
    ("null\n", "1:1: the file is empty"),
    ("- a\n", "1:1: expected a mapping of `key: value` lines, got a list"),
    ("hello\n", "1:1: expected a mapping of `key: value` lines, got `hello`"),
    ("a:\n\tb: 1\n", "2:1: a tab cannot be used here | indent with spaces"),
    ("a: [1, 2\n", "1:4: a list that is opened with `[` is not closed | add `]` or a comma"),
    ("a: {b: 1\n", "1:4: a mapping opened with `{` is not closed | add `}` or a comma"),
    ("a: 'x\n", "1:4: a quote that is opened here is never closed | close it"),
    ("a: 1\nb\nc: 2\n", "2:1: a key without `:` | write `key: value`"),
    ("a: @x\n", "1:4: a value cannot start with this character | put it in quotes"),
    ("a: b: c\n", "1:5: a `:` is not allowed here | check the indentation of this line and the "
     "one above; quote text that contains `: `"),
    ("a:\n  - b\n c: d\n", "3:2: this line does not line up with the lines above | keys of one "
     "section start in the same column; list items start with `- `"),
    ("a:\n  {b: 1}: 3\n d: 1\n", "3:2: this line does not line up with the lines above | keys of "
     "one section start in the same column; list items start with `- `"),
    ("a: 1\nb:1 - &c d\n", "2:1: a key without `:` | write `key: value`"),
    ('a: "\\q"\n', "1:6: unknown escape after `\\` | use single quotes for a plain `\\`"),
    ("a: 1\n---\nb: 2\n", "2:1: a second YAML document begins here | keep one document per file"),
    ("a: \x00\n", "1:4: character U+0000 is not allowed in YAML | remove it"),
    (b"name: caf\xe9\n", "1:10: byte 0xE9 is not UTF-8 | save the file as UTF-8"),
    ("a: 1\n".encode("utf-16"), "1:1: byte 0xFF is not UTF-8 | save the file as UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), WRONG_SYNTAX)
def test_wrong_syntax(tmp_path: Path, text: str | bytes, expected: str) -> None:
    assert shown(tmp_path, problems_of(tmp_path, text)) == [expected]


@pytest.mark.parametrize(("text", "expected"), WRONG_SYNTAX)
def test_messages_do_not_depend_on_the_wording_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | bytes, expected: str
) -> None:
    init = MarkedYAMLError.__init__

    def reworded(self: MarkedYAMLError, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.problem = self.context = "other words"

    monkeypatch.setattr(MarkedYAMLError, "__init__", reworded)
    assert shown(tmp_path, problems_of(tmp_path, text)) == [expected]


def test_all_problems_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = VALID.replace("name: tiny", "name: a b\nname: c").replace("lr: 1e-3", "lr: x")
    text = text.replace("gpus: 4", "gpus: 012") + "supervise: {stall: 5}\nbogus: 1\n"
    lines = [problem.line for problem in problems_of(tmp_path, text, "nothing")]
    assert lines == [1, 2, 6, 8, 9, 10, None]


def test_no_words_of_the_libraries_get_out(tmp_path: Path) -> None:
    values = ["x", "1", "-1", "1.5", "true", "null", "[1]", "{a: 1}", "'1'", "012", "[{a: [b]}]"]
    keys = "model batch budget optimizer checkpoint resources parallel data environment name seed "
    keys += "precision schedule engine.name model.tied batch.micro parallel.stages data.sources"
    seen = 0
    for key in keys.split():
        for value in values:
            file = tmp_path / "spec.yaml"
            file.write_text(VALID)
            try:
                load_run_spec(file, [f"{key}={value}"])
            except Exception as error:
                seen += 1
                assert type(error).__name__ == "InvalidInputError", (key, value)
                for word in ("pydantic", "input_value", "type=", "Input should", "while parsing"):
                    assert word not in str(error), (key, value)
                assert "another value" not in str(error), (key, value)
    assert seen > 100


def test_missing_file_names_similar_ones(tmp_path: Path) -> None:
    (tmp_path / "gpt175b.yaml").write_text(VALID)
    with pytest.raises(Exception, match="no such file") as caught:
        load_run_spec(tmp_path / "gpt157b.yaml")
    assert caught.value.problems[0].hint == "did you mean `gpt175b.yaml`?"


def test_a_path_of_an_example_is_answered_with_the_command_that_writes_it(tmp_path: Path) -> None:
    """`--help` names examples/gpt175b.yaml, which people with a wheel do not have."""
    with pytest.raises(Exception, match="no such file") as caught:
        load_run_spec(tmp_path / "examples" / "gpt175b.yaml")
    hint = caught.value.problems[0].hint
    assert hint == "`hpctrain examples gpt175b > gpt175b.yaml` writes the example of that name"


def test_directory_and_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="is a directory"):
        load_run_spec(tmp_path)
    with pytest.raises(Exception, match="no such file"):
        load_profile(tmp_path / "nowhere" / "x.yaml")


def test_large_and_endless_files_are_refused(tmp_path: Path) -> None:
    assert "larger than 1 MiB" in problems_of(tmp_path, b"#" * (MAX_FILE_BYTES + 1))[0].message
    with pytest.raises(Exception, match="larger than 1 MiB"):
        load_run_spec(Path("/dev/zero"))


# -- Fields that have gone: their defaults, which run directories contain, are left out ---------


# As a former version wrote them, in sections that this one has.
FORMER = f"""{VALID.replace("lr: 1e-3", "lr: 1e-3, name: adamw")}
profile: {{steps: [3], start: null, count: 1, shapes: false, largest: 512MiB, flops: false}}
supervise: {{storm_window: '00:30:00', rollback: {{other_nodes: true}}}}
engine: {{ddp: {{powersgd_rank: 4}}}}
notify: {{channels: [{{kind: slack, url_file: /a, url_env: null}}]}}
"""


def test_a_spec_of_a_former_version_is_read(tmp_path: Path) -> None:
    former, now = tmp_path / "former.yaml", tmp_path / "now.yaml"
    former.write_text(FORMER)
    channel = "notify: {channels: [{kind: slack, url_file: /a}]}"
    now.write_text(f"{VALID}profile: {{steps: [3]}}\n{channel}\n")
    assert load_run_spec(former).document == load_run_spec(now).document


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("distributed: true", "zero: null"),
        ("distributed: true, zero: 3", "zero: 3"),
        # as run directories have it: each field is written
        ("distributed: false, zero: null", "zero: 0"),
        ("distributed: false, zero: 0", "zero: 0"),
    ],
)
def test_the_stage_says_what_distributed_did(tmp_path: Path, former: str, now: str) -> None:
    before, after = tmp_path / "before.yaml", tmp_path / "after.yaml"
    before.write_text(VALID.replace("lr: 1e-3", f"lr: 1e-3, {former}"))
    after.write_text(VALID.replace("lr: 1e-3", f"lr: 1e-3, {now}"))
    assert load_run_spec(before).document == load_run_spec(after).document


@pytest.mark.parametrize(
    "fields",
    ["distributed: false", "distributed: false, zero: 1", "distributed: true, zero: 0"],
)
def test_distributed_is_refused_with_what_to_write(tmp_path: Path, fields: str) -> None:
    text = VALID.replace("lr: 1e-3", f"lr: 1e-3, {fields}").encode()
    (problem,) = problems_of(tmp_path, text)
    assert problem.message == "`optimizer.distributed`: unknown key" and problem.line is not None
    assert problem.hint == "instead of `distributed: false` write `zero: 0`"


def test_the_former_prologue_is_read_as_commands_of_tasks(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    head = "extends: a100x64\nname: own\nsoftware:\n"
    own.write_text(f"{head}  prologue: [[source, /sw/rails.sh]]\n")
    assert load_profile(own).document.software.commands.task == (("source", "/sw/rails.sh"),)
    own.write_text(f"{head}  prologue: []\n")  # as run directories of earlier versions have it
    assert load_profile(own).document.software.commands == CommandsProfile()
    for wrong, line in (("  prologue: [[source, 7]]\n", 4), ("  prologue: text\n", 4)):
        own.write_text(head + wrong)
        with pytest.raises(InvalidInputError) as caught:
            load_profile(own)
        assert {one.line for one in caught.value.problems} == {line}
    own.write_text(f"{head}  commands: {{task: []}}\n  prologue: [[a]]\n")
    with pytest.raises(InvalidInputError) as caught:
        load_profile(own)
    (problem,) = caught.value.problems
    assert (problem.line, problem.hint) == (5, "use `software.commands.task`")


@pytest.mark.parametrize(
    ("field", "other"),
    [("largest: 512MiB", "largest: 1GiB"), ("flops: false", "flops: 0"), ("'00:30:00'", "1h")],
)
def test_another_value_is_an_unknown_key(tmp_path: Path, field: str, other: str) -> None:
    (problem,) = problems_of(tmp_path, FORMER.replace(field, other))
    assert "unknown key" in problem.message and problem.line is not None


def test_documents_of_a_run_that_goes_on_are_read_with_any_value() -> None:
    values = {"ddp": {"hook": "powersgd", "powersgd_rank": 8}, "flops_steps": [3], "seed": 1}
    forget_former_fields(values, only_defaults=False)
    assert values == {"ddp": {"hook": "powersgd"}, "seed": 1}
    assert RollbackSettings.model_validate_json('{"other_nodes": false}') == RollbackSettings()
    channel = {"name": "slack", "kind": "slack", "url_env": "HOOK"}
    assert ChannelSettings.model_validate_json(json.dumps(channel)).url_file is None


def test_no_field_of_today_has_gone() -> None:
    from hpctrain.spec.reference import fields_of

    today = {path for kind in ("spec", "profile", "service") for path in fields_of(kind)}
    assert not today & {path.replace("channels.", "channels[].") for path in GONE}


# -- What is refused in the section `notify`, with words that tell what to write instead --------


SPEC = """\
name: small
model: {layers: 4, hidden: 128, heads: 4, vocab: 512, seq: 128}
batch: {global: 8, micro: 2}
budget: {steps: 60}
optimizer: {lr: 1e-3}
checkpoint: {every_steps: 20}
resources: {gpus: 4}
"""
SLACK = "{kind: slack, url_file: x}"


def problems(tmp_path: Path, notify: str) -> str:
    file = tmp_path / "small.yaml"
    file.write_text(f"{SPEC}notify: {notify}\n")
    try:
        load_run_spec(file)
    except InvalidInputError as error:
        return " & ".join(f"{one.line}:{one.column}: {one.message}" for one in error.problems)
    return ""


@pytest.mark.parametrize(
    ("notify", "words"),
    [
        (f"{{channels: [{SLACK}], on: [done, failed]}}", ""),
        ("{channels: [{kind: slack}]}", "a channel of kind slack needs `url_file`"),
        ("{channels: [{kind: slack, url_file: a, url_env: B}]}", "unknown key"),
        ("{channels: [{kind: slack, url_file: a, token_file: b}]}", "kind slack has no `token_f"),
        ("{channels: [{kind: mail}]}", "mail needs addresses: `to: [ada@example.org]`"),
        ("{channels: [{kind: mail, to: [ada], sendmail: msmtp}]}", "sendmail"),
        ("{channels: [{kind: mail, to: ['a b']}]}", "expected an address such as"),
        ("{channels: [{kind: mail, to: ['-oQ/tmp']}]}", "expected an address such as"),
        ('{channels: [{kind: mail, to: ["a\\nBcc: b"]}]}', "expected an address such as"),
        ("{channels: [{kind: slurm, to: [a, b]}]}", "Slurm takes one address"),
        ("{channels: [{kind: slurm}, {kind: slurm}]}", "one channel of kind slurm"),
        (f"{{channels: [{SLACK}], on: [fialed]}}", "got `fialed`"),
        ("{quiet_hours: '22-7', time_zone: UTC}", "quiet_hours: expected a time of the day"),
        ("{quiet_hours: '24:00-07:00', time_zone: UTC}", "expected a time of the day"),
        ("{quiet_hours: '07:00-07:00', time_zone: UTC}", "expected a time of the day"),
        ("{quiet_hours: '22:00-07:00'}", "quiet_hours needs `time_zone`"),
        ("{time_zone: UTC}", "go with `quiet_hours`"),
        ("{quiet_hours: '22:00-07:00', time_zone: Mars/Base}", "`Mars/Base` is no time zone"),
        ("{quiet_hours: '22:00-07:00', time_zone: ../../etc/passwd}", "is no time zone"),
        (
            "{quiet_hours: '22:00-07:00', time_zone: UTC, even_at_night: [started]}",
            "`started` is not among `on`",
        ),
        ("{at_most: 6}", "at_most"),
        ("{at_most: 0/h}", "at_most: expected a number per time"),
        ("{at_most: 6/week}", "at_most: expected a number per time"),
        ("{queue_limit: 0s}", "queue_limit"),
    ],
)
def test_wrong_values(tmp_path: Path, notify: str, words: str) -> None:
    found = problems(tmp_path, notify)
    assert words in found and bool(found) == bool(words), found
    assert not found or found.startswith("8:"), found
