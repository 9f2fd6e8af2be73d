/* One process's side of the software GPU: what the files of libcuda.so.1 know of each other.
 *
 * Rules that keep this simple:
 *  - One mutex, `driver.mutex`, guards all bookkeeping. It is held for a look or a change, never while waiting, sleeping,
 *    copying device memory or calling the application back.
 *  - Device memory is mapped into the process at the address that the application knows as CUdeviceptr. Copies and
 *    kernels are ordinary loads and stores by ordinary threads. An address stays reserved (PROT_NONE) while the memory
 *    behind it is away.
 *  - Every exported function begins with ENTER(flags) and ends with RETURN(result). ENTER is where the gate of a locked
 *    process holds callers, where faults are injected, and where calls are counted. An entry point never calls another
 *    entry point (it would pass the gate twice): what two of them need is a plain function.
 *  - Nothing of the node is open while the process is checkpointed: no descriptor, no mapping (CRIU must be able to dump
 *    it). Everything else that this library knows is ordinary memory and comes back with the process.
 *  - After fork the child has no driver: device memory is not inherited (MADV_DONTFORK), descriptors of blocks are closed
 *    by an atfork handler, every call answers NOT_INITIALIZED. The descriptors and mappings of /dev/nvidia* stay, as with
 *    the real driver.
 */
#ifndef LIMOSA_DRIVER_H
#define LIMOSA_DRIVER_H

#include "cuda_api.h" // IWYU pragma: export
#include "node.h" // IWYU pragma: export

#include <pthread.h>
#include <stdatomic.h>

#define EXPORT __attribute__((visibility("default")))

/* ------------------------------------------------------------------ process.c: the process, the gate, every call --- */

enum call_flags {
    CALL_ANY = 0, /* works before cuInit and while the process is locked (versions, error names, checkpoint calls) */
    CALL_INIT = 1, /* NOT_INITIALIZED before cuInit */
    CALL_CONTEXT = 2, /* INVALID_CONTEXT without a current context; implies CALL_INIT */
    CALL_GATED = 4, /* waits while the process is locked */
    /* What a lock does not hold, as a real driver does not: */
    CALL_AWAITS = 16, /* waits while the process is checkpointed (synchronises: locked, there is nothing to await) */
    CALL_ASKS = 32, /* asks the GPU: OPERATING_SYSTEM while the process is checkpointed */
    CALL_EXPORTS = 64, /* goes with CALL_ASKS: UNKNOWN instead */
    CALL_OWN_FAULTS = 8, /* asks fault_ask itself, as it knows what the call is about (checkpoint calls: the target) */
    /* what most take: */
    CALL_QUERY = CALL_INIT,
    CALL_WORK = CALL_INIT | CALL_CONTEXT | CALL_GATED,
    CALL_MANAGE = CALL_INIT | CALL_GATED,
    CALL_SYNC = CALL_INIT | CALL_AWAITS,
};

struct call {
    const char *name;
    unsigned flags;
    CUresult late; /* a fault: what to answer after the work was done */
    unsigned faults; /* of enum fault_action: what the function itself has to carry out (memory, a state, a lie) */
    struct context *context; /* the current one, NULL without */
};

CUresult call_begin(struct call *call, const char *name, unsigned flags);
CUresult call_end(struct call *call, CUresult result);

#define ENTER(flags)                                                                                                   \
    struct call call_;                                                                                                 \
    do {                                                                                                               \
        CUresult refused_ = call_begin(&call_, __func__, (flags));                                                     \
        if (refused_ != CUDA_SUCCESS)                                                                                  \
            return refused_;                                                                                           \
    } while (0)
#define RETURN(result) return call_end(&call_, (result))

struct driver {
    pthread_mutex_t mutex;
    _Atomic bool initialised; /* cuInit has succeeded in this very process */
    _Atomic bool forked; /* a child of a process that had initialised */
    struct node_state *_Atomic node; /* NULL before cuInit; while checkpointed a private copy (node.h) */

