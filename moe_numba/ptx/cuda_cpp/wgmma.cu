// One GEMM main-loop step in CUDA C++ with inline PTX: a 64 x 64 tile, 128 bytes of k. See wgmma.py.

typedef unsigned char byte;
typedef unsigned long long u64;

// Rows of 128 bytes with the 128-byte swizzle, as TMA writes them; 8 rows are 1024 bytes.
static __device__ __forceinline__ u64 descriptor(const byte* tile) {
    return 1ull << 62 | (u64)(1024 >> 4) << 32 | 1ull << 16 | ((unsigned)__cvta_generic_to_shared(tile) & 0x3FFFF) >> 4;
}

static __device__ __forceinline__ void multiply(float* d, u64 a, u64 b, int scale_d) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(scale_d));
}

extern "C" __device__ int cu_wgmma_step_m64n64k128_e4m3(float* acc, byte* array, int a_offset, int b_offset, int accumulate) {
    u64 a = descriptor(array + a_offset), b = descriptor(array + b_offset);
    float d[32];
#pragma unroll
    for (int i = 0; i < 32; i++) d[i] = acc[i];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply(d, a, b, accumulate);
    multiply(d, a + 2, b + 2, 1);
    multiply(d, a + 4, b + 4, 1);
    multiply(d, a + 6, b + 6, 1);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 32; i++) acc[i] = d[i];
    return 0;
}
