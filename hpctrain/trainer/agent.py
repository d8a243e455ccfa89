"""The parent of a trainer of one's own: it starts the ranks, and keeps a trainer's contract for it.

    python -m hpctrain.trainer.agent RUN_DIRECTORY/train.json

srun starts one on each node, or one for each GPU (`launch: srun`). The first one leads: it alone
writes progress, metrics and checkpoints of the run. What a trainer does is never taken for more
than it is: an exit code of 0 is no end without the target, a signal is sent to who catches it, a
trainer that resumes elsewhere than it was told to is stopped. Belongs here: the order of a launch,
and what its end means. Does not belong here: processes (`ranks`), checkpoints (`publishing`), steps
(`progress`), calls of a script (`hpctrain.trainer`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpctrain.base.durable import append_line, make_private_directory, replace_link
from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem
from hpctrain.checkpoints.discover import good_steps
from hpctrain.checkpoints.foreign import layout_words, own_name, put_back
from hpctrain.checkpoints.publish import StaleEpochError
from hpctrain.engines.trainer import TrainerSettings, trainer_settings_of
from hpctrain.records.exit_records import (
    mark_left_startup,
    read_agent_records,
    write_agent_record,
)
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.requests import is_requested
from hpctrain.records.run_records import (
    AgentRecord,
    DoneMarker,
    Outcome,
    RankEnd,
    TrainerExit,
    read_record,
    write_record,
)
from hpctrain.spec.job_text import UnsetNameError, expanded_text
from hpctrain.spec.trainer import ProgressSource, filled_in
from hpctrain.train.faults import BadCheckpointError, UnreadableCheckpointError
from hpctrain.train.launchers.agent_environment import Place
from hpctrain.train.launchers.rank_processes import Rank, open_log, torchrun_variables
from hpctrain.train.network_interface import set_gloo_interface
from hpctrain.train.rank_environment import Launch, host_threads, read_launch
from hpctrain.train.saving.digest_check import start_digest_check
from hpctrain.train.stop import StopSignals, leave
from hpctrain.train.storage import fence_of, outlast, record_exit
from hpctrain.trainer import (
    CHECKPOINT_VARIABLE,
    OUTPUT_VARIABLE,
    SOCKET_VARIABLE,
    STACKS_VARIABLE,
    YIELDED,
)
from hpctrain.trainer.progress import (
    FileChanges,
    FileReader,
    OutputReader,
    Recorder,
    Values,
    wrong_start,
)
from hpctrain.trainer.publishing import Publisher
from hpctrain.trainer.ranks import (
    SaveSignal,
    Talk,
    accelerate_words,
    catching,
    python_of,
    write_scontrol,
)
from hpctrain.trainer.ray_cluster import (
    RayError,
    RayNode,
    prepare_ray,
    ray_environment,
    wait_for_head,
)

_TICK_SECONDS = 0.1
_LOOK_SECONDS = 1.0
_FENCE_SECONDS = 5.0
# How long others may live on after a rank has failed: their own last words.
_AFTER_FAILURE_SECONDS = 5.0
# How long a process may take to end after SIGTERM.
_TERM_SECONDS = 10.0
# A rank that has done nothing for so long, after others have ended well, is ended.
_LINGERING_SECONDS = 60.0
# It does nothing while it computes for less than this share of the time.
_IDLE_SHARE, _TICKS = 0.02, os.sysconf("SC_CLK_TCK")
# A trainer that has saved on request and trains on is ended after so long.
_AFTER_SAVE_SECONDS = 5.0
# How long a start that is to be stopped waits for a rank to catch the signal.
_STARTUP_SECONDS = 10.0
# How long the end of a launch waits for its last checkpoint to stand still.
_LAST_CHECKPOINT_SECONDS = 60.0
# How long it waits for what other agents have heard last.
_LAST_REPORTS_SECONDS = 5.0
# A socket's path has at most 107 bytes (unix(7)), and the names below this are short.
_LONGEST_HOME = 70


# What other agents have heard, in `Agent._reports`.
_OTHER_AGENTS = ProgressSource(
    jsonl=".reports-*.jsonl",
    step="step",
    loss="loss",
    learning_rate="learning_rate",
    grad_norm="grad_norm",
    seconds="seconds",
    tokens="tokens",
    samples="samples",
)


class Agent:
    """One agent of one launch."""

    def __init__(
        self, run: RunLayout, launch: Launch, settings: TrainerSettings, stop: StopSignals
    ) -> None:
        self.run, self.launch, self.settings, self.stop = run, launch, settings, stop
        trainer = settings.trainer
        self.resume_step = launch.resume_step
        self.output = run.launch_output(launch.epoch)
        self.place = _place(launch, settings, os.environ)
        silence, tells = trainer.silence, trainer.tells_steps
        self.recorder = Recorder(
            run,
            launch.epoch,
            self.resume_step,
            trainer.done.step,
            tells=tells,
            beats=not tells and silence is None,
        )
        self._changes = FileChanges(self.output, float(silence)) if silence is not None else None
        self._passed_on_at = time.monotonic()
        self.publisher: Publisher | None = None
        self.ranks: list[Rank] = []
        self.ray: RayNode | None = None
        self.talk: Talk | None = None
        self._lines = OutputReader(trainer.metrics, trainer.done.step)
        self._heard: list[Values] = []
        self._lock = threading.Lock()
        sources = [one for one in trainer.metrics if one.output is None]
        sources += [_OTHER_AGENTS] if launch.world_size > 1 else []
        self._files = [FileReader(one, self.output, self.resume_step) for one in sources]
        self._own = private_directory()
        self._requeue_mark = self._own / "requeue-asked"
        self._save = (
            SaveSignal(trainer.signal.save, to_launcher=trainer.signal.to == "launcher")
            if (trainer.signal is not None and not trainer.talks)
            else None
        )
        self._asked_at: float | None = None
        self._term_at: float | None = None
        self._failed_at: float | None = None
        self._looked_at = self._fenced_at = 0.0
        self._saved_before_stop: int | None = None
        self._step_when_asked = 0
        self._saved_at: float | None = None
        self._lingering = False
        self._began = time.time()
        self._done_since: float | None = None
        self._ticks, self._idle_since = -1, time.monotonic()
        self._deaths: tuple[RankEnd, ...] = ()

    def close(self) -> None:
        if self.talk is not None:
            self.talk.close()
            stacks = self.run.stack_dump(self.launch.epoch, 0).parent
            with contextlib.suppress(OSError):
                for path in stacks.iterdir() if self.launch.leads else ():
                    if path.read_bytes().count(b"\n") <= 1:  # nothing but its head
                        path.unlink()
        if self.ray is not None:
            self.ray.close()
        shutil.rmtree(self._own, ignore_errors=True)

    # -- begin -------------------------------------------------------------------------------

    def start(self) -> None:
        """Verify what is loaded, make the directory of this launch, and start the ranks.

        Raises BadCheckpointError, UnreadableCheckpointError, InvalidInputError, OSError.
        """
        run, launch, trainer = self.run, self.launch, self.settings.trainer
        resumed = run.checkpoints / launch.resume if launch.resume else None
        digests = start_digest_check(resumed, launch.rank, launch.world_size, launch.node)
        if launch.leads:
            self.recorder.write()
            outlast(run, self._make_output)
            for reader in self._files:
                reader.pass_over()
        else:
            while not self.output.is_dir():
                time.sleep(_TICK_SECONDS)
        if digests is not None:
            digests.wait()
        environment = self._environment(resumed)
        directory = self.settings.directory
        if not os.path.isdir(directory):
            hint = "every node, and the container, must see `trainer.directory`"
            problem = Problem("no such directory", directory, hint=hint, node_dependent=True)
            raise InvalidInputError([problem])
        words = self._words(environment)
        starts = self.place.ranks_here if self._starts_ranks else 1
        if trainer.starts_by == "ray":
            starts = int(self._start_ray(words, environment) and launch.leads)
        for local in range(starts):
            own = {}
            if self._starts_ranks:
                own = torchrun_variables(self.place, local, run.run_id)
            number = self.place.first_rank + local if self._starts_ranks else None
            log, label = 1, b""  # below srun, one's own output is the log of the rank
            if trainer.starts_by != "srun":
                first = number if number is not None else self.place.first_rank
                log, label = open_log(run, first, by_node=self.settings.logs == "node")
            with _running(words[0]):
                rank = Rank(number, words, directory, environment | own, log, label, self._hear)
            self.ranks.append(rank)
        if trainer.checkpoint is not None:
            self.publisher = Publisher(
                run,
                launch,
                trainer.checkpoint,
                ranks=self.place.world_size,
                layout=layout_words(trainer, self.place.world_size),
                samples=lambda: self.recorder.samples,
            )
            self.publisher.start()

    def _start_ray(self, words: Sequence[str], environment: dict[str, str]) -> bool:
        """Start Ray here; False if that was given up. On the head all nodes have joined then.

        Puts what the driver needs into `environment`. Raises RayError, InvalidInputError, OSError.
        """

        def given_up() -> bool:
            return self.stop.requested

        if not self.launch.leads and not wait_for_head(self.output, given_up):
            return False
        around = ray_environment(environment, self.output)
        more = self._put_in(
            self.settings.trainer.launcher_arguments, "launcher_arguments", environment
        )
        gpus = self.settings.gpus_per_node if self.settings.accelerator == "cuda" else 0
        python, directory, node = python_of(words), self.settings.directory, self.launch.node
        for last in (False, False, True):
            with _running(python):
                ray = RayNode(self.place, self.output, node, python, more, gpus, directory, around)
            self.ray, self.ranks = ray, [ray]
            is_up = ray.wait_until_up(given_up)
            if last or given_up() or not ray.may_start_later():
                break
            ray.kill_left()
        environment.clear()
        environment.update(around, RAY_ADDRESS=ray.address)
        return is_up

    @property
    def _own_ranks(self) -> list[Rank]:
        """The processes of the command, without those that it needs around it."""
        return [rank for rank in self.ranks if rank is not self.ray]

    @property
    def _starts_ranks(self) -> bool:
        return self.settings.trainer.starts_by in ("srun", "torchrun")

    def _make_output(self) -> None:
        """Make the directory of this launch under its name at once, complete, for all agents."""
        trainer, run = self.settings.trainer, self.run
        run.make_directory(run.output)
        fresh = self.output.with_name(f".{self.output.name}")
        make_private_directory(fresh)
        checkpoint = trainer.checkpoint
        if checkpoint is not None and checkpoint.found and self.resume_step:
            put_back(run.checkpoints, self.resume_step, fresh, checkpoint)
        if trainer.starts_by == "ray":
            prepare_ray(fresh)
        os.rename(fresh, self.output)
        replace_link(run.newest_output, self.output.name)

    def _environment(self, resumed: Path | None) -> dict[str, str]:
        """The environment of the trainer: the agent's, with what the launch and the adapter set."""
        trainer, found = self.settings.trainer, None
        if resumed is not None:
            name = own_name(resumed)
            found = str(resumed / name) if name is not None else None
        environment = {
            name: value for name, value in os.environ.items() if name not in trainer.unset
        }
        self._requeue_mark = write_scontrol(self._own)
        programs = self._own
        if not os.access(programs / "scontrol", os.X_OK):  # a node's own disk without programs
            programs = self.output / f".programs-{self.launch.rank}"
            programs.mkdir(exist_ok=True)
            self._requeue_mark = write_scontrol(programs)
        environment |= {
            OUTPUT_VARIABLE: str(self.output),
            CHECKPOINT_VARIABLE: found or "",
            STACKS_VARIABLE: str(self.run.stack_dump(self.launch.epoch, 0).parent),
            "HPCTRAIN_RESUME_STEP": str(self.resume_step or ""),
            "PATH": f"{programs}:{environment.get('PATH', os.defpath)}",
            "PYTHONUNBUFFERED": environment.get("PYTHONUNBUFFERED", "1"),
        }
        defaults = {"OMP_NUM_THREADS": str(host_threads() if self.place.ranks_here == 1 else 1)}
        if self.settings.accelerator == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""  # GPUs of this machine are not the run's
            environment["ACCELERATE_USE_CPU"] = "true"  # accelerate, and transformers by it
        environment = {**defaults, **environment}
        values = self._values(found)
        for name, text in trainer.environment.items():
            environment[name] = filled_in((text,), values)[0] if text else text
        if trainer.talks:
            self.talk = Talk(self._own / "talk")
            environment[SOCKET_VARIABLE] = self.talk.address
        return environment

    def _values(self, resume: str | None) -> dict[str, str]:
        return {
            "output": str(self.output),
            "resume": resume or "",
            "resume_step": str(self.resume_step) if resume else "",
            "run": str(self.run.directory),
            "nodes": str(self.place.nodes),
            "gpus_per_node": str(self.settings.gpus_per_node),
        }

    def _words(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        """The words of the command on this node. Raises InvalidInputError for an unset `$NAME`."""
        trainer = self.settings.trainer
        if trainer.script is not None:
            return trainer.words
        words = self._put_in(trainer.words, "command", environment)
        if trainer.starts_by == "accelerate":
            more = self._put_in(trainer.launcher_arguments, "launcher_arguments", environment)
            return accelerate_words(words, more, self.place)
        return words

    def _put_in(
        self, words: Sequence[str], field: str, environment: Mapping[str, str]
    ) -> tuple[str, ...]:
        try:
            filled = filled_in(tuple(words), self._values(environment[CHECKPOINT_VARIABLE]))
            return tuple(expanded_text(word, environment) for word in filled)
        except UnsetNameError as error:
            raise InvalidInputError([Problem(f"trainer.{field}: {error}")]) from None

    # -- while it runs -----------------------------------------------------------------------

    def watch(self) -> None:
        """Look after the ranks until none is left.

        Raises StaleEpochError when a newer launch owns the run, WrongStartError, and what keeps
        checkpoints from being published.
        """
        while any(rank.poll() is None for rank in self.ranks):
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            self._take_reports()
            self._notice_deaths(now)
            if self.ray is not None:
                driver = next(iter(self._own_ranks), None)
                failed = driver is not None and driver.poll() not in (None, 0)
                others = read_agent_records(self.run, self.launch.epoch) if failed else ()
                lost = any(record.node != self.launch.node for record in others)
                in_haste = self.stop.requested or lost
                self.ray.follow(driver, in_haste=in_haste)
            self._follow_stop(now)
            self._end_lingering(now)
            if now - self._looked_at >= _LOOK_SECONDS:
                self._looked_at = now
                self._look()
            if now - self._fenced_at >= _FENCE_SECONDS:
                self._fenced_at = now
                with contextlib.suppress(OSError):
                    fence_of(self.run, self.launch).check()
        for rank in self.ranks:
            rank.finish_reading(2.0)
        self._take_reports()
        self._notice_deaths(time.monotonic())

    def _hear(self, line: str) -> None:
        """Take a line of output, in the thread that reads it."""
        self.recorder.sign()
        found = list(self._lines.read(line))
        if found:
            with self._lock:
                self._heard += found

    def _take_reports(self) -> None:
        with self._lock:
            heard, self._heard = self._heard, []
        messages = list(self.talk.messages()) if self.talk is not None else []
        if not self.launch.leads:
            for values in heard:  # the leading agent writes them
                with contextlib.suppress(OSError):
                    append_line(self._reports, json.dumps(values), mode=0o600, durable=False)
            return
        for values in heard:
            self.recorder.report(values)
        self._take(messages)
        wrong = wrong_start(self.recorder.first_step, self.recorder.row_steps, self.resume_step)
        if wrong is not None:
            raise WrongStartError(wrong)

    def _take(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            kind = message.pop("kind", None)
            if kind == "step":
                self.recorder.report({k: float(v) for k, v in message.items()})
            elif kind == "saving":
                self.recorder.phase("saving")
            elif kind == "times":
                self.recorder.times(**message)

    @property
    def _reports(self) -> Path:
        """The file by which this agent passes on to the leading one what it hears."""
        return self.output / f".reports-{self.place.node_rank}.jsonl"

    def _follow_life(self, changes: FileChanges) -> None:
        """Find a changed file; an agent that does not lead changes one if it has heard a line."""
        silent_seconds, now = self.recorder.silent_seconds, time.monotonic()
        since_seconds = now - self._passed_on_at
        if not self.launch.leads:
            if silent_seconds < since_seconds and since_seconds >= changes.pause_seconds:
                self._passed_on_at = now
                with contextlib.suppress(OSError):
                    self._reports.touch(mode=0o600)
            return
        told = changes.takes_too_long
        if changes.seen(silent_seconds):
            self.recorder.sign()
        if changes.takes_too_long and not told:
            seconds = 2 * changes.pause_seconds
            print(
                f"hpctrain: a look at all files of {self.output} takes more than {seconds:.0f} s: "
                "while it does, silence counts as no hang",
                flush=True,
            )

    def _look(self) -> None:
        """Read files, look for requests, write progress: once a second."""
        if self.publisher is not None and self.publisher.problem is not None:
            raise self.publisher.problem
        if is_requested(self.run, "stop") and self._asked_at is None and not self.stop.requested:
            self.stop.remember(signal.SIGUSR2)
        if self.talk is not None and (at := _changed_at(self.run.stacks_request)) > self._began:
            self._began = at
            self.forward_quit()
        if self._changes is not None:
            self._follow_life(self._changes)
        if not self.launch.leads:
            return
        self._read_files()
        if self.publisher is not None:
            newest = self.publisher.newest
            if newest is not None and newest != self.recorder.checkpoint_step:
                self.recorder.published(newest)
            self._refuse_earlier(self.publisher)
            if self.publisher.is_writing:
                self.recorder.sign()
        if self.talk is not None and is_requested(self.run, "save"):
            self.talk.ask("SAVE")
            with contextlib.suppress(OSError):
                self.run.save_request.unlink()
        if self._done_since is None and self._is_done():
            self._done_since = time.time()
        self.recorder.write()

    def _read_files(self) -> None:
        read_at = time.time()
        for reader in self._files:
            for values in reader.read():
                self.recorder.report(values, read_at=read_at)

    def _refuse_earlier(self, publisher: Publisher) -> None:
        """Stop a trainer that saves a step again which the one it resumed from has behind it."""
        if publisher.earlier is not None:
            raise WrongStartError(
                f"it starts over: it has saved step {publisher.earlier}, and it was told to resume "
                f"from step {self.resume_step}"
            )

    def _notice_deaths(self, now: float) -> None:
        """Record ranks that have failed, once; then the others get some seconds."""
        failed = [
            rank
            for rank in self.ranks
            if (code := rank.poll()) is not None and code not in (0, YIELDED)
        ]
        if failed and self._failed_at is None and self._asked_at is None and not self._lingering:
            self._failed_at = now
            self._deaths = ended = tuple(
                RankEnd(rank=self._number(rank), code=rank.poll() or 0) for rank in failed
            )
            launch, first_at = self.launch, min(rank.ended_at or time.time() for rank in failed)
            record = AgentRecord(epoch=launch.epoch, node=launch.node, time=first_at, ended=ended)
            with contextlib.suppress(OSError):
                write_agent_record(self.run, launch.node_rank, record)
        if self._failed_at is not None and now - self._failed_at > _AFTER_FAILURE_SECONDS:
            self._end(now)

    def _number(self, rank: Rank) -> int:
        return rank.number if rank.number is not None else self.place.first_rank

    def _follow_stop(self, now: float) -> None:
        """Have the ranks save and leave, and end those that do not."""
        if not self.stop.requested:
            return
        if self._asked_at is None:
            self._asked_at = now
            self._saved_before_stop = self.publisher.newest if self.publisher else None
            self._step_when_asked = self.recorder.step
            if self.talk is not None:
                self.talk.ask("STOP")
        if self._save is not None:
            self._save.send(self._own_ranks)
        waited = now - self._asked_at
        trainer = self.settings.trainer
        if trainer.signal is None:
            self._end(now)
            return
        if waited > float(trainer.signal.seconds):
            self._end(now)
        nobody = bool(self._own_ranks) and self._save is not None and not self._save.sent
        if nobody and not self.recorder.has_stepped and waited > _STARTUP_SECONDS:
            self._end(now)  # it is still starting, and there is nothing to save
        if self._saved_since_asked() is not None and self._term_at is None:
            self._saved_at = self._saved_at or now
            if now - self._saved_at > _AFTER_SAVE_SECONDS:
                self._end(now)  # it has saved, and trains on

    def _saved_since_asked(self) -> int | None:
        """Return the step that the ranks have saved because they were asked to leave.

        A save that was on its way then has a step far below; those of trainers that count steps
        from 0 are one below.
        """
        newest = self.publisher.newest if self.publisher is not None else None
        if newest is None or newest == self._saved_before_stop:
            return None
        return newest if newest >= self._step_when_asked - 1 else None

    def _end_lingering(self, now: float) -> None:
        """End ranks that wait for nothing, when others have ended well or all is done.

        Threads of process groups keep a rank now and then that has nothing left to do. One that
        writes its last model prints nothing either, but it computes.
        """
        ticks = sum(rank.cpu_ticks() for rank in self.ranks if rank.poll() is None)
        # threads of communication libraries look around now and then
        if abs(ticks - self._ticks) > _IDLE_SHARE * _TICKS * (now - self._idle_since) + 5:
            self._ticks, self._idle_since = ticks, now
        idle = min(now - self._idle_since, self.recorder.silent_seconds) > _LINGERING_SECONDS
        ended = any(rank.poll() == 0 for rank in self.ranks)
        done = self.launch.leads and self._is_done()
        if self._starts_ranks and idle and (ended or done):
            self._lingering = True
            self._end(now)

    def _end(self, now: float) -> None:
        """Ask what is left to end, and kill it some seconds later."""
        if self._term_at is None:
            self._term_at = now
            for rank in self.ranks:
                rank.signal(signal.SIGTERM)
        elif now - self._term_at > _TERM_SECONDS:
            for rank in self.ranks:
                rank.signal(signal.SIGKILL)

    def kill(self) -> None:
        """Kill everything that is left at once."""
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)

    def forward_quit(self) -> None:
        """Have ranks write their stacks, those that have asked for it."""
        for rank in self.ranks:
            for pid in catching(rank.pid, signal.SIGQUIT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGQUIT)

    # -- the end -----------------------------------------------------------------------------

    def finish(self) -> tuple[Outcome, str | None, str | None]:
        """Publish the last checkpoint and judge the end: outcome, message, cause.

        Raises what keeps the checkpoint from being published.
        """
        if not self.launch.leads:
            if self.publisher is not None and self._failed_at is None:
                self.publisher.finish(math.inf)  # it digests its share until the first one ends
            return self._judged()
        self.recorder.phase("leaving")
        self._read_files()
        deadline = time.monotonic() + _LAST_REPORTS_SECONDS
        while self._may_hear_more() and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)
            self._read_files()
        if self.publisher is not None:
            codes = {rank.poll() for rank in self.ranks}
            asked = self._asked_at is not None and self._term_at is None  # it left by itself
            self.publisher.ended_well = codes <= {0, YIELDED} or asked
            self.publisher.finish(_LAST_CHECKPOINT_SECONDS)
            if self.publisher.missing is not None:
                print(f"hpctrain: {self.publisher.missing}", flush=True)
            if self.publisher.newest is not None:
                self.recorder.published(self.publisher.newest)
            self._refuse_earlier(self.publisher)
        with contextlib.suppress(OSError):
            self.recorder.close()
        self.recorder.write()
        return self._judged()

    def _may_hear_more(self) -> bool:
        """Whether another agent may still hand on the step that ends the run.

        Its ranks end with those of this one, and may be the ones that print.
        """
        ended_well = all(rank.poll() == 0 for rank in self.ranks)
        return ended_well and self.launch.world_size > 1 and not self._is_done()

    def _judged(self) -> tuple[Outcome, str | None, str | None]:
        codes = [rank.poll() for rank in self.ranks]
        clean = all(code == 0 for code in codes) or self._lingering
        if clean and self._is_done():
            return ("crash" if self._lost_before_done() else "done"), None, None
        if self._asked_at is not None or all(code == YIELDED for code in codes):
            return "yielded", self._left_words(), None
        if clean:
            return "crash", self._early_words(), "ended_early"
        rank = next(rank for rank in self.ranks if rank.poll() not in (0, YIELDED))
        code = rank.poll() or 0
        if code < 0:
            return "crash", None, None  # the agent's record has the signal
        if rank is not self.ray and self.ray is not None:
            records = read_agent_records(self.run, self.launch.epoch)
            if any(record.node != self.launch.node for record in records):
                return "crash", None, None  # the agent of that node has recorded why
        return "crash", rank.last_words[:500] or f"exit code {code}", None

    def _is_done(self) -> bool:
        done = self.settings.trainer.done
        if done.file is not None:
            return (self.output / done.file).exists()
        if not self.launch.leads:
            return True  # the leading agent decides
        newest = self.publisher.newest if self.publisher is not None else None
        return max(self.recorder.step, newest or 0) >= (done.step or 0)

    def _lost_before_done(self) -> bool:
        """Whether a rank of another agent had failed before all was done.

        One that fails later, while all of them end, takes nothing of the result away.
        """
        if not self.launch.leads or self.launch.world_size == 1:
            return False
        until = (self._done_since or time.time()) - _LOOK_SECONDS
        records = read_agent_records(self.run, self.launch.epoch)
        return any(record.time < until for record in records)

    def _left_words(self) -> str:
        how = self.stop.name or "control/stop"
        if (saved := self._saved_since_asked()) is not None:
            return f"asked to leave ({how}); it has saved step {saved}"
        if not self.recorder.has_stepped and self.settings.trainer.metrics:
            return f"asked to stop ({how}) before its first step"
        since = (self.publisher.newest if self.publisher is not None else None) or self.resume_step
        return f"asked to leave ({how}); it saved nothing, and steps since {since} are lost"

    def _early_words(self) -> str:
        done = self.settings.trainer.done
        asked = " after it had asked Slurm for a requeue" if self._requeue_mark.exists() else ""
        missing = self.publisher.missing if self.publisher is not None else None
        asked += f" ({missing})" if missing is not None else ""
        if done.file is not None:
            return f"the trainer ended with exit code 0{asked} and has not written {done.file}"
        return (
            f"the trainer ended with exit code 0{asked} at step {self.recorder.step} of {done.step}"
        )

    def record(self, outcome: Outcome, message: str | None, cause: str | None) -> int:
        """Write how the launch has ended here, and return the exit code of this agent."""
        code = TrainerExit.of(outcome)
        if outcome == "done" and self.launch.leads:
            outlast(self.run, self._mark_done)
        left_early = outcome == "yielded" and self.launch.leads and not self.recorder.has_stepped
        if left_early and self.settings.trainer.tells_steps:
            with contextlib.suppress(OSError):
                mark_left_startup(self.run, self.launch.epoch)
        if self.launch.leads or (message is not None and outcome not in ("done", "yielded")):
            self._write_exit(outcome, message, cause, code)
        killed = next((end for end in self._deaths if end.code < 0), None)
        if outcome == "crash" and killed is not None:
            return 128 - killed.code
        return code

    def _write_exit(
        self, outcome: Outcome, message: str | None, cause: str | None, code: int
    ) -> None:
        failed = [rank for rank in self.ranks if rank.poll() not in (0, YIELDED, None)]
        if outcome == "crash" and message is None:
            return  # a rank that was killed leaves no record
        tail = "\n".join(failed[0].tail) if failed and outcome == "crash" else None
        # as a shell has them: 128 and the signal for a process that was killed
        codes = {code if code >= 0 else 128 - code for code in (r.poll() or 0 for r in self.ranks)}
        record_exit(
            self.run,
            self.launch,
            outcome,
            rank=self._number(failed[0]) if failed else self.place.first_rank,
            step=self.recorder.step,
            exit_code=code,
            time=(failed[0].ended_at if failed else None) or time.time(),
            message=message,
            traceback=tail,
            cause=cause,
            signal=self.stop.name,
            rank_codes=tuple(sorted(codes)),
        )

    def _mark_done(self) -> None:
        newest = next(iter(good_steps(self.run.checkpoints)), None)
        name = checkpoint_name(newest) if newest is not None else ""
        step = max(self.recorder.step, newest or 0)
        marker = DoneMarker(step=step, epoch=self.launch.epoch, checkpoint=name, time=time.time())
        write_record(self.run.done, marker)


