/* At a checkpoint the driver asks once for anonymous memory, as large as all that it must save, with MAP_POPULATE: one
 * thread clears it in small pages, which takes longer than the copy of a small job. We answer that one call with memory
 * that several threads have populated in huge pages, before the pause where there was time.
 *
 * Nothing else of mmap changes, and nothing at all outside a checkpoint: without being armed this is the system call. */
#include "bulk.h"
#include "compiler.h"

#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HUGE ((size_t)2 << 20)
#define SMALLEST ((size_t)32 << 20)
#define LEAST ((size_t)1 << 20) /* of a checkpoint: a context alone is some hundred MiB */
#define THREADS 8
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
static char *ready; /* populated, not given away yet; this and the next two under the lock */
static size_t ready_bytes;
static bool closed; /* the gate is: only the driver asks for memory of that kind */
static size_t asked;
static _Atomic bool guarded;
static void *sign; /* that it is, for others to see */
static _Atomic size_t refused;
static struct {
    uintptr_t start, end;
} libcuda; /* its code: noted at the first guard, since the loader's lock is nothing to wait for in mmap */
static _Atomic bool armed; /* ready, closed or guarded */
static bool switched_off;

static void arm(void)
{
    atomic_store(&armed, closed || ready || atomic_load(&guarded));
}

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

/* Address space that begins at a huge page. */
static char *reserve(size_t bytes)
{
    size_t room = bytes + HUGE;
    char *got = system_mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (got == MAP_FAILED)
        return NULL;
    char *start = (char *)(((uintptr_t)got + HUGE - 1) & ~(HUGE - 1));
    if (start > got)
        munmap(got, (size_t)(start - got));
    if (got + room > start + bytes)
        munmap(start + bytes, (size_t)(got + room - start - bytes));
    return start;
}

static void populate_all(char *start, size_t bytes)
{
    pthread_t threads[THREADS];
    pthread_attr_t small;
    struct part parts[THREADS];
    sigset_t all, before;
    int n = 0;
    size_t each = ((bytes + THREADS - 1) / THREADS + HUGE - 1) & ~(HUGE - 1);

    madvise(start, bytes, MADV_HUGEPAGE);
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 128 << 10);
    sigfillset(&all); /* these threads are not for the application's handlers */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (size_t at = 0; at < bytes; at += each) {
        parts[n] = (struct part){start + at, bytes - at < each ? bytes - at : each};
        if (at + each >= bytes || pthread_create(&threads[n], &small, populate, &parts[n])) {
            parts[n].bytes = bytes - at; /* the last part, and all that is left where no thread is to be had */
            populate(&parts[n]);
            break;
        }
        n++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&small);
    while (n-- > 0)
        pthread_join(threads[n], NULL);
}

/* Memory of that many bytes, a multiple of HUGE, populated by several threads; what there is already is its beginning.
 * NULL where it is not to be had. */
static char *make(size_t bytes, char *old, size_t old_bytes)
{
    char *start = reserve(bytes);

    if (old && (!start || mremap(old, old_bytes, old_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, start) == MAP_FAILED)) {
        munmap(old, old_bytes);
        old_bytes = 0;
    }
    if (start)
        populate_all(start + old_bytes, bytes - old_bytes);
    return start;
}

static char *take(size_t *bytes)
{
    pthread_mutex_lock(&one);
    char *mine = ready;
    *bytes = ready_bytes;
    ready = NULL;
    ready_bytes = 0;
    arm();
    pthread_mutex_unlock(&one);
    return mine;
}

int bulk_prepare(size_t bytes)
{
    size_t had;
    char *mine = take(&had);

    bytes = switched_off ? 0 : (bytes + HUGE - 1) & ~(HUGE - 1);
    if (mine && !bytes) {
        munmap(mine, had);
        mine = NULL;
        had = 0;
    } else if (had < bytes) {
        mine = make(bytes, mine, had);
        had = mine ? bytes : 0;
    }
    if (mine)
        madvise(mine, had, MADV_DONTFORK); /* a child has no use for it */
    pthread_mutex_lock(&one);
    ready = mine;
    ready_bytes = had;
    arm();
    pthread_mutex_unlock(&one);
    return bytes && !mine ? -ENOMEM : 0;
}

void bulk_gate(bool now_closed)
{
    pthread_mutex_lock(&one);
    closed = now_closed && !switched_off;
    arm();
    pthread_mutex_unlock(&one);
}

