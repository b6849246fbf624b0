"""Many sequences over one pool, whatever happens to them, get the tokens that each gets alone."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanokv.engine import Engine
from nanokv.errors import CapacityError, UsageError
from nanokv.generate import Options
from nanokv.kv.spec import CacheSpec
from nanokv.numerics import COMPILED, FAST
from nanokv.sampling import SamplingParams
from tests.llama_support import tiny_llama
from tests.support import EXACT_KERNELS, NO_NUMBA, examples, tiny_model

MODEL = tiny_model(layers=1, heads=2, kv_heads=1, eos=False)
LLAMA = tiny_llama(layers=1, heads=2, kv_heads=1, eos=False)


@cache
def computed(make, numerics):
    """The same models by other kernels."""
    return make(numerics, layers=1, heads=2, kv_heads=1, eos=False)


SPECS = st.sampled_from([
    CacheSpec(block_size=16), CacheSpec(block_size=4), CacheSpec(block_size=1), CacheSpec(block_size=16, window=20),
    CacheSpec(block_size=8, window=12, sinks=3), CacheSpec(block_size=16, kv_dtype="int8"),
    CacheSpec(block_size=32, kv_dtype="int4"), CacheSpec(block_size=16, kv_dtype="fp8", window=30),
])  # fmt: skip


def alone(prompt, options, spec, model=MODEL):
    return model.stream(prompt, max_tokens=options.max_tokens, sampling=options.sampling, window=spec.window, sinks=spec.sinks,
                        kv_dtype=spec.kv_dtype).run()  # fmt: skip


prompts = st.lists(st.integers(0, 9), min_size=1, max_size=60)  # few different tokens: prefixes meet
sampled = st.builds(
    lambda n, t, seed, penalty: Options(n, SamplingParams(t, top_k=20, seed=seed, repetition_penalty=penalty)),
    st.integers(1, 25), st.sampled_from([0.0, 0.9]), st.integers(0, 99), st.sampled_from([1.0, 1.3]),
)  # fmt: skip


@EXACT_KERNELS
@examples(60)
@given(
    st.sampled_from([tiny_model, tiny_llama]), SPECS, st.lists(st.tuples(prompts, sampled), min_size=1, max_size=6),
    st.integers(0, 40), st.integers(1, 70), st.booleans(),
)  # fmt: skip
def test_every_request_gets_the_tokens_it_gets_alone(numerics, make, spec, requests, spare, batch_tokens, caching):
    model = computed(make, numerics)
    longest = max(len(prompt) + options.max_tokens for prompt, options in requests)
    blocks = model.blocks_for(spec, longest, batch_tokens) + spare + 1
    engine = Engine(model, spec, num_blocks=blocks, max_batch_tokens=batch_tokens, prefix_caching=caching)
    runs = [engine.add(prompt, options)[0] for prompt, options in requests]
    texts = {id(run): "" for run in runs}
    for update in engine.stream():
        texts[id(update.run)] += update.text
    for run, (prompt, options) in zip(runs, requests, strict=True):
        expected = alone(prompt, options, spec, model)
        assert run.tokens == expected.tokens
        assert texts[id(run)] == run.text == expected.text
        assert run.finish_reason == expected.finish_reason
    stats = engine.pool.blocks.stats()
    assert stats.used == 0
    assert stats.used + stats.cached + stats.free == blocks - 1


class EngineMachine(RuleBasedStateMachine):
    """Submit, fork, step, cancel in any order, in a pool so small that sequences are preempted."""

    model = MODEL

    def __init__(self):
        super().__init__()
        self.engine = Engine(self.model, CacheSpec(block_size=4), num_blocks=24, max_batch_tokens=24)
        self.runs = []  # (run, prompt, options, tokens made before it was forked)

    @rule(prompt=prompts.filter(lambda p: len(p) <= 50), options=sampled)
    def submit(self, prompt, options):
        self.runs.append((self.engine.add(prompt, options)[0], prompt, options, 0))

    @rule(prompt=prompts.filter(lambda p: len(p) <= 30), seed=st.integers(0, 9), n=st.integers(2, 4))
    def submit_copies(self, prompt, seed, n):
        options = Options(10, SamplingParams(1.0, seed=seed))
        for run in self.engine.add(prompt, options, n):
            self.runs.append((run, prompt, run.options, 0))

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: any(run.finish_reason is None and run.tokens for run, *_ in self.runs))
    @rule(which=st.integers(0, 99), seed=st.integers(0, 99))
    def fork(self, which, seed):
        going = [entry for entry in self.runs if entry[0].finish_reason is None and entry[0].tokens]
        run, prompt, _, _ = going[which % len(going)]
        child = self.engine.fork(run, seed)
        self.runs.append((child, prompt, child.options, len(run.tokens)))

    @precondition(lambda self: any(run.finish_reason is None for run, *_ in self.runs))
    @rule(which=st.integers(0, 99))
    def cancel(self, which):
        going = [run for run, *_ in self.runs if run.finish_reason is None]
        self.engine.cancel(going[which % len(going)])

    @invariant()
    def blocks_are_conserved(self):
        stats = self.engine.pool.blocks.stats()
        assert stats.used + stats.cached + stats.free == 23
        held = {block for s in [*self.engine._running, *self.engine._waiting] for block in s.cache.block_table} - {0}
        assert stats.used == len(held)

    def teardown(self):
        for _ in self.engine.stream():
            pass
        assert self.engine.pool.blocks.stats().used == 0
        for run, prompt, options, forked_at in self.runs:
            if forked_at == 0:
                expected = alone(prompt, options, CacheSpec(), self.model).tokens
            else:  # what a text so far and a fresh sampler with this seed give
                start = run.tokens[:forked_at]
                left = Options(options.max_tokens - forked_at, options.sampling)
                expected = start + alone(prompt + start, left, CacheSpec(), self.model).tokens
            assert run.tokens == expected[: len(run.tokens)]
            assert run.finish_reason == "interrupted" or len(run.tokens) == len(expected)


class LlamaEngineMachine(EngineMachine):
    model = LLAMA


class CompiledEngineMachine(EngineMachine):
    def __init__(self):
        self.model = computed(tiny_llama, COMPILED)
        super().__init__()


EngineMachine.TestCase.settings = examples(25, stateful_step_count=25)
LlamaEngineMachine.TestCase.settings = examples(10, stateful_step_count=25)
CompiledEngineMachine.TestCase.settings = examples(10, stateful_step_count=25)
TestEngineMachine = EngineMachine.TestCase
TestLlamaEngineMachine = LlamaEngineMachine.TestCase
TestCompiledEngineMachine = NO_NUMBA(CompiledEngineMachine.TestCase)


def test_preemption_happens_and_does_not_show():
    """Two texts that fit alone but not together."""
    options = Options(30)
    engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=20, max_batch_tokens=64)
    runs = [engine.add([token] * 20, options)[0] for token in (1, 2)]
    for _ in engine.stream():
        pass
    assert engine.stats.preemptions > 0
    assert engine.stats.recomputed_tokens > 0
    assert engine.stats.prefix_hit_tokens == 0  # what a preempted sequence finds of itself is no hit
    for run, token in zip(runs, (1, 2), strict=True):
        assert run.tokens == alone([token] * 20, options, CacheSpec()).tokens


def test_the_newest_is_preempted_and_keeps_its_text_and_its_random_state():
    engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=20, max_batch_tokens=64)
    options = Options(30, SamplingParams(1.0, seed=3, repetition_penalty=1.2))
    runs = [engine.add([token] * 20, options)[0] for token in (1, 2)]
    while not engine.stats.preemptions:
        engine.step()
    assert [sequence.run for sequence in engine._running] == runs[:1]
    assert [sequence.run for sequence in engine._waiting] == runs[1:]
    assert len(runs[1].tokens) > 3
    for _ in engine.stream():
        pass
    for run, token in zip(runs, (1, 2), strict=True):
        assert run.tokens == alone([token] * 20, options, CacheSpec()).tokens


def test_a_cancelled_request_gives_its_blocks_back():
    engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=40)
    run, other = (engine.add([token] * 9, Options(20))[0] for token in (1, 2))
    engine.step()
    engine.cancel(run)
    assert engine.pool.blocks.stats().used == 3
    assert run.finish_reason == "interrupted"
    engine.cancel(other)
    assert engine.pool.blocks.stats().used == 0
    assert not engine.has_work


def test_nobody_is_let_in_to_be_thrown_out_at_the_next_token():
    """Two prompts of 8 tokens in 5 blocks of 4: both fit, but not both with the token that follows."""
    engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=6, max_batch_tokens=64)
    for token in (1, 2):
        engine.add([token] * 8, Options(4))
    for _ in engine.stream():
        pass
    assert engine.stats.preemptions == 0


def test_copies_of_a_prompt_that_is_all_cached_fit_in_what_was_counted():
    """In pools of every size, from one that holds one of them."""
    for blocks in range(5, 16):
        engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=blocks, max_batch_tokens=8)
        runs = [engine.add([1, 2, 3, 4, 5, 6, 7, 8], Options(5, SamplingParams(1.0, seed=seed)))[0] for seed in range(4)]
        for _ in engine.stream():
            pass
        for seed, run in enumerate(runs):
            assert run.tokens == alone([1, 2, 3, 4, 5, 6, 7, 8], Options(5, SamplingParams(1.0, seed=seed)), CacheSpec()).tokens


def test_a_long_prompt_in_a_pool_that_is_nearly_full_goes_on_or_waits():
    """Ten chunks of prompt beside a text that grows: every step computes something, and there are not endlessly many."""
    engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=20, max_batch_tokens=5)
    engine.add([1] * 8, Options(20))
    for _ in range(3):
        engine.step()
    engine.add([2] * 50, Options(4))
    while engine.has_work:
        before = engine.stats.computed_tokens
        engine.step()
        assert engine.stats.computed_tokens > before
    assert engine.stats.steps < 100


def test_a_short_prompt_with_a_long_output_is_computed_whole_before_it_goes_on():
    """Preempted with 3 tokens of prompt and many of output: all of them are computed, in chunks, before the next is chosen."""
    engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=24, max_batch_tokens=7, prefix_caching=False)
    runs = [engine.add([token] * 3, Options(60))[0] for token in (1, 2)]
    for _ in engine.stream():
        pass
    assert engine.stats.preemptions > 0
    assert engine.stats.recomputed_tokens > 3 + 7
    for run, token in zip(runs, (1, 2), strict=True):
        assert run.tokens == alone([token] * 3, Options(60), CacheSpec()).tokens


def test_a_hit_is_counted_when_it_is_taken_not_when_it_was_asked_for():
    """The prefix is cached when the request comes, and gone when there is room for it."""
    engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=12, max_batch_tokens=16, max_sequences=1)
    engine.generate([[1] * 8], Options(1))
    engine.add([2] * 36, Options(6))
    late = engine.add([1] * 8 + [3], Options(2))[0]
    for _ in engine.stream():
        pass
    assert engine.stats.prefix_hit_tokens == 0
    assert late.tokens == alone([1] * 8 + [3], Options(2), CacheSpec()).tokens


def test_a_fast_batch_chooses_what_fast_runs_choose_alone():
    """Many sequences share products and a softmax there: the text is the same where no two logits nearly tie."""
    fast = tiny_model(FAST, layers=1, heads=2, kv_heads=1, eos=False)
    prompts = [*([token] * (3 + 40 * token) for token in range(5)), [7] * 240]  # one is in a later tile than its window needs
    for spec in (CacheSpec(block_size=4), CacheSpec(block_size=16, window=50), CacheSpec(block_size=32, kv_dtype="int4")):
        for run, prompt in zip(Engine(fast, spec).generate(prompts, Options(8)), prompts, strict=True):
            assert run.tokens == alone(prompt, Options(8), spec).tokens


def test_two_that_each_need_most_of_the_pool_run_one_after_the_other():
    engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=21, max_batch_tokens=16)
    for token in (1, 2):
        engine.add([token] * 48, Options(4))
    while engine.has_work:
        engine.step()
        assert len(engine._running) <= 1
    assert engine.stats.preemptions == 0


def test_a_request_that_can_never_fit_is_refused_at_once():
    """4 blocks, one of them the null block: 3 can be used."""
    engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=4)
    with pytest.raises(CapacityError, match="14 tokens, 4 blocks, and the pool has 3"):
        engine.add([1] * 10, Options(4))
    assert engine.add([1] * 8, Options(4))
    for _ in engine.stream():
        pass


def test_a_block_aligned_prompt_that_is_all_cached_still_computes_one_token():
    engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=40)
    first = engine.generate([[1, 2, 3, 4, 5, 6, 7, 8]], Options(3))[0]
    computed = engine.stats.computed_tokens
    again = engine.generate([[1, 2, 3, 4, 5, 6, 7, 8]], Options(3))[0]
    assert again.tokens == first.tokens
    assert engine.stats.computed_tokens - computed == 4 + 2  # one block of the prompt, then two tokens
    assert engine.stats.prefix_hit_tokens == 4


def test_generated_tokens_are_found_by_the_next_turn():
    """The prompt, its answer and a new question: all full blocks of the first turn are a hit."""
    engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=80)
    run = engine.generate([[1] * 6], Options(15))[0]
    engine.generate([[1] * 6 + run.tokens + [2, 3]], Options(2))
    assert engine.stats.prefix_hit_tokens == 20  # 21 tokens; the last was never fed


def test_distinct_prompts_have_no_hits():
    engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=30, max_batch_tokens=32)
    for token in range(8):
        engine.add([token, *range(20)], Options(8))
    for _ in engine.stream():
        pass
    assert engine.stats.prefix_hit_tokens == 0


def test_a_seeded_request_does_not_change_with_its_neighbours():
    options = Options(12, SamplingParams(1.0, seed=5))
    engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=200)
    seeded, *_ = (engine.add([4, 5], o)[0] for o in (options, Options(12, SamplingParams(1.0)), Options(12)))
    for _ in engine.stream():
        pass
    assert seeded.tokens == alone([4, 5], options, CacheSpec()).tokens


def test_copies_differ_and_repeat():
    def sample():
        engine = Engine(MODEL, CacheSpec(block_size=4), num_blocks=200)
        runs = engine.add(list(range(30)), Options(12, SamplingParams(1.0, seed=5)), n=4)
        for _ in engine.stream():
            pass
        assert engine.stats.computed_tokens == 30 + 4 * 11  # the prompt once
        assert engine.stats.peak_shared_blocks >= 7
        return [run.tokens for run in runs]

    first, second = sample(), sample()
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 4
    assert first[0] == alone(list(range(30)), Options(12, SamplingParams(1.0, seed=5)), CacheSpec()).tokens


@pytest.mark.parametrize(("n", "options", "words"), [
    (0, Options(), "n 0"), (2, Options(), "greedy continuations would be equal"),
])  # fmt: skip
def test_copies_that_make_no_sense_are_refused(n, options, words):
    with pytest.raises(UsageError, match=words):
        Engine(MODEL).add([1], options, n)


@EXACT_KERNELS
@pytest.mark.parametrize("make", [tiny_model, tiny_llama])
def test_an_endless_text_runs_in_bounded_memory(make, numerics):
    """Window 12 and 3 sinks: 400 tokens in a model of 320 positions, a few blocks at a time."""
    model = computed(make, numerics)
    spec = CacheSpec(block_size=4, window=12, sinks=3)
    engine = Engine(model, spec, num_blocks=30, max_batch_tokens=16)
    run = engine.add([1, 2, 3], Options(400, ignore_eos=True))[0]
    for _ in engine.stream():
        pass
    assert len(run.tokens) == 400
    assert engine.stats.peak_blocks <= 6
    assert run.tokens == alone([1, 2, 3], Options(400, ignore_eos=True), spec, model).tokens


def test_numpy_integers_are_tokens():
    assert Engine(MODEL).generate([np.array([1, 2])], Options(2))[0].tokens == alone([1, 2], Options(2), CacheSpec()).tokens
