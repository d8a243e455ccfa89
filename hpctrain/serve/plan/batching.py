"""Simulate one replica's continuous batching: iterations, chunks of prompts, memory of keys.

The rules are those of vLLM's scheduler (vllm/v1/core/sched/scheduler.py): decoding sequences first,
one token each; what is left of the token budget goes to the prompt that was begun, then to waiting
ones in the order of arrival, the last of which may be cut (chunked prefill). A prompt is admitted
when its keys fit. If the keys of decoding sequences no longer fit, the sequence that was admitted
last gives up its memory, waits in front of the others, and is computed again.

Belongs here: what is in each iteration, and when requests begin and end. Does not belong here: how
long an iteration takes (`step_time`), which replica gets a request (`routing`), quantiles
(`promises`). Times are seconds, and only differ where an iteration ends.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from hpctrain.serve.plan.step_time import IterationTable

BLOCK_TOKENS = 16  # of a block of the KV cache (vLLM's --block-size); half of the last one is empty
_NEVER = math.inf
_NOBODY = -1


@dataclass(frozen=True)
class BatchLimits:
    """What one iteration may hold at most, and the tokens whose keys fit into memory."""

    max_sequences: int
    batch_tokens: int
    kv_capacity_tokens: float


class Journal:
    """The requests of a simulation and what has become of them; shared by all replicas.

    Lists are by the number of the request. `first_token` and `finished` are seconds. The keys of
    the first `prefilled` prompts come from elsewhere, and only their last token is computed.
    """

    def __init__(
        self,
        prompt_tokens: list[int],
        output_tokens: list[int],
        shared_prefix_tokens: int = 0,
        prefilled: int = 0,
    ) -> None:
        count = len(prompt_tokens)
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.shared_prefix_tokens = shared_prefix_tokens
        self.prefilled = prefilled
        self.produced = [0] * count  # tokens of the answer
        self.first_token = [_NEVER] * count
        self.finished = [_NEVER] * count


class Replica:
    """One replica of a simulation, whose iterations follow each other while it has requests.

    Iterations without prompts are run in one stretch, up to the end of a sequence or to the next
    request. `clock` is the end of the last stretch, `next_event` that of the one under way.
    `loads[index]` counts its requests that have come and are not answered; it does not change
    before `next_event` but by new ones.
    """

    __slots__ = (
        *("table", "limits", "journal", "loads", "index", "clock", "next_event", "waiting"),
        *("iterations", "prompt_tokens_computed", "output_tokens_produced"),
        *("preemptions", "most_kv_tokens", "_decoding", "_context", "_kv_used", "_partial"),
        *("_computed", "_needed", "_ends", "_order", "_admission", "_begun", "_admissions"),
        *("_prefix_ready", "_steps", "_first", "_growth", "_chunks", "_done", "_cuttable"),
    )

    def __init__(
        self,
        table: IterationTable,
        limits: BatchLimits,
        journal: Journal,
        loads: list[int],
        index: int,
    ) -> None:
        """Make the replica of `loads[index]`, where a router looks."""
        self.table, self.limits, self.journal = table, limits, journal
        self.loads, self.index = loads, index
        self.clock, self.next_event = 0.0, _NEVER
        self.waiting: deque[int] = deque()
        self.iterations = 0
        self.prompt_tokens_computed = 0
        self.output_tokens_produced = 0
        self.preemptions = 0
        self.most_kv_tokens = 0.0
        self._decoding = 0  # sequences
        self._context = 0.0  # their tokens
        self._kv_used = 0.0  # tokens of all that run, and of the shared prefix
        self._partial = _NOBODY  # the request whose prompt has been begun
        self._computed = 0  # tokens of it
        self._needed = 0
        self._ends: list[tuple[int, int, int]] = []  # iteration, request, its admission
        self._order: list[tuple[int, int]] = []  # request and admission, oldest first
        self._admission: dict[int, int] = {}  # of those that run
        self._begun: dict[int, int] = {}  # iteration in which each began to decode
        self._admissions = 0
        self._prefix_ready = False
        # The stretch under way: its iterations (0: none), seconds of the first, and what each of
        # the others takes longer than the one before; its prompts; whether a request may cut it.
        self._steps = 0
        self._first = self._growth = 0.0
        self._chunks = 0
        self._done: list[int] = []
        self._cuttable = False

    def submit(self, request: int, seconds: float) -> None:
        """Take a request that arrives at `seconds`, up to which the replica has been advanced."""
        self.waiting.append(request)
        self.loads[self.index] += 1
        if self.next_event == _NEVER:
            self.clock = self.next_event = seconds
        elif self._cuttable and self._steps > 1:
            steps = _steps_within(seconds - self.clock, self._first, self._growth)
            if steps < self._steps:
                self._steps = steps = max(1, steps)
                lasting = steps * (self._first + self._growth * (steps - 1) / 2)
                self.next_event = self.clock + lasting

    def advance(self, until: float) -> list[int]:
        """Run what ends up to `until`, and begin what begins before; return what was answered."""
        answered: list[int] = []
        while True:
            if self._steps:
                if self.next_event > until:
                    return answered
                answered += self._end()
            if self.next_event >= until:
                return answered
            self._begin()

    def _begin(self) -> None:
        """Begin an iteration with prompts, or a stretch without."""
        chunks, pairs = 0, 0.0
        if self.waiting or self._partial != _NOBODY or self._is_full():
            chunks, pairs = self._schedule()
        count, table = self._decoding, self.table
        row = table.cells[table.prompt_cell[chunks]]
        start, per_prompt, per_sequence, both, per_key, per_pair = row[table.sequence_cell[count]]
        first = start + per_sequence * count + per_key * self._context
        if chunks:
            first += (per_prompt + both * count) * chunks + per_pair * pairs
            steps = 1
        else:
            ends = self._ends
            while self._admission.get(ends[0][1]) != ends[0][2]:
                heappop(ends)
            room = int((self.limits.kv_capacity_tokens - self._kv_used) // count)
            steps = max(1, min(ends[0][0] - self.iterations, room))
        self._steps, self._chunks = steps, chunks
        self._first, self._growth = first, per_key * count
        self._cuttable = not self.waiting
        self.next_event = self.clock + steps * (first + self._growth * (steps - 1) / 2)

    def _end(self) -> list[int]:
        """End the stretch under way: tokens, first tokens, and answers, which are returned."""
        steps, count = self._steps, self._decoding
        self.clock = self.next_event
        self.iterations += steps
        self.prompt_tokens_computed += self._chunks
        self.output_tokens_produced += steps * count
        self._context += steps * count
        self._kv_used += steps * count
        if self._kv_used > self.most_kv_tokens:
            self.most_kv_tokens = self._kv_used
        self._steps = 0
        done, ended = self._done, []
        if done:
            ended = self._end_prompts(done)
            self._done = []
        if self._ends and self._ends[0][0] <= self.iterations:
            ended += self._end_sequences()
        if ended:
            for request in ended:
                self.journal.finished[request] = self.clock
                del self._admission[request]
            self.loads[self.index] -= len(ended)
            if not self.loads[self.index]:
                self.next_event = _NEVER
        return ended

    def _is_full(self) -> bool:
        """Whether one more token of each decoding sequence does not fit."""
        return self._kv_used + self._decoding > self.limits.kv_capacity_tokens

    def _schedule(self) -> tuple[int, float]:
        """Fill one iteration with prompts; return their tokens and pairs of tokens and keys."""
        preempted = self._make_room()
        room = self.limits.batch_tokens - self._decoding
        chunks, pairs = 0, 0.0
        if self._partial != _NOBODY and room > 0:
            chunks = min(room, self._needed - self._computed)
            pairs = chunks * (self._computed + chunks / 2)
            room -= chunks
            self._computed += chunks
            if self._computed == self._needed:
                self._done.append(self._partial)
                self._partial = _NOBODY
        running = self._decoding + len(self._done) + (self._partial != _NOBODY)
        most = self.limits.max_sequences
        while self.waiting and room > 0 and running < most and not preempted:
            request = self.waiting[0]
            cached = self._admit(request, running)
            if cached < 0:
                break
            self.waiting.popleft()
            needed = self.journal.prompt_tokens[request] + self.journal.produced[request]
            chunk = min(room, needed - cached)
            chunks += chunk
            pairs += chunk * (cached + chunk / 2)
            room -= chunk
            running += 1
            if cached + chunk == needed:
                self._done.append(request)
            else:
                self._partial, self._computed, self._needed = request, cached + chunk, needed
        return chunks, pairs

    def _admit(self, request: int, running: int) -> int:
        """Give a request its memory; return how many of its tokens are known, -1 for no room."""
        journal = self.journal
        prompt, produced = journal.prompt_tokens[request], journal.produced[request]
        shared = min(journal.shared_prefix_tokens, prompt - 1)
        wanted = prompt + produced - shared + BLOCK_TOKENS // 2
        cached = shared
        if not self._prefix_ready:
            wanted += journal.shared_prefix_tokens
            cached = 0
        if self._kv_used + wanted > self.limits.kv_capacity_tokens:
            assert running, "the memory holds the longest request"
            return -1
        self._prefix_ready = journal.shared_prefix_tokens > 0
        self._kv_used += wanted
        self._admissions += 1
        self._admission[request] = self._admissions
        self._order.append((request, self._admissions))
        elsewhere = request < journal.prefilled and not produced
        return prompt - 1 if elsewhere else cached

    def _make_room(self) -> bool:
        """Preempt the sequences admitted last until one more token of each other one fits."""
        preempted = False
        while self._is_full():
            request, admission = self._order.pop()
            if self._admission.get(request) != admission:
                continue
            assert len(self._admission) > 1, "the memory holds the longest request"
            preempted = True
            self.preemptions += 1
            del self._admission[request]
            self._kv_used -= self._own_tokens(request)
            if request == self._partial:
                self._partial = _NOBODY
            else:
                self._settle(request)
            self.waiting.appendleft(request)
        return preempted

    def _own_tokens(self, request: int) -> float:
        """Count the keys that a running request has of its own."""
        journal = self.journal
        prompt = journal.prompt_tokens[request]
        shared = min(journal.shared_prefix_tokens, prompt - 1)
        produced = journal.produced[request]
        if request in self._begun:
            produced += self.iterations - self._begun[request]
        return prompt - shared + produced + BLOCK_TOKENS // 2

    def _settle(self, request: int) -> None:
        """Take a sequence out of those that decode, and write down what it has produced."""
        journal = self.journal
        journal.produced[request] += self.iterations - self._begun.pop(request)
        self._decoding -= 1
        self._context -= journal.prompt_tokens[request] + journal.produced[request]

    def _end_prompts(self, done: list[int]) -> list[int]:
        """Give completed prompts their first token; return those that need no other."""
        journal, ended = self.journal, []
        for request in done:
            produced = journal.produced[request] = journal.produced[request] + 1
            self.output_tokens_produced += 1
            if journal.first_token[request] == _NEVER:
                journal.first_token[request] = self.clock
            left = journal.output_tokens[request] - produced
            if left > 0:
                self._decoding += 1
                self._context += journal.prompt_tokens[request] + produced
                self._kv_used += 1
                self._begun[request] = self.iterations
                heappush(self._ends, (self.iterations + left, request, self._admission[request]))
            else:
                self._kv_used -= self._own_tokens(request) - 1
                ended.append(request)
        return ended

    def _end_sequences(self) -> list[int]:
        """Take out the sequences whose last token this stretch has made."""
        ends, ended = self._ends, []
        while ends and ends[0][0] <= self.iterations:
            _, request, admission = heappop(ends)
            if self._admission.get(request) == admission:
                self._kv_used -= self._own_tokens(request)
                self._settle(request)
                ended.append(request)
        return ended


def _steps_within(seconds: float, first: float, growth: float) -> int:
    """Count the iterations that begin within `seconds`: the first takes `first`, each more later.

    The least m with m first + growth m (m - 1) / 2 >= seconds.
    """
    if growth <= 0:
        return math.ceil(seconds / first)
    half = first - growth / 2
    return math.ceil((math.sqrt(half * half + 2 * growth * seconds) - half) / growth)
