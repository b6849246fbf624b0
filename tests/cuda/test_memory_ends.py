"""Memory that runs out on the card, at every request: an error by name, nothing lost, and afterwards the same bits."""

import gc
import re
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

pytest.importorskip("numba", exc_type=ImportError)
import cli
import nanokv
from nanokv.backend import NUMPY, asking_for, get_backend, to_numpy
from nanokv.engine import Engine
from nanokv.errors import BackendError, OutOfMemory
from nanokv.generate import Options
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import Batch
from nanokv.models import gpt2, llama
from nanokv.numerics import COMPILED
from nanokv.sampling import SamplingParams
from tests.cuda.stand_in import OutOfMemoryError, both_memories
from tests.llama_support import small_llama
from tests.support import small_config, tiny_model
from tests.weights.llama_files import gguf_arrays, gguf_metadata, write_gguf

WORDS = r"no memory on the card for .+ \(Out of memory allocating [\d,]+ bytes .*1,024 of its 16,000 bytes are free\): .+"


def on_both(params=None):
    """A model on the host and on the card, by compiled kernels."""
    model, backends = tiny_model(eos=False), (NUMPY, get_backend("cupy"))
    params = params or gpt2.random_params(small_config(1), scale=0.3)
    return [
        replace(model, params=params.to(memory), backend=backend, numerics=COMPILED)
        for memory, backend in zip(both_memories(), backends, strict=True)
    ]


def insisted(meter, work, check=lambda: None):
    """What `work` gives once enough requests for memory are granted; before, with ever more of them, it is OutOfMemory, after
    which `check` holds. Also how often that was."""
    refused = 0
    while True:
        try:
            with meter.refusing(refused):
                return work(), refused
        except OutOfMemory as error:
            said = str(error)
        assert re.fullmatch(WORDS, said)
        check()
        refused += 1


