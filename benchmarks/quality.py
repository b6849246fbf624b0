"""What each codec, window and head count costs in bytes and in perplexity, on held-out text.

    python -m benchmarks.quality --corpora DIR [--model default] [--tokens 8000]

The text is what the default model's training held out (weights/train_default.py) of TinyStories and the dialogues, joined
into texts of the model's context; for the endless caches, into one long text. Greedy text that differs from that of the
float cache is counted too.
"""

import argparse
import math
from pathlib import Path

import nanokv
from nanokv.kv.spec import CacheSpec
from nanokv.model import Model
from nanokv.perplexity import nats, perplexity
from weights.corpora import held_out_texts

CODECS = ("float32", "bfloat16", "float16", "int8", "fp8", "int4")


def texts(model: Model, corpora: Path, limit: int) -> list[list[int]]:
    """Held-out documents joined by the end of text, cut to the model's positions."""
    end = sorted(model.eos_token_ids)[:1]
    stream = [token for text in held_out_texts(corpora) for token in [*model.encode(text), *end]][:limit]
    size = model.config.num_positions
    return [stream[at : at + size] for at in range(0, len(stream) - size + 1, size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    model = nanokv.load(args.model)
    held = texts(model, args.corpora, args.tokens)
    stream = [token for text in held for token in text]
    base = perplexity(model, held)
    print(f"{model.name}, {len(stream)} held-out tokens in texts of {len(held[0])}: perplexity {base:.3f}\n")

    print("| KV format | bytes a token | of float32 | perplexity | change |\n|---|---|---|---|---|")
    for name in CODECS:
        spec = CacheSpec(kv_dtype=name)
        size = model.new_cache(128, spec).bytes_per_token
        value = perplexity(model, held, spec)
        whole = model.new_cache(128).bytes_per_token
        print(f"| {name} | {size:,.0f} | {size / whole:.0%} | {value:.4f} | {value / base - 1:+.3%} |")

    print("\n| key-value heads | bytes a token | perplexity |\n|---|---|---|")
    for heads in (6, 3, 2, 1):
        fewer = model.with_kv_heads(heads)
        print(f"| {heads} | {fewer.new_cache(128).bytes_per_token:,.0f} | {perplexity(fewer, held):.2f} |")

    size = model.config.num_positions
    print(f"\n| cache, one text of {len(stream)} tokens | tokens kept | perplexity | past token {size} |\n|---|---|---|---|")
    half = size // 2
    for label, spec in (
        (f"window {half}, no sinks", CacheSpec(window=half, sinks=0)),
        (f"window {half - 1}, 1 sink", CacheSpec(window=half - 1, sinks=1)),
        (f"window {half - 4}, 4 sinks", CacheSpec(window=half - 4, sinks=4)),
        (f"window {half - 16}, 16 sinks", CacheSpec(window=half - 16, sinks=16)),
    ):
        losses = nats(model, stream, spec)
        kept = spec.visibility.held(1 << 30)
        print(f"| {label} | {kept} | {math.exp(losses.mean()):.2f} | {math.exp(losses[size:].mean()):.2f} |")
    recomputed = [nats(model, stream[at : at + size])[half - 1 :] for at in range(0, len(stream) - size + 1, half)]
    value = math.exp(sum(part.sum() for part in recomputed) / sum(len(part) for part in recomputed))
    print(f"| recomputed in overlapping windows of {size}, the second half of each | | {value:.2f} | |")

    prompt = "Once upon a time"
    plain = model.generate(prompt, max_tokens=60).tokens
    print("\ngreedy tokens of 60 that equal the float32 cache's, up to the first that differs:")
    for name in CODECS[1:]:
        other = model.generate(prompt, max_tokens=60, kv_dtype=name).tokens
        same = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
        print(f"  {name:9} {same}")


if __name__ == "__main__":
    main()
