"""Text to token ids and back, from a model's own files: never the network, never a cache.

The kind is GPT-2's (Radford et al. 2019): byte-level byte-pair encoding. Text is cut into pieces by a pattern; a piece
starts as single bytes, and the pair that comes first in the list of merges is joined until no pair is listed (Sennrich
et al. 2016, arXiv 1508.07909). tiktoken does the joining. Its rule is another: it joins two parts when the text they
make together is a token, and it looks a whole piece up before it cuts it. The two rules give the same ids on every text
when each merge is what its own text becomes (see `_is_cut_elsewhere`); trained merges all are. Files in which one is not
are refused, since tiktoken would give other ids than the model was trained with.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import tiktoken

from nanokv.errors import TokenizerError
from nanokv.files import read_json, read_text

# GPT-2's pattern as tiktoken writes it. It cuts like the original
#   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
# without going back over what it has matched.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# The pattern's engine runs out of stack, and ends in a panic, at about a million spaces in a row.
LONGEST_SPACE = 900_000
_TOO_MUCH_SPACE = re.compile(rf"\s{{{LONGEST_SPACE}}}")

# The beginning of a character at the end of some bytes (The Unicode Standard, table 3-7). Python's own incremental decoder
# also waits for the third byte of a surrogate, which UTF-8 never has.
_UNFINISHED = re.compile(
    rb"(?:[\xC2-\xDF]|\xE0[\xA0-\xBF]?|[\xE1-\xEC\xEE\xEF][\x80-\xBF]?|\xED[\x80-\x9F]?"
    rb"|\xF0(?:[\x90-\xBF][\x80-\xBF]?)?|[\xF1-\xF3][\x80-\xBF]{0,2}|\xF4(?:[\x80-\x8F][\x80-\xBF]?)?)\Z"
)


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for the 256 bytes in GPT-2's files (its bytes_to_unicode): a printable Latin-1 character
    for itself, the n-th of the others as chr(256 + n)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class Segmenter(Protocol):
    """What cuts ordinary text into tokens."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text that has at least one character and in which nothing is special."""
        ...


class BytePairs:
    """Byte-pair encoding by tiktoken. `ids[rank]` is the id of the token to which `encoding` gives that rank. Text is first
    brought into the `normal_form` of Unicode that the model was trained on, if there is one. `missing` are bytes that the
    vocabulary has no token for: text that has one is a TokenizerError."""

    def __init__(
        self,
        encoding: tiktoken.Encoding,
        ids: Sequence[int],
        normal_form: Literal["NFC"] | None = None,
        missing: frozenset[int] = frozenset(),
    ):
        self._encoding, self._ids, self._normal_form, self._missing = encoding, ids, normal_form, missing

    def encode(self, text: str) -> list[int]:
        if len(text) >= LONGEST_SPACE and _TOO_MUCH_SPACE.search(text):
            raise TokenizerError(f"the text has {LONGEST_SPACE} spaces or more in a row: take some out")
        if self._normal_form:
            text = unicodedata.normalize(self._normal_form, text)
        check_bytes(text, self._missing)
        ids = self._ids
        return [ids[rank] for rank in self._encoding.encode_ordinary(text)]


