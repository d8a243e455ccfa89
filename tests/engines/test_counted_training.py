"""Models that the class of transformers alone knows: counted, and trained as it computes them."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import hpctrain
from trial_runs import (
    LIMIT_SECONDS,
    MODULE_GPT,
    MakeTrial,
    apart,
    assert_near,
    assert_resumes_exactly,
    config_of,
    held_at,
    trained,
)
from variants import varied

from hpctrain.base.errors import InvalidInputError
from hpctrain.base.module_subprocess import EndedProgram
from hpctrain.convert.__main__ import convert
from hpctrain.plan.model.parameters import total_parameters
from hpctrain.records.run_records import TrainerExit
from hpctrain.site import init
from hpctrain.spec.architecture import RemoteCodeSpec
from hpctrain.spec.families.remote_code import code_digest, code_files
from hpctrain.spec.loader import load_run_spec
from hpctrain.train.engines.models.build import blocks_of, build_module
from hpctrain.train.engines.models.count import count, count_file
from hpctrain.train.engines.models.tasks import loss_of
from tests.engines.test_models_build import batch_of

# State spaces; windows in every second layer, and dropout; convolutions; layers that share weights.
CONFIGS: dict[str, dict[str, Any]] = {
    "mamba": dict(hidden_size=32, state_size=8, num_hidden_layers=2, time_step_rank=4),
    "gpt_neo": dict(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=16,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        resid_dropout=0.1,
    ),
    "lfm2": dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        pad_token_id=0,
    ),
    "zamba2": dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        hybrid_layer_ids=[1, 3],
        num_mem_blocks=1,
        attention_hidden_size=64,
        attention_head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        mamba_d_state=8,
        mamba_ngroups=1,
        n_mamba_heads=8,
        mamba_headdim=8,
    ),
}


def model_of(kind: str) -> dict[str, Any]:
    config = {"model_type": kind, "vocab_size": 250, **CONFIGS[kind]}
    return {"config": config, "family": "other", "seq": 16, **count(config)}


def base_of(kind: str) -> dict[str, Any]:
    return dict(
        MODULE_GPT,
        model=model_of(kind),
        seq_length=16,
        data_parallel_size=2,
        micro_batch_size=4,
        deterministic_mode=True,
    )


@pytest.mark.parametrize("kind", varied(CONFIGS, "gpt_neo"))
def test_a_count_is_that_of_the_class(kind: str) -> None:
    config = config_of(base_of(kind))
    model = config.model
    module = build_module(config, device=torch.device("cpu"))
    learned = dict(module.named_parameters())
    assert sum(one.numel() for one in learned.values()) == total_parameters(model)
    own = kind != "zamba2"  # of which blocks share weights
    assert len(blocks_of(module, model.counted)) == (model.layers if own else 0)
    tokens = torch.arange(16)[None]
    other = torch.where(tokens < 9, tokens, tokens + 99)
    ahead, (loss, _) = (
        (module.eval()(input_ids=one, use_cache=False).logits[:, :9] for one in (tokens, other)),
        loss_of(config)(module.train(), batch_of(config)),
    )
    assert torch.equal(*ahead), "no token sees a later one"
    loss.backward()
    assert [name for name, one in learned.items() if one.grad is None] == []


def test_another_class_than_was_counted_is_not_trained() -> None:
    base = base_of("mamba")
    base["model"]["counted"]["parameters"] += 1
    with pytest.raises(InvalidInputError, match=r"MambaForCausalLM has .* parameters"):
        build_module(config_of(base), device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba", "hidden_size": -1}, "transformers cannot build it"),
        ({"model_type": "no_such"}, r"transformers cannot build it: .*no_such"),
        ({"model_type": "vit"}, "no causal language model of type vit"),
    ],
)
def test_what_cannot_be_counted_says_why(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        count(config)


@pytest.mark.variant("test_a_counted_model_is_resumed_exactly")
def test_init_counts_by_the_environment_of_the_trainer(tmp_path: Path) -> None:
    config, spec = tmp_path / "config.json", tmp_path / "own.yaml"
    limits = {"time_step_limit": [0.0, math.inf]}  # which is no JSON, and is written all the same
    config.write_text(json.dumps(model_of("zamba2")["config"] | limits))
    made = hpctrain("init", str(spec), "--model", str(config), "--gpus", "2")
    assert made.exit_code == 0, made.stderr
    model = load_run_spec(spec).document.model
    wanted = config_of(base_of("zamba2")).model
    same = {"config", "counted", "seq"}
    assert model.model_dump(exclude=same) == wanted.model_dump(exclude=same)
    settings = {**base_of("zamba2"), "model": model.model_dump(mode="json")}
    module = build_module(config_of(settings), device=torch.device("cpu"))
    assert module.config.time_step_limit[1] == math.inf


@pytest.mark.variant("test_a_counted_model_is_resumed_exactly")
def test_exported_weights_are_where_another_run_begins(trial: MakeTrial, tmp_path: Path) -> None:
    settings = {**base_of("mamba"), **ENGINES["fsdp"]}
    whole, target = trained(settings), tmp_path / "hf"
    apart(convert, whole.run.checkpoints / "iter_0000006", target)
    config = json.loads((target / "config.json").read_text())
    model = dict(settings["model"], **count(config), config=config, pretrained=str(target))
    again = trial({**settings, "model": model, "lr": 0.0, "min_lr": 0.0})
    assert again.train() == [0, 0]
    assert again.losses[1] < whole.losses[1] - 0.1, "as it was left"


# -- Code of a model's own ------------------------------------------------------------------------


CODE = {
    "configuration_own.py": """
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "own"
    def __init__(self, hidden_size=16, layers=2, vocab_size=250, **rest):
        self.hidden_size, self.layers, self.vocab_size = hidden_size, layers, vocab_size
        super().__init__(**rest)
