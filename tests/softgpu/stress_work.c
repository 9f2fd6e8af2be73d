/* Many threads use one driver at once: streams made and destroyed, events awaited across streams, copies, kernels, host
 * functions, default streams, contexts, children that are forked, and a gate that closes and opens meanwhile. Built
 * like the driver, so that a sanitizer sees both. Arguments: threads, rounds. */
#include "stress.h"

#define WORDS 2048

static const char ptx[] = ".version 6.3\n.target sm_75\n"
                          ".visible .entry fill(\n.visible .entry stamp(\n.visible .entry hash(\n";
static CUcontext primary;
static CUfunction fill, hash;
static int rounds;
static _Atomic long called;
static _Atomic bool over;

static void count(void *data)
{
    (void)data;
    called++;
}

static void launch_fill(CUstream stream, CUdeviceptr p, uint64_t n, uint64_t value)
{
    void *params[] = {&p, &n, &value};
    OK(cuLaunchKernel(fill, 4, 1, 1, 64, 1, 1, 0, stream, params, NULL));
}

static void *work(void *argument)
{
    uint64_t seed = (uint64_t)(uintptr_t)argument;
    OK(cuCtxSetCurrent(primary));
    for (int round = 0; round < rounds; round++) {
        CUstream first, second;
        CUevent event;
        CUdeviceptr a, b, out;
        uint64_t value = seed * 1000003 + (uint64_t)round, n = WORDS, got[2] = {0};
        void *params[] = {&b, &n, &out};
        static _Thread_local uint64_t back[WORDS];
        OK(cuStreamCreate(&first, round % 2));
        OK(cuStreamCreate(&second, 1));
        OK(cuEventCreate(&event, 0));
        OK(cuMemAlloc_v2(&a, sizeof back));
        OK(cuMemAlloc_v2(&b, sizeof back));
        OK(cuMemAlloc_v2(&out, 8));
        OK(cuMemsetD32Async(out, 0, 2, second));
        launch_fill(first, a, WORDS, value);
        OK(cuEventRecord(event, first));
        OK(cuStreamWaitEvent(second, event, 0));
        OK(cuMemcpyDtoDAsync_v2(b, a, sizeof back, second));
        OK(cuLaunchKernel(hash, 1, 1, 1, 32, 1, 1, 0, second, params, NULL));
        OK(cuLaunchHostFunc(second, count, NULL));
        OK(cuStreamDestroy_v2(first));
        OK(cuEventDestroy_v2(event));
        if (round % 3 == 0)
            OK(cuStreamSynchronize(second));
        else if (round % 3 == 1)
            OK(cuCtxSynchronize());
        else
            while (cuStreamQuery(second) == CUDA_ERROR_NOT_READY)
                ;
        OK(cuMemcpyDtoH_v2(got, out, 8));
        OK(cuMemcpyDtoH_v2_ptds(back, b, sizeof back));
        uint64_t sum = 0;
        for (uint64_t i = 0; i < WORDS; i++) {
            sum += (value ^ (value >> 29)) * (2 * i + 1);
            if (back[i] != value)
                abort();
        }
        if (sum != got[0])
            abort();
        /* The legacy default stream waits for blocking streams and they for it. */
        OK(cuStreamCreate(&first, 0));
        launch_fill(first, a, WORDS, 1);
        launch_fill(NULL, a, WORDS, 2);
        launch_fill(first, a, WORDS, 3);
        OK(cuStreamSynchronize(first));
        OK(cuMemcpyDtoH_v2(back, a, sizeof back));
        if (back[0] != 3 || back[WORDS - 1] != 3)
            abort();
        OK(cuStreamDestroy_v2(first));
        OK(cuStreamDestroy_v2(second));
        OK(cuMemFree_v2(a));
        OK(cuMemFree_v2(b));
        OK(cuMemFree_v2(out));
    }
    return NULL;
}

static void *contexts_come_and_go(void *argument)
{
    (void)argument;
    for (int round = 0; round < rounds; round++) {
        CUcontext mine;
        CUdeviceptr a;
        OK(cuCtxCreate_v2(&mine, 0, round % 2));
        OK(cuMemAlloc_v2(&a, 4096));
        OK(cuMemsetD8Async(a, 1, 4096, NULL));
        OK(cuCtxDestroy_v2(mine));
    }
    return NULL;
}

static bool never(const void *argument)
{
    (void)argument;
    return false;
}

static void *lock_and_unlock(void *argument)
{
    (void)argument;
    while (!over) {
        if (gate_close(10000, never, NULL) != 0 || !streams_drain(10))
            abort();
        gate_shut();
        usleep(500);
        gate_unshut();
        gate_open();
        usleep(3000);
    }
    return NULL;
}

/* A child of a process in the middle of everything: it has no driver, and holds nothing of the parent's. */
static void *fork_often(void *argument)
{
    (void)argument;
#ifndef __SANITIZE_THREAD__ /* which wants a process with threads not to fork */
    while (!over) {
        int status;
        pid_t child = fork();
        if (child == 0)
            _exit(cuInit(0) == CUDA_ERROR_NOT_INITIALIZED && cuCtxSynchronize() == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
            abort();
        usleep(5000);
    }
#endif
    return NULL;
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 6;
    pthread_t threads[64], others[3];
    CUmodule module;
    rounds = argc > 2 ? atoi(argv[2]) : 50;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&primary, 0));
    OK(cuCtxSetCurrent(primary));
    OK(cuModuleLoadData(&module, ptx));
    OK(cuModuleGetFunction(&fill, module, "fill"));
    OK(cuModuleGetFunction(&hash, module, "hash"));
    pthread_create(&others[0], NULL, lock_and_unlock, NULL);
    pthread_create(&others[1], NULL, contexts_come_and_go, NULL);
    pthread_create(&others[2], NULL, fork_often, NULL);
    for (int i = 0; i < n; i++)
        pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(i + 1));
    for (int i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    pthread_join(others[1], NULL);
    over = true;
    pthread_join(others[0], NULL);
    pthread_join(others[2], NULL);
    if (called != (long)n * rounds)
        abort();
    OK(cuModuleUnload(module));
    OK(cuDevicePrimaryCtxRelease_v2(0));
    puts("done");
    return 0;
}
