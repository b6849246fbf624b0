"""One prompt from text to text: the same with and without a cache, ended for the right reason, nothing lost on the way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import CapacityError, TokenizerError, UsageError
from nanokv.generate import Generation, Options, top_logprobs
from nanokv.kv.contiguous import ContiguousCache
from nanokv.models import gpt2
from nanokv.numerics import EXACT, FAST
from nanokv.sampling import SamplingParams, log_softmax
from tests.support import examples, nan_cache, tiny_model

MODEL = tiny_model()
PROMPTS = st.lists(st.integers(0, 4095), min_size=1, max_size=40)


@examples(15)
@given(PROMPTS, st.integers(1, 12), st.sampled_from([0.0, 0.7]), st.integers(0, 99))
def test_with_and_without_a_cache_everything_is_equal(prompt, count, temperature, seed):
    runs = [
        MODEL.generate(prompt, max_tokens=count, temperature=temperature, seed=seed, cache=cache, logprobs=3, top_k=50)
        for cache in ("contiguous", "none")
    ]
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].text == runs[1].text
    assert runs[0].logprobs == runs[1].logprobs  # to the last bit


def test_unused_memory_is_never_read(monkeypatch):
    expected = MODEL.generate([1, 2, 3], max_tokens=10).tokens
    monkeypatch.setattr(type(MODEL), "new_cache", lambda self, capacity=None, spec=None: nan_cache(self.config, capacity))
    assert MODEL.generate([1, 2, 3], max_tokens=10).tokens == expected


@examples(15)
@given(PROMPTS, st.integers(1, 20))
def test_streamed_pieces_are_the_text(prompt, count):
    run = MODEL.stream(prompt, max_tokens=count, temperature=1.0, seed=1, ignore_eos=True)
    pieces = list(run)
    assert "".join(pieces) == run.text == MODEL.decode(run.tokens)
    assert len(run.tokens) == count
    assert run.finish_reason == "length"


def test_greedy_decoding_is_the_best_token_of_the_uncached_model():
    text = [5, 6, 7]
    for token in MODEL.generate(text, max_tokens=6, ignore_eos=True).tokens:
        logits = gpt2.forward(MODEL.params, np.array(text), nan_cache(MODEL.config, 50))
        assert token == logits[-1].argmax()
        text.append(token)


def test_max_tokens_counts_new_tokens():
    assert len(MODEL.generate(list(range(10)), max_tokens=5, ignore_eos=True).tokens) == 5


def test_the_model_ends_at_its_last_position_and_says_so():
    """320 positions and a prompt of 310: 10 tokens, whatever was asked for; a full context makes none."""
    run = MODEL.generate([1] * 310, max_tokens=50, ignore_eos=True)
    assert (len(run.tokens), run.finish_reason) == (10, "context")
    run = MODEL.generate([1] * 320, max_tokens=50)
    assert (run.tokens, run.finish_reason, run.text) == ([], "context", "")
    exact = MODEL.generate([1] * 310, max_tokens=10, ignore_eos=True)
    assert exact.finish_reason == "length"
    for cache in ("contiguous", "none"):
        with pytest.raises(CapacityError, match="321 tokens.*320 positions"):
            MODEL.generate([1] * 321, cache=cache)


def always(token, monkeypatch):
    """A model that says one token for ever."""
    real = gpt2.unembed

    def unembed(*args, **kwargs):
        logits = real(*args, **kwargs)
        logits[:, token] = 1e9
        return logits

    monkeypatch.setattr(gpt2, "unembed", unembed)


def test_end_of_text_ends_it_and_is_not_text(monkeypatch):
    always(4095, monkeypatch)
    run = MODEL.generate([1, 2])
    assert (run.tokens, run.text, run.finish_reason) == ([4095], "", "eos")
    run = MODEL.generate([1, 2], ignore_eos=True, max_tokens=3)
    assert (run.tokens, run.finish_reason) == ([4095] * 3, "length")
    assert run.text == "<|endoftext|>" * 3


def logits_of(token, others=()):
    logits = np.zeros(4096, np.float32)
    logits[token] = 9
    logits[list(others)] = 8
    return logits


def test_a_fork_has_its_own_tokens_and_its_own_held_back_text():
    the, other = MODEL.encode(" the")[0], MODEL.encode(" a")[0]
    run = MODEL.stream([1], stop="e th")
    assert run.advance(logits_of(the)) == " th"
    child = run.fork(run.options)
    assert (child.advance(logits_of(the)), child.finish_reason) == ("", "stop")
    assert (run.advance(logits_of(other)), run.finish_reason) == ("e a", None)
    assert (run.tokens, child.tokens) == ([the, other], [the, the])
    assert (run.text, child.text) == (" the a", " th")


def test_a_repetition_penalty_counts_the_prompt():
    run = MODEL.stream([5], repetition_penalty=2.0)
    run.advance(logits_of(5, [6]))
    run.advance(logits_of(5, [6, 7]))
    assert run.tokens == [6, 7]


def test_the_text_before_an_end_of_text_is_kept(monkeypatch):
    """The control token decodes to nothing here, and nothing else is cut with it."""
    said = iter([*MODEL.encode(" the dog"), 4095])
    real = gpt2.unembed

    def unembed(*args, **kwargs):
        logits = real(*args, **kwargs)
        logits[:, next(said)] = 1e9
        return logits

    monkeypatch.setattr(gpt2, "unembed", unembed)
    run = MODEL.generate([1, 2], stop="dog!")
    assert (run.text, run.finish_reason) == (" the dog", "eos")


def test_an_option_that_is_none_of_ours_is_refused():
    with pytest.raises(UsageError, match="unknown option 'max_length'"):
        MODEL.generate([1], max_length=5)


def test_a_format_that_cannot_be_stored_is_refused_before_anything_is_shown():
    with pytest.raises(UsageError, match="scale 0.0"):
        MODEL.stream([1], kv_dtype="fp8", kv_scale=0.0)


def test_a_stop_string_across_tokens(monkeypatch):
    """The same token again and again; the stop string begins in one and ends in the next."""
    token = MODEL.encode(" the")[0]
    always(token, monkeypatch)
    run = MODEL.generate([1], stop="e th", max_tokens=20)
    assert (run.text, run.finish_reason, len(run.tokens)) == (" th", "stop", 2)
    run = MODEL.generate([1], stop=["xyz", " the the the"], max_tokens=20)
    assert (run.text, run.finish_reason) == ("", "stop")
    run = MODEL.generate([1], stop="the z", max_tokens=3)
    assert run.text == " the the the"


def test_a_character_cut_by_the_end_is_replaced(monkeypatch):
    first = MODEL.tokenizer.encode("\u20ac")[0]  # the first byte or bytes of a character of three
    assert MODEL.tokenizer.token_bytes(first) != "\u20ac".encode()
    always(first, monkeypatch)
    run = MODEL.stream([1], max_tokens=1)
    assert list(run) == ["\ufffd"]
    run = MODEL.stream([1], max_tokens=2)
    assert list(run) == ["", "\ufffd\ufffd"]


def test_an_interrupt_keeps_the_text_so_far(monkeypatch):
    always(MODEL.encode(" the")[0], monkeypatch)
    run = MODEL.stream([1], stop="the X", max_tokens=20)
    pieces = iter(run)
    shown = [next(pieces), next(pieces)]
    shown.append(run.interrupt())
    assert "".join(shown) == run.text == " the the"
    assert run.finish_reason == "interrupted"


def test_a_generation_runs_once():
    run = MODEL.generate([1], max_tokens=1)
    with pytest.raises(UsageError, match="already run"):
        run.run()


def test_a_decode_step_feeds_one_token(monkeypatch):
    """The prompt once, then only what is new: the cache is not silently off."""
    fed = []
    real = gpt2._layers
    monkeypatch.setattr(gpt2, "_layers", lambda p, tokens, *a: fed.append(len(tokens)) or real(p, tokens, *a))
    run = MODEL.generate(list(range(30)), max_tokens=5, ignore_eos=True)
    assert fed == [30, 1, 1, 1, 1]
    assert run.cache_tokens == 34
    assert run.cache_bytes == 34 * 2 * 2 * 4 * 8 * 4
    fed.clear()
    MODEL.generate(list(range(30)), max_tokens=5, ignore_eos=True, cache="none")
    assert fed == [30, 31, 32, 33, 34]


def test_logprobs_are_those_of_the_raw_logits():
    run = MODEL.generate([3, 4], max_tokens=1, logprobs=4, temperature=2.0, seed=0, repetition_penalty=1.5)
    logits = gpt2.forward(MODEL.params, np.array([3, 4]), nan_cache(MODEL.config, 5))[-1]
    expected = log_softmax(logits)
    step = run.logprobs[0]
    assert step.token == run.tokens[0]
    assert step.logprob == expected[step.token]
    assert [token for token, _ in step.top] == np.argsort(-expected, kind="stable")[:4].tolist()
    assert [value for _, value in step.top] == sorted(expected)[::-1][:4]


def test_logprobs_do_not_change_the_text():
    plain, noted = (MODEL.generate([3, 4], max_tokens=8, repetition_penalty=2.0, logprobs=n).tokens for n in (0, 2))
    assert plain == noted


def test_equal_logits_are_listed_by_id():
    assert top_logprobs(np.zeros(5, np.float32), 3, 2).top == ((0, -np.log(5)), (1, -np.log(5)))


def test_fast_numerics_and_a_fast_model_agree_on_clear_cases():
    fast = tiny_model(FAST)
    assert fast.generate([1, 2, 3], max_tokens=5).tokens == MODEL.generate([1, 2, 3], max_tokens=5).tokens
    assert (MODEL.numerics, fast.numerics) == (EXACT, FAST)


@pytest.mark.parametrize(("prompt", "options", "error", "words"), [
    ("", {}, UsageError, "empty"), ([], {}, UsageError, "empty"), ([4096], {}, TokenizerError, "4096"),
    ([1], {"max_tokens": 0}, UsageError, "max-tokens 0"), ([1], {"max_tokens": -5}, UsageError, "max-tokens -5"),
    ([1], {"cache": "ring"}, UsageError, "'ring'.*contiguous, paged, none"), ([1], {"logprobs": -1}, UsageError, "logprobs -1"),
    ([1], {"temperature": -1}, UsageError, "temperature -1"), ([1], {"stop": ""}, UsageError, "empty"),
])  # fmt: skip
def test_bad_requests_are_named(prompt, options, error, words):
    with pytest.raises(error, match=words):
        MODEL.generate(prompt, **options)


def test_json_has_the_fields_that_are_promised():
    out = MODEL.generate([1, 2], max_tokens=3, logprobs=2, ignore_eos=True).to_dict()
    assert set(out) == {
        "model", "prompt_tokens", "tokens", "text", "finish_reason", "logprobs", "cache", "numerics", "kernels", "backend",
        "timing",
    }  # fmt: skip
    assert out["cache"] == {"kind": "contiguous", "bytes": 4 * 2 * 2 * 4 * 8 * 4, "tokens": 4}
    assert set(out["timing"]) == {"prefill_s", "decode_s", "decode_ms_per_token"}
    assert [len(step["top"]) for step in out["logprobs"]] == [2, 2, 2]
    assert MODEL.generate([1], max_tokens=1).to_dict()["timing"]["decode_ms_per_token"] is None


def test_options_are_checked_once_and_kept():
    options = Options(max_tokens=3, sampling=SamplingParams(seed=1))
    run = Generation(MODEL, [1, 2], options).run()
    assert len(run.tokens) <= 3
    assert isinstance(MODEL.new_cache(), ContiguousCache)
    assert MODEL.new_cache().capacity == 320
