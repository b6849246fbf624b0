"""The host side on the stand-in device: whole models give the bits of the compiled CPU kernels, and ask little of the card."""

import hashlib
import json
import sys

import numpy as np
import pytest

pytest.importorskip("numba", exc_type=ImportError)
import cli
import nanokv
from nanokv.backend import NUMPY, get_backend
from nanokv.errors import BackendError, CapacityError, UsageError
from nanokv.kernels.cuda.arrays import CardMatrix, linear
from nanokv.kernels.cuda.card import Card
from nanokv.kv.spec import CacheSpec
from nanokv.kv.tile import Batch
from nanokv.model import choose_numerics
from nanokv.models import gpt2, llama
from nanokv.models.decode_step import DecodeStep
from nanokv.numerics import COMPILED, FAST
from tests import stand_in
from tests.cuda.stand_in import Meter, both_memories, install, kv_memory
from tests.kernels import logits
from tests.llama_support import small_llama
from tests.support import small_config

CACHES = [
    CacheSpec(), CacheSpec("paged", 16), CacheSpec("paged", 32, kv_dtype="int4"), CacheSpec("paged", 16, 20, kv_dtype="int8"),
    CacheSpec(kv_dtype="float16"), CacheSpec("paged", 16, kv_dtype="bfloat16"), CacheSpec(kv_dtype="fp8", window=40),
]  # fmt: skip


@pytest.mark.parametrize("spec", CACHES, ids=str)
@pytest.mark.parametrize(("family", "form"), [(gpt2, None), (llama, "int8")])
def test_a_model_on_the_card_has_the_processors_bits(meter, spec, family, form):
    """Prefill, decode, two sequences in one batch: logits on the card are those of the compiled CPU kernels, bit for bit."""
    config = small_config(dim=16, kv_heads=2, positions=200) if family is gpt2 else small_llama(heads=4, kv_heads=2, dim=16)
    params = family.random_params(config, scale=0.2)
    host, card = both_memories(form)
    results = []
    for memory in (host, card):
        there = params.to(memory)
        shape = config.visibility(), config.num_kv_heads, config.head_dim
        plain = NUMPY if memory is host else kv_memory()
        if spec.kind == "paged":
            pool = spec.pool(*shape, 40, np.float32, plain)
            caches = [pool.new_sequence() for _ in range(2)]
        else:
            caches = [spec.contiguous(*shape, 190, np.float32, plain) for _ in range(2)]
        tokens, out = np.random.default_rng(0).integers(0, config.vocab_size, 170), []
        out.append(family.forward(there, tokens[:130], caches[0], numerics=COMPILED))
        out.append(family.forward(there, tokens[:3], caches[1], numerics=COMPILED))
        batch = Batch([(cache, 1) for cache in caches])
        out += [family.forward(there, tokens[step : step + 2], batch, numerics=COMPILED) for step in range(2)]
        results.append([a.get() if isinstance(a, stand_in.DeviceArray) else a for a in out])
    for host_logits, card_logits in zip(*results, strict=True):
        assert np.array_equal(host_logits, card_logits)


def test_the_shipped_models_logits_are_those_of_every_machine(meter):
    """The committed sha256 of its logits, prefilled and decoded, come out of the CUDA sources too."""
    model = nanokv.load("default", backend="cupy", numerics="exact")
    prompt = logits.PROMPTS[0]
    tokens, cache = model.encode(prompt), model.new_cache()
    parts = [model.forward(tokens, cache).get()]
    for _ in range(8):
        parts.append(model.forward([int(parts[-1][-1].argmax())], cache).get())
    found = hashlib.sha256(np.concatenate(parts).astype("<f4").tobytes()).hexdigest()
    assert found == json.loads(logits.FILE.read_text(encoding="utf-8"))[prompt]


@pytest.mark.parametrize("family", [gpt2, llama])
def test_a_decoded_token_copies_nothing_back_and_gets_no_memory(meter, family):
    """After the first tokens of a tile: no piece of memory from the driver, no copy from the card, the same few launches."""
    config = small_config(dim=16) if family is gpt2 else small_llama(heads=4, kv_heads=2, dim=16)
    _, card = both_memories(None)
    params = family.random_params(config).to(card)
    pool = CacheSpec("paged", 16).pool(config.visibility(), config.num_kv_heads, config.head_dim, 12, np.float32, kv_memory())
    cache, seen = pool.new_sequence(), []
    for token in range(30):
        family.forward(params, [token % 50], cache, numerics=COMPILED)
        seen.append(meter.read())
    later = seen[20:]
    assert all(counts.get("allocations", 0) == 0 for counts in later)
    assert all(counts.get("copies from the card", 0) == 0 for counts in later)
    assert len({counts["launches"] for counts in later}) == 1
    assert max(counts["copies to the card"] for counts in later) <= 4 + config.num_layers


