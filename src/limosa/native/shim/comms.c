#include "comms.h"
#include "compiler.h"
#include "nccl_api.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Held for a few instructions (by the shim's own thread for longer: cut.c), never across a call of NCCL's or the driver's.
 * Whoever finds it taken turns round for a moment, and then sleeps, again and again. A mutex of the C library costs twice
 * as much. */
static _Atomic bool taken;
#define TURNS 200
static struct comm *first, *last;
static uint64_t n_made;

/* Handles, found without a lock: slots are only ever filled. A table that is full is replaced, and kept for those who look
 * at it still. */
struct table {
    size_t room, used;
    struct comm *_Atomic slots[];
};
static struct table *_Atomic table;

static enum gate_phase phase;
static bool resting; /* shut, and no capture goes on */
#define TURNS_ALONE 50
static bool alone; /* the shim's own thread looks at a communicator: whoever comes waits a moment */
static unsigned inside, asking;
static uint64_t changes;
static _Atomic uint32_t moved; /* goes up when somebody who waits has to look again */

/* Who waits at the gate, on their stacks. */
struct waiter {
    struct waiter *next, **before;
    const struct counted *steps;
    size_t n;
    uint32_t thread;
};
static struct waiter *waiters;

/* Limits of communicators that this rank has not begun to make yet. */
#define EARLY_MOST 4096
static struct early {
    struct comm_id id;
    uint64_t limit;
} *early;
static size_t n_early;

static bool same(struct comm_id one, struct comm_id other)
{
    return one.a == other.a && one.b == other.b;
}

struct comm_id comm_id_mix(struct comm_id id, const void *bytes, size_t n)
{
    const unsigned char *byte = bytes;

    for (size_t i = 0; i < n; i++) {
        id.a = (id.a ^ byte[i]) * 0x100000001b3u;
        id.b = (id.b + byte[i] + 1) * 0x9e3779b97f4a7c15u;
        id.b ^= id.b >> 29;
    }
    return id;
}

static size_t place(const void *handle, size_t room)
{
    return (size_t)(((uintptr_t)handle >> 4) * 0x9e3779b97f4a7c15u >> 20) & (room - 1);
}

struct comm *comms_find(const void *handle)
{
    struct table *now = atomic_load_explicit(&table, memory_order_acquire);

    if (!now || !handle)
        return NULL;
    for (size_t i = place(handle, now->room);; i = (i + 1) & (now->room - 1)) {
        struct comm *comm = atomic_load_explicit(&now->slots[i], memory_order_acquire);
        if (!comm || comm->handle == handle)
            return comm;
    }
}

static void put(struct table *into, struct comm *comm)
{
    size_t i = place(comm->handle, into->room);

    while (atomic_load_explicit(&into->slots[i], memory_order_relaxed))
        i = (i + 1) & (into->room - 1);
    atomic_store_explicit(&into->slots[i], comm, memory_order_release);
    into->used++;
}

static bool remember(struct comm *comm)
{
    struct table *now = atomic_load(&table);

    if (!now || 2 * (now->used + 1) > now->room) {
        size_t room = now ? 2 * now->room : 64;
        struct table *bigger = calloc(1, sizeof *bigger + room * sizeof bigger->slots[0]);
        if (!bigger)
            return false;
        bigger->room = room;
        for (size_t i = 0; now && i < now->room; i++)
            if (atomic_load(&now->slots[i]))
                put(bigger, atomic_load(&now->slots[i]));
        put(bigger, comm);
        atomic_store_explicit(&table, bigger, memory_order_release);
        return true;
    }
    put(now, comm);
    return true;
}

struct nccl_config *comms_copy(const struct nccl_config *config)
{
    if (!config || config->size < offsetof(struct nccl_config, net_name) || config->size > 4096)
        return NULL;
    struct nccl_config *copy = calloc(1, config->size > sizeof *copy ? config->size : sizeof *copy);
    if (!copy)
        return NULL;
    memcpy(copy, config, config->size);
    if (copy->net_name)
        copy->net_name = strdup(copy->net_name);
    if (copy->comm_name)
        copy->comm_name = strdup(copy->comm_name);
    return copy;
}

