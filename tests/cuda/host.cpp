// What Python calls: one kernel of one source launched on the CPU. REGISTRY and SOURCE come from the build (machine.py).
#include "cuda_on_cpu.h"
#include SOURCE

static const std::map<std::string, cuda_on_cpu::Binder> kernels = {
#define KERNEL(...) {#__VA_ARGS__, [](void** values) { return cuda_on_cpu::bind(&__VA_ARGS__, values); }},
#include REGISTRY
};

extern "C" {

// values: the addresses of the arguments, as a driver takes them; sizes: grid, block and bytes of shared memory; order: 0
// forwards, 1 backwards, 2 random; tensors [count, 2]: address and bytes; counts [count, 4]: bytes loaded, stored, and both
// with every address once a block. Empty text: it went well.
const char* cuda_launch(const char* name, void** values, const unsigned* sizes, int order, unsigned seed, const uint64_t* tensors,
                        int count, int64_t* counts, int64_t* flops) {
    using namespace cuda_on_cpu;
    auto found = kernels.find(name);
    if (found == kernels.end()) return "no such kernel";
    machine.tensors.assign(count, Tensor());
    for (int i = 0; i < count; i++) {
        machine.tensors[i].begin = tensors[2 * i];
        machine.tensors[i].end = tensors[2 * i] + tensors[2 * i + 1];
    }
    launch(dim3(sizes[0], sizes[1], sizes[2]), dim3(sizes[3], sizes[4], sizes[5]), sizes[6], Order(order), seed, found->second(values));
    for (int i = 0; i < count; i++) {
        const Tensor& tensor = machine.tensors[i];
        int64_t all[4] = {tensor.loads, tensor.stores, tensor.distinct_loads, tensor.distinct_stores};
        std::copy(all, all + 4, counts + 4 * i);
    }
    *flops = machine.flops;
    return machine.failure.c_str();
}

}
