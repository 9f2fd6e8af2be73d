// SPDX-License-Identifier: MIT
/*
 * POSIX locks, taken again before a restored process runs.
 *
 * CRIU takes a process's locks when its descriptors are there, and opens and closes each file that is mapped after
 * that; and whoever closes any descriptor of a file gives up all of his POSIX locks on it (fcntl(2)). So the locks on
 * files that are also mapped are gone again: those of SQLite's -shm files, for one. They belong to the process, and
 * nobody else can take them for it. In this hook CRIU, whose thread we are, holds every restored thread by ptrace where
 * it is about to go on: the main thread is lent to fcntl(2) for each lock and put back as it was.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include "locks.h"
#include "plugin.h"

enum { LOCK_FLAG = 1, LOCK_TYPE = 2, LOCK_PID = 3, LOCK_FD = 4, LOCK_START = 5, LOCK_LENGTH = 6 };
#define KIND_POSIX 1

struct lock {
	int fd;
	struct flock range;
};

/*
 * ---- Which locks: two magic numbers, then records of a length and a protobuf message, as in CRIU's filelocks.img ----
 *
 * Limosa hands over its own list in a descriptor: CRIU's lacks those of a second process that has a file by a descriptor
 * which it has inherited. For images of earlier versions it hands over none.
 */

static bool read_lock(const uint8_t *at, const uint8_t *end, int pid, struct lock *lock)
{
	uint64_t number, value, kind = 0, type = 0, owner = 0, fd = 0, start = 0, length = 0;
	const uint8_t *data;

	while (at && at < end) {
		at = field(at, end, &number, &value, &data);
		if (!at || data)
			return false;
		switch (number) {
		case LOCK_FLAG: kind = value; break;
		case LOCK_TYPE: type = value; break;
		case LOCK_PID: owner = value; break;
		case LOCK_FD: fd = value; break;
		case LOCK_START: start = value; break;
		case LOCK_LENGTH: length = value; break;
		default: break; /* of a later version */
		}
	}
	if (!at || !(kind & KIND_POSIX) || owner != (uint64_t)pid)
		return false;
	memset(lock, 0, sizeof(*lock));
	lock->fd = (int)fd;
	lock->range.l_type = (short)type;
	lock->range.l_whence = SEEK_SET;
	lock->range.l_start = (off_t)start;
	lock->range.l_len = (off_t)length;
	return true;
}

