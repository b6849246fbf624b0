"""Published figures of KV memory beside what the planner computes: the table in docs/planner.md.

python -m benchmarks.planner_figures                        prints the table; exit code 1 if a figure is missed
python -m benchmarks.planner_figures --traces DIR           the figures of the replay, from public traces in DIR
python -m benchmarks.planner_figures --write-configs DIR    writes the config.json files that the page uses
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from nanokv.errors import UsageError
from sim.gpus import get_gpu
from sim.planner.capacity import first_token_bytes, max_tokens, need, pool_tokens
from sim.planner.geometry import geometry_from_config
from sim.planner.kv_formats import kv_format
from sim.planner.layers import Geometry
from sim.planner.model import Model
from sim.planner.parameters import count_parameters
from sim.planner.plan import split_budget
from sim.planner.replay import Limits
from sim.planner.replay_report import useful_share
from sim.planner.server import Policy, Server, build_server, replay_all
from sim.planner.traces import Trace, first_requests, read_trace
from sim.planner.weights_size import from_parameters

GIB = 1 << 30
CONFIGS = Path(__file__).with_name("planner_configs.json")


@dataclass(frozen=True)
class Figure:
    """One published number. `within` is how far the planner may be off: the rounding of what was printed."""

    what: str
    source: str
    published: str
    computed: int | float
    expected: int | float
    within: float = 0

    @property
    def met(self) -> bool:
        return abs(self.computed - self.expected) <= self.within


def published_configs() -> Mapping[str, Mapping[str, Any]]:
    """The keys of public config.json files that shape caches, each with its source."""
    return json.loads(CONFIGS.read_text(encoding="utf-8"))


def figures() -> Iterator[Figure]:
    """Every figure, in the order of the page."""
    configs = published_configs()
    bf16 = kv_format("bfloat16")

    def model(name: str, **changes: Any) -> Geometry:
        return geometry_from_config({**configs[name]["config"], **changes})

    def kv(name: str, context: int, batch: int = 1, **changes: Any) -> int:
        return need(model(name, **changes), context, batch, bf16).kv

    def exact(what: str, source: str, computed: int, expected: int) -> Figure:
        return Figure(what, source, f"{expected:,}", computed, expected)

    qwen = "Qwen2.5-72B, 32,768 tokens"
    yield exact(
        f"{qwen}, as multi-head attention", "closed form", kv("Qwen/Qwen2.5-72B", 32768, num_key_value_heads=64), 85_899_345_920
    )
    yield exact(f"{qwen}, 8 KV heads", "closed form", kv("Qwen/Qwen2.5-72B", 32768), 10_737_418_240)
    gpt3 = kv("GPT-3 175B", 544, 64)
    yield exact("GPT-3, batch 64, 512 + 32 tokens", "4BLH(S+N)", gpt3, 4 * 64 * 96 * 12288 * (512 + 32))
    yield Figure("GPT-3, the same, over 350 GB of weights", "closed form", "0.47", gpt3 / 350e9, 0.47, 0.005)
    yield Figure(
        "OPT-175B, batch 512, 512 + 32 tokens",
        "FlexGen, 2303.06865",
        "1.2 TiB",
        kv("facebook/opt-175b", 544, 512) / 2**40,
        1.2,
        0.05,
    )
    yield Figure(
        "PaLM-540B as MHA, batch 512, 2,048 tokens", "2211.05102", "3 TB", kv("PaLM-540B as MHA", 2048, 512) / 1e12, 3, 0.05
    )
    yield exact("Llama-2-7B, 4,096 tokens", "2 GiB", kv("meta-llama/Llama-2-7b-hf", 4096), 2 * GIB)
    yield exact("Mixtral-8x7B, 32,768 tokens", "4 GiB", kv("mistralai/Mixtral-8x7B-v0.1", 32768), 4 * GIB)
    oss, short = "openai/gpt-oss-20b", "gpt-oss-20b"
    yield Figure(
        f"{short}, 131,072 tokens, needed, GiB", "gguf-parser-go #32", "3.0029", kv(oss, 131_072) / GIB, 3.0029, 0.00005
    )
    both = need(model(oss), 8192, 32, bf16)
    yield Figure(f"{short}, 32 x 8,192 tokens, needed, GiB", "hf-mem #70", "6.09", both.kv / GIB, 6.09, 0.005)
    yield Figure(f"{short}, the same, one pool, GiB", "hf-mem #70", "12.00", both.allocated / GIB, 12)
    for name, source, rate in (
        ("openai/gpt-oss-120b", "hf-mem #60", 73_728),
        ("Qwen/Qwen3-0.6B", "dynamo #14431", 114_688),
        ("Qwen/Qwen2.5-7B-Instruct", "vLLM #22291", 57_344),
        ("meta-llama/Llama-3.1-8B", "vllm-fit #2", 131_072),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", "its block_configs", 200_704),
        ("nvidia/Nemotron-H-56B", "its layer pattern", 40_960),
        ("XiaomiMiMo/MiMo-V2-Flash", "its config.json", 222_720),
        ("google/gemma-4-31B", "configiq #112", 901_120),
    ):
        yield exact(f"{name.split('/')[-1]}, first token", source, first_token_bytes(model(name), bf16), rate)
    for name, whole, printed in (("facebook/opt-13b", 12, 15_700), ("facebook/opt-175b", 264, 60_100)):
        found = pool_tokens(model(name), whole * GIB, bf16, 1)
        yield Figure(
            f"{name.split('/')[-1].upper()}, slots in {whole} GiB",
            "PagedAttention, table 1",
            f"{printed / 1000}K",
            found,
            printed,
            50,
        )
    for name, form, gib, tokens in (
        ("Qwen/Qwen3-4B", "bfloat16", 11.47, 83_488),
        ("Qwen/Qwen3-4B", "fp8", 11.47, 166_992),
        ("Qwen/Qwen3-1.7B", "bfloat16", 24.20, 226_528),
        ("openai/gpt-oss-120b", "bfloat16", 5.38, 78_384),
    ):
        stored = kv_format(form)
        rate = first_token_bytes(model(name), stored)
        slots = pool_tokens(model(name), int(gib * GIB), stored)
        what = f"{name.split('/')[-1]}, {form}, slots in {gib:.2f} GiB"
        yield Figure(what, "vLLM log", f"{tokens:,}", slots, tokens, 0.005 * GIB / rate + 16)
    half = max_tokens(model("google/gemma-2-9b-it"), 344_064 * 8192, 1, bf16)
    yield exact("Gemma-2-9B, tokens in the bytes of 8,192 first tokens", "aiconfigurator #1201", half or 0, 4096 + 2 * 4096)
    for name, parameters in (
        ("openai-community/gpt2", 124_439_808),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("google/gemma-2-9b-it", 9_241_705_984),
    ):
        yield exact(
            f"{name.split('/')[-1]}, parameters",
            "the published count",
            count_parameters(configs[name]["config"], model(name)),
            parameters,
        )


def trace_figures(traces: Path) -> Iterator[Figure]:
    """What the Mooncake traces say of themselves: rows, block ids, different ones, and an infinite cache's hits."""
    for name, requests, ids, unique, rate in (
        ("conversation", 12_031, 288_500, 182_790, 0.3664),
        ("synthetic", 3_993, 121_877, 43_924, 0.6396),
    ):
        trace = read_trace(_trace(traces, f"{name}_trace.jsonl"))
        sharing = trace.sharing()
        if sharing is None:
            raise UsageError(f"{name}_trace.jsonl names no prefixes")
        what, source = f"Mooncake {name}", "the trace's rows"
        yield Figure(f"{what}, requests", source, f"{requests:,}", len(trace.requests), requests)
        yield Figure(f"{what}, block ids", source, f"{ids:,}", sharing.blocks, ids)
        yield Figure(f"{what}, different ids", source, f"{unique:,}", sharing.unique, unique)
        yield Figure(f"{what}, hits of an infinite cache", "1 - different / all", f"{rate:.2%}", sharing.hit_rate, rate, 5e-5)


