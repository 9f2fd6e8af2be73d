/* Contexts: primary and others, which is current, their limits, peer access. */
#define _GNU_SOURCE
#include "block.h"
#include "fault.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_CURRENT 64 /* contexts pushed in one thread */
#define PROHIBITED 2   /* compute modes, as NVML numbers them */
#define EXCLUSIVE_PROCESS 3
/* Each GPU with a context shows as one mapping of /dev/nvidia-uvm, of this size and at such an address. */
#define UVM_BYTES ((size_t)2 << 20)
#ifdef __SANITIZE_THREAD__ /* which keeps low addresses for itself */
#define UVM_FLAGS 0
#else
#define UVM_FLAGS MAP_FIXED_NOREPLACE
#endif
#define UVM_ADDRESS(ordinal) ((void *)(0x204a00000 + (uintptr_t)(ordinal) * UVM_BYTES))

struct context *contexts;

static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER; /* one context at a time is made or destroyed */
static unsigned long long last_id;
static unsigned primary_flags[NODE_MAX_GPUS];
static void *uvm[NODE_MAX_GPUS];

static _Thread_local struct context *current[MAX_CURRENT];
static _Thread_local int n_current;

struct context *context_current(void)
{
    return n_current ? current[n_current - 1] : NULL;
}

struct context *context_of_handle(CUcontext handle)
{
    for (struct context *context = contexts; context; context = context->next)
        if (context == (struct context *)handle)
            return context;
    return NULL;
}

int context_gpu(const struct context *context)
{
    return driver.devices[context->ordinal];
}

/* ----------------------------------------------------------------------------------------- what a context takes --- */

