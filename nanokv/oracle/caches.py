"""check_cache(): does a model say the same with its cache as without?

For any function of (ids, state): a text fed at once to an empty state is the measure. Fed token by token, in chunks, after a
truncation, through a fork, in a batch, the same text must give the same logits, bit for bit or within a bound.
"""

import copy as copying
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from nanokv.errors import UsageError
from nanokv.oracle.bounds import gamma
from nanokv.oracle.formats import format_of
from nanokv.oracle.interchange import to_numpy

Step = Callable[[np.ndarray, Any], Any]
State = Any
CHUNKS = (2, 3, 5, 8, 16)


class StepError(UsageError):
    """The step function under test does not return logits of the ids that it was given."""


@dataclass
class Finding:
    """One way of feeding: `error` is the largest |difference| over all prompts, `bound` what was allowed (0: the same bits).
    `where` names the first difference beyond it; `greedy` counts positions whose most likely token changed."""

    way: str
    runs: int = 0
    error: float = 0.0
    bound: float = 0.0
    where: str = ""
    greedy: int = 0

    @property
    def passed(self) -> bool:
        return not self.where

    def __str__(self) -> str:
        allowed = "bit for bit" if self.bound == 0 else f"bound {self.bound:.2g}"
        if self.passed:
            return f"  {self.way}: equal, largest difference {self.error:.2g} ({allowed}, {self.runs} runs)"
        tokens = f", {self.greedy} greedy tokens change" if self.greedy else ""
        return f"  {self.way}: WRONG, {self.where}; largest difference {self.error:.2g} ({allowed}){tokens}"


@dataclass
class CacheReport:
    """What each way of feeding gave, and the shortest prompt that shows a fault."""

    findings: list[Finding] = field(default_factory=list)
    smallest: tuple[str, list[int]] | None = None

    @property
    def passed(self) -> bool:
        return bool(self.findings) and all(finding.passed for finding in self.findings)

    def __str__(self) -> str:
        wrong = [finding.way for finding in self.findings if not finding.passed]
        head = f"FAILED: {', '.join(wrong)}" if wrong else f"passed: {len(self.findings)} ways of feeding"
        lines = [head, *map(str, self.findings)]
        if self.smallest:
            way, ids = self.smallest
            shown = " ".join(map(str, ids[:16])) + (" …" if len(ids) > 16 else "")
            lines.append(f"shortest prompt that shows it ({way}): {len(ids)} tokens: {shown}")
        return "\n".join(lines)


def logit_bound(layers: int, width: int, largest: float, dtype: str = "float32", sums: int = 2) -> float:
    """How far logits may be apart by rounding alone: 2 (n L + 1) gamma_K times the size of what the head multiplies
    (docs/numerics.md), with `largest` for that size: the largest |logit|, or, to be safe, the product of the norms of a row of
    the head and of the last hidden state. `width` K is the longest sum, `sums` n how many count in a layer: 2, or 3 where a
    gated MLP multiplies two."""
    return float(2 * (sums * layers + 1) * gamma(width, format_of(dtype).roundoff) * largest)


@dataclass(frozen=True)
class Subject:
    """A model under test: step(ids [n], state) -> logits [n, V] of these ids, `state` then holding them too."""

    step: Step
    new_state: Callable[[], State]
    copy: Callable[[State], State]
    truncate: Callable[[State, int], Any] | None
    batch: Callable[[Sequence[np.ndarray]], Sequence[Any]] | None

    def feed(self, ids: np.ndarray, pieces: Sequence[int], state: State) -> np.ndarray:
        """Logits of all `ids`, fed in pieces."""
        parts, at = [], 0
        for size in pieces:
            logits = np.asarray(to_numpy(self.step(ids[at : at + size], state)))
            if logits.ndim != 2 or len(logits) != size:
                raise StepError(
                    f"step gave logits of shape {list(logits.shape)} for {size} ids: it must be [{size}, vocabulary]"
                )
            parts.append(logits.astype(np.float64))
            at += size
        return np.concatenate(parts)


