"""The float64 reference against a second formulation that shares nothing with it, and against nanokv's naive attention.

The second formulation is scalar: keys chosen by a list comprehension over positions, scores by math.fsum, the softmax as
exp(score - logsumexp) with the sum by math.fsum, one output number at a time. Both are within a few float64 roundings of the
exact value, and so of each other: the bound of float64 arithmetic that the oracle itself gives is what is allowed.
"""

import math

import numpy as np
import pytest
from hypothesis import given

from nanokv import naive_attention
from nanokv.oracle.bounds import default_arithmetic
from nanokv.oracle.case import Case
from nanokv.oracle.judge import exceeds
from nanokv.oracle.spec import FEATURES, Spec
from nanokv.oracle.strategies import attention_cases
from nanokv.oracle.suite import suite
from tests.support import examples


def second(case, i):
    """out [R, Hq, D] and lse [R, Hq] of sequence i, number by number."""
    spec, each = case.spec, case.values[i]
    rows, tokens = spec.lengths[i]
    q, k, v = each.q.astype(float), each.k, each.v
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for r in range(rows):
        at = tokens - rows + r
        seen = [j for j in range(tokens) if visible(spec, at, j)]
        for h in range(spec.num_heads):
            head = h * spec.num_kv_heads // spec.num_heads
            scores = [score(spec, q[r, h], k[j, head], at, j, h) for j in seen]
            if not seen:
                continue
            top = max(scores)
            lse[r, h] = top + math.log(math.fsum(math.exp(s - top) for s in scores))
            weights = [math.exp(s - lse[r, h]) for s in scores]
            for d in range(spec.head_dim):
                out[r, h, d] = math.fsum(w * v[j, head, d] for w, j in zip(weights, seen, strict=True))
    return out, lse


def visible(spec, at, key):
    if not spec.causal:
        return True
    return key <= at and (spec.window is None or key > at - spec.window or key < spec.sinks)


def score(spec, q, k, at, key, head):
    if spec.rope:
        q, k = turned(spec, q, at), turned(spec, k, key)
    value = math.fsum(float(a) * float(b) for a, b in zip(q, k, strict=True)) * (spec.scale or 1 / math.sqrt(spec.head_dim))
    if spec.softcap:
        value = spec.softcap * math.tanh(value / spec.softcap)
    if spec.alibi:
        distance = at - key
        if spec.streaming and key < spec.sinks:
            distance = min(at, spec.sinks + spec.window - 1) - key
        value -= float(np.float32(2.0 ** (-8 * (head + 1) / spec.num_heads))) * distance
    return value


def turned(spec, x, position):
    """One vector as complex numbers times e^(i angle)."""
    half = spec.head_dim // 2
    pairs = [(2 * i, 2 * i + 1) if spec.rope == "pairs" else (i, i + half) for i in range(half)]
    out = [0.0] * spec.head_dim
    for i, (a, b) in enumerate(pairs):
        angle = position * spec.rope_theta ** (-2 * i / spec.head_dim)
        z = complex(x[a], x[b]) * complex(math.cos(angle), math.sin(angle))
        out[a], out[b] = z.real, z.imag
    return out


@examples(25)
@given(
    attention_cases(
        ("contiguous", "vllm"), ("float32", "bfloat16"), (None, "int8", "fp8"), FEATURES,
        heads=((1, 1), (4, 2), (3, 1)), head_dims=(4, 8), max_tokens=40, max_sequences=2,
    )
)  # fmt: skip
def test_two_formulations_agree(case):
    agree(case)


@pytest.mark.parametrize("spec", [spec for spec in suite(features=FEATURES, head_dim=8) if spec.features()], ids=Spec.title)
def test_they_agree_on_every_feature(spec):
    agree(Case(spec))


def agree(case):
    doubles = default_arithmetic("float64")
    found = case.expected_with(doubles)
    start = 0
    for i, (rows, _) in enumerate(case.spec.lengths):
        out, lse = second(case, i)
        part = slice(start, start + rows)
        allowed = Case(case.spec, doubles).expected
        assert exceeds(out, found.out[part], np.maximum(allowed.bound[part], 1e-300)).max(initial=0) <= 1
        assert exceeds(lse, found.lse[part], np.maximum(allowed.lse_bound[part], 1e-300)).max(initial=0) <= 1
        start += rows


@examples(30)
@given(attention_cases(("contiguous",), features=("window", "sinks", "scale"), max_tokens=60))
def test_where_nothing_special_is_asked_it_is_the_naive_attention(case):
    for problem, (rows, tokens) in zip(case.problems, case.spec.lengths, strict=True):
        if rows and tokens:
            plain = naive_attention(problem.q, problem.k, problem.v, problem.positions, problem.scale, problem.visibility)
            assert plain.shape == problem.q.shape
    outs = [
        naive_attention(p.q, p.k, p.v, p.positions, p.scale, p.visibility) if len(p.k) else np.zeros_like(p.q)
        for p in case.problems
    ]
    assert np.array_equal(np.concatenate(outs), case.expected.out)


def test_a_row_that_sees_nothing_is_zero_and_must_be():
    case = Case(Spec(((3, 1), (2, 0)), num_heads=2, num_kv_heads=1))
    assert np.array_equal(case.expected.out[[0, 1, 3, 4]], np.zeros((4, 2, 32)))
    assert np.isneginf(case.expected.lse[[0, 1, 3, 4]]).all()
    assert not case.expected.bound[[0, 1, 3, 4]].any()


@pytest.mark.parametrize(
    ("keys", "values", "out", "lse"),
    [
        ([0.0, 0.0], [1.0, 3.0], 2.0, math.log(2)),
        ([math.log(3), 0.0], [1.0, 5.0], 2.0, math.log(4)),
        ([1000.0, 0.0], [1.0, 5.0], 1.0, 1000.0),
    ],
)
def test_by_hand(keys, values, out, lse):
    from nanokv.oracle.values import Values

    q = np.array([[[1.0]]])
    k, v = (np.array(x)[:, None, None] for x in (keys, values))
    spec = Spec(((1, 2),), dtype="float64", num_heads=1, num_kv_heads=1, head_dim=1)
    case = Case(spec, values=[Values(q, k, v, None, None)])
    assert abs(case.expected.out[0, 0, 0] - out) < 1e-15
    assert abs(case.expected.lse[0, 0] - lse) < 1e-13
