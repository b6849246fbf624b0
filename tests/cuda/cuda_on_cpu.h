// CUDA's execution model on the CPU, as far as nanokv's kernels use it: their own source, compiled by a C++ compiler.
//
// A block's threads are fibers of one operating system thread. A fiber runs until it ends or comes to a barrier or a
// shuffle; then the next one runs, forwards, backwards or in random order. Blocks run one after the other. So a run is
// deterministic, and what it finds does not depend on luck:
//   - a global access outside the tensor that its pointer came from, or one that is not aligned to its size;
//   - a shared access outside the launch's bytes, and a read of shared memory that nobody wrote;
//   - two accesses of one address, at least one of them a write, that no barrier (of the block, or of the warp that both
//     threads are in) keeps in order, in shared and in global memory; between blocks nothing is in order;
//   - a barrier or a shuffle that not every thread of the block (lane of the warp) reaches, and threads that wait at
//     different ones.
// Every access is counted: bytes by tensor, as the threads make them, and each address once a block, which is what a
// block brings on chip at least. Multiply-adds of products (madd) are counted as FLOPs.
// It says nothing about speed, and of races only those in blocks that ran.
#pragma once
#define CUDA_ON_CPU

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

// --- fibers --------------------------------------------------------------------------------------------------------------

constexpr size_t STACK = 64 << 10;
constexpr unsigned WARP = 32, MOST_THREADS = 1024;

struct Place {  // where a fiber or the scheduler goes on
#if defined(__x86_64__)
    void* stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
    const void* bottom = nullptr;  // of its stack, for AddressSanitizer
    size_t size = 0;
    void* fake_stack = nullptr;
};

#if defined(__x86_64__)
extern "C" void cuda_on_cpu_switch(void** from, void* to);
asm(R"(
.text
.local cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
#endif

static void switch_to(Place& from, Place& to, bool ends = false) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(ends ? nullptr : &from.fake_stack, to.bottom, to.size);
#endif
    (void)ends;
#if defined(__x86_64__)
    cuda_on_cpu_switch(&from.stack_pointer, to.stack_pointer);
#else
    swapcontext(&from.context, &to.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

static void prepare(Place& place, char* stack, void (*entry)()) {
    place.bottom = stack;
    place.size = STACK;
    place.fake_stack = nullptr;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack, STACK);
#endif
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + STACK) & ~uintptr_t(15));
    *--top = nullptr;  // where the entry would return to: it never does
    *--top = reinterpret_cast<void*>(entry);
    place.stack_pointer = top - 6;
    std::fill(top - 6, top, nullptr);
#else
    getcontext(&place.context);
    place.context.uc_stack.ss_sp = stack;
    place.context.uc_stack.ss_size = STACK;
    place.context.uc_link = nullptr;
    makecontext(&place.context, entry, 0);
#endif
}

// --- a launch ------------------------------------------------------------------------------------------------------------

enum class Wait { none, block, warp, done };

// When an access happened: two of one block are in order if a barrier lies between them.
struct Time {
    uint32_t block = 0;  // 0: never
    uint32_t barrier = 0, warp_barrier = 0;
    uint32_t thread = 0;  // or MANY + warp, or EVERY
};
constexpr uint32_t MANY = MOST_THREADS, EVERY = MANY + MOST_THREADS / WARP;

struct Cell {  // of one byte of global or one word of shared memory
    Time read, write;
};

struct Tensor {
    uintptr_t begin = 0, end = 0;
    int64_t loads = 0, stores = 0, distinct_loads = 0, distinct_stores = 0;  // bytes
    std::vector<Cell> cells;
};

struct Fiber {
    Place place;
    dim3 index;
    Wait wait = Wait::none;
    int line = 0;  // of the barrier that it waits at
};

struct Machine {
    std::vector<Fiber> fibers;
    std::unique_ptr<char[]> stacks;
    Place scheduler;
    std::function<void()> body;
    std::vector<Tensor> tensors;
    std::vector<Cell> shared_cells;
    std::vector<uint32_t> shared;  // words
    std::vector<uint32_t> warp_barriers;
    uint32_t mailbox[2][MOST_THREADS];
    std::vector<unsigned char> parity;
    uint32_t current = 0, block = 0, barrier = 0;
    int64_t flops = 0;
    std::string failure;
};
static Machine machine;

[[noreturn]] __attribute__((format(printf, 1, 2))) static void fail(const char* format, ...) {
    char text[400];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    char where[160];
    snprintf(where, sizeof where, " (block %u %u %u, thread %u %u %u)", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
             threadIdx.y, threadIdx.z);
    machine.failure = std::string(text) + where;
    Fiber& fiber = machine.fibers[machine.current];
    fiber.wait = Wait::done;
    switch_to(fiber.place, machine.scheduler, true);
    __builtin_unreachable();
}

