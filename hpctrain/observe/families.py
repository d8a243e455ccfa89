"""The metric families of runs and services: name, type, unit, labels, help. Pure.

Names follow OpenMetrics (prometheus/OpenMetrics, specification/OpenMetrics.md): a unit is the end
of the name, counters are exposed with `_total`, info metrics with `_info`. A name here is without
both. Every family of runs has the label `run`; info families carry what other exporters' series are
joined by. None has a label for ranks, so a run has at most as many series of a family as it has
nodes. Every family of services has the label `service`. What engines count has the label `replica`
as well: a sum over replicas would fall whenever one leaves, which Prometheus takes for a restart.
Belongs here: the one table of them. Does not belong here: their values (`samples`), text formats
(`exposition`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FamilyType = Literal["gauge", "counter", "histogram", "info", "stateset"]


@dataclass(frozen=True)
class Family:
    """One metric family; `unit` is "" for numbers without one.

    `subject` is the label that says what it is of, "" for the exporter itself; `labels` are the
    others, without `le` of histograms.
    """

    name: str
    type: FamilyType
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    subject: Literal["run", "service", ""] = "run"

    @property
    def all_labels(self) -> tuple[str, ...]:
        """All labels that its series have."""
        own = (self.subject,) if self.subject else ()
        return (*own, *self.labels, *(("le",) if self.type == "histogram" else ()))

    @property
    def sample_name(self) -> str:
        """Its name in a query; that of the buckets of a histogram."""
        if self.type == "histogram":
            return f"{self.name}_bucket"
        return self.name + {"counter": "_total", "info": "_info"}.get(self.type, "")


def _run(
    name: str, type: FamilyType, help: str, unit: str = "", labels: tuple[str, ...] = ()
) -> Family:
    return Family(f"hpctrain_run_{name}", type, help, unit, labels)


def _service(
    name: str, type: FamilyType, help: str, unit: str = "", labels: tuple[str, ...] = ()
) -> Family:
    return Family(f"hpctrain_service_{name}", type, help, unit, labels, subject="service")


# Names of parts of a step, and axes of the mesh, as values of labels.
STEP_PARTS = ("passes", "data", "optimizer", "rest")

RUN_FAMILIES: tuple[Family, ...] = (
    # -- which run ------------------------------------------------------------------------------
    Family(
        "hpctrain_run",
        "info",
        "What a run is: user, Slurm account, cluster, engine, model, layout, GPU.",
        labels=("user", "account", "cluster", "engine", "model", "layout", "gpu"),
    ),
    _run("job", "info", "The job that trains the run or waits for nodes.", labels=("job",)),
    _run("node", "info", "The nodes of the running job.", labels=("job", "node")),
    _run("state", "stateset", "What the run is doing.", labels=("hpctrain_run_state",)),
    _run("nodes", "gauge", "Nodes that the run holds, spares included."),
    _run("gpus", "gauge", "GPUs that the run holds, spares included."),
    # -- progress -------------------------------------------------------------------------------
    _run("step", "gauge", "The last finished optimizer step."),
    _run("target_step", "gauge", "The optimizer step at which the run is done."),
    _run(
        "last_step_timestamp_seconds",
        "gauge",
        "When the run last finished a step (Unix time).",
        "seconds",
    ),
    _run(
        "sign_of_life_timestamp_seconds",
        "gauge",
        "When the trainer last wrote that it is alive, in steps, saves or evaluations (Unix time).",
        "seconds",
    ),
    _run(
        "stall_limit_seconds",
        "gauge",
        "Silence of the trainer after which the supervisor ends a launch as hung.",
        "seconds",
    ),
    _run("eta_seconds", "gauge", "Time of the steps that are left, without the queue.", "seconds"),
    # -- learning -------------------------------------------------------------------------------
    _run("loss", "gauge", "Training loss of the last step; NaN where it is not finite."),
    _run("gradient_norm", "gauge", "Norm of the gradients in the last step, before clipping."),
    _run("learning_rate", "gauge", "Learning rate of the last step."),
    _run("evaluation_loss", "gauge", "Loss of the newest evaluation."),
    # -- speed ----------------------------------------------------------------------------------
    _run("step_seconds", "gauge", "Median time of the last steps.", "seconds"),
    _run("planned_step_seconds", "gauge", "Time of a step that the plan predicts.", "seconds"),
    _run(
        "tokens_per_second",
        "gauge",
        "Median of tokens (images for models of images) per second of the whole run.",
    ),
    _run("mfu_ratio", "gauge", "Median model FLOPs utilization of the last steps.", "ratio"),
    _run("planned_mfu_ratio", "gauge", "Model FLOPs utilization that the plan predicts.", "ratio"),
    _run(
        "step_part_seconds",
        "gauge",
        "Mean time per step of all ranks in a part of it: passes, data, optimizer, rest.",
        "seconds",
        ("part",),
    ),
    _run(
        "message_seconds",
        "gauge",
        "Time per step in messages along an axis of the layout, the mean of ranks.",
        "seconds",
        ("axis",),
    ),
    _run(
        "message_bytes",
        "gauge",
        "Bytes per step that a rank hands to messages along an axis, the mean of ranks.",
        "bytes",
        ("axis",),
    ),
    _run(
        "planned_message_seconds",
        "gauge",
        "Time per step in messages along an axis that computation does not hide, as planned.",
        "seconds",
        ("axis",),
    ),
    _run(
        "node_slowdown_ratio",
        "gauge",
        "Compute time of the slowest rank of a node over the median of the ranks.",
        "ratio",
        ("node",),
    ),
    _run(
        "slow_rank_limit_ratio",
        "gauge",
        "Slowdown from which the supervisor reports a rank.",
        "ratio",
    ),
    _run(
        "peak_memory_bytes",
        "gauge",
        "Most memory of a GPU that PyTorch has allocated, of the ranks of a pipeline stage.",
        "bytes",
        ("stage",),
    ),
    _run(
        "planned_memory_bytes",
        "gauge",
        "Memory of a GPU of a pipeline stage that the plan predicts.",
        "bytes",
        ("stage",),
    ),
    # -- checkpoints ----------------------------------------------------------------------------
    _run("checkpoint_step", "gauge", "Step of the newest published checkpoint."),
    _run(
        "checkpoint_timestamp_seconds",
        "gauge",
        "When the newest checkpoint was published (Unix time).",
        "seconds",
    ),
    _run("checkpoint_bytes", "gauge", "Size of the newest checkpoint.", "bytes"),
    _run(
        "checkpoint_stall_seconds",
        "gauge",
        "How long training stood still for the newest checkpoint.",
        "seconds",
    ),
    _run(
        "checkpoint_publish_seconds",
        "gauge",
        "From the begin of the newest save until it counted.",
        "seconds",
    ),
    _run("checkpoint_interval_seconds", "gauge", "Planned time between checkpoints.", "seconds"),
    _run("checkpoints", "counter", "Published checkpoints."),
    _run(
        "at_risk_seconds",
        "gauge",
        "Training since the newest checkpoint, which a failure now would lose.",
        "seconds",
    ),
    _run("disk_free_bytes", "gauge", "Free space where the checkpoints are.", "bytes"),
    # -- attempts -------------------------------------------------------------------------------
    _run("attempts", "counter", "Starts of the run's jobs by Slurm."),
    _run("launches", "counter", "Starts of the trainer."),
    _run("launch_ends", "counter", "Ends of launches and attempts, by cause.", labels=("cause",)),
    _run(
        "last_end_timestamp_seconds",
        "gauge",
        "When a launch or attempt last ended by a cause (Unix time).",
        "seconds",
        ("cause",),
    ),
    _run(
        "retries_left",
        "gauge",
        "Failures of a cause that the supervisor would still retry, for causes that occurred.",
        labels=("cause",),
    ),
    _run("lost_steps", "counter", "Steps that were trained again, by cause.", labels=("cause",)),
    # -- time and money -------------------------------------------------------------------------
    _run(
        "time_seconds",
        "gauge",
        "Wall time by category (docs/scale.md); a step that is lost moves to `redone`.",
        "seconds",
        ("category",),
    ),
    _run("lost_seconds", "gauge", "Wall time that a cause has cost.", "seconds", ("cause",)),
    _run(
        "goodput_ratio",
        "gauge",
        "Productive share of the wall time: of the whole run (ETTR, with the queue), of the last "
        "hour, of the last day.",
        "ratio",
        ("window",),
    ),
    _run("pending_seconds", "gauge", "How long the job has been waiting for nodes.", "seconds"),
    _run("gpu_seconds", "counter", "GPU time that the run has occupied.", "seconds"),
    _run("planned_gpu_seconds", "gauge", "GPU time of all steps as planned, no loss.", "seconds"),
    _run(
        "cost",
        "counter",
        "Money for the GPU time so far, by the prices of the profile.",
        labels=("currency",),
    ),
    _run(
        "budget_used_ratio",
        "gauge",
        "GPU time so far over that of the budget (`budget.gpu_hours`).",
        "ratio",
    ),
    # -- who looks after it ---------------------------------------------------------------------
    _run(
        "supervisor_timestamp_seconds",
        "gauge",
        "The newest line that supervisor or trainer wrote (Unix time).",
        "seconds",
    ),
)

# Values of the label `latency`: what is promised, and the wait in the engine's queue.
LATENCIES = ("ttft", "tpot", "e2e", "queue")
# Values of the label `phase` (hpctrain.records.service_records.ReplicaState).
PHASES = ("queued", "loading", "ready", "draining", "ended", "failed")
# Values of the label `result` of drains, and of the label `reason` of the router's failures.
DRAIN_RESULTS = ("finished", "broken_off")
FAILURE_REASONS = ("failed", "refused", "limited")
_OF_PROMISES = ("latency", "percentile")

SERVICE_FAMILIES: tuple[Family, ...] = (
    # -- which service --------------------------------------------------------------------------
    Family(
        "hpctrain_service",
        "info",
        "What a service is: user, cluster, engine, model, GPU, router, address of clients.",
        labels=("user", "cluster", "engine", "model", "gpu", "router", "url"),
        subject="service",
    ),
    _service("controller_epoch", "gauge", "Number of the controller that steers."),
    _service(
        "controller_timestamp_seconds",
        "gauge",
        "When the controller last wrote what it sees (Unix time).",
        "seconds",
    ),
    # -- replicas -------------------------------------------------------------------------------
    _service("replicas_wanted", "gauge", "Replicas that the controller wants now."),
    _service("replicas_needed", "gauge", "Replicas that carry the planned traffic, no spare."),
    _service("replicas_planned", "gauge", "Replicas at the busiest hour, spares included."),
    _service("replicas", "gauge", "Replicas as the controller sees them.", labels=("phase",)),
    _service("replicas_ready", "gauge", "Replicas with an endpoint whose lease has not ended."),
    _service("replicas_in_rotation", "gauge", "Ready replicas that the router asks."),
    _service(
        "replica_ready_timestamp_seconds",
        "gauge",
        "Since when a ready replica has been answering (Unix time).",
        "seconds",
        ("replica",),
    ),
    _service(
        "replica_load_seconds",
        "gauge",
        "From the start of the job of a ready replica to its first answer.",
        "seconds",
        ("replica",),
    ),
    _service("planned_load_seconds", "gauge", "The same as planned.", "seconds"),
    _service(
        "replica_walltime_end_timestamp_seconds",
        "gauge",
        "When the time limit of the job of a ready replica is reached (Unix time).",
        "seconds",
        ("replica",),
    ),
    _service("replica_starts", "counter", "Jobs of replicas that have begun."),
    _service(
        "replica_ends",
        "counter",
        "Ends of engines and jobs of replicas, by cause.",
        labels=("cause",),
    ),
    _service(
        "drains",
        "counter",
        "Replicas that left on purpose: with all requests finished, or some broken off.",
        labels=("result",),
    ),
    _service("broken_off_requests", "counter", "Requests that replicas broke off when they left."),
    # -- promise --------------------------------------------------------------------------------
    _service("promised_seconds", "gauge", "What is promised to clients.", "seconds", _OF_PROMISES),
    _service(
        "predicted_seconds", "gauge", "What the plan predicts of it.", "seconds", _OF_PROMISES
    ),
    _service(
        "promised_slow_ratio",
        "gauge",
        "Share of requests that may be slower than promised: 0.01 for p99.",
        "ratio",
        _OF_PROMISES,
    ),
    _service("planned_requests_per_second", "gauge", "Rate of requests that is planned for."),
    _service(
        "capacity_requests_per_second",
        "gauge",
        "Rate up to which the promises hold with the replicas that are needed, as planned.",
    ),
    # -- requests, as the engines of ready replicas count them ----------------------------------
    _service(
        "replica_answers",
        "gauge",
        "1 if a ready replica answered when it was asked for its metrics, else 0.",
        labels=("replica",),
    ),
    _service(
        "latency_seconds",
        "histogram",
        "Times of requests in the engine: to the first token, per further token, in all, queued.",
        "seconds",
        ("latency", "replica"),
    ),
    _service(
        "slow_requests",
        "counter",
        "Requests slower than promised; inside a bucket of the engine evenly distributed.",
        labels=(*_OF_PROMISES, "replica"),
    ),
    _service("running_requests", "gauge", "Requests that are computed.", labels=("replica",)),
    _service("waiting_requests", "gauge", "Requests in the engine's queue.", labels=("replica",)),
    _service(
        "kv_cache_used_ratio",
        "gauge",
        "Share of the memory for keys and values that is in use.",
        "ratio",
        ("replica",),
    ),
    _service("prompt_tokens", "counter", "Tokens of prompts.", labels=("replica",)),
    _service("output_tokens", "counter", "Tokens of answers.", labels=("replica",)),
    _service(
        "recomputed_requests",
        "counter",
        "Times that an engine put a request back for want of memory.",
        labels=("replica",),
    ),
    _service(
        "prefix_cache_hit_tokens",
        "counter",
        "Tokens of prompts that were found in the prefix cache.",
        labels=("replica",),
    ),
    _service(
        "prefix_cache_queried_tokens",
        "counter",
        "Tokens of prompts that were looked for in the prefix cache.",
        labels=("replica",),
    ),
    # -- router ---------------------------------------------------------------------------------
    _service(
        "rotation_timestamp_seconds",
        "gauge",
        "When the router last compared its replicas with the endpoints (Unix time).",
        "seconds",
    ),
    _service("router_requests", "counter", "Requests that have reached the router."),
    _service(
        "router_failed_requests",
        "counter",
        "Requests that clients got an error for: failed, no replica was ready, over their limit.",
        labels=("reason",),
    ),
    # -- time and money -------------------------------------------------------------------------
    _service("gpus", "gauge", "GPUs that the replicas hold."),
    _service("gpu_seconds", "counter", "GPU time that all replicas have occupied.", "seconds"),
    _service(
        "cost",
        "counter",
        "Money for the GPU time so far, by the prices of the profile.",
        labels=("currency",),
    ),
    _service(
        "planned_cost_per_hour",
        "gauge",
        "Money for an hour of all planned replicas.",
        labels=("currency",),
    ),
)

EXPORTER_FAMILIES: tuple[Family, ...] = (
    Family("hpctrain_exporter", "info", "The exporter.", labels=("version",), subject=""),
    Family("hpctrain_exporter_runs", "gauge", "Runs that are exported.", subject=""),
    Family("hpctrain_exporter_services", "gauge", "Services that are exported.", subject=""),
    Family("hpctrain_exporter_unreadable_runs", "gauge", "Runs that cannot be read.", subject=""),
    Family(
        "hpctrain_exporter_unreadable_services",
        "gauge",
        "Services that cannot be read.",
        subject="",
    ),
    Family(
        "hpctrain_exporter_collection_seconds",
        "gauge",
        "Time that the last collection took.",
        "seconds",
        subject="",
    ),
    Family(
        "hpctrain_exporter_timestamp_seconds",
        "gauge",
        "The begin of the last complete collection (Unix time).",
        "seconds",
        subject="",
    ),
    Family(
        "hpctrain_exporter_slurm_queries", "counter", "Commands of Slurm, all runs.", subject=""
    ),
    Family(
        "hpctrain_exporter_slurm_up",
        "gauge",
        "1 if Slurm answered the last query, else 0.",
        subject="",
    ),
    Family(
        "hpctrain_watch_timestamp_seconds",
        "gauge",
        "The last complete pass of `hpctrain watch --act` (Unix time); absent before the first.",
        "seconds",
        subject="",
    ),
    Family(
        "hpctrain_suspect_nodes",
        "gauge",
        "Nodes that new launches avoid because of evidence of all runs.",
        subject="",
    ),
)

FAMILIES = (*RUN_FAMILIES, *SERVICE_FAMILIES, *EXPORTER_FAMILIES)
BY_NAME = {family.name: family for family in FAMILIES}
