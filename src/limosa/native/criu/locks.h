/* SPDX-License-Identifier: MIT */
/* POSIX locks of restored processes. */
#ifndef LIMOSA_LOCKS_H
#define LIMOSA_LOCKS_H

/* Has a process that is restored, and does not run yet, take the POSIX locks again that it had. */
int take_locks_again(int pid);

#endif
