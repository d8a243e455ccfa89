"""The faults that this project promises to survive, numbered for docs/reliability.md.

Belongs here: the rows and what is expected. Does not belong here: bringing them about (the tests
beside this file), what came of it (`reliability_report`).
"""

from __future__ import annotations

ROWS: dict[int, tuple[str, str]] = {
    1: ("Preempted; the step saves and leaves within the grace", "requeued, no step lost"),
    2: ("Preempted; the step dies of TERM", "requeued as preempted, budget untouched"),
    3: ("Preempted; the step ignores TERM, or there is no grace", "last periodic checkpoint"),
    4: ("Preempted with the job's own signal to the batch shell", "as without it"),
    5: ("Preempted while a checkpoint is written", "the one before is used"),
    6: ("Preempted or requeued in the second in which the run finishes", "nothing is run again"),
    7: ("Many preemptions in a row", "never a stop, budget untouched"),
    8: ("Time limit with a warning", "saved and requeued before the limit"),
    9: ("Time limit with srun in the foreground", "no such script is ever written"),
    10: ("Time limit shorter than start and first step", "stops and says which limit to raise"),
    11: ("A node without the batch script dies", "other nodes"),
    12: ("The batch node dies", "Slurm restarts the job; the lost attempt is closed"),
    13: ("slurmd dies and its ranks live on", "they publish nothing any more"),
    14: ("A node dies in a job with a spare", "same job, no queue"),
    15: ("A node dies where jobs may not be requeued", "a new job of the same run"),
    16: ("The prolog fails on a node", "the run goes on without that node"),
    17: ("A node is drained under the job, then something fails", "goes on; later elsewhere"),
    18: ("slurmctld is away", "the run does not notice, calls are repeated"),
    19: ("squeue hangs or answers nothing", "unknown: nothing is concluded, nothing is done"),
    20: ("One rank dies", "it is named, not its code as srun shows it; relaunched in place"),
    21: ("One rank hangs", "stacks of all ranks, the odd one named, relaunched in place"),
    22: ("All ranks are silent during a slow save", "no hang"),
    23: ("ImportError on all ranks at the start", "stops at once, with the traceback's last line"),
    24: ("The same traceback at the same step, without progress", "stops when the budget is used"),
    25: ("Crashes, each after new progress", "never a stop"),
    26: ("XID lines in the kernel's log", "hardware: away from the node; application: again"),
    27: ("An XID on one node, timeouts on all others", "the XID is the cause"),
    28: ("CUDA out of memory, at once or late", "stops; one retry when it had fitted before"),
    29: ("No space left for a checkpoint", "stops, deletes nothing, says how much is missing"),
    30: ("Damaged checkpoints", "skipped with a reason, the newest good one is used"),
    31: ("Killed between a checkpoint's last byte and its publication", "the one before is used"),
    32: ("The port of the rendezvous is taken", "another port"),
    33: ("NaN at a certain step, always", "again elsewhere, then back and around the data"),
    34: ("Cancelled by the user, running or queued", "stays cancelled, whoever looks"),
    35: ("Requeued, or requeued and held, by an administrator", "resumes; held stays held"),
    36: ("A job array of one at a time, an element requeued", "never two writers"),
    37: ("A chain of jobs", "the successor waits for the real end"),
    38: ("Two jobs of the same run", "the second one leaves"),
    39: ("All nodes are to be avoided", "the list gives way, with a warning"),
    40: ("A rank leaves with a code that the site requeues (RequeueExit)", "no code is passed on"),
    41: ("A requeue where logs are truncated by default", "all attempts stay readable"),
    42: ("All of it at random", "losses and weights bit by bit, every second accounted for"),
}
