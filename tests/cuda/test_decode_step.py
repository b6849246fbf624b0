"""The fixed step as generate and the engine use it, on the stand-in device: the results of the compiled CPU kernels, which
have no such step, and little that is asked of the card."""

import gc
import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

pytest.importorskip("numba", exc_type=ImportError)
from nanokv.backend import NUMPY, get_backend, to_numpy
from nanokv.engine import Engine
from nanokv.errors import CapacityError, TokenizerError, UsageError
from nanokv.generate import Options
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import Batch, Visibility
from nanokv.models import gpt2, llama
from nanokv.models.decode_step import DecodeStep, Steps, tiles_seen
from nanokv.numerics import COMPILED
from nanokv.sampling import SamplingParams
from tests.cuda.stand_in import both_memories
from tests.llama_support import small_llama
from tests.support import ROOT, examples, small_config, tiny_model

FAMILIES = {"gpt2": gpt2, "llama": llama}
VOCAB = 61


def small_params(family, layers=1, **more):
    shape = {"heads": 4, "kv_heads": 2, "dim": 8, "vocab": VOCAB, **more}
    return family.random_params((small_config if family is gpt2 else small_llama)(layers, **shape), scale=0.3)


def on_both(params):
    """A model on the host and on the card, by compiled kernels."""
    return [
        replace(tiny_model(eos=False), params=params.to(memory), backend=backend, numerics=COMPILED)
        for memory, backend in zip(both_memories(), (NUMPY, get_backend("cupy")), strict=True)
    ]


@st.composite
def requests(draw):
    """What an engine is asked: a prompt, perhaps with a beginning that others have too, how many copies, and options."""
    prompt = [*range(draw(st.sampled_from([0, 0, 16, 35]))), *draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))]
    temperature, penalty = draw(st.sampled_from([(0.0, 1.0), (0.0, 1.0), (0.0, 1.3), (0.8, 1.0)]))
    sampling = SamplingParams(temperature, seed=draw(st.integers(0, 9)), repetition_penalty=penalty)
    options = Options(draw(st.integers(1, 9)), sampling, logprobs=draw(st.sampled_from([0, 0, 0, 2])))
    return prompt, options, draw(st.integers(1, 2)) if temperature else 1


@examples(8, suppress_health_check=[*HealthCheck])
@given(
    st.sampled_from(list(FAMILIES)),
    st.sampled_from([(None, None), ("int8", None), ("float16", 9), ("bfloat16", None), ("fp8", 40)]),
    st.sampled_from([8, 16]),
    st.lists(requests(), min_size=1, max_size=4),
    st.integers(9, 40),
    st.integers(1, 4),
)
def test_an_engine_on_the_card_gives_what_it_gives_on_the_host(meter, family, kv, block_size, asked, blocks, together):
    """Sequences that join, finish, fork, find a prefix and are preempted, greedy ones beside others: tokens, text, ends,
    log-probabilities, and what the engine counted."""
    kv_dtype, window = kv
    spec = CacheSpec("paged", block_size, window, None, kv_dtype)
    results = []
    for model in on_both(small_params(FAMILIES[family])):
        engine = Engine(model, spec, num_blocks=blocks, max_batch_tokens=20, max_sequences=together)
        runs = []
        for prompt, options, n in asked:
            try:
                runs += engine.add(prompt, options, n)
            except CapacityError:
                continue
            engine.step()
        for _ in engine.stream():
            pass
        stats = engine.stats
        assert not any(to_numpy(plane[:, 0]).view(np.uint8).any() for plane in engine.pool.storage.planes)  # the null block
        results.append([
            [(run.tokens, run.text, run.finish_reason, run.logprobs) for run in runs],
            (stats.steps, stats.preemptions, stats.prefix_hit_tokens, stats.peak_blocks, engine.pool.blocks.num_free),
        ])  # fmt: skip
    assert results[0] == results[1]


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
@pytest.mark.parametrize("spec", [CacheSpec(), CacheSpec(window=40, kv_dtype="int8"), CacheSpec("paged", 16, 20)], ids=str)
def test_a_generation_decodes_by_one_graph(meter, spec, activation):
    """Any cache of one memory, contiguous ones too; forward() copies the logits where somebody asks for them."""
    host, card = on_both(small_params(gpt2, activation=activation))
    options = {
        "max_tokens": 9,
        "cache": spec.kind,
        "window": spec.window,
        "kv_dtype": spec.kv_dtype,
        "block_size": spec.block_size,
    }
    prompt = np.random.default_rng(0).integers(0, VOCAB, 122).tolist()
    expected = host.generate(prompt, **options).tokens
    meter.read()
    assert card.generate(prompt, **options).tokens == expected
    counts = meter.read()
    assert counts["graphs"] == 7  # of 8 steps, the first loads the kernels
    assert counts["copies from the card"] == 9
    for more in ({"temperature": 0.9, "seed": 1}, {"repetition_penalty": 1.5}, {"logprobs": 3}):
        runs = [model.generate(prompt, **options, **more) for model in (host, card)]
        assert runs[0].tokens == runs[1].tokens
        assert runs[0].logprobs == runs[1].logprobs
        assert len(runs[1].logprobs) == 9 * ("logprobs" in more)
        assert (runs[1].tokens == expected) == ("logprobs" in more)
    assert meter.read()["graphs"] == 3 * 7


