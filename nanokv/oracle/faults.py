"""What kernels get wrong, each as a small kernel that gets it wrong: a right Problem in, a wrong one out.

Most come from public reports (docs/oracle.md names them). A fault `applies` where it could happen; whether it changes
anything there is seen by running it. `apply` takes the case, the number of a sequence and its right problem.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from nanokv.attention import naive_softmax
from nanokv.errors import UsageError
from nanokv.kv.tile import CAUSAL, Visibility
from nanokv.oracle.case import Call, Case
from nanokv.oracle.formats import dtype_of, rounded
from nanokv.oracle.judge import exceeds
from nanokv.oracle.layouts import pack
from nanokv.oracle.reference import Everything, Problem, attend_exactly
from nanokv.oracle.spec import Spec
from nanokv.oracle.values import meaning

Apply = Callable[[Case, int, Problem], Problem]


@dataclass(frozen=True)
class Fault:
    """`text` completes "equal what you get when ...". `applies` may be wider than where the fault shows."""

    name: str
    text: str
    apply: Apply
    applies: Callable[[Spec], bool] = lambda spec: True

    def run(self, case: Case) -> np.ndarray:
        """The faulty kernel's output [R, Hq, D] in float64, before it is rounded to the case's format."""
        with np.errstate(all="ignore"):
            return np.concatenate([attend_exactly(self.apply(case, i, each)) for i, each in enumerate(case.problems)])


@dataclass(frozen=True)
class Seen(Visibility):
    """A mask that is a function of the right one: `rule(query, key, right)`."""

    right: Visibility = CAUSAL
    rule: Callable[[np.ndarray, np.ndarray, Visibility], np.ndarray] = lambda q, k, right: right.sees(q, k)

    def sees(self, query: np.ndarray, key: np.ndarray) -> np.ndarray:
        return np.broadcast_to(self.rule(query, key, self.right), np.broadcast_shapes(query.shape, key.shape))


def _mask(rule: Callable[[np.ndarray, np.ndarray, Visibility], np.ndarray]) -> Apply:
    def apply(case: Case, i: int, problem: Problem) -> Problem:
        right = problem.visibility
        return replace(problem, visibility=Seen(right.window, right.sinks, right.streaming, right=right, rule=rule))

    return apply


def _heads(index: Callable[[Spec], np.ndarray]) -> Apply:
    """Query head h reads key-value head index[h]."""

    def apply(case: Case, i: int, problem: Problem) -> Problem:
        heads = index(case.spec)
        return replace(problem, k=problem.k[:, heads], v=problem.v[:, heads])

    return apply


def _scaled(factor: Callable[[Spec], float]) -> Apply:
    return lambda case, i, problem: replace(problem, scale=factor(case.spec))


# Heads.


def _tiled(spec: Spec) -> np.ndarray:
    return np.arange(spec.num_heads) % spec.num_kv_heads


def _divided_by_kv_heads(spec: Spec) -> np.ndarray:
    return np.minimum(np.arange(spec.num_heads) // spec.num_kv_heads, spec.num_kv_heads - 1)


def _grouped(spec: Spec) -> bool:
    return 1 < spec.num_kv_heads < spec.num_heads


# Masks. The rules get positions of queries [R, 1] and keys [S].


def _top_left(case: Case, i: int, problem: Problem) -> Problem:
    first = int(problem.positions[0]) if len(problem.positions) else 0
    return _mask(lambda q, k, right: right.sees(q - first, k))(case, i, problem)


def _on_columns(case: Case, i: int, problem: Problem) -> Problem:
    return _mask(lambda q, k, right: k >= q)(case, i, problem)


def _window_of(change: int) -> Apply:
    def apply(case: Case, i: int, problem: Problem) -> Problem:
        window = (case.spec.window or 1) + change
        rule = Visibility(window, problem.visibility.sinks).sees if window else _nothing
        return _mask(lambda q, k, right: rule(q, k))(case, i, problem)

    return apply


def _nothing(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    return np.zeros(np.broadcast_shapes(query.shape, key.shape), dtype=bool)


def _windowed(spec: Spec) -> bool:
    return spec.window is not None


def _hide(index: Callable[[int, Spec], np.ndarray | int]) -> Apply:
    """Hides keys: `index(tokens, spec)` says which."""

    def apply(case: Case, i: int, problem: Problem) -> Problem:
        hidden = index(len(problem.k), case.spec)
        return _mask(lambda q, k, right: right.sees(q, k) & ~np.isin(k, hidden))(case, i, problem)

    return apply


# Memory. A layout without blocks has one block a sequence, as long as its capacity.


def _read(case: Case, i: int, slots: list[tuple[int, int]], problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """K and V [tokens, Hkv, D] at (block, offset), as the kernel would restore them."""
    memory, at = case.memory, tuple(np.array(slots, dtype=np.int64).reshape(-1, 2).T)
    if case.spec.scales == "token" or memory.k_scale is None or memory.v_scale is None:
        scales = [None if scale is None else scale[at] for scale in (memory.k_scale, memory.v_scale)]
    else:  # one for the head or for everything: it has no place in memory
        scales = [np.broadcast_to(x[:1], (len(slots), case.spec.num_kv_heads)) for x in _head_scales(case)]
    return meaning(memory.k[at], scales[0]), meaning(memory.v[at], scales[1])


def _head_scales(case: Case) -> tuple[np.ndarray, np.ndarray]:
    some = next((each for each in case.values if len(each.k_codes)), case.values[0])
    assert some.k_scale is not None
    assert some.v_scale is not None
    return some.k_scale, some.v_scale


def _appended(case: Case, i: int, problem: Problem, slots: list[tuple[int, int]]) -> Problem:
    """Keys from `slots` behind the sequence's own, seen by every query: a kernel that bounds keys by their number alone."""
    k, v = _read(case, i, slots, problem)
    own = len(problem.k)
    apply = _mask(lambda q, key, right: np.where(key < own, right.sees(q, key), True))
    return apply(case, i, replace(problem, k=np.concatenate([problem.k, k]), v=np.concatenate([problem.v, v])))


