"""A byte that changed in a checkpoint: found by the ranks while they load, with every engine.

Nobody has read the content before: the ranks are started as a supervisor starts them that looks at
names and sizes only (`verify: size`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaged_checkpoints import flip_a_byte, vouch
from megatron_lm_trials import EVERY, make_lm_trial, make_real_trial, trained_lm, trained_real
from trial_runs import (
    DDP2,
    FSDP2,
    GPT,
    ZERO,
    MakeTrial,
    Trial,
    assert_resumes_exactly,
    trained,
    wrap,
)
from variants import varied

from hpctrain.checkpoints.discover import inspect
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.run_records import TrainerExit
from hpctrain.train.saving import digest_check

CRASHED = TrainerExit.CRASH
ENGINES: dict[str, tuple[dict[str, Any], str]] = {
    "megatron-core": (dict(GPT, data_parallel_size=2), "__1_0.distcp"),
    "fsdp": (FSDP2, "__1_0.distcp"),
    "ddp": (DDP2, "__0_0.distcp"),
    "deepspeed": (ZERO, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
}


@pytest.mark.parametrize("engine", varied(ENGINES, "fsdp"))
def test_a_flipped_byte_is_found_before_the_first_step(engine: str, trial: MakeTrial) -> None:
    base, shard = ENGINES[engine]
    hurt = trial(base)
    hurt.adopt(trained(base), 2)
    directory = hurt.run.checkpoints / checkpoint_name(2)
    # In the middle of a large tensor, which every loader takes as it is.
    flip_a_byte(directory / shard)
    assert inspect(directory, 2, "size").good
    assert hurt.train(resume=2) == [CRASHED, CRASHED]
    assert hurt.rows == []
    exits = hurt.exits()
    # A rank whose loader fails at once may see no more than that the other one has left.
    causes = {record.cause for record in exits}
    assert "bad_checkpoint" in causes and causes <= {"bad_checkpoint", "load_failed", None}
    message = next(record.message for record in exits if record.cause == "bad_checkpoint")
    assert message is not None
    assert f"{shard} has other content than was written" in message


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-10], checkpoint_name(2)),
        # the loader fails before the ranks agree, with words that could mean anything
        (lambda data: bytes(len(data)), "has other content than was written"),
    ],
    ids=["cut off", "zeros"],
)
def test_what_breaks_the_loader_is_told_by_its_digest(
    damage: Callable[[bytes], bytes], words: str, trial: MakeTrial, gpt_reference: Trial
) -> None:
    hurt = trial(GPT)
    hurt.adopt(gpt_reference, 2)
    shard = next((hurt.run.checkpoints / checkpoint_name(2)).glob("*.distcp"))
    shard.write_bytes(damage(shard.read_bytes()))
    assert hurt.train(resume=2) == [CRASHED]
    (record,) = hurt.exits()
    assert record.cause == "bad_checkpoint", record
    assert shard.name in hurt.message() and words in hurt.message()


@pytest.mark.variant("test_a_flipped_byte_is_found_before_the_first_step")
def test_the_good_checkpoint_is_loaded_as_ever(trial: MakeTrial) -> None:
    """All of it was read, by two ranks, each file once; and the losses are exact."""
    whole, resumed = trained(FSDP2), trial(FSDP2)
    log = resumed.run.directory / "read"
    assert_resumes_exactly(resumed, whole, prepare=lambda: _log_reading(log))
    names = sorted(log.read_text().split())
    shards = [name for name in names if name.endswith(".distcp")]
    assert names == sorted(set(names)) and len(shards) == 2


def _log_reading(log: Path) -> None:

    @wrap(digest_check, "digest_file")
    def logged(real: Any, directory: Path, name: str) -> Any:
        with log.open("a") as stream:
            stream.write(f"{name}\n")
        return real(directory, name)


@pytest.mark.variant("test_a_flipped_byte_is_found_before_the_first_step")
def test_what_verifies_and_does_not_load_names_the_checkpoint(
    trial: MakeTrial, gpt_reference: Trial
) -> None:
    """The bytes are as they were written, and no loader takes them: it was written so."""
    strange = trial(GPT)
    strange.adopt(gpt_reference, 2)
    directory = strange.run.checkpoints / checkpoint_name(2)
    shard = next(directory.glob("*.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))
    vouch(directory)
    assert inspect(directory, 2, "sha256").good
    assert strange.train(resume=2) == [CRASHED]
    (record,) = strange.exits()
    assert record.loading_step == 2 and record.cause != "bad_checkpoint", record


def test_a_storage_fault_while_loading_does_not_name_the_checkpoint(
    trial: MakeTrial, gpt_reference: Trial
) -> None:
    stale = trial(GPT)
    stale.adopt(gpt_reference, 2)
    assert stale.train(resume=2, prepare=_fail_to_read) == [CRASHED]
    (record,) = stale.exits()
    assert record.loading_step is None, record


def _fail_to_read() -> None:
    from hpctrain.train.engines.megatron import snapshot

    def load(*_: object, **__: object) -> object:
        raise OSError(116, "Stale file handle", "__0_0.distcp")

    snapshot.dist_checkpointing.load = load


def test_an_external_megatron_lm_compares_before_it_starts(tmp_path: Path) -> None:
    hurt = make_lm_trial(tmp_path / "hurt")
    hurt.adopt(trained_lm(), 2)
    for rank in (0, 1):  # where only one leaves, the other waits for it until it is ended
        flip_a_byte(hurt.run.checkpoints / checkpoint_name(2) / f"__{rank}_1.distcp")
    assert hurt.train(resume=2) == [CRASHED, CRASHED]
    causes = [record.cause for record in hurt.exits()]
    # rank 0 has the store: with it gone, rank 1 may end before it has compared
    assert causes[0] == "bad_checkpoint"
    assert causes[1] in ("bad_checkpoint", None)
    assert hurt.rows == []


@pytest.mark.variant("test_a_flipped_byte_is_found_before_the_first_step")
def test_an_external_megatron_lm_that_cannot_load_names_the_checkpoint(tmp_path: Path) -> None:
    strange = make_real_trial(tmp_path / "strange")
    strange.adopt(trained_real(), EVERY)
    directory = strange.run.checkpoints / checkpoint_name(EVERY)
    (directory / "common.pt").write_bytes(bytes(100))
    vouch(directory)
    assert 0 not in strange.train(resume=EVERY)
    assert {record.loading_step for record in strange.exits()} == {EVERY}
