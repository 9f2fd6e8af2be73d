/* Virtual memory through a checkpoint and a restore.
 *
 * A checkpoint saves what this process knows of, and lets it go; a restore takes new memory for the same handles and
 * addresses. Whoever else had the old memory keeps that.
 */
#define _GNU_SOURCE
#include "vmm.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct memory *original(size_t place, bool before);

/* A handle of memory that another process has made, or that this one has made and let go of (measured). */
bool vmm_has_imported(void)
{
    bool found = false;

    driver_lock();
    for (size_t i = 0; i < vmm_n_memories; i++)
        found = found || (vmm_memories[i]->imported && !original(i, false));
    driver_unlock();
    return found;
}

/* The memory of this process's own that a handle was imported of, or NULL. */
static struct memory *original(size_t place, bool before)
{
    struct memory *memory = vmm_memories[place];

    for (size_t i = 0; memory->imported && i < place; i++)
        if (before ? vmm_memories[i]->before == memory->before : vmm_memories[i]->block == memory->block)
            return vmm_memories[i];
    return NULL;
}

uint64_t vmm_bytes(void)
{
    uint64_t bytes = 0;

    driver_lock();
    for (size_t i = 0; i < vmm_n_memories; i++)
        bytes += original(i, false) ? 0 : vmm_memories[i]->bytes;
    driver_unlock();
    return bytes;
}

/* A memory may be mapped nowhere or several times: it is looked at through a mapping of its own. */
static void *window_open(const struct memory *memory)
{
    void *window = MAP_FAILED;
    int fd;

    driver_lock();
    fd = block_open(memory->block);
    if (fd >= 0) {
        window = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (window != MAP_FAILED)
            madvise(window, memory->bytes, MADV_DONTFORK);
        close(fd);
    }
    driver_unlock();
    return window == MAP_FAILED ? NULL : window;
}

char *vmm_save(char *to)
{
    for (size_t i = 0; i < vmm_n_memories; i++) {
        if (original(i, false))
            continue;
        void *window = window_open(vmm_memories[i]);
        if (window) {
            memcpy(to, window, vmm_memories[i]->bytes);
            munmap(window, vmm_memories[i]->bytes);
        } else {
            node_log("block %llu cannot be saved", (unsigned long long)vmm_memories[i]->block);
        }
        to += vmm_memories[i]->bytes;
    }
    return to;
}

const char *vmm_load(const char *from)
{
    for (size_t i = 0; i < vmm_n_memories; i++) {
        if (original(i, false))
            continue;
        void *window = window_open(vmm_memories[i]);
        if (window) {
            memcpy(window, from, vmm_memories[i]->bytes);
            munmap(window, vmm_memories[i]->bytes);
        } else {
            node_log("block %llu cannot be loaded", (unsigned long long)vmm_memories[i]->block);
        }
        from += vmm_memories[i]->bytes;
    }
    return from;
}

/* Descriptors that the application has exported, or was given, are its own; but while it is checkpointed nothing of the
 * node may be open in it. So /dev/nvidiactl stands in for each (a real driver's descriptors are seen as that anyway), and
 * a restore puts a descriptor of the new memory in its place where the memory is one that this process knows. (An
 * application that closes one in this very moment could have its next file replaced: a driver in the kernel has no such
 * gap.) */
struct stand_in {
    struct stand_in *next;
    int fd;
    CUmemGenericAllocationHandle handle; /* 0: of memory that is not known here */
};
static struct stand_in *stand_ins;

static bool link_of(const char *name, char *link, size_t room)
{
    char path[64];

    snprintf(path, sizeof(path), "/proc/self/fd/%.16s", name);
    ssize_t length = readlink(path, link, room - 1);
    if (length <= 0)
        return false;
    link[length] = 0;
    return true;
}

/* Put another file behind a descriptor's number. */
static bool replace(int fd, int by)
{
    int flags = fcntl(fd, F_GETFD);

    return flags >= 0 && dup3(by, fd, flags & FD_CLOEXEC ? O_CLOEXEC : 0) >= 0;
}