def _last_block_in_full(case: Case, i: int, problem: Problem) -> Problem:
    size, length = case.memory.k.shape[1], len(problem.k)
    if length % size == 0:
        return problem
    return _appended(case, i, problem, [(case.memory.tables[i][-1], offset) for offset in range(length % size, size)])


def _stale_entry(case: Case, i: int, problem: Problem) -> Problem:
    """One entry of the table too many: what lies behind a sequence's end in it."""
    table = case.arrays()["block_tables"][i]
    block = int(table[len(case.memory.tables[i])])
    return _appended(case, i, problem, [(block, offset) for offset in range(case.spec.block_size)])


def _padded_sum(case: Case, i: int, problem: Problem) -> Problem:
    """Padding has score 0 and value 0, but counts in the sum."""
    size = case.memory.k.shape[1]
    padding = -len(problem.k) % size

    def softmax(scores: np.ndarray) -> np.ndarray:
        zeros = np.zeros((*scores.shape[:2], padding))
        return naive_softmax(np.concatenate([scores, zeros], axis=-1))[..., : scores.shape[-1]]

    return replace(problem, softmax=softmax)


def _physical_order(case: Case, i: int, problem: Problem) -> Problem:
    """The sequence's blocks in the order of their ids; the last logical block's empty slots are where they are."""
    size, length = case.spec.block_size, len(problem.k)
    slots = [(block, offset) for block in sorted(case.memory.tables[i]) for offset in range(size)][:length]
    k, v = _read(case, i, slots, problem)
    return replace(problem, k=k, v=v)


