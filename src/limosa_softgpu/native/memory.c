/* Plain, managed and host memory, and what a checkpoint does with it. */
#define _GNU_SOURCE
#include "memory.h"
#include "fault.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LARGEST ((size_t)1 << 46) /* nothing near this is ever there */
#define PITCH ((size_t)512)
#define PEER_HAZARD_BYTES ((size_t)512 << 20)
#define PAGE ((size_t)4096)

void memory_context_gone(struct context *context)
{
    driver_lock();
    for (size_t i = n_allocations; i-- > 0;) {
        struct allocation *one = allocations[i];
        if (one->context != context || one->freeing)
            continue;
        if (one->kind == MEMORY_HOST) {
            munmap((void *)(uintptr_t)one->start, round_up(one->bytes, PAGE));
            allocation_remove(one);
        } else if (one->kind == MEMORY_REGISTERED) {
            allocation_remove(one);
        } else {
            release(one);
        }
    }
    pools_trim(context->ordinal);
    driver_unlock();
}

/* ----------------------------------------------------------------------------------------------- device memory --- */

static CUresult allocate(struct call *call, enum memory_kind kind, size_t bytes, CUdeviceptr *address)
{
    struct allocation *made;
    CUresult result;

    if (!address || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > LARGEST || (call->faults & FAULT_NO_DEVICE_MEMORY))
        return CUDA_ERROR_OUT_OF_MEMORY;
    driver_lock();
    result = carve(kind, bytes, call->context->ordinal, call->context, NULL, &made);
    if (result == CUDA_SUCCESS)
        *address = made->start;
    driver_unlock();
    return result;
}

EXPORT CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
    ENTER(CALL_WORK);
    RETURN(allocate(&call_, MEMORY_PLAIN, bytesize, dptr));
}

EXPORT CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
                                           unsigned int ElementSizeBytes)
{
    ENTER(CALL_WORK);
    size_t pitch;
    CUresult result;

    if (!dptr || !pPitch || !WidthInBytes || !Height
        || (ElementSizeBytes != 4 && ElementSizeBytes != 8 && ElementSizeBytes != 16))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (WidthInBytes > LARGEST || Height > LARGEST / round_up(WidthInBytes, PITCH))
        RETURN(CUDA_ERROR_OUT_OF_MEMORY);
    pitch = round_up(WidthInBytes, PITCH);
    result = allocate(&call_, MEMORY_PLAIN, pitch * Height, dptr);
    if (result == CUDA_SUCCESS)
        *pPitch = pitch;
    RETURN(result);
}

/* Managed memory is the process's own, seen from outside as what it is on a real driver: one more mapping of
 * /dev/nvidia-uvm, among the libraries. It is not counted as device memory, and never survives a checkpoint: a process
 * that has any is refused. */
