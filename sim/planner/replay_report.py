"""What `replay` says: one dictionary for --json, one table within 100 columns, and a picture over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from nanokv.errors import UsageError
from sim.planner.kv_memory import USES
from sim.planner.report import size_of
from sim.planner.server import PAGED, Outcome, Server, windowed
from sim.planner.step_time import PICOSECONDS
from sim.planner.timeline import Series
from sim.planner.traces import Trace

INTERVALS = 100  # of a series over time
HELD = ("tokens", "reserved", "internal", "external")  # memory in use: what requests hold, and holes that nobody can


def shares(outcome: Outcome) -> dict[str, float]:
    """Of all slots, averaged over busy time, the part that each use has: together 1. All 0 where nothing ran."""
    means = outcome.timeline.means()
    return {name: means[name] / outcome.slots if outcome.slots else 0.0 for name in USES}


def useful_share(outcome: Outcome) -> float:
    """Token states over memory in use."""
    means = outcome.timeline.means()
    held = sum(means[name] for name in HELD)
    return means["tokens"] / held if held else 0.0


def as_dict(trace: Trace, server: Server, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything that is printed, and the series over time. Bytes are those of one GPU."""
    requests, sharing = trace.requests, trace.sharing()
    return {
        "trace": trace.name,
        "requests": len(requests),
        "arrival_seconds": requests[-1].arrival,
        "prompt_tokens": sum(request.prompt for request in requests),
        "output_tokens": sum(request.output for request in requests),
        "prefix_blocks": None if sharing is None else {
            "block_tokens": trace.hash_block, "ids": sharing.blocks, "unique_ids": sharing.unique,
            "infinite_cache_hit_rate": sharing.hit_rate,
        },
        "model": server.model.name,
        "gpu": server.gpu.name,
        "tensor_parallel": server.parts,
        "kv_dtype": server.form.name,
        "kv_bytes": server.kv_bytes,
        "kv_bytes_per_token": server.token_bytes,
        "max_model_len": server.limits.length,
        "max_batch_tokens": server.limits.tokens,
        "max_sequences": server.limits.sequences,
        "policies": [_outcome(outcome, server) for outcome in outcomes],
        "notes": notes(server, outcomes),
    }  # fmt: skip


def _outcome(outcome: Outcome, server: Server) -> dict[str, Any]:
    counts, timeline, policy = outcome.counts, outcome.timeline, outcome.policy
    paged = policy.kind == PAGED
    means = timeline.means()
    series = timeline.series(INTERVALS)
    admitted = counts.requests - counts.refused
    return {
        "policy": policy.kind,
        "block_size": policy.block_size if paged else None,
        "prefix_reuse": policy.reuse,
        "allocator": None if paged else policy.allocator,
        "slots": outcome.slots,
        "finished": counts.finished,
        "refused_too_long": counts.too_long,
        "refused_too_large": counts.too_large,
        "useful_share": useful_share(outcome),
        "shares": shares(outcome),
        "mean_running": means["running"],
        "mean_waiting": means["waiting"],
        "peak_running": timeline.peak_running,
        "peak_waiting": timeline.peak_waiting,
        "peak_tokens": timeline.peak_tokens,
        "preemptions": counts.preemptions,
        "steps": counts.steps,
        "computed_tokens": counts.computed_tokens,
        "recomputed_tokens": counts.recomputed_tokens,
        "prompt_tokens": counts.prompt_tokens,
        "prefix_hit_tokens": counts.prefix_hit_tokens,
        "prefix_hit_rate": _part(counts.prefix_hit_tokens, counts.prompt_tokens),
        "infinite_cache_hit_tokens": counts.infinite_hit_tokens,
        "infinite_cache_hit_rate": _part(counts.infinite_hit_tokens, counts.prompt_tokens),
        "prefix_saved_bytes": counts.prefix_hit_tokens * server.token_bytes,
        "peak_shared_blocks": counts.peak_shared_blocks,
        "peak_saved_bytes": counts.peak_saved_blocks * policy.block_size * server.token_bytes,
        "mean_wait_seconds": _part(counts.waited, admitted) / PICOSECONDS,
        "busy_seconds": timeline.busy / PICOSECONDS,
        "seconds": timeline.end / PICOSECONDS,
        "series": {"seconds": series.seconds.tolist(), **{name: each.tolist() for name, each in series.values.items()}},
    }


