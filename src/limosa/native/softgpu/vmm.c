/* The virtual memory group: reservations of address space, memory handles, and mappings of the one into the other.
 *
 * A memory is one block of the node. It lives while the application has a reference to its handle or a mapping of it, and
 * beyond that while anybody else has a descriptor of it. A checkpoint saves what this process knows of, and lets it go; a
 * restore takes new memory for the same handles and addresses. Whoever else had the old memory keeps that.
 */
#define _GNU_SOURCE
#include "block.h"
#include "fault.h"
#include "memory.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE ((size_t)4096)

/* Things with an address, sorted by it. */
struct piece {
    CUdeviceptr start;
    size_t bytes;
};

struct table {
    struct piece **items;
    size_t n, room;
};

struct memory {
    CUmemGenericAllocationHandle handle;
    int references, mappings;
    uint64_t block, before; /* the block; the one that it was at the last checkpoint */
    void *holder; /* keeps the block; NULL while the process is checkpointed */
    int ordinal;
    size_t bytes;
    CUmemAllocationProp prop;
    bool imported;
};

struct mapping {
    struct piece piece;
    struct memory *memory;
    unsigned access[NODE_MAX_GPUS]; /* CUmemAccess_flags by ordinal */
    unsigned long long buffer_id;
};

static struct table reservations, mappings;
static struct memory **memories; /* sorted by handle */
static size_t n_memories, room_memories;

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
    return (struct mapping *)piece_in(&mappings, address, bytes);
}

/* -------------------------------------------------------------------------------------------------- memories --- */

