"""For each source a small example that goes through its kernels, and says whether the results are right to the bit."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from nanokv.backend import NUMPY
from nanokv.card_sampling import host_choice, seen_bits
from nanokv.kernels import compiled, layout
from nanokv.kernels.cuda import launches
from nanokv.kernels.matrix import Matrix, pack
from nanokv.kv.codec import GROUP, get_codec
from nanokv.kv.spec import CacheSpec
from nanokv.sampling import SamplingParams
from tests.cuda.attention_cases import make_case, run_case
from tests.cuda.machine import CpuDevice
from tests.kernels import sampling_oracle

Entries = Mapping[str, Any] | None

KERNELS = {
    "attention.cu": ["attend_tiles<8>", "combine_tiles", "attend_rows<16>"],
    "linear.cu": ["linear_segments<Float32, 4>", "linear_sum", "linear_rows<Int4>", "embed_rows<Int8>"],
    "rows.cu": ["layer_norm", "rms_norm", "gelu_new", "gelu_erf", "swiglu", "rotate", "embed", "add"],
    "cache.cu": ["append<0>", "append<3>", "append_keys_int4", "append_values_int4", "copy_unit"],
    "softmax.cu": ["softmax"],
    "choose.cu": ["argmax", "sample", "mark_seen"],
}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def empty(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def tensors_of(matrix: Matrix) -> dict[str, np.ndarray]:
    planes = {"W": matrix.codes, "scales": matrix.scales, "lows": matrix.lows}
    return {name: plane for name, plane in planes.items() if plane is not None}


def attention(entries: Entries) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        case, arrays = make_case(patch, CacheSpec("paged", 16), [140, 3], [1, 2], 4, 2, 40)
    return all(np.array_equal(run_case(case, arrays, few=few, entries=entries)[0], case.expected) for few in (8, 0))


def linear(entries: Entries) -> bool:
    right = []
    for rows, form in ((3, "float32"), (40, "int4")):
        x, matrix = normal(rows, 200), pack(normal(70, 200, seed=1), form)
        out, sums = empty(rows, 70), empty(*launches.sums_shape(rows, matrix))
        launches.linear(CpuDevice(entries=entries, **tensors_of(matrix)), x, matrix, None, out, sums)
        right.append(np.array_equal(out, compiled.linear(x, matrix, None)))
    matrix, tokens, out = pack(normal(70, 45), "int8"), np.array([3, 69], np.int32), empty(2, 45)
    launches.embed_rows(CpuDevice(entries=entries, **tensors_of(matrix)), tokens, matrix, out)
    return all(right) and np.array_equal(out, matrix[tokens])


def rows(entries: Entries) -> bool:
    device, x, weight, bias = CpuDevice(entries=entries), normal(3, 2, 34), normal(68, seed=1), normal(68, seed=2)
    flat, cos, sin = x.reshape(3, 68), normal(3, 1, 17, seed=3), normal(3, 1, 17, seed=4)
    outs = [empty(3, 68) for _ in range(6)]
    half, tokens = empty(3, 34), np.array([2, 0, 1], np.int32)
    launches.layer_norm(device, flat, weight, bias, 1e-5, outs[0])
    launches.rms_norm(device, flat, weight, 1e-5, outs[1])
    launches.gelu_new(device, flat, outs[2])
    launches.swiglu(device, flat, half)
    launches.rotate(device, x, cos, sin, False, outs[3].reshape(x.shape))
    launches.embed(device, tokens, flat, tokens, outs[0], outs[4])
    launches.add(device, outs[4], flat)
    launches.gelu_erf(device, flat, outs[5])
    expected = [
        compiled.layer_norm(flat, weight, bias, 1e-5), compiled.rms_norm(flat, weight, 1e-5), compiled.gelu_new(flat),
        compiled.rotate(x, cos, sin, False).reshape(3, 68), flat[tokens] + outs[0][tokens] + flat,
        compiled.gelu_erf(flat),
    ]  # fmt: skip
    return np.array_equal(half, compiled.swiglu(flat)) and np.array_equal(outs, expected)


def cache(entries: Entries) -> bool:
    right, x = [], normal(GROUP, 2, 33)
    for name, number in (("float32", layout.FLOAT32), ("int8", layout.INT8)):
        expected = get_codec(name, np.float32, NUMPY).encode(x, x)[0]
        planes = [np.zeros_like(each) for each in expected]
        slots, scales = np.arange(GROUP, dtype=np.int32), planes[1] if len(planes) > 1 else None
        launches.append(CpuDevice(entries=entries), x, slots, number, planes[0], scales, 1.0)
        right.append(all(np.array_equal(*pair) for pair in zip(planes, expected, strict=True)))
    for keys, expected in zip((True, False), get_codec("int4", np.float32, NUMPY).encode(x, x), strict=True):
        planes = [np.zeros((len(each) * 2, *each.shape[1:]), each.dtype) for each in expected]
        launches.append_int4(CpuDevice(entries=entries), x, slots + GROUP, planes, keys)
        right += [np.array_equal(plane[len(each) :], each) for plane, each in zip(planes, expected, strict=True)]
    plane = normal(2, 4, 5)
    launches.copy_unit(CpuDevice(entries=entries, plane=plane), plane, 1, 3)
    return all(right) and np.array_equal(plane[:, 1], plane[:, 3])


def softmax(entries: Entries) -> bool:
    x, out = normal(1, 34000) * np.float32(5), empty(1, 34000)  # more than 32 pieces of 1024
    launches.softmax(CpuDevice(entries=entries), x, out)
    return np.array_equal(out[0], sampling_oracle.softmax(x[0]))


def choose(entries: Entries) -> bool:
    """Ties at every place where one could matter; a mass that is exactly the one drawn; a penalty that decides."""
    logits, tokens = np.round(normal(3, 1500) * np.float32(2)), np.full(3, -1, np.int32)
    launches.argmax(CpuDevice(entries=entries), logits, tokens)
    right = [np.array_equal(tokens, logits.argmax(axis=1))]
    params = [SamplingParams(1.0), SamplingParams(0.7, 40, 0.9, 0.0, 1.3), SamplingParams(1.5, 0, 0.5, 0.2)]
    histories, uniforms = [[], [3, 7, 7, 900], [5]], [0.3, 0.96875, 0.5]
    right.append(right_choice(entries, logits, params, histories, uniforms))
    logits = np.zeros((2, 64), np.float32)
    logits[1, [40, 50]] = 2, 1
    params = [SamplingParams(1.0), SamplingParams(0.0, repetition_penalty=4.0)]
    right.append(right_choice(entries, logits, params, [[], [40]], [0.5, 0.5]))
    seen = np.zeros((3, 47), np.uint32)
    launches.mark_seen(CpuDevice(entries=entries), np.array([40, 3, 1499], np.int32), seen, 1500)
    return all(right) and np.array_equal(seen, np.stack([seen_bits([token], 1500) for token in (40, 3, 1499)]))


def right_choice(
    entries: Entries, logits: np.ndarray, params: list[SamplingParams], histories: list[list[int]], uniforms: list[float]
) -> bool:
    tokens, weights = np.full(len(logits), -1, np.int32), empty(*logits.shape)
    choice = host_choice(params, histories, uniforms, logits.shape[1])
    launches.sample(CpuDevice(entries=entries), logits, choice, weights, tokens)
    rows = zip(logits, params, histories, uniforms, strict=True)
    return tokens.tolist() == [sampling_oracle.choose(*row) for row in rows]


EXAMPLES: dict[str, Callable[[Entries], bool]] = {
    "attention.cu": attention,
    "linear.cu": linear,
    "rows.cu": rows,
    "cache.cu": cache,
    "softmax.cu": softmax,
    "choose.cu": choose,
}
