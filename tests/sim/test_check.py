"""The check of measured latencies: what it accuses, what it sets aside, what it cannot read."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import NanoKVError, UsageError
from sim.check import Columns, Row, as_dict, judge, read_rows, worst
from sim.formats import FORMATS
from sim.gpus import get_gpu
from sim.roofline import minimum_bytes, minimum_flops
from sim.shape import Shape

A100 = get_gpu("a100-80")
L2 = A100.l2 or 0
BRAIN = FORMATS["bfloat16"]
HEAD = "gpu,q_heads,kv_heads,batch,kv_len,us\n"


def decode(batch: int, length: int, us: float) -> Row:
    return Row(2, Shape(length, 64, 128, 1, 8, batch, dtype=BRAIN), us * 1e-6)


def rows(path: Path, columns: Columns | None = None, **more: object) -> list[Row]:
    return list(read_rows(path, columns or Columns(), **{"causal": True, "head_dim": 128, "dtype": BRAIN, **more}))


@given(st.integers(1, 512), st.integers(1, 1 << 17), st.floats(0.1, 1e6))
def test_a_row_is_accused_exactly_below_its_bound(batch: int, length: int, us: float) -> None:
    row = decode(batch, length, us)
    nbytes, flops = minimum_bytes(row.shape), minimum_flops(row.shape)
    cold = max(nbytes / 2039e9, flops / 312e12)
    warm = max(max(0, nbytes - L2) / 2039e9, flops / 312e12)
    for flag, bound in ((True, cold), (False, warm)):
        verdict = judge(iter([row]), A100, cold=flag)
        assert bool(verdict.impossible) == (row.seconds < bound)
        assert verdict.set_aside == (not flag and nbytes <= L2)
        assert verdict.rows + verdict.set_aside == 1


def test_a_benchmark_without_values_is_found() -> None:
    """AIConfigurator issue 1379: keys only. The K bytes at 76% of the bandwidth and 31 us are faster than K and V can be."""
    row = decode(16, 16384, 0)
    half = minimum_bytes(row.shape) // 2
    timed = replace(row, seconds=31e-6 + half / (0.76 * A100.bandwidth))
    (found,) = judge(iter([timed]), A100).impossible
    assert found.limit == "memory"
    assert 1.2 < found.factor < 1.69
    right = replace(row, seconds=31e-6 + 2 * half / (0.76 * A100.bandwidth))
    assert judge(iter([right]), A100).impossible == []


def test_prefill_is_held_against_the_arithmetic() -> None:
    shape = Shape(8192, 32, 128, kv_heads=8, dtype=BRAIN)
    bound = minimum_flops(shape) / 312e12
    slow, fast = (Row(2, shape, bound * factor) for factor in (1.01, 0.99))
    (found,) = judge(iter([slow, fast]), A100).impossible
    assert (found.row, found.limit) == (fast, "compute")


def test_the_worst_come_first_and_the_object_has_all() -> None:
    verdict = judge(iter([decode(64, 4096, us) for us in (300, 100, 200)]), A100)
    assert [round(each.row.seconds * 1e6) for each in worst(verdict, 2)] == [100, 200]
    found = as_dict(verdict)
    assert (found["rows"], found["set_aside"], len(found["impossible"])) == (3, 0, 3)
    assert found["impossible"][0]["factor"] == verdict.impossible[0].factor


def test_columns_units_and_filters(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("card, H ,KV,b,n,ms,D\nx,32,8,2,4096,0.5,64\ny,32,8,2,4096,0.5,64\n")
    columns = Columns("ms", "ms", "b", "H", "KV", "n", "D")
    (row,) = rows(path, columns, only={"card": "y"})
    assert (row.line, row.seconds) == (3, 0.5e-3)
    assert row.shape == Shape(4096, 32, 64, 1, 8, 2, dtype=BRAIN)
    path.write_text("q_heads,kv_heads,batch,seq,us\n8,8,1,64,5\n")
    assert rows(path, causal=False)[0].shape == Shape(64, 8, 128, 64, 8, 1, causal=False, dtype=BRAIN)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("A,8,8,1,64,nan", "line 2: us 'nan' is not a positive time"),
        ("A,8,8,1,64,inf", "line 2: us 'inf' is not a positive time"),
        ("A,8,8,1,64,-1", "line 2: us '-1' is not a positive time"),
        ("A,8,8,1,64,fast", "line 2: us 'fast' is not a number"),
        ("A,8,8,1,64", "line 2: us None is not a number"),
        ("A,8,3,1,64,5", "line 2: heads 8 is not divisible by kv_heads 3"),
        ("A,8,8,1,6.5,5", "line 2: kv_len '6.5' is not a whole number"),
        ("A,8,8,0,64,5", "line 2: batch '0' is not a whole number above 0"),
        ("A,8,8,inf,64,5", "line 2: batch 'inf' is not a whole number above 0"),
        ("A,8,8,nan,64,5", "line 2: batch 'nan' is not a whole number above 0"),
        ('A,8,8,1,64,"5', "is not a CSV file"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(HEAD + line + "\n")
    with pytest.raises(NanoKVError, match=message) as caught:
        rows(path)
    assert "\n" not in str(caught.value)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with pytest.raises(NanoKVError, match="cannot read"):
        rows(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(NanoKVError, match="is not a CSV file"):
        rows(path)
    path.write_text("")
    with pytest.raises(UsageError, match="has no column kv_len or context or seq or seq_len; it has none"):
        rows(path)
    path.write_text("q_heads,kv_heads,kv_len,us\n")
    with pytest.raises(UsageError, match="has no column 'batch'; it has q_heads, kv_heads, kv_len, us"):
        rows(path)
    path.write_text(HEAD)
    with pytest.raises(UsageError, match="has no column 'card'"):
        rows(path, only={"card": "x"})
