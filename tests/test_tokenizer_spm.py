"""SentencePiece's byte-pair encoding: ids as the reference has them, round trips, a stream that keeps or drops the space."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import TokenizerError
from nanokv.gguf_header import read_header
from nanokv.tokenizer import Tokenizer, TokenStream
from nanokv.tokenizer_spm import SentencePieces, spm_tokenizer
from tests.support import data
from weights.gguf_tokenizer import read_prefix, read_tokenizer
from weights.llama2c import read_tokenizer as read_llama2c

PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "é", "aa", "aaa"]


def small(**more) -> Tokenizer:
    pieces = {text: (300 + n, float(-n)) for n, text in enumerate(PIECES)}
    byte_tokens = {byte: 3 + byte for byte in range(256)}
    return spm_tokenizer(pieces, byte_tokens, {"<unk>": 0, "<s>": 1, "</s>": 2}, {"<tool>": 290}, 0, "test", **more)


SMALL = small()


def ids(*pieces: str) -> list[int]:
    return [300 + PIECES.index(piece) for piece in pieces]


@cache
def load_llama() -> Tokenizer:
    path = data("tokenizers/vectors/ggml-vocab-llama-spm.gguf")
    return read_tokenizer(read_header(path).metadata, str(path))


def test_llama_vectors():
    """The 47 strings of llama.cpp's vocabulary of Llama 2: they decode back, the first space with them."""
    given, expected = (data(f"tokenizers/vectors/ggml-vocab-llama-spm.gguf.{end}") for end in ("inp", "out"))
    texts = given.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = expected.read_text().split("\n")
    assert len(texts) == 47
    for text, line in zip(texts, lines, strict=True):
        expected = [int(number) for number in line.split()]
        assert load_llama().encode(text) == expected, text
        assert load_llama().decode(expected) == text


def test_llama_prefix_and_special_tokens():
    metadata = read_header(data("tokenizers/vectors/ggml-vocab-llama-spm.gguf")).metadata
    assert read_prefix(metadata, "f") == (1,)
    assert read_prefix(metadata | {"tokenizer.ggml.add_bos_token": False}, "f") == ()
    tokenizer = load_llama()
    assert tokenizer.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}
    assert tokenizer.vocab_size == 32000
    assert 1 not in tokenizer.encode("<s> and </s>")  # J04
    assert tokenizer.encode("<s>Hi</s>", special=True) == [1, *tokenizer.encode("Hi"), 2]


def test_stories260k_vocabulary():
    """tok512.bin: spaces are written as such; beginnings of the text that its model tells."""
    tokenizer = read_llama2c(data("models/stories260K/tok512.bin"), 512)
    assert tokenizer.encode("Once upon a time, there was a little girl named Lily.")[0] == 403
    for text in ("Once upon a time", " two  spaces", "Ünïcode ▁ 🎈\n\t", "<0x41>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_best_score_is_joined_first_and_the_leftmost_of_equals():
    assert SMALL.encode("ab") == ids("▁ab")
    assert SMALL.encode("abc") == ids("▁a", "bc")  # "▁a" comes before "ab" and "bc"
    assert SMALL.encode("cabc") == ids("▁", "c", "abc")  # "ab" before "bc", then "abc"
    assert SMALL.encode("") == []


def test_equal_scores():
    pieces = {text: (n, 0.0 if len(text) > 1 else -1.0) for n, text in enumerate(["a", "b", "c", "ab", "bc"])}
    assert SentencePieces(pieces, [], None, prefix_space=False).encode("abc") == [3, 2]


def test_bytes_and_unknown_characters():
    assert SMALL.encode("é☃") == [*ids("▁", "é"), *(3 + byte for byte in "☃".encode())]
    assert SMALL.encode("\ud800") == SMALL.encode("\ufffd")
    pieces = {"▁": (5, 0.0)}
    assert spm_tokenizer(pieces, {}, {"<unk>": 0}, {}, 0, "t").encode("☃") == [5, 0]
    with pytest.raises(TokenizerError, match="no token for '☃'"):
        spm_tokenizer(pieces, {}, {}, {}, None, "t").encode("☃")
    with pytest.raises(TokenizerError, match="none for 0x07"):
        spm_tokenizer(pieces, {byte: byte for byte in range(256) if byte != 7}, {}, {}, 0, "t")


def test_names_of_special_and_byte_tokens_are_ordinary_text():
    assert not {1, 2, 0} & set(SMALL.encode("<s></s><unk>"))
    assert SMALL.encode("<0x41>")[1:] == [3 + byte for byte in b"<0x41>"]


def test_user_tokens_cut_the_text():
    assert SMALL.encode("a<tool>b") == [*ids("▁a"), 290, *ids("▁", "b")]
    assert SMALL.decode([290]) == "<tool>"


def test_the_space_before_a_text():
    """J07: by the flag of the file; a continuation keeps the space that begins it."""
    assert SMALL.decode(ids("▁a", "▁a")) == "a a"
    assert SMALL.decode(ids("▁a"), continues=True) == " a"
    assert small(prefix_space=False).encode("a a") == ids("a", "▁a")
    assert small(prefix_space=False).decode(ids("▁a")) == " a"
    for continues in (True, False):
        stream = TokenStream(SMALL, continues)
        assert "".join([stream.push(token) for token in ids("▁a", "▁a")]) == SMALL.decode(ids("▁a", "▁a"), continues)


@given(st.text(st.sampled_from("abcé▁ ☃\n<>0x"), max_size=40))
def test_round_trips(text):
    """But for the character that stands for a space, which becomes one."""
    assert SMALL.decode(SMALL.encode(text)) == text.replace("▁", " ")


@given(st.lists(st.sampled_from([*range(3, 259), *range(300, 300 + len(PIECES)), 0, 1, 2, 290]), max_size=30), st.booleans())
def test_a_stream_gives_what_decode_gives(tokens, continues):
    stream = TokenStream(SMALL, continues)
    parts = [stream.push(token) for token in tokens]
    assert "".join(parts) + stream.finish() == SMALL.decode(tokens, continues)


def naive(symbols: list[str], pieces: dict[str, tuple[int, float]]) -> list[str]:
    """The definition: look through all neighbours for the best, join it, begin again."""
    while True:
        pairs = [(pieces[a + b][1], -n) for n, (a, b) in enumerate(pairwise(symbols)) if a + b in pieces]
        if not pairs:
            return symbols
        at = -max(pairs)[1]
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]


@given(
    st.lists(st.text("ab", min_size=2, max_size=5), unique=True, max_size=12),
    st.lists(st.integers(-3, 0), min_size=12, max_size=12),
    st.text("ab", max_size=30),
)
def test_joining_is_the_definition(texts, scores, text):
    """Any pieces and scores, ties and pieces that no join leads to among them."""
    pieces = {"a": (0, -9.0), "b": (1, -9.0)}
    pieces |= {each: (n, float(score)) for n, (each, score) in enumerate(zip(texts, scores, strict=False), start=2)}
    expected = [pieces[symbol][0] for symbol in naive(list(text), pieces)]
    assert SentencePieces(pieces, [], None, prefix_space=False).encode(text) == expected
