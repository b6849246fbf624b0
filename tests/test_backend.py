"""CuPy without a GPU: how it is chosen, and that the runtime keeps to what it has."""

import ast
import inspect
import sys
from types import ModuleType

import numpy as np
import pytest

import nanokv
from nanokv.backend import NUMPY, get_backend
from nanokv.errors import BackendError, UsageError
from nanokv.kv.contiguous import ContiguousCache
from nanokv.kv.tile import CAUSAL, Visibility
from nanokv.models import llama
from nanokv.models.gpt2 import forward, random_params
from nanokv.numerics import FAST
from nanokv.rope import Rope
from tests import stand_in
from tests.llama_support import small_llama
from tests.support import ROOT, nan_cache, small_config


class Broken(ModuleType):
    """A CuPy whose driver is missing: it fails where `at` says, and not with an ImportError."""

    def __init__(self, at):
        super().__init__("cupy")
        self.at = at

    def is_available(self):
        if self.at == "query":
            raise RuntimeError("cudaErrorInsufficientDriver\nmore lines")
        return self.at != "no device"

    def zeros(self, shape):
        raise RuntimeError("cudaErrorNoDevice")


@pytest.mark.parametrize("at", ["query", "no device", "first array"])
def test_auto_falls_back_and_an_explicit_request_is_an_error(monkeypatch, at):
    monkeypatch.setitem(sys.modules, "cupy", Broken(at))
    assert get_backend("auto") is NUMPY
    with pytest.raises(BackendError, match="no CUDA device answers") as caught:
        get_backend("cupy")
    assert "\n" not in str(caught.value)


def test_an_import_that_fails_in_the_driver(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("raise RuntimeError('driver')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert get_backend("auto") is NUMPY
    with pytest.raises(BackendError, match="driver"):
        get_backend("cupy")


def test_cupy_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert get_backend("auto") is NUMPY
    with pytest.raises(BackendError, match="not installed.*nanokv"):
        get_backend("cupy")


def test_an_unknown_backend_is_named():
    with pytest.raises(BackendError, match="'jax'.*auto, numpy, cupy"):
        get_backend("jax")


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", stand_in.module())
    return get_backend("auto")


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_the_forward_pass_asks_nothing_of_the_host(device, heads, activation):
    """Prefill and decode on the stand-in; the values are those of NumPy in fast numerics."""
    config = small_config(heads=heads[0], kv_heads=heads[1], activation=activation)
    params, tokens = random_params(config), np.random.default_rng(0).integers(0, 61, 200)
    on_device = params.to(device)
    cache = ContiguousCache(config.num_layers, heads[1], config.head_dim, 220, np.float32, device)
    expected = nan_cache(config, 220)
    for start, stop in ((0, 190), (190, 191), (191, 200)):
        got = forward(on_device, tokens[start:stop], cache, numerics=FAST)
        assert isinstance(got, stand_in.DeviceArray)
        assert np.array_equal(got.get(), forward(params, tokens[start:stop], expected, numerics=FAST))
    branch = cache.copy()
    branch.truncate(100)
    assert branch.length == 100


@pytest.mark.parametrize("more", [{}, {"qk_norm": True, "qkv_bias": True}, {"rope": Rope(8, adjacent=True)}])
def test_a_llama_asks_nothing_of_the_host(device, more):
    """As above, and through a cache with sinks, whose queries are turned twice."""
    config = small_llama(**more)
    params, tokens = llama.random_params(config), np.random.default_rng(0).integers(0, 61, 200)
    on_device = params.to(device)
    for visibility in (CAUSAL, Visibility(40, 4, True)):
        caches = [
            ContiguousCache(2, config.num_kv_heads, config.head_dim, 220, np.float32, each, visibility=visibility)
            for each in (device, NUMPY)
        ]
        for start, stop in ((0, 90), (90, 91), (91, 200)):
            got = llama.forward(on_device, tokens[start:stop], caches[0], numerics=FAST)
            assert np.array_equal(got.get(), llama.forward(params, tokens[start:stop], caches[1], numerics=FAST))


@pytest.mark.parametrize("flags", [
    {}, {"cache": "none"}, {"cache": "paged", "block_size": 4}, {"window": 8, "sinks": 2}, {"kv_dtype": "int8"},
    {"kv_dtype": "int4", "cache": "paged", "block_size": 32}, {"kv_dtype": "float16"}, {"temperature": 0.8, "seed": 1},
])  # fmt: skip
def test_the_whole_of_generate_runs_on_the_stand_in(device, flags):
    """Loading, prefill, decoding, sampling, every cache: the text is NumPy's in fast numerics."""
    on_device = nanokv.load("default", backend="auto")
    assert (on_device.backend.name, on_device.numerics) == ("cupy", FAST)
    assert isinstance(on_device.params.wte, stand_in.DeviceArray)
    run = on_device.generate("Once upon a time", max_tokens=12, logprobs=2, **flags)
    expected = nanokv.load("default", backend="numpy", numerics="fast")
    assert run.text == expected.generate("Once upon a time", max_tokens=12, **flags).text
    assert run.to_dict()["backend"] == "cupy"


def test_exact_numerics_without_kernels_are_refused_on_cupy(device):
    with pytest.raises(UsageError, match="exact on cupy takes the compiled kernels"):
        nanokv.load("default", backend="cupy", numerics="exact", kernels="numpy")


def used_functions() -> dict[str, set[str]]:
    """Every function of the array module that the runtime calls as xp.name, with its keywords."""
    found: dict[str, set[str]] = {name: set() for name in ("asarray", "zeros", "is_available")}
    for path in (ROOT / "nanokv").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            base = node.func.value
            name = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
            if name in ("xp", "_xp") or (isinstance(base, ast.Call) and getattr(base.func, "id", "") == "module_of"):
                found.setdefault(node.func.attr, set()).update(word.arg for word in node.keywords)
    return found


def test_the_stand_in_lists_exactly_what_the_runtime_uses():
    assert {name: set(words) for name, words in stand_in.FUNCTIONS.items()} == used_functions()


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_all_of_it_exists_in_cupy():
    cupy = pytest.importorskip("cupy", exc_type=ImportError)
    for name, words in stand_in.FUNCTIONS.items():
        function = getattr(cupy, name)
        if isinstance(function, cupy.ufunc) or name == "matmul":
            assert words in ((), ("out",))  # every ufunc takes out
        else:
            assert set(words) <= set(inspect.signature(function).parameters)
    for name in ("get", "copy", "reshape", "transpose", "astype", "max", "min", "T", "nbytes", "itemsize"):
        assert hasattr(cupy.ndarray, name)
