/* Closes every descriptor that it can name, as daemons do, once the driver is there; then allocates, and lives until its
 * input ends. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int (*init)(unsigned) = dlsym(library, "cuInit");
    int (*retain)(void **, int) = dlsym(library, "cuDevicePrimaryCtxRetain");
    int (*current)(void *) = dlsym(library, "cuCtxSetCurrent");
    int (*alloc)(unsigned long long *, size_t) = dlsym(library, "cuMemAlloc_v2");
    unsigned long long address;
    char word[64] = "";

    if (init(0) || retain(&context, 0) || current(context))
        return 1;
    for (int fd = 3; fd < 100000; fd++) {
        char path[64], link[256] = "";
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if (readlink(path, link, sizeof link - 1) > 0 && !strncmp(link, "socket:", 7))
            close(fd);
    }
    if (alloc(&address, 4 << 20))
        return 2;
    puts("ready");
    fflush(stdout);
    fgets(word, sizeof word, stdin);
    return 0;
}
