/* The application's own virtual memory (PyTorch's expandable segments, XLA's): it goes on using its calls, and what it
 * makes can be put away, too. It holds numbers of ours for the driver's handles, because those change. */
#include "bulk.h"
#include "compiler.h"
#include "count.h"
#include "driver.h"
#include "gate.h"
#include "hooks.h"
#include "late.h"
#include "memory.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The application's number for a handle that the driver has given; the driver's own goes where there is no room. */
static CUresult number(CUhandle *handle, CUhandle driver, size_t bytes, const CUmemAllocationProp *asked, bool stays,
                       enum left cause, int owner)
{
    memory_lock();
    struct memory *memory = memory_new(driver, bytes, asked);
    if (memory) {
        memory->references = 1;
        memory->shared = stays;
        memory->cause = (unsigned char)cause;
        memory->owner = owner;
        *handle = memory_given(memory);
    }
    memory_unlock();
    if (memory)
        return CUDA_SUCCESS;
    real(cuMemRelease)(driver);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult create_once(CUhandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
    CUhandle driver = 0;

    if (!handle || !prop)
        return real(cuMemCreate)(handle, bytes, prop, flags);
    CUmemAllocationProp more = *prop;
    bool stays = flags || prop->type != ALLOCATION_PINNED || prop->location.type != LOCATION_DEVICE
        || prop->requestedHandleTypes & ~HANDLE_POSIX_FD || prop->location.id < 0 || prop->location.id >= MAX_DEVICES;
    if (!stays)
        more.requestedHandleTypes |= HANDLE_POSIX_FD; /* else it could not be given to anybody */
    CUresult result = real(cuMemCreate)(&driver, bytes, &more, flags);
    if (result && result != CUDA_ERROR_OUT_OF_MEMORY && !stays
        && more.requestedHandleTypes != prop->requestedHandleTypes) {
        stays = true; /* what is asked for is to be had, only not for others */
        result = real(cuMemCreate)(&driver, bytes, prop, flags);
    }
    return result ? result : number(handle, driver, bytes, prop, stays, LEFT_FOREIGN, 0);
}

static CUresult my_cuMemCreate(CUhandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                               unsigned long long flags)
{
    late_free(LATE_LOOK);
    CUresult result = create_once(handle, bytes, prop, flags);
    return result == CUDA_ERROR_OUT_OF_MEMORY && late_free(LATE_ALL) ? create_once(handle, bytes, prop, flags) : result;
}

EXPORT CUresult cuMemCreate(CUhandle *handle, size_t bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
    entry_called(AT_cuMemCreate);
    if (!shim_ready())
        return real(cuMemCreate) ? real(cuMemCreate)(handle, bytes, prop, flags) : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, my_cuMemCreate(handle, bytes, prop, flags));
}

static CUresult my_cuMemRelease(CUhandle handle)
{
    memory_lock();
    struct memory *memory = memory_of(handle);
    CUhandle driver = 0;
    if (memory) {
        memory->references--;
        driver = memory_let_go(memory);
    }
    memory_unlock();
    if (!memory)
        return real(cuMemRelease)(handle);
    memory_release(driver);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemRelease(CUhandle handle)
{
    entry_called(AT_cuMemRelease);
    if (!shim_ready())
        return real(cuMemRelease) ? real(cuMemRelease)(handle) : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, my_cuMemRelease(handle));
}

/* The memory that the application means, held for the time of a call; NULL where it is not ours. */
static struct memory *hold(CUhandle handle)
{
    memory_lock();
    struct memory *memory = memory_of(handle);
    if (memory)
        memory->references++;
    memory_unlock();
    return memory;
}

static void unhold(struct memory *memory)
{
    memory_lock();
    memory->references--;
    CUhandle driver = memory_let_go(memory);
    memory_unlock();
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
            memory_lock();
            there = mapping_add(mapping);
            if (there && memory->shared && memory->bytes < offset + bytes)
                memory->bytes = offset + bytes; /* how large imported memory is shows here */
            memory_unlock();
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
    entry_called(AT_cuMemMap);
    if (!shim_ready())
        return real(cuMemMap) ? real(cuMemMap)(at, bytes, offset, handle, flags) : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, my_cuMemMap(at, bytes, offset, handle, flags));
}

/* With memory_lock held: the mapping at a place where it begins before an address, else NULL. */
static struct mapping *mapping_before(size_t place, CUdeviceptr end)
{
    struct mapping *mapping = mapping_nth(place);

