/* cuMemAlloc and what belongs to it, for pieces of 2 MiB and more: virtual memory that can be given away and taken back
 * at the same address. What cannot be had that way is the driver's, as if the shim were not there. */
#include "plain.h"
#include "compiler.h"
#include "contexts.h"
#include "count.h"
#include "driver.h"
#include "gate.h"
#include "hooks.h"
#include "late.h"
#include "memory.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Which contexts may use whose memory: enabled by cuCtxEnablePeerAccess. */
struct peer {
    CUcontext from, to;
    int device, of; /* device may use memory of… */
};
static struct peer *peers;
static size_t n_peers;

static int device_of_current(void)
{
    CUdevice device;

    return real(cuCtxGetDevice)(&device) ? -1 : device;
}

/* With memory_lock held: the devices that may use memory of one. */
static void may_use(unsigned char *access, int of)
{
    access[of] = ACCESS_READWRITE;
    for (size_t i = 0; i < n_peers; i++)
        if (peers[i].of == of && peers[i].device >= 0)
            access[peers[i].device] = ACCESS_READWRITE;
}

static CUresult make(CUdeviceptr *pointer, size_t bytes)
{
    CUmemAllocationProp prop = {.type = ALLOCATION_PINNED, .requestedHandleTypes = HANDLE_POSIX_FD};
    size_t granularity = 0, whole;
    CUhandle handle = 0;
    CUdeviceptr at = 0;
    CUresult result;
    CUcontext context = NULL;

    prop.location = (CUmemLocation){LOCATION_DEVICE, device_of_current()};
    if (prop.location.id < 0 || prop.location.id >= MAX_DEVICES || real(cuCtxGetCurrent)(&context))
        return CUDA_ERROR_NOT_SUPPORTED;
    context = context_owner(context, prop.location.id);
    prop.allocFlags.gpuDirectRDMACapable = 1; /* as plain memory is */
    if (real(cuMemGetAllocationGranularity)(&granularity, &prop, 0)) {
        prop.allocFlags.gpuDirectRDMACapable = 0;
        if (real(cuMemGetAllocationGranularity)(&granularity, &prop, 0))
            return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (bytes > (size_t)-1 - granularity)
        return CUDA_ERROR_OUT_OF_MEMORY;
    whole = (bytes + granularity - 1) / granularity * granularity;
    result = real(cuMemCreate)(&handle, whole, &prop, 0);
    if (result && prop.allocFlags.gpuDirectRDMACapable && result != CUDA_ERROR_OUT_OF_MEMORY) {
        prop.allocFlags.gpuDirectRDMACapable = 0;
        result = real(cuMemCreate)(&handle, whole, &prop, 0);
    }
    if (result)
        return result == CUDA_ERROR_OUT_OF_MEMORY ? result : CUDA_ERROR_NOT_SUPPORTED;
    if (real(cuMemAddressReserve)(&at, whole, 0, 0, 0))
        goto no_address;
    if (real(cuMemMap)(at, whole, 0, handle, 0))
        goto no_map;

    struct mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping)
        goto no_record;
    *mapping = (struct mapping){.at = at, .bytes = whole, .plain = true, .asked = bytes, .context = context};
    memory_lock();
    may_use(mapping->access, prop.location.id);
    memory_unlock();
    if ((result = memory_show(mapping)))
        goto no_record;
    unsigned char access[MAX_DEVICES] = {0};
    prop.requestedHandleTypes = 0;
    memory_lock();
    struct memory *memory = memory_new(handle, whole, &prop);
    mapping->memory = memory;
    bool there = memory && mapping_add(mapping);
    if (memory && !there)
        memory_let_go(memory); /* its handle is released below */
    may_use(access, prop.location.id);
    if (there && memcmp(access, mapping->access, sizeof access)) { /* peer access has begun meanwhile */
        memcpy(mapping->access, access, sizeof access);
        memory_show(mapping);
    }
    memory_unlock();
    if (!there)
        goto no_record;
    *pointer = at;
    return CUDA_SUCCESS;

no_record:
    free(mapping);
    real(cuMemUnmap)(at, whole);
no_map:
    real(cuMemAddressFree)(at, whole);
no_address:
    real(cuMemRelease)(handle);
    return result == CUDA_ERROR_OUT_OF_MEMORY ? result : CUDA_ERROR_NOT_SUPPORTED;
}

