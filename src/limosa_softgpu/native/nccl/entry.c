/* What libnccl.so.2 exports. Each function asks what is to go wrong with it (fault.h), checks its arguments, and hands on. */
#define _GNU_SOURCE
#include "comm.h"
#include "../fault.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static ncclResult_t leave(const struct fault *fault, ncclResult_t result)
{
    if (fault->actions & FAULT_CRASH_CALLER_AFTER)
        kill(getpid(), SIGKILL);
    if ((result == ncclSuccess || result == ncclInProgress) && fault->actions & FAULT_AFTER)
        result = (ncclResult_t)fault->after;
    return group_said(result);
}

#define ENTER()                                                                                                        \
    struct fault fault_ = fault_ask(__func__, 0);                                                                      \
    if (fault_.actions & FAULT_RESULT) {                                                                               \
        say("a fault was injected into %s", __func__);                                                                 \
        return group_said((ncclResult_t)fault_.result);                                                                \
    }
#define RETURN(result) return leave(&fault_, (result))
/* Enter with a communicator, which is `found` from here on and dropped by RETURN_COMM. */
#define ENTER_COMM(handle)                                                                                             \
    ENTER();                                                                                                           \
    struct comm *found = comm_hold(handle);                                                                            \
    if (!found)                                                                                                        \
    RETURN(ncclInvalidArgument)
#define RETURN_COMM(result)                                                                                            \
    do {                                                                                                               \
        ncclResult_t result_ = (result);                                                                               \
        comm_drop(found);                                                                                              \
        RETURN(result_);                                                                                               \
    } while (0)

static ncclResult_t wrong(const char *what)
{
    say("%s", what);
    return ncclInvalidArgument;
}

/* ---------------------------------------------------------------------------------------------------- questions --- */

EXPORT ncclResult_t ncclGetVersion(int *version)
{
    ENTER();
    if (!version)
        RETURN(wrong("no place for the version"));
    *version = NCCL_VERSION_CODE;
    RETURN(ncclSuccess);
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    ENTER();
    if (!id)
        RETURN(wrong("no place for the id"));
    shared_reap();
    RETURN(getrandom(id, sizeof(*id), 0) == sizeof(*id) ? ncclSuccess : ncclSystemError);
}

EXPORT const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const words[] = {
        "no error",         "unhandled cuda error", "unhandled system error", "internal error",
        "invalid argument", "invalid usage",        "remote error",           "NCCL operation in progress",
    };
    return (int)result >= 0 && result < ncclNumResults ? words[result] : "unknown result code";
}

EXPORT const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return said_last();
}

/* The state of a communicator; what another rank has found is noted, also where nothing runs here. */
static ncclResult_t state_of(struct comm *comm)
{
    int none = ncclSuccess;
    if (comm->async == ncclSuccess && comm_enter(comm)) {
        if (comm->shared)
            atomic_compare_exchange_strong(&comm->async, &none, (int)atomic_load(&comm->shared->error));
        comm_leave(comm);
    }
    ncclResult_t state = (ncclResult_t)comm->async;
    bool busy = atomic_load(&comm->splitting) > 0 || atomic_load(&comm->launching_aside) > 0;
    return state == ncclSuccess && busy ? ncclInProgress : state;
}

EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    ENTER_COMM(comm);
    if (!error)
        RETURN_COMM(wrong("no place for the error"));
    *error = state_of(found);
    RETURN_COMM(ncclSuccess);
}

/* A number that a communicator that is ready can tell. */
static ncclResult_t tell(struct comm *comm, int *to, int value)
{
    if (!to)
        return wrong("no place for the answer");
    if (!comm->ended && state_of(comm) == ncclInProgress)
        return wrong("the communicator is not ready");
    *to = value;
    return ncclSuccess;
}

EXPORT ncclResult_t ncclCommCount(ncclComm_t comm, int *count)
{
    ENTER_COMM(comm);
    RETURN_COMM(tell(found, count, found->n));
}

EXPORT ncclResult_t ncclCommCuDevice(ncclComm_t comm, int *device)
{
    ENTER_COMM(comm);
    RETURN_COMM(tell(found, device, found->device));
}

