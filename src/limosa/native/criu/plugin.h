/* SPDX-License-Identifier: MIT */
/* What the parts of the plugin share. */
#ifndef LIMOSA_PLUGIN_H
#define LIMOSA_PLUGIN_H

#include <stdbool.h>
#include <stdint.h>

extern int criu_get_image_dir(void);
extern void print_on_level(unsigned int level, const char *format, ...) __attribute__((weak, format(printf, 2, 3)));

enum { ERROR = 1, WARNING = 2, INFO = 3 };
/* In CRIU's log, where it has one for us. */
void say(unsigned int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* One field of a protobuf message: its number, its value, or its length where it holds bytes (then *data is set). */
const uint8_t *field(const uint8_t *at, const uint8_t *end, uint64_t *number, uint64_t *value, const uint8_t **data);

/* guard.c: whether CRIU's calls come there, where Limosa has asked for it. */
bool guard_is_there(void);

/* Has a process that is restored, and does not run yet, take the POSIX locks again that it had. */
int take_locks_again(int pid);

#endif
