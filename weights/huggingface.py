"""A model directory in Hugging Face's layout -> Checkpoint.

config.json, generation_config.json (may be absent), the weights in safetensors files, and the tokenizer as vocab.json
with merges.txt, or as tokenizer.json.
"""

from pathlib import Path
from typing import Any

from nanokv.backend import Backend
from nanokv.errors import CheckpointError, ConfigError, TokenizerError
from nanokv.files import read_json
from nanokv.models.config import GPT2Config, token_ids
from nanokv.tokenizer import Tokenizer
from weights.checkpoint import Checkpoint
from weights.gpt2 import read_gpt2
from weights.tensors import INDEX, SINGLE, find_tensors, read_index

CONFIG = "config.json"
GENERATION = "generation_config.json"
VOCAB, MERGES, TOKENIZER = "vocab.json", "merges.txt", "tokenizer.json"


def load_directory(directory: Path, name: str, dtype: str, backend: Backend) -> Checkpoint:
    """The model in `directory`, its weights as `dtype` (float32 or float64) in the backend's memory.

    The small files and the headers of the large ones are checked before any weights are read. Raises ConfigError,
    TokenizerError or CheckpointError, each naming the file.
    """
    config = read_config(directory)
    tokenizer = read_tokenizer(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but config.json has vocab_size "
            f"{config.vocab_size}: these files do not belong together"
        )
    eos = frozenset(config.eos_token_ids) | generation_eos(directory, config)
    params = read_gpt2(find_tensors(directory), config, dtype, backend, directory)
    return Checkpoint(name, params.config, params, tokenizer, eos)


def read_config(directory: Path) -> GPT2Config:
    """config.json, checked. Raises ConfigError."""
    path = directory / CONFIG
    raw = read_json(path, ConfigError)
    try:
        return GPT2Config.from_dict(raw)
    except ConfigError as reason:
        raise ConfigError(f"{path}: {reason}") from None


def generation_eos(directory: Path, config: GPT2Config) -> frozenset[int]:
    """The ids that end a text according to generation_config.json; none where there is no such file. Raises ConfigError."""
    path = directory / GENERATION
    if not path.exists():
        return frozenset()
    raw: Any = read_json(path, ConfigError)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} does not hold an object")
    try:
        return frozenset(token_ids(raw.get("eos_token_id"), config.vocab_size))
    except ConfigError as reason:
        raise ConfigError(f"{path}: {reason}") from None


def read_tokenizer(directory: Path) -> Tokenizer:
    """From vocab.json and merges.txt where both are there, else from tokenizer.json. Raises TokenizerError."""
    vocab, merges, tokenizer = directory / VOCAB, directory / MERGES, directory / TOKENIZER
    if vocab.exists() and merges.exists():
        return Tokenizer.from_vocab_and_merges(vocab, merges)
    if tokenizer.exists():
        return Tokenizer.from_tokenizer_json(tokenizer)
    raise TokenizerError(f"{directory} has no tokenizer: it needs {VOCAB} and {MERGES}, or {TOKENIZER}")


def missing_files(directory: Path) -> list[str]:
    """The files without which `directory` cannot be loaded and that are not there."""
    index = directory / INDEX
    sharded = index.exists() and not (directory / SINGLE).exists()
    needed = [CONFIG, *(sorted(set(read_index(index).values())) if sharded else [SINGLE])]
    if not all((directory / name).exists() for name in (VOCAB, MERGES)):
        needed.append(TOKENIZER)
    return [name for name in needed if not (directory / name).exists()]
