"""The simulator's formats are the runtime's codecs, byte for byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.backend import get_backend
from nanokv.errors import UsageError
from nanokv.kv.codec import CODECS, get_codec
from sim.formats import COMPUTE, FORMATS, get_format, of_weights

CODEC_OF = {name: name for name in FORMATS} | {"fp8_e4m3": "fp8", "fp8_scaled": "fp8"}


def codec_bytes(name: str, heads: int, dim: int) -> tuple[float, float]:
    """Bytes a token of K and of V of the runtime's codec."""
    scale = 1.0 if name == "fp8_e4m3" else None
    codec = get_codec(CODEC_OF[name], np.float32, get_backend("numpy"), scale)
    keys, values = (
        sum(int(np.prod(plane.shape)) * np.dtype(plane.dtype).itemsize / plane.tokens for plane in planes)
        for planes in codec.planes(heads, dim)
    )
    return keys, values


def test_both_have_the_same_formats() -> None:
    assert {CODEC_OF[name] for name in FORMATS} == set(CODECS)


@pytest.mark.parametrize("name", FORMATS)
@given(heads=st.integers(1, 4), dim=st.integers(1, 200))
def test_a_token_takes_the_bytes_of_the_runtimes_codec(name: str, heads: int, dim: int) -> None:
    form = FORMATS[name]
    ours = heads * (form.row_bytes(dim) + form.scale_bytes(dim))
    keys, values = codec_bytes(name, heads, dim)
    assert ours == values
    # int4's keys have groups of 32 tokens: no channel is left over where 32 does not divide the head.
    assert ours == keys if name != "int4" or dim % 32 == 0 else ours > keys


def test_what_is_not_k_or_v_has_no_scales() -> None:
    for name in COMPUTE:
        assert FORMATS[name].bare.scale_bytes(128) == 0
        assert FORMATS[name].bare.row_bytes(128) == FORMATS[name].row_bytes(128)


def test_packed_weights_have_half_precision_scales() -> None:
    """ggml-common.h, q4_1: 20 bytes for 32 elements; every other format is stored as a cache stores it."""
    form = of_weights(FORMATS["int4"])
    assert form.row_bytes(32) + form.scale_bytes(32) == 20
    assert all(of_weights(form) is form for name, form in FORMATS.items() if name != "int4")


@pytest.mark.parametrize("name", ["fp4", "", "float", "int", "float64"])
def test_an_unknown_format_is_one_line(name: str) -> None:
    with pytest.raises(UsageError, match="unknown dtype .* choose one of float32, float16") as caught:
        get_format(name)
    assert "\n" not in str(caught.value)
