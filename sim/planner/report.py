"""What `size` says: one dictionary for --json, lines and tables for people, and the plot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanokv.errors import UsageError
from sim.planner.capacity import first_token_bytes, need, shard
from sim.planner.layers import GROWING, Kind
from sim.planner.model import Model
from sim.planner.plan import Budget, Plan

GIB = 1 << 30
UNITS = (("B", 1), ("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12))
BINARY = (("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", GIB), ("TiB", 1 << 40))


def size_of(count: int) -> str:
    """Bytes in decimal and binary units side by side: 164.28 GB = 153.00 GiB."""
    return f"{_scaled(count, UNITS)} = {_scaled(count, BINARY)}" if abs(count) >= 1000 else f"{count} B"


def _scaled(count: int, units: tuple[tuple[str, int], ...]) -> str:
    name, unit = next((pair for pair in reversed(units) if abs(count) >= pair[1]), units[0])
    return f"{count / unit:,.2f} {name}"


def as_dict(model: Model, found: Plan, budget: Budget | None = None, gpu: str | None = None) -> dict[str, Any]:
    """Everything that is printed, in bytes and tokens. What was not asked for or is not known is null."""
    asked = found.asked
    geometry = model.geometry
    layers = [
        {
            "kind": str(layer.kind), "count": count, "kv_heads": layer.kv_heads, "head_dim_k": layer.head_dim_k,
            "head_dim_v": layer.head_dim_v, "window": layer.window,
        }
        for layer, count in geometry.groups()
    ]  # fmt: skip
    best, pool = found.as_needed, found.one_pool
    return {
        "model": model.name,
        "model_type": geometry.model_type,
        "layers": layers,
        "context": asked.context,
        "batch": asked.batch,
        "kv_dtype": asked.form.name,
        "block_size": asked.block_size,
        "max_positions": geometry.max_positions,
        "kv_bytes": found.needed.kv,
        "allocated_bytes": found.needed.allocated,
        "kv_bytes_first_token": first_token_bytes(geometry, asked.form),
        "state_bytes": found.needed.state,
        "cross_attention_bytes": found.needed.cross,
        "indexer_bytes": found.needed.indexer,
        "total_bytes": found.needed.total,
        "parameters": model.weights.parameters if model.weights else None,
        "weights_bytes": model.weights.total if model.weights else None,
        "weights_source": model.weights.source if model.weights else model.why,
        "gpu": gpu,
        "tensor_parallel": asked.parts,
        "gpu_memory_bytes": budget.memory if budget else None,
        "utilisation": budget.utilisation if budget else None,
        "weights_bytes_per_gpu": budget.weights if budget else None,
        "overhead_bytes": budget.overhead if budget else None,
        "kv_budget_bytes": found.available,
        "kv_bytes_per_gpu": found.per_gpu.kv,
        "total_bytes_per_gpu": found.per_gpu.total,
        "fits": best.fits if best else None,
        "spare_bytes": best.spare if best else None,
        "max_tokens": best.max_tokens if best else None,
        "max_requests": best.max_requests if best else None,
        "fits_one_pool": pool.fits if pool else None,
        "max_tokens_one_pool": pool.max_tokens if pool else None,
        "max_requests_one_pool": pool.max_requests if pool else None,
        "pool_tokens": found.pool_tokens,
        "notes": list(geometry.notes),
    }


def lines(result: dict[str, Any], model: Model, found: Plan, budget: Budget | None) -> list[str]:
    """One model's answer for a terminal."""
    context, batch = result["context"], result["batch"]
    requests = "1 request" if batch == 1 else f"{batch:,} requests"
    out = [f"{result['model']}: {result['model_type']}, {len(model.geometry.layers)} layers"]
    out += ["  " + line for line in _layer_lines(model)]
    out.append(f"{requests} of {context:,} tokens, K and V in {result['kv_dtype']}")
    rows = [("first token of a request", result["kv_bytes_first_token"]), ("KV that the layers need", result["kv_bytes"])]
    rows.append((f"KV in one pool of {result['block_size']}-token blocks", result["allocated_bytes"]))
    rows += [
        (name, result[key])
        for name, key in (
            ("fixed state", "state_bytes"),
            ("cross-attention", "cross_attention_bytes"),
            ("indexer keys", "indexer_bytes"),
        )
        if result[key]
    ]
    if result["tensor_parallel"] > 1:
        rows.append((f"all caches on each of {result['tensor_parallel']} GPUs", result["total_bytes_per_gpu"]))
    out += [f"  {name:34} {count:>22,} B  {size_of(count)}" for name, count in rows]
    positions = result["max_positions"]
    if positions is not None and context > positions:
        out.append(f"  note: {context:,} tokens are more than the model's {positions:,} positions")
    out += [f"  note: {note}" for note in result["notes"]]
    if found.as_needed is not None:
        out += _gpu_lines(result, found, budget)
    elif model.weights is not None:
        count = f"{model.weights.parameters:,} parameters, " if model.weights.parameters else ""
        share = result["kv_bytes"] / model.weights.total
        out.append(f"weights: {count}{size_of(model.weights.total)} ({model.weights.source}); KV is {share:.2f} of them")
    return out


def _layer_lines(model: Model) -> list[str]:
    out = []
    for layer, count in model.geometry.groups():
        window = f", {'chunks' if layer.kind is Kind.CHUNKED else 'window'} of {layer.window:,} tokens" if layer.window else ""
        if layer.kind is Kind.MLA:
            heads = f"one latent of {layer.head_dim_k} elements a token"
        elif layer.kv_heads:
            same = layer.head_dim_k == layer.head_dim_v
            heads = f"{layer.kv_heads} KV heads, " + (
                f"{layer.head_dim_k} wide" if same else f"K {layer.head_dim_k} and V {layer.head_dim_v} wide"
            )
        else:
            heads = "a state of fixed size" if layer.state else "no cache of its own"
        beside = ", and a state of fixed size" if layer.state and layer.kind in GROWING else ""
        out.append(f"{count:3} x {layer.kind}: {heads}{window}{beside}")
    return out