@pytest.mark.parametrize(
    "shape", [{"qk_norm": True}, {"qkv_bias": True, "mlp_bias": True, "output_bias": True, "windows": (30, 30)}]
)
def test_every_part_of_a_llama_is_in_the_step(meter, shape):
    host, card = on_both(small_params(llama, 2, **shape))
    logits = []
    for model in (host, card):
        cache = model.new_cache(160, CacheSpec("paged", 16))
        model.prefill(list(range(50)) * 2 + list(range(25)), cache)
        logits.append([to_numpy(model.forward([token], cache)) for token in range(6)])
    assert np.array_equal(*logits)
    assert meter.read()["graphs"] == 5


def test_logits_outlive_the_next_step(meter):
    """And rows are those that were asked for, in their order."""
    host, card = on_both(small_params(gpt2))
    batches, kept = [], []
    for model in (host, card):
        pool = model.new_pool(20, CacheSpec("paged", 16))
        batches.append(Batch([(pool.new_sequence(), 1) for _ in range(3)]))
        rows = [2, 0], slice(None), [0, 1, 2], slice(-1, None)
        kept.append([model.forward([token, 5, 9], batches[-1], each) for token, each in enumerate(rows)])
    assert all(np.array_equal(one, other.get()) for one, other in zip(*kept, strict=True))
    assert np.array_equal(*(model.best([1, 2, 3], batch, [2, 1]) for model, batch in zip((host, card), batches, strict=True)))
    assert meter.read()["graphs"] == 4


def test_what_a_step_cannot_serve_goes_through_forward(meter):
    """Two tokens of a sequence, caches apart, int4, sinks, layers that see differently: the same bits, without a graph."""
    host, card = on_both(small_params(llama, 2))
    mixed = on_both(small_params(llama, 2, windows=(None, 9)))
    cases = [
        ((host, card), CacheSpec("paged", 16), [2, 1]), ((host, card), CacheSpec(), [1, 1]),
        ((host, card), CacheSpec("paged", 32, kv_dtype="int4"), [1, 1]), ((host, card), CacheSpec("paged", 16, 9, 2), [1, 1]),
        (mixed, CacheSpec("paged", 16), [1, 1]), (mixed, CacheSpec(), [1]),
    ]  # fmt: skip
    for models, spec, counts in cases:
        found = []
        for model in models:
            pool = model.new_pool(40, spec) if spec.kind == "paged" else None
            batch = Batch([(pool.new_sequence() if pool else model.new_cache(40, spec), count) for count in counts])
            tokens = list(range(sum(counts)))
            found.append([to_numpy(model.forward(tokens, batch)) for _ in range(12)] + [model.best(tokens, batch)])
        assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))
    assert "graphs" not in meter.read()


def test_a_refused_step_changes_nothing(meter):
    """In the words of forward(): an unknown token, a position past the model's, a cache that shows a layer too much."""
    models = on_both(small_params(llama, positions=8, windows=(4,)))
    said = []
    for model in models:
        pool, words = model.new_pool(9, CacheSpec("paged", 16)), []
        cache = pool.new_sequence()
        for token in range(8):
            model.forward([token], cache)
        wide = model.new_pool(9, CacheSpec("paged", 16)).new_sequence()
        wide.pool.visibility[:] = [Visibility()]
        for token, one, kind in ((VOCAB, cache, TokenizerError), (1, cache, CapacityError), (1, wide, UsageError)):
            for call in (model.forward, model.best):
                with pytest.raises(kind) as caught:
                    call([token], one)
                words.append(str(caught.value))
        said.append(words)
        assert (cache.length, wide.length) == (8, 0)
    assert said[0] == said[1]


def growth(meter, family, batch, spec):
    """What each of 40 greedy steps asks of the card, from the first token on."""
    _, card = on_both(small_params(family, 2))
    pool = card.new_pool(30, spec)
    cache, found = Batch([(pool.new_sequence(), 1) for _ in range(batch)]), []
    for token in range(40):
        meter.read()
        card.best([token] * batch, cache)
        found.append(meter.read())
    return found


