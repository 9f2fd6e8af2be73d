/* A program that is linked with libstdc++, as C++ is that asks for the steady time: whose function does it get? */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

int64_t _ZNSt6chrono3_V212steady_clock3nowEv(void);

int main(void)
{
    Dl_info info;
    int64_t first = _ZNSt6chrono3_V212steady_clock3nowEv(), second = _ZNSt6chrono3_V212steady_clock3nowEv();

    if (!dladdr((void *)_ZNSt6chrono3_V212steady_clock3nowEv, &info) || first <= 0 || second < first)
        return 1;
    return puts(info.dli_fname) < 0;
}
