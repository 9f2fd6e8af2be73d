/* The life of a communicator: it comes into being when all ranks have come, and ends when all have gone. */
#define _GNU_SOURCE
#include "comm.h"
#include "../fault.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LOOK_SECONDS 0.1

/* ------------------------------------------------------------------------------------------------------ splits --- */

static bool read_by_all(struct comm *comm, uint64_t split)
{
    for (int rank = 0; rank < comm->n; rank++)
        if (atomic_load(&comm->shared->members[rank].split_read) < split)
            return false;
    return true;
}

static bool told_by_all(struct comm *comm, uint64_t split)
{
    for (int rank = 0; rank < comm->n; rank++)
        if (atomic_load(&comm->shared->members[rank].split) < split)
            return false;
    return true;
}

/* Tell one's colour, read everybody's: how many have the same, and which of them this rank is. */
static bool split(struct comm *parent, const struct start *start)
{
    struct member *members = parent->shared->members, *own = &members[parent->rank];
    struct {
        char name[NAME_ROOM];
        uint64_t split;
        int64_t colour;
    } unique = {.split = start->split, .colour = start->colour};

    if (!shared_await(parent, read_by_all, start->split - 1))
        return false;
    own->colour = start->colour;
    own->key = start->key;
    atomic_store(&own->split, start->split);
    shared_tell(parent->shared);
    if (!shared_await(parent, told_by_all, start->split))
        return false;
    start->comm->n = start->comm->rank = 0;
    for (int rank = 0; rank < parent->n; rank++) {
        if (members[rank].colour != start->colour)
            continue;
        start->comm->n++;
        if (members[rank].key < start->key || (members[rank].key == start->key && rank < parent->rank))
            start->comm->rank++;
    }
    atomic_store(&own->split_read, start->split);
    shared_tell(parent->shared);
    strcpy(unique.name, parent->name);
    name_of(start->comm->name, &unique, sizeof(unique));
    return true;
}

static bool split_of(struct comm *parent, const struct start *start)
{
    if (!comm_enter(parent))
        return false;
    bool done = split(parent, start);
    comm_leave(parent);
    return done;
}

/* ---------------------------------------------------------------------------------------------- coming to life --- */