def _heads_and_tokens(case: Case, i: int, problem: Problem) -> Problem:
    """A block [N, Hkv, D] read as [Hkv, N, D], or the reverse; the scales of tokens with it, those of heads as they are."""
    spec, memory, tokens = case.spec, case.memory, len(problem.k)
    size, heads = spec.block_size, spec.num_kv_heads

    def misread(plane: np.ndarray) -> np.ndarray:
        blocks = plane[memory.tables[i]]
        if spec.layout == "flashinfer-hnd":
            wrong = blocks.swapaxes(1, 2).reshape(blocks.shape)
        else:
            wrong = blocks.reshape(-1, heads, size, *blocks.shape[3:]).swapaxes(1, 2)
        return wrong.reshape(-1, heads, *blocks.shape[3:])[:tokens]

    def restored(codes: np.ndarray, scale: np.ndarray | None, of_heads: np.ndarray | None) -> np.ndarray:
        if scale is None:
            return meaning(misread(codes), None)
        return meaning(misread(codes), misread(scale) if spec.scales == "token" else of_heads)

    each = case.values[i]
    k, v = restored(memory.k, memory.k_scale, each.k_scale), restored(memory.v, memory.v_scale, each.v_scale)
    return replace(problem, k=k, v=v)


def _neighbour(case: Case, i: int, problem: Problem) -> Problem:
    """A sequence begins one token early: with the last token of the one before it, and without its own last."""
    before = case.problems[i - 1]
    if i == 0 or not len(before.k) or not len(problem.k):
        return problem
    return replace(
        problem, k=np.concatenate([before.k[-1:], problem.k[:-1]]), v=np.concatenate([before.v[-1:], problem.v[:-1]])
    )


def _first_of_batch(case: Case, i: int, problem: Problem) -> Problem:
    first, tokens = case.problems[0], len(problem.k)
    return replace(problem, k=first.k[:tokens], v=first.v[:tokens])


# Scales of K and V.


