// A block of 1024 threads with one row of a vocabulary: sums by the long sum rule of docs/numerics.md.
#pragma once
#include "common.cuh"

#define ROW_THREADS 1024
#define BLOCK_WARPS (ROW_THREADS / WARP)
#define PIECE 1024  // numbers that the sum rule takes at once in a long sum

// The long sums of N rows of n numbers that are never negative, in every thread: numbers(i, values) gives the N numbers at
// place i and is called once for each. `room`: N * 32 words of shared memory. Ends with a barrier.
template <int N, class Numbers>
__device__ __forceinline__ void long_sums(int n, Shared<float> room, const Numbers& numbers, float* totals) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int s = 0; s < N; s++) totals[s] = 0.0f;
    for (int from = 0; from < n; from += BLOCK_WARPS * PIECE) {  // a warp a piece
        int begin = from + warp * PIECE, end = min(begin + PIECE, n);
        float low[N], high[N], values[N];
#pragma unroll
        for (int s = 0; s < N; s++) low[s] = high[s] = 0.0f;
        for (int i = begin + lane; i < end; i += 2 * WARP) {
            numbers(i, values);
#pragma unroll
            for (int s = 0; s < N; s++) low[s] = low[s] + values[s];
            if (i + WARP >= end) continue;
            numbers(i + WARP, values);
#pragma unroll
            for (int s = 0; s < N; s++) high[s] = high[s] + values[s];
        }
#pragma unroll
        for (int s = 0; s < N; s++) {
            float sum = sum_lanes(low[s], high[s]);
            if (lane == 0) room[s * BLOCK_WARPS + warp] = sum;
        }
        __syncthreads();
        int pieces = min(BLOCK_WARPS, (n - from + PIECE - 1) / PIECE);
        for (int piece = 0; piece < pieces; piece++)
#pragma unroll
            for (int s = 0; s < N; s++) totals[s] = totals[s] + room[s * BLOCK_WARPS + piece];
        __syncthreads();
    }
}