static void descriptors_away(void)
{
    static const char folder[] = NODE_FOLDER "/memory/";
    char link[128];
    DIR *all = opendir("/proc/self/fd");
    int control = open("/dev/nvidiactl", O_RDWR | O_CLOEXEC);

    for (struct dirent *entry; all && control >= 0 && (entry = readdir(all));) {
        struct stand_in *made;
        if (!link_of(entry->d_name, link, sizeof(link)) || strncmp(link, folder, sizeof(folder) - 1) != 0)
            continue;
        made = calloc(1, sizeof(*made));
        if (!made || !replace(atoi(entry->d_name), control)) {
            free(made);
            continue;
        }
        uint64_t id = strtoull(link + sizeof(folder) - 1, NULL, 10);
        made->fd = atoi(entry->d_name);
        for (size_t i = 0; i < vmm_n_memories; i++)
            if (vmm_memories[i]->block == id)
                made->handle = vmm_memories[i]->handle;
        made->next = stand_ins;
        stand_ins = made;
    }
    if (control >= 0)
        close(control);
    if (all)
        closedir(all);
}

static void descriptors_back(void)
{
    for (struct stand_in *one; (one = stand_ins);) {
        size_t place = vmm_memory_place(one->handle);
        char name[16], link[128];
        stand_ins = one->next;
        snprintf(name, sizeof(name), "%d", one->fd);
        /* The application may have closed it meanwhile. Where CRIU had no /dev/nvidiactl, it is /dev/null. */
        if (place < vmm_n_memories && vmm_memories[place]->handle == one->handle && link_of(name, link, sizeof(link))
            && (!strcmp(link, "/dev/nvidiactl") || !strcmp(link, "/dev/null"))) {
            int fd = block_open(vmm_memories[place]->block);
            if (fd >= 0) {
                replace(one->fd, fd);
                close(fd);
            }
        }
        free(one);
    }
}

void vmm_release(void)
{
    driver_lock();
    descriptors_away(); /* first: it looks for the blocks' numbers */
    for (size_t i = 0; i < vmm_mappings.n; i++) {
        struct mapping *mapping = (struct mapping *)vmm_mappings.items[i];
        if (mapping->memory->holder)
            block_unmap(mapping->piece.start, mapping->piece.bytes, mapping->memory->block);
    }
    for (size_t i = 0; i < vmm_n_memories; i++) {
        block_let_go(vmm_memories[i]->holder, vmm_memories[i]->block, !vmm_memories[i]->imported);
        if (vmm_memories[i]->holder)
            vmm_memories[i]->before = vmm_memories[i]->block;
        vmm_memories[i]->holder = NULL;
    }
    driver_unlock();
}

static int hold_same(struct memory *memory, const struct memory *same)
{
    int fd = block_open(same->block);

    if (fd < 0)
        return fd;
    memory->block = same->block;
    memory->holder = block_hold(fd);
    close(fd);
    return memory->holder ? 0 : -ENOMEM;
}

int vmm_claim(void)
{
    int error = 0;

    driver_lock();
    for (size_t i = 0; i < vmm_n_memories && !error; i++) {
        struct memory *memory = vmm_memories[i], *same = original(i, true);
        if (!memory->holder && same)
            error = hold_same(memory, same);
        else if (!memory->holder)
            error = block_take(gpu_after(driver.devices[memory->ordinal]), memory->bytes, NODE_VMM, 0, &memory->block,
                               &memory->holder);
    }
    for (size_t i = 0; i < vmm_mappings.n && !error; i++) {
        struct mapping *mapping = (struct mapping *)vmm_mappings.items[i];
        error = block_map(mapping->memory->block, mapping->piece.bytes, mapping->piece.start, vmm_protection(mapping));
    }
    if (!error)
        descriptors_back();
    driver_unlock();
    return error;
}

/* Nothing of it is mapped in a child (MADV_DONTFORK), and no descriptor is kept. */
void vmm_forked(void)
{
    vmm_n_memories = 0;
    vmm_reservations.n = vmm_mappings.n = 0;
    stand_ins = NULL;
}
