/* The guard cannot become root again after it has opened a file as the job's user: guard.c, with system calls that say so. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

static int opened;

static long kernel(long number, ...)
{
    va_list arguments;
    long first, second;

    va_start(arguments, number);
    first = va_arg(arguments, long);
    second = va_arg(arguments, long);
    va_end(arguments);
    (void)first;
    if (number == SYS_setresuid && (uid_t)second == 0) {
        errno = EPERM;
        return -1;
    }
    if (number == SYS_openat) {
        opened++;
        return dup(1);
    }
    return 0;
}
#define syscall kernel
#include "guard.c"

int main(void)
{
    int fd = open_of_kernel(AT_FDCWD, "proc/self/status", O_RDONLY, 0);

    printf("%d %d\n", fd, opened);
    return 0;
}
