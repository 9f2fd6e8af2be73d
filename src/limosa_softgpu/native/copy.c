/* Copies and memsets: ordinary loads and stores, in a stream's order, as fast as the node's rates allow. */
#define _GNU_SOURCE
#include "queue.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define STAGED ((size_t)64 << 10) /* up to here an asynchronous copy from pageable memory returns at once */
#define MAX_PITCH ((size_t)2147483647)

/* One side of a copy: rows of `width` bytes, `pitch` apart, in layers that are `slice` apart. */
struct side {
    CUdeviceptr at;
    size_t pitch, slice;
    bool device; /* the caller says that it is device memory (pinned host memory may be named so too) */
};

struct copy {
    struct context *context;
    struct side to, from;
    size_t width, height, depth;
    double fixed, rate;
    bool peer; /* the caller names the contexts of both ends */
    char staged[]; /* what was at `from` when the copy was submitted */
};

/* Where an address lies: a device, or the host (-1). */
static int place(CUdeviceptr address, bool *pageable)
{
    struct range range;
    bool known = memory_find(address, &range);
    *pageable = !known;
    return known ? range.ordinal : -1;
}

static CUresult check(const struct side *side, size_t width, size_t height, size_t depth)
{
    size_t layers, rows, bytes;
    if (__builtin_mul_overflow(depth - 1, side->slice, &layers)
        || __builtin_mul_overflow(height - 1, side->pitch, &rows) || __builtin_add_overflow(layers, rows, &bytes)
        || __builtin_add_overflow(bytes, width, &bytes))
        return CUDA_ERROR_INVALID_VALUE;
    return memory_check(side->at, bytes, side->device);
}

static void run_copy(void *argument)
{
    const struct copy *copy = argument;
    double since = node_now();
    if (copy->context->sticky || copy->context->destroyed)
        return;
    /* The memory may have been freed since the copy was submitted. */
    if (check(&copy->to, copy->width, copy->height, copy->depth) != CUDA_SUCCESS
        || check(&copy->from, copy->width, copy->height, copy->depth) != CUDA_SUCCESS) {
        context_fail(copy->context, CUDA_ERROR_ILLEGAL_ADDRESS);
        return;
    }
    size_t width = copy->width, height = copy->height;
    if (copy->to.pitch == width && copy->from.pitch == width) {
        width *= height;
        height = 1;
    }
    for (size_t z = 0; z < copy->depth; z++)
        for (size_t y = 0; y < height; y++)
            memmove((void *)(uintptr_t)(copy->to.at + z * copy->to.slice + y * copy->to.pitch),
                    (const void *)(uintptr_t)(copy->from.at + z * copy->from.slice + y * copy->from.pitch), width);
    node_pace(since, copy->fixed, copy->width * copy->height * copy->depth, copy->rate);
}

/* Between two devices, or a device and the host (less than 0); between places of the host there is no limit (0). */
static double rate_between(const struct node_rates *rates, int to, int from)
{
    if (to < 0)
        return from < 0 ? 0 : rates->device_to_host;
    if (from < 0)
        return rates->host_to_device;
    return to == from ? rates->device_to_device : rates->peer;
}

/* Work whose end the caller need not see runs behind its back. */
static CUresult submit(struct context *context, CUstream stream, void (*run)(void *), const void *argument,
                       size_t bytes, bool wait)
{
    if (wait)
        return stream_run(context, stream, run, (void *)(uintptr_t)argument);
    void *kept = malloc(bytes);
    if (!kept)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(kept, argument, bytes);
    return stream_submit(context, stream, run, kept);
}

/* The driver's rules of what is over when a call returns: a copy with host memory of a synchronous function always; of an
 * asynchronous one if the memory is pageable, except that a small source is read at once. Between devices never. */