static int note_code(struct dl_phdr_info *info, size_t size, void *address)
{
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        uintptr_t start = info->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_LOAD && part->p_flags & PF_X && (uintptr_t)address >= start
            && (uintptr_t)address < start + part->p_memsz) {
            libcuda.start = start;
            libcuda.end = start + part->p_memsz;
            return 1;
        }
    }
    return 0;
}

void bulk_find_driver(void *address)
{
    dl_iterate_phdr(note_code, address);
}

static void *raise_sign(void)
{
    int fd = (int)syscall(SYS_memfd_create, BULK_SIGN, 1 /* MFD_CLOEXEC */);
    void *at = MAP_FAILED;

    if (fd >= 0 && !ftruncate(fd, 4096))
        at = system_mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    if (at == MAP_FAILED)
        return NULL;
    madvise(at, 4096, MADV_DONTFORK);
    return at;
}

void bulk_guard(bool needed)
{
    if (atomic_load(&guarded) == needed)
        return;
    int before = errno;
    pthread_mutex_lock(&one);
    atomic_store(&guarded, needed);
    if (needed && !sign)
        sign = raise_sign();
    if (!needed && sign) {
        munmap(sign, 4096);
        sign = NULL;
    }
    arm();
    pthread_mutex_unlock(&one);
    errno = before;
}

bool bulk_guarded(void)
{
    return atomic_load_explicit(&guarded, memory_order_relaxed);
}

size_t bulk_refused(void)
{
    return atomic_load(&refused);
}

void bulk_switch_off(void)
{
    switched_off = true;
}

void bulk_in_child(void)
{
    pthread_mutex_init(&one, NULL);
    ready = NULL; /* it was not inherited */
    ready_bytes = 0;
    closed = false;
    atomic_store(&guarded, false);
    sign = NULL; /* nor was this */
    atomic_store(&refused, 0);
    atomic_store(&armed, false);
}

size_t bulk_asked(void)
{
    return asked;
}

size_t bulk_ready(void)
{
    return ready_bytes;
}

/* While the gate is open the application may ask for memory of that kind, too: it gets the same from the kernel, and
 * what was prepared is kept for the driver, who asks for about as much as there is. */
static void *answer(uintptr_t from, void *address, size_t bytes, int protection, int flags, int fd, long offset)
{
    char *mine = NULL;
    size_t had = 0;

    /* Any other flag (locked, low, growing, huge pages) asks for something that what is ready is not. */
    if (address || bytes < LEAST || protection != (PROT_READ | PROT_WRITE)
        || (flags & ~MAP_NORESERVE) != (MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE))
        return system_mmap(address, bytes, protection, flags, fd, offset);
    /* Of this kind libcuda asks for nothing but a checkpoint's (measured). */
    if (atomic_load(&guarded) && from >= libcuda.start && from < libcuda.end) {
        atomic_fetch_add(&refused, 1);
        errno = ENOMEM;
        return MAP_FAILED;
    }
    pthread_mutex_lock(&one);
    bool drivers = bytes >= SMALLEST && (closed || (ready && bytes >= ready_bytes / 2));
    pthread_mutex_unlock(&one);
    if (!drivers)
        return system_mmap(address, bytes, protection, flags, fd, offset);
    asked = bytes;
    size_t whole = (bytes + 4095) & ~(size_t)4095, wanted = (bytes + HUGE - 1) & ~(HUGE - 1);
    mine = take(&had);
    if (had < wanted) {
        mine = make(wanted, mine, had);
        had = wanted;
    }
    if (!mine)
        return system_mmap(address, bytes, protection, flags, fd, offset);
    madvise(mine, had, MADV_DOFORK);
    if (had > whole)
        munmap(mine + whole, had - whole);
    return mine;
}

#define FROM ((uintptr_t)__builtin_return_address(0))

EXPORT void *mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    if (UNLIKELY(atomic_load_explicit(&armed, memory_order_relaxed)))
        return answer(FROM, address, bytes, protection, flags, fd, offset);
    return system_mmap(address, bytes, protection, flags, fd, offset);
}

EXPORT void *mmap64(void *address, size_t bytes, int protection, int flags, int fd, off64_t offset)
{
    if (UNLIKELY(atomic_load_explicit(&armed, memory_order_relaxed)))
        return answer(FROM, address, bytes, protection, flags, fd, offset);
    return system_mmap(address, bytes, protection, flags, fd, offset);
}
