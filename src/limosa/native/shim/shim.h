/* What the files of the shim share. */
#ifndef LIMOSA_SHIM_H
#define LIMOSA_SHIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gate.h"

#define EXPORT __attribute__((visibility("default")))

/* What becomes of a function: ../driver/functions.list and newer.list say it of each. */
enum role { ROLE_UNKNOWN, ROLE_PASS, ROLE_USES, ROLE_HOST, ROLE_OLD, ROLE_OWN, ROLE_COPY };

/* An entry of the driver: what the application gets instead of it, and where the real one is. */
struct entry {
    const char *symbol, *base; /* cuMemAlloc_v2; what cuGetProcAddress is asked for */
    void *hook;
    void *_Atomic real;
    _Atomic unsigned char called;
    _Atomic unsigned char asked_for; /* by dlsym or cuGetProcAddress */
    unsigned char role;
};

enum { /* places in the table */
#define FUNCTION(symbol, base, version, per_thread, what) AT_##symbol,
#include "../driver/functions.list"
#include "newer.list"
#undef FUNCTION
       LISTED
};

extern struct entry entries[]; /* LISTED, behind them what no list knows, in turn */
int n_entries(void);

static inline void entry_called(struct entry *entry)
{
    if (UNLIKELY(!atomic_load_explicit(&entry->called, memory_order_relaxed)))
        atomic_store_explicit(&entry->called, 1, memory_order_relaxed);
}
/* The first line of every definition of our own. */
#define CALLED(name) entry_called(&entries[AT_##name])

struct entry *entry_of(const char *symbol);
/* The real function; NULL where the program has no libcuda, or none with it. */
void *entry_real(struct entry *entry);
/* What the application is to have instead of a function of libcuda that is really at that address. */
void *entry_instead(const char *symbol, void *real);

/* Returns what a call of the driver answers that is made inside the gate. */
#define GATE(call)                                                                                                     \
    do {                                                                                                               \
        struct reader *reader_ = gate_enter();                                                                         \
        CUresult result_ = (call);                                                                                     \
        gate_leave(reader_);                                                                                           \
        return result_;                                                                                                \
    } while (0)

/* find.c: the way past ourselves. */
void *find_in_driver(const char *symbol);
void *find_driver(void); /* the program's own libcuda; NULL before it has loaded one */
bool find_is_driver(const void *address); /* whether it lies in libcuda */
void find_begin(void);

/* pthread_atfork without the part of it that glibc links into whoever calls it: the symbol behind it is missing in other C
 * libraries, whose loaders would end a program for it. Those have no driver either. */
int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *) __attribute__((weak));
extern void *__dso_handle __attribute__((visibility("hidden")));

static inline void around_forks(void (*before)(void), void (*after)(void), void (*in_child)(void))
{
    if (__register_atfork)
        __register_atfork(before, after, in_child, &__dso_handle);
}

static inline void in_children(void (*what)(void))
{
    around_forks(NULL, NULL, what);
}

#define DRIVER_NOT_THERE 100 /* CUDA_ERROR_NO_DEVICE */
#define DRIVER_INVALID_VALUE 1 /* CUDA_ERROR_INVALID_VALUE */

#endif
