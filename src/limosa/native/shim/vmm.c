/* The application's own virtual memory (PyTorch's expandable segments, XLA's): it goes on using its calls, and what it
 * makes can be put away, too. It holds numbers of ours for the driver's handles, because those change. */
#include "memory.h"
#include "shim.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GATED(name, ...)                                                                                               \
    do {                                                                                                               \
        if (!shim_ready())                                                                                             \
            return real_functions[REAL_##name] ? real(name)(__VA_ARGS__) : CUDA_ERROR_NO_DEVICE;                       \
        struct reader *reader_ = gate_enter();                                                                         \
        CUresult result_ = my_##name(__VA_ARGS__);                                                                     \
        gate_leave(reader_);                                                                                           \
        return result_;                                                                                                \
    } while (0)

static CUresult my_cuMemCreate(CUhandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
    CUhandle driver = 0;

    if (!handle || !prop || flags || prop->type != ALLOCATION_PINNED || prop->location.type != LOCATION_DEVICE
        || prop->requestedHandleTypes & ~HANDLE_POSIX_FD || prop->location.id < 0 || prop->location.id >= MAX_DEVICES) {
        CUresult result = real(cuMemCreate)(handle, bytes, prop, flags);
        if (!result)
            left_add(LEFT_FOREIGN, bytes);
        return result;
    }
    CUmemAllocationProp more = *prop;
    more.requestedHandleTypes |= HANDLE_POSIX_FD; /* else it could not be given to anybody */
    CUresult result = real(cuMemCreate)(&driver, bytes, &more, flags);
    if (result)
        return result;
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = memory_new(driver, bytes, prop);
    if (memory) {
        memory->references = 1;
        *handle = memory_given(memory);
    }
    pthread_mutex_unlock(&memory_lock);
    if (!memory) {
        real(cuMemRelease)(driver);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUhandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
    GATED(cuMemCreate, handle, bytes, prop, flags);
}

static CUresult my_cuMemRelease(CUhandle handle)
{
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = memory_of(handle);
    CUhandle driver = 0;
    if (memory) {
        memory->references--;
        driver = memory_let_go(memory);
    }
    pthread_mutex_unlock(&memory_lock);
    if (!memory)
        return real(cuMemRelease)(handle);
    memory_release(driver);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUhandle handle)
{
    GATED(cuMemRelease, handle);
}

/* The memory that the application means, held for the time of a call; NULL where it is not ours. */
static struct memory *hold(CUhandle handle)
{
    pthread_mutex_lock(&memory_lock);
    struct memory *memory = memory_of(handle);
    if (memory)
        memory->references++;
    pthread_mutex_unlock(&memory_lock);
    return memory;
}

static void unhold(struct memory *memory)
{
    pthread_mutex_lock(&memory_lock);
    memory->references--;
    CUhandle driver = memory_let_go(memory);
    pthread_mutex_unlock(&memory_lock);
    memory_release(driver);
}

static CUresult my_cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUhandle handle, unsigned long long flags)
{
    struct memory *memory = hold(handle);
    CUresult result = real(cuMemMap)(at, bytes, offset, memory ? memory->driver : handle, flags);

    if (!memory)
        return result;
    if (!result) {
        struct mapping *mapping = calloc(1, sizeof *mapping);
        bool there = false;
        if (mapping) {
            *mapping = (struct mapping){.at = at, .bytes = bytes, .offset = offset, .memory = memory};
            pthread_mutex_lock(&memory_lock);
            there = mapping_add(mapping);
            pthread_mutex_unlock(&memory_lock);
        }
        if (!there) {
            free(mapping);
            real(cuMemUnmap)(at, bytes);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    unhold(memory);
    return result;
}

EXPORT CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUhandle handle, unsigned long long flags)
{
    GATED(cuMemMap, at, bytes, offset, handle, flags);
}

/* Memory of cuMemAlloc is no mapping for whoever allocated it. */
static bool has_plain(CUdeviceptr at, size_t bytes)
{
    bool found = false;

    pthread_mutex_lock(&memory_lock);
    for (size_t place = mapping_place(at); place < n_mappings && mappings[place]->at < at + bytes; place++)
        found |= mappings[place]->plain;
    pthread_mutex_unlock(&memory_lock);
    return found;
}

static CUresult my_cuMemUnmap(CUdeviceptr at, size_t bytes)
{
    CUresult result = has_plain(at, bytes) ? CUDA_ERROR_INVALID_VALUE : real(cuMemUnmap)(at, bytes);

    if (result)
        return result;
    pthread_mutex_lock(&memory_lock);
    for (size_t place; (place = mapping_place(at)) < n_mappings && mappings[place]->at < at + bytes;) {
        CUhandle driver = mapping_remove(place);
        pthread_mutex_unlock(&memory_lock);
        memory_release(driver);
        pthread_mutex_lock(&memory_lock);
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t bytes)
{
    GATED(cuMemUnmap, at, bytes);
}

static CUresult my_cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *all, size_t n)
{
    CUresult result = has_plain(at, bytes) ? CUDA_ERROR_INVALID_VALUE : real(cuMemSetAccess)(at, bytes, all, n);

    if (result)
        return result;
    pthread_mutex_lock(&memory_lock);
    for (size_t place = mapping_place(at); place < n_mappings && mappings[place]->at < at + bytes; place++)
        for (size_t i = 0; i < n; i++) {
            if (all[i].location.type == LOCATION_DEVICE && all[i].location.id >= 0 && all[i].location.id < MAX_DEVICES)
                mappings[place]->access[all[i].location.id] = (unsigned char)all[i].flags;
            else
                mappings[place]->memory->shared = true; /* the processor's own access: not taken apart here */
        }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *all, size_t n)
{
    GATED(cuMemSetAccess, at, bytes, all, n);
}

static CUresult export(void *out, struct memory *memory, int type, unsigned long long flags)
{
    if (type != HANDLE_POSIX_FD || flags || !out || !(memory->asked.requestedHandleTypes & HANDLE_POSIX_FD))
        return CUDA_ERROR_INVALID_VALUE;
    if (memory->kept < 0)
        return real(cuMemExportToShareableHandle)(out, memory->driver, type, flags);
    int fd = fcntl(memory->kept, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *(int *)out = fd;
    return CUDA_SUCCESS;
}

static CUresult my_cuMemExportToShareableHandle(void *out, CUhandle handle, int type, unsigned long long flags)
{
    struct memory *memory = hold(handle);

    if (!memory)
        return real(cuMemExportToShareableHandle)(out, handle, type, flags);
    CUresult result = export(out, memory, type, flags);
    if (!result)
        memory->shared = true;
    unhold(memory);
    return result;
}

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUhandle handle, int type, unsigned long long flags)
{
    GATED(cuMemExportToShareableHandle, out, handle, type, flags);
}

static CUresult my_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUhandle handle)
{
    struct memory *memory = hold(handle);

    if (!memory)
        return real(cuMemGetAllocationPropertiesFromHandle)(prop, handle);
    CUresult result = real(cuMemGetAllocationPropertiesFromHandle)(prop, memory->driver);
    if (!result)
        prop->requestedHandleTypes = memory->asked.requestedHandleTypes;
    unhold(memory);
    return result;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUhandle handle)
{
    GATED(cuMemGetAllocationPropertiesFromHandle, prop, handle);
}

static CUresult my_cuMemRetainAllocationHandle(CUhandle *handle, void *address)
{
    CUresult result = CUDA_SUCCESS;

    pthread_mutex_lock(&memory_lock);
    struct mapping *mapping = mapping_at((CUdeviceptr)(uintptr_t)address);
    bool ours = mapping && handle;
    if (ours && mapping->plain) {
        result = CUDA_ERROR_INVALID_VALUE; /* as for memory of cuMemAlloc */
    } else if (ours) {
        mapping->memory->references++;
        *handle = memory_given(mapping->memory);
    }
    pthread_mutex_unlock(&memory_lock);
    return ours ? result : real(cuMemRetainAllocationHandle)(handle, address);
}

EXPORT CUresult cuMemRetainAllocationHandle(CUhandle *handle, void *address)
{
    GATED(cuMemRetainAllocationHandle, handle, address);
}

static CUresult my_cuMemImportFromShareableHandle(CUhandle *handle, void *from, int type)
{
    CUresult result = real(cuMemImportFromShareableHandle)(handle, from, type);

    if (!result)
        left_add(LEFT_SHARED, 0); /* somebody else's: a checkpoint of this process would lose it */
    return result;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUhandle *handle, void *from, int type)
{
    GATED(cuMemImportFromShareableHandle, handle, from, type);
}
