"""What a run asks of slurmctld: one row per command and event, and the RPCs of each command.

Nothing is asked in steady state: the supervisor reads the run directory, and ranks ask nothing.
Belongs here: rows and their sources. Does not belong here: how often events happen (`predict`),
people who run `status` and `watch`.
"""

from __future__ import annotations

from hpctrain.plan.footprint.quantities import Formula, SlurmRow

# RPCs that reach slurmctld by one execution, at most, as sdiag(1) counts them on 22.05 and 24.11;
# tests/slurm/test_footprint_on_slurm.py measures them again. For srun each node reports the end of
# the step, at most: beyond TreeWidth (slurm.conf(5)) nodes report for others.
RPC_OF_COMMAND: dict[str, Formula] = {
    "squeue": Formula(3),
    "squeue --steps": Formula(2),
    "scontrol show node": Formula(2),
    "scontrol show config": Formula(2),
    "scontrol show topology": Formula(2),
    "scontrol requeue": Formula(1),
    "scontrol update": Formula(1),
    "sinfo": Formula(2),
    "scancel": Formula(8),
    "sbatch": Formula(1),
    "srun": Formula(2, nodes=1),
}
# The shortest pauses of `hpctrain.slurm.backoff`, half of the full ones, and how long they go on:
# so much beyond KillWait for a step that refuses to die, and so long for a controller.
PAUSE_SECONDS, SHORTER_PAUSES = 2.5, 3
KILL_SECONDS_BEYOND_KILL_WAIT = 10
PATIENCE_SECONDS = 600.0
_TIME_LIMIT = "hpctrain.supervise.time_limit:query_time_limit"
_LAUNCH = "hpctrain.supervise.srun_launch:TrainerLauncher"
_LEAVES = "hpctrain.supervise.evidence.leaves:leaves_of"
_STEPS = "hpctrain.supervise.evidence.srun_steps:OwnSteps"
_PROBE = "hpctrain.supervise.evidence.probe:probe_nodes"
_FACTS = "hpctrain.supervise.evidence.job_facts:job_facts"
_BLAME = "hpctrain.supervise.decision_inputs:_planned"
_REQUEUE = "hpctrain.supervise.act.requeue"
_END = "hpctrain.supervise.act.execute:act"
_SUBMIT = "hpctrain.actions.job_submission:submit_jobs"
_SUCCESSOR = "hpctrain.supervise.act.successor"
_ONE = Formula(1)
_REFUSAL = Formula(SHORTER_PAUSES, refusal_seconds=1 / PAUSE_SECONDS)
_OUTAGE = Formula(SHORTER_PAUSES + PATIENCE_SECONDS / PAUSE_SECONDS)

SLURM_ROWS: tuple[SlurmRow, ...] = (
    SlurmRow("scontrol show config", "run", _ONE, "name of the cluster", _SUBMIT),
    SlurmRow("sbatch", "run", Formula(jobs=1), "the job", _SUBMIT),
    SlurmRow("squeue", "launch", _ONE, "time left", _TIME_LIMIT),
    SlurmRow(
        "scontrol show topology",
        "launch",
        Formula(located=1),
        "where nodes are",
        _LEAVES,
        varies=True,
    ),  # once per attempt
    SlurmRow("scontrol show node", "launch", _ONE, "address of the first node", _LAUNCH),
    SlurmRow("srun", "launch", _ONE, "the ranks", _LAUNCH),
    SlurmRow("squeue", "launch", _ONE, "does the job still run, at its end", _STEPS),
    SlurmRow("squeue --steps", "launch", _ONE, "is a step left, at its end", _STEPS),
    SlurmRow("squeue", "launch", Formula(chain=1), "does another job run", _SUCCESSOR, varies=True),
    SlurmRow("sbatch", "launch", Formula(chain=1), "the next job", _SUCCESSOR, varies=True),
    SlurmRow("scontrol update", "launch", _ONE, "no requeue of a run that ends", _END, varies=True),
    SlurmRow("squeue", "failure", Formula(2), "why the step ended", _FACTS),
    SlurmRow("squeue", "failure", _ONE, "nodes of the job", _PROBE),
    SlurmRow("sinfo", "failure", _ONE, "states of nodes", _PROBE),
    SlurmRow("sinfo", "failure", _ONE, "were lost nodes to go", _BLAME, varies=True),
    SlurmRow("scontrol show node", "failure", _ONE, "have nodes booted", _PROBE),
    SlurmRow("srun", "failure", _ONE, "checks of nodes", _PROBE),
    SlurmRow("scontrol requeue", "failure", _ONE, "the next attempt", _REQUEUE, varies=True),
    SlurmRow("scontrol update", "failure", _ONE, "nodes to avoid", _REQUEUE, varies=True),
    SlurmRow("squeue", "refusal", _REFUSAL, "is the job the same", _STEPS),
    SlurmRow("squeue --steps", "refusal", _REFUSAL, "is the step left", _STEPS),
    SlurmRow("scancel", "refusal", _REFUSAL, "kill what is left", _STEPS),
    SlurmRow("squeue", "refusal", _ONE, "nodes of the job", _PROBE),
    SlurmRow("squeue", "outage", _OUTAGE, "why the step ended", _FACTS),
    SlurmRow("scontrol requeue", "outage", _OUTAGE, "the next attempt", _REQUEUE),
    SlurmRow("squeue", "outage", _OUTAGE, "was it cancelled meanwhile", _REQUEUE),
)
