"""Many sequences at once over one pool of blocks: continuous batching, chunked prefill, preemption, prefix reuse, forks.

    engine = Engine(model)
    runs = [engine.add(model.encode(prompt), options) for prompt in prompts]
    for update in engine.stream():
        print(update.run, update.text)

A step feeds one token of every running sequence and fills what is left of its budget with pieces of prompts; sequences
join and leave between steps (scheduler.py has the rules). When blocks run out, the newest sequence gives its back and is
computed again later. In exact numerics none of this shows in the tokens: each sequence gets the ones that it would get
alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from nanokv.backend import to_numpy
from nanokv.errors import CapacityError, NanoKVError, UsageError
from nanokv.generate import Generation, Options
from nanokv.kv.block_pool import NULL_BLOCK
from nanokv.kv.paged import PagedCache, PagedPool
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import Batch
from nanokv.model import PREFILL_STEP, Model
from nanokv.scheduler import Scheduler


@dataclass(frozen=True)
class Update:
    """What a step did for one sequence: new text, perhaps empty, and perhaps its end (`run.finish_reason`)."""

    run: Generation
    text: str


@dataclass
class EngineStats:
    """Counts since the engine was made. Tokens that a preempted sequence computes again are `recomputed`, and what it
    finds of itself in the index is no hit: `prefix_hit_tokens` are prompt tokens that another request had computed."""

    steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    peak_blocks: int = 0
    peak_shared_blocks: int = 0
    bytes_saved: int = 0  # by blocks that stand in several tables, when it was most
    seconds: float = 0.0


@dataclass(eq=False)
class _Sequence:
    """A generation in the engine. `cache.length` of `known` tokens are computed; the phase follows from the two alone."""

    run: Generation
    cache: PagedCache
    copies: list[Generation] = field(default_factory=list)  # forks to make once the prompt is computed
    seen: int = 0  # tokens computed once, before any preemption

    @property
    def known(self) -> int:
        return len(self.run.prompt_tokens) + len(self.run.tokens)

    @property
    def pending(self) -> int:
        return self.known - self.cache.length


class _Blocks:
    """A pool of blocks as the scheduler sees it."""

    def __init__(self, pool: PagedPool, blocks_for: Callable[[int], int], prefix_caching: bool):
        self._pool, self._blocks_for, self._prefix_caching = pool, blocks_for, prefix_caching

    @property
    def num_free(self) -> int:
        return self._pool.blocks.num_free

    def needed(self, sequence: _Sequence, count: int) -> int:
        return sequence.cache.blocks_needed(count)

    def outstanding(self, sequence: _Sequence) -> int:
        held = sum(block != NULL_BLOCK for block in sequence.cache.block_table)
        return self._blocks_for(sequence.known + 1) - held

    def adopt(self, sequence: _Sequence) -> None:
        if self._prefix_caching:
            sequence.cache.adopt(sequence.run.all_tokens)

    def release(self, sequence: _Sequence) -> None:
        sequence.cache.reset()


class Engine:
    """`spec` says block size, window, sinks and codec; `num_blocks` counts the null block, None is room for 4 full texts.
    A step feeds `max_batch_tokens` at most, and `max_sequences` run at once at most (forks beside them)."""

    def __init__(
        self,
        model: Model,
        spec: CacheSpec | None = None,
        *,
        num_blocks: int | None = None,
        max_batch_tokens: int = PREFILL_STEP,
        max_sequences: int = 64,
        prefix_caching: bool = True,
    ):
        self.model = model
        self.spec = replace(spec or CacheSpec(), kind="paged")
        self._blocks_for = partial(model.blocks_for, self.spec, step=max_batch_tokens)
        if num_blocks is None:
            num_blocks = 4 * self._blocks_for(model.config.num_positions) + 1
        self.pool = model.new_pool(num_blocks, self.spec)
        self.stats = EngineStats()
        self._prefix_caching = prefix_caching
        blocks = _Blocks(self.pool, self._blocks_for, prefix_caching)
        self._scheduler: Scheduler[_Sequence] = Scheduler(blocks, max_batch_tokens, max_sequences)
        self._waiting, self._running = self._scheduler.waiting, self._scheduler.running

    @property
    def _block_bytes(self) -> float:
        return self.pool.block_size * self.pool.storage.bytes_per_token

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, prompt: Sequence[int], options: Options | None = None, n: int = 1) -> list[Generation]:
        """Queues a prompt; `n` continuations of it share its blocks. Each has a seed of its own, made from the given one.

        Raises what Generation does for a bad request, UsageError for copies that would be equal, and CapacityError for one
        that could never fit in the pool.
        """
        options = options or Options()
        if n < 1:
            raise UsageError(f"n {n} is out of range: it must be at least 1")
        if n > 1 and options.sampling.temperature == 0:
            raise UsageError(f"{n} greedy continuations would be equal: set a temperature")
        runs = [Generation(self.model, list(prompt), seeded(options, i), self.spec) for i in range(n)]
        usable = self.pool.blocks.num_blocks - 1
        needed = self._blocks_for(runs[0].longest)
        if needed > usable:
            raise CapacityError(
                f"prompt and output can come to {runs[0].longest} tokens, {needed} blocks, and the pool has {usable}: "
                "lower max-tokens or enlarge the pool"
            )
        if runs[0].finish_reason is None:
            self._waiting.append(_Sequence(runs[0], self.pool.new_sequence(), runs[1:]))
            self.stats.prompt_tokens += len(prompt)
        return runs

    def cancel(self, run: Generation) -> None:
        """Ends a generation and gives its blocks back; copies of it that were not made yet take its place."""
        for queue in (self._running, self._waiting):
            for sequence in list(queue):
                if sequence.run is run:
                    if sequence.copies:
                        sequence.run = sequence.copies.pop(0)
                    else:
                        sequence.cache.reset()
                        queue.remove(sequence)
                elif run in sequence.copies:
                    sequence.copies.remove(run)
        run.interrupt()

    def fork(self, run: Generation, seed: int | None = None) -> Generation:
        """A copy of a running generation that goes its own way from here, sharing every block."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.run is run:
                break
        else:
            raise UsageError("only a generation that this engine has not ended can be forked")
        options = replace(run.options, sampling=replace(run.options.sampling, seed=seed))
        child = run.fork(options)
        twin = _Sequence(child, sequence.cache.fork(), seen=sequence.seen)
        if sequence in self._running:
            self._running.append(twin)
        else:
            self._waiting.append(twin)
        return child

    def report(self) -> list[tuple[str, str]]:
        """Name and value of each line that `generate --stats` shows for an engine."""
        stats, pool = self.stats, self.pool
        rate = stats.computed_tokens / stats.seconds if stats.seconds else 0.0
        return [
            ("steps", f"{stats.steps}, {stats.computed_tokens} tokens computed, {rate:,.0f} tokens/s"),
            ("prefix hits", f"{stats.prefix_hit_tokens} of {stats.prompt_tokens} prompt tokens"),
            ("preempted", f"{stats.preemptions} times, {stats.recomputed_tokens} tokens recomputed"),
            ("blocks", f"{stats.peak_blocks} of {pool.blocks.num_blocks - 1} at most, {self._block_bytes:,.0f} bytes each"),
            ("shared", f"{stats.peak_shared_blocks} blocks at most, {stats.bytes_saved:,} bytes saved"),
            ("KV cache", f"paged, {pool.codec.name}: {pool.storage.bytes_per_token:,.0f} bytes a token"),
        ]

    def step(self) -> list[Update]:
        """One forward pass; what it made. Empty when there is nothing to do."""
        plan = self._scheduler.schedule()
        self.stats.preemptions = self._scheduler.preemptions
        if not plan:
            if self.has_work:  # add() checked that each fits alone, so one can always go on
                raise NanoKVError("the engine found nothing that fits in its pool: this is a fault of nanokv")
            return []
        if self._prefix_caching:
            for sequence, _ in plan:
                sequence.cache.publish(sequence.run.all_tokens)
        start = time.perf_counter()
        tokens = [token for sequence, count in plan for token in self._next_tokens(sequence, count)]
        ends = np.cumsum([count for _, count in plan]) - 1
        done = [sequence.pending == count for sequence, count in plan]  # whose last known token is computed now
        batch = Batch([(sequence.cache, count) for sequence, count in plan])
        rows = [int(end) for end, last in zip(ends, done, strict=True) if last]
        finished = [sequence for (sequence, _), last in zip(plan, done, strict=True) if last]
        found = self._compute(tokens, batch, rows, [sequence.run for sequence in finished])
        elapsed = time.perf_counter() - start
        self._count(plan, len(tokens))
        self.stats.seconds += elapsed
        for sequence, _ in plan:
            sequence.run.spend(elapsed)
        copies = self._fork_copies(finished)
        updates = []
        for sequence, row in zip(finished, found, strict=True):
            updates += self._advance(sequence, copies.get(sequence, []), row)
        return updates

    def stream(self) -> Iterator[Update]:
        """Steps until all is done."""
        while self.has_work:
            yield from self.step()

    def generate(self, prompts: Sequence[str | Sequence[int]], options: Options | None = None) -> list[Generation]:
        """Continues all prompts to the end, together."""
        ids = [self.model.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        runs = [self.add(prompt, options)[0] for prompt in ids]
        for _ in self.stream():
            pass
        return runs

    def _next_tokens(self, sequence: _Sequence, count: int) -> list[int]:
        start = sequence.cache.length
        return sequence.run.all_tokens[start : start + count]

    def _compute(self, tokens: list[int], batch: Batch, rows: list[int], runs: list[Generation]) -> Sequence[np.ndarray | int]:
        """The step; for each of `rows`, whose generations are `runs`, its logits [V], or the best token where that is all that
        any of them takes."""
        if not rows:
            self.model.hidden_states(tokens, batch)
            return []
        if all(run.takes_best for run in runs):
            best: list[int] = self.model.best(tokens, batch, rows).tolist()
            return best
        return list(to_numpy(self.model.forward(tokens, batch, rows)))

    def _count(self, plan: list[tuple[_Sequence, int]], tokens: int) -> None:
        stats, pool = self.stats, self.pool.blocks.stats()
        stats.steps += 1
        stats.computed_tokens += tokens
        for sequence, count in plan:
            before = sequence.cache.length - count
            if sequence.seen == 0:  # its first step: what it begins with, it found
                stats.prefix_hit_tokens += before
            stats.recomputed_tokens += max(0, min(sequence.seen, sequence.cache.length) - before)
            sequence.seen = max(sequence.seen, sequence.cache.length)
        stats.peak_blocks = max(stats.peak_blocks, pool.used)
        stats.peak_shared_blocks = max(stats.peak_shared_blocks, pool.shared)
        held = sum(block != NULL_BLOCK for sequence in self._running for block in sequence.cache.block_table)
        stats.bytes_saved = max(stats.bytes_saved, round((held - pool.used) * self._block_bytes))

    def _fork_copies(self, finished: list[_Sequence]) -> dict[_Sequence, list[_Sequence]]:
        """The copies of the sequences whose prompt is computed now, as sequences of their own. Where there is no memory for
        them, none is made, and the step's logits are lost with its error: their sequences are computed again."""
        made: dict[_Sequence, list[_Sequence]] = {sequence: [] for sequence in finished if sequence.copies}
        try:
            for sequence, twins in made.items():
                for run in sequence.copies:
                    twins.append(_Sequence(run, sequence.cache.fork(), seen=sequence.seen))
        except Exception:
            for twin in (twin for twins in made.values() for twin in twins):
                twin.cache.reset()
            for sequence in reversed(finished):
                self._scheduler.preempt(self._running.index(sequence))
            raise
        return made

    def _advance(self, sequence: _Sequence, copies: list[_Sequence], found: np.ndarray | int) -> list[Update]:
        """The next token of a sequence, and of its copies, which split off here."""
        self._running.extend(copies)
        sequence.copies = []
        updates = []
        for twin in (sequence, *copies):
            run = twin.run
            updates.append(Update(run, run.advance(found)))
            run.note_cache(twin.cache)
            if run.finish_reason:
                twin.cache.reset()
                self._running.remove(twin)
        return updates


def engine_for(model: Model, spec: CacheSpec, prompt_lengths: Sequence[int], options: Options, copies: int = 1) -> Engine:
    """An engine whose pool holds all of these prompts and their copies to the end, when none shares a block.

    One block more for each sequence: while copies split, the shared block and all that replace it are held at once.
    """
    blocks = sum(model.blocks_for(spec, length + options.max_tokens) + 1 for length in prompt_lengths)
    return Engine(model, spec, num_blocks=copies * blocks + 1, max_batch_tokens=PREFILL_STEP)


def seeded(options: Options, index: int) -> Options:
    """The options of copy `index`: its seed is made from the given one, which the first copy keeps."""
    seed = options.sampling.seed
    if seed is None or index == 0:
        return options
    child = int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0])
    return replace(options, sampling=replace(options.sampling, seed=child))
