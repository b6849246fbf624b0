"""From logits to the next token: penalties, temperature, filters, and a draw that a seed repeats.

Everything happens in float64 on the host. The order is the one of transformers: repetition penalty, temperature, top-k,
top-p, min-p. Symbols: V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nanokv.errors import UsageError


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next token. The defaults are greedy decoding: the most likely token, the lowest id of equals.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 change nothing. The same seed gives the
    same tokens; None draws a fresh one. Raises UsageError for a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        checks = [
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 (greedy) or a positive number"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (off) or a positive whole number"),
            ("top-p", self.top_p, 0 <= self.top_p <= 1, "between 0 and 1"),
            ("min-p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition-penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "a positive number"),
            ("seed", self.seed, self.seed is None or self.seed >= 0, "0 or a positive whole number"),
        ]
        for name, value, ok, allowed in checks:  # NaN fails every comparison
            if not ok:
                raise UsageError(f"{name} {value} is out of range: it must be {allowed}")

    @property
    def takes_best(self) -> bool:
        """Whether the choice is the largest logit, whatever came before."""
        return self.temperature == 0 and self.repetition_penalty == 1


class Sampler:
    """Chooses the tokens of one sequence; holds nothing but its own random generator."""

    def __init__(self, params: SamplingParams):
        self.params = params
        self._rng = np.random.default_rng(params.seed)

    def choose(self, logits: np.ndarray, history: Sequence[int]) -> int:
        """Host logits [V] after the tokens `history` (prompt and output) -> a token id."""
        params = self.params
        scores = penalise_repetition(logits.astype(np.float64), history, params.repetition_penalty)
        if params.temperature == 0:
            return int(scores.argmax())
        probabilities = softmax(scores / params.temperature)
        ids = np.argsort(-probabilities, kind="stable")[: count_kept(-np.sort(-probabilities), params)]
        cumulative = np.cumsum(probabilities[ids])
        return int(ids[np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right")])


def count_kept(probabilities: np.ndarray, params: SamplingParams) -> int:
    """How many of the probabilities [V], given in falling order, pass top-k, top-p and min-p: at least one.

    Top-k counts tokens. Top-p keeps the fewest that together reach p of what top-k left (Holtzman et al. 2020, arXiv
    1904.09751). Min-p drops those less likely than p times the most likely (Nguyen et al. 2024, arXiv 2407.01082).
    """
    kept = min(params.top_k, len(probabilities)) if params.top_k else len(probabilities)
    if params.top_p < 1:
        cumulative = np.cumsum(probabilities[:kept])
        kept = int(np.searchsorted(cumulative, params.top_p * cumulative[-1], side="left")) + 1
    if params.min_p > 0:
        kept = min(kept, int(np.count_nonzero(probabilities >= params.min_p * probabilities[0])))
    return max(1, kept)


def penalise_repetition(logits: np.ndarray, history: Sequence[int], penalty: float) -> np.ndarray:
    """Logits [V] of tokens that already occurred made less likely (Keskar et al. 2019, arXiv 1909.05858): positive ones
    divided by the penalty, negative ones multiplied, once however often the token occurred."""
    if penalty == 1:
        return logits
    seen = np.unique(np.asarray(history, dtype=np.int64))
    out = logits.copy()
    out[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    return out


def softmax(logits: np.ndarray) -> np.ndarray:
    """[V] -> [V], in float64."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """[V] -> [V]: natural logarithms of the probabilities, in float64."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


class StopStrings:
    """Watches a stream of text for strings that end it, even where they span pieces.

    Only what could still become a stop string is held back, and nothing of one is ever given out.
    """

    def __init__(self, stops: Sequence[str]):
        if any(not stop for stop in stops):
            raise UsageError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that may be shown after `piece` came; once `stopped` is true it is the last."""
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        """What was held back when the stream ended for another reason."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
