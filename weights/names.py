"""Which tensors a checkpoint holds against which it should: what every architecture's reader asks."""

import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from nanokv.backend import Array, Backend
from nanokv.errors import CheckpointError
from weights.tensors import StoredTensor

Shapes = Mapping[str, tuple[int, ...]]
SHOWN = 4  # names in a message


def without_prefix(tensors: Mapping[str, StoredTensor], prefix: str) -> dict[str, StoredTensor]:
    """By names without `prefix`, which some files have and some do not. One tensor under both is a CheckpointError."""
    plain: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if (short := name.removeprefix(prefix)) in plain:
            raise CheckpointError(f"{tensor} is there twice, with and without {prefix!r}")
        plain[short] = tensor
    return plain


def check_tensors(tensors: Mapping[str, StoredTensor], shapes: Shapes, ignored: Collection[str], where: Path) -> None:
    """Every tensor of `shapes` is there in its shape, and no other but the `ignored`. Raises CheckpointError."""
    if unknown := [name for name in tensors if name not in shapes and name not in ignored]:
        raise CheckpointError(f"{where} holds tensors that a model of its configuration does not have: {some(unknown)}")
    if missing := [name for name in shapes if name not in tensors]:
        raise CheckpointError(f"{where} lacks tensors that its configuration asks for: {some(missing)}")
    for name, shape in shapes.items():
        tensors[name].check(shape)


def tie(tensors: dict[str, StoredTensor], embedding: str, head: str, where: Path, tied: bool) -> None:
    """Gives embedding and head one entry in `tensors` each: the same in a tied model that stores one of them. An untied one
    that stores no head is a CheckpointError."""
    if tied and (stored := tensors.get(embedding) or tensors.get(head)):
        tensors.setdefault(embedding, stored)
        tensors.setdefault(head, stored)
    if head not in tensors and embedding in tensors:
        raise CheckpointError(f"{where} holds no {head}, and its configuration says that head and embedding are not tied")


def read_ends(embedding: StoredTensor, head: StoredTensor, dtype: str, backend: Backend, tied: bool) -> tuple[Array, Array]:
    """Embedding and head: one array where they are one tensor, or equal in a model that says that they are tied. Where
    they differ though it says so, both, with a warning, as transformers 5 does."""
    values = embedding.read(dtype)
    first = backend.from_numpy(values)
    if head is embedding or (tied and head.equals(values)):
        return first, first
    if tied:
        warnings.warn(f"{head} differs from the embedding though the model is said to be tied: both are used", stacklevel=3)
    return first, backend.from_numpy(head.read(dtype))


def some(names: Iterable[str]) -> str:
    """The first few names and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
