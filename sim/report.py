"""What `simulate` prints for people: lines and tables within 100 columns, and rows for CSV."""

import csv
import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from sim.check import Impossible
from sim.footprint import hbm_footprint
from sim.gpus import GIB, GPU, KIB, MIB, PRESETS
from sim.memory import Kernel, Values
from sim.roofline import estimate, minimum_bytes, minimum_flops
from sim.run import Simulation, as_dict
from sim.shape import Shape
from sim.transformer import Decoder, Step

WIDTH = 100
BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
COUNT_UNITS = ("", "k", "M", "G", "T", "P", "E")
TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def decimal(number: float, units: Sequence[str] = BYTE_UNITS) -> str:
    """Three digits and a decimal unit: 8912896 -> 8.91 MB."""
    for unit in units:
        if abs(number) < 999.5 or unit == units[-1]:
            break
        number /= 1000
    digits = 0 if unit == units[0] or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {unit}".rstrip()


def both(nbytes: int) -> str:
    """Decimal and binary: 8.91 MB = 8.50 MiB."""
    if nbytes < 1000:
        return f"{nbytes} B"
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(BINARY_UNITS) - 1)
    return f"{decimal(nbytes)} = {nbytes / 1024**power:.2f} {BINARY_UNITS[power]}"


def duration(seconds: float) -> str:
    """Three digits: 1.23 ms."""
    for unit, name in TIME_UNITS:
        if seconds >= unit * 0.9995 or name == "ns":
            break
    value = seconds / unit
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {name}"


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)


def queries(shape: Shape) -> str:
    """1 query x 4096 keys."""
    return f"{shape.rows} {'query' if shape.rows == 1 else 'queries'} x {shape.seq} keys"


def card(shape: Shape, gpu: GPU) -> str:
    """The machine and the shape, in two lines."""
    l2 = f", L2 {gpu.l2 // MIB} MB" if gpu.l2 else ""
    rate = gpu.rate(shape.dtype.name)
    machine = (
        f"{gpu.name}: HBM {decimal(gpu.bandwidth)}/s, {decimal(rate, COUNT_UNITS)}FLOP/s {shape.dtype.name}, "
        f"SRAM {gpu.sram // KIB} KB a block ({gpu.sram_total / MIB:.1f} MB in all){l2}"
    )
    kv = f", K and V {shape.kv.name}" if shape.kv.bare != shape.dtype else ""
    masks = ("causal" if shape.causal else "not causal") + (f", window {shape.window}" if shape.window else "")
    heads = f"{shape.heads} heads over {shape.num_kv_heads} kv heads of {shape.head_dim}"
    return f"{machine}\n{queries(shape)}, batch {shape.batch}, {heads}, {masks}, {shape.dtype.name}{kv}"


def simulation_report(simulation: Simulation, per_tensor: bool = False) -> Group:
    """The whole answer: card, table, notes, and the tensors if asked."""
    parts: list[Any] = [Text(card(simulation.shape, simulation.gpu) + "\n"), algorithm_table(simulation)]
    if per_tensor:
        parts += [Text("\nbytes of each tensor"), tensor_table(simulation)]
    parts.append(Text("\n" + "\n".join(notes(simulation))))
    return Group(*parts)


def algorithm_table(simulation: Simulation) -> Table:
    """A row an algorithm, and under it a row a kernel where there are several."""
    table = _table()
    table.add_column("algorithm", no_wrap=True)
    table.add_column("tile", no_wrap=True)
    for name in ("HBM read", "written", "both", "naive/it", "SRAM", "FLOPs", "FLOP/B", "bound", "time >="):
        table.add_column(name, justify="right", no_wrap=True)
    for result in simulation.results.values():
        naive = simulation.results.get("naive-backward" if result.backward else "naive")
        total = result.counts.total
        table.add_row(
            result.name, str(result.tile), decimal(total.hbm_read), decimal(total.hbm_write), decimal(total.hbm),
            _ratio(naive.hbm / total.hbm) if naive and naive is not result else "",
            f"{result.counts.sram_peak / KIB:.0f} KB", decimal(result.counts.flops, COUNT_UNITS),
            f"{result.bound.intensity:.1f}", result.bound.kind, duration(result.bound.seconds),
        )  # fmt: skip
        if len(result.counts.kernels) > 1:
            for name, kernel in result.counts.kernels.items():
                table.add_row(*_kernel_row(name, kernel), style="dim")
    return table


