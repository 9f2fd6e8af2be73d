/* Memory in stream order: cuMemAllocAsync, cuMemFreeAsync, and the pools behind them.
 *
 * An allocation is there at once, which every order of streams allows; a free takes effect when its stream gets to it.
 * A pool gives blocks back as soon as they are unused, as far as its release threshold wants it; a driver waits with that
 * for the next synchronise.
 */
#include "memory.h"
#include "fault.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct CUmemPoolHandle_st {
    struct CUmemPoolHandle_st *next;
    int ordinal;
    bool standard; /* the device's default pool */
    bool destroyed; /* by the application; goes with its last allocation */
    size_t largest; /* 0: no limit */
    int reuse[3];   /* kept and told, of no consequence here */
    cuuint64_t threshold, reserved, reserved_high, used, used_high;
    unsigned access[NODE_MAX_GPUS];
};

static CUmemoryPool pools;
static CUmemoryPool standard_pool[NODE_MAX_GPUS], current_pool[NODE_MAX_GPUS]; /* by ordinal; NULL: the default one */
static int n_freeing; /* frees that their streams have not come to */

/* ------------------------------------------------------------------------------------- what memory.c tells us --- */

void pool_grown(CUmemoryPool pool, size_t bytes)
{
    pool->reserved += bytes;
    if (pool->reserved > pool->reserved_high)
        pool->reserved_high = pool->reserved;
}

void pool_shrunk(CUmemoryPool pool, size_t bytes)
{
    pool->reserved -= bytes;
}

void pool_used(CUmemoryPool pool, size_t bytes)
{
    pool->used += bytes;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
}

/* Give unused blocks back until the pool keeps no more than so many bytes. */
static bool pool_trim(CUmemoryPool pool, cuuint64_t keep)
{
    bool any = false;
    struct block *next;

    for (struct block *block = blocks; block && pool->reserved > keep; block = next) {
        next = block->next;
        if (block->pool != pool || block->used || pool->reserved - block->bytes < keep)
            continue;
        block_destroy(block);
        any = true;
    }
    return any;
}

static void pool_drop(CUmemoryPool pool)
{
    pool_trim(pool, 0);
    for (CUmemoryPool *at = &pools; *at; at = &(*at)->next)
        if (*at == pool) {
            *at = pool->next;
            break;
        }
    free(pool);
}

void pool_unused(CUmemoryPool pool, size_t bytes)
{
    pool->used -= bytes;
    if (pool->destroyed && !pool->used)
        pool_drop(pool);
    else
        pool_trim(pool, pool->destroyed ? 0 : pool->threshold);
}

bool pool_admits(CUmemoryPool pool, size_t bytes)
{
    return !pool->largest || pool->reserved + bytes <= pool->largest;
}

bool pools_trim(int ordinal)
{
    bool any = false;

    for (CUmemoryPool pool = pools; pool; pool = pool->next)
        if (ordinal < 0 || pool->ordinal == ordinal)
            any = pool_trim(pool, 0) || any;
    return any;
}

CUmemoryPool pool_of(const struct allocation *allocation)
{
    return allocation->block ? allocation->block->pool : NULL;
}

void pools_forked(void)
{
    pools = NULL;
    memset(standard_pool, 0, sizeof(standard_pool));
    memset(current_pool, 0, sizeof(current_pool));
    n_freeing = 0;
}

/* ------------------------------------------------------------------------------------------------------ pools --- */

static CUmemoryPool pool_make(int ordinal)
{
    CUmemoryPool pool = calloc(1, sizeof(*pool));

    if (!pool)
        return NULL;
    pool->ordinal = ordinal;
    pool->access[ordinal] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    for (int i = 0; i < 3; i++)
        pool->reuse[i] = 1;
    pool->next = pools;
    pools = pool;
    return pool;
}

static CUmemoryPool pool_standard(int ordinal)
{
    if (!standard_pool[ordinal]) {
        standard_pool[ordinal] = pool_make(ordinal);
        if (standard_pool[ordinal])
            standard_pool[ordinal]->standard = true;
    }
    return standard_pool[ordinal];
}

static CUmemoryPool pool_current(int ordinal)
{
    return current_pool[ordinal] ? current_pool[ordinal] : pool_standard(ordinal);
}

static bool pool_valid(CUmemoryPool pool)
{
    for (CUmemoryPool one = pools; one; one = one->next)
        if (one == pool)
            return !one->destroyed;
    return false;
}

static bool device_valid(CUdevice device)
{
    return device >= 0 && device < driver.n_devices;
}