def without_surrogates(text: str) -> str:
    """The text as UTF-8 can write it: surrogates in pairs are the character that they stand for, a lone one is U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_bytes(text: str, missing: frozenset[int]) -> None:
    """Raises TokenizerError, which names the character, for text with a byte that a vocabulary has no token for."""
    if missing and not missing.isdisjoint(text.encode("utf-8", "replace")):
        bad = next(char for char in text if not missing.isdisjoint(char.encode("utf-8", "replace")))
        raise TokenizerError(f"the vocabulary has no token for {bad!r} (U+{ord(bad):04X}): take it out of the text")


class Tokenizer:
    """One vocabulary. `special_tokens` are those that no text becomes, by name; `vocab_size` is the largest id plus one."""

    def __init__(
        self,
        segmenter: Segmenter,
        tokens: Mapping[int, bytes],
        special_tokens: Mapping[str, int],
        user_tokens: Mapping[str, int] | None = None,
        text_prefix: bytes = b"",
    ):
        """`tokens` are the bytes of every id. Text is cut at `user_tokens` before anything else. `text_prefix` is what the
        segmenter puts before a text and decode() takes off again."""
        self._segmenter = segmenter
        self._tokens = tokens
        self.special_tokens = special_tokens
        self.user_tokens = user_tokens or {}
        self.text_prefix = text_prefix
        self.vocab_size = max(tokens) + 1

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text. All of it is ordinary text: "<|endoftext|>" in it is 13 characters, not a control token, unless
        `special` says that it was written by a chat template, whose names of special tokens stand for the tokens.

        A lone surrogate, which UTF-8 has no bytes for, becomes U+FFFD.
        """
        whole = {**self.user_tokens, **(self.special_tokens if special else {})}
        names = sorted(filter(None, whole), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        ids: list[int] = []
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(whole[part])
            elif part:
                ids += self._segmenter.encode(part)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which may be part of a character; a special token's are its name."""
        try:
            return self._tokens[token]
        except KeyError:
            raise TokenizerError(f"token id {token} is not in the vocabulary (0 .. {self.vocab_size - 1})") from None

    def decode(self, tokens: Iterable[int], continues: bool = False) -> str:
        """The text of some ids; bytes that are no UTF-8 become U+FFFD. `continues`: the ids follow others of the same text,
        so that a space which begins them was not put there by encode()."""
        data = b"".join(map(self.token_bytes, tokens))
        return (data if continues else data.removeprefix(self.text_prefix)).decode("utf-8", errors="replace")

    @classmethod
    def of_bytes(cls) -> "Tokenizer":
        """256 tokens, the bytes: for a model that was not trained on any vocabulary."""
        tokens = {byte: bytes([byte]) for byte in range(256)}
        ranks = {data: byte for byte, data in tokens.items()}
        return cls(BytePairs(_encoding(ranks, GPT2_PATTERN), range(256)), tokens, {})

    @classmethod
    def from_vocab_and_merges(cls, vocab: Path, merges: Path) -> "Tokenizer":
        """From GPT-2's pair of files: vocab.json (token to id) and merges.txt ("a b" a line, first to last).

        A token of the vocabulary that is neither a byte nor a merge is special. Raises TokenizerError.
        """
        pairs = []
        for number, line in enumerate(read_text(merges, TokenizerError).split("\n"), start=1):
            line = line.removesuffix("\r")
            if line and not (number == 1 and line.startswith("#version")):
                pairs.append(_pair(line, f"{merges} line {number}"))
        return _byte_level(_vocabulary(read_json(vocab, TokenizerError), vocab), pairs, {}, f"{vocab} and {merges.name}")

    @classmethod
    def from_tokenizer_json(cls, path: Path) -> "Tokenizer":
        """From Hugging Face's tokenizer.json, when it says what GPT-2's does: BPE after the ByteLevel pre-tokenizer.

        Raises TokenizerError, which names the setting, for whatever would give other ids.
        """
        raw = read_json(path, TokenizerError)
        model = _check_settings(raw, path)
        vocab = _vocabulary(model.get("vocab"), path)
        merges = model.get("merges")
        if not isinstance(merges, list):
            raise TokenizerError(f"{path} holds no list of merges")
        pairs = [_pair(merge, f"{path} merge {number}") for number, merge in enumerate(merges, start=1)]
        whole = model.get("ignore_merges") is True
        return _byte_level(vocab, pairs, _added_tokens(raw, vocab, path), str(path), look_up_pieces=whole)

    @classmethod
    def from_byte_level(
        cls,
        vocab: Mapping[str, int],
        merges: Sequence[str],
        special_tokens: Mapping[str, int],
        user_tokens: Mapping[str, int],
        source: str,
        pattern: str,
        whole_pieces: bool = False,
        normal_form: Literal["NFC"] | None = None,
    ) -> "Tokenizer":
        """From what a GGUF file holds: tokens in the byte alphabet, merges "a b" from first to last, and the tokens that are
        plain text: special ones, and those that text is cut at. How text is cut and what else is done to it is given by the
        caller (nanokv.pretokenizers). A vocabulary may lack bytes, as SmolLM's does. `source` names the file in errors.
        Raises TokenizerError.
        """
        pairs = [_pair(merge, f"{source} merge {number}") for number, merge in enumerate(merges, start=1)]
        if whole_pieces and len({left + right for left, right in pairs}) < len(pairs):
            segmenter, tokens = _by_rank(vocab, pairs, source, pattern)
            tokens |= {index: name.encode("utf-8") for name, index in (*special_tokens.items(), *user_tokens.items())}
            return cls(segmenter, tokens, special_tokens, user_tokens)
        added = {**special_tokens, **user_tokens}
        made = _byte_level(vocab, pairs, added, source, whole_pieces, pattern, normal_form, may_lack_bytes=True)
        return cls(made._segmenter, made._tokens, special_tokens, user_tokens)


class TokenStream:
    """Decodes ids as they come. The pieces joined are what decode() gives for all ids at once; `continues` as there."""

    def __init__(self, tokenizer: Tokenizer, continues: bool = False):
        self._tokenizer = tokenizer
        self._prefix = b"" if continues else tokenizer.text_prefix
        self._held = b""

    def push(self, token: int) -> str:
        """The text that is complete with this token: never part of a character, and nothing is held back for bytes that
        no continuation can make valid. Raises TokenizerError for an unknown id, which is then as if never pushed."""
        data = self._held + self._tokenizer.token_bytes(token).removeprefix(self._prefix)
        self._prefix = b""
        cut = _UNFINISHED.search(data)
        end = cut.start() if cut else len(data)
        self._held = data[end:]
        return data[:end].decode("utf-8", errors="replace")

    def finish(self) -> str:
        """Ends the text: U+FFFD if it ends inside a character, else nothing."""
        held, self._held = self._held, b""
        return held.decode("utf-8", errors="replace")


def _byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    added: Mapping[str, int],
    source: str,
    look_up_pieces: bool = False,
    pattern: str = GPT2_PATTERN,
    normal_form: Literal["NFC"] | None = None,
    may_lack_bytes: bool = False,
) -> Tokenizer:
    """The tokenizer of a vocabulary in the byte alphabet and its merges.

    `added` are tokens given by their plain text. `look_up_pieces`: a piece that is a token stays whole though no merges
    lead to it (the setting ignore_merges). `source` names the files in errors.
    """
    alphabet = byte_alphabet()
    to_latin1 = str.maketrans({char: chr(byte) for char, byte in alphabet.items()})
    if not may_lack_bytes:
        _check_bytes(vocab, alphabet, source)
    bytes_there = {char: byte for char, byte in alphabet.items() if char in vocab}
    _check_merges(vocab, bytes_there, merges, source)
    mergeable = [*bytes_there, *(left + right for left, right in merges)]
    ranks = {token.translate(to_latin1).encode("latin-1"): rank for rank, token in enumerate(mergeable)}
    encoding = _encoding(ranks, pattern)

    tokens = {vocab[token]: data for token, data in zip(mergeable, ranks, strict=True)}
    special = {}
    for token, index in vocab.items():
        if index in tokens or token in added:
            continue
        readable = token != "" and alphabet.keys() >= set(token)
        data = tokens[index] = token.translate(to_latin1).encode("latin-1") if readable else token.encode("utf-8")
        if not (look_up_pieces and readable):
            special[token] = index
            continue
        if len(encoding._encode_single_piece(data)) == 2:
            raise TokenizerError(f"{source}: ignore_merges with {token!r}, two tokens that no merge joins, is not supported")
        mergeable.append(token)
        ranks[data] = len(ranks)
    for name, index in added.items():
        if index not in tokens:
            tokens[index] = name.encode("utf-8")
            special[name] = index
    if look_up_pieces:
        encoding = _encoding(ranks, pattern)
    missing = frozenset(alphabet.values()) - frozenset(bytes_there.values())
    return Tokenizer(BytePairs(encoding, [vocab[token] for token in mergeable], normal_form, missing), tokens, special)