/* The locks of one process: their number, or -1 where the image cannot be read; *locks is to be freed. */
static int read_locks(int pid, struct lock **locks)
{
	const char *given = getenv("LIMOSA_LOCKS");
	const uint8_t *image, *at, *end;
	struct stat info;
	int fd, count = 0;

	*locks = NULL;
	if (given)
		fd = dup(atoi(given));
	else
		fd = openat(criu_get_image_dir(), "filelocks.img", O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	if (fd < 0)
		return errno == ENOENT ? 0 : -1;
	if (fstat(fd, &info) || !S_ISREG(info.st_mode)) {
		close(fd);
		return -1;
	}
	if (info.st_size <= 8) {
		close(fd);
		return 0;
	}
	image = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
	close(fd);
	if (image == MAP_FAILED)
		return -1;
	for (at = image + 8, end = image + info.st_size; count >= 0 && end - at >= 4;) {
		struct lock lock, *more;
		uint32_t length;

		memcpy(&length, at, sizeof(length));
		at += sizeof(length);
		if (length > (size_t)(end - at)) {
			count = -1;
			break;
		}
		if (read_lock(at, at + length, pid, &lock)) {
			more = count & (count - 1) ? *locks
						   : realloc(*locks, sizeof(lock) * (count ? 2 * (size_t)count : 1));
			if (!more) {
				count = -1;
				break;
			}
			*locks = more;
			more[count++] = lock;
		}
		at += length;
	}
	munmap((void *)image, (size_t)info.st_size);
	return count;
}

/* ---- The process -------------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)

/* A process that is lent: what it was like, and where in it a call can be made. */
struct lent {
	pid_t pid;
	int memory; /* /proc/PID/mem */
	struct user_regs_struct registers;
	uint64_t mask;
	unsigned long instruction; /* of "syscall" */
	unsigned long scratch; /* room for a struct flock */
	struct flock before; /* what was there */
	unsigned long section; /* where rseq(2) has its critical section noted, or 0 */
	uint64_t section_before; /* which the kernel forgets when the thread runs elsewhere */
	bool stop; /* it was to be stopped, and still is */
};

/* Where the bytes of the instruction are in a part of memory that may be executed, or 0. */
static unsigned long find_instruction(int memory, unsigned long start, unsigned long end)
{
	uint8_t part[4096];

	while (start < end) {
		ssize_t got =
			pread(memory, part, end - start < sizeof(part) ? end - start : sizeof(part), (off_t)start);
		uint8_t *found = got > 1 ? memmem(part, (size_t)got, "\x0f\x05", 2) : NULL;

		if (found)
			return start + (unsigned long)(found - part);
		if (got < (ssize_t)sizeof(part))
			return 0;
		start += sizeof(part);
	}
	return 0;
}

struct mapping {
	unsigned long start, end;
	bool readable, executable;
	bool room; /* private memory that can be written to, of no file */
};

static const char *hexadecimal(const char *at, unsigned long *value)
{
	for (*value = 0; (*at >= '0' && *at <= '9') || (*at >= 'a' && *at <= 'f'); at++)
		*value = *value << 4 | (unsigned long)(*at <= '9' ? *at - '0' : *at - 'a' + 10);
	return at;
}

/* A line of /proc/PID/maps: "start-end rwxp offset major:minor inode  path". (sscanf has a newer C library's name.) */
static bool read_mapping(const char *at, struct mapping *map)
{
	const char *flags;
	int spaces;

	at = hexadecimal(at, &map->start);
	if (*at != '-')
		return false;
	flags = hexadecimal(at + 1, &map->end) + 1;
	if (flags[-1] != ' ' || strlen(flags) < 5)
		return false;
	for (at = flags, spaces = 0; *at && spaces < 3; at++)
		spaces += *at == ' ';
	map->readable = flags[0] == 'r';
	map->executable = flags[2] == 'x';
	map->room = map->readable && flags[1] == 'w' && flags[3] == 'p' && *at == '0';
	return true;
}

/* Find both places: the instruction in the vDSO where it is there, room in the stack that the thread uses. */
static bool find_places(struct lent *lent)
{
	unsigned long any_instruction = 0, any_room = 0;
	char name[64], line[512];
	bool begins = true; /* a line does: of a long path the rest comes by itself */
	FILE *maps;

	snprintf(name, sizeof(name), "/proc/%d/maps", (int)lent->pid);
	maps = fopen(name, "re");
	if (!maps)
		return false;
	while (fgets(line, sizeof(line), maps)) {
		struct mapping map;

		if (begins && read_mapping(line, &map)) {
			if (map.readable && map.executable && !lent->instruction &&
			    (!any_instruction || strstr(line, "[vdso]"))) {
				unsigned long found = find_instruction(lent->memory, map.start, map.end);
				if (strstr(line, "[vdso]"))
					lent->instruction = found;
				else if (found)
					any_instruction = found;
			}
			if (map.room) {
				if (map.start <= lent->registers.rsp && lent->registers.rsp < map.end)
					lent->scratch = map.start;
				else if (!any_room)
					any_room = map.start;
			}
		}
		begins = strchr(line, '\n') != NULL;
	}
	fclose(maps);
	if (!lent->instruction)
		lent->instruction = any_instruction;
	if (!lent->scratch)
		lent->scratch = any_room;
	return lent->instruction && lent->scratch;
}

/*
 * Let the thread run to its next stop at the border of the kernel. Signals are blocked; the only one that comes all the
 * same is SIGSTOP, where the process was stopped: it is held back and sent again at the end.
 */
static bool to_next_stop(struct lent *lent)
{
	int tries, status;

	for (tries = 0; tries < 16; tries++) {
		if (ptrace(PTRACE_SYSCALL, lent->pid, NULL, NULL) || waitpid(lent->pid, &status, __WALL) != lent->pid)
			return false;
		if (!WIFSTOPPED(status))
			return false;
		if (status >> 16) /* PTRACE_EVENT_STOP and the like */
			continue;
		if ((WSTOPSIG(status) & ~0x80) == SIGTRAP)
			return true;
		if (WSTOPSIG(status) == SIGSTOP)
			lent->stop = true;
	}
	return false;
}

/* Make one call in it; its result, or -EIO where it could not be made. */
static long call(struct lent *lent, long number, unsigned long a, unsigned long b, unsigned long c)
{
	struct user_regs_struct registers = lent->registers;
	int stops;

	registers.rip = lent->instruction;
	registers.rax = (unsigned long)number;
	registers.orig_rax = (unsigned long)-1; /* it is in no call that could be begun again */
	registers.rdi = a;
	registers.rsi = b;
	registers.rdx = c;
	if (ptrace(PTRACE_SETREGS, lent->pid, NULL, &registers))
		return -EIO;
	for (stops = 0; stops < 2; stops++) /* on its way in, on its way out */
		if (!to_next_stop(lent))
			return -EIO;
	if (ptrace(PTRACE_GETREGS, lent->pid, NULL, &registers))
		return -EIO;
	return (long)registers.rax;
}

/* linux/ptrace.h, since Linux 5.13 */
#define GET_RSEQ_CONFIGURATION 0x420f
struct rseq_configuration {
	uint64_t area;
	uint32_t size, signature, flags, pad;
};

static bool borrow(struct lent *lent, pid_t pid)
{
	struct rseq_configuration rseq;
	uint64_t all = ~0ull;
	char name[64];

	memset(lent, 0, sizeof(*lent));
	lent->pid = pid;
	snprintf(name, sizeof(name), "/proc/%d/mem", (int)pid);
	lent->memory = open(name, O_RDWR | O_CLOEXEC);
	if (lent->memory < 0)
		return false;
	if (ptrace(GET_RSEQ_CONFIGURATION, pid, sizeof(rseq), &rseq) == sizeof(rseq) && rseq.area &&
	    pread(lent->memory, &lent->section_before, 8, (off_t)rseq.area + 8) == 8)
		lent->section = (unsigned long)rseq.area + 8;
	if (ptrace(PTRACE_GETREGS, pid, NULL, &lent->registers) ||
	    ptrace(PTRACE_GETSIGMASK, pid, sizeof(lent->mask), &lent->mask) || !find_places(lent) ||
	    pread(lent->memory, &lent->before, sizeof(lent->before), (off_t)lent->scratch) != sizeof(lent->before) ||
	    ptrace(PTRACE_SETSIGMASK, pid, sizeof(all), &all)) {
		close(lent->memory);
		return false;
	}
	return true;
}

/* Put it back as it was; false where that cannot be said. */
static bool give_back(struct lent *lent)
{
	bool well = pwrite(lent->memory, &lent->before, sizeof(lent->before), (off_t)lent->scratch) ==
			    sizeof(lent->before) &&
		    (!lent->section || pwrite(lent->memory, &lent->section_before, 8, (off_t)lent->section) == 8) &&
		    !ptrace(PTRACE_SETREGS, lent->pid, NULL, &lent->registers) &&
		    !ptrace(PTRACE_SETSIGMASK, lent->pid, sizeof(lent->mask), &lent->mask);

	close(lent->memory);
	if (lent->stop && kill(lent->pid, SIGSTOP))
		return false;
	return well;
}

static bool take(pid_t pid, const struct lock *locks, int count)
{
	struct lent lent;
	bool well = true;
	int i;

	if (!borrow(&lent, pid)) {
		say(ERROR, "lock-lost: process %d cannot be made to take its locks again: %s\n", (int)pid,
		    strerror(errno));
		return false;
	}
	for (i = 0; well && i < count; i++) {
		long result = -EIO;

		if (pwrite(lent.memory, &locks[i].range, sizeof(locks[i].range), (off_t)lent.scratch) ==
		    sizeof(locks[i].range))
			result = call(&lent, SYS_fcntl, (unsigned long)locks[i].fd, F_SETLK, lent.scratch);
		if (result) {
			say(ERROR,
			    "lock-lost: process %d cannot take its lock again on descriptor %d from byte %lld: %s\n",
			    (int)pid, locks[i].fd, (long long)locks[i].range.l_start, strerror((int)-result));
			well = false;
		}
	}
	if (!give_back(&lent)) {
		say(ERROR, "lock-lost: process %d cannot be put back as it was\n", (int)pid);
		well = false;
	}
	return well;
}

#else

static bool take(pid_t pid, const struct lock *locks, int count)
{
	(void)locks;
	(void)count;
	say(ERROR, "lock-lost: process %d had locks, and on this processor they cannot be taken again\n", (int)pid);
	return false;
}

#endif

/*
 * A process whose locks are not all there must not run: CRIU does not look at what this hook returns, but ends all it has
 * restored where one of them is gone when it lets them go.
 */
int take_locks_again(int pid)
{
	struct lock *locks;
	int count = read_locks(pid, &locks);
	bool well = count == 0;

	if (count < 0)
		say(ERROR, "lock-lost: the locks of process %d cannot be read from the image\n", pid);
	else if (count > 0)
		well = take(pid, locks, count);
	free(locks);
	if (!well)
		kill(pid, SIGKILL);
	return count > 0 && well ? 0 : -ENOTSUP;
}
