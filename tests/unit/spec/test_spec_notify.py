"""What is refused in the section `notify`, with words that tell what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.spec.loader import load_run_spec

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
