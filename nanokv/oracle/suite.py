"""The fixed suite: a few dozen small cases that between them show every fault of the catalogue, in seconds."""

from collections.abc import Iterable
from dataclasses import replace

from nanokv.errors import UsageError
from nanokv.oracle.spec import FEATURES, PAGED, Spec

PHASES = ("prefill", "chunked", "decode")
Lengths = tuple[tuple[int, int], ...]

PLAIN: tuple[tuple[str, Lengths], ...] = (
    ("prefill", ((12, 12),)),
    ("prefill", ((17, 17), (1, 1), (33, 33))),
    ("chunked", ((5, 37),)),
    ("chunked", ((16, 48), (3, 18), (1, 33))),
    ("chunked", ((40, 200),)),
    ("chunked", ((3, 1), (2, 0), (0, 5), (1, 9))),  # rows that see nothing, sequences without keys or queries
    ("decode", ((1, 1),)),
    ("decode", ((1, 33),)),
    ("decode", ((1, 15), (1, 16), (1, 17), (1, 1), (1, 32), (1, 31))),
    ("decode", ((1, 20), (1, 150), (1, 75))),
)
HEADS = ((4, 4), (8, 2), (6, 1), (6, 3))
FEATURED: Lengths = ((9, 40), (1, 30), (1, 6))
SMALL_WINDOW = 8


def suite(
    layout: str = "contiguous",
    dtype: str = "float32",
    kv_dtype: str | None = None,
    features: Iterable[str] = (),
    phases: Iterable[str] = PHASES,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    block_size: int | None = None,
    scales: str = "head",
    seed: int = 0,
) -> list[Spec]:
    """The cases for a kernel of this layout and these formats.

    `features`: what else the kernel does, of nanokv.oracle.FEATURES. `phases`: of prefill, chunked (a prefill behind cached
    tokens) and decode (one query a sequence). `num_heads`, `num_kv_heads`, `head_dim` and `block_size` fix what a kernel was
    compiled for; by default MHA, GQA and MQA and several block sizes. Raises UsageError for what is unknown.
    """
    features, phases = known("feature", features, FEATURES), known("phase", phases, PHASES)
    if (num_heads is None) != (num_kv_heads is None):
        raise UsageError("num_heads and num_kv_heads go together: give both or neither")
    base = Spec(layout=layout, dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim, scales=scales, seed=seed, unused="large")
    fixed_heads = None if num_heads is None or num_kv_heads is None else (num_heads, num_kv_heads)
    sizes = (block_size,) if block_size else (16, 8, 32, 1)
    found: list[Spec] = []
    poison = "large" if layout == "hf" else "nan"
    for i, (phase, lengths) in enumerate(PLAIN):
        if phase in phases:
            spec = _shaped(base, lengths, i, fixed_heads, sizes if layout in PAGED else (16,))
            found += [spec] if poison == "large" else [replace(spec, unused=poison), spec]
    for lengths, logits, heads in ((((2, 20),), "offset", (4, 2)), (((1, 1024),), "equal", (2, 1))):
        spec = _shaped(base, _of_a_phase(lengths, phases), 0, fixed_heads or heads, sizes)
        found.append(replace(spec, logits=logits, unused=poison))
    for i, changed in enumerate(_featured(features)):
        spec = _shaped(base, _of_a_phase(FEATURED, phases), i + 1, fixed_heads, sizes)
        found.append(replace(spec, unused=poison, **changed))
    return found


def _of_a_phase(lengths: Lengths, phases: list[str]) -> Lengths:
    """As they are, where the kernel knows a few queries behind cached tokens; else one query each; else every token its own."""
    if "chunked" in phases:
        return lengths
    return tuple((1 if "decode" in phases else kv, kv) for _, kv in lengths)


def _shaped(base: Spec, lengths: Lengths, i: int, heads: tuple[int, int] | None, sizes: tuple[int, ...]) -> Spec:
    num_heads, num_kv_heads = heads or HEADS[i % len(HEADS)]
    return replace(base, lengths=lengths, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=sizes[i % len(sizes)])


def _featured(features: list[str]) -> list[dict]:
    """Changes to a plain case, for each feature and the pairs that matter."""
    found: list[dict] = []
    if "window" in features:
        found += [{"window": SMALL_WINDOW}, {"window": 1}, {"window": 100}]
    if "sinks" in features:
        found += [{"window": SMALL_WINDOW, "sinks": 3}]
    if "alibi" in features:
        found += [{"alibi": True}]
    if {"alibi", "sinks"} <= set(features):
        found += [{"alibi": True, "window": SMALL_WINDOW, "sinks": 3, "streaming": True}]
    if "softcap" in features:
        found += [{"softcap": 3.0}]
    if "scale" in features:
        found += [{"scale": 0.3}]
    if "rope" in features:
        found += [{"rope": "halves"}, {"rope": "pairs"}]
    if "full" in features:
        found += [{"causal": False}]
    return found


def known(what: str, names: Iterable[str], allowed: tuple[str, ...]) -> list[str]:
    """The names as a list. Raises UsageError for one that is not allowed."""
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in allowed:
            raise UsageError(f"unknown {what} {name!r}: choose among {', '.join(allowed)}")
    return names
