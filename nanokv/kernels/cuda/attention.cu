// Attention over tiles of 128 keys read where they lie: blocks through their table, any KV format, all sequences at once.
//
// attend_tiles gives one tile's partial result (m, l, o) for a few queries, every tile of every sequence at once, and
// combine_tiles combines each query's in order: Flash-Decoding with a fixed split. attend_rows is for many queries (a
// prefill): a block keeps its queries and folds their tiles in order. Both give the same bits.
//
// Queries are q [R, Hq, D], rows `stride` apart. A block's queries are consecutive ones of one run: rows of one sequence that lie in the same tile, times the G heads that
// read one key-value head; query i of a run is row i / G, head h G + i % G. The tables (tables.py makes them):
//   runs [n, 6]     first row, past the last; first tile in the list, past the last; window (0: none), sinks
//   tiles [N, 5]    number, which of the sources it lies in, which query it meets (0: q, 1: q_sinks), and the positions
//                   low .. high - 1 to which it is limited
//   sources [s, 7]  KV format, addresses of three planes of keys and three of values: a layer's storage, or a tile apart
//   units [N, 128 / unit_size]   which unit of its source holds each part of a tile: the block table
//
// Symbols: R rows, Hq query heads, H key-value heads, G = Hq / H, D head width, N tiles, Q = QUERIES of a block.
#include "common.cuh"

#define TILE 128
#define THREADS 128
#define STEP 32        // channels of the keys staged at once, half a segment
#define PITCH (STEP + 1)
#define CODE_GROUP 32  // of int4

enum { BEGIN, END, FIRST, LAST, WINDOW, SINKS, RUN_COLUMNS };
enum { NUMBER, SOURCE_ROW, QUERY, LOW, HIGH, TILE_COLUMNS };
enum { CODEC, KEYS, VALUES = 4, SOURCE_COLUMNS = 7 };
enum { FLOAT32, FLOAT16, BFLOAT16, INT8, FP8, FP8_FIXED, INT4 };

// Planes of keys or of values (nanokv/kv/storage.py): [slots, H, ...]; the second and third are scales, or lows and spans.
struct Planes {
    In<unsigned char> codes;
    In<float> second, third;
    bool keys;
    int heads, head, dim;
    float fixed;  // fp8's scale where it is one number
    __device__ __forceinline__ Planes(In<long long> addresses, bool keys, int heads, int head, int dim, float fixed)
        : codes(in_at<unsigned char>(addresses[0])), second(in_at<float>(addresses[1])), third(in_at<float>(addresses[2])),
          keys(keys), heads(heads), head(head), dim(dim), fixed(fixed) {}
};

// Channel d of the token in `slot`: the arithmetic of nanokv/kv/codec.py's decode().
template <int FORMAT> __device__ __forceinline__ float channel(const Planes& p, int slot, int d) {
    long long entry = (long long)slot * p.heads + p.head, at = entry * p.dim + d;
    if (FORMAT == FLOAT32) return load_as<float>(p.codes, at * 4);
    if (FORMAT == FLOAT16) return from_half(load_as<unsigned short>(p.codes, at * 2));
    if (FORMAT == BFLOAT16) return from_bfloat16(load_as<unsigned short>(p.codes, at * 2));
    if (FORMAT == INT8) return share((float)(signed char)p.codes[at], 127.0f, 1.0f / 127.0f) * p.second[entry];
    if (FORMAT == FP8) return share(from_fp8(p.codes[at]), 448.0f, 1.0f / 448.0f) * p.second[entry];
    if (FORMAT == FP8_FIXED) return from_fp8(p.codes[at]) * p.fixed;
    unsigned code = p.codes[entry * ((p.dim + 1) / 2) + d / 2] >> (4 * (d % 2)) & 15;
    long long group = p.keys ? ((long long)(slot / CODE_GROUP) * p.heads + p.head) * p.dim + d
                             : entry * ((p.dim + CODE_GROUP - 1) / CODE_GROUP) + d / CODE_GROUP;
    return p.second[group] + share((float)code, 15.0f, 1.0f / 15.0f) * p.third[group];
}

