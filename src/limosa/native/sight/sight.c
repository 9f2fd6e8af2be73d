/* `limosa run --gpus`: a program sees some GPUs only.
 *
 * NVIDIA's libraries open /dev/nvidiaN of every GPU that there is and leave out those that they may not open, as where a
 * cgroup forbids it. This library, preloaded, forbids it: which may be opened is in a file that LIMOSA_SEES names, read
 * anew each time, since a move changes it. Where there is no such file nothing is hidden. A program that opens device
 * nodes without the C library's open() is not held back: this keeps GPUs out of sight, it does not guard them.
 *
 * Everything else that a program opens goes on to the C library by the name that glibc has for it beside open(); it is a
 * point of cancellation there as well. Other C libraries get the system call. */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define NODE "/dev/nvidia"
#define PATH_ROOM 4096
#define LIST_ROOM 1024 /* "0,1,2": some hundred GPUs */

int __open64(const char *path, int flags, ...) __attribute__((weak));

static char list[PATH_ROOM]; /* copied: a program may do with its environment what it wants */

__attribute__((constructor)) static void begin(void)
{
    const char *path = secure_getenv("LIMOSA_SEES");

    if (path && strlen(path) < sizeof list)
        strcpy(list, path);
}

static int plain_open(const char *path, int flags, mode_t mode)
{
    return __open64 ? __open64(path, flags, mode) : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

/* N of "/dev/nvidiaN", -1 for everything else. */
static int minor_of(const char *path)
{
    if (!path || strncmp(path, NODE, sizeof NODE - 1) != 0)
        return -1;
    const char *digits = path + sizeof NODE - 1;
    size_t n = strspn(digits, "0123456789");
    return n > 0 && n < 6 && !digits[n] ? atoi(digits) : -1;
}

/* Of whoever started the job, or root: after a restart somebody else may have taken the name of the folder. */
static bool is_ours(int fd)
{
    struct stat found;

    return fstat(fd, &found) == 0 && S_ISREG(found.st_mode)
        && (found.st_uid == 0 || found.st_uid == geteuid() || found.st_uid == getuid());
}

static bool may_open(int minor)
{
    char text[LIST_ROOM];
    ssize_t n = -1;
    int kept = errno;
    if (!list[0])
        begin(); /* a process that was forked, and told since */
    int fd = list[0] ? (int)syscall(SYS_openat, AT_FDCWD, list, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0) : -1;

    if (fd >= 0) {
        n = is_ours(fd) ? read(fd, text, sizeof text - 1) : -1;
        close(fd);
    }
    errno = kept;
    if (n < 0)
        return true;
    text[n] = 0;
    for (char *at = text, *end; *at; at = end + (*end != 0))
        if (strtol(at, &end, 10) == minor && end > at)
            return true;
        else if (end == at)
            end = at + strcspn(at, ",\n");
    return false;
}

static int guarded_open(const char *path, int flags, mode_t mode)
{
    int minor = minor_of(path);

    if (minor >= 0 && !may_open(minor)) {
        errno = EPERM;
        return -1;
    }
    return plain_open(path, flags, mode);
}

static mode_t mode_of(int flags, va_list arguments)
{
    return flags & (O_CREAT | __O_TMPFILE) ? (mode_t)va_arg(arguments, int) : 0;
}

#define OPEN(name)                                                                                                     \
    EXPORT int name(const char *path, int flags, ...)                                                                  \
    {                                                                                                                  \
        va_list arguments;                                                                                             \
        va_start(arguments, flags);                                                                                    \
        mode_t mode = mode_of(flags, arguments);                                                                       \
        va_end(arguments);                                                                                             \
        return guarded_open(path, flags, mode);                                                                        \
    }
OPEN(open)
OPEN(open64)
