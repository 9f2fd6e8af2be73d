/* The built-in kernels and their launches. Each gives the same answer for any grid and block on a real GPU, so it is done
 * once over the whole range, by the stream's thread. Addresses are checked first: a wrong one is the context's end, as on
 * a GPU, not the process's. */
#define _GNU_SOURCE
#include "kernels.h"
#include "queue.h"

#include "../../limosa/native/hash/chunk_hash.h"

#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_THREADS 1024 /* of a block */
#define SPIN_PAUSE 50000 /* ns between two looks at a flag */

/* -------------------------------------------------------------------------------------------------- the kernels --- */

/* Memory that another context allocated on another GPU is there only for who has enabled access to it. */
static bool reachable(const struct context *context, CUdeviceptr address)
{
    struct range range;
    if (!memory_find(address, &range) || range.ordinal < 0 || range.ordinal == context->ordinal)
        return true;
    if (range.kind != MEMORY_PLAIN && range.kind != MEMORY_ASYNC)
        return true;
    driver_lock();
    bool enabled = context->peers & (1u << range.ordinal);
    driver_unlock();
    return enabled;
}

static bool accessible(const struct launch *launch, uint64_t address, uint64_t n, size_t size)
{
    CUresult error = CUDA_SUCCESS;
    if (n == 0)
        return true;
    if (address % size)
        error = CUDA_ERROR_MISALIGNED_ADDRESS;
    else if (n > UINT64_MAX / size || memory_check(address, n * size, true) != CUDA_SUCCESS
             || !reachable(launch->context, address))
        error = CUDA_ERROR_ILLEGAL_ADDRESS;
    if (error)
        context_fail(launch->context, error);
    return !error;
}

#define WORD(i) (launch->parameters[i].word)
#define AT(i, type) ((type *)(uintptr_t)WORD(i))

static void fill(const struct launch *launch)
{
    uint64_t *p = AT(0, uint64_t), n = WORD(1), value = WORD(2);
    if (!accessible(launch, WORD(0), n, sizeof *p))
        return;
    for (uint64_t i = 0; i < n; i++)
        p[i] = value;
}

static void stamp(const struct launch *launch)
{
    uint64_t *p = AT(0, uint64_t), n = WORD(1), epoch = WORD(2), page = WORD(3);
    if (!accessible(launch, WORD(0), n, sizeof *p))
        return;
    for (uint64_t i = 0; i < n; i++)
        p[i] = epoch * 0x9E3779B97F4A7C15ull + (page * 512 + i) * 0xD1B54A32D192ED03ull;
}

/* Two roundings, as the kernel asks for: no fused multiply-add, whatever the compiler may do elsewhere. */
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
__attribute__((optimize("fp-contract=off")))
#endif
static void saxpy(const struct launch *launch)
{
    float *y = AT(0, float), a = launch->parameters[2].number;
    const float *x = AT(1, const float);
    uint64_t n = WORD(3);
    if (!accessible(launch, WORD(0), n, sizeof *y) || !accessible(launch, WORD(1), n, sizeof *x))
        return;
    for (uint64_t i = 0; i < n; i++)
        y[i] = y[i] + a * x[i];
}

static void hash(const struct launch *launch)
{
    const uint64_t *p = AT(0, const uint64_t);
    uint64_t n = WORD(1), sum = 0;
    if (!accessible(launch, WORD(0), n, sizeof *p))
        return;
    for (uint64_t i = 0; i < n; i++)
        sum += (p[i] ^ (p[i] >> 29)) * (2 * i + 1);
    if (sum && accessible(launch, WORD(2), 1, sizeof sum))
        __atomic_fetch_add(AT(2, uint64_t), sum, __ATOMIC_RELAXED);
}

/* Limosa's own, of many chunks in one launch. Sums are added to, as the parts of a real grid do. */
static void chunk_hash(const struct launch *launch)
{
    const struct hash_chunk *chunks = AT(0, const struct hash_chunk);
    const struct hash_table *table = AT(2, const struct hash_table);
    uint64_t n = WORD(1), strips = 0;
    if (!accessible(launch, WORD(0), 2 * n, sizeof n) || !accessible(launch, WORD(3), HASH_LANES * n, sizeof n))
        return;
    for (uint64_t i = 0; i < n; i++) {
        if (!accessible(launch, chunks[i].at, chunks[i].bytes / HASH_WORD, HASH_WORD))
            return;
        uint64_t needed = (chunks[i].bytes + HASH_TILE - 1) / HASH_TILE * HASH_COLUMNS;
        strips = needed > strips ? needed : strips;
    }
    if (!accessible(launch, WORD(2), (sizeof *table + strips * sizeof *table->strips) / HASH_WORD, HASH_WORD))
        return;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t sums[HASH_LANES];
        chunk_hash_sums((const void *)(uintptr_t)chunks[i].at, chunks[i].bytes, table, sums);
        for (int lane = 0; lane < HASH_LANES; lane++)
            __atomic_fetch_add(AT(3, uint64_t) + HASH_LANES * i + lane, sums[lane], __ATOMIC_RELAXED);
    }
}

/* Looks at the flag's memory anew each time: it may be freed, and the context be destroyed, under it. */
static void spin(const struct launch *launch)
{
    const struct timespec pause = {.tv_nsec = SPIN_PAUSE};
    while (!launch->context->destroyed && accessible(launch, WORD(0), 1, sizeof(uint32_t))
           && __atomic_load_n(AT(0, uint32_t), __ATOMIC_ACQUIRE) < launch->parameters[1].half)
        nanosleep(&pause, NULL);
}

