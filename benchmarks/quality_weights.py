"""What each format of the weights, with each format of K and V, costs in bytes and in perplexity, on held-out text.

    python -m benchmarks.quality_weights --corpora DIR [--model default] [--tokens 8192] [--context N]

The text is that of benchmarks.quality, by the same options. Compiled kernels: every machine gives the same numbers.
"""

import nanokv
from benchmarks.quality import CODECS, held_texts, text_options
from nanokv.kernels.matrix import FORMATS
from nanokv.kv.spec import CacheSpec
from nanokv.perplexity import perplexity


def main() -> None:
    args = text_options(__doc__).parse_args()
    print(f"| weights | MB | {' | '.join(f'KV {codec}' for codec in CODECS)} |\n|---|---|{'---|' * len(CODECS)}")
    for form in FORMATS:
        model = nanokv.load(args.model, kernels="compiled", weights=form)
        held = held_texts(model, args)
        values = [perplexity(model, held, CacheSpec(kv_dtype=codec)) for codec in CODECS]
        print(f"| {form} | {model.weight_bytes / 1e6:.1f} | {' | '.join(f'{value:.4f}' for value in values)} |", flush=True)


if __name__ == "__main__":
    main()