class WrongStartError(HpctrainError):
    """A trainer that has not resumed from the checkpoint that it was told to resume from."""


def _place(launch: Launch, settings: TrainerSettings, environment: Mapping[str, str]) -> Place:
    """Find the ranks of this agent: its own one below srun, else those of its node."""
    by_rank = settings.trainer.starts_by == "srun"
    gpus = settings.gpus_per_node
    return Place(
        node_rank=launch.node_rank if by_rank else launch.rank,
        nodes=launch.world_size // gpus if by_rank else launch.world_size,
        first_rank=launch.rank if by_rank else launch.rank * gpus,
        ranks_here=1 if by_rank else gpus,
        world_size=launch.world_size if by_rank else launch.world_size * gpus,
        address=environment.get("MASTER_ADDR", "127.0.0.1"),
        port=int(environment.get("MASTER_PORT") or 29500),
    )


def private_directory() -> Path:
    """Make a directory on this node, with a path that is short enough for a socket (unix(7))."""
    home = tempfile.gettempdir()
    if len(home) > _LONGEST_HOME and os.access("/tmp", os.W_OK):
        home = "/tmp"
    return Path(tempfile.mkdtemp(prefix="hpctrain-", dir=home))


@contextlib.contextmanager
def _running(program: str) -> Iterator[None]:
    """Turn the error of a program that cannot be run into InvalidInputError."""
    try:
        yield
    except (FileNotFoundError, PermissionError) as error:
        where = [Problem(f"cannot be run: {error.strerror}", program, node_dependent=True)]
        raise InvalidInputError(where) from error


