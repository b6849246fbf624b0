import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import UsageError
from nanokv.sampling import Sampler, SamplingParams, StopStrings, count_kept, log_softmax, penalise_repetition, softmax

LOGITS = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40).map(lambda values: np.array(values, np.float32))


def draws(logits, count=200, **params):
    sampler = Sampler(SamplingParams(**{"seed": 0} | params))
    return [sampler.choose(logits, []) for _ in range(count)]


@given(LOGITS)
def test_temperature_zero_is_the_best_token_without_a_warning(logits):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Sampler(SamplingParams(temperature=0)).choose(logits, []) == int(np.argmax(logits))


@given(LOGITS, st.integers(0, 1 << 40), st.floats(0.01, 5))
def test_a_seed_repeats_itself(logits, seed, temperature):
    a, b = (draws(logits, 20, seed=seed, temperature=temperature) for _ in range(2))
    assert a == b


@given(LOGITS, st.integers(1, 50), st.floats(0, 1), st.floats(0, 1))
def test_every_draw_passes_every_filter(logits, top_k, top_p, min_p):
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    probabilities = softmax(logits)
    chosen = draws(logits, 30, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    for token in chosen:
        place = order.tolist().index(token)
        assert place < top_k
        assert probabilities[token] >= min_p * probabilities.max() or token == order[0]
        before = probabilities[order[:place]].sum() / probabilities[order[:top_k]].sum()
        assert before < top_p + 1e-12 or place == 0  # what came before had not reached p: float64 sums of 40 terms


@pytest.mark.parametrize(("probabilities", "options", "kept"), [
    ([0.9, 0.1], {"top_p": 0.01}, 1), ([0.9, 0.1], {"top_p": 0.0}, 1), ([0.5, 0.3, 0.15, 0.05], {"top_p": 0.75}, 2),
    ([0.5, 0.3, 0.15, 0.05], {"top_p": 1.0}, 4), ([0.5, 0.3, 0.15, 0.05], {"top_k": 3}, 3),
    ([0.5, 0.3, 0.15, 0.05], {"top_k": 99}, 4), ([0.5, 0.3, 0.15, 0.05], {"min_p": 0.25}, 3),
    ([0.5, 0.25, 0.25], {"min_p": 0.5}, 3),
    ([0.5, 0.3, 0.15, 0.05], {"min_p": 1.0}, 1), ([0.4, 0.4, 0.2], {"top_k": 2, "top_p": 0.6}, 2),
])  # fmt: skip
def test_how_many_tokens_the_filters_keep(probabilities, options, kept):
    assert count_kept(np.array(probabilities), SamplingParams(**options)) == kept


def test_draws_follow_the_distribution():
    """20,000 draws: each share within 5 standard deviations of its probability."""
    logits = np.log(np.array([0.6, 0.3, 0.1]))
    shares = np.bincount(draws(logits, 20000, temperature=1.0), minlength=3) / 20000
    for share, p in zip(shares, [0.6, 0.3, 0.1], strict=True):
        assert abs(share - p) < 5 * np.sqrt(p * (1 - p) / 20000)
    cold = np.bincount(draws(logits, 20000, temperature=0.5), minlength=3) / 20000
    squared = np.array([0.36, 0.09, 0.01]) / 0.46
    assert np.all(np.abs(cold - squared) < 5 * np.sqrt(squared * (1 - squared) / 20000))


def test_a_large_vocabulary_in_float32_draws_without_complaint():
    """Probabilities of 50257 float32 logits need not sum to 1 in float64: the draw must not care."""
    logits = np.random.default_rng(0).standard_normal(50257).astype(np.float32)
    assert all(0 <= token < 50257 for token in draws(logits, 50, temperature=1.0))


def test_repetition_penalty_divides_the_positive_and_multiplies_the_negative_once():
    logits = np.array([2.0, -2.0, 1.0, -1.0])
    assert penalise_repetition(logits, [0, 1, 1, 0, 0], 2.0).tolist() == [1.0, -4.0, 1.0, -1.0]
    assert logits.tolist() == [2.0, -2.0, 1.0, -1.0]
    assert Sampler(SamplingParams(repetition_penalty=3.0)).choose(logits, [0]) == 2


@given(LOGITS)
def test_log_softmax_is_the_logarithm_of_softmax(logits):
    np.testing.assert_allclose(
        np.exp(log_softmax(logits)), softmax(logits), rtol=1e-13, atol=1e-300
    )  # exp of up to 100, eps each


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1), ("top_p", 1.1),
    ("top_p", -0.1), ("top_p", float("nan")), ("min_p", 2.0), ("repetition_penalty", 0.0), ("repetition_penalty", float("nan")),
    ("seed", -1),
])  # fmt: skip
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(UsageError, match=name.replace("_", "-")):
        SamplingParams(**{name: value})


def shown(stops, pieces):
    watch, out = StopStrings(stops), []
    for piece in pieces:
        out.append(watch.push(piece))
        if watch.stopped:
            break
    else:
        out.append(watch.finish())
    return out, watch.stopped


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("abc", max_size=3), max_size=12))
def test_stop_strings_cut_where_the_whole_text_would_be_cut(stops, pieces):
    """Whatever the pieces: the text before the first place where a stop string is complete."""
    out, stopped = shown(stops, pieces)
    text, expected = "", None
    for piece in pieces:
        text += piece
        found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
        if found:
            expected = text[: min(found)]
            break
    assert stopped == (expected is not None)
    assert "".join(out) == (text if expected is None else expected)


def test_nothing_of_a_stop_string_is_ever_shown_and_nothing_else_is_held():
    assert shown(["\n\n"], ["a\n", "b\n", "\nc"]) == (["a", "\nb", ""], True)
    assert shown(["stop"], ["hello", " world"]) == (["hello", " world", ""], False)
    assert shown(["END"], ["no E", "ND in", " sight"]) == (["no ", ""], True)
    assert shown(["END"], ["no EN"]) == (["no ", "EN"], False)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="empty"):
        StopStrings(["a", ""])
