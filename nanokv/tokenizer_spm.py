"""SentencePiece's byte-pair encoding (Kudo and Richardson 2018, arXiv 1808.06226), from the pieces and scores that GGUF and
llama2.c files hold.

Text starts as single characters, a space before it; of all neighbours that are a piece together, those with the highest
score are joined, the leftmost first among equals, until none are. A character that is no piece is given by the tokens of
its UTF-8 bytes.
"""

import heapq
from collections.abc import Mapping, Sequence

from nanokv.errors import TokenizerError
from nanokv.tokenizer import Tokenizer, without_surrogates

SPACE = "\u2581"  # stands for a space in pieces


class SentencePieces:
    """`pieces`: the id and score of each that text can become; `byte_ids`: the tokens of the 256 bytes, if there are;
    `unknown`: the token of a character that is nothing else. `space` is how pieces write a space. `prefix_space`: a space is
    put before a text."""

    def __init__(
        self,
        pieces: Mapping[str, tuple[int, float]],
        byte_ids: Sequence[int],
        unknown: int | None,
        space: str = SPACE,
        prefix_space: bool = True,
    ):
        self._pieces, self._byte_ids, self._unknown = pieces, byte_ids, unknown
        self._space, self._prefix_space = space, prefix_space

    def encode(self, text: str) -> list[int]:
        text = without_surrogates(text)
        if self._prefix_space:
            text = " " + text
        symbols = self._join(list(text.replace(" ", self._space)))
        return [token for symbol in symbols for token in self._ids(symbol)]

    def _join(self, symbols: list[str]) -> list[str]:
        """The pieces that remain when nothing can be joined. A joined symbol takes the place of its left part; its right
        part becomes empty."""
        before, after = list(range(-1, len(symbols) - 1)), list(range(1, len(symbols) + 1))
        heap: list[tuple[float, int, str]] = []

        def consider(left: int) -> None:
            if left >= 0 and after[left] < len(symbols):
                pair = symbols[left] + symbols[after[left]]
                if pair in self._pieces:
                    heapq.heappush(heap, (-self._pieces[pair][1], left, pair))

        for left in range(len(symbols)):
            consider(left)
        while heap:
            _, left, pair = heapq.heappop(heap)
            right = after[left]
            if not symbols[left] or right >= len(symbols) or symbols[left] + symbols[right] != pair:
                continue  # one of the two has been joined to another since
            symbols[left], symbols[right] = pair, ""
            after[left] = after[right]
            if after[left] < len(symbols):
                before[after[left]] = left
            consider(before[left])
            consider(left)
        return [symbol for symbol in symbols if symbol]

    def _ids(self, symbol: str) -> list[int]:
        if symbol in self._pieces:
            return [self._pieces[symbol][0]]
        if self._byte_ids:
            return [self._byte_ids[byte] for byte in symbol.encode()]
        if self._unknown is not None:
            return [self._unknown]
        raise TokenizerError(f"the vocabulary has no token for {symbol!r}, none for bytes, and none for what is unknown")


def spm_tokenizer(
    pieces: Mapping[str, tuple[int, float]],
    byte_tokens: Mapping[int, int],
    special: Mapping[str, int],
    user: Mapping[str, int],
    unknown: int | None,
    source: str,
    space: str = SPACE,
    prefix_space: bool = True,
) -> Tokenizer:
    """The tokenizer of these pieces (text -> id, score). `byte_tokens`: byte -> id, all 256 or none. `special` and `user`
    are tokens by name. `source` names the file in errors."""
    if byte_tokens and len(byte_tokens) != 256:
        missing = next(byte for byte in range(256) if byte not in byte_tokens)
        raise TokenizerError(f"{source}: the vocabulary has tokens for bytes, but none for 0x{missing:02X}")
    tokens = {index: text.replace(space, " ").encode() for text, (index, _) in pieces.items()}
    tokens |= {index: bytes([byte]) for byte, index in byte_tokens.items()}
    tokens |= {index: name.encode() for name, index in (*special.items(), *user.items())}
    byte_ids = [byte_tokens[byte] for byte in range(256)] if byte_tokens else []
    segmenter = SentencePieces(pieces, byte_ids, unknown, space, prefix_space)
    return Tokenizer(segmenter, tokens, special, user, text_prefix=b" " if prefix_space else b"")