EXPORT ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank)
{
    ENTER_COMM(comm);
    RETURN_COMM(tell(found, rank, found->rank));
}

/* No NCCL has it. So it shows what a configuration has become, and is, to whatever stands before libnccl, a function of a
 * version that is yet to come. */
EXPORT ncclResult_t ncclSoftgpuConfig(ncclComm_t comm, ncclConfig_t *config)
{
    ENTER_COMM(comm);
    if (!config)
        RETURN_COMM(wrong("no place for the configuration"));
    *config = found->config; /* its texts are the communicator's */
    RETURN_COMM(ncclSuccess);
}

/* No team where the handle is not a communicator's: there is no result that would say so. */
EXPORT ncclTeam_t ncclTeamWorld(ncclComm_t comm)
{
    ncclTeam_t team = {0};

    (void)fault_ask(__func__, 0);
    struct comm *found = comm_hold(comm);
    if (found) {
        team = (ncclTeam_t){found->n, found->rank, 1};
        comm_drop(found);
    }
    return team;
}

/* ------------------------------------------------------------------------------------------------- coming to life --- */

static ncclResult_t read_config(const ncclConfig_t *config, bool *blocking)
{
    if (!config)
        return ncclSuccess;
    if (config->magic != NCCL_CONFIG_MAGIC || config->size < offsetof(ncclConfig_t, cgaClusterSize))
        return wrong("the configuration was not initialised");
    if (config->blocking == NCCL_CONFIG_UNDEF_INT)
        return ncclSuccess;
    if (config->blocking != 0 && config->blocking != 1)
        return wrong("blocking is neither 0 nor 1");
    *blocking = config->blocking;
    return ncclSuccess;
}

static bool blocks_by_default(void)
{
    const char *said = getenv("NCCL_COMM_BLOCKING");
    return !said || atoi(said) != 0;
}

/* What a version older than this one does not have, or nobody has given, is undefined. */
static void keep_config(struct comm *comm, const ncclConfig_t *given)
{
    const int none = NCCL_CONFIG_UNDEF_INT;
    ncclConfig_t *config = &comm->config;

    *config = (ncclConfig_t){.size = sizeof(*config), .magic = NCCL_CONFIG_MAGIC, .version = NCCL_VERSION_CODE};
    config->blocking = config->cgaClusterSize = config->minCTAs = config->maxCTAs = none;
    config->splitShare = config->trafficClass = config->collnetEnable = config->CTAPolicy = none;
    config->shrinkShare = config->nvlsCTAs = config->nChannelsPerNetPeer = config->nvlinkCentricSched = none;
    if (given)
        memcpy(config, given, given->size < sizeof(*config) ? given->size : sizeof(*config));
    config->size = sizeof(*config);
    config->netName = config->netName ? strdup(config->netName) : NULL;
    config->commName = config->commName ? strdup(config->commName) : NULL;
}

/* Make one and begin with it; the group does, if there is one. */
static ncclResult_t begin(struct start start, const char *name, int n, int rank, const ncclConfig_t *config,
                          bool blocking)
{
    CUcontext context;
    CUdevice device;
    ncclResult_t result = driver_context(&context, &device);
    struct comm *comm = result == ncclSuccess ? comm_new(n, rank, name) : NULL;

    if (!comm) {
        if (start.parent)
            comm_drop(start.parent);
        return result == ncclSuccess ? ncclSystemError : result;
    }
    comm->context = context;
    comm->device = device;
    comm->blocking = blocking;
    keep_config(comm, config);
    comm->async = ncclInProgress;
    start.comm = comm;
    comm_list(comm);
    if (!start.parent) /* of a split it is NULL until that is done */
        *start.to = comm;
    return group_add_start(&start);
}