static void count(enum left kind, CUdeviceptr pointer, size_t bytes)
{
    CUcontext context = NULL;

    real(cuCtxGetCurrent)(&context);
    left_add(kind, pointer, bytes, context);
}

/* The driver's own free of what is the driver's own. */
static CUresult let_go_of_theirs(CUdeviceptr pointer)
{
    struct left_piece *piece = left_take(pointer);
    CUresult result = real(cuMemFree_v2)(pointer);

    left_freed(piece, result);
    return result;
}

static CUresult alloc_once(CUdeviceptr *pointer, size_t bytes)
{
    bool small = bytes < LARGE || !pointer;
    CUresult result = small ? CUDA_ERROR_NOT_SUPPORTED : make(pointer, bytes);

    if (result == CUDA_ERROR_NOT_SUPPORTED) {
        result = real(cuMemAlloc_v2)(pointer, bytes);
        if (!result && pointer)
            count(small ? LEFT_SMALL : LEFT_FAILED, *pointer, bytes);
    }
    return result;
}

static CUresult alloc(CUdeviceptr *pointer, size_t bytes)
{
    late_free(bytes < LARGE ? LATE_LOOK : LATE_MARK);
    CUresult result = alloc_once(pointer, bytes);
    return result == CUDA_ERROR_OUT_OF_MEMORY && late_free(LATE_ALL) ? alloc_once(pointer, bytes) : result;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    entry_called(AT_cuMemAlloc_v2);
    if (!shim_ready())
        return real(cuMemAlloc_v2) ? real(cuMemAlloc_v2)(pointer, bytes) : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, alloc(pointer, bytes));
}

/* Pitches that the driver has told: asked again, it would make a row again, and letting go of that waits for the device. */
static struct told {
    size_t width, pitch;
    int device;
    unsigned element;
} told[64];
static size_t n_told;

static size_t pitch_of(size_t width, int device, unsigned element)
{
    size_t pitch = 0;

    memory_lock();
    for (size_t i = 0; i < sizeof told / sizeof told[0] && !pitch; i++)
        if (told[i].width == width && told[i].device == device && told[i].element == element)
            pitch = told[i].pitch;
    memory_unlock();
    return pitch;
}

/* The pitch is the driver's business: it is asked with one row. */
static CUresult ask_pitch(size_t *pitch, size_t width, unsigned element)
{
    int device = device_of_current();
    CUdeviceptr row = 0;

    if (device >= 0 && (*pitch = pitch_of(width, device, element)))
        return CUDA_SUCCESS;
    CUresult result = real(cuMemAllocPitch_v2)(&row, pitch, width, 1, element);
    if (result)
        return result;
    real(cuMemFree_v2)(row);
    memory_lock();
    told[n_told++ % (sizeof told / sizeof told[0])] = (struct told){width, *pitch, device, element};
    memory_unlock();
    return CUDA_SUCCESS;
}

