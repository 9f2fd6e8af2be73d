/* What a call of ncclAllReduce takes: reads "N\n", makes N calls in place on a communicator of one rank (nothing is
 * sent), writes nanoseconds a call. Linked to libnccl, as frameworks are; the driver is loaded. For bench/nccl_cost.py. */
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

typedef void *comm_t;

int ncclCommInitAll(comm_t *comms, int count, const int *devices);
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, comm_t comm, void *stream);

enum { FLOAT32 = 7, SUM = 0 };

static void *driver(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);

    return library ? dlsym(library, name) : NULL;
}

int main(void)
{
    int (*init)(unsigned) = driver("cuInit");
    int (*retain)(void **, int) = driver("cuDevicePrimaryCtxRetain");
    int (*current)(void *) = driver("cuCtxSetCurrent");
    int (*allocate)(unsigned long long *, size_t) = driver("cuMemAlloc_v2");
    int (*settle)(void) = driver("cuCtxSynchronize");
    struct timespec from, to;
    unsigned long long memory;
    void *context;
    comm_t comm;
    int device = 0;
    long n;

    if (!init || !retain || !current || !allocate || !settle)
        return 1;
    if (init(0) || retain(&context, device) || current(context) || allocate(&memory, 1 << 20))
        return 2;
    if (ncclCommInitAll(&comm, 1, &device))
        return 3;
    printf("ready\n");
    fflush(stdout);
    while (scanf("%ld", &n) == 1) {
        clock_gettime(CLOCK_MONOTONIC, &from);
        for (long i = 0; i < n; i++)
            if (ncclAllReduce((void *)memory, (void *)memory, 16, FLOAT32, SUM, comm, NULL))
                return 4;
        clock_gettime(CLOCK_MONOTONIC, &to);
        if (settle())
            return 5;
        printf("%.3f\n", ((to.tv_sec - from.tv_sec) * 1e9 + (to.tv_nsec - from.tv_nsec)) / n);
        fflush(stdout);
    }
    return 0;
}
