"""Beam search over forks: beams share the blocks of what they have in common, and copy a block only to differ in it.

The rules are those of transformers (early_stopping False): of the best candidates of all beams, those that end, by an
end-of-text token or by the limit, are finished with score = log-probability / length ** length_penalty if they are among
the best `beams`; the best that do not end go on. The search stops when no running beam can beat the worst of `beams`
finished ones at its present length. Length counts output tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nanokv.backend import to_numpy
from nanokv.errors import UsageError
from nanokv.generate import Generation, Options
from nanokv.kv.paged import PagedCache
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import Batch
from nanokv.model import PREFILL_STEP, Model
from nanokv.sampling import log_softmax


@dataclass(frozen=True)
class Beam:
    """A finished continuation. `logprob` is the sum over its tokens; the score divides it by length ** length_penalty."""

    tokens: list[int]
    text: str
    logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True)
class BeamResult:
    """Beams, best first, and what sharing saved at its peak: blocks counted once for each table, and once each."""

    beams: list[Beam]
    peak_table_blocks: int
    peak_blocks: int
    bytes_saved: int

    def report(self) -> list[tuple[str, str]]:
        """Name and value of each line that `generate --beams --stats` shows."""
        best = self.beams[0]
        return [
            (
                "best",
                f"{len(best.tokens)} tokens, log-probability {best.logprob:.3f}, score {best.score:.4f}, {best.finish_reason}",
            ),
            (
                "blocks",
                f"{self.peak_table_blocks} in all tables, {self.peak_blocks} in memory: {self.bytes_saved:,} bytes saved",
            ),
        ]


@dataclass
class _Running:
    tokens: list[int]
    logprob: float
    cache: PagedCache


def beam_search(
    model: Model, prompt: Sequence[int], options: Options, spec: CacheSpec, beams: int = 4, length_penalty: float = 1.0
) -> BeamResult:
    """The `beams` best continuations found. Raises UsageError for flags that do not go with beams, and for more beams than the
    model has tokens to begin a text with, or than a step may have rows."""
    most = min(model.config.vocab_size, PREFILL_STEP)
    if not 2 <= beams <= most:
        raise UsageError(f"beams {beams} is out of range: 2 to {most} with this model")
    if not math.isfinite(length_penalty):
        raise UsageError(f"length-penalty {length_penalty} is out of range: it must be a finite number")
    sampling = options.sampling
    if sampling.temperature or sampling.top_k or sampling.top_p < 1 or sampling.min_p or sampling.repetition_penalty != 1:
        raise UsageError("beam search takes the most likely texts: leave out temperature, top-k, top-p, min-p and penalties")
    if options.stop or options.logprobs:
        raise UsageError("beam search does not take stop strings or logprobs")
    limit = Generation(model, list(prompt), options, spec).longest - len(prompt)  # checks the request
    if limit < 1:
        raise UsageError(f"the prompt fills all {len(prompt)} positions of the model: nothing can follow")
    ends = frozenset() if options.ignore_eos else model.eos_token_ids
    pool = model.new_pool((2 * beams + 1) * model.blocks_for(spec, len(prompt) + limit) + 1, spec)
    first = pool.new_sequence()
    logits = to_numpy(model.prefill(prompt, first))[None]
    running, finished = [_Running([], 0.0, first)], list[Beam]()
    peak_tables = peak_blocks = 0
    for length in range(1, limit + 1):
        totals = np.stack([beam.logprob + log_softmax(row) for beam, row in zip(running, logits, strict=True)])
        keep = max(2, 1 + len(ends)) * beams
        best = np.argsort(-totals, axis=None, kind="stable")[:keep]
        going: list[tuple[int, int, float]] = []
        for rank, (parent, token) in enumerate(zip(*np.unravel_index(best, totals.shape), strict=True)):
            logprob = float(totals[parent, token])
            ended = "eos" if int(token) in ends else "length" if length == limit else None
            if ended is None:
                going.append((int(parent), int(token), logprob))
            elif rank < beams:
                tokens = [*running[parent].tokens, int(token)]
                text = model.decode(tokens[:-1] if ended == "eos" else tokens, len(prompt) > len(model.prefix))
                finished.append(Beam(tokens, text, logprob, logprob / length**length_penalty, ended))
        finished = sorted(finished, key=lambda beam: -beam.score)[:beams]
        going = going[:beams]
        if not going or (len(finished) == beams and going[0][2] / length**length_penalty <= finished[-1].score):
            break
        children = [_Running([*running[p].tokens, token], logprob, running[p].cache.fork()) for p, token, logprob in going]
        for beam in running:
            beam.cache.reset()
        running = children
        batch = Batch([(beam.cache, 1) for beam in running])
        logits = to_numpy(model.forward([beam.tokens[-1] for beam in running], batch))
        tables, used = sum(len(beam.cache.block_table) for beam in running), pool.blocks.stats().used
        if tables - used >= peak_tables - peak_blocks:
            peak_tables, peak_blocks = tables, used
    saved = (peak_tables - peak_blocks) * pool.block_size * pool.storage.bytes_per_token
    return BeamResult(finished, peak_tables, peak_blocks, round(saved))
