/* A hook for every function of the driver: pass the gate, call the real one, leave.
 *
 * What a function takes is not known here. All of them take integers, pointers and (cuIpcOpenMemHandle) a structure by
 * value that fits the words below, so handing on all argument registers and as many words of the caller's stack does for
 * any. Floating point registers are not touched: this file is compiled for general registers only. A function that the
 * shim has to know better (OWN in the list) has a definition of its own elsewhere. */
#include "hooks.h"
#include "compiler.h"
#include "driver_api.h"
#include "find.h"
#include "forks.h"
#include "gate.h"
#include "reach.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    const char *symbol, *base; /* cuMemAlloc_v2; what cuGetProcAddress is asked for */
    void *hook;
    void *_Atomic real;
    _Atomic unsigned char called;
    _Atomic unsigned char asked_for;
    unsigned char role;
};

#define SPARE 256 /* functions that are newer than the list */
static struct entry entries[LISTED + SPARE];

/* Nothing is written where it is known already: the line is every thread's. */
static inline void note_call(struct entry *entry)
{
    if (UNLIKELY(!atomic_load_explicit(&entry->called, memory_order_relaxed)))
        atomic_store_explicit(&entry->called, 1, memory_order_relaxed);
}

static void *look_up(struct entry *entry)
{
    void *real = find_in_driver(entry->symbol);

    if (real)
        atomic_store(&entry->real, real);
    return real;
}

static inline void *real_of(struct entry *entry)
{
    void *real = atomic_load(&entry->real);

    return UNLIKELY(!real) ? look_up(entry) : real;
}

typedef uint64_t word;
#define WORDS                                                                                                          \
    word a, word b, word c, word d, word e, word f, word g, word h, word i, word j, word k, word l, word m, word n,    \
        word o, word p
#define PASSED a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p

typedef word function(WORDS);

/* copies is known where it is compiled: what others hand on stays as short as it would be without. */
static inline __attribute__((always_inline)) word hand_on(bool copies, struct entry *entry, WORDS)
{
    function *real = (function *)atomic_load_explicit(&entry->real, memory_order_relaxed);
    if (UNLIKELY(!real) && !(real = (function *)real_of(entry)))
        return CUDA_ERROR_NO_DEVICE;
    note_call(entry);
    struct reader *reader = gate_enter();
    word result = real(PASSED);
    if (copies && UNLIKELY((int)result == CUDA_ERROR_INVALID_VALUE)) {
        const word words[REACH_WORDS] = {a, b, c, d, e, f};
        if (reach(entry->base, words))
            result = real(PASSED);
    }
    gate_leave(reader);
    return result;
}