def _changed_at(path: Path) -> float:
    """Return when a file was changed last; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def main(arguments: list[str], stop: StopSignals) -> int:
    """Run one agent; returns its exit code."""
    try:
        if len(arguments) != 1:
            usage = "usage: python -m hpctrain.trainer.agent RUN_DIRECTORY/train.json"
            raise InvalidInputError([Problem(usage)])
        path = Path(arguments[0]).absolute()
        run, launch = RunLayout(path.parent), read_launch(os.environ)
        if read_record(run.done, DoneMarker) is not None:
            return TrainerExit.DONE
        outlast(run, fence_of(run, launch).check)
        settings = outlast(run, lambda: trainer_settings_of(path, path.read_bytes()))
    except InvalidInputError as error:
        print(error, file=sys.stderr, flush=True)
        return TrainerExit.CONFIG_ERROR
    agent = Agent(run, launch, settings, stop)
    signal.signal(signal.SIGQUIT, lambda number, frame: agent.forward_quit())
    try:
        return _run(agent)
    finally:
        agent.kill()
        agent.close()


def _run(agent: Agent) -> int:
    """Run the launch from start to end, and record how it has ended."""
    try:
        set_gloo_interface(os.environ, agent.launch.node)
        agent.start()
        agent.watch()
        outcome, message, cause = agent.finish()
    except InvalidInputError as error:
        outcome, message, cause = "config_error", str(error), None
    except (BadCheckpointError, UnreadableCheckpointError) as error:
        cause = "bad_checkpoint" if isinstance(error, BadCheckpointError) else None
        outcome, message = "crash", str(error)
    except WrongStartError as error:
        outcome, message, cause = "crash", str(error), "starts_over"
    except RayError as error:
        outcome, message, cause = "crash", str(error), None
    except StaleEpochError as error:
        outcome, message, cause = "crash", f"stale epoch: {error}", "superseded"
    except (HpctrainError, OSError) as error:
        outcome, message, cause = "crash", str(error), "storage"
    agent.kill()
    if message is not None and (agent.launch.leads or outcome not in ("done", "yielded")):
        print(f"hpctrain: {message}", file=sys.stderr, flush=True)
    return agent.record(outcome, message, cause)


if __name__ == "__main__":
    signals = StopSignals()
    signals.install()
    leave(main(sys.argv[1:], signals))
