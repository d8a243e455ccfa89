"""A dataset made by a job array of the real Slurm: its shards on the nodes, the rest here."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsal import Stage

from hpctrain.job.datasets import prepare_dataset
from hpctrain.records.datasets import DatasetRequest

pytestmark = pytest.mark.nightly("a dozen processes that tokenize")

LINES = [json.dumps({"text": f"the cat sat on mat {number}\n" * 5}) for number in range(40)]
BROKEN = 25


def prepare(
    stage: Stage, output: Path, source: Path, tokenizer: Path
) -> subprocess.CompletedProcess[str]:
    """The command line as a user has it: some shards of 1 kB in three elements."""
    options = [f"--output={output}", f"--tokenizer={tokenizer}", "--shard-size=1kB", "--slurm"]
    options += ["--profile=sandbox", "--jobs=3", "--workers=2", "--time=5min"]
    return subprocess.run(
        [str(Path(sys.executable).with_name("hpctrain")), "data", "prepare", str(source), *options],
        env={**os.environ, **stage.sandbox.environment(), "SBATCH_PARTITION": "nonsense"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def digests(directory: Path) -> dict[str, str]:
    files = [path for path in directory.iterdir() if path.suffix in (".bin", ".idx")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_wrong_line_is_told_and_what_is_finished_is_kept(stage: Stage, tmp_path: Path) -> None:
    source, output = tmp_path / "text.jsonl", tmp_path / "array" / "text"
    tokenizer = tmp_path / "tokenizer" / "tokenizer.json"
    source.write_text("\n".join(LINES) + "\n")
    alone = tmp_path / "alone" / "text"
    prepare_dataset(
        DatasetRequest(output=alone, inputs=(source,), vocab_size=280, tokenizer_output=tokenizer)
    )
    broken = [*LINES]
    broken[BROKEN - 1] = broken[BROKEN - 1].replace('"text"', '"tixt"')
    source.write_text("\n".join(broken) + "\n")
    failed = prepare(stage, output, source, tokenizer)
    assert failed.returncode == 3, f"{failed.stdout}\n{failed.stderr}"
    assert f"{source}:{BROKEN}: has no text in field `text`" in failed.stderr
    source.write_text("\n".join(LINES) + "\n")
    ended = prepare(stage, output, source, tokenizer)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert ": shards 1, elements 1" in ended.stderr, "the others were there"
    assert digests(output.parent) == digests(alone.parent)
    assert not list(output.parent.glob(".*")), "no workplace is left"
