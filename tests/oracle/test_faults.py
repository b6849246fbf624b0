"""Every fault shows, every kernel that has one is caught, nearly all are named, and no right kernel is accused.

Two kinds of faulty kernels are tried: the catalogue's own, and tests/oracle/kernels.py, written apart from it in float32.
"""

import numpy as np
import pytest

from nanokv import oracle
from nanokv.errors import UsageError
from nanokv.oracle.case import Case
from nanokv.oracle.faults import FAULTS, faulty_kernel, moved
from nanokv.oracle.spec import FEATURES, Spec
from tests.oracle.kernels import kernel
from tests.support import EVERYDAY, settings

SETTINGS = [
    ("vllm", "float32", None, "head"),
    ("vllm", "bfloat16", "fp8", "head"),
    ("flashinfer-nhd", "bfloat16", None, "head"),
    ("flashinfer-hnd", "float16", "int8", "token"),
    ("contiguous", "float16", None, "head"),
    ("contiguous", "float32", "int8", "head"),
    ("hf", "bfloat16", None, "head"),
]
COVERED = {fault.name for fault in FAULTS}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting)))
def test_every_fault_that_applies_moves_some_output_by_ten_bounds(setting):
    layout, dtype, kv_dtype, scales = setting
    cases = [Case(spec) for spec in oracle.suite(layout, dtype, kv_dtype, FEATURES, scales=scales)]
    for fault in FAULTS:
        where = [case for case in cases if fault.applies(case.spec)]
        if where:
            assert any(moved(fault, case) >= 10 for case in where), fault.name


def test_the_catalogue_is_complete_and_named_once():
    assert len(COVERED) == len(FAULTS) >= 25
    with pytest.raises(UsageError, match="no fault 'gremlin'"):
        faulty_kernel("gremlin")


def small(layout, dtype, kv_dtype, scales, features=FEATURES):
    """A part of the suite that a kernel in Python runs in a fraction of a second, and that still shows every fault."""
    specs = oracle.suite(layout, dtype, kv_dtype, features, head_dim=16, scales=scales)
    return [spec for spec in specs if (spec.size < 60_000 and spec.rows <= 32) or spec.logits == "equal"]


STRANGERS = [("vllm", "float32", "int8", "head"), ("flashinfer-hnd", "bfloat16", None, "head")]


@pytest.fixture(scope="module")
def verdicts():
    """(setting, fault) -> report, for every kernel written apart from the catalogue."""
    found = {}
    thorough = settings.default.max_examples > EVERYDAY
    for setting in STRANGERS if thorough else STRANGERS[:1]:
        specs = small(*setting)
        for fault in FAULTS:
            if any(fault.applies(spec) for spec in specs):
                found[setting, fault.name] = oracle.check(kernel(fault.name), cases=specs, twice=False, smallest=False)
    return found


def test_every_faulty_kernel_is_caught(verdicts):
    assert [key for key, report in verdicts.items() if report.passed] == []
    assert {name for _, name in verdicts} == COVERED


def test_every_faulty_kernel_is_named_rightly(verdicts):
    assert {key: report.diagnosis for key, report in verdicts.items() if report.fault != key[1]} == {}


@pytest.mark.parametrize("setting", STRANGERS, ids=lambda setting: setting[0])
def test_a_right_kernel_is_not_accused(setting):
    report = oracle.check(kernel(), cases=small(*setting), twice=False)
    assert report.passed, str(report)
    assert report.diagnosis is None


@pytest.mark.parametrize("name", ["kv_heads_tiled", "window_one_more", "kv_scale_of_head_0", "empty_row_is_a_mean"])
def test_the_catalogues_own_kernels_are_kernels(name):
    specs = small("flashinfer-nhd", "bfloat16", "int8", "head")
    report = oracle.check(faulty_kernel(name), cases=specs, twice=False, smallest=False)
    assert report.fault == name


def test_the_smallest_case_is_small_and_still_shows_the_fault():
    report = oracle.check(kernel("kv_heads_tiled"), cases=small("vllm", "float32", None, "head", ()), twice=False)
    spec = report.smallest.spec
    assert spec.lengths == ((1, 1),)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 8)
    assert oracle.check(kernel("kv_heads_tiled"), cases=[spec]).fault == "kv_heads_tiled"
    assert "heads 1..2 of 4 equal" in str(oracle.check(kernel("kv_heads_tiled"), cases=[spec]))


def test_what_a_kernel_was_compiled_for_is_not_shrunk():
    seen = set()

    def fixed(call):
        seen.add((call.num_heads, call.num_kv_heads, call.head_dim))
        return kernel("last_token_missing")(call)

    report = oracle.check(fixed, "vllm", phases=["decode"], num_heads=4, num_kv_heads=2, head_dim=16, block_size=8, twice=False)
    # one query a sequence: its own key is the newest, and nothing tells the two faults apart
    assert report.diagnosis.names == ("mask_one_early", "last_token_missing")
    assert seen == {(4, 2, 16)}
    assert report.smallest.spec.lengths == ((1, 1),)


def test_a_fault_in_one_of_two_code_paths_is_named_as_such():
    def decode_only(call):
        return kernel("kv_heads_tiled" if all(q == 1 for q, _ in call.spec.lengths) else "")(call)

    report = oracle.check(decode_only, cases=small("vllm", "float32", None, "head", ()), twice=False, smallest=False)
    assert report.fault == "kv_heads_tiled"
    assert "in the failing cases alone" in report.diagnosis.text


def test_an_unknown_fault_is_not_given_a_name():
    def odd(call):
        out = kernel()(call)
        out[..., 3] = -out[..., 3]
        return out

    report = oracle.check(odd, cases=small("vllm", "float32", None, "head", ()), twice=False, smallest=False)
    assert not report.passed
    assert report.diagnosis is None
    assert "none of the catalogue" in str(report)


def test_half_precision_anywhere_is_told_from_its_size():
    def sloppy(call):
        from nanokv.oracle.kernels import put_together, sequences_of

        outs = []
        for each, problem in zip(sequences_of(call), Case(call.spec).problems, strict=True):
            out = np.zeros(each.q.shape)
            for r, position in enumerate(problem.positions):
                k, v = (x[: position + 1].repeat(call.spec.group, 1).astype(np.float16) for x in (each.k, each.v))
                if position < 0:
                    continue
                s = np.einsum("hd,shd->hs", each.q[r].astype(np.float16), k) * np.float16(call.scale)
                p = np.exp(s - s.max(1, keepdims=True))
                out[r] = np.einsum("hs,shd->hd", p, v) / p.sum(1, keepdims=True)
            outs.append(out)
        return put_together(call, outs)

    report = oracle.check(sloppy, cases=[Spec(((1, 20),)), Spec(((4, 9), (1, 30)))], twice=False, smallest=False)
    assert report.fault in ("half_precision_scores", "half_precision_sums")
    assert "no larger" in report.diagnosis.text
