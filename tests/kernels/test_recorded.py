"""A model's layers as one program give the bits of the same operations called one by one, and those of the slow oracle."""

import copy
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from threading import Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.backend import NUMPY
from nanokv.errors import UsageError
from nanokv.kernels.matrix import FORMATS
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import Batch, Visibility
from nanokv.models import gpt2, llama, recorded
from nanokv.models.families import module_for
from nanokv.numerics import COMPILED
from nanokv.rope import Rope
from tests.kernels import oracle
from tests.llama_support import small_llama
from tests.support import ROOT, examples, fit_for, forward, head_counts, poisoned, small_config

pytest.importorskip("numba", reason="not run: numba is not installed (pip install 'nanokv[cpu]')")

import numba

from tests.kernels.guard import guarded, late, one_after_the_other, one_thread_does_all

MODELS = ("gpt2", "llama")
CAPACITY = 768  # tokens of a cache
KV = st.sampled_from(["float32", "float32", "float16", "bfloat16", "int8", "fp8", "fp8 fixed", "int4"])


@pytest.fixture(autouse=True)
def one_thread():
    """As fit_for() would have it, and back."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


@st.composite
def models(draw):
    """A random model of either family, whose widths fill panels, segments and lanes or do not."""
    heads, kv_heads = draw(head_counts())
    layers = draw(st.integers(1, 3))
    if draw(st.booleans()):
        dim, wide = draw(st.sampled_from([1, 3, 16, 33, 64, 80, 128])), draw(st.booleans())
        config = small_config(
            layers, heads, kv_heads, dim, CAPACITY, vocab=draw(st.sampled_from([61, 64, 130])), tied_head=draw(st.booleans()),
            activation="gelu" if wide else "gelu_new", scale_by_layer=draw(st.booleans()),
        )  # fmt: skip
    else:
        dim = draw(st.sampled_from([2, 16, 24, 64, 128, 256]))
        window = st.one_of(st.none(), st.sampled_from([1, 40, 129]))
        config = small_llama(
            layers, heads, kv_heads, dim, CAPACITY, vocab=draw(st.sampled_from([61, 64, 130])), qkv_bias=draw(st.booleans()),
            output_bias=draw(st.booleans()), mlp_bias=draw(st.booleans()), qk_norm=draw(st.booleans()),
            windows=tuple(draw(st.lists(window, min_size=layers, max_size=layers))) if draw(st.booleans()) else (),
            rope=Rope(dim, adjacent=draw(st.booleans())), tied_head=draw(st.booleans()),
        )  # fmt: skip
    params = module_for(config).random_params(config, draw(st.integers(0, 99)), scale=0.2)
    return fit_for(params, COMPILED, draw(st.sampled_from(FORMATS)))


@st.composite
def specs(draw, config):
    """Any cache for it."""
    name, _, fixed = draw(KV).partition(" ")
    own_windows = any(each.window for each in config.visibility())
    window = draw(st.sampled_from([None, None, 1, 60, 200]))
    sinks = None if window is None or own_windows else draw(st.sampled_from([None, 0, 4, 130]))
    kind, size = draw(st.sampled_from(["contiguous", "paged"])), draw(st.sampled_from([1, 8, 16, 32, 128]))
    size = max(size, 32) if name == "int4" else size
    return CacheSpec(kind, size, window, sinks, name, 0.37 if fixed else None)


def new_caches(config, spec, count, own=None):
    """In memory that tells, for CAPACITY tokens each: enough for a window's ring to turn. `own`: what each layer sees."""
    shape = own or config.visibility(), config.num_kv_heads, config.head_dim
    if spec.kind == "contiguous":
        return [poisoned(spec.contiguous(*shape, CAPACITY, np.float32, NUMPY)) for _ in range(count)]
    pool = spec.pool(*shape, count * (CAPACITY // spec.block_size + 2), np.float32, NUMPY)
    return [pool.new_sequence() for _ in range(count)]


def one_by_one(params, *args, **more):
    """Logits by one call an operation."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (gpt2, llama):
            patch.setattr(module, "can_record", lambda _: False)
        return forward(params, *args, **more)


STEPS = st.sampled_from([1, 1, 1, 2, 8, 9, 17, 97])


@examples(40)
@given(st.data())
def test_a_recorded_step_is_its_operations_one_by_one(data):
    """Random models, caches, formats, batches of sequences of any length and steps of any size: few rows and many, in turn."""
    params = data.draw(models())
    config = params.config
    members = data.draw(st.integers(1, 3))
    spec = data.draw(specs(config))
    mixed = data.draw(st.one_of(st.none(), specs(config)))  # of two kinds in a batch, where that can be
    mixed = mixed if mixed and alike(spec, mixed) else None
    own = config.visibility()
    if spec.window is None and data.draw(st.booleans()):  # layers that see unlike, whatever the model would have them see
        own = [Visibility(each.window or window) for each, window in zip(own, (40, None, 40), strict=False)]
    sets = [[*new_caches(config, spec, members, own), *(new_caches(config, mixed, 1, own) if mixed else [])] for _ in range(2)]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    steps = [[data.draw(st.sampled_from([1, 100, 127, 128])) for _ in sets[0]]]
    steps += [[128] * len(sets[0])] * data.draw(st.sampled_from([0, 0, 3]))
    steps += [[data.draw(STEPS) for _ in sets[0]] for _ in range(2)]
    for sizes in steps:
        tokens = rng.integers(0, config.vocab_size, sum(sizes))
        batches = [Batch(list(zip(caches, sizes, strict=True))) for caches in sets]
        with guarded():
            ours = forward(params, tokens, batches[0], numerics=COMPILED)
        assert np.array_equal(ours, one_by_one(params, tokens, batches[1], numerics=COMPILED))


def alike(one, other):
    """Whether sequences of two kinds of caches can be rows of one step: a model is told positions in one way."""
    return one.visibility.streaming == other.visibility.streaming and (one.window is None) == (other.window is None)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("spec", [CacheSpec(), CacheSpec("paged", 16)], ids=["contiguous", "paged"])
def test_layers_that_see_unlike_have_their_own_tables(name, spec):
    """The first and the last of three see 40 keys, of which a contiguous cache keeps a ring that turns; the other sees all."""
    config = replace(SHAPES[name], num_layers=3, num_positions=CAPACITY, **({"windows": ()} if name == "llama" else {}))
    params = fit_for(module_for(config).random_params(config, 1, scale=0.2), COMPILED)
    own = [Visibility(40), Visibility(), Visibility(40)]
    ours, theirs = (new_caches(config, spec, 1, own)[0] for _ in range(2))
    tokens = np.random.default_rng(0).integers(0, 70, 512)
    for part in np.split(tokens, [128, 256, 384, 480, 481, 489]):
        with guarded():
            logits = forward(params, part, ours, rows=[-1], numerics=COMPILED)
        assert np.array_equal(logits, one_by_one(params, part, theirs, rows=[-1], numerics=COMPILED))


SHAPES = {
    "gpt2": small_config(layers=2, heads=4, kv_heads=2, dim=64, vocab=70),
    "llama": small_llama(layers=2, heads=4, kv_heads=2, dim=64, vocab=70, qk_norm=True, windows=(None, 40)),
}


def small(name, form="float32"):
    config = SHAPES[name]
    return fit_for(module_for(config).random_params(config, 1, scale=0.2), COMPILED, form)


def one_cache(config, **spec):
    return new_caches(config, CacheSpec(**spec), 1)[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_recorded_model_is_the_oracles(name):
    """135 tokens, of which the last is decoded: two tiles, layers with and without a window."""
    params = small(name)
    tokens = np.random.default_rng(0).integers(0, 70, 135)
    cache = one_cache(params.config)
    with guarded():
        parts = [forward(params, part, cache, numerics=COMPILED) for part in np.split(tokens, [100, 134])]
    rows = [0, 100, 133, 134]
    expected = oracle_logits(params, tokens, rows)
    assert np.array_equal(np.concatenate(parts)[rows], expected)


def oracle_logits(params, tokens, rows):
    """By tests/kernels/oracle.py's functions alone, written out for both families; attention for the last layer's `rows`."""
    config, positions = params.config, np.arange(len(tokens))
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    is_llama = hasattr(config, "rope")
    if is_llama:
        norms = lambda block: (  # noqa: E731
            lambda x: oracle.rms_norm(x, block.attention_norm, config.norm_epsilon),
            lambda x: oracle.rms_norm(x, block.mlp_norm, config.norm_epsilon),
        )
        x = params.embedding.to_array()[tokens]
        cos, sin = config.rope.tables(positions, like=params.norm)
    else:
        eps = config.layer_norm_epsilon
        norms = lambda block: (  # noqa: E731
            lambda x: oracle.layer_norm(x, block.ln_1_weight, block.ln_1_bias, eps),
            lambda x: oracle.layer_norm(x, block.ln_2_weight, block.ln_2_bias, eps),
        )
        x = params.wte.to_array()[tokens] + params.wpe[positions]
    for layer, block in enumerate(params.blocks):
        first, second = norms(block)
        qkv = oracle.linear(first(x), block.qkv_weight.to_array(), block.qkv_bias).reshape(len(x), -1, dim)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if is_llama:
            q, k = (oracle.rms_norm(a, w, config.norm_epsilon) for a, w in ((q, block.q_norm), (k, block.k_norm)))
            q, k = (oracle.rotate(a, cos, sin, adjacent=False) for a in (q, k))
        wanted = positions if layer + 1 < config.num_layers else np.array(rows)
        mixed = oracle.attend(q[wanted], wanted, k, v, dim**-0.5, config.visibility()[layer]).reshape(len(wanted), -1)
        if is_llama:
            x = x[wanted] + oracle.linear(mixed, block.output_weight.to_array())
            inner = oracle.swiglu(oracle.linear(second(x), block.gate_up_weight.to_array()))
            x = x + oracle.linear(inner, block.down_weight.to_array())
        else:
            x = x[wanted] + oracle.linear(mixed, block.proj_weight.to_array(), block.proj_bias)
            inner = oracle.gelu_new(oracle.linear(second(x), block.fc_weight.to_array(), block.fc_bias))
            x = x + oracle.linear(inner, block.out_weight.to_array(), block.out_bias)
    if is_llama:
        return oracle.linear(oracle.rms_norm(x, params.norm, config.norm_epsilon), params.head.to_array())
    return oracle.linear(oracle.layer_norm(x, params.ln_f_weight, params.ln_f_bias, eps), params.head.to_array())


def logits_of(params, sizes=(30, 1, 9, 97, 1), **spec):
    """All logits of one text, fed in these pieces."""
    tokens = np.random.default_rng(5).integers(0, 70, sum(sizes))
    cache, parts, at = one_cache(params.config, **spec), [], 0
    for size in sizes:
        parts.append(forward(params, tokens[at : at + size], cache, numerics=COMPILED))
        at += size
    return np.concatenate(parts)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("runner", [one_thread_does_all, one_after_the_other, late])
@pytest.mark.parametrize("threads", [2, 7])
def test_threads_that_come_late_or_never_change_nothing(name, runner, threads, monkeypatch):
    """Also more of them than cores: what one waits for, another is doing."""
    params = small(name, "bf16")
    expected = logits_of(params)
    monkeypatch.setattr(numba, "get_num_threads", lambda: threads)
    with guarded(runner) as ran:
        assert np.array_equal(logits_of(params), expected)
    assert set(ran) == {threads}


def test_another_number_of_threads_takes_the_memory_it_needs(monkeypatch):
    params = small("gpt2")
    expected = logits_of(params)
    for threads in (1, 5, 2):
        monkeypatch.setattr(numba, "get_num_threads", lambda threads=threads: threads)
        with guarded(one_after_the_other):
            assert np.array_equal(logits_of(params), expected)


@pytest.mark.parametrize("name", MODELS)
def test_two_threads_may_use_one_model_at_once(name):
    """Each with a cache of its own; Numba counts threads for each thread of Python's apart."""
    params = small(name)
    expected, found = logits_of(params), {}

    def use(which):
        numba.set_num_threads(1)
        found[which] = [logits_of(params) for _ in range(3)]

    crowd = [Thread(target=use, args=(which,)) for which in range(3)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert all(np.array_equal(each, expected) for which in range(3) for each in found[which])


@pytest.mark.parametrize("name", MODELS)
def test_parameters_made_from_others_have_programs_of_their_own(name):
    params = small(name)
    expected = logits_of(params)
    copies = [copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))]
    assert all(np.array_equal(logits_of(each), expected) for each in copies)
    blocks = (params.blocks[1], params.blocks[0])
    turned = replace(params, blocks=blocks)
    assert not np.array_equal(logits_of(turned), expected)
    assert np.array_equal(logits_of(turned), logits_of(replace(params, blocks=blocks)))
    assert np.array_equal(logits_of(params), expected)


def test_an_interrupted_step_leaves_model_and_cache_as_they_were(monkeypatch):
    """As Control-C, which comes before or after what is compiled; the next step is none the worse."""
    params = small("llama")
    tokens = np.random.default_rng(5).integers(0, 70, 20)
    cache, twin = one_cache(params.config), one_cache(params.config)
    for each in (cache, twin):
        forward(params, tokens[:10], each, numerics=COMPILED)

    def interrupted(*_):
        raise KeyboardInterrupt

    for runner in (interrupted, lambda *args: (one_thread_does_all(*args), interrupted())):
        with guarded(runner), pytest.raises(KeyboardInterrupt):
            forward(params, tokens[10:], cache, numerics=COMPILED)
    assert cache.length == 10
    runs = [forward(params, tokens[10:], each, numerics=COMPILED) for each in (cache, twin)]
    assert np.array_equal(*runs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("other", [{"layers": 1}, {"layers": 3}, {"kv_heads": 1}, {"kv_heads": 4}, {"dim": 32}, {"dim": 128}])
@pytest.mark.parametrize("kv_dtype", ["float32", "int4"])
def test_a_cache_for_another_model_is_refused(name, other, kv_dtype):
    """Where NumPy complains of a shape, a kernel would go past the end of the cache's memory."""
    params = small(name)
    shape = {"layers": 2, "heads": 4, "kv_heads": 2, "dim": 64} | other
    config = small_config(**shape)
    cache = CacheSpec(kv_dtype=kv_dtype).contiguous(
        [Visibility()] * shape["layers"], config.num_kv_heads, config.head_dim, 100, np.float32, NUMPY
    )
    if name == "llama":
        params = replace(params, config=replace(params.config, windows=()))
    if kv_dtype == "int4" and other == {"layers": 3}:
        return  # one layer is left unused
    with pytest.raises((UsageError, ValueError, IndexError), match="the cache|broadcast|out of"):
        forward(params, np.arange(5), cache, numerics=COMPILED)


@pytest.mark.parametrize("name", MODELS)
def test_no_array_that_a_program_reads_is_freed_before_it(name):
    """Vectors that come as another type or in strides are copied: the copies live as long as the program."""
    params = small(name)

    def loose(block):
        strided = {key: np.repeat(each, 2)[::2] for key, each in vars(block).items() if isinstance(each, np.ndarray)}
        return replace(block, **strided)

    moved = replace(params, blocks=tuple(map(loose, params.blocks)))
    expected = logits_of(params)
    assert np.array_equal(logits_of(moved), expected)
    rubbish = [np.full(each.size, np.nan, np.float32) for block in params.blocks for each in vars(block).values()
               if isinstance(each, np.ndarray)]  # fmt: skip
    assert np.array_equal(logits_of(moved), expected)
    del rubbish


@pytest.mark.parametrize("name", MODELS)
def test_a_long_step_keeps_no_memory(name, monkeypatch):
    """Its program is made for it alone; those of short steps stay."""
    params = small(name)
    expected = logits_of(params)
    monkeypatch.setattr(recorded, "KEPT_ROWS", 32)
    fresh = copy.copy(params)
    assert np.array_equal(logits_of(fresh), expected)
    assert [found.rows for found in vars(fresh)["_programs"].values()] == [32, 32]


@pytest.mark.parametrize("spec", [CacheSpec(), CacheSpec("paged"), CacheSpec(kv_dtype="int8")], ids=["whole", "paged", "int8"])
def test_a_copy_of_a_cache_goes_on_in_its_own_memory(spec):
    params = small("gpt2")
    tokens = np.random.default_rng(5).integers(0, 70, (3, 5))
    cache, fresh = new_caches(params.config, spec, 2)
    forward(params, tokens[0], cache, numerics=COMPILED)
    other = cache.copy()
    forward(params, tokens[1], other, numerics=COMPILED)
    ours = forward(params, tokens[2], cache, numerics=COMPILED)
    theirs = forward(params, tokens[2], other, numerics=COMPILED)
    assert np.array_equal(theirs, forward(params, tokens.reshape(-1), fresh, numerics=COMPILED)[10:])
    fresh.truncate(5)
    assert np.array_equal(ours, forward(params, tokens[2], fresh, numerics=COMPILED))


def test_hidden_states_of_one_step_outlive_the_next():
    params = small("gpt2")
    cache = one_cache(params.config)
    first = gpt2.hidden_states(params, np.arange(5), cache, numerics=COMPILED)
    before = first.copy()
    gpt2.hidden_states(params, np.arange(5), cache, numerics=COMPILED)
    assert np.array_equal(first, before)


@pytest.mark.parametrize("name", MODELS)
def test_no_rows_give_no_logits(name):
    params = small(name)
    cache = one_cache(params.config)
    assert forward(params, np.arange(5), cache, rows=[], numerics=COMPILED).shape == (0, 70)


def test_two_threads_of_python_do_not_end_the_process():
    """Numba's own threading layer ends a process in which two of them run at once."""
    if numba.config.NUMBA_NUM_THREADS == 1:
        pytest.skip("not run: one thread is all that this process may use")
    env = {**os.environ, "NUMBA_THREADING_LAYER": "workqueue"}
    code = "from tests.kernels.test_recorded import use_at_once; use_at_once()"
    run = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "workqueue\n", run.stderr[-2000:]


def use_at_once():
    params = small("gpt2")

    def use():
        numba.set_num_threads(2)
        for _ in range(3):
            logits_of(params)

    crowd = [Thread(target=use) for _ in range(3)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    print(numba.threading_layer())