struct comm *comms_new(struct comm_id id, int ranks, int rank, const struct nccl_config *config)
{
    struct comm *comm = calloc(1, sizeof *comm);

    if (!comm)
        return NULL;
    comm->id = id;
    comm->ranks = ranks;
    comm->rank = rank;
    comm->device = -1;
    comm->joining = true;
    comm->config = comms_copy(config);
    if (ranks > 0) {
        comm->sent = calloc((size_t)ranks, sizeof *comm->sent);
        comm->received = calloc((size_t)ranks, sizeof *comm->received);
    }
    comms_lock();
    comm->number = ++n_made;
    for (size_t i = 0; i < n_early; i++)
        if (same(early[i].id, id))
            comm->limit = early[i].limit;
    if (last)
        last->next = comm;
    else
        first = comm;
    last = comm;
    changes++;
    comms_unlock();
    return comm;
}

/* A handle that the application has had before, of a communicator that is no more, is not given out again. The record's own
 * address may be one: libnccl has had that place before. What is drawn is kept, in vain too: so nothing is drawn twice. */
static void **drawn;

static void *new_handle(struct comm *comm, void *real)
{
    void *handle = comms_find(real) ? comm : real;

    while (comms_find(handle)) {
        void **more = malloc(sizeof *more);
        if (!more)
            break;
        *more = drawn;
        handle = drawn = more;
    }
    return handle;
}

/* With the lock held. */
static void *is_there(struct comm *comm, void *real)
{
    atomic_store(&comm->real, real);
    comm->handle = new_handle(comm, real);
    changes++;
    return remember(comm) ? comm->handle : real;
}

void *comms_made(struct comm *comm, void *real)
{
    comms_lock();
    void *handle = is_there(comm, real);
    comms_unlock();
    return handle;
}

bool comms_arrived(struct comm *comm, void *real)
{
    comms_lock();
    if (comm->place && real) {
        __atomic_store_n(comm->place, is_there(comm, real), __ATOMIC_RELEASE);
        comm->place = NULL;
    }
    bool over = !comm->place;
    comms_unlock();
    return over;
}

void comms_ended(struct comm *comm)
{
    comms_lock();
    comm->ended = true;
    comm->joining = false;
    comm->place = NULL;
    atomic_store(&comm->real, NULL);
    changes++;
    comms_unlock();
}

void comms_failed(struct comm *comm)
{
    comms_lock();
    comm->ended = true;
    comm->joining = false;
    changes++;
    comms_unlock();
}

static uint64_t *count_of(const struct counted *step)
{
    const struct comm *comm = step->comm;

    if (step->kind == COUNT_COLLECTIVE || step->peer < 0 || step->peer >= comm->ranks || !comm->sent || !comm->received)
        return &step->comm->collectives;
    return step->kind == COUNT_SEND ? &comm->sent[step->peer].count : &comm->received[step->peer].count;
}

static uint64_t limit_of(const struct counted *step)
{
    const struct comm *comm = step->comm;
    const uint64_t *count = count_of(step);

    if (count == &comm->collectives)
        return comm->limit;
    return ((const struct pair *)(const void *)count)->limit; /* its first member */
}

static void count(const struct counted *steps, size_t n, uint64_t by)
{
    for (size_t i = 0; i < n; i++)
        *count_of(&steps[i]) += by;
}

/* A group is one: all of it, or nothing. */
static bool may(const struct counted *steps, size_t n)
{
    bool well = true;

    if (phase != PHASE_CUT)
        return phase == PHASE_OPEN;
    count(steps, n, 1);
    for (size_t i = 0; i < n && well; i++)
        well = *count_of(&steps[i]) <= limit_of(&steps[i]);
    count(steps, n, (uint64_t)-1);
    return well;
}

