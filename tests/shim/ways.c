/* Every way to a function of the driver: prints, for each, the function that is found and the library that it is in. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern int cuInit(unsigned), cuMemAlloc_v2(unsigned long long *, size_t), cuCtxSynchronize(void);
typedef int get_proc(const char *, void **, int, unsigned long long);
typedef int get_proc_v2(const char *, void **, int, unsigned long long, int *);

int rand(void) /* in front of the C library's */
{
    return -4;
}

static void say(const char *way, void *found)
{
    Dl_info info;

    if (!found)
        printf("%s: nothing\n", way);
    else if (!dladdr(found, &info))
        printf("%s: nowhere\n", way);
    else
        printf("%s: %s in %s\n", way, info.dli_sname ? info.dli_sname : "?", strrchr(info.dli_fname, '/') + 1);
}

static void ask(get_proc *one, get_proc_v2 *two, const char *name, int version, int flags)
{
    void *found = NULL;
    int status = -1;
    char way[100];

    one(name, &found, version, flags);
    snprintf(way, sizeof way, "one %s %d %d", name, version, flags);
    say(way, found);
    found = NULL;
    two(name, &found, version, flags, &status);
    snprintf(way, sizeof way, "two %s %d %d status %d", name, version, flags, status);
    say(way, found);
}

int main(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);

    say("linked", (void *)cuMemAlloc_v2);
    say("dlsym", dlsym(library, "cuMemAlloc_v2"));
    say("dlsym default", dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"));
    say("dlsym next", dlsym(RTLD_NEXT, "cuMemAlloc_v2"));
    say("dlsym nothing", dlsym(library, "cuNoSuchFunction"));
    say("dlvsym", dlvsym(library, "cuMemAlloc_v2", "LIBCUDA_1"));
    void *next = dlsym(RTLD_NEXT, "rand"), *first = dlsym(RTLD_DEFAULT, "rand");
    printf("rand: %d %d\n", next && next != (void *)rand, first == (void *)rand);
#if defined(__x86_64__)
    printf("qsort: %d\n", dlvsym(RTLD_DEFAULT, "qsort", "GLIBC_2.2.5") == (void *)qsort);
#else
    printf("qsort: %d\n", dlvsym(RTLD_DEFAULT, "qsort", "GLIBC_2.17") == (void *)qsort);
#endif
    if (cuInit(0))
        return 1;
    get_proc *one = dlsym(library, "cuGetProcAddress");
    get_proc_v2 *two = dlsym(library, "cuGetProcAddress_v2");
    say("cuGetProcAddress", (void *)one);
    ask(one, two, "cuMemAlloc", 2000, 0);
    ask(one, two, "cuMemAlloc", 13000, 0);
    ask(one, two, "cuMemFree", 13000, 0);
    ask(one, two, "cuMemcpyHtoD", 13000, 0);
    ask(one, two, "cuMemcpyHtoD", 13000, 2);
    ask(one, two, "cuMemAllocAsync", 13000, 2);
    ask(one, two, "cuCtxCreate", 3020, 0);
    ask(one, two, "cuCtxCreate", 13000, 0);
    ask(one, two, "cuGetProcAddress", 11030, 0);
    ask(one, two, "cuGetProcAddress", 13000, 0);
    ask(one, two, "cuNoSuchFunction", 13000, 0);
    return 0;
}
