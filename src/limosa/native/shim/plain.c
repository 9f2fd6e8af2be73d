/* cuMemAlloc and what belongs to it, for pieces of 2 MiB and more: virtual memory that can be given away and taken back
 * at the same address. What cannot be had that way is the driver's, as if the shim were not there. */
#include "capture.h"
#include "memory.h"
#include "shim.h"

#include <stdlib.h>
#include <string.h>

#define GATE(call)                                                                                                     \
    do {                                                                                                               \
        struct reader *reader_ = gate_enter();                                                                         \
        CUresult result_ = (call);                                                                                     \
        gate_leave(reader_);                                                                                           \
        return result_;                                                                                                \
    } while (0)

/* Which contexts may use whose memory: enabled by cuCtxEnablePeerAccess. */
struct peer {
    CUcontext from, to;
    int device, of; /* device may use memory of… */
};
static struct peer *peers;
static size_t n_peers;

/* What was freed while a stream was being captured, and waits until the device may be waited for. */
static uint64_t *later; /* by their memory's number: addresses are used again */
static size_t n_later, room_later;

static int device_of_current(void)
{
    CUdevice device;

    return real(cuCtxGetDevice)(&device) ? -1 : device;
}

/* Waits for the work of the context that some memory is of (NULL: of the current one). Without memory_lock. */
static CUresult wait_for_work(CUcontext owner)
{
    int mode = CAPTURE_MODE_RELAXED;
    CUcontext mine = NULL;
    CUresult result;

    if (capture_any()) /* the driver would refuse, and might spoil the capture */
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    real(cuThreadExchangeStreamCaptureMode)(&mode);
    result = real(cuCtxGetCurrent)(&mine);
    bool other = !result && owner && owner != mine;
    if (other)
        result = real(cuCtxSetCurrent)(owner);
    if (!result)
        result = real(cuCtxSynchronize)();
    if (other)
        real(cuCtxSetCurrent)(mine);
    real(cuThreadExchangeStreamCaptureMode)(&mode);
    return result;
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
    prop.allocFlags.gpuDirectRDMACapable = 1; /* as plain memory is */
    if (real(cuMemGetAllocationGranularity)(&granularity, &prop, 0)) {
        prop.allocFlags.gpuDirectRDMACapable = 0;
        if (real(cuMemGetAllocationGranularity)(&granularity, &prop, 0))
            return CUDA_ERROR_NOT_SUPPORTED;
    }
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
    pthread_mutex_lock(&memory_lock);
    may_use(mapping->access, prop.location.id);
    pthread_mutex_unlock(&memory_lock);
    if ((result = memory_show(mapping)))
        goto no_record;
    unsigned char access[MAX_DEVICES] = {0};
    prop.requestedHandleTypes = 0;
    pthread_mutex_lock(&memory_lock);
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
    pthread_mutex_unlock(&memory_lock);
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

/* What waits to be freed, if the device may be waited for by now. */
static void free_later(void)
{
    pthread_mutex_lock(&memory_lock);
    size_t n = n_later;
    uint64_t last = n ? later[n - 1] : 0;
    pthread_mutex_unlock(&memory_lock);
    if (!n || wait_for_work(NULL))
        return;
    pthread_mutex_lock(&memory_lock);
    for (n = n_later; n && later[n - 1] != last; n--) /* what came after is for the next time */
        ;
    for (size_t i = 0; i < n; i++)
        for (size_t place = 0; place < n_mappings; place++)
            if (mappings[place]->memory->id == later[i]) {
                mapping_take_away(place);
                break;
            }
    n_later -= n;
    memmove(later, later + n, n_later * sizeof *later);
    pthread_mutex_unlock(&memory_lock);
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

    result ? left_again(piece) : left_gone(piece);
    return result;
}

static CUresult alloc(CUdeviceptr *pointer, size_t bytes)
{
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;

    if (bytes < LARGE || !pointer) {
        result = real(cuMemAlloc_v2)(pointer, bytes);
        if (!result)
            count(LEFT_SMALL, *pointer, bytes);
        return result;
    }
    free_later();
    result = make(pointer, bytes);
    if (result == CUDA_ERROR_NOT_SUPPORTED) {
        result = real(cuMemAlloc_v2)(pointer, bytes);
        if (!result)
            count(LEFT_FAILED, *pointer, bytes);
    }
    return result;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    CALLED(cuMemAlloc_v2);
    if (!shim_ready())
        return real_functions[REAL_cuMemAlloc_v2] ? real(cuMemAlloc_v2)(pointer, bytes) : CUDA_ERROR_NO_DEVICE;
    GATE(alloc(pointer, bytes));
}

static CUresult pitched(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element)
{
    /* The pitch is the driver's business: it is asked with one row. */
    CUdeviceptr row = 0;
    CUresult result;

    if (!pointer || !pitch || !height || width > (size_t)-1 / height || width * height < LARGE) {
        result = real(cuMemAllocPitch_v2)(pointer, pitch, width, height, element);
        if (!result)
            count(LEFT_SMALL, *pointer, *pitch * height);
        return result;
    }
    result = real(cuMemAllocPitch_v2)(&row, pitch, width, 1, element);
    if (result)
        return result;
    real(cuMemFree_v2)(row);
    return alloc(pointer, *pitch * height);
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element)
{
    CALLED(cuMemAllocPitch_v2);
    if (!shim_ready())
        return real_functions[REAL_cuMemAllocPitch_v2]
            ? real(cuMemAllocPitch_v2)(pointer, pitch, width, height, element) : CUDA_ERROR_NO_DEVICE;
    GATE(pitched(pointer, pitch, width, height, element));
}

static CUresult let_go(CUdeviceptr pointer)
{
    struct mapping *mapping;

    pthread_mutex_lock(&memory_lock);
    mapping = mapping_at(pointer);
    if (!mapping || !mapping->plain || mapping->at != pointer || mapping->freeing) {
        pthread_mutex_unlock(&memory_lock);
        return mapping ? CUDA_ERROR_INVALID_VALUE : let_go_of_theirs(pointer);
    }
    CUcontext owner = mapping->context, mine = NULL;
    if (real(cuCtxGetCurrent)(&mine) || !mine) {
        pthread_mutex_unlock(&memory_lock);
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    mapping->freeing = true;
    pthread_mutex_unlock(&memory_lock);
    /* cuMemFree waits for what uses the memory. Without the lock: nobody else shall have to wait for that. */
    CUresult result = wait_for_work(owner);
    pthread_mutex_lock(&memory_lock);
    size_t place = mapping_place(pointer);
    if (place >= n_mappings || mappings[place]->at != pointer) {
        result = CUDA_ERROR_INVALID_VALUE; /* its context has ended meanwhile */
    } else if (result >= 900 && result < 910) { /* a stream is being captured */
        if (n_later == room_later) {
            size_t more = room_later ? 2 * room_later : 64;
            uint64_t *bigger = realloc(later, more * sizeof *later);
            if (bigger)
                later = bigger, room_later = more;
        }
        if (n_later < room_later)
            later[n_later++] = mappings[place]->memory->id;
        result = CUDA_SUCCESS;
    } else {
        mapping_take_away(place);
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    CALLED(cuMemFree_v2);
    if (!shim_ready())
        return real_functions[REAL_cuMemFree_v2] ? real(cuMemFree_v2)(pointer) : CUDA_ERROR_NO_DEVICE;
    GATE(let_go(pointer));
}

/* Of memory that cuMemAlloc has made this waits, too: longer than it has to, never less. */
static CUresult let_go_async(CUdeviceptr pointer, void *stream, struct entry *entry)
{
    typedef CUresult type(CUdeviceptr, void *);
    type *function = (type *)entry_real(entry);

    if (!function)
        return CUDA_ERROR_NO_DEVICE;

    pthread_mutex_lock(&memory_lock);
    const struct mapping *mapping = mapping_at(pointer);
    bool ours = mapping && mapping->plain;
    pthread_mutex_unlock(&memory_lock);
    if (ours)
        return let_go(pointer);
    struct left_piece *piece = left_take(pointer);
    CUresult result = function(pointer, stream);
    result ? left_again(piece) : left_gone(piece);
    return result;
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, void *stream)
{
    CALLED(cuMemFreeAsync);
    GATE(let_go_async(pointer, stream, &entries[AT_cuMemFreeAsync]));
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, void *stream)
{
    CALLED(cuMemFreeAsync_ptsz);
    GATE(let_go_async(pointer, stream, &entries[AT_cuMemFreeAsync_ptsz]));
}

/* --------------------------------------------------------------------------------------------------- questions --- */

enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_IS_LEGACY_IPC = 10, ATTRIBUTE_RANGE_START = 11, ATTRIBUTE_RANGE_SIZE = 12,
       ATTRIBUTE_HANDLE_TYPES = 14, ATTRIBUTE_MAPPING_SIZE = 18, ATTRIBUTE_MAPPING_BASE = 19 };

/* Answers as for memory that the driver has allocated itself. With memory_lock held. */
static void put_right(const struct mapping *mapping, int attribute, void *data)
{
    switch (attribute) {
    case ATTRIBUTE_CONTEXT: *(CUcontext *)data = mapping->context; break;
    case ATTRIBUTE_IS_LEGACY_IPC: *(int *)data = mapping->plain; break;
    case ATTRIBUTE_RANGE_START: *(CUdeviceptr *)data = mapping->at; break;
    case ATTRIBUTE_MAPPING_BASE: *(CUdeviceptr *)data = mapping->at; break;
    case ATTRIBUTE_MAPPING_SIZE: *(size_t *)data = mapping->asked; break;
    case ATTRIBUTE_RANGE_SIZE: *(size_t *)data = mapping->asked; break;
    case ATTRIBUTE_HANDLE_TYPES: *(uint64_t *)data = 0; break;
    default: break;
    }
}

static CUresult range(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer)
{
    pthread_mutex_lock(&memory_lock);
    const struct mapping *mapping = mapping_at(pointer);
    bool ours = mapping && (mapping->plain || mapping->opened) && pointer < mapping->at + mapping->asked;
    if (ours && base)
        *base = mapping->at;
    if (ours && bytes)
        *bytes = mapping->asked;
    pthread_mutex_unlock(&memory_lock);
    return ours ? CUDA_SUCCESS : real(cuMemGetAddressRange_v2)(base, bytes, pointer);
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer)
{
    CALLED(cuMemGetAddressRange_v2);
    if (!shim_ready())
        return real_functions[REAL_cuMemGetAddressRange_v2]
            ? real(cuMemGetAddressRange_v2)(base, bytes, pointer) : CUDA_ERROR_NO_DEVICE;
    GATE(range(base, bytes, pointer));
}

static CUresult attribute(void *data, int which, CUdeviceptr pointer)
{
    CUresult result = real(cuPointerGetAttribute)(data, which, pointer);

    pthread_mutex_lock(&memory_lock);
    const struct mapping *mapping = mapping_at(pointer);
    if (data && mapping && (mapping->plain || mapping->opened) && (result == CUDA_SUCCESS || which == ATTRIBUTE_CONTEXT)) {
        put_right(mapping, which, data);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

EXPORT CUresult cuPointerGetAttribute(void *data, int which, CUdeviceptr pointer)
{
    CALLED(cuPointerGetAttribute);
    if (!shim_ready())
        return real_functions[REAL_cuPointerGetAttribute]
            ? real(cuPointerGetAttribute)(data, which, pointer) : CUDA_ERROR_NO_DEVICE;
    GATE(attribute(data, which, pointer));
}

static CUresult attributes(unsigned n, int *which, void **data, CUdeviceptr pointer)
{
    CUresult result = real(cuPointerGetAttributes)(n, which, data, pointer);

    pthread_mutex_lock(&memory_lock);
    const struct mapping *mapping = mapping_at(pointer);
    if (result == CUDA_SUCCESS && mapping && (mapping->plain || mapping->opened))
        for (unsigned i = 0; i < n; i++)
            put_right(mapping, which[i], data[i]);
    pthread_mutex_unlock(&memory_lock);
    return result;
}

EXPORT CUresult cuPointerGetAttributes(unsigned n, int *which, void **data, CUdeviceptr pointer)
{
    CALLED(cuPointerGetAttributes);
    if (!shim_ready())
        return real_functions[REAL_cuPointerGetAttributes]
            ? real(cuPointerGetAttributes)(n, which, data, pointer) : CUDA_ERROR_NO_DEVICE;
    GATE(attributes(n, which, data, pointer));
}

/* ------------------------------------------------------------------------------------------------ peer access --- */

/* With memory_lock held: devices that may use memory of one are told so, for all of it. */
static CUresult show_to(int of, int device, int flags)
{
    CUresult first = CUDA_SUCCESS;

    for (size_t i = 0; i < n_mappings; i++)
        if (mappings[i]->plain && mappings[i]->memory->asked.location.id == of) {
            CUmemAccessDesc desc = {{LOCATION_DEVICE, device}, flags};
            mappings[i]->access[device] = (unsigned char)flags;
            CUresult result = real(cuMemSetAccess)(mappings[i]->at, mappings[i]->bytes, &desc, 1);
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
    pthread_mutex_lock(&memory_lock);
    struct peer *more = realloc(peers, (n_peers + 1) * sizeof *peers);
    if (more) {
        peers = more;
        peers[n_peers] = (struct peer){mine, peer, device, of};
        if (peers[n_peers].device >= 0 && peers[n_peers].of >= 0)
            result = show_to(peers[n_peers].of, peers[n_peers].device, ACCESS_READWRITE);
        n_peers++;
    }
    pthread_mutex_unlock(&memory_lock);
    return result;
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    CALLED(cuCtxEnablePeerAccess);
    if (!shim_ready())
        return real_functions[REAL_cuCtxEnablePeerAccess] ? real(cuCtxEnablePeerAccess)(peer, flags)
                                                          : CUDA_ERROR_NO_DEVICE;
    GATE(enable(peer, flags));
}

static CUresult disable(CUcontext peer)
{
    CUresult result = real(cuCtxDisablePeerAccess)(peer);
    CUcontext mine = NULL;

    if (result)
        return result;
    real(cuCtxGetCurrent)(&mine);
    pthread_mutex_lock(&memory_lock);
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
    pthread_mutex_unlock(&memory_lock);
    return result;
}

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
    CALLED(cuCtxDisablePeerAccess);
    if (!shim_ready())
        return real_functions[REAL_cuCtxDisablePeerAccess] ? real(cuCtxDisablePeerAccess)(peer) : CUDA_ERROR_NO_DEVICE;
    GATE(disable(peer));
}

/* ------------------------------------------------------------------------------------------- end of a context --- */

CUcontext *contexts;
size_t n_contexts;

static CUresult made(CUresult result, CUcontext *context)
{
    if (result)
        return result;
    pthread_mutex_lock(&memory_lock);
    CUcontext *more = realloc(contexts, (n_contexts + 1) * sizeof *more);
    if (more) {
        contexts = more;
        contexts[n_contexts++] = *context;
    }
    pthread_mutex_unlock(&memory_lock);
    if (!more) { /* its work could not be waited for */
        real(cuCtxDestroy_v2)(*context);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device)
{
    CALLED(cuCtxCreate_v2);
    if (!shim_ready())
        return real_functions[REAL_cuCtxCreate_v2] ? real(cuCtxCreate_v2)(context, flags, device)
                                                   : CUDA_ERROR_NO_DEVICE;
    GATE(made(real(cuCtxCreate_v2)(context, flags, device), context));
}

EXPORT CUresult cuCtxCreate_v3(CUcontext *context, void *affinities, int n, unsigned flags, CUdevice device)
{
    CALLED(cuCtxCreate_v3);
    if (!shim_ready())
        return real_functions[REAL_cuCtxCreate_v3] ? real(cuCtxCreate_v3)(context, affinities, n, flags, device)
                                                   : CUDA_ERROR_NO_DEVICE;
    GATE(made(real(cuCtxCreate_v3)(context, affinities, n, flags, device), context));
}

/* From CUDA 12.5 on; drivers before it do not have it. */
EXPORT CUresult cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned flags, CUdevice device)
{
    CALLED(cuCtxCreate_v4);
    typedef CUresult create(CUcontext *, void *, unsigned, CUdevice);
    create *function = (create *)entry_real(entry_of("cuCtxCreate_v4"));

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    if (!shim_ready())
        return function(context, parameters, flags, device);
    GATE(made(function(context, parameters, flags, device), context));
}

/* With memory_lock held: its memory goes with it. */
static void context_gone(CUcontext context)
{
    for (size_t i = 0; i < n_mappings;)
        if ((mappings[i]->plain || mappings[i]->opened) && mappings[i]->context == context) {
            mapping_take_away(i);
            i = 0; /* the table was let go of */
        } else {
            i++;
        }
    for (size_t i = n_contexts; i-- > 0;)
        if (contexts[i] == context)
            contexts[i] = contexts[--n_contexts];
    for (size_t i = n_peers; i-- > 0;)
        if (peers[i].from == context || peers[i].to == context)
            peers[i] = peers[--n_peers];
    left_context_gone(context);
    capture_context_ends(context);
}

static CUresult destroy(CUcontext context)
{
    CUresult result = real(cuCtxDestroy_v2)(context);

    if (!result) {
        pthread_mutex_lock(&memory_lock);
        context_gone(context);
        pthread_mutex_unlock(&memory_lock);
    }
    return result;
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    CALLED(cuCtxDestroy_v2);
    if (!shim_ready())
        return real_functions[REAL_cuCtxDestroy_v2] ? real(cuCtxDestroy_v2)(context) : CUDA_ERROR_NO_DEVICE;
    GATE(destroy(context));
}

/* Primary contexts keep their address when they end: it is asked for before. */
static CUcontext primary_of(CUdevice device)
{
    CUcontext context = NULL;
    unsigned flags;
    int active = 0;

    if (real(cuDevicePrimaryCtxGetState)(device, &flags, &active) || !active)
        return NULL;
    if (real(cuDevicePrimaryCtxRetain)(&context, device))
        return NULL;
    real(cuDevicePrimaryCtxRelease_v2)(device);
    return context;
}

static CUresult primary_ends(CUdevice device, CUresult (*how)(CUdevice))
{
    CUcontext context = primary_of(device);
    CUresult result = how(device);
    unsigned flags;
    int active = 1;

    if (!result && context && !real(cuDevicePrimaryCtxGetState)(device, &flags, &active) && !active) {
        pthread_mutex_lock(&memory_lock);
        context_gone(context);
        pthread_mutex_unlock(&memory_lock);
    }
    return result;
}

#define PRIMARY_ENDS(name)                                                                                             \
    EXPORT CUresult name(CUdevice device)                                                                              \
    {                                                                                                                  \
        CALLED(name);                                                                                                  \
        CUresult (*function)(CUdevice) = (CUresult (*)(CUdevice))entry_real(&entries[AT_##name]);                      \
        if (!function)                                                                                                 \
            return CUDA_ERROR_NO_DEVICE;                                                                               \
        if (!shim_ready())                                                                                             \
            return function(device);                                                                                   \
        GATE(primary_ends(device, function));                                                                          \
    }
PRIMARY_ENDS(cuDevicePrimaryCtxRelease)
PRIMARY_ENDS(cuDevicePrimaryCtxRelease_v2)
PRIMARY_ENDS(cuDevicePrimaryCtxReset)
PRIMARY_ENDS(cuDevicePrimaryCtxReset_v2)
