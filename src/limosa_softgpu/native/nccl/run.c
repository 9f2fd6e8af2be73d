/* Operations: how they come onto a stream, and what they do there. */
#include "comm.h"
#include "../fault.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct launch {
    struct comm *comm;
    uint64_t number;
    int n;
    struct operation operations[];
};

/* ------------------------------------------------------------------------------------------------ collectives --- */

/* What goes through a buffer at a time: a part of everything that a rank gives, or of each of n blocks. */
struct shape {
    enum { ALL_OF_ALL, ONE_OF_ROOT, OWN_OF_ALL } gets;
    bool blocks;    /* what is given has a block for each rank */
    bool root_only; /* only the root gives */
    bool to_root;   /* only the root gets */
    bool reduces;
};
static const struct shape shapes[] = {
    [ALL_REDUCE] = {.gets = ALL_OF_ALL, .reduces = true},
    [BROADCAST] = {.root_only = true, .gets = ONE_OF_ROOT},
    [REDUCE] = {.to_root = true, .gets = ALL_OF_ALL, .reduces = true},
    [REDUCE_SCATTER] = {.blocks = true, .gets = OWN_OF_ALL, .reduces = true},
    [ALL_GATHER] = {.gets = ALL_OF_ALL},
    [ALL_TO_ALL] = {.blocks = true, .gets = OWN_OF_ALL},
    [GATHER] = {.to_root = true, .gets = ALL_OF_ALL},
    [SCATTER] = {.blocks = true, .root_only = true, .gets = ONE_OF_ROOT},
};

static bool arrived(struct comm *comm, uint64_t phase)
{
    for (int rank = 0; rank < comm->n; rank++)
        if (atomic_load(&comm->shared->members[rank].arrived) < phase)
            return false;
    return true;
}

static bool same_operation(const struct comm *comm, uint64_t phase)
{
    const struct header *first = &comm->shared->members[0].headers[phase & 1];

    for (int rank = 1; rank < comm->n; rank++)
        if (memcmp(first, &comm->shared->members[rank].headers[phase & 1], sizeof(*first)) != 0) {
            say("ranks 0 and %d are in different collectives (kind, count, type, operator or root)", rank);
            return false;
        }
    return true;
}

/* Copy what this rank gives of a part into its buffer. */
static void give(const struct comm *comm, const struct operation *op, char *buffer, size_t room, size_t done, size_t n)
{
    const struct shape *shape = &shapes[op->kind];
    size_t bytes = type_bytes(op->type);
    int blocks = shape->blocks ? comm->n : 1;

    if (shape->root_only && op->root != comm->rank)
        return;
    for (int block = 0; block < blocks; block++) {
        const char *from = op->from + ((size_t)block * op->count + done) * bytes;
        char *to = buffer + (size_t)block * room * bytes;
        if (op->operator == PRE_MUL_SUM && shape->reduces)
            multiply(op->type, &op->scalar, to, from, n);
        else
            memcpy(to, from, n * bytes);
    }
}

/* Take what this rank gets of a part out of everybody's. */
static void take(const struct comm *comm, const struct operation *op, size_t part, size_t room, size_t done, size_t n)
{
    const struct shape *shape = &shapes[op->kind];
    size_t bytes = type_bytes(op->type);
    const void *from[MOST_RANKS];

    if (shape->to_root && op->root != comm->rank)
        return;
    for (int rank = 0; rank < comm->n; rank++)
        from[rank] = comm->data[rank] + part + (shape->blocks ? (size_t)comm->rank * room * bytes : 0);
    if (shape->reduces)
        reduce(op->type, op->operator, op->to + done * bytes, from, comm->n, n);
    else if (shape->gets == ONE_OF_ROOT)
        memcpy(op->to + done * bytes, from[op->root], n * bytes);
    else
        for (int rank = 0; rank < comm->n; rank++)
            memcpy(op->to + ((size_t)rank * op->count + done) * bytes, from[rank], n * bytes);
}

