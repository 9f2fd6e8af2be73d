/* Many threads allocate, map, share, ask and free at once, while children are forked and another process checkpoints and
 * restores this one. Built like the driver, so that a sanitizer sees both. Arguments: threads, rounds, checkpoints.
 */
#include "stress.h"

#include <sys/mman.h>

#define MIB ((size_t)1 << 20)
#define SLOTS 64

static CUcontext primary;
static int rounds;
static _Atomic bool over;
static _Atomic CUdeviceptr seen[SLOTS]; /* addresses of anybody's, to be asked about while they come and go */

static void check(CUdeviceptr address, size_t bytes, uint64_t value)
{
    uint64_t out[64], back[64];

    for (int i = 0; i < 64; i++)
        out[i] = value * 64 + (uint64_t)i;
    OK(cuMemcpyHtoD_v2(address, out, sizeof(out)));
    OK(cuMemcpyHtoD_v2(address + bytes - sizeof(out), out, sizeof(out)));
    OK(cuMemcpyDtoH_v2(back, address, sizeof(back)));
    if (memcmp(out, back, sizeof(out)) != 0) {
        fprintf(stderr, "wrong content at %llx\n", address);
        _exit(1);
    }
}

static void plain(uint64_t value)
{
    size_t sizes[] = {512, 5000 / 8 * 8, 700 * 1024, 3 * MIB};
    CUdeviceptr address[4];

    for (int i = 0; i < 4; i++) {
        OK(cuMemAlloc_v2(&address[i], sizes[i]));
        seen[value * 4 % SLOTS + (unsigned)i] = address[i];
    }
    for (int i = 0; i < 4; i++)
        check(address[i], sizes[i], value + (uint64_t)i);
    for (int i = 0; i < 4; i++)
        OK(cuMemFree_v2(address[i]));
}

static void pooled(uint64_t value, CUstream stream)
{
    CUdeviceptr address, large;

    OK(cuMemAllocAsync(&address, 4096, stream));
    OK(cuMemAllocAsync(&large, 5 * MIB, stream));
    check(address, 4096, value);
    check(large, 5 * MIB, value + 1);
    OK(cuMemFreeAsync(address, stream));
    OK(cuMemFreeAsync(large, stream));
    if (value % 3 == 0)
        OK(cuStreamSynchronize(stream));
}

static void virtual(uint64_t value)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemAccessDesc access = {.location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle, again, kept;
    CUdeviceptr address;
    int fd;

    OK(cuMemCreate(&handle, 4 * MIB, &prop, 0));
    OK(cuMemAddressReserve(&address, 8 * MIB, 0, 0, 0));
    OK(cuMemMap(address, 4 * MIB, 0, handle, 0));
    OK(cuMemMap(address + 4 * MIB, 4 * MIB, 0, handle, 0));
    OK(cuMemSetAccess(address, 8 * MIB, &access, 1));
    seen[value % SLOTS] = address;
    check(address, 8 * MIB, value);
    CUresult exported;
    while ((exported = cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0))
           == CUDA_ERROR_UNKNOWN)
        usleep(1000); /* the process is checkpointed */
    OK(exported);
    OK(cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    OK(cuMemRelease(again)); /* first: what is imported and nothing else is left of, no driver restores */
    OK(cuMemRetainAllocationHandle(&kept, (void *)(uintptr_t)(address + MIB)));
    OK(cuMemRelease(handle));
    OK(cuMemRelease(kept));
    OK(cuMemUnmap(address, 8 * MIB));
    OK(cuMemAddressFree(address, 8 * MIB));
}

static void host(uint64_t value)
{
    void *pinned, *mine = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CUdeviceptr address;

    OK(cuMemHostAlloc(&pinned, 100000, 0));
    OK(cuMemHostRegister_v2(mine, 8192, 0));
    OK(cuMemHostGetDevicePointer_v2(&address, mine, 0));
    check((uintptr_t)pinned, 100000, value);
    check(address, 8192, value);
    OK(cuMemHostUnregister(mine));
    OK(cuMemFreeHost(pinned));
    munmap(mine, 8192);
}

