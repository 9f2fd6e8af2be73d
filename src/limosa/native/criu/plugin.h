/* SPDX-License-Identifier: MIT */
/* What limosa_plugin.c has for the other parts, and CRIU for all of them. */
#ifndef LIMOSA_PLUGIN_H
#define LIMOSA_PLUGIN_H

#include <stdint.h>

extern int criu_get_image_dir(void);
extern void print_on_level(unsigned int level, const char *format, ...) __attribute__((weak, format(printf, 2, 3)));

enum { ERROR = 1, WARNING = 2, INFO = 3 };
/* In CRIU's log, where it has one for us. */
void say(unsigned int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* One field of a protobuf message: its number, its value, or its length where it holds bytes (then *data is set). */
const uint8_t *field(const uint8_t *at, const uint8_t *end, uint64_t *number, uint64_t *value, const uint8_t **data);

#endif
