"""What loading gives, whatever the files were."""

from dataclasses import dataclass

from nanokv.models.families import Config, Params
from nanokv.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """A model read from files. `eos_token_ids`: every id that ends a text, by any of the files that name one. `prefix`: the
    ids that the model was trained to see before every text, usually the beginning-of-text token or nothing."""

    name: str
    config: Config
    params: Params
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    prefix: tuple[int, ...] = ()
    chat_template: str | None = None
