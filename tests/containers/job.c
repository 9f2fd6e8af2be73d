/* A job for a container: it computes on a GPU and says after each step what it has computed.
 *
 *     job [MIB [PACE_MS [STEPS]]]
 *
 *     job wait          does nothing, and has no driver
 *     job nvml          says which GPUs NVML lists, by their nodes
 *
 * Prints READY, then "step N hash H". The hash runs over all steps and all of its device memory, which is stamped anew
 * in turn: one wrong page shows in all later lines. With as many MiB it is the same in every process. Where there is a
 * file /where, it says "at BUS" after a step: the bus id that the driver tells it of its GPU. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGES 16 /* parts of its memory; each step looks at one and stamps it anew */

#ifdef LIMOSA_OWN_START /* for images of older systems; the shim has a dlsym of its own, so this is not in old_glibc.h */
__asm__(".symver dlsym,dlsym@" LIMOSA_OWN_START);
#endif

static void *driver;

static void must(int result, const char *what)
{
    if (result) {
        printf("%s: %d\n", what, result);
        exit(2);
    }
}

#define CALL(name, ...) must(((int (*)())dlsym(driver, name))(__VA_ARGS__), name)

static void *module;

static void launch(const char *name, void **arguments)
{
    void *function;
    CALL("cuModuleGetFunction", &function, module, name);
    CALL("cuLaunchKernel", function, 8, 1, 1, 256, 1, 1, 0, NULL, arguments, NULL);
}

static void stamp(uint64_t at, uint64_t words, uint64_t epoch, uint64_t page)
{
    launch("stamp", (void *[]){&at, &words, &epoch, &page});
}

static int say_what_nvml_lists(void)
{
    unsigned count, minor;
    void *one;
    driver = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!driver)
        return 3;
    CALL("nvmlInit_v2");
    CALL("nvmlDeviceGetCount_v2", &count);
    for (unsigned index = 0; index < count; index++) {
        CALL("nvmlDeviceGetHandleByIndex_v2", index, &one);
        CALL("nvmlDeviceGetMinorNumber", one, &minor);
        printf("nvidia%u\n", minor);
    }
    return 0;
}

static void say_where(int gpu)
{
    char bus[32];
    CALL("cuDeviceGetPCIBusId", bus, (int)sizeof bus, gpu);
    printf("at %s\n", bus);
}

int main(int argc, char **argv)
{
    uint64_t bytes = (argc > 1 ? strtoull(argv[1], NULL, 10) : 16) << 20, words = bytes / PAGES / 8;
    unsigned pace = argc > 2 ? (unsigned)atoi(argv[2]) : 20;
    uint64_t steps = argc > 3 ? strtoull(argv[3], NULL, 10) : UINT64_MAX, table, total, found;
    static char image[1 << 20], path[4096];
    void *context;
    int gpu;

    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 1 && !strcmp(argv[1], "wait")) {
        puts("READY");
        for (;;)
            pause();
    }
    if (argc > 1 && !strcmp(argv[1], "nvml"))
        return say_what_nvml_lists();
    snprintf(path, sizeof path, "%s.ptx", argv[0]);
    FILE *file = fopen(path, "r");
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!file || !fread(image, 1, sizeof image - 1, file) || !driver) {
        printf("%s\n", driver ? "no kernels beside it" : dlerror());
        return 3;
    }
    fclose(file);
    CALL("cuInit", 0);
    CALL("cuDeviceGet", &gpu, 0);
    CALL("cuDevicePrimaryCtxRetain", &context, gpu);
    CALL("cuCtxSetCurrent", context);
    CALL("cuModuleLoadData", &module, image);
    CALL("cuMemAlloc_v2", &table, (size_t)bytes);
    CALL("cuMemAlloc_v2", &total, (size_t)8);
    CALL("cuMemsetD8_v2", total, 0, (size_t)8);
    stamp(table, bytes / 8, 0, 0);
    puts("READY");
    for (uint64_t step = 0; step < steps; step++) {
        uint64_t page = step % PAGES, at = table + page * words * 8;
        launch("hash", (void *[]){&at, &words, &total});
        stamp(at, words, step + 1, page);
        CALL("cuMemcpyDtoH_v2", &found, total, (size_t)8);
        printf("step %llu hash %#018llx\n", (unsigned long long)step, (unsigned long long)found);
        if (!access("/where", F_OK))
            say_where(gpu);
        usleep(pace * 1000);
    }
    puts("done");
    return 0;
}
