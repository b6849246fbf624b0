"""The texts that the default model learned from, and which of them it never saw.

They are read from a folder of gzipped files, documents separated by <|endoftext|>; none is part of the project.
"""

import gzip
import hashlib
import re
from pathlib import Path

from weights.greetings import greetings

END = "<|endoftext|>"
MIX = {  # file: how often its documents stand in the mix
    "tinystories_dedup.txt.gz": 3,
    "sgd_dialogues.txt.gz": 1,
    "chatterbot_english.txt.gz": 1,
}
GREETINGS = 2400
# The tokenizer's 4,096 entries have no curly quotes: each would be three bytes, three tokens.
PLAIN = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "-", "\u2013": "-", "\u2026": "...", "\xa0": " "}
)


def read_documents(path: Path) -> list[str]:
    """The distinct documents of one file, in plain quotes, the dialogues without their speaker labels."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [text.strip().translate(PLAIN) for text in file.read().split(END)]
    if path.name.startswith("sgd"):
        texts = [re.sub(r"^(User|System): ", "", text, flags=re.M) for text in texts]
    return [text for text in dict.fromkeys(texts) if text]


def documents(corpora: Path) -> list[tuple[str, int]]:
    """Every distinct document with its weight in the mix."""
    found = [(text, 1) for text in greetings(GREETINGS)]
    for name, times in MIX.items():
        found += [(text, times) for text in read_documents(corpora / name)]
    return found


def held_out(text: str) -> bool:
    """One document in a hundred, by its own hash: the split does not depend on order or seed."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % 100 == 0


def held_out_texts(corpora: Path) -> list[str]:
    """Held-out stories and dialogues in turn: what the model's quality is measured on."""
    kinds = [[t for t in read_documents(corpora / name) if held_out(t)] for name in list(MIX)[:2]]
    return [text for pair in zip(*kinds, strict=False) for text in pair]