static void wait_for(Wait why, int line) {
    Fiber& fiber = machine.fibers[machine.current];
    fiber.wait = why;
    fiber.line = line;
    switch_to(fiber.place, machine.scheduler);
    threadIdx = fiber.index;
}

static void entry() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &machine.scheduler.bottom, &machine.scheduler.size);
#endif
    machine.body();
    Fiber& fiber = machine.fibers[machine.current];
    fiber.wait = Wait::done;
    switch_to(fiber.place, machine.scheduler, true);
}

static void release(size_t begin, size_t end, Wait what, const char* whom) {
    int line = 0;
    for (size_t i = begin; i < end; i++) {
        Fiber& fiber = machine.fibers[i];
        if (fiber.wait != what) continue;
        if (line && fiber.line != line && machine.failure.empty()) {
            char text[160];
            snprintf(text, sizeof text, "threads of one %s wait at different barriers: lines %d and %d", whom, line, fiber.line);
            machine.failure = text;
        }
        line = fiber.line;
        fiber.wait = Wait::none;
    }
}

static bool release_warps() {  // a warp goes on when all its lanes that have not ended wait for the warp
    bool any = false;
    for (size_t begin = 0; begin < machine.fibers.size(); begin += WARP) {
        size_t end = std::min<size_t>(begin + WARP, machine.fibers.size()), live = 0, waiting = 0;
        for (size_t i = begin; i < end; i++) {
            live += machine.fibers[i].wait != Wait::done;
            waiting += machine.fibers[i].wait == Wait::warp;
        }
        if (!waiting || waiting != live) continue;
        any = true;
        machine.warp_barriers[begin / WARP]++;
        release(begin, end, Wait::warp, "warp");
    }
    return any;
}

static bool release_block() {  // true while something is left to run
    size_t live = 0, waiting = 0;
    for (const Fiber& fiber : machine.fibers) {
        live += fiber.wait != Wait::done;
        waiting += fiber.wait == Wait::block;
    }
    if (!live) return false;
    if (waiting != live) {
        machine.failure = "a barrier that not every thread of the block (or lane of the warp) reaches";
        return false;
    }
    machine.barrier++;
    release(0, machine.fibers.size(), Wait::block, "block");
    return true;
}

enum Order { FORWARDS, BACKWARDS, RANDOM };

static void run_block(Order order, std::mt19937& random) {
    size_t count = machine.fibers.size();
    std::vector<uint32_t> turns(count);
    std::iota(turns.begin(), turns.end(), 0u);
    if (order == BACKWARDS) std::reverse(turns.begin(), turns.end());
    machine.block++;
    machine.barrier = 0;
    std::fill(machine.shared.begin(), machine.shared.end(), ~0u);  // NaN
    std::fill(machine.shared_cells.begin(), machine.shared_cells.end(), Cell());
    std::fill(machine.warp_barriers.begin(), machine.warp_barriers.end(), 0u);
    std::fill(machine.parity.begin(), machine.parity.end(), (unsigned char)0);
    for (size_t i = 0; i < count; i++) {
        Fiber& fiber = machine.fibers[i];
        fiber.index = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
        fiber.wait = Wait::none;
        prepare(fiber.place, machine.stacks.get() + i * STACK, entry);
    }
    do {
        do {
            if (order == RANDOM) std::shuffle(turns.begin(), turns.end(), random);
            for (uint32_t i : turns) {
                Fiber& fiber = machine.fibers[i];
                if (fiber.wait != Wait::none) continue;
                machine.current = i;
                threadIdx = fiber.index;
                switch_to(machine.scheduler, fiber.place);
                if (!machine.failure.empty()) return;
            }
        } while (release_warps() && machine.failure.empty());
    } while (machine.failure.empty() && release_block());
}

static void launch(dim3 grid, dim3 block, size_t shared_bytes, Order order, unsigned seed, std::function<void()> body) {
    gridDim = grid;
    blockDim = block;
    machine.failure.clear();
    machine.body = std::move(body);
    machine.block = 0;
    machine.flops = 0;
    size_t threads = size_t(block.x) * block.y * block.z;
    if (!machine.stacks) machine.stacks.reset(new char[MOST_THREADS * STACK]);
    machine.fibers.assign(threads, Fiber());
    machine.shared.assign(shared_bytes / 4, 0);
    machine.shared_cells.assign(shared_bytes / 4, Cell());
    machine.warp_barriers.assign((threads + WARP - 1) / WARP, 0);
    machine.parity.assign(threads, 0);
    for (Tensor& tensor : machine.tensors) tensor.cells.assign(tensor.end - tensor.begin, Cell());
    std::mt19937 random(seed);
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = dim3(x, y, z);
                run_block(order, random);
                if (!machine.failure.empty()) return;
            }
}