    return mapping && mapping->at < end ? mapping : NULL;
}

/* Memory of cuMemAlloc, or of a legacy handle, is no mapping for whoever has it. */
static bool has_plain(CUdeviceptr at, size_t bytes)
{
    const struct mapping *mapping;
    bool found = false;

    memory_lock();
    for (size_t place = mapping_place(at); (mapping = mapping_before(place, at + bytes)); place++)
        found |= mapping->plain || mapping->opened;
    memory_unlock();
    return found;
}

static CUresult my_cuMemUnmap(CUdeviceptr at, size_t bytes)
{
    CUresult result = has_plain(at, bytes) ? CUDA_ERROR_INVALID_VALUE : real(cuMemUnmap)(at, bytes);

    if (result)
        return result;
    memory_lock();
    for (size_t place; mapping_before(place = mapping_place(at), at + bytes);) {
        CUhandle driver = mapping_remove(place);
        memory_unlock();
        memory_release(driver);
        memory_lock();
    }
    memory_unlock();
    return result;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t bytes)
{
    entry_called(AT_cuMemUnmap);
    if (!shim_ready())
        return real(cuMemUnmap) ? real(cuMemUnmap)(at, bytes) : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, my_cuMemUnmap(at, bytes));
}

static CUresult my_cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *all, size_t n)
{
    CUresult result = has_plain(at, bytes) ? CUDA_ERROR_INVALID_VALUE : real(cuMemSetAccess)(at, bytes, all, n);

    if (result)
        return result;
    struct mapping *mapping;
    memory_lock();
    for (size_t place = mapping_place(at); (mapping = mapping_before(place, at + bytes)); place++)
        for (size_t i = 0; i < n; i++) {
            if (all[i].location.type == LOCATION_DEVICE && all[i].location.id >= 0 && all[i].location.id < MAX_DEVICES)
                mapping->access[all[i].location.id] = (unsigned char)all[i].flags;
            else
                /* the processor's own access: not taken apart here */
                memory_stays(mapping->memory, LEFT_SHARED);
        }
    memory_unlock();
    return result;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *all, size_t n)
{
    entry_called(AT_cuMemSetAccess);
    if (!shim_ready())
        return real(cuMemSetAccess) ? real(cuMemSetAccess)(at, bytes, all, n) : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, my_cuMemSetAccess(at, bytes, all, n));
}

/* Somebody whom we do not know has it from now on. */
static void stays(struct memory *memory)
{
    memory_lock();
    memory_stays(memory, LEFT_SHARED);
    memory_unlock();
}

static CUresult export(void *out, struct memory *memory, int type, unsigned long long flags)
{
    if (memory->shared && memory->cause == LEFT_FOREIGN) /* the driver's own business */
        return real(cuMemExportToShareableHandle)(out, memory->driver, type, flags);
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
        stays(memory);
    unhold(memory);
    return result;
}

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUhandle handle, int type, unsigned long long flags)
{
    entry_called(AT_cuMemExportToShareableHandle);
    if (!shim_ready())
        return real(cuMemExportToShareableHandle) ? real(cuMemExportToShareableHandle)(out, handle, type, flags)
                                                  : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, my_cuMemExportToShareableHandle(out, handle, type, flags));
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
    entry_called(AT_cuMemGetAllocationPropertiesFromHandle);
    if (!shim_ready())
        return real(cuMemGetAllocationPropertiesFromHandle) ? real(cuMemGetAllocationPropertiesFromHandle)(prop, handle)
                                                            : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, my_cuMemGetAllocationPropertiesFromHandle(prop, handle));
}

static CUresult my_cuMemRetainAllocationHandle(CUhandle *handle, void *address)
{
    CUresult result = CUDA_SUCCESS;

    memory_lock();
    struct mapping *mapping = mapping_at((CUdeviceptr)(uintptr_t)address);
    bool ours = mapping && handle;
    if (ours && (mapping->plain || mapping->opened)) {
        result = CUDA_ERROR_INVALID_VALUE; /* as for memory of cuMemAlloc */
    } else if (ours) {
        mapping->memory->references++;
        *handle = memory_given(mapping->memory);
    }
    memory_unlock();
    return ours ? result : real(cuMemRetainAllocationHandle)(handle, address);
}

EXPORT CUresult cuMemRetainAllocationHandle(CUhandle *handle, void *address)
{
    entry_called(AT_cuMemRetainAllocationHandle);
    if (!shim_ready())
        return real(cuMemRetainAllocationHandle) ? real(cuMemRetainAllocationHandle)(handle, address)
                                                 : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, my_cuMemRetainAllocationHandle(handle, address));
}

