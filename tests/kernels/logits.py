"""The logits of the model that ships, as sha256: the same on every machine. A new model needs a new file:

python -m tests.kernels.logits --write
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

import nanokv

FILE = Path(__file__).with_name("default_logits.json")
PROMPTS = ("Hello, how", "Once upon a time, there was a little girl named Lily.", "What is the weather like in London? " * 20)


def digests(**options: object) -> dict[str, str]:
    """Prompt -> the digest of its logits, float32 little-endian, prefilled and then one token at a time."""
    model = nanokv.load("default", kernels="compiled", backend="numpy", **options)
    found = {}
    for prompt in PROMPTS:
        tokens, cache = model.encode(prompt), model.new_cache()
        parts = [model.forward(tokens, cache)]
        for _ in range(8):
            parts.append(model.forward([int(parts[-1][-1].argmax())], cache))
        found[prompt] = hashlib.sha256(np.concatenate(parts).astype("<f4").tobytes()).hexdigest()
    return found


if __name__ == "__main__":
    text = json.dumps(digests(), indent=1) + "\n"
    if "--write" in sys.argv:
        FILE.write_text(text)
    print(text, end="")
