"""A model directory in Hugging Face's layout -> Checkpoint.

config.json, whose `model_type` says which architecture it is; the weights in safetensors files; the tokenizer. GPT-2's may
be vocab.json with merges.txt, or tokenizer.json. For the Llama families it must be tokenizer.json: the pair does not say how
text is cut, and Qwen's and SmolLM's is not cut as GPT-2's. generation_config.json, tokenizer_config.json and
chat_template.jinja may be absent.
"""

from pathlib import Path
from typing import Any

from nanokv.backend import Backend
from nanokv.errors import CheckpointError, ConfigError, TokenizerError
from nanokv.files import read_json, read_text
from nanokv.models.config import GPT2Config, token_ids
from nanokv.models.families import Config, Params
from nanokv.models.llama_config import FAMILIES, LlamaConfig
from nanokv.tokenizer import Tokenizer
from nanokv.tokenizer_json import read_tokenizer_json
from weights.checkpoint import Checkpoint
from weights.gpt2 import read_gpt2
from weights.llama import read_llama
from weights.tensors import INDEX, SINGLE, find_tensors, read_index

CONFIG = "config.json"
GENERATION = "generation_config.json"
VOCAB, MERGES, TOKENIZER = "vocab.json", "merges.txt", "tokenizer.json"
TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"


def load_directory(directory: Path, name: str, dtype: str, backend: Backend) -> Checkpoint:
    """The model in `directory`, its weights as `dtype` (float32 or float64) in the backend's memory.

    The small files and the headers of the large ones are checked before any weights are read. Raises ConfigError,
    TokenizerError or CheckpointError, each naming the file.
    """
    config = read_config(directory)
    tokenizer, prefix = read_tokenizer(directory, config)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but config.json has vocab_size "
            f"{config.vocab_size}: these files do not belong together"
        )
    eos = frozenset(config.eos_token_ids) | generation_eos(directory, config)
    template = read_template(directory)
    tensors = find_tensors(directory)
    params: Params
    if isinstance(config, GPT2Config):
        params = read_gpt2(tensors, config, dtype, backend, directory)
    else:
        params = read_llama(tensors, config, dtype, backend, directory)
    return Checkpoint(name, params.config, params, tokenizer, eos, prefix, template)


def read_config(directory: Path) -> Config:
    """config.json, checked. Raises ConfigError."""
    path = directory / CONFIG
    raw = read_json(path, ConfigError)
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    try:
        if kind != "gpt2" and kind not in FAMILIES:
            raise ConfigError(f"model_type {kind!r} is not supported: gpt2, {', '.join(FAMILIES)} are")
        return GPT2Config.from_dict(raw) if kind == "gpt2" else LlamaConfig.from_dict(raw)
    except ConfigError as reason:
        raise ConfigError(f"{path}: {reason}") from None


def generation_eos(directory: Path, config: Config) -> frozenset[int]:
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


def read_tokenizer(directory: Path, config: Config) -> tuple[Tokenizer, tuple[int, ...]]:
    """The tokenizer, and the ids before every text: for GPT-2 from vocab.json and merges.txt where both are there, else from
    tokenizer.json. Raises TokenizerError."""
    vocab, merges, tokenizer = directory / VOCAB, directory / MERGES, directory / TOKENIZER
    if not isinstance(config, GPT2Config):
        if not tokenizer.exists():
            raise TokenizerError(f"{directory} has no {TOKENIZER}: {VOCAB} and {MERGES} do not say how text is cut")
        return read_tokenizer_json(tokenizer)
    if vocab.exists() and merges.exists():
        return Tokenizer.from_vocab_and_merges(vocab, merges), ()
    if tokenizer.exists():
        return Tokenizer.from_tokenizer_json(tokenizer), ()
    raise TokenizerError(f"{directory} has no tokenizer: it needs {VOCAB} and {MERGES}, or {TOKENIZER}")


def read_template(directory: Path) -> str | None:
    """The chat template: a file of its own (transformers 5), or a string in tokenizer_config.json; None where there is
    neither. Raises TokenizerError for a file that cannot be read."""
    if (directory / TEMPLATE).exists():
        return read_text(directory / TEMPLATE, TokenizerError)
    if not (directory / TOKENIZER_CONFIG).exists():
        return None
    raw = read_json(directory / TOKENIZER_CONFIG, TokenizerError)
    template = raw.get("chat_template") if isinstance(raw, dict) else None
    return template if isinstance(template, str) else None


def missing_files(directory: Path) -> list[str]:
    """The files without which `directory` cannot be loaded and that are not there."""
    index = directory / INDEX
    sharded = index.exists() and not (directory / SINGLE).exists()
    needed = [CONFIG, *(sorted(set(read_index(index).values())) if sharded else [SINGLE])]
    pair = _is_gpt2(directory) and all((directory / name).exists() for name in (VOCAB, MERGES))
    if not pair:
        needed.append(TOKENIZER)
    return [name for name in needed if not (directory / name).exists()]


def _is_gpt2(directory: Path) -> bool:
    """By its config.json; one that is missing or damaged is reported when it is read."""
    try:
        raw = read_json(directory / CONFIG, ConfigError)
    except ConfigError:
        return True
    return not isinstance(raw, dict) or raw.get("model_type") not in FAMILIES
