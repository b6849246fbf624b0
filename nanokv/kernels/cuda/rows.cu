// What is done to one row at a time: norms by the sum rule, activations, rotary positions, the embedding, the residual.
//
// A norm has a warp for each row: a thread has lanes j and j + 32 of the sum rule's 64. Rows lie `stride` apart, or, for
// norms and rotations of heads, `heads` of them side by side in each of rows that lie `stride` apart.
//
// Symbols: R rows, K inputs of a norm, I inner width, H heads, D head width, E model width.
#include "common.cuh"

#define ROW_WARPS 4

// Sum of x, or of the squares of x - shift, over n numbers by the sum rule.
template <bool SQUARES> __device__ __forceinline__ float row_sum(In<float> x, int n, float shift) {
    float low = 0.0f, high = 0.0f;
    for (int i = threadIdx.x; i < n; i += 2 * WARP) {
        float c = SQUARES ? x[i] - shift : x[i];
        low = SQUARES ? __fmaf_rn(c, c, low) : low + c;
        if (i + WARP < n) {
            c = SQUARES ? x[i + WARP] - shift : x[i + WARP];
            high = SQUARES ? __fmaf_rn(c, c, high) : high + c;
        }
    }
    return sum_lanes(low, high);
}

// Block (32, 4), grid ceil(R / 4). `part` is float32(1 / K).
__global__ void layer_norm(In<float> x, In<float> weight, In<float> bias, float eps, float part, Out<float> out, int rows, int width) {
    int row = blockIdx.x * ROW_WARPS + threadIdx.y;
    if (row >= rows) return;
    In<float> from = x + (long long)row * width;
    float mean = row_sum<false>(from, width, 0.0f) * part;
    float scale = __fdiv_rn(1.0f, __fsqrt_rn(row_sum<true>(from, width, mean) * part + eps));
    for (int i = threadIdx.x; i < width; i += WARP)
        out[(long long)row * width + i] = __fmaf_rn((from[i] - mean) * scale, weight[i], bias[i]);
}

// x [R, H, K] with rows `stride` apart -> out [R, H, K]. Block (32, 4), grid ceil(R H / 4).
__global__ void rms_norm(In<float> x, In<float> weight, float eps, float part, Out<float> out, int rows, int heads, int width, int stride) {
    int line = blockIdx.x * ROW_WARPS + threadIdx.y;
    if (line >= rows * heads) return;
    In<float> from = x + ((long long)(line / heads) * stride + line % heads * width);
    float scale = __fdiv_rn(1.0f, __fsqrt_rn(row_sum<true>(from, width, 0.0f) * part + eps));
    for (int i = threadIdx.x; i < width; i += WARP) out[(long long)line * width + i] = from[i] * scale * weight[i];
}

// x, out [n]: GELU by tanh. c0 = float32(2 sqrt(2 / pi)), c1 = float32(2 sqrt(2 / pi) 0.044715).
__global__ void gelu_new(In<float> x, Out<float> out, float c0, float c1, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float value = x[i];
    out[i] = times_sigmoid(value, value * __fmaf_rn(c1, value * value, c0));
}

// x, out [n]: GELU by the error function, by exp(-x^2 / 2) and a rational function.
__global__ void gelu_erf(In<float> x, Out<float> out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float value = x[i], t = value < 0.0f ? -value : value;
    t = t < 14.0f ? t : 14.0f;
    float square = t * t, e = exp_negative(square * -0.5f);
    e = __fmaf_rn(e * -0.5f, __fmaf_rn(t, t, -square), e);
    float above = __fmaf_rn(3.99084156e-3f, t, 3.97992767e-2f);
    above = __fmaf_rn(above, t, 1.80777177e-1f);
    above = __fmaf_rn(above, t, 4.35000986e-1f);
    above = __fmaf_rn(above, t, 0.5f);
    float below = __fmaf_rn(1.00034093e-2f, t, 9.97695178e-2f);
    below = __fmaf_rn(below, t, 4.62976545e-1f);
    below = __fmaf_rn(below, t, 1.19233203f);
    below = __fmaf_rn(below, t, 1.66788673f);
    below = __fmaf_rn(below, t, 1.0f);
    float g = __fdiv_rn((value < 0.0f ? value : t) * above, below);
    out[i] = value < 0.0f ? g * e : __fmaf_rn(-g, e, value);
}

// gate_up [R, 2 I], the gate's half and the other -> out [R, I].
__global__ void swiglu(In<float> gate_up, Out<float> out, int rows, int inner) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * inner) return;
    long long at = (long long)(i / inner) * 2 * inner + i % inner;
    float gate = gate_up[at];
    out[i] = times_sigmoid(gate, gate) * gate_up[at + inner];
}

// x [R, H, D] with rows `stride` apart, cos, sin [R, D / 2] -> out [R, H, D]; a thread a pair.
__global__ void rotate(In<float> x, In<float> cos, In<float> sin, int adjacent, Out<float> out, int rows, int heads, int dim, int stride) {
    int half = dim / 2, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * heads * half) return;
    int p = i % half, h = i / half % heads, r = i / half / heads;
    int one = adjacent ? 2 * p : p, other = adjacent ? 2 * p + 1 : half + p;
    In<float> from = x + ((long long)r * stride + h * dim);
    Out<float> to = out + ((long long)r * heads + h) * dim;
    float a = from[one], b = from[other], c = cos[(long long)r * half + p], s = sin[(long long)r * half + p];
    to[one] = __fmaf_rn(a, c, -(b * s));
    to[other] = __fmaf_rn(b, c, a * s);
}

// out [R, E]: the rows of `table` [V, E] that tokens [R] name, plus those of `places` [., E] at positions [R] where there
// are learned positions.
__global__ void embed(In<int> tokens, In<float> table, In<int> positions, In<float> places, int with_places, Out<float> out, int rows, int width) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * width) return;
    int r = i / width, e = i % width;
    float value = table[(long long)tokens[r] * width + e];
    out[i] = with_places ? value + places[(long long)positions[r] * width + e] : value;
}

// x [n] += y [n]
__global__ void add(Out<float> x, In<float> y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] + y[i];
}
