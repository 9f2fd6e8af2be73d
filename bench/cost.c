/* What a call of the driver takes: reads "N\n", makes N calls, writes nanoseconds a call. For bench/cost.py. */
#include <dlfcn.h>
#include <stdio.h>
#include <time.h>

int main(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = library ? dlsym(library, "cuInit") : NULL;
    int (*call)(void *) = library ? dlsym(library, "cuDriverGetVersion") : NULL;
    struct timespec from, to;
    long n;
    int value;

    if (!init || !call || init(0))
        return 1;
    printf("ready\n");
    fflush(stdout);
    while (scanf("%ld", &n) == 1) {
        clock_gettime(CLOCK_MONOTONIC, &from);
        for (long i = 0; i < n; i++)
            call(&value);
        clock_gettime(CLOCK_MONOTONIC, &to);
        printf("%.3f\n", ((to.tv_sec - from.tv_sec) * 1e9 + (to.tv_nsec - from.tv_nsec)) / n);
        fflush(stdout);
    }
    return 0;
}