def _gpu_lines(result: dict[str, Any], found: Plan, budget: Budget | None) -> list[str]:
    parts, best, pool = result["tensor_parallel"], found.as_needed, found.one_pool
    assert best is not None
    assert pool is not None
    assert found.available is not None
    out = []
    if budget is not None:
        name = result["gpu"] or "a GPU"
        on = f"{parts} x {name}" if parts > 1 else name
        out.append(f"on {on}, each: {size_of(budget.memory)}, of which {budget.utilisation:.0%} is used")
        out.append(f"  weights  {size_of(budget.weights)} ({result['weights_source']})")
        out.append(f"  overhead {size_of(budget.overhead)}")
        out.append(f"  caches   {size_of(found.per_gpu.total)} asked for, {size_of(found.available)} left")
    else:
        out.append(f"in {size_of(found.available)} for the caches")
    if found.available < 0:
        out.append(f"does not fit: the weights and the overhead alone are {size_of(-found.available)} too much")
    else:
        out.append(
            f"{'fits' if best.fits else 'does not fit'}: {size_of(abs(best.spare))} {'spare' if best.fits else 'too much'}"
        )
    batch, context = result["batch"], result["context"]
    out.append(
        f"  longest context at batch {batch:,}: {_limit(best.max_tokens)} tokens ({_limit(pool.max_tokens)} in one pool)"
    )
    out.append(f"  most requests of {context:,} tokens: {_limit(best.max_requests)} ({_limit(pool.max_requests)} in one pool)")
    out.append(f"  token slots of one pool: {found.pool_tokens:,}")
    return out


def _limit(count: int | None) -> str:
    return "no limit" if count is None else f"{count:,}"


def _giga(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e9:,.3f}"


def _gibi(count: int) -> str:
    return f"{count / GIB:,.3f}"


TABLE: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("model", "model", str),
    ("layers", "layers", lambda groups: str(sum(group["count"] for group in groups))),
    ("KV dtype", "kv_dtype", str),
    ("first token B", "kv_bytes_first_token", "{:,}".format),
    ("KV GB", "kv_bytes", _giga),
    ("KV GiB", "kv_bytes", _gibi),
    ("one pool GiB", "allocated_bytes", _gibi),
    ("state MiB", "state_bytes", lambda count: f"{count / (1 << 20):,.2f}"),
    ("weights GB", "weights_bytes", _giga),
)
FIT_TABLE: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("fits", "fits", lambda fits: "yes" if fits else "no"),
    ("longest context", "max_tokens", _limit),
    ("positions", "max_positions", lambda count: "?" if count is None else f"{count:,}"),
    ("most requests", "max_requests", _limit),
)


def table(results: list[dict[str, Any]]) -> list[str]:
    """Several models side by side, one a line, at the same context and batch."""
    columns = TABLE + (FIT_TABLE if results[0]["fits"] is not None else ())
    rows = [[title for title, _, _ in columns]] + [[show(result[key]) for _, key, show in columns] for result in results]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def figure_of(models: list[Model], plans: list[Plan]) -> Any:
    """Bytes of caches on a GPU against context: as needed, dotted in one pool where that is more, and dashed what the GPU has
    left. The grey line is the context that was asked for."""
    from matplotlib.figure import Figure

    asked = plans[0].asked
    figure = Figure(figsize=(8, 5 + 0.25 * len(plans)), layout="constrained")
    axes = figure.subplots()
    last = max([asked.context, *(found.as_needed.max_tokens or 0 for found in plans if found.as_needed)])
    at = sorted({max(1, last * i // 200) for i in range(221)})
    heights = []
    for model, found in zip(models, plans, strict=True):
        part = shard(model.geometry, asked.parts)
        needs = [need(part, tokens, asked.batch, found.asked.form, asked.block_size) for tokens in at]
        label = f"{model.name}, {found.asked.form.name}"
        (line,) = axes.plot(at, [each.total / GIB for each in needs], label=f"{label}: needed")
        if any(layer.window for layer in part.layers):
            pool = [each.total_allocated / GIB for each in needs]
            axes.plot(at, pool, ":", color=line.get_color(), label=f"{label}: in one pool")
        heights += [needs[-1].total / GIB, found.per_gpu.total_allocated / GIB]
        if found.available is not None:
            left = found.available / GIB
            says = f"{left:.2f} GiB are left" if left >= 0 else f"nothing is left, {-left:.2f} GiB are missing"
            heights.append(max(0, left))
            axes.axhline(heights[-1], color=line.get_color(), linestyle="--", linewidth=1, label=f"{label}: {says}")
    axes.axvline(asked.context, color="grey", linewidth=0.8, label=f"{asked.context:,} tokens")
    axes.set(
        xlabel=f"tokens of context, batch {asked.batch:,}", ylabel="GiB on each GPU",
        xlim=(0, at[-1]), ylim=(0, 1.1 * max(heights)),
    )  # fmt: skip
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def draw(models: list[Model], plans: list[Plan], path: Path) -> None:
    """figure_of() into a file; UsageError where it cannot be written, and then nothing is left of it."""
    try:
        figure_of(models, plans).savefig(path, dpi=150)
    except (ValueError, OSError) as error:
        path.unlink(missing_ok=True)
        raise UsageError(f"cannot write {path}: {error}") from error