// Channels d .. d + 3, d and D multiples of 4: one access to the codes.
template <int FORMAT> __device__ __forceinline__ void four_channels(const Planes& p, int slot, int d, float* out) {
    long long entry = (long long)slot * p.heads + p.head, at = entry * p.dim + d;
    if (FORMAT == FLOAT32) {
        float4 all = load_as<float4>(p.codes, at * 4);
        out[0] = all.x, out[1] = all.y, out[2] = all.z, out[3] = all.w;
    } else if (FORMAT == FLOAT16 || FORMAT == BFLOAT16) {
        uint2 all = load_as<uint2>(p.codes, at * 2);
        unsigned codes[4] = {all.x & 0xffff, all.x >> 16, all.y & 0xffff, all.y >> 16};
        for (int i = 0; i < 4; i++) out[i] = FORMAT == FLOAT16 ? from_half(codes[i]) : from_bfloat16(codes[i]);
    } else if (FORMAT == INT4) {
        for (int i = 0; i < 4; i++) out[i] = channel<INT4>(p, slot, d + i);
    } else {
        unsigned all = load_as<unsigned>(p.codes, at);
        float scale = FORMAT == FP8_FIXED ? p.fixed : p.second[entry];
        for (int i = 0; i < 4; i++) {
            unsigned code = all >> (8 * i) & 0xff;
            float value = FORMAT == INT8  ? share((float)(signed char)code, 127.0f, 1.0f / 127.0f)
                          : FORMAT == FP8 ? share(from_fp8(code), 448.0f, 1.0f / 448.0f)
                                          : from_fp8(code);
            out[i] = value * scale;
        }
    }
}

// Which queries a block has, and what they may see.
template <int QUERIES> struct Work {
    int row, lines, first, group, head, position, last_position, window, sinks;  // `first`: its first query in the run
    int low, high;                                                               // limits of the tile at hand
    __device__ __forceinline__ Work(In<long long> run, In<int> positions, int first, int group, int head)
        : row((int)run[BEGIN]), lines(min(QUERIES, (int)(run[END] - run[BEGIN]) * group - first)), first(first), group(group),
          head(head), position(0), last_position(0), window((int)run[WINDOW]), sinks((int)run[SINKS]),
          low(0), high(0) {
        if (lines > 0) {
            position = positions[row_of(0)];
            last_position = positions[row_of(lines - 1)];
        }
    }
    __device__ __forceinline__ int row_of(int q) const { return row + (first + q) / group; }
    __device__ __forceinline__ int head_of(int q) const { return head * group + (first + q) % group; }
    __device__ __forceinline__ bool sees(int position, int key) const {
        return key <= position && (window == 0 || position - key < window || key < sinks) && low <= key && key < high;
    }
    // Whether any of its queries sees the key.
    __device__ __forceinline__ bool wants(int key) const {
        return key <= last_position && (window == 0 || position - key < window || key < sinks) && low <= key && key < high;
    }
};

// A block's shared memory, in words.
template <int QUERIES> struct Memory {
    Shared<float> query;    // [Q, D] scaled
    Shared<float> weights;  // [Q, 128] scores, then their exponentials
    Shared<float> m, l;     // [Q] of one tile
    Shared<int> slots;      // [128] where each key lies; -1: nobody sees it
    Shared<float> staged;   // keys [128, PITCH]; then the sums of the values' two segments [2, Q, D]
    __device__ __forceinline__ Memory(int dim)
        : query(shared<float>(0)), weights(shared<float>(QUERIES * dim)), m(shared<float>(QUERIES * (dim + TILE))),
          l(shared<float>(QUERIES * (dim + TILE + 1))), slots(shared<int>(QUERIES * (dim + TILE + 2))),
          staged(shared<float>(QUERIES * (dim + TILE + 2) + TILE)) {}
    __device__ __forceinline__ static int words(int dim) {
        return QUERIES * (dim + TILE + 2) + TILE + max(TILE * PITCH, 2 * QUERIES * dim);
    }
};

template <int QUERIES>
__device__ void load_queries(In<float> q, const Work<QUERIES>& work, const Memory<QUERIES>& memory, int stride, int dim, float scale) {
    for (int i = threadIdx.x; i < work.lines * dim; i += THREADS) {
        int line = i / dim, d = i % dim;
        memory.query[i] = q[(long long)work.row_of(line) * stride + work.head_of(line) * dim + d] * scale;
    }
}

// The tile's slots: the block table is read once, for units of which somebody sees a key.
template <int QUERIES>
__device__ void find_slots(In<int> units, int unit_size, const Work<QUERIES>& work, int start, Shared<int> slots) {
    int t = threadIdx.x, begin = t / unit_size * unit_size, first = begin;
    while (first < t && !work.wants(start + first)) first++;
    bool wanted = work.wants(start + t);
    if (wanted && first == t) slots[t] = units[t / unit_size] * unit_size;
    __syncthreads();
    int base = wanted ? (int)slots[first] : 0;
    __syncthreads();
    slots[t] = wanted ? base + t - begin : -1;
    __syncthreads();
}