static void *work(void *argument)
{
    uint64_t seed = (uint64_t)(uintptr_t)argument;
    CUstream stream;

    OK(cuCtxSetCurrent(primary));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int round = 0; round < rounds; round++) {
        uint64_t value = seed * 1000 + (uint64_t)round;
        plain(value);
        pooled(value, stream);
        virtual(value);
        host(value);
    }
    OK(cuStreamDestroy_v2(stream));
    return NULL;
}

/* Ask about addresses that may be going away: whatever is answered, it must be answered. */
static void *ask(void *argument)
{
    (void)argument;
    OK(cuCtxSetCurrent(primary));
    while (!over) {
        for (int i = 0; i < SLOTS; i++) {
            CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                           CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE};
            unsigned long long values[3] = {0};
            void *data[] = {&values[0], &values[1], &values[2]};
            CUdeviceptr base;
            size_t size;
            OK(cuPointerGetAttributes(3, names, data, seen[i]));
            cuMemGetAddressRange_v2(&base, &size, seen[i]);
        }
        size_t free_bytes, total;
        CUresult result = cuMemGetInfo_v2(&free_bytes, &total);
        if (result != CUDA_ERROR_OPERATING_SYSTEM) /* checkpointed */
            OK(result);
        usleep(1000);
    }
    return NULL;
}

static void *fork_children(void *argument)
{
    (void)argument;
    while (!over) {
        pid_t child = fork();
        if (child == 0) {
            CUdeviceptr address;
            _exit(cuMemAlloc_v2(&address, 100) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
        }
        int status = 1;
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
            fprintf(stderr, "a child ended with %x\n", status);
            _exit(1);
        }
        usleep(20000);
    }
    return NULL;
}

/* Another process: one checkpoint after the other. Begun before there is a driver in this one. */
static pid_t controller(int checkpoints, int *go)
{
    int ends[2];
    if (pipe(ends) != 0)
        _exit(1);
    pid_t target = getpid(), made = fork();
    if (made != 0) {
        close(ends[0]);
        *go = ends[1];
        return made;
    }
    char word;
    close(ends[1]);
    if (read(ends[0], &word, 1) != 1)
        _exit(1);
    OK(cuInit(0));
    for (int i = 0; i < checkpoints; i++) {
        CUcheckpointLockArgs lock = {.timeoutMs = 20000};
        OK(cuCheckpointProcessLock(target, &lock));
        OK(cuCheckpointProcessCheckpoint(target, NULL));
        OK(cuCheckpointProcessRestore(target, NULL));
        OK(cuCheckpointProcessUnlock(target, NULL));
        usleep(10000);
    }
    _exit(0);
}

int main(int argc, char **argv)
{
    int n = atoi(argv[1]), go, status;
    pthread_t threads[16], asking, forking;
    size_t before, after, total;

    (void)argc;
    rounds = atoi(argv[2]);
    pid_t other = controller(atoi(argv[3]), &go);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&primary, 0));
    OK(cuCtxSetCurrent(primary));
    OK(cuMemGetInfo_v2(&before, &total));
    for (int i = 0; i < n; i++)
        pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(i + 1));
    pthread_create(&asking, NULL, ask, NULL);
    pthread_create(&forking, NULL, fork_children, NULL);
    if (write(go, "x", 1) != 1)
        return 1;
    for (int i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    over = true;
    pthread_join(asking, NULL);
    pthread_join(forking, NULL);
    if (waitpid(other, &status, 0) != other || status != 0) {
        fprintf(stderr, "the controller ended with %x\n", status);
        return 1;
    }
    OK(cuCtxSynchronize());
    OK(cuMemGetInfo_v2(&after, &total));
    if (after != before) {
        fprintf(stderr, "%zu bytes are left\n", before - after);
        return 1;
    }
    puts("done");
    fflush(stdout);
    _exit(0); /* what a driver keeps for its process's life is no leak */
}