static CUresult start(struct context *current, CUstream stream, struct copy copy, bool synchronous)
{
    bool to_pageable, from_pageable;
    copy.context = stream_context(current, stream);
    if (!copy.context)
        return stream && stream != CU_STREAM_PER_THREAD ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_CONTEXT;
    size_t bytes;
    if (__builtin_mul_overflow(copy.width, copy.height, &bytes) || __builtin_mul_overflow(bytes, copy.depth, &bytes)
        || bytes > SIZE_MAX / 2)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes == 0)
        return CUDA_SUCCESS;
    CUresult result = check(&copy.to, copy.width, copy.height, copy.depth);
    if (result == CUDA_SUCCESS)
        result = check(&copy.from, copy.width, copy.height, copy.depth);
    if (result != CUDA_SUCCESS)
        return result;
    int to = place(copy.to.at, &to_pageable), from = place(copy.from.at, &from_pageable);
    /* Virtual memory is found only if the GPU that copies was given access to it; a call that names both contexts needs
     * none (measured). */
    int by = copy.context->ordinal;
    if (!copy.peer
        && ((to >= 0 && !memory_reached(copy.to.at, by)) || (from >= 0 && !memory_reached(copy.from.at, by))))
        return CUDA_ERROR_INVALID_VALUE;
    const struct node_rates *rates = &driver.node->rates;
    copy.fixed = to < 0 && from < 0 ? 0 : rates->copy_fixed;
    copy.rate = rate_between(rates, to, from);
    bool wait = synchronous ? to < 0 || from < 0 : to_pageable || from_pageable;
    if (wait && !synchronous && !to_pageable && bytes <= STAGED && copy.height == 1 && copy.depth == 1) {
        struct copy *kept = malloc(sizeof *kept + bytes);
        if (!kept)
            return CUDA_ERROR_OUT_OF_MEMORY;
        *kept = copy;
        memcpy(kept->staged, (const void *)(uintptr_t)copy.from.at, bytes);
        kept->from.at = (CUdeviceptr)(uintptr_t)kept->staged;
        return stream_submit(current, stream, run_copy, kept);
    }
    return submit(current, stream, run_copy, &copy, sizeof copy, wait);
}

static struct copy line(CUdeviceptr to, bool to_device, CUdeviceptr from, bool from_device, size_t bytes)
{
    return (struct copy){.to = {.at = to, .device = to_device},
                         .from = {.at = from, .device = from_device},
                         .width = bytes,
                         .height = 1,
                         .depth = 1};
}

/* A synchronous copy between contexts is in order with all work of both, earlier and later: it waits for the one and is
 * over before the other can be submitted. */
static CUresult peer_begin(struct context *current, CUcontext to_handle, CUcontext from_handle, bool synchronous)
{
    driver_lock();
    struct context *ends[] = {current, context_of_handle(to_handle), context_of_handle(from_handle)};
    bool known = ends[1] && !ends[1]->destroyed && ends[2] && !ends[2]->destroyed;
    driver_unlock();
    if (!known)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; i < 3 && synchronous && result == CUDA_SUCCESS; i++)
        result = context_wait(ends[i]);
    return result;
}

static CUresult peer(struct context *current, CUstream stream, CUdeviceptr to, CUcontext to_handle, CUdeviceptr from,
                     CUcontext from_handle, size_t bytes, bool synchronous)
{
    CUresult result = peer_begin(current, to_handle, from_handle, synchronous);
    if (result == CUDA_SUCCESS) {
        struct copy copy = line(to, true, from, true, bytes);
        copy.peer = true;
        result = start(current, stream, copy, synchronous);
    }
    return result == CUDA_SUCCESS && synchronous ? stream_wait(current, stream) : result;
}

