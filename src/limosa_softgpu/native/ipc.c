/* Legacy IPC: the memory of cuMemAlloc, opened by another process.
 *
 * A handle names a block of the node and a place in it. From outside nothing shows that memory is shared so, as with the
 * real driver; who shares an event beside it, as PyTorch does, shows that (shared_event.c).
 *
 * A process that has memory of another one open can be checkpointed and not be restored (memory_has_imported).
 */
#define _GNU_SOURCE
#include "memory.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HANDLE_MAGIC 0x6370694Cu

struct handle {
    uint32_t magic;
    int32_t pid;
    uint64_t start_time; /* of the exporter: its pid may be somebody else's by now */
    uint64_t block, offset, bytes;
};
_Static_assert(sizeof(struct handle) <= CU_IPC_HANDLE_SIZE, "a handle has 64 bytes");

EXPORT CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)
{
    ENTER(CALL_INIT | CALL_CONTEXT | CALL_ASKS);
    struct handle handle = {.magic = HANDLE_MAGIC, .pid = getpid(), .start_time = node_start_time(getpid())};
    struct allocation *found;
    CUresult result = CUDA_ERROR_INVALID_VALUE;

    if (!pHandle)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    found = allocation_at(dptr);
    if (found && found->kind == MEMORY_PLAIN && !found->freeing) {
        handle.block = found->block->id;
        handle.offset = found->start - found->block->address;
        handle.bytes = found->bytes;
        result = CUDA_SUCCESS;
    }
    driver_unlock();
    if (result == CUDA_SUCCESS) {
        memset(pHandle, 0, sizeof(*pHandle));
        memcpy(pHandle, &handle, sizeof(handle));
    }
    RETURN(result);
}

/* Memory that is open already: the same address again. */
static struct allocation *opened(const struct handle *handle, const struct context *context)
{
    for (size_t i = 0; i < n_allocations; i++) {
        struct allocation *one = allocations[i];
        if (one->kind == MEMORY_IPC && one->block->id == handle->block && one->context == context
            && one->start - one->block->address == handle->offset)
            return one;
    }
    return NULL;
}

static struct allocation *import(const struct handle *handle, int fd, uint64_t block_bytes, int gpu,
                                 struct context *context)
{
    struct block *block = calloc(1, sizeof(*block));
    struct allocation *made = NULL;

    if (!block)
        return NULL;
    block->bytes = block_bytes;
    block->id = handle->block;
    block->ordinal = ordinal_of_gpu(gpu);
    block->context = context;
    block->imported = true;
    block->address = space_take(block_bytes, NODE_GRANULARITY, 0);
    if (block->address && block_map_fd(fd, block_bytes, block->address, PROT_READ | PROT_WRITE) == 0)
        made = allocation_add(MEMORY_IPC, block->address + handle->offset, handle->bytes);
    if (!made) {
        if (block->address)
            space_give(block->address, block_bytes);
        free(block);
        return NULL;
    }
    block->next = blocks;
    blocks = block;
    block->used = made->bytes;
    made->block = block;
    made->ordinal = block->ordinal;
    made->context = context;
    made->opens = 1;
    return made;
}

EXPORT CUresult CUDAAPI cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)
{
    ENTER(CALL_WORK);
    struct handle its;
    struct allocation *found;
    uint64_t bytes = 0;
    int gpu = 0, fd;
    CUresult result = CUDA_SUCCESS;

    memcpy(&its, &handle, sizeof(its));
    if (!pdptr || Flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS || its.magic != HANDLE_MAGIC)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (its.pid == getpid() && node_same_start(its.start_time, node_start_time(getpid())))
        RETURN(CUDA_ERROR_INVALID_CONTEXT); /* one's own memory */
    if (!node_same_start(node_start_time(its.pid), its.start_time))
        RETURN(CUDA_ERROR_INVALID_HANDLE);
    driver_lock();
    found = opened(&its, call_.context);
    if (found) {
        found->opens++;
    } else {
        fd = block_open(its.block);
        if (fd < 0 || node_identify(fd, NULL, &gpu, &bytes, NULL) != 0 || its.bytes > bytes
            || its.offset > bytes - its.bytes)
            result = CUDA_ERROR_INVALID_VALUE;
        else if (ordinal_of_gpu(gpu) < 0)
            result = CUDA_ERROR_INVALID_DEVICE;
        else if (!(found = import(&its, fd, bytes, gpu, call_.context)))
            result = CUDA_ERROR_MAP_FAILED;
        if (fd >= 0)
            close(fd);
    }
    if (found)
        *pdptr = found->start;
    driver_unlock();
    RETURN(result);
}

EXPORT CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr dptr)
{
    ENTER(CALL_WORK);
    struct allocation *found;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    bool last = false;

    driver_lock();
    found = allocation_at(dptr);
    if (found && found->kind == MEMORY_IPC && found->start == dptr && !found->freeing) {
        result = CUDA_SUCCESS;
        last = --found->opens == 0;
        found->freeing = last;
    }
    driver_unlock();
    if (last) {
        result = context_wait(call_.context);
        driver_lock();
        release(found);
        driver_unlock();
    }
    RETURN(result);
}
