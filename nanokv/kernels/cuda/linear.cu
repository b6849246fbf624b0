// out = x W^T + bias by the product rule, W in the panels of nanokv/kernels/matrix.py: [P, K, 64], 64 outputs side by side.
//
// A few rows (decoding): a warp takes one segment of 64 inputs of one panel and writes its sums; a second kernel adds the
// segments in order. Every weight is read once, by whole lines, and all segments of all panels run at once, so that a
// narrow matrix fills a card too. Many rows: a block takes a panel and 128 rows, and decodes each piece of W once for them.
//
// Symbols: R rows, K inputs, N outputs, P = ceil(N / 64) panels, S = ceil(K / 64) segments, G = ceil(K / 32) groups.
#include "common.cuh"

#define PANEL 64
#define GROUP 32
#define FEW_WARPS 4   // segments of a block
#define MANY_ROWS 128  // rows of a block
#define MANY_STEP 32  // inputs staged at once, half a segment
#define MANY_PITCH (MANY_ROWS + 4)

// Weights of two neighbouring outputs of a panel: eight() gives those of inputs k .. k + 7, zeros from k + count on; begin()
// comes before it wherever a group of 32 begins.
struct Float32 {
    In<float> codes;
    __device__ __forceinline__ Float32(long long codes, long long, long long, long long panel, int inputs, int column)
        : codes(in_at<float>(codes) + panel * inputs * PANEL + column) {}
    __device__ __forceinline__ void begin(int) {}
    __device__ __forceinline__ void eight(int k, int count, float* a, float* b) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            a[i] = b[i] = 0.0f;
            if (i >= count) continue;
            float2 both = load2(codes, (long long)(k + i) * PANEL);
            a[i] = both.x;
            b[i] = both.y;
        }
    }
};

template <bool HALF> struct Float16 {
    In<unsigned short> codes;
    __device__ __forceinline__ Float16(long long codes, long long, long long, long long panel, int inputs, int column)
        : codes(in_at<unsigned short>(codes) + panel * inputs * PANEL + column) {}
    __device__ __forceinline__ void begin(int) {}
    __device__ __forceinline__ void eight(int k, int count, float* a, float* b) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            a[i] = b[i] = 0.0f;
            if (i >= count) continue;
            unsigned both = load_as<unsigned>(codes, (long long)(k + i) * PANEL);
            a[i] = HALF ? from_half(both & 0xffff) : from_bfloat16(both & 0xffff);
            b[i] = HALF ? from_half(both >> 16) : from_bfloat16(both >> 16);
        }
    }
};
typedef Float16<false> Bf16;
typedef Float16<true> Fp16;

// One scale for 32 inputs, or for all of an output's.
template <bool BY_ROW> struct ScaledInt8 {
    In<signed char> codes;
    In<unsigned short> scales;
    float one, other;
    __device__ __forceinline__ ScaledInt8(long long codes, long long scales, long long, long long panel, int inputs, int column)
        : codes(in_at<signed char>(codes) + panel * inputs * PANEL + column),
          scales(in_at<unsigned short>(scales) + panel * (BY_ROW ? 1 : (inputs + GROUP - 1) / GROUP) * PANEL + column), one(0), other(0) {
        if (BY_ROW) read_scales(0);
    }
    __device__ __forceinline__ void begin(int k) {
        if (!BY_ROW) read_scales(k / GROUP);
    }
    __device__ __forceinline__ void read_scales(int group) {
        unsigned both = load_as<unsigned>(scales, (long long)group * PANEL);
        one = from_half(both & 0xffff);
        other = from_half(both >> 16);
    }
    __device__ __forceinline__ void eight(int k, int count, float* a, float* b) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            a[i] = b[i] = 0.0f;
            if (i >= count) continue;
            unsigned both = load_as<unsigned short>(codes, (long long)(k + i) * PANEL);
            a[i] = one * (float)(signed char)(both & 0xff);
            b[i] = other * (float)(signed char)(both >> 8);
        }
    }
};
typedef ScaledInt8<false> Int8;
typedef ScaledInt8<true> Int8Row;

