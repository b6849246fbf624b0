"""What each codec, window and head count costs in bytes and in perplexity on held-out text, and what reuse saves.

    python -m benchmarks.quality --corpora DIR [--model default] [--tokens 8192] [--context N] [--numerics fast]
    python -m benchmarks.quality --model smollm2 --text FILE --tokens 2048 --context 512

The text is a file, or what the default model's training held out (weights/train_default.py) of TinyStories and the
dialogues: joined into texts of `--context` tokens (the model's positions if not said); for the endless caches, one long
text. Greedy text that differs from that of the float cache is counted too. A model with a chat template also shows what a
second turn finds in the cache.
"""

import argparse
import math
from pathlib import Path

import nanokv
from nanokv.chat import encode_chat
from nanokv.engine import Engine
from nanokv.generate import Options
from nanokv.kv.spec import CacheSpec
from nanokv.model import Model
from nanokv.perplexity import nats, perplexity
from nanokv.sampling import SamplingParams
from weights.corpora import held_out_texts

CODECS = ("float32", "bfloat16", "float16", "int8", "fp8", "int4")
PROMPT = "Once upon a time"
QUESTIONS = ("Which animals live in the sea?", "And which of them is the largest?")


def stream_of(model: Model, corpora: Path | None, text: Path | None, limit: int) -> list[int]:
    """The first `limit` tokens of the file, or of the held-out documents joined by the end of text."""
    if text is not None:
        return model.encode(text.read_text(encoding="utf-8"))[:limit]
    if corpora is None:
        raise SystemExit("name a text: --corpora DIR or --text FILE")
    end = sorted(model.eos_token_ids)[:1]
    return [token for each in held_out_texts(corpora) for token in [*model.encode(each), *end]][:limit]


def show_codecs(model: Model, held: list[list[int]], base: float) -> None:
    whole = model.new_cache(128).bytes_per_token
    print("| KV format | bytes a token | of float32 | perplexity | change |\n|---|---|---|---|---|")
    for name in CODECS:
        spec = CacheSpec(kv_dtype=name)
        size, value = model.new_cache(128, spec).bytes_per_token, perplexity(model, held, spec)
        print(f"| {name} | {size:,.0f} | {size / whole:.0%} | {value:.4f} | {value / base - 1:+.3%} |", flush=True)


def show_heads(model: Model, held: list[list[int]]) -> None:
    print("\n| key-value heads | bytes a token | perplexity |\n|---|---|---|")
    present = model.config.num_kv_heads
    for heads in (number for number in range(present, 0, -1) if present % number == 0):
        fewer = model.with_kv_heads(heads)
        print(f"| {heads} | {fewer.new_cache(128).bytes_per_token:,.0f} | {perplexity(fewer, held):.2f} |", flush=True)


def show_windows(model: Model, stream: list[int], size: int) -> None:
    print(f"\n| cache, one text of {len(stream)} tokens | tokens kept | perplexity | past token {size} |\n|---|---|---|---|")
    half = size // 2
    for sinks in (0, 1, 4, 16):
        spec = CacheSpec(window=half - sinks, sinks=sinks)
        losses, kept = nats(model, stream, spec), spec.visibility.held(1 << 30)
        values = f"{math.exp(losses.mean()):.2f} | {math.exp(losses[size:].mean()):.2f}"
        print(f"| window {half - sinks}, {sinks} sinks | {kept} | {values} |", flush=True)
    recomputed = [nats(model, stream[at : at + size])[half - 1 :] for at in range(0, len(stream) - size + 1, half)]
    value = math.exp(sum(part.sum() for part in recomputed) / sum(len(part) for part in recomputed))
    print(f"| recomputed in overlapping windows of {size}, the second half of each | | {value:.2f} | |")


def show_greedy(model: Model) -> None:
    plain = model.generate(PROMPT, max_tokens=60).tokens
    print("\ngreedy tokens of 60 that equal the float32 cache's, up to the first that differs:")
    for name in CODECS[1:]:
        other = model.generate(PROMPT, max_tokens=60, kv_dtype=name).tokens
        same = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), min(len(plain), len(other)))
        print(f"  {name:9} {same}", flush=True)


def show_reuse(model: Model) -> None:
    """Two turns of a chat, and four samples of one prompt, in an engine."""
    print("\n| reuse, blocks of 16 | tokens | found in the cache or shared | computed |\n|---|---|---|---|")
    engine = Engine(model, num_blocks=200)
    messages: list[dict[str, str]] = []
    for turn, question in enumerate(QUESTIONS if model.chat_template else ()):
        messages.append({"role": "user", "content": question})
        prompt, before, hits = encode_chat(model, messages), engine.stats.computed_tokens, engine.stats.prefix_hit_tokens
        run = engine.generate([prompt], Options(40))[0]
        messages.append({"role": "assistant", "content": run.text})
        found, computed = engine.stats.prefix_hit_tokens - hits, engine.stats.computed_tokens - before
        print(f"| chat, turn {turn + 1} | {len(prompt)} and {len(run.tokens)} new | {found} | {computed} |", flush=True)
    engine, prompt = Engine(model, num_blocks=200), model.encode(" ".join([PROMPT, *QUESTIONS] * 4))
    engine.add(prompt, Options(20, SamplingParams(1.0, seed=1), ignore_eos=True), n=4)
    for _ in engine.stream():
        pass
    stats = engine.stats
    shared = f"{stats.peak_shared_blocks} blocks, {stats.bytes_saved:,} bytes saved"
    print(f"| 4 samples of one prompt | {len(prompt)} and 4 x 20 new | {shared} | {stats.computed_tokens} |")


def text_options(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows which model and which text."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0] if description else None)
    parser.add_argument("--corpora", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--context", type=int)
    return parser


def held_texts(model: Model, args: argparse.Namespace) -> list[list[int]]:
    """The text in pieces of the context that was asked for; a rest that is shorter is left out."""
    size = min(args.context or model.config.num_positions, model.config.num_positions)
    stream = stream_of(model, args.corpora, args.text, args.tokens)
    if len(stream) < size:
        raise SystemExit(f"the text is shorter than {size} tokens: give a smaller --context")
    return [stream[at : at + size] for at in range(0, len(stream) - size + 1, size)]


def main() -> None:
    parser = text_options(__doc__)
    parser.add_argument("--numerics", choices=["exact", "fast"])
    args = parser.parse_args()
    model = nanokv.load(args.model, numerics=args.numerics)
    held = held_texts(model, args)
    size, stream = len(held[0]), [token for text in held for token in text]
    base = perplexity(model, held)
    print(
        f"{model.name}, {model.numerics}, {len(stream)} held-out tokens in texts of {size}: perplexity {base:.3f}\n", flush=True
    )
    show_codecs(model, held, base)
    show_heads(model, held)
    show_windows(model, stream, size)
    show_reuse(model)
    show_greedy(model)


if __name__ == "__main__":
    main()
