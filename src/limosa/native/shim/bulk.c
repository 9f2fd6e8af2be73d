/* At a checkpoint the driver asks once for anonymous memory, as large as all that it must save, with MAP_POPULATE: one
 * thread clears it in small pages, which takes longer than the copy of a small job. We answer that one call with memory
 * that several threads have populated in huge pages, before the pause where there was time.
 *
 * Nothing else of mmap changes, and nothing at all outside a checkpoint: without being armed this is the system call. */
#include "bulk.h"
#include "shim.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HUGE ((size_t)2 << 20)
#define SMALLEST ((size_t)32 << 20)
#define THREADS 8
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static _Atomic bool armed;
static char *ready; /* populated, not given away yet */
static size_t ready_bytes, asked;

static void *system_mmap(void *address, size_t bytes, int protection, int flags, int fd, long offset)
{
    return (void *)syscall(SYS_mmap, address, bytes, protection, flags, fd, offset);
}

struct part {
    char *start;
    size_t bytes;
};

static void *populate(void *data)
{
    struct part *part = data;

    if (madvise(part->start, part->bytes, MADV_POPULATE_WRITE) && errno != ENOMEM)
        for (size_t at = 0; at < part->bytes; at += 4096) /* a kernel before 5.14 */
            *(volatile char *)(part->start + at) = 0;
    return NULL;
}

/* Aligned to huge pages, populated by several threads; NULL where the memory is not to be had. */
static char *make(size_t bytes)
{
    size_t room = bytes + HUGE;
    char *got = system_mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    pthread_t threads[THREADS];
    struct part parts[THREADS];
    int n = 0;

    if (got == MAP_FAILED)
        return NULL;
    char *start = (char *)(((uintptr_t)got + HUGE - 1) & ~(HUGE - 1));
    if (start > got)
        munmap(got, (size_t)(start - got));
    if (got + room > start + bytes)
        munmap(start + bytes, (size_t)(got + room - start - bytes));
    madvise(start, bytes, MADV_HUGEPAGE);
    size_t each = ((bytes + THREADS - 1) / THREADS + HUGE - 1) & ~(HUGE - 1);
    for (size_t at = 0; at < bytes; at += each) {
        parts[n] = (struct part){start + at, bytes - at < each ? bytes - at : each};
        if (at + each >= bytes || pthread_create(&threads[n], NULL, populate, &parts[n])) {
            parts[n].bytes = bytes - at; /* the last part, and all that is left where no thread is to be had */
            populate(&parts[n]);
            break;
        }
        n++;
    }
    while (n-- > 0)
        pthread_join(threads[n], NULL);
    return start;
}

int bulk_prepare(size_t bytes)
{
    bytes = (bytes + 4095) & ~(size_t)4095;
    if (ready && (!bytes || bytes > ready_bytes)) {
        munmap(ready, ready_bytes);
        ready = NULL;
        ready_bytes = 0;
    }
    if (bytes && !ready) {
        ready = make(bytes);
        ready_bytes = ready ? bytes : 0;
    }
    return bytes && !ready ? -ENOMEM : 0;
}

void bulk_arm(void)
{
    atomic_store(&armed, true);
}

void bulk_disarm(void)
{
    atomic_store(&armed, false);
    bulk_prepare(0);
}

size_t bulk_asked(void)
{
    return asked;
}

size_t bulk_ready(void)
{
    return ready_bytes;
}

static void *answer(void *address, size_t bytes, int protection, int flags, int fd, long offset)
{
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    char *mine = NULL;

    if (address || bytes < SMALLEST || protection != (PROT_READ | PROT_WRITE) || !(flags & MAP_POPULATE)
        || (flags & (MAP_PRIVATE | MAP_ANONYMOUS)) != (MAP_PRIVATE | MAP_ANONYMOUS)
        || flags & (MAP_FIXED | MAP_HUGETLB | MAP_SHARED))
        return system_mmap(address, bytes, protection, flags, fd, offset);
    size_t whole = (bytes + 4095) & ~(size_t)4095;
    pthread_mutex_lock(&one);
    asked = bytes;
    if (ready && ready_bytes >= whole) {
        mine = ready;
        if (ready_bytes > whole)
            munmap(ready + whole, ready_bytes - whole);
        ready = NULL;
        ready_bytes = 0;
    }
    pthread_mutex_unlock(&one);
    if (!mine)
        mine = make(whole);
    return mine ? mine : system_mmap(address, bytes, protection, flags, fd, offset);
}

EXPORT void *mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    if (UNLIKELY(atomic_load_explicit(&armed, memory_order_relaxed)))
        return answer(address, bytes, protection, flags, fd, offset);
    return system_mmap(address, bytes, protection, flags, fd, offset);
}

EXPORT void *mmap64(void *address, size_t bytes, int protection, int flags, int fd, off64_t offset)
{
    return mmap(address, bytes, protection, flags, fd, offset);
}
