"""What nanokv.sampling's parameters are on a card: choose.cu's tables, in host memory, a row a sequence.

Symbols: R rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from nanokv.kernels.cuda.launches import Choice
from nanokv.sampling import SamplingParams


def host_choice(
    params: Sequence[SamplingParams], histories: Sequence[Sequence[int]], uniform: Sequence[float], vocab: int
) -> Choice:
    """Parameters of each row, the tokens that occurred in it, and its uniform number, all rounded to float32."""
    settings = [(p.temperature, p.top_p, p.min_p, p.repetition_penalty) for p in params]
    with np.errstate(over="ignore"):  # a temperature beyond float32 is infinite there: all tokens weigh the same
        numbers = np.array(settings, np.float64).reshape(-1, 4).astype(np.float32)
    return Choice(
        np.stack([seen_bits(history, vocab) for history in histories]),
        numbers,
        np.array([min(p.top_k, vocab) for p in params], np.int32),
        np.array(uniform, np.float32),
    )


def seen_bits(history: Sequence[int], vocab: int) -> np.ndarray:
    """Tokens -> [ceil(V / 32)] uint32: bit t % 32 of word t // 32 says that token t occurred."""
    flags = np.zeros(-(-vocab // 32) * 32, np.uint8)
    flags[np.asarray(history, dtype=np.int64)] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)
