/* The node's shared state: mapping it, locking it, and the accounting of device memory (node.h says how memory lives). */
#define _GNU_SOURCE
#include "node.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#define STATE_FILE NODE_FOLDER "/state"
#define LOCK_FILE NODE_FOLDER "/lock"
#define LOG_FILE NODE_FOLDER "/log"
#define MEMORY_FOLDER NODE_FOLDER "/memory/"
#define PATH_ROOM 128
#define MEM_MAJOR 1 /* /dev/null, with which a device node is covered, may have a GPU's minor number */

_Static_assert(NODE_MAX_BLOCKS == 65536, "a block's id holds its place in 16 bits");

static pthread_mutex_t mapping_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct node_state *mapped; /* where the state is or was mapped */
static bool mapping_is_live; /* the node's own, not the copy that node_close leaves */
static atomic_bool closed; /* node_close was called, node_reopen was not: nothing of the node may be opened */

/* One thread of a process at a time holds the node's lock, so that there is at most one descriptor to close in a child
 * that is forked meanwhile: it would otherwise keep a name of the node open for its whole life. */
static pthread_mutex_t lock_mutex = PTHREAD_MUTEX_INITIALIZER;
static atomic_int lock_descriptor = -1;

/* -------------------------------------------------------------------------------------------- files of others --- */

int node_open_file(const char *path, int flags)
{
    struct stat info;
    int fd = open(path, flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0666);
    if (fd < 0)
        return -1;
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) {
        fcntl(fd, F_SETFL, flags & O_APPEND); /* that nothing was waited for is not to be seen later */
        return fd;
    }
    close(fd);
    errno = EPROTO;
    return -1;
}

/* ------------------------------------------------------------------------------------------------ the mapping --- */

/* No prepare handler: it would wait for threads that may be waiting for locks of the caller's. */
static void forked(void)
{
    int lock = atomic_exchange(&lock_descriptor, -1);
    if (lock >= 0)
        close(lock);
    pthread_mutex_init(&lock_mutex, NULL);
    pthread_mutex_init(&mapping_mutex, NULL);
    mapped = NULL; /* MADV_DONTFORK: it is not there */
    mapping_is_live = false;
    closed = false;
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, forked);
}

static struct node_state *map_state(void *at)
{
    int fd = node_open_file(STATE_FILE, O_RDWR);
    if (fd < 0)
        return NULL;
    struct stat info;
    struct node_state *state = MAP_FAILED;
    int problem = EPROTO;
    if (fstat(fd, &info) == 0 && info.st_size >= (off_t)sizeof(struct node_state)) {
        state = mmap(at, sizeof(struct node_state), PROT_READ | PROT_WRITE, MAP_SHARED | (at ? MAP_FIXED : 0), fd, 0);
        problem = errno;
    }
    close(fd);
    if (state == MAP_FAILED) {
        errno = problem;
        return NULL;
    }
    madvise(state, sizeof(struct node_state), MADV_DONTFORK);
    if (state->magic != NODE_MAGIC || state->size != sizeof(struct node_state)) {
        if (!at)
            munmap(state, sizeof(struct node_state));
        errno = EPROTO;
        return NULL;
    }
    return state;
}

struct node_state *node_open(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&mapping_mutex);
    if (!mapping_is_live && !closed) {
        struct node_state *state = map_state(mapped);
        if (state) {
            mapped = state;
            mapping_is_live = true;
        }
    }
    struct node_state *answer = mapping_is_live || closed ? mapped : NULL;
    int problem = errno;
    pthread_mutex_unlock(&mapping_mutex);
    errno = problem;
    return answer;
}

struct node_state *node_mapped(void)
{
    pthread_mutex_lock(&mapping_mutex);
    struct node_state *answer = mapping_is_live || closed ? mapped : NULL;
    pthread_mutex_unlock(&mapping_mutex);
    return answer;
}

bool node_peek(size_t offset, void *to, size_t bytes)
{
    struct {
        uint64_t magic;
        uint32_t size;
    } head;
    int kept = errno;
    int fd = closed ? -1 : node_open_file(STATE_FILE, O_RDONLY);
    bool found = fd >= 0 && pread(fd, &head, sizeof(head), 0) == sizeof(head) && head.magic == NODE_MAGIC
        && head.size == sizeof(struct node_state) && pread(fd, to, bytes, (off_t)offset) == (ssize_t)bytes;

    if (fd >= 0)
        close(fd);
    errno = kept;
    return found;
}

