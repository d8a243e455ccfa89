"""Batch scripts that start a training, in the shapes that public ones have, and adopting them.

The scripts are ours; `SHAPES` says after which public files each is shaped. Belongs here: scripts.
Does not belong here: what must become of them (`tests/unit/adopt`, `tests/golden`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

from hpctrain.adopt.adoption import Source, adopt
from hpctrain.adopt.draft import Adoption
from hpctrain.spec.loader import load_named_profile
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.trainer import Adapter, ForeignCheckpointSpec

# In place of the packaged ones, so that what is expected does not change with them.
ADAPTERS = {
    "hf": Adapter(
        title="Hugging Face Trainer",
        launch="torchrun",
        commands=("--per_device_train_batch_size", "TrainingArguments"),
        checkpoint=ForeignCheckpointSpec(path="checkpoint-{step}"),
    ),
    "trl": Adapter(
        title="TRL",
        commands=("trl sft",),
        checkpoint=ForeignCheckpointSpec(path="checkpoint-{step}"),
    ),
    "finds": Adapter(
        title="a trainer that looks for its newest checkpoint",
        launch="torchrun",
        commands=("titan.train",),
        checkpoint=ForeignCheckpointSpec(path="step-{step}", found=True),
    ),
}


@dataclass(frozen=True)
class Shape:
    """A script, and the public files that have its shape."""

    name: str
    sources: tuple[str, ...]
    text: str
    profile: str | None = None


SHAPES = (
    Shape(
        "tasks",
        ("PrincetonUniversity/multi_gpu_training 02_pytorch_ddp/job.slurm",),
        """\
#!/bin/bash
#SBATCH --job-name=digits      # what squeue shows
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2    # a task for each GPU
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --gres=gpu:2
#SBATCH --time=00:50:00
#SBATCH --mail-type=begin
#SBATCH --mail-type=end

export MASTER_PORT=$(expr 10000 + $(echo -n $SLURM_JOBID | tail -c 4))
export WORLD_SIZE=$(($SLURM_NNODES * $SLURM_NTASKS_PER_NODE))
master_addr=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=$master_addr
echo "MASTER_ADDR="$MASTER_ADDR

module purge
module load anaconda3/2023.9
conda activate torch-env

srun python digits.py --epochs=2
""",
    ),
    Shape(
        "arrays",
        (
            "aws-samples/awsome-distributed-training 3.test_cases/pytorch/FSDP/slurm/"
            "llama3_1_8b-training.sbatch",
            "aws-samples/awsome-distributed-training 3.test_cases/pytorch/ddp/slurm/"
            "3.container-train.sbatch",
        ),
        """\
#!/bin/bash
#SBATCH --nodes=4 # number of nodes
#SBATCH --job-name=llama-FSDP
#SBATCH --output=logs/%x_%j.out
#SBATCH --exclusive # no sharing

set -ex;

GPUS_PER_NODE=8 # 4 on the smaller ones
export NCCL_DEBUG=INFO
export FI_PROVIDER=efa
export HF_HUB_ETAG_TIMEOUT=60

declare -a ARGS=(
    --container-image /images/train.sqsh
    --container-mounts /fsx:/fsx,/scratch
)
declare -a TORCHRUN_ARGS=(
    --nproc_per_node=$GPUS_PER_NODE
    --nnodes=$SLURM_JOB_NUM_NODES
    --rdzv_id=$SLURM_JOB_ID
    # found by name
    --rdzv_backend=c10d
    --rdzv_endpoint=$(hostname)
)
export TRAIN_SCRIPT=${TRAIN_SCRIPT:=./train.py}
declare -a TRAINING_ARGS=(
    --hidden_width=4096
    --layers=$((4 * 8))
    --max_steps=5000
    --checkpoint_dir=./checkpoints
    --resume_from_checkpoint=./checkpoints
)
AUTO_RESUME=""
if [ -d "/opt/cluster" ]; then
    AUTO_RESUME="--auto-resume=1"
fi
srun ${AUTO_RESUME} -l "${ARGS[@]}" torchrun "${TORCHRUN_ARGS[@]}" \\
    $TRAIN_SCRIPT "${TRAINING_ARGS[@]}"
