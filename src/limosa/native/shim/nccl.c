/* NCCL's functions as the application calls them: each passes the gate of comms.c, and finds the real communicator behind the
 * application's handle. What a group has is kept until its end, which passes the gate as one call.
 *
 * libnccl calls its own exported functions, too, and so comes through here: it is let through as it is. */
#include "nccl.h"
#include "capture.h"
#include "clock.h"
#include "comms.h"
#include "compiler.h"
#include "driver.h"
#include "find.h"
#include "gate.h"
#include "hooks.h"
#include "nccl_api.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#define WORDS 12
typedef uint64_t word;
typedef word call12(word, word, word, word, word, word, word, word, word, word, word, word);
struct two {
    word first, second; /* as a result comes: an int, or a team, which is three of them */
};
typedef struct two call12_two(word, word, word, word, word, word, word, word, word, word, word, word);

typedef CUresult is_capturing_type(void *, int *);

enum what { COLLECTIVE, SEND, RECEIVE, CONFIG, QUERY, OWN, PASS, STRANGE };

static struct call {
    const char *symbol;
    void *_Atomic real;
    void *hook; /* NULL: PASS */
    enum what what;
    signed char comm, op;
} calls[NCCL_LISTED];

/* ---- the way to the real library ---- */

static _Atomic uintptr_t own_begin, own_end; /* where libnccl lies */

static void *libnccl(void)
{
    static void *_Atomic library;
    void *handle = atomic_load(&library);

    if (!handle && (handle = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD)))
        atomic_store(&library, handle);
    return handle;
}

static void *look_up(struct call *call)
{
    void *handle = libnccl();
    void *real = handle ? find_in(handle, call->symbol) : NULL;
    if (real && !atomic_load(&own_end)) {
        struct span span = {0};
        find_span(real, &span);
        atomic_store(&own_begin, span.begin);
        atomic_store(&own_end, span.end);
    }
    if (real)
        atomic_store(&call->real, real);
    return real;
}

void *nccl_real(int place)
{
    void *real = atomic_load_explicit(&calls[place].real, memory_order_relaxed);

    return UNLIKELY(!real) ? look_up(&calls[place]) : real;
}

bool nccl_is_own(const void *address)
{
    uintptr_t at = (uintptr_t)address;

    return at >= atomic_load_explicit(&own_begin, memory_order_relaxed)
        && at < atomic_load_explicit(&own_end, memory_order_relaxed);
}

/* Unless `LIMOSA_SHIM_WITHOUT=ranks` is in the environment: then every call is passed on as it is. */
bool nccl_switched_on(void)
{
    static _Atomic signed char on;
    signed char now = atomic_load_explicit(&on, memory_order_relaxed);

    if (UNLIKELY(!now)) {
        const char *words = secure_getenv("LIMOSA_SHIM_WITHOUT");
        now = words && strstr(words, "ranks") ? -1 : 1;
        atomic_store_explicit(&on, now, memory_order_relaxed);
    }
    return now > 0;
}
#define FROM_NCCL (!nccl_switched_on() || nccl_is_own(__builtin_return_address(0)))

static void *newer_instead(const char *symbol, void *found);

static int listed(const char *symbol)
{
    int at = 0;

    while (at < NCCL_LISTED && strcmp(calls[at].symbol, symbol) != 0)
        at++;
    return at;
}

bool nccl_names(const char *symbol)
{
    const char *rest = find_past(symbol + (*symbol == 'p'), "nccl");

    return rest && *rest >= 'A' && *rest <= 'Z';
}

void *nccl_instead(const char *symbol, void *found)
{
    int at = listed(symbol + (*symbol == 'p')); /* the profilers' name is the same function's */

    if (at == NCCL_LISTED)
        return newer_instead(symbol, found);
    void *hook = calls[at].hook;
    if (!hook)
        return found;
    if (found == hook) /* the whole program was searched, and we were found first */
        return nccl_real(at) ? hook : NULL;
    return nccl_real(at) == found && nccl_switched_on() ? hook : found;
}

/* A program may come here first, before it has called the driver. */
static CUcontext current(void)
{
    CUcontext context = NULL;

    if (real(cuCtxGetCurrent))
        real(cuCtxGetCurrent)(&context);
    return context;
}

static void make_current(CUcontext context)
{
    if (real(cuCtxSetCurrent))
        real(cuCtxSetCurrent)(context);
}

/* ---- groups ---- */

struct step {
    struct call *call;
    struct comm *comm;
    CUcontext context;
    int (*replay)(struct step *step); /* NULL: an operation, by its words */
    void *more; /* of replay's: freed with it */
    word words[WORDS];
};

static TLS struct group {
    int depth;
    size_t n, room;
    struct step *steps;
    struct reduction *done; /* operators that were destroyed, and are yet to be used */
} group;

static struct step *later(struct call *call, struct comm *comm)
{
    if (group.n == group.room) {
        size_t room = group.room ? 2 * group.room : 16;
        struct step *more = realloc(group.steps, room * sizeof *more);
        if (!more)
            return NULL;
        group.steps = more;
        group.room = room;
    }
    struct step *step = &group.steps[group.n++];
    memset(step, 0, sizeof *step);
    step->call = call;
    step->comm = comm;
    step->context = current();
    return step;
}

/* ---- operations ---- */

static int translated(const struct comm *comm, int number)
{
    if (number >= NCCL_OPERATIONS)
        for (const struct reduction *one = comm->reductions; one; one = one->next)
            if (one->number == number)
                return one->real;
    return number;
}

/* The stream is the last argument of an operation, behind the communicator. */
static bool captures(void *stream)
{
    int status = 0;

    if (!capture_any())
        return false;
    is_capturing_type *ask = (is_capturing_type *)entry_real(AT_cuStreamIsCapturing);
    return ask && !ask(stream, &status) && status;
}