static CUresult pitched(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element)
{
    size_t bytes;
    CUresult result;

    if (!pointer || !pitch || !height || width > (size_t)-1 / height || width * height < LARGE) {
        result = real(cuMemAllocPitch_v2)(pointer, pitch, width, height, element);
        if (result == CUDA_ERROR_OUT_OF_MEMORY && late_free(LATE_ALL))
            result = real(cuMemAllocPitch_v2)(pointer, pitch, width, height, element);
        if (!result && pointer && pitch)
            count(LEFT_SMALL, *pointer, *pitch * height);
        return result;
    }
    result = ask_pitch(pitch, width, element);
    if (!result && __builtin_mul_overflow(*pitch, height, &bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return result ? result : alloc(pointer, bytes);
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element)
{
    entry_called(AT_cuMemAllocPitch_v2);
    if (!shim_ready())
        return real(cuMemAllocPitch_v2) ? real(cuMemAllocPitch_v2)(pointer, pitch, width, height, element)
                                        : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, pitched(pointer, pitch, width, height, element));
}

/* With memory_lock held: memory of ours that begins there and is not being freed. */
static struct mapping *ours_at(CUdeviceptr pointer, CUresult *wrong)
{
    struct mapping *mapping = mapping_at(pointer);

    *wrong = mapping ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    return mapping && mapping->plain && mapping->at == pointer && !mapping->freeing ? mapping : NULL;
}

/* With memory_lock held: the same as before, while others may have let go of it and used its address again. */
static struct mapping *still(CUdeviceptr pointer, uint64_t id, size_t *place)
{
    *place = mapping_place(pointer);
    struct mapping *mapping = mapping_nth(*place);
    return mapping && mapping->at == pointer && mapping->freeing && mapping->memory->id == id ? mapping : NULL;
}

static CUresult let_go(CUdeviceptr pointer)
{
    CUresult wrong;

    late_free(LATE_LOOK);
    memory_lock();
    struct mapping *mapping = ours_at(pointer, &wrong);
    if (!mapping) {
        memory_unlock();
        return wrong ? wrong : let_go_of_theirs(pointer);
    }
    CUcontext owner = mapping->context, mine = NULL;
    uint64_t id = mapping->memory->id;
    if (real(cuCtxGetCurrent)(&mine) || !mine) {
        memory_unlock();
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    mapping->freeing = true;
    memory_unlock();
    /* cuMemFree waits for what uses the memory. Without the lock: nobody else shall have to wait for that. */
    CUresult result = wait_for_work(owner);
    size_t place;
    memory_lock();
    if (!(mapping = still(pointer, id, &place))) {
        result = CUDA_ERROR_INVALID_VALUE; /* its context has ended meanwhile */
    } else if (result >= 900 && result < 910) { /* a stream is being captured */
        late_add(mapping, NULL, NULL, false);
        result = CUDA_SUCCESS;
    } else {
        mapping_take_away(place);
    }
    memory_unlock();
    return result;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    entry_called(AT_cuMemFree_v2);
    if (!shim_ready())
        return real(cuMemFree_v2) ? real(cuMemFree_v2)(pointer) : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, let_go(pointer));
}

/* In the order of a stream: nothing waits here, since what the stream waits for may be this thread's to do. */
static CUresult let_go_in_order(CUdeviceptr pointer, void *stream, bool per_thread)
{
    CUcontext recorded = NULL;
    void *event = NULL;
    CUresult result;
    size_t place;

    late_free(LATE_LOOK);
    memory_lock();
    struct mapping *mapping = ours_at(pointer, &result);
    if (!mapping) {
        memory_unlock();
        return CUDA_ERROR_INVALID_VALUE;
    }
    uint64_t id = mapping->memory->id;
    mapping->freeing = true;
    memory_unlock();
    result = late_record(stream, per_thread, &event, &recorded);
    if (!result && !event) {
        typedef CUresult synchronize(void *);
        synchronize *wait = (synchronize *)entry_real(per_thread ? AT_cuStreamSynchronize_ptsz
                                                                 : AT_cuStreamSynchronize);
        result = wait ? wait(stream) : CUDA_ERROR_NOT_SUPPORTED;
    }
    memory_lock();
    mapping = still(pointer, id, &place);
    if (!mapping)
        result = CUDA_ERROR_INVALID_VALUE; /* its context has ended meanwhile */
    else if (result)
        mapping->freeing = false;
    else if (event)
        late_add(mapping, event, recorded, true);
    else
        mapping_take_away(place);
    memory_unlock();
    if (!mapping)
        late_forget(event);
    return result;
}

static CUresult let_go_async(CUdeviceptr pointer, void *stream, int place, bool per_thread)
{
    typedef CUresult type(CUdeviceptr, void *);
    type *function = (type *)entry_call(place);

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    memory_lock();
    const struct mapping *mapping = mapping_at(pointer);
    bool ours = mapping && mapping->plain;
    memory_unlock();
    if (ours)
        return let_go_in_order(pointer, stream, per_thread);
    struct left_piece *piece = left_take(pointer);
    CUresult result = function(pointer, stream);
    left_freed(piece, result);
    return result;
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, void *stream)
{
    struct reader *reader = gate_enter();
    return gate_left(reader, let_go_async(pointer, stream, AT_cuMemFreeAsync, false));
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, void *stream)
{
    struct reader *reader = gate_enter();
    return gate_left(reader, let_go_async(pointer, stream, AT_cuMemFreeAsync_ptsz, true));
}

/* --------------------------------------------------------------------------------------------------- questions --- */

enum {
    ATTRIBUTE_CONTEXT = 1,
    ATTRIBUTE_BUFFER = 7,
    ATTRIBUTE_IS_LEGACY_IPC = 10,
    ATTRIBUTE_RANGE_START = 11,
    ATTRIBUTE_RANGE_SIZE = 12,
    ATTRIBUTE_HANDLE_TYPES = 14,
    ATTRIBUTE_MAPPING_SIZE = 18,
    ATTRIBUTE_MAPPING_BASE = 19,
    ATTRIBUTE_BLOCK = 20
};

#define OURS (1ull << 62) /* numbers of ours are none that a driver counts to */

/* Answers as for memory that the driver has allocated itself, and that does not change when it has been away. With
 * memory_lock held. */
static void put_right(const struct mapping *mapping, int attribute, void *data)
{
    if (attribute == ATTRIBUTE_BUFFER || attribute == ATTRIBUTE_BLOCK)
        *(uint64_t *)data = OURS | (attribute == ATTRIBUTE_BUFFER ? mapping->number : mapping->memory->id);
    if (!mapping->plain && !mapping->opened)
        return;
    switch (attribute) {
    case ATTRIBUTE_CONTEXT: *(CUcontext *)data = mapping->context; break;
    case ATTRIBUTE_IS_LEGACY_IPC: *(int *)data = mapping->plain; break;
    case ATTRIBUTE_RANGE_START:
    case ATTRIBUTE_MAPPING_BASE: *(CUdeviceptr *)data = mapping->at; break;
    case ATTRIBUTE_RANGE_SIZE:
    case ATTRIBUTE_MAPPING_SIZE: *(size_t *)data = mapping->asked; break;
    case ATTRIBUTE_HANDLE_TYPES: *(uint64_t *)data = 0; break;
    default: break;
    }
}

static CUresult range(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer)
{
    late_free(LATE_LOOK); /* what was freed is not there */
    memory_lock();
    const struct mapping *mapping = mapping_at(pointer);
    bool ours = mapping && (mapping->plain || mapping->opened) && pointer < mapping->at + mapping->asked;
    if (ours && base)
        *base = mapping->at;
    if (ours && bytes)
        *bytes = mapping->asked;
    memory_unlock();
    return ours ? CUDA_SUCCESS : real(cuMemGetAddressRange_v2)(base, bytes, pointer);
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer)
{
    entry_called(AT_cuMemGetAddressRange_v2);
    if (!shim_ready())
        return real(cuMemGetAddressRange_v2) ? real(cuMemGetAddressRange_v2)(base, bytes, pointer)
                                             : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, range(base, bytes, pointer));
}

