"""What a cached block holds, as a key: the hash of its whole past.

digest = sha256(parent digest | tokens as 64-bit little-endian | extra keys, each tagged and with its length), from a fixed
root. So a block's digest names every token before it, agrees between processes and machines, and a model's name cannot be
mistaken for a salt. Only full blocks have one. The key itself, parent and tokens and extras, stands beside the digest: it
is the slow oracle that the digest is tested against, and it is compared on every hit.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

ROOT = hashlib.sha256(b"nanokv prefix root").digest()


class BlockKey(NamedTuple):
    """The content of a full block. `parent` is the digest of the block before it, or ROOT."""

    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]
    extra: tuple[tuple[str, str], ...]


def block_key(parent: bytes, tokens: Sequence[int], extra: tuple[tuple[str, str], ...] = ()) -> BlockKey:
    """The key of one full block after `parent`. `extra`: (tag, value) pairs, such as ("model", ...) or ("salt", ...)."""
    digest = hashlib.sha256(parent)
    digest.update(np.asarray(tokens, dtype="<i8").tobytes())
    for text in (part for pair in extra for part in pair):
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return BlockKey(digest.digest(), parent, tuple(int(token) for token in tokens), extra)


def block_keys(
    tokens: Sequence[int], block_size: int, extra: tuple[tuple[str, str], ...] = (), after: Sequence[BlockKey] = ()
) -> Iterator[BlockKey]:
    """The keys of the full blocks of a sequence, in order; `after` are those already known."""
    parent = after[-1].digest if after else ROOT
    for start in range(len(after) * block_size, len(tokens) - block_size + 1, block_size):
        key = block_key(parent, tokens[start : start + block_size], extra)
        parent = key.digest
        yield key


def tagged(extra: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Extra keys in one order."""
    return tuple(sorted(extra.items()))
