"""A failing case made small: the fewest and shortest sequences, heads and channels at which the kernel still fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from nanokv.errors import UsageError
from nanokv.oracle.spec import Spec

MOST_RUNS = 120
LEAST_DIM = 8


def shrink(spec: Spec, fails: Callable[[Spec], bool], keep: frozenset[str] = frozenset()) -> Spec:
    """The smallest spec that greedy steps reach from `spec`, which fails. `keep` names fields that must stay as they are
    (what a kernel was compiled for). `fails` is called at most MOST_RUNS times."""
    runs = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _steps(spec, keep):
            if runs >= MOST_RUNS:
                return spec
            runs += 1
            if fails(candidate):
                spec, smaller = candidate, True
                break
    return spec


def _steps(spec: Spec, keep: frozenset[str]) -> Iterator[Spec]:
    """Smaller specs, the boldest first."""
    seen = {spec}
    for changes in _changes(spec):
        if keep & changes.keys():
            continue
        try:
            candidate = replace(spec, **changes)
        except UsageError:
            continue
        if candidate not in seen:
            seen.add(candidate)
            yield candidate


def _changes(spec: Spec) -> Iterator[dict]:
    for plain in ({"window": None, "sinks": 0, "streaming": False}, {"sinks": 0}, {"alibi": False, "streaming": False},
                  {"softcap": None}, {"scale": None}, {"rope": None}, {"causal": True}, {"logits": "diffuse"}):  # fmt: skip
        if any(getattr(spec, name) != value for name, value in plain.items()):
            yield plain
    lengths = spec.lengths
    if len(lengths) > 1:
        yield from ({"lengths": (each,)} for each in sorted(lengths, key=lambda each: each[0] * each[1]))
        yield from ({"lengths": lengths[:i] + lengths[i + 1 :]} for i in range(len(lengths)))
    for i, (q, kv) in enumerate(lengths):
        for new in (
            (1, 1),
            (1, min(kv, 2)),
            (1, kv),
            (q, kv // 2),
            (q // 2, kv),
            (q // 2, kv // 2),
            (q, kv - 1),
            (q - 1, kv - 1),
            (q - 1, kv),
        ):
            if 0 <= new[0] <= q and 0 <= new[1] <= kv and sum(new) < q + kv:
                yield {"lengths": (*lengths[:i], new, *lengths[i + 1 :])}
    for heads, kv_heads in ((1, 1), (2, 1), (2, 2), (4, 2), (spec.group, 1)):
        if heads < spec.num_heads:
            yield {"num_heads": heads, "num_kv_heads": kv_heads}
    if spec.head_dim // 2 >= LEAST_DIM:
        yield {"head_dim": spec.head_dim // 2}
    if spec.paged and spec.block_size > 1:
        yield {"block_size": spec.block_size // 2}