def _kernel_row(name: str, kernel: Kernel) -> list[str]:
    total = kernel.total
    flops = decimal(kernel.flops, COUNT_UNITS) if kernel.flops else ""
    return [f"  {name}", "", decimal(total.hbm_read), decimal(total.hbm_write), decimal(total.hbm), "", "", flops]


def _ratio(value: float) -> str:
    """Three digits: 3.27x."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}x"


def tensor_table(simulation: Simulation) -> Table:
    """Every tensor's bytes, exact."""
    table = _table()
    table.add_column("algorithm", no_wrap=True)
    table.add_column("tensor", no_wrap=True)
    for name in ("HBM read", "HBM written", "into SRAM", "out of SRAM"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in simulation.results.values():
        label = result.name
        for name, moved in result.counts.per_tensor().items():
            each = (moved.hbm_read, moved.hbm_write, moved.sram_read, moved.sram_write)
            table.add_row(label, name, *(f"{nbytes:,}" if nbytes else "" for nbytes in each))
            label = ""
    return table


def notes(simulation: Simulation) -> list[str]:
    """What the table does not say."""
    shape, lines = simulation.shape, []
    lines.append(
        f"least possible: {both(minimum_bytes(shape))} (Q, K, V read and O written once), "
        f"{decimal(minimum_flops(shape), COUNT_UNITS)}FLOP"
    )
    if simulation.l2:
        lines.append("HBM bytes are those behind the L2, which starts empty")
    elif simulation.gpu.l2:
        lines.append("HBM bytes as the papers count them, without a cache, and the times with them: --l2 simulates the L2")
    if simulation.ratio is not None:
        tiled = "decode" if shape.rows == 1 else "flash2"
        lines.append(f"naive moves {simulation.ratio:.4g} times the bytes of {tiled}")
    lines.append(_values_note(simulation))
    seconds = estimate(shape, simulation.gpu)
    if seconds is not None:
        lines.append(f"decode: about {duration(seconds)} by a fit to measured kernels (an estimate, not a measurement)")
    for result in simulation.results.values():
        nbytes = hbm_footprint(result.counts, shape)
        if nbytes > simulation.gpu.memory:
            lines.append(f"{result.name} keeps {both(nbytes)} in HBM, which has {both(simulation.gpu.memory)}: it cannot run")
    closed = [result.name for result in simulation.results.values() if not result.looped]
    if closed:
        lines.append(f"closed form in place of the loop: {', '.join(closed)}")
    lines += [f"{name} is left out: {reason}" for name, reason in simulation.left_out.items()]
    return lines


def _values_note(simulation: Simulation) -> str:
    if simulation.values is Values.NONE:
        return "counted only: no values were computed (--execute computes them)"
    shape = simulation.shape
    which = "every head" if simulation.values is Values.ALL else f"{shape.group} of {shape.all_heads} heads"
    text = f"values: {which} computed in float32, largest error {simulation.max_abs_error:.1e} against float64"
    equal = [result.name for result in simulation.results.values() if result.same_bits]
    differing = [result.name for result in simulation.results.values() if result.same_bits is False]
    if equal:
        text += f"; the runtime's bits: {', '.join(equal)}"
    if differing:
        text += f"; NOT the runtime's bits: {', '.join(differing)}"
    return text


CSV_FIELDS = ("gpu", "algorithm", "tile", "seq", "q_len", "heads", "kv_heads", "head_dim", "batch", "causal", "window", "dtype",
              "kv_dtype", "hbm_read_bytes", "hbm_write_bytes", "hbm_bytes", "sram_peak_bytes", "flops", "intensity", "bound",
              "time_s")  # fmt: skip


def csv_rows(simulation: Simulation) -> list[dict[str, Any]]:
    """A row an algorithm."""
    whole = as_dict(simulation)
    rows = []
    for name, fields in whole["algorithms"].items():
        row = {"gpu": whole["gpu"], "algorithm": name, "tile": str(simulation.results[name].tile), **whole["shape"], **fields}
        rows.append({field: row[field] for field in CSV_FIELDS})
    return rows


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows of CSV_FIELDS with a header line."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def sweep_table(rows: Sequence[Mapping[str, Any]], axes: Sequence[str]) -> Table:
    """A line for each point and algorithm of a sweep."""
    table = _table()
    for name in axes:
        table.add_column(name, no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    for name in ("HBM bytes", "SRAM", "FLOPs", "FLOP/B", "bound", "time >="):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in axes), row["algorithm"], decimal(row["hbm_bytes"]),
            f"{row['sram_peak_bytes'] / KIB:.0f} KB", decimal(row["flops"], COUNT_UNITS), f"{row['intensity']:.1f}",
            row["bound"], duration(row["time_s"]),
        )  # fmt: skip
    return table