/* Somebody else's, and who that is nobody knows: it stays. A multicast object comes this way, too. */
static CUresult my_cuMemImportFromShareableHandle(CUhandle *handle, void *from, int type)
{
    CUmemAllocationProp prop = {.type = ALLOCATION_PINNED};
    CUhandle driver = 0;

    if (!handle)
        return real(cuMemImportFromShareableHandle)(handle, from, type);
    bulk_guard(true);
    CUresult result = real(cuMemImportFromShareableHandle)(&driver, from, type);
    if (!result) {
        real(cuMemGetAllocationPropertiesFromHandle)(&prop, driver);
        result = number(handle, driver, 0, &prop, true, LEFT_SHARED, -1);
    }
    if (result) {
        memory_lock();
        memory_guard();
        memory_unlock();
    }
    return result;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUhandle *handle, void *from, int type)
{
    entry_called(AT_cuMemImportFromShareableHandle);
    if (!shim_ready())
        return real(cuMemImportFromShareableHandle) ? real(cuMemImportFromShareableHandle)(handle, from, type)
                                                    : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, my_cuMemImportFromShareableHandle(handle, from, type));
}

/* ------------------------------------------------------------------------- other calls that take handles or show --- */

/* The driver's handle for the application's, which is held as long. */
static CUhandle theirs(CUhandle given, struct memory **held)
{
    *held = hold(given);
    return *held ? (*held)->driver : given;
}

static void and_stays(struct memory *memory, bool so)
{
    if (memory && so)
        stays(memory);
    if (memory)
        unhold(memory);
}

EXPORT CUresult cuMulticastAddDevice(CUhandle object, CUdevice device)
{
    typedef CUresult type(CUhandle, CUdevice);
    type *function = (type *)entry_call(AT_cuMulticastAddDevice);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    struct memory *held;
    CUresult result = function(theirs(object, &held), device);
    and_stays(held, false);
    return gate_left(reader, result);
}

/* What a multicast object is bound to is in its addresses, which we do not see: it stays. */
EXPORT CUresult cuMulticastBindMem(CUhandle object, size_t at, CUhandle handle, size_t offset, size_t bytes,
                                   unsigned long long flags)
{
    typedef CUresult type(CUhandle, size_t, CUhandle, size_t, size_t, unsigned long long);
    type *function = (type *)entry_call(AT_cuMulticastBindMem);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    struct memory *held, *memory;
    CUresult result = function(theirs(object, &held), at, theirs(handle, &memory), offset, bytes, flags);
    and_stays(memory, !result);
    and_stays(held, false);
    return gate_left(reader, result);
}

/* All memory in a range is seen by somebody from now on. */
static void range_stays(CUdeviceptr at, size_t bytes)
{
    const struct mapping *mapping;

    memory_lock();
    for (size_t place = mapping_place(at); (mapping = mapping_before(place, at + bytes)); place++)
        memory_stays(mapping->memory, LEFT_SHARED);
    memory_unlock();
}

EXPORT CUresult cuMulticastBindAddr(CUhandle object, size_t at, CUdeviceptr pointer, size_t bytes,
                                    unsigned long long flags)
{
    typedef CUresult type(CUhandle, size_t, CUdeviceptr, size_t, unsigned long long);
    type *function = (type *)entry_call(AT_cuMulticastBindAddr);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    struct memory *held;
    CUresult result = function(theirs(object, &held), at, pointer, bytes, flags);
    if (!result)
        range_stays(pointer, bytes);
    and_stays(held, false);
    return gate_left(reader, result);
}

/* Newer ones, which name the device. An endpoint is a number of the driver's own, not a handle. */
EXPORT CUresult cuMulticastBindMem_v2(CUhandle object, CUdevice device, size_t at, CUhandle handle, size_t offset,
                                      size_t bytes, unsigned long long flags)
{
    typedef CUresult type(CUhandle, CUdevice, size_t, CUhandle, size_t, size_t, unsigned long long);
    type *function = (type *)entry_call(AT_cuMulticastBindMem_v2);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    struct memory *held, *memory;
    CUresult result = function(theirs(object, &held), device, at, theirs(handle, &memory), offset, bytes, flags);
    and_stays(memory, !result);
    and_stays(held, false);
    return gate_left(reader, result);
}