# Kwon et al. 2023 (arXiv 2309.06180), figure 2: token states, in per cent of KV memory.
PAPER: tuple[tuple[Policy, float], ...] = (
    (Policy("max"), 20.4),
    (Policy("pow2"), 26.8),
    (Policy("oracle"), 38.2),
    (Policy("paged", 16), 96.3),
)


def paper_server() -> Server:
    """The paper's: OPT-13B in float16 on an A100 of 40 GB, 12 GiB of it for K and V (table 1), 2,048 positions."""
    weights = from_parameters(13_000_000_000, "float16", "stated parameters")
    model = Model("opt-13b", geometry_from_config(published_configs()["facebook/opt-13b"]["config"]), weights)
    gpu = get_gpu("a100-40")
    budget = split_budget(gpu.memory, 0.9, weights.total, 0, 1)
    return build_server(model, gpu, kv_format("float16"), budget, Limits(8192, 256, 2048), kv_bytes=12 * GIB)


def useful_shares(traces: Path, requests: int | None = None) -> list[list[float]]:
    """Token states over memory in use, in per cent: a row for each policy of PAPER, and in it the Azure conversation trace
    (its first `requests`, or all) with a buddy allocator, with first fit, and with prompts and outputs exchanged."""
    azure = first_requests(read_trace(_trace(traces, "AzureLLMInferenceTrace_conv.csv")), requests)
    exchanged = replace(azure, requests=tuple(replace(each, prompt=each.output, output=each.prompt) for each in azure.requests))
    server, jobs = paper_server(), (os.cpu_count() or 1) if requests is None else 1

    def column(trace: Trace, allocator: str) -> list[float]:
        ways = [replace(policy, allocator=allocator) for policy, _ in PAPER]
        return [100 * useful_share(outcome) for outcome in replay_all(trace, server, ways, jobs=jobs)]

    columns = column(azure, "buddy"), column(azure, "first-fit"), column(exchanged, "buddy")
    return [list(row) for row in zip(*columns, strict=True)]


