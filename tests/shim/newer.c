/* Allocates by a function that newer_driver.c has and that no list knows; lives until its input ends. */
#include <dlfcn.h>
#include <stdio.h>

int main(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = dlsym(library, "cuInit"), (*alloc)(int) = dlsym(library, "cuMemAllocOfTheYearAfter");
    int (*fetch)(int) = dlsym(library, "cuFetchOfTheYearAfter");

    if (init(0))
        return 1;
    printf("%d\n", alloc(20) + fetch(2));
    fflush(stdout);
    getchar();
    return 0;
}