EXPORT CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
    ENTER(CALL_MANAGE);
    CUmemoryPool made;

    if (!pool || !poolProps || poolProps->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (poolProps->location.type != CU_MEM_LOCATION_TYPE_DEVICE || poolProps->handleTypes != CU_MEM_HANDLE_TYPE_NONE
        || poolProps->usage) {
        node_log("cuMemPoolCreate: only pools of device memory that are not shared are implemented");
        RETURN(CUDA_ERROR_NOT_SUPPORTED);
    }
    if (!device_valid(poolProps->location.id))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    driver_lock();
    made = pool_make(poolProps->location.id);
    if (made) {
        made->largest = poolProps->maxSize;
        *pool = made;
    }
    driver_unlock();
    RETURN(made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

EXPORT CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool pool)
{
    ENTER(CALL_MANAGE);
    CUresult result = CUDA_ERROR_INVALID_VALUE;

    driver_lock();
    if (pool_valid(pool) && !pool->standard) {
        if (current_pool[pool->ordinal] == pool)
            current_pool[pool->ordinal] = NULL;
        pool->destroyed = true;
        if (!pool->used)
            pool_drop(pool);
        result = CUDA_SUCCESS;
    }
    driver_unlock();
    RETURN(result);
}

EXPORT CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)
{
    ENTER(CALL_MANAGE);
    bool valid;

    driver_lock();
    valid = pool_valid(pool);
    if (valid)
        pool_trim(pool, minBytesToKeep);
    driver_unlock();
    RETURN(valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

static CUresult attribute(CUmemoryPool pool, CUmemPool_attribute name, void *value, bool set)
{
    cuuint64_t *number;

    if (!value || !pool_valid(pool))
        return CUDA_ERROR_INVALID_VALUE;
    switch (name) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: {
        int *flag = &pool->reuse[name - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES];
        if (set)
            *flag = *(int *)value != 0;
        else
            *(int *)value = *flag;
        return CUDA_SUCCESS;
    }
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: number = &pool->threshold; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: number = &pool->reserved; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: number = &pool->reserved_high; break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: number = &pool->used; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: number = &pool->used_high; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    if (!set) {
        *(cuuint64_t *)value = *number;
        return CUDA_SUCCESS;
    }
    switch (name) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *number = *(cuuint64_t *)value; return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        if (*(cuuint64_t *)value)
            return CUDA_ERROR_INVALID_VALUE;
        *number = name == CU_MEMPOOL_ATTR_USED_MEM_HIGH ? pool->used : pool->reserved; /* it begins again from now */
        return CUDA_SUCCESS;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
    ENTER(CALL_MANAGE);
    driver_lock();
    CUresult result = attribute(pool, attr, value, true);
    driver_unlock();
    RETURN(result);
}

EXPORT CUresult CUDAAPI cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)
{
    ENTER(CALL_MANAGE);
    driver_lock();
    CUresult result = attribute(pool, attr, value, false);
    driver_unlock();
    RETURN(result);
}

/* Every GPU of a node reaches every other's memory; what is set here is kept and told. */
EXPORT CUresult CUDAAPI cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
    ENTER(CALL_MANAGE);
    CUresult result = CUDA_SUCCESS;

    if (!map || !count)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    if (!pool_valid(pool))
        result = CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        bool none = map[i].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE;
        bool device = map[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE;
        if (device && !device_valid(map[i].location.id))
            result = CUDA_ERROR_INVALID_DEVICE;
        else if (!device || (!none && map[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
                 || (none && map[i].location.id == pool->ordinal)) /* its own device's access cannot be taken away */
            result = CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        pool->access[map[i].location.id] = map[i].flags;
    driver_unlock();
    RETURN(result);
}

EXPORT CUresult CUDAAPI cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool memPool, CUmemLocation *location)
{
    ENTER(CALL_MANAGE);
    CUresult result = CUDA_SUCCESS;

    if (!flags || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!device_valid(location->id))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    driver_lock();
    if (pool_valid(memPool))
        *flags = (CUmemAccess_flags)memPool->access[location->id];
    else
        result = CUDA_ERROR_INVALID_VALUE;
    driver_unlock();
    RETURN(result);
}

static CUresult pool_get(CUmemoryPool *answer, CUdevice device, CUmemoryPool (*which)(int))
{
    if (!answer)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device))
        return CUDA_ERROR_INVALID_DEVICE;
    driver_lock();
    *answer = which(device);
    driver_unlock();
    return *answer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)
{
    ENTER(CALL_MANAGE);
    RETURN(pool_get(pool_out, dev, pool_standard));
}

EXPORT CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
    ENTER(CALL_MANAGE);
    RETURN(pool_get(pool, dev, pool_current));
}