SPECS = [
    CacheSpec(), CacheSpec("paged", 16), CacheSpec("paged", 32, kv_dtype="int4"), CacheSpec(kv_dtype="int4"),
    CacheSpec("paged", 8, 20, 3, "fp8"), CacheSpec(window=30, kv_dtype="bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("family", [gpt2, llama])
def test_a_step_that_runs_out_leaves_the_cache_as_it_was(meter, family, spec):
    """Making a cache, a step across the edge of a tile, a fork, both sequences in one batch: each at every request."""
    host, card = on_both(family.random_params(small_config(1) if family is gpt2 else small_llama(1), scale=0.3))
    tokens = np.random.default_rng(0).integers(0, 50, 140)
    expected = [host.new_cache(300, spec)]
    caches = [insisted(meter, lambda: card.new_cache(300, spec))[0]]
    for model, cache in ((host, expected[0]), (card, caches[0])):
        model.prefill(tokens[:126], cache)

    def step(model, members):
        end = members[0].length
        batch = Batch([(cache, 4) for cache in members])
        return to_numpy(model.forward(np.tile(tokens[end : end + 4], len(members)), batch, rows=[-1, 0]))

    def unchanged():
        assert [cache.length for cache in caches] == lengths

    lengths = [126]
    logits, refused = insisted(meter, lambda: step(card, caches), unchanged)
    assert refused > 10
    assert np.array_equal(logits, step(host, expected))
    lengths = [130]
    expected.append(expected[0].copy())
    caches.append(insisted(meter, caches[0].copy, unchanged)[0])
    lengths = [130, 130]
    for _ in range(2):
        assert np.array_equal(insisted(meter, lambda: step(card, caches), unchanged)[0], step(host, expected))
        lengths = [length + 4 for length in lengths]


@pytest.mark.parametrize("spec", [CacheSpec(), CacheSpec("paged", 8)], ids=str)
def test_a_fixed_step_that_runs_out_is_taken_again(meter, monkeypatch, spec):
    """Its own memory, the logits that are kept, and a longer step in its place: each at every request."""
    monkeypatch.setattr("nanokv.models.decode_step.LEAST_TILES", 1)
    host, card = on_both()
    expected, cache = host.new_cache(300, spec), card.new_cache(300, spec)
    length = 0

    def unchanged():
        assert cache.length == length

    refusals = []
    for rows in (1, 126, 1, 1, 1):
        tokens = np.random.default_rng(length).integers(0, 50, rows)
        logits, refused = insisted(meter, lambda tokens=tokens: to_numpy(card.forward(tokens, cache)), unchanged)
        assert np.array_equal(logits, host.forward(tokens, expected))
        refusals.append(refused)
        length += rows
    best, without_logits = insisted(meter, lambda: card.best([3], cache), unchanged)
    assert best == host.best([3], expected)
    assert refusals[0] > 10  # the first step makes the fixed one, and the fourth one of two tiles
    assert refusals[3] > 10
    assert (refusals[2], refusals[4], without_logits) == (1, 1, 0)


def test_a_pool_that_ran_out_has_all_its_blocks(meter):
    """A fork that differs in a shared block: until its step goes through, no block is lost and none is freed twice."""
    _, card = on_both()
    pool = card.new_pool(20, CacheSpec("paged", 16))
    cache = pool.new_sequence()
    card.prefill(list(range(20)), cache)
    fork = cache.fork()

    def accounted():
        held = {block for each in (cache, fork) for block in each.block_table}
        assert pool.blocks.num_free == 19 - len(held)

    insisted(meter, lambda: card.forward([1], fork), accounted)
    accounted()
    for each in (cache, fork):
        each.reset()
    assert pool.blocks.num_free == 19


def test_a_block_that_cannot_be_copied_is_not_taken(meter, monkeypatch):
    """The card fails while blocks are made ready: pool and table are as they were."""
    _, card = on_both()
    pool = card.new_pool(20, CacheSpec("paged", 16))
    cache = pool.new_sequence()
    card.prefill(list(range(20)), cache)
    fork = cache.fork()
    table, free = list(fork.block_table), pool.blocks.num_free

    def fails(*_):
        raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(pool.storage, "copy_unit", fails)
        with pytest.raises(OutOfMemory, match="for a step of 20 tokens .*out of memory"):
            card.forward(list(range(20)), fork)
    assert (fork.block_table, pool.blocks.num_free, fork.length) == (table, free, 20)
    assert pool.blocks.ref_cnt(table[-1]) == 2


@pytest.mark.parametrize("spec", [CacheSpec("paged", 16), CacheSpec("paged", 32, kv_dtype="int4")], ids=str)
def test_an_engine_goes_on_when_there_is_memory_again(meter, spec):
    """Every step at every request, copies that split off included: the tokens are those of an engine that never ran out."""
    host, card = on_both()
    prompts = [np.random.default_rng(n).integers(0, 60, length).tolist() for n, length in enumerate((7, 125))]
    options = Options(5, SamplingParams(temperature=0.9, seed=3))
    results = []
    for model in (host, card):
        engine = Engine(model, spec, num_blocks=40, max_batch_tokens=200)
        runs = [run for prompt, n in zip(prompts, (3, 1), strict=True) for run in engine.add(prompt, options, n)]
        failures = 0
        while engine.has_work:
            if model is host:
                engine.step()
            else:
                failures += insisted(meter, engine.step)[1]
        results.append([(run.tokens, run.text, run.finish_reason) for run in runs])
        assert engine.pool.blocks.num_free == 39
    assert results[0] == results[1]
    assert failures > 30


def test_loading_that_runs_out_keeps_nothing(meter, tmp_path):
    """At every request of a load: what it had got is free again though the error is still held, and the last one is whole."""
    with meter.refusing(0), pytest.raises(BackendError, match="the card's memory is full"):
        get_backend("cupy")
    params = llama.random_params(small_llama(vocab=260), scale=0.3)
    path = write_gguf(tmp_path / "small.gguf", gguf_metadata(params, "llama"), gguf_arrays(params, "llama"))
    model, seen = None, set()
    for granted in count(1):
        try:
            with meter.refusing(granted):
                model = nanokv.load(str(path), backend="cupy", numerics="exact", weights="int8")
            break
        except OutOfMemory as error:
            seen.add(str(error).split(" (")[0].removeprefix("no memory on the card for ").replace(str(path), "it"))
            if "the weights of" in str(error):
                assert not meter.memory
        gc.collect()
    work = [f"a {what} of {tokens} tokens" for tokens in (1, 16) for what in ("cache", "step")]
    assert seen == {"the weights of it", *work}
    host = nanokv.load(str(path), backend="numpy", numerics="exact", kernels="compiled", weights="int8")
    assert model.generate("Hello", max_tokens=4).tokens == host.generate("Hello", max_tokens=4).tokens


def test_the_command_line_says_it_in_one_line(meter, capsys):
    """Exit code 1, while it loads and while it generates."""
    arguments = ["generate", "Once", "--backend", "cupy", "--numerics", "exact", "--max-tokens", "2", "--no-stream"]
    for granted, words in ((3, "the weights of default"), (None, "a step of")):
        if granted is None:
            meter.requests = 0
            nanokv.load("default", backend="cupy", numerics="exact")
            granted = meter.requests + 60
        with meter.refusing(granted), pytest.raises(SystemExit) as ended:
            cli.main.main(arguments)
        shown = capsys.readouterr()
        assert ended.value.code == 1
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert line.startswith(f"error: no memory on the card for {words}")


def test_the_host_runs_out_in_the_same_words():
    """NumPy's own refusal, and one that is nanokv's already."""
    words = r"^no memory for a pool \(Unable to allocate .+ for an array .+\): use fewer blocks$"
    with pytest.raises(OutOfMemory, match=words), asking_for("a pool", "use fewer blocks", np):
        np.empty(1 << 60, np.uint8)
    inner = OutOfMemory("said before")
    with pytest.raises(OutOfMemory) as caught, asking_for("a pool", "use fewer blocks", np):
        raise inner
    assert caught.value is inner
    with pytest.raises(ValueError, match="other"), asking_for("a pool", "use fewer blocks", np):
        raise ValueError("other")


def test_the_stand_in_says_what_cupy_says():
    cupy_memory = pytest.importorskip("cupy.cuda.memory", exc_type=ImportError)
    assert str(cupy_memory.OutOfMemoryError(2048, 1024)) == str(OutOfMemoryError(2048, 1024))
    assert issubclass(cupy_memory.OutOfMemoryError, MemoryError)
