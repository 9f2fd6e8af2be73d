/* Calls what fake_driver.c has, each for the first time in its thread, and prints the answers. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

struct handle {
    char bytes[64];
};
static void *library;

static void *kernel(void *nothing)
{
    int (*call)(long, long, long, long, long, long, long, long, long, long, long) = dlsym(library, "cuLaunchKernel");
    printf("%d\n", call(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11));
    return NULL;
}

static void *structure(void *nothing)
{
    int (*call)(void *, struct handle, unsigned) = dlsym(library, "cuIpcOpenMemHandle_v2");
    printf("%d\n", call(NULL, (struct handle){.bytes = {[0] = 5, [63] = 7}}, 3));
    return NULL;
}

static void *bias(void *nothing)
{
    int (*call)(void *, float) = dlsym(library, "cuTexRefSetMipmapLevelBias");
    printf("%d\n", call(NULL, 20.5f));
    return NULL;
}

static void *clamp(void *nothing)
{
    int (*call)(void *, float, float) = dlsym(library, "cuTexRefSetMipmapLevelClamp");
    printf("%d\n", call(NULL, 4.5f, 7.0f));
    return NULL;
}

static void *parameter(void *nothing)
{
    int (*call)(void *, int, float) = dlsym(library, "cuParamSetf");
    printf("%d\n", call(NULL, 8, 3.0f));
    return NULL;
}

static void *unknown(void *nothing)
{
    int (*call)(int, int) = dlsym(library, "cuOfTheYearAfter");
    printf("%d\n", call(4, 2));
    return NULL;
}

int main(void)
{
    void *(*all[])(void *) = {kernel, structure, bias, clamp, parameter, unknown};
    Dl_info info;

    library = dlopen("libcuda.so.1", RTLD_NOW);
    for (int i = 0; i < 6; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, all[i], NULL);
        pthread_join(thread, NULL);
    }
    dladdr(dlsym(library, "cuOfTheYearAfter"), &info);
    puts(info.dli_fname);
    return 0;
}