def check_cache(
    step: Step,
    prompts: Iterable[Sequence[int] | np.ndarray],
    new_state: Callable[[], State],
    *,
    copy: Callable[[State], State] | None = copying.deepcopy,
    truncate: Callable[[State, int], Any] | None = None,
    batch: Callable[[Sequence[np.ndarray]], Sequence[Any]] | None = None,
    recompute: Callable[[np.ndarray], Any] | None = None,
    bound: float | Callable[[np.ndarray], float] = 0.0,
) -> CacheReport:
    """Feeds every prompt in every way and compares with `recompute(ids)`, by default one step on a new state.

    `step(ids, state)` returns logits [len(ids), V] and appends ids to the state. `copy(state)` forks it (None: not tried),
    `truncate(state, length)` forgets all but the first `length` tokens (it may return a new state). `batch(list of ids)`
    returns each prompt's logits from one run together. `bound`: the difference allowed, or a function of the recomputed logits
    to it (see logit_bound()); 0 asks for the same bits. What a way raises is its finding. Raises UsageError for too few ids.
    """
    texts = [np.asarray(prompt, dtype=np.int64) for prompt in prompts]
    if not texts or any(text.ndim != 1 or len(text) < 2 for text in texts):
        raise UsageError("check_cache needs prompts of at least 2 token ids each")
    subject = Subject(step, new_state, copy or copying.deepcopy, truncate, batch)
    measure = recompute or (lambda ids: subject.feed(ids, [len(ids)], new_state()))
    report = CacheReport()
    truth = [np.asarray(to_numpy(measure(text))).astype(np.float64) for text in texts]
    ways = dict(_ways(subject, forked=copy is not None))
    for name, way in ways.items():
        finding = Finding(name)
        for text, exact in zip(texts, truth, strict=True):
            _compare(finding, way, text, exact, bound)
        report.findings.append(finding)
    if batch is not None:
        report.findings.append(_batched(batch, texts, truth, bound))
    report.smallest = _shortest(report, ways, texts, measure, bound)
    return report


def _ways(subject: Subject, forked: bool) -> Iterator[tuple[str, Callable[[np.ndarray], np.ndarray]]]:
    """Name, and a function from ids to the logits of all of them."""
    yield "again at once", lambda ids: subject.feed(ids, [len(ids)], subject.new_state())
    yield "token by token", lambda ids: subject.feed(ids, [1] * len(ids), subject.new_state())
    yield "prompt, then token by token", lambda ids: subject.feed(ids, _half_then_single(len(ids)), subject.new_state())
    for size in CHUNKS:
        yield f"chunks of {size}", partial(_chunked, subject, size)
    if subject.truncate is not None:
        yield "after a truncation", partial(_truncated, subject)
    if forked:
        yield "beside a fork", lambda ids: _forked(subject, ids, child=False)
        yield "in a fork", lambda ids: _forked(subject, ids, child=True)


