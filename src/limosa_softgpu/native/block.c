/* Address space for device memory, and blocks of it mapped there. */
#define _GNU_SOURCE
#include "block.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

/* Device addresses come from here, lowest first: far from where the kernel puts libraries, threads and host memory, and
 * within what sanitizers leave to applications. Nothing but device memory and reservations is ever put here. */
#ifdef __SANITIZE_THREAD__ /* which leaves less */
#define SPACE_START 0x7e8000000000ull
#define SPACE_END 0x7ef000000000ull
#else
#define SPACE_START 0x7c0000000000ull
#define SPACE_END 0x7e0000000000ull
#endif

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

struct span {
    CUdeviceptr start, end;
};
static struct span *spans; /* taken ones, sorted; also those that a hint has put elsewhere */
static size_t n_spans, room_spans;

static bool reserve_at(CUdeviceptr address, size_t bytes)
{
    void *wanted = (void *)(uintptr_t)address;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    void *got = mmap(wanted, bytes, PROT_NONE, flags, -1, 0);

    if (got == wanted)
        return true;
    if (got != MAP_FAILED) /* a kernel that takes the address for a hint */
        munmap(got, bytes);
    return false;
}

static bool span_insert(size_t place, CUdeviceptr start, size_t bytes)
{
    if (n_spans == room_spans) {
        size_t room = room_spans ? 2 * room_spans : 64;
        struct span *more = realloc(spans, room * sizeof(*more));
        if (!more)
            return false;
        spans = more;
        room_spans = room;
    }
    memmove(&spans[place + 1], &spans[place], (n_spans - place) * sizeof(*spans));
    spans[place] = (struct span){start, start + bytes};
    n_spans++;
    return true;
}

/* The first span that ends after an address. */
static size_t span_after(CUdeviceptr address)
{
    size_t low = 0, high = n_spans;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (spans[middle].end > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static CUdeviceptr take_at(size_t place, CUdeviceptr address, size_t bytes)
{
    if (!reserve_at(address, bytes))
        return 0;
    if (span_insert(place, address, bytes))
        return address;
    munmap((void *)(uintptr_t)address, bytes);
    return 0;
}

CUdeviceptr space_take(size_t bytes, size_t alignment, CUdeviceptr hint)
{
    CUdeviceptr address = SPACE_START;

    if (alignment < NODE_GRANULARITY)
        alignment = NODE_GRANULARITY;
    if (bytes == 0 || bytes > SPACE_END - SPACE_START || alignment > SPACE_END - SPACE_START)
        return 0;
    if (hint && hint % alignment == 0 && hint + bytes > hint && hint + bytes < 1ull << 47) {
        size_t place = span_after(hint);
        if (place == n_spans || spans[place].start >= hint + bytes) {
            CUdeviceptr taken = take_at(place, hint, bytes);
            if (taken)
                return taken;
        }
    }
    for (size_t place = span_after(address - 1);;) {
        address = round_up(address, alignment);
        if (address + bytes > SPACE_END)
            return 0;
        if (place < n_spans && spans[place].start < address + bytes) {
            if (spans[place].end > address)
                address = spans[place].end;
            place++;
            continue;
        }
        CUdeviceptr taken = take_at(place, address, bytes);
        if (taken)
            return taken;
        address += alignment < 1u << 30 ? 1u << 30 : alignment; /* somebody else's: look further on */
        place = span_after(address - 1);
    }
}

void space_give(CUdeviceptr address, size_t bytes)
{
    size_t place = span_after(address);

    munmap((void *)(uintptr_t)address, bytes);
    if (place < n_spans && spans[place].start == address) {
        n_spans--;
        memmove(&spans[place], &spans[place + 1], (n_spans - place) * sizeof(*spans));
    }
}

bool space_ours(CUdeviceptr address)
{
    if (address >= SPACE_START && address < SPACE_END)
        return true;
    size_t place = span_after(address);
    return place < n_spans && spans[place].start <= address;
}

/* ------------------------------------------------------------------------------------------------------ blocks --- */

int block_map_fd(int fd, size_t bytes, CUdeviceptr address, int protection)
{
    void *at = (void *)(uintptr_t)address;

    if (mmap(at, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        return -errno;
    madvise(at, bytes, MADV_DONTFORK);
    return 0;
}

void *block_hold(int fd)
{
    void *holder = mmap(NULL, HOLDER_BYTES, PROT_NONE, MAP_SHARED, fd, 0);

    if (holder == MAP_FAILED)
        return NULL;
    madvise(holder, HOLDER_BYTES, MADV_DONTFORK);
    return holder;
}

void block_let_go(void *holder, uint64_t id, bool ours)
{
    if (!holder)
        return;
    munmap(holder, HOLDER_BYTES);
    node_dropped(id, ours);
}

int block_take(int gpu, size_t bytes, enum node_kind kind, CUdeviceptr address, uint64_t *id, void **holder)
{
    int fd, error = node_take(gpu, bytes, kind, &fd, id);

    if (error)
        return error;
    if (holder) {
        *holder = block_hold(fd);
        if (!*holder)
            error = -errno;
    }
    if (!error && address) {
        error = block_map_fd(fd, bytes, address, PROT_READ | PROT_WRITE);
        if (error && holder)
            munmap(*holder, HOLDER_BYTES);
    }
    close(fd);
    if (error)
        node_dropped(*id, false);
    return error;
}

int block_open(uint64_t id)
{
    char path[64];
    int fd;

    snprintf(path, sizeof(path), NODE_FOLDER "/memory/%llu", (unsigned long long)id);
    fd = node_open_file(path, O_RDWR);
    if (fd < 0)
        return -errno;
    if (flock(fd, LOCK_SH | LOCK_NB) == 0 && node_identify(fd, NULL, NULL, NULL, NULL) == 0)
        return fd;
    close(fd); /* it was on its way to be removed */
    return -ENOENT;
}

int block_map(uint64_t id, size_t bytes, CUdeviceptr address, int protection)
{
    int error, fd = block_open(id);

    if (fd < 0)
        return fd;
    error = block_map_fd(fd, bytes, address, protection);
    close(fd);
    return error;
}

void block_unmap(CUdeviceptr address, size_t bytes, uint64_t id)
{
    /* In one step, so that nothing else can come to lie there in between. */
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap((void *)(uintptr_t)address, bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED)
        node_log("a block could not be unmapped (errno %d): its memory stays taken until the process ends", errno);
    node_dropped(id, false);
}

CUresult block_result(int error)
{
    switch (-error) {
    case 0: return CUDA_SUCCESS;
    case ENOMEM:
    case ENOSPC: return CUDA_ERROR_OUT_OF_MEMORY;
    case ENODEV: return CUDA_ERROR_DEVICE_UNAVAILABLE;
    default: return CUDA_ERROR_OPERATING_SYSTEM;
    }
}

int ordinal_of_gpu(int gpu)
{
    for (int i = 0; i < driver.n_devices; i++)
        if (driver.devices[i] == gpu)
            return i;
    return -1;
}