/* A buffer has two parts: who writes one has seen that all have come to the other, and so have read this one. */
static bool run_collective(struct comm *comm, const struct operation *op)
{
    struct member *own = &comm->shared->members[comm->rank];
    size_t room = PART_BYTES / type_bytes(op->type) / (shapes[op->kind].blocks ? (size_t)comm->n : 1);

    for (size_t done = 0, n; done < op->count; done += n) {
        n = op->count - done < room ? op->count - done : room;
        uint64_t phase = ++comm->phase;
        size_t part = phase & 1 ? PART_BYTES : 0;
        give(comm, op, comm->data[comm->rank] + part, room, done, n);
        own->headers[phase & 1] = (struct header){op->count, done, op->kind, op->type, op->operator, op->root};
        atomic_store(&own->arrived, phase);
        shared_tell(comm->shared);
        if (!shared_await(comm, arrived, phase))
            return false;
        if (!same_operation(comm, phase)) {
            shared_fail(comm, ncclInvalidUsage);
            return false;
        }
        take(comm, op, part, room, done, n);
    }
    return true;
}

/* ------------------------------------------------------------------------------------------ sends and receives --- */

static size_t least(size_t one, size_t other)
{
    return one < other ? one : other;
}

/* Send or receive one part, if that can be now. */
static bool move_part(struct comm *comm, struct operation *op)
{
    bool sends = op->kind == SEND;
    int from = sends ? comm->rank : op->root, to = sends ? op->root : comm->rank;
    struct channel *channel = &comm->shared->channels[from][to];
    size_t room = SENT_BYTES / (size_t)comm->n / 64 * 64, bytes = op->count * type_bytes(op->type);
    char *buffer = comm->data[from] + 2 * PART_BYTES + (size_t)to * room;
    uint64_t written = atomic_load(&channel->written), read = atomic_load(&channel->read);

    if (sends != (written == read))
        return false;
    if (sends) {
        channel->bytes = (uint32_t)least(room, bytes - op->done);
        channel->count = op->count;
        channel->type = op->type;
        memcpy(buffer, op->from + op->done, channel->bytes);
        op->done += channel->bytes;
        atomic_store(&channel->written, written + 1);
    } else {
        if (channel->count != op->count || channel->type != (int)op->type || channel->bytes > bytes - op->done) {
            say("rank %d sends rank %d something else than that receives (count or type)", from, to);
            shared_fail(comm, ncclInvalidUsage);
            return false;
        }
        memcpy(op->to + op->done, buffer, channel->bytes);
        op->done += channel->bytes;
        atomic_store(&channel->read, read + 1);
    }
    shared_tell(comm->shared);
    return true;
}

static bool over(const struct operation *op)
{
    return op->kind < SEND || op->done == op->count * type_bytes(op->type);
}

struct moving {
    struct operation *operations;
    int n;
    bool moved;
};

/* One round: of each pair of ranks, in each direction, the first that is not over. */
static bool move_round(struct comm *comm, uint64_t of)
{
    struct moving *moving = (struct moving *)(uintptr_t)of;
    bool busy[2][MOST_RANKS] = {{0}}, left = false;

    moving->moved = false;
    for (int i = 0; i < moving->n; i++) {
        struct operation *op = &moving->operations[i];
        bool *before = over(op) ? NULL : &busy[op->kind == SEND][op->root];
        if (!before || *before)
            continue;
        while (!over(op) && move_part(comm, op))
            moving->moved = true;
        *before = !over(op);
        left |= *before;
    }
    return !left || moving->moved;
}

/* All of a group together, so that nobody waits for a receive that comes later in the same group. */
static bool run_moves(struct comm *comm, struct operation *operations, int n)
{
    struct moving moving = {operations, n, true};

    do {
        if (!shared_await(comm, move_round, (uintptr_t)&moving))
            return false;
    } while (moving.moved);
    return true;
}

/* -------------------------------------------------------------------------------------------- on the stream --- */

bool comm_enter(struct comm *comm)
{
    pthread_mutex_lock(&comm->mutex);
    bool in = !comm->aborted;
    comm->inside += in;
    pthread_mutex_unlock(&comm->mutex);
    return in;
}

void comm_leave(struct comm *comm)
{
    pthread_mutex_lock(&comm->mutex);
    comm->inside--;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->mutex);
}

/* A point in the middle, at which rules can strike. A hang ends with its rule. */
static bool step(struct comm *comm, const char *name)
{
    struct fault fault = fault_ask(name, getpid());

    if (fault.actions & (FAULT_CRASH_TARGET | FAULT_CRASH_TARGET_AFTER | FAULT_CRASH_CALLER_AFTER))
        kill(getpid(), SIGKILL);
    if (fault.actions & (FAULT_RESULT | FAULT_AFTER)) {
        int error = fault.actions & FAULT_RESULT ? fault.result : fault.after;
        say("a fault was injected");
        comm->async = error; /* of this rank alone: its peers wait, as they do for one whose GPU has failed */
        return error == ncclSuccess;
    }
    return true;
}