static void wait_at_gate(const struct counted *steps, size_t n)
{
    struct waiter me = {
        .next = waiters, .before = &waiters, .steps = steps, .n = n, .thread = (uint32_t)syscall(SYS_gettid)};

    if (waiters)
        waiters->before = &me.next;
    waiters = &me;
    changes++;
    while (!may(steps, n)) {
        uint32_t now = atomic_load(&moved);
        comms_unlock();
        syscall(SYS_futex, &moved, FUTEX_WAIT_PRIVATE, now, NULL, NULL, 0);
        comms_lock();
    }
    *me.before = me.next;
    if (me.next)
        me.next->before = me.before;
}

/* With the lock held, which is let go meanwhile. */
static void let_look(void)
{
    while (UNLIKELY(alone)) {
        comms_unlock();
        syscall(SYS_nanosleep, &(struct timespec){0, 20000}, NULL);
        comms_lock();
    }
}

void comms_enter(const struct counted *steps, size_t n)
{
    comms_lock();
    do {
        let_look();
        if (UNLIKELY(!may(steps, n)))
            wait_at_gate(steps, n);
    } while (UNLIKELY(alone));
    count(steps, n, 1);
    changes++;
    inside++;
    comms_unlock();
}

void comms_uncount(const struct counted *steps, size_t n)
{
    comms_lock();
    count(steps, n, (uint64_t)-1);
    changes++;
    comms_unlock();
}

void comms_leave(void)
{
    comms_lock();
    inside--;
    changes++;
    comms_unlock();
}

bool comms_ask(void)
{
    comms_lock();
    let_look();
    bool open = phase != PHASE_SHUT;
    asking += open;
    comms_unlock();
    return open;
}

void comms_asked(void)
{
    comms_lock();
    asking--;
    comms_unlock();
}

bool comms_enter_uncounted(bool captured)
{
    comms_lock();
    let_look();
    bool open = captured ? !resting : phase != PHASE_SHUT;
    inside += open;
    comms_unlock();
    return open;
}

void comms_wait(void)
{
    uint32_t now = atomic_load(&moved);

    if (phase == PHASE_SHUT)
        syscall(SYS_futex, &moved, FUTEX_WAIT_PRIVATE, now, NULL, NULL, 0);
}

void comms_sized(struct comm *comm, void *real, int (*count)(void *, int *), int (*rank)(void *, int *))
{
    int ranks = 0, mine = -1;

    if (count(real, &ranks) || rank(real, &mine) || ranks < 1)
        return;
    struct pair *sent = calloc((size_t)ranks, sizeof *sent), *received = calloc((size_t)ranks, sizeof *received);
    comms_lock();
    if (comm->ranks > 0) { /* another thread was here first */
        comms_unlock();
        free(sent);
        free(received);
        return;
    }
    comm->sent = sent;
    comm->received = received;
    comm->rank = mine;
    comm->ranks = ranks;
    changes++;
    comms_unlock();
}

void comms_came(struct comm *comm)
{
    comms_lock();
    comm->joining = false;
    changes++;
    comms_unlock();
}

bool comms_alone(void)
{
    for (unsigned turn = 0; turn < TURNS_ALONE; turn++) {
        comms_lock();
        alone = !inside;
        bool may_be = alone, is = alone && !asking;
        comms_unlock();
        if (!may_be || is)
            return is;
        syscall(SYS_nanosleep, &(struct timespec){0, 20000}, NULL); /* who asks is soon done */
    }
    comms_others();
    return false;
}

void comms_others(void)
{
    comms_lock();
    alone = false;
    comms_unlock();
}

enum gate_phase comms_phase(void)
{
    return phase;
}

struct comm *comms_first(void)
{
    return first;
}

/* By the call itself: the thread is not to be cancelled here. */
static __attribute__((noinline)) void wait_for_lock(void)
{
    int before = errno;
    unsigned turns = 0;

    do
        while (atomic_load_explicit(&taken, memory_order_relaxed))
            if (++turns > TURNS)
                syscall(SYS_nanosleep, &(struct timespec){0, 20000}, NULL);
    while (atomic_exchange_explicit(&taken, true, memory_order_acquire));
    errno = before;
}

