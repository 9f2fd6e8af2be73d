/* The gate that every call of the driver passes: closed while a job's memory is away.
 *
 * Each thread has a counter of its own, written by it alone, so passing costs two plain stores and a look at a flag that
 * nearly never changes. Whoever closes the gate raises the flag, has the kernel run a memory barrier on every thread
 * (membarrier), and waits until all counters are zero. Calls inside calls pass: a thread that is inside must be able to
 * get out. */
#ifndef LIMOSA_GATE_H
#define LIMOSA_GATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "compiler.h"

struct reader {
    _Atomic uint32_t inside; /* calls of this thread that are in the driver, one within the other */
    /* Which of them, by its depth, has found the gate open: those inside it need not look. 0 where none has: a signal
     * may come between counting and looking. */
    _Atomic uint32_t passed;
    _Atomic bool used;
    struct reader *next;
} __attribute__((aligned(64)));

/* These three for the functions below alone: they stand in the way of every call. */
extern TLS struct reader *gate_reader;
extern _Atomic uint32_t gate_closed;
extern bool gate_fence; /* no membarrier on this kernel: each thread makes its own */

struct reader *gate_new_reader(void);
void gate_wait(struct reader *reader, uint32_t depth);

static inline struct reader *gate_enter(void)
{
    struct reader *reader = gate_reader;
    if (UNLIKELY(!reader))
        reader = gate_new_reader();
    uint32_t inside = atomic_load_explicit(&reader->inside, memory_order_relaxed);
    atomic_store_explicit(&reader->inside, inside + 1, memory_order_relaxed);
    if (UNLIKELY(gate_fence))
        atomic_thread_fence(memory_order_seq_cst);
    else
        atomic_signal_fence(memory_order_seq_cst); /* the order of store and look: membarrier does the rest */
    if (atomic_load_explicit(&reader->passed, memory_order_relaxed) == 0) {
        /* What was done behind the closed gate comes before what is read after this (acquire). */
        if (UNLIKELY(atomic_load_explicit(&gate_closed, memory_order_acquire)))
            gate_wait(reader, inside + 1);
        atomic_store_explicit(&reader->passed, inside + 1, memory_order_relaxed);
    }
    atomic_signal_fence(memory_order_seq_cst);
    return reader;
}

static inline void gate_leave(struct reader *reader)
{
    uint32_t inside = atomic_load_explicit(&reader->inside, memory_order_relaxed);
    if (atomic_load_explicit(&reader->passed, memory_order_relaxed) == inside)
        atomic_store_explicit(&reader->passed, 0, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
    atomic_store_explicit(&reader->inside, inside - 1, memory_order_release);
}

/* Leaves, with what the call inside it has answered: return gate_left(reader, call()). */
static inline int gate_left(struct reader *reader, int result)
{
    gate_leave(reader);
    return result;
}

/* Of the calling thread: what it counts with, NULL where it has not called yet; and by what it is known from others. */
static inline const struct reader *gate_mine(void)
{
    return gate_reader;
}
static inline const void *gate_thread(void)
{
    return &gate_reader;
}

/* Closes it: false where a call has not come back by then, and it is open again. Only the shim's own thread calls it. */
bool gate_close(uint64_t milliseconds);
void gate_open(void);
/* The calling thread passes whatever state the gate is in, and nobody waits for it. */
void gate_exempt(void);
/* In a child after fork: the only thread there is. */
void gate_after_fork(void);
/* Threads known to it, threads inside: for those who look at a gate that does not close. */
void gate_counts(unsigned *threads, unsigned *inside);

#endif
