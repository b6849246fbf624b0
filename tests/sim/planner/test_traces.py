"""Traces: every kind of file, what is wrong with one by line and field, and the published counts of the public ones."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.errors import NanoKVError, UsageError
from sim.planner.traces import Request, Trace, first_requests, paced, poisson, read_trace
from tests.support import data

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def jsonl(*rows: object) -> str:
    return "\n".join(json.dumps(row) for row in rows)


def row(**changes: object) -> dict[str, object]:
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], **changes}


# The public traces. Counts: the traces' own rows; 36.64% and 63.96% follow from them as 1 - unique / all.


@pytest.mark.parametrize(
    ("name", "requests", "ids", "unique", "rate"),
    [("conversation", 12_031, 288_500, 182_790, 0.3664), ("synthetic", 3_993, 121_877, 43_924, 0.6396)],
)
def test_mooncake(name: str, requests: int, ids: int, unique: int, rate: float) -> None:
    path = data(f"traces/mooncake/{name}_trace.jsonl")
    trace = read_trace(path)
    sharing = trace.sharing()
    assert sharing is not None
    assert (len(trace.requests), sharing.blocks, trace.hash_block) == (requests, ids, 512)
    raw = [each for line in path.read_text().splitlines() for each in json.loads(line)["hash_ids"]]
    assert len(set(raw)) == unique
    assert sharing.unique == unique  # an id names all that stands before it: no id has two pasts
    assert round(sharing.hit_rate, 4) == rate


def test_mooncake_times_are_milliseconds() -> None:
    trace = read_trace(data("traces/mooncake/conversation_trace.jsonl"))
    assert 3500 < trace.requests[-1].arrival < 3600  # an hour


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output"), [("conv", 19_366, 1154.7, 211.1), ("code", 8_819, 2047.8, 27.9)]
)
def test_azure(name: str, requests: int, prompt: float, output: float) -> None:
    found = read_trace(data(f"traces/azure/AzureLLMInferenceTrace_{name}.csv")).requests
    assert len(found) == requests
    assert round(sum(each.prompt for each in found) / requests, 1) == prompt
    assert round(sum(each.output for each in found) / requests, 1) == output
    assert found[0].arrival == 0
    assert 3400 < found[-1].arrival < 3600


# Files.


@pytest.mark.parametrize("header", [
    AZURE, "arrived_at,num_prefill_tokens,num_decode_tokens\n", "Timestamp,Request tokens,Response tokens\n",
    "timestamp,input_length,output_length\n", "arrival,prompt_tokens,output_tokens\r\n",
])  # fmt: skip
def test_known_columns(tmp_path: Path, header: str) -> None:
    trace = read_trace(written(tmp_path, header + "3.5,10,4\r\n1.5,7,0\n"))
    assert trace.requests == (Request(0.0, 7, 0), Request(2.0, 10, 4))
    assert (trace.name, trace.hash_block, trace.timed) == ("trace.csv", None, True)


def test_other_columns_and_other_order(tmp_path: Path) -> None:
    path = written(tmp_path, "id,out,in,when\na,4,10,3\n")
    columns = {"arrival": "when", "prompt": "in", "output": "out"}
    assert read_trace(path, columns).requests == (Request(0.0, 10, 4),)


def test_without_arrivals(tmp_path: Path) -> None:
    assert not read_trace(written(tmp_path, "input_tokens,output_tokens\n3,4\n")).timed


@pytest.mark.parametrize("first", ["2023-11-16 18:17:03.9799600", "2024-05-10 00:00:03.979960+00:00"])
def test_dates(tmp_path: Path, first: str) -> None:
    """Azure's two spellings, seven digits and a zone. A double holds seconds since 1970 to 2**-22 = 2.4e-7."""
    second = first.replace("03.97", "05.47")
    trace = read_trace(written(tmp_path, f"{AZURE}{first},1,1\n{second},1,1"))
    assert trace.requests[1].arrival == pytest.approx(1.5, abs=2**-21)


def test_a_byte_order_mark_and_empty_lines(tmp_path: Path) -> None:
    assert len(read_trace(written(tmp_path, "\ufeff" + AZURE + "1,2,3\n\n ,,\n2,2,3\n\n")).requests) == 2
    assert len(read_trace(written(tmp_path, "\ufeff\n" + jsonl(row()) + "\n\n")).requests) == 1


def test_the_same_id_after_another_past_is_another_block(tmp_path: Path) -> None:
    rows = [row(hash_ids=[1, 9]), row(hash_ids=[2, 9]), row(hash_ids=[1, 9]), row(hash_ids=[1, 8])]
    requests = read_trace(written(tmp_path, jsonl(*rows))).requests
    first, other, again, branch = (request.prefix for request in requests)
    assert first == again
    assert not set(first) & set(other)
    assert first[0] == branch[0]
    assert first[1] != branch[1]


def test_json_without_ids_and_with_other_blocks(tmp_path: Path) -> None:
    plain = read_trace(written(tmp_path, jsonl({key: value for key, value in row().items() if key != "hash_ids"})))
    assert plain.hash_block is None
    assert plain.sharing() is None
    small = read_trace(written(tmp_path, jsonl(row(input_length=33, hash_ids=[1, 2, 3]))), hash_block=16)
    assert (small.hash_block, small.requests[0].prompt) == (16, 33)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(0, 10**6)), min_size=1, max_size=20))