""",
        "a100x64",
    ),
    Shape(
        "strings",
        (
            "stas00/ml-engineering orchestration/slurm/launchers/torchrun-launcher.slurm",
            "bigscience-workshop/bigscience train/tr11-176B-ml/tr11-176B-ml.slurm",
        ),
        """\
#!/bin/bash
#SBATCH --job-name=gpt-176
#SBATCH --partition=gpu_p5
#SBATCH --constraint=a100
#SBATCH --qos=qos_gpu-gc           # up to 100h
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1        # one task for each node!
#SBATCH --cpus-per-task=64
#SBATCH --hint=nomultithread
#SBATCH --gres=gpu:8
#SBATCH --time 20:00:00
#SBATCH --output=%x-%j.out
#SBATCH --account=proj@a100

set -x -e
source $WORK/start-env
echo "START TIME: $(date)"
DATA=$WORK/data
CKPT=$SCRATCH/gpt/checkpoints
mkdir -p $CKPT
cd $WORK/Megatron-LM

MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
MASTER_PORT=6000
N_LAYERS=70
GPT_ARGS=" \\
    --num-layers $N_LAYERS \\
    --init-method-std 0.0048 \\
    --train-iters 95_000 \\
    "
OUTPUT_ARGS=" --save-interval 100 --tensorboard-dir $SCRATCH/tb "
config_json="./ds_config.json"
cat <<EOT > $config_json
{
  "steps_per_print": 2000
}
EOT
export LAUNCHER="python -u -m torch.distributed.run \\
    --nproc_per_node 8 \\
    --nnodes $SLURM_NNODES \\
    --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT \\
    --rdzv_backend c10d \\
    --max_restarts 0 \\
    --tee 3 \\
    "
export CMD=" \\
    `pwd`/pretrain_gpt.py \\
    $GPT_ARGS \\
    $OUTPUT_ARGS \\
    --save $CKPT \\
    --load $CKPT \\
    --data-path $DATA/text \\
    "
echo $CMD
export CUDA_LAUNCH_BLOCKING=1
SRUN_ARGS=" \\
    --wait=60 \\
    --kill-on-bad-exit=1 \\
    "
clear; srun $SRUN_ARGS --jobid $SLURM_JOB_ID \\
    bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD" 2>&1 | tee -a main_log.txt
echo "END TIME: $(date)"
""",
        "jean-zay-h100",
    ),
    Shape(
        "accelerate",
        (
            "huggingface/accelerate examples/slurm/submit_multinode_fsdp.sh",
            "huggingface/open-r1 slurm/train.slurm",
        ),
        """\
#!/bin/bash
#SBATCH --job-name=multinode
#SBATCH -D .
#SBATCH --output=O-%x.%j
#SBATCH --nodes=4                   # number of nodes
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=160
#SBATCH --time=3-00:00:00
#SBATCH --requeue

source activateEnvironment.sh
export GPUS_PER_NODE=4
head_node_ip=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export ACCELERATE_DIR="${ACCELERATE_DIR:-/accelerate}"

export LAUNCHER="ACCELERATE_LOG_LEVEL=info accelerate launch \\
    --config_file ${ACCELERATE_DIR}/fsdp_config.yaml \\
    --num_processes $((SLURM_NNODES * GPUS_PER_NODE)) \\
    --num_machines $SLURM_NNODES \\
    --rdzv_backend c10d \\
    --main_process_ip $head_node_ip \\
    --main_process_port 29500 \\
    --machine_rank $SLURM_PROCID \\
    "
export SCRIPT="${ACCELERATE_DIR}/examples/complete_nlp_example.py"
export SCRIPT_ARGS=" \\
    --mixed_precision fp16 \\
    --per_device_train_batch_size 8 \\
    --output_dir ${ACCELERATE_DIR}/examples/output \\
    --run_name exp-$(date +%F) \\
    "
# one line, for the launcher reads no others
export CMD="$LAUNCHER $SCRIPT $SCRIPT_ARGS"
srun --wait=60 --kill-on-bad-exit=1 bash -c "$CMD" 2>&1
""",
    ),
    Shape(
        "deepspeed",
        ("SURF-ML/Snellius-AI-Guide 06-multi-nodes-deepspeed/run_ds_torchrun.sh",),
        """\
