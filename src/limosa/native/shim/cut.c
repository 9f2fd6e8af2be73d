#include "cut.h"
#include "capture.h"
#include "clock.h"
#include "comms.h"
#include "driver.h"
#include "gate.h"
#include "nccl.h"
#include "nccl_api.h"
#include "protocol.h"
#include "serve.h"
#include "still.h"
#include "tell.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define WANTS_MOST 256
#define CLOSED_AT_ONCE 64
#define PART_MS 500 /* of a wait whose end nobody may wait for any more */
#define CAPTURES_MS 5000 /* that captures may take to come to their end */

static struct comm_record record_of(const struct comm *comm)
{
    struct comm_record record = {
        .id = {comm->id.a, comm->id.b},
        .number = comm->number,
        .collectives = comm->collectives,
        .rank = comm->rank,
        .ranks = comm->ranks,
        .device = comm->device,
        .flags = (comm->joining || atomic_load(&comm->busy) ? COMM_JOINING : 0) | (comm->closed ? COMM_CLOSED : 0)
            | (atomic_load(&comm->captured) ? COMM_CAPTURED : 0) | (nccl_memories() ? COMM_MEMORY : 0)
            | (comm->made_again % 2 ? COMM_AGAIN : 0),
    };
    const char *strange = atomic_load(&comm->strange);

    if (strange) {
        record.flags |= COMM_STRANGE;
        memcpy(record.why, strange, strnlen(strange, sizeof record.why - 1));
    } else if ((strange = nccl_newer())) {
        record.flags |= COMM_NEWER;
        memcpy(record.why, strange, strnlen(strange, sizeof record.why - 1));
    }
    return record;
}

/* All of these: with the lock held, into memory that is the caller's to free. */
static size_t collect_comms(void **found)
{
    size_t n = 0, room = 0;

    for (const struct comm *comm = comms_first(); comm; comm = comm->next)
        room++;
    struct comm_record *all = *found = calloc(room + 1, sizeof *all);
    for (const struct comm *comm = comms_first(); all && comm && n < room; comm = comm->next)
        if (!comm->ended)
            all[n++] = record_of(comm);
    return n;
}

static size_t collect_pairs(void **found)
{
    size_t n = 0, room = 0;

    for (const struct comm *comm = comms_first(); comm; comm = comm->next)
        room += comm->sent && comm->received && !comm->ended ? (size_t)comm->ranks : 0;
    struct pair_record *all = *found = calloc(room + 1, sizeof *all);
    for (const struct comm *comm = comms_first(); all && comm; comm = comm->next)
        for (int peer = 0; comm->sent && comm->received && !comm->ended && peer < comm->ranks && n < room; peer++)
            if (comm->sent[peer].count || comm->received[peer].count)
                all[n++] = (struct pair_record){comm->number, comm->sent[peer].count, comm->received[peer].count,
                                                (uint32_t)peer, 0};
    return n;
}

static size_t collect_wants(void **found)
{
    struct want *all = *found = calloc(WANTS_MOST, sizeof *all);

    return all ? comms_wants(all, WANTS_MOST) : 0;
}

/* Nobody may have asked since what was begun has come to its end. Not while the gate is open: the application may be about to
 * destroy it. */
static void look_at_busy(void)
{
    if (comms_phase() == PHASE_OPEN)
        return;
    for (struct comm *comm = comms_first(); comm; comm = comm->next) {
        if ((!atomic_load(&comm->busy) && !comm->joining) || !comms_alone())
            continue;
        nccl_look(comm);
        comms_others();
    }
}

bool tell_comms(int client, struct message *answer, uint64_t what)
{
    static size_t (*const collect[])(void **) = {collect_comms, collect_pairs, collect_wants};
    static const size_t each[] = {sizeof(struct comm_record), sizeof(struct pair_record), sizeof(struct want)};
    void *all = NULL;

    if (what >= sizeof collect / sizeof collect[0]) {
        answer->result = -EINVAL;
        return say(client, answer, NULL, 0, NULL, 0);
    }
    look_at_busy();
    comms_lock();
    size_t n = collect[what](&all);
    answer->c = (uint64_t)comms_phase() | (uint64_t)comms_inside() << 32;
    answer->d = comms_changes();
    comms_unlock();
    if (!all)
        answer->result = -ENOMEM;
    bool well = say_all(client, answer, all, n, each[what]);
    free(all);
    return well;
}

