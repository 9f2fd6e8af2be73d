// A CUDA C++ program with the static runtime: kernels, a graph, two streams, pinned memory, memory that comes and goes,
// a variable of the module. Integers, so that the order of additions does not matter.
//
//   nvcc -O2 -cudart static -arch=native proof_native.cu -o proof_native
//   proof_native FOLDER [MiB] [HOLD]           writes FOLDER/trace as proof.py does
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fcntl.h>
#include <string>
#include <unistd.h>

#define DO(call)                                                                                                       \
    do {                                                                                                               \
        cudaError_t said = (call);                                                                                     \
        if (said != cudaSuccess) {                                                                                     \
            printf("%s: %s\n", #call, cudaGetErrorString(said));                                                       \
            fflush(stdout);                                                                                            \
            _exit(3);                                                                                                  \
        }                                                                                                              \
    } while (0)

__device__ unsigned long long rounds; // lies in the module's own memory, which the driver carries
__constant__ uint32_t factor;

__global__ void turn(uint32_t *words, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        words[i] = words[i] * factor + 1013904223u;
}

__global__ void sum(const uint32_t *words, size_t n, unsigned long long *total) {
    unsigned long long mine = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        mine += words[i];
    atomicAdd(total, mine);
    if (blockIdx.x == 0 && threadIdx.x == 0)
        atomicAdd(&rounds, 1ull);
}

int main(int argc, char **argv) {
    if (argc < 2)
        return 2;
    std::string folder = argv[1];
    size_t n = (size_t)(argc > 2 ? atoi(argv[2]) : 512) << 18;
    long hold = argc > 3 ? atol(argv[3]) : 0, last = -1;
    int trace = open((folder + "/trace").c_str(), O_WRONLY | O_APPEND | O_CREAT, 0600);
    uint32_t *words, *other, *pinned, value = 1664525u;
    unsigned long long *total, *answer, seen;
    const size_t some = 1 << 18;
    DO(cudaMemcpyToSymbol(factor, &value, sizeof value));
    DO(cudaMalloc(&words, n * 4));
    DO(cudaMalloc(&other, some * 4));
    DO(cudaMalloc(&total, 64)); // small: left to the driver
    DO(cudaHostAlloc(&pinned, some * 4, 0));
    DO(cudaHostAlloc(&answer, 64, 0));
    DO(cudaMemset(words, 1, n * 4));
    DO(cudaMemset(other, 2, some * 4));
    cudaStream_t first, second;
    DO(cudaStreamCreate(&first));
    DO(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    cudaEvent_t ready;
    DO(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    DO(cudaStreamBeginCapture(first, cudaStreamCaptureModeThreadLocal));
    DO(cudaMemsetAsync(total, 0, 8, first));
    turn<<<512, 256, 0, first>>>(words, n);
    sum<<<512, 256, 0, first>>>(words, n, total);
    DO(cudaStreamEndCapture(first, &graph));
    DO(cudaGraphInstantiate(&replay, graph, 0));
    for (long step = 0;; step++) {
        uint32_t *spare;
        DO(cudaMalloc(&spare, (size_t)(4 + step % 5) << 20));
        DO(cudaMemsetAsync(spare, (int)(step & 0xff), 4 << 20, second));
        DO(cudaGraphLaunch(replay, first));
        DO(cudaMemcpyAsync(answer, total, 8, cudaMemcpyDeviceToHost, first));
        DO(cudaEventRecord(ready, first));
        DO(cudaStreamWaitEvent(second, ready, 0));
        turn<<<64, 256, 0, second>>>(other, some);
        DO(cudaMemcpyAsync(pinned, other, some * 4, cudaMemcpyDeviceToHost, second));
        DO(cudaStreamSynchronize(first));
        DO(cudaStreamSynchronize(second));
        DO(cudaMemcpyFromSymbol(&seen, rounds, sizeof seen));
        uint32_t back;
        DO(cudaMemcpy(&back, spare, 4, cudaMemcpyDeviceToHost));
        DO(cudaFree(spare));
        unsigned long long mixed = 0;
        for (size_t i = 0; i < some; i += 64)
            mixed = mixed * 31 + pinned[i];
        char line[200];
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        int size = snprintf(line, sizeof line, "%ld %.6f %llx:%llx:%llx:%x\n", step, now.tv_sec + now.tv_nsec * 1e-9,
                            *answer, mixed, seen, back);
        if (write(trace, line, size) != size)
            return 4;
        if (step == 0) {
            puts("READY");
            fflush(stdout);
        }
        while (last < 0) {
            if (FILE *file = fopen((folder + "/until").c_str(), "r")) {
                if (fscanf(file, "%ld", &last) != 1)
                    last = -1;
                fclose(file);
            } else if (step + 1 != hold)
                break;
            else
                usleep(20000);
        }
        if (last >= 0 && step + 1 >= last)
            break;
    }
    puts("DONE");
    fflush(stdout);
    _exit(0);
}
