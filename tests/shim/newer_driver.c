/* A libcuda.so.1 that has what the shim needs, each of which does nothing, and two functions that nobody knows. */
#include "driver_api.h"

#define F(name, arguments)                                                                                             \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        return 0;                                                                                                      \
    }
DRIVER_FUNCTIONS(F)

int cuMemAllocOfTheYearAfter(int n)
{
    return 2 * n;
}

int cuFetchOfTheYearAfter(int n)
{
    return n;
}
