"""Sweeps: axes, and the same rows however they are computed."""

import sys

import pytest

from nanokv.errors import NanoKVError, UsageError
from sim.gpus import get_gpu
from sim.run import simulate
from sim.shape import Shape, TileSize
from sim.sweep import Point, parse_axis, points, run_points

A100 = get_gpu("a100-80")


def made(*axes: str, shape: Shape | None = None, algorithms: tuple[str, ...] = ()) -> list[Point]:
    return points(axes, shape or Shape(1024), A100, None, algorithms, {})


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("tile=16..512", ["16", "32", "64", "128", "256", "512"]),
        ("seq=1k..1m", [str(1024 << i) for i in range(11)]),
        ("seq=3..13", ["3", "6", "12"]),
        ("seq=1k,3k", ["1024", "3072"]),
        ("tile=64x128,auto", ["64x128", "auto"]),
        ("dtype=float16,int8", ["float16", "int8"]),
    ],
)
def test_an_axis(text: str, values: list[str]) -> None:
    assert parse_axis(text) == (text.partition("=")[0], values)


@pytest.mark.parametrize(
    "text", ["seq", "foo=1", "seq=", "seq=1,,2", "seq=0..4", "seq=8..4", "seq=a..b", "dtype=a..b", "seq=1.5", "seq=-1"]
)
def test_a_bad_axis_is_one_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_axis(text)
    assert "\n" not in str(caught.value)


def test_points_cross_the_axes_and_followers_follow() -> None:
    found = made("seq=64,128", "heads=8,16", "dtype=float16,bfloat16")
    assert [tuple(point.labels.values()) for point in found][:3] == [
        ("64", "8", "float16"),
        ("64", "8", "bfloat16"),
        ("64", "16", "float16"),
    ]
    assert all(point.shape.rows == point.shape.seq for point in found)
    assert all(point.shape.num_kv_heads == point.shape.heads for point in found)
    assert all(point.shape.kv == point.shape.dtype for point in found)
    fixed = made("seq=64,128", shape=Shape(1024, 8, q_len=1, kv_heads=2))
    assert [(point.shape.rows, point.shape.num_kv_heads) for point in fixed] == [(1, 2), (1, 2)]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["seq=1..4", "seq=8"], "twice"),
        (["seq=1..1m"] * 1 + ["heads=1..1m", "batch=1..1m", "head_dim=1..1m"], "points are more"),
    ],
)
def test_points_that_make_no_sense_are_refused(axes: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made(*axes)


def test_a_point_of_a_sweep_is_the_single_answer() -> None:
    rows = run_points(made("tile=64,128", "seq=1k,4k", algorithms=("flash2",)))
    for row in rows:
        size = TileSize(*map(int, row["tile"].split("x")))
        alone = simulate(Shape(row["seq"]), A100, ["flash2"], size).results["flash2"]
        assert (row["hbm_bytes"], row["flops"], row["time_s"]) == (alone.hbm, alone.counts.flops, alone.bound.seconds)


def test_a_tile_that_does_not_fit_has_no_row() -> None:
    rows = run_points(made("tile=128,256,512", algorithms=("flash2",)))
    assert [row["tile"] for row in rows] == ["128x128"]


def test_decode_points_have_decode_algorithms() -> None:
    rows = run_points(made("seq=64", shape=Shape(1024, q_len=1)))
    assert {row["algorithm"] for row in rows} == {"naive", "decode-per-head", "decode", "split-kv", "paged"}


def test_progress_advances_once_a_point() -> None:
    done: list[int] = []
    run_points(made("seq=64..512"), None, lambda: done.append(1))
    assert len(done) == 4


def test_processes_give_the_same_rows() -> None:
    pytest.importorskip("joblib", reason="not run: needs joblib (pip install 'nanokv[sweep]')")
    found = made("tile=32..128", "seq=256..2k")
    assert run_points(found, "2") == run_points(found, "1") == run_points(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_dask_cluster_gives_the_same_rows() -> None:
    distributed = pytest.importorskip("distributed", reason="not run: needs Dask (pip install 'nanokv[sweep]')")
    found = made("tile=32..128", "seq=256..2k")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None, processes=False) as cluster:
        assert run_points(found, cluster.scheduler_address) == run_points(found)


def test_a_missing_extra_is_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, workers in (("joblib", "2"), ("distributed", "tcp://127.0.0.1:1")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(NanoKVError, match=rf"--workers needs {module}: pip install 'nanokv\[sweep\]'"):
            run_points(made("seq=64"), workers)


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ("0", "at least 1"),
        ("4096", "more than 1024"),
        *((each, "neither a number of processes nor an address") for each in ("-1", "two", "2.5", "tcp://", "host:", "")),
    ],
)
def test_bad_workers_are_refused_before_anything_starts(workers: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        run_points(made("seq=64"), workers)
    assert "\n" not in str(caught.value)
