// SPDX-License-Identifier: MIT
/*
 * CRIU plugin: NVIDIA device files that forked children have inherited; locks.c has the file locks, guard.c the names
 * that CRIU opens as root.
 *
 * The process that uses the GPU has nothing of it left once the driver has checkpointed it. Its children (the workers
 * of a DataLoader) still hold what they inherited: mappings and descriptors of device files that they never use, and
 * that CRIU cannot dump. DESIGN.md beside this file says what is done with each, and why.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "guard.h"
#include "locks.h"
#include "plugin.h"

/* ---- CRIU's side of the interface, in declarations of our own --------------------------------------------------- */

enum {
	HOOK_DUMP_EXT_FILE = 2,
	HOOK_RESTORE_EXT_FILE = 3,
	HOOK_HANDLE_DEVICE_VMA = 7,
	HOOK_UPDATE_VMA_MAP = 8,
	HOOK_RESUME_DEVICES_LATE = 9,
};
#define HOOKS 10 /* the highest one used + 1: a CRIU that knows fewer refuses the plugin */
#define INTERFACE 0x000200 /* 0.2.0, since CRIU 1.5 */

struct descriptor {
	const char *name;
	int (*init)(int stage);
	void (*exit)(int stage, int status);
	unsigned int version;
	unsigned int max_hooks;
	void *hooks[HOOKS];
};

/* ---- What CRIU is told -------------------------------------------------------------------------------------------- */

void say(unsigned int level, const char *format, ...)
{
	char text[512];
	va_list arguments;

	if (!print_on_level)
		return;
	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	print_on_level(level, "limosa-plugin: %s", text);
}

/* ---- Which files are meant --------------------------------------------------------------------------------------- */

#define PATH_ROOM 128
#define PREFIX "/dev/nvidia"

/*
 * /dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia-caps/nvidia-cap1 …: by name, never by a major number, which
 * differs from machine to machine. Nothing else passes, so that a name from an image cannot open another file.
 */
