"""Which module computes which parameters. gpt2.py and llama.py have the same functions: forward, hidden_states, unembed,
fast_bound, random_params. Each takes parameters of its own kind, or for the last a configuration."""

from types import ModuleType

from nanokv.models import gpt2, llama
from nanokv.models.config import GPT2Config
from nanokv.models.gpt2 import GPT2Params
from nanokv.models.llama import LlamaParams
from nanokv.models.llama_config import LlamaConfig

Params = GPT2Params | LlamaParams
Config = GPT2Config | LlamaConfig


def module_for(shape: Params | Config) -> ModuleType:
    """The module whose functions work on these parameters or on this configuration."""
    return gpt2 if isinstance(shape, GPT2Params | GPT2Config) else llama