#!/bin/bash
#SBATCH -p gpu_h100 -N 1 -t 60 --exclusive
#SBATCH --gpus-per-node=h100:4
ml purge
ml 2024 CUDA/12.6.0
. ~/venvs/ds/bin/activate
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-2} CC=gcc
deepspeed --num_gpus=4 --master_port 29501 vit.py --deepspeed --deepspeed_config ds.json \\
  --data_path $TMPDIR/tiny-imagenet --load_dir ckpt --save_dir ckpt
""",
    ),
    Shape(
        "apptainer",
        (
            "SURF-ML/Megatron-LM-Snellius 3_train/train-gpt.job",
            "GaMS-Team/GaMS3-12B-Training pretraining/base_cpt/run_pretraining.sbatch",
        ),
        """\
#!/bin/bash -l
#SBATCH --job-name=gemma
#SBATCH --partition=boost_usr_prod
#SBATCH --time=1-00
#SBATCH --nodes=8
#SBATCH --tasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --qos=boost_qos_bprod
CONTAINER=/scratch/$USER/images/nemo.sif
export PYTHONUSERBASE=""
export NCCL_IB_TIMEOUT=50
srun --cpu-bind=verbose --output="logs/%j.txt" apptainer exec --nv --no-home \\
    --env HF_TOKEN=$HF_TOKEN -B /scratch/$USER,$WORK/data:/data $CONTAINER \\
    python -u /data/pretrain.py \\
    --num_nodes=$SLURM_JOB_NUM_NODES --max_steps=6953 --version=$SLURM_JOB_ID
""",
        "leonardo",
    ),
    Shape(
        "signals",
        (
            "Lightning documentation, clouds/cluster_advanced",
            "mila-iqia/mila-docs docs/examples/good_practices/checkpointing/job.sh",
            "facebookresearch and others: `trap ... scontrol requeue`",
        ),
        """\
#!/bin/bash
#SBATCH -J lit
#SBATCH -N 2
#SBATCH -n 8
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --signal=SIGUSR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --array=1-10%1
#SBATCH --dependency=singleton
#SBATCH --exclude=n[1-3]
source ~/.bashrc
eval "$(conda shell.bash hook)"
conda activate /envs/lit
trap_handler () {
    echo "requeue $SLURM_JOB_ID"
    scontrol requeue $SLURM_JOB_ID
}
trap 'trap_handler USR1' USR1
ulimit -n 65536
srun python -u fit.py fit --config lit.yaml --trainer.max_steps=20000 \\
  --trainer.default_root_dir=runs/lit --ckpt_path last &
wait $!
""",
    ),
    Shape(
        "blocks",
        (
            "huggingface/nanotron examples/mamba/run_multinode.sh",
            "aws-samples/awsome-distributed-training 3.test_cases/pytorch/deepspeed/.../"
            "finetune_llama.sbatch",
        ),
        """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gres=gpu:8
: ${CONFIG_FILE:="config_tiny.yaml"}
function makehostfile() {
  for node in $(scontrol show hostnames); do echo "$node slots=8"; done
}
makehostfile > hostfile
if [ "$1" = "convert" ]; then
    python convert.py
else
    srun torchrun --nnodes=2 --nproc_per_node=8 run_train.py --config-file $CONFIG_FILE
fi
for seed in 1 2 3; do
    echo $seed
done
case $2 in
  a) echo a ;;
  *) echo b ;;
esac
( cd /tmp && rm -rf cache )
""",
    ),
    Shape(
        "plain",
        ("many: one GPU, no srun",),
        """\
#!/bin/bash
#SBATCH --gres=gpu:1
#SBATCH --mem=64000
#SBATCH --time=0-12:00
#SBATCH --constraint="volta32gb&nvme"
export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567
export HF_HOME=$SCRATCH/hf PYTHONPATH=/proj/lib:$PYTHONPATH
cd /proj/code
pip install -r requirements.txt
python prepare_data.py --out $SLURM_TMPDIR/data
python train.py --data $SLURM_TMPDIR/data --name "my run" --price '$5' --steps 300 "$@"
cp -r out /archive
sbatch next.sbatch
""",
    ),
    Shape(
        "module",
        ("pytorch/torchtitan multinode_trainer.slurm",),
        """\
#!/bin/bash

#SBATCH --job-name=titan_multi_node

#SBATCH --ntasks=4

#SBATCH --nodes=4

#SBATCH --gpus-per-task=8

#SBATCH --partition=train

nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
nodes_array=($nodes)
head_node=${nodes_array[0]}
head_node_ip=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)

echo Node IP: $head_node_ip
export LD_LIBRARY_PATH=/opt/amazon/efa/lib:$LD_LIBRARY_PATH
export NCCL_SOCKET_IFNAME="eth0,en"
CONFIG=${CONFIG:-"debug"}
dcgmi profile --pause
srun torchrun --nnodes 4 --nproc_per_node 8 --rdzv_id 101 --rdzv_backend c10d \\
  --rdzv_endpoint "$head_node_ip:29500" \\
  -m titan.train --config ${CONFIG} --training.steps 1000 "$@"
dcgmi profile --resume
""",
    ),
)
BY_NAME = {shape.name: shape for shape in SHAPES}


@cache
def _profile(name: str) -> ClusterProfile:
    return load_named_profile(name).document


def adopted(text: str, profile: str | None = None, name: str = "job.sbatch") -> Adoption:
    """Adopt a script that is submitted in /project."""
    document = None if profile is None else _profile(profile)
    return adopt(Source(name, text, "/project"), ADAPTERS, document, profile)


# -- Scripts of all combinations of how each of their parts is written -----------------------------

_SIZES = (
    "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\n#SBATCH --ntasks-per-node={tasks}\n",
    "#SBATCH -N2 --gres=gpu:a100:4 --ntasks-per-node {tasks}  # all in one line\n",
    "#SBATCH -N 2 -n {all}\n#SBATCH --gpus=8\n",
)
_SOFTWARE = (
    "module purge\nmodule load cuda/12.4 gcc\nsource /envs/a/bin/activate\n",
    "ml cuda/12.4\neval \"$(/opt/conda/bin/conda 'shell.bash' 'hook' 2> /dev/null)\"\n"
    "conda activate e\n",
    'source /opt/miniforge3/etc/profile.d/conda.sh; conda activate "$HOME/envs/e" && echo ok\n',
)
_AROUND = (
    "{line}\n",
    "srun {line}\n",
    "srun -l --wait=60 bash -c '{line}'\n",
    'CMD="{line}"\necho $CMD\nsrun --mpi=pmix bash -c "$CMD" 2>&1 | tee log.txt\n',
    'CMD=" \\\n   {line} \\\n   "\nsrun $CMD\n',
    "srun --container-image=/i.sqsh --container-mounts=/data:/data \\\n  {line} &\nwait\n",
    "srun apptainer exec --nv -B /data:/data /i.sif {line}\n",
)
_TRAINERS = (
    ("torchrun", "torchrun --nproc_per_node=4 --nnodes=$SLURM_NNODES train.py {arguments}"),
    ("torchrun", "python3 -m torch.distributed.run --nproc-per-node 4 train.py {arguments}"),
    ("accelerate", "accelerate launch --num_machines 2 --use_fsdp train.py {arguments}"),
    ("torchrun", "deepspeed --hostfile h train.py {arguments}"),
    ("srun", "python train.py {arguments}"),
)
ARGUMENTS = (
    "--lr 1e-4 --max_steps 500 --output_dir out/x --resume_from_checkpoint out/x/last "
    "--per_device_train_batch_size 8"
)


def combined_scripts() -> dict[str, tuple[str, str]]:
    """Return combinations by name, each with the launch that must be found in it.

    Every two parts meet, in a third of all combinations.
    """
    found = {}
    parts = (_SIZES, _SOFTWARE, _AROUND, _TRAINERS)
    for numbers in product(*(range(len(part)) for part in parts)):
        size, software, around = (
            _SIZES[numbers[0]],
            _SOFTWARE[numbers[1]],
            _AROUND[numbers[2]],
        )
        launch, trainer = _TRAINERS[numbers[3]]
        if sum(numbers) % 3 or (launch == "srun" and "srun" not in around):
            continue  # the latter is another shape: one process, which starts others itself
        tasks = 4 if launch == "srun" else 1
        line = trainer.format(arguments=ARGUMENTS)
        text = (
            "#!/bin/bash\n#SBATCH --job-name=combined\n"
            + size.format(tasks=tasks, all=2 * tasks)
            + "\n# comment\nset -euo pipefail\n"
            + software
            + around.format(line=line)
        )
        found["-".join(map(str, numbers))] = (text, launch)
    return found
