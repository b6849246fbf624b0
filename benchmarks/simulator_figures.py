"""The simulator against published and measured figures: makes the tables of docs/simulator.md.

    python -m benchmarks.simulator_figures                       # print
    python -m benchmarks.simulator_figures --write docs/simulator.md
    python -m benchmarks.simulator_figures --measured DIRECTORY --write docs/simulator.md

DIRECTORY holds AIConfigurator's attention latencies as decode_attn_bf16_d128.csv (gpu, q_heads, kv_heads, batch, kv_len, us)
and prefill_attn_causal_bf16_d128.csv (..., seq, us); without it the table about them is left as it is. Every figure names
its source; each one is also a test (tests/sim/test_published.py, tests/sim/test_measured.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np

from sim.check import Columns, Row, judge, read_rows
from sim.footprint import training_peak
from sim.formats import FORMATS
from sim.gpus import GB, MIB, get_gpu
from sim.memory import Values
from sim.roofline import ESTIMATE_FROM, ESTIMATES, Estimate, fit_estimate, lower_bound, minimum_bytes, minimum_flops
from sim.run import count, simulate
from sim.schedules import get_schedule
from sim.shape import Shape, TileSize
from sim.transformer import Decoder, elementwise, linear, scores, simulate_model, step, weighted

FLASH1 = "FlashAttention, arXiv 2205.14135"
UNVEILED = "LLM Inference Unveiled, arXiv 2402.16363, table 1, unrounded by running LLM-Viewer 472f71f"
GENZ = "GenZ 091bdd0, golden CSV"
HALF, SINGLE, BRAIN = FORMATS["float16"], FORMATS["float32"], FORMATS["bfloat16"]


@dataclass(frozen=True)
class Figure:
    """Our number and theirs. `low` and `high` are what ours / theirs must lie between: 1 and 1 is equality."""

    what: str
    source: str
    ours: float
    theirs: float
    unit: str
    low: float = 1.0
    high: float = 1.0
    why: str = ""

    @property
    def holds(self) -> bool:
        return self.low * self.theirs <= self.ours <= self.high * self.theirs


def flash_table_21() -> Iterator[Figure]:
    """Peak memory of training, batch 16, 8 heads of 64, float16."""
    printed = {
        False: (36, 104, 336, 1184, 4416, 17024),
        True: (22, 44, 104, 209, 418, 836, 1672, 3344, 6688, 13376),
    }
    for flash, column in printed.items():
        for power, mib in enumerate(column):
            shape = Shape(128 << power, heads=8, head_dim=64, batch=16, causal=False)
            name = f"{'FlashAttention' if flash else 'PyTorch'}, N {shape.seq}"
            yield Figure(f"peak memory, {name}", f"{FLASH1}, table 21", training_peak(shape, flash=flash) // MIB, mib, "MiB",
                         why="our coefficients were fitted on this table: it confirms growth and units")  # fmt: skip


def unveiled_table_1() -> Iterator[Figure]:
    """Llama-2-7B, 2048 tokens, batch 1, float16: operations and bytes of each layer, prefill and decode."""
    printed = {
        2048: {"q, k, v, o": (68719476736, 67108864), "gate, up, down": (184683593728, 152043520),
               "Q K^T": (34359738368, 301989888), "P V": (34359738368, 301989888), "softmax": (671088640, 536870912),
               "norm": (58720256, 33554432), "add": (8388608, 33554432)},
        1: {"q, k, v, o": (33554432, 33570816), "gate, up, down": (90177536, 90207744), "Q K^T": (16777216, 16916480),
            "P V": (16777216, 16916480), "softmax": (327680, 262144), "norm": (28672, 16384), "add": (4096, 16384)},
    }  # fmt: skip
    for rows, layers in printed.items():
        shape = Shape(2048, heads=32, head_dim=128, q_len=rows)
        ours = {
            "q, k, v, o": linear("proj", rows, 4096, 4096, HALF, HALF),
            "gate, up, down": linear("gate", rows, 4096, 11008, HALF, HALF),
            "Q K^T": scores("qk", shape),
            "P V": weighted("sv", shape),
            "softmax": elementwise("softmax", "softmax", 32 * rows, 2048, HALF),
            "norm": elementwise("norm", "rms_norm", rows, 4096, HALF, weights=1),
            "add": elementwise("add", "add", rows, 4096, HALF, inputs=2),
        }
        differs = {
            ("norm", "operations"): (
                4 / 7,
                "theirs counts LayerNorm's 7 an element; Llama has RMSNorm: square, sum, scale, weight",
            ),
            ("norm", "bytes"): (1 + 4096 / (4096 * 2 * rows), "theirs leaves out the weight vector"),
            ("add", "bytes"): (1.5, "theirs counts one of the two inputs"),
        }
        phase = "prefill" if rows > 1 else "decode"
        for name, (flops, nbytes) in layers.items():
            for unit, mine, published in (("operations", ours[name].flops, flops), ("bytes", ours[name].nbytes, nbytes)):
                ratio, why = differs.get((name, unit), (1.0, ""))
                yield Figure(f"{phase} {name}", UNVEILED, mine, published, unit, ratio, ratio, why)


def genz_golden() -> Iterator[Figure]:
    """MiB of an operator's activation in, weight or cache in, activation out."""
    golden = {
        "Llama-2-7B decode, QKV product": (linear("qkv", 1, 4096, 12288, HALF, HALF), (0.0078125, 96.0, 0.0234375)),
        "Llama-2-7B decode, Q K^T, L 1024": (scores("qk", Shape(1024, 32, 128, 1)), (0.0078125, 8.0, 0.0625)),
        "Mixtral-8x7B decode, Q K^T, L 1024": (scores("qk", Shape(1024, 32, 128, 1, 8)), (0.0078125, 2.0, 0.0625)),
        "Llama-2-7B prefill, Q K^T, 1024": (scores("qk", Shape(1024, 32, 128)), (8.0, 8.0, 64.0)),
        "Mixtral-8x7B prefill, Q K^T, 1024": (scores("qk", Shape(1024, 32, 128, kv_heads=8)), (8.0, 2.0, 64.0)),
    }
    for name, (op, parts) in golden.items():
        ours = (op.input_bytes, op.weight_bytes + op.kv_bytes, op.output_bytes)
        for part, mine, theirs in zip(("in", "weight or cache", "out"), ours, parts, strict=True):
            yield Figure(f"{name}: {part}", GENZ, mine / MIB, theirs, "MiB")


