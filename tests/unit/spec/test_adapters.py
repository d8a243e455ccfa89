"""The packaged adapters, held against what their frameworks wrote here (tests/adapters/NAME.json).

Lines of frameworks that do not run here have the shape of public ones, named beside them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoints.foreign import find_checkpoints, what_is_missing
from hpctrain.spec.loader import adapter_names, load_adapter
from hpctrain.spec.trainer import Adapter, ForeignCheckpointSpec, ProgressSource
from hpctrain.trainer.progress import OutputReader

RECORDS: Mapping[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_bytes())
    for path in sorted((Path(__file__).resolve().parents[2] / "adapters").glob("*.json"))
}
# By the name of an adapter: a line, what is read from it, and where such lines were seen.
PUBLIC_LINES: Mapping[str, tuple[str, dict[str, float], str]] = {
    "ms-swift": (
        "{'loss': 0.25, 'grad_norm': 0.625, 'learning_rate': 8.6e-07, 'memory(GiB)': 60.2, "
        "'epoch': 0.6, 'global_step/max_steps': '56/176', 'elapsed_time': '1h 2m 8s'}",
        {"step": 56, "loss": 0.25, "grad_norm": 0.625, "learning_rate": 8.6e-07},
        "https://github.com/modelscope/ms-swift/issues/4146",
    ),
    "nanotron": (
        "10/17/2025 10:31:56 [INFO|DP=0|PP=0|TP=0]: iteration: 3281 / 3790 | consumed_tokens: 858M "
        "| elapsed_time_per_iteration_ms: 11.5K | tokens_per_sec: 22.8K | global_batch_size: 64 | "
        "lm_loss: 2.5 | lr: 1e-05 | model_tflops_per_gpu: 38.3 | grad_norm: 1.25",
        {"step": 3281, "loss": 2.5, "grad_norm": 1.25, "learning_rate": 1e-05},
        "https://github.com/huggingface/nanotron/issues/390",
    ),
    "megatron-bridge": (
        "[2026-05-28 12:26:20] iteration       29/    6069 | consumed samples:        14848 | "
        "elapsed time per iteration (ms): 26813.0 | learning rate: 5.800000E-05 | global batch "
        "size:   512 | lm loss: 8.750000E-01 | mtp_1 loss: 1.125000E+00 | loss scale: 1.0 | grad "
        "norm: 0.875 | number of skipped iterations:   0 | number of nan iterations:   0 |",
        {"step": 29, "samples": 14848, "learning_rate": 5.8e-05, "loss": 0.875, "grad_norm": 0.875},
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4024",
    ),
}


def recorded(name: str) -> tuple[dict[str, Any], ForeignCheckpointSpec]:
    checkpoint = load_adapter(name).document.checkpoint
    assert checkpoint is not None
    return RECORDS[name], checkpoint


@pytest.mark.parametrize("name", adapter_names())
def test_an_adapter_says_with_what_it_was_checked(name: str) -> None:
    adapter = load_adapter(name).document
    if adapter.talks:
        return  # it is hpctrain's own
    assert adapter.needs and adapter.sources
    (checked,) = adapter.checked
    seen = {checked.resume, checked.save, checked.progress, checked.complete}
    assert ("run" in seen) == (name in RECORDS), "what ran has a record, and nothing else has one"
    if name in RECORDS:
        version = RECORDS[name]["versions"][checked.package]
        assert version.partition("+")[0] == checked.version
        assert set(RECORDS[name]["codes"]) == {0}
        rows = [row for read in RECORDS[name]["files"].values() for row in read["rows"]]
        assert (checked.progress == "run") == bool(RECORDS[name]["lines"] or rows)


@pytest.mark.parametrize("name", RECORDS)
def test_a_checkpoint_is_complete_with_its_last_file_and_not_before(
    tmp_path: Path, name: str
) -> None:
    record, checkpoint = recorded(name)
    files = record["checkpoint"]["files"]
    for written in range(len(files) + 1):
        output = tmp_path / str(written)
        lay(output, record, files[:written], tracked=written == len(files))
        missing = missing_in(output, checkpoint, record["ranks"])
        assert (missing is None) == (written == len(files)), f"{files[:written]}: {missing}"
    if record["checkpoint"]["tracker"]:
        lay(tmp_path / "last", record, files, tracked=False)
        assert missing_in(tmp_path / "last", checkpoint, record["ranks"]) is not None


@pytest.mark.parametrize("name", RECORDS)
def test_a_file_that_was_cut_short_is_seen_by_its_format(tmp_path: Path, name: str) -> None:
    """All formats but those whose files do not tell their length (`.distcp`, text)."""
    record, checkpoint = recorded(name)
    files = record["checkpoint"]["files"]
    for cut in (one for one in files if "tail" in one or one["name"].endswith((".safetensors",))):
        output = tmp_path / str(files.index(cut))
        lay(output, record, files, tracked=True)
        path = Path(output, record["checkpoint"]["name"], cut["name"])
        with path.open("r+b") as stream:
            stream.truncate(cut["bytes"] // 2)
        if record["checkpoint"]["name"].endswith(".metadata") or checkpoint.complete.dcp:
            continue  # shards are archives of PyTorch, too, and their metadata has their names only
        assert missing_in(output, checkpoint, record["ranks"]) is not None, cut["name"]


@pytest.mark.parametrize("name", RECORDS)
def test_lines_that_were_printed_tell_steps(name: str) -> None:
    record, adapter = RECORDS[name], load_adapter(name).document
    lines = iter(record["lines"])
    for source in output_sources(adapter):
        steps = [steps_of(source, next(lines), record["target"]) for _ in ("first", "last")]
        assert all(steps), source
        assert steps[-1][-1] == record["target"], "the last line is of the last step"
    assert not list(lines)


@pytest.mark.parametrize("name", RECORDS)
def test_files_that_were_written_tell_steps_and_losses(name: str) -> None:
    """Read while the record was made: by the same reader, from the files themselves."""
    for pattern, read in RECORDS[name]["files"].items():
        # the examples do not log by this name, which others use
        assert pattern.endswith(" train_loss") or [row["step"] for row in read["rows"]] == [1, 2]
        if RECORDS[name]["package"] in ("transformers", "trl"):
            assert all({"learning_rate", "grad_norm"} <= {*row} for row in read["rows"]), pattern
    files = [source for source in load_adapter(name).document.metrics if source.output is None]
    assert len(RECORDS[name]["files"]) == len(files)


@pytest.mark.parametrize("name", RECORDS)
def test_a_resumed_run_went_on_with_the_same_losses(name: str) -> None:
    resumed = RECORDS[name]["resume"]
    assert resumed["first"] == resumed["step"] + 1
    assert resumed["equal"] > 0
    assert resumed["different"] == 0


@pytest.mark.parametrize("name", [name for name, record in RECORDS.items() if "signal" in record])
def test_the_signal_saved_and_ended_all_ranks(name: str) -> None:
    told, adapter = RECORDS[name]["signal"], load_adapter(name).document
    assert told["ranks_that_catch_it"] == RECORDS[name]["ranks"]
    assert told["step_saved"] > told["step_before"]
    assert adapter.signal is None or told["name"] == f"SIG{adapter.signal.save}"


@pytest.mark.parametrize("name", PUBLIC_LINES)
def test_lines_of_frameworks_that_do_not_run_here(name: str) -> None:
    line, expected, _ = PUBLIC_LINES[name]
    (first, *_) = output_sources(load_adapter(name).document)
    (values,) = OutputReader((first,), None).read(line)
    assert values == expected


def output_sources(adapter: Adapter) -> Iterator[ProgressSource]:
    return (source for source in adapter.metrics if source.output is not None)


def steps_of(source: ProgressSource, line: str, target: int) -> list[float]:
    return [values["step"] for values in OutputReader((source,), target).read(line)]


def lay(output: Path, record: dict[str, Any], files: list[dict[str, Any]], tracked: bool) -> None:
    """Make the files of a recorded checkpoint, with those of their bytes that a rule looks at."""
    for one in files:
        path = Path(output, record["checkpoint"]["name"], one["name"])
        path.parent.mkdir(parents=True, exist_ok=True)
        head, tail = (base64.b64decode(one.get(part, "")) for part in ("head", "tail"))
        path.write_bytes(head + b"\0" * (one["bytes"] - len(head) - len(tail)) + tail)
    output.mkdir(exist_ok=True)
    if tracked and record["checkpoint"]["tracker"]:
        (output / "latest").write_text(record["checkpoint"]["tracker"])


def missing_in(output: Path, checkpoint: ForeignCheckpointSpec, ranks: int) -> str | None:
    try:
        found = find_checkpoints(output, checkpoint)
    except FileNotFoundError:
        return "no checkpoint"
    if not found:
        return "no checkpoint"
    return what_is_missing(found[0], checkpoint.complete, output, ranks)
