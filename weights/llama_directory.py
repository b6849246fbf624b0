"""A Llama's or a relative's directory in Hugging Face's layout -> LlamaCheckpoint.

config.json, the weights in safetensors files, tokenizer.json; generation_config.json, tokenizer_config.json and
chat_template.jinja may be absent. A vocab.json with merges.txt is no substitute for tokenizer.json: the pair does not say
how text is cut, and Qwen's and SmolLM's is not cut as GPT-2's.
"""

from pathlib import Path

from nanokv.backend import Backend
from nanokv.errors import CheckpointError, ConfigError, TokenizerError
from nanokv.files import read_json, read_text
from nanokv.models.llama_config import LlamaConfig
from nanokv.tokenizer_json import read_tokenizer_json
from weights.huggingface import CONFIG, TOKENIZER, generation_eos
from weights.llama import LlamaCheckpoint, read_llama
from weights.tensors import find_tensors

TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"


def load_llama_directory(directory: Path, name: str, dtype: str, backend: Backend) -> LlamaCheckpoint:
    """The model in `directory`, its weights as `dtype` (float32 or float64) in the backend's memory.

    The small files and the headers of the large ones are checked before any weights are read. Raises ConfigError,
    TokenizerError or CheckpointError, each naming the file.
    """
    config = read_llama_config(directory / CONFIG)
    if not (directory / TOKENIZER).exists():
        raise TokenizerError(f"{directory} has no {TOKENIZER}: vocab.json and merges.txt do not say how text is cut")
    tokenizer, prefix = read_tokenizer_json(directory / TOKENIZER)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but config.json has vocab_size "
            f"{config.vocab_size}: these files do not belong together"
        )
    eos = frozenset(config.eos_token_ids) | generation_eos(directory, config)  # type: ignore[arg-type]
    template = read_template(directory)
    params = read_llama(find_tensors(directory), config, dtype, backend, directory)
    return LlamaCheckpoint(name, params.config, params, tokenizer, eos, prefix, template)


def read_llama_config(path: Path) -> LlamaConfig:
    """config.json, checked. Raises ConfigError."""
    raw = read_json(path, ConfigError)
    try:
        return LlamaConfig.from_dict(raw)
    except ConfigError as reason:
        raise ConfigError(f"{path}: {reason}") from None


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
