/* Events that two processes know: cuIpcGetEventHandle, cuIpcOpenEventHandle.
 *
 * An event that was made with CU_EVENT_INTERPROCESS has a page on which each record gets a number, and notes it when it
 * is reached. As long as nobody else knows the event, the page is the process's own; with its first handle it becomes a
 * file in /dev/shm whose name tells who exports. Who waits for a record looks at the page ever again: no thread of
 * another process can wake it, and CRIU can dump it.
 *
 * A page is host memory, so a checkpoint leaves it alone: a process that has another's event open comes back (measured),
 * unlike one that has its memory open.
 */
#define _GNU_SOURCE
#include "queue.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE_BYTES 4096
#define RECORDS 64 /* that can be under way at a time: a later one in the same place ends the wait for an earlier */
#define PAGE_MAGIC 0x6b72614d47734f45ull
#define HANDLE_MAGIC 0x7645504cu
#define LOOK_SECONDS 0.0005

struct record {
    _Atomic uint64_t number, reached;
    _Atomic uint64_t start_time; /* of the process that records: if it is killed, nothing is waited for any more */
    _Atomic int32_t pid;
};

struct page {
    uint64_t magic;
    _Atomic uint64_t last; /* number of the newest record, 0 before the first */
    struct record records[RECORDS];
};
_Static_assert(sizeof(struct page) <= PAGE_BYTES, "it is one page");

struct shared_event {
    struct shared_event *next; /* of all that this process knows */
    int references;
    struct page *page;
    bool imported, exported;
    unsigned number; /* in the name of its file */
    int fd;          /* of an exported one: the real driver, too, holds what it shares open */
};

struct handle {
    uint32_t magic;
    int32_t pid;
    uint64_t start_time;
    uint32_t number;
};
_Static_assert(sizeof(struct handle) <= CU_IPC_HANDLE_SIZE, "a handle has 64 bytes");

/* Guarded by streams_lock. */
static struct shared_event *known;
static unsigned last_exported;

static void file_name(char *name, size_t room, pid_t pid, unsigned number)
{
    snprintf(name, room, "/dev/shm/cuda.shm.0.%x.%u", (unsigned)pid, number);
}

static struct shared_event *add(struct page *page)
{
    struct shared_event *event = page == MAP_FAILED ? NULL : calloc(1, sizeof *event);
    if (!event)
        return NULL;
    event->references = 1;
    event->page = page;
    event->next = known;
    known = event;
    return event;
}

struct shared_event *shared_event_make(void)
{
    struct page *page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct shared_event *event = add(page);
    if (event)
        page->magic = PAGE_MAGIC;
    else if (page != MAP_FAILED)
        munmap(page, PAGE_BYTES);
    return event;
}

static void unlink_file(const struct shared_event *event)
{
    char name[64];
    file_name(name, sizeof name, getpid(), event->number);
    unlink(name);
}

void shared_event_drop(struct shared_event *event)
{
    if (!event || --event->references > 0)
        return;
    for (struct shared_event **at = &known; *at; at = &(*at)->next)
        if (*at == event) {
            *at = event->next;
            break;
        }
    if (event->exported) {
        unlink_file(event);
        close(event->fd);
    }
    munmap(event->page, PAGE_BYTES);
    free(event);
}

void shared_event_keep(struct shared_event *event)
{
    event->references++;
}

/* In a child: the pages of exported and imported events are not there (MADV_DONTFORK). */
void shared_events_forked(void)
{
    for (const struct shared_event *event = known; event; event = event->next)
        if (event->exported)
            close(event->fd);
    known = NULL;
}

__attribute__((destructor)) static void end(void)
{
    if (driver.forked)
        return;
    for (const struct shared_event *event = known; event; event = event->next)
        if (event->exported)
            unlink_file(event);
}

/* ----------------------------------------------------------------------------------------------------- records --- */

uint64_t shared_event_record(struct shared_event *event)
{
    uint64_t number = atomic_fetch_add(&event->page->last, 1) + 1;
    struct record *record = &event->page->records[number % RECORDS];
    record->pid = getpid();
    record->start_time = node_start_time(getpid());
    record->number = number;
    return number;
}

void shared_event_reach(struct shared_event *event, uint64_t number)
{
    struct record *record = &event->page->records[number % RECORDS];
    uint64_t before = record->reached;
    while (before < number && !atomic_compare_exchange_weak(&record->reached, &before, number))
        ;
}

uint64_t shared_event_last(const struct shared_event *event)
{
    return event->page->last;
}

bool shared_event_reached(const struct shared_event *event, uint64_t number)
{
    const struct record *record = &event->page->records[number % RECORDS];
    if (number == 0 || record->reached >= number || record->number > number)
        return true;
    if (record->number < number) /* its process is just about to say what it is */
        return false;
    return record->pid != getpid() && !node_same_start(node_start_time((pid_t)record->pid), record->start_time);
}

void shared_event_wait(const struct shared_event *event, uint64_t number, const struct context *context)
{
    while (!shared_event_reached(event, number) && !context->destroyed && !context->sticky)
        node_pace(node_now(), LOOK_SECONDS, 0, 0);
}

/* ----------------------------------------------------------------------------------------------------- handles --- */

CUresult shared_event_export(struct shared_event *event, CUipcEventHandle *handle)
{
    struct handle its = {.magic = HANDLE_MAGIC, .pid = getpid(), .start_time = node_start_time(getpid())};
    char name[64];

    if (event->imported)
        return CUDA_ERROR_INVALID_VALUE;
    if (!event->exported) {
        event->number = ++last_exported;
        file_name(name, sizeof name, getpid(), event->number);
        unlink(name); /* of a process that had this number before; what others have put there is never opened */
        int fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        bool made = fd >= 0 && write(fd, event->page, PAGE_BYTES) == PAGE_BYTES
            && mmap(event->page, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED;
        if (!made) {
            if (fd >= 0)
                close(fd);
            unlink(name);
            return CUDA_ERROR_OPERATING_SYSTEM;
        }
        madvise(event->page, PAGE_BYTES, MADV_DONTFORK);
        event->exported = true;
        event->fd = fd;
    }
    its.number = event->number;
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &its, sizeof its);
    return CUDA_SUCCESS;
}

CUresult shared_event_open(const CUipcEventHandle *handle, struct shared_event **event)
{
    struct handle its;
    char name[64];

    memcpy(&its, handle, sizeof its);
    if (its.magic != HANDLE_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    if (its.pid == getpid() && node_same_start(its.start_time, node_start_time(getpid())))
        return CUDA_ERROR_INVALID_CONTEXT; /* one's own */
    if (!node_same_start(node_start_time((pid_t)its.pid), its.start_time))
        return CUDA_ERROR_INVALID_HANDLE;
    file_name(name, sizeof name, (pid_t)its.pid, its.number);
    int fd = node_open_file(name, O_RDWR);
    if (fd < 0)
        return CUDA_ERROR_INVALID_HANDLE; /* it was destroyed */
    struct page *page = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    *event = add(page);
    if (!*event) {
        if (page != MAP_FAILED)
            munmap(page, PAGE_BYTES);
        return CUDA_ERROR_MAP_FAILED;
    }
    madvise(page, PAGE_BYTES, MADV_DONTFORK);
    (*event)->imported = true;
    return CUDA_SUCCESS;
}
