/* Included before every source: symbols as a C library from 2.17 on has them, the oldest that CUDA 12 images have (CentOS 7).
 *
 * A newer one gives the same functions newer versions where they moved from libpthread and libdl into libc (2.32, 2.34),
 * makes functions of what were macros (stat), and has strtol() read what C23 adds to numbers (2.38). Nothing of ours needs
 * what is new about them. */
#ifndef LIMOSA_OLD_GLIBC_H
#define LIMOSA_OLD_GLIBC_H

#include <features.h>
#if defined(__GLIBC__) && (defined(__x86_64__) || defined(__aarch64__))
#undef __GLIBC_USE_C2X_STRTOL
#define __GLIBC_USE_C2X_STRTOL 0
#undef __GLIBC_USE_C23_STRTOL
#define __GLIBC_USE_C23_STRTOL 0

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __has_include
#if __has_include(<sys/random.h>)
#include <sys/random.h>
#endif
#endif

#if defined(__x86_64__)
#define LIMOSA_BASE "GLIBC_2.2.5"
#define LIMOSA_CLOCK "GLIBC_2.3.3"
#define LIMOSA_NAMES "GLIBC_2.12"
#else
#define LIMOSA_BASE "GLIBC_2.17"
#define LIMOSA_CLOCK "GLIBC_2.17"
#define LIMOSA_NAMES "GLIBC_2.17"
#endif

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

/* The kernel's struct stat is the C library's on 64-bit machines. With an argument list only: `struct stat` stays. */
#define fstat(fd, into) ((int)syscall(SYS_fstat, (fd), (into)))
#define stat(path, into) ((int)syscall(SYS_newfstatat, AT_FDCWD, (path), (into), 0))
#define lstat(path, into) ((int)syscall(SYS_newfstatat, AT_FDCWD, (path), (into), AT_SYMLINK_NOFOLLOW))
#define gettid() ((pid_t)syscall(SYS_gettid))
#define getrandom(into, bytes, flags) ((ssize_t)syscall(SYS_getrandom, (into), (bytes), (flags)))

#endif
#endif
