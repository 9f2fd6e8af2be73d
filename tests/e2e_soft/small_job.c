/* A job that is small in every way, so that many fit beside each other: some memory of a GPU, stamped and looked at again.
 *
 *     small_job GPU MIB
 *
 * Prints READY. SIGTERM: it looks at all of its memory and exits 0 where every word is its own. */
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static volatile sig_atomic_t over;

static void on_term(int number)
{
    (void)number;
    over = 1;
}

static void must(int result, const char *what)
{
    if (result) {
        fprintf(stderr, "%s: %d\n", what, result);
        _exit(2);
    }
}

#define CALL(name, ...) must(((int (*)())dlsym(driver, name))(__VA_ARGS__), name)

int main(int argc, char **argv)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    size_t size = (size_t)atoi(argv[2]) << 20, words = size / 8;
    uint64_t *mine = malloc(size), *found = malloc(size), at;
    void *context;
    int gpu;

    if (argc != 3 || !driver || !mine || !found)
        return 3;
    signal(SIGTERM, on_term);
    for (size_t i = 0; i < words; i++)
        mine[i] = ((uint64_t)getpid() << 32) + i;
    CALL("cuInit", 0);
    CALL("cuDeviceGet", &gpu, atoi(argv[1]));
    CALL("cuDevicePrimaryCtxRetain", &context, gpu);
    CALL("cuCtxSetCurrent", context);
    CALL("cuMemAlloc_v2", &at, size);
    CALL("cuMemcpyHtoD_v2", at, mine, size);
    puts("READY");
    fflush(stdout);
    while (!over)
        usleep(20000);
    CALL("cuMemcpyDtoH_v2", found, at, size);
    for (size_t i = 0; i < words; i++)
        if (found[i] != mine[i])
            return 1;
    return 0;
}
