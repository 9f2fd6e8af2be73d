/* Says what the kernel answers when a program asks by syscall(): for an io_uring, and for much else. */
#include <errno.h>
#include <execinfo.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int word;

static void look_back(int signal)
{
    void *frames[50];

    (void)signal;
    printf("frames %s\n", backtrace(frames, 50) >= 5 ? "enough" : "cut");
    fflush(stdout);
    _exit(0);
}

__attribute__((noinline)) static void wait_here(void)
{
    for (;;)
        syscall(SYS_futex, &word, FUTEX_WAIT, 0, NULL, NULL, 0);
}

__attribute__((noinline)) static void wait_there(void)
{
    wait_here();
    __asm__("");
}

int main(void)
{
    char parameters[120] = {0}, text[] = "abcdefgh", got[sizeof text] = "";
    int ends[2];

    errno = 0;
    long ring = syscall(SYS_io_uring_setup, 4, parameters);
    printf("ring %s %s\n", ring < 0 ? "refused" : "open", strerrorname_np(errno));

    /* Six arguments, the last of them one that counts. */
    int file = memfd_create("text", 0);
    ftruncate(file, 8192);
    pwrite(file, text, sizeof text, 4096);
    char *at = (char *)syscall(SYS_mmap, NULL, 4096L, (long)PROT_READ, (long)MAP_SHARED, (long)file, 4096L);
    printf("mmap %s\n", at == MAP_FAILED ? "failed" : at);
    printf("pid %s\n", syscall(SYS_getpid) == getpid() ? "right" : "wrong");

    pipe(ends);
    printf("write %ld\n", syscall(SYS_write, (long)ends[1], text, 8L));
    printf("read %ld %s\n", syscall(SYS_read, (long)ends[0], got, 8L), got);
    errno = 0;
    long bad = syscall(SYS_close, -1L);
    printf("bad %ld %s\n", bad, strerrorname_np(errno));

    fflush(stdout);
    long child = syscall(SYS_clone, (long)SIGCHLD, NULL, NULL, NULL, 0L);
    if (!child)
        _exit(7);
    int status = 0;
    waitpid((pid_t)child, &status, 0);
    printf("child %d\n", WEXITSTATUS(status));

    void *first[2];
    backtrace(first, 2); /* loads what it needs */
    signal(SIGALRM, look_back);
    alarm(1);
    wait_there();
    return 0;
}