static bool is_device(const char *path)
{
	const char *at;
	int slashes = 0;

	if (strlen(path) >= PATH_ROOM || strncmp(path, PREFIX, sizeof(PREFIX) - 1))
		return false;
	for (at = path + sizeof(PREFIX) - 1; *at; at++) {
		bool plain = (*at >= '0' && *at <= '9') || (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') ||
			     *at == '-' || *at == '_';
		if (*at == '/' ? ++slashes > 1 : !plain)
			return false;
	}
	return at[-1] != '/';
}

/* The name under which a descriptor was opened; false where it is none of ours. */
static bool device_of(int fd, char *path)
{
	static const char deleted[] = " (deleted)";
	char link[64];
	ssize_t length;

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	length = readlink(link, path, PATH_ROOM - 1);
	if (length < 0)
		return false;
	path[length] = 0;
	if ((size_t)length >= sizeof(deleted) && !strcmp(path + length - (sizeof(deleted) - 1), deleted))
		path[length - (sizeof(deleted) - 1)] = 0;
	return is_device(path);
}

/* ---- Descriptors ------------------------------------------------------------------------------------------------- */

#define KEPT_FLAGS (O_ACCMODE | O_NONBLOCK | O_APPEND)

static void note_name(char *name, size_t room, int id)
{
	snprintf(name, room, "limosa-device-%x.img", (unsigned int)id);
}

/* Note path and flags of an open device file in a file of our own in the image. */
static int dump_ext_file(int fd, int id)
{
	char path[PATH_ROOM], text[PATH_ROOM + 16], name[64];
	int length, flags, out;
	ssize_t written;

	if (!device_of(fd, path))
		return -ENOTSUP;
	flags = fcntl(fd, F_GETFL);
	if (flags < 0)
		return -errno;
	length = snprintf(text, sizeof(text), "%08x %s\n", (unsigned int)(flags & KEPT_FLAGS), path);
	note_name(name, sizeof(name), id);
	out = openat(criu_get_image_dir(), name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (out < 0) {
		say(ERROR, "cannot make %s: %s\n", name, strerror(errno));
		return -EIO;
	}
	written = write(out, text, (size_t)length);
	if (close(out) || written != length) {
		say(ERROR, "cannot write %s\n", name);
		return -EIO;
	}
	return 0;
}

/* Read what dump_ext_file() wrote. An image is hostile input: anything but exactly that is refused. */
static bool read_note(int id, char *path, int *flags)
{
	char text[PATH_ROOM + 16], name[64];
	unsigned int value = 0;
	ssize_t length;
	int in, i;

	note_name(name, sizeof(name), id);
	in = openat(criu_get_image_dir(), name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	if (in < 0)
		return false;
	length = read(in, text, sizeof(text) - 1);
	close(in);
	if (length < 11 || text[8] != ' ' || text[length - 1] != '\n' || memchr(text, 0, (size_t)length))
		return false;
	text[length - 1] = 0;
	for (i = 0; i < 8; i++) {
		if (text[i] >= '0' && text[i] <= '9')
			value = value << 4 | (unsigned int)(text[i] - '0');
		else if (text[i] >= 'a' && text[i] <= 'f')
			value = value << 4 | (unsigned int)(text[i] - 'a' + 10);
		else
			return false;
	}
	if (!is_device(text + 9))
		return false;
	strcpy(path, text + 9);
	*flags = (int)value & KEPT_FLAGS;
	return true;
}

/* CRIU after 4.2 hands over a place for "ask me again later" and reads it; earlier ones hand over nothing. */
static bool has_retry;

/* Open the device again, or /dev/null where this machine has none of that name: it was never used here. */
static int restore_ext_file(int id, bool *retry)
{
	char path[PATH_ROOM];
	struct stat info;
	int fd, flags;

	if (has_retry)
		*retry = false;
	if (!read_note(id, path, &flags))
		return -ENOTSUP; /* another plugin's */
	fd = open(path, flags | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC);
	if (fd >= 0 && (fstat(fd, &info) || !S_ISCHR(info.st_mode))) {
		close(fd);
		fd = -1;
	}
	if (fd < 0) {
		say(WARNING, "%s is not here: /dev/null in its place\n", path);
		fd = open("/dev/null", flags | O_CLOEXEC);
	}
	return fd < 0 ? -EIO : fd;
}

/* ---- Mappings ---------------------------------------------------------------------------------------------------- */

/* Accept a mapping of a device: CRIU notes where it was and what it was of, not what is in it. */
static int handle_device_vma(int fd, const struct stat *info)
{
	char path[PATH_ROOM];

	if (S_ISREG(info->st_mode) || !device_of(fd, path))
		return -ENOTSUP;
	return 0;
}

static const uint8_t *varint(const uint8_t *at, const uint8_t *end, uint64_t *value)
{
	unsigned int shift;

	*value = 0;
	for (shift = 0; at < end && shift < 64; shift += 7) {
		*value |= (uint64_t)(*at & 0x7f) << shift;
		if (!(*at++ & 0x80))
			return at;
	}
	return NULL;
}

const uint8_t *field(const uint8_t *at, const uint8_t *end, uint64_t *number, uint64_t *value, const uint8_t **data)
{
	uint64_t key;

	*data = NULL;
	at = varint(at, end, &key);
	if (!at)
		return NULL;
	*number = key >> 3;
	switch (key & 7) {
	case 0: return varint(at, end, value);
	case 1:
	case 5: *value = (key & 7) == 1 ? 8 : 4; break;
	case 2:
		at = varint(at, end, value);
		if (!at)
			return NULL;
		break;
	default: return NULL;
	}
	if (*value > (uint64_t)(end - at))
		return NULL;
	*data = at;
	return at + *value;
}

enum { MM_VMAS = 14, VMA_START = 1, VMA_FILE = 4, VMA_STATUS = 7, VMA_FDFLAGS = 10 };
#define REGULAR (1u << 0)
#define FILE_PRIVATE (1u << 6)
#define FILE_SHARED (1u << 7)

/*
 * Will CRIU take the descriptor that we hand out for the mapping at this address? It keeps the one of the mapping
 * before where that was of the same file with the same flags, and would then leak ours into the job. The mappings are
 * in mm-PID.img, in the order in which CRIU opens them. Where that cannot be read the answer is yes: a leak of a
 * descriptor of /dev/zero harms less than a mapping without one.
 */
static bool wants_descriptor(const uint8_t *at, const uint8_t *end, uint64_t address)
{
	uint64_t number, value, before_file = 0, before_flags = 0;
	const uint8_t *data;
	bool before = false;

	while (at && at < end) {
		uint64_t start = 0, file = 0, status = 0, flags = 0;
		const uint8_t *inner, *inner_end;

		at = field(at, end, &number, &value, &data);
		if (!at || number != MM_VMAS || !data)
			continue;
		for (inner = data, inner_end = data + value; inner && inner < inner_end;) {
			inner = field(inner, inner_end, &number, &value, &data);
			if (!inner || data)
				continue;
			if (number == VMA_START)
				start = value;
			else if (number == VMA_FILE)
				file = value;
			else if (number == VMA_STATUS)
				status = value;
			else if (number == VMA_FDFLAGS)
				flags = value;
		}
		if (start == address)
			return !(before && before_file == file && before_flags == flags);
		if ((status & REGULAR) && (status & (FILE_PRIVATE | FILE_SHARED))) {
			before = true;
			before_file = file;
			before_flags = flags;
		}
	}
	return true;
}

static bool descriptor_wanted(uint64_t address)
{
	const size_t head = 12; /* two magic numbers and the length of the message */
	uint8_t *image;
	uint32_t length;
	struct stat info;
	char name[32];
	bool answer = true;
	int fd;

	snprintf(name, sizeof(name), "mm-%d.img", (int)getpid());
	fd = openat(criu_get_image_dir(), name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	if (fd < 0)
		return true;
	if (!fstat(fd, &info) && S_ISREG(info.st_mode) && info.st_size > (off_t)head) {
		image = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
		if (image != MAP_FAILED) {
			memcpy(&length, image + 8, sizeof(length));
			if (length <= (size_t)info.st_size - head)
				answer = wants_descriptor(image + head, image + head + length, address);
			munmap(image, (size_t)info.st_size);
		}
	}
	close(fd);
	return answer;
}

/*
 * Say what to map at restore: zeroes, from /dev/zero. The device would refuse (its driver knows nothing of the new
 * process), and a child that inherited the mapping could never use it anyway.
 */
static int update_vma_map(const char *path, uint64_t address, uint64_t old_offset, uint64_t *new_offset, int *fd)
{
	(void)old_offset;
	while (path[0] == '/' && path[1] == '/')
		path++;
	if (!is_device(path))
		return -ENOTSUP;
	*new_offset = 0;
	*fd = -1;
	if (descriptor_wanted(address)) {
		*fd = open("/dev/zero", O_RDWR | O_CLOEXEC);
		if (*fd < 0) {
			say(ERROR, "cannot open /dev/zero: %s\n", strerror(errno));
			return -EIO;
		}
	}
	return 1;
}

/* ---- What CRIU looks for ----------------------------------------------------------------------------------------- */

static int init(int stage)
{
	(void)stage;
	has_retry = getenv("LIMOSA_CRIU_RETRY") != NULL; /* set by whoever starts CRIU, by its version */
	if (!guard_is_there()) {
		say(ERROR, "this CRIU does not open files through the guard\n");
		return -EPERM;
	}
	return 0;
}

static void finish(int stage, int status)
{
	(void)stage;
	(void)status;
}

__attribute__((visibility("default"))) struct descriptor CR_PLUGIN_DESC = {
	.name = "limosa",
	.init = init,
	.exit = finish,
	.version = INTERFACE,
	.max_hooks = HOOKS,
	.hooks =
		{
			[HOOK_DUMP_EXT_FILE] = (void *)dump_ext_file,
			[HOOK_RESTORE_EXT_FILE] = (void *)restore_ext_file,
			[HOOK_HANDLE_DEVICE_VMA] = (void *)handle_device_vma,
			[HOOK_UPDATE_VMA_MAP] = (void *)update_vma_map,
			[HOOK_RESUME_DEVICES_LATE] = (void *)take_locks_again,
		},
};
