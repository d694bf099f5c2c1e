// Tensor maps modified on the device, in CUDA C++ with inline PTX. Declared to Numba in tensormap.py.

typedef unsigned char byte;

static __device__ __forceinline__ unsigned shared(const byte* p) { return (unsigned)__cvta_generic_to_shared(p); }

extern "C" __device__ int cu_tensormap_replace_global_address(byte* array, int offset, byte* pointer, long long index) {
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;"
                 :: "r"(shared(array + offset)), "l"(pointer + index) : "memory");
    return 0;
}

// The dimension is an immediate of the instruction, so there is one function per dimension.
#define DIM(dimension)                                                                                         \
    extern "C" __device__ int cu_tensormap_replace_global_dim_##dimension(byte* array, int offset, unsigned extent) { \
        asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], " #dimension ", %1;"       \
                     :: "r"(shared(array + offset)), "r"(extent) : "memory");                                      \
        return 0;                                                                                              \
    }
DIM(0) DIM(1) DIM(2) DIM(3) DIM(4)

#define STRIDE(dimension)                                                                                      \
    extern "C" __device__ int cu_tensormap_replace_global_stride_##dimension(byte* array, int offset,              \
                                                                              unsigned long long bytes) {      \
        asm volatile("tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%0], " #dimension ", %1;"    \
                     :: "r"(shared(array + offset)), "l"(bytes) : "memory");                                       \
        return 0;                                                                                              \
    }
STRIDE(0) STRIDE(1) STRIDE(2) STRIDE(3)

extern "C" __device__ int cu_tensormap_cp_fenceproxy(byte* pointer, long long index, byte* array, int offset) {
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
                 "[%0], [%1], 128;" :: "l"(pointer + index), "r"(shared(array + offset)) : "memory");
    return 0;
}

extern "C" __device__ int cu_fence_proxy_tensormap_acquire_gpu(byte* pointer, long long index) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(pointer + index) : "memory");
    return 0;
}
