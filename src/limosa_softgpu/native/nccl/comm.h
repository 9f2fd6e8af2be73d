/* A communicator in software: what the files of libnccl.so.2 know of each other.
 *
 * Ranks meet in a file of the node's folder, nccl/NAME, which all of them map and whose name goes once all have come
 * (shared.c). Each rank has a piece of device memory that its peers in other processes have imported (peers.c): data goes
 * by it, a part at a time. Operations run on their streams, as host functions of the driver (run.c), in the order in which
 * the communicator was given them. Nothing is left of a communicator that was destroyed: no descriptor, no mapping, no
 * thread.
 *
 * Locks: comm->mutex guards what several threads change in a communicator, and is held for a look or a change only.
 * comm->launching is held while an operation is put on its stream, which may wait at the driver's gate.
 */
#ifndef LIMOSA_NCCL_COMM_H
#define LIMOSA_NCCL_COMM_H

#include "nccl_api.h" // IWYU pragma: export
#include "../node.h" // IWYU pragma: export

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define NCCL_FOLDER NODE_FOLDER "/nccl/"
#define NAME_ROOM 40
#define MOST_RANKS NODE_MAX_GPUS /* each has a GPU of its own */

/* Of each rank's device memory: two parts that collectives use in turn, and one for what it sends. */
#define PART_BYTES ((size_t)512 << 10)
#define SENT_BYTES ((size_t)1 << 20)
#define BUFFER_BYTES (2 * PART_BYTES + SENT_BYTES)
_Static_assert(BUFFER_BYTES == NODE_GRANULARITY, "the least that a device gives");

enum kind {
    ALL_REDUCE,
    BROADCAST,
    REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    ALL_TO_ALL,
    GATHER,
    SCATTER,
    SEND,
    RECEIVE,
};

enum { PRE_MUL_SUM = ncclNumOps }; /* beside the operators that have numbers */

struct scalar {
    const void *device; /* read when the operation runs; NULL: */
    unsigned char bytes[8];
};

struct operation {
    enum kind kind;
    const char *from;
    char *to;
    size_t count;
    ncclDataType_t type;
    int operator; /* up to PRE_MUL_SUM */
    int root; /* or the peer */
    struct scalar scalar;
    cudaStream_t stream;
    size_t done; /* bytes of a send or a receive */
};

/* ------------------------------------------------------------------------------------------- what ranks share --- */

enum step { STEP_NONE, STEP_READY, STEP_CONNECTED };

/* What an operation has to be like on every rank. */
struct header {
    uint64_t count, done;
    int32_t kind, type, operator, root;
};

struct member {
    _Atomic uint32_t taken;
    _Atomic uint32_t step; /* of enum step */
    _Atomic uint32_t exports, imports; /* it gives others its memory: told when ready; it has theirs: when connected */
    _Atomic uint32_t called; /* a collective, for the first time: connections are made then */
    _Atomic uint32_t left; /* it has finalised, destroyed or aborted */
    int32_t pid;
    uint64_t start_time;
    unsigned char uuid[16];
    uint64_t address; /* of its memory, for the ranks of its own process: told when ready */
    _Atomic uint32_t uses; /* by these, and by itself: the last one lets it go */
    _Atomic uint64_t arrived; /* parts of collectives that it has written */
    struct header headers[2];
    _Atomic uint64_t split, split_read; /* the split that its colour is of; the last that it has read all colours of */
    int32_t colour, key;
};

/* From one rank to another; the bytes lie in the sender's buffer. */
struct channel {
    _Atomic uint64_t written, read; /* parts */
    uint64_t count;
    int32_t type;
    uint32_t bytes;
};

struct shared {
    _Atomic uint32_t changes; /* counted up, and told by futex, whenever something here has changed */
    _Atomic uint32_t n;
    _Atomic uint32_t joined;
    _Atomic uint32_t error; /* ncclResult_t: what every rank's operations end with from now on */
    struct member members[MOST_RANKS];
    struct channel channels[MOST_RANKS][MOST_RANKS];
    _Alignas(4096) char buffers[MOST_RANKS][BUFFER_BYTES]; /* where device memory cannot be imported */
};