template <int FORMAT, int QUERIES>
__device__ void stage_keys(const Planes& planes, const Memory<QUERIES>& memory, int from, int count) {
    if (planes.dim % 4 == 0) {
        for (int i = threadIdx.x; i < TILE * (STEP / 4); i += THREADS) {
            int t = i / (STEP / 4), c = i % (STEP / 4) * 4, slot = memory.slots[t];
            if (slot < 0 || c >= count) continue;
            float four[4];
            four_channels<FORMAT>(planes, slot, from + c, four);
            for (int j = 0; j < 4; j++) memory.staged[t * PITCH + c + j] = four[j];
        }
    } else {
        for (int i = threadIdx.x; i < TILE * STEP; i += THREADS) {
            int t = i / STEP, c = i % STEP, slot = memory.slots[t];
            if (slot >= 0 && c < count) memory.staged[t * PITCH + c] = channel<FORMAT>(planes, slot, from + c);
        }
    }
}

// Scores [Q, 128]: thread t has key t, one chain for each query.
template <int FORMAT, int QUERIES>
__device__ void score(const Planes& planes, const Work<QUERIES>& work, const Memory<QUERIES>& memory, int start) {
    int t = threadIdx.x, dim = planes.dim;
    bool wanted = memory.slots[t] >= 0;
    float chain[QUERIES], total[QUERIES];
#pragma unroll
    for (int q = 0; q < QUERIES; q++) chain[q] = total[q] = 0.0f;
    for (int from = 0; from < dim; from += STEP) {
        int count = min(STEP, dim - from);
        stage_keys<FORMAT>(planes, memory, from, count);
        __syncthreads();
        if (wanted)
            for (int c = 0; c < count; c++) {
                float key = memory.staged[t * PITCH + c];
#pragma unroll
                for (int q = 0; q < QUERIES; q++)
                    if (q < work.lines) chain[q] = madd(memory.query[q * dim + from + c], key, chain[q]);
            }
        __syncthreads();
        if ((from + STEP) % SEGMENT == 0 || from + STEP >= dim)
#pragma unroll
            for (int q = 0; q < QUERIES; q++) {
                total[q] = total[q] + chain[q];
                chain[q] = 0.0f;
            }
    }
#pragma unroll
    for (int q = 0; q < QUERIES; q++)
        if (q < work.lines) {
            int position = work.position + work.row_of(q) - work.row_of(0);  // the rows of a run are consecutive positions
            memory.weights[q * TILE + t] = wanted && work.sees(position, start + t) ? total[q] : MINUS_INFINITY;
        }
}

// Scores become weights; m and l of each query. A warp a query.
template <int QUERIES> __device__ void weigh(const Work<QUERIES>& work, const Memory<QUERIES>& memory) {
    int lane = threadIdx.x % WARP;
    for (int q = threadIdx.x / WARP; q < work.lines; q += THREADS / WARP) {
        float s[4], m = LOWEST;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            s[j] = memory.weights[q * TILE + lane + j * WARP];
            m = fmaxf(m, s[j]);
        }
        m = warp_max(m);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            s[j] = exp_negative(s[j] - m);
            memory.weights[q * TILE + lane + j * WARP] = s[j];
        }
        float l = sum_lanes(s[0] + s[2], s[1] + s[3]);
        if (lane == 0) {
            memory.m[q] = m;
            memory.l[q] = l;
        }
    }
}

// The sums of both segments of 64 keys [2, Q, D]: a thread has one channel of one segment, one chain for each query.
template <int FORMAT, int QUERIES>
__device__ void weigh_values(const Planes& planes, const Work<QUERIES>& work, const Memory<QUERIES>& memory) {
    int dim = planes.dim;
    for (int i = threadIdx.x; i < 2 * dim; i += THREADS) {
        int segment = i / dim, d = i % dim;
        float chain[QUERIES];
#pragma unroll
        for (int q = 0; q < QUERIES; q++) chain[q] = 0.0f;
        for (int t = segment * SEGMENT; t < (segment + 1) * SEGMENT; t++) {
            int slot = memory.slots[t];
            if (slot < 0) continue;  // nobody sees it
            float value = channel<FORMAT>(planes, slot, d);
#pragma unroll
            for (int q = 0; q < QUERIES; q++)
                if (q < work.lines) {
                    float weight = memory.weights[q * TILE + t];
                    if (weight != 0.0f) chain[q] = madd(weight, value, chain[q]);  // 0 hides a value that is not finite
                }
        }
#pragma unroll
        for (int q = 0; q < QUERIES; q++)
            if (q < work.lines) memory.staged[(segment * QUERIES + q) * dim + d] = chain[q];
    }
}