EXPORT CUresult cuMulticastBindAddr_v2(CUhandle object, CUdevice device, size_t at, CUdeviceptr pointer, size_t bytes,
                                       unsigned long long flags)
{
    typedef CUresult type(CUhandle, CUdevice, size_t, CUdeviceptr, size_t, unsigned long long);
    type *function = (type *)entry_call(AT_cuMulticastBindAddr_v2);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    struct memory *held;
    CUresult result = function(theirs(object, &held), device, at, pointer, bytes, flags);
    if (!result)
        range_stays(pointer, bytes);
    and_stays(held, false);
    return gate_left(reader, result);
}

EXPORT CUresult cuLogicalEndpointBindMem(uint32_t endpoint, CUdevice device, uint64_t at, CUhandle handle,
                                         uint64_t offset, uint64_t bytes, unsigned long long flags)
{
    typedef CUresult type(uint32_t, CUdevice, uint64_t, CUhandle, uint64_t, uint64_t, unsigned long long);
    type *function = (type *)entry_call(AT_cuLogicalEndpointBindMem);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    struct memory *memory;
    CUresult result = function(endpoint, device, at, theirs(handle, &memory), offset, bytes, flags);
    and_stays(memory, !result);
    return gate_left(reader, result);
}

EXPORT CUresult cuLogicalEndpointBindAddr(uint32_t endpoint, CUdevice device, uint64_t at, CUdeviceptr pointer,
                                          uint64_t bytes, unsigned long long flags)
{
    typedef CUresult type(uint32_t, CUdevice, uint64_t, CUdeviceptr, uint64_t, unsigned long long);
    type *function = (type *)entry_call(AT_cuLogicalEndpointBindAddr);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = function(endpoint, device, at, pointer, bytes, flags);
    if (!result)
        range_stays(pointer, bytes);
    return gate_left(reader, result);
}

EXPORT CUresult cuMulticastUnbind(CUhandle object, CUdevice device, size_t at, size_t bytes)
{
    typedef CUresult type(CUhandle, CUdevice, size_t, size_t);
    type *function = (type *)entry_call(AT_cuMulticastUnbind);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    struct memory *held;
    CUresult result = function(theirs(object, &held), device, at, bytes);
    and_stays(held, false);
    return gate_left(reader, result);
}

/* A descriptor for another device's own access (dma-buf). */
EXPORT CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr pointer, size_t bytes, int kind,
                                              unsigned long long flags)
{
    typedef CUresult type(void *, CUdeviceptr, size_t, int, unsigned long long);
    type *function = (type *)entry_call(AT_cuMemGetHandleForAddressRange);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = function(handle, pointer, bytes, kind, flags);
    if (!result)
        range_stays(pointer, bytes);
    return gate_left(reader, result);
}

/* Memory behind sparse arrays: it stays, for where it is mapped cannot be asked. */
struct map_info {
    int resource_type;
    void *resource;
    int subresource_type;
    union {
        unsigned level[8];
        struct {
            unsigned layer;
            unsigned long long offset, bytes;
        } tail;
    } subresource;
    int operation, handle_type;
    CUhandle handle;
    unsigned long long offset;
    unsigned devices, flags, reserved[2];
};

typedef CUresult map_arrays(struct map_info *, unsigned, void *);

static CUresult map_them(map_arrays *function, struct map_info *all, unsigned n, void *stream)
{
    struct map_info *own = shim_ready() && all && n ? malloc(n * sizeof *own) : NULL;

    if (!own)
        return function(all, n, stream);
    memcpy(own, all, n * sizeof *own);
    for (unsigned i = 0; i < n; i++) {
        struct memory *memory;
        own[i].handle = theirs(all[i].handle, &memory);
        and_stays(memory, true);
    }
    CUresult result = function(own, n, stream);
    free(own);
    return result;
}

EXPORT CUresult cuMemMapArrayAsync(struct map_info *all, unsigned n, void *stream)
{
    typedef CUresult type(struct map_info *, unsigned, void *);
    type *function = (type *)entry_call(AT_cuMemMapArrayAsync);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = map_them(function, all, n, stream);
    return gate_left(reader, result);
}

EXPORT CUresult cuMemMapArrayAsync_ptsz(struct map_info *all, unsigned n, void *stream)
{
    typedef CUresult type(struct map_info *, unsigned, void *);
    type *function = (type *)entry_call(AT_cuMemMapArrayAsync_ptsz);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = map_them(function, all, n, stream);
    return gate_left(reader, result);
}
