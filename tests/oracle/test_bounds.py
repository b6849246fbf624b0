"""The derived bounds hold for kernels that are right, and are not much wider than they must be.

Sharpness is measured over 10 000 cases a kernel and format by benchmarks/oracle_bounds.py (docs/oracle.md has its table); here
a small sample of the same holds the claim: the largest error is at least a thirtieth of its bound.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from benchmarks.oracle_bounds import RUNS, measure
from nanokv.attention import naive_softmax
from nanokv.oracle.bounds import Arithmetic, default_arithmetic, gamma
from nanokv.oracle.case import Case
from nanokv.oracle.formats import FORMATS, dtype_of, rounded
from nanokv.oracle.judge import exceeds, judge
from nanokv.oracle.kernels import nanokv_attend
from nanokv.oracle.reference import attend_exactly
from nanokv.oracle.spec import LAYOUTS, Spec
from nanokv.oracle.strategies import attention_cases
from nanokv.oracle.values import Values
from tests.support import EVERYDAY, examples, settings

OURS = [run for run in RUNS if run.name.startswith("nanokv")]


@examples(40)
@given(
    attention_cases(
        LAYOUTS, ("float64", "float32", "float16", "bfloat16"), (None, "bfloat16", "int8", "fp8"), ("window", "sinks", "scale")
    )
)
def test_our_own_kernels_are_inside_the_bounds(case):
    assert judge(case, nanokv_attend(case.call())).faults == []


@pytest.mark.parametrize("run", OURS, ids=lambda run: f"{run.name}, {run.dtype}, {run.stored}")
def test_the_bounds_are_sharp(run):
    if "compiled" in run.name:
        pytest.importorskip("numba", reason="not run: compiled kernels need numba (pip install '.[cpu]')")
    cases = 12 * settings.default.max_examples // EVERYDAY
    worst = max(measure(run, cases, seed=1).values())
    assert 1 / 30 <= worst <= 1


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("int8", "tfloat32")])
def test_the_unit_roundoff_is_half_the_step_above_one(name):
    dtype, u = dtype_of(name), FORMATS[name].roundoff
    assert dtype.type(1 + 2 * u) > dtype.type(1)
    assert dtype.type(1 + u) == dtype.type(1)  # a tie goes to even
    assert float(rounded(np.array([1e300 if name != "float64" else np.inf]), name)[0]) == FORMATS[name].top


def test_gamma_is_highams_and_infinite_where_it_says_nothing():
    assert gamma(3, 0.1) == pytest.approx(0.3 / 0.7)
    assert gamma(10, 0.1) == np.inf


def test_a_bound_follows_what_a_kernel_computes_in():
    case = Case(Spec(((4, 40),), dtype="bfloat16"))
    fused, eager = (case.expected_with(default_arithmetic("bfloat16", kind)).bound for kind in ("fused", "eager"))
    single = case.expected_with(default_arithmetic("float32")).bound
    assert (eager >= fused).all()
    assert (fused > single).all()
    assert eager.sum() > 2 * fused.sum()


def test_the_bound_of_a_single_key_by_hand():
    # its weight is 1 whatever the score; one numerator and two rescalings round the sums of v and of weights (gamma_3 each),
    # then four roundings for the division and the last rescaling, and one for the output
    case = Case(Spec(((1, 1),), head_dim=8))
    v = np.abs(case.values[0].v[0])
    allowed = case.expected.bound[0] / np.repeat(v, case.spec.group, axis=0)
    assert allowed == pytest.approx(np.full(allowed.shape, 11 * 2.0**-24), rel=1e-4)


@pytest.mark.parametrize(("factor", "passed"), [(0.99, True), (1.01, False)])
def test_a_bound_is_where_it_says(factor, passed):
    case = Case(Spec(((2, 9),), dtype="float64", head_dim=8), default_arithmetic("float32"))
    expected = case.expected
    verdict = judge(case, expected.out + factor * expected.bound)
    assert verdict.passed == passed
    assert verdict.excess == pytest.approx(factor)
    assert judge(case, expected.out, expected.lse + factor * expected.lse_bound).passed == passed


@pytest.mark.parametrize("part", ["scores", "products", "values", "output"])
def test_an_error_of_each_kind_is_noticed_when_it_is_too_large(part):
    case = Case(Spec(((6, 50),), dtype="float32", head_dim=32))
    rng = np.random.default_rng(0)

    def disturbed(x, size):
        return x * (1 + size * rng.choice([-1.0, 1.0], x.shape))

    def off_by(size):
        problem = case.problems[0]
        if part == "scores":
            problem = replace(problem, q=disturbed(problem.q, size))
        elif part == "products":
            problem = replace(problem, k=disturbed(problem.k, size))
        elif part == "values":
            problem = replace(problem, v=disturbed(problem.v, size))
        out = attend_exactly(problem)
        out = disturbed(out, size) if part == "output" else out
        return exceeds(out, case.expected.out, case.expected.bound).max()

    assert off_by(2.0**-24) <= 1
    assert off_by(2.0**-12) > 1


@pytest.mark.parametrize("seed", range(4))
def test_scores_may_be_off_by_all_that_their_products_allow(seed):
    # the worst case of the derivation: every score off by gamma_D times its magnitude, with a sign of its own
    case = Case(Spec(((6, 50),), head_dim=64, seed=seed))
    problem, rng = case.problems[0], np.random.default_rng(seed)
    size = np.einsum("rhd,shd->hrs", np.abs(problem.q), np.abs(problem.k).repeat(case.spec.group, 1)) * problem.scale
    error = gamma(64, 2.0**-24) * size * rng.choice([-1.0, 1.0], size.shape)
    out = attend_exactly(replace(problem, softmax=lambda scores: naive_softmax(scores + error)))
    ratio = exceeds(out, case.expected.out, case.expected.bound).max()
    assert 0.1 < ratio <= 1


def test_the_output_may_be_rounded_to_its_format():
    # all in float32 but for the output: its rounding is nearly all that there is
    case = Case(Spec(((6, 50),), dtype="float16"), Arithmetic("float32", "float32"))
    verdict = judge(case, nanokv_attend(case.call()))
    assert verdict.passed, str(verdict)
    assert verdict.excess > 0.5


def lse_of_one_key(q, k, arithmetic, **spec):
    """What may be made of the log-sum-exp of a single key, which is its score: the bound on scores and nothing else."""
    values = Values(q[None, None], k[None, None], k[None, None], None, None)
    return Case(Spec(((1, 1),), num_heads=1, num_kv_heads=1, head_dim=len(q), **spec), arithmetic, [values]).expected


def test_float32_inputs_may_be_rounded_to_what_a_product_takes():
    near = np.float32(1 + 2.0**-11 - 2.0**-20)  # tfloat32 makes 1 of it
    q, k = np.array([8 * near]), np.array([near])
    found = lse_of_one_key(q, k, Arithmetic("tfloat32", "float32"), scale=1.0)
    assert 0.9 < abs(8 - found.lse[0, 0]) / found.lse_bound[0, 0] <= 1
    found = lse_of_one_key(q, k, Arithmetic("float32", "float32"), scale=1.0)
    assert abs(8 - found.lse[0, 0]) / found.lse_bound[0, 0] > 100


@pytest.mark.parametrize(
    ("feature", "more"),
    [
        ({"softcap": 1e9}, 8 * 8),  # tanh: twice 4 units in the last place, of a score of 8
        ({"alibi": True}, 2 * 8),  # the product with the distance, here 0, and the difference
        ({"rope": "pairs"}, 28 * 16 - 4 * 8),  # 24 more, and the pair counts with its length on both sides
    ],
    ids=lambda value: str(value),
)
def test_what_is_done_to_a_score_may_cost_roundings(feature, more):
    q, k = np.array([8.0, 0], np.float32), np.array([1.0, 0], np.float32)
    plain, changed = (lse_of_one_key(q, k, None, scale=1.0, **each) for each in ({}, feature))
    assert plain.lse[0, 0] == changed.lse[0, 0] == 8
    # the score: 4 roundings; its exponential: 3 (8 + 8), and 10 for each of 3; the sum: 3; the logarithm: 4 (8 + 8 + 1), 8
    assert plain.lse_bound[0, 0] == pytest.approx((4 * 8 + 48 + 30 + 3 + 68 + 8) * 2.0**-24, rel=1e-3)
    assert changed.lse_bound[0, 0] - plain.lse_bound[0, 0] == pytest.approx(more * 2.0**-24, rel=1e-3)


def test_rotated_inputs_may_be_rounded_to_what_a_product_takes():
    near = 1 + 2.0**-8 - 2.0**-15  # position 0: the rotation changes nothing, but its result is rounded
    q, k = np.array([8.0, 0]), np.array([1.0, 0])
    found = lse_of_one_key(q.astype(np.float16), k.astype(np.float16), None, dtype="bfloat16", scale=1.0, rope="pairs")
    assert 8 * near**2 - 8 <= found.lse_bound[0, 0] < 4 * (8 * near**2 - 8)


def test_a_restored_code_below_float16s_normal_range_may_lose_half_a_step():
    # 64 k of 33.4 steps of 2^-24 become 33: far more than a unit roundoff of k
    k, step = np.full(64, 100, np.int8), np.float32(33.4 / 100 * 2.0**-24)
    values = Values(np.full((1, 1, 64), 2.0**11, np.float16), k[None, None], k[None, None], *[np.full((1, 1), step)] * 2)
    spec = Spec(((1, 1),), dtype="float16", kv_dtype="int8", num_heads=1, num_kv_heads=1, head_dim=64, scale=1.0)
    found = Case(spec, values=[values]).expected
    lost = abs(64 * 2.0**11 * 33 * 2.0**-24 - found.lse[0, 0])
    assert 0.5 < lost / found.lse_bound[0, 0] <= 1
    assert abs(33 * 2.0**-24 - found.out).max() <= found.bound.min()


def test_a_restored_value_and_a_numerator_below_float16s_normal_range_may_lose_half_a_step():
    half = Arithmetic("float16", "float32")
    step = 2.0**-24
    code, scale = np.full((1, 1, 1), 100, np.int8), np.full((1, 1), np.float32(33.4 / 100 * step))
    spec = Spec(((1, 1),), kv_dtype="int8", num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0)
    found = Case(spec, half, [Values(np.zeros((1, 1, 1), np.float32), code, code, scale, scale)]).expected
    assert 0.5 < abs(33 * step - found.out[0, 0, 0]) / found.bound[0, 0, 0] <= 1

    # two keys; the second's numerator lies half way between two steps
    keys = -12 - np.arange(128) / 128
    numerators = np.exp(keys) / step
    best = int(np.abs(numerators % 1 - 0.5).argmin())
    q, k, v = np.ones((1, 1, 1)), np.array([0, keys[best]])[:, None, None], np.array([0, 1e4])[:, None, None]
    spec = Spec(((1, 2),), dtype="float16", num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0)
    found = Case(spec, half, [Values(*(x.astype(np.float16) for x in (q, k, v)), None, None)]).expected
    taken = np.floor(numerators[best]) * step
    assert 0.5 < abs(taken * 1e4 / (1 + taken) - found.out[0, 0, 0]) / found.bound[0, 0, 0] <= 1