static CUresult side_of(struct side *side, CUmemorytype type, const void *host, CUdeviceptr device, size_t pitch,
                        size_t layer, size_t x, size_t y, size_t z, const size_t extent[3])
{
    size_t needed = x + extent[0];
    switch ((int)type) {
    case CU_MEMORYTYPE_HOST: *side = (struct side){.at = (CUdeviceptr)(uintptr_t)host}; break;
    case CU_MEMORYTYPE_DEVICE: *side = (struct side){.at = device, .device = true}; break;
    case CU_MEMORYTYPE_UNIFIED: *side = (struct side){.at = device}; break;
    case CU_MEMORYTYPE_ARRAY: node_log("copies of arrays are not supported"); return CUDA_ERROR_NOT_SUPPORTED;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    bool many_rows = extent[1] > 1 || y, many_layers = extent[2] > 1 || z;
    if ((pitch || many_rows || many_layers) && (pitch < needed || pitch > MAX_PITCH))
        return CUDA_ERROR_INVALID_VALUE;
    if (many_layers && layer < y + extent[1])
        return CUDA_ERROR_INVALID_VALUE;
    side->pitch = pitch;
    side->slice = pitch * layer;
    side->at += z * side->slice + y * pitch + x;
    return CUDA_SUCCESS;
}

static CUresult copy_2d(struct context *current, CUstream stream, const CUDA_MEMCPY2D *c, bool synchronous)
{
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    struct copy copy = {.width = c->WidthInBytes, .height = c->Height, .depth = 1};
    const size_t extent[3] = {c->WidthInBytes, c->Height, 1};
    CUresult result = side_of(&copy.to, c->dstMemoryType, c->dstHost, c->dstDevice, c->dstPitch, 0, c->dstXInBytes,
                              c->dstY, 0, extent);
    if (result == CUDA_SUCCESS)
        result = side_of(&copy.from, c->srcMemoryType, c->srcHost, c->srcDevice, c->srcPitch, 0, c->srcXInBytes,
                         c->srcY, 0, extent);
    return result == CUDA_SUCCESS ? start(current, stream, copy, synchronous) : result;
}

static CUresult boxes(struct context *current, CUstream stream, const CUDA_MEMCPY3D *c, bool peer, bool synchronous)
{
    if (!c || c->srcLOD || c->dstLOD)
        return CUDA_ERROR_INVALID_VALUE;
    struct copy copy = {.width = c->WidthInBytes, .height = c->Height, .depth = c->Depth, .peer = peer};
    const size_t extent[3] = {c->WidthInBytes, c->Height, c->Depth};
    CUresult result = side_of(&copy.to, c->dstMemoryType, c->dstHost, c->dstDevice, c->dstPitch, c->dstHeight,
                              c->dstXInBytes, c->dstY, c->dstZ, extent);
    if (result == CUDA_SUCCESS)
        result = side_of(&copy.from, c->srcMemoryType, c->srcHost, c->srcDevice, c->srcPitch, c->srcHeight,
                         c->srcXInBytes, c->srcY, c->srcZ, extent);
    return result == CUDA_SUCCESS ? start(current, stream, copy, synchronous) : result;
}

static CUresult copy_3d(struct context *current, CUstream stream, const CUDA_MEMCPY3D *c, bool synchronous)
{
    return boxes(current, stream, c, false, synchronous);
}

static CUresult copy_3d_peer(struct context *current, CUstream stream, const CUDA_MEMCPY3D_PEER *c, bool synchronous)
{
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = peer_begin(current, c->dstContext, c->srcContext, synchronous);
    CUDA_MEMCPY3D copy = {.srcXInBytes = c->srcXInBytes,
                          .srcY = c->srcY,
                          .srcZ = c->srcZ,
                          .srcLOD = c->srcLOD,
                          .srcMemoryType = c->srcMemoryType,
                          .srcHost = c->srcHost,
                          .srcDevice = c->srcDevice,
                          .srcPitch = c->srcPitch,
                          .srcHeight = c->srcHeight,
                          .dstXInBytes = c->dstXInBytes,
                          .dstY = c->dstY,
                          .dstZ = c->dstZ,
                          .dstLOD = c->dstLOD,
                          .dstMemoryType = c->dstMemoryType,
                          .dstHost = c->dstHost,
                          .dstDevice = c->dstDevice,
                          .dstPitch = c->dstPitch,
                          .dstHeight = c->dstHeight,
                          .WidthInBytes = c->WidthInBytes,
                          .Height = c->Height,
                          .Depth = c->Depth};
    if (result == CUDA_SUCCESS)
        result = boxes(current, stream, &copy, true, synchronous);
    return result == CUDA_SUCCESS && synchronous ? stream_wait(current, stream) : result;
}

/* ------------------------------------------------------------------------------------------------------ memsets --- */

struct set {
    struct context *context;
    CUdeviceptr to;
    size_t pitch, width, height; /* width in elements */
    unsigned value, size;        /* of an element: 1, 2 or 4 bytes */
    double rate;
};

static CUresult check_set(const struct set *set)
{
    return memory_check(set->to, (set->height - 1) * set->pitch + set->width * set->size, true);
}

static void run_set(void *argument)
{
    const struct set *set = argument;
    double since = node_now();
    if (set->context->sticky || set->context->destroyed)
        return;
    if (check_set(set) != CUDA_SUCCESS) {
        context_fail(set->context, CUDA_ERROR_ILLEGAL_ADDRESS);
        return;
    }
    for (size_t y = 0; y < set->height; y++) {
        void *row = (void *)(uintptr_t)(set->to + y * set->pitch);
        if (set->size == 1)
            memset(row, (int)set->value, set->width);
        for (size_t x = 0; set->size == 2 && x < set->width; x++)
            ((uint16_t *)row)[x] = (uint16_t)set->value;
        for (size_t x = 0; set->size == 4 && x < set->width; x++)
            ((uint32_t *)row)[x] = set->value;
    }
    node_pace(since, 0, set->width * set->height * set->size, set->rate);
}

static CUresult fill(struct context *current, CUstream stream, CUdeviceptr to, size_t pitch, unsigned value,
                     unsigned size, size_t width, size_t height, bool synchronous)
{
    struct set set = {stream_context(current, stream),    to, pitch, width, height, value, size,
                      driver.node->rates.device_to_device};
    bool pageable;
    if (!set.context)
        return stream && stream != CU_STREAM_PER_THREAD ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_CONTEXT;
    if (width == 0 || height == 0)
        return CUDA_SUCCESS;
    if (width > SIZE_MAX / size || to % size)
        return CUDA_ERROR_INVALID_VALUE;
    if (height > 1 && (pitch % size || pitch < width * size || pitch > MAX_PITCH || height > SIZE_MAX / 2 / pitch))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = check_set(&set);
    if (result != CUDA_SUCCESS)
        return result;
    return submit(current, stream, run_set, &set, sizeof set, synchronous && place(to, &pageable) < 0);
}

/* ------------------------------------------------------------------------------------------------- entry points --- */

#define HOST(pointer) ((CUdeviceptr)(uintptr_t)(pointer))
#define ARGUMENTS(...) __VA_ARGS__

/* A synchronous function, in the legacy default stream and in the thread's own. */
#define SYNCHRONOUS(name, arguments, work, ...)                                                                        \
    EXPORT CUresult name(arguments)                                                                                    \
    {                                                                                                                  \
        ENTER(CALL_WORK);                                                                                              \
        RETURN(work(call_.context, CU_STREAM_LEGACY, __VA_ARGS__, true));                                              \
    }                                                                                                                  \
    EXPORT CUresult name##_ptds(arguments)                                                                             \
    {                                                                                                                  \
        ENTER(CALL_WORK);                                                                                              \
        RETURN(work(call_.context, CU_STREAM_PER_THREAD, __VA_ARGS__, true));                                          \
    }

#define ASYNCHRONOUS(name, arguments, work, ...)                                                                       \
    EXPORT CUresult name(arguments, CUstream stream)                                                                   \
    {                                                                                                                  \
        ENTER(CALL_WORK);                                                                                              \
        RETURN(work(call_.context, stream, __VA_ARGS__, false));                                                       \
    }                                                                                                                  \
    EXPORT CUresult name##_ptsz(arguments, CUstream stream)                                                            \
    {                                                                                                                  \
        ENTER(CALL_WORK);                                                                                              \
        RETURN(work(call_.context, PER_THREAD(stream), __VA_ARGS__, false));                                           \
    }

#define ANY_TO_ANY ARGUMENTS(CUdeviceptr to, CUdeviceptr from, size_t bytes)
#define TO_DEVICE ARGUMENTS(CUdeviceptr to, const void *from, size_t bytes)
#define TO_HOST ARGUMENTS(void *to, CUdeviceptr from, size_t bytes)
#define PEERS ARGUMENTS(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes)
#define COPY_2D ARGUMENTS(const CUDA_MEMCPY2D *copy)
#define COPY_3D ARGUMENTS(const CUDA_MEMCPY3D *copy)
#define COPY_3D_PEER ARGUMENTS(const CUDA_MEMCPY3D_PEER *copy)

SYNCHRONOUS(cuMemcpy, ANY_TO_ANY, start, line(to, false, from, false, bytes))
SYNCHRONOUS(cuMemcpyHtoD_v2, TO_DEVICE, start, line(to, true, HOST(from), false, bytes))
SYNCHRONOUS(cuMemcpyDtoH_v2, TO_HOST, start, line(HOST(to), false, from, true, bytes))
SYNCHRONOUS(cuMemcpyDtoD_v2, ANY_TO_ANY, start, line(to, true, from, true, bytes))
SYNCHRONOUS(cuMemcpyPeer, PEERS, peer, to, to_context, from, from_context, bytes)
SYNCHRONOUS(cuMemcpy2D_v2, COPY_2D, copy_2d, copy)
SYNCHRONOUS(cuMemcpy2DUnaligned_v2, COPY_2D, copy_2d, copy)
SYNCHRONOUS(cuMemcpy3D_v2, COPY_3D, copy_3d, copy)
SYNCHRONOUS(cuMemcpy3DPeer, COPY_3D_PEER, copy_3d_peer, copy)

ASYNCHRONOUS(cuMemcpyAsync, ANY_TO_ANY, start, line(to, false, from, false, bytes))
ASYNCHRONOUS(cuMemcpyHtoDAsync_v2, TO_DEVICE, start, line(to, true, HOST(from), false, bytes))
ASYNCHRONOUS(cuMemcpyDtoHAsync_v2, TO_HOST, start, line(HOST(to), false, from, true, bytes))
ASYNCHRONOUS(cuMemcpyDtoDAsync_v2, ANY_TO_ANY, start, line(to, true, from, true, bytes))
ASYNCHRONOUS(cuMemcpyPeerAsync, PEERS, peer, to, to_context, from, from_context, bytes)
ASYNCHRONOUS(cuMemcpy2DAsync_v2, COPY_2D, copy_2d, copy)
ASYNCHRONOUS(cuMemcpy3DAsync_v2, COPY_3D, copy_3d, copy)
ASYNCHRONOUS(cuMemcpy3DPeerAsync, COPY_3D_PEER, copy_3d_peer, copy)

#define LINE(type) ARGUMENTS(CUdeviceptr to, type value, size_t n)
#define AREA(type) ARGUMENTS(CUdeviceptr to, size_t pitch, type value, size_t width, size_t height)

SYNCHRONOUS(cuMemsetD8_v2, LINE(unsigned char), fill, to, 0, value, 1, n, 1)
SYNCHRONOUS(cuMemsetD16_v2, LINE(unsigned short), fill, to, 0, value, 2, n, 1)
SYNCHRONOUS(cuMemsetD32_v2, LINE(unsigned int), fill, to, 0, value, 4, n, 1)
SYNCHRONOUS(cuMemsetD2D8_v2, AREA(unsigned char), fill, to, pitch, value, 1, width, height)
SYNCHRONOUS(cuMemsetD2D16_v2, AREA(unsigned short), fill, to, pitch, value, 2, width, height)
SYNCHRONOUS(cuMemsetD2D32_v2, AREA(unsigned int), fill, to, pitch, value, 4, width, height)

ASYNCHRONOUS(cuMemsetD8Async, LINE(unsigned char), fill, to, 0, value, 1, n, 1)
ASYNCHRONOUS(cuMemsetD16Async, LINE(unsigned short), fill, to, 0, value, 2, n, 1)
ASYNCHRONOUS(cuMemsetD32Async, LINE(unsigned int), fill, to, 0, value, 4, n, 1)
ASYNCHRONOUS(cuMemsetD2D8Async, AREA(unsigned char), fill, to, pitch, value, 1, width, height)
ASYNCHRONOUS(cuMemsetD2D16Async, AREA(unsigned short), fill, to, pitch, value, 2, width, height)
ASYNCHRONOUS(cuMemsetD2D32Async, AREA(unsigned int), fill, to, pitch, value, 4, width, height)
