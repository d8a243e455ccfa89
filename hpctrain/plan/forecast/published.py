"""Published figures for what a profile does not give; every use is printed as assumed.

Belongs here: a number, its unit and where it was published. Does not belong here: anything that
a site can measure and has put into its profile.
"""

from __future__ import annotations

from typing import Final

SECONDS_PER_DAY: Final = 86400.0

# Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters",
# HPCA 2025, arXiv 2410.21680: 6.50 failures per 1000 node-days on RSC-1 (nodes of eight
# A100, Slurm, 11 months, 4 million jobs). These are failures of the infrastructure; the same
# paper measures 7.9 h between failures of jobs with 1024 GPUs where this rate gives 28.8 h,
# because jobs of that size die of software as well.
RSC1_FAILURES_PER_NODE_DAY: Final = 6.50e-3
RSC_GPUS_PER_NODE: Final = 8

NODE_FAILURES_SOURCE: Final = "6.5 per 1000 node-days, Meta RSC-1, arXiv 2410.21680"

# From a failure to the first new step. Kokolis et al. take 5 to 20 minutes for it (u0).
RESTART_SECONDS: Final = 600.0
RESTART_SOURCE: Final = "5 to 20 min in arXiv 2410.21680"

# Means over the four one-node traces of preemption/1-node/aws-04-22-2023 in
# github.com/skypilot-org/spot-traces (V100 on AWS, 7 days; data of Wu et al., "Can't Be Late",
# NSDI 2024): 432 h up and 202 times taken away, 278 h until there was a node again.
SPOT_PREEMPTION_SECONDS: Final = 432 / 202 * 3600
SPOT_WAIT_SECONDS: Final = 278 / 202 * 3600
SPOT_SOURCE: Final = "V100 on AWS spot, traces of NSDI 2024 `Can't Be Late`"

# Rate at which one GPU copies its share of a checkpoint to main memory. Links: PCIe 4.0 x16
# carries 32 GB/s; copies into memory that is not pinned reach about a third of that (assumed).
STAGING_BYTES_PER_SECOND: Final = 10e9

# What one save stops training for besides the copy: planning, agreement of all ranks, forking the
# writer. Assumed, between 6.3 s for a 7B model (pytorch.org/blog/reducing-checkpointing-times) and
# under 0.5 s for an 8B one with cached plans on 512 H100 (PyTorch's later report).
SAVE_OVERHEAD_SECONDS: Final = 2.0
STAGING_SOURCE: Final = "2 s and 10 GB/s per GPU for the copy to main memory"

# Bytes of a checkpoint per parameter. Megatron (torch_dist, distributed optimizer) and DeepSpeed:
# the model as it computes, 2 or 4, and 4 + 4 + 4 for master weights and two moments of Adam
# (BLOOM-176B: 2.3 TB, of which weights 329 GB; bigscience/bloom model card). The keys `model`,
# `optimizer.state.{param,exp_avg,exp_avg_sq}` of this trainer's checkpoints say the same, in fp32
# too, where the master copy is redundant but written. FSDP and DDP keep one fp32 copy of weights.
MIXED_PRECISION_CHECKPOINT_BYTES: Final = 14.0
FP32_CHECKPOINT_BYTES: Final = 16.0
ONE_COPY_CHECKPOINT_BYTES: Final = 12.0

# A forward pass costs a third of forward + backward (2 of 6 floating-point operations per weight
# and token: Kaplan et al. 2020, arXiv 2001.08361, section 2.1); evaluation runs forward only.
FORWARD_SHARE: Final = 1 / 3
