"""Softmax and sampling on the CPU: the canonical rule's bits, and the choice of nanokv.sampling.Sampler."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from nanokv.card_sampling import host_choice, seen_bits
from nanokv.errors import UsageError
from nanokv.kernels.cuda import launches
from nanokv.sampling import Sampler, SamplingParams, count_kept, penalise_repetition
from nanokv.sampling import softmax as exact_softmax
from tests.cuda.machine import ORDERS, CpuDevice
from tests.kernels import sampling_oracle as oracle
from tests.support import examples

pytest.importorskip("numba", exc_type=ImportError)
from nanokv.kernels.softmax import softmax as compiled_softmax

UNIT = 2.0**-24  # of float32's roundings
EXP_ERROR, EXP_END = 1e-7, 2e-38  # of exp: relative, and what is dropped below -87 (docs/numerics.md)
VOCABULARIES = st.one_of(st.integers(1, 140), st.sampled_from([1023, 1024, 1025, 1088, 3000]))
SEEDS = st.integers(0, 1 << 30)


def some_logits(rng: np.random.Generator, vocab: int, kind: str) -> np.ndarray:
    if kind == "equal":
        return np.full(vocab, np.float32(rng.normal()))
    logits = rng.standard_normal(vocab, dtype=np.float32) * np.float32(4)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "hidden":
        logits[rng.random(vocab) < 0.5] = -np.inf
    if kind == "wild":
        logits *= np.float32(10) ** rng.integers(-40, 35, vocab).astype(np.float32)
    if kind == "steep":
        logits *= np.float32(30)
    if kind == "not finite":
        logits[rng.random(vocab) < 0.3] = np.nan
        logits[rng.random(vocab) < 0.1] = rng.choice(np.array([np.inf, -np.inf, np.nan], np.float32))
    if kind == "nothing":
        logits[:] = -np.inf
    return logits


KINDS = ["normal", "normal", "ties", "hidden", "wild", "steep", "equal", "not finite", "nothing"]


def softmax_on_card(x: np.ndarray, order: str = "forwards", entries: dict | None = None) -> np.ndarray:
    out = np.full(x.shape, np.nan, np.float32)
    launches.softmax(CpuDevice(order, entries), x, out)
    return out


@examples(15)
@given(st.integers(1, 3), VOCABULARIES, st.sampled_from(KINDS), st.sampled_from(list(ORDERS)), SEEDS)
def test_softmax_is_the_oracles_on_cpu_and_card(rows, vocab, kind, order, seed):
    rng = np.random.default_rng(seed)
    x = np.stack([some_logits(rng, vocab, kind) for _ in range(rows)])
    expected = np.stack([oracle.softmax(row) for row in x])
    assert np.array_equal(compiled_softmax(x), expected, equal_nan=True)
    assert np.array_equal(softmax_on_card(x, order), expected, equal_nan=True)


def long_sum_steps(vocab: int) -> int:
    """Additions that a number passes in the long sum rule: its lane's 16, the lanes' 6, one a piece."""
    return 16 + 6 + -(-vocab // oracle.PIECE)


def gamma(steps: int) -> float:
    return steps * UNIT / (1 - steps * UNIT)


@examples(10)
@given(st.sampled_from([1, 50, 2000, 20000]), st.sampled_from(["normal", "hidden", "steep", "equal"]), SEEDS)
def test_softmax_keeps_its_bound(vocab, kind, seed):
    """Against float64: the difference x - m is rounded once, which exp turns into a relative error of u |x - m|; exp has its
    own; the sum gamma of its steps, the division one rounding."""
    x = some_logits(np.random.default_rng(seed), vocab, kind)
    x[0] = 1
    shifted = x.astype(np.float64) - x.max()
    truth = np.exp(shifted) / np.exp(shifted).sum()
    with np.errstate(invalid="ignore"):
        own = np.where(np.isfinite(shifted), np.expm1(UNIT * np.abs(shifted)), 0) + EXP_ERROR
    near = float((own * truth).sum()) + vocab * EXP_END  # relative error of the sum's terms
    bound = truth * (own + near + gamma(long_sum_steps(vocab)) + UNIT) * 1.01 + EXP_END  # 1.01: products of these errors
    assert (np.abs(compiled_softmax(x[None])[0] - truth) <= bound).all()


def float32s(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


TOP_P = st.one_of(st.just(1.0), st.just(0.0), float32s(0, 1))
TEMPERATURE = st.one_of(float32s(0.5, 2), st.sampled_from([0.0, 1.0, 2.0**-140, 2.0**-20, 100.0, 2.0**100]))
PARAMS = st.builds(
    SamplingParams,
    temperature=TEMPERATURE,
    top_k=st.one_of(st.just(0), st.integers(1, 5), st.integers(1, 5000)),
    top_p=TOP_P,
    min_p=st.one_of(st.just(0.0), float32s(0, 1)),
    repetition_penalty=st.one_of(st.just(1.0), float32s(0.5, 2)),
)
UNIFORMS = st.one_of(float32s(0, 1), st.sampled_from([0.0, 1.0, 1 - 2.0**-24, 2.0**-149]))


def chosen_on_card(
    logits: np.ndarray,
    params: list[SamplingParams],
    histories: list[list[int]],
    uniforms: list[float],
    order: str = "forwards",
    entries: dict | None = None,
) -> np.ndarray:
    device, tokens = CpuDevice(order, entries), np.full(len(logits), -1, np.int32)
    choice = host_choice(params, histories, uniforms, logits.shape[1])
    launches.sample(device, logits, choice, np.full(logits.shape, np.nan, np.float32), tokens)
    return tokens


@examples(40, suppress_health_check=list(HealthCheck))
@given(VOCABULARIES, st.sampled_from(KINDS), PARAMS, UNIFORMS, st.sampled_from(list(ORDERS)), SEEDS)
def test_a_choice_is_the_oracles(vocab, kind, params, uniform, order, seed):
    rng = np.random.default_rng(seed)
    logits, history = some_logits(rng, vocab, kind), rng.integers(0, vocab, rng.integers(0, 20)).tolist()
    token = chosen_on_card(logits[None], [params], [history], [uniform], order)[0]
    assert token == oracle.choose(logits, params, history, uniform)


@pytest.mark.parametrize("kind", ["normal", "ties", "equal"])
def test_a_large_vocabulary(kind):
    """GPT-2's, several pieces a warp, each row with its own parameters."""
    rng = np.random.default_rng(5)
    params = [
        SamplingParams(1.0), SamplingParams(0.8, 300, 0.9, 0.0, 1.3), SamplingParams(2.0, 0, 0.97, 0.001), SamplingParams(0.0),
    ]  # fmt: skip
    logits = np.stack([some_logits(rng, 50257, kind) for _ in params])
    uniforms = [0.25, 0.625, 0.99609375, 0.5]
    history = rng.integers(0, 50257, 100).tolist()
    tokens = chosen_on_card(logits, params, [history] * 4, uniforms)
    assert tokens.tolist() == [oracle.choose(*row, history, u) for *row, u in zip(logits, params, uniforms, strict=True)]


