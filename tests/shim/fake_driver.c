/* A libcuda.so.1 that says what it was called with: a few functions that the shim knows, and one that nobody does. */
#include <string.h>

int cuLaunchKernel(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k)
{
    return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j + 11 * k;
}

struct handle {
    char bytes[64];
};

int cuIpcOpenMemHandle_v2(void *pointer, struct handle handle, unsigned flags)
{
    return handle.bytes[0] + 2 * handle.bytes[63] + 1000 * flags;
}

int cuTexRefSetMipmapLevelBias(void *texture, float bias)
{
    return bias * 2;
}

int cuTexRefSetMipmapLevelClamp(void *texture, float least, float most)
{
    return least * 10 + most;
}

int cuParamSetf(void *function, int offset, float value)
{
    return offset + value;
}

int cuOfTheYearAfter(int a, int b)
{
    return 10 * a + b;
}
