// Softmax of long rows.
#include "vocab.cuh"

// x, out [R, V]. A block a row, 1024 threads, 2 * 32 words of shared memory. A row without any number above minus infinity
// gives zeros.
__global__ void __launch_bounds__(ROW_THREADS) softmax(In<float> x, Out<float> out, int vocab) {
    In<float> from = x + (long long)blockIdx.x * vocab;
    Out<float> to = out + (long long)blockIdx.x * vocab;
    Shared<float> tops = shared<float>(0), room = shared<float>(BLOCK_WARPS);
    float top = LOWEST, total;
    for (int i = threadIdx.x; i < vocab; i += ROW_THREADS) top = fmaxf(top, from[i]);
    top = warp_max(top);
    if (threadIdx.x % WARP == 0) tops[threadIdx.x / WARP] = top;
    __syncthreads();
    top = warp_max(tops[threadIdx.x % WARP]);
    long_sums<1>(vocab, room, [&](int i, float* value) {
        value[0] = exp_negative(from[i] - top);
        to[i] = value[0];
    }, &total);
    for (int i = threadIdx.x; i < vocab; i += ROW_THREADS) to[i] = total == 0.0f ? 0.0f : __fdiv_rn(to[i], total);
}