@pytest.mark.parametrize("vocab", [1, 7, 300])
def test_the_oracles_bisection_is_a_search_through_all_prefixes(vocab):
    """It and the kernel rest on it: a longer prefix never weighs less, though every sum is rounded."""
    rng = np.random.default_rng(vocab)
    w = oracle.weights(some_logits(rng, vocab, "ties"), np.float32(0.7))
    order, first, masses = np.argsort(-w, kind="stable"), np.zeros_like(w), []
    for token in order:
        first[token] = w[token]
        masses.append(oracle.long_sum(first))
    assert (np.diff(masses) >= 0).all()


class Fixed:
    """A random generator of one number."""

    def __init__(self, number: float):
        self.number = number

    def random(self) -> float:
        return self.number


def sampler_choice(logits: np.ndarray, params: SamplingParams, history: list[int], uniform: float) -> int:
    sampler = Sampler(params)
    sampler._rng = Fixed(uniform)
    return sampler.choose(logits, history)


def is_clear(logits: np.ndarray, params: SamplingParams, history: list[int], uniform: float) -> bool:
    """Whether float32 cannot choose another token than float64 does: all that is compared lies further apart than its error.

    A score s that was penalised carries u |s|, its difference to the best one u more, and so does the division: exp's argument
    is wrong by `off`, a weight by a factor of e^off and exp's own error, a sum of weights by theirs, weighed, and gamma of its
    steps. Compared are neighbours in the order, weights with min-p, and sums with their goals, which carry another rounding
    and the error of a total; both sides of each count. What float32 drops (EXP_END) is not drawn.
    """
    scores = penalise_repetition(logits.astype(np.float64), history, params.repetition_penalty)
    best = scores.max()
    if params.temperature == 0:
        return params.repetition_penalty == 1 or int((scores >= best - 2 * UNIT * abs(best)).sum()) == 1
    order = np.argsort(-scores, kind="stable")
    s = scores[order][np.isfinite(scores[order])]
    p = exact_softmax(s / params.temperature)
    off = 2 * UNIT * (best - s) + UNIT * (np.abs(s) + abs(best)) * (params.repetition_penalty != 1)
    error = np.expm1(np.minimum(off / params.temperature, 1)) + EXP_ERROR  # e^off of more than e - 1: nothing is clear
    worst = float((error * p).sum()) + len(logits) * EXP_END + gamma(long_sum_steps(len(logits)) + 1)
    first = min(params.top_k, len(p)) if params.top_k else len(p)
    swap = (p[:-1] - p[1:] <= error[1:] * p[1:] + error[:-1] * p[:-1]) & (s[:-1] != s[1:]) & (p[:-1] > EXP_END)
    at_least = params.min_p > 0 and bool((np.abs(p / p[0] - params.min_p) <= error * p / p[0] + UNIT * params.min_p).any())
    reached = 0 < params.top_p < 1 and goals_are_near(p[:first], params.top_p, worst)
    drawn = goals_are_near(p[: count_kept(p, params)], uniform, worst)
    return not (swap[:first].any() or at_least or reached or drawn)


