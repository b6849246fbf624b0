"""Weights on the card: a file's own numbers as they are stored, or packed from floats; the bits of the host either way."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba", exc_type=ImportError)
import nanokv
from nanokv.backend import NUMPY, get_backend, to_numpy
from nanokv.kernels.cuda.arrays import CardMatrix
from nanokv.kernels.matrix import FORMATS, pack
from nanokv.models import gpt2, llama
from nanokv.models.convert import pool_kv_heads
from nanokv.numerics import FAST
from tests.cuda.stand_in import both_memories
from tests.llama_support import small_llama
from tests.support import small_config
from tests.weights.llama_files import gguf_arrays, gguf_metadata, write_gguf
from weights.gguf_file import load_gguf

KINDS = {"F16": "fp16", "BF16": "bf16", "Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}


@pytest.fixture
def quantised(tmp_path):
    """Writes a small model whose matrices are in an encoding, each row being whole blocks of it."""
    gguf = pytest.importorskip("gguf", reason="not run: quantised files are written by the gguf package")
    params = llama.random_params(replace(small_llama(2, 4, 2, 16, vocab=260), width=32, inner=64), 1, scale=0.3)

    def write(name, tied=False):
        some = replace(params, head=params.embedding, config=replace(params.config, tied_head=True)) if tied else params
        kind, coded = gguf.GGMLQuantizationType[name], {}
        for key, array in gguf_arrays(some, "llama").items():
            coded[key] = (name, array.shape, gguf.quants.quantize(array, kind).tobytes()) if array.ndim == 2 else array
        return write_gguf(tmp_path / f"{name}.gguf", gguf_metadata(some, "llama"), coded)

    return write


def matrices(params):
    return [params.embedding, params.head, *(a for block in params.blocks for a in block.arrays() if a.ndim == 2)]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_a_quantised_file_stays_as_it_is_stored(meter, quantised, name, tied):
    """Codes, scales and lows are the host's, no float32 matrix is ever on the card, and the logits are the host's bits."""
    path, sizes = quantised(name, tied), []
    host_memory, card_memory = both_memories()
    note = meter.note
    meter.note = lambda array: (sizes.append(array.nbytes), note(array))[1]
    host, card = (load_gguf(path, "test", "float32", memory).params for memory in (host_memory, card_memory))
    for one, other in zip(matrices(host), matrices(card), strict=True):
        assert isinstance(other, CardMatrix)
        assert (one.form, one.shape, one.nbytes) == (other.form, other.shape, other.nbytes)
        assert one.form == KINDS[name]
        planes = [plane for plane in (other.codes, other.scales, other.lows) if plane is not None]
        assert all(np.array_equal(a, b.get()) for a, b in zip(one.planes, planes, strict=True))
    assert (card.head is card.embedding) == (host.head is host.embedding) == tied
    vectors = sum(a.nbytes for block in host.blocks for a in block.arrays() if a.ndim == 1) + host.norm.nbytes
    each = {id(matrix): matrix.nbytes for matrix in matrices(host)}
    assert sum(sizes) == sum(each.values()) + vectors


@pytest.mark.parametrize("weights", [None, *FORMATS])
def test_weights_in_a_format_give_the_hosts_bits(meter, quantised, weights):
    path = quantised("Q8_0")
    rest = {"numerics": "exact", "kernels": "compiled", "weights": weights}
    host, card = (nanokv.load(str(path), backend=name, **rest) for name in ("numpy", "cupy"))
    assert {matrix.form for matrix in matrices(card.params)} == {weights or "int8"}
    assert card.weight_bytes == host.weight_bytes
    tokens = list(range(20))
    logits = [to_numpy(model.forward(tokens, model.new_cache(30))) for model in (host, card)]
    assert np.array_equal(*logits)
    assert card.generate(tokens, max_tokens=3).tokens == host.generate(tokens, max_tokens=3).tokens


@pytest.mark.parametrize("form", ["float32", "int4"])
def test_averaged_heads_are_the_hosts(meter, form):
    """A packed matrix, a plain one and their biases: what is averaged is equal in bits, what is not stays."""
    params = gpt2.random_params(small_config(1, dim=16), scale=0.3)
    for host, card in (both_memories(form), (NUMPY, get_backend("cupy"))):
        there = params.to(card)
        one, other = pool_kv_heads(params.to(host), 2).blocks[0], pool_kv_heads(there, 2).blocks[0]
        weights = (getattr(block.qkv_weight, "codes", block.qkv_weight) for block in (one, other))
        assert np.array_equal(*map(to_numpy, weights))
        assert np.array_equal(one.qkv_bias, other.qkv_bias.get())
        assert len(one.qkv_weight) == len(other.qkv_weight) == 16 * (4 + 2 * 2)
        assert other.fc_weight is there.blocks[0].fc_weight


def test_array_code_takes_weights_rounded_to_a_format(meter, quantised):
    """In fast numerics a matrix is rounded and kept as float32, on the card as on the host."""
    path = quantised("F16")
    plain = nanokv.load(str(path), backend="numpy", numerics="fast")
    card = nanokv.load(str(path), backend="cupy", numerics="fast", weights="int4")
    assert card.numerics is FAST
    for one, other in zip(matrices(plain.params), matrices(card.params), strict=True):
        assert np.array_equal(pack(one, "int4").to_array(), other.get())
