"""The tokenizer that a GGUF file holds (tokenizer.ggml.*): byte-level BPE ("gpt2") or SentencePiece's ("llama")."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from nanokv.errors import TokenizerError
from nanokv.pretokenizers import get_pre_tokenizer
from nanokv.tokenizer import Tokenizer
from nanokv.tokenizer_spm import spm_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
PREFIX = "tokenizer.ggml."

Metadata = Mapping[str, Any]


def read_tokenizer(metadata: Metadata, where: str) -> Tokenizer:
    """The tokenizer; `where` names the file in errors. Raises TokenizerError for a kind that is not supported."""
    model = metadata.get(PREFIX + "model")
    readers = {"gpt2": _byte_level, "llama": _sentence_pieces}
    if not isinstance(model, str) or model not in readers:
        raise TokenizerError(f"{where}: tokenizer.ggml.model {model!r} is not supported: {', '.join(readers)} are")
    texts = metadata.get(PREFIX + "tokens")
    if not isinstance(texts, list) or not texts:
        raise TokenizerError(f"{where} has no tokenizer.ggml.tokens")
    kinds = _numbers(metadata, "token_type", len(texts), where)
    if kinds is None:
        raise TokenizerError(f"{where} has no tokenizer.ggml.token_type, which says what is text and what is not")
    return readers[model](metadata, texts, kinds.tolist(), where)


def read_prefix(metadata: Metadata, where: str) -> tuple[int, ...]:
    """The ids that stand before every text: the beginning-of-text token where the file, or else its kind, says so."""
    if metadata.get(PREFIX + "model") == "llama":
        default = True
    else:
        default = get_pre_tokenizer(metadata.get(PREFIX + "pre"), where).add_bos
    if metadata.get(PREFIX + "add_bos_token", default) is not True:
        return ()
    return (_token(metadata, "bos_token_id", where),)


def read_ends(metadata: Metadata, where: str) -> frozenset[int]:
    """The ids that end a text or a turn."""
    return frozenset(_token(metadata, key, where) for key in ENDS if PREFIX + key in metadata)


def _byte_level(metadata: Metadata, texts: list[str], kinds: list[int], where: str) -> Tokenizer:
    rules = get_pre_tokenizer(metadata.get(PREFIX + "pre"), where)
    merges = metadata.get(PREFIX + "merges")
    if not isinstance(merges, list):
        raise TokenizerError(f"{where} has no tokenizer.ggml.merges")
    vocab = _by_text(texts, kinds, (NORMAL,), where)
    special, user = _by_text(texts, kinds, (UNKNOWN, CONTROL, UNUSED), where), _by_text(texts, kinds, (USER,), where)
    return Tokenizer.from_byte_level(
        vocab, merges, special, user, where, rules.pattern, rules.whole_pieces, rules.normal_form
    )  # fmt: skip


def _sentence_pieces(metadata: Metadata, texts: list[str], kinds: list[int], where: str) -> Tokenizer:
    scores = _numbers(metadata, "scores", len(texts), where)
    if scores is None:
        raise TokenizerError(f"{where} has no tokenizer.ggml.scores")
    pieces = {text: (index, float(scores[index])) for text, index in _by_text(texts, kinds, (NORMAL,), where).items()}
    special, user = _by_text(texts, kinds, (UNKNOWN, CONTROL, UNUSED), where), _by_text(texts, kinds, (USER,), where)
    unknown = _token(metadata, "unknown_token_id", where) if PREFIX + "unknown_token_id" in metadata else None
    prefix_space = metadata.get(PREFIX + "add_space_prefix", True) is True
    return spm_tokenizer(pieces, _bytes(texts, kinds, where), special, user, unknown, where, prefix_space=prefix_space)


def _by_text(texts: list[str], kinds: list[int], wanted: tuple[int, ...], where: str) -> dict[str, int]:
    """The tokens of these kinds. Two of one text are an error."""
    found: dict[str, int] = {}
    for index, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if kind in wanted and found.setdefault(text, index) != index:
            raise TokenizerError(f"{where}: tokens {found[text]} and {index} are both {text!r:.80}")
    return found


def _bytes(texts: list[str], kinds: list[int], where: str) -> dict[int, int]:
    """Byte -> id, from tokens named <0x0A>."""
    found: dict[int, int] = {}
    for index, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if kind == BYTE:
            try:
                found[bytes.fromhex(text.removeprefix("<0x").removesuffix(">"))[0]] = index
            except (ValueError, IndexError):
                raise TokenizerError(f"{where}: token {index} is called a byte, but its text is {text!r:.80}") from None
    return found


def _numbers(metadata: Metadata, key: str, count: int, where: str) -> np.ndarray | None:
    values = metadata.get(PREFIX + key)
    if values is not None and (not isinstance(values, np.ndarray) or len(values) != count):
        raise TokenizerError(f"{where}: tokenizer.ggml.{key} is not a list of {count} numbers, one a token")
    return values


def _token(metadata: Metadata, key: str, where: str) -> int:
    value, count = metadata.get(PREFIX + key), len(metadata.get(PREFIX + "tokens", ()))
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise TokenizerError(f"{where}: tokenizer.ggml.{key} {value!r} is not the id of a token (0 .. {count - 1})")
    return value