static int by_words(struct step *step)
{
    struct call *call = step->call;
    struct comm *comm = step->comm;
    word *w = step->words;
    void *behind = atomic_load(&comm->real);

    if (UNLIKELY(!behind))
        return NCCL_REMOTE_ERROR; /* it could not be made again: a peer has left */
    w[call->comm] = (word)(uintptr_t)behind;
    if (call->op >= 0 && (call->what == COLLECTIVE || call->what == CONFIG)
        && UNLIKELY((int)w[call->op] >= NCCL_OPERATIONS))
        w[call->op] = (word)translated(comm, (int)w[call->op]);
    bool captured = captures((void *)(uintptr_t)w[call->comm + 1]);
    int result = (int)((call12 *)nccl_real((int)(call - calls)))(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8],
                                                                 w[9], w[10], w[11]);
    if (captured && (result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS))
        atomic_fetch_add(&comm->captured, 1);
    return result;
}

static struct counted counted(const struct step *step)
{
    const struct call *call = step->call;
    enum count_kind kind = COUNT_COLLECTIVE;

    if (call->what == SEND || call->what == RECEIVE)
        kind = call->what == SEND ? COUNT_SEND : COUNT_RECEIVE;
    return (struct counted){step->comm, kind, kind == COUNT_COLLECTIVE ? -1 : (int)step->words[call->op]};
}

/* What is captured is not in flight: it is not counted. And a capture has to come to its end before anything is closed: it
 * is not held up at the gate. Whether it was closed meanwhile is looked at behind the gate (by_words). False: not counted. */
static bool enter(const struct step *steps, size_t n, const struct counted *counts, size_t n_counts)
{
    bool captured = false;

    for (size_t i = 0; i < n && !captured && capture_any(); i++)
        captured = !steps[i].replay && captures((void *)(uintptr_t)steps[i].words[steps[i].call->comm + 1]);
    if (!captured)
        comms_enter(counts, n_counts);
    else
        while (!comms_enter_uncounted(true))
            comms_wait();
    return !captured;
}

static void goes_on_behind(struct comm *comm)
{
    static _Atomic uint64_t which;

    atomic_store(&comm->busy, atomic_fetch_add(&which, 1) + 1);
}

static void look_for_newer(void);

/* It was counted before, as it may be in flight before the call is back; what was not issued is not to be. */
static bool refused(int result)
{
    return UNLIKELY(result == NCCL_INVALID_ARGUMENT || result == NCCL_INVALID_USAGE);
}

/* One call, or one of a group that is not at its end yet. */
static int issue(struct step *step)
{
    if (group.depth) {
        struct step *kept = later(step->call, step->comm);
        if (!kept) {
            free(step->more);
            return NCCL_SYSTEM_ERROR;
        }
        kept->replay = step->replay;
        kept->more = step->more;
        memcpy(kept->words, step->words, sizeof step->words);
        return NCCL_SUCCESS;
    }
    struct counted what = counted(step);
    bool counts = enter(step, 1, &what, 1);
    int result = step->replay ? step->replay(step) : by_words(step);
    if (result == NCCL_IN_PROGRESS)
        goes_on_behind(step->comm);
    else if (counts && refused(result))
        comms_uncount(&what, 1);
    if (step->more)
        look_for_newer();
    comms_leave();
    if (step->more)
        free(step->more);
    return result;
}

static word operation(int place, const void *caller, struct step *step)
{
    struct call *call = step->call;
    const word *w = step->words;
    void *real = nccl_real(place);

    if (UNLIKELY(!real))
        return NCCL_SYSTEM_ERROR;
    if (UNLIKELY(nccl_is_own(caller)) || !(step->comm = comms_find((void *)(uintptr_t)w[call->comm])))
        return ((call12 *)real)(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11]);
    if (call->what == CONFIG && group.depth) /* what is behind the pointer may be gone at the group's end */
        atomic_store(&step->comm->strange, call->symbol);
    return (word)issue(step);
}

static void asked(const struct call *call)
{
    if (call->what == STRANGE)
        comms_leave();
    else
        comms_asked();
}

/* Not counted: nothing of it is in flight between ranks. */
static struct two question(int place, const void *caller, struct step *step)
{
    struct call *call = step->call;
    void *real = nccl_real(place);
    word *mine = step->words;

    if (UNLIKELY(!real))
        return (struct two){NCCL_SYSTEM_ERROR, 0};
    struct comm *comm = nccl_is_own(caller) ? NULL : comms_find((void *)(uintptr_t)mine[call->comm]);
    if (comm) {
        if (call->what == STRANGE)
            atomic_store(&comm->strange, call->symbol);
        while (call->what == STRANGE ? !comms_enter_uncounted(false) : !comms_ask())
            comms_wait();
        mine[call->comm] = (word)(uintptr_t)atomic_load(&comm->real);
        if (!mine[call->comm]) {
            asked(call);
            return (struct two){NCCL_REMOTE_ERROR, 0};
        }
    }
    struct two result = ((call12_two *)real)(mine[0], mine[1], mine[2], mine[3], mine[4], mine[5], mine[6], mine[7],
                                             mine[8], mine[9], mine[10], mine[11]);
    if (comm)
        asked(call);
    return result;
}

