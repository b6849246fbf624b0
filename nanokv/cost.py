"""What a generation cost, against the machine's read bandwidth and against recomputing."""

from dataclasses import dataclass

from nanokv.generate import Generation
from nanokv.measure import read_bandwidth
from nanokv.model import Model


@dataclass(frozen=True)
class Cost:
    """Speeds of one generation. What was not measured (no decode step, no cache) is None."""

    prefill_tokens_per_s: float
    decode_ms: float | None
    decode_gb_per_s: float | None
    read_gb_per_s: float | None
    tokens_computed: int
    tokens_uncached: int
    uncached_s: float

    @property
    def bandwidth_share(self) -> float | None:
        """Of the bytes a second that this machine reads, the share that decoding reached."""
        if self.decode_gb_per_s is None or self.read_gb_per_s is None:
            return None
        return self.decode_gb_per_s / self.read_gb_per_s


def decode_bytes(model: Model, tokens: float, token_bytes: float) -> float:
    """Bytes that one decoded token must read: the weights, and K and V of the `tokens` that it sees."""
    return model.weight_bytes + tokens * token_bytes


def cost(run: Generation) -> Cost:
    """Measures the machine (a fraction of a second) and sets a finished generation beside it.

    Without a cache, step i computes the prompt and the i tokens made so far again; `uncached_s` estimates that from the
    prefill's time a token.
    """
    prompt, made = len(run.prompt_tokens), len(run.tokens)
    steps = made - 1
    cached = run.cache.kind != "none"
    uncached = sum(prompt + i for i in range(made))
    decode_s = run.decode_s / steps if steps > 0 else None
    rate = prompt / run.prefill_s if run.prefill_s else 0.0
    moved = measured = None
    if decode_s is not None and cached and run.model.backend.name == "numpy":
        seen = min(prompt + made / 2, run.cache_tokens)  # on average; a window caps it
        moved = decode_bytes(run.model, seen, run.cache_token_bytes) / decode_s / 1e9
        measured = read_bandwidth() / 1e9
    return Cost(
        prefill_tokens_per_s=rate,
        decode_ms=None if decode_s is None else decode_s * 1e3,
        decode_gb_per_s=moved,
        read_gb_per_s=measured,
        tokens_computed=prompt + steps if cached else uncached,
        tokens_uncached=uncached,
        uncached_s=uncached / rate if rate else 0.0,
    )
