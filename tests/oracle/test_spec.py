"""A case that cannot be is refused by name; one that can comes out the same every time."""

import copy
import json

import numpy as np
import pytest

from nanokv import oracle
from nanokv.errors import UsageError
from nanokv.oracle.case import Case
from nanokv.oracle.spec import FEATURES, LAYOUTS, Spec

BAD = [
    ({"layout": "nchw"}, "layout 'nchw' is unknown"),
    ({"dtype": "float12"}, "unknown number format 'float12'"),
    ({"dtype": "int8"}, "dtype 'int8' is unknown"),
    ({"kv_dtype": "tfloat32"}, "kv_dtype 'tfloat32' is unknown"),
    ({"scales": "row"}, "scales 'row' is unknown"),
    ({"num_heads": 6, "num_kv_heads": 4}, "6 heads are no multiple of 4"),
    ({"head_dim": 0}, "head_dim 0 is out of range"),
    ({"layout": "vllm", "block_size": 12}, "block size 12 does not divide 128"),
    ({"lengths": ()}, "lengths () are out of range"),
    ({"lengths": ((0, 3),)}, "with a query somewhere"),
    ({"lengths": ((-1, 3),)}, "lengths ((-1, 3),) are out of range"),
    ({"lengths": ((1 << 15, 1 << 15),)}, "too long"),
    ({"window": 0}, "window 0 is out of range"),
    ({"sinks": 2}, "sinks need a window"),
    ({"window": 4, "causal": False}, "a window needs causal"),
    ({"alibi": True, "softcap": 3.0}, "alibi and softcap do not go together"),
    ({"window": 4, "streaming": True}, "it needs alibi"),
    ({"softcap": float("nan")}, "softcap nan is out of range"),
    ({"scale": -1.0}, "scale -1.0 is out of range"),
    ({"rope": "halves", "head_dim": 33}, "head_dim 33 is odd"),
    ({"rope": "spiral"}, "rope 'spiral' is unknown"),
    ({"layout": "hf"}, "layout hf masks its padding"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda value: str(value)[:40])
def test_a_case_that_cannot_be_is_refused_by_name(fields, message):
    with pytest.raises(UsageError) as error:
        Spec(**fields)
    assert message in str(error.value)


def test_short_names_of_formats_are_known():
    assert Spec(dtype="bf16").dtype == "bfloat16"
    assert Spec(dtype="fp16", kv_dtype="fp8_e4m3").stored == "fp8"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_case_is_a_function_of_its_spec(layout):
    for spec in oracle.suite(layout, "bfloat16", "fp8", FEATURES, head_dim=8)[::4]:
        again = Spec.from_dict(json.loads(json.dumps(spec.as_dict())))
        assert again == spec
        one, two = Case(spec).arrays(), Case(again).arrays()
        assert one.keys() == two.keys()
        assert all(one[name].tobytes() == two[name].tobytes() for name in one)


def test_a_spec_from_a_file_names_what_it_does_not_know():
    with pytest.raises(UsageError, match="unknown fields of a case: colour"):
        Spec.from_dict({"lengths": [[1, 1]], "colour": "red"})
    with pytest.raises(UsageError, match="not a case"):
        Spec.from_dict({"lengths": 3})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": ["glue"]}, "unknown feature 'glue'"),
        ({"phases": ["rest"]}, "unknown phase 'rest'"),
        ({"num_heads": 4}, "go together"),
    ],
)
def test_the_suite_names_what_it_does_not_know(arguments, message):
    with pytest.raises(UsageError, match=message):
        oracle.suite(**arguments)


def test_the_suite_has_what_kernels_stumble_over():
    specs = oracle.suite("vllm", features=FEATURES)
    lengths = {pair for spec in specs for pair in spec.lengths}
    assert {(1, 1), (1, 15), (1, 16), (1, 17), (0, 5), (2, 0), (3, 1)} <= lengths
    assert {spec.block_size for spec in specs} >= {1, 8, 16, 32}
    assert {spec.unused for spec in specs} == {"nan", "large"}
    assert {spec.group for spec in specs} >= {1, 2, 4, 6}
    assert set().union(*(spec.features() for spec in specs)) == set(FEATURES)


def test_only_what_was_asked_for():
    specs = oracle.suite("vllm", phases=["decode"], num_heads=32, num_kv_heads=8, head_dim=128, block_size=16)
    assert {(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size) for spec in specs} == {(32, 8, 128, 16)}
    assert {q for spec in specs for q, _ in spec.lengths} == {1}
    assert not any(spec.features() for spec in specs)


def test_unused_memory_is_poisoned_and_used_memory_is_not():
    for spec in oracle.suite("flashinfer-hnd", "float16", phases=["decode"]):
        pages = Case(spec).arrays()["paged_kv_cache"]
        assert np.isnan(pages).any() == (spec.unused == "nan")


def phase(q, kv):
    return "prefill" if q == kv and q > 1 else "decode" if q == 1 else "chunked"


@pytest.mark.parametrize("phases", [["prefill"], ["decode"], ["prefill", "decode"], ["chunked"]], ids="+".join)
def test_no_phase_that_was_not_asked_for(phases):
    specs = oracle.suite("vllm", features=FEATURES, phases=phases)
    found = {phase(q, kv) for spec in specs for q, kv in spec.lengths if (q, kv) != (1, 1)}
    assert found <= {*phases, "decode"} if "chunked" in phases else found == set(phases)  # a chunk of one is a decode


def test_a_call_can_be_shown_and_copied():
    call = Case(Spec(((1, 3),), head_dim=8)).call()
    assert "k [1, 8, 2, 8] float32" in repr(call)
    again = copy.deepcopy(call)
    assert again.scale == call.scale
    assert all(
        np.array_equal(again.arrays[name], array, equal_nan=array.dtype.kind == "f") for name, array in call.arrays.items()
    )


def test_the_command_offers_what_there_is():
    from nanokv.commands import vectors
    from nanokv.oracle.formats import ALIASES, COMPUTED

    assert tuple(vectors.LAYOUTS) == LAYOUTS
    assert tuple(vectors.FEATURES) == FEATURES
    assert {ALIASES.get(name, name) for name in vectors.DTYPES} == set(COMPUTED)


def test_a_strategy_names_what_it_does_not_know():
    for arguments in ({"layouts": ["nchw"]}, {"dtypes": ["int8"]}, {"kv_dtypes": ["int3"]}, {"features": ["glue"]}):
        with pytest.raises(UsageError, match="unknown"):
            oracle.attention_cases(**arguments)