static const struct kernel kernels[] = {
    {"fill", fill, 3, {8, 8, 8}}, {"stamp", stamp, 4, {8, 8, 8, 8}}, {"saxpy", saxpy, 4, {8, 8, 4, 8}},
    {"hash", hash, 3, {8, 8, 8}}, {"spin", spin, 2, {8, 4}},         {"chunk_hash", chunk_hash, 4, {8, 8, 8, 8}},
};

const struct kernel *kernel_find(const char *name)
{
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
        if (strcmp(kernels[i].name, name) == 0)
            return &kernels[i];
    return NULL;
}

size_t kernel_offset(const struct kernel *kernel, int parameter)
{
    size_t offset = 0;
    for (int i = 0;; i++) {
        offset = (offset + kernel->sizes[i] - 1) / kernel->sizes[i] * kernel->sizes[i];
        if (i == parameter)
            return offset;
        offset += kernel->sizes[i];
    }
}

/* ----------------------------------------------------------------------------------------------------- launches --- */

static void run_launch(void *argument)
{
    const struct launch *launch = argument;
    if (!launch->context->sticky && !launch->context->destroyed)
        launch->kernel->run(launch);
}

static CUresult take_parameters(struct launch *launch, void **params, void **extra)
{
    const struct kernel *kernel = launch->kernel;
    const char *buffer = NULL;
    size_t bytes = 0;
    if (!params == !extra)
        return CUDA_ERROR_INVALID_VALUE; /* one of the two ways; every kernel has parameters */
    for (int i = 0; extra && extra[i] != CU_LAUNCH_PARAM_END; i += 2) {
        if (extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            buffer = extra[i + 1];
        else if (extra[i] == CU_LAUNCH_PARAM_BUFFER_SIZE && extra[i + 1])
            bytes = *(size_t *)extra[i + 1];
        else
            return CUDA_ERROR_INVALID_VALUE;
    }
    int last = kernel->n_parameters - 1;
    if (extra && (!buffer || bytes < kernel_offset(kernel, last) + kernel->sizes[last]))
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i <= last; i++) {
        const void *from = params ? params[i] : buffer + kernel_offset(kernel, i);
        if (!from)
            return CUDA_ERROR_INVALID_VALUE;
        memcpy(&launch->parameters[i], from, kernel->sizes[i]);
    }
    return CUDA_SUCCESS;
}

static CUresult check_shape(const CUlaunchConfig *c, const struct function *function)
{
    uint64_t threads = (uint64_t)c->blockDimX * c->blockDimY;
    if (!c->gridDimX || !c->gridDimY || !c->gridDimZ || !c->blockDimX || !c->blockDimY || !c->blockDimZ)
        return CUDA_ERROR_INVALID_VALUE;
    if (c->gridDimX > 2147483647 || c->gridDimY > 65535 || c->gridDimZ > 65535)
        return CUDA_ERROR_INVALID_VALUE;
    if (c->blockDimX > MAX_THREADS || c->blockDimY > MAX_THREADS || c->blockDimZ > 64
        || threads * c->blockDimZ > MAX_THREADS)
        return CUDA_ERROR_INVALID_VALUE;
    if (c->sharedMemBytes > (unsigned)function->dynamic_shared)
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

static CUresult launch(struct context *current, const CUlaunchConfig *config, CUfunction handle, void **params,
                       void **extra)
{
    struct function function;
    struct context *loaded_in;
    if (!function_find(handle, &function, &loaded_in) || (loaded_in && loaded_in != current)
        || stream_context(current, config->hStream) != current)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = check_shape(config, &function);
    struct launch *launch = result == CUDA_SUCCESS ? calloc(1, sizeof *launch) : NULL;
    if (!launch)
        return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
    launch->context = current;
    launch->kernel = function.kernel;
    result = take_parameters(launch, params, extra);
    if (result == CUDA_SUCCESS)
        return stream_submit(current, config->hStream, run_launch, launch);
    free(launch);
    return result;
}

/* An event to fire, or a node that the device may change, cannot be left out without being noticed; other attributes
 * say how a kernel is to be spread over a GPU, which means nothing here. */
static CUresult check_attributes(const CUlaunchConfig *config)
{
    if (!config || (config->numAttrs && !config->attrs))
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        int id = (int)config->attrs[i].id;
        if (id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT || id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT
            || id == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE) {
            node_log("launch attribute %d is not supported", id);
            return CUDA_ERROR_NOT_SUPPORTED;
        }
    }
    return CUDA_SUCCESS;
}

#define CONFIG(of) &(CUlaunchConfig){grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, of, NULL, 0}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                               unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
                               CUstream stream, void **params, void **extra)
{
    ENTER(CALL_WORK);
    RETURN(launch(call_.context, CONFIG(stream), function, params, extra));
}

EXPORT CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                    unsigned int block_x, unsigned int block_y, unsigned int block_z,
                                    unsigned int shared, CUstream stream, void **params, void **extra)
{
    ENTER(CALL_WORK);
    RETURN(launch(call_.context, CONFIG(PER_THREAD(stream)), function, params, extra));
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
    ENTER(CALL_WORK);
    CUresult result = check_attributes(config);
    RETURN(result == CUDA_SUCCESS ? launch(call_.context, config, function, params, extra) : result);
}

EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
    ENTER(CALL_WORK);
    CUresult result = check_attributes(config);
    if (result != CUDA_SUCCESS)
        RETURN(result);
    CUlaunchConfig mine = *config;
    mine.hStream = PER_THREAD(config->hStream);
    RETURN(launch(call_.context, &mine, function, params, extra));
}
