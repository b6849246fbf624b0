// Keys and values into their slots in a KV format, and the copy of a block. The arithmetic is nanokv/kv/codec.py's.
//
// Symbols: R rows, H key-value heads, D head width.
#include "common.cuh"

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

// Everything of unit `source` into unit `target`, in all layers of a plane of `layers` times `pitch` bytes, of which a unit
// has `size`. A thread a byte of a unit, grid (ceil(size / threads), layers).
__global__ void copy_unit(Out<unsigned char> plane, long long pitch, long long size, int source, int target) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x, base = blockIdx.y * pitch;
    if (i < size) plane[base + target * size + i] = (unsigned char)plane[base + source * size + i];
}
