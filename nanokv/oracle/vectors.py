"""Cases as files, for kernels in any language: one safetensors file a case, a JSON manifest, and a results file to judge.

safetensors is a plain format (huggingface/safetensors, README): 8 bytes of header length, little-endian, then that much JSON
that names each tensor's dtype, shape and place, then the data.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from nanokv.errors import NanoKVError, UsageError
from nanokv.files import read_json
from nanokv.oracle.bounds import Arithmetic
from nanokv.oracle.case import Call, Case
from nanokv.oracle.check import conclude
from nanokv.oracle.formats import dtype_of
from nanokv.oracle.judge import Verdict, judge
from nanokv.oracle.layouts import unpack
from nanokv.oracle.reference import Solved
from nanokv.oracle.report import Report
from nanokv.oracle.spec import Spec

MANIFEST = "manifest.json"
FORMAT = 1
ANSWERS = {"expected_out": "out", "expected_lse": "lse", "bound_out": "bound", "bound_lse": "lse_bound"}
_TAGS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "F8_E4M3": "fp8"}
_WHOLE = {"I32": np.int32, "I64": np.int64}


class VectorsError(NanoKVError):
    """A file of vectors or results that is missing, damaged, or not what its manifest says."""


def write_vectors(directory: Path | str, specs: Iterable[Spec], arithmetic: Arithmetic | None = None) -> int:
    """Writes every case and the manifest; returns the bytes written. The directory appears whole or not at all.

    Raises UsageError where it exists, VectorsError where it cannot be written.
    """
    directory = Path(directory)
    if directory.exists():
        raise UsageError(f"{directory} exists: name a directory that does not")
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        cases = [_write_case(partial, f"{i:03}", Case(spec, arithmetic)) for i, spec in enumerate(specs)]
        if not cases:
            raise UsageError("there is no case to write")
        manifest = {"format": FORMAT, "cases": cases}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        written = sum(path.stat().st_size for path in partial.iterdir())
        partial.rename(directory)
    except OSError as error:
        raise VectorsError(f"{directory} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def _write_case(directory: Path, name: str, case: Case) -> dict[str, Any]:
    answers = case.packed()
    tensors = {**case.arrays(), **{file_name: answers[key] for file_name, key in ANSWERS.items()}}
    path = directory / f"{name}.safetensors"
    _save(path, tensors, {"name": name, "scale": repr(case.spec.score_scale)})  # for readers without a JSON parser
    return {
        "name": name,
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "about": case.spec.title(),
        "scale": case.spec.score_scale,
        "spec": case.spec.as_dict(),
        "arithmetic": asdict(case.arithmetic),
        "inputs": list(case.arrays()),
        "output": {"name": f"{name}.out", "dtype": case.spec.dtype, "shape": list(answers["out"].shape)},
    }


def _save(path: Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    from safetensors.numpy import save  # save_file() makes files that nobody else may read

    path.write_bytes(save({name: np.ascontiguousarray(array) for name, array in tensors.items()}, metadata))


def _load(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, deserialize

    try:
        entries: list[tuple[str, dict[str, Any]]] = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except OSError as error:
        raise VectorsError(f"{path} cannot be read: {error.strerror}") from None
    except SafetensorError as error:
        raise VectorsError(f"{path} is not a safetensors file: {error}") from None
    found = {}
    for name, entry in entries:
        tag = entry["dtype"]
        if tag not in _TAGS and tag not in _WHOLE:
            raise VectorsError(f"{path}: tensor {name} is of dtype {tag}, which no case has")
        dtype = np.dtype(_WHOLE[tag]) if tag in _WHOLE else dtype_of(_TAGS[tag])
        found[name] = np.frombuffer(bytes(entry["data"]), dtype=dtype).reshape(entry["shape"]).copy()
    return found


def write_results(path: Path | str, outputs: Mapping[str, np.ndarray]) -> None:
    """The results file: `outputs` maps "000.out" (and "000.lse", where there is one) to arrays."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        _save(partial, outputs)
        partial.replace(path)
    except OSError as error:
        raise VectorsError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)


