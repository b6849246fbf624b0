"""tokenizer.json of the Llama families: the package's ids, our rules for special tokens, and bytes token by token."""

import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import TokenizerError
from nanokv.gguf_header import read_header
from nanokv.tokenizer import Tokenizer, TokenStream, byte_alphabet
from nanokv.tokenizer_json import read_tokenizer_json
from tests.llama_support import BYTE_LEVEL, added, byte_level, small_vocab, template
from tests.support import data
from weights.gguf_tokenizer import read_tokenizer

tokenizers = pytest.importorskip("tokenizers")

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]


def sentence_pieces(**more):
    """Llama 2's kind of file."""
    return {
        "version": "1.0", "added_tokens": [added("<unk>", 0), added("<s>", 1), added("</s>", 2)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "pre_tokenizer": None, "post_processor": template("<s>", "$A"),
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True,
                  "vocab": {text: index for index, text in enumerate(PIECES)}, "merges": ["▁ a", "a b"]},
        **more,
    }  # fmt: skip


def load(path, raw):
    path.write_text(json.dumps(raw), encoding="utf-8")
    return read_tokenizer_json(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokenizer.json"


@cache
def llama3(folder) -> Tokenizer:
    file = data("tokenizers/vectors/ggml-vocab-llama-bpe.gguf")
    metadata = read_header(file).metadata
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    texts = metadata["tokenizer.ggml.tokens"]
    vocab = {text: index for index, (text, kind) in enumerate(zip(texts, kinds, strict=True)) if kind == 1}
    return load(folder / "llama3.json", byte_level(vocab, metadata["tokenizer.ggml.merges"], added_tokens=[
        added(text, index) for index, (text, kind) in enumerate(zip(texts, kinds, strict=True)) if kind == 3
    ], post_processor=template("<|begin_of_text|>", "$A")))  # fmt: skip


def test_llama3_from_its_json_and_from_its_gguf(tmp_path_factory):
    """Two programs, tiktoken behind the GGUF and the package here: the 47 strings and the prefix."""
    ours, prefix = llama3(tmp_path_factory.getbasetemp())
    file = data("tokenizers/vectors/ggml-vocab-llama-bpe.gguf")
    theirs = read_tokenizer(read_header(file).metadata, str(file))
    assert prefix == (128000,)
    for text in (
        data("tokenizers/vectors/ggml-vocab-llama-bpe.gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    ):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == text
    assert ours.special_tokens == theirs.special_tokens
    assert all(ours.token_bytes(token) == theirs.token_bytes(token) for token in range(0, 128256, 97))


def test_special_names_are_ordinary_text_and_user_tokens_are_not(path):
    tokenizer, prefix = load(path, byte_level(small_vocab(), ["a b"]))
    assert prefix == (900,)
    assert tokenizer.special_tokens == {"<|begin|>": 900, "<|end|>": 901}
    assert 901 not in tokenizer.encode("ab<|end|>")
    assert tokenizer.encode("ab<|end|>", special=True) == [256, 901]
    assert tokenizer.encode("ab<tool>") == [256, 902]
    assert tokenizer.decode(tokenizer.encode("\ud800 é")) == "\ufffd é"


def test_a_vocabulary_without_some_bytes(path):
    vocab = small_vocab()
    del vocab[{byte: char for char, byte in byte_alphabet().items()}[4]]
    tokenizer, _ = load(path, byte_level(vocab, ["a b"]))
    with pytest.raises(TokenizerError, match="U[+]0004"):
        tokenizer.encode("a\x04")


def test_sentence_pieces(path):
    tokenizer, prefix = load(path, sentence_pieces())
    assert prefix == (1,)
    a, space = PIECES.index("▁a"), PIECES.index("▁")
    assert tokenizer.encode("a a") == [a, a]
    assert tokenizer.encode("é") == [space, *(3 + byte for byte in "é".encode())]
    assert tokenizer.decode([a, a]) == "a a"
    assert tokenizer.decode([a], continues=True) == " a"
    assert 1 not in tokenizer.encode("<s>")
    assert tokenizer.encode("<s>a", special=True) == [1, a]


@given(st.text(st.sampled_from("ab é☃\n"), max_size=20))
def test_round_trips_and_streams(tmp_path_factory, text):
    folder = tmp_path_factory.getbasetemp()
    for raw in (sentence_pieces(), byte_level(small_vocab(), ["a b"])):
        tokenizer, _ = load(folder / "round.json", raw)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = TokenStream(tokenizer)
        assert "".join([stream.push(token) for token in ids]) + stream.finish() == text


def test_metaspace(path):
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    for scheme, prefix in (("first", b" "), ("never", b"")):
        section = {**metaspace, "prepend_scheme": scheme}
        tokenizer, _ = load(path, sentence_pieces(normalizer=None, pre_tokenizer=section))
        assert tokenizer.text_prefix == prefix
        assert tokenizer.decode(tokenizer.encode("a a")) == "a a"


@pytest.mark.parametrize(("raw", "words"), [
    ([], "does not hold a tokenizer"), ({"model": 3}, "does not hold a tokenizer"),
    ({"model": {"type": "X"}}, "is not a tokenizer"), (sentence_pieces(decoder=None), "decoder"),
    (sentence_pieces(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "decoder"),
    (byte_level(small_vocab(), [], pre_tokenizer={**BYTE_LEVEL, "add_prefix_space": True}), "add_prefix_space"),
    (sentence_pieces(post_processor=template("<s>", "$A", "</s>")), "before the text"),
    (sentence_pieces(post_processor=template("<cls>", "$A")), "'<cls>'"),
    (sentence_pieces(added_tokens=[added("<x>", 300, special=False, rstrip=True)]), "rstrip"),
    (sentence_pieces(added_tokens=[{"content": "<x>"}]), "needs content and an id"),
    (sentence_pieces(added_tokens=[added("", 300)]), "needs content and an id"),
])  # fmt: skip
def test_what_is_refused(path, raw, words):
    with pytest.raises(TokenizerError, match=words) as caught:
        load(path, raw)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