static bool run_all(struct launch *launch)
{
    struct comm *comm = launch->comm;
    bool moves = false;

    for (int i = 0; i < launch->n; i++) {
        if (launch->operations[i].kind >= SEND)
            moves = true;
        else if (!step(comm, "step:nccl-collective") || !run_collective(comm, &launch->operations[i]))
            return false;
    }
    return !moves || (step(comm, "step:nccl-sendrecv") && run_moves(comm, launch->operations, launch->n));
}

/* The host function. What comes after an error, or after an abort, does nothing. */
static void run(void *argument)
{
    struct launch *launch = argument;
    struct comm *comm = launch->comm;

    pthread_mutex_lock(&comm->mutex);
    while (!comm->aborted && comm->finished != launch->number)
        pthread_cond_wait(&comm->changed, &comm->mutex);
    bool in = !comm->aborted;
    comm->inside += in;
    pthread_mutex_unlock(&comm->mutex);
    if (in && comm->async == ncclSuccess)
        run_all(launch);
    pthread_mutex_lock(&comm->mutex);
    comm->inside -= in;
    comm->finished++;
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->mutex);
    comm_drop(comm);
    free(launch);
}

/* ------------------------------------------------------------------------------------------------- launching --- */

static ncclResult_t check_stream(struct comm *comm, cudaStream_t stream)
{
    CUstreamCaptureStatus status;
    ncclResult_t result = CUDA_TRY(cuStreamIsCapturing, stream, &status);

    if (result == ncclSuccess && status != CU_STREAM_CAPTURE_STATUS_NONE) {
        say("the driver in software cannot capture a collective (rank %d)", comm->rank);
        return ncclInvalidUsage;
    }
    return result;
}

/* Let one stream wait for what another has been given so far. */
static ncclResult_t order(cudaStream_t before, cudaStream_t after)
{
    CUevent event;
    ncclResult_t result = CUDA_TRY(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);

    if (result != ncclSuccess)
        return result;
    result = CUDA_TRY(cuEventRecord, event, before);
    if (result == ncclSuccess)
        result = CUDA_TRY(cuStreamWaitEvent, after, event, 0);
    cuda.cuEventDestroy(event);
    return result;
}

/* Whether an operation is the first of its group on its stream. */
static bool first_on_stream(const struct operation *operations, int i)
{
    for (int before = 0; before < i; before++)
        if (operations[before].stream == operations[i].stream)
            return false;
    return true;
}

/* A group on several streams runs on the first, which waits for the others before, as they do for it after. */
static ncclResult_t submit(struct comm *comm, struct launch *launch, const struct operation *operations, int n)
{
    ncclResult_t result = ncclSuccess;

    for (int i = 0; i < n && result == ncclSuccess; i++)
        if (first_on_stream(operations, i))
            result = check_stream(comm, operations[i].stream);
    for (int i = 1; i < n && result == ncclSuccess; i++)
        if (first_on_stream(operations, i))
            result = order(operations[i].stream, operations[0].stream);
    if (result != ncclSuccess)
        return result;
    pthread_mutex_lock(&comm->mutex);
    launch->number = comm->issued++;
    comm->last_stream = operations[0].stream;
    pthread_mutex_unlock(&comm->mutex);
    result = CUDA_TRY(cuLaunchHostFunc, operations[0].stream, run, launch);
    if (result != ncclSuccess) {
        pthread_mutex_lock(&comm->mutex);
        comm->issued--; /* nothing was issued after it: `launching` is held */
        pthread_mutex_unlock(&comm->mutex);
        return result;
    }
    for (int i = 1; i < n && result == ncclSuccess; i++)
        if (first_on_stream(operations, i))
            result = order(operations[0].stream, operations[i].stream);
    return result;
}

