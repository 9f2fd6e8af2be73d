/* Where the ranks of a communicator meet: a file of the node's folder, mapped by each of their processes.
 *
 * Its name is made from the unique id. It is there from the first rank's coming until all are connected; a file whose
 * ranks were killed before that is held (flock) by nobody, and the next ncclGetUniqueId takes it away.
 */
#define _GNU_SOURCE
#include "comm.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOOK_NANOSECONDS 20000000 /* how often who waits looks whether it was aborted, though nobody tells it */
#define PATH_ROOM 96

/* Two FNV-1a hashes: no secret, but as good as never the same for two. */
void name_of(char name[NAME_ROOM], const void *from, size_t bytes)
{
    uint64_t hash[2] = {0xcbf29ce484222325u, 0x9ae16a3b2f90404fu};

    for (int half = 0; half < 2; half++)
        for (size_t i = 0; i < bytes; i++)
            hash[half] = (hash[half] ^ ((const unsigned char *)from)[i]) * 0x100000001b3u + (uint64_t)half;
    snprintf(name, NAME_ROOM, "%016llx%016llx", (unsigned long long)hash[0], (unsigned long long)hash[1]);
}

static void path_of(char path[PATH_ROOM], const char *name)
{
    snprintf(path, PATH_ROOM, NCCL_FOLDER "%s", name);
}

/* -------------------------------------------------------------------------------------------------- the file --- */

/* Open and hold the file, as the first rank or a later one: -1 with errno. */
static int open_held(const char *path)
{
    for (;;) {
        struct stat named, opened;
        int fd = node_open_file(path, O_RDWR | O_CREAT);
        if (fd < 0)
            return -1;
        if (flock(fd, LOCK_SH) == 0 && fstat(fd, &opened) == 0 && stat(path, &named) == 0
            && named.st_ino == opened.st_ino) {
            fchmod(fd, 0666); /* whatever the umask is: other users' ranks come, too */
            if (ftruncate(fd, sizeof(struct shared)) == 0)
                return fd;
            close(fd);
            return -1;
        }
        close(fd); /* it was taken away meanwhile */
    }
}

/* Ranks of one process use one mapping of a file. So the sanitizers see what orders their threads. */
struct mapping {
    struct mapping *next;
    struct shared *shared;
    char name[NAME_ROOM];
    ino_t inode; /* one name can be that of several files, one after the other */
    int uses;
};
static pthread_mutex_t mappings_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct mapping *mappings;

/* A child has none of them. */
static void forked(void)
{
    pthread_mutex_init(&mappings_mutex, NULL);
    mappings = NULL;
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, forked);
}

static struct mapping *map_new(const char *name, int fd, ino_t inode)
{
    struct mapping *made = malloc(sizeof(*made));
    struct shared *shared = made ? mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;

    if (shared == MAP_FAILED) {
        free(made);
        return NULL;
    }
    madvise(shared, sizeof(*shared), MADV_DONTFORK);
    *made = (struct mapping){.next = mappings, .shared = shared, .inode = inode};
    strcpy(made->name, name);
    mappings = made;
    return made;
}

/* The mapping of an open file, which goes on holding it. */
static struct shared *map_open(const char *name, int fd)
{
    struct stat opened;

    if (fstat(fd, &opened) != 0)
        return NULL;
    pthread_mutex_lock(&mappings_mutex);
    struct mapping *found = mappings;
    while (found && (found->inode != opened.st_ino || strcmp(found->name, name) != 0))
        found = found->next;
    if (!found)
        found = map_new(name, fd, opened.st_ino);
    if (found)
        found->uses++;
    pthread_mutex_unlock(&mappings_mutex);
    return found ? found->shared : NULL;
}

static struct shared *map(const char *name)
{
    char path[PATH_ROOM];

    path_of(path, name);
    int fd = open_held(path);
    if (fd < 0) {
        say("%s: %s", path, strerror(errno));
        return NULL;
    }
    struct shared *shared = map_open(name, fd);
    close(fd);
    return shared;
}

static void unmap(struct shared *shared)
{
    pthread_mutex_lock(&mappings_mutex);
    struct mapping **at = &mappings, *last = NULL;
    while (*at && (*at)->shared != shared)
        at = &(*at)->next;
    if (*at && --(*at)->uses == 0) {
        last = *at;
        *at = last->next;
        munmap(shared, sizeof(*shared));
    }
    pthread_mutex_unlock(&mappings_mutex);
    free(last);
}

