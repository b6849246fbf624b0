// Keys and values into their slots in a KV format, and the copy of a block. The arithmetic is nanokv/kv/codec.py's.
//
// Symbols: R rows, H key-value heads, D head width.
#include "common.cuh"

#define CODE_GROUP 32  // of int4: tokens of a key's channel, channels of a value

enum { FLOAT32, FLOAT16, BFLOAT16, INT8, FP8, FP8_FIXED };

// Finite x to the nearest float16, ties to even; beyond 65504 its largest value.
__device__ __forceinline__ unsigned to_half(float x) {
    unsigned bits = (unsigned)__float_as_int(x), sign = bits >> 16 & 0x8000;
    float size = fminf(__int_as_float((int)(bits & 0x7fffffff)), 65504.0f);
    if (size < 0x1p-14f) return sign | (unsigned)(int)rintf(size * 0x1p24f);  // subnormal: whole numbers of 2^-24
    bits = (unsigned)__float_as_int(size);
    return sign | ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112u << 10);
}

// Finite x to the nearest bfloat16, ties to even.
__device__ __forceinline__ unsigned to_bfloat16(float x) {
    unsigned bits = (unsigned)__float_as_int(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// x in -448 .. 448 to the nearest fp8 e4m3, ties to even.
__device__ __forceinline__ unsigned to_fp8(float x) {
    unsigned bits = (unsigned)__float_as_int(x), sign = bits >> 24 & 0x80;
    float size = __int_as_float((int)(bits & 0x7fffffff));
    if (size < 0x1p-6f) return sign | (unsigned)(int)rintf(size * 0x1p9f);  // subnormal: whole numbers of 2^-9
    bits = (unsigned)__float_as_int(size);
    return sign | ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120u << 3);
}

// x [R, H, D], rows `stride` apart, into the slots [R] of codes [slots, H, D] and scales [slots, H]; a row whose slot is
// negative is left out. Block (32, 4): a warp a head, grid ceil(R H / 4).
template <int FORMAT>
__global__ void append(In<float> x, int stride, In<int> slots, Out<unsigned char> codes, Out<float> scales, float fixed, int rows, int heads, int dim) {
    int line = blockIdx.x * 4 + threadIdx.y, lane = threadIdx.x;
    if (line >= rows * heads) return;
    int slot = slots[line / heads], head = line % heads;
    if (slot < 0) return;
    In<float> from = x + ((long long)(line / heads) * stride + head * dim);
    long long entry = (long long)slot * heads + head;
    float largest = 0.0f;
    if (FORMAT == INT8 || FORMAT == FP8) {
        for (int d = lane; d < dim; d += WARP) largest = fmaxf(largest, fabsf(from[d]));
        largest = warp_max(largest);
        if (lane == 0) scales[entry] = largest;
    }
    float divisor = FORMAT == FP8_FIXED ? fixed : largest == 0.0f ? 1.0f : largest, top = FORMAT == INT8 ? 127.0f : 448.0f;
    for (int d = lane; d < dim; d += WARP) {
        float value = from[d];
        long long at = entry * dim + d;
        if (FORMAT == FLOAT32) store_as<float>(codes, at * 4, value);
        if (FORMAT == FLOAT16) store_as<unsigned short>(codes, at * 2, (unsigned short)to_half(value));
        if (FORMAT == BFLOAT16) store_as<unsigned short>(codes, at * 2, (unsigned short)to_bfloat16(value));
        if (FORMAT >= INT8) {
            float code = FORMAT == FP8_FIXED ? __fdiv_rn(value, divisor) : __fdiv_rn(value, divisor) * top;
            code = fminf(fmaxf(code, -top), top);
            codes[at] = FORMAT == INT8 ? (unsigned char)(signed char)(int)rintf(code) : (unsigned char)to_fp8(code);
        }
    }
}

// x as fifteenths of its group's span above its lowest value. Of both, + 0.0f has made a zero +0, as the codec's is.
__device__ __forceinline__ unsigned to_int4(float x, float low, float span) {
    float code = rintf(__fdiv_rn(x - low, span == 0.0f ? 1.0f : span) * 15.0f);
    return (unsigned)(int)fminf(fmaxf(code, 0.0f), 15.0f);
}

// Finite keys x [R, H, D], rows `stride` apart, in int4: groups of 32 consecutive rows go to 32 consecutive slots, of which
// slots [R] is read for the first, a multiple of 32; a group whose slot is negative is left out. codes [slots, H,
// ceil(D / 2)], low and span [slots / 32, H, D]. A thread two channels of one group's head.
__global__ void append_keys_int4(In<float> x, int stride, In<int> slots, Out<unsigned char> codes, Out<float> low, Out<float> span, int rows,
                                 int heads, int dim) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, pairs = (dim + 1) / 2, group = i / (heads * pairs), head = i / pairs % heads;
    if (group >= rows / CODE_GROUP) return;
    int d = i % pairs * 2, both = min(2, dim - d), slot = slots[group * CODE_GROUP];
    if (slot < 0) return;
    In<float> from = x + ((long long)group * CODE_GROUP * stride + head * dim + d);
    float least[2], size[2];
    for (int j = 0; j < both; j++) {
        float most = least[j] = from[j];
        for (int t = 1; t < CODE_GROUP; t++) {
            float value = from[(long long)t * stride + j];
            least[j] = fminf(least[j], value);
            most = fmaxf(most, value);
        }
        least[j] = least[j] + 0.0f;
        size[j] = most - least[j] + 0.0f;
        long long at = ((long long)(slot / CODE_GROUP) * heads + head) * dim + d + j;
        low[at] = least[j];
        span[at] = size[j];
    }
    for (int t = 0; t < CODE_GROUP; t++) {
        unsigned code = to_int4(from[(long long)t * stride], least[0], size[0]);
        if (both == 2) code |= to_int4(from[(long long)t * stride + 1], least[1], size[1]) << 4;
        codes[((long long)(slot + t) * heads + head) * pairs + d / 2] = (unsigned char)code;
    }
}

