"""llama.cpp through its Python binding, for benchmarks and tests: a model in float32, its logits, one step at a time."""

from pathlib import Path
from typing import Any

import numpy as np

from nanokv.gguf_header import read_header


class LlamaCpp:
    """A GGUF file in llama.cpp, keys and values in float32, on the CPU alone. Tokens go in as we give them, nothing before
    them."""

    def __init__(self, path: Path, threads: int, context: int):
        import llama_cpp

        self._lib = llama_cpp
        self._model: Any = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=context, n_ubatch=context, n_threads=threads, n_threads_batch=threads,
            n_gpu_layers=0, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, flash_attn=False,
            logits_all=False, use_mmap=True, verbose=False,
        )  # fmt: skip

    @property
    def version(self) -> str:
        return str(self._lib.__version__)

    def reset(self) -> None:
        """Forgets every token."""
        self._model.reset()
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._model.ctx), True)

    def feed(self, tokens: list[int]) -> np.ndarray:
        """Tokens that follow those fed before -> the logits [V] after the last."""
        self._model.eval(tokens)
        pointer = self._lib.llama_get_logits_ith(self._model.ctx, -1)
        return np.ctypeslib.as_array(pointer, shape=(self._model.n_vocab(),)).copy()


def write_float32(source: Path, target: Path) -> Path:
    """The same GGUF with every tensor dequantised to F32: what float32 arithmetic on these weights is measured with."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

    metadata = read_header(source).metadata
    reader = GGUFReader(source)
    writer = GGUFWriter(target, metadata["general.architecture"])
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=inner)
    writer.add_file_type(0)
    for tensor in reader.tensors:
        if tensor.tensor_type == GGMLQuantizationType.F32:
            values = np.array(tensor.data, np.float32)
        else:
            values = quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32, copy=False))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
