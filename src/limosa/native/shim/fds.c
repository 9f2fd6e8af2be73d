#include "fds.h"
#include "compiler.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define HIGHEST 65536 /* a table of descriptors as long as the largest is the kernel's to keep */
#define NOTED (1 << 20) /* the kernel's own limit where nobody has raised it */
#define LOCK_MS 500

/* The limit, the notes, and what is between fds_begin and fds_end: also of application threads, outside of the gate. */
static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
static TLS int forks; /* that this thread is in: a handler may fork in the middle of one */
static TLS bool locked; /* this thread has the lock */
static TLS sigset_t signals;
static TLS int cancelled;
static struct rlimit before;
static bool raised;
static uint64_t noted[NOTED / 64]; /* a bit for each number; pages that are not needed are not there */

/* Whoever is in a fork may wait for somebody at the closed gate: nobody waits for the lock longer than this. Without it a
 * child may get a descriptor of ours, which costs memory, but no life. */
static bool lock(void)
{
    struct timespec end;

    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_nsec += LOCK_MS * 1000000;
    if (end.tv_nsec >= 1000000000) {
        end.tv_sec++;
        end.tv_nsec -= 1000000000;
    }
    return !pthread_mutex_timedlock(&one, &end);
}

/* No handler runs with the lock: it might call the driver and sleep at the closed gate. */
void fds_begin(void)
{
    sigset_t all;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &signals);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancelled);
    locked = lock();
}

void fds_end(void)
{
    int errno_before = errno;

    if (locked)
        pthread_mutex_unlock(&one);
    locked = false;
    pthread_setcancelstate(cancelled, NULL);
    pthread_sigmask(SIG_SETMASK, &signals, NULL);
    errno = errno_before;
}

int fds_note(int fd)
{
    if (fd >= 0 && fd < NOTED)
        noted[fd / 64] |= (uint64_t)1 << fd % 64;
    return fd;
}

/* Before its number can be somebody else's. */
void fds_forget(int fd)
{
    if (fd >= 0 && fd < NOTED)
        noted[fd / 64] &= ~((uint64_t)1 << fd % 64);
}

void fds_close(int fd)
{
    fds_begin();
    fds_forget(fd);
    close(fd);
    fds_end();
}

void fds_more(void)
{
    fds_begin();
    if (!raised && !getrlimit(RLIMIT_NOFILE, &before) && before.rlim_cur < before.rlim_max)
        raised = !setrlimit(RLIMIT_NOFILE, &(struct rlimit){before.rlim_max, before.rlim_max});
    fds_end();
}

/* Whoever has changed it meanwhile has meant it. */
static void lower(void)
{
    struct rlimit now;

    if (raised && !getrlimit(RLIMIT_NOFILE, &now) && now.rlim_cur == before.rlim_max)
        setrlimit(RLIMIT_NOFILE, &before);
    raised = false;
}

void fds_as_before(void)
{
    fds_begin();
    lower();
    fds_end();
}

int fds_away(int fd)
{
    struct rlimit now;

    if (fd < 0)
        return fd;
    fds_begin();
    fds_note(fd);
    if (!getrlimit(RLIMIT_NOFILE, &now)) {
        rlim_t soft = raised && now.rlim_cur == before.rlim_max ? before.rlim_cur : now.rlim_cur;
        bool above = soft < now.rlim_max && soft < HIGHEST;
        bool more = above && now.rlim_cur == soft
            && !setrlimit(RLIMIT_NOFILE, &(struct rlimit){now.rlim_max, now.rlim_max});
        rlim_t least = above && (more || now.rlim_cur > soft) ? soft : soft / 2;
        int there = fcntl(fd, F_DUPFD_CLOEXEC, (int)(least < HIGHEST ? least : HIGHEST));
        if (more)
            setrlimit(RLIMIT_NOFILE, &now);
        if (there >= 0) {
            fds_forget(fd);
            close(fd);
            fd = fds_note(there);
        }
    }
    fds_end();
    return fd;
}

bool fds_room(size_t more)
{
    DIR *all = opendir("/proc/self/fd");
    struct rlimit limit;
    size_t n = 0;

    if (!all || getrlimit(RLIMIT_NOFILE, &limit)) {
        if (all)
            closedir(all);
        return true; /* who knows; what does not fit fails where it is tried */
    }
    while (readdir(all))
        n++;
    closedir(all);
    return limit.rlim_max == RLIM_INFINITY || n + more <= limit.rlim_max;
}

void fds_before_fork(void)
{
    int errno_before = errno;

    if (!forks++)
        locked = lock();
    errno = errno_before;
}

void fds_after_fork(void)
{
    if (--forks)
        return;
    if (locked)
        pthread_mutex_unlock(&one);
    locked = false;
}

void fds_in_child(void)
{
    forks = 0;
    locked = false;
    pthread_mutex_init(&one, NULL);
    lower();
    for (int word = 0; word < NOTED / 64; word++)
        for (; noted[word]; noted[word] &= noted[word] - 1)
            close(word * 64 + __builtin_ctzll(noted[word]));
}