#define TWELVE word a, word b, word c, word d, word e, word f, word g, word h, word i, word j, word k, word l
#define HOOK(symbol, type, how)                                                                                        \
    EXPORT type symbol(TWELVE);                                                                                        \
    type symbol(TWELVE)                                                                                                \
    {                                                                                                                  \
        return how(AT_##symbol, __builtin_return_address(0),                                                           \
                   &(struct step){.call = &calls[AT_##symbol], .words = {a, b, c, d, e, f, g, h, i, j, k, l}});        \
    }
#define HOOK_COLLECTIVE(symbol) HOOK(symbol, word, operation)
#define HOOK_SEND(symbol) HOOK(symbol, word, operation)
#define HOOK_RECEIVE(symbol) HOOK(symbol, word, operation)
#define HOOK_CONFIG(symbol) HOOK(symbol, word, operation)
#define HOOK_QUERY(symbol) HOOK(symbol, struct two, question)
#define HOOK_STRANGE(symbol) HOOK(symbol, struct two, question)
#define HOOK_OWN(symbol) EXPORT symbol##_type symbol;
#define HOOK_PASS(symbol)
#define NCCL(symbol, what, comm, op) HOOK_##what(symbol)
#include "../nccl/functions.list"
#undef NCCL

/* ---- functions that are newer than the list ---- */

static const char *_Atomic newer;

const char *nccl_newer(void)
{
    return atomic_load(&newer);
}

#define SPARE 64
static struct spare {
    void *_Atomic real;
    const char *symbol;
} spares[SPARE];
static _Atomic int n_spares;

/* Which of its arguments is a communicator is not known. A word that is one's handle by chance is no argument of it. */
static struct two hand_on(const struct spare *spare, const void *caller, word *w)
{
    call12_two *behind = (call12_two *)atomic_load(&spare->real);
    bool ours = nccl_switched_on() && !nccl_is_own(caller);

    if (ours) {
        atomic_store(&newer, spare->symbol);
        while (!comms_enter_uncounted(false))
            comms_wait();
        for (int i = 0; i < WORDS; i++) {
            struct comm *comm = comms_find((void *)(uintptr_t)w[i]);
            w[i] = comm ? (word)(uintptr_t)atomic_load(&comm->real) : w[i];
        }
    }
    struct two result = behind(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11]);
    if (ours)
        comms_leave();
    return result;
}

#define SPARE_1(x)                                                                                                     \
    static struct two spare_##x(TWELVE)                                                                                \
    {                                                                                                                  \
        return hand_on(&spares[0x##x], __builtin_return_address(0),                                                    \
                       (word[WORDS]){a, b, c, d, e, f, g, h, i, j, k, l});                                             \
    }
/* clang-format off */
#define SPARE_16(x)                                                                                                    \
    SPARE_1(x##0) SPARE_1(x##1) SPARE_1(x##2) SPARE_1(x##3) SPARE_1(x##4) SPARE_1(x##5) SPARE_1(x##6) SPARE_1(x##7)    \
        SPARE_1(x##8) SPARE_1(x##9) SPARE_1(x##a) SPARE_1(x##b) SPARE_1(x##c) SPARE_1(x##d) SPARE_1(x##e)              \
            SPARE_1(x##f)
SPARE_16(0) SPARE_16(1) SPARE_16(2) SPARE_16(3)

#define HOOK_16(x)                                                                                                     \
    spare_##x##0, spare_##x##1, spare_##x##2, spare_##x##3, spare_##x##4, spare_##x##5, spare_##x##6, spare_##x##7,    \
        spare_##x##8, spare_##x##9, spare_##x##a, spare_##x##b, spare_##x##c, spare_##x##d, spare_##x##e, spare_##x##f
static call12_two *const spare_hooks[SPARE] = {HOOK_16(0), HOOK_16(1), HOOK_16(2), HOOK_16(3)};
/* clang-format on */

/* What has no hook any more counts as called. */
static void *newer_instead(const char *symbol, void *found)
{
    int place = 0;

    if (!nccl_switched_on() || !nccl_real(AT_ncclGetVersion) || !nccl_is_own(found))
        return found;
    char *copy = strdup(symbol); /* before: another thread may fork in the allocator */
    if (!copy)
        return found;
    comms_lock();
    int known = atomic_load(&n_spares);
    while (place < known && atomic_load(&spares[place].real) != found)
        place++;
    if (place == known && known < SPARE) {
        spares[known].symbol = copy;
        copy = NULL;
        atomic_store(&spares[known].real, found);
        atomic_store(&n_spares, known + 1);
    }
    comms_unlock();
    if (place == SPARE) {
        atomic_store(&newer, copy);
        return found;
    }
    free(copy);
    return (void *)spare_hooks[place];
}

struct linked_names {
    size_t n;
    char name[16][64];
};

static bool keep_name(const char *symbol, void *data)
{
    struct linked_names *found = data;

    if (nccl_names(symbol) && listed(symbol) == NCCL_LISTED && strlen(symbol) < sizeof found->name[0])
        memcpy(found->name[found->n++], symbol, strlen(symbol) + 1);
    return found->n < sizeof found->name / sizeof found->name[0];
}

/* A call by a symbol of a name that the list does not have does not come through here. So to be linked with it is to have
 * called it. Not by the shim's own thread: it waits for the loader. */
static void look_for_newer(void)
{
    struct linked_names found = {0};

    if (!find_linked(keep_name, &found))
        return;
    for (size_t i = 0; i < found.n && !atomic_load(&newer); i++)
        if (find_in(libnccl(), found.name[i]))
            atomic_store(&newer, strdup(found.name[i]));
}

/* ---- groups, as the application sees them ---- */

EXPORT int ncclGroupStart(void)
{
    if (FROM_NCCL)
        return nccl(ncclGroupStart)();
    if (!nccl_real(AT_ncclGroupStart))
        return NCCL_SYSTEM_ERROR;
    group.depth++;
    return NCCL_SUCCESS;
}

static int destroy_reduction(struct reduction *one);

static void forget_group(void)
{
    for (size_t i = 0; i < group.n; i++)
        free(group.steps[i].more);
    group.n = 0;
    while (group.done) {
        struct reduction *next = group.done->later;
        destroy_reduction(group.done);
        group.done = next;
    }
}

/* All of it, between a start and an end of the real ones. */
static int replay_group(void)
{
    CUcontext before, now;
    int result = nccl(ncclGroupStart)(), failed = NCCL_SUCCESS;

    now = before = current();
    for (size_t i = 0; !result && i < group.n && !failed; i++) {
        struct step *step = &group.steps[i];
        if (step->context && step->context != now) {
            make_current(step->context);
            now = step->context;
        }
        failed = step->replay ? step->replay(step) : by_words(step);
        failed = failed == NCCL_IN_PROGRESS ? NCCL_SUCCESS : failed;
    }
    if (now != before)
        make_current(before);
    return failed ? failed : result;
}

static void group_ended(int result);

/* `failed`: a step of it, which may be ours and not NCCL's. */
static int end_group(int failed, int result)
{
    bool makes = false;

    for (size_t i = 0; i < group.n; i++) {
        makes = makes || group.steps[i].more;
        if (result == NCCL_IN_PROGRESS && group.steps[i].comm)
            goes_on_behind(group.steps[i].comm);
    }
    if (makes) {
        group_ended(result);
        look_for_newer();
    }
    return failed ? failed : result;
}

static bool blocks(const struct comm *comm);

/* Steps of it that count: all, but of a group that is only simulated those alone that NCCL issues even so, as it does where
 * communicators do not block. */
static bool group_counts(const struct step *step, bool simulated)
{
    return step->comm && (!simulated || !blocks(step->comm));
}

static int end_all(bool simulated, void *information)
{
    if (--group.depth)
        return NCCL_SUCCESS;
    if (!group.n && !simulated)
        return NCCL_SUCCESS;
    struct counted few[32], *all = group.n <= 32 ? few : malloc(group.n * sizeof *all);
    size_t n = 0;
    if (!all) {
        forget_group();
        return NCCL_SYSTEM_ERROR;
    }
    for (size_t i = 0; i < group.n; i++)
        if (group_counts(&group.steps[i], simulated))
            all[n++] = counted(&group.steps[i]);
    bool counts = n && enter(group.steps, group.n, all, n);
    if (!n)
        while (!comms_enter_uncounted(false))
            comms_wait();
    int failed = replay_group(), ended = simulated ? nccl(ncclGroupSimulateEnd)(information) : nccl(ncclGroupEnd)();
    int result = end_group(failed, ended);
    if (counts && refused(result))
        comms_uncount(all, n);
    comms_leave();
    forget_group();
    if (all != few)
        free(all);
    return result;
}

EXPORT int ncclGroupEnd(void)
{
    if (FROM_NCCL)
        return nccl(ncclGroupEnd)();
    if (!nccl_real(AT_ncclGroupEnd))
        return NCCL_SYSTEM_ERROR;
    return group.depth ? end_all(false, NULL) : NCCL_INVALID_USAGE;
}

/* What it only simulates is operations, of communicators that block: communicators come all the same. */
EXPORT int ncclGroupSimulateEnd(void *information)
{
    if (FROM_NCCL || !group.depth)
        return nccl_real(AT_ncclGroupSimulateEnd) ? nccl(ncclGroupSimulateEnd)(information) : NCCL_SYSTEM_ERROR;
    return end_all(true, information);
}

/* ---- communicators come ---- */

/* What a split has made is measured before anybody knows of it: its calls are counted by that, and NCCL is to be asked about a
 * communicator by one thread at a time. False: not there yet. */
static bool arrives(struct comm *comm)
{
    while (atomic_exchange(&comm->measuring, true))
        nanosleep(&(struct timespec){0, 20000}, NULL);
    void *behind = atomic_load(&comm->coming);
    if (comm->place && behind && comm->ranks <= 0) {
        comms_sized(comm, behind, nccl(ncclCommCount), nccl(ncclCommUserRank));
        nccl(ncclCommCuDevice)(behind, &comm->device);
    }
    bool over = comms_arrived(comm, behind);
    atomic_store(&comm->measuring, false);
    return over;
}

static void fails(struct comm *comm)
{
    if (arrives(comm))
        comms_failed(comm);
    else
        comms_ended(comm);
}

/* One that was coming may be there; what it is now. */
static void *arrived(struct comm *comm)
{
    if (comm->joining)
        arrives(comm);
    return atomic_load(&comm->real);
}

/* It is ready; with the gate entered, or alone. */
static void settle(struct comm *comm)
{
    void *behind = arrived(comm);

    if (!behind || !comm->joining || comm->ranks <= 0)
        return;
    if (!comm->parent)
        nccl(ncclCommCuDevice)(behind, &comm->device);
    comms_came(comm);
}

/* What was begun on it when it was asked has come to its end; what was to come from it is there, or has failed. Whether it has
 * come itself its parent tells: NCCL says SUCCESS of one that has failed. */
static void all_done(struct comm *comm, uint64_t begun, int result)
{
    atomic_compare_exchange_strong(&comm->busy, &begun, 0);
    if (result == NCCL_SUCCESS && !comm->parent)
        settle(comm);
    for (struct comm *child = comms_first(); child; child = child->next)
        if (child->parent != comm || !child->joining)
            continue;
        else if (result == NCCL_SUCCESS)
            settle(child);
        else if (atomic_load(&child->coming)) /* else it may be an error of another call's */
            fails(child);
}

/* SUCCESS where it is none any more. */
static int state_of(void *behind)
{
    int now = NCCL_SUCCESS, failed = behind ? nccl(ncclCommGetAsyncError)(behind, &now) : NCCL_SUCCESS;

    return failed ? failed : now;
}

/* By the shim's own thread, alone. */
void nccl_look(struct comm *comm)
{
    uint64_t begun = atomic_load(&comm->busy);
    void *behind = arrived(comm);
    int now = comm->joining && comm->parent ? state_of(atomic_load(&comm->parent->real)) : NCCL_SUCCESS;

    if (now == NCCL_IN_PROGRESS)
        return;
    if (now != NCCL_SUCCESS) { /* whether it was made its parent tells, and it does not */
        if (behind)
            fails(comm);
        return;
    }
    now = state_of(behind);
    if (now == NCCL_IN_PROGRESS)
        return;
    atomic_compare_exchange_strong(&comm->busy, &begun, 0);
    if (now == NCCL_SUCCESS)
        settle(comm);
}

/* Who looks at nothing but its variable is to see it there, too. */
static void *wait_for_it(void *comm)
{
    gate_exempt();
    capture_leave_alone();
    while (!arrives(comm))
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    return NULL;
}

static void watch(struct comm *comm)
{
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;

    if (arrives(comm))
        return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_create(&thread, &attributes, wait_for_it, comm); /* else whoever asks sees that it is there */
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* A communicator has come, or goes on coming (IN_PROGRESS), or has not: it may have a handle even so, to be aborted. */
static int made(struct comm *comm, void **handle, void *behind, int result)
{
    bool well = result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS;

    if (!comm->context)
        comm->context = current();
    if (!behind) {
        comms_ended(comm);
        if (well)
            *handle = NULL;
        return result;
    }
    *handle = comms_made(comm, behind);
    if (!well)
        fails(comm);
    else if (!result && !group.n)
        settle(comm);
    return result;
}

static int join_now(struct step *step);

static void group_ended(int result)
{
    for (size_t i = 0; i < group.n; i++) {
        struct step *step = &group.steps[i];
        struct comm *comm = step->more ? (struct comm *)(uintptr_t)step->words[0] : NULL;
        if (step->replay == join_now && !comm) /* an earlier one has failed */
            comms_ended(step->comm);
        if (!comm || !comm->joining)
            continue;
        if (step->context && !comm->parent)
            comm->context = step->context;
        if (result == NCCL_SUCCESS)
            settle(comm);
        else if (result == NCCL_IN_PROGRESS)
            watch(comm);
        else
            fails(comm);
    }
}

/* By unique ids: the first one names it. */
struct join {
    void **handle;
    int ranks, rank, n_ids;
    struct nccl_config *config;
    bool scalable, plain;
    struct nccl_unique_id *ids;
};

static int join_now(struct step *step)
{
    struct join *join = step->more;
    void *behind = NULL;
    int result;

    step->words[0] = (word)(uintptr_t)step->comm;
    /* The application's own may be gone at a group's end. */
    struct nccl_config *config = step->comm->config ? step->comm->config : join->config;
    if (join->scalable)
        result = nccl(ncclCommInitRankScalable)(&behind, join->ranks, join->rank, join->n_ids, join->ids, config);
    else if (join->plain)
        result = nccl(ncclCommInitRank)(&behind, join->ranks, join->ids[0], join->rank);
    else
        result = nccl(ncclCommInitRankConfig)(&behind, join->ranks, join->ids[0], join->rank, config);
    return made(step->comm, join->handle, behind, result);
}

static int join(int place, struct join what)
{
    const struct nccl_unique_id *ids = what.ids;
    struct join *join = malloc(sizeof *join + (size_t)what.n_ids * sizeof ids[0]);
    struct comm_id name = comm_id_mix((struct comm_id){1, 1}, ids, sizeof ids[0]);
    struct comm *comm = comms_new(name, what.ranks, what.rank, what.config);

    if (!join || !comm) {
        free(join);
        return NCCL_SYSTEM_ERROR;
    }
    comm->context = current(); /* the thread that finds it made may have none */
    *join = what;
    join->ids = memcpy(join + 1, ids, (size_t)what.n_ids * sizeof ids[0]);
    struct step step = {.call = &calls[place], .comm = comm, .replay = join_now, .more = join};
    return issue(&step);
}

EXPORT int ncclCommInitRankConfig(void **handle, int ranks, struct nccl_unique_id id, int rank,
                                  struct nccl_config *config)
{
    if (FROM_NCCL || !handle || !nccl_real(AT_ncclCommInitRankConfig))
        return nccl_real(AT_ncclCommInitRankConfig) ? nccl(ncclCommInitRankConfig)(handle, ranks, id, rank, config)
                                                    : NCCL_SYSTEM_ERROR;
    return join(AT_ncclCommInitRankConfig, (struct join){handle, ranks, rank, 1, config, false, false, &id});
}

EXPORT int ncclCommInitRank(void **handle, int ranks, struct nccl_unique_id id, int rank)
{
    if (FROM_NCCL || !handle || !nccl_real(AT_ncclCommInitRank))
        return nccl_real(AT_ncclCommInitRank) ? nccl(ncclCommInitRank)(handle, ranks, id, rank) : NCCL_SYSTEM_ERROR;
    return join(AT_ncclCommInitRank, (struct join){handle, ranks, rank, 1, NULL, false, true, &id});
}

EXPORT int ncclCommInitRankScalable(void **handle, int ranks, int rank, int n_ids, struct nccl_unique_id *ids,
                                    struct nccl_config *config)
{
    if (FROM_NCCL || !handle || !ids || n_ids < 1 || !nccl_real(AT_ncclCommInitRankScalable))
        return nccl_real(AT_ncclCommInitRankScalable)
            ? nccl(ncclCommInitRankScalable)(handle, ranks, rank, n_ids, ids, config)
            : NCCL_SYSTEM_ERROR;
    return join(AT_ncclCommInitRankScalable, (struct join){handle, ranks, rank, n_ids, config, true, false, ids});
}

/* All ranks are in this process: nothing between processes is to be closed. */
EXPORT int ncclCommInitAll(void **handles, int n, const int *devices)
{
    struct nccl_unique_id id;

    if (!nccl_real(AT_ncclCommInitAll))
        return NCCL_SYSTEM_ERROR;
    if (FROM_NCCL || !handles)
        return nccl(ncclCommInitAll)(handles, n, devices);
    while (!comms_enter_uncounted(false))
        comms_wait();
    int result = nccl(ncclCommInitAll)(handles, n, devices);
    if (!result)
        while (getrandom(&id, sizeof id, 0) != sizeof id)
            ;
    for (int rank = 0; rank < n && !result; rank++) {
        struct comm *comm = comms_new(comm_id_mix((struct comm_id){2, 2}, &id, sizeof id), n, rank, NULL);
        if (comm) {
            handles[rank] = comms_made(comm, handles[rank]);
            settle(comm);
        } else {
            result = NCCL_SYSTEM_ERROR;
        }
    }
    look_for_newer();
    comms_leave();
    return result;
}

/* As NCCL sees it. */
static bool blocks(const struct comm *comm)
{
    const char *word = secure_getenv("NCCL_COMM_BLOCKING");

    if (word && (*word == '0' || *word == '1') && !word[1])
        return *word == '1';
    return !comm->config || comm->config->blocking != 0;
}

/* NCCL says SUCCESS of a split that goes on behind the call, too. Whether it does is not asked: another thread may ask just
 * now, and NCCL is for one at a time. As long as it does its parent takes nothing else. */
static int come_from(struct comm *parent, struct comm *comm, struct step *step, void **handle, int result)
{
    comms_lock();
    comm->context = parent->context;
    comm->parent = parent;
    comm->place = handle;
    comms_unlock();
    step->words[0] = (word)(uintptr_t)comm;
    if (result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS) {
        fails(comm);
    } else if (!group.n) { /* else not before its end */
        if (blocks(parent) && atomic_load(&comm->coming)) {
            settle(comm);
        } else {
            goes_on_behind(parent);
            watch(comm);
        }
    }
    return result;
}

struct split {
    void **handle;
    int color, key;
    struct nccl_config *config;
};

static int split_now(struct step *step)
{
    struct split *split = step->more;
    struct comm *parent = step->comm;
    uint64_t nth = parent->children;
    struct comm_id id = comm_id_mix(comm_id_mix(parent->id, &nth, sizeof nth), &split->color, sizeof split->color);
    struct comm *comm = comms_new(id, 0, -1, split->config ? split->config : parent->config);
    void *from = atomic_load(&parent->real);

    *split->handle = NULL;
    if (!comm)
        return NCCL_SYSTEM_ERROR;
    int result = from ? nccl(ncclCommSplit)(from, split->color, split->key, (void **)&comm->coming, split->config)
                      : NCCL_REMOTE_ERROR;
    if (result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS) /* else others may not know of it */
        parent->children++;
    if (split->color != NCCL_NO_COLOR)
        return come_from(parent, comm, step, split->handle, result);
    comms_ended(comm);
    if (!group.n && !blocks(parent))
        goes_on_behind(parent);
    return result;
}

EXPORT int ncclCommSplit(void *handle, int color, int key, void **new, struct nccl_config *config)
{
    struct step step = {.call = &calls[AT_ncclCommSplit], .replay = split_now};

    if (!nccl_real(AT_ncclCommSplit))
        return NCCL_SYSTEM_ERROR;
    if (FROM_NCCL || !new || !(step.comm = comms_find(handle)))
        return nccl(ncclCommSplit)(handle, color, key, new, config);
    struct split *split = malloc(sizeof *split);
    if (!split)
        return NCCL_SYSTEM_ERROR;
    *split = (struct split){new, color, key, group.depth ? comms_copy(config) : config};
    step.more = split;
    return issue(&step);
}

struct shrink {
    void **handle;
    int *excluded, n, flags;
    struct nccl_config *config;
};

static int shrink_now(struct step *step)
{
    struct shrink *shrink = step->more;
    struct comm *parent = step->comm;
    uint64_t nth = parent->children;
    struct comm_id id = comm_id_mix(comm_id_mix(parent->id, &nth, sizeof nth), "shrink", 6);
    struct comm *comm = comms_new(id, 0, -1, shrink->config ? shrink->config : parent->config);
    void *from = atomic_load(&parent->real);

    *shrink->handle = NULL;
    if (!comm)
        return NCCL_SYSTEM_ERROR;
    int result = from
        ? nccl(ncclCommShrink)(from, shrink->excluded, shrink->n, (void **)&comm->coming, shrink->config, shrink->flags)
        : NCCL_REMOTE_ERROR;
    /* Those who were left out have counted less on it than the others. */
    if (result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS) {
        parent->children++;
        atomic_store(&parent->strange, "ncclCommShrink");
    }
    return come_from(parent, comm, step, shrink->handle, result);
}

EXPORT int ncclCommShrink(void *handle, int *excluded, int n, void **new, struct nccl_config *config, int flags)
{
    struct step step = {.call = &calls[AT_ncclCommShrink], .replay = shrink_now};

    if (!nccl_real(AT_ncclCommShrink))
        return NCCL_SYSTEM_ERROR;
    if (FROM_NCCL || !new || !(step.comm = comms_find(handle)))
        return nccl(ncclCommShrink)(handle, excluded, n, new, config, flags);
    struct shrink *shrink = malloc(sizeof *shrink);
    if (!shrink)
        return NCCL_SYSTEM_ERROR;
    *shrink = (struct shrink){new, excluded, n, flags, config};
    if (group.depth) {
        shrink->config = comms_copy(config);
        shrink->excluded = n > 0 ? malloc((size_t)n * sizeof *excluded) : NULL;
        if (shrink->excluded)
            memcpy(shrink->excluded, excluded, (size_t)n * sizeof *excluded);
    }
    step.more = shrink;
    return issue(&step);
}

/* ---- and go ---- */

static int finalize_now(struct step *step)
{
    void *behind = atomic_load(&step->comm->real);

    return behind ? nccl(ncclCommFinalize)(behind) : NCCL_SUCCESS;
}

EXPORT int ncclCommFinalize(void *handle)
{
    struct step step = {.call = &calls[AT_ncclCommFinalize], .replay = finalize_now};

    if (!nccl_real(AT_ncclCommFinalize))
        return NCCL_SYSTEM_ERROR;
    if (FROM_NCCL || !(step.comm = comms_find(handle)))
        return nccl(ncclCommFinalize)(handle);
    return issue(&step);
}

static int destroy_now(struct step *step)
{
    void *behind = atomic_load(&step->comm->real);
    int now = state_of(behind), result = NCCL_SUCCESS;

    /* As NCCL does, which would then leave the thread in a group: it stays, to be aborted. */
    if (now == NCCL_IN_PROGRESS)
        return NCCL_INVALID_ARGUMENT;
    if (now == NCCL_SUCCESS) {
        comms_ended(step->comm);
        result = behind ? nccl(ncclCommDestroy)(behind) : NCCL_SUCCESS;
    }
    bool failed = now != NCCL_SUCCESS || (result && result != NCCL_IN_PROGRESS);
    for (struct comm *child = comms_first(); child; child = child->next)
        if (child->parent == step->comm && child->joining && (failed || !arrives(child)))
            fails(child); /* it comes no more */
    return now ? now : result;
}

EXPORT int ncclCommDestroy(void *handle)
{
    struct step step = {.call = &calls[AT_ncclCommDestroy], .replay = destroy_now};

    if (!nccl_real(AT_ncclCommDestroy))
        return NCCL_SYSTEM_ERROR;
    if (FROM_NCCL || !(step.comm = comms_find(handle)))
        return nccl(ncclCommDestroy)(handle);
    if (!step.comm->ended)
        return issue(&step);
    if (!atomic_load(&step.comm->real))
        return NCCL_SUCCESS;
    while (!comms_enter_uncounted(false)) /* it has failed: its peers have counted nothing */
        comms_wait();
    int result = destroy_now(&step);
    comms_leave();
    return result;
}

/* Whoever aborts does not wait for anybody, so not at the gate either. */
EXPORT int ncclCommAbort(void *handle)
{
    struct comm *comm;

    if (!nccl_real(AT_ncclCommAbort))
        return NCCL_SYSTEM_ERROR;
    if (FROM_NCCL || !(comm = comms_find(handle)))
        return nccl(ncclCommAbort)(handle);
    bool open = comms_enter_uncounted(false);
    /* One that has failed is not among those that are closed. */
    for (; !open && comm->ended && atomic_load(&comm->real); open = comms_enter_uncounted(false))
        comms_wait();
    void *behind = open ? atomic_load(&comm->real) : NULL;
    for (struct comm *child = comms_first(); behind && child; child = child->next)
        if (child->parent == comm && child->joining) {
            int now = state_of(behind);
            child->doomed = !arrives(child) || (now != NCCL_SUCCESS && now != NCCL_IN_PROGRESS);
        }
    comms_ended(comm);
    int result = behind ? nccl(ncclCommAbort)(behind) : NCCL_SUCCESS;
    for (struct comm *child = comms_first(); behind && child; child = child->next)
        if (child->parent == comm && child->doomed && !child->ended)
            fails(child);
    if (open)
        comms_leave();
    return result;
}

/* ---- questions, which are answered while it is closed, too ---- */

static int ask_int(int place, const void *caller, void *handle, int *answer, size_t known)
{
    typedef int ask(void *, int *);
    struct comm *comm;
    ask *behind = (ask *)nccl_real(place);

    if (!behind)
        return NCCL_SYSTEM_ERROR;
    if (nccl_is_own(caller) || !answer || !(comm = comms_find(handle)))
        return behind(handle, answer);
    if (comm->joining || comm->ended) {
        if (!comms_ask())
            return NCCL_INVALID_USAGE;
        void *real = atomic_load(&comm->real);
        int result = real ? behind(real, answer) : NCCL_INVALID_ARGUMENT;
        comms_asked();
        return result;
    }
    memcpy(answer, (const char *)comm + known, sizeof *answer);
    return NCCL_SUCCESS;
}

EXPORT int ncclCommCount(void *handle, int *answer)
{
    return ask_int(AT_ncclCommCount, __builtin_return_address(0), handle, answer, offsetof(struct comm, ranks));
}

EXPORT int ncclCommUserRank(void *handle, int *answer)
{
    return ask_int(AT_ncclCommUserRank, __builtin_return_address(0), handle, answer, offsetof(struct comm, rank));
}

EXPORT int ncclCommCuDevice(void *handle, int *answer)
{
    return ask_int(AT_ncclCommCuDevice, __builtin_return_address(0), handle, answer, offsetof(struct comm, device));
}

/* The framework's watchdog asks now and then: it sees nothing of a closed gate. */
EXPORT int ncclCommGetAsyncError(void *handle, int *answer)
{
    struct comm *comm;

    if (!nccl_real(AT_ncclCommGetAsyncError))
        return NCCL_SYSTEM_ERROR;
    if (FROM_NCCL || !answer || !(comm = comms_find(handle)))
        return nccl(ncclCommGetAsyncError)(handle, answer);
    clock_watched_by(__builtin_return_address(0));
    *answer = NCCL_SUCCESS;
    if (!comms_ask())
        return NCCL_SUCCESS;
    uint64_t begun = atomic_load(&comm->busy);
    void *behind = arrived(comm);
    int result = behind ? nccl(ncclCommGetAsyncError)(behind, answer) : NCCL_SUCCESS;
    if (!behind && comm->closed)
        *answer = NCCL_REMOTE_ERROR; /* it was closed, and could not be made again */
    else if (!behind && comm->joining)
        *answer = NCCL_IN_PROGRESS;
    if (behind && !result && *answer != NCCL_IN_PROGRESS)
        all_done(comm, begun, *answer);
    comms_asked();
    return result;
}

EXPORT const char *ncclGetLastError(void *handle)
{
    struct comm *comm = FROM_NCCL ? NULL : comms_find(handle);

    if (!nccl_real(AT_ncclGetLastError))
        return "there is no libnccl";
    return nccl(ncclGetLastError)(comm ? NULL : handle);
}

EXPORT int ncclGetUniqueId(struct nccl_unique_id *id)
{
    return nccl_real(AT_ncclGetUniqueId) ? nccl(ncclGetUniqueId)(id) : NCCL_SYSTEM_ERROR;
}

/* ---- what hangs on a communicator ---- */

EXPORT int ncclCommRegister(void *handle, void *buffer, size_t bytes, void **registered)
{
    struct comm *comm;

    if (!nccl_real(AT_ncclCommRegister))
        return NCCL_SYSTEM_ERROR;
    if (FROM_NCCL || !registered || !(comm = comms_find(handle)))
        return nccl(ncclCommRegister)(handle, buffer, bytes, registered);
    struct registered *one = calloc(1, sizeof *one);
    if (!one)
        return NCCL_SYSTEM_ERROR;
    while (!comms_enter_uncounted(false))
        comms_wait();
    one->buffer = buffer;
    one->bytes = bytes;
    void *behind = atomic_load(&comm->real);
    int result = behind ? nccl(ncclCommRegister)(behind, buffer, bytes, &one->real) : NCCL_REMOTE_ERROR;
    comms_lock();
    if (!result && one->real) {
        one->next = comm->registered;
        comm->registered = one;
        *registered = one;
    } else {
        *registered = one->real;
        free(one);
    }
    comms_unlock();
    comms_leave();
    return result;
}

EXPORT int ncclCommDeregister(void *handle, void *registered)
{
    struct comm *comm;

    if (!nccl_real(AT_ncclCommDeregister))
        return NCCL_SYSTEM_ERROR;
    if (FROM_NCCL || !(comm = comms_find(handle)))
        return nccl(ncclCommDeregister)(handle, registered);
    struct registered *one = NULL;
    while (!comms_enter_uncounted(false))
        comms_wait();
    comms_lock();
    for (struct registered **at = &comm->registered; *at; at = &(*at)->next)
        if (*at == registered) {
            one = *at;
            *at = one->next;
            break;
        }
    comms_unlock();
    void *behind = atomic_load(&comm->real);
    int result = behind ? nccl(ncclCommDeregister)(behind, one ? one->real : registered) : NCCL_SUCCESS;
    free(one);
    comms_leave();
    return result;
}

static size_t bytes_of(int type)
{
    static const unsigned char sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

    return type >= 0 && type < (int)sizeof sizes ? sizes[type] : 8;
}

EXPORT int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, void *handle)
{
    struct comm *comm;

    if (!nccl_real(AT_ncclRedOpCreatePreMulSum))
        return NCCL_SYSTEM_ERROR;
    if (FROM_NCCL || !op || !scalar || !(comm = comms_find(handle)))
        return nccl(ncclRedOpCreatePreMulSum)(op, scalar, type, residence, handle);
    struct reduction *one = calloc(1, sizeof *one);
    if (!one)
        return NCCL_SYSTEM_ERROR;
    while (!comms_enter_uncounted(false))
        comms_wait();
    void *behind = atomic_load(&comm->real);
    int result = behind ? nccl(ncclRedOpCreatePreMulSum)(&one->real, scalar, type, residence, behind)
                        : NCCL_REMOTE_ERROR;
    if (result) {
        free(one);
        comms_leave();
        return result;
    }
    one->comm = comm;
    one->type = type;
    one->residence = residence;
    one->scalar = scalar;
    if (residence == NCCL_HOST_SCALAR)
        memcpy(one->value, scalar, bytes_of(type));
    comms_lock();
    one->number = one->real;
    for (const struct reduction *other = comm->reductions; other; other = other->next)
        if (other->number >= one->number) /* one that is in use by a number from before a move */
            one->number = other->number + 1;
    one->next = comm->reductions;
    comm->reductions = one;
    *op = one->number;
    comms_unlock();
    comms_leave();
    return result;
}

static int destroy_reduction(struct reduction *one)
{
    struct comm *comm = one->comm;

    comms_lock();
    for (struct reduction **at = &comm->reductions; *at; at = &(*at)->next)
        if (*at == one) {
            *at = one->next;
            break;
        }
    comms_unlock();
    void *behind = atomic_load(&comm->real);
    int result = behind ? nccl(ncclRedOpDestroy)(one->real, behind) : NCCL_SUCCESS;
    free(one);
    return result;
}

EXPORT int ncclRedOpDestroy(int op, void *handle)
{
    struct comm *comm;
    int result;

    if (!nccl_real(AT_ncclRedOpDestroy))
        return NCCL_SYSTEM_ERROR;
    if (FROM_NCCL || !(comm = comms_find(handle)))
        return nccl(ncclRedOpDestroy)(op, handle);
    while (!comms_enter_uncounted(false))
        comms_wait();
    comms_lock();
    struct reduction *one = comm->reductions;
    while (one && one->number != op)
        one = one->next;
    comms_unlock();
    void *behind = atomic_load(&comm->real);
    if (one && group.depth && group.n) { /* what the group has may use it */
        one->later = group.done;
        group.done = one;
        result = NCCL_SUCCESS;
    } else if (one) {
        result = destroy_reduction(one);
    } else {
        result = behind ? nccl(ncclRedOpDestroy)(op, behind) : NCCL_SUCCESS;
    }
    comms_leave();
    return result;
}

static _Atomic unsigned memories;

unsigned nccl_memories(void)
{
    return atomic_load(&memories);
}

EXPORT int ncclMemAlloc(void **pointer, size_t bytes)
{
    int result = nccl_real(AT_ncclMemAlloc) ? nccl(ncclMemAlloc)(pointer, bytes) : NCCL_SYSTEM_ERROR;

    if (!result && !FROM_NCCL)
        atomic_fetch_add(&memories, 1);
    return result;
}

EXPORT int ncclMemFree(void *pointer)
{
    int result = nccl_real(AT_ncclMemFree) ? nccl(ncclMemFree)(pointer) : NCCL_SYSTEM_ERROR;

    if (!result && !FROM_NCCL && pointer && atomic_load(&memories))
        atomic_fetch_sub(&memories, 1);
    return result;
}

#define OF_COLLECTIVE(symbol) (void *)(symbol)
#define OF_SEND(symbol) (void *)(symbol)
#define OF_RECEIVE(symbol) (void *)(symbol)
#define OF_CONFIG(symbol) (void *)(symbol)
#define OF_QUERY(symbol) (void *)(symbol)
#define OF_STRANGE(symbol) (void *)(symbol)
#define OF_OWN(symbol) (void *)(symbol)
#define OF_PASS(symbol) NULL
static struct call calls[NCCL_LISTED] = {
#define NCCL(symbol, what, comm, op) {#symbol, NULL, OF_##what(symbol), what, comm, op},
#include "../nccl/functions.list"
#undef NCCL
};
