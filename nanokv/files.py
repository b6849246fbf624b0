"""Text and JSON files, read whole; whatever is wrong with one is a single line that names it."""

import json
from pathlib import Path
from typing import Any

from nanokv.errors import NanoKVError

MAX_BYTES = 1 << 28  # several times the largest vocabulary in use; beyond it a file is not what its name says


def read_text(path: Path, error: type[NanoKVError]) -> str:
    """The UTF-8 text of a file, line ends as they are. Raises `error` when it is absent, too large or not text."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise error(f"{path} is larger than {MAX_BYTES >> 20} MiB: it is not the text file that its name says")
        return path.read_bytes().decode("utf-8")
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}") from None
    except UnicodeDecodeError as reason:
        raise error(f"{path} is not UTF-8 text (byte {reason.start}): it may be cut or another kind of file") from None


def read_json(path: Path, error: type[NanoKVError]) -> Any:
    """What a JSON file holds. Raises `error` as read_text() does, and when it is not JSON."""
    text = read_text(path, error)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as reason:  # also a number with too many digits, arrays nested too deep
        raise error(f"{path} is not JSON: {reason}") from None
