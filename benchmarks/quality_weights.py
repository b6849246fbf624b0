"""What each format of the weights, with each format of K and V, costs in bytes and in perplexity, on held-out text.

    python -m benchmarks.quality_weights --corpora DIR [--model default] [--tokens 8192] [--context N]

The text is that of benchmarks.quality, by the same options. A file whose matrices are packed already (GGUF) has a line of
its own. Compiled kernels: every machine gives the same numbers.
"""

import nanokv
from benchmarks.quality import CODECS, held_texts, text_options
from nanokv.kernels.matrix import FORMATS
from nanokv.kv.spec import CacheSpec
from nanokv.perplexity import perplexity


def main() -> None:
    args = text_options(__doc__).parse_args()
    print(f"| weights | MB | {' | '.join(f'KV {codec}' for codec in CODECS)} |\n|---|---|{'---|' * len(CODECS)}")
    for form in (None, *FORMATS):
        model = nanokv.load(args.model, kernels="compiled", weights=form)
        if form is None and model.params.head.form == "float32":
            continue
        held = held_texts(model, args)
        values = [perplexity(model, held, CacheSpec(kv_dtype=codec)) for codec in CODECS]
        cells = " | ".join(f"{value:.4f}" for value in values)
        print(f"| {form or 'as stored'} | {model.weight_bytes / 1e6:.1f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