def _part(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def notes(server: Server, outcomes: Sequence[Outcome]) -> list[str]:
    """What the table does not say."""
    lines = []
    long = max(outcome.counts.too_long for outcome in outcomes)
    if long:
        lines.append(f"{long:,} requests are longer than {server.limits.length:,} tokens and were refused")
    lines += [
        f"{outcome.policy.label}: {outcome.counts.too_large:,} requests could never fit in its memory and were refused"
        for outcome in outcomes
        if outcome.counts.too_large
    ]
    if windowed(server.model):
        lines.append("layers with a window hold every token too, as they do in one pool")
    return lines


def replay_report(trace: Trace, server: Server, outcomes: Sequence[Outcome]) -> Group:
    """Three lines, the table, the notes."""
    lines = ["", *notes(server, outcomes), "steps take the least time that the GPU allows: a real one queues more"]
    return Group(Text("\n".join(_head(trace, server)) + "\n"), _table(outcomes), Text("\n".join(lines)))


def _head(trace: Trace, server: Server) -> list[str]:
    requests, limits = trace.requests, server.limits
    prompt, output = (sum(counts) for counts in zip(*((each.prompt, each.output) for each in requests), strict=True))
    lines = [
        f"{trace.name}: {len(requests):,} requests in {requests[-1].arrival:,.0f} s, {prompt:,} + {output:,} tokens",
        f"{server.model.name} on {server.machine}: {size_of(server.kv_bytes)} of {server.form.name} K and V, "
        f"{server.slots:,} tokens",
        f"at most {limits.length:,} tokens a request, {limits.tokens:,} a step, {limits.sequences:,} sequences",
    ]
    sharing = trace.sharing()
    if sharing:
        lines.append(
            f"{sharing.blocks:,} prompt blocks of {trace.hash_block} tokens, {sharing.unique:,} different: "
            f"a cache that never evicts finds {sharing.hit_rate:.2%}"
        )
    return lines


COLUMNS = ("use-\nful", "token\nstates", "re-\nserved", "inter-\nnal", "exter-\nnal", "\ncached", "run-\nning", "wait-\ning",
           "pre-\nempted", "hits,\nLRU", "never\nevict", "\nseconds")  # fmt: skip


def _table(outcomes: Sequence[Outcome]) -> Table:
    """Shares of memory in per cent: `useful` of what is in use, the others of all."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("\npolicy", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        counts, means, part = outcome.counts, outcome.timeline.means(), shares(outcome)
        hits = [_part(hit, counts.prompt_tokens) for hit in (counts.prefix_hit_tokens, counts.infinite_hit_tokens)]
        table.add_row(
            outcome.policy.label, f"{100 * useful_share(outcome):.1f}",
            *(f"{100 * part[name]:.1f}" for name in (*HELD, "cached")),
            f"{means['running']:,.1f}", f"{means['waiting']:,.0f}", f"{counts.preemptions:,}",
            *(f"{100 * hit:.1f}" if outcome.policy.reuse else "" for hit in hits),
            f"{outcome.timeline.end / PICOSECONDS:,.0f}",
        )  # fmt: skip
    return table


COLOURS = {"tokens": "#4477aa", "reserved": "#ccbb44", "internal": "#ee6677", "external": "#aa3377", "cached": "#66ccee"}


def figure_of(outcomes: Sequence[Outcome]) -> Any:
    """A row a policy, on one axis of time: memory by what it holds on the left (white is free), requests on the right."""
    from matplotlib.figure import Figure

    rows = len(outcomes)
    figure = Figure(figsize=(12, 1 + 1.9 * rows), layout="constrained")
    grid = figure.subplots(rows, 2, sharex=True, squeeze=False)
    for (left, right), outcome in zip(grid, outcomes, strict=True):
        _draw(left, right, outcome, outcome.timeline.series(2 * INTERVALS))
    look: dict[str, Any] = {"fontsize": 8, "ncols": len(COLOURS), "frameon": False}
    left, right = (axes.get_legend_handles_labels() for axes in grid[0])
    figure.legend(*left, loc="outside upper left", **look)
    figure.legend(*right, loc="outside upper right", **look)
    for axes in grid[-1]:
        axes.set(xlabel="seconds", xlim=(0, None))
    return figure


def _draw(left: Any, right: Any, outcome: Outcome, series: Series) -> None:
    slots = max(1, outcome.slots)
    parts = [100 * series.values[name] / slots for name in COLOURS]
    left.stackplot(series.seconds, parts, labels=list(COLOURS), colors=list(COLOURS.values()))
    left.set(title=outcome.policy.label, ylabel="% of KV memory", ylim=(0, 100))
    for name in ("running", "waiting"):
        right.plot(series.seconds, series.values[name], label=name)
    right.plot(series.seconds, series.values["preemptions"], ":", color="grey", label="preempted so far")
    right.set(title=outcome.policy.label, ylabel="requests", yscale="symlog", ylim=(0, None))
    right.yaxis.set_major_formatter("{x:,.0f}")


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """figure_of() into a file; UsageError where it cannot be written, and then nothing is left of it."""
    try:
        figure_of(outcomes).savefig(path, dpi=150)
    except (ValueError, OSError) as error:
        path.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error}") from error