// --- memory --------------------------------------------------------------------------------------------------------------

static Time now() {
    Time time;
    time.block = machine.block;
    time.barrier = machine.barrier;
    time.warp_barrier = machine.warp_barriers[machine.current / WARP];
    time.thread = machine.current;
    return time;
}

static bool in_order(const Time& then, const Time& time) {
    if (!then.block) return true;
    if (then.block != time.block) return false;
    if (then.thread == time.thread || then.barrier != time.barrier) return true;
    uint32_t warp = then.thread >= MANY ? then.thread - MANY : then.thread / WARP;
    return warp == time.thread / WARP && then.warp_barrier != time.warp_barrier;
}

static void note_read(Cell& cell, const Time& time, const char* what, long long at) {
    if (!in_order(cell.write, time)) fail("%s at %lld is read without a barrier after another thread wrote it", what, at);
    Time then = cell.read;
    cell.read = time;
    if (then.block == time.block && then.barrier == time.barrier && then.thread != time.thread) {
        uint32_t warp = then.thread >= MANY ? then.thread - MANY : then.thread / WARP;
        if (warp != time.thread / WARP) cell.read.thread = EVERY;
        else if (then.warp_barrier == time.warp_barrier) cell.read.thread = MANY + warp;
    }
}

static void note_write(Cell& cell, const Time& time, const char* what, long long at) {
    if (!in_order(cell.write, time)) fail("%s at %lld is written twice without a barrier between", what, at);
    if (!in_order(cell.read, time)) fail("%s at %lld is written without a barrier after another thread read it", what, at);
    cell.write = time;
}

static int tensor_at(uintptr_t address) {
    for (size_t i = 0; i < machine.tensors.size(); i++)
        if (address >= machine.tensors[i].begin && address < std::max(machine.tensors[i].end, machine.tensors[i].begin + 1)) return int(i);
    return -1;
}

static Tensor& touch(int which, uintptr_t at, size_t size) {
    if (which < 0) fail("an address that belongs to no tensor of the launch is used");
    Tensor& tensor = machine.tensors[which];
    if (at < tensor.begin || at + size > tensor.end)
        fail("tensor %d has %lld bytes, and %zu at byte %lld are used", which, (long long)(tensor.end - tensor.begin), size,
             (long long)at - (long long)tensor.begin);
    if (at % size) fail("tensor %d: an access of %zu bytes at byte %lld is not aligned", which, size, (long long)(at - tensor.begin));
    return tensor;
}

static void load(int which, uintptr_t at, size_t size, void* to) {
    Tensor& tensor = touch(which, at, size);
    Time time = now();
    tensor.loads += size;
    for (size_t i = 0; i < size; i++) {
        Cell& cell = tensor.cells[at - tensor.begin + i];
        tensor.distinct_loads += cell.read.block != time.block;
        note_read(cell, time, "global memory", (long long)(at - tensor.begin + i));
    }
    memcpy(to, reinterpret_cast<void*>(at), size);
}

static void store(int which, uintptr_t at, size_t size, const void* from) {
    Tensor& tensor = touch(which, at, size);
    Time time = now();
    tensor.stores += size;
    for (size_t i = 0; i < size; i++) {
        Cell& cell = tensor.cells[at - tensor.begin + i];
        tensor.distinct_stores += cell.write.block != time.block;
        note_write(cell, time, "global memory", (long long)(at - tensor.begin + i));
    }
    memcpy(reinterpret_cast<void*>(at), from, size);
}

static Cell& shared_cell(long long word) {
    if (word < 0 || word >= (long long)machine.shared.size())
        fail("the block has %zu words of shared memory, and word %lld is used", machine.shared.size(), word);
    return machine.shared_cells[word];
}

// A pointer to T in global memory that knows its tensor.
template <class T> struct Pointer {
    uintptr_t at;
    int tensor;
    struct Place {
        uintptr_t at;
        int tensor;
        operator T() const {
            T value;
            load(tensor, at, sizeof(T), &value);
            return value;
        }
        void operator=(T value) { store(tensor, at, sizeof(T), &value); }
        void operator=(const Place& other) { *this = T(other); }
    };
    Pointer operator+(long long i) const { return {at + i * (long long)sizeof(T), tensor}; }
    Place operator[](long long i) const { return {at + i * (long long)sizeof(T), tensor}; }
};
template <class T> struct ReadPointer : Pointer<T> {
    ReadPointer(Pointer<T> from) : Pointer<T>(from) {}
    ReadPointer operator+(long long i) const { return Pointer<T>::operator+(i); }
    T operator[](long long i) const { return T(Pointer<T>::operator[](i)); }
    explicit operator bool() const { return this->at != 0; }
};