def bug_reports() -> Iterator[Figure]:
    """Byte counts that public tools had wrong, with the right value."""
    small = Shape(1024, heads=1, head_dim=64, causal=False)
    naive = count(get_schedule("naive"), small, TileSize(128, 128))[0]
    yield Figure("naive, N 1024, D 64, float16", "Dao-AILab/flash-attention issue 1260", naive.total.hbm, 8912896, "bytes")
    yield Figure("least possible, same shape", "Dao-AILab/flash-attention issue 1260", minimum_bytes(small), 524288, "bytes")
    grouped = Shape(4096, heads=32, head_dim=128, q_len=1, kv_heads=8)
    moved = count(get_schedule("decode"), grouped, TileSize(1, 128))[0].per_tensor()
    yield Figure("K and V, 32/8 heads of 128, L 4096", "LLM-Viewer issue 12 (counts 67,108,864: once a query head)",
                 moved["K"].hbm + moved["V"].hbm, 16777216, "bytes")  # fmt: skip
    llama2 = Shape(2048, heads=32, head_dim=128)
    written = count(get_schedule("flash2"), llama2, TileSize(128, 128))[0].per_tensor()["O"].hbm
    yield Figure("fused attention's output, Llama-2-7B, 2048", "LLM-Viewer 472f71f (counts 536,870,912: N x N for N x D)",
                 written, 16777216, "bytes")  # fmt: skip
    cached = Shape(10241, heads=32, head_dim=128, q_len=1, kv_heads=8, batch=16, dtype=BRAIN)
    moved = count(get_schedule("decode"), cached, TileSize(1, 128))[0].per_tensor()
    yield Figure("K and V, batch 16, 10,240 cached + 1", "intel/sycl-tla pull request 778 (left the cache out)",
                 moved["K"].hbm + moved["V"].hbm, 671154176, "bytes")  # fmt: skip