static CUresult attribute(void *data, int which, CUdeviceptr pointer)
{
    late_free(LATE_LOOK);
    CUresult result = real(cuPointerGetAttribute)(data, which, pointer);

    memory_lock();
    const struct mapping *mapping = mapping_at(pointer);
    if (data && mapping && (!result || (which == ATTRIBUTE_CONTEXT && (mapping->plain || mapping->opened)))) {
        put_right(mapping, which, data);
        result = CUDA_SUCCESS;
    }
    memory_unlock();
    return result;
}

EXPORT CUresult cuPointerGetAttribute(void *data, int which, CUdeviceptr pointer)
{
    entry_called(AT_cuPointerGetAttribute);
    if (!shim_ready())
        return real(cuPointerGetAttribute) ? real(cuPointerGetAttribute)(data, which, pointer) : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, attribute(data, which, pointer));
}

static CUresult attributes(unsigned n, int *which, void **data, CUdeviceptr pointer)
{
    late_free(LATE_LOOK);
    CUresult result = real(cuPointerGetAttributes)(n, which, data, pointer);

    memory_lock();
    const struct mapping *mapping = mapping_at(pointer);
    if (result == CUDA_SUCCESS && mapping)
        for (unsigned i = 0; i < n; i++)
            put_right(mapping, which[i], data[i]);
    memory_unlock();
    return result;
}