static CUresult allocate_managed(struct call *call, size_t bytes, unsigned flags, CUdeviceptr *address)
{
    size_t whole = round_up(bytes, NODE_GRANULARITY);
    CUdeviceptr at;
    struct allocation *made = NULL;
    void *memory = MAP_FAILED;
    int fd = open("/dev/nvidia-uvm", O_RDWR | O_CLOEXEC);

    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    driver_lock();
    at = space_take(whole, NODE_GRANULARITY, 0);
    if (at)
        memory = mmap((void *)(uintptr_t)at, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0);
    if (memory != MAP_FAILED)
        made = allocation_add(MEMORY_MANAGED, at, bytes);
    if (made) {
        made->ordinal = call->context->ordinal;
        made->context = call->context;
        made->flags = flags;
        *address = at;
    } else if (at) {
        space_give(at, whole);
    }
    driver_unlock();
    close(fd);
    return made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
    ENTER(CALL_WORK);
    if (!dptr || !bytesize || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (bytesize > LARGEST || (call_.faults & FAULT_NO_DEVICE_MEMORY))
        RETURN(CUDA_ERROR_OUT_OF_MEMORY);
    RETURN(allocate_managed(&call_, bytesize, flags, dptr));
}

/* Freeing waits for the work of both contexts: it may still be using the memory. */
static CUresult wait_for(struct context *current, struct context *owner)
{
    CUresult result = context_wait_for_memory(current);

    if (owner && owner != current && !owner->destroyed)
        context_wait_for_memory(owner);
    return result;
}

EXPORT CUresult CUDAAPI cuMemFree_v2(CUdeviceptr dptr)
{
    ENTER(CALL_WORK);
    struct allocation *found;
    struct context *owner = NULL;
    CUresult result = CUDA_SUCCESS;
    bool ours = false, waits = false;

    if (!dptr)
        RETURN(CUDA_SUCCESS); /* as free(NULL) */
    driver_lock();
    found = allocation_at(dptr);
    if (found && found->start == dptr && !found->freeing
        && (found->kind == MEMORY_PLAIN || found->kind == MEMORY_ASYNC || found->kind == MEMORY_MANAGED)) {
        ours = found->freeing = true;
        waits = found->kind != MEMORY_ASYNC;
        owner = found->context;
    }
    driver_unlock();
    if (!ours)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (waits)
        result = wait_for(call_.context, owner);
    driver_lock();
    release(found);
    driver_unlock();
    RETURN(result);
}

EXPORT CUresult CUDAAPI cuMemGetInfo_v2(size_t *free, size_t *total)
{
    ENTER(CALL_INIT | CALL_CONTEXT | CALL_ASKS);
    if (!free || !total)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    int gpu = context_gpu(call_.context);
    uint64_t memory = driver.node->gpus[gpu].memory, used = node_used(gpu);

    *total = memory;
    *free = used < memory && !(call_.faults & FAULT_NO_DEVICE_MEMORY) ? memory - used : 0;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
    ENTER(CALL_QUERY | CALL_CONTEXT);
    struct range range;

    if (!memory_find(dptr, &range) || range.kind == MEMORY_REGISTERED)
        RETURN(CUDA_ERROR_NOT_FOUND);
    if (pbase)
        *pbase = range.start;
    if (psize)
        *psize = range.bytes;
    RETURN(CUDA_SUCCESS);
}

/* ------------------------------------------------------------------------------------------------- host memory --- */

static CUresult allocate_host(struct call *call, void **address, size_t bytes, unsigned flags)
{
    struct allocation *made;
    size_t whole = round_up(bytes, PAGE);
    double since = node_now();
    void *at;

    if (!address
        || flags & ~(unsigned)(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED))
        return CUDA_ERROR_INVALID_VALUE;
    if (!bytes) {
        *address = NULL;
        return CUDA_SUCCESS;
    }
    if (bytes > LARGEST || (call->faults & FAULT_NO_HOST_MEMORY))
        return CUDA_ERROR_OUT_OF_MEMORY;
    at = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    driver_lock();
    made = allocation_add(MEMORY_HOST, (uintptr_t)at, bytes);
    if (made) {
        made->context = call->context;
        made->flags = flags;
    }
    driver_unlock();
    if (!made) {
        munmap(at, whole);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    node_pace(since, 0, bytes, driver.node->rates.pinned);
    *address = at;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemAllocHost_v2(void **pp, size_t bytesize)
{
    ENTER(CALL_WORK);
    RETURN(allocate_host(&call_, pp, bytesize, 0));
}

EXPORT CUresult CUDAAPI cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)
{
    ENTER(CALL_WORK);
    RETURN(allocate_host(&call_, pp, bytesize, Flags));
}

/* Take host memory off the table, its work being done. */
static CUresult forget_host(struct call *call, void *p, enum memory_kind kind, CUresult otherwise)
{
    struct allocation *found;
    struct context *owner = NULL;
    CUresult result;
    bool ours = false;

    driver_lock();
    found = allocation_at((uintptr_t)p);
    if (found && found->start == (uintptr_t)p && found->kind == kind && !found->freeing) {
        ours = found->freeing = true;
        owner = found->context;
    } else if (found && !found->freeing && found->ordinal < 0)
        otherwise = CUDA_ERROR_INVALID_VALUE; /* host memory, but not so, or not from its beginning */
    driver_unlock();
    if (!ours)
        return otherwise;
    result = wait_for(call->context, owner);
    driver_lock();
    if (kind == MEMORY_HOST)
        munmap(p, round_up(found->bytes, PAGE));
    allocation_remove(found);
    driver_unlock();
    return result;
}

EXPORT CUresult CUDAAPI cuMemFreeHost(void *p)
{
    ENTER(CALL_WORK);
    if (!p)
        RETURN(CUDA_SUCCESS);
    RETURN(forget_host(&call_, p, MEMORY_HOST, CUDA_ERROR_INVALID_VALUE));
}

EXPORT CUresult CUDAAPI cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
{
    ENTER(CALL_WORK);
    const unsigned known = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_IOMEMORY
        | CU_MEMHOSTREGISTER_READ_ONLY;
    uintptr_t start = (uintptr_t)p, first = start / PAGE * PAGE;
    struct allocation *made;
    CUresult result = CUDA_SUCCESS;

    if (!p || !bytesize || bytesize > LARGEST || Flags & ~known)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (Flags & CU_MEMHOSTREGISTER_IOMEMORY)
        RETURN(CUDA_ERROR_NOT_SUPPORTED);
    driver_lock();
    if (allocation_in(start, bytesize) && allocation_in(start, bytesize)->ordinal < 0) {
        result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    } else if (space_ours(start) || msync((void *)first, round_up(start + bytesize - first, PAGE), MS_ASYNC) != 0) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else if ((made = allocation_add(MEMORY_REGISTERED, start, bytesize))) {
        made->context = call_.context;
        made->flags = Flags;
    } else {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    driver_unlock();
    RETURN(result);
}

EXPORT CUresult CUDAAPI cuMemHostUnregister(void *p)
{
    ENTER(CALL_WORK);
    if (!p)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    RETURN(forget_host(&call_, p, MEMORY_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED));
}

EXPORT CUresult CUDAAPI cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags)
{
    ENTER(CALL_QUERY | CALL_CONTEXT);
    struct range range;

    if (!pdptr || !p || Flags || !memory_find((uintptr_t)p, &range)
        || (range.kind != MEMORY_HOST && range.kind != MEMORY_REGISTERED))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    *pdptr = (uintptr_t)p;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult CUDAAPI cuMemHostGetFlags(unsigned int *pFlags, void *p)
{
    ENTER(CALL_QUERY | CALL_CONTEXT);
    struct range range;

    if (!pFlags || !p || !memory_find((uintptr_t)p, &range) || range.kind != MEMORY_HOST)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    *pFlags = range.flags | CU_MEMHOSTALLOC_DEVICEMAP; /* with unified addresses it always is */
    RETURN(CUDA_SUCCESS);
}

/* --------------------------------------------------------------------------------------------- what others ask --- */

bool memory_find(CUdeviceptr address, struct range *found)
{
    struct allocation *allocation;
    struct vmm_place place;
    bool there = true;

    driver_lock();
    allocation = allocation_at(address);
    if (allocation)
        *found = (struct range){allocation->kind,    allocation->start,   allocation->bytes,
                                allocation->ordinal, allocation->context, allocation->flags};
    else if (vmm_find(address, &place) && place.start)
        *found = (struct range){MEMORY_VMM, place.start, place.bytes, place.ordinal, NULL, 0};
    else
        there = false;
    driver_unlock();
    return there;
}

static bool vmm_accessible(const struct vmm_place *place)
{
    for (int i = 0; i < NODE_MAX_GPUS; i++)
        if (place->access[i])
            return true;
    return false;
}

/* Whether a range lies in virtual memory all of whose mappings somebody may access: it may span several. */
static bool vmm_covers(CUdeviceptr address, size_t bytes)
{
    struct vmm_place place;
    CUdeviceptr end = address + bytes;

    while (vmm_find(address, &place) && place.start && vmm_accessible(&place)) {
        address = place.start + place.bytes;
        if (address >= end)
            return true;
    }
    return false;
}

CUresult memory_check(CUdeviceptr address, size_t bytes, bool device_only)
{
    struct allocation *allocation;
    bool allowed;

    if (!bytes)
        return CUDA_SUCCESS;
    if (!address || address + bytes < address)
        return CUDA_ERROR_INVALID_VALUE;
    driver_lock();
    allocation = allocation_in(address, bytes);
    if (allocation && address >= allocation->start)
        /* Host memory may be part pinned and part not, unless a kernel is to use it. */
        allowed = bytes <= allocation->start + allocation->bytes - address || (!device_only && allocation->ordinal < 0);
    else if (allocation)
        allowed = !device_only && allocation->ordinal < 0;
    else if (space_ours(address) || space_ours(address + bytes - 1))
        allowed = vmm_covers(address, bytes);
    else
        allowed = !device_only;
    driver_unlock();
    return allowed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

bool memory_reached(CUdeviceptr address, int ordinal)
{
    struct vmm_place place;

    driver_lock();
    bool reached = allocation_at(address) || !vmm_find(address, &place) || !place.start || place.access[ordinal];
    driver_unlock();
    return reached;
}

/* ------------------------------------------------------------------------------------------------ a checkpoint --- */

static bool any_of(enum memory_kind kind, size_t at_least)
{
    bool any = false;

    driver_lock();
    for (size_t i = 0; i < n_allocations && !any; i++)
        any = allocations[i]->kind == kind && allocations[i]->bytes >= at_least;
    driver_unlock();
    return any;
}

bool memory_has_managed(void)
{
    return any_of(MEMORY_MANAGED, 0);
}

bool memory_has_imported(void)
{
    return any_of(MEMORY_IPC, 0);
}

/* One allocation of 512 MiB or more, and peer access between the process's GPUs: the driver was seen to checkpoint such
 * processes and not to restore them (PyTorch's, not those of bare calls: a hazard to be switched on). */
bool memory_has_peer_hazard(void)
{
    bool peers = false;

    driver_lock();
    for (struct context *context = contexts; context; context = context->next)
        peers = peers || (!context->destroyed && context->peers);
    driver_unlock();
    return peers && any_of(MEMORY_PLAIN, PEER_HAZARD_BYTES);
}

uint64_t memory_bytes(void)
{
    uint64_t bytes = 0;

    driver_lock();
    for (struct block *block = blocks; block; block = block->next)
        bytes += block->imported ? 0 : block->bytes;
    driver_unlock();
    return bytes;
}

/* The list does not change while the gate is closed: saved and loaded in its order, without the lock. */
char *memory_save(char *to)
{
    for (struct block *block = blocks; block; block = block->next)
        if (!block->imported) {
            memcpy(to, (const void *)(uintptr_t)block->address, block->bytes);
            to += block->bytes;
        }
    return to;
}

const char *memory_load(const char *from)
{
    for (struct block *block = blocks; block; block = block->next)
        if (!block->imported) {
            memcpy((void *)(uintptr_t)block->address, from, block->bytes);
            from += block->bytes;
        }
    return from;
}

void memory_release(void)
{
    driver_lock();
    for (struct block *block = blocks; block; block = block->next)
        if (!block->away) {
            block_unmap(block->address, block->bytes, block->id);
            block->away = true;
        }
    driver_unlock();
}

int memory_claim(void)
{
    int error = 0;

    driver_lock();
    for (struct block *block = blocks; block && !error; block = block->next) {
        if (!block->away || block->imported)
            continue;
        error = block_take(gpu_after(driver.devices[block->ordinal]), block->bytes, NODE_PLAIN, block->address,
                           &block->id, NULL);
        block->away = error != 0;
    }
    driver_unlock();
    return error;
}

/* The memory itself is not there in a child (MADV_DONTFORK); what is known of it goes too. */
void memory_forked(void)
{
    blocks = NULL;
    n_allocations = 0;
    pools_forked();
}