/* The application's signals are for its own threads. */
int thread_make(pthread_t *thread, void *(*body)(void *), void *argument)
{
    sigset_t all, before;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* NCCL has a thread for each communicator, by whose name it is seen from outside. This one only waits for the end. */
static void *service_body(void *argument)
{
    struct comm *comm = argument;

    pthread_mutex_lock(&comm->mutex);
    while (!comm->aborted)
        pthread_cond_wait(&comm->changed, &comm->mutex);
    pthread_mutex_unlock(&comm->mutex);
    return NULL;
}

static ncclResult_t serve(struct comm *comm)
{
    char name[16];

    snprintf(name, sizeof(name), "NCCL Service%2d", comm->device % 100);
    if (thread_make(&comm->service, service_body, comm) != 0)
        return ncclSystemError;
    pthread_setname_np(comm->service, name);
    comm->serviced = true;
    return ncclSuccess;
}

static ncclResult_t connect_all(struct comm *comm)
{
    struct fault fault = fault_ask("step:nccl-init", getpid());
    ncclResult_t result;

    if (fault.actions & (FAULT_CRASH_TARGET | FAULT_CRASH_TARGET_AFTER | FAULT_CRASH_CALLER_AFTER))
        kill(getpid(), SIGKILL);
    if (fault.actions & FAULT_RESULT)
        return (ncclResult_t)fault.result;
    result = CUDA_TRY(cuCtxSetCurrent, comm->context);
    if (result == ncclSuccess && shared_join(comm, &result))
        result = peers_connect(comm);
    shared_unname(comm);
    return result == ncclSuccess ? serve(comm) : result;
}

/* Of a split it is the parent that blocks or does not, as with NCCL. */
static bool blocks(const struct start *start)
{
    return start->parent ? start->parent->blocking : start->comm->blocking;
}

/* Everything that an init waits for. Not blocking ones stay, with the error, until they are aborted: NCCL writes the handle of
 * a split that has failed, too. */
static ncclResult_t start_one(struct start *start)
{
    struct comm *comm = start->comm;
    ncclResult_t result = ncclInternalError;

    if (comm_enter(comm)) {
        if (start->split && !split_of(start->parent, start))
            result = start->parent->aborted ? ncclInternalError : (ncclResult_t)start->parent->async;
        else if (start->split && start->colour == NCCL_SPLIT_NOCOLOR)
            result = ncclSuccess;
        else
            result = connect_all(comm);
        comm->async = result;
        comm_leave(comm);
    }
    if (start->parent) {
        bool made = (result == ncclSuccess || !blocks(start)) && start->colour != NCCL_SPLIT_NOCOLOR;
        __atomic_store_n(start->to, made ? comm : NULL, __ATOMIC_RELEASE);
        if (!blocks(start)) {
            if (result != ncclSuccess)
                start->parent->async = result;
            atomic_fetch_sub(&start->parent->splitting, 1);
        }
    }
    if (start->parent && start->colour == NCCL_SPLIT_NOCOLOR) {
        comm_unlist(comm);
        comm_end(comm);
    } else if (result != ncclSuccess && blocks(start)) {
        *start->to = NULL;
        if (comm_unlist(comm))
            comm_end(comm);
    }
    return result;
}

void start_drop(struct start *start)
{
    if (start->parent)
        comm_drop(start->parent);
    comm_drop(start->comm);
}

struct starting {
    struct start start;
    ncclResult_t result;
    bool detached; /* nobody waits for the result */
};

static void *start_body(void *argument)
{
    struct starting *starting = argument;

    starting->result = start_one(&starting->start);
    if (starting->detached) {
        start_drop(&starting->start);
        free(starting);
    }
    return NULL;
}

/* One that does not block: its thread is joined when it ends. */
static ncclResult_t start_aside(const struct start *start)
{
    struct starting *starting = malloc(sizeof(*starting));
    struct comm *comm = start->comm;

    if (!starting)
        return ncclSystemError;
    *starting = (struct starting){*start, ncclInProgress, true};
    if (start->parent)
        atomic_fetch_add(&start->parent->splitting, 1);
    if (start->colour == NCCL_SPLIT_NOCOLOR && start->parent) { /* no handle, nobody to join it */
        pthread_t thread;
        if (thread_make(&thread, start_body, starting) == 0) {
            pthread_detach(thread);
            return ncclInProgress;
        }
    } else {
        comm->threaded = thread_make(&comm->thread, start_body, starting) == 0;
        if (comm->threaded)
            return ncclInProgress;
    }
    if (start->parent)
        atomic_fetch_sub(&start->parent->splitting, 1);
    free(starting);
    return ncclSystemError;
}

/* Blocking ones of a group wait for each other, so each has a thread. */
static ncclResult_t start_together(struct start *starts, int n)
{
    struct starting *all = calloc((size_t)n, sizeof(*all));
    pthread_t *threads = calloc((size_t)n, sizeof(*threads));
    ncclResult_t result = all && threads ? ncclSuccess : ncclSystemError;
    int made = 0;

    for (; result == ncclSuccess && made < n; made++) {
        all[made] = (struct starting){starts[made], ncclInternalError, false};
        if (thread_make(&threads[made], start_body, &all[made]) != 0)
            result = ncclSystemError;
    }
    for (int i = 0; i < made; i++) {
        pthread_join(threads[i], NULL);
        if (all[i].result != ncclSuccess)
            result = all[i].result;
    }
    for (int i = 0; i < n; i++)
        start_drop(&starts[i]);
    free(all);
    free(threads);
    return result;
}

ncclResult_t start_all(struct start *starts, int n)
{
    ncclResult_t result = ncclSuccess;
    int blocking = 0;

    for (int i = 0; i < n; i++) {
        if (blocks(&starts[i])) {
            starts[blocking++] = starts[i];
            continue;
        }
        ncclResult_t one = start_aside(&starts[i]);
        if (one != ncclInProgress)
            start_drop(&starts[i]);
        result = one;
    }
    if (blocking == 1) {
        CUcontext before = NULL;
        cuda.cuCtxGetCurrent(&before);
        result = start_one(&starts[0]);
        cuda.cuCtxSetCurrent(before);
        start_drop(&starts[0]);
    } else if (blocking > 1) {
        result = start_together(starts, blocking);
    }
    return result;
}

/* ----------------------------------------------------------------------------------------------------- ending --- */

/* Work that can never be done: the context has failed, and the driver calls no host function of it any more. */
static bool context_failed(struct comm *comm)
{
    CUcontext before = NULL;
    CUresult result = cuda.cuCtxGetCurrent(&before);

    if (result == CUDA_SUCCESS)
        result = cuda.cuCtxSetCurrent(comm->context);
    if (result == CUDA_SUCCESS)
        result = cuda.cuStreamQuery(comm->last_stream);
    cuda.cuCtxSetCurrent(before);
    return result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY && result != CUDA_ERROR_INVALID_HANDLE;
}

static void await_work(struct comm *comm)
{
    bool failed = false;

    while (!failed) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += (long)(LOOK_SECONDS * 1e9);
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        pthread_mutex_lock(&comm->mutex);
        if (!comm->aborted && comm->finished != comm->issued)
            pthread_cond_timedwait(&comm->changed, &comm->mutex, &until);
        bool over = comm->aborted || comm->finished == comm->issued;
        pthread_mutex_unlock(&comm->mutex);
        if (over)
            return;
        failed = context_failed(comm);
    }
}

