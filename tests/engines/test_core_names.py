"""What hpctrain uses of megatron-core: the list is complete, and what is missing is refused."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed import PrefixStore
from trial_runs import LIMIT_SECONDS, MODULE_GPT, MakeTrial, Trial

from hpctrain.engines.train_json import parse_train_config
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.run_records import TrainerExit
from hpctrain.records.software import read_software
from hpctrain.train import software, software_agreement
from hpctrain.train.engines.megatron.core_versions import check, supported
from hpctrain.train.engines.megatron.core_versions.check import names_of_all_versions
from hpctrain.train.engines.megatron.core_versions.supported import CoreName
from hpctrain.train.schedule import learning_rate

PACKAGE = Path(check.__file__).parents[4]
# bound by `fixes`, where megatron-core does not
BOUND_HERE = {("megatron.core.transformer.moe.moe_utils", "te_general_gemm")}


def used_names(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of all that a file imports from megatron-core, or reads from it."""
    tree = ast.parse(path.read_text())
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core"):
            for name in node.names:
                modules[name.asname or name.name] = f"{node.module}.{name.name}"
                yield str(node.module), name.name
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("megatron.core"):
                    modules[name.asname or name.name] = name.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = modules.get(node.value.id)
            if owner is not None and not node.attr.startswith("__"):
                module, _, last = owner.rpartition(".")
                yield (module, f"{last}.{node.attr}") if last[0].isupper() else (owner, node.attr)


def test_every_used_name_is_listed() -> None:
    """The engine megatron-lm looks at its program as it is, and uses nothing that it needs."""
    listed = [*names_of_all_versions(), *(n for row in supported.SUPPORTED for n in row.names)]
    known = {(name.module, name.path) for name in listed}
    # a class is listed with each of its attributes, and a module with each of its names
    known |= {(module, path.partition(".")[0]) for module, path in known}
    for name in listed:
        words = name.module.split(".")
        known |= {(".".join(words[:last]), words[last]) for last in range(2, len(words))}
    files = [path for path in PACKAGE.rglob("*.py") if "megatron_lm" not in path.parts]
    used = {name for path in files for name in used_names(path)} - BOUND_HERE
    assert len(used) > 70
    missing = used - known
    assert not missing, "add them to core_versions/names.py"


def test_names_of_the_installed_version_exist() -> None:
    findings = check.library_findings()
    assert findings == software.LibraryFindings()


def test_versions_of_the_newest_release_are_read_without_importing() -> None:
    assert software.megatron_core() == supported.current().number
    import megatron.core

    assert str(megatron.core.__version__).startswith(str(software.megatron_core()))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (CoreName("megatron.core.gone"), "megatron.core.gone cannot be imported (ModuleNotFound"),
        (CoreName("megatron.core.utils", "_gone"), "no megatron.core.utils._gone"),
        (
            CoreName("megatron.core.models.gpt", "GPTModel.forward.gone"),
            "no megatron.core.models.gpt.GPTModel.forward.gone",
        ),
        (
            CoreName("megatron.core.models.gpt", "GPTModel", attribute="gone"),
            "no megatron.core.models.gpt.GPTModel.gone",
        ),
    ],
)
def test_a_missing_name_is_named(name: CoreName, text: str) -> None:
    (missing,) = check.missing_names([name])
    assert missing.startswith(text)
    assert check.missing_names([CoreName("megatron.core.models.gpt", "GPTModel")]) == []


def _remove_a_private_name() -> None:
    from megatron.core import rerun_state_machine

    del rerun_state_machine._set_rerun_state_machine


class LateReader(PrefixStore):
    """A store whose judgement is there a second before it is read."""

    def get(self, key: str) -> bytes:
        if key == "judgement":
            self.wait([key])
            time.sleep(1.0)
        return super().get(key)


def test_ranks_refuse_before_process_groups_exist(trial: MakeTrial) -> None:
    """As a newer release that has renamed it; no rank waits for another."""
    run = trial(data_parallel_size=2)

    def prepare() -> None:
        _remove_a_private_name()
        import torch.distributed

        def no_groups(*arguments: Any, **keywords: Any) -> None:
            raise AssertionError("process groups are opened")

        torch.distributed.init_process_group = no_groups
        software_agreement.PrefixStore = LateReader  # type: ignore[misc]

    ranks = run.start(prepare=prepare)
    assert ranks.wait(LIMIT_SECONDS) == [TrainerExit.CONFIG_ERROR] * 2, ranks.log(1)
    version = software.megatron_core()
    wanted = (
        f"megatron-core {version} lacks what hpctrain uses: "
        "no megatron.core.rerun_state_machine._set_rerun_state_machine"
    )
    for record in run.exits():
        assert record.message == wanted
    assert "hint: `pip install megatron-core==" in ranks.log(0)


@pytest.mark.variant("test_every_used_name_is_listed")
def test_an_unknown_newer_version_trains_with_a_warning(trial: MakeTrial) -> None:
    run = trial(data_parallel_size=2, save_interval_steps=6)
    unknown = f"{software.megatron_core()}.1"

    def prepare() -> None:
        software.megatron_core = lambda: unknown  # type: ignore[assignment]

    ranks = run.start(prepare=prepare)
    codes = ranks.wait(LIMIT_SECONDS)
    assert codes == [0, 0], ranks.log(0)
    assert f"warning: megatron-core {unknown} is not tested with hpctrain" in ranks.log(0)
    assert "warning" not in ranks.log(1)
    (record,) = read_software(run.run)
    (remark,) = record.facts.remarks
    assert record.facts.megatron_core == unknown and "0.16.1 or 0.19.2" in remark


@pytest.mark.variant("test_every_used_name_is_listed")
def test_a_checkout_in_the_path_is_the_version(tmp_path: Path) -> None:
    """As in containers: an installed package's metadata would name another version."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise AssertionError('imported')")
    (core / "package_info.py").write_text(
        "import os\nMAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = 'rc1'\nos.abort()\n"
    )
    program = "from hpctrain.train import software; print(software.megatron_core())"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert found.stdout == "0.20.0rc1\n", found.stderr


def test_checkpoint_of_an_untested_version_is_refused(
    gpt_reference: Trial, trial: MakeTrial
) -> None:
    resumed, installed = trial(), software.megatron_core()
    resumed.adopt(gpt_reference, 2)
    manifest = resumed.run.checkpoints / checkpoint_name(2) / "manifest.json"
    text = manifest.read_text()
    assert f'"library_version":"{installed}"' in text.replace(": ", ":")
    manifest.write_text(text.replace(str(installed), "0.17.0"))
    assert resumed.train(resume=2) == [TrainerExit.CONFIG_ERROR]
    (record,) = resumed.exits()
    assert f"was saved by megatron-core 0.17.0, and this is {installed}" in (record.message or "")


# -- Engines without a schedule of their own take megatron-core's numbers -----------------------

SCHEDULED_STEPS = 60


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_the_same_rates(style: str, warmup: int) -> None:
    changes: dict[str, Any] = dict(lr_decay_style=style, lr_warmup_steps=warmup, lr_decay_steps=50)
    config = parse_train_config(json.dumps({**MODULE_GPT, **changes}))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.lr)
    theirs = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=50,
        lr_decay_style=style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=SCHEDULED_STEPS,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    for step in range(SCHEDULED_STEPS):
        assert learning_rate(config, step) == optimizer.param_groups[0]["lr"], step
        theirs.step(increment=1)