def flash_figure_2() -> Iterator[Figure]:
    """GPT-2 medium: N 1024, 16 heads of 64, batch 64, float16, forward and backward, in GB."""
    shape = Shape(1024, heads=16, head_dim=64, batch=64, causal=False)
    gpu = get_gpu("a100-paper")

    def both(name: str, **options: bool) -> float:
        total = 0
        for each in (name, f"{name}-backward"):
            schedule = get_schedule(each, **options)
            total += count(schedule, shape, schedule.auto_tile(shape, gpu))[0].total.hbm
        return total / GB

    versions = "NeurIPS version and arXiv v2"
    yield Figure("flash1, nothing but Q, K, V, O and gradients", f"{FLASH1}, figure 2 ({versions})",
                 both("flash1", init=False, stats=False), 4.4, "GB", 0.9, 1.0,
                 "no first writes, no l and m: a lower end")  # fmt: skip
    yield Figure("flash1, with l and m", f"{FLASH1}, figure 2 ({versions})",
                 both("flash1", init=False), 4.4, "GB", 0.9, 1.0, "no first writes")  # fmt: skip
    yield Figure("flash1, with first writes, l and m", f"{FLASH1}, figure 2 ({versions})",
                 both("flash1"), 4.4, "GB", 1.0, 1.1, "Algorithms 1 and 4 to the letter: an upper end")  # fmt: skip
    yield Figure("naive, mask passes", f"{FLASH1}, figure 2 (NeurIPS version: key-padding mask, no dropout)",
                 both("naive", mask=True), 35.3, "GB", 0.95, 1.0,
                 "the mask itself and framework copies are not counted")  # fmt: skip
    yield Figure("naive, mask and dropout passes", f"{FLASH1}, figure 2 (arXiv v2)",
                 both("naive", mask=True, dropout=True), 40.3, "GB", 1.0, 1.12,
                 "which passes were fused is not printed; a byte mask is assumed")  # fmt: skip


def ncu_on_l4() -> Iterator[Figure]:
    """DRAM bytes that a profiler counted: N 8192, D 32, float32, one head, an L4."""
    source = "QuantizedMHA repository, ncu report on an L4"
    shape = Shape(8192, heads=1, head_dim=32, causal=False, dtype=SINGLE)
    naive = count(get_schedule("naive"), shape, TileSize(128, 128))[0]
    reads = "caches re-read K or V in part; ours reads them once"
    for name, theirs, low, why in (("QK^T", 302.3, 0.85, reads), ("softmax", 590.9, 0.85, "the report does not say why"),
                                   ("PV", 411.8, 0.62, reads + "; the report does not say how often")):  # fmt: skip
        yield Figure(f"naive {name}", source, naive.kernels[name].total.hbm / 1e6, theirs, "MB", low, 1.0, why)
    behind = simulate(shape, get_gpu("l4"), ["flash2"], TileSize(128, 128), values=Values.NONE, l2=True).results["flash2"]
    yield Figure("flash2 behind a simulated L2", source, behind.hbm / 1e6, 3.58, "MB", 1.0, 1.2,
                 "theirs is below the least possible: presumably written lines were still in L2")  # fmt: skip


def measured_rows() -> Iterator[Figure]:
    """Single published latencies, which must not be below our bound; in microseconds."""
    yield from _flash_tables()
    yield from _flash_decoding()
    yield from _aiconfigurator_rows()
    yield from _llmcompass()
    yield from _gpt_fast()


def _bound(shape: Shape, gpu: str) -> float:
    """Microseconds that no kernel can beat: least bytes and operations."""
    return lower_bound(minimum_bytes(shape), minimum_flops(shape), get_gpu(gpu), shape.dtype.name).seconds * 1e6


def _slower(what: str, source: str, bound: float, measured: float, why: str = "") -> Figure:
    return Figure(what, source, bound, measured, "us", 0.0, 1.0, why)


