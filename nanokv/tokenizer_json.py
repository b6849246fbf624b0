"""Any tokenizer.json, through Hugging Face's tokenizers package: for the families whose files say more than GPT-2's.

The package cuts and joins; special tokens stay with us, so that their names in a text are ordinary text here, too. It is an
optional extra, imported when such a file is read.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanokv.errors import TokenizerError
from nanokv.files import read_json
from nanokv.tokenizer import Tokenizer, byte_alphabet, check_bytes, without_surrogates
from nanokv.tokenizer_spm import SPACE

BYTE = re.compile("<0x([0-9A-F]{2})>")


class JsonSegmenter:
    """The package's tokenizer for text in which nothing is special. It would drop what it has no token for: see
    check_bytes()."""

    def __init__(self, theirs: Any, missing: frozenset[int]):
        self._theirs, self._missing = theirs, missing

    def encode(self, text: str) -> list[int]:
        text = without_surrogates(text)
        check_bytes(text, self._missing)
        return list(self._theirs.encode(text, add_special_tokens=False).ids)


def read_tokenizer_json(path: Path) -> tuple[Tokenizer, tuple[int, ...]]:
    """The tokenizer, and the ids that its file puts before every text.

    Raises TokenizerError: the package is not installed, it cannot read the file, or the file asks for something that
    could not be decoded token by token.
    """
    raw = read_json(path, TokenizerError)
    if not isinstance(raw, dict) or not isinstance(raw.get("model"), dict):
        raise TokenizerError(f"{path} does not hold a tokenizer")
    special, user = _added_tokens(raw, path)
    plain = raw | {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    theirs = _parse(plain, path)
    vocab: dict[str, int] = theirs.get_vocab(with_added_tokens=False)
    decoders = _names(raw.get("decoder"))
    missing: frozenset[int] = frozenset()
    if "ByteLevel" in decoders:
        alphabet = byte_alphabet()
        tokens = {index: _from_alphabet(text, alphabet) for text, index in vocab.items()}
        missing = frozenset(byte for char, byte in alphabet.items() if char not in vocab)
        if any(part.get("add_prefix_space") for part in _parts(raw.get("pre_tokenizer"))):
            raise TokenizerError(
                f"{path}: add_prefix_space is not supported in byte-level files: a text would not decode to itself"
            )
        prefix_space = False
    elif {"ByteFallback", "Metaspace"} & set(decoders):
        tokens = {index: _from_piece(text) for text, index in vocab.items()}
        prefix_space = _puts_space(raw)
    else:
        raise TokenizerError(f"{path}: decoder {decoders} is not supported: ByteLevel, ByteFallback and Metaspace are")
    tokens |= {index: name.encode() for name, index in (*special.items(), *user.items())}
    made = Tokenizer(JsonSegmenter(theirs, missing), tokens, special, user, b" " if prefix_space else b"")
    return made, _prefix(raw, special, path)


def _parse(raw: Mapping[str, Any], path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as Theirs
    except ImportError:
        raise TokenizerError(f"{path} needs the tokenizers package: pip install 'nanokv[tokenizers]'") from None
    try:
        return Theirs.from_str(json.dumps(raw))
    except Exception as reason:  # the package promises no type
        raise TokenizerError(f"{path} is not a tokenizer that the tokenizers package reads: {reason}".splitlines()[0]) from None


def _added_tokens(raw: Mapping[str, Any], path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Special tokens, and those that text is cut at, by name."""
    special: dict[str, int] = {}
    user: dict[str, int] = {}
    for entry in raw.get("added_tokens") or []:
        name, index = (entry.get("content"), entry.get("id")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not name or type(index) is not int or index < 0:
            raise TokenizerError(f"{path}: an added token needs content and an id: {entry!r:.80}")
        is_special = entry.get("special") is True
        if not is_special and (strips := [flag for flag in ("lstrip", "rstrip", "single_word") if entry.get(flag)]):
            raise TokenizerError(f"{path}: added token {name!r} has {strips[0]}, which is not supported")
        (special if is_special else user)[name] = index
    return special, user


def _prefix(raw: Mapping[str, Any], special: Mapping[str, int], path: Path) -> tuple[int, ...]:
    """The ids before a text by the post-processor's template. One that adds ids after it is refused."""
    ids: list[int] = []
    for part in _parts(raw.get("post_processor")):
        if part.get("type") == "ByteLevel":
            continue
        if part.get("type") != "TemplateProcessing" or not isinstance(part.get("single"), list):
            raise TokenizerError(f"{path}: post_processor {part.get('type')!r:.80} is not supported")
        kinds = [next(iter(entry.items())) if isinstance(entry, dict) and entry else (None, {}) for entry in part["single"]]
        if not kinds or kinds[-1][0] != "Sequence" or any(kind != "SpecialToken" for kind, _ in kinds[:-1]):
            raise TokenizerError(f"{path}: only special tokens before the text are supported in the post_processor's template")
        for _, entry in kinds[:-1]:
            name = entry.get("id") if isinstance(entry, dict) else None
            if not isinstance(name, str) or name not in special:
                raise TokenizerError(f"{path}: the post_processor puts {name!r:.80} before a text, which is no special token")
            ids.append(special[name])
    return tuple(ids)


def _parts(section: Any) -> list[dict[str, Any]]:
    """A section, or the sections of a Sequence."""
    if not isinstance(section, dict):
        return []
    inner = next(
        (section[key] for key in ("processors", "pretokenizers", "decoders", "normalizers") if key in section), [section]
    )
    return [part for part in inner if isinstance(part, dict)] if isinstance(inner, list) else []


def _names(section: Any) -> list[str]:
    return [str(part.get("type")) for part in _parts(section)]


def _puts_space(raw: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text: by a normalizer (Llama 2) or by the Metaspace pre-tokenizer."""
    if any(part.get("type") == "Prepend" and part.get("prepend") == SPACE for part in _parts(raw.get("normalizer"))):
        return True
    spaces = [part for part in _parts(raw.get("pre_tokenizer")) if part.get("type") == "Metaspace"]
    return any(part.get("prepend_scheme", "always") != "never" and part.get("add_prefix_space", True) for part in spaces)


def _from_alphabet(text: str, alphabet: Mapping[str, int]) -> bytes:
    return bytes(alphabet[char] for char in text) if alphabet.keys() >= set(text) else text.encode()


def _from_piece(text: str) -> bytes:
    if byte := BYTE.fullmatch(text):
        return bytes.fromhex(byte[1])
    return text.replace(SPACE, " ").encode()
