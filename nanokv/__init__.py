"""nanokv: the reference to check a KV cache against.

    import nanokv
    model = nanokv.load("default")
    print(model.generate("Hello, how", max_tokens=20).text)

Nothing heavy is imported before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanokv.attention import attend, naive_attention
    from nanokv.engine import Engine
    from nanokv.errors import NanoKVError
    from nanokv.generate import Generation, Options
    from nanokv.kv.contiguous import ContiguousCache
    from nanokv.kv.paged import PagedCache, PagedPool
    from nanokv.kv.spec import CacheSpec
    from nanokv.kv.tile import TILE, Batch, Cache, Tiles, Visibility
    from nanokv.model import Model
    from nanokv.models.config import GPT2Config
    from nanokv.models.gpt2 import GPT2Params, forward
    from nanokv.numerics import EXACT, FAST, Numerics
    from nanokv.sampling import Sampler, SamplingParams
    from nanokv.tokenizer import Tokenizer

__version__ = "0.1.0"

_HOME = {
    "nanokv.attention": ("attend", "naive_attention"),
    "nanokv.errors": ("NanoKVError",),
    "nanokv.generate": ("Generation", "Options"),
    "nanokv.engine": ("Engine",),
    "nanokv.kv.contiguous": ("ContiguousCache",),
    "nanokv.kv.paged": ("PagedCache", "PagedPool"),
    "nanokv.kv.spec": ("CacheSpec",),
    "nanokv.kv.tile": ("TILE", "Batch", "Cache", "Tiles", "Visibility"),
    "nanokv.model": ("Model",),
    "nanokv.models.config": ("GPT2Config",),
    "nanokv.models.gpt2": ("GPT2Params", "forward"),
    "nanokv.numerics": ("EXACT", "FAST", "Numerics"),
    "nanokv.sampling": ("Sampler", "SamplingParams"),
    "nanokv.tokenizer": ("Tokenizer",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Batch", "Cache", "CacheSpec", "ContiguousCache", "EXACT", "Engine", "FAST", "GPT2Config", "GPT2Params",
    "Generation", "Model", "NanoKVError", "Numerics", "Options", "PagedCache", "PagedPool", "Sampler", "SamplingParams",
    "TILE", "Tiles", "Tokenizer", "Visibility", "attend", "forward", "load", "naive_attention",
]  # fmt: skip


def load(
    source: str = "default",
    *,
    dtype: str = "float32",
    backend: str = "auto",
    numerics: str | None = None,
    kernels: str = "auto",
    weights: str | None = None,
    threads: int | None = None,
) -> "Model":
    """A model ready to run.

    `source`: "default" (ships with nanokv), "smollm2" (once it is pulled), a directory in Hugging Face's layout, a GGUF or
    llama2.c file, or a hub id such as "gpt2". `dtype`: float32 or float64. `backend`: auto, numpy or cupy. `numerics`: exact
    or fast; None is exact on NumPy and fast on CuPy, whose products make no promise about rows. `kernels`: numpy or compiled
    (numba, float32, one set of bits on every machine); auto is compiled where that can run, on `threads` threads (None: the
    physical cores). `weights`: float32, bf16, fp16, int8, int8-row or int4; None keeps what a GGUF file has quantised, and is
    float32 otherwise. Raises a NanoKVError that says in one line what is wrong.
    """
    from nanokv.backend import asking_for, get_backend
    from nanokv.kernels.choice import memory_for
    from nanokv.model import Model, choose_numerics
    from weights import load as load_weights

    chosen = get_backend(backend)
    mode = choose_numerics(numerics, chosen, kernels, dtype)
    memory = memory_for(chosen, mode, weights, threads)
    with asking_for(f"the weights of {source}", "keep them in a smaller format (--weights)", chosen.xp):
        checkpoint = load_weights(source, dtype=dtype, backend=memory)
    model = Model(
        checkpoint.name, checkpoint.params, checkpoint.tokenizer, checkpoint.eos_token_ids, chosen, mode,
        checkpoint.prefix, checkpoint.chat_template,
    )  # fmt: skip
    return model.warm_up()


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'nanokv' has no attribute {name!r}")