    /* The GPUs whose device node the process could open at cuInit or at its last restore: a restore's map must name
     * each of them. Bits are indices in node->gpus. */
    uint32_t openable;
    /* Devices as the application counts them (CUDA_VISIBLE_DEVICES): ordinal → index in node->gpus. A restore with a map
     * changes these. */
    int n_devices;
    int devices[NODE_MAX_GPUS];
    /* What the application is told of each, by ordinal: as at cuInit, also while nothing of the node is mapped, and after
     * it was restored onto another GPU: of that it is told the uuid, but still the old bus id. */
    struct node_gpu known[NODE_MAX_GPUS];

    /* What it saw at cuInit: memory of other GPUs cannot be imported, also where it was moved to one of them. */
    uint32_t openable_at_first;
    int n_at_first;
    struct node_gpu at_first[NODE_MAX_GPUS];

    _Atomic int state; /* CUprocessState */
    pid_t restore_thread;
};
extern struct driver driver;

void driver_lock(void);
void driver_unlock(void);
/* A condition variable whose timed waits count CLOCK_MONOTONIC, and the point in time `seconds` from now. */
void driver_condition(pthread_cond_t *condition);
struct timespec driver_deadline(double seconds);

/* Start a thread of the driver: every signal blocked, named (as /proc/PID/task/TID/comm shows it). 0 or errno. */
int driver_thread(pthread_t *thread, const char *name, void *(*body)(void *), void *argument);

/* True in a thread that driver_thread started (its own calls never wait at the gate). */
extern _Thread_local bool driver_own_thread;

/* The gate. gate_close lets no new gated call in and waits until those inside have left; ETIMEDOUT (and open again) when
 * they have not after timeout_ms (0: no limit), or when `abandoned` says that nobody waits for it any more. */
int gate_close(unsigned timeout_ms, bool (*abandoned)(const void *), const void *argument);
void gate_open(void);
/* As what CALL_GATED does: for a part of a function that is not gated as a whole. */
void gate_enter(void);
void gate_leave(void);
/* For a checkpoint, once it is certain: CALL_AWAITS waits, CALL_ASKS fails, those inside have left when this returns. */
void gate_shut(void);
void gate_unshut(void);

/* Open and map /dev/nvidia* as a process with a driver does; undone for a checkpoint, done again by a restore. */
int devices_open(void);
void devices_close(void);

/* Bits of the GPUs whose device node this process can open now (by name /dev/nvidia<minor>: a character device with
 * that minor number, mode permitting). */
uint32_t devices_openable(void);

/* Where a GPU of the node went in the restore under way (identity outside of one). Set by checkpoint.c. */
int gpu_after(int gpu);

/* ------------------------------------------------------------------------- device.c: devices, contexts, limits --- */

struct context {
    struct context *next; /* a destroyed context stays in the list: handles of it may be current somewhere */
    unsigned long long id;
    _Atomic bool destroyed; /* or a primary context that nobody retains */
    int ordinal; /* the device as the application counts; driver.devices[ordinal] is the GPU */
    _Atomic unsigned flags;
    bool primary;
    int references; /* of a primary context */
    int attached; /* times current in some thread */
    int attaches; /* cuCtxAttach, less cuCtxDetach */
    uint64_t block; /* the device memory that the context itself takes (NODE_CONTEXT) */
    void *holder; /* what keeps it (block.h); NULL while the context has none */
    uint32_t peers; /* ordinals whose memory it has enabled */
    _Atomic size_t limits[16]; /* by CUlimit */
    _Atomic int sticky; /* CUresult: an error that a context does not recover from */
    unsigned version; /* cuCtxGetApiVersion */
    _Atomic CUfunc_cache cache;
};

struct context *context_current(void);
struct context *context_of_handle(CUcontext handle); /* NULL where it is none of ours; driver.mutex held */
int context_gpu(const struct context *context); /* index in node->gpus */
extern struct context *contexts; /* all of them; driver.mutex held */

/* For checkpoint.c: give the contexts' own device memory back, take it again on gpu_after(). 0 or -errno (-ENOMEM). */
void contexts_release(void);
int contexts_claim(void);
void contexts_forked(void);

/* ------------------------------------------------------------------- memory.c, vmm.c: what is on the device --- */

