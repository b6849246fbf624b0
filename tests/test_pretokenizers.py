"""How text is cut, by the name in the file: the published patterns, and ids as the reference vectors have them."""

import unicodedata
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import TokenizerError
from nanokv.gguf_header import read_header
from nanokv.pretokenizers import PRE_TOKENIZERS, get_pre_tokenizer
from nanokv.tokenizer import Tokenizer, byte_alphabet
from tests.support import data
from weights.gguf_tokenizer import read_prefix, read_tokenizer

regex = pytest.importorskip("regex")  # comes with the peers: Python's own re knows no \p{L}

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PUBLISHED = {  # as tiktoken's and Hugging Face's files have them
    "gpt-2": GPT2,
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                 r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
             r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}  # fmt: skip
TELLING = "abZé'sSTt\u017fllLL 019²\u2167٣ \t\n\r.,!?-_中🎈\u0301\u00a0"
TEXTS = st.text(st.one_of(st.sampled_from(TELLING), st.characters(codec="utf-8")), max_size=30)


def pieces(name: str, text: str) -> list[str]:
    return regex.findall(get_pre_tokenizer(name, "f").pattern, text)


def published(name: str, text: str) -> list[str]:
    if name == "smollm":  # single digits first, then GPT-2's pattern on what lies between
        parts = regex.split(r"(\p{N})", text)
        return [piece for n, part in enumerate(parts) for piece in ([part] if n % 2 else regex.findall(GPT2, part))]
    return regex.findall(PUBLISHED[name], text)


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
@given(text=TEXTS)
def test_cuts_as_published(name, text):
    assert pieces(name, text) == published(name, text)


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("llama-bpe", "1234567", ["123", "456", "7"]), ("qwen2", "1234", list("1234")),
    ("smollm", "a  12 b", ["a", "  ", "1", "2", " b"]),
    ("gpt-2", "1234", ["1234"]), ("llama-bpe", "I'LL go\n\n ok", ["I", "'LL", " go", "\n\n", " ok"]),
])  # fmt: skip
def test_digits_and_newlines(name, text, expected):
    """J05: what a wrong pattern gets wrong."""
    assert pieces(name, text) == expected


def test_unknown_names_are_refused():
    for name in ("default", "", None, 3, "llama-bpe2"):
        with pytest.raises(TokenizerError, match="is not supported: gpt-2"):
            get_pre_tokenizer(name, "f")
    assert {"gpt-2", "llama-bpe", "smollm", "qwen2"} <= PRE_TOKENIZERS.keys()


@cache
def load_vocabulary(name: str) -> Tokenizer:
    path = data(f"tokenizers/vectors/ggml-vocab-{name}.gguf")
    return read_tokenizer(read_header(path).metadata, str(path))


@pytest.mark.parametrize("name", ["llama-bpe", "gpt-2"])
def test_vectors(name):
    """The 47 strings of llama.cpp."""
    texts = data(f"tokenizers/vectors/ggml-vocab-{name}.gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = data(f"tokenizers/vectors/ggml-vocab-{name}.gguf.out").read_text().split("\n")
    tokenizer = load_vocabulary(name)
    assert len(texts) == 47
    for text, line in zip(texts, lines, strict=True):
        expected = [int(number) for number in line.split()]
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected) == text


def test_llama3_special_tokens():
    """J04, J06: names are ordinary text unless asked; a word that is a token is one id."""
    tokenizer = load_vocabulary("llama-bpe")
    metadata = read_header(data("tokenizers/vectors/ggml-vocab-llama-bpe.gguf")).metadata
    assert read_prefix(metadata, "f") == (128000,)
    assert tokenizer.special_tokens["<|end_of_text|>"] == 128001
    assert len(tokenizer.encode("<|end_of_text|>")) > 1
    assert tokenizer.encode("<|end_of_text|>", special=True) == [128001]
    assert len(tokenizer.encode(" Việt")) == 1


def vocabulary(*more: str) -> dict[str, int]:
    return {token: index for index, token in enumerate([*byte_alphabet(), *more])}


def build(vocab, merges, user=None, **more):
    pattern = get_pre_tokenizer("gpt-2", "f").pattern
    return Tokenizer.from_byte_level(vocab, merges, {"<|end|>": 900}, user or {}, "f", pattern, **more)


def test_merges_that_list_every_way_to_make_a_token():
    """As files made from tiktoken's vocabularies have them: what makes the token of the lowest id is joined first, in
    whichever way it can be made."""
    vocab, merges = vocabulary("bc", "ab", "abc", "cd", "abcd"), ["b c", "a b", "a bc", "ab c", "c d", "abc d", "ab cd"]
    tokenizer = build(vocab, merges, whole_pieces=True)
    for text, expected in (("abc", ["abc"]), ("xabc", ["x", "abc"]), ("bcd", ["bc", "d"]), ("xabcd", ["x", "abcd"])):
        assert [tokenizer.token_bytes(token).decode() for token in tokenizer.encode(text)] == expected
    assert tokenizer.vocab_size == 901
    for wrong, words in (
        (merges[:-1], "'abcd' are not all the ways"), ([*merges[:2], *merges[4:], *merges[2:4]], "not all the ways"),
        ([*merges, "x y"], "'xy'|merge 8"), ([*merges, "b c"], "merge 8 makes no token"),
    ):  # fmt: skip
        with pytest.raises(TokenizerError, match=words):
            build(vocab, wrong, whole_pieces=True)
    with pytest.raises(TokenizerError, match="byte alphabet"):
        build({**vocab, "\u2603": 300}, merges, whole_pieces=True)
    with pytest.raises(TokenizerError, match="not what earlier merges make"):
        build(vocab, merges)


def test_user_tokens_cut_the_text():
    tokenizer = build(vocabulary("ab"), ["a b"], user={"<tool>": 901})
    assert tokenizer.encode("ab<tool>ab") == [256, 901, 256]
    assert tokenizer.decode([256, 901]) == "ab<tool>"
    assert tokenizer.special_tokens == {"<|end|>": 900}
    nested = build(vocabulary("ab"), ["a b"], user={"<t>": 901, "<t>b": 902})
    assert nested.encode("a<t>b<t>") == [nested.encode("a")[0], 902, 901]


def test_a_vocabulary_without_some_bytes():
    """SmolLM's has no token for a few control characters: other text is as ever, that text is refused, nothing is lost."""
    vocab = vocabulary("ab")
    for byte in (0x04, 0xC0, 0xF1):
        del vocab[{value: char for char, value in byte_alphabet().items()}[byte]]
    tokenizer = build(vocab, ["a b"])
    assert tokenizer.decode(tokenizer.encode("ab é \ud800 \U0001f388")) == "ab é \ufffd \U0001f388"
    for text, name in (("a\x04b", "U[+]0004"), ("\U00040000", "U[+]40000")):
        with pytest.raises(TokenizerError, match=name):
            tokenizer.encode(text)


def test_qwen_text_is_composed_first():
    tokenizer = build(vocabulary(), [], normal_form="NFC")
    apart = unicodedata.normalize("NFD", "é")
    assert tokenizer.encode(apart) == tokenizer.encode("é") != build(vocabulary(), []).encode(apart)