struct node_state *node_reopen(void)
{
    closed = false;
    struct node_state *state = node_open();
    if (!state)
        closed = true;
    return state;
}

/* The address stays readable (what the node was, blocks left out): threads of the application may be in the middle of a
 * question that no gate holds. */
void node_close(void)
{
    const size_t kept = offsetof(struct node_state, blocks);
    pthread_mutex_lock(&mapping_mutex);
    if (mapping_is_live) {
        void *copy = mmap(NULL, sizeof(struct node_state), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (copy == MAP_FAILED) {
            munmap(mapped, sizeof(struct node_state));
            mapped = NULL;
        } else {
            memcpy(copy, mapped, kept);
            ((struct node_state *)copy)->n_blocks = 0;
            ((struct node_state *)copy)->fault_generation = 0;
            if (mremap(copy, sizeof(struct node_state), sizeof(struct node_state), MREMAP_MAYMOVE | MREMAP_FIXED,
                       mapped)
                == MAP_FAILED) {
                munmap(mapped, sizeof(struct node_state));
                munmap(copy, sizeof(struct node_state));
                mapped = NULL;
            }
        }
        mapping_is_live = false;
    }
    closed = true;
    pthread_mutex_unlock(&mapping_mutex);
}

/* --------------------------------------------------------------------------------------------------- the lock --- */

int node_lock(void)
{
    pthread_mutex_lock(&lock_mutex);
    errno = ENODEV;
    int lock = closed ? -1 : node_open_file(LOCK_FILE, O_RDWR);
    if (lock >= 0) {
        atomic_store(&lock_descriptor, lock);
        int failed;
        while ((failed = flock(lock, LOCK_EX)) != 0 && errno == EINTR)
            ;
        if (!failed)
            return lock;
        int problem = errno;
        atomic_store(&lock_descriptor, -1);
        close(lock);
        errno = problem;
    }
    int problem = errno;
    pthread_mutex_unlock(&lock_mutex);
    errno = problem;
    return -1;
}

void node_unlock(int lock)
{
    if (lock < 0)
        return;
    int kept = errno;
    flock(lock, LOCK_UN); /* a child that was forked meanwhile and has not got to its handler shares the description */
    atomic_store(&lock_descriptor, -1);
    close(lock);
    pthread_mutex_unlock(&lock_mutex);
    errno = kept;
}

/* ----------------------------------------------------------------------------------------------------- blocks --- */

static void block_path(char *path, uint64_t id)
{
    snprintf(path, PATH_ROOM, MEMORY_FOLDER "%llu", (unsigned long long)id);
}

/* Free a place if nobody holds its block. The lock is held. */
static void reap_place(struct node_state *node, int place)
{
    struct node_block *block = &node->blocks[place];
    if (!block->id)
        return;
    char path[PATH_ROOM];
    block_path(path, block->id);
    int fd = node_open_file(path, O_RDONLY);
    if (fd < 0) {
        if (errno == ENOENT) /* whoever made it was killed before the file was there */
            block->id = 0;
        return;
    }
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
        unlink(path);
        block->id = 0;
    }
    close(fd);
}

static void reap(struct node_state *node)
{
    for (int place = 0; place < node_blocks(node); place++)
        reap_place(node, place);
    int used = node_blocks(node);
    while (used > 0 && !node->blocks[used - 1].id)
        used--;
    node->n_blocks = used;
}

void node_reap(bool locked)
{
    struct node_state *node = node_open();
    if (!node)
        return;
    int lock = locked ? -1 : node_lock();
    if (locked || lock >= 0)
        reap(node);
    node_unlock(lock);
}

void node_dropped(uint64_t id, bool disowned)
{
    struct node_state *node = node_open();
    int place = (int)(id % NODE_MAX_BLOCKS);
    int lock = node ? node_lock() : -1;
    if (lock < 0)
        return;
    if (place < node_blocks(node) && node->blocks[place].id == id) {
        if (disowned)
            node->blocks[place].pid = 0;
        reap_place(node, place);
    }
    node_unlock(lock);
}

