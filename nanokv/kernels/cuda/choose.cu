// From logits to the next token: greedy choice, and sampling with the meaning of nanokv/sampling.py by the canonical rule of
// docs/numerics.md. A block a row.
//
// Nothing is sorted. A filter keeps the first tokens of an order (larger weight first, of equal ones the lower id), and so
// does a draw, whose token is the last of those that together pass the uniform number. How many tokens come before a bound,
// or what they weigh, only grows with the bound, since a fixed order of additions never falls when a term grows: the bound is
// found two bits at a time, first the weight's, then the id's.
//
// Symbols: R rows, V vocabulary.
#include "vocab.cuh"

enum { TEMPERATURE, TOP_P, MIN_P, PENALTY, SETTINGS };

#define NO_TOKEN 0x7fffffff
#define BELOW_ONE 0x1.fffffep-1f
#define WAYS 3  // bounds that are tried at once: two bits

// The best of the block's candidates, in every thread: the larger one, of equals the lower token. 2 * 32 words of shared
// memory.
__device__ __forceinline__ void best_of_block(float& best, int& token) {
    Shared<float> bests = shared<float>(0);
    Shared<int> choices = shared<int>(BLOCK_WARPS);
    int thread = threadIdx.x;
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
}

// logits [R, V] -> tokens [R]. 1024 threads, 2 * 32 words of shared memory. A row without any number (all NaN) gives token 0.
__global__ void __launch_bounds__(ROW_THREADS) argmax(In<float> logits, Out<int> tokens, int vocab) {
    In<float> row = logits + (long long)blockIdx.x * vocab;
    float best = MINUS_INFINITY;
    int token = NO_TOKEN;
    for (int i = threadIdx.x; i < vocab; i += ROW_THREADS) {
        float value = row[i];
        if (value > best || (value == best && i < token)) best = value, token = i;
    }
    best_of_block(best, token);
    if (threadIdx.x == 0) tokens[blockIdx.x] = token == NO_TOKEN ? 0 : token;
}

// The first tokens of the order: those whose weight has larger bits, and of that weight those below an id.
struct Prefix {
    unsigned weight;
    int end;
    __device__ __forceinline__ bool has(float w, int id) const {
        unsigned bits = (unsigned)__float_as_int(w);
        return bits > weight || (bits == weight && id < end);
    }
};

// What the tokens of N prefixes weigh, or how many they are (exact below 2^24).
template <int N>
__device__ __forceinline__ void measure(Out<float> weights, int vocab, bool count, const Prefix* prefixes, Shared<float> room, float* totals) {
    long_sums<N>(vocab, room, [&](int i, float* values) {
        float w = weights[i];
#pragma unroll
        for (int s = 0; s < N; s++) values[s] = prefixes[s].has(w, i) ? count ? 1.0f : w : 0.0f;
    }, totals);
}

// The shortest prefix whose measure is at least `goal`, a positive number that the measure of all tokens reaches. Weights
// are 0 .. 1.
__device__ Prefix shortest(Out<float> weights, int vocab, bool count, float goal, Shared<float> room) {
    Prefix found = {0, vocab}, tried[WAYS];
    float totals[WAYS];
    for (int shift = 28; shift >= 0; shift -= 2) {  // the largest weight down to which all tokens reach the goal
#pragma unroll
        for (int j = 0; j < WAYS; j++) tried[j] = {found.weight + ((unsigned)(j + 1) << shift), vocab};
        measure<WAYS>(weights, vocab, count, tried, room, totals);
#pragma unroll
        for (int j = 0; j < WAYS; j++)
            if (totals[j] >= goal) found = tried[j];
    }
    int shift = 0;
    while ((WAYS + 1) << shift < vocab) shift += 2;
    for (found.end = 0; shift >= 0; shift -= 2) {  // of that weight, the most tokens that do not reach it yet
#pragma unroll
        for (int j = 0; j < WAYS; j++) tried[j] = {found.weight, found.end + ((j + 1) << shift)};
        measure<WAYS>(weights, vocab, count, tried, room, totals);
#pragma unroll
        for (int j = 0; j < WAYS; j++)
            if (totals[j] < goal) found = tried[j];
    }
    found.end++;
    return found;
}

