"""Beam search against transformers on random weights, and against trying everything."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from nanokv.beam import beam_search
from nanokv.errors import UsageError
from nanokv.generate import Options
from nanokv.kv.spec import CacheSpec
from nanokv.models.gpt2 import forward, random_params
from nanokv.sampling import SamplingParams, log_softmax
from tests.llama_support import tiny_llama
from tests.support import EXACT_KERNELS, nan_cache, small_config, tiny_model

SPEC = CacheSpec("paged", block_size=4)


def test_as_many_beams_as_texts_find_the_best_text():
    """Two tokens of a vocabulary cut to 6 by the logits of the others: 36 texts, all tried."""
    model = tiny_model(layers=1, eos=False)
    allowed = [5, 9, 100, 300, 1000, 4000]
    bias = np.full(4096, -1e4, np.float32)
    bias[allowed] = 0

    class Biased(type(model)):
        def forward(self, tokens, cache, rows=slice(None)):
            return super().forward(tokens, cache, rows) + bias

    biased = Biased(**vars(model))
    found = beam_search(biased, [1, 2, 3], Options(2), SPEC, beams=36).beams

    def logprob(text):
        logits = forward(model.params, np.array([1, 2, 3, *text]), nan_cache(model.config, 9)) + bias
        return sum(log_softmax(logits[2 + i])[token] for i, token in enumerate(text))

    everything = sorted(itertools.product(allowed, repeat=2), key=lambda text: -logprob(text))
    assert [tuple(beam.tokens) for beam in found[:10]] == everything[:10]
    assert found[0].logprob == pytest.approx(logprob(everything[0]), abs=1e-9)


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("beams", [2, 4])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_beams_agree_with_transformers(beams, penalty, seed):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from benchmarks.peers import torch_gpt2

    model = tiny_model(seed=seed, layers=2)
    prompt = np.random.default_rng(seed).integers(0, 4095, 10).tolist()
    logits = forward(model.params, np.array(prompt), nan_cache(model.config, 10))[-1]
    end = int(np.argsort(-logits)[3])  # a likely token ends the text, so that beams finish at different lengths
    model = type(model)(**{**vars(model), "eos_token_ids": frozenset({end})})
    found = beam_search(model, prompt, Options(12), SPEC, beams, penalty)
    theirs = torch_gpt2(model.params)
    with torch.no_grad():
        out = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, num_beams=beams, num_return_sequences=beams, length_penalty=penalty,
            do_sample=False, early_stopping=False, eos_token_id=end, pad_token_id=0, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
    for beam, sequence, score in zip(found.beams, out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        text = sequence[10:]
        text = text[: text.index(end) + 1] if end in text else text
        assert beam.tokens == text
        assert beam.score == pytest.approx(score, abs=1e-4)  # float32 sums of 12 logarithms there, float64 here


def test_beams_share_what_they_have_in_common():
    model = tiny_model()
    found = beam_search(model, list(range(40)), Options(10, ignore_eos=True), SPEC, beams=4)
    assert found.peak_table_blocks - found.peak_blocks >= 3 * 10  # ten full blocks of the prompt, once instead of four times
    assert found.bytes_saved == (found.peak_table_blocks - found.peak_blocks) * 4 * 2 * 2 * 4 * 8 * 4


@EXACT_KERNELS
@pytest.mark.parametrize("spec", [CacheSpec("paged", window=16, sinks=2), CacheSpec("paged", 32, kv_dtype="int4")])
@pytest.mark.parametrize("make", [tiny_model, tiny_llama])
def test_beams_on_windows_and_codecs_equal_their_own_recomputation(make, spec, numerics):
    """The log-probability of the best beam, summed again by one run over its text."""
    model = make(numerics)
    prompt = list(range(100, 130))
    best = beam_search(model, prompt, Options(8, ignore_eos=True), spec, beams=3).beams[0]
    cache = model.new_cache(60, CacheSpec(window=spec.window, sinks=spec.sinks, kv_dtype=spec.kv_dtype))
    logits = model.forward(prompt + best.tokens, cache)
    again = sum(log_softmax(logits[29 + i])[token] for i, token in enumerate(best.tokens))
    assert best.logprob == again


def test_no_more_beams_than_tokens():
    """More could not begin differently: as many as the vocabulary has are searched, one more is refused before any work."""
    model = replace(tiny_model(eos=False), params=random_params(small_config(1), scale=0.3))
    found = beam_search(model, [1], Options(2), SPEC, beams=61)
    assert len({tuple(beam.tokens) for beam in found.beams}) == 61
    with pytest.raises(UsageError, match="beams 62 is out of range: 2 to 61 with this model"):
        beam_search(model, [1], Options(2), SPEC, beams=62)


@pytest.mark.parametrize("penalty", [float("nan"), float("inf")])
def test_a_length_penalty_that_ranks_nothing_is_refused(penalty):
    with pytest.raises(UsageError, match=f"length-penalty {penalty}"):
        beam_search(tiny_model(), [1], Options(), SPEC, 2, penalty)


@pytest.mark.parametrize(("options", "beams", "words"), [
    (Options(), 1, "beams 1"), (Options(), 513, "beams 513 is out of range: 2 to 512"),
    (Options(sampling=SamplingParams(0.5)), 2, "leave out temperature"),
    (Options(stop=("x",)), 2, "stop strings"), (Options(logprobs=2), 2, "logprobs"),
])  # fmt: skip
def test_flags_that_do_not_go_with_beams_are_refused(options, beams, words):
    with pytest.raises(UsageError, match=words):
        beam_search(tiny_model(), [1], options, SPEC, beams)