struct Int4 {
    In<unsigned> codes;
    In<unsigned short> scales, lows;
    bool with_lows;
    float one, other, one_low, other_low;
    __device__ __forceinline__ Int4(long long codes, long long scales, long long lows, long long panel, int inputs, int column)
        : codes(in_at<unsigned>(codes) + panel * ((inputs + GROUP - 1) / GROUP) * (GROUP / 8) * PANEL + column),
          scales(in_at<unsigned short>(scales) + panel * ((inputs + GROUP - 1) / GROUP) * PANEL + column),
          lows(in_at<unsigned short>(lows) + panel * ((inputs + GROUP - 1) / GROUP) * PANEL + column), with_lows(lows != 0),
          one(0), other(0), one_low(0), other_low(0) {}
    __device__ __forceinline__ void begin(int k) {
        unsigned both = load_as<unsigned>(scales, (long long)(k / GROUP) * PANEL);
        one = from_half(both & 0xffff);
        other = from_half(both >> 16);
        if (with_lows) {
            both = load_as<unsigned>(lows, (long long)(k / GROUP) * PANEL);
            one_low = from_half(both & 0xffff);
            other_low = from_half(both >> 16);
        } else {
            one_low = one * -8.0f;
            other_low = other * -8.0f;
        }
    }
    __device__ __forceinline__ void eight(int k, int count, float* a, float* b) {
        uint2 both = load_as<uint2>(codes, (long long)(k / 8) * PANEL);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            a[i] = b[i] = 0.0f;
            if (i >= count) continue;
            a[i] = __fmaf_rn((float)(both.x >> (4 * i) & 15), one, one_low);
            b[i] = __fmaf_rn((float)(both.y >> (4 * i) & 15), other, other_low);
        }
    }
};

// sums [S, R, N]: one segment's sums of ROWS rows, for a few rows. Block (32, FEW_WARPS), grid (P, ceil(S / FEW_WARPS),
// ceil(R / ROWS)); ROWS * FEW_WARPS * 64 words of shared memory.
template <class Form, int ROWS>
__global__ void __launch_bounds__(WARP * FEW_WARPS) linear_segments(In<float> x, long long codes, long long scales, long long lows,
                                                                    Out<float> sums, int rows, int inputs, int outputs) {
    int lane = threadIdx.x, segment = blockIdx.y * FEW_WARPS + threadIdx.y, k = segment * SEGMENT, row = blockIdx.z * ROWS;
    int count = min(SEGMENT, inputs - k), some = min(ROWS, rows - row), column = blockIdx.x * PANEL + 2 * lane;
    if (count <= 0) return;  // whole warps: none waits for another
    Shared<float> piece = shared<float>(threadIdx.y * ROWS * SEGMENT);  // [ROWS, 64]
    for (int r = 0; r < ROWS; r++)
        for (int i = lane; i < SEGMENT; i += WARP)
            piece[r * SEGMENT + i] = r < some && i < count ? x[(long long)(row + r) * inputs + k + i] : 0.0f;
    __syncwarp();
    float one[ROWS], other[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) one[r] = other[r] = 0.0f;
    Form weights(codes, scales, lows, blockIdx.x, inputs, 2 * lane);
    for (int at = 0; at < count; at += 8) {
        if (at % GROUP == 0) weights.begin(k + at);
        float a[8], b[8];
        weights.eight(k + at, count - at, a, b);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float4 left = load4(piece, r * SEGMENT + at), right = load4(piece, r * SEGMENT + at + 4);
            float values[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                one[r] = madd(values[i], a[i], one[r]);
                other[r] = madd(values[i], b[i], other[r]);
            }
        }
    }
    for (int r = 0; r < some; r++) {
        Out<float> to = sums + ((long long)segment * rows + row + r) * outputs;
        if (column < outputs) to[column] = one[r];
        if (column + 1 < outputs) to[column + 1] = other[r];
    }
}