int32_t cut_limits(const struct limit_record *records, size_t n)
{
    for (size_t i = 0; i < n; i++)
        comms_limit((struct comm_id){records[i].id[0], records[i].id[1]}, records[i].kind, records[i].rank - 1,
                    records[i].peer, records[i].limit);
    return 0;
}

/* NCCL's own waits have no limit: a thread does it, and is left to it when the time is up. One at a time. */
struct job {
    int (*what)(void *);
    void *of;
    bool closes;
    _Atomic int result;
    _Atomic bool over, left;
};
static struct job *_Atomic under_way;

static void *do_job(void *data)
{
    struct job *job = data;

    gate_exempt();
    capture_leave_alone();
    int result = job->what(job->of);
    real(cuCtxSetCurrent)(NULL);
    atomic_store(&job->result, result);
    atomic_store(&job->over, true);
    return NULL;
}

static uint64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* -ETIMEDOUT, -ECANCELED (nobody waits for the answer any more): it goes on. `of` is freed when it is over. */
static int32_t within(uint64_t milliseconds, int (*what)(void *), void *of, bool closes)
{
    uint64_t end = now_ms() + milliseconds;
    struct job *job = atomic_load(&under_way);
    pthread_attr_t attributes;
    pthread_t thread;

    for (; job && !atomic_load(&job->over); poll(NULL, 0, 1))
        if (now_ms() >= end || serve_is_alone()) {
            free(of);
            return -EBUSY;
        }
    if (job) {
        free(job->of);
        free(job);
        atomic_store(&under_way, NULL);
    }
    if (!(job = calloc(1, sizeof *job))) {
        free(of);
        return -ENOMEM;
    }
    job->what = what;
    job->of = of;
    job->closes = closes;
    atomic_store(&under_way, job);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attributes, do_job, job)) {
        atomic_store(&under_way, NULL);
        free(of);
        free(job);
        return -EAGAIN;
    }
    for (unsigned turn = 0; !atomic_load(&job->over); turn++) {
        if (now_ms() >= end)
            return -ETIMEDOUT;
        if (turn >= 100 && serve_is_alone()) /* a peer has failed: whoever asks again waits for this first */
            return -ECANCELED;
        nanosleep(&(struct timespec){0, turn < 100 ? 100000 : 1000000}, NULL);
    }
    int32_t result = atomic_load(&job->result);
    atomic_store(&under_way, NULL);
    free(job->of);
    free(job);
    return result;
}

static struct comm *by_number(uint64_t number)
{
    struct comm *comm = comms_first();

    while (comm && comm->number != number)
        comm = comm->next;
    return comm;
}

/* Of one that does not block: until it has come to something. */
static int wait_for(void *behind, int result)
{
    while (result == NCCL_IN_PROGRESS) {
        int now = NCCL_SUCCESS, asked = nccl(ncclCommGetAsyncError)(behind, &now);
        result = asked ? asked : now;
        if (result == NCCL_IN_PROGRESS)
            nanosleep(&(struct timespec){0, 200000}, NULL);
    }
    return result;
}

struct numbers {
    size_t n;
    uint64_t number[];
};

/* A thread's own: a destroy that has failed leaves the group of the thread that tried it open (2.28), and whatever is asked
 * there then is kept for ever. */
static void *abort_one(void *behind)
{
    gate_exempt();
    capture_leave_alone();
    nccl(ncclCommAbort)(behind);
    return NULL;
}

static void give_up(void *behind)
{
    pthread_t thread;

    if (!pthread_create(&thread, NULL, abort_one, behind))
        pthread_join(thread, NULL);
}

/* A thread's. What hangs on it goes with it. */
static void *close_one(void *data)
{
    struct comm *comm = data;
    void *behind = atomic_load(&comm->real);

    gate_exempt();
    capture_leave_alone();
    if (comm->context)
        real(cuCtxSetCurrent)(comm->context);
    comms_lock();
    atomic_store(&comm->real, NULL);
    comms_unlock();
    bool blocks = !comm->config || comm->config->blocking != 0;
    int finalized = blocks ? NCCL_SUCCESS : wait_for(behind, nccl(ncclCommFinalize)(behind));
    int destroyed = finalized ? finalized : nccl(ncclCommDestroy)(behind);
    if (destroyed)
        give_up(behind); /* or its peers wait for it */
    real(cuCtxSetCurrent)(NULL);
    return (void *)(intptr_t)destroyed;
}

