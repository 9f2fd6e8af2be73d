/* The virtual memory group: reservations of address space, memory handles, and mappings of the one into the other.
 *
 * A memory is one block of the node. It lives while the application has a reference to its handle or a mapping of it,
 * and beyond that while anybody else has a descriptor of it. What a checkpoint does with it is in vmm_saved.c.
 */
#define _GNU_SOURCE
#include "vmm.h"
#include "fault.h"
#include "memory.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE ((size_t)4096)

struct table vmm_reservations, vmm_mappings;
struct memory **vmm_memories;
size_t vmm_n_memories;
static size_t room_memories;

/* ------------------------------------------------------------------------------------------------------ tables --- */

/* The first piece that ends after an address. */
static size_t place_of(const struct table *table, CUdeviceptr address)
{
    size_t low = 0, high = table->n;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table->items[middle]->start + table->items[middle]->bytes > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The first piece that has something of a range. */
static struct piece *piece_in(const struct table *table, CUdeviceptr address, size_t bytes)
{
    size_t place = place_of(table, address);

    return place < table->n && table->items[place]->start < address + bytes ? table->items[place] : NULL;
}

static bool piece_insert(struct table *table, struct piece *piece)
{
    size_t place = place_of(table, piece->start);

    if (table->n == table->room) {
        size_t room = table->room ? 2 * table->room : 64;
        struct piece **more = realloc(table->items, room * sizeof(struct piece *));
        if (!more)
            return false;
        table->items = more;
        table->room = room;
    }
    memmove(&table->items[place + 1], &table->items[place], (table->n - place) * sizeof(struct piece *));
    table->items[place] = piece;
    table->n++;
    return true;
}

static void piece_remove(struct table *table, struct piece *piece)
{
    size_t place = place_of(table, piece->start);

    table->n--;
    memmove(&table->items[place], &table->items[place + 1], (table->n - place) * sizeof(struct piece *));
    free(piece);
}

static struct mapping *mapping_in(CUdeviceptr address, size_t bytes)
{
    return (struct mapping *)piece_in(&vmm_mappings, address, bytes);
}

/* ---------------------------------------------------------------------------------------------------- memories --- */

size_t vmm_memory_place(CUmemGenericAllocationHandle handle)
{
    size_t low = 0, high = vmm_n_memories;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (vmm_memories[middle]->handle >= handle)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The memory of a handle that the application may use. */
static struct memory *memory_of(CUmemGenericAllocationHandle handle)
{
    size_t place = vmm_memory_place(handle);

    if (place == vmm_n_memories || vmm_memories[place]->handle != handle || !vmm_memories[place]->references)
        return NULL;
    return vmm_memories[place];
}

static struct memory *memory_add(void)
{
    static CUmemGenericAllocationHandle last; /* never used twice: a handle that was released names nothing */
    struct memory *made;

    if (vmm_n_memories == room_memories) {
        size_t room = room_memories ? 2 * room_memories : 64;
        struct memory **more = realloc(vmm_memories, room * sizeof(struct memory *));
        if (!more)
            return NULL;
        vmm_memories = more;
        room_memories = room;
    }
    made = calloc(1, sizeof(*made));
    if (!made)
        return NULL;
    made->handle = ++last;
    made->references = 1;
    vmm_memories[vmm_n_memories++] = made;
    return made;
}

static void memory_remove(struct memory *memory)
{
    size_t place = vmm_memory_place(memory->handle);

    vmm_n_memories--;
    memmove(&vmm_memories[place], &vmm_memories[place + 1], (vmm_n_memories - place) * sizeof(struct memory *));
    free(memory);
}

static void memory_drop_unused(struct memory *memory)
{
    if (memory->references || memory->mappings)
        return;
    block_let_go(memory->holder, memory->block, !memory->imported);
    memory_remove(memory);
}

/* ------------------------------------------------------------------------------------------------ reservations --- */

static bool multiple_of(unsigned long long value, size_t of)
{
    return value % of == 0;
}

EXPORT CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                            unsigned long long flags)
{
    ENTER(CALL_QUERY);
    struct piece *made;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;

    /* cuda.h asks for multiples of a page; the drivers want the granularity. */
    if (!ptr || !size || !multiple_of(size, NODE_GRANULARITY) || !multiple_of(addr, PAGE)
        || (alignment & (alignment - 1)) || flags)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    made = calloc(1, sizeof(*made));
    if (made) {
        made->bytes = size;
        made->start = space_take(size, alignment, addr);
    }
    if (made && made->start && piece_insert(&vmm_reservations, made)) {
        *ptr = made->start;
        result = CUDA_SUCCESS;
    } else {
        if (made && made->start)
            space_give(made->start, size);
        free(made);
    }
    driver_unlock();
    RETURN(result);
}

EXPORT CUresult CUDAAPI cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
    ENTER(CALL_QUERY);
    struct piece *found;
    CUresult result = CUDA_ERROR_INVALID_VALUE;

    driver_lock();
    found = piece_in(&vmm_reservations, ptr, 1);
    if (found && found->start == ptr && found->bytes == size && !piece_in(&vmm_mappings, ptr, size)) {
        space_give(ptr, size);
        piece_remove(&vmm_reservations, found);
        result = CUDA_SUCCESS;
    }
    driver_unlock();
    RETURN(result);
}