template <int FORMAT, int QUERIES>
__device__ void tile_in_format(In<long long> source, const Work<QUERIES>& work, const Memory<QUERIES>& memory, int heads, int dim,
                               float fixed, int start) {
    score<FORMAT>(Planes(source + KEYS, true, heads, work.head, dim, fixed), work, memory, start);
    __syncthreads();
    weigh(work, memory);
    __syncthreads();
    weigh_values<FORMAT>(Planes(source + VALUES, false, heads, work.head, dim, fixed), work, memory);
    __syncthreads();
}

// One tile's partial result for the block's queries: m, l in memory.m and .l, o as two segments in memory.staged.
template <int QUERIES>
__device__ void partial_result(In<int> tile, In<long long> sources, In<int> units, int unit_size, Work<QUERIES>& work,
                               const Memory<QUERIES>& memory, int heads, int dim, float fixed) {
    int start = tile[NUMBER] * TILE;
    work.low = tile[LOW];
    work.high = tile[HIGH];
    In<long long> source = sources + tile[SOURCE_ROW] * SOURCE_COLUMNS;
    find_slots(units, unit_size, work, start, memory.slots);
    switch ((int)source[CODEC]) {
        case FLOAT32: tile_in_format<FLOAT32>(source, work, memory, heads, dim, fixed, start); break;
        case FLOAT16: tile_in_format<FLOAT16>(source, work, memory, heads, dim, fixed, start); break;
        case BFLOAT16: tile_in_format<BFLOAT16>(source, work, memory, heads, dim, fixed, start); break;
        case INT8: tile_in_format<INT8>(source, work, memory, heads, dim, fixed, start); break;
        case FP8: tile_in_format<FP8>(source, work, memory, heads, dim, fixed, start); break;
        case FP8_FIXED: tile_in_format<FP8_FIXED>(source, work, memory, heads, dim, fixed, start); break;
        default: tile_in_format<INT4>(source, work, memory, heads, dim, fixed, start);
    }
}

template <int QUERIES> __device__ __forceinline__ float value_of(const Memory<QUERIES>& memory, int q, int d, int dim) {
    return 0.0f + memory.staged[q * dim + d] + memory.staged[(QUERIES + q) * dim + d];
}

// Of each tile of the list: m, l [N, most, Hq], o [N, most, Hq, D], `most` rows a run at most. owner [N]: each tile's run,
// -1: none, so that a list may be longer than what it holds.
// Grid (N, H, ceil(most G / Q)), 128 threads, Memory<Q>::words(D) words of shared memory.
template <int QUERIES>
__global__ void __launch_bounds__(THREADS)
    attend_tiles(In<float> q, In<float> q_sinks, In<int> positions, In<long long> runs, In<int> tiles, In<long long> sources, In<int> owner, In<int> units, int unit_size,
                 float fixed, float scale, Out<float> m, Out<float> l, Out<float> o, int heads, int kv_heads, int dim, int stride, int most) {
    int at = blockIdx.x;
    if (owner[at] < 0) return;
    Work<QUERIES> work(runs + (long long)owner[at] * RUN_COLUMNS, positions, blockIdx.z * QUERIES, heads / kv_heads, blockIdx.y);
    if (work.lines <= 0) return;
    Memory<QUERIES> memory(dim);
    load_queries(tiles[(long long)at * TILE_COLUMNS + QUERY] ? q_sinks : q, work, memory, stride, dim, scale);
    partial_result(tiles + (long long)at * TILE_COLUMNS, sources, units + (long long)at * (TILE / unit_size), unit_size, work, memory,
                   kv_heads, dim, fixed);
    for (int i = threadIdx.x; i < work.lines * dim; i += THREADS) {
        int line = i / dim, d = i % dim;
        long long place = ((long long)at * most + work.row_of(line) - work.row) * heads + work.head_of(line);
        o[place * dim + d] = value_of(memory, line, d, dim);
        if (d == 0) {
            m[place] = memory.m[line];
            l[place] = memory.l[line];
        }
    }
}