static bool named_before(const struct numbers *these, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (these->number[i] == these->number[n])
            return true;
    return false;
}

/* Side by side: most of it is waiting, and so it does not matter in which order the peers do it. */
static int close_these(void *data)
{
    const struct numbers *these = data;
    pthread_t threads[CLOSED_AT_ONCE];
    int result = NCCL_SUCCESS;

    for (size_t from = 0; from < these->n; from += CLOSED_AT_ONCE) {
        size_t n = 0;
        for (size_t i = from; i < these->n && i < from + CLOSED_AT_ONCE; i++) {
            struct comm *comm = by_number(these->number[i]);
            if (!comm || !atomic_load(&comm->real) || named_before(these, i))
                continue;
            if (!pthread_create(&threads[n], NULL, close_one, comm))
                n++;
            else
                result = NCCL_SYSTEM_ERROR; /* nothing was done to it */
        }
        for (size_t i = 0; i < n; i++) {
            void *came = NULL;
            pthread_join(threads[i], &came);
            result = result ? result : (int)(intptr_t)came;
        }
    }
    return result;
}

/* What was tried for a part of the time may yet come to be. */
static bool may_yet(int32_t result, uint64_t spent)
{
    return result == CUDA_ERROR_NOT_READY || (result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && spent < CAPTURES_MS);
}

/* Nobody passes any more, and all that was issued is done. */
int32_t cut_rest(uint64_t milliseconds)
{
    uint64_t begun = now_ms();

    if (still_state() != STATE_OPEN)
        return -EINVAL;
    /* Whoever only asks is inside for a moment, too. */
    while (!comms_shut()) {
        if (now_ms() - begun >= milliseconds)
            return -EBUSY;
        if (serve_is_alone())
            return -ECANCELED;
        nanosleep(&(struct timespec){0, 50000}, NULL);
    }
    int32_t result = CUDA_ERROR_NOT_READY;
    for (bool last = false; may_yet(result, now_ms() - begun) && !last;) {
        uint64_t spent = now_ms() - begun, left = milliseconds > spent ? milliseconds - spent : 1;
        last = left <= PART_MS;
        result = still_close(last ? left : PART_MS);
        if (!result) {
            bool well = comms_rest();
            if (well)
                capture_hold(HOLD_AT_CUT, true); /* none is open, none begins until the communicators are there */
            result = still_open();
            result = result || well ? result : CUDA_ERROR_NOT_READY;
        }
        if (result && serve_is_alone()) /* whoever comes next is to be answered */
            return -ECANCELED;
    }
    if (!result)
        clock_stop(); /* not before: what the device waits for may look at it */
    return result;
}

int32_t cut_close(const uint64_t *numbers, size_t n, uint64_t milliseconds)
{
    struct numbers *these = malloc(sizeof *these + n * sizeof numbers[0]);

    if (!these)
        return -ENOMEM;
    these->n = n;
    memcpy(these->number, numbers, n * sizeof numbers[0]);
    if (comms_phase() != PHASE_SHUT || still_state() != STATE_OPEN) {
        free(these);
        return -EINVAL;
    }
    comms_lock();
    for (size_t i = 0; i < n; i++) { /* whoever looks before the thread has come to it is to know that it will be */
        struct comm *comm = by_number(numbers[i]);
        if (comm && atomic_load(&comm->real))
            comm->closed = true;
    }
    comms_unlock();
    return within(milliseconds, close_these, these, true);
}

/* The same as the last time, where that has come to nothing: some rank may wait in it for the others. */
bool tell_unique_ids(int client, struct message *answer, const uint64_t *numbers, size_t n)
{
    static struct nccl_unique_id ids[PROTOCOL_MOST];
    size_t some = n < PROTOCOL_MOST ? n : PROTOCOL_MOST;

    for (size_t i = 0; i < some && !answer->result; i++) {
        struct comm *comm = by_number(numbers[i]);
        if (!comm || !nccl_real(AT_ncclGetUniqueId)) {
            answer->result = -EINVAL;
            break;
        }
        if (!comm->has_new_id && !(answer->result = nccl(ncclGetUniqueId)(&comm->new_id)))
            comm->has_new_id = true;
        ids[i] = comm->new_id;
    }
    answer->a = answer->result ? 0 : some;
    return say(client, answer, ids, answer->a * sizeof ids[0], NULL, 0);
}