static ncclResult_t init(ncclComm_t *to, int n, const void *id, size_t bytes, int rank, const ncclConfig_t *config)
{
    char name[NAME_ROOM];
    bool blocking = blocks_by_default();

    if (!to)
        return wrong("no place for the communicator");
    *to = NULL;
    if (n < 1 || rank < 0 || rank >= n)
        return wrong("there is no such rank");
    if (n > MOST_RANKS) {
        say("a node in software has %d ranks at most", MOST_RANKS);
        return ncclInvalidUsage;
    }
    ncclResult_t result = read_config(config, &blocking);
    if (result != ncclSuccess)
        return result;
    name_of(name, id, bytes);
    return begin((struct start){.to = to}, name, n, rank, config, blocking);
}

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int n, ncclUniqueId id, int rank)
{
    ENTER();
    RETURN(init(comm, n, &id, sizeof(id), rank, NULL));
}

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    ENTER();
    RETURN(init(comm, n, &id, sizeof(id), rank, config));
}

EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int n, int rank, int n_ids, ncclUniqueId *ids,
                                             ncclConfig_t *config)
{
    ENTER();
    if (!ids || n_ids < 1 || n_ids > n)
        RETURN(wrong("there must be an id, and no more than ranks"));
    RETURN(init(comm, n, ids, (size_t)n_ids * sizeof(*ids), rank, config));
}

/* The primary context of a device, current: what a rank there is of. */
static ncclResult_t use_device(int ordinal)
{
    CUdevice device;
    CUcontext context = NULL;
    ncclResult_t result = CUDA_TRY(cuDeviceGet, &device, ordinal);

    if (result == ncclSuccess)
        result = CUDA_TRY(cuDevicePrimaryCtxRetain, &context, device);
    return result == ncclSuccess ? CUDA_TRY(cuCtxSetCurrent, context) : ncclInvalidArgument;
}

EXPORT ncclResult_t ncclCommInitAll(ncclComm_t *comms, int n, const int *devices)
{
    ENTER();
    ncclUniqueId id;
    CUcontext before = NULL;

    if (!comms || n < 1 || n > MOST_RANKS)
        RETURN(wrong("there must be a place for communicators, and a device"));
    ncclResult_t result = driver_load();
    if (result == ncclSuccess)
        result = CUDA_TRY(cuCtxGetCurrent, &before);
    if (result != ncclSuccess || getrandom(&id, sizeof(id), 0) != sizeof(id))
        RETURN(ncclSystemError);
    shared_reap();
    group_begin();
    for (int rank = 0; rank < n && result == ncclSuccess; rank++) {
        result = use_device(devices ? devices[rank] : rank);
        if (result == ncclSuccess)
            result = init(&comms[rank], n, &id, sizeof(id), rank, NULL);
        group_said(result);
    }
    ncclResult_t ended = group_end(false, NULL);
    cuda.cuCtxSetCurrent(before);
    RETURN(result == ncclSuccess ? ended : result);
}

/* Whether a communicator takes orders. */
static ncclResult_t check_ready(struct comm *comm)
{
    if (comm->ended) {
        say("the communicator was finalised");
        return ncclInvalidUsage;
    }
    ncclResult_t state = state_of(comm);
    return state == ncclInProgress ? wrong("the communicator is not ready") : state;
}

EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int colour, int key, ncclComm_t *to, ncclConfig_t *config)
{
    ENTER_COMM(comm);
    bool blocking = found->blocking;
    ncclResult_t result = to && (colour >= 0 || colour == NCCL_SPLIT_NOCOLOR) ? check_ready(found)
                                                                              : wrong("no such colour");
    if (result == ncclSuccess)
        result = read_config(config, &blocking);
    if (result != ncclSuccess)
        RETURN_COMM(result);
    *to = NULL;
    pthread_mutex_lock(&found->mutex);
    struct start start = {.to = to, .parent = found, .colour = colour, .key = key, .split = ++found->splits};
    pthread_mutex_unlock(&found->mutex);
    config = config ? config : &found->config;
    RETURN(begin(start, found->name, 1, 0, config, blocking)); /* the reference goes with it */
}

static bool excluded(int rank, const int *list, int n)
{
    for (int i = 0; i < n; i++)
        if (list[i] == rank)
            return true;
    return false;
}

/* Stop what runs: as an abort, but the communicator stays until it is destroyed. */
static void stop(struct comm *comm)
{
    pthread_mutex_lock(&comm->mutex);
    comm->aborted = true;
    comm->ended = true;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->mutex);
    shared_tell(comm->shared);
}

