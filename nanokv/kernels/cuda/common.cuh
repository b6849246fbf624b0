// What all kernels share: how they name memory, and the arithmetic of docs/numerics.md (exp, the sum rule, small formats).
//
// Memory is named by In<T> (read only), Out<T> and Shared<T>: plain pointers on a card. On a CPU (tests/cuda) they are
// classes that check and count every access; so kernels take nothing from memory in another way.
// Operators are IEEE: one rounding each, nothing contracted (--fmad=false); madd is the fused multiply-add of the product
// rule, __fmaf_rn any other. Division and square root are the correctly rounded ones.
#pragma once

#ifndef CUDA_ON_CPU
template <class T> using In = const T* __restrict__;
template <class T> using Out = T*;
template <class T> using Shared = T*;
extern __shared__ float4 block_memory[];
template <class T> __device__ __forceinline__ Shared<T> shared(int word) { return reinterpret_cast<T*>(block_memory) + word; }
template <class T> __device__ __forceinline__ In<T> in_at(long long address) { return reinterpret_cast<const T*>(address); }
template <class T> __device__ __forceinline__ Out<T> out_at(long long address) { return reinterpret_cast<T*>(address); }
// W at element i of an array of a smaller type
template <class W, class T> __device__ __forceinline__ W load_as(const T* from, long long i) {
    return *reinterpret_cast<const W*>(from + i);
}
template <class W, class T> __device__ __forceinline__ void store_as(T* to, long long i, W value) { *reinterpret_cast<W*>(to + i) = value; }
__device__ __forceinline__ float2 load2(const float* from, long long i) { return load_as<float2>(from, i); }
__device__ __forceinline__ float4 load4(const float* from, long long i) { return load_as<float4>(from, i); }
__device__ __forceinline__ float madd(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#endif

#define WARP 32
#define ALL_LANES 0xffffffffu
#define SEGMENT 64  // of the product rule
#define LOWEST __int_as_float(0xff7fffff)
#define MINUS_INFINITY __int_as_float(0xff800000)

// exp(x) for x <= 0
__device__ __forceinline__ float exp_negative(float x) {
    float y = x < -87.0f ? -87.0f : x;
    float t = __fmaf_rn(y, 1.44269504f, 12582912.0f);
    float n = t - 12582912.0f;
    float r = __fmaf_rn(n, 2.12194440e-4f, __fmaf_rn(n, -0.693359375f, y));
    float p = 1.9875691500e-4f;
    p = __fmaf_rn(p, r, 1.3981999507e-3f);
    p = __fmaf_rn(p, r, 8.3334519073e-3f);
    p = __fmaf_rn(p, r, 4.1665795894e-2f);
    p = __fmaf_rn(p, r, 1.6666665459e-1f);
    p = __fmaf_rn(p, r, 5.0000001201e-1f);
    p = __fmaf_rn(p, r * r, r) + 1.0f;
    float power = __int_as_float((int)(((unsigned)__float_as_int(t) << 23) + (127u << 23)));
    return x < -87.0f ? 0.0f : p * power;
}

// x / (1 + exp(-z))
__device__ __forceinline__ float times_sigmoid(float x, float z) {
    float e = exp_negative(z < 0.0f ? z : -z);
    return __fdiv_rn(z < 0.0f ? x * e : x, 1.0f + e);
}

// The end of the sum rule: lanes j and j + 32 of 64 in each lane of a warp -> the sum in all of them.
__device__ __forceinline__ float sum_lanes(float low, float high) {
    float sum = low + high;
    for (int apart = WARP / 2; apart; apart /= 2) sum = sum + __shfl_xor_sync(ALL_LANES, sum, apart);
    return sum;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int apart = WARP / 2; apart; apart /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, apart));
    return x;
}

// float16's bits: the exponent is mended by a product with 2^112, which is exact; NaN and infinity keep theirs.
__device__ __forceinline__ float from_half(unsigned bits) {
    unsigned size = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
    unsigned value = size >= 0x7c00u << 13 ? size | 0x7f800000u : (unsigned)__float_as_int(__int_as_float((int)size) * 0x1p112f);
    return __int_as_float((int)(value | sign));
}

__device__ __forceinline__ float from_bfloat16(unsigned bits) { return __int_as_float((int)(bits << 16)); }

// fp8 e4m3's bits, in the same way; its only special value is NaN.
__device__ __forceinline__ float from_fp8(unsigned bits) {
    unsigned size = (bits & 0x7f) << 20, sign = (bits & 0x80) << 24;
    unsigned value = size == 0x7fu << 20 ? 0x7fc00000u : (unsigned)__float_as_int(__int_as_float((int)size) * 0x1p120f);
    return __int_as_float((int)(value | sign));
}

// code / whole, correctly rounded, for the codes of the KV formats: a test holds every one of them against the division.
__device__ __forceinline__ float share(float code, float whole, float inverse) {
    float near = code * inverse;
    return __fmaf_rn(__fmaf_rn(-near, whole, code), inverse, near);
}
