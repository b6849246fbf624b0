// Greedy decoding: the most likely token of each row, the lowest id of equals.
#include "common.cuh"

#define CHOOSERS 1024

// logits [R, V] -> tokens [R]. A block a row, 1024 threads, 2 * 32 words of shared memory. A row without any number (all
// NaN) gives token 0.
__global__ void __launch_bounds__(CHOOSERS) argmax(In<float> logits, Out<int> tokens, int vocab) {
    In<float> row = logits + (long long)blockIdx.x * vocab;
    float best = MINUS_INFINITY;
    int token = 0x7fffffff, thread = threadIdx.x;
    for (int i = thread; i < vocab; i += CHOOSERS) {
        float value = row[i];
        if (value > best || (value == best && i < token)) best = value, token = i;
    }
    Shared<float> bests = shared<float>(0);
    Shared<int> choices = shared<int>(WARP);
    for (int round = 0; round < 2; round++) {
        for (int apart = WARP / 2; apart; apart /= 2) {
            float other = __shfl_xor_sync(ALL_LANES, best, apart);
            int its = __shfl_xor_sync(ALL_LANES, token, apart);
            if (other > best || (other == best && its < token)) best = other, token = its;
        }
        if (round == 0) {
            if (thread % WARP == 0) {
                bests[thread / WARP] = best;
                choices[thread / WARP] = token;
            }
            __syncthreads();
            best = bests[thread % WARP];
            token = choices[thread % WARP];
        }
    }
    if (thread == 0) tokens[blockIdx.x] = token == 0x7fffffff ? 0 : token;
}