/* ------------------------------------------------------------------------------------------ the communicator --- */

struct registration {
    struct registration *next;
};

struct comm {
    struct comm *next; /* in the list of those that the application can name */
    int references; /* the list's and those of calls, operations and threads (registry.c) */
    char name[NAME_ROOM];
    int rank, n;
    bool blocking;
    ncclConfig_t config; /* that it was made with; its texts are its own */
    CUcontext context;
    CUdevice device;
    struct shared *shared;
    CUdeviceptr buffers[MOST_RANKS]; /* mapped here: its own, and those of its peers */
    bool imported[MOST_RANKS]; /* which of them came from other processes */
    char *data[MOST_RANKS]; /* by which data really goes: these, or shared->buffers */
    uint64_t splits, shrinks;
    atomic_int splitting; /* splits of it that do not block and are under way: it is in progress as long */
    bool joined; /* shared->members[rank] is ours */

    pthread_mutex_t launching;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    _Atomic int async; /* ncclResult_t */
    atomic_int launching_aside; /* what one that does not block was ordered, until it is on its stream: in progress */
    atomic_bool aborted;
    bool ended; /* finalised, destroyed or aborted: takes no more operations */
    bool quiet; /* finalised, and all others have */
    int inside; /* threads that use the shared file and the buffers */
    bool threaded; /* `thread` is to be joined */
    pthread_t thread;
    bool serviced; /* likewise */
    pthread_t service;
    uint64_t issued, finished; /* operations; each begins when all before it have finished */
    cudaStream_t last_stream;
    uint64_t phase; /* parts of collectives; only the operation that runs changes it */
    struct registration *registrations;
    bool operators_used[64];
    struct scalar operators[64];
    int operator_types[64];
};

/* registry.c */
struct comm *comm_new(int n, int rank, const char *name);
void comm_list(struct comm *comm); /* from now on the application may name it */
void comm_keep(struct comm *comm);
/* The communicator of a handle, held, or NULL. */
struct comm *comm_hold(ncclComm_t handle);
void comm_drop(struct comm *comm);
/* Take it off the list; false where it was not there. */
bool comm_unlist(struct comm *comm);
void say(const char *format, ...) __attribute__((format(printf, 1, 2))); /* what ncclGetLastError answers */
const char *said_last(void);

/* shared.c */
bool shared_join(struct comm *comm, ncclResult_t *result);
void shared_leave(struct comm *comm);
void shared_unname(struct comm *comm);
void shared_tell(struct shared *shared);
void shared_fail(struct comm *comm, ncclResult_t error);
/* Wait until something holds; false where the communicator is aborted or has failed meanwhile. */
bool shared_await(struct comm *comm, bool (*holds)(struct comm *, uint64_t), uint64_t of);
void shared_reap(void);
bool member_lives(const struct member *member);
void name_of(char name[NAME_ROOM], const void *from, size_t bytes);

/* peers.c */
ncclResult_t peers_connect(struct comm *comm);
void peers_let_go(struct comm *comm);

/* life.c */
/* A communicator that is to come into being: at once, in a thread, or at the end of a group. */
struct start {
    struct comm *comm;
    ncclComm_t *to; /* where the application wants the handle */
    struct comm *parent; /* of a split or a shrink: held */
    uint64_t split; /* 0: a shrink */
    int colour, key;
};
ncclResult_t start_all(struct start *starts, int n);
void start_drop(struct start *start);
ncclResult_t comm_finalize(struct comm *comm);
/* Wait for one's own work, and for the other ranks: what a destroy does first. */
ncclResult_t comm_finish(struct comm *comm);
/* Stop what runs, and let everything go. Its handle is off the list. */
void comm_end(struct comm *comm);

int thread_make(pthread_t *thread, void *(*body)(void *), void *argument);

/* run.c */
struct aside; /* what communicators that do not block were ordered in one group, or by one call */
ncclResult_t launch(struct comm *comm, const struct operation *operations, int n, struct aside **aside);
/* In a thread of its own: ncclInProgress; ncclSuccess where there is nothing. */
ncclResult_t launch_aside(struct aside *all);
bool comm_enter(struct comm *comm); /* false where it is aborted */
void comm_leave(struct comm *comm);