def impossible_table(found: Sequence[Impossible]) -> Table:
    """Measured rows faster than their bound."""
    table = _table()
    for name in ("line", "batch", "heads", "kv heads", "queries", "keys", "measured", "at least", "by", "faster than"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        shape = each.row.shape
        sizes = (each.row.line, shape.batch, shape.heads, shape.num_kv_heads, shape.rows, shape.seq)
        limit = "HBM" if each.limit == "memory" else "arithmetic"
        table.add_row(*map(str, sizes), duration(each.row.seconds), duration(each.seconds), f"{each.factor:.2f}x", limit)
    return table


def gpu_table() -> Table:
    """The presets."""
    table = _table()
    table.add_column("name", no_wrap=True)
    for name in ("memory", "HBM GB/s", "SRAM/block", "SRAM", "L2", "bf16", "fp16", "fp32", "fp8", "int8"):
        table.add_column(name, justify="right", no_wrap=True)
    for gpu in PRESETS.values():
        rates = (gpu.rates.get(name) for name in ("bfloat16", "float16", "float32", "fp8_e4m3", "int8"))
        table.add_row(
            gpu.name, f"{gpu.memory / GIB:.1f} GiB", f"{gpu.bandwidth / 1e9:.0f}", f"{gpu.sram // KIB} KB",
            f"{gpu.sram_total / MIB:.1f} MB", f"{gpu.l2 // MIB} MB" if gpu.l2 else "-",
            *("-" if rate is None else f"{rate / 1e12:g}" for rate in rates),
        )  # fmt: skip
    return table


def gpu_sources() -> str:
    """Where each preset's numbers are from."""
    return "\n".join(
        textwrap.fill(f"{gpu.name}: {gpu.source}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for gpu in PRESETS.values()
    )


def model_report(model: Decoder, gpu: GPU, shape: Shape, weights: str, steps: Mapping[str, Step]) -> Group:
    """A table for prefill and one for decode."""
    parts: list[Any] = [Text(
        f"{model.name} on {gpu.name}: context {shape.seq}, batch {shape.batch}, {shape.dtype.name}, K and V {shape.kv.name}, "
        f"weights {weights}\n{model.layers} layers, width {model.width}, {model.heads} heads over {model.kv_heads} kv heads of "
        f"{model.head_dim}"
    )]  # fmt: skip
    for phase, whole in steps.items():
        tokens = shape.batch * (shape.seq if phase == "prefill" else 1)
        parts.append(Text(
            f"\n{phase}: at least {duration(whole.seconds)}, at most {tokens / whole.seconds:,.0f} tokens/s; "
            f"{both(whole.nbytes)}, {decimal(whole.flops, COUNT_UNITS)}FLOP"
        ))  # fmt: skip
        parts.append(_step_table(whole))
    return Group(*parts)


def _step_table(whole: Step) -> Table:
    table = _table()
    table.add_column("operation", no_wrap=True)
    for name in ("count", "FLOPs", "bytes", "weights", "K and V", "FLOP/B", "bound", "each >=", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for op, bound in zip(whole.ops, whole.bounds, strict=True):
        table.add_row(
            op.name, str(op.count), decimal(op.flops, COUNT_UNITS), decimal(op.nbytes),
            decimal(op.weight_bytes) if op.weight_bytes else "", decimal(op.kv_bytes) if op.kv_bytes else "",
            f"{bound.intensity:.1f}", bound.kind, duration(bound.seconds),
            f"{bound.seconds * op.count / whole.seconds:.1%}",
        )  # fmt: skip
    return table


def print_report(report: Any) -> None:
    """To standard output, never wider than WIDTH."""
    console = Console(width=WIDTH, highlight=False)
    console.print(report)