// Finite values x [R, H, D], rows `stride` apart, in int4 into the slots [R], a negative one left out. codes [slots, H,
// ceil(D / 2)], low and span [slots, H, ceil(D / 32)]. Block (32, 4): a warp a head, grid ceil(R H / 4).
__global__ void append_values_int4(In<float> x, int stride, In<int> slots, Out<unsigned char> codes, Out<float> low, Out<float> span, int rows,
                                   int heads, int dim) {
    int line = blockIdx.x * 4 + threadIdx.y, lane = threadIdx.x, groups = (dim + CODE_GROUP - 1) / CODE_GROUP;
    if (line >= rows * heads) return;
    int slot = slots[line / heads], head = line % heads;
    if (slot < 0) return;
    In<float> from = x + ((long long)(line / heads) * stride + head * dim);
    long long entry = (long long)slot * heads + head;
    for (int group = 0; group < groups; group++) {
        int d = group * CODE_GROUP + lane;
        float value = from[min(d, dim - 1)];  // the last channel again changes neither the least nor the most
        float least = -warp_max(-value) + 0.0f, size = warp_max(value) - least + 0.0f;
        unsigned code = to_int4(value, least, size), next = __shfl_xor_sync(ALL_LANES, code, 1);
        if (lane == 0) {
            low[entry * groups + group] = least;
            span[entry * groups + group] = size;
        }
        if (lane % 2 == 0 && d < dim) codes[entry * ((dim + 1) / 2) + d / 2] = (unsigned char)(d + 1 < dim ? code | next << 4 : code);
    }
}

// Everything of unit `source` into unit `target`, in all layers of a plane of `layers` times `pitch` bytes, of which a unit
// has `size`. A thread a byte of a unit, grid (ceil(size / threads), layers).
__global__ void copy_unit(Out<unsigned char> plane, long long pitch, long long size, int source, int target) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, base = blockIdx.y * pitch;
    if (i < size) plane[base + target * size + i] = (unsigned char)plane[base + source * size + i];
}
