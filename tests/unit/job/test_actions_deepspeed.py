"""What a run of DeepSpeed has in its directory, and what it is refused for before the queue."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.engines.deepspeed import DeepSpeedConfig, ds_config
from hpctrain.job.prepare import Prepared, load_knowledge, prepare, smaller_sizes
from hpctrain.job.run_directory import write_run_directory

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "examples" / "gpt-tiny.yaml"
LAYOUT = ("engine.name=deepspeed", "parallel.tp=1", "parallel.pp=1", "recompute=none")
NVME = ("optimizer.offload=nvme", "optimizer.zero=3")


def prepared(runs: Path, *overrides: str, profile: str = "sandbox") -> Prepared:
    return prepare(TINY, profile, (*LAYOUT, *overrides), runs=runs)


def test_deepspeed_s_own_file_lies_beside_the_trainer_s(tmp_path: Path) -> None:
    found = prepared(tmp_path, "optimizer.zero=2")
    layout = write_run_directory(found, tmp_path)
    assert isinstance(found.train, DeepSpeedConfig)
    assert json.loads(layout.ds_config.read_text()) == ds_config(found.train)
    assert stat.S_IMODE(layout.ds_config.stat().st_mode) == 0o600
    assert layout.ds_configs == [layout.ds_config]


def test_other_engines_have_no_such_file(tmp_path: Path) -> None:
    layout = write_run_directory(prepare(TINY, "sandbox", runs=tmp_path), tmp_path)
    assert not layout.ds_config.exists()


def test_each_size_has_its_file_and_the_same_stage(tmp_path: Path) -> None:
    """A checkpoint belongs to a ZeRO stage, which the planner must not choose anew."""
    sizes = ("resources.gpus=8", "resources.min_nodes=2", "batch.micro=1")
    found = prepared(tmp_path, *sizes, "optimizer.zero=2")
    layout = write_run_directory(found, tmp_path)
    assert [path.name for path in layout.ds_configs] == ["ds_config.json", "ds_config-n000002.json"]
    fewer = json.loads(layout.ds_config_for(2).read_text())
    assert fewer["zero_optimization"]["stage"] == 2
    assert fewer["train_batch_size"] == ds_config(found.train)["train_batch_size"]  # type: ignore[arg-type]


def test_the_stage_that_the_planner_chose_stays(tmp_path: Path) -> None:
    found = prepared(tmp_path, "resources.gpus=8", "resources.min_nodes=2", "batch.micro=1")
    chosen = found.plan.model_copy(update={"zero": 3})  # as a search may
    knowledge = load_knowledge(found.profile)
    (size,) = smaller_sizes(replace(found.job, plan=chosen), knowledge)
    assert isinstance(size.train, DeepSpeedConfig) and size.train.zero_stage == 3


def test_a_pipeline_can_be_submitted(tmp_path: Path) -> None:
    found = prepared(tmp_path, "parallel.pp=2", "optimizer.zero=1")
    assert isinstance(found.train, DeepSpeedConfig)
    assert found.train.pipeline_stages == (2, 2)
    assert found.supervise.shapes[0].tasks == found.train.world_size == 4


def test_a_pipeline_shrinks_by_replicas(tmp_path: Path) -> None:
    """Fewer nodes train the same stages: only as many copies of them as there is room for."""
    sizes = ("resources.gpus=8", "resources.min_nodes=1", "batch.micro=1")
    found = prepared(tmp_path, *sizes, "parallel.pp=2", "optimizer.zero=1")
    knowledge = load_knowledge(found.profile)
    smaller = smaller_sizes(found.job, knowledge)
    configs = [one.train for one in smaller]
    assert all(isinstance(one, DeepSpeedConfig) for one in configs)
    assert [(one.pipeline_stages, one.data_parallel_size) for one in configs] == [  # type: ignore[attr-defined]
        ((2, 2), 2),
        ((2, 2), 1),
    ]


def test_nvme_is_the_site_s_unless_the_spec_names_a_directory(tmp_path: Path) -> None:
    site = prepared(tmp_path, *NVME).train
    own = prepared(tmp_path, *NVME, "engine.deepspeed.nvme_path=/nvme").train
    assert isinstance(site, DeepSpeedConfig) and isinstance(own, DeepSpeedConfig)
    assert (site.nvme_path, own.nvme_path) == ("/tmp", "/nvme")


def test_a_site_without_nvme_is_said(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    text = TINY.read_text().replace("optimizer:\n", "optimizer:\n  zero: 3\n  offload: nvme\n", 1)
    file.write_text(text)
    with pytest.raises(InvalidInputError) as caught:
        prepare(file, "a100x64", LAYOUT, runs=tmp_path)
    (problem,) = caught.value.problems
    line = text.splitlines().index("  offload: nvme") + 1
    assert (problem.file, problem.line, problem.column) == (str(file), line, 12)
    assert "no file system of kind `local`" in problem.message
    assert problem.hint is not None and "nvme_path" in problem.hint


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("parallel.tp=2",), "for a llama, not for a gpt: engine megatron has tp"),
        (("parallel.tp=2", "lora.rank=4"), "splits weights over tp for whole models"),
        (("parallel.tp=2", "optimizer.zero=3"), "at ZeRO stages 0, 1 and 2"),
        (("parallel.tp=4", "model.kv_heads=2"), "2 of them cannot be divided by 4"),
        (("parallel.pp=2", "optimizer.offload=cpu"), "with the optimizer's state on the GPU"),
        (("parallel.pp=2", "lora.rank=4"), "trains whole models"),
        (("resources.gpus=4", "resources.min_nodes=1", *NVME), "one number of ranks"),
        (("recompute=selective",), "recomputes whole blocks or nothing"),
    ],
)
def test_what_is_planned_but_not_trained(
    tmp_path: Path, overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        prepared(tmp_path, *overrides)