@pytest.mark.parametrize(
    ("family", "kv_dtype", "window"), [(gpt2, None, None), (gpt2, "int8", 20), (llama, "float16", None), (gpt2, "fp8", None)]
)
def test_a_captured_step_gives_the_bits_of_forward(meter, family, kv_dtype, window):
    """Three sequences, one of them across the edge of a tile: every step of one graph, against the compiled CPU kernels. While
    it runs, nothing is allocated, copied or loaded."""
    config = small_config(dim=16, kv_heads=2) if family is gpt2 else small_llama(heads=4, kv_heads=2, dim=16)
    params, spec = family.random_params(config, scale=0.2), CacheSpec("paged", 16, window, None, kv_dtype)
    host, card = both_memories(None)
    shape = config.visibility(), config.num_kv_heads, config.head_dim
    pools = [spec.pool(*shape, 30, np.float32, memory) for memory in (NUMPY, kv_memory())]
    there = [params.to(memory) for memory in (host, card)]
    caches = [[pool.new_sequence() for _ in range(3)] for pool in pools]
    rng = np.random.default_rng(0)
    for b, count in enumerate((126, 1, 31)):
        prompt = rng.integers(0, 50, count)
        for weights, members in zip(there, caches, strict=True):
            family.forward(weights, prompt, members[b], numerics=COMPILED)
    step = DecodeStep(there[1], caches[1][0], 4, 256)
    for turn in range(5):
        tokens = rng.integers(0, 50, 3)
        expected = family.forward(there[0], tokens, Batch([(cache, 1) for cache in caches[0]]), numerics=COMPILED)
        step.prepare(caches[1], tokens.tolist())
        if turn == 1:
            step.capture()
        meter.read()
        step.launch()
        assert meter.read().keys() == ({"launches", "graphs"} if turn else {"launches"})
        for cache in caches[1]:
            cache.commit()
        assert np.array_equal(step.logits.get()[:3], expected)
        assert np.array_equal(step.chosen.get()[:3], expected.argmax(axis=1))
    assert not any(plane.data[:, 0].view(np.uint8).any() for plane in pools[1].storage.planes)  # rows of nobody wrote nothing


def test_a_step_refuses_what_it_cannot_hold(meter):
    config, card = small_config(dim=16), get_backend("cupy")
    params = gpt2.random_params(config).to(both_memories(None)[1])
    shape = config.visibility(), config.num_kv_heads, config.head_dim, 12, np.float32, card
    with pytest.raises(UsageError, match="encoded token by token"):
        DecodeStep(params, CacheSpec("paged", 32, kv_dtype="int4").pool(*shape).new_sequence(), 1, 128)
    with pytest.raises(UsageError, match="absolute positions"):
        DecodeStep(params, CacheSpec("paged", 16, 20, 2).pool(*shape).new_sequence(), 1, 128)
    pool = CacheSpec("paged", 16).pool(*shape)
    cache = pool.new_sequence()
    step = DecodeStep(params, cache, 1, 100)
    gpt2.forward(params, list(range(50)) * 2 + [0] * 28, cache, numerics=COMPILED)
    with pytest.raises(CapacityError, match="made for 1 sequences of 1 tiles"):
        step.prepare([cache], [1])
    with pytest.raises(CapacityError, match="made for 1 sequences"):
        step.prepare([pool.new_sequence(), pool.new_sequence()], [1, 1])
    assert (cache.length, pool.blocks.num_free) == (128, 3)


def test_the_parts_of_the_check_on_a_card_run(meter):
    """benchmarks/gpu_exact.py on the stand-in, small: what it compares is equal, what it counts is there."""
    from benchmarks import gpu_exact

    def timer(call, _):
        call()
        return 1.0

    gpu, config = get_backend("cupy"), small_config(dim=16, positions=64)
    found = {
        "same_bits": gpu_exact.same_bits(gpu, ["fp16"], 20), "digests": {}, "compute_sanitizer": "not installed",
        "choices": gpu_exact.choices(gpu, timer, 400, 3), "int4_writes": gpu_exact.int4_writes(gpu),
    }  # fmt: skip
    assert gpu_exact.passed(found)
    assert not gpu_exact.passed(found | {"digests": {"prompt": False}})
    assert not gpu_exact.passed(found | {"int4_writes": {"keys": False}})
    assert [row["same"] for row in found["choices"]] == [True, "3/3", "3/3"]
    (decoded,) = gpu_exact.decode(gpu, timer, config, [2], 20)
    assert decoded["bytes"] > config.num_layers * 2 * 4 * 16 * 21
    assert gpu_exact.prefill(gpu, timer, config, 20)["tflops"] > 0
    assert [row["keys"] for row in gpu_exact.paged_attention(gpu, timer, [256])] == [256]


def test_exact_on_cupy_is_the_compiled_kernels(meter):
    cupy = get_backend("cupy")
    assert choose_numerics("exact", cupy) is COMPILED
    assert choose_numerics(None, cupy) is FAST
    assert choose_numerics(None, cupy, "compiled") is COMPILED
    with pytest.raises(UsageError, match="float32, not float64"):
        choose_numerics("exact", cupy, dtype="float64")
    with pytest.raises(UsageError, match="takes the compiled kernels"):
        choose_numerics("exact", cupy, "numpy")


@pytest.mark.parametrize(("flags", "noted"), [
    ([], True), (["--numerics", "fast"], False), (["--numerics", "exact"], False), (["--kernels", "compiled"], False),
])  # fmt: skip
def test_the_note_on_fast_numerics_is_for_those_who_did_not_ask(meter, capsys, flags, noted):
    with pytest.raises(SystemExit) as ended:
        cli.main.main(["generate", "Once", "--backend", "cupy", "--max-tokens", "2", *flags])
    assert ended.value.code == 0
    assert ("the numerics are fast" in capsys.readouterr().err) == noted


def test_an_old_card_is_refused_by_name(monkeypatch):
    with pytest.raises(BackendError, match="stand-in has 7.0"):
        Card(install(monkeypatch, Meter(), "70"))


def test_a_kernel_that_does_not_compile_says_the_first_error(meter, monkeypatch):
    cupy = sys.modules["cupy"]

    def broken(**_):
        raise RuntimeError("linear.cu(7): warning: something\nlinear.cu(9): error: expected a ;\n1 error detected")

    monkeypatch.setattr(cupy, "RawModule", broken)
    x = cupy.zeros((1, 64), dtype=np.float32)
    matrix = CardMatrix("float32", (64, 64), cupy.zeros((1, 64, 64), dtype=np.float32))
    with pytest.raises(BackendError, match=r"linear.cu\(9\): error: expected a ;"):
        linear(x, matrix, None)
