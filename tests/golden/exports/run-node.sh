#!/bin/sh
# llama7b on h100x16: 2 nodes x 8 GPUs, megatron, tp 1 · pp 1 · dp 16, 3815 steps
# hpctrain 0.1.0 · spec dbc72bd33327 · profile h100x16 73934fe7d92d
#
# Starts the ranks of one node:  sh run-node.sh RANK
# RANK is the line of this host in hostfile, from 0; below mpirun it is known.
# commands.txt starts all. To stop, send SIGTERM to this process on every host: ranks save.
# MASTER_PORT, the same on every host, replaces the port.
#
# Why variables are set:
# - NCCL_SOCKET_IFNAME: Without it NCCL may choose an interface that other nodes cannot reach for
#   its start-up
# - GLOO_SOCKET_IFNAME: Gloo groups (start-up, checkpoints) must use an interface that all nodes
#   reach
# - NCCL_IB_HCA: Use the cards whose name begins with mlx5; list single cards if some serve
#   storage
# - NCCL_IB_TIMEOUT: Retry for 4.096 us x 2^22 = 17 s before a connection breaks, to outlast a
#   link flap
# - NCCL_DEBUG: NCCL says nothing about the cause of an error unless asked to
# - CUDA_DEVICE_MAX_CONNECTIONS: Without tensor and context parallelism no order matters, and
#   eight queues overlap more
# - PYTORCH_CUDA_ALLOC_CONF: Segments grow in place, so less memory is lost between blocks of
#   different sizes
# - NCCL_NVLS_ENABLE: NVLink SHARP would take buffers of GPU memory for every communicator
# - TORCH_NCCL_HIGH_PRIORITY: NCCL's kernels start before those of the model that wait at the same
#   time
# - NVTE_FWD_LAYERNORM_SM_MARGIN: Norms leave 20 multiprocessors to NCCL, so that messages go on
#   meanwhile
# - NVTE_BWD_LAYERNORM_SM_MARGIN: Norms leave 20 multiprocessors to NCCL, so that messages go on
#   meanwhile
# - PYTHONUNBUFFERED: log lines appear when they are written
#
# Lost, compared with `hpctrain submit` to Slurm:
# - supervisor: nobody finds out why a launch ended, so causes, budgets and the wait between
#   launches (`supervise`) have no effect, and `hpctrain status`, `why` and `goodput` do not know
#   it; instead: start the commands again: the run goes on from its newest verified checkpoint
# - supervise.stall, supervise.rollback: a hang is not noticed, and no loss is rolled back;
#   instead: `engine.collective_timeout` ends ranks that wait for a lost one
# - node ledger: no node is probed before a launch, and none avoided after it has failed
# - kept code: the run does not keep the hpctrain that it was planned with, 0.1.0; instead: the
#   interpreter of each host has to have it
# - resources.walltime 12:00:00: no time limit ends an attempt, and none has to be survived
# - network.switches, network.islands: Slurm places neighbouring ranks near each other, and nobody
#   does so here; instead: the order of `--hosts` is the order of the nodes
# - files: every host needs them at these paths: /data/domain.bin, /data/domain.idx
#
# Kept: layout, batch, engine and every setting of training, as `submit` has them;
# numbered launches, of which an older one publishes no checkpoint; resuming from the
# newest verified checkpoint; a save when the pod or the process is told to stop.
set -eu
rank=${1:-${OMPI_COMM_WORLD_RANK:?is not set: give the rank of this host}}
export NCCL_SOCKET_IFNAME=eth0
export GLOO_SOCKET_IFNAME=eth0
export NCCL_IB_HCA=mlx5
export NCCL_IB_TIMEOUT=22
export NCCL_DEBUG=WARN
export CUDA_DEVICE_MAX_CONNECTIONS=8
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export NCCL_NVLS_ENABLE=0
export TORCH_NCCL_HIGH_PRIORITY=1
export NVTE_FWD_LAYERNORM_SM_MARGIN=20
export NVTE_BWD_LAYERNORM_SM_MARGIN=20
export PYTHONUNBUFFERED=1
exec /opt/hpctrain/bin/python3 \
  -m \
  hpctrain.train.unsupervised \
  --nnodes=2 \
  --nproc-per-node=8 \
  --run-directory=/shared/runs/llama7b \
  --node-rank="$rank" \
  --master-addr=node1 \
  --master-port="${MASTER_PORT:-29500}" \
  /shared/llama7b/train.json
