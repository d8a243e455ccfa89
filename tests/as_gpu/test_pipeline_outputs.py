"""Pipeline stages that free their outputs once they are sent, as on GPUs only, train the same.

On the CPU hpctrain leaves that off, because overlapped transfers of gloo read the freed memory.
The flat schedule waits for its transfers, so it can be tested: `custom_backward` with its
assertions, for each kind of model that a stage can end with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trial_runs import GPT, LLAMA, largest_difference, make_trial

PP2: dict[str, Any] = dict(
    pipeline_model_parallel_size=2,
    pipeline_layer_split=((2,), (2,)),
    transformer_impl="local",
    train_steps=3,
    lr_decay_steps=3,
)
MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "bert": {**GPT, "model_type": "bert"},
    "prediction layer": {**LLAMA, "mtp_num_layers": 1},
}


def free_outputs() -> None:
    """A `prepare`: set the option, and end the rank where it frees nothing."""
    from megatron.core.pipeline_parallel import schedules

    from hpctrain.train.engines.megatron import model

    made = model.transformer_settings

    def freeing(*args: Any, **keywords: Any) -> Any:
        settings = made(*args, **keywords)
        settings.deallocate_pipeline_outputs = True
        return settings

    model.transformer_settings = freeing
    free, freed = schedules.deallocate_output_tensor, []

    def deallocate_output_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
        free(out, deallocate_pipeline_outputs)
        if deallocate_pipeline_outputs and out is not None:
            assert out.numel() == 1
            if not freed:
                print("an output was freed", flush=True)
            freed.append(True)

    schedules.deallocate_output_tensor = deallocate_output_tensor


@pytest.mark.parametrize("name", MODELS)
def test_freed_outputs_change_nothing(name: str, tmp_path: Path) -> None:
    kept = make_trial(tmp_path / "kept", MODELS[name], **PP2)
    assert kept.train() == [0, 0]
    freed = make_trial(tmp_path / "freed", MODELS[name], **PP2)
    ranks = freed.start(prepare=free_outputs)
    assert ranks.wait(240) == [0, 0], ranks.log(0) + ranks.log(1)
    assert "an output was freed" in ranks.log(0)
    assert largest_difference(kept, freed, 1) == (0.0, 0.0)
