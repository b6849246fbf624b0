"""What loading gives, whatever the files were."""

from dataclasses import dataclass

from nanokv.models.config import GPT2Config
from nanokv.models.gpt2 import GPT2Params
from nanokv.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """A model read from files. `eos_token_ids`: every id that ends a text, by any of the files that name one."""

    name: str
    config: GPT2Config
    params: GPT2Params
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