EXPORT ncclResult_t ncclCommShrink(ncclComm_t comm, int *list, int n, ncclComm_t *to, ncclConfig_t *config, int flags)
{
    ENTER_COMM(comm);
    struct {
        char name[NAME_ROOM];
        uint64_t shrink, excluded;
    } unique = {0};
    char name[NAME_ROOM];
    int left = 0, rank = 0;
    bool blocking = found->blocking;

    if (!to || !list || n < 1 || excluded(found->rank, list, n))
        RETURN_COMM(wrong("a rank that is excluded does not take part, and somebody must be"));
    ncclResult_t result = flags & NCCL_SHRINK_ABORT ? ncclSuccess : check_ready(found);
    if (result == ncclSuccess)
        result = read_config(config, &blocking);
    if (result != ncclSuccess)
        RETURN_COMM(result);
    for (int i = 0; i < found->n; i++) {
        if (excluded(i, list, n)) {
            unique.excluded |= 1ull << i;
            continue;
        }
        rank += i < found->rank;
        left++;
    }
    *to = NULL;
    unique.shrink = ++found->shrinks;
    strcpy(unique.name, found->name);
    name_of(name, &unique, sizeof(unique));
    if (flags & NCCL_SHRINK_ABORT)
        stop(found);
    config = config ? config : &found->config;
    RETURN(begin((struct start){.to = to, .parent = found}, name, left, rank, config, blocking)); /* likewise */
}

/* ----------------------------------------------------------------------------------------------------- ending --- */

EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    ENTER_COMM(comm);
    ncclResult_t result = check_ready(found);
    if (result == ncclSuccess) {
        found->ended = true;
        result = comm_finalize(found);
    }
    RETURN_COMM(result);
}

/* While a destroy waits, another thread may ask for errors, or abort. */
static ncclResult_t end(ncclComm_t handle, bool abort)
{
    struct comm *found = comm_hold(handle);
    ncclResult_t result = ncclSuccess;

    if (!found)
        return ncclInvalidArgument;
    ncclResult_t state = abort ? ncclSuccess : state_of(found);
    if (state != ncclSuccess) { /* it stays, to be aborted */
        comm_drop(found);
        return state == ncclInProgress ? wrong("the communicator is not ready") : state;
    }
    found->ended = true;
    if (!abort)
        result = comm_finish(found);
    if (comm_unlist(found))
        comm_end(found);
    comm_drop(found);
    return result;
}

EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    ENTER();
    RETURN(comm ? end(comm, false) : ncclSuccess);
}

EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    ENTER();
    RETURN(comm ? end(comm, true) : ncclSuccess);
}

EXPORT ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags)
{
    ENTER_COMM(comm);
    (void)flags;
    say("revoking is not implemented");
    RETURN_COMM(ncclInvalidUsage);
}

/* -------------------------------------------------------------------------------------------------- operations --- */

static ncclResult_t read_operator(struct comm *comm, struct operation *op, ncclRedOp_t operator)
{
    int place = operator - ncclNumOps;
    ncclResult_t result = ncclSuccess;

    if (!type_reduces(op->type))
        return wrong("this type is not reduced");
    op->operator = operator;
    if (operator < 0 || place >= 64)
        return wrong("there is no such operator");
    if (place < 0)
        return ncclSuccess;
    pthread_mutex_lock(&comm->mutex);
    if (!comm->operators_used[place] || comm->operator_types[place] != (int)op->type) {
        result = ncclInvalidArgument;
    } else {
        op->operator = PRE_MUL_SUM;
        op->scalar = comm->operators[place];
    }
    pthread_mutex_unlock(&comm->mutex);
    return result;
}

static bool reduces(enum kind kind)
{
    return kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER;
}

static ncclResult_t check_pointers(const struct comm *comm, const struct operation *op)
{
    bool root = op->root == comm->rank;
    bool gives = op->kind != RECEIVE && (root || (op->kind != BROADCAST && op->kind != SCATTER));
    bool gets = op->kind != SEND && (root || (op->kind != REDUCE && op->kind != GATHER));

    if ((gives || op->kind == SEND) && !op->from)
        return wrong("no memory to take from");
    return (gets || op->kind == RECEIVE) && !op->to ? wrong("no memory to write to") : ncclSuccess;
}