LAUNCHES = {"gpt2": (7, 17), "llama": (5, 19)}  # of a step, and of each of its layers


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_decoded_token_asks_for_one_copy_each_way_and_one_graph(meter, family, batch):
    """Exactly, and no memory: the numbers of docs/gpu.md. Where a block begins, array code clears its keys and its values."""
    found = growth(meter, FAMILIES[family], batch, CacheSpec("paged", 16))
    once, each = LAUNCHES[family]
    for step, counts in enumerate(found[1:], 1):
        expected = {"copies to the card": 1, "graphs": 1, "launches": once + 2 * each, "copies from the card": 1}
        assert counts == expected | ({"array writes": 2 * batch} if step % 16 == 0 else {})
    assert found[0]["copies to the card"] == 2  # the addresses of the layers, once
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert f"{once} + {each} L" in text


def test_steps_are_few_and_go_with_their_memory(meter, monkeypatch):
    """One for each power of two of sequences; a longer one takes the place of a shorter. Nothing keeps them from going."""
    made, real = [], DecodeStep.__init__

    def counted(self, params, cache, batch, most_tokens):
        made.append((batch, most_tokens))
        real(self, params, cache, batch, most_tokens)

    monkeypatch.setattr(DecodeStep, "__init__", counted)
    monkeypatch.setattr("nanokv.models.decode_step.LEAST_TILES", 1)
    _, card = on_both(small_params(gpt2))
    pool = card.new_pool(60, CacheSpec("paged", 16))
    caches = [pool.new_sequence() for _ in range(5)]
    for count in (1, 2, 3, 4, 5, 4, 3, 1):
        card.best([1] * count, Batch([(cache, 1) for cache in caches[:count]]))
    assert made == [(1, 128), (2, 128), (4, 128), (8, 128)]
    card.prefill(list(range(60)) * 2 + [0] * 8, caches[0])
    for _ in range(3):
        card.best([1], caches[0])
    assert made[4:] == [(1, 256)]
    gc.collect()
    gc.disable()
    try:
        held = sum(array.nbytes for array in list(meter.memory.values()))
        del pool, caches
        weights = sum(array.nbytes for array in list(meter.memory.values()))
        assert weights < held
        del card
        assert not meter.memory
    finally:
        gc.enable()


def test_a_window_bounds_what_a_step_is_made_for():
    assert [tiles_seen(Visibility(), tokens) for tokens in (1, 128, 129, 5000)] == [1, 1, 2, 40]
    assert [tiles_seen(Visibility(128), tokens) for tokens in (1, 129, 5000)] == [1, 2, 2]
    assert [tiles_seen(Visibility(130, 3), tokens) for tokens in (128, 5000)] == [1, 4]


def test_a_capture_that_fails_costs_the_graph_alone(meter, monkeypatch, caplog):
    """One line says so, once for a model; the launches go on, and no capture is left open."""
    host, card = on_both(small_params(gpt2))
    ended = []

    class Broken(SimpleNamespace):
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def begin_capture(self):
            raise RuntimeError("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: no\nsecond line")

    class BrokenAtTheEnd(Broken):
        def begin_capture(self):
            meter.captured = []

        def end_capture(self):
            meter.captured = None
            ended.append(True)
            raise RuntimeError("the capture was invalidated")

    for stream, words in (
        (Broken, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: no"),
        (BrokenAtTheEnd, "the capture was invalidated"),
    ):
        model = replace(card, params=replace(card.params))
        monkeypatch.setattr(model.backend.xp.cuda, "Stream", stream)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "nanokv"):
            for _ in range(2):
                tokens = model.generate([1, 2, 3], max_tokens=5, cache="paged").tokens
                assert tokens == host.generate([1, 2, 3], max_tokens=5, cache="paged").tokens
        (record,) = caplog.records
        assert record.getMessage() == f"no CUDA graph ({words}): a decoded token is launched kernel by kernel"
    assert ended == [True]
    assert "graphs" not in meter.read()
    assert model.params.beside(Steps) is model.params.beside(Steps)


@pytest.mark.parametrize("spec", [CacheSpec("paged", 16), CacheSpec("paged", 16, kv_dtype="int8")], ids=str)
def test_a_batch_through_forward_is_written_at_once(meter, spec):
    """One launch for the keys of all sequences and one for the values, whose places are sent once for all layers."""
    _, card = on_both(small_params(gpt2, 2))
    pool = card.new_pool(30, spec)
    caches = [pool.new_sequence() for _ in range(3)]
    counts = []
    for members in (caches[:1], caches):
        batch = Batch([(cache, 2) for cache in members])
        for _ in range(2):
            meter.read()
            card.hidden_states([1, 2] * len(members), batch)
            counts.append(meter.read())
    assert counts[1]["launches"] == counts[3]["launches"]
    assert counts[3]["copies to the card"] == counts[1]["copies to the card"] + 1
