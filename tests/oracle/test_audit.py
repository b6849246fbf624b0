"""What a tolerance lets through: the tolerances of public reports, and what the oracle's own inputs make of them."""

import numpy as np
import pytest

from nanokv import oracle
from nanokv.errors import UsageError
from nanokv.oracle.faults import FAULTS
from nanokv.oracle.spec import Spec

PREFILL = [Spec(((64, 64),), layout="hf", dtype="bfloat16", num_heads=8, num_kv_heads=2, head_dim=32, unused="large")]
DECODE = [Spec(((1, 33), (1, 16)), layout="vllm", dtype="bfloat16", num_heads=8, num_kv_heads=2, head_dim=32, unused="large")]


def narrow(rng, shape):
    return rng.uniform(0.5, 1.0, shape)


def test_half_a_unit_on_narrow_data_accepts_everything():
    # Xilinx/mlir-air #1427: atol 0.5, rtol 0.2, inputs uniform in [0.5, 1]
    found = oracle.audit(atol=0.5, rtol=0.2, shapes=PREFILL, inputs=narrow)
    assert set(found.caught) <= {"mask_one_early", "first_token_missing", "empty_row_is_a_mean"}  # the first row becomes 0
    assert "kv_heads_tiled" in found.let_through
    assert "mask_missing" in found.let_through
    assert {"a constant", "noise", "the mean of V"} <= set(found.garbage)


def test_the_same_tolerance_on_planted_inputs_catches_a_good_part():
    found = oracle.audit(atol=0.5, rtol=0.2, shapes=PREFILL)
    assert "kv_heads_tiled" in found.caught
    assert found.garbage == ()


def test_finite_is_no_test():
    # RBLN-SW/torch-rbln #278: shape, dtype, isfinite, and not all zero
    found = oracle.audit(shapes=DECODE, accepts=lambda out, exact: bool(np.isfinite(out).all() and out.any()))
    assert found.caught == ()
    assert len(found.let_through) > 10


def test_expected_results_that_are_never_compared():
    # iree-org/iree #24829
    found = oracle.audit(shapes=DECODE, accepts=lambda out, exact: True)
    assert found.caught == ()
    assert "all zeros" in found.garbage


def test_a_tolerance_below_rounding_refuses_right_kernels():
    assert oracle.audit(atol=1e-6, shapes=PREFILL).refused
    assert not oracle.audit(atol=1.0, shapes=PREFILL).refused


def test_every_fault_that_applies_is_in_one_group():
    found = oracle.audit(atol=0.02, rtol=0.02, shapes=PREFILL)
    groups = [*found.let_through, *found.caught, *found.unseen]
    assert sorted(groups) == sorted({fault.name for fault in FAULTS if fault.applies(PREFILL[0])})
    assert "neighbour_token" not in groups
    assert "causal_top_left" in found.unseen  # a prefill cannot tell
    assert str(found).startswith("atol 0.02, rtol 0.02: ")


def test_bad_arguments():
    with pytest.raises(UsageError, match="tolerances are 0 or more"):
        oracle.audit(atol=-1)
    with pytest.raises(UsageError, match="no shapes"):
        oracle.audit(shapes=[])
    with pytest.raises(UsageError, match="floating-point K and V"):
        oracle.audit(shapes=[Spec(kv_dtype="int8")], inputs=narrow)
