"""Cases as a hypothesis strategy: hypothesis (an optional package) finds and shrinks them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nanokv.errors import UsageError
from nanokv.oracle.bounds import Arithmetic
from nanokv.oracle.case import Case
from nanokv.oracle.formats import COMPUTED, SCALED, format_of
from nanokv.oracle.spec import FEATURES, LAYOUTS, PAGED, ROPES, SCALES, Spec
from nanokv.oracle.suite import known

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

HEADS = ((1, 1), (2, 2), (4, 4), (4, 2), (6, 2), (6, 1), (3, 1), (8, 2))
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129)


def attention_cases(
    layouts: Iterable[str] = LAYOUTS,
    dtypes: Iterable[str] = ("float32",),
    kv_dtypes: Iterable[str | None] = (None,),
    features: Iterable[str] = (),
    heads: Iterable[tuple[int, int]] = HEADS,
    head_dims: Iterable[int] = (8, 16, 64),
    block_sizes: Iterable[int] = (1, 4, 16, 32),
    max_tokens: int = 160,
    max_sequences: int = 4,
    arithmetic: Arithmetic | None = None,
) -> "SearchStrategy[Case]":
    """Cases over everything that is listed: lengths at blocks' edges and off by one, empty rows and sequences, decode,
    prefill and prefill behind cached tokens in one batch, each of `features` now and then. Shrinks towards one short sequence.
    Raises UsageError where hypothesis is not installed, or for unknown names.
    """
    try:
        from hypothesis import strategies as st
    except ImportError:
        raise UsageError("strategies need the package hypothesis: pip install hypothesis; suite() does not") from None
    features, layouts = known("feature", features, FEATURES), known("layout", layouts, LAYOUTS)
    dtypes = known("dtype", [format_of(name).name for name in dtypes], COMPUTED)
    kv_dtypes = [name and format_of(name).name for name in kv_dtypes]

    @st.composite
    def cases(draw: "DrawFn") -> Case:
        tokens = st.one_of(st.integers(0, max_tokens), st.sampled_from([n for n in EDGES if n <= max_tokens]))
        lengths = []
        for _ in range(draw(st.integers(1, max_sequences))):
            kv = draw(tokens)
            lengths.append((draw(st.one_of(st.just(1), st.just(kv), st.integers(0, kv + 2))), kv))
        if not any(q for q, _ in lengths):
            lengths[0] = (1, lengths[0][1])
        layout = draw(st.sampled_from(layouts))
        num_heads, num_kv_heads = draw(st.sampled_from(list(heads)))
        kv_dtype = draw(st.sampled_from(kv_dtypes))
        values: dict[str, Any] = {
            "lengths": tuple(lengths),
            "layout": layout,
            "dtype": draw(st.sampled_from(dtypes)),
            "kv_dtype": kv_dtype,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": draw(st.sampled_from(list(head_dims))),
            "block_size": draw(st.sampled_from(list(block_sizes))) if layout in PAGED else 16,
            "scales": draw(st.sampled_from(SCALES)) if kv_dtype in SCALED else "head",
            "unused": "large" if layout == "hf" else draw(st.sampled_from(["nan", "large"])),
            "seed": draw(st.integers(0, 1000)),
        }
        return Case(Spec(**values, **_extras(draw, features)), arithmetic)

    return cases()


def _extras(draw: "DrawFn", features: list[str]) -> dict[str, Any]:
    """Some of the features, of those that go together."""
    from hypothesis import strategies as st

    found: dict[str, Any] = {}
    chosen = {name for name in features if draw(st.booleans())}
    if "full" in chosen:
        return {"causal": False, **({"scale": 0.3} if "scale" in chosen else {})}
    if "window" in chosen:
        found["window"] = draw(st.integers(1, 40))
        if "sinks" in chosen:
            found["sinks"] = draw(st.integers(1, 20))
    if "alibi" in chosen:
        found["alibi"] = True
        found["streaming"] = "sinks" in found and draw(st.booleans())
    elif "softcap" in chosen:
        found["softcap"] = draw(st.sampled_from([2.0, 30.0]))
    if "scale" in chosen:
        found["scale"] = draw(st.sampled_from([0.05, 0.3, 1.0]))
    if "rope" in chosen:
        found["rope"] = draw(st.sampled_from(ROPES))
    return found