EXPORT CUresult CUDAAPI cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
    ENTER(CALL_MANAGE);
    CUresult result = CUDA_ERROR_INVALID_VALUE;

    if (!device_valid(dev))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    driver_lock();
    if (pool_valid(pool) && pool->ordinal == dev) {
        current_pool[dev] = pool;
        result = CUDA_SUCCESS;
    }
    driver_unlock();
    RETURN(result);
}

/* ------------------------------------------------------------------------------------------ allocate and free --- */

/* A full GPU may only be full of what streams are about to free: worth a moment. */
#define FREEING_TRIES 100
#define FREEING_PAUSE_NS 10000000

/* The context whose stream it is: its device, not the current one's, is where the memory lies. */
static CUresult owner_of(const struct call *call, CUstream stream, struct context **context)
{
    *context = stream_context(call->context, stream);
    if (*context)
        return CUDA_SUCCESS;
    return call->context ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult allocate_async(struct call *call, CUdeviceptr *address, size_t bytes, CUmemoryPool pool,
                               CUstream stream)
{
    struct context *context;
    struct allocation *made;
    CUresult result;

    if (!address)
        return CUDA_ERROR_INVALID_VALUE;
    result = owner_of(call, stream, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!bytes) {
        *address = 0;
        return CUDA_SUCCESS;
    }
    if (bytes > (size_t)1 << 46 || (call->faults & FAULT_NO_DEVICE_MEMORY))
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (int i = 0;; i++) {
        bool again;

        driver_lock();
        CUmemoryPool from = pool ? pool : pool_current(context->ordinal);
        if (!from)
            result = CUDA_ERROR_OUT_OF_MEMORY;
        else if (!pool_valid(from))
            result = CUDA_ERROR_INVALID_VALUE;
        else
            result = carve(MEMORY_ASYNC, bytes, from->ordinal, context, from, &made);
        if (result == CUDA_SUCCESS)
            *address = made->start;
        again = result == CUDA_ERROR_OUT_OF_MEMORY && n_freeing > 0 && i < FREEING_TRIES;
        driver_unlock();
        if (!again)
            return result;
        nanosleep(&(struct timespec){.tv_nsec = FREEING_PAUSE_NS}, NULL);
    }
}

static void free_now(void *argument)
{
    driver_lock();
    release(*(struct allocation **)argument);
    n_freeing--;
    driver_unlock();
}

static CUresult free_async(struct call *call, CUdeviceptr address, CUstream stream)
{
    struct allocation **argument, *found;
    struct context *context;
    CUresult result = owner_of(call, stream, &context);

    if (result != CUDA_SUCCESS)
        return result;
    if (!address)
        return CUDA_SUCCESS;
    argument = malloc(sizeof(struct allocation *));
    if (!argument)
        return CUDA_ERROR_OUT_OF_MEMORY;
    driver_lock();
    found = allocation_at(address);
    if (found
        && (found->start != address || found->freeing || (found->kind != MEMORY_ASYNC && found->kind != MEMORY_PLAIN)))
        found = NULL;
    if (found) {
        found->freeing = true;
        n_freeing++;
    }
    driver_unlock();
    if (!found) {
        free(argument);
        return CUDA_ERROR_INVALID_VALUE;
    }
    *argument = found;
    result = stream_submit(context, stream, free_now, argument); /* the argument is its own from here on */
    if (result != CUDA_SUCCESS) {
        driver_lock();
        found->freeing = false;
        n_freeing--;
        driver_unlock();
    }
    return result;
}

EXPORT CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
    ENTER(CALL_MANAGE);
    RETURN(allocate_async(&call_, dptr, bytesize, NULL, hStream));
}

EXPORT CUresult CUDAAPI cuMemAllocAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
    ENTER(CALL_MANAGE);
    RETURN(allocate_async(&call_, dptr, bytesize, NULL, PER_THREAD(hStream)));
}

EXPORT CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)
{
    ENTER(CALL_MANAGE);
    RETURN(pool ? allocate_async(&call_, dptr, bytesize, pool, hStream) : CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult CUDAAPI cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool,
                                                     CUstream hStream)
{
    ENTER(CALL_MANAGE);
    RETURN(pool ? allocate_async(&call_, dptr, bytesize, pool, PER_THREAD(hStream)) : CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
{
    ENTER(CALL_MANAGE);
    RETURN(free_async(&call_, dptr, hStream));
}

EXPORT CUresult CUDAAPI cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream hStream)
{
    ENTER(CALL_MANAGE);
    RETURN(free_async(&call_, dptr, PER_THREAD(hStream)));
}
