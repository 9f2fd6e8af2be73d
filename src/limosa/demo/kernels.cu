/* The kernels that Limosa's demo and tests run, on a real GPU from kernels.ptx, on the software GPU built in by name.
 *
 * Each strides over the whole grid, so that it is right with any grid and any block, and its answer does not depend on
 * how many of either there are. kernels.ptx is what `nvcc --ptx --gpu-architecture=compute_75 kernels.cu` makes (PTX for
 * an old architecture is compiled by the driver for whatever GPU there is), with `.version 6.3` instead of the
 * compiler's own: the oldest that knows that architecture, as a driver refuses PTX that is newer than itself.
 */
typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ u64 first() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ u64 stride() { return (u64)gridDim.x * blockDim.x; }

extern "C" __global__ void fill(u64 *p, u64 n, u64 value) {
    for (u64 i = first(); i < n; i += stride())
        p[i] = value;
}

/* A page (512 words) says of itself where it is and when it was written; n may be any number of words. */
extern "C" __global__ void stamp(u64 *p, u64 n, u64 epoch, u64 page) {
    for (u64 i = first(); i < n; i += stride())
        p[i] = epoch * 0x9E3779B97F4A7C15ull + (page * 512 + i) * 0xD1B54A32D192ED03ull;
}

/* Two roundings: a fused multiply-add would give other bits than a CPU that has none. */
extern "C" __global__ void saxpy(float *y, const float *x, float a, u64 n) {
    for (u64 i = first(); i < n; i += stride())
        y[i] = __fadd_rn(y[i], __fmul_rn(a, x[i]));
}

/* Integers, so that the order of the additions does not matter. */
extern "C" __global__ void hash(const u64 *p, u64 n, u64 *out) {
    u64 sum = 0;
    for (u64 i = first(); i < n; i += stride())
        sum += (p[i] ^ (p[i] >> 29)) * (2 * i + 1);
    if (sum)
        atomicAdd(out, sum);
}

extern "C" __global__ void spin(volatile u32 *flag, u32 until) {
    while (*flag < until)
        ;
}