static CUresult claim(struct context *context, int gpu)
{
    uint64_t block;
    void *holder;
    driver_lock(); /* also so that no child is born with the descriptor that this needs for a moment */
    int error = block_take(gpu, driver.node->rates.context_bytes, NODE_CONTEXT, 0, &block, &holder);
    if (!error) {
        context->block = block;
        context->holder = holder;
    }
    driver_unlock();
    if (error == -ENODEV)
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (error == -ENOMEM || error == -ENOSPC)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return error ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

static void release(struct context *context)
{
    driver_lock();
    block_let_go(context->holder, context->block, true);
    context->holder = NULL;
    context->block = 0;
    driver_unlock();
}

/* One mapping for each device with a context that holds its memory, none for the others. */
static void show_mappings(void)
{
    bool wanted[NODE_MAX_GPUS] = {false};
    driver_lock();
    for (const struct context *context = contexts; context; context = context->next)
        if (context->holder)
            wanted[context->ordinal] = true;
    for (int i = 0; i < NODE_MAX_GPUS; i++) {
        if (uvm[i] && !wanted[i]) {
            munmap(uvm[i], UVM_BYTES);
            uvm[i] = NULL;
        } else if (wanted[i] && !uvm[i]) {
            int fd = open("/dev/nvidia-uvm", O_RDWR | O_CLOEXEC);
            void *at = mmap(UVM_ADDRESS(i), UVM_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | UVM_FLAGS, fd, 0);
            if (at == MAP_FAILED)
                at = mmap(NULL, UVM_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
            uvm[i] = at == MAP_FAILED ? NULL : at;
            if (fd >= 0)
                close(fd);
        }
    }
    driver_unlock();
}

void contexts_release(void)
{
    for (struct context *context = contexts; context; context = context->next)
        release(context);
    show_mappings();
}

int contexts_claim(void)
{
    CUresult result = CUDA_SUCCESS;
    for (struct context *context = contexts; context && result == CUDA_SUCCESS; context = context->next)
        if (!context->destroyed && !context->holder)
            result = claim(context, gpu_after(context_gpu(context)));
    if (result != CUDA_SUCCESS)
        contexts_release();
    show_mappings();
    switch (result) {
    case CUDA_SUCCESS: return 0;
    case CUDA_ERROR_OUT_OF_MEMORY: return -ENOMEM;
    case CUDA_ERROR_DEVICE_UNAVAILABLE: return -ENODEV;
    default: return -EIO;
    }
}

/* In a child: what is open of the contexts is closed, or their memory would live as long as it does. */
void contexts_forked(void)
{
    pthread_mutex_init(&making, NULL);
    contexts = NULL;
    memset(uvm, 0, sizeof uvm);
    n_current = 0;
}

/* ------------------------------------------------------------------------------------------- making, destroying --- */

__attribute__((weak)) void memory_context_gone(struct context *context)
{
    (void)context;
}

static const size_t default_limits[CU_LIMIT_MAX] = {
    [CU_LIMIT_STACK_SIZE] = 1024,
    [CU_LIMIT_PRINTF_FIFO_SIZE] = 8650752,
    [CU_LIMIT_MALLOC_HEAP_SIZE] = 8 << 20,
    [CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048,
    [CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64,
    [CU_LIMIT_CIG_SHMEM_FALLBACK_ENABLED] = 1,
};

static CUresult refuse_mode(int gpu)
{
    uint32_t mode = driver.node->gpus[gpu].compute_mode;
    struct node_process found[16];
    if (mode == PROHIBITED)
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (mode == EXCLUSIVE_PROCESS) {
        int n = node_processes(gpu, found, 16);
        for (int i = 0; i < n && i < 16; i++)
            if (found[i].pid != getpid())
                return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
    return CUDA_SUCCESS;
}

/* Take what the context needs and let it be used; `making` is held. */
static CUresult bring_up(struct context *context, unsigned faults)
{
    double since = node_now();
    int gpu = context_gpu(context);
    CUresult result = faults & FAULT_NO_DEVICE_MEMORY ? CUDA_ERROR_OUT_OF_MEMORY : refuse_mode(gpu);
    if (result == CUDA_SUCCESS)
        result = claim(context, gpu);
    if (result != CUDA_SUCCESS)
        return result;
    show_mappings();
    node_pace(since, driver.node->rates.context_fixed, 0, 0);
    driver_lock();
    context->destroyed = false;
    context->sticky = CUDA_SUCCESS;
    context->peers = 0;
    for (int i = 0; i < CU_LIMIT_MAX; i++)
        context->limits[i] = default_limits[i];
    driver_unlock();
    return CUDA_SUCCESS;
}

/* `making` is held. Kernels that would not end see that the context is destroyed. */
static void take_down(struct context *context)
{
    driver_lock();
    context->destroyed = true;
    driver_unlock();
    streams_context_gone(context);
    modules_context_gone(context);
    memory_context_gone(context);
    release(context);
    show_mappings();
}

static struct context *context_make(int ordinal, unsigned flags, bool primary)
{
    struct context *context = calloc(1, sizeof *context);
    if (!context)
        return NULL;
    context->ordinal = ordinal;
    context->flags = flags;
    context->primary = primary;
    context->destroyed = true;
    context->version = 3020;
    driver_lock();
    context->id = ++last_id;
    context->next = contexts;
    contexts = context;
    driver_unlock();
    return context;
}

static struct context *primary_of(int ordinal)
{
    driver_lock();
    struct context *context = contexts;
    while (context && !(context->primary && context->ordinal == ordinal))
        context = context->next;
    driver_unlock();
    return context;
}

static bool valid_device(CUdevice device)
{
    return device >= 0 && device < driver.n_devices;
}

static bool valid_flags(unsigned flags)
{
    unsigned scheduling = flags & CU_CTX_SCHED_MASK;
    return !(flags & ~(unsigned)CU_CTX_FLAGS_MASK) && scheduling != 3 && scheduling <= CU_CTX_SCHED_BLOCKING_SYNC;
}

static CUresult primary_retain(CUcontext *handle, CUdevice device, bool only_active, unsigned faults)
{
    pthread_mutex_lock(&making);
    struct context *context = primary_of(device);
    CUresult result = CUDA_SUCCESS;
    if (only_active && (!context || context->destroyed))
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (!context && !(context = context_make(device, primary_flags[device], true)))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    else if (context->destroyed)
        result = bring_up(context, faults);
    if (result == CUDA_SUCCESS) {
        context->references++;
        *handle = (CUcontext)context;
    }
    pthread_mutex_unlock(&making);
    return result;
}

/* Counting one more who retains it is nothing that a lock holds; making it is. */
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *handle, CUdevice device)
{
    ENTER(CALL_QUERY);
    if (!handle)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!valid_device(device))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    CUresult result = call_.faults & FAULT_NO_DEVICE_MEMORY ? CUDA_ERROR_INVALID_CONTEXT
                                                            : primary_retain(handle, device, true, 0);
    if (result == CUDA_ERROR_INVALID_CONTEXT) {
        gate_enter();
        result = primary_retain(handle, device, false, call_.faults);
        gate_leave();
    }
    RETURN(result);
}

static CUresult primary_release(CUdevice device)
{
    if (!valid_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&making);
    struct context *context = primary_of(device);
    if (!context || context->references == 0)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (--context->references == 0)
        take_down(context);
    pthread_mutex_unlock(&making);
    return result;
}

static CUresult primary_reset(CUdevice device)
{
    if (!valid_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&making);
    struct context *context = primary_of(device);
    if (context && context->references > 0) {
        context->references = 0;
        take_down(context);
    }
    pthread_mutex_unlock(&making);
    return CUDA_SUCCESS;
}

static CUresult primary_set_flags(CUdevice device, unsigned flags)
{
    if (!valid_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!valid_flags(flags))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&making);
    struct context *context = primary_of(device);
    primary_flags[device] = flags;
    if (context)
        context->flags = flags;
    pthread_mutex_unlock(&making);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    ENTER(CALL_MANAGE);
    RETURN(primary_release(device));
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER(CALL_MANAGE);
    RETURN(primary_release(device));
}

EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device)
{
    ENTER(CALL_MANAGE);
    RETURN(primary_reset(device));
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    ENTER(CALL_MANAGE);
    RETURN(primary_reset(device));
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int flags)
{
    ENTER(CALL_MANAGE);
    RETURN(primary_set_flags(device, flags));
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags)
{
    ENTER(CALL_MANAGE);
    RETURN(primary_set_flags(device, flags));
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    ENTER(CALL_QUERY);
    if (!valid_device(device))
        RETURN(CUDA_ERROR_INVALID_DEVICE);
    if (!flags || !active)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    const struct context *context = primary_of(device);
    driver_lock();
    *flags = context ? context->flags : primary_flags[device];
    *active = context && !context->destroyed;
    driver_unlock();
    RETURN(CUDA_SUCCESS);
}

static CUresult push(struct context *context)
{
    if (n_current == MAX_CURRENT)
        return CUDA_ERROR_OUT_OF_MEMORY;
    current[n_current++] = context;
    return CUDA_SUCCESS;
}

static CUresult create(CUcontext *handle, unsigned flags, CUdevice device, unsigned faults)
{
    if (!handle || !valid_flags(flags))
        return CUDA_ERROR_INVALID_VALUE;
    if (!valid_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&making);
    struct context *context = context_make(device, flags, false);
    CUresult result = context ? bring_up(context, faults) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        result = push(context);
    pthread_mutex_unlock(&making);
    if (result == CUDA_SUCCESS)
        *handle = (CUcontext)context;
    return result;
}

EXPORT CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device)
{
    ENTER(CALL_MANAGE);
    RETURN(create(context, flags, device, call_.faults));
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
    ENTER(CALL_MANAGE);
    RETURN(create(context, flags, device, call_.faults));
}

