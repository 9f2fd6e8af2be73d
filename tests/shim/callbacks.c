/* Host callbacks that take a lock which the main thread holds around its calls of the driver: for some seconds, or
   until SIGTERM. */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int called;
static volatile sig_atomic_t over;

static void end_well(int number)
{
    over = 1;
}

static void callback(void *data)
{
    pthread_mutex_lock(&lock);
    called++;
    pthread_mutex_unlock(&lock);
}

int main(int argc, char **argv)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context, *stream;
    int (*init)(unsigned) = dlsym(library, "cuInit");
    int (*retain)(void **, int) = dlsym(library, "cuDevicePrimaryCtxRetain");
    int (*current)(void *) = dlsym(library, "cuCtxSetCurrent");
    int (*create)(void **, unsigned) = dlsym(library, "cuStreamCreate");
    int (*launch)(void *, void (*)(void *), void *) = dlsym(library, "cuLaunchHostFunc");
    int (*wait)(void *) = dlsym(library, "cuStreamSynchronize");
    int (*alloc)(unsigned long long *, size_t) = dlsym(library, "cuMemAlloc_v2");
    int (*release)(unsigned long long) = dlsym(library, "cuMemFree_v2");
    time_t end = time(NULL) + atoi(argv[1]);

    if (init(0) || retain(&context, 0) || current(context) || create(&stream, 1))
        return 1;
    signal(SIGTERM, end_well);
    puts("ready");
    fflush(stdout);
    while (!over && time(NULL) < end) {
        unsigned long long address;
        if (launch(stream, callback, NULL))
            return 2;
        pthread_mutex_lock(&lock);
        int result = alloc(&address, 4 << 20);
        pthread_mutex_unlock(&lock);
        if (result || wait(stream) || release(address))
            return 3;
    }
    printf("callbacks %d\n", called);
    return 0;
}