struct joins {
    size_t n;
    struct join_record one[];
};

/* A reduction of its own, and buffers that were made known to it. An operator that is not made is none: its old number may be
 * another one's now. */
static int hang_on(struct comm *comm, void *behind)
{
    int result = NCCL_SUCCESS;

    for (struct reduction *one = comm->reductions; one; one = one->next)
        one->real = INT32_MAX;
    for (struct registered *one = comm->registered; one && !result; one = one->next)
        result = nccl(ncclCommRegister)(behind, one->buffer, one->bytes, &one->real);
    for (struct reduction *one = comm->reductions; one && !result; one = one->next)
        result = nccl(ncclRedOpCreatePreMulSum)(&one->real,
                                                one->residence == NCCL_HOST_SCALAR ? one->value : one->scalar,
                                                one->type, one->residence, behind);
    return result;
}

static int join_these(void *data)
{
    const struct joins *these = data;
    void **made = calloc(these->n ? these->n : 1, sizeof *made);
    int result = made ? NCCL_SUCCESS : NCCL_SYSTEM_ERROR;

    for (size_t from = 0, to; from < these->n && !result; from = to) {
        const struct join_record *first = &these->one[from];
        for (to = from + 1;
             to < these->n && !memcmp(these->one[to].unique_id, first->unique_id, sizeof first->unique_id); to++)
            ;
        /* Several ranks of one communicator are in this process: they are to be made together. */
        if (to - from > 1)
            result = nccl(ncclGroupStart)();
        for (size_t i = from; i < to && !result; i++) {
            struct comm *comm = by_number(these->one[i].number);
            struct nccl_unique_id id;
            if (comm && atomic_load(&comm->real)) /* by what was asked before, or it was never closed */
                comm->closed = false;
            if (!comm || comm->ended || !comm->closed)
                continue;
            memcpy(&id, these->one[i].unique_id, sizeof id);
            if (!comm->context)
                result = (int)real(cuDevicePrimaryCtxRetain)(&comm->context, comm->device < 0 ? 0 : comm->device);
            real(cuCtxSetCurrent)(comm->context);
            if (!result)
                result = nccl(ncclCommInitRankConfig)(&made[i], comm->ranks, id, comm->rank, comm->config);
            if (to - from == 1)
                result = wait_for(made[i], result);
            else
                result = result == NCCL_IN_PROGRESS ? NCCL_SUCCESS : result;
        }
        if (to - from > 1) {
            int ended = nccl(ncclGroupEnd)();
            if (!result && ended != NCCL_IN_PROGRESS)
                result = ended;
            for (size_t i = from; i < to && !result; i++)
                result = made[i] ? wait_for(made[i], NCCL_IN_PROGRESS) : NCCL_SUCCESS;
        }
        for (size_t i = from; i < to; i++) {
            struct comm *comm = by_number(these->one[i].number);
            if (!comm || !made[i])
                continue;
            comm->has_new_id = comm->has_new_id && result; /* another id, or its peers would wait in this one */
            result = result ? result : hang_on(comm, made[i]);
            comms_lock();
            bool wanted = !result && !comm->ended;
            if (wanted) {
                atomic_store(&comm->real, made[i]);
                comm->closed = false;
                comm->made_again++;
            }
            comms_unlock();
            if (!wanted)
                give_up(made[i]);
        }
    }
    free(made);
    return result;
}

int32_t cut_join(const struct join_record *records, size_t n, uint64_t milliseconds)
{
    if (!nccl_real(AT_ncclGroupStart) || !nccl_real(AT_ncclGroupEnd) || !nccl_real(AT_ncclCommInitRankConfig))
        return -EINVAL; /* there is no libnccl, or an old one */
    struct joins *these = malloc(sizeof *these + n * sizeof records[0]);

    if (!these)
        return -ENOMEM;
    these->n = n;
    memcpy(these->one, records, n * sizeof records[0]);
    return within(milliseconds, join_these, these, false);
}

/* A child has no such thread. */
void cut_in_child(void)
{
    atomic_store(&under_way, NULL);
}

/* While something is being closed nobody may come to it. */
int32_t cut_open(void)
{
    const struct job *job = atomic_load(&under_way);

    if (job && job->closes && !atomic_load(&job->over))
        return -EBUSY;
    clock_go(); /* before anybody goes on */
    comms_open();
    capture_hold(HOLD_AT_CUT, false);
    return 0;
}
