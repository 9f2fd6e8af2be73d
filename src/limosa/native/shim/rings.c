/* Keeps io_uring from libuv where UV_USE_IO_URING=0 says so, because CRIU can dump none.
 *
 * That is libuv's own switch (Node.js, uvloop, the store of PyTorch's torchrun). But since 1.49 libuv looks at it for one of
 * its two kinds of rings alone, and opens the other one all the same. It asks by syscall(), which is ours, and is answered as
 * by a kernel without io_uring; then it uses epoll. */
#include <errno.h>
#include <stdlib.h>

__attribute__((visibility("hidden"))) long shim_system_call(long number, ...); /* below */

/* Not by the table of what is linked lazily: a first use of that takes kilobytes of stack, and the resolver of an indirect
 * function may come here before it is made. These are null then. */
static int *(*const volatile errno_at)(void) = __errno_location;
static char *(*const volatile environment)(const char *) = secure_getenv;

static long failed(int why)
{
    int *(*at)(void) = errno_at;

    if (at)
        *at() = why;
    return -1;
}

static __attribute__((used)) long shim_setup_ring(long number, long entries, long parameters)
{
    char *(*get)(const char *) = environment;
    const char *word = get ? get("UV_USE_IO_URING") : NULL;

    if (!word || word[0] != '0' || word[1])
        return shim_system_call(number, entries, parameters);
    return failed(ENOSYS);
}

static __attribute__((used)) long shim_system_call_failed(long result)
{
    return failed((int)-result);
}

/* 425 is io_uring_setup, on any kind of machine. The rest is as the C library's: nothing on the stack, which may be another one
 * when the call is back (clone), and nothing to look up, since a program may come here before anything can be. */
#if defined(__x86_64__)
__asm__(".text\n"
        ".globl syscall\n.type syscall, @function\n"
        "syscall:\n"
        "  .cfi_startproc\n"
        "  endbr64\n"
        "  cmp $425, %edi\n  je shim_setup_ring\n"
        "shim_system_call:\n"
        "  mov %rdi, %rax\n  mov %rsi, %rdi\n  mov %rdx, %rsi\n  mov %rcx, %rdx\n"
        "  mov %r8, %r10\n  mov %r9, %r8\n  mov 8(%rsp), %r9\n"
        "  syscall\n"
        "  cmp $-4095, %rax\n  jae 1f\n"
        "  ret\n"
        "1: mov %rax, %rdi\n  jmp shim_system_call_failed\n"
        "  .cfi_endproc\n"
        ".size syscall, .-syscall\n");
#elif defined(__aarch64__)
__asm__(".text\n"
        ".globl syscall\n.type syscall, %function\n"
        "syscall:\n"
        "  .cfi_startproc\n"
        "  hint #34\n" /* bti c */
        "  cmp w0, #425\n  b.eq 1f\n"
        "shim_system_call:\n"
        "  mov x8, x0\n  mov x0, x1\n  mov x1, x2\n  mov x2, x3\n  mov x3, x4\n  mov x4, x5\n  mov x5, x6\n"
        "  svc 0\n"
        "  cmn x0, #4095\n  b.cs 2f\n"
        "  ret\n"
        "1: b shim_setup_ring\n"
        "2: b shim_system_call_failed\n"
        "  .cfi_endproc\n"
        ".size syscall, .-syscall\n");
#else
#error "the shim knows x86-64 and aarch64"
#endif