static uint64_t used(const struct node_state *node, int gpu)
{
    uint64_t bytes = node->gpus[gpu].reserved;
    for (int place = 0; place < node_blocks(node); place++)
        if (node->blocks[place].id && node->blocks[place].gpu == gpu)
            bytes += node->blocks[place].bytes;
    return bytes;
}

static int free_place(struct node_state *node)
{
    for (int place = 0; place < node_blocks(node); place++)
        if (!node->blocks[place].id)
            return place;
    int used = node_blocks(node);
    return used < NODE_MAX_BLOCKS ? used : -1;
}

static bool fits(const struct node_state *node, int gpu, uint64_t bytes)
{
    uint64_t taken = used(node, gpu), memory = node->gpus[gpu].memory;
    return taken <= memory && bytes <= memory - taken;
}

/* Make a block's file. Its place is written first: a file without a place would stay for ever. */
static int make_block(struct node_state *node, int place, int gpu, uint64_t bytes, enum node_kind kind, int *fd)
{
    struct node_block *block = &node->blocks[place];
    uint64_t id = ++node->next_block * NODE_MAX_BLOCKS + (uint64_t)place;
    block->bytes = bytes;
    block->pid = getpid();
    block->start_time = node_start_time(getpid());
    block->pid_namespace = node_pid_namespace();
    block->gpu = (int16_t)gpu;
    block->kind = (int16_t)kind;
    if (place >= node_blocks(node))
        node->n_blocks = place + 1;
    __atomic_store_n(&block->id, id, __ATOMIC_RELEASE);

    char path[PATH_ROOM];
    block_path(path, id);
    int made = node_open_file(path, O_RDWR | O_CREAT | O_EXCL);
    if (made >= 0 && flock(made, LOCK_SH | LOCK_NB) == 0 && ftruncate(made, (off_t)bytes) == 0) {
        fchmod(made, 0666); /* whatever the umask is: others must be able to look whether it is held */
        *fd = made;
        return 0;
    }
    int problem = errno;
    if (made >= 0) {
        unlink(path);
        close(made);
    }
    block->id = 0;
    return -problem;
}

int node_take(int gpu, uint64_t bytes, enum node_kind kind, int *fd, uint64_t *id)
{
    struct node_state *node = node_open();
    if (!node)
        return -errno;
    if (gpu < 0 || gpu >= node_gpus(node))
        return -EINVAL;
    if (bytes > UINT64_MAX / 2)
        return -ENOMEM;
    if (kind != NODE_CONTEXT)
        bytes = (bytes + NODE_GRANULARITY - 1) / NODE_GRANULARITY * NODE_GRANULARITY;
    int lock = node_lock();
    if (lock < 0)
        return -errno;
    int result = 0;
    if (node->gpus[gpu].lost) {
        result = -ENODEV;
    } else {
        /* Looking at every block takes time; done only where it is needed. */
        int place = free_place(node);
        if (place < 0 || !fits(node, gpu, bytes)) {
            reap(node);
            place = free_place(node);
        }
        if (!fits(node, gpu, bytes))
            result = -ENOMEM;
        else if (place < 0)
            result = -ENOSPC;
        else
            result = make_block(node, place, gpu, bytes, kind, fd);
        if (result == 0 && id)
            *id = node->blocks[place].id;
    }
    node_unlock(lock);
    return result;
}

int node_identify(int fd, uint64_t *id, int *gpu, uint64_t *bytes, enum node_kind *kind)
{
    struct node_state *node = node_open();
    char link[64], path[PATH_ROOM], *end;
    struct stat mine, named;
    if (!node || fd < 0)
        return -EINVAL;
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof(path) - 1);
    if (length <= (ssize_t)strlen(MEMORY_FOLDER))
        return -EINVAL;
    path[length] = 0;
    if (strncmp(path, MEMORY_FOLDER, strlen(MEMORY_FOLDER)) != 0)
        return -EINVAL;
    uint64_t named_id = strtoull(path + strlen(MEMORY_FOLDER), &end, 10);
    /* The name alone could be that of a file of another node. */
    if (*end || fstat(fd, &mine) || lstat(path, &named) || mine.st_dev != named.st_dev || mine.st_ino != named.st_ino)
        return -EINVAL;

    int place = (int)(named_id % NODE_MAX_BLOCKS), result = -EINVAL;
    int lock = node_lock();
    if (lock < 0)
        return -EINVAL;
    const struct node_block *block = &node->blocks[place];
    if (named_id && place < node_blocks(node) && block->id == named_id) {
        int its_gpu = __atomic_load_n(&block->gpu, __ATOMIC_RELAXED);
        uint64_t its_bytes = __atomic_load_n(&block->bytes, __ATOMIC_RELAXED);
        if (id)
            *id = named_id;
        if (gpu)
            *gpu = its_gpu;
        if (bytes)
            *bytes = its_bytes;
        if (kind)
            *kind = (enum node_kind)block->kind;
        if (its_gpu >= 0 && its_gpu < node_gpus(node) && its_bytes <= NODE_MOST_BYTES
            && its_bytes <= (uint64_t)mine.st_size)
            result = 0;
    }
    node_unlock(lock);
    return result;
}