// out [R, Hq, D]: the partial results of each query in order. run_of [R]: each row's run, -1: none. Grid (R, Hq), 128
// threads, 2 * 128 words of shared memory, through which m and l pass, 128 tiles at a time.
__global__ void __launch_bounds__(THREADS) combine_tiles(In<float> m, In<float> l, In<float> o, In<long long> runs, In<int> run_of,
                                                         Out<float> out, int heads, int dim, int most) {
    int row = blockIdx.x, head = blockIdx.y, thread = threadIdx.x, which = run_of[row];
    if (which < 0) return;
    In<long long> run = runs + (long long)which * RUN_COLUMNS;
    int first = (int)run[FIRST], last = (int)run[LAST], line = row - (int)run[BEGIN];
    Shared<float> tops = shared<float>(0), totals = shared<float>(THREADS);
    for (int d = thread; d < (dim + THREADS - 1) / THREADS * THREADS; d += THREADS) {
        float top = LOWEST, total = 0.0f, value = 0.0f;
        for (int from = first; from < last; from += THREADS) {
            int count = min(THREADS, last - from);
            __syncthreads();
            if (thread < count) {
                long long place = ((long long)(from + thread) * most + line) * heads + head;
                tops[thread] = m[place];
                totals[thread] = l[place];
            }
            __syncthreads();
            for (int i = 0; i < count; i++) {
                float other = tops[i], both = fmaxf(top, other);
                float old = exp_negative(top - both), fresh = exp_negative(other - both);
                total = __fmaf_rn(total, old, totals[i] * fresh);
                if (d < dim) value = __fmaf_rn(value, old, o[(((long long)(from + i) * most + line) * heads + head) * dim + d] * fresh);
                top = both;
            }
        }
        if (d < dim) out[((long long)row * heads + head) * dim + d] = total == 0.0f ? 0.0f : __fdiv_rn(value, total);
    }
}

// out [R, Hq, D] for many rows: pieces [n, 2] of a run and the first of its queries. Grid (n, H), 128 threads,
// Memory<Q>::words(D) + Q (D + 4) words of shared memory.
template <int QUERIES>
__global__ void __launch_bounds__(THREADS)
    attend_rows(In<float> q, In<float> q_sinks, In<int> positions, In<long long> runs, In<int> tiles, In<long long> sources, In<int> pieces, In<int> units, int unit_size,
                float fixed, float scale, Out<float> out, int heads, int kv_heads, int dim, int stride) {
    In<long long> run = runs + (long long)pieces[2 * blockIdx.x] * RUN_COLUMNS;
    Work<QUERIES> work(run, positions, pieces[2 * blockIdx.x + 1], heads / kv_heads, blockIdx.y);
    Memory<QUERIES> memory(dim);
    int thread = threadIdx.x, at = Memory<QUERIES>::words(dim);
    Shared<float> o = shared<float>(at), m = shared<float>(at + QUERIES * dim), l = m + QUERIES, old = l + QUERIES, fresh = old + QUERIES;
    for (int i = thread; i < work.lines * dim; i += THREADS) o[i] = 0.0f;
    if (thread < work.lines) {
        m[thread] = LOWEST;
        l[thread] = 0.0f;
    }
    int loaded = -1;
    for (long long tile = run[FIRST]; tile < run[LAST]; tile++) {
        int which = tiles[tile * TILE_COLUMNS + QUERY];
        if (which != loaded) load_queries(which ? q_sinks : q, work, memory, stride, dim, scale);
        loaded = which;
        partial_result(tiles + tile * TILE_COLUMNS, sources, units + tile * (TILE / unit_size), unit_size, work, memory, kv_heads, dim, fixed);
        if (thread < work.lines) {
            float both = fmaxf(m[thread], memory.m[thread]);
            old[thread] = exp_negative(m[thread] - both);
            fresh[thread] = exp_negative(memory.m[thread] - both);
            l[thread] = __fmaf_rn(l[thread], old[thread], memory.l[thread] * fresh[thread]);
            m[thread] = both;
        }
        __syncthreads();
        for (int i = thread; i < work.lines * dim; i += THREADS) {
            int line = i / dim;
            o[i] = __fmaf_rn(o[i], old[line], value_of(memory, line, i % dim, dim) * fresh[line]);
        }
        __syncthreads();
    }
    for (int i = thread; i < work.lines * dim; i += THREADS) {
        int line = i / dim;
        float total = l[line];
        out[((long long)work.row_of(line) * heads + work.head_of(line)) * dim + i % dim] = total == 0.0f ? 0.0f : __fdiv_rn(o[i], total);
    }
}