def useful_table(traces: Path) -> list[str]:
    """Markdown: the paper's shares beside the replay's."""
    out = ["| reservation | paper, ShareGPT | Azure conversation | first fit | prompts and outputs exchanged |"]
    out.append("|---|---:|---:|---:|---:|")
    for (policy, printed), row in zip(PAPER, useful_shares(traces), strict=True):
        out.append(f"| {policy.label} | {printed}% | {' | '.join(f'{share:.1f}%' for share in row)} |")
    return out


def _trace(folder: Path, name: str) -> Path:
    """The file of that name in the folder or below it; UsageError where there is none."""
    found = next(iter(sorted(folder.rglob(name))), None)
    if found is None:
        raise UsageError(f"{folder} has no {name}")
    return found


def table(rows: list[Figure]) -> list[str]:
    """Markdown. A figure that is met within the rounding of what was printed says by how much that is."""
    out = ["| what | source | published | computed | |", "|---|---|---:|---:|---|"]
    for row in rows:
        show: Callable[[int | float], str] = "{:,}".format if isinstance(row.computed, int) else "{:,.4f}".format
        verdict = "NOT MET" if not row.met else "exact" if row.computed == row.expected else f"within {row.within:.4g}"
        out.append(f"| {row.what} | {row.source} | {row.published} | {show(row.computed)} | {verdict} |")
    return out


@click.command()
@click.option(
    "--write-configs", type=click.Path(file_okay=False, path_type=Path), help="Write the config.json files here instead."
)
@click.option("--traces", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Public traces to replay.")
def main(write_configs: Path | None, traces: Path | None) -> None:
    """Published figures of KV memory beside the planner's."""
    if write_configs:
        write_configs.mkdir(parents=True, exist_ok=True)
        for name, row in published_configs().items():
            (write_configs / f"{name.split('/')[-1]}.json").write_text(json.dumps(row["config"], indent=1), encoding="utf-8")
        return
    rows = list(trace_figures(traces) if traces else figures())
    click.echo("\n".join(table(rows)))
    if traces:
        click.echo("\n".join(["", *useful_table(traces)]))
    raise SystemExit(0 if all(row.met for row in rows) else 1)


if __name__ == "__main__":
    main()
