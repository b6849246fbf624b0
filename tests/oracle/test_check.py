"""Kernels that misbehave: each is a clear line of the report."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given

from nanokv import oracle
from nanokv.errors import UsageError
from nanokv.oracle.case import Case
from nanokv.oracle.faults import faulty_kernel
from nanokv.oracle.spec import Spec
from tests.oracle.kernels import kernel
from tests.support import ROOT, examples

CASES = [Spec(((2, 9),), head_dim=8), Spec(((1, 5), (3, 4)), head_dim=8)]
right = kernel()


def raises(call):
    raise ValueError("no such\nblock")


def wrong_shape(call):
    return right(call)[:, :, :4]


def transposed(call):
    return right(call).transpose(1, 0, 2)


def wrong_dtype(call):
    return right(call).astype(np.float64)


def not_a_number(call):
    out = right(call)
    out[0, 1, 2] = np.nan
    return out


def infinite(call):
    out = right(call)
    out[0, 1, 2] = np.inf
    return out


def writes_to_its_inputs(call):
    out = right(call)
    call.k[0, 0, 0, 0] = 7
    return out


def no_array(call):
    return "done"


class Unsteady:
    def __init__(self):
        self.runs = 0

    def __call__(self, call):
        self.runs += 1
        out = right(call)
        out[0, 0, 0] = np.nextafter(out[0, 0, 0], np.float32(np.inf if self.runs % 2 else -np.inf))
        return out


class OneBuffer:
    """Unsteady, and both runs give the same memory."""

    def __init__(self):
        self.out, self.inner = np.zeros((2, 4, 8), np.float32), Unsteady()

    def __call__(self, call):
        self.out[...] = self.inner(call)
        return self.out


class Once:
    runs = 0

    def __call__(self, call):
        self.runs += 1
        if self.runs % 2 == 0:
            raise RuntimeError("out of streams")
        return right(call)


MISBEHAVED = [
    (raises, "raised", "it raised ValueError: no such block"),
    (wrong_shape, "shape", "the output's shape is [2, 4, 4], not [2, 4, 8]"),
    (transposed, "shape", "the output's shape is [4, 2, 8], not [2, 4, 8]"),
    (wrong_dtype, "dtype", "the output's dtype is float64, not float32"),
    (not_a_number, "nan", "1 of 64 numbers are NaN or infinite, first at sequence 0, query 0 (position 7), head 1, channel 2"),
    (infinite, "nan", "1 of 64 numbers are NaN or infinite"),
    (writes_to_its_inputs, "inputs", "it modified its inputs: k"),
    (no_array, "raised", "it raised TypeError: it returned str, not an array"),
    (Unsteady(), "repeats", "it is not deterministic"),
    (OneBuffer(), "repeats", "it is not deterministic"),
    (lambda call: right(call).astype(complex), "dtype", "the output's dtype is complex128, which holds no real numbers"),
    (lambda call: right(call).astype(object), "dtype", "the output's dtype is object, which holds no real numbers"),
    (lambda call: None, "raised", "it raised TypeError: it returned NoneType, not an array"),
    (Once(), "raised", "it raised RuntimeError the second time: out of streams"),
]


@pytest.mark.parametrize(("bad", "kind", "line"), MISBEHAVED, ids=lambda value: getattr(value, "__name__", None))
def test_what_a_kernel_does_wrong_is_a_line_of_the_report(bad, kind, line):
    report = oracle.check(bad, cases=CASES[:1], smallest=False)
    assert not report.passed
    assert report.verdicts[0].kind == kind
    assert line in str(report)


def test_a_right_kernel_passes_and_says_how_near():
    report = oracle.check(right, cases=CASES)
    assert report.passed
    assert str(report).startswith("passed: 2 cases, the largest error is 0.")
    assert report.fault is None


def test_a_kernel_that_does_not_repeat_itself_is_shown_at_its_smallest():
    smallest = oracle.check(Unsteady(), cases=CASES[1:]).smallest
    assert smallest.kind == "repeats"
    assert smallest.spec.lengths == ((1, 1),)


def test_the_smallest_case_shows_the_fault_and_not_another_one():
    def picky(call):
        if call.num_heads == 1:
            raise ValueError("heads come in pairs")
        return right(call) * np.float32(1.1)

    smallest = oracle.check(picky, cases=CASES[1:], twice=False).smallest
    assert smallest.kind == "numbers"
    assert smallest.spec.num_heads == 2


class Elsewhere:
    """An array of another library: nothing but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_a_kernel_may_take_and_give_whatever_speaks_dlpack():
    def there(call):
        assert all(isinstance(array, Elsewhere) for array in call.arrays.values())
        here = oracle.Call(call.spec, {name: np.from_dlpack(array) for name, array in call.arrays.items()})
        return Elsewhere(right(here))

    assert oracle.check(there, cases=CASES, convert=Elsewhere).passed


