"""How long a step takes: the figures of a known machine, and the larger of two bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import UsageError
from sim.gpus import get_gpu
from sim.planner.step_time import StepTime, step_time
from sim.planner.weights_size import Weights

LLAMA = Weights(2 * 8_030_261_248, 8_030_261_248, "stated")
counts = st.integers(0, 10**6)


def test_llama_on_an_h100() -> None:
    """3.35 TB/s and 989.4 TF: 16.06 GB in 4.794 ms, 128 KiB a token in 39.1 ns, 16.06 GF a token in 16.23 us."""
    assert step_time(get_gpu("h100"), LLAMA, "bfloat16", 131_072) == StepTime(4_794_185_820, 39_126, 16_232_588)


def test_four_gpus_share_weights_and_operations() -> None:
    """`token_bytes` are those of one GPU already."""
    assert step_time(get_gpu("h100"), LLAMA, "bfloat16", 32_768, 4) == StepTime(1_198_546_455, 9_781, 4_058_147)


def test_parameters_that_are_not_known_follow_from_the_bytes() -> None:
    unknown = Weights(LLAMA.total, None, "stated")
    assert step_time(get_gpu("h100"), unknown, "bfloat16", 1) == step_time(get_gpu("h100"), LLAMA, "bfloat16", 1)


def test_a_gpu_without_the_dtype_computes_in_float16() -> None:
    times = {dtype: step_time(get_gpu("t4"), LLAMA, dtype, 1).new_token for dtype in ("float16", "bfloat16", "int4")}
    assert set(times.values()) == {round(2 * 8_030_261_248 / 65e12 * 1e12)}
    with pytest.raises(UsageError, match="unknown KV dtype 'int3'"):
        step_time(get_gpu("t4"), LLAMA, "int3", 1)


@given(st.builds(StepTime, counts, counts, counts), st.integers(1, 500), st.lists(counts, min_size=1, max_size=9))
def test_many_steps_are_each_of_them(time: StepTime, new: int, cached: list[int]) -> None:
    together = time.steps(new, np.array(cached)).tolist()
    assert together == [time.step(new, each) for each in cached]
    assert together == [max(time.weights + each * time.cached_token, new * time.new_token) for each in cached]
