"""A kernel in C on trial without files: `python examples/oracle/c_kernel.py`. Copy, put your own function in.

ctypes hands over the pointers of a call's arrays. A kernel that may crash is better run on files (read_vectors.c).
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from nanokv import oracle

SOURCE = """
#include <math.h>
#include <stdint.h>
#include <string.h>

/* vLLM's layout, float32: caches [blocks, block_size, kv_heads, dim], tables [sequences, most blocks] */
void paged_attention(const float *q, const float *k_cache, const float *v_cache, const int32_t *tables, const int32_t *lens,
                     const int32_t *starts, int sequences, int columns, int heads, int kv_heads, int dim, int size, float scale,
                     float *p, float *out) {
    for (int b = 0; b < sequences; b++)
        for (int row = starts[b]; row < starts[b + 1]; row++)
            for (int h = 0; h < heads; h++) {
                int head = h / (heads / kv_heads), seen = lens[b] - starts[b + 1] + row + 1;
                float *o = out + ((long)row * heads + h) * dim, top = -INFINITY, sum = 0;
                memset(o, 0, sizeof(float) * dim);
                for (int j = 0; j < seen; j++) {
                    long slot = (long)tables[b * columns + j / size] * size + j % size;
                    p[j] = 0;
                    for (int d = 0; d < dim; d++)
                        p[j] += q[((long)row * heads + h) * dim + d] * k_cache[(slot * kv_heads + head) * dim + d];
                    p[j] *= scale;
                    if (p[j] > top) top = p[j];
                }
                for (int j = 0; j < seen; j++) {
                    long slot = (long)tables[b * columns + j / size] * size + j % size;
                    float weight = expf(p[j] - top);
                    sum += weight;
                    for (int d = 0; d < dim; d++) o[d] += weight * v_cache[(slot * kv_heads + head) * dim + d];
                }
                for (int d = 0; d < dim && seen > 0; d++) o[d] /= sum;
            }
}
"""


def built(folder, source=SOURCE):
    """The function, from a shared library that the C compiler makes in `folder`."""
    code, library = Path(folder) / "kernel.c", Path(folder) / "kernel.so"
    code.write_text(source)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, code, "-lm"], check=True)
    return ctypes.CDLL(str(library)).paged_attention


def kernel_of(function):
    def kernel(call):
        out, scratch = np.empty_like(call.q), np.empty(int(call.seq_lens.max()) + 1, np.float32)
        given = (call.q, call.k_cache, call.v_cache, call.block_tables, call.seq_lens, call.query_start_loc)
        sizes = (
            len(call.seq_lens),
            call.block_tables.shape[1],
            call.num_heads,
            call.num_kv_heads,
            call.head_dim,
            call.block_size,
        )
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*given, scratch, out)]
        function(*pointers[:6], *sizes, ctypes.c_float(call.scale), *pointers[6:])
        return out

    return kernel


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(oracle.check(kernel_of(built(folder)), layout="vllm", dtype="float32"))
