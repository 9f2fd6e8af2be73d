#include "fds.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#define HIGHEST 65536 /* a table of descriptors as long as the largest is the kernel's to keep */

static struct rlimit before; /* only the shim's own thread raises it for longer */
static bool raised;

void fds_more(void)
{
    if (raised || getrlimit(RLIMIT_NOFILE, &before) || before.rlim_cur >= before.rlim_max)
        return;
    raised = !setrlimit(RLIMIT_NOFILE, &(struct rlimit){before.rlim_max, before.rlim_max});
}

void fds_as_before(void)
{
    struct rlimit now;

    /* Whoever has changed it meanwhile has meant it. */
    if (raised && !getrlimit(RLIMIT_NOFILE, &now) && now.rlim_cur == before.rlim_max)
        setrlimit(RLIMIT_NOFILE, &before);
    raised = false;
}

int fds_away(int fd)
{
    struct rlimit now;

    if (fd < 0 || getrlimit(RLIMIT_NOFILE, &now))
        return fd;
    bool more = now.rlim_cur < now.rlim_max && now.rlim_cur < HIGHEST
        && !setrlimit(RLIMIT_NOFILE, &(struct rlimit){now.rlim_max, now.rlim_max});
    rlim_t least = more ? now.rlim_cur : now.rlim_cur / 2;
    int there = fcntl(fd, F_DUPFD_CLOEXEC, (int)(least < HIGHEST ? least : HIGHEST));
    if (more)
        setrlimit(RLIMIT_NOFILE, &now);
    if (there < 0)
        return fd;
    close(fd);
    return there;
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
