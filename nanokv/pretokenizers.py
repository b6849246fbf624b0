"""How text is cut into pieces before byte-pair encoding, by the name that a GGUF file gives (tokenizer.ggml.pre).

The rule belongs to the vocabulary: with another one "1234" becomes other ids. A name that is not here is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nanokv.errors import TokenizerError
from nanokv.tokenizer import GPT2_PATTERN

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?+\p{L}++"
_REST = r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class PreTokenizer:
    """`whole_pieces`: a piece that is a token stays whole though no merges lead to it. `add_bos`: the text begins with the
    beginning-of-text token where the file does not say."""

    pattern: str
    whole_pieces: bool = False
    add_bos: bool = False
    normal_form: Literal["NFC"] | None = None


GPT2 = PreTokenizer(GPT2_PATTERN)

# Llama 3 (llama3/tokenizer.py in meta-llama/llama-models): numbers in groups of three, a letter run takes one character
# before it along.
LLAMA3 = PreTokenizer(
    rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}{{1,3}}+|{_REST}", whole_pieces=True, add_bos=True
)  # fmt: skip

# Qwen2's tokenizer.json: as Llama 3, with single digits, after Unicode's normal form C.
QWEN2 = PreTokenizer(rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}|{_REST}", normal_form="NFC")

# SmolLM's tokenizer.json cuts out single digits, then cuts what is left by GPT-2's pattern; here both in one pattern. A run of
# spaces before a digit is therefore one piece, as at the end of a text.
SMOLLM = PreTokenizer(
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++|\p{N}| ?[^\s\p{L}\p{N}]++|\s++(?=\p{N}|$)|\s+(?!\S)|\s"
)  # fmt: skip

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": GPT2, "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "qwen2": QWEN2, "smollm": SMOLLM,
}  # fmt: skip


def get_pre_tokenizer(name: object, where: str) -> PreTokenizer:
    """By the name in a file. TokenizerError for an unknown one, and where there is none."""
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise TokenizerError(f"{where}: pre-tokenizer {name!r} is not supported: {', '.join(PRE_TOKENIZERS)} are")
    return PRE_TOKENIZERS[name]
