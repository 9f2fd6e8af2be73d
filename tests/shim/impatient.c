/* Preloaded beside the shim: limits of sockets are hundredths of what was asked for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/time.h>

int setsockopt(int fd, int level, int option, const void *value, socklen_t size)
{
    static int (*real)(int, int, int, const void *, socklen_t);
    struct timeval less;

    if (!real)
        real = (int (*)(int, int, int, const void *, socklen_t))dlsym(RTLD_NEXT, "setsockopt");
    if (level == SOL_SOCKET && (option == SO_RCVTIMEO || option == SO_SNDTIMEO) && size == sizeof less) {
        long all = ((const struct timeval *)value)->tv_sec * 10000;
        less = (struct timeval){all / 1000000, all % 1000000};
        value = &less;
    }
    return real(fd, level, option, value, size);
}
