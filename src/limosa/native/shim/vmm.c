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
        pthread_mutex_lock(&memory_lock);                                                                              \
        CUresult result_ = my_##name(__VA_ARGS__);                                                                     \
        pthread_mutex_unlock(&memory_lock);                                                                            \
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
    struct memory *memory = memory_new(driver, bytes, prop);
    if (!memory) {
        real(cuMemRelease)(driver);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memory->references = 1;
    *handle = memory_given(memory);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUhandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
    GATED(cuMemCreate, handle, bytes, prop, flags);
}

static CUresult my_cuMemRelease(CUhandle handle)
{
    struct memory *memory = memory_of(handle);

    if (!memory)
        return real(cuMemRelease)(handle);
    memory->references--;
    memory_let_go(memory);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUhandle handle)
{
    GATED(cuMemRelease, handle);
}

static CUresult my_cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUhandle handle, unsigned long long flags)
{
    struct memory *memory = memory_of(handle);
    CUresult result = real(cuMemMap)(at, bytes, offset, memory ? memory->driver : handle, flags);

    if (result || !memory)
        return result;
    struct mapping *mapping = calloc(1, sizeof *mapping);
    if (mapping) {
        *mapping = (struct mapping){.at = at, .bytes = bytes, .offset = offset, .memory = memory};
        if (mapping_add(mapping))
            return CUDA_SUCCESS;
        free(mapping);
    }
    real(cuMemUnmap)(at, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUhandle handle, unsigned long long flags)
{
    GATED(cuMemMap, at, bytes, offset, handle, flags);
}

/* Memory of cuMemAlloc is no mapping for whoever allocated it. */
static bool has_plain(CUdeviceptr at, size_t bytes)
{
    for (size_t place = mapping_place(at); place < n_mappings && mappings[place]->at < at + bytes; place++)
        if (mappings[place]->plain)
            return true;
    return false;
}

static CUresult my_cuMemUnmap(CUdeviceptr at, size_t bytes)
{
    CUresult result = has_plain(at, bytes) ? CUDA_ERROR_INVALID_VALUE : real(cuMemUnmap)(at, bytes);

    if (!result)
        for (size_t place; (place = mapping_place(at)) < n_mappings && mappings[place]->at < at + bytes;)
            mapping_remove(place);
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
    for (size_t place = mapping_place(at); place < n_mappings && mappings[place]->at < at + bytes; place++)
        for (size_t i = 0; i < n; i++) {
            if (all[i].location.type == LOCATION_DEVICE && all[i].location.id >= 0 && all[i].location.id < MAX_DEVICES)
                mappings[place]->access[all[i].location.id] = (unsigned char)all[i].flags;
            else
                mappings[place]->memory->shared = true; /* the processor's own access: not taken apart here */
        }
    return result;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *all, size_t n)
{
    GATED(cuMemSetAccess, at, bytes, all, n);
}

static CUresult my_cuMemExportToShareableHandle(void *out, CUhandle handle, int type, unsigned long long flags)
{
    struct memory *memory = memory_of(handle);

    if (!memory)
        return real(cuMemExportToShareableHandle)(out, handle, type, flags);
    if (type != HANDLE_POSIX_FD || flags || !out || !(memory->asked.requestedHandleTypes & HANDLE_POSIX_FD))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    if (memory->kept >= 0) {
        int fd = fcntl(memory->kept, F_DUPFD_CLOEXEC, 0);
        if (fd < 0)
            return CUDA_ERROR_OUT_OF_MEMORY;
        *(int *)out = fd;
    } else {
        result = real(cuMemExportToShareableHandle)(out, memory->driver, type, flags);
    }
    if (!result)
        memory->shared = true;
    return result;
}

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUhandle handle, int type, unsigned long long flags)
{
    GATED(cuMemExportToShareableHandle, out, handle, type, flags);
}

static CUresult my_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUhandle handle)
{
    struct memory *memory = memory_of(handle);

    if (!memory)
        return real(cuMemGetAllocationPropertiesFromHandle)(prop, handle);
    CUresult result = real(cuMemGetAllocationPropertiesFromHandle)(prop, memory->driver);
    if (!result)
        prop->requestedHandleTypes = memory->asked.requestedHandleTypes;
    return result;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUhandle handle)
{
    GATED(cuMemGetAllocationPropertiesFromHandle, prop, handle);
}

static CUresult my_cuMemRetainAllocationHandle(CUhandle *handle, void *address)
{
    struct mapping *mapping = mapping_at((CUdeviceptr)(uintptr_t)address);

    if (!mapping || !handle)
        return real(cuMemRetainAllocationHandle)(handle, address);
    if (mapping->plain)
        return CUDA_ERROR_INVALID_VALUE; /* as for memory of cuMemAlloc */
    mapping->memory->references++;
    *handle = memory_given(mapping->memory);
    return CUDA_SUCCESS;
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