// A pointer into the block's shared memory, in words.
template <class T> struct SharedPointer {
    static_assert(sizeof(T) == 4, "words only");
    long long word;
    struct Place {
        long long word;
        operator T() const {
            Cell& cell = shared_cell(word);
            if (!cell.write.block) fail("word %lld of shared memory is read, and nobody wrote it", word);
            note_read(cell, now(), "shared memory", word);
            T value;
            memcpy(&value, &machine.shared[word], 4);
            return value;
        }
        void operator=(T value) {
            note_write(shared_cell(word), now(), "shared memory", word);
            memcpy(&machine.shared[word], &value, 4);
        }
        void operator=(const Place& other) { *this = T(other); }
    };
    SharedPointer operator+(long long i) const { return {word + i}; }
    Place operator[](long long i) const { return {word + i}; }
};

template <class T> T shuffle(T value, unsigned from, int line) {
    static_assert(sizeof(T) == 4, "32-bit shuffles only");
    unsigned me = machine.current, box = machine.parity[me] ^= 1;  // two boxes: nobody is more than one shuffle ahead
    memcpy(&machine.mailbox[box][me], &value, 4);
    wait_for(Wait::warp, line);
    unsigned other = me / WARP * WARP + from % WARP;
    if (other >= machine.fibers.size()) fail("a shuffle reads lane %u, which the warp does not have", from);
    T got;
    memcpy(&got, &machine.mailbox[box][other], 4);
    return got;
}

// --- arguments as a driver takes them ---------------------------------------------------------------------------------------

template <class P> struct Argument {
    static P of(void* at) { return *static_cast<P*>(at); }
};
template <class T> struct Argument<Pointer<T>> {
    static Pointer<T> of(void* at) { uintptr_t address = *static_cast<uintptr_t*>(at); return {address, tensor_at(address)}; }
};
template <class T> struct Argument<ReadPointer<T>> {
    static ReadPointer<T> of(void* at) { return Argument<Pointer<T>>::of(at); }
};
template <class... P, size_t... I> std::function<void()> bound(void (*kernel)(P...), void** values, std::index_sequence<I...>) {
    std::tuple<P...> arguments{Argument<P>::of(values[I])...};
    return [=] { std::apply(kernel, arguments); };
}
template <class... P> std::function<void()> bind(void (*kernel)(P...), void** values) {
    return bound(kernel, values, std::index_sequence_for<P...>());
}
using Binder = std::function<std::function<void()>(void**)>;

}  // namespace cuda_on_cpu

#define __global__ static
#define __device__ inline
#define __forceinline__
#define __launch_bounds__(...)
#define __syncthreads() cuda_on_cpu::wait_for(cuda_on_cpu::Wait::block, __LINE__)
#define __syncwarp() cuda_on_cpu::wait_for(cuda_on_cpu::Wait::warp, __LINE__)
#define __shfl_xor_sync(mask, value, apart) cuda_on_cpu::shuffle(value, cuda_on_cpu::machine.current % 32 ^ (apart), __LINE__)

template <class T> using In = cuda_on_cpu::ReadPointer<T>;
template <class T> using Out = cuda_on_cpu::Pointer<T>;
template <class T> using Shared = cuda_on_cpu::SharedPointer<T>;
template <class T> static Shared<T> shared(int word) { return {word}; }
template <class T> static In<T> in_at(long long address) {
    return cuda_on_cpu::Pointer<T>{uintptr_t(address), cuda_on_cpu::tensor_at(uintptr_t(address))};
}
template <class T> static Out<T> out_at(long long address) {
    return {uintptr_t(address), cuda_on_cpu::tensor_at(uintptr_t(address))};
}

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
static float2 load2(In<float> from, long long i) { float2 v; cuda_on_cpu::load(from.tensor, from.at + i * 4, 8, &v); return v; }
static float4 load4(In<float> from, long long i) { float4 v; cuda_on_cpu::load(from.tensor, from.at + i * 4, 16, &v); return v; }
template <class W, class T> static W load_as(In<T> from, long long i) {
    W v;
    cuda_on_cpu::load(from.tensor, from.at + i * (long long)sizeof(T), sizeof(W), &v);
    return v;
}
template <class W, class T> static void store_as(Out<T> to, long long i, W value) {
    cuda_on_cpu::store(to.tensor, to.at + i * (long long)sizeof(T), sizeof(W), &value);
}
static float4 load4(Shared<float> from, int i) {
    if ((from.word + i) % 4) cuda_on_cpu::fail("four words of shared memory at %lld are not aligned", from.word + i);
    return {from[i], from[i + 1], from[i + 2], from[i + 3]};
}

static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline float madd(float a, float b, float c) {
    cuda_on_cpu::machine.flops += 2;
    return __builtin_fmaf(a, b, c);
}
static inline float __int_as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline int __float_as_int(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
