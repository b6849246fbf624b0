"""What several tests need: small models, caches whose unused memory is NaN, the optional data folder."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from nanokv.kv.contiguous import ContiguousCache
from nanokv.model import Model
from nanokv.models import gpt2
from nanokv.models.config import GPT2Config
from nanokv.models.families import Params, module_for
from nanokv.models.gpt2 import random_params
from nanokv.numerics import COMPILED, EXACT, Numerics
from nanokv.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
DATA = ROOT.parent / "shared" / "data"
EVERYDAY = 40  # examples a property in the profile "default" (conftest.py)

NO_NUMBA = pytest.mark.skipif(not find_spec("numba"), reason="not run: numba is not installed (pip install 'nanokv[cpu]')")
# A property that holds for every exact kind of kernels: the test takes `numerics`.
EXACT_KERNELS = pytest.mark.parametrize("numerics", [EXACT, pytest.param(COMPILED, marks=NO_NUMBA)], ids=["numpy", "compiled"])


def examples(count: int, **more: object) -> settings:
    """Hypothesis settings of `count` examples in the everyday profile, and as many times more in another."""
    return settings(max_examples=max(1, count * settings.default.max_examples // EVERYDAY), **more)


def data(path: str) -> Path:
    """A file of the data folder beside the project, or a skip that says which is missing."""
    found = DATA / path
    if not found.exists():
        pytest.skip(f"not run: {path} is not in the data folder beside the project")
    return found


def small_config(
    layers: int = 2, heads: int = 4, kv_heads: int = 4, dim: int = 8, positions: int = 320, vocab: int = 61, **more: object
) -> GPT2Config:
    return GPT2Config(vocab, positions, heads * dim, layers, heads, kv_heads, 4 * heads * dim, **more)


def nan_cache(config: GPT2Config, capacity: int, dtype: type = np.float32) -> ContiguousCache:
    """A cache in which every slot that was never written is NaN: one that is read shows."""
    return poisoned(ContiguousCache(config.num_layers, config.num_kv_heads, config.head_dim, capacity, dtype))


def poisoned(cache: ContiguousCache) -> ContiguousCache:
    """The cache with all its memory NaN, or the largest code where a format has no NaN."""
    for plane in cache.planes:
        plane[...] = np.iinfo(plane.dtype).max if plane.dtype.kind in "iu" else np.nan
    return cache


def forward(params: Params, *args: object, **more: object) -> np.ndarray:
    """The forward pass of whichever model these are the parameters of."""
    return module_for(params).forward(params, *args, **more)


def fit_for(params: Params, numerics: Numerics, form: str = "float32") -> Params:
    """The parameters as these numerics take them: as they are, or float32 with the matrices packed in the format `form`, for
    kernels on one thread: on models this small a second one only makes the first wait for it, long on a busy machine."""
    if numerics is not COMPILED:
        return params
    import numba

    from nanokv.kernels.choice import PackedMemory

    numba.set_num_threads(1)

    class Memory(PackedMemory):
        def from_numpy(self, array: np.ndarray) -> object:
            return super().from_numpy(array.astype(np.float32, copy=False))

    return params.to(Memory("numpy", np, form))


def in_chunks(
    params: Params, tokens: np.ndarray, chunks: list[int], cache: ContiguousCache, numerics: Numerics = EXACT
) -> np.ndarray:
    """All logits of `tokens` fed in pieces of the given sizes."""
    parts, at = [], 0
    for size in chunks:
        parts.append(forward(params, tokens[at : at + size], cache, numerics=numerics))
        at += size
    assert at == len(tokens)
    return np.concatenate(parts)


@st.composite
def chunkings(draw: st.DrawFn, total: int) -> list[int]:
    """Ways of cutting `total` tokens into pieces."""
    sizes = []
    while (left := total - sum(sizes)) > 0:
        sizes.append(draw(st.one_of(st.just(1), st.integers(1, left), st.sampled_from([2, 64, 127, 128, 129]))))
        sizes[-1] = min(sizes[-1], left)
    return sizes


def head_counts() -> st.SearchStrategy[tuple[int, int]]:
    """(query heads, key-value heads): MHA, GQA and MQA."""
    return st.sampled_from([(1, 1), (2, 2), (4, 4), (4, 2), (6, 2), (6, 1), (3, 1), (8, 2)])


def tiny_model(numerics: Numerics = EXACT, seed: int = 0, eos: bool = True, **shape: object) -> Model:
    """A random model with the tokenizer that ships: its text is nonsense, its arithmetic is not."""
    folder = ROOT / "weights" / "default"
    tokenizer = Tokenizer.from_vocab_and_merges(folder / "vocab.json", folder / "merges.txt")
    config = small_config(vocab=tokenizer.vocab_size, **shape)
    ends = frozenset({tokenizer.vocab_size - 1}) if eos else frozenset()
    params = fit_for(random_params(config, seed, scale=0.3), numerics)
    return Model("tiny", params, tokenizer, ends, numerics=numerics)


def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[np.ndarray]]:
    """What every stage of GPT-2's forward pass gives from now on, in order, by the name of the function."""
    seen = {name: [] for name in ("layer_norm", "linear", "activate", "cached_attention")}
    for name, values in seen.items():
        real = getattr(gpt2, name)

        def wrapper(*args, real=real, values=values, **kwargs):
            out = real(*args, **kwargs)
            values.append(out.copy())
            return out

        monkeypatch.setattr(gpt2, name, wrapper)
    return seen