""",
    "modeling_own.py": """
from pathlib import Path
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_own import OwnConfig

Path("MARK").touch()

class OwnBlock(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.mix = nn.Linear(size, size)
    def forward(self, x):
        return x + torch.tanh(self.mix(x))

class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(OwnBlock(config.hidden_size) for _ in range(config.layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
    def get_input_embeddings(self):
        return self.words
    def get_output_embeddings(self):
        return self.head
    def forward(self, input_ids, use_cache=False):
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return CausalLMOutput(logits=self.head(x))
""",
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model of its own, which leaves `ran` where it is imported."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "own"
    directory.mkdir()
    for name, text in CODE.items():
        (directory / name).write_text(text.replace("MARK", str(tmp_path / "ran")))
    named = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (directory / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": named}))
    return directory


def test_own_code_is_run_for_its_digest_alone(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(_: object, *arguments: str, **__: object) -> EndedProgram:
        try:
            return EndedProgram(0, json.dumps(count_file(*arguments)), "")
        except InvalidInputError as error:
            return EndedProgram(1, "", error.problems[0].message)

    monkeypatch.setattr(init, "run_module", run_here)
    asked = ("init", "own.yaml", "--model", str(own), "--gpus", "2")
    digest = code_digest(code_files(own))
    for words in ((), ("--remote-code", "sha256:" + "0" * 64)):
        refused = hpctrain(*asked, *words)
        assert refused.exit_code == 3 and digest in refused.stderr, refused.stderr
        assert "configuration_own.py, modeling_own.py" in refused.stderr
    assert not Path("ran").exists()
    made = hpctrain(*asked, "--remote-code", digest)
    assert made.exit_code == 0 and Path("ran").exists(), made.stderr
    Path("ran").unlink()
    document = load_run_spec(Path("own.yaml")).document
    assert document.model.counted is not None and document.model.counted.blocks == ("OwnBlock",)
    judged = hpctrain("validate", "own.yaml", "-p", "a100x64")
    assert judged.exit_code == 0 and "own code is what was read" in judged.stdout
    config = config_of({**base_of("mamba"), "model": document.model.model_dump(mode="json")})
    (own / "modeling_own.py").write_text("raise SystemExit")
    judged = hpctrain("validate", "own.yaml", "-p", "a100x64")
    assert judged.exit_code == 3 and "its Python files are not those of" in judged.stderr
    with pytest.raises(InvalidInputError, match="its Python files are not those of"):
        build_module(config, device=torch.device("cpu"))
    assert not Path("ran").exists() and str(own) in config.needed_paths


@pytest.mark.variant("test_a_counted_model_is_resumed_exactly")
def test_own_code_is_trained_and_resumed_exactly(own: Path, trial: MakeTrial) -> None:
    code = RemoteCodeSpec(directory=str(own), digest=code_digest(code_files(own)))
    config = json.loads((own / "config.json").read_text())
    model = {"config": config, "family": "other", "seq": 16, **count(config, code)}
    settings = {**base_of("mamba"), "model": model, "engine": "fsdp", "shard_size": 2}
    whole = trained(settings)
    assert_resumes_exactly(trial(settings), whole)
    assert whole.losses[6] < whole.losses[1] - 1e-3, "it learns"


# -- Training -------------------------------------------------------------------------------------


ENGINES: dict[str, dict[str, Any]] = {
    "fsdp": dict(engine="fsdp", shard_size=2, activation_checkpointing=True),
    "ddp": dict(engine="ddp"),
    "deepspeed": dict(
        engine="deepspeed",
        zero_stage=3,
        reduce_bucket_elements=30_000,
        gather_bucket_elements=30_000,
    ),
}
CASES = {f"{kind} by {engine}": (kind, engine) for kind in CONFIGS for engine in ENGINES}


@pytest.mark.parametrize("case", varied(CASES, "mamba by fsdp"))
def test_a_counted_model_is_resumed_exactly(case: str, trial: MakeTrial) -> None:
    kind, engine = CASES[case]
    settings = {**base_of(kind), **ENGINES[engine]}
    whole, stopped = trained(settings), trial(settings)
    ranks = stopped.start(prepare=held_at(4, lambda loop: loop.job.stop.requested))
    stopped.wait_for_step(2, ranks)
    ranks.signal(signal.SIGTERM, 1)
    assert ranks.wait(LIMIT_SECONDS) == [TrainerExit.YIELDED] * 2, ranks.log()
    last = max(stopped.losses)
    assert last < 6 and stopped.train(resume=last) == [0, 0]
    assert stopped.exact == whole.exact
    assert whole.losses[6] < whole.losses[1] - 0.1, "it learns"


@pytest.mark.variant("test_a_counted_model_is_resumed_exactly")
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_sharded_or_not_it_is_the_same_model(kind: str, engine: str) -> None:
    """Also where it begins: the first loss, before any step."""
    sharded, replicated = (trained({**base_of(kind), **ENGINES[one]}) for one in (engine, "ddp"))
    assert_near(sharded, replicated, 1, 2e-5, 1e-3)
