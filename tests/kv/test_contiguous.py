"""The contiguous cache against the plainest model there is: a list of tokens."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanokv.errors import CapacityError, UsageError
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.tile import TILE
from tests.support import poisoned

LAYERS, HEADS, DIM, CAPACITY = 2, 2, 3, 290


def rows(values: list[int], layer: int) -> np.ndarray:
    """The key that token `value` has in `layer`: [R, H, D]."""
    return np.array([[[100 * v + 10 * h + layer + d for d in range(DIM)] for h in range(HEADS)] for v in values], np.float32)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.cache = poisoned(ContiguousCache(LAYERS, HEADS, DIM, CAPACITY))
        self.tokens: list[int] = []
        self.next = 1

    def step(self, count: int, layers: int) -> list[int]:
        positions = self.cache.extend(count)
        assert positions.tolist() == list(range(len(self.tokens), len(self.tokens) + count))
        new = list(range(self.next, self.next + count))
        for layer in range(layers):
            self.cache.write(layer, rows(new, layer), -rows(new, layer))
        self.next += count
        return new

    @rule(count=st.integers(1, 150))
    def append(self, count):
        if len(self.tokens) + count > CAPACITY:
            with pytest.raises(CapacityError, match=str(CAPACITY)):
                self.cache.extend(count)
        else:
            self.tokens += self.step(count, LAYERS)
            self.cache.commit()

    @rule(count=st.integers(1, 20))
    def a_step_that_fails_half_way(self, count):
        if len(self.tokens) + count <= CAPACITY:
            self.step(count, 1)

    @precondition(lambda self: self.tokens)
    @rule(share=st.floats(0, 1))
    def truncate(self, share):
        length = int(share * len(self.tokens))
        self.cache.truncate(length)
        del self.tokens[length:]

    @rule()
    def truncate_beyond(self):
        with pytest.raises(UsageError):
            self.cache.truncate(len(self.tokens) + 1)

    @rule()
    def reset(self):
        self.cache.reset()
        self.tokens = []

    @rule()
    def go_on_with_a_copy(self):
        old, self.cache = self.cache, self.cache.copy()
        poisoned(old)

    @invariant()
    def holds_its_tokens(self):
        assert self.cache.length == len(self.tokens)

    @invariant()
    def yields_its_tokens_and_zeros(self):
        """Read at the next step, as attention does."""
        if len(self.tokens) == CAPACITY:
            return
        cache = self.cache.copy()
        cache.extend(1)
        for layer in range(LAYERS):
            cache.write(layer, rows([7], layer), -rows([7], layer))
            (tiles,) = cache.tiles(layer, len(self.tokens) // TILE)
            assert tiles.k.shape == tiles.v.shape == (len(self.tokens) // TILE + 1, TILE, HEADS, DIM)
            flat = tiles.k.reshape(-1, HEADS, DIM)
            assert np.array_equal(flat[: len(self.tokens) + 1], rows([*self.tokens, 7], layer))
            assert np.all(flat[len(self.tokens) + 1 :] == 0)
            assert np.array_equal(tiles.v.reshape(flat.shape), -flat)


TestCacheMachine = CacheMachine.TestCase


def test_reset_counts_from_zero_again():
    """6 tokens, reset, 3 tokens: 3, not 9."""
    cache = ContiguousCache(1, 1, 1, 16)
    cache.extend(6)
    cache.commit()
    cache.reset()
    assert cache.length == 0
    assert cache.extend(3).tolist() == [0, 1, 2]
    cache.commit()
    assert cache.length == 3


@pytest.mark.parametrize("capacity", [1, 127, 128, 129, 2048])
def test_capacity_is_exact(capacity):
    """The array is rounded up to tiles, what it takes is not."""
    cache = ContiguousCache(1, 1, 1, capacity)
    cache.extend(capacity)
    cache.commit()
    with pytest.raises(CapacityError, match=f"{capacity} of {capacity}"):
        cache.extend(1)
    assert cache.length == capacity


@pytest.mark.parametrize("capacity", [0, -3])
def test_no_capacity_is_refused(capacity):
    with pytest.raises(UsageError, match=str(capacity)):
        ContiguousCache(1, 1, 1, capacity)


def test_an_empty_step_is_refused():
    with pytest.raises(UsageError, match="at least 1"):
        ContiguousCache(1, 1, 1, 4).extend(0)


def test_bytes():
    cache = ContiguousCache(12, 12, 64, 100)
    assert cache.bytes_per_token == 2 * 12 * 12 * 64 * 4
    assert cache.nbytes == 128 * cache.bytes_per_token
