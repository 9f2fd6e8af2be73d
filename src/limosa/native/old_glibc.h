/* Included before every source of a release build: symbols as a C library from 2.25 on has them.
 *
 * A newer one gives the same functions newer versions where they moved from libpthread and libdl into libc (2.32, 2.34),
 * and makes functions of what were macros (stat). Nothing of ours needs what is new about them. */
#ifndef LIMOSA_OLD_GLIBC_H
#define LIMOSA_OLD_GLIBC_H

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define LIMOSA_BASE "GLIBC_2.2.5"
#define LIMOSA_CLOCK "GLIBC_2.3.3"
#define LIMOSA_NAMES "GLIBC_2.12"
#elif defined(__aarch64__)
#define LIMOSA_BASE "GLIBC_2.17"
#define LIMOSA_CLOCK "GLIBC_2.17"
#define LIMOSA_NAMES "GLIBC_2.17"
#endif

#ifdef LIMOSA_BASE
#define LIMOSA_OLD(name, version) __asm__(".symver " #name "," #name "@" version)
LIMOSA_OLD(dladdr, LIMOSA_BASE);
LIMOSA_OLD(dlclose, LIMOSA_BASE);
LIMOSA_OLD(dlerror, LIMOSA_BASE);
LIMOSA_OLD(dlopen, LIMOSA_BASE);
LIMOSA_OLD(pthread_attr_setstacksize, LIMOSA_BASE);
LIMOSA_OLD(pthread_condattr_setclock, LIMOSA_CLOCK);
LIMOSA_OLD(pthread_create, LIMOSA_BASE);
LIMOSA_OLD(pthread_detach, LIMOSA_BASE);
LIMOSA_OLD(pthread_getspecific, LIMOSA_BASE);
LIMOSA_OLD(pthread_join, LIMOSA_BASE);
LIMOSA_OLD(pthread_key_create, LIMOSA_BASE);
LIMOSA_OLD(pthread_mutex_timedlock, LIMOSA_BASE);
LIMOSA_OLD(pthread_once, LIMOSA_BASE);
LIMOSA_OLD(pthread_setname_np, LIMOSA_NAMES);
LIMOSA_OLD(pthread_setspecific, LIMOSA_BASE);
LIMOSA_OLD(pthread_sigmask, LIMOSA_BASE);
LIMOSA_OLD(sem_destroy, LIMOSA_BASE);
LIMOSA_OLD(sem_init, LIMOSA_BASE);
LIMOSA_OLD(sem_post, LIMOSA_BASE);
LIMOSA_OLD(sem_wait, LIMOSA_BASE);
#endif

/* The kernel's struct stat is the C library's on 64-bit machines. With an argument list only: `struct stat` stays. */
#define fstat(fd, into) ((int)syscall(SYS_fstat, (fd), (into)))
#define stat(path, into) ((int)syscall(SYS_newfstatat, AT_FDCWD, (path), (into), 0))
#define lstat(path, into) ((int)syscall(SYS_newfstatat, AT_FDCWD, (path), (into), AT_SYMLINK_NOFOLLOW))
#define gettid() ((pid_t)syscall(SYS_gettid))

#endif
