/* NVML from many threads, some of which start and stop it, while GPUs are lost and rules come and go (test_stress.py).
 * Arguments: threads, seconds. */
#include "nvml_api.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static atomic_bool stop;
static atomic_ulong calls;

static void expect(int right, const char *what, nvmlReturn_t result)
{
    if (!right) {
        printf("%s: %s\n", what, nvmlErrorString(result));
        exit(1);
    }
}

static void ask_all(nvmlDevice_t device)
{
    char text[96];
    unsigned int number, other, count = 8;
    nvmlProcessInfo_t processes[8];
    nvmlMemory_t memory;
    nvmlMemory_v2_t second = {.version = nvmlMemory_v2};
    nvmlPciInfo_t pci;
    nvmlReturn_t results[] = {
        nvmlDeviceGetName(device, text, sizeof(text)),
        nvmlDeviceGetUUID(device, text, sizeof(text)),
        nvmlDeviceGetMinorNumber(device, &number),
        nvmlDeviceGetPciInfo_v3(device, &pci),
        nvmlDeviceGetMemoryInfo(device, &memory),
        nvmlDeviceGetMemoryInfo_v2(device, &second),
        nvmlDeviceGetMigMode(device, &number, &other),
        nvmlDeviceGetComputeRunningProcesses_v3(device, &count, processes),
    };
    for (size_t i = 0; i < sizeof(results) / sizeof(results[0]); i++)
        expect(results[i] == NVML_SUCCESS || results[i] == NVML_ERROR_GPU_IS_LOST
                   || results[i] == NVML_ERROR_NO_DATA, /* the rule's */
               "a call", results[i]);
    if (results[4] == NVML_SUCCESS)
        expect(memory.used + memory.free == memory.total, "memory does not add up", results[4]);
    calls += sizeof(results) / sizeof(results[0]);
}

static void *asking(void *argument)
{
    (void)argument;
    while (!stop) {
        nvmlDevice_t device;
        nvmlReturn_t result = nvmlInit_v2();
        expect(result == NVML_SUCCESS, "init", result);
        for (unsigned int index = 0; index < 2; index++) {
            result = nvmlDeviceGetHandleByIndex_v2(index, &device);
            if (result == NVML_SUCCESS)
                ask_all(device);
            else
                expect(result == NVML_ERROR_GPU_IS_LOST || result == NVML_ERROR_NO_DATA, "a handle", result);
        }
        expect(nvmlDeviceGetHandleByIndex_v2(2, &device) != NVML_SUCCESS, "a third GPU", NVML_SUCCESS);
        result = nvmlShutdown();
        expect(result == NVML_SUCCESS, "shutdown", result);
    }
    return NULL;
}

int main(int count, char **arguments)
{
    int threads = count > 1 ? atoi(arguments[1]) : 4;
    pthread_t thread[64];
    for (int i = 0; i < threads; i++)
        pthread_create(&thread[i], NULL, asking, NULL);
    sleep(count > 2 ? (unsigned int)atoi(arguments[2]) : 2);
    stop = true;
    for (int i = 0; i < threads; i++)
        pthread_join(thread[i], NULL);
    puts(calls > 100 ? "done" : "hardly any calls");
    return 0;
}
