"""Whole caches: nanokv's own are equal bit for bit in every way of feeding; a cache with a fault is found out."""

import numpy as np
import pytest

from nanokv import oracle
from nanokv.errors import UsageError
from nanokv.kv.paged import PagedPool
from nanokv.kv.tile import Batch, Visibility
from nanokv.models.gpt2 import forward, random_params
from tests.support import nan_cache, small_config

CONFIG = small_config()
PARAMS = random_params(CONFIG, 0, scale=0.3)
PROMPTS = [[1, 2], list(range(20)), [(7 * i) % 61 for i in range(37)]]


def step(ids, cache):
    return forward(PARAMS, ids, cache)


def together(texts):
    caches = [nan_cache(CONFIG, 64) for _ in texts]
    rows = Batch([(cache, len(text)) for cache, text in zip(caches, texts, strict=True)])
    return np.split(forward(PARAMS, np.concatenate(texts), rows), np.cumsum([len(text) for text in texts])[:-1])


def fork(cache):
    return cache.copy()


def crop(cache, length):
    cache.truncate(length)


def test_our_contiguous_cache_is_equal_bit_for_bit():
    report = oracle.check_cache(step, PROMPTS, lambda: nan_cache(CONFIG, 64), copy=fork, truncate=crop, batch=together)
    assert report.passed, str(report)
    assert {finding.error for finding in report.findings} == {0.0}
    assert len(report.findings) == 12
    assert "bit for bit" in str(report)


@pytest.mark.parametrize("block_size", [1, 8])
def test_our_paged_cache_is_equal_bit_for_bit_through_forks(block_size):
    pool = PagedPool(CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, 400, block_size)
    for plane in pool.storage.planes:
        plane[:, 1:] = np.nan
    report = oracle.check_cache(step, PROMPTS[:2], pool.new_sequence, copy=lambda cache: cache.fork(), truncate=crop)
    assert report.passed, str(report)


class Wrong:
    """A cache of whole texts: what it forgets to do, its logits show."""

    def __init__(self, fault=""):
        self.fault, self.ids = fault, []

    def step(self, ids, state):
        kept = state.ids
        if self.fault == "position" and len(ids) == 1:
            kept = kept[1:]
        logits = forward(PARAMS, np.array([*kept, *ids]), nan_cache(CONFIG, 64))[len(kept) :]
        state.ids = [*state.ids, *map(int, ids)]
        return logits

    def truncate(self, state, length):
        state.ids = state.ids[: length + (self.fault == "truncation")]
        return state

    def copy(self, state):
        other = Wrong(self.fault)
        other.ids = state.ids if self.fault == "fork" else list(state.ids)
        return other


def shared(state):
    return state


@pytest.mark.parametrize(
    ("fault", "ways"),
    [
        ("position", {"token by token", "prompt, then token by token", "after a truncation", "beside a fork", "in a fork"}),
        ("truncation", {"after a truncation"}),
        ("fork", {"beside a fork", "in a fork"}),
    ],
)
def test_a_cache_with_a_fault_is_found_out(fault, ways):
    subject = Wrong(fault)
    copied = shared if fault == "fork" else subject.copy
    report = oracle.check_cache(
        subject.step, PROMPTS[:2], lambda: Wrong(fault), copy=copied, truncate=subject.truncate, bound=1e-4
    )
    failed = {finding.way for finding in report.findings if not finding.passed}
    assert ways <= failed
    if fault != "position":
        assert failed == ways
    way, ids = report.smallest
    assert way in failed
    assert 2 <= len(ids) <= 5
    assert "FAILED" in str(report)
    assert "shortest prompt that shows it" in str(report)


def test_a_child_that_is_no_copy_is_told_from_a_parent_that_is_disturbed():
    def short(state):
        other = Wrong()
        other.ids = state.ids[:-1]
        return other

    subject = Wrong()
    report = oracle.check_cache(subject.step, PROMPTS[:2], Wrong, copy=short)
    assert [finding.way for finding in report.findings if not finding.passed] == ["in a fork"]


@pytest.mark.parametrize(("bound", "passed"), [(0.0, False), (0.0009, False), (0.0011, True)])
def test_a_difference_just_beyond_the_bound_is_wrong(bound, passed):
    def step(ids, state):
        return np.full((len(ids), 3), 0.001 * (len(ids) == 1))

    report = oracle.check_cache(step, [[1, 2, 3]], list, bound=bound)
    assert report.passed == passed
    assert max(finding.error for finding in report.findings) == 0.001


def test_a_window_that_has_dropped_tokens_refuses_to_be_truncated_by_name():
    from nanokv.kv.contiguous import ContiguousCache

    def new():
        return ContiguousCache(CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, 64, visibility=Visibility(4))

    report = oracle.check_cache(step, PROMPTS[1:2], new, copy=fork, truncate=crop)
    failed = [finding for finding in report.findings if not finding.passed]
    assert [finding.way for finding in failed] == ["after a truncation"]
    assert "it raised" in failed[0].where


def test_a_batch_that_mixes_its_prompts_is_found_out():
    def mixed(texts):
        return together(texts)[::-1]

    report = oracle.check_cache(step, [PROMPTS[1], PROMPTS[1][::-1]], lambda: nan_cache(CONFIG, 64), copy=fork, batch=mixed)
    assert [finding.way for finding in report.findings if not finding.passed] == ["in a batch"]
    report = oracle.check_cache(step, PROMPTS[:2], lambda: nan_cache(CONFIG, 64), batch=lambda texts: together(texts)[:1])
    assert "1 results for 2 prompts" in str(report)


def test_nan_is_no_match():
    def broken(ids, cache):
        return forward(PARAMS, ids, cache) * (np.nan if len(ids) == 1 else 1)

    report = oracle.check_cache(broken, PROMPTS[1:2], lambda: nan_cache(CONFIG, 64), bound=1e9)
    assert not report.passed


def test_the_bound_counts_layers_width_and_size():
    assert oracle.logit_bound(2, 64, 10.0) == pytest.approx(10 * 10 * 64 * 2.0**-24, rel=1e-4)
    assert oracle.logit_bound(2, 64, 10.0, "bfloat16") > 1


def test_bad_arguments_are_named():
    with pytest.raises(UsageError, match="at least 2 token ids"):
        oracle.check_cache(step, [[1]], lambda: nan_cache(CONFIG, 64))
    with pytest.raises(UsageError, match=r"step gave logits of shape \[61\] for 2 ids"):
        oracle.check_cache(lambda ids, state: np.zeros(61), [[1, 2]], lambda: None)
