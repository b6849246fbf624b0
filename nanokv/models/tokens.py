"""What every model asks of the ids and positions that it is given."""

import numpy as np

from nanokv.errors import CapacityError, TokenizerError, UsageError


def check_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Host ids [R], at least one, each within the vocabulary -> int64."""
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size == 0:
        raise UsageError(f"expected a list of at least one token id, not shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise UsageError(f"token ids must be whole numbers, not {array.dtype}")
    if array.min() < 0 or array.max() >= vocab_size:
        bad = int(array.min()) if array.min() < 0 else int(array.max())
        raise TokenizerError(f"token id {bad} is not in the vocabulary (0 .. {vocab_size - 1})")
    return array.astype(np.int64)


def check_positions(positions: np.ndarray, count: int) -> None:
    """CapacityError for a position that a model of `count` positions does not have."""
    if positions.max() >= count:
        raise CapacityError(f"position {positions.max()} is past the model's {count} positions (0 is the first)")
