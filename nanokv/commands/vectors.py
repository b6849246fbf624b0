"""`vectors`: cases for somebody's attention kernel, as files."""

from pathlib import Path

import click

from nanokv.errors import UsageError

LAYOUTS = ["contiguous", "hf", "vllm", "flashinfer-nhd", "flashinfer-hnd"]
FEATURES = ["window", "sinks", "alibi", "softcap", "scale", "rope", "full"]
DTYPES = ["float64", "float32", "float16", "bfloat16", "fp64", "fp32", "fp16", "bf16"]


@click.command()
@click.option("-o", "--output", "directory", required=True, type=click.Path(path_type=Path), help="A directory to create.")
@click.option(
    "--layout", default="contiguous", show_default=True, type=click.Choice(LAYOUTS), help="How K and V lie in memory."
)
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(DTYPES), help="Of q and the output.")
@click.option("--kv-dtype", help="Of K and V: also int8 or fp8, with scales.  [default: as --dtype]")
@click.option(
    "--scales",
    default="head",
    show_default=True,
    type=click.Choice(["tensor", "head", "token"]),
    help="What int8 and fp8 have one scale for.",
)
@click.option("--heads", type=click.IntRange(1), help="Query heads.  [default: several shapes]")
@click.option("--kv-heads", type=click.IntRange(1), help="Key-value heads.  [default: several shapes]")
@click.option("--head-dim", default=64, show_default=True, type=click.IntRange(1), help="Width of a head.")
@click.option("--block-size", type=click.IntRange(1), help="Tokens a block.  [default: several sizes]")
@click.option(
    "--feature", "features", multiple=True, type=click.Choice(FEATURES), help="What else the kernel does; may be repeated."
)
@click.option(
    "--phase",
    "phases",
    multiple=True,
    type=click.Choice(["prefill", "chunked", "decode"]),
    help="May be repeated.  [default: all]",
)
@click.option(
    "--arithmetic",
    default="fused",
    show_default=True,
    type=click.Choice(["fused", "eager"]),
    help="eager: scores are stored in --dtype; wider bounds.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the values.")
def vectors(
    directory: Path,
    layout: str,
    dtype: str,
    kv_dtype: str | None,
    scales: str,
    heads: int | None,
    kv_heads: int | None,
    head_dim: int,
    block_size: int | None,
    features: tuple[str, ...],
    phases: tuple[str, ...],
    arithmetic: str,
    seed: int,
) -> None:
    """Write inputs, expected outputs and error bounds of attention, for a kernel in any language.

    One safetensors file a case and manifest.json. Run the kernel on each, save what it gives as 000.out, 001.out, … in one
    safetensors file, and let `verify` judge it.
    """
    from nanokv.oracle.bounds import default_arithmetic
    from nanokv.oracle.formats import format_of
    from nanokv.oracle.suite import PHASES, suite
    from nanokv.oracle.vectors import write_vectors

    if (heads is None) != (kv_heads is None):
        raise UsageError("--heads and --kv-heads go together: give both or neither")
    specs = suite(layout, dtype, kv_dtype, features, phases or PHASES, heads, kv_heads, head_dim, block_size, scales, seed)
    written = write_vectors(directory, specs, default_arithmetic(format_of(dtype).name, arithmetic))
    click.echo(f"{len(specs)} cases, {written / 1e6:.1f} MB, in {directory}")