static ncclResult_t launch_now(struct comm *comm, const struct operation *operations, int n)
{
    struct launch *made = malloc(sizeof(*made) + (size_t)n * sizeof(*operations));
    CUcontext before = NULL;
    uint64_t issued;

    if (!made)
        return ncclSystemError;
    made->comm = comm;
    made->n = n;
    memcpy(made->operations, operations, (size_t)n * sizeof(*operations));
    ncclResult_t result = CUDA_TRY(cuCtxGetCurrent, &before);
    if (result == ncclSuccess && before != comm->context)
        result = CUDA_TRY(cuCtxSetCurrent, comm->context);
    if (result != ncclSuccess) {
        free(made);
        return result;
    }
    comm_keep(comm); /* the operation's */
    pthread_mutex_lock(&comm->launching);
    issued = comm->issued;
    result = submit(comm, made, operations, n); /* from here on `made` may be gone */
    bool on_stream = comm->issued != issued;
    pthread_mutex_unlock(&comm->launching);
    if (!on_stream) {
        comm_drop(comm);
        free(made);
    }
    if (before != comm->context)
        cuda.cuCtxSetCurrent(before);
    return result;
}

/* ------------------------------------------------------------------- launching, where that does not block --- */

#define LAUNCH_NS 300000 /* so long after the call it begins */

struct aside {
    struct aside *next;
    struct comm *comm;
    int n;
    struct operation operations[];
};

static bool called_by_all(struct comm *comm, uint64_t unused)
{
    (void)unused;
    for (int rank = 0; rank < comm->n; rank++)
        if (!atomic_load(&comm->shared->members[rank].called))
            return false;
    return true;
}

/* The first collective connects the ranks: it is in progress until all have called one. */
static bool connect_first(struct comm *comm, const struct aside *aside)
{
    struct member *own = &comm->shared->members[comm->rank];

    if (atomic_load(&own->called) || aside->operations[0].kind >= SEND)
        return true;
    atomic_store(&own->called, 1);
    shared_tell(comm->shared);
    return shared_await(comm, called_by_all, 0);
}

static void launch_one(const struct aside *aside)
{
    struct comm *comm = aside->comm;
    ncclResult_t result = ncclSuccess;
    int none = ncclSuccess;

    if (comm_enter(comm)) {
        if (step(comm, "step:nccl-launch") && connect_first(comm, aside))
            result = launch_now(comm, aside->operations, aside->n);
        comm_leave(comm);
    }
    if (result != ncclSuccess)
        atomic_compare_exchange_strong(&comm->async, &none, (int)result);
}

/* All of a group have come to their end together. */
static void let_go(struct aside *all)
{
    while (all) {
        struct aside *next = all->next;
        atomic_fetch_sub(&all->comm->launching_aside, 1);
        comm_drop(all->comm);
        free(all);
        all = next;
    }
}

/* One thread for a group: in the same order on all ranks, as streams are. */
static void *launch_body(void *argument)
{
    nanosleep(&(struct timespec){0, LAUNCH_NS}, NULL);
    for (const struct aside *aside = argument; aside; aside = aside->next)
        launch_one(aside);
    let_go(argument);
    return NULL;
}

ncclResult_t launch_aside(struct aside *all)
{
    pthread_t thread;

    if (!all)
        return ncclSuccess;
    if (thread_make(&thread, launch_body, all) == 0) {
        pthread_detach(thread);
        return ncclInProgress;
    }
    let_go(all);
    return ncclSystemError;
}

static ncclResult_t keep_for_later(struct comm *comm, const struct operation *operations, int n, struct aside **all)
{
    for (int i = 0; i < n; i++) {
        ncclResult_t result = check_stream(comm, operations[i].stream);
        if (result != ncclSuccess)
            return result;
    }
    struct aside *aside = malloc(sizeof(*aside) + (size_t)n * sizeof(*operations));
    if (!aside)
        return ncclSystemError;
    aside->next = NULL;
    aside->comm = comm;
    aside->n = n;
    memcpy(aside->operations, operations, (size_t)n * sizeof(*operations));
    comm_keep(comm);
    atomic_fetch_add(&comm->launching_aside, 1);
    while (*all)
        all = &(*all)->next;
    *all = aside;
    return ncclSuccess;
}

/* One rank alone has nobody to wait for, and NCCL copies at once. */
ncclResult_t launch(struct comm *comm, const struct operation *operations, int n, struct aside **aside)
{
    bool now = comm->blocking || comm->n == 1;

    return now ? launch_now(comm, operations, n) : keep_for_later(comm, operations, n, aside);
}
