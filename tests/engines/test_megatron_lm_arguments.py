"""Every rendered argument is accepted by a real Megatron-LM: its parser, its checks, and the
configuration that it makes of them.

`make install` unpacks the package of `megatron.training` that PyPI has (megatron-core 0.17 and
newer contain it, for Python 3.12; as files it is read by any) beside the environment. Checkouts of
somebody's own: HPCTRAIN_MEGATRON_LM, separated by colons, are tried as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from megatron_lm_cases import CASES, FRESH, Case
from trial_runs import once

from hpctrain.engines.megatron import core_fields
from hpctrain.engines.megatron_lm import arguments
from hpctrain.plan.abilities.trainable_megatron_lm import untrainable
from hpctrain.spec.engines.megatron_lm import FIELD_OF, KEPT_BACK
from hpctrain.spec.families import family_named, read_config

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = Path(sys.prefix, "megatron-lm")
CHECKOUTS = [Path(one) for one in os.environ.get("HPCTRAIN_MEGATRON_LM", "").split(":") if one]
CHECKOUTS += [PACKAGE] if PACKAGE.is_dir() else []
LIMIT_SECONDS = 240.0


FAMILIES = {
    f"family {file.stem}": json.loads(file.read_text())
    for file in sorted((HERE.parent / "families").glob("*.json"))
    if file.stem not in ("vit", "resnet")
}


def case_of(name: str) -> Case:
    """A case, or a tiny model of a family in place of Llama."""
    if name not in FAMILIES:
        return CASES[name]
    family = family_named(name.removeprefix("family "))
    assert family is not None
    return Case(model={**read_config(FAMILIES[name], family).fields, "seq": 64})


def trained_families() -> list[str]:
    """Families of which Megatron-LM has every part."""
    lacking = {
        name: [
            field for field, _ in untrainable(case_of(name).spec()) if field.startswith("model.")
        ]
        for name in FAMILIES
    }
    return [name for name, fields in lacking.items() if not fields]


@cache
def answers(checkout: Path) -> dict[str, dict[str, Any]]:
    """One process for all cases: most of it is importing."""
    names = [*CASES, *trained_families()]
    cases = [
        (config.world_size, arguments(config, case.places))
        for config, case in ((case.config(), case) for case in map(case_of, names))
    ]

    def ask(directory: Path) -> None:
        done = subprocess.run(
            [sys.executable, str(HERE / "megatron_lm_parser.py"), str(checkout)],
            input=json.dumps([*cases, (1, ["--no-such-argument"]), *negatives()]),
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        directory.mkdir()
        (directory / "answers.json").write_text(done.stdout)

    found = json.loads((once(f"arguments, {checkout}", ask) / "answers.json").read_text())
    return dict(zip([*names, "unknown", "contradiction"], found, strict=True))


def negatives() -> list[tuple[int, tuple[str, ...]]]:
    """What it must refuse, or this test would show nothing."""
    words = arguments(CASES["llama"].config(), FRESH)
    return [(3, (*words, "--tensor-model-parallel-size=2"))]


def test_a_real_parser_is_here() -> None:
    assert CHECKOUTS, f"`make install` unpacks one into {PACKAGE}"


@pytest.mark.variant("test_asked_to_stop_and_resumed")
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
@pytest.mark.parametrize("name", list(CASES))
def test_accepted(checkout: Path, name: str) -> None:
    answer = answers(checkout)[name]
    assert "refused" not in answer, answer["refused"]


@pytest.mark.variant("test_a_whole_run")
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_what_is_wrong_is_refused(checkout: Path) -> None:
    found = answers(checkout)
    assert "unrecognized arguments: --no-such-argument" in found["unknown"]["refused"]
    assert "world size (3) is not divisible" in found["contradiction"]["refused"]


@pytest.mark.variant("test_a_whole_run")
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_understood_as_planned(checkout: Path) -> None:
    """The values that Megatron-LM works with after its own checks are those of the plan."""
    large, config = answers(checkout)["gpt175b"], CASES["gpt175b"].config()
    assert large["data_parallel_size"] == config.data_parallel_size
    assert large["virtual_pipeline_model_parallel_size"] == 3
    assert large["padded_vocab_size"] == config.padded_vocab_size
    assert large["async_save"] and large["exit_signal_handler"]
    assert large["save_interval"] == 100 and large["load"] is None
    assert answers(checkout)["resumed"]["ckpt_step"] == 40
    assert answers(checkout)["experts"]["moe_layer_freq"] == [0, 1, 1, 1]
    assert answers(checkout)["axes"]["optimizer_cpu_offload"] is True
    assert answers(checkout)["uneven"]["use_tp_pp_dp_mapping"] is True
    parts = answers(checkout)["parts"]
    assert (parts["lr_decay_style"], parts["lr_wsd_decay_iters"]) == ("WSD", 500)
    assert (parts["init_method_std"], parts["rotary_percent"]) == (0.01, 0.5)
    assert parts["rotary_seq_len_interpolation_factor"] == 2 and parts["add_qkv_bias"]
    assert parts["padded_vocab_size"] % 256 == 0
    assert parts["moe_router_load_balancing_type"] in ("seq_aux_loss", ["seq_aux_loss"])
    chosen = answers(checkout)["settings"]
    assert chosen["num_distributed_optimizer_instances"] == 2
    assert chosen["hierarchical_context_parallel_sizes"] == [2, 2]
    assert chosen["cp_comm_type"] == ["a2a+p2p"] and chosen["config"]["calculate_per_token_loss"]
    assert chosen["use_precision_aware_optimizer"] and chosen["grad_reduce_in_bf16"]
    assert not chosen["accumulate_allreduce_grads_in_fp32"] and chosen["tp_comm_overlap"]
    llama = answers(checkout)["llama"]
    assert (llama["swiglu"], llama["normalization"]) == (True, "RMSNorm")
    assert llama["untie_embeddings_and_output_weights"] and not llama["add_bias_linear"]
    assert (llama["lr_decay_iters"], llama["train_iters"]) == (3815, 3815)
    assert llama["ckpt_format"] == "torch_dist"


@pytest.mark.variant("test_a_whole_run")
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_a_family_is_the_model_of_its_record(checkout: Path) -> None:
    """Megatron-LM makes the configuration of its arguments that engine megatron makes itself."""
    names = trained_families()
    assert len(names) >= 15, names
    differ = {}
    for name in names:
        answer = answers(checkout)[name]
        assert "refused" not in answer, (name, answer["refused"])
        wished = json.loads(json.dumps(core_fields(case_of(name).config().model)))
        if wished["add_bias_linear"]:
            wished["add_qkv_bias"] = True  # Megatron-LM says that it follows
        for field, value in wished.items():
            if answer["config"].get(field) != value:
                differ[name, field] = value, answer["config"].get(field)
    assert not differ


@pytest.mark.variant("test_a_whole_run")
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_names_that_are_kept_back_exist(checkout: Path) -> None:
    """A name that no Megatron-LM knows would guard nothing. Names of other versions are fine."""
    text = " ".join(
        path.read_text() for path in (checkout / "megatron").rglob("*.py")
        if {"training", "transformer"} & set(path.parts) or path.parent.name == "core"
    )  # fmt: skip
    unknown = {
        name
        for name in (*FIELD_OF, *KEPT_BACK)
        if name not in text and name.replace("-", "_").removeprefix("no_") not in text
    }
    assert len(unknown) < 8, sorted(unknown)