void comms_lock(void)
{
    if (UNLIKELY(atomic_exchange_explicit(&taken, true, memory_order_acquire)))
        wait_for_lock();
}

void comms_unlock(void)
{
    atomic_store_explicit(&taken, false, memory_order_release);
}

uint64_t comms_changes(void)
{
    return changes;
}

unsigned comms_inside(void)
{
    return inside;
}

size_t comms_wants(struct want *found, size_t most)
{
    size_t n = 0;

    for (const struct waiter *waiter = waiters; waiter; waiter = waiter->next) {
        count(waiter->steps, waiter->n, 1);
        for (size_t i = 0; i < waiter->n && n < most; i++) {
            const struct counted *step = &waiter->steps[i];
            bool paired = count_of(step) != &step->comm->collectives;
            found[n++] = (struct want){step->comm->id,
                                       *count_of(step),
                                       paired ? step->kind : COUNT_COLLECTIVE,
                                       paired ? (uint32_t)step->peer : 0,
                                       waiter->thread,
                                       (uint32_t)(step->comm->rank + 1)};
        }
        count(waiter->steps, waiter->n, (uint64_t)-1);
    }
    return n;
}

static void look_again(void)
{
    atomic_fetch_add(&moved, 1);
    syscall(SYS_futex, &moved, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
}

void comms_cut(void)
{
    comms_lock();
    if (phase == PHASE_OPEN) {
        for (struct comm *comm = first; comm; comm = comm->next) {
            comm->limit = comm->collectives;
            for (int peer = 0; comm->sent && comm->received && peer < comm->ranks; peer++) {
                comm->sent[peer].limit = comm->sent[peer].count;
                comm->received[peer].limit = comm->received[peer].count;
            }
        }
        n_early = 0;
        phase = PHASE_CUT;
    }
    comms_unlock();
}

static void raise_to(uint64_t *limit, uint64_t to)
{
    if (*limit < to)
        *limit = to;
}

void comms_limit(struct comm_id id, uint32_t kind, int rank, uint32_t peer, uint64_t limit)
{
    bool known = false;

    comms_lock();
    for (struct comm *comm = first; comm; comm = comm->next) {
        if (!same(comm->id, id) || comm->ended)
            continue;
        known = true;
        if (kind == COUNT_COLLECTIVE)
            raise_to(&comm->limit, limit);
        else if (comm->sent && comm->received && peer < (uint32_t)comm->ranks && (rank < 0 || rank == comm->rank))
            raise_to(kind == COUNT_SEND ? &comm->sent[peer].limit : &comm->received[peer].limit, limit);
    }
    for (size_t i = 0; i < n_early && !known; i++)
        if (same(early[i].id, id) && kind == COUNT_COLLECTIVE) {
            known = true;
            raise_to(&early[i].limit, limit);
        }
    if (!known && kind == COUNT_COLLECTIVE && n_early < EARLY_MOST) {
        struct early *more = realloc(early, (n_early + 1) * sizeof *early);
        if (more) {
            early = more;
            early[n_early++] = (struct early){id, limit};
        }
    }
    comms_unlock();
    look_again();
}

bool comms_shut(void)
{
    comms_lock();
    if (phase == PHASE_CUT && !inside)
        phase = PHASE_SHUT; /* from here on nobody begins to ask */
    bool well = phase == PHASE_SHUT && !inside && !asking;
    comms_unlock();
    return well;
}

bool comms_rest(void)
{
    comms_lock();
    bool well = phase == PHASE_SHUT && !inside && !asking;
    resting = resting || well;
    comms_unlock();
    return well;
}

void comms_open(void)
{
    comms_lock();
    phase = PHASE_OPEN;
    resting = false;
    comms_unlock();
    look_again();
}

/* A child has none of it: NCCL does not work in one. */
void comms_in_child(void)
{
    atomic_store(&taken, false);
    phase = PHASE_OPEN;
    resting = false;
    inside = asking = 0;
    waiters = NULL;
    first = last = NULL;
    atomic_store(&table, NULL);
    alone = false;
}
