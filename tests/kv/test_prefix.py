"""The digest against the plain triple that it stands for."""

import subprocess
import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanokv.backend import NUMPY
from nanokv.kv.prefix import ROOT, block_key, block_keys, tagged
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import CAUSAL
from tests.support import ROOT as PROJECT

texts = st.lists(st.integers(0, 3), max_size=12)
extras = st.dictionaries(st.sampled_from(["model", "salt"]), st.text("ab", max_size=2), max_size=2).map(tagged)


@given(texts, texts, extras, extras, st.integers(1, 4))
def test_digests_agree_exactly_where_the_plain_prefixes_do(a, b, extra_a, extra_b, size):
    """The slow oracle: the whole prefix and the extras, as tuples."""
    mine, theirs = list(block_keys(a, size, extra_a)), list(block_keys(b, size, extra_b))
    assert len(mine) == len(a) // size  # full blocks only
    for i, key in enumerate(mine):
        for j, other in enumerate(theirs):
            same = (tuple(a[: (i + 1) * size]), extra_a) == (tuple(b[: (j + 1) * size]), extra_b)
            assert (key.digest == other.digest) == same
            assert (key == other) == same


@given(texts, st.integers(1, 4), st.integers(0, 12))
def test_keys_go_on_where_they_ended(tokens, size, cut):
    whole = list(block_keys(tokens, size))
    known = list(block_keys(tokens[:cut], size))
    assert known + list(block_keys(tokens, size, after=known)) == whole


def test_the_same_text_as_model_and_as_salt_are_different():
    assert block_key(ROOT, [1], (("model", "x"),)).digest != block_key(ROOT, [1], (("salt", "x"),)).digest
    assert block_key(ROOT, [1], (("a", "bc"),)).digest != block_key(ROOT, [1], (("ab", "c"),)).digest


def test_a_block_is_known_by_its_whole_past():
    first, second = block_keys([1, 2, 3, 4], 2)
    assert block_key(ROOT, [3, 4]).digest != second.digest
    assert block_key(first.digest, [3, 4]).digest == second.digest


def test_what_is_computed_otherwise_has_other_digests():
    """Codec, window, sinks, dtype, scale and the model's name are all in the hash."""
    base = {"block_size": 32}
    specs = [
        {}, {"kv_dtype": "int8"}, {"kv_dtype": "int4"}, {"kv_dtype": "fp8"}, {"kv_dtype": "fp8", "kv_scale": 1.0},
        {"window": 8}, {"window": 9}, {"window": 8, "sinks": 0}, {"window": 8, "sinks": 1},
    ]  # fmt: skip
    pools = [CacheSpec("paged", **base, **spec).pool([CAUSAL], 1, 2, 3, np.float32, NUMPY, "a") for spec in specs]
    for dtype, name in ((np.float64, "a"), (np.float32, "b")):
        pools.append(CacheSpec("paged", **base).pool([CAUSAL], 1, 2, 3, dtype, NUMPY, name))
    assert len({block_key(ROOT, [1], pool.extra).digest for pool in pools}) == len(pools)


def test_a_token_id_is_eight_bytes_whatever_its_size():
    assert block_key(ROOT, [1, 0]).digest != block_key(ROOT, [1]).digest
    assert block_key(ROOT, [256]).digest != block_key(ROOT, [1]).digest
    assert block_key(ROOT, [1, 2]).digest != block_key(ROOT, [2, 1]).digest


def test_digests_agree_between_processes():
    code = "from nanokv.kv.prefix import *; print(block_key(ROOT, [1, 2, 3], (('salt', 'x'),)).digest.hex())"
    env = {"PYTHONHASHSEED": "123"}
    out = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True, env=env).stdout
    assert out.strip() == block_key(ROOT, [1, 2, 3], (("salt", "x"),)).digest.hex()