/* Whether all ranks of other processes have finished, or have died. The last one of a process waits for them, as with
 * NCCL: one thread may end the ranks of its process one after the other. */
static bool others_left(struct comm *comm, uint64_t unused)
{
    bool all = true;

    (void)unused;
    for (int rank = 0; rank < comm->n; rank++) {
        const struct member *member = &comm->shared->members[rank];
        if (atomic_load(&member->left))
            continue;
        if (member->pid == getpid())
            return true;
        all = all && !member_lives(member);
    }
    return all;
}

static void tell_left(struct comm *comm)
{
    if (!comm->shared || !comm->joined)
        return;
    atomic_store(&comm->shared->members[comm->rank].left, 1);
    shared_tell(comm->shared);
}

/* Wait for one's own work, and for the other ranks to have done with theirs. */
static ncclResult_t finish(struct comm *comm)
{
    await_work(comm);
    if (!comm_enter(comm))
        return ncclInternalError;
    ncclResult_t result = (ncclResult_t)comm->async;
    if (comm->shared && comm->joined && atomic_load(&comm->shared->members[comm->rank].step) != STEP_NONE) {
        tell_left(comm);
        if (!comm->quiet)
            shared_await(comm, others_left, 0);
        comm->quiet = true;
    }
    comm_leave(comm);
    return result == ncclInProgress ? ncclSuccess : result;
}

static void *finish_body(void *argument)
{
    struct comm *comm = argument;

    comm->async = finish(comm);
    comm_drop(comm);
    return NULL;
}

static void join(struct comm *comm)
{
    pthread_mutex_lock(&comm->mutex);
    bool threaded = comm->threaded;
    comm->threaded = false;
    pthread_mutex_unlock(&comm->mutex);
    if (threaded)
        pthread_join(comm->thread, NULL);
}

ncclResult_t comm_finalize(struct comm *comm)
{
    if (comm->blocking)
        return finish(comm);
    join(comm);
    comm->async = ncclInProgress;
    comm_keep(comm);
    comm->threaded = thread_make(&comm->thread, finish_body, comm) == 0;
    if (comm->threaded)
        return ncclInProgress;
    comm_drop(comm);
    return ncclSystemError;
}

ncclResult_t comm_finish(struct comm *comm)
{
    join(comm);
    return finish(comm);
}

void comm_end(struct comm *comm)
{
    pthread_mutex_lock(&comm->mutex);
    comm->aborted = true;
    comm->inside++; /* shared stays mapped */
    pthread_cond_broadcast(&comm->changed);
    pthread_mutex_unlock(&comm->mutex);
    if (comm->shared)
        shared_tell(comm->shared);
    join(comm);
    pthread_mutex_lock(&comm->mutex);
    while (comm->inside > 1)
        pthread_cond_wait(&comm->changed, &comm->mutex);
    comm->inside--;
    pthread_mutex_unlock(&comm->mutex);
    if (comm->serviced)
        pthread_join(comm->service, NULL);
    tell_left(comm);
    peers_let_go(comm);
    shared_leave(comm);
}