// out [R, N]: the segments' sums [S, R, N] in order, then bias [N], where there is one. A thread an element.
__global__ void linear_sum(In<float> sums, In<float> bias, int with_bias, Out<float> out, int segments, int rows, int outputs) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x, size = (long long)rows * outputs;
    if (at >= size) return;
    float total = 0.0f;
    for (int s = 0; s < segments; s++) total = total + sums[s * size + at];
    out[at] = with_bias ? total + bias[at % outputs] : total;
}

// out [R, N] for many rows. Block (16, 16), grid (P, ceil(R / 128)); a thread has 8 rows and 4 outputs.
// Shared: x turned, [32, 132], and W decoded, [32, 64].
template <class Form>
__global__ void __launch_bounds__(256) linear_rows(In<float> x, long long codes, long long scales, long long lows, In<float> bias,
                                                   int with_bias, Out<float> out, int rows, int inputs, int outputs) {
    int tx = threadIdx.x, ty = threadIdx.y, thread = ty * 16 + tx, row = blockIdx.y * MANY_ROWS, column = blockIdx.x * PANEL;
    Shared<float> turned = shared<float>(0), decoded = shared<float>(MANY_STEP * MANY_PITCH);
    float chain[8][4], total[8][4];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) chain[i][j] = total[i][j] = 0.0f;
    // Of each step of 32 inputs a thread decodes one piece of eight inputs and two outputs: 4 x 32 of the 256 threads do.
    Form weights(codes, scales, lows, blockIdx.x, inputs, 2 * (thread % WARP));
    for (int k = 0; k < inputs; k += MANY_STEP) {
        int count = min(MANY_STEP, inputs - k);
        for (int i = thread; i < MANY_ROWS * MANY_STEP; i += 256) {
            int r = i / MANY_STEP, c = i % MANY_STEP;
            turned[c * MANY_PITCH + r] = row + r < rows && c < count ? x[(long long)(row + r) * inputs + k + c] : 0.0f;
        }
        int from = thread / WARP * 8;
        if (from < MANY_STEP) {
            float a[8], b[8];
            if (from < count) {
                weights.begin(k);
                weights.eight(k + from, count - from, a, b);
            } else {
                for (int i = 0; i < 8; i++) a[i] = b[i] = 0.0f;
            }
            for (int i = 0; i < 8; i++) {
                decoded[(from + i) * PANEL + 2 * (thread % WARP)] = a[i];
                decoded[(from + i) * PANEL + 2 * (thread % WARP) + 1] = b[i];
            }
        }
        __syncthreads();
        for (int c = 0; c < MANY_STEP; c++) {
            float4 low = load4(turned, c * MANY_PITCH + ty * 8), high = load4(turned, c * MANY_PITCH + ty * 8 + 4);
            float4 w = load4(decoded, c * PANEL + tx * 4);
            float xs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, ws[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) chain[i][j] = madd(xs[i], ws[j], chain[i][j]);
        }
        __syncthreads();
        if ((k + MANY_STEP) % SEGMENT == 0 || k + MANY_STEP >= inputs)
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    total[i][j] = total[i][j] + chain[i][j];
                    chain[i][j] = 0.0f;
                }
    }
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 4; j++) {
            int r = row + ty * 8 + i, c = column + tx * 4 + j;
            if (r < rows && c < outputs) out[(long long)r * outputs + c] = with_bias ? total[i][j] + bias[c] : total[i][j];
        }
}

// out [R, K]: the decoded rows of W that tokens [R] name; a thread eight inputs of one row.
template <class Form>
__global__ void embed_rows(In<int> tokens, long long codes, long long scales, long long lows, Out<float> out, int rows, int inputs) {
    int eights = (inputs + 7) / 8, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * eights) return;
    int r = i / eights, k = i % eights * 8, token = tokens[r];
    Form weights(codes, scales, lows, token / PANEL, inputs, token % PANEL / 2 * 2);
    float a[8], b[8];
    weights.begin(k);
    weights.eight(k, inputs - k, a, b);
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (k + j < inputs) out[(long long)r * inputs + k + j] = token % 2 ? b[j] : a[j];
}
