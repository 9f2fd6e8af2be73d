/* Ranks as threads of one process, under a sanitizer: communicators come and go, in groups and aborted in the middle, and
 * every sum is right. stress_nccl RANKS ROUNDS */
#include "nccl/nccl_api.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define COUNT 300000

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        int result_ = (int)(call);                                                                                     \
        if (result_ != 0) {                                                                                            \
            fprintf(stderr, "%s:%d: %s: %d (%s)\n", __FILE__, __LINE__, #call, result_, ncclGetLastError(NULL));       \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

const char *ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int n, ncclUniqueId id, int rank);
ncclResult_t ncclCommSplit(ncclComm_t comm, int colour, int key, ncclComm_t *to, ncclConfig_t *config);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operator,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

static int n, rounds;
static ncclUniqueId *ids;
static pthread_barrier_t barrier;

struct rank {
    int rank;
    CUdeviceptr own, sums, ring;
    CUstream stream;
    uint32_t *host;
};

static void check(struct rank *rank, CUdeviceptr address, uint32_t expected)
{
    OK(cuMemcpyDtoH_v2(rank->host, address, COUNT * sizeof(uint32_t)));
    for (int i = 0; i < COUNT; i++)
        if (rank->host[i] != expected) {
            fprintf(stderr, "rank %d: %u at %d instead of %u\n", rank->rank, rank->host[i], i, expected);
            _exit(1);
        }
}

static void use(struct rank *rank, ncclComm_t comm)
{
    int after = (rank->rank + 1) % n, before = (rank->rank + n - 1) % n;

    OK(ncclAllReduce((void *)rank->own, (void *)rank->sums, COUNT, ncclUint32, ncclSum, comm, rank->stream));
    OK(ncclGroupStart());
    OK(ncclSend((void *)rank->own, COUNT, ncclUint32, after, comm, rank->stream));
    OK(ncclRecv((void *)rank->ring, COUNT, ncclUint32, before, comm, rank->stream));
    OK(ncclGroupEnd());
    OK(cuStreamSynchronize(rank->stream));
    check(rank, rank->sums, (uint32_t)(n * (n + 1) / 2));
    check(rank, rank->ring, (uint32_t)before + 1);
}

static void *watch(void *comm)
{
    ncclResult_t error = ncclSuccess;
    while (ncclCommGetAsyncError(comm, &error) == ncclSuccess)
        usleep(200);
    return NULL;
}

static void *run(void *argument)
{
    struct rank *rank = argument;
    CUcontext context;

    OK(cuDevicePrimaryCtxRetain(&context, rank->rank));
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&rank->stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAlloc_v2(&rank->own, COUNT * sizeof(uint32_t)));
    OK(cuMemAlloc_v2(&rank->sums, COUNT * sizeof(uint32_t)));
    OK(cuMemAlloc_v2(&rank->ring, COUNT * sizeof(uint32_t)));
    rank->host = malloc(COUNT * sizeof(uint32_t));
    OK(cuMemsetD32_v2(rank->own, (unsigned)rank->rank + 1, COUNT));
    OK(cuCtxSynchronize());
    for (int round = 0; round < rounds; round++) {
        ncclComm_t world, part;
        pthread_t watcher;
        OK(ncclCommInitRank(&world, n, ids[round], rank->rank));
        pthread_create(&watcher, NULL, watch, world);
        use(rank, world);
        OK(ncclCommSplit(world, 0, rank->rank, &part, NULL));
        use(rank, part);
        if (round % 3 == 2 && rank->rank > 0) /* the first does not come: the others wait until the abort */
            OK(ncclAllReduce((void *)rank->own, (void *)rank->sums, COUNT, ncclUint32, ncclSum, part, rank->stream));
        pthread_barrier_wait(&barrier);
        OK(round % 3 == 2 ? ncclCommAbort(part) : ncclCommDestroy(part));
        OK(cuStreamSynchronize(rank->stream));
        OK(ncclCommDestroy(world));
        pthread_join(watcher, NULL);
    }
    free(rank->host);
    return NULL;
}

int main(int argc, char **argv)
{
    n = argc > 1 ? atoi(argv[1]) : 2;
    rounds = argc > 2 ? atoi(argv[2]) : 10;
    pthread_t *threads = calloc((size_t)n, sizeof(*threads));
    struct rank *ranks = calloc((size_t)n, sizeof(*ranks));

    OK(cuInit(0));
    ids = calloc((size_t)rounds, sizeof(*ids));
    for (int round = 0; round < rounds; round++)
        OK(ncclGetUniqueId(&ids[round]));
    pthread_barrier_init(&barrier, NULL, (unsigned)n);
    for (int rank = 0; rank < n; rank++) {
        ranks[rank].rank = rank;
        pthread_create(&threads[rank], NULL, run, &ranks[rank]);
    }
    for (int rank = 0; rank < n; rank++)
        pthread_join(threads[rank], NULL);
    free(threads);
    free(ranks);
    free(ids);
    puts("done");
    return 0;
}
