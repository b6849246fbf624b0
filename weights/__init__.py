"""From files to arrays: `load` finds a model and reads it, whatever its files are.

tensors.py reads safetensors files, gpt2.py and llama.py know the names of tensors, huggingface.py a model directory,
hub.py the hub, gguf_file.py and llama2c.py other formats; pull.py fetches, inventory.py lists what is here.
"""

import os
import re
from pathlib import Path

from nanokv.backend import NUMPY, Backend
from nanokv.errors import CheckpointError, UsageError
from weights.checkpoint import Checkpoint
from weights.gguf_file import load_gguf
from weights.huggingface import load_directory
from weights.llama2c import is_llama2c, load_llama2c
from weights.pull import PACKAGES, pulled
from weights.tensors import PICKLED, refuse_pickle

__all__ = ["Checkpoint", "load"]

DEFAULT = "default"
DTYPES = ("float32", "float64")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def load(source: str | os.PathLike[str], dtype: str = "float32", backend: Backend = NUMPY) -> Checkpoint:
    """A model, its weights as `dtype` in the memory of `backend`.

    `source` is "default", the model that ships with nanokv; or "smollm2", once it is pulled; or a directory in Hugging
    Face's layout, a GGUF file, a file of llama2.c with its tokenizer beside it; or, when there is no such path and it does
    not look like one, an id on the hub such as "gpt2" or "HuggingFaceTB/SmolLM2-135M-Instruct".
    Raises UsageError for an argument that can mean nothing, else CheckpointError, ConfigError or TokenizerError.
    """
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    if not os.fspath(source):
        raise UsageError(
            "the name of the model is empty: name a directory or a file, 'default', or an id on the hub like 'gpt2'"
        )
    if source == DEFAULT:
        return load_directory(Path(__file__).parent / DEFAULT, DEFAULT, dtype, backend)
    if isinstance(source, str) and source in PACKAGES:
        return load_gguf(pulled(source), source, dtype, backend)
    path = Path(os.path.expanduser(source))  # unlike Path.expanduser, leaves an unknown "~name" alone
    if os.path.isdir(path):
        return load_directory(path, path.resolve().name, dtype, backend)
    if path.suffix == ".gguf" and os.path.isfile(path):
        return load_gguf(path, path.stem, dtype, backend)
    if is_llama2c(path):
        return load_llama2c(path, None, path.stem, dtype, backend)
    if isinstance(source, str) and not os.path.exists(path) and not looks_like_path(source):
        if not HUB_ID.fullmatch(source):
            raise UsageError(f"{source!r} is neither 'default', nor a directory, nor an id on the hub like 'owner/name'")
        from weights.hub import fetch  # only a hub id needs it

        return load_directory(fetch(source), source, dtype, backend)
    raise _not_a_directory(path, os.fspath(source))


def looks_like_path(source: str) -> bool:
    """Whether it names a place on this machine, there or not: "./x", "~/x", "/x", "a/b/c", "x/", "x.safetensors"."""
    separators = source.replace("\\", "/")
    return (
        separators.startswith((".", "~", "/"))
        or separators.endswith(("/", ".safetensors", ".json", ".gguf", *PICKLED))
        or separators.count("/") > 1
        or "\\" in source
    )


def _not_a_directory(path: Path, source: str) -> CheckpointError:
    """What to say of a path at which there is no model directory."""
    if path.suffix in PICKLED:
        return refuse_pickle(path)
    if os.path.exists(path):
        return CheckpointError(f"{source} is a file: name the directory that holds it, config.json and the tokenizer")
    return CheckpointError(f"{source} does not exist: name a model directory, 'default', or an id on the hub like 'gpt2'")