def test_a_csv_comes_back_in_order_of_arrival(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.csv"
    path.write_text(AZURE + "".join(f"{time},{prompt},{output}\n" for time, prompt, output in rows))
    first = min(time for time, _, _ in rows)
    ordered = sorted(rows, key=lambda each: each[0])
    assert read_trace(path).requests == tuple(Request(float(time - first), *lengths) for time, *lengths in ordered)


# What is wrong, by line and field.


@pytest.mark.parametrize(("text", "message"), [
    (AZURE + "1,2,3\n2,-5,1\n", r"trace\.csv, line 3: ContextTokens -5 is negative"),
    (AZURE + "1,2,3\n2,5,\n", "line 3: GeneratedTokens is missing"),
    (AZURE + "1,2,3\n2,5\n", "line 3: GeneratedTokens is missing"),
    (AZURE + ",2,3\n", "line 2: TIMESTAMP is missing"),
    (AZURE + "1,2.5,3\n", "line 2: ContextTokens '2.5' is not a whole number"),
    (AZURE + "1,many,3\n", "line 2: ContextTokens 'many' is not a whole number"),
    (AZURE + "1,0,3\n", "line 2: the prompt has 0 tokens"),
    (AZURE + "noon,2,3\n", "line 2: TIMESTAMP 'noon' is neither a number nor a date"),
    (AZURE + "nan,2,3\n", "line 2: TIMESTAMP 'nan' is not a time"),
    (AZURE + "1e999,2,3\n", "line 2: TIMESTAMP '1e999' is not a time"),
    (AZURE + '1,"2"3,4\n', "line 2 is not CSV"),
    (AZURE + '1,"2', "line 2 is not CSV"),
    (AZURE, "holds no requests"),
    ("", r"has no column for the prompt tokens \(no columns\)"),
    ("a,b,c\n1,2,3\n", r"no column for the prompt tokens \(a, b, c\): name it with --columns prompt=NAME"),
    ("ContextTokens,c\n1,2\n", "no column for the output tokens"),
    ("ContextTokens,prompt_tokens,output_tokens\n1,2,3\n", "ContextTokens and prompt_tokens may both be the prompt"),
])  # fmt: skip
def test_a_bad_csv(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(NanoKVError, match=message):
        read_trace(written(tmp_path, text))


@pytest.mark.parametrize(("line", "message"), [
    (row(input_length=-1), "line 2: input_length -1 is negative"),
    (row(output_length=-1), "line 2: output_length -1 is negative"),
    (row(output_length=None), "line 2: output_length is missing"),
    (row(input_length=1.0), r"line 2: input_length 1\.0 is not a whole number"),
    (row(input_length=True), "line 2: input_length True is not a whole number"),
    (row(timestamp=None), "line 2: timestamp is missing"),
    (row(timestamp=True), "line 2: timestamp True is neither a number nor a date"),
    (row(timestamp=[1]), r"line 2: timestamp \[1\] is neither"),
    (row(hash_ids=[1]), "line 2: 1 hash_ids for a prompt of 600 tokens, which is 2 blocks of 512"),
    (row(hash_ids=[1, "2"]), "line 2: hash_ids is not a list of whole numbers"),
    (row(hash_ids=7), "line 2: hash_ids is not a list"),
    (row(input_length=0, hash_ids=[]), "line 2: the prompt has 0 tokens"),
    ([1], "line 2 is not a JSON object"),
])  # fmt: skip
def test_a_bad_line_of_json(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(NanoKVError, match=message):
        read_trace(written(tmp_path, jsonl(row(), line)))


def test_not_json(tmp_path: Path) -> None:
    with pytest.raises(NanoKVError, match="line 2 is not JSON"):
        read_trace(written(tmp_path, jsonl(row()) + "\n{"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NanoKVError, match=r"absent\.csv cannot be read"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(NanoKVError, match="cannot be read"):
        read_trace(tmp_path)
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\x80\x81")
    with pytest.raises(NanoKVError, match="is not UTF-8 text"):
        read_trace(path)


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no column 'x': it has a, b"):
        read_trace(written(tmp_path, "a,b\n1,2\n"), {"prompt": "x"})
    with pytest.raises(UsageError, match="--columns is for CSV"):
        read_trace(written(tmp_path, jsonl(row())), {"prompt": "x"})


# Arrivals.

TRACE = Trace("t", tuple(Request(float(at * at), at + 1, 1) for at in range(11)))


@pytest.mark.parametrize("rate", [0.1, 1.0, 250.0])
def test_paced_arrivals_keep_their_shape(rate: float) -> None:
    scaled = paced(TRACE, rate).requests
    assert 10 / scaled[-1].arrival == pytest.approx(rate)  # 10 gaps
    assert [each.arrival / scaled[-1].arrival for each in scaled] == pytest.approx([at * at / 100 for at in range(11)])
    assert [each.prompt for each in scaled] == [each.prompt for each in TRACE.requests]


def test_poisson_arrivals_follow_from_the_seed() -> None:
    many = Trace("t", (Request(0.0, 1, 1),) * 20_000, timed=False)
    one, again, other = (poisson(many, 5.0, seed).requests for seed in (1, 1, 2))
    assert one == again
    assert one != other
    # The mean of n gaps has a relative deviation of 1 / sqrt(n) = 0.7%; five of them.
    assert len(one) / one[-1].arrival == pytest.approx(5.0, rel=5 / 20_000**0.5)
    assert one[0].arrival == 0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_rates(rate: float) -> None:
    with pytest.raises(UsageError, match="rate .* out of range"):
        paced(TRACE, rate)
    with pytest.raises(UsageError, match="rate .* out of range"):
        poisson(TRACE, rate, 0)


def test_one_moment_cannot_be_paced() -> None:
    with pytest.raises(UsageError, match="all requests of t arrive at once"):
        paced(Trace("t", (Request(0.0, 1, 1),) * 3), 1.0)


def test_the_first_requests() -> None:
    assert first_requests(TRACE, 3).requests == TRACE.requests[:3]