enum memory_kind {
    MEMORY_PLAIN = 1, /* cuMemAlloc, cuMemAllocPitch */
    MEMORY_ASYNC, /* cuMemAllocAsync */
    MEMORY_MANAGED,
    MEMORY_VMM, /* a mapping of a cuMemCreate handle */
    MEMORY_IPC, /* another process's, opened by cuIpcOpenMemHandle */
    MEMORY_HOST, /* cuMemHostAlloc: the process's own memory */
    MEMORY_REGISTERED /* cuMemHostRegister: likewise */
};

/* What an address belongs to. */
struct range {
    enum memory_kind kind;
    CUdeviceptr start;
    size_t bytes;
    int ordinal; /* device, -1 for host memory */
    struct context *context;
    unsigned flags;
};

/* Find the range that holds an address; false where none does. Takes driver.mutex itself. */
bool memory_find(CUdeviceptr address, struct range *found);
/* Whether a whole range may be read or written by a copy or kernel: device, managed, pinned, or (device_only false) any
 * host memory. CUDA_SUCCESS, INVALID_VALUE. */
CUresult memory_check(CUdeviceptr address, size_t bytes, bool device_only);
/* Whether a device has access to what is at an address: virtual memory knows to whom it was given. */
bool memory_reached(CUdeviceptr address, int ordinal);

/* For checkpoint.c, all called by the restore thread with the gate closed and all work done, in this order.
 * Sizes are bytes of device memory to be saved. */
bool memory_has_managed(void);
bool memory_has_imported(void); /* IPC memory of another process is open here: a restore will fail (measured) */
bool vmm_has_imported(void); /* so is a handle of another process's memory */
uint64_t memory_bytes(void);
uint64_t vmm_bytes(void);
char *memory_save(char *to); /* copies all of it to `to`, returns the end; nothing is released yet */
char *vmm_save(char *to);
void memory_release(void); /* unmaps, leaving the addresses reserved; device memory is free for others */
void vmm_release(void);
int memory_claim(void); /* takes device memory on gpu_after(), maps it at the old addresses; 0 or -errno */
int vmm_claim(void);
const char *memory_load(const char *from);
const char *vmm_load(const char *from);
void memory_context_gone(struct context *context); /* destroyed: free what was allocated in it. Not locked */
void memory_forked(void); /* in a child: close what is open, forget everything */
void vmm_forked(void);

/* --------------------------------------------------------------- stream.c, copy.c, kernels.c: work for the device --- */

/* Wait until everything submitted so far, on every stream, callbacks included, is done. false on time-out
 * (timeout < 0: none; seconds). Called by the restore thread. */
bool streams_drain(double timeout);
/* The lock of the queues, a leaf: nothing else is taken while it is held. Only for fork. */
void streams_lock(void);
void streams_unlock(void);
void streams_forked(void);
/* Of a context that is destroyed: wait until its work is done, let all its streams and events go. */
void streams_context_gone(struct context *context);
void modules_context_gone(struct context *context);

/* Queue a piece of work on a stream (handles 0, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD resolved); `run` is called by the
 * stream's thread, then `free`d by it. It may block (spin kernels). */
CUresult stream_submit(struct context *context, CUstream handle, void (*run)(void *), void *argument);
/* The context that a stream belongs to (a default stream: the current one); NULL where there is no such stream. */
struct context *stream_context(struct context *current, CUstream handle);
/* Wait for all of a stream's work, for all of a context's. What went wrong with it is answered (context->sticky). */
CUresult stream_wait(struct context *context, CUstream handle);
CUresult context_wait(struct context *context);
/* As what frees memory waits: a capture forbids it only in the modes in which a driver says so. */
CUresult context_wait_for_memory(struct context *context);
/* As stream_submit and stream_wait in one, run by the calling thread once its turn has come; `argument` stays the
 * caller's. */
CUresult stream_run(struct context *context, CUstream handle, void (*run)(void *), void *argument);
/* The handle that a *_ptds or *_ptsz function means by 0. */
#define PER_THREAD(stream) ((stream) ? (stream) : (CUstream)0x2)

/* ----------------------------------------------------------------------------- checkpoint.c: the restore thread --- */

/* Started by cuInit once everything else is ready. 0 or errno. */
int restore_thread_start(void);

#endif