bool shared_join(struct comm *comm, ncclResult_t *result)
{
    uint32_t none = 0, no_size = 0;
    struct shared *shared = map(comm->name);

    *result = ncclSystemError;
    if (!shared)
        return false;
    comm->shared = shared;
    struct member *own = &shared->members[comm->rank];
    *result = ncclInvalidUsage;
    if (!atomic_compare_exchange_strong(&shared->n, &no_size, (uint32_t)comm->n) && no_size != (uint32_t)comm->n) {
        say("another rank says that there are %u ranks, not %d", no_size, comm->n);
        shared_fail(comm, ncclInvalidUsage);
        return false;
    }
    if (!atomic_compare_exchange_strong(&own->taken, &none, 1)) {
        say("there is a rank %d already", comm->rank);
        shared_fail(comm, ncclInvalidUsage);
        return false;
    }
    comm->joined = true;
    own->pid = getpid();
    own->start_time = node_start_time(getpid());
    CUuuid uuid;
    *result = CUDA_TRY(cuDeviceGetUuid, &uuid, comm->device);
    memcpy(own->uuid, &uuid, sizeof(own->uuid));
    if (*result != ncclSuccess) {
        shared_fail(comm, ncclRemoteError);
        return false;
    }
    atomic_fetch_add(&shared->joined, 1);
    shared_tell(shared);
    return true;
}

void shared_leave(struct comm *comm)
{
    if (comm->shared)
        unmap(comm->shared);
    comm->shared = NULL;
}

void shared_unname(struct comm *comm)
{
    char path[PATH_ROOM];

    path_of(path, comm->name);
    unlink(path);
    for (int rank = 0; rank < comm->n; rank++) { /* also of ranks that were killed */
        snprintf(path, sizeof(path), NCCL_FOLDER "%s.%d", comm->name, rank);
        unlink(path);
    }
}

/* Take away what belongs to a file (sockets: NAME.RANK). */
static void unlink_all(DIR *folder, const char *name)
{
    int fd = dirfd(folder);

    rewinddir(folder);
    for (struct dirent *entry; (entry = readdir(folder));)
        if (fd >= 0 && !strncmp(entry->d_name, name, strlen(name)))
            unlinkat(fd, entry->d_name, 0);
}

void shared_reap(void)
{
    char names[16][NAME_ROOM];
    int n = 0;
    DIR *folder = opendir(NCCL_FOLDER);

    for (struct dirent *entry; folder && n < 16 && (entry = readdir(folder));) {
        char path[PATH_ROOM];
        if (entry->d_name[0] == '.' || strlen(entry->d_name) >= NAME_ROOM || strchr(entry->d_name, '.'))
            continue;
        path_of(path, entry->d_name);
        int fd = node_open_file(path, O_RDWR);
        if (fd < 0)
            continue;
        if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
            unlink(path);
            strcpy(names[n++], entry->d_name);
        }
        close(fd);
    }
    for (int i = 0; i < n; i++)
        unlink_all(folder, names[i]);
    if (folder)
        closedir(folder);
}

/* ------------------------------------------------------------------------------------------ telling, waiting --- */

static void futex(_Atomic uint32_t *word, int what, uint32_t value, const struct timespec *limit)
{
    syscall(SYS_futex, word, what, value, limit, NULL, 0);
}

void shared_tell(struct shared *shared)
{
    atomic_fetch_add(&shared->changes, 1);
    futex(&shared->changes, FUTEX_WAKE, INT_MAX, NULL);
}

void shared_fail(struct comm *comm, ncclResult_t error)
{
    uint32_t none = ncclSuccess;

    atomic_compare_exchange_strong(&comm->shared->error, &none, (uint32_t)error);
    shared_tell(comm->shared);
}

bool shared_await(struct comm *comm, bool (*holds)(struct comm *, uint64_t), uint64_t of)
{
    const struct timespec look = {0, LOOK_NANOSECONDS};

    for (;;) {
        uint32_t seen = atomic_load(&comm->shared->changes);
        uint32_t error = atomic_load(&comm->shared->error);
        if (comm->aborted)
            return false;
        if (error != ncclSuccess) {
            comm->async = (int)error;
            return false;
        }
        if (holds(comm, of))
            return true;
        futex(&comm->shared->changes, FUTEX_WAIT, seen, &look);
    }
}

/* Not a process that has ended and waits for its parent. */
bool member_lives(const struct member *member)
{
    char path[64], text[512];

    if (!node_same_start(node_start_time(member->pid), member->start_time))
        return false;
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)member->pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, text, sizeof(text) - 1);
    if (fd >= 0)
        close(fd);
    text[length > 0 ? length : 0] = 0;
    const char *after = strrchr(text, ')');
    return after && strlen(after) > 2 && after[2] != 'Z' && after[2] != 'X';
}