static ncclResult_t add(struct comm *comm, struct operation op, ncclRedOp_t operator)
{
    ncclResult_t result = check_ready(comm);

    if (result != ncclSuccess)
        return result;
    if (!type_bytes(op.type))
        return wrong("there is no such type");
    if (op.root < 0 || op.root >= comm->n)
        return wrong("there is no such rank");
    if (reduces(op.kind))
        result = read_operator(comm, &op, operator);
    if (result != ncclSuccess || op.count == 0)
        return result;
    result = check_pointers(comm, &op);
    return result == ncclSuccess ? group_add(comm, &op) : result;
}

#define ADD(kind_, from_, to_, root_, operator_)                                                                       \
    ENTER_COMM(comm);                                                                                                  \
    struct operation op = {.kind = (kind_),                                                                            \
                           .from = (from_),                                                                            \
                           .to = (to_),                                                                                \
                           .count = count,                                                                             \
                           .type = type,                                                                               \
                           .root = (root_),                                                                            \
                           .stream = stream};                                                                          \
    RETURN_COMM(add(found, op, (operator_)))

EXPORT ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operator,
                                  ncclComm_t comm, cudaStream_t stream)
{
    ADD(ALL_REDUCE, from, to, 0, operator);
}

EXPORT ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t comm, cudaStream_t stream)
{
    ADD(BROADCAST, from, to, root, ncclSum);
}

EXPORT ncclResult_t ncclBcast(void *both, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                              cudaStream_t stream)
{
    ADD(BROADCAST, both, both, root, ncclSum);
}

EXPORT ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operator,
                               int root, ncclComm_t comm, cudaStream_t stream)
{
    ADD(REDUCE, from, to, root, operator);
}

EXPORT ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
                                      ncclRedOp_t operator, ncclComm_t comm, cudaStream_t stream)
{
    ADD(REDUCE_SCATTER, from, to, 0, operator);
}

EXPORT ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream)
{
    ADD(ALL_GATHER, from, to, 0, ncclSum);
}

EXPORT ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                                 cudaStream_t stream)
{
    ADD(ALL_TO_ALL, from, to, 0, ncclSum);
}

EXPORT ncclResult_t ncclGather(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                               cudaStream_t stream)
{
    ADD(GATHER, from, to, root, ncclSum);
}

EXPORT ncclResult_t ncclScatter(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                                ncclComm_t comm, cudaStream_t stream)
{
    ADD(SCATTER, from, to, root, ncclSum);
}

EXPORT ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream)
{
    ADD(SEND, from, NULL, peer, ncclSum);
}

EXPORT ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                             cudaStream_t stream)
{
    ADD(RECEIVE, NULL, to, peer, ncclSum);
}

EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *to, void *scalar, ncclDataType_t type,
                                             ncclScalarResidence_t residence, ncclComm_t comm)
{
    ENTER_COMM(comm);
    ncclResult_t result = ncclInternalError; /* no place left */

    if (!to || !scalar || !type_reduces(type) || ((int)residence != 0 && (int)residence != 1))
        RETURN_COMM(wrong("no such operator can be made"));
    pthread_mutex_lock(&found->mutex);
    for (int place = 0; place < 64 && result != ncclSuccess; place++) {
        if (found->operators_used[place])
            continue;
        found->operators_used[place] = true;
        found->operator_types[place] = (int)type;
        found->operators[place] = (struct scalar){residence == ncclScalarDevice ? scalar : NULL, {0}};
        if (residence == ncclScalarHostImmediate)
            memcpy(found->operators[place].bytes, scalar, type_bytes(type));
        *to = ncclNumOps + place;
        result = ncclSuccess;
    }
    pthread_mutex_unlock(&found->mutex);
    RETURN_COMM(result);
}

EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t operator, ncclComm_t comm)
{
    ENTER_COMM(comm);
    int place = operator - ncclNumOps;
    bool there = place >= 0 && place < 64;

    pthread_mutex_lock(&found->mutex);
    there = there && found->operators_used[place];
    if (there)
        found->operators_used[place] = false;
    pthread_mutex_unlock(&found->mutex);
    RETURN_COMM(there ? ncclSuccess : wrong("there is no such operator"));
}

/* ------------------------------------------------------------------------------------------------------ groups --- */

EXPORT ncclResult_t ncclGroupStart(void)
{
    ENTER();
    group_begin();
    RETURN(ncclSuccess);
}

EXPORT ncclResult_t ncclGroupEnd(void)
{
    ENTER();
    RETURN(group_end(false, NULL));
}

EXPORT ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *info)
{
    ENTER();
    int n = 0;

    if (info && info->magic != NCCL_SIM_INFO_MAGIC)
        RETURN(wrong("the place for the answer was not initialised"));
    ncclResult_t result = group_end(true, &n);
    if (info && result == ncclSuccess)
        info->estimatedTime = (float)n; /* microseconds, for want of anything better */
    RETURN(result);
}

/* ------------------------------------------------------------------------------------------------------ memory --- */

/* Nothing is faster for it: only that it is kept and given back. */
static ncclResult_t register_memory(struct comm *comm, const void *memory, size_t size, void **to)
{
    struct registration *made = memory && size && to ? malloc(sizeof(*made)) : NULL;

    if (!made)
        return wrong("no memory to register");
    pthread_mutex_lock(&comm->mutex);
    made->next = comm->registrations;
    comm->registrations = made;
    pthread_mutex_unlock(&comm->mutex);
    *to = made;
    return ncclSuccess;
}

static ncclResult_t forget_memory(struct comm *comm, const void *handle)
{
    pthread_mutex_lock(&comm->mutex);
    struct registration **at = &comm->registrations;
    while (*at && *at != handle)
        at = &(*at)->next;
    struct registration *old = *at;
    if (old)
        *at = old->next;
    pthread_mutex_unlock(&comm->mutex);
    free(old);
    return old ? ncclSuccess : wrong("nothing is registered by this handle");
}

EXPORT ncclResult_t ncclCommRegister(ncclComm_t comm, void *memory, size_t size, void **handle)
{
    ENTER_COMM(comm);
    RETURN_COMM(register_memory(found, memory, size, handle));
}

EXPORT ncclResult_t ncclCommDeregister(ncclComm_t comm, void *handle)
{
    ENTER_COMM(comm);
    RETURN_COMM(forget_memory(found, handle));
}

EXPORT ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *memory, size_t size, ncclWindow_t *window, int flags)
{
    ENTER_COMM(comm);
    (void)flags;
    RETURN_COMM(register_memory(found, memory, size, (void **)window));
}

EXPORT ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window)
{
    ENTER_COMM(comm);
    RETURN_COMM(forget_memory(found, window));
}

EXPORT ncclResult_t ncclMemAlloc(void **to, size_t size)
{
    ENTER();
    CUcontext context;
    CUdevice device;
    CUdeviceptr address = 0;

    if (!to || !size)
        RETURN(wrong("no memory to allocate"));
    ncclResult_t result = driver_context(&context, &device);
    if (result == ncclSuccess)
        result = driver_memory(device, (size + NODE_GRANULARITY - 1) / NODE_GRANULARITY * NODE_GRANULARITY, &address,
                               NULL);
    *to = (void *)(uintptr_t)address;
    RETURN(result);
}

EXPORT ncclResult_t ncclMemFree(void *memory)
{
    ENTER();
    CUdeviceptr start = 0;
    size_t size = 0;
    ncclResult_t result = memory ? driver_load() : ncclSuccess;

    if (!memory || result != ncclSuccess)
        RETURN(result);
    if (cuda.cuMemGetAddressRange(&start, &size, (CUdeviceptr)(uintptr_t)memory) != CUDA_SUCCESS
        || start != (CUdeviceptr)(uintptr_t)memory)
        RETURN(wrong("this was not allocated by ncclMemAlloc"));
    driver_unmap(start, size);
    RETURN(ncclSuccess);
}