def test_inputs_that_change_after_they_were_converted_are_noticed():
    def there(call):
        out = right(call)
        call.v[0, 0, 0, 0] += 1
        return out

    assert "it modified its inputs: v" in str(oracle.check(there, cases=CASES[:1], convert=np.copy, smallest=False))


def test_eager_is_what_it_is_for_every_case():
    specs = [Spec(((1, 40),)), Spec(((1, 40),), dtype="bfloat16")]
    report = oracle.check(faulty_kernel("half_precision_scores"), cases=specs[::-1], arithmetic="eager", smallest=False)
    assert [verdict.passed for verdict in report.verdicts] == [True, False]  # bfloat16 may, float32 may not


def test_another_output_format_can_be_allowed():
    assert oracle.check(wrong_dtype, cases=CASES, any_dtype=True).passed


@pytest.mark.parametrize(
    ("factor", "hint"), [(1.0, None), (1 / np.log(2), "logarithm to base 2"), (1.01, "exact")], ids=["right", "base 2", "off"]
)
def test_the_log_sum_exp_is_judged_where_it_is_given(factor, hint):
    def with_lse(call):
        return right(call), (Case(call.spec).expected.lse * factor).astype(np.float32)

    report = oracle.check(with_lse, cases=CASES, smallest=False)
    assert report.passed == (hint is None)
    assert hint is None or hint in str(report)


def test_a_log_sum_exp_of_the_wrong_shape_is_said():
    report = oracle.check(lambda call: (right(call), np.zeros(3, np.float32)), cases=CASES, smallest=False)
    assert "the log-sum-exp's shape is [3], not [2, 4]" in str(report)
    report = oracle.check(lambda call: (right(call), np.zeros((2, 4), "M8[s]")), cases=CASES[:1], smallest=False)
    assert "the log-sum-exp's dtype is datetime64[s], which holds no real numbers" in str(report)


def test_unused_memory_that_is_read_shows_as_nan_and_is_still_named():
    specs = [Spec(((1, 20),), layout="vllm", unused=unused) for unused in ("nan", "large")]
    report = oracle.check(kernel("last_block_in_full"), cases=specs, smallest=False)
    assert [verdict.kind for verdict in report.verdicts] == ["nan", "numbers"]
    assert report.fault == "last_block_in_full"


def test_nothing_judged_is_nothing_passed():
    assert not oracle.Report([]).passed
    assert oracle.check(right, cases=CASES[:1]).passed


def test_arguments_out_of_range():
    with pytest.raises(UsageError, match="no case to check"):
        oracle.check(right, cases=[])
    with pytest.raises(UsageError, match="unknown arithmetic 'sloppy'"):
        oracle.check(right, cases=CASES, arithmetic="sloppy")
    with pytest.raises(UsageError, match="layout 'nchw'"):
        oracle.check(right, layout="nchw")


def test_a_call_names_its_arrays_when_asked_for_another():
    with pytest.raises(AttributeError, match="a call of layout contiguous has no 'block_tables'; its arrays: q, k, v"):
        _ = Case(CASES[0]).call().block_tables


def test_a_report_is_also_data():
    import json

    found = json.loads(json.dumps(oracle.check(kernel("kv_head_0_for_all"), cases=CASES).as_dict()))
    assert found["passed"] is False
    assert found["diagnosis"]["names"] == ["kv_head_0_for_all"]
    assert found["smallest"]["case"]["lengths"] == [[1, 1]]
    assert found["cases"][0]["heads"] == [2, 3]


@examples(15)
@given(
    oracle.attention_cases(("contiguous", "vllm", "flashinfer-nhd"), features=("window", "rope"), head_dims=(8,), max_tokens=40)
)
def test_the_strategy_is_a_test_of_ones_own(case):
    verdict = oracle.judge(case, right(case.call()))
    assert verdict.passed, str(verdict)


def test_numpy_is_all_that_is_needed():
    code = textwrap.dedent("""
        import sys

        class Nothing:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {"click", "ml_dtypes", "rich", "safetensors", "threadpoolctl", "tiktoken",
                                          "hypothesis", "torch", "cupy", "transformers"}:
                    raise ImportError(name)

        sys.meta_path.insert(0, Nothing())
        import numpy as np
        from nanokv import oracle
        from nanokv.oracle.kernels import nanokv_attend
        report = oracle.check(nanokv_attend, "flashinfer-nhd", "float16", kv_dtype="int8", phases=["decode"], twice=False)
        assert report.passed, report
        assert not oracle.check(lambda call: nanokv_attend(call) * np.float16(1.1), "vllm", "float16", phases=["decode"],
                                twice=False, smallest=False).passed
        for wanted, arguments in (("ml_dtypes", {"dtype": "bfloat16"}), ("hypothesis", None)):
            try:
                oracle.attention_cases() if arguments is None else oracle.check(nanokv_attend, **arguments)
            except oracle.spec.UsageError as error:
                assert f"pip install {wanted}" in str(error), error
            else:
                raise AssertionError(wanted)
    """)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