def _flash_tables() -> Iterator[Figure]:
    """Forward, batch 16, 8 heads of 64, A100-40: standard attention against naive's bytes, flash against the least."""
    columns = {"PyTorch": (1.27, 4.32, 16.47, 67.77), "FlashAttention": (0.68, 2.40, 8.42, 33.54)}
    gpu = get_gpu("a100-40")
    for name, times in columns.items():
        for power, milliseconds in enumerate(times):
            shape = Shape(1024 << power, heads=8, head_dim=64, batch=16, causal=False)
            if name == "PyTorch":
                counts, _ = count(get_schedule("naive"), shape, TileSize(128, 128))
                bound = lower_bound(counts.total.hbm, counts.flops, gpu, "float16").seconds * 1e6
            else:
                bound = _bound(shape, gpu.name)
            yield _slower(f"{name} forward, N {shape.seq}, A100-40", f"{FLASH1}, table 18", bound, milliseconds * 1000)


def _flash_decoding() -> Iterator[Figure]:
    """16 query heads over 2 of 128, float16, A100."""
    times = {(256, 256): 63.4, (128, 512): 67.7, (64, 1024): 77.7, (32, 2048): 58.5, (16, 4096): 57.0, (8, 8192): 56.4,
             (4, 16384): 58.2, (2, 32768): 60.3, (1, 65536): 64.4, (1, 131072): 106.6}  # fmt: skip
    for (batch, length), us in times.items():
        shape = Shape(length, heads=16, head_dim=128, q_len=1, kv_heads=2, batch=batch)
        source = "Dao et al. 2023, Flash-Decoding for long-context inference"
        yield _slower(f"Flash-Decoding, batch {batch}, L {length}, A100", source, _bound(shape, "a100-80"), us)


def _aiconfigurator_rows() -> Iterator[Figure]:
    """vLLM's decode kernels, 64 query heads over 8 of 128, bfloat16."""
    measured = {
        (8, 4096): {"a100-80": 109.73, "h100": 58.85, "h200": 45.54, "b200": 27.41, "l40s": 202.04},
        (8, 16384): {"a100-80": 344.99, "h100": 184.45, "h200": 135.16, "b200": 80.36, "l40s": 757.54},
        (1, 16384): {"a100-80": 64.73, "h100": 37.65, "h200": 30.60, "b200": 15.02, "l40s": 36.60},
    }
    for (batch, length), row in measured.items():
        shape = Shape(length + 1, heads=64, head_dim=128, q_len=1, kv_heads=8, batch=batch, dtype=BRAIN)
        for name, us in row.items():
            gpu = get_gpu(name)
            warm = (batch, name) == (1, "l40s")
            nbytes = minimum_bytes(shape) - (gpu.l2 or 0 if warm else 0)
            why = "67 MB of K and V stay in the 96 MB L2 between runs: nothing is charged to HBM" if warm else ""
            bound = max(0, nbytes) / gpu.bandwidth * 1e6
            yield _slower(f"vLLM decode, batch {batch}, L {length}, {name}", "AIConfigurator 095f58a", bound, us, why)