/* reduce.c */
size_t type_bytes(ncclDataType_t type); /* 0: none */
bool type_reduces(ncclDataType_t type);
void multiply(ncclDataType_t type, const struct scalar *scalar, void *to, const void *from, size_t count);
void reduce(ncclDataType_t type, int operator, void * to, const void *const *from, int n, size_t count);

/* group.c */
void group_begin(void);
ncclResult_t group_end(bool simulate, int *n_operations);
/* A call that has failed: so does the group that it is in. */
ncclResult_t group_said(ncclResult_t result);
ncclResult_t group_add(struct comm *comm, const struct operation *operation);
ncclResult_t group_add_start(const struct start *start); /* takes over what it holds */

/* ------------------------------------------------------------------------------------ the driver, by its names --- */

#define DRIVER_CALLS(CALL)                                                                                             \
    CALL(cuInit, cuInit)                                                                                               \
    CALL(cuCtxGetCurrent, cuCtxGetCurrent)                                                                             \
    CALL(cuCtxSetCurrent, cuCtxSetCurrent)                                                                             \
    CALL(cuCtxGetDevice, cuCtxGetDevice)                                                                               \
    CALL(cuDeviceGet, cuDeviceGet)                                                                                     \
    CALL(cuDeviceGetCount, cuDeviceGetCount)                                                                           \
    CALL(cuDeviceGetUuid, cuDeviceGetUuid_v2)                                                                          \
    CALL(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)                                                           \
    CALL(cuLaunchHostFunc, cuLaunchHostFunc)                                                                           \
    CALL(cuStreamIsCapturing, cuStreamIsCapturing)                                                                     \
    CALL(cuStreamQuery, cuStreamQuery)                                                                                 \
    CALL(cuStreamWaitEvent, cuStreamWaitEvent)                                                                         \
    CALL(cuEventCreate, cuEventCreate)                                                                                 \
    CALL(cuEventRecord, cuEventRecord)                                                                                 \
    CALL(cuEventDestroy, cuEventDestroy_v2)                                                                            \
    CALL(cuMemCreate, cuMemCreate)                                                                                     \
    CALL(cuMemRelease, cuMemRelease)                                                                                   \
    CALL(cuMemExportToShareableHandle, cuMemExportToShareableHandle)                                                   \
    CALL(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle)                                               \
    CALL(cuMemAddressReserve, cuMemAddressReserve)                                                                     \
    CALL(cuMemAddressFree, cuMemAddressFree)                                                                           \
    CALL(cuMemMap, cuMemMap)                                                                                           \
    CALL(cuMemUnmap, cuMemUnmap)                                                                                       \
    CALL(cuMemSetAccess, cuMemSetAccess)                                                                               \
    CALL(cuMemGetAddressRange, cuMemGetAddressRange_v2)

/* NOLINTNEXTLINE(bugprone-macro-parentheses): it is the name of what is declared. */
#define DRIVER_FIELD(name, declared) __typeof__(&(declared)) name;
struct driver_calls {
    DRIVER_CALLS(DRIVER_FIELD)
};
extern struct driver_calls cuda; /* driver.c; filled by driver_load */
/* Find the driver and initialise it. */
ncclResult_t driver_load(void);
/* The context that a communicator of the calling thread is of: the current one, else the first device's. */
ncclResult_t driver_context(CUcontext *context, CUdevice *device);
/* Device memory that can be exported, mapped; *handle may be NULL: then only the mapping holds it. */
ncclResult_t driver_memory(CUdevice device, size_t bytes, CUdeviceptr *address, CUmemGenericAllocationHandle *handle);
ncclResult_t driver_map(CUmemGenericAllocationHandle handle, CUdevice device, size_t bytes, CUdeviceptr *address);
void driver_unmap(CUdeviceptr address, size_t bytes);
/* ncclUnhandledCudaError and what it was, for ncclGetLastError. */
ncclResult_t driver_said(const char *name, CUresult result);
#define CUDA_TRY(name, ...) driver_said(#name, cuda.name(__VA_ARGS__))

#endif