#define HAND_ON(symbol, copies)                                                                                        \
    EXPORT word symbol(WORDS);                                                                                         \
    word symbol(WORDS)                                                                                                 \
    {                                                                                                                  \
        return hand_on(copies, &entries[AT_##symbol], PASSED);                                                         \
    }
#define HOOK_PASS(symbol) HAND_ON(symbol, false)
#define HOOK_COPY(symbol) HAND_ON(symbol, true)
#define HOOK_USES(symbol) HAND_ON(symbol, false)
#define HOOK_HOST(symbol) HAND_ON(symbol, false)
#define HOOK_OLD(symbol) HAND_ON(symbol, false)
#define HOOK_OWN(symbol) extern word symbol(WORDS);
#define FUNCTION(symbol, base, version, per_thread, what) HOOK_##what(symbol)
#include "../driver/functions.list"
#include "newer.list"
#undef FUNCTION

#define SPARE_1(x)                                                                                                     \
    static word spare_##x(WORDS)                                                                                       \
    {                                                                                                                  \
        return hand_on(false, &entries[LISTED + 0x##x], PASSED);                                                       \
    }
/* clang-format off */
#define SPARE_16(x)                                                                                                    \
    SPARE_1(x##0) SPARE_1(x##1) SPARE_1(x##2) SPARE_1(x##3) SPARE_1(x##4) SPARE_1(x##5) SPARE_1(x##6) SPARE_1(x##7)    \
        SPARE_1(x##8) SPARE_1(x##9) SPARE_1(x##a) SPARE_1(x##b) SPARE_1(x##c) SPARE_1(x##d) SPARE_1(x##e)              \
            SPARE_1(x##f)
SPARE_16(0) SPARE_16(1) SPARE_16(2) SPARE_16(3) SPARE_16(4) SPARE_16(5) SPARE_16(6) SPARE_16(7) SPARE_16(8) SPARE_16(9)
SPARE_16(a) SPARE_16(b) SPARE_16(c) SPARE_16(d) SPARE_16(e) SPARE_16(f)
/* clang-format on */

#define HOOK_1(x) {.hook = (void *)(spare_##x)},
/* clang-format off */
#define HOOK_16(x)                                                                                                     \
    HOOK_1(x##0) HOOK_1(x##1) HOOK_1(x##2) HOOK_1(x##3) HOOK_1(x##4) HOOK_1(x##5) HOOK_1(x##6) HOOK_1(x##7)            \
        HOOK_1(x##8) HOOK_1(x##9) HOOK_1(x##a) HOOK_1(x##b) HOOK_1(x##c) HOOK_1(x##d) HOOK_1(x##e) HOOK_1(x##f)
static struct entry entries[LISTED + SPARE] = {
#define FUNCTION(symbol, base, version, per_thread, what) {#symbol, #base, (void *)(symbol), .role = ROLE_##what},
#include "../driver/functions.list"
#include "newer.list"
#undef FUNCTION
    HOOK_16(0) HOOK_16(1) HOOK_16(2) HOOK_16(3) HOOK_16(4) HOOK_16(5) HOOK_16(6) HOOK_16(7) HOOK_16(8) HOOK_16(9)
        HOOK_16(a) HOOK_16(b) HOOK_16(c) HOOK_16(d) HOOK_16(e) HOOK_16(f)
};
/* clang-format on */
static _Atomic int n_spare;
static _Atomic int guard; /* held for a few instructions, never across a call that may wait */

/* A child has no thread that would let go of it. */
static void in_child(void)
{
    atomic_store(&guard, 0);
}

__attribute__((constructor)) static void begin(void)
{
    in_children(in_child);
}

int entry_count(void)
{
    return LISTED + atomic_load(&n_spare);
}

/* The list is in the order of people, not of strcmp. */
static unsigned short sorted[LISTED];
_Static_assert(LISTED <= 65536, "a place in the list is two bytes");
static pthread_once_t once = PTHREAD_ONCE_INIT;

static int order(const void *one, const void *other)
{
    return strcmp(entries[*(const unsigned short *)one].symbol, entries[*(const unsigned short *)other].symbol);
}

static void sort(void)
{
    for (int at = 0; at < LISTED; at++)
        sorted[at] = (unsigned short)at;
    qsort(sorted, LISTED, sizeof sorted[0], order);
}

static int compare(const void *symbol, const void *at)
{
    return strcmp(symbol, entries[*(const unsigned short *)at].symbol);
}

int entry_of(const char *symbol)
{
    pthread_once(&once, sort);
    unsigned short *at = bsearch(symbol, sorted, LISTED, sizeof sorted[0], compare);
    return at ? *at : -1;
}

void entry_called(int place)
{
    note_call(&entries[place]);
}

void *entry_call(int place)
{
    note_call(&entries[place]);
    return real_of(&entries[place]);
}

void *entry_real(int place)
{
    return real_of(&entries[place]);
}

void *entry_known(int place)
{
    return atomic_load(&entries[place].real);
}

void *entry_hook(int place)
{
    return entries[place].hook;
}

void entry_asked_for(int place)
{
    atomic_store(&entries[place].asked_for, 1);
}

struct told_of entry_told(int place)
{
    const struct entry *entry = &entries[place];

    return (struct told_of){entry->symbol, (enum role)entry->role, entry->called != 0, entry->asked_for != 0};
}

/* The headers of graphics have functions of their own (cudaGL.h, cudaEGL.h, cudaVDPAU.h). They find memory that is the
 * graphics driver's, and the runtime asks for all of them. */
static bool of_graphics(const char *symbol)
{
    static const char *const names[] = {"cuGL", "cuEGL", "cuVDPAU", "cuGraphics"};

    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!strncmp(symbol, names[i], strlen(names[i])))
            return true;
    return false;
}

/* Another version of it is meant where the address is not that one's: cuGetProcAddress is asked by the base name. */
static int version_of(const char *base, const void *real)
{
    for (int at = 0; at < LISTED; at++)
        if (!strcmp(entries[at].base, base) && entry_real(at) == real)
            return at;
    return -1;
}

void *entry_instead(const char *symbol, void *real)
{
    int place = entry_of(symbol);

    if (place < 0 || entry_real(place) != real)
        place = version_of(symbol, real);
    if (place >= 0) {
        entry_asked_for(place);
        return entry_hook(place);
    }
    void *hook = NULL;
    char *copy = strdup(symbol); /* before: another thread may fork, or a signal come, in the allocator */
    while (atomic_exchange_explicit(&guard, 1, memory_order_acquire))
        ;
    int known = atomic_load(&n_spare);
    for (int at = 0; at < known && !hook; at++)
        if (atomic_load(&entries[LISTED + at].real) == real)
            hook = entries[LISTED + at].hook;
    if (!hook && known < SPARE) {
        struct entry *new = &entries[LISTED + known];
        new->symbol = new->base = copy ? copy : "?";
        copy = NULL;
        atomic_store(&new->asked_for, 1);
        new->role = of_graphics(symbol) ? ROLE_USES : ROLE_UNKNOWN;
        atomic_store(&new->real, real);
        hook = new->hook;
        atomic_store(&n_spare, known + 1);
    }
    atomic_store_explicit(&guard, 0, memory_order_release);
    free(copy);
    return hook ? hook : real;
}