def read_vectors(directory: Path | str) -> Iterator[tuple[str, Call]]:
    """Every case's name and call, from the files alone."""
    directory = Path(directory)
    for entry in _manifest(directory):
        tensors = _load(directory / entry["file"])
        yield entry["name"], Call(Spec.from_dict(entry["spec"]), {name: tensors[name] for name in entry["inputs"]})


def _manifest(directory: Path) -> list[dict[str, Any]]:
    path = directory / MANIFEST
    manifest = read_json(path, VectorsError)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or not isinstance(manifest.get("cases"), list):
        raise VectorsError(f"{path} is not a manifest of format {FORMAT}: write the vectors again")
    fields = {"name": str, "file": str, "sha256": str, "spec": dict, "arithmetic": dict, "inputs": list}
    for entry in manifest["cases"]:
        for name, kind in fields.items():
            if not isinstance(entry, dict) or not isinstance(entry.get(name), kind):
                raise VectorsError(f"{path}: a case has no {name}: write the vectors again")
    if not manifest["cases"]:
        raise VectorsError(f"{path} names no cases: nothing would be checked")
    return manifest["cases"]


def verify(directory: Path | str, *results: Path | str) -> Report:
    """Judges results files against the vectors they were computed from: the expected outputs and bounds are the files'.

    A missing output, a wrong shape or dtype are verdicts in the report. Raises VectorsError where vectors or results cannot be
    read, the vectors were changed, or two results files hold the same tensor.
    """
    directory = Path(directory)
    entries = _manifest(directory)
    outputs: dict[str, np.ndarray] = {}
    for path in map(Path, results):
        found = _load(path)
        twice = sorted(found.keys() & outputs.keys())
        if twice:
            raise VectorsError(f"{path} has a tensor {twice[0]}, which another results file has too: give each output once")
        outputs |= found
    judged, strange = [], []
    for entry in entries:
        case, same = _case_of(directory, entry)
        judged.append((case, _judged(case, entry["name"], outputs)))
        if not same:
            strange.append(entry["name"])
    known = {f"{entry['name']}.{what}" for entry in entries for what in ("out", "lse")}
    report = conclude(judged)
    if strange:
        report.diagnosis = None
        report.notes.append(f"no fault is named: this NumPy draws other numbers than the files hold (case {strange[0]})")
    for name in sorted(set(outputs) - known):
        report.notes.append(f"the results have a tensor {name!r} that belongs to no case")
    return report


def _judged(case: Case, name: str, outputs: Mapping[str, np.ndarray]) -> Verdict:
    out = outputs.get(f"{name}.out")
    if out is None:
        verdict = Verdict(case.spec)
        verdict.add("missing", f"the results have no tensor {name}.out")
        return verdict
    return judge(case, out, outputs.get(f"{name}.lse"))


def _case_of(directory: Path, entry: dict[str, Any]) -> tuple[Case, bool]:
    """The case with the files' answers, and whether its inputs are those that this program would draw."""
    path = directory / entry["file"]
    tensors = _load(path)
    if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
        raise VectorsError(f"{path} is not the file that the manifest names: it was changed; write the vectors again")
    missing = [name for name in (*ANSWERS, *entry["inputs"]) if name not in tensors]
    if missing:
        raise VectorsError(f"{path} has no tensor {missing[0]}: write the vectors again")
    try:
        case = Case(Spec.from_dict(entry["spec"]), Arithmetic(**entry["arithmetic"]))
    except (TypeError, UsageError) as error:
        raise VectorsError(f"{directory / MANIFEST}: case {entry['name']} is none of this version: {error}") from None
    drawn = case.arrays()
    same = all(tensors[name].tobytes() == drawn[name].tobytes() for name in entry["inputs"] if name in drawn)
    answers = {}
    for file_name, key in ANSWERS.items():
        answer = tensors[file_name]
        answers[key] = unpack(case.spec, answer[..., None])[..., 0] if file_name.endswith("lse") else unpack(case.spec, answer)
    case.expected = Solved(**answers)
    return case, same
