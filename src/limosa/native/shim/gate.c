#include "gate.h"
#include "capture.h"
#include "compiler.h"
#include "forks.h"

#include <errno.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

TLS struct reader *gate_reader;
_Atomic uint32_t gate_closed;
bool gate_fence = true;

static struct reader *_Atomic readers; /* only ever grows at its head; what is not used is used again */
static pthread_key_t key;
/* A program may have used up all of them: then what a thread had when it ended is not used again. */
static bool has_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static TLS struct reader own; /* of a thread that is exempt */

/* By the call itself: the thread may hold a lock of stdio's, and is not to be cancelled here. */
static _Noreturn void end_saying(const char *why)
{
    syscall(SYS_write, STDERR_FILENO, why, strlen(why));
    _exit(127);
}

static int membarrier(int command)
{
    return (int)syscall(SYS_membarrier, command, 0, 0);
}

static void thread_ends(void *value)
{
    struct reader *reader = value;

    capture_thread_ends(reader);
    gate_reader = NULL; /* a later destructor of this thread may still call the driver: it gets another one */
    atomic_store_explicit(&reader->passed, 0, memory_order_relaxed);
    atomic_store_explicit(&reader->inside, 0, memory_order_release);
    atomic_store_explicit(&reader->used, false, memory_order_release);
}

static void begin(void)
{
    has_key = !pthread_key_create(&key, thread_ends);
    in_children(gate_after_fork); /* calls that other threads were in do not go on in a child */
    gate_fence = membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) != 0;
}

struct reader *gate_new_reader(void)
{
    int before = errno;
    struct reader *reader;

    pthread_once(&once, begin);
    for (reader = atomic_load(&readers); reader; reader = reader->next) {
        bool no = false;
        if (!atomic_load_explicit(&reader->used, memory_order_relaxed)
            && atomic_compare_exchange_strong(&reader->used, &no, true))
            break;
    }
    if (!reader) {
        /* Pages of their own, never given back: whoever closes the gate may look at any of them at any time. */
        struct reader *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) /* a thread that the gate does not know would be a hole in it */
            end_saying("limosa: no memory for what the shim keeps of a thread (4 KiB): the job ends, 127\n");
        unsigned n = 4096 / sizeof *page;
        atomic_store_explicit(&page[0].used, true, memory_order_relaxed);
        for (unsigned i = 0; i + 1 < n; i++)
            page[i].next = &page[i + 1];
        struct reader *head = atomic_load(&readers);
        do
            page[n - 1].next = head;
        while (!atomic_compare_exchange_weak(&readers, &head, page));
        reader = page;
    }
    if (has_key)
        pthread_setspecific(key, reader);
    gate_reader = reader;
    errno = before;
    return reader;
}

/* None of this thread's calls has passed, so it is not in the driver whatever the depth is. */
void gate_wait(struct reader *reader, uint32_t depth)
{
    int before = errno;

    do {
        atomic_store_explicit(&reader->inside, 0, memory_order_release);
        while (atomic_load_explicit(&gate_closed, memory_order_relaxed))
            syscall(SYS_futex, &gate_closed, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0);
        atomic_store_explicit(&reader->inside, depth, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst);
    } while (atomic_load_explicit(&gate_closed, memory_order_acquire));
    errno = before;
}

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

bool gate_close(uint64_t milliseconds)
{
    uint64_t end = now_ns() + milliseconds * 1000000;

    pthread_once(&once, begin);
    atomic_store(&gate_closed, 1);
    /* A process that was brought back from an image may have to register anew. */
    if (!gate_fence && membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) != 0) {
        membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
        if (membarrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) != 0) {
            gate_open();
            return false;
        }
    }
    for (struct reader *reader = atomic_load(&readers); reader; reader = reader->next)
        while (atomic_load_explicit(&reader->inside, memory_order_acquire)) {
            if (now_ns() >= end) {
                gate_open();
                return false;
            }
            nanosleep(&(struct timespec){0, 20000}, NULL);
        }
    return true;
}

void gate_open(void)
{
    atomic_store(&gate_closed, 0);
    syscall(SYS_futex, &gate_closed, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
}

void gate_exempt(void)
{
    atomic_store_explicit(&own.inside, 1, memory_order_relaxed); /* not in the list: nobody waits for it */
    atomic_store_explicit(&own.passed, 1, memory_order_relaxed);
    gate_reader = &own;
}

void gate_after_fork(void)
{
    for (struct reader *reader = atomic_load(&readers); reader; reader = reader->next)
        if (reader != gate_reader) {
            atomic_store(&reader->inside, 0);
            atomic_store(&reader->passed, 0);
            atomic_store(&reader->used, false);
        }
    atomic_store(&gate_closed, 0);
    if (!gate_fence)
        membarrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
}

void gate_counts(unsigned *threads, unsigned *inside)
{
    *threads = *inside = 0;
    for (struct reader *reader = atomic_load(&readers); reader; reader = reader->next) {
        *threads += atomic_load(&reader->used);
        *inside += atomic_load(&reader->inside) != 0;
    }
}