uint64_t node_used(int gpu)
{
    struct node_state *node = node_open();
    if (!node || gpu < 0 || gpu >= node_gpus(node))
        return 0;
    int lock = node_lock();
    if (lock < 0)
        return 0;
    reap(node);
    uint64_t bytes = used(node, gpu);
    node_unlock(lock);
    return bytes;
}

/* -------------------------------------------------------------------------------------------------- processes --- */

/* How many clock ticks this process's boot-time clock is ahead of the machine's (time_namespaces(7)). */
static int64_t clock_ahead(void)
{
    char text[256], *at;
    int fd = open("/proc/self/timens_offsets", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof(text) - 1);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    long long seconds = 0, nanoseconds = 0;
    at = strstr(text, "boottime");
    if (!at || sscanf(at, "boottime %lld %lld", &seconds, &nanoseconds) != 2)
        return 0;
    long ticks = sysconf(_SC_CLK_TCK);
    return seconds * ticks + nanoseconds / (1000000000 / ticks);
}

bool node_same_start(uint64_t one, uint64_t other)
{
    return one && other && (one > other ? one - other : other - one) <= 1;
}

uint64_t node_start_time(pid_t pid)
{
    char path[64], text[1024], *at;
    if (pid == getpid()) /* whose pids /proc has may be another namespace's */
        snprintf(path, sizeof(path), "/proc/self/stat");
    else
        snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    /* NOLINTNEXTLINE(clang-analyzer-unix.BlockInCriticalSection): of /proc/PID/stat nobody waits for anything. */
    ssize_t length = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (length <= 0)
        return 0;
    text[length] = 0;
    at = strrchr(text, ')'); /* the name may hold spaces and brackets */
    if (!at)
        return 0;
    for (int field = 2; field < 22; field++) {
        at = strchr(at + 1, ' ');
        if (!at)
            return 0;
    }
    return (uint64_t)((int64_t)strtoull(at + 1, NULL, 10) - clock_ahead());
}

static uint64_t pid_namespace_of(const char *process)
{
    char path[64], text[64] = "";
    unsigned long long inode = 0;
    snprintf(path, sizeof(path), "/proc/%.20s/ns/pid", process);
    ssize_t length = readlink(path, text, sizeof(text) - 1);
    return length > 0 && sscanf(text, "pid:[%llu]", &inode) == 1 ? inode : 0;
}

uint64_t node_pid_namespace(void)
{
    return pid_namespace_of("self");
}

/* No driver has that number: whoever may open the node hears ENXIO, and who may not hears it from a device cgroup. */
static bool may_open(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0)
        close(fd);
    return fd >= 0 || errno == ENXIO || errno == ENODEV;
}

