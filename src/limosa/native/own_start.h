/* A start of a program's own: that of the C library has a new name since 2.34, and the program would not run with older ones.
 *
 * For whoever is compiled with -nostartfiles and -DLIMOSA_OWN_START="GLIBC_2.2.5", or what that name's version is here. */
#ifndef LIMOSA_OWN_START_H
#define LIMOSA_OWN_START_H

#ifdef LIMOSA_OWN_START
#include <stdint.h>

int main(int argc, char **argv);
int old_start_main(int (*main)(int, char **), int argc, char **argv, void (*init)(void), void (*fini)(void),
                   void (*loader_fini)(void), void *stack);
__asm__(".symver old_start_main,__libc_start_main@" LIMOSA_OWN_START);

__attribute__((used, noreturn)) static void begin(uintptr_t *stack)
{
    old_start_main(main, (int)stack[0], (char **)(stack + 1), 0, 0, 0, stack);
    __builtin_trap();
}

#ifdef __x86_64__
__asm__(".globl _start\n_start:\n xor %ebp, %ebp\n mov %rsp, %rdi\n and $-16, %rsp\n call begin\n");
#else
__asm__(".globl _start\n_start:\n mov x29, #0\n mov x30, #0\n mov x0, sp\n b begin\n");
#endif
#endif

#endif
