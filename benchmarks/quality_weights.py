"""What each format of the weights, with each format of K and V, costs in bytes and in perplexity, on held-out text.

    python -m benchmarks.quality_weights --corpora DIR [--model default] [--tokens 8192]

The text is benchmarks.quality's. Compiled kernels, so that the numbers are the same on every machine.
"""

import argparse
from pathlib import Path

import nanokv
from benchmarks.quality import CODECS, texts
from nanokv.kernels.matrix import FORMATS
from nanokv.kv.spec import CacheSpec
from nanokv.perplexity import perplexity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    print(f"| weights | MB | {' | '.join(f'KV {codec}' for codec in CODECS)} |\n|---|---|{'---|' * len(CODECS)}")
    for form in FORMATS:
        model = nanokv.load(args.model, kernels="compiled", weights=form)
        held = texts(model, args.corpora, args.tokens)
        values = [perplexity(model, held, CacheSpec(kv_dtype=codec)) for codec in CODECS]
        print(f"| {form} | {model.weight_bytes / 1e6:.1f} | {' | '.join(f'{value:.4f}' for value in values)} |", flush=True)


if __name__ == "__main__":
    main()