def _llmcompass() -> Iterator[Figure]:
    """GPT-3's layer on one of four A100s, batch 8, context 3072: matrix products of a decode step."""
    width, heads, share = 12288, 24, 4
    shape = Shape(3072, heads=heads, head_dim=128, q_len=1, batch=8)
    ops = {
        "QKV": (linear("qkv", 8, width, 3 * width // share, HALF, HALF), 212.4),
        "Q K^T": (scores("qk", shape), 106.1),
        "A V": (weighted("av", shape), 138.6),
        "Wo": (linear("wo", 8, width // share, width, HALF, HALF), 68.9),
        "W1": (linear("w1", 8, width, 4 * width // share, HALF, HALF), 186.0),
        "W2": (linear("w2", 8, 4 * width // share, width, HALF, HALF), 186.1),
    }
    for name, (op, us) in ops.items():
        bound = lower_bound(op.nbytes, op.flops, get_gpu("a100-80"), "float16").seconds * 1e6
        yield _slower(f"GPT-3 layer, decode, {name}, A100", "LLMCompass 2e015fd, measured", bound, us)


LLAMA2_7B = Decoder("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000, "rms_norm", True, False, False, False, True)
LLAMA31_8B = Decoder("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, "rms_norm", True, False, False, False, True)


def _gpt_fast() -> Iterator[Figure]:
    """A token's time in a whole model at batch 1 on an A100-80, against the step's bound at the shortest context."""
    for model, dtype, rate in ((LLAMA2_7B, "bfloat16", 104.9), (LLAMA2_7B, "int8", 155.58), (LLAMA31_8B, "bfloat16", 93.89),
                               (LLAMA31_8B, "int8", 137.64)):  # fmt: skip
        shape = Shape(2, heads=model.heads, head_dim=model.head_dim, dtype=BRAIN)
        whole = simulate_model(model, get_gpu("a100-80"), shape, FORMATS[dtype])["decode"]
        yield _slower(f"{model.name}, weights {dtype}, a token, A100", "gpt-fast README", whole.seconds * 1e6, 1e6 / rate)


def per_model_totals() -> Iterator[Figure]:
    """Llama-2-7B at 2048: LLM-Viewer's totals leave out and add what its layers do."""
    shape = Shape(2048, heads=32, head_dim=128, q_len=1)
    cache = 2 * 32 * 32 * 2048 * 128 * 2
    yield Figure("KV cache of Llama-2-7B, 2048 tokens", UNVEILED, cache, 1073741824, "bytes")
    weights = sum(op.weight_bytes * op.count for op in step(LLAMA2_7B, shape, HALF) if op.name.endswith("proj"))
    yield Figure("layer weights of Llama-2-7B", UNVEILED, weights, 12952010752, "bytes")


GROUPS: dict[str, Callable[[], Iterator[Figure]]] = {
    "FlashAttention's peak memory": flash_table_21,
    "LLM Inference Unveiled, table 1": unveiled_table_1,
    "GenZ's golden rows": genz_golden,
    "Whole-model sizes": per_model_totals,
    "Bytes that public tools had wrong": bug_reports,
    "FlashAttention's figure 2": flash_figure_2,
    "A profiler's DRAM bytes": ncu_on_l4,
    "Published latencies against our lower bound": measured_rows,
}


def all_figures() -> list[Figure]:
    return [figure for group in GROUPS.values() for figure in group()]


def number(value: float) -> str:
    """Exact for whole numbers, else four digits."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.1f}"


def difference(figure: Figure) -> str:
    """Ours against theirs."""
    if figure.ours == figure.theirs:
        return "equal"
    ratio = figure.ours / figure.theirs - 1
    return f"{ratio:+.{1 if abs(ratio) >= 0.001 else 2}%}"


def markdown() -> str:
    """A table for each group; what is the same in all its rows stands above it."""
    lines = []
    for title, group in GROUPS.items():
        figures = list(group())
        sources, reasons = ({getattr(each, name) for each in figures} for name in ("source", "why"))
        columns = ["figure", "ours", "theirs", "unit", "difference"]
        columns += ["why"] * (len(reasons) > 1) + ["source"] * (len(sources) > 1)
        lines += [f"### {title}", ""]
        shared = [f"Source: {text}." for text in sources if len(sources) == 1]
        shared += [f"{text[0].upper()}{text[1:]}." for text in reasons if len(reasons) == 1 and text]
        lines += [" ".join(shared), ""] if shared else []
        lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for each in figures:
            cells = {"figure": each.what, "ours": number(each.ours), "theirs": number(each.theirs), "unit": each.unit,
                     "difference": difference(each), "why": each.why, "source": each.source}  # fmt: skip
            lines.append(f"| {' | '.join(cells[column] for column in columns)} |")
        lines.append("")
    return "\n".join(lines)


GPUS = {"A100-SXM-80": "a100-80", "H100-SXM": "h100", "L40S": "l40s"}
DECODE_FILE, PREFILL_FILE = "decode_attn_bf16_d128.csv", "prefill_attn_causal_bf16_d128.csv"


@dataclass(frozen=True)
class Measured:
    """What the measured rows of one GPU say. `as_mha`: the share impossible if K and V are charged to every query head;
    `cold`: how many are impossible if no L2 is taken into account."""

    gpu: str
    decode: int
    decode_set_aside: int
    decode_impossible: int
    cold: int
    as_mha: float
    keys_only: int
    prefill: int
    prefill_impossible: int
    fit: Estimate


def rows_of(path: Path, gpu: str) -> list[Row]:
    """The rows of one GPU."""
    only = {"gpu": gpu}
    return list(read_rows(path, Columns(), causal=True, head_dim=128, dtype=BRAIN, only=only))


def keys_only(rows: list[Row], gpu: str) -> Iterator[Row]:
    """The rows as a benchmark would have them that stores keys and no values: half the bytes by the fitted estimate."""
    fitted = ESTIMATES[gpu]
    for row in rows:
        yield replace(row, seconds=fitted.seconds(minimum_bytes(row.shape) // 2, get_gpu(gpu)))


def measured(directory: Path) -> list[Measured]:
    """Every GPU of the data set."""
    found = []
    for label, name in GPUS.items():
        gpu = get_gpu(name)
        decode, prefill = (rows_of(directory / file, label) for file in (DECODE_FILE, PREFILL_FILE))
        verdict, prefill_verdict = judge(iter(decode), gpu), judge(iter(prefill), gpu)
        cold = judge(iter(decode), gpu, cold=True)
        as_mha = judge(iter(decode), gpu, cold=True, per_query_head=True)
        nbytes = np.array([minimum_bytes(row.shape) for row in decode])
        seconds = np.array([row.seconds for row in decode])
        large = nbytes > ESTIMATE_FROM
        found.append(
            Measured(
                name, len(decode), verdict.set_aside, len(verdict.impossible), len(cold.impossible),
                len(as_mha.impossible) / len(decode), len(judge(keys_only(decode, name), gpu).impossible), len(prefill),
                len(prefill_verdict.impossible), fit_estimate(nbytes[large], seconds[large], gpu.bandwidth),
            )
        )  # fmt: skip
    return found


def measured_markdown(found: list[Measured]) -> str:
    """The table of the measured data."""
    head = ["GPU", "decode rows", "set aside (fit in L2)", "faster than bytes/BW", "without the L2 rule",
            "impossible if K and V per query head", "found if V were left out", "prefill rows", "faster than FLOPs/peak",
            "fit: t0", "efficiency", "held-out median error"]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [
        f"| {each.gpu} | {each.decode:,} | {each.decode_set_aside:,} | {each.decode_impossible} | {each.cold} "
        f"| {each.as_mha:.1%} | {each.keys_only:,} | {each.prefill:,} | {each.prefill_impossible} | {each.fit.t0 * 1e6:.1f} us "
        f"| {each.fit.efficiency:.1%} | {each.fit.held_out_error:.1%} |"
        for each in found
    ]
    return "\n".join(lines) + "\n"


def put_between(text: str, name: str, content: str) -> str:
    """`text` with what lies between the two markers of `name` replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise click.ClickException(f"no markers {begin} and {end}")
    return f"{before}{begin}\n{content}{end}{after}"


@click.command()
@click.option("--measured", "directory", type=click.Path(path_type=Path, exists=True, file_okay=False), help="The data set.")
@click.option("--write", "page", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Replace the tables in it.")
def main(directory: Path | None, page: Path | None) -> None:
    """Make the tables; exit code 1 if a figure is missed."""
    missed = [figure for figure in all_figures() if not figure.holds]
    for figure in missed:
        click.echo(f"missed: {figure.what}: ours {number(figure.ours)}, theirs {number(figure.theirs)} {figure.unit}", err=True)
    if missed:
        raise SystemExit(1)
    parts = {"figures": markdown()}
    if directory:
        parts["measured"] = measured_markdown(measured(directory))
    if page is None:
        click.echo("\n".join(parts.values()))
        return
    text = page.read_text(encoding="utf-8")
    for name, content in parts.items():
        text = put_between(text, name, content)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
