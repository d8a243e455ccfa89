"""What the sources of software say about its memory, beside the constants that are fitted.

Belongs here: which tensors a generation of software has, for published rows. Does not belong here:
constants (`catalogue/calibration.yaml`), what a printed figure counts (`memory_conventions`).
"""

from __future__ import annotations

import re
from dataclasses import replace

from bench.published import PublishedRow
from bench.published_recipes import Recipe
from hpctrain.plan.cost.case import Software
from hpctrain.plan.cost.from_spec import COMMUNICATOR_BYTES
from hpctrain.spec.calibration import SoftwareCalibration

# megatron-core's caller of the loss has the 16-bit logits beside their fp32 form
# (models/gpt/gpt_model.py, compute_language_model_loss).
NARROW_LOGITS = r"megatron-20|megatron-core|mcore|nemo|bridge|generic"
# Share of what passes (activations, logits, buffers) that the allocator holds in freed blocks where
# there is room, without expandable segments: two logs of NeMo on half-empty GPUs; BLOOM's trials,
# fitted (bench/fit_memory.py).
CACHED = ((r"nemo|dgxc", 0.2), (r"megatron-deepspeed", 0.05))
# DeepSpeed with fp16, per parameter of a rank's shard while the optimizer runs: its 16-bit
# gradients in one block, and the same in fp32 (runtime/zero/stage_1_and_2.py, step).
FLAT_COPIES = {"megatron-deepspeed": 2.0 + 4.0}
# With bf16, per parameter: an fp32 accumulator, and of 16-bit parameters those blocks that nothing
# reuses when they have been copied into a flat one (runtime/bf16_optimizer.py), which is fitted.
BF16_ACCUMULATOR = 4.0 + 1.2
MOMENT_SAVED = 4.0  # bytes per parameter, where both moments are in bf16
# Fields of an entry of the calibration that say what is in memory, not how long it takes.
MEMORY_FIELDS = (
    *("dummy_gradients", "norm_bytes", "checkpoint_copies", "logit_bytes"),
    *("slack", "context_bytes"),
)
# Aleph-Alpha/scaling: the head gathers its logits (transformer/model/layers/lm_head.py), so does a
# norm its output with sequence parallelism (core/nn/norm/rms_norm.py), SwiGLU is two operations
# (core/nn/mlp.py), and values are a view of what was computed together with queries and keys before
# they are rotated (core/nn/attention/attention.py).
SCALING = dict(gathered_logits=1, gathered_inputs=1, gate_copy=1, turned_copy=1)


def with_memory_facts(
    software: Software, key: str, entry: SoftwareCalibration, row: PublishedRow, recipe: Recipe
) -> Software:
    """Put in what the row's own software has in memory: `key`, of which `entry` has constants.

    It stands for the framework that the row names, whichever constants of time `software` has.
    """
    text = f"{row.source} {row.framework}".lower()
    cached = next((share for pattern, share in CACHED if re.search(pattern, text)), 0.0)
    known = {name: getattr(entry, name) for name in MEMORY_FIELDS}
    return replace(
        software,
        **known,
        main_bytes=entry.main_bytes - MOMENT_SAVED * (recipe.moment_dtype == "bf16"),
        **(SCALING if key.startswith("scaling") else {}),
        narrow_logits=int(re.match(NARROW_LOGITS, key) is not None),
        cached=cached,
        flat_copies=int(key in FLAT_COPIES),
        communicator_bytes=COMMUNICATOR_BYTES,
    )


def copied_gradient_bytes(key: str, precision: str) -> float:
    """Return the bytes per gradient of a shard that are there while the optimizer runs."""
    return FLAT_COPIES.get(key, 0.0) if precision == "fp16" else 0.0