def goals_are_near(p: np.ndarray, share: float, worst: float) -> bool:
    """Whether a sum of the first p comes near to a share of their total; the total itself is reached by none but all."""
    sums = np.cumsum(p)
    return bool((np.abs(sums[:-1] - share * sums[-1]) <= 2 * worst * sums[-1]).any())


@examples(60)
@given(VOCABULARIES, st.sampled_from(["normal", "ties", "hidden", "steep", "equal"]), PARAMS, float32s(0, 1), SEEDS)
def test_a_choice_is_the_samplers(vocab, kind, params, uniform, seed):
    rng = np.random.default_rng(seed)
    logits, history = some_logits(rng, vocab, kind), rng.integers(0, vocab, rng.integers(0, 20)).tolist()
    logits[0], uniform = 1, min(uniform, 1 - 2.0**-24)
    if is_clear(logits, params, history, uniform):
        token = oracle.choose(logits, params, history, uniform)  # the kernel's, by the tests above
        assert token == sampler_choice(logits, params, history, uniform)


def test_nearly_every_choice_is_the_samplers():
    """On ordinary logits few choices are within the bound; the kernel itself, many rows at once."""
    rng = np.random.default_rng(2)
    params = SamplingParams(0.9, 50, 0.95, 0.01, 1.1)
    logits = rng.standard_normal((40, 400), dtype=np.float32) * np.float32(3)
    histories = [rng.integers(0, 400, 30).tolist() for _ in logits]
    uniforms = rng.random(40, dtype=np.float32).tolist()
    tokens = chosen_on_card(logits, [params] * 40, histories, uniforms)
    clear = [is_clear(row, params, history, u) for row, history, u in zip(logits, histories, uniforms, strict=True)]
    assert sum(clear) >= 37
    for i in np.flatnonzero(clear):
        assert tokens[i] == sampler_choice(logits[i], params, histories[i], uniforms[i])


@examples(10)
@given(st.integers(1, 100), st.lists(st.integers(0, 99), max_size=30))
def test_tokens_that_occurred_are_marked(vocab, history):
    history = [token % vocab for token in history]
    expected = np.stack([seen_bits(history, vocab), seen_bits([], vocab)])
    seen = np.zeros_like(expected)
    for token in history:
        launches.mark_seen(CpuDevice(), np.array([token], np.int32), seen[:1], vocab)
    assert np.array_equal(seen, expected)
    bits = expected[0][np.arange(vocab) // 32] >> (np.arange(vocab, dtype=np.uint32) % 32) & 1
    assert np.flatnonzero(bits).tolist() == sorted(set(history))


def test_a_vocabulary_that_float32_cannot_count_is_refused():
    logits = np.broadcast_to(np.zeros((1, 1), np.float32), (1, (1 << 24) + 1))
    with pytest.raises(UsageError, match="vocabulary of 16777217"):
        launches.sample(CpuDevice(), logits, host_choice([SamplingParams()], [[]], [0.5], 1), logits, np.zeros(1, np.int32))