bool node_openable(const struct node_gpu *gpu)
{
    char path[64];
    struct stat info;
    snprintf(path, sizeof path, "/dev/nvidia%d", gpu->minor);
    if (stat(path, &info) != 0 || !S_ISCHR(info.st_mode) || (int)minor(info.st_rdev) != gpu->minor
        || major(info.st_rdev) == MEM_MAJOR || faccessat(AT_FDCWD, path, R_OK | W_OK, AT_EACCESS) != 0
        || !may_open(path))
        return false;
    int fd = open(path, O_PATH | O_CLOEXEC); /* nobody may be behind the node; whoever hooks open() hears of it */
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

/* What a process is called in the innermost pid namespace that it is in; 0 where it has gone. */
static pid_t innermost_pid(const char *process)
{
    char path[64], line[256];
    pid_t pid = 0;
    snprintf(path, sizeof(path), "/proc/%.20s/status", process);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    /* NOLINTNEXTLINE(clang-analyzer-unix.BlockInCriticalSection): of /proc/PID/status nobody waits for anything. */
    while (!pid && fgets(line, sizeof(line), file))
        if (!strncmp(line, "NSpid:", 6)) {
            const char *last = strrchr(line, '\t');
            pid = last ? (pid_t)strtol(last, NULL, 10) : 0;
        }
    fclose(file);
    return pid;
}

/* What whoever made a block is called here: 0 where it has ended, or is none of this pid namespace or those in it. */
static pid_t maker_of(const struct node_block *block, uint64_t own_namespace)
{
    pid_t found = 0;
    if (!block->pid) /* disowned */
        return 0;
    if (!block->pid_namespace || block->pid_namespace == own_namespace)
        return node_same_start(node_start_time(block->pid), block->start_time) ? block->pid : 0;
    DIR *processes = opendir("/proc");
    if (!processes)
        return 0;
    for (struct dirent *entry; !found && (entry = readdir(processes));)
        if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9'
            && pid_namespace_of(entry->d_name) == block->pid_namespace && innermost_pid(entry->d_name) == block->pid) {
            pid_t pid = (pid_t)strtol(entry->d_name, NULL, 10);
            if (node_same_start(node_start_time(pid), block->start_time))
                found = pid;
        }
    closedir(processes);
    return found;
}

int node_processes(int gpu, struct node_process *found, int room)
{
    struct node_state *node = node_open();
    uint64_t own_namespace = node_pid_namespace();
    int n = 0;
    if (!node || gpu < 0 || gpu >= node_gpus(node))
        return 0;
    int lock = node_lock();
    if (lock < 0)
        return 0;
    reap(node);
    for (int place = 0; place < node_blocks(node); place++) {
        const struct node_block *block = &node->blocks[place];
        if (!block->id || block->gpu != gpu || block->kind == NODE_RESERVED)
            continue;
        /* Each process once, at its first block. */
        uint64_t bytes = 0;
        bool seen = false;
        for (int other = 0; other < node_blocks(node); other++) {
            const struct node_block *its = &node->blocks[other];
            if (!its->id || its->gpu != gpu || its->pid != block->pid || its->pid_namespace != block->pid_namespace
                || !node_same_start(its->start_time, block->start_time) || its->kind == NODE_RESERVED)
                continue;
            if (other < place) {
                seen = true;
                break;
            }
            bytes += its->bytes;
        }
        /* Memory may outlive its maker, held by whoever imported it. */
        pid_t pid = seen ? 0 : maker_of(block, own_namespace);
        if (!pid)
            continue;
        if (n < room)
            found[n] = (struct node_process){.pid = pid, .bytes = bytes};
        n++;
    }
    node_unlock(lock);
    return n;
}

/* ----------------------------------------------------------------------------------------------- log and pace --- */

void node_log(const char *format, ...)
{
    char line[512];
    int kept = errno;
    if (closed)
        return;
    int fd = node_open_file(LOG_FILE, O_WRONLY | O_APPEND);
    if (fd >= 0) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        int at = snprintf(line, sizeof(line), "%lld.%06ld %d ", (long long)now.tv_sec, now.tv_nsec / 1000, getpid());
        va_list arguments;
        va_start(arguments, format);
        int more = vsnprintf(line + at, sizeof(line) - (size_t)at - 1, format, arguments);
        va_end(arguments);
        at += more < 0 ? 0 : more;
        if (at > (int)sizeof(line) - 2)
            at = (int)sizeof(line) - 2;
        line[at++] = '\n';
        if (write(fd, line, (size_t)at) < 0) { /* nowhere to say it */
        }
        close(fd);
    }
    errno = kept;
}

double node_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void node_pace(double since, double seconds, uint64_t bytes, double rate)
{
    double until = since + seconds + (rate > 0 ? (double)bytes / rate : 0);
    for (double left; (left = until - node_now()) > 0;) {
        struct timespec rest = {.tv_sec = (time_t)left, .tv_nsec = (long)((left - (double)(time_t)left) * 1e9)};
        nanosleep(&rest, NULL);
    }
}