/* ----------------------------------------------------------------------------------------------------- handles --- */

static CUresult check_properties(const CUmemAllocationProp *prop)
{
    if (!prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->win32HandleMetaData)
        return CUDA_ERROR_INVALID_VALUE;
    switch (prop->location.type) {
    case CU_MEM_LOCATION_TYPE_DEVICE: break;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        node_log("memory handles of host memory are not implemented");
        return CUDA_ERROR_NOT_SUPPORTED;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    if (prop->location.id < 0 || prop->location.id >= driver.n_devices)
        return CUDA_ERROR_INVALID_DEVICE;
    if (prop->requestedHandleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (prop->allocFlags.usage & CU_MEM_CREATE_USAGE_TILE_POOL)
        return CUDA_ERROR_NOT_SUPPORTED; /* there are no sparse arrays */
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                                      CUmemAllocationGranularity_flags option)
{
    ENTER(CALL_QUERY);
    CUresult result = check_properties(prop);

    if (!granularity || (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM && option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (result == CUDA_SUCCESS)
        *granularity = NODE_GRANULARITY;
    RETURN(result);
}

static CUresult create(size_t size, const CUmemAllocationProp *prop, CUmemGenericAllocationHandle *handle)
{
    struct memory *made = memory_add();
    int gpu = driver.devices[prop->location.id], error;

    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    error = block_take(gpu, size, NODE_VMM, 0, &made->block, &made->holder);
    if (error == -ENOMEM && pools_trim(prop->location.id))
        error = block_take(gpu, size, NODE_VMM, 0, &made->block, &made->holder);
    if (error) {
        memory_remove(made);
        return block_result(error);
    }
    made->ordinal = prop->location.id;
    made->bytes = size;
    made->prop = *prop;
    made->prop.allocFlags.compressionType = 0; /* a wish that no GPU here can grant */
    *handle = made->handle;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                                    unsigned long long flags)
{
    ENTER(CALL_MANAGE);
    CUresult result;

    if (!handle || !size || !multiple_of(size, NODE_GRANULARITY) || flags)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    result = check_properties(prop);
    if (result != CUDA_SUCCESS)
        RETURN(result);
    if (call_.faults & FAULT_NO_DEVICE_MEMORY)
        RETURN(CUDA_ERROR_OUT_OF_MEMORY);
    driver_lock();
    result = create(size, prop, handle);
    driver_unlock();
    RETURN(result);
}

EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle)
{
    ENTER(CALL_MANAGE);
    struct memory *memory;

    driver_lock();
    memory = memory_of(handle);
    if (memory) {
        memory->references--;
        memory_drop_unused(memory);
    }
    driver_unlock();
    RETURN(memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
                                                               CUmemGenericAllocationHandle handle)
{
    ENTER(CALL_MANAGE);
    struct memory *memory;

    if (!prop)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    memory = memory_of(handle);
    if (memory)
        *prop = memory->prop;
    driver_unlock();
    RETURN(memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    ENTER(CALL_MANAGE);
    struct mapping *mapping;

    if (!handle || !addr)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    mapping = mapping_in((uintptr_t)addr, 1);
    if (mapping) {
        mapping->memory->references++;
        *handle = mapping->memory->handle;
    }
    driver_unlock();
    RETURN(mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

EXPORT CUresult CUDAAPI cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle,
                                                     CUmemAllocationHandleType handleType, unsigned long long flags)
{
    ENTER(CALL_INIT | CALL_ASKS | CALL_EXPORTS);
    struct memory *memory;
    int fd = -EINVAL;
    bool away = false;

    if (!shareableHandle || flags)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    memory = memory_of(handle);
    /* Memory can be exported as what it was made for, by the process that made it. */
    if (memory && !memory->imported && memory->prop.requestedHandleTypes & handleType
        && handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        fd = memory->holder ? block_open(memory->block) : -ENOENT;
    away = memory && !memory->holder;
    driver_unlock();
    if (fd < 0)
        RETURN(away ? CUDA_ERROR_UNKNOWN : fd == -EINVAL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)shareableHandle = fd;
    RETURN(CUDA_SUCCESS);
}

/* Whether this is one of the GPUs that the process saw at cuInit. */
static bool seen_at_first(int gpu)
{
    for (int i = 0; i < driver.n_at_first; i++)
        if (!memcmp(driver.at_first[i].uuid, driver.node->gpus[gpu].uuid, sizeof driver.at_first[i].uuid))
            return true;
    return false;
}

static CUresult import(int fd, CUmemGenericAllocationHandle *handle)
{
    enum node_kind kind;
    struct memory *made;
    uint64_t id, bytes;
    int gpu;

    if (node_identify(fd, &id, &gpu, &bytes, &kind) != 0 || kind != NODE_VMM)
        return CUDA_ERROR_UNKNOWN;
    if (!seen_at_first(gpu))
        return driver.openable_at_first >> gpu & 1 ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_INVALID_DEVICE;
    if (ordinal_of_gpu(gpu) < 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    made = memory_add();
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->holder = block_hold(fd);
    if (!made->holder) {
        memory_remove(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->block = id;
    made->bytes = bytes;
    made->ordinal = ordinal_of_gpu(gpu);
    made->imported = true;
    made->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    made->prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    made->prop.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, made->ordinal};
    *handle = made->handle;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle,
                                                       CUmemAllocationHandleType shHandleType)
{
    ENTER(CALL_MANAGE);
    CUresult result;

    if (shHandleType == CU_MEM_HANDLE_TYPE_FABRIC)
        RETURN(CUDA_ERROR_NOT_SUPPORTED);
    if (!handle || shHandleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    result = import((int)(intptr_t)osHandle, handle);
    driver_unlock();
    RETURN(result);
}

/* ---------------------------------------------------------------------------------------------------- mappings --- */

/* The CPU's right is the greatest that any device has: what runs on the devices are this process's threads. */
int vmm_protection(const struct mapping *mapping)
{
    unsigned all = 0;

    for (int i = 0; i < NODE_MAX_GPUS; i++)
        all |= mapping->access[i];
    return (all & CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : 0)
        | ((all & CU_MEM_ACCESS_FLAGS_PROT_READWRITE) == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_WRITE : 0);
}

static CUresult map(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle)
{
    struct memory *memory = memory_of(handle);
    struct piece *reserved = piece_in(&vmm_reservations, ptr, 1);
    struct mapping *made;
    int error;

    if (!memory)
        return CUDA_ERROR_INVALID_VALUE;
    if (offset || size != memory->bytes)
        return CUDA_ERROR_NOT_SUPPORTED; /* a part of it cannot be mapped */
    if (!reserved || size > reserved->start + reserved->bytes - ptr || piece_in(&vmm_mappings, ptr, size))
        return CUDA_ERROR_INVALID_VALUE;
    made = calloc(1, sizeof(*made));
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->piece = (struct piece){ptr, size};
    made->memory = memory;
    made->buffer_id = buffer_id_next();
    error = block_map(memory->block, size, ptr, PROT_NONE);
    if (error || !piece_insert(&vmm_mappings, &made->piece)) {
        if (!error)
            block_unmap(ptr, size, memory->block);
        free(made);
        return error ? block_result(error) : CUDA_ERROR_OUT_OF_MEMORY;
    }
    memory->mappings++;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                                 unsigned long long flags)
{
    ENTER(CALL_MANAGE);
    CUresult result;

    if (!ptr || !size || flags || !multiple_of(ptr, NODE_GRANULARITY))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    result = map(ptr, size, offset, handle);
    driver_unlock();
    RETURN(result);
}

/* Whether a range is made of whole mappings, side by side. */
static bool whole_mappings(CUdeviceptr ptr, size_t size)
{
    CUdeviceptr end = ptr + size;

    if (!size || end < ptr)
        return false;
    while (ptr < end) {
        struct mapping *mapping = mapping_in(ptr, 1);
        if (!mapping || mapping->piece.start != ptr || mapping->piece.bytes > end - ptr)
            return false;
        ptr += mapping->piece.bytes;
    }
    return true;
}

/* Whether a range may be unmapped: within a reservation, and no mapping only in part. Where nothing is mapped there is
 * nothing to do. */
static bool may_unmap(CUdeviceptr ptr, size_t size)
{
    struct piece *reserved = piece_in(&vmm_reservations, ptr, 1);

    if (!size || !multiple_of(ptr, NODE_GRANULARITY) || !multiple_of(size, NODE_GRANULARITY))
        return false;
    if (!reserved || size > reserved->start + reserved->bytes - ptr)
        return false;
    struct piece *first = piece_in(&vmm_mappings, ptr, 1), *last = piece_in(&vmm_mappings, ptr + size - 1, 1);
    return (!first || first->start == ptr) && (!last || last->start + last->bytes == ptr + size);
}

static void unmap(CUdeviceptr ptr, size_t size)
{
    for (struct mapping *mapping; (mapping = mapping_in(ptr, size));) {
        struct memory *memory = mapping->memory;
        block_unmap(mapping->piece.start, mapping->piece.bytes, memory->block);
        piece_remove(&vmm_mappings, &mapping->piece);
        memory->mappings--;
        memory_drop_unused(memory);
    }
}

EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    ENTER(CALL_MANAGE);
    bool allowed;

    driver_lock();
    allowed = may_unmap(ptr, size);
    driver_unlock();
    if (!allowed)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    streams_drain(-1); /* the memory belongs to no context: whatever is running may be using it */
    driver_lock();
    allowed = may_unmap(ptr, size); /* another thread may have been faster */
    if (allowed)
        unmap(ptr, size);
    driver_unlock();
    RETURN(allowed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

static CUresult check_access(const CUmemAccessDesc *desc, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READ
            && desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            return CUDA_ERROR_INVALID_VALUE;
        if (desc[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE)
            return CUDA_ERROR_INVALID_VALUE; /* device memory cannot be given to the host */
        if (desc[i].location.id < 0 || desc[i].location.id >= driver.n_devices)
            return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    ENTER(CALL_MANAGE);
    CUresult result;

    if (!desc || !count)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    result = check_access(desc, count);
    driver_lock();
    if (result == CUDA_SUCCESS && !whole_mappings(ptr, size))
        result = CUDA_ERROR_INVALID_VALUE;
    for (CUdeviceptr at = ptr; result == CUDA_SUCCESS && at < ptr + size;) {
        struct mapping *mapping = mapping_in(at, 1);
        for (size_t i = 0; i < count; i++)
            mapping->access[desc[i].location.id] = desc[i].flags;
        if (mprotect((void *)(uintptr_t)at, mapping->piece.bytes, vmm_protection(mapping)) != 0)
            result = CUDA_ERROR_OPERATING_SYSTEM;
        at += mapping->piece.bytes;
    }
    driver_unlock();
    RETURN(result);
}

EXPORT CUresult CUDAAPI cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
    ENTER(CALL_MANAGE);
    struct mapping *mapping;

    if (!flags || !location || location->type != CU_MEM_LOCATION_TYPE_DEVICE)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (location->id < 0 || location->id >= driver.n_devices)
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    driver_lock();
    mapping = mapping_in(ptr, 1);
    if (mapping)
        *flags = mapping->access[location->id];
    driver_unlock();
    RETURN(mapping ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

bool vmm_find(CUdeviceptr address, struct vmm_place *found)
{
    struct piece *reserved = piece_in(&vmm_reservations, address, 1);
    struct mapping *mapping = mapping_in(address, 1);

    if (!reserved)
        return false;
    memset(found, 0, sizeof(*found));
    found->reserved = reserved->start;
    found->reserved_bytes = reserved->bytes;
    if (mapping) {
        found->start = mapping->piece.start;
        found->bytes = mapping->piece.bytes;
        found->ordinal = mapping->memory->ordinal;
        memcpy(found->access, mapping->access, sizeof(found->access));
        found->handle_types = mapping->memory->prop.requestedHandleTypes;
        found->buffer_id = mapping->buffer_id;
    }
    return true;
}