EXPORT CUresult cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *affinity, int n_affinity, unsigned int flags,
                               CUdevice device)
{
    ENTER(CALL_MANAGE);
    if (affinity || n_affinity)
        RETURN(CUDA_ERROR_NOT_SUPPORTED);
    RETURN(create(context, flags, device, call_.faults));
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned int flags, CUdevice device)
{
    ENTER(CALL_MANAGE);
    if (params && (params->execAffinityParams || params->cigParams))
        RETURN(CUDA_ERROR_NOT_SUPPORTED);
    RETURN(create(context, flags, device, call_.faults));
}

static CUresult destroy(CUcontext handle)
{
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&making);
    driver_lock();
    struct context *context = context_of_handle(handle);
    bool ours = context && !context->primary && !context->destroyed;
    driver_unlock();
    if (ours) {
        take_down(context);
        if (context_current() == context)
            n_current--;
    }
    pthread_mutex_unlock(&making);
    return ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuCtxDestroy(CUcontext context)
{
    ENTER(CALL_MANAGE);
    RETURN(destroy(context));
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    ENTER(CALL_MANAGE);
    RETURN(destroy(context));
}

/* The old way to hold a context: it ends with its last use. */
EXPORT CUresult cuCtxAttach(CUcontext *handle, unsigned int flags)
{
    ENTER(CALL_MANAGE | CALL_CONTEXT);
    if (!handle || flags)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    driver_lock();
    call_.context->attaches++;
    driver_unlock();
    *handle = (CUcontext)call_.context;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxDetach(CUcontext handle)
{
    ENTER(CALL_MANAGE);
    driver_lock();
    struct context *context = context_of_handle(handle);
    bool known = context && !context->primary && !context->destroyed;
    bool last = known && !context->attaches;
    if (known && !last)
        context->attaches--;
    driver_unlock();
    RETURN(last ? destroy(handle) : known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT);
}

/* ------------------------------------------------------------------------------------------------------ current --- */

/* A handle that may be made current; a primary context may be so before it is retained again. */
static struct context *usable(CUcontext handle)
{
    driver_lock();
    struct context *context = context_of_handle(handle);
    if (context && context->destroyed && !context->primary)
        context = NULL;
    driver_unlock();
    return context;
}

static CUresult push_handle(CUcontext handle)
{
    struct context *context = usable(handle);
    return context ? push(context) : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult pop(CUcontext *handle)
{
    if (n_current == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    n_current--;
    if (handle)
        *handle = (CUcontext)current[n_current];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent(CUcontext context)
{
    ENTER(CALL_QUERY);
    RETURN(push_handle(context));
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTER(CALL_QUERY);
    RETURN(push_handle(context));
}

EXPORT CUresult cuCtxPopCurrent(CUcontext *context)
{
    ENTER(CALL_QUERY);
    RETURN(pop(context));
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    ENTER(CALL_QUERY);
    RETURN(pop(context));
}

EXPORT CUresult cuCtxSetCurrent(CUcontext handle)
{
    ENTER(CALL_QUERY);
    if (!handle) {
        n_current -= n_current > 0;
        RETURN(CUDA_SUCCESS);
    }
    struct context *context = usable(handle);
    if (!context)
        RETURN(CUDA_ERROR_INVALID_CONTEXT);
    if (n_current == 0)
        RETURN(push(context));
    current[n_current - 1] = context;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER(CALL_QUERY);
    if (!context)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    *context = (CUcontext)call_.context;
    RETURN(CUDA_SUCCESS);
}

/* ------------------------------------------------------------------------------------------ what a context says --- */

/* The context that a handle means, NULL being the current one. */
static struct context *meant(const struct call *call, CUcontext handle)
{
    return handle ? usable(handle) : call->context;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER(CALL_QUERY);
    if (!device)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!call_.context)
        RETURN(CUDA_ERROR_INVALID_CONTEXT);
    *device = call_.context->ordinal;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext handle)
{
    ENTER(CALL_QUERY);
    const struct context *context = meant(&call_, handle);
    if (!device)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!context)
        RETURN(CUDA_ERROR_INVALID_CONTEXT);
    *device = context->ordinal;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetFlags(unsigned int *flags)
{
    ENTER(CALL_QUERY);
    if (!flags)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!call_.context)
        RETURN(CUDA_ERROR_INVALID_CONTEXT);
    *flags = call_.context->flags;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSetFlags(unsigned int flags)
{
    ENTER(CALL_WORK);
    if (!valid_flags(flags))
        RETURN(CUDA_ERROR_INVALID_VALUE);
    call_.context->flags = flags;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetId(CUcontext handle, unsigned long long *id)
{
    ENTER(CALL_QUERY);
    const struct context *context = meant(&call_, handle);
    if (!context)
        RETURN(CUDA_ERROR_INVALID_CONTEXT);
    if (!id)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    *id = context->id;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext handle, unsigned int *version)
{
    ENTER(CALL_QUERY);
    const struct context *context = meant(&call_, handle);
    if (!context)
        RETURN(CUDA_ERROR_INVALID_CONTEXT);
    if (!version)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    *version = context->version;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSynchronize(void)
{
    ENTER(CALL_SYNC | CALL_CONTEXT);
    RETURN(context_wait(call_.context));
}

EXPORT CUresult cuCtxSynchronize_v2(CUcontext handle)
{
    ENTER(CALL_SYNC);
    struct context *context = meant(&call_, handle);
    if (!context)
        RETURN(CUDA_ERROR_INVALID_CONTEXT);
    if (context->sticky)
        RETURN((CUresult)context->sticky);
    RETURN(context_wait(context));
}

EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit)
{
    ENTER(CALL_WORK);
    if (!value || (unsigned)limit >= CU_LIMIT_MAX)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (limit == CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH && driver.known[call_.context->ordinal].cc_major >= 9)
        RETURN(CUDA_ERROR_UNSUPPORTED_LIMIT);
    *value = call_.context->limits[limit];
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
    ENTER(CALL_WORK);
    const struct node_gpu *gpu = &driver.known[call_.context->ordinal];
    switch ((unsigned)limit) {
    case CU_LIMIT_STACK_SIZE:
        if (value > (size_t)512 << 10) /* no thread can have more local memory */
            RETURN(CUDA_ERROR_INVALID_VALUE);
        value = (value + 15) & ~(size_t)15;
        break;
    case CU_LIMIT_PRINTF_FIFO_SIZE:
    case CU_LIMIT_MALLOC_HEAP_SIZE:
        if (value > gpu->memory)
            RETURN(CUDA_ERROR_INVALID_VALUE);
        break;
    case CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT:
    case CU_LIMIT_PERSISTING_L2_CACHE_SIZE: break;
    case CU_LIMIT_MAX_L2_FETCH_GRANULARITY:
        if (value > 128)
            RETURN(CUDA_ERROR_INVALID_VALUE);
        break;
    case CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH:
    case CU_LIMIT_SHMEM_SIZE:
    case CU_LIMIT_CIG_ENABLED:
    case CU_LIMIT_CIG_SHMEM_FALLBACK_ENABLED: RETURN(CUDA_ERROR_UNSUPPORTED_LIMIT);
    default: RETURN(CUDA_ERROR_INVALID_VALUE);
    }
    call_.context->limits[limit] = value;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetCacheConfig(CUfunc_cache *config)
{
    ENTER(CALL_QUERY | CALL_CONTEXT);
    if (!config)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    *config = call_.context->cache;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSetCacheConfig(CUfunc_cache config)
{
    ENTER(CALL_WORK);
    if ((unsigned)config > CU_FUNC_CACHE_PREFER_EQUAL)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    call_.context->cache = config;
    RETURN(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER(CALL_QUERY | CALL_CONTEXT);
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    RETURN(CUDA_SUCCESS);
}

/* -------------------------------------------------------------------------------------------------- peer access --- */

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext handle, unsigned int flags)
{
    ENTER(CALL_WORK);
    const struct context *peer = usable(handle);
    if (flags != 0)
        RETURN(CUDA_ERROR_INVALID_VALUE);
    if (!peer)
        RETURN(CUDA_ERROR_INVALID_CONTEXT);
    if (peer->ordinal == call_.context->ordinal)
        RETURN(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    driver_lock();
    uint32_t bit = 1u << peer->ordinal;
    CUresult result = call_.context->peers & bit ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
    call_.context->peers |= bit;
    driver_unlock();
    RETURN(result);
}

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext handle)
{
    ENTER(CALL_WORK);
    const struct context *peer = usable(handle);
    if (!peer)
        RETURN(CUDA_ERROR_INVALID_CONTEXT);
    driver_lock();
    uint32_t bit = 1u << peer->ordinal;
    CUresult result = call_.context->peers & bit ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    call_.context->peers &= ~bit;
    driver_unlock();
    RETURN(result);
}