EXPORT CUresult cuPointerGetAttributes(unsigned n, int *which, void **data, CUdeviceptr pointer)
{
    entry_called(AT_cuPointerGetAttributes);
    if (!shim_ready())
        return real(cuPointerGetAttributes) ? real(cuPointerGetAttributes)(n, which, data, pointer)
                                            : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, attributes(n, which, data, pointer));
}

/* What was freed is free: what can be let go of is, before anybody counts. */
EXPORT CUresult cuMemGetInfo_v2(size_t *now, size_t *all)
{
    typedef CUresult type(size_t *, size_t *);
    entry_called(AT_cuMemGetInfo_v2);
    type *function = (type *)entry_real(AT_cuMemGetInfo_v2);
    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    if (shim_ready())
        late_free(LATE_FREED);
    CUresult result = function(now, all);
    gate_leave(reader);
    return result;
}

/* ------------------------------------------------------------------------------------------------ peer access --- */

/* With memory_lock held: devices that may use memory of one are told so, for all of it. */
static CUresult show_to(int of, int device, int flags)
{
    CUresult first = CUDA_SUCCESS;
    struct mapping *mapping;

    for (size_t i = 0; (mapping = mapping_nth(i)); i++)
        if (mapping->plain && mapping->memory->asked.location.id == of) {
            CUmemAccessDesc desc = {{LOCATION_DEVICE, device}, flags};
            mapping->access[device] = (unsigned char)flags;
            mapping->shown[device] = false;
            CUresult result = real(cuMemSetAccess)(mapping->at, mapping->bytes, &desc, 1);
            first = first ? first : result;
        }
    return first;
}

static int device_of(CUcontext context)
{
    CUcontext before = NULL;
    int device = -1;

    real(cuCtxGetCurrent)(&before);
    if (!real(cuCtxSetCurrent)(context))
        device = device_of_current();
    real(cuCtxSetCurrent)(before);
    return device;
}

static CUresult enable(CUcontext peer, unsigned flags)
{
    CUresult result = real(cuCtxEnablePeerAccess)(peer, flags);
    CUcontext mine = NULL;

    if (result || real(cuCtxGetCurrent)(&mine))
        return result;
    int device = device_of_current(), of = device_of(peer);
    memory_lock();
    struct peer *more = realloc(peers, (n_peers + 1) * sizeof *peers);
    if (more) {
        peers = more;
        peers[n_peers] = (struct peer){mine, peer, device, of};
        if (peers[n_peers].device >= 0 && peers[n_peers].of >= 0)
            result = show_to(peers[n_peers].of, peers[n_peers].device, ACCESS_READWRITE);
        n_peers++;
    }
    memory_unlock();
    return result;
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    entry_called(AT_cuCtxEnablePeerAccess);
    if (!shim_ready())
        return real(cuCtxEnablePeerAccess) ? real(cuCtxEnablePeerAccess)(peer, flags) : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, enable(peer, flags));
}

static CUresult disable(CUcontext peer)
{
    CUresult result = real(cuCtxDisablePeerAccess)(peer);
    CUcontext mine = NULL;

    if (result)
        return result;
    real(cuCtxGetCurrent)(&mine);
    memory_lock();
    for (size_t i = 0; i < n_peers; i++)
        if (peers[i].from == mine && peers[i].to == peer) {
            struct peer gone = peers[i];
            peers[i] = peers[--n_peers];
            bool another = false;
            for (size_t j = 0; j < n_peers; j++)
                another |= peers[j].device == gone.device && peers[j].of == gone.of;
            if (!another && gone.device != gone.of)
                show_to(gone.of, gone.device, ACCESS_NONE);
            break;
        }
    memory_unlock();
    return result;
}

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
    entry_called(AT_cuCtxDisablePeerAccess);
    if (!shim_ready())
        return real(cuCtxDisablePeerAccess) ? real(cuCtxDisablePeerAccess)(peer) : CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, disable(peer));
}

void peers_context_gone(CUcontext context)
{
    for (size_t i = n_peers; i-- > 0;)
        if (peers[i].from == context || peers[i].to == context)
            peers[i] = peers[--n_peers];
}