static size_t memory_place(CUmemGenericAllocationHandle handle)
{
    size_t low = 0, high = n_memories;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (memories[middle]->handle >= handle)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The memory of a handle that the application may use. */
static struct memory *memory_of(CUmemGenericAllocationHandle handle)
{
    size_t place = memory_place(handle);

    if (place == n_memories || memories[place]->handle != handle || !memories[place]->references)
        return NULL;
    return memories[place];
}

static struct memory *memory_add(void)
{
    static CUmemGenericAllocationHandle last; /* never used twice: a handle that was released names nothing */
    struct memory *made;

    if (n_memories == room_memories) {
        size_t room = room_memories ? 2 * room_memories : 64;
        struct memory **more = realloc(memories, room * sizeof(struct memory *));
        if (!more)
            return NULL;
        memories = more;
        room_memories = room;
    }
    made = calloc(1, sizeof(*made));
    if (!made)
        return NULL;
    made->handle = ++last;
    made->references = 1;
    memories[n_memories++] = made;
    return made;
}

static void memory_remove(struct memory *memory)
{
    size_t place = memory_place(memory->handle);

    n_memories--;
    memmove(&memories[place], &memories[place + 1], (n_memories - place) * sizeof(struct memory *));
    free(memory);
}

static void memory_drop_unused(struct memory *memory)
{
    if (memory->references || memory->mappings)
        return;
    block_let_go(memory->holder, memory->block);
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
    if (!ptr || !size || !multiple_of(size, NODE_GRANULARITY) || !multiple_of(addr, PAGE) || (alignment & (alignment - 1)) || flags)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    made = calloc(1, sizeof(*made));
    if (made) {
        made->bytes = size;
        made->start = space_take(size, alignment, addr);
    }
    if (made && made->start && piece_insert(&reservations, made)) {
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
    found = piece_in(&reservations, ptr, 1);
    if (found && found->start == ptr && found->bytes == size && !piece_in(&mappings, ptr, size)) {
        space_give(ptr, size);
        piece_remove(&reservations, found);
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
    case CU_MEM_LOCATION_TYPE_DEVICE:
        break;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        node_log("memory handles of host memory are not implemented");
        return CUDA_ERROR_NOT_SUPPORTED;
    default:
        return CUDA_ERROR_INVALID_VALUE;
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
    if (memory && !memory->imported && memory->prop.requestedHandleTypes & handleType &&
        handleType == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        fd = memory->holder ? block_open(memory->block) : -ENOENT;
    away = memory && !memory->holder;
    driver_unlock();
    if (fd < 0)
        RETURN(away            ? CUDA_ERROR_UNKNOWN
               : fd == -EINVAL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)shareableHandle = fd;
    RETURN(CUDA_SUCCESS);
}

static CUresult import(int fd, CUmemGenericAllocationHandle *handle)
{
    enum node_kind kind;
    struct memory *made;
    uint64_t id, bytes;
    int gpu;

    if (node_identify(fd, &id, &gpu, &bytes, &kind) != 0 || kind != NODE_VMM)
        return CUDA_ERROR_UNKNOWN;
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
static int protection_of(const struct mapping *mapping)
{
    unsigned all = 0;

    for (int i = 0; i < NODE_MAX_GPUS; i++)
        all |= mapping->access[i];
    return (all & CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : 0) |
           ((all & CU_MEM_ACCESS_FLAGS_PROT_READWRITE) == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_WRITE : 0);
}

static CUresult map(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle)
{
    struct memory *memory = memory_of(handle);
    struct piece *reserved = piece_in(&reservations, ptr, 1);
    struct mapping *made;
    int error;

    if (!memory)
        return CUDA_ERROR_INVALID_VALUE;
    if (offset || size != memory->bytes)
        return CUDA_ERROR_NOT_SUPPORTED; /* a part of it cannot be mapped */
    if (!reserved || size > reserved->start + reserved->bytes - ptr || piece_in(&mappings, ptr, size))
        return CUDA_ERROR_INVALID_VALUE;
    made = calloc(1, sizeof(*made));
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->piece = (struct piece){ptr, size};
    made->memory = memory;
    made->buffer_id = buffer_id_next();
    error = block_map(memory->block, size, ptr, PROT_NONE);
    if (error || !piece_insert(&mappings, &made->piece)) {
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
    struct piece *reserved = piece_in(&reservations, ptr, 1);

    if (!size || !multiple_of(ptr, NODE_GRANULARITY) || !multiple_of(size, NODE_GRANULARITY))
        return false;
    if (!reserved || size > reserved->start + reserved->bytes - ptr)
        return false;
    struct piece *first = piece_in(&mappings, ptr, 1), *last = piece_in(&mappings, ptr + size - 1, 1);
    return (!first || first->start == ptr) && (!last || last->start + last->bytes == ptr + size);
}

static void unmap(CUdeviceptr ptr, size_t size)
{
    for (struct mapping *mapping; (mapping = mapping_in(ptr, size));) {
        struct memory *memory = mapping->memory;
        block_unmap(mapping->piece.start, mapping->piece.bytes, memory->block);
        piece_remove(&mappings, &mapping->piece);
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
        if (desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
            desc[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
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
        if (mprotect((void *)(uintptr_t)at, mapping->piece.bytes, protection_of(mapping)) != 0)
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
    struct piece *reserved = piece_in(&reservations, address, 1);
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

/* ------------------------------------------------------------------------------------------------ a checkpoint --- */

/* A handle of memory that another process has made. */
bool vmm_has_imported(void)
{
    struct node_state *node = driver.node;
    bool found = false;

    driver_lock();
    for (size_t i = 0; i < n_memories; i++) {
        const struct node_block *block = &node->blocks[memories[i]->block % NODE_MAX_BLOCKS];
        found = found || (memories[i]->imported && !(block->id == memories[i]->block && block->pid == getpid()));
    }
    driver_unlock();
    return found;
}

/* The memory of this process's own that a handle was imported of, or NULL. */
static struct memory *original(size_t place, bool before)
{
    struct memory *memory = memories[place];

    for (size_t i = 0; memory->imported && i < place; i++)
        if (before ? memories[i]->before == memory->before : memories[i]->block == memory->block)
            return memories[i];
    return NULL;
}

uint64_t vmm_bytes(void)
{
    uint64_t bytes = 0;

    driver_lock();
    for (size_t i = 0; i < n_memories; i++)
        bytes += original(i, false) ? 0 : memories[i]->bytes;
    driver_unlock();
    return bytes;
}

/* A memory may be mapped nowhere or several times: it is looked at through a mapping of its own. */
static void *window_open(const struct memory *memory)
{
    void *window = MAP_FAILED;
    int fd;

    driver_lock();
    fd = block_open(memory->block);
    if (fd >= 0) {
        window = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (window != MAP_FAILED)
            madvise(window, memory->bytes, MADV_DONTFORK);
        close(fd);
    }
    driver_unlock();
    return window == MAP_FAILED ? NULL : window;
}

char *vmm_save(char *to)
{
    for (size_t i = 0; i < n_memories; i++) {
        if (original(i, false))
            continue;
        void *window = window_open(memories[i]);
        if (window) {
            memcpy(to, window, memories[i]->bytes);
            munmap(window, memories[i]->bytes);
        } else {
            node_log("block %llu cannot be saved", (unsigned long long)memories[i]->block);
        }
        to += memories[i]->bytes;
    }
    return to;
}

const char *vmm_load(const char *from)
{
    for (size_t i = 0; i < n_memories; i++) {
        if (original(i, false))
            continue;
        void *window = window_open(memories[i]);
        if (window) {
            memcpy(window, from, memories[i]->bytes);
            munmap(window, memories[i]->bytes);
        } else {
            node_log("block %llu cannot be loaded", (unsigned long long)memories[i]->block);
        }
        from += memories[i]->bytes;
    }
    return from;
}

/* Descriptors that the application has exported, or was given, are its own; but while it is checkpointed nothing of the
 * node may be open in it. So /dev/nvidiactl stands in for each, as which the real driver's descriptors are seen anyway, and
 * a restore puts a descriptor of the new memory in its place where the memory is one that this process knows. (An
 * application that closes one in this very moment could have its next file replaced: a driver in the kernel has no such
 * gap.) */
struct stand_in {
    struct stand_in *next;
    int fd;
    CUmemGenericAllocationHandle handle; /* 0: of memory that is not known here */
};
static struct stand_in *stand_ins;

static bool link_of(const char *name, char *link, size_t room)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/self/fd/%.16s", name);
    ssize_t length = readlink(path, link, room - 1);
    if (length <= 0)
        return false;
    link[length] = 0;
    return true;
}

/* Put another file behind a descriptor's number. */
static bool replace(int fd, int by)
{
    int flags = fcntl(fd, F_GETFD);

    return flags >= 0 && dup3(by, fd, flags & FD_CLOEXEC ? O_CLOEXEC : 0) >= 0;
}

static void descriptors_away(void)
{
    static const char folder[] = NODE_FOLDER "/memory/";
    char link[128];
    DIR *all = opendir("/proc/self/fd");
    int control = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);

    for (struct dirent *entry; all && control >= 0 && (entry = readdir(all));) {
        struct stand_in *made;
        if (!link_of(entry->d_name, link, sizeof(link)) || strncmp(link, folder, sizeof(folder) - 1) != 0)
            continue;
        made = calloc(1, sizeof(*made));
        if (!made || !replace(atoi(entry->d_name), control)) {
            free(made);
            continue;
        }
        uint64_t id = strtoull(link + sizeof(folder) - 1, NULL, 10);
        made->fd = atoi(entry->d_name);
        for (size_t i = 0; i < n_memories; i++)
            if (memories[i]->block == id)
                made->handle = memories[i]->handle;
        made->next = stand_ins;
        stand_ins = made;
    }
    if (control >= 0)
        close(control);
    if (all)
        closedir(all);
}

static void descriptors_back(void)
{
    for (struct stand_in *one; (one = stand_ins);) {
        size_t place = memory_place(one->handle);
        char name[16], link[128];
        stand_ins = one->next;
        snprintf(name, sizeof(name), "%d", one->fd);
        /* The application may have closed it meanwhile. Where CRIU had no /dev/nvidiactl, it is /dev/null. */
        if (place < n_memories && memories[place]->handle == one->handle && link_of(name, link, sizeof(link)) &&
            (!strcmp(link, "/dev/nvidiactl") || !strcmp(link, "/dev/null"))) {
            int fd = block_open(memories[place]->block);
            if (fd >= 0) {
                replace(one->fd, fd);
                close(fd);
            }
        }
        free(one);
    }
}

void vmm_release(void)
{
    driver_lock();
    descriptors_away(); /* first: it looks for the blocks' numbers */
    for (size_t i = 0; i < mappings.n; i++) {
        struct mapping *mapping = (struct mapping *)mappings.items[i];
        if (mapping->memory->holder)
            block_unmap(mapping->piece.start, mapping->piece.bytes, mapping->memory->block);
    }
    for (size_t i = 0; i < n_memories; i++) {
        block_let_go(memories[i]->holder, memories[i]->block);
        if (memories[i]->holder)
            memories[i]->before = memories[i]->block;
        memories[i]->holder = NULL;
    }
    driver_unlock();
}

static int hold_same(struct memory *memory, const struct memory *same)
{
    int fd = block_open(same->block);

    if (fd < 0)
        return fd;
    memory->block = same->block;
    memory->holder = block_hold(fd);
    close(fd);
    return memory->holder ? 0 : -ENOMEM;
}

int vmm_claim(void)
{
    int error = 0;

    driver_lock();
    for (size_t i = 0; i < n_memories && !error; i++) {
        struct memory *memory = memories[i], *same = original(i, true);
        if (!memory->holder && same)
            error = hold_same(memory, same);
        else if (!memory->holder)
            error = block_take(gpu_after(driver.devices[memory->ordinal]), memory->bytes, NODE_VMM, 0, &memory->block,
                               &memory->holder);
    }
    for (size_t i = 0; i < mappings.n && !error; i++) {
        struct mapping *mapping = (struct mapping *)mappings.items[i];
        error = block_map(mapping->memory->block, mapping->piece.bytes, mapping->piece.start, protection_of(mapping));
    }
    if (!error)
        descriptors_back();
    driver_unlock();
    return error;
}

/* Nothing of it is mapped in a child (MADV_DONTFORK), and no descriptor is kept. */
void vmm_forked(void)
{
    n_memories = 0;
    reservations.n = mappings.n = 0;
    stand_ins = NULL;
}