def _codes_times(
    case: Case, i: int, problem: Problem, scales: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> Problem:
    each = case.values[i]
    assert each.k_scale is not None
    assert each.v_scale is not None
    k_scale, v_scale = scales(each.k_scale, each.v_scale)
    return replace(problem, k=meaning(each.k_codes, k_scale), v=meaning(each.v_codes, v_scale))


def _no_kv_scale(case: Case, i: int, problem: Problem) -> Problem:
    return _codes_times(case, i, problem, lambda k, v: (np.ones_like(k), np.ones_like(v)))


def _scale_of_head_0(case: Case, i: int, problem: Problem) -> Problem:
    return _codes_times(case, i, problem, lambda k, v: (k[:, :1] + 0 * k, v[:, :1] + 0 * v))


def _scales_swapped(case: Case, i: int, problem: Problem) -> Problem:
    return _codes_times(case, i, problem, lambda k, v: (v, k))


# Softmax.


def _no_maximum(scores: np.ndarray) -> np.ndarray:
    numerators = np.exp(scores.astype(np.float32))
    total = numerators.sum(axis=-1, keepdims=True)
    return (numerators / np.where(total == 0, np.float32(1), total)).astype(np.float64)


def _mean_of_empty(scores: np.ndarray) -> np.ndarray:
    """Minus a large number in place of minus infinity: a row that sees nothing weighs all keys alike."""
    return naive_softmax(np.maximum(scores, -1e30))


def _half_sums(case: Case, i: int, problem: Problem) -> Problem:
    """Numerators and their sum in half precision, one key after another."""
    half = dtype_of("bfloat16" if case.spec.dtype == "bfloat16" else "float16")

    def softmax(scores: np.ndarray) -> np.ndarray:
        numerators = np.exp(scores - np.maximum(scores.max(axis=-1, keepdims=True), -1e300)).astype(half)
        total = np.zeros(scores.shape[:2], dtype=half)
        for key in range(scores.shape[-1]):
            total = (total + numerators[..., key]).astype(half)
        total = total.astype(np.float64)[..., None]
        return numerators.astype(np.float64) / np.where(total == 0, 1, total)

    return replace(problem, softmax=softmax)


def _half_scores(case: Case, i: int, problem: Problem) -> Problem:
    half = "bfloat16" if case.spec.dtype == "bfloat16" else "float16"

    def softmax(scores: np.ndarray) -> np.ndarray:
        stored = np.where(np.isfinite(scores), rounded(np.nan_to_num(scores), half).astype(np.float64), scores)
        return naive_softmax(stored)

    return replace(problem, softmax=softmax)


# Rotary positions.


def _other_rope(case: Case, i: int, problem: Problem) -> Problem:
    assert problem.rope is not None
    return replace(problem, rope=replace(problem.rope, adjacent=not problem.rope.adjacent))


def _rope_late(case: Case, i: int, problem: Problem) -> Problem:
    return replace(problem, q_angles=problem.positions + 1)


def _rope_from_zero(case: Case, i: int, problem: Problem) -> Problem:
    return replace(problem, q_angles=np.arange(len(problem.positions)))


def _wrong_slopes(case: Case, i: int, problem: Problem) -> Problem:
    assert problem.slopes is not None
    return replace(problem, slopes=problem.slopes[np.arange(case.spec.num_heads) // case.spec.group])


FAULTS = (
    Fault("kv_heads_tiled", "kv heads are tiled (0 1 0 1) instead of repeated (0 0 1 1)", _heads(_tiled), _grouped),
    Fault("kv_heads_divided_wrongly", "query head h reads kv head h // num_kv_heads, the group size being another number",
          _heads(_divided_by_kv_heads), _grouped),
    Fault("kv_head_0_for_all", "every query head reads kv head 0",
          _heads(lambda spec: np.zeros(spec.num_heads, dtype=int)), lambda spec: spec.num_kv_heads > 1),
    Fault("causal_top_left", "the causal mask is aligned top-left: query 0 sees key 0 alone, whatever came before", _top_left,
          lambda spec: spec.causal),
    Fault("mask_missing", "there is no causal mask", lambda case, i, problem: replace(problem, visibility=Everything()),
          lambda spec: spec.causal and spec.window is None),
    Fault("mask_one_late", "the mask lets a query see the key after its own", _mask(lambda q, k, right: right.sees(q + 1, k)),
          lambda spec: spec.causal and spec.window is None),
    Fault("mask_one_early", "the mask hides a query's own key", _mask(lambda q, k, right: right.sees(q, k) & (k < q)),
          lambda spec: spec.causal),
    Fault("mask_on_columns", "the mask is applied to columns: a query sees its own key and later ones", _on_columns,
          lambda spec: spec.causal and spec.window is None),
    Fault("window_one_more", "the window is one key too long (W before the query's own)", _window_of(1), _windowed),
    Fault("window_one_less", "the window is one key too short", _window_of(-1), _windowed),
    Fault("window_ignored", "the window is ignored", _mask(lambda q, k, right: k <= q), _windowed),
    Fault("sinks_dropped", "the sinks are dropped", _mask(lambda q, k, right: right.sees(q, k) & (q - k < (right.window or 1))),
          lambda spec: spec.sinks > 0),
    Fault("sinks_at_absolute_positions", "sinks keep their absolute distance instead of that inside the cache",
          lambda case, i, problem: replace(problem, sinks_at=None), lambda spec: spec.streaming),
    Fault("scale_missing", "scores are not scaled", _scaled(lambda spec: 1.0)),
    Fault("scale_twice", "scores are scaled twice", _scaled(lambda spec: spec.score_scale**2)),
    Fault("scale_of_the_wrong_width", "the scale is 1/sqrt(num_heads * head_dim), the model's width",
          _scaled(lambda spec: (spec.num_heads * spec.head_dim) ** -0.5), lambda spec: spec.num_heads > 1),
    Fault("scale_argument_ignored", "the scale is 1/sqrt(head_dim), whatever was asked for",
          _scaled(lambda spec: spec.head_dim**-0.5), lambda spec: spec.scale is not None),
    Fault("softmax_without_maximum", "the maximum is not subtracted before the exponential",
          lambda case, i, problem: replace(problem, softmax=_no_maximum), lambda spec: spec.logits == "offset"),
    Fault("padded_keys_counted", "padding up to the block's end counts in the softmax's sum", _padded_sum,
          lambda spec: spec.paged),
    Fault("last_block_dropped", "the last, partly filled block is ignored",
          _hide(lambda n, spec: np.arange(n - n % spec.block_size, n)),
          lambda spec: spec.paged),
    Fault("last_block_in_full", "the last block is read in full, past the sequence's end", _last_block_in_full,
          lambda spec: spec.paged or spec.layout == "contiguous"),
    Fault("stale_table_entry", "a stale entry behind the end of the block table is followed", _stale_entry,
          lambda spec: spec.layout == "vllm"),
    Fault("physical_block_order", "blocks are read in physical order, not in the table's", _physical_order,
          lambda spec: spec.paged),
    Fault("heads_and_tokens_swapped", "a block's axes of heads and tokens are swapped (NHD read as HND)", _heads_and_tokens,
          lambda spec: spec.paged and spec.num_kv_heads > 1 and spec.block_size > 1),
    Fault("k_and_v_swapped", "K and V are swapped", lambda case, i, problem: replace(problem, k=problem.v, v=problem.k)),
    Fault("neighbour_token", "a sequence begins one token early, in its neighbour in the batch", _neighbour,
          lambda spec: len(spec.lengths) > 1),
    Fault("neighbour_batch", "a sequence reads the keys of the first one in the batch",
          _first_of_batch,
          lambda spec: len(spec.lengths) > 1),
    Fault("kv_scale_missing", "codes of K and V are used without their scale", _no_kv_scale, lambda spec: spec.scaled),
    Fault("kv_scale_of_head_0", "every head is restored with the scale of head 0", _scale_of_head_0,
          lambda spec: spec.scaled and spec.scales != "tensor" and spec.num_kv_heads > 1),
    Fault("kv_scales_swapped", "the scales of K and V are swapped", _scales_swapped, lambda spec: spec.scaled),
    Fault("half_precision_sums", "the softmax's sum is accumulated in half precision", _half_sums,
          lambda spec: spec.logits == "equal"),
    Fault("half_precision_scores", "scores are rounded to half precision before the softmax", _half_scores,
          lambda spec: spec.stored == spec.dtype or spec.dtype in ("float32", "float64")),  # else K is rounded as much
    Fault("rope_pairs_for_halves", "rope turns the other pairs (adjacent numbers for halves, or the reverse)", _other_rope,
          lambda spec: spec.rope is not None),
    Fault("rope_one_late", "queries are rotated one position late", _rope_late, lambda spec: spec.rope is not None),
    Fault("rope_from_zero", "queries are rotated from position 0, the cached tokens forgotten", _rope_from_zero,
          lambda spec: spec.rope is not None),
    Fault("first_token_missing", "the first key is left out", _hide(lambda n, spec: 0)),
    Fault("last_token_missing", "the newest key is left out", _hide(lambda n, spec: n - 1)),
    Fault("empty_row_is_a_mean", "a row that may see no key gives the mean of V instead of 0",
          lambda case, i, problem: replace(problem, softmax=_mean_of_empty),
          lambda spec: spec.causal and any(q > kv for q, kv in spec.lengths)),
    Fault("softcap_ignored", "the soft cap is ignored", lambda case, i, problem: replace(problem, softcap=None),
          lambda spec: spec.softcap is not None),
    Fault("alibi_ignored", "ALiBi's bias is ignored", lambda case, i, problem: replace(problem, slopes=None),
          lambda spec: spec.alibi),
    Fault("alibi_slopes_of_kv_heads", "ALiBi's slope is that of the kv head", _wrong_slopes,
          lambda spec: spec.alibi and spec.group > 1),
)  # fmt: skip


def fault_named(name: str) -> Fault:
    """Raises UsageError with the names there are."""
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise UsageError(f"no fault {name!r}: choose one of {', '.join(each.name for each in FAULTS)}")


def faulty_kernel(name: str) -> Callable[[Call], np.ndarray]:
    """A kernel with the fault called `name`, and no other: to try a test on. Raises UsageError for an unknown name."""
    fault = fault_named(name)

    def kernel(call: Call) -> np.ndarray:
        case = Case(call.spec)
        rows = fault.run(case) if fault.applies(call.spec) else case.expected.out
        return pack(call.spec, rounded(rows, call.dtype), 0)

    return kernel


def moved(fault: Fault, case: Case) -> float:
    """The largest change that the fault makes, in bounds."""
    expected = case.expected
    return float(exceeds(fault.run(case), expected.out, expected.bound).max(initial=0.0))