def _by_rank(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], source: str, pattern: str
) -> tuple[BytePairs, dict[int, bytes]]:
    """What cuts text, and the bytes of each id, when the list of merges says no more than the vocabulary does: every token,
    in order of its id, with all the ways in which it is two tokens. Files made from tiktoken's vocabularies have such a
    list, and tiktoken's own rule, to join what makes the token of the lowest rank, is then the model's.
    """
    alphabet = byte_alphabet()
    to_latin1 = str.maketrans({char: chr(byte) for char, byte in alphabet.items()})
    _check_bytes(vocab, alphabet, source)
    ordered = sorted(vocab, key=vocab.__getitem__)
    at = 0
    for token in ordered:
        ways = {(token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in vocab and token[cut:] in vocab}
        if set(merges[at : at + len(ways)]) != ways:
            raise TokenizerError(f"{source}: the merges of token {token!r} are not all the ways to make it: not supported")
        at += len(ways)
    if at != len(merges):
        raise TokenizerError(f"{source}: merge {at + 1} makes no token of the vocabulary: {' '.join(merges[at])!r:.80}")
    if odd := next((token for token in ordered if not alphabet.keys() >= set(token)), None):
        raise TokenizerError(f"{source}: token {odd!r} is not written in the byte alphabet")
    data = [token.translate(to_latin1).encode("latin-1") for token in ordered]
    encoding = _encoding({each: rank for rank, each in enumerate(data)}, pattern)
    ids = [vocab[token] for token in ordered]
    return BytePairs(encoding, ids), dict(zip(ids, data, strict=True))


def _encoding(ranks: dict[bytes, int], pattern: str) -> tiktoken.Encoding:
    return tiktoken.Encoding("nanokv", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def _check_merges(
    vocab: Mapping[str, int], alphabet: Mapping[str, int], merges: Sequence[tuple[str, str]], source: str
) -> None:
    """Every merge is in the vocabulary, made of parts that are, and what its own text becomes."""
    made: dict[str, tuple[int, str, str]] = {}
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    for rank, (left, right) in enumerate(merges):
        token, line = left + right, f"{source}: merge {rank + 1} ({left!r} {right!r})"
        for part in (left, right):
            if part not in alphabet and part not in made:
                raise TokenizerError(f"{line} joins {part!r}, which no earlier merge makes")
        if token not in vocab:
            raise TokenizerError(f"{line} makes {token!r}, which is not in the vocabulary")
        if token in made or _is_cut_elsewhere(left, right, rank, made, ranks):
            raise TokenizerError(f"{line} is not what earlier merges make of its text: such merges are not supported")
        made[token] = rank, left, right


def _check_bytes(vocab: Mapping[str, int], alphabet: Mapping[str, int], source: str) -> None:
    for char, byte in alphabet.items():
        if char not in vocab:
            raise TokenizerError(f"{source}: the vocabulary has no token for byte 0x{byte:02X} ({char!r})")


def _is_cut_elsewhere(
    left: str, right: str, rank: int, made: Mapping[str, tuple[int, str, str]], ranks: Mapping[tuple[str, str], int]
) -> bool:
    """Whether merging the text of left + right joins a pair across their border before both are made.

    Merges apply in order of rank, since a part made by one can only be joined by a later one. So the parts that touch the
    border come in order of rank, too; this goes back through them. While left's last part and right's first part touch,
    a merge of these two would join them if it came before the merges that use them up. Of equal pairs the left one is
    joined first.

    Why that is enough: where a text gets cut into two parts that together are a token, no pair across the ends of that
    token was joined, so the merges inside it are those of its text alone, which end in its own merge and no other pair.
    """
    left_until = right_until = rank
    while True:
        across = ranks.get((left, right), rank)
        if across < left_until and across <= right_until:
            return True
        last, first = made.get(left), made.get(right)
        if last is not None and (first is None or last[0] > first[0]):
            left_until, _, left = last
        elif first is not None:
            right_until, right, _ = first
        else:
            return False


def _pair(merge: Any, where: str) -> tuple[str, str]:
    """A merge as files have it, "a b" or ["a", "b"]."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
        raise TokenizerError(f"{where} is not a merge of two tokens: {merge!r:.80}")
    return parts[0], parts[1]


def _vocabulary(raw: Any, path: Path) -> dict[str, int]:
    """Token to id, checked: ids are whole numbers, none twice."""
    if not isinstance(raw, dict):
        raise TokenizerError(f"{path} holds no vocabulary: an object of tokens and their ids was expected")
    for token, index in raw.items():
        _check_id(index, token, path)
    if len(set(raw.values())) < len(raw):
        raise TokenizerError(f"{path} gives one id to several tokens")
    return raw


def _check_id(index: Any, token: str, path: Path) -> None:
    if type(index) is not int or index < 0:
        raise TokenizerError(f"{path}: the id of token {token!r:.80} is not a whole number: {index!r:.80}")


def _added_tokens(raw: Mapping[str, Any], vocab: Mapping[str, int], path: Path) -> dict[str, int]:
    """The special tokens that tokenizer.json lists beside the vocabulary, or in it."""
    by_id = {index: token for token, index in vocab.items()}
    added: dict[str, int] = {}
    for entry in raw.get("added_tokens") or []:
        name = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise TokenizerError(f"{path}: added token without content: {entry!r:.80}")
        index = entry.get("id")
        _check_id(index, name, path)
        if entry.get("special") is not True:
            raise TokenizerError(f"{path}: added token {name!r} is not special: cutting text at such tokens is not supported")
        if by_id.setdefault(index, name) != name or vocab.get(name, index) != index or added.get(name, index) != index:
            raise TokenizerError(f"{path}: added token {name!r} with id {index} disagrees with the vocabulary")
        added[name] = index
    return added


def _check_settings(raw: Any, path: Path) -> Mapping[str, Any]:
    """The model of a tokenizer.json, whose every setting that changes ids is the one GPT-2's file has."""

    def section(value: Any, name: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise TokenizerError(f"{path} has no {name}: only byte-level BPE as in GPT-2's files is supported")
        return value

    def need(value: Any, allowed: tuple[Any, ...], name: str) -> None:
        if value not in allowed:
            raise TokenizerError(f"{path}: {name} {value!r:.80} is not supported: only byte-level BPE as in GPT-2's files is")

    raw = section(raw, "tokenizer")
    model = section(raw.get("model"), "model")
    need(model.get("type", "BPE"), ("BPE",), "model type")  # GPT-2's own file, older than the key, has none
    need(model.get("dropout"), (None, 0), "dropout")
    need(model.get("byte_fallback"), (None, False), "byte_fallback")
    need(model.get("ignore_merges"), (None, False, True), "ignore_merges")
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        need(model.get(affix), (None, ""), affix)
    need(raw.get("normalizer"), (None,), "normalizer")
    before = section(raw.get("pre_tokenizer"), "pre_tokenizer")
    need(before.get("type"), ("ByteLevel",), "pre_tokenizer")
    need(before.get("add_prefix_space"), (False,), "add_prefix_space")
    need(before.get("use_regex", True), (True,), "use_regex")
    need(section(raw.get("decoder"), "decoder").get("type"), ("ByteLevel",), "decoder")
    after = raw.get("post_processor")
    if after is not None:
        after = section(after, "post_processor")
        need(after.get("type"), ("ByteLevel", "TemplateProcessing"), "post_processor")
        if after["type"] == "TemplateProcessing":  # may add tokens around the text; GPT-2's adds none
            parts = after.get("single")
            kinds = [kind for part in parts for kind in part] if isinstance(parts, list) else parts
            need(kinds, (["Sequence"],), "post_processor template")
    return model
