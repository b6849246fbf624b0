"""The canonical softmax and choice of docs/numerics.md in plain NumPy, slow and readable. Symbols: V vocabulary."""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from nanokv.sampling import SamplingParams
from tests.kernels.oracle import LOWEST, F, exp, lanes_sum

PIECE = 1024


def long_sum(x: np.ndarray) -> np.float32:
    """[n] -> its sum by the long sum rule."""
    total = F(0)
    for start in range(0, len(x), PIECE):
        total = total + lanes_sum(x[start : start + PIECE])
    return total


def softmax(x: np.ndarray) -> np.ndarray:
    """[V] -> [V]"""
    with np.errstate(invalid="ignore", over="ignore"):
        weights = exp(x - np.fmax.reduce(x, initial=LOWEST))
        total = long_sum(weights)
        return np.zeros_like(x) if total == 0 else weights / total


def scores(logits: np.ndarray, history: list[int], penalty: np.float32) -> np.ndarray:
    """[V] -> [V]: tokens that occurred made less likely."""
    seen = np.isin(np.arange(len(logits)), history)
    with np.errstate(all="ignore"):
        return np.where(seen & (penalty != 1), np.where(logits > 0, logits / penalty, logits * penalty), logits)


def weights(scores: np.ndarray, temperature: np.float32) -> np.ndarray:
    """[V] -> [V]: probabilities but for a common factor; the best score is finite and weighs 1."""
    with np.errstate(all="ignore"):
        x = (scores - np.nanmax(scores)) / temperature
        return np.where(x <= 0, exp(np.where(x <= 0, x, F(0))), F(0))


def choose(logits: np.ndarray, params: SamplingParams, history: list[int], uniform: float) -> int:
    """Logits [V] float32 after `history` -> the token for a uniform number."""
    numbers = params.temperature, params.top_p, params.min_p, params.repetition_penalty, uniform
    temperature, top_p, min_p, penalty, u = (F(number) for number in numbers)
    found = scores(logits, history, penalty)
    known = np.where(np.isnan(found), -np.inf, found)
    best = int(known.argmax())
    if temperature == 0 or not np.isfinite(known[best]):
        return best
    w = weights(found, temperature)
    order = np.argsort(-w, kind="stable")  # larger weight first, of equal ones the lower id

    def mass(count: int) -> np.float32:
        """What the first tokens of the order weigh: the long sum over all ids, those that are not among them as zeros."""
        first = np.zeros_like(w)
        first[order[:count]] = w[order[:count]]
        return long_sum(first)

    def shortest(reaches: Callable[[np.float32], bool]) -> int:
        """The fewest first tokens, one or more, whose mass reaches; a longer prefix never weighs less."""
        return 1 + bisect_left(range(1, len(w)), True, key=lambda count: bool(reaches(mass(count))))

    kept = min(params.top_k, len(w)) if params.top_k else len(w)
    if top_p < 1:
        goal = top_p * mass(kept)
        kept = shortest(lambda found: found >= goal)
    kept = min(kept, int(np.count_nonzero(w >= min_p)))
    drawn = np.clip(u, F(0), np.nextafter(F(1), F(0))) * mass(kept)
    return int(order[shortest(lambda found: found > drawn) - 1])