// logits [R, V] -> tokens [R]. settings [R, 4]: temperature, top-p, min-p, repetition penalty; top_ks [R], 0: off; uniforms
// [R] in 0 .. 1; seen [R, ceil(V / 32)]: a bit for each token that occurred, read where there is a penalty. weights [R, V] is
// scratch. Temperature 0 is greedy, and so is a row whose best score is not finite. 1024 threads, (2 + 3) * 32 words of
// shared memory; V at most 2^24.
__global__ void __launch_bounds__(ROW_THREADS) sample(In<float> logits, In<unsigned> seen, In<float> settings, In<int> top_ks,
                                                      In<float> uniforms, Out<float> weights, Out<int> tokens, int vocab) {
    int row = blockIdx.x;
    In<float> from = logits + (long long)row * vocab, mine = settings + row * SETTINGS;
    In<unsigned> occurred = seen + (long long)row * ((vocab + 31) / 32);
    Out<float> own = weights + (long long)row * vocab;
    Shared<float> room = shared<float>(2 * BLOCK_WARPS);
    float temperature = mine[TEMPERATURE], top_p = mine[TOP_P], min_p = mine[MIN_P], penalty = mine[PENALTY];
    auto score = [&](int i) {
        float x = from[i];
        if (penalty == 1.0f || !(occurred[i / 32] >> (i % 32) & 1)) return x;
        return x > 0.0f ? __fdiv_rn(x, penalty) : x * penalty;
    };
    float best = MINUS_INFINITY, total;
    int token = NO_TOKEN;
    for (int i = threadIdx.x; i < vocab; i += ROW_THREADS) {
        float value = score(i);
        if (value > best || (value == best && i < token)) best = value, token = i;
    }
    best_of_block(best, token);
    if (temperature == 0.0f || best < LOWEST || best > -LOWEST) {
        if (threadIdx.x == 0) tokens[row] = token == NO_TOKEN ? 0 : token;
        return;
    }
    long_sums<1>(vocab, room, [&](int i, float* value) {
        float x = __fdiv_rn(score(i) - best, temperature);
        value[0] = x <= 0.0f ? exp_negative(x) : 0.0f;  // what is not a number weighs nothing
        own[i] = value[0];
    }, &total);
    Prefix kept = {0, vocab};
    int top_k = top_ks[row];
    bool by_count = top_k > 0 && top_k < vocab;
    if (by_count) kept = shortest(own, vocab, true, (float)top_k, room);
    if (top_p < 1.0f) {
        if (by_count) measure<1>(own, vocab, false, &kept, room, &total);
        kept = shortest(own, vocab, false, fmaxf(top_p * total, 0x1p-149f), room);
    }
    unsigned least = (unsigned)__float_as_int(min_p);
    if (kept.weight < least) kept = {least, vocab};
    if (by_count || top_p < 1.0f || least) measure<1>(own, vocab, false, &kept, room, &total);
    float drawn = fminf(fmaxf(uniforms[row], 0.0f), BELOW_ONE) * total;
    Prefix passed = shortest(own, vocab, false, __int_as_float(__float_as_int(drawn) + 1), room);
    if (threadIdx.x == 0) tokens[row] = passed.end - 1;
}

// seen [R, ceil(V / 32)]: the bits of tokens [R] are set. A thread a row.
__global__ void mark_seen(In<int> tokens, Out<unsigned> seen, int rows, int vocab) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    int token = tokens[row];
    long long word = (long long)row * ((vocab + 31) / 32) + token / 32;
    seen[word] = seen[word] | 1u << (token % 32);
}