def _half_then_single(total: int) -> list[int]:
    return [total // 2, *[1] * (total - total // 2)]


def _chunked(subject: Subject, size: int, ids: np.ndarray) -> np.ndarray:
    return subject.feed(ids, _pieces(len(ids), size), subject.new_state())


def _pieces(total: int, size: int) -> list[int]:
    return [min(size, total - at) for at in range(0, total, size)]


def _other(ids: np.ndarray) -> np.ndarray:
    """The same ids in another order: a text that is not the prompt, of tokens that the model has."""
    return ids[::-1].copy()


def _truncated(subject: Subject, ids: np.ndarray) -> np.ndarray:
    """Half the text, then another text, which is forgotten, then the rest."""
    assert subject.truncate is not None
    half, state = max(1, len(ids) // 2), subject.new_state()
    first = subject.feed(ids[:half], [half], state)
    subject.feed(_other(ids)[: len(ids) - half], [len(ids) - half], state)
    kept = subject.truncate(state, half)
    state = state if kept is None else kept
    return np.concatenate([first, subject.feed(ids[half:], [1] * (len(ids) - half), state)])


def _forked(subject: Subject, ids: np.ndarray, child: bool) -> np.ndarray:
    """Half the text, a fork, another text in one branch, the rest in the other."""
    half, state = max(1, len(ids) // 2), subject.new_state()
    first = subject.feed(ids[:half], [half], state)
    twin = subject.copy(state)
    state, twin = (twin, state) if child else (state, twin)
    rest, junk = [], _other(ids)
    for at in range(half, len(ids)):
        subject.feed(junk[at : at + 1], [1], twin)
        rest.append(subject.feed(ids[at : at + 1], [1], state))
    return np.concatenate([first, *rest])


def _compare(
    finding: Finding, way: Callable[[np.ndarray], np.ndarray], text: np.ndarray, exact: np.ndarray, bound: float | Callable
) -> None:
    finding.runs += 1
    allowed = float(bound(exact)) if callable(bound) else float(bound)
    finding.bound = max(finding.bound, allowed)
    try:
        logits = way(text)
    except StepError:
        raise
    except Exception as error:  # whatever somebody's cache raises is the finding
        finding.where = finding.where or f"it raised {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return
    _judge(finding, logits, exact, allowed, f"a prompt of {len(text)} tokens")


def _judge(finding: Finding, logits: np.ndarray, exact: np.ndarray, allowed: float, prompt: str) -> None:
    if logits.shape != exact.shape:
        finding.where = finding.where or f"logits of shape {list(logits.shape)} instead of {list(exact.shape)}"
        return
    with np.errstate(invalid="ignore"):
        error = np.where(logits == exact, 0.0, np.abs(logits - exact))
    error = np.where(np.isnan(error), np.inf, error)
    finding.error = max(finding.error, float(error.max()))
    beyond = np.flatnonzero(error.max(axis=1) > allowed)
    if len(beyond):
        finding.greedy += int((logits.argmax(axis=1) != exact.argmax(axis=1)).sum())
        finding.where = finding.where or f"first at position {int(beyond[0])} of {prompt}"


def _batched(batch: Callable[[Sequence[np.ndarray]], Sequence[Any]], texts: list[np.ndarray], truth: list[np.ndarray],
             bound: float | Callable) -> Finding:  # fmt: skip
    finding = Finding("in a batch", runs=1)
    try:
        together = [np.asarray(to_numpy(each)).astype(np.float64) for each in batch(texts)]
    except Exception as error:  # as above
        finding.where = f"it raised {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return finding
    if len(together) != len(texts):
        finding.where = f"{len(together)} results for {len(texts)} prompts"
    for i, (logits, exact) in enumerate(zip(together, truth, strict=False)):
        allowed = float(bound(exact)) if callable(bound) else float(bound)
        finding.bound = max(finding.bound, allowed)
        _judge(finding, logits, exact, allowed, f"prompt {i} ({len(exact)} tokens)")
    return finding


def _shortest(report: CacheReport, ways: dict[str, Callable[[np.ndarray], np.ndarray]], texts: list[np.ndarray],
              measure: Callable[[np.ndarray], Any], bound: float | Callable) -> tuple[str, list[int]] | None:  # fmt: skip
    """The first failing way on the shortest beginning of a prompt at which it still fails."""
    finding = next((each for each in report.findings if not each.passed and each.way in ways), None)
    if finding is None:
        return None
    way, text = ways[finding.way], max(texts, key=len)
    for length in range(2, len(text) + 1):
        start = text[:length]
        again = Finding(finding.way)
        _compare(again, way, start, np.asarray(to_numpy(measure(start))).astype(np.float64), bound)
        if not again.passed:
            return finding.way, start.tolist()
    return None
