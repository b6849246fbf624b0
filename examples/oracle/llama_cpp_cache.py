"""llama.cpp's KV cache on trial, through its Python binding: `python examples/oracle/llama_cpp_cache.py MODEL.gguf`.

Every text is fed at once, token by token, in batches, after a truncation (llama_memory_seq_rm), in and beside a fork
(llama_memory_seq_cp), and together with others in one batch, and compared bit for bit with the text fed at once.
"""

import sys
from dataclasses import dataclass

import llama_cpp
import numpy as np

from nanokv import oracle

SEQUENCES = 8
FORMATS = {"f32": llama_cpp.GGML_TYPE_F32, "f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)  # the library keeps a pointer to it


@dataclass
class Sequence:
    """A state: one sequence of the cache."""

    number: int
    length: int = 0


class LlamaCpp:
    """A model and a cache of `context` tokens for several sequences, on one thread. `ubatch`: tokens that llama.cpp computes
    at once, however many it is given."""

    def __init__(self, path: str, kv: str = "f32", flash: bool = False, ubatch: int = 512, context: int = 512):
        llama_cpp.llama_log_set(SILENT, None)
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = context, context, ubatch
        settings.n_threads = settings.n_threads_batch = 1
        settings.n_seq_max, settings.kv_unified = SEQUENCES, True
        settings.type_k = settings.type_v = FORMATS[kv]
        settings.flash_attn_type = int(flash)
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp takes no {kv} cache with flash attention {'on' if flash else 'off'} for this model")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(context, 0, 1)
        self._forks = 0
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def new(self) -> Sequence:
        """An empty sequence, the only one: whatever the cache held is gone."""
        llama_cpp.llama_memory_clear(self._memory, True)
        self._forks = 0
        return Sequence(0)

    def step(self, ids: np.ndarray, state: Sequence) -> np.ndarray:
        return self._decode([(state, ids)])

    def truncate(self, state: Sequence, length: int) -> None:
        if not llama_cpp.llama_memory_seq_rm(self._memory, state.number, length, -1):
            raise RuntimeError("llama_memory_seq_rm refused")
        state.length = length

    def fork(self, state: Sequence) -> Sequence:
        self._forks += 1
        llama_cpp.llama_memory_seq_cp(self._memory, state.number, self._forks, 0, -1)
        return Sequence(self._forks, state.length)

    def together(self, texts: list[np.ndarray]) -> list[np.ndarray]:
        """The texts' first halves in one batch, then their second halves."""
        self.new()
        states = [Sequence(i) for i in range(len(texts))]
        halves = []
        for pieces in zip(*(np.array_split(text, 2) for text in texts), strict=True):
            logits = self._decode(list(zip(states, pieces, strict=True)))
            halves.append(np.split(logits, np.cumsum([len(piece) for piece in pieces])[:-1]))
        return [np.concatenate(both) for both in zip(*halves, strict=True)]

    def _decode(self, fed: list[tuple[Sequence, np.ndarray]]) -> np.ndarray:
        """One batch of several sequences' next tokens -> the logits of each of them."""
        batch, row = self._batch, 0
        for state, ids in fed:
            for token in ids.tolist():
                batch.token[row], batch.pos[row], batch.logits[row] = token, state.length, 1
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, state.number
                state.length, row = state.length + 1, row + 1
        batch.n_tokens = row
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode found no room in the cache")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=(row, self.vocabulary)).copy()


def check(subject: LlamaCpp, **how: object) -> oracle.CacheReport:
    """Three texts of random tokens. `how` goes to check_cache()."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, subject.vocabulary, count) for count in (2, 9, 40)]
    return oracle.check_cache(
        subject.step, prompts, subject.new, copy=subject.fork, truncate=subject.truncate, batch=subject.together, **how
    )


if __name__ == "__main__":
    for kv in FORMATS:
        for flash in (False, True):
            print(f"{kv} cache, flash attention {'on' if flash else 'off'}")
            try:
                subject = LlamaCpp(sys.argv[1], kv, flash)
            except RuntimeError as error:
                print(f"not run: {error}")
                continue
            print(check(subject))
            subject.close()
