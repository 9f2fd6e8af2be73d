// SPDX-License-Identifier: MIT
/*
 * Names that CRIU opens, makes and removes as root, in folders that belong to a job's user.
 *
 * CRIU follows whatever link lies there: a user who puts one in the place of his folder has it make and remove sockets,
 * change owners and connect, as root, where he likes. Limosa starts CRIU with this library before the C library
 * (LD_PRELOAD): every call that takes a path walks there itself, folder by folder, and follows only links of root's or
 * of who installed Limosa, which nobody else can have made. What is done at the end is done in the folder that was
 * reached. DESIGN.md says more.
 *
 * System calls are made directly: nothing here depends on which C library CRIU brings.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "guard.h"
#include "plugin.h"

#define EXPORT __attribute__((visibility("default")))
#define PROC_MAGIC 0x9fa0 /* statfs(2) */
#define FUSE_MAGIC 0x65735546
#define CGROUP_MAGIC 0x27e0eb
#define CGROUP2_MAGIC 0x63677270
#ifndef SIOCUNIXFILE
#define SIOCUNIXFILE 0x89e0 /* linux/un.h: a descriptor (O_PATH) of a socket's file */
#endif
#define MOST_LINKS 40
#define NOBODY 65534
#define SYSTEM_GROUPS 100 /* members of those below are as good as root (limosa/start.py) */
#define NO_SET_ID 0777u /* of what is made: it is root's until it is given away, with what its user had in it */
#define SLACK 2 /* seconds: clocks of file systems are coarse */

#define MOST_GROUPS 256
static bool active, asked, begun, for_user; /* for_user: the job is not root's */
static uid_t installer;

/* The job's user and his groups; nobody where that is root. */
static uid_t user = NOBODY;
static gid_t groups[MOST_GROUPS] = {NOBODY};
static size_t n_groups = 1;

/* The file that was made last by a path. Only that one is given away or given a mode: not another one by its name. */
static struct {
	bool known;
	dev_t device;
	ino_t inode;
} made;

__attribute__((constructor)) static void begin(void)
{
	const char *given = getenv("LIMOSA_GUARD"); /* "installer", or "installer:uid,gid,gid" */
	char *end;

	if (!given || geteuid())
		return;
	active = true;
	installer = (uid_t)strtoul(given, &end, 10);
	if (*end != ':')
		return;
	for_user = true;
	user = (uid_t)strtoul(end + 1, &end, 10);
	for (n_groups = 0; *end && n_groups < MOST_GROUPS; n_groups++)
		groups[n_groups] = (gid_t)strtoul(end + 1, &end, 10);
}

/* Without LD_PRELOAD this library is only CRIU's plugin, and CRIU calls the C library. */
bool guard_is_there(void)
{
	int fd;

	asked = false;
	begun = active;
	fd = open("/", O_PATH | O_CLOEXEC); /* as CRIU would find it: not within this library */
	if (fd >= 0)
		close(fd);
	unsetenv("LD_PRELOAD"); /* not in programs that CRIU runs */
	return asked || !active;
}

/* ---- Walking ----------------------------------------------------------------------------------------------------- */

/*
 * Where a path leads: the folder, open, and the last name. others: somebody else than root can change names on the way;
 * uid, gid: whose rights do there what he could do himself; NOBODY for a group's (gid), everybody's and one that cannot be
 * known.
 */
struct place {
	int folder;
	char name[NAME_MAX + 1];
	bool others;
	uid_t uid;
	gid_t gid;
};

static int raw_open(int folder, const char *name, int flags, mode_t mode)
{
	return (int)syscall(SYS_openat, folder, name, flags, mode);
}

/* fstat(2), without the C library, whose own is a new one (2.33). */
static int look_at(int fd, struct stat *info)
{
	return (int)syscall(SYS_newfstatat, fd, "", info, AT_EMPTY_PATH);
}

static void drop(int fd)
{
	int kept = errno;

	close(fd);
	errno = kept;
}

/*
 * The name of a descriptor's file below /proc. False where that leads elsewhere: what is at /proc in a container is the
 * container's to choose, and while its mounts are put together there is nothing.
 */
static bool by_proc(int fd, char *link, size_t room)
{
	int folder = raw_open(AT_FDCWD, "/proc/self/fd", O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
	struct stat own, there;
	struct statfs info;
	bool real;

	if (folder < 0)
		return false;
	real = !fstatfs(folder, &info) && info.f_type == PROC_MAGIC;
	drop(folder);
	snprintf(link, room, "/proc/self/fd/%d", fd);
	if (real && !look_at(fd, &own) && !syscall(SYS_newfstatat, AT_FDCWD, link, &there, 0) &&
	    own.st_dev == there.st_dev && own.st_ino == there.st_ino)
		return true;
	errno = ENOENT;
	return false;
}

static void blame(const char *path, const char *what)
{
	int kept = errno;

	/* As CRIU's own errors are written: Limosa reads the log. */
	if (print_on_level)
		print_on_level(ERROR, "Error (limosa-guard): exchanged: %s %s\n", path, what);
	errno = kept;
}

/* Whether it is of that file system, as far as can be known. */
static bool may_be_on(int fd, long magic)
{
	struct statfs info;

	return fstatfs(fd, &info) || info.f_type == magic;
}

/* Others than owner and group may be let in by a list, whose limit the group's bits are then. */
static bool has_list(int fd)
{
	char link[64];

	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	return syscall(SYS_getxattr, link, "system.posix_acl_access", NULL, 0) > 0;
}

static void look(struct place *place, int fd)
{
	struct stat info;

	if (look_at(fd, &info))
		return;
	if (may_be_on(fd, FUSE_MAGIC)) { /* whose something is there is a user's word, perhaps */
		place->others = true;
		if (!place->uid)
			place->uid = NOBODY;
	} else if (info.st_uid) {
		place->others = true;
		if (!place->uid || place->uid == NOBODY) {
			place->uid = info.st_uid;
			place->gid = info.st_gid;
		}
	} else {
		bool everybody = info.st_mode & S_IWOTH, group = info.st_mode & S_IWGRP;
		bool people = group && info.st_gid >= SYSTEM_GROUPS, list = group && has_list(fd);

		if (!everybody && !people && !list)
			return;
		place->others = true;
		if (!place->uid && !(info.st_mode & S_ISVTX)) {
			place->uid = NOBODY;
			if (!everybody && !list)
				place->gid = info.st_gid; /* and nobody else */
		}
	}
}

/* Reads a link that may be followed; false where it may not. */
static bool read_link(int folder, const char *name, const struct stat *info, char *to, const char *path)
{
	char rest[PATH_MAX];
	ssize_t length;

	/* Those on procfs lead where a process says, whoever they belong to. */
	if ((info->st_uid && info->st_uid != installer) || may_be_on(folder, FUSE_MAGIC) ||
	    may_be_on(folder, PROC_MAGIC)) {
		errno = ELOOP;
		blame(path, "leads through a symbolic link of somebody else's");
		return false;
	}
	length = readlinkat(folder, name, rest, sizeof(rest) - 1);
	if (length <= 0)
		return false;
	rest[length] = 0;
	if ((size_t)length + strlen(to) + 2 > PATH_MAX) {
		errno = ENAMETOOLONG;
		return false;
	}
	strcat(rest, "/");
	strcat(rest, to);
	strcpy(to, rest);
	return true;
}

/* Walks to the folder of a path's last name. follow: the last name is no link then. place->folder is to be closed. */
static bool walk(int at, const char *path, bool follow, struct place *place)
{
	char rest[PATH_MAX];
	int links = 0, next;
	struct stat info;

	memset(place, 0, sizeof(*place));
	if (strlen(path) >= sizeof(rest)) {
		errno = ENAMETOOLONG;
		return false;
	}
	strcpy(rest, path);
	place->folder = raw_open(at, *path == '/' ? "/" : ".", O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
	if (place->folder < 0)
		return false;
	look(place, place->folder);
	for (;;) {
		char *begin = rest, *end;
		bool last;

		while (*begin == '/')
			begin++;
		end = strchrnul(begin, '/');
		if (end - begin > NAME_MAX) {
			errno = ENAMETOOLONG;
			break;
		}
		memcpy(place->name, begin, (size_t)(end - begin));
		place->name[end - begin] = 0;
		last = !*(end + strspn(end, "/"));
		memmove(rest, end, strlen(end) + 1);
		if (!*place->name) {
			strcpy(place->name, ".");
			return true;
		}
		if (last && !follow)
			return true;
		next = raw_open(place->folder, place->name, O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);
		if (next < 0 && last && errno == ENOENT)
			return true; /* it is to be made */
		if (next < 0)
			break;
		if (look_at(next, &info)) {
			drop(next);
			break;
		}
		if (S_ISLNK(info.st_mode)) {
			bool read = false;

			if (++links > MOST_LINKS)
				errno = ELOOP;
			else
				read = read_link(next, "", &info, rest, path);
			drop(next);
			if (!read)
				break;
			if (*rest == '/') {
				next = raw_open(AT_FDCWD, "/", O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
				if (next < 0)
					break;
				drop(place->folder);
				place->folder = next;
			}
			continue;
		}
		if (last) {
			drop(next);
			return true;
		}
		look(place, next);
		drop(place->folder);
		place->folder = next;
	}
	drop(place->folder);
	return false;
}

static bool below(const char *path, const char *folder)
{
	size_t length = strlen(folder);

	return !strncmp(path, folder, length) && (!path[length] || path[length] == '/');
}

/* Whether the first name of a path is that one. */
static bool is(const char *path, const char *name)
{
	return strcspn(path, "/") == strlen(name) && !strncmp(path, name, strlen(name));
}

/*
 * Whether a path below /proc or /sys is CRIU's own. A socket's name is whatever its user has written: it may lead out of
 * there again, by "..", by a process's working folder, or by a descriptor.
 */
static bool stays(const char *path)
{
	const char *before = "";
	size_t length;

	for (path += strspn(path, "/"); *path; path += length, path += strspn(path, "/")) {
		length = strcspn(path, "/");
		if (is(path, ".."))
			return false;
		if (path[length] && (is(path, "cwd") || is(path, "root") || is(before, "fd")))
			return false;
		before = path;
	}
	return true;
}

static bool is_root(int at)
{
	struct stat folder, root;

	return !look_at(at, &folder) && !syscall(SYS_newfstatat, AT_FDCWD, "/", &root, 0) &&
	       folder.st_dev == root.st_dev && folder.st_ino == root.st_ino;
}

/* Whether a path is one of a job's: absolute, or below the root folder, or by the working folder. */
static bool guarded(int at, const char *path)
{
	struct statfs info;

	if (!active || !path || !*path)
		return false;
	if (*path == '/') {
		path += strspn(path, "/") - 1;
		return !(below(path, "/proc") || below(path, "/sys")) || !stays(path);
	}
	if (at == AT_FDCWD) /* the one place where CRIU works in /proc: in /proc/PID/fd */
		return strchr(path, '/') || !strcmp(path, "..") || statfs(".", &info) || info.f_type != PROC_MAGIC;
	if ((below(path, "proc") || below(path, "sys")) && stays(path))
		return false;
	return is_root(at);
}

/* Whether it is a job's file below /proc or /sys, which CRIU opens from the root folder; its own it opens otherwise. */
static bool of_kernel(int at, const char *path)
{
	return for_user && path && at != AT_FDCWD && (below(path, "proc") || below(path, "sys")) && stays(path) &&
	       is_root(at);
}

/* ---- Whose rights ------------------------------------------------------------------------------------------------- */

struct rights {
	gid_t groups[NGROUPS_MAX > 1024 ? 1024 : NGROUPS_MAX];
	int count;
};

/* Has so many of the job's user's groups instead of ours. */
static bool take_groups(size_t count, struct rights *before)
{
	before->count = getgroups((int)(sizeof(before->groups) / sizeof(*before->groups)), before->groups);
	return before->count >= 0 && !syscall(SYS_setgroups, (int)count, groups);
}

static bool be_root_again(const struct rights *before)
{
	int kept = errno;

	setfsuid(0);
	setfsgid(0);
	if (syscall(SYS_setgroups, before->count, before->groups))
		return false;
	errno = kept;
	return true;
}

/* Of whose place it is; the job's user's where that is everybody's or a group's. */
static uid_t rights_of(const struct place *place)
{
	return place->uid && place->uid != NOBODY ? place->uid : user;
}

/* Takes his rights to files; the group's alone where the job is root's and a group can exchange names. */
static bool become(const struct place *place, struct rights *before)
{
	uid_t uid = rights_of(place);
	bool known = uid == user && (for_user || !place->gid);

	if (!take_groups(known ? n_groups : 0, before))
		return false;
	setfsgid(known ? groups[0] : place->gid);
	setfsuid(uid);
	if ((uid_t)setfsuid((uid_t)-1) == uid)
		return true;
	be_root_again(before);
	errno = EPERM;
	return false;
}

/* ---- What was made ----------------------------------------------------------------------------------------------- */

static void remember(const struct stat *info)
{
	made.known = true;
	made.device = info->st_dev;
	made.inode = info->st_ino;
}

/* The same for what was made by a name, in whose place another may be by now: a new one of that owner's is meant. */
static void remember_new(const struct place *place, mode_t kind, uid_t owner, time_t since)
{
	struct statx more;
	struct stat info;
	int fd = raw_open(place->folder, place->name, O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);
	time_t born;

	made.known = false;
	if (fd < 0)
		return;
	if (!look_at(fd, &info) && (info.st_mode & S_IFMT) == kind && info.st_uid == owner) {
		born = info.st_ctime;
		if (!syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_BTIME, &more) && more.stx_mask & STATX_BTIME)
			born = (time_t)more.stx_btime.tv_sec;
		if (born >= since - SLACK)
			remember(&info);
	}
	drop(fd);
}

/* Whether a file of that owner's is what who has the folder could have made. */
static bool may_be_his(const struct place *place, uid_t owner)
{
	return owner && (!place->uid || place->uid == NOBODY || place->uid == owner);
}

/*
 * Opens what is to be given to an owner (mode 0) or given a mode. A user whose file system says what he likes (FUSE) has
 * files of anybody's in an image: no program of another's comes of it, and no link of root's.
 */
static int open_made(int at, const char *path, uid_t owner, mode_t mode)
{
	const char *wrong = NULL;
	struct place place;
	struct stat info;
	int fd;

	if (!walk(at, path, false, &place))
		return -1;
	fd = raw_open(place.folder, place.name, O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);
	drop(place.folder);
	if (fd < 0 || !place.others)
		return fd;
	if (look_at(fd, &info) || !made.known || info.st_dev != made.device || info.st_ino != made.inode)
		wrong = "is not the file that was made there";
	else if (!mode && S_ISLNK(info.st_mode) && (!owner || owner == installer))
		wrong = "would be a symbolic link of root's";
	else if (S_ISREG(info.st_mode) && (mode & S_ISGID || (mode & S_ISUID && !may_be_his(&place, info.st_uid))))
		wrong = "would run with the rights of somebody else";
	if (!wrong)
		return fd;
	drop(fd);
	errno = EPERM;
	blame(path, wrong);
	return -1;
}

/* ---- Opening ----------------------------------------------------------------------------------------------------- */

/* Takes the user's rights whole: his numbers, and no capability. */
static int open_as_user(int at, const char *path, int flags, mode_t mode)
{
	struct rights before;
	int fd = -1, kept;

	if (!take_groups(n_groups, &before))
		return -1;
	if (!syscall(SYS_setresgid, -1, groups[0], -1) && !syscall(SYS_setresuid, -1, user, -1))
		fd = raw_open(at, path, flags, mode);
	kept = errno;
	if (syscall(SYS_setresuid, -1, 0, -1) || syscall(SYS_setresgid, -1, 0, -1) || !be_root_again(&before)) {
		if (fd >= 0)
			close(fd);
		errno = EIO; /* not that he may not open it: nobody is to try it again with whose rights these are now */
		return -1;
	}
	errno = kept;
	return fd;
}

/*
 * The kernel asks who has opened such a file when it is written to (cgroup.procs) or read (kallsyms): the job's user has.
 * Root opens what he may not (a process of the job is root's still), but nothing of a control group.
 */
static int open_of_kernel(int at, const char *path, int flags, mode_t mode)
{
	int fd = open_as_user(at, path, flags, mode), found;
	bool group;

	if (fd >= 0 || (errno != EACCES && errno != EPERM))
		return fd;
	found = raw_open(at, path, O_PATH | O_CLOEXEC, 0);
	if (found < 0)
		return -1;
	group = may_be_on(found, CGROUP_MAGIC) || may_be_on(found, CGROUP2_MAGIC);
	drop(found);
	if (!group)
		return raw_open(at, path, flags, mode);
	errno = EACCES;
	blame(path, "is of a control group that is not its user's to open");
	return -1;
}

/* Opens what was found once more; where that is not to be had by /proc, by its name, and it must be the same. */
static int open_found(int found, const struct place *place, const struct stat *info, int flags)
{
	struct stat again;
	char link[64];
	int fd;

	if (by_proc(found, link, sizeof(link)))
		return raw_open(AT_FDCWD, link, flags, 0);
	fd = raw_open(place->folder, place->name, flags | O_NOFOLLOW, 0);
	if (fd < 0 || (!look_at(fd, &again) && again.st_dev == info->st_dev && again.st_ino == info->st_ino))
		return fd;
	drop(fd);
	errno = ELOOP;
	return -1;
}

static int guarded_open(int at, const char *path, int flags, mode_t mode)
{
	bool follow = !(flags & O_NOFOLLOW) && (flags & (O_CREAT | O_EXCL)) != (O_CREAT | O_EXCL);
	struct place place;
	struct stat info;
	int fd, found;
	bool pipe;

	asked = true;
	if (of_kernel(at, path) && !(flags & O_PATH))
		return open_of_kernel(at, path, flags, mode);
	if (!guarded(at, path))
		return raw_open(at, path, flags, mode);
	mode &= NO_SET_ID;
	if (!walk(at, path, follow, &place))
		return -1;
	if (!follow || flags & O_CREAT) {
		fd = raw_open(place.folder, place.name, flags | (follow ? O_NOFOLLOW : 0), mode);
		if (fd >= 0 && flags & O_CREAT && !look_at(fd, &info))
			remember(&info);
		drop(place.folder);
		return fd;
	}
	/* O_NOFOLLOW would stay among the descriptor's flags: what was found is opened once more. */
	found = raw_open(place.folder, place.name, O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);
	if (found < 0) {
		drop(place.folder);
		return -1;
	}
	if (look_at(found, &info) || S_ISLNK(info.st_mode)) {
		drop(found);
		drop(place.folder);
		errno = ELOOP;
		blame(path, "is a symbolic link now");
		return -1;
	}
	/* CRIU holds both ends of a job's pipe by then. Put there by another, it would hold us up until he opens it. */
	pipe = S_ISFIFO(info.st_mode) && !(flags & O_PATH);
	fd = open_found(found, &place, &info, pipe ? flags | O_NONBLOCK : flags);
	drop(place.folder);
	if (fd >= 0 && pipe && !(flags & O_NONBLOCK))
		fcntl(fd, F_SETFL, flags);
	drop(found);
	return fd;
}

/* The mode is handed over only where something may be made. */
static mode_t mode_of(int flags, va_list arguments)
{
	return flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
}

EXPORT int open(const char *path, int flags, ...)
{
	va_list arguments;
	mode_t mode;

	va_start(arguments, flags);
	mode = mode_of(flags, arguments);
	va_end(arguments);
	return guarded_open(AT_FDCWD, path, flags, mode);
}

EXPORT int open64(const char *path, int flags, ...)
{
	va_list arguments;
	mode_t mode;

	va_start(arguments, flags);
	mode = mode_of(flags, arguments);
	va_end(arguments);
	return guarded_open(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}

EXPORT int openat(int at, const char *path, int flags, ...)
{
	va_list arguments;
	mode_t mode;

	va_start(arguments, flags);
	mode = mode_of(flags, arguments);
	va_end(arguments);
	return guarded_open(at, path, flags, mode);
}

EXPORT int openat64(int at, const char *path, int flags, ...)
{
	va_list arguments;
	mode_t mode;

	va_start(arguments, flags);
	mode = mode_of(flags, arguments);
	va_end(arguments);
	return guarded_open(at, path, flags | O_LARGEFILE, mode);
}

/* What a fortified program calls instead. */
int __open_2(const char *path, int flags);
int __open64_2(const char *path, int flags);
int __openat_2(int at, const char *path, int flags);
int __openat64_2(int at, const char *path, int flags);

EXPORT int __open_2(const char *path, int flags)
{
	return guarded_open(AT_FDCWD, path, flags, 0);
}

EXPORT int __open64_2(const char *path, int flags)
{
	return guarded_open(AT_FDCWD, path, flags | O_LARGEFILE, 0);
}

EXPORT int __openat_2(int at, const char *path, int flags)
{
	return guarded_open(at, path, flags, 0);
}

EXPORT int __openat64_2(int at, const char *path, int flags)
{
	return guarded_open(at, path, flags | O_LARGEFILE, 0);
}

EXPORT int chdir(const char *path)
{
	struct place place;
	int fd, done;

	/* Later it is the folder of a socket, which its user has named. Before, it is Limosa's (/proc/self/fd/N). */
	if (!*path || (!begun && !guarded(AT_FDCWD, path)))
		return (int)syscall(SYS_chdir, path);
	if (!walk(AT_FDCWD, path, true, &place))
		return -1;
	fd = raw_open(place.folder, place.name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
	drop(place.folder);
	if (fd < 0)
		return -1;
	done = fchdir(fd);
	drop(fd);
	return done;
}

/* ---- Making and removing ----------------------------------------------------------------------------------------- */

EXPORT int unlinkat(int at, const char *path, int flags)
{
	struct place place;
	int done;

	if (!guarded(at, path))
		return (int)syscall(SYS_unlinkat, at, path, flags);
	if (!walk(at, path, false, &place))
		return -1;
	done = (int)syscall(SYS_unlinkat, place.folder, place.name, flags);
	drop(place.folder);
	return done;
}

EXPORT int unlink(const char *path)
{
	return unlinkat(AT_FDCWD, path, 0);
}

EXPORT int rmdir(const char *path)
{
	return unlinkat(AT_FDCWD, path, AT_REMOVEDIR);
}

EXPORT int mkdirat(int at, const char *path, mode_t mode)
{
	time_t since = time(NULL);
	struct place place;
	int done;

	if (!guarded(at, path))
		return (int)syscall(SYS_mkdirat, at, path, mode);
	if (!walk(at, path, false, &place))
		return -1;
	done = (int)syscall(SYS_mkdirat, place.folder, place.name, mode);
	if (!done)
		remember_new(&place, S_IFDIR, 0, since);
	drop(place.folder);
	return done;
}

EXPORT int mkdir(const char *path, mode_t mode)
{
	return mkdirat(AT_FDCWD, path, mode);
}

/* mkdtemp(3), whose mkdir(2) would be the C library's own: CRIU gives the folder another mode afterwards. */
EXPORT char *mkdtemp(char *path)
{
	static const char letters[] = "abcdefghijklmnopqrstuvwxyz0123456789";
	size_t length = strlen(path), i;
	unsigned char random[6];
	int tries;

	if (length < sizeof(random) || strcmp(path + length - sizeof(random), "XXXXXX")) {
		errno = EINVAL;
		return NULL;
	}
	for (tries = 0; tries < 100; tries++) {
		if (syscall(SYS_getrandom, random, sizeof(random), 0) != sizeof(random))
			return NULL;
		for (i = 0; i < sizeof(random); i++)
			path[length - sizeof(random) + i] = letters[random[i] % (sizeof(letters) - 1)];
		if (!mkdirat(AT_FDCWD, path, 0700))
			return path;
		if (errno != EEXIST)
			return NULL;
	}
	return NULL;
}

EXPORT int mknodat(int at, const char *path, mode_t mode, dev_t device)
{
	time_t since = time(NULL);
	struct place place;
	int done;

	if (!guarded(at, path))
		return (int)syscall(SYS_mknodat, at, path, mode, (unsigned int)device);
	if (!walk(at, path, false, &place))
		return -1;
	if (place.others && (S_ISCHR(mode) || S_ISBLK(mode))) {
		drop(place.folder);
		errno = EPERM;
		blame(path, "would be a device in a folder of somebody else's");
		return -1;
	}
	done = (int)syscall(SYS_mknodat, place.folder, place.name, mode & (S_IFMT | NO_SET_ID), (unsigned int)device);
	if (!done)
		remember_new(&place, mode & S_IFMT, 0, since);
	drop(place.folder);
	return done;
}

EXPORT int mknod(const char *path, mode_t mode, dev_t device)
{
	return mknodat(AT_FDCWD, path, mode, device);
}

/* mknod(3) of a C library before 2.33. */
int __xmknod(int version, const char *path, mode_t mode, dev_t *device);

EXPORT int __xmknod(int version, const char *path, mode_t mode, dev_t *device)
{
	(void)version;
	return mknodat(AT_FDCWD, path, mode, *device);
}

/* With the rights of whose folder it is: a link of root's is followed, and he could keep this one. */
static int link_as(const struct place *place, const char *to)
{
	struct rights before;
	int done;

	if (!become(place, &before))
		return -1;
	done = (int)syscall(SYS_symlinkat, to, place->folder, place->name);
	return be_root_again(&before) ? done : -1;
}

EXPORT int symlinkat(const char *to, int at, const char *path)
{
	time_t since = time(NULL);
	struct place place;
	struct stat folder;
	bool theirs;
	int done;

	if (!guarded(at, path))
		return (int)syscall(SYS_symlinkat, to, at, path);
	if (!walk(at, path, false, &place))
		return -1;
	theirs = !geteuid() && (place.uid || look_at(place.folder, &folder) || folder.st_mode & (S_IWGRP | S_IWOTH));
	done = theirs ? link_as(&place, to) : (int)syscall(SYS_symlinkat, to, place.folder, place.name);
	if (!done)
		remember_new(&place, S_IFLNK, theirs ? rights_of(&place) : 0, since);
	drop(place.folder);
	return done;
}

EXPORT int symlink(const char *to, const char *path)
{
	return symlinkat(to, AT_FDCWD, path);
}

/* Both names of a call that has two. */
static bool walk_both(int at, const char *path, int new_at, const char *new_path, struct place *from, struct place *to)
{
	from->folder = to->folder = -1;
	if (guarded(at, path) && !walk(at, path, false, from))
		return false;
	if (guarded(new_at, new_path) && !walk(new_at, new_path, false, to)) {
		if (from->folder >= 0)
			drop(from->folder);
		return false;
	}
	return true;
}

static int on_both(long call, int at, const char *path, int new_at, const char *new_path, int flags)
{
	struct place from, to;
	int done;

	if (!walk_both(at, path, new_at, new_path, &from, &to))
		return -1;
	if (from.folder >= 0) {
		at = from.folder;
		path = from.name;
	}
	if (to.folder >= 0) {
		new_at = to.folder;
		new_path = to.name;
	}
	done = (int)syscall(call, at, path, new_at, new_path, flags);
	if (from.folder >= 0)
		drop(from.folder);
	if (to.folder >= 0)
		drop(to.folder);
	return done;
}

EXPORT int linkat(int at, const char *path, int new_at, const char *new_path, int flags)
{
	/* AT_SYMLINK_FOLLOW is for links of /proc, which are not guarded. */
	return on_both(SYS_linkat, at, path, new_at, new_path, guarded(at, path) ? flags & ~AT_SYMLINK_FOLLOW : flags);
}

EXPORT int link(const char *path, const char *new_path)
{
	return linkat(AT_FDCWD, path, AT_FDCWD, new_path, 0);
}

EXPORT int renameat(int at, const char *path, int new_at, const char *new_path)
{
	return on_both(SYS_renameat2, at, path, new_at, new_path, 0);
}

EXPORT int rename(const char *path, const char *new_path)
{
	return renameat(AT_FDCWD, path, AT_FDCWD, new_path);
}

/* ---- Giving away ------------------------------------------------------------------------------------------------- */

EXPORT int fchownat(int at, const char *path, uid_t uid, gid_t gid, int flags)
{
	int fd, done;

	if (!guarded(at, path))
		return (int)syscall(SYS_fchownat, at, path, uid, gid, flags);
	fd = open_made(at, path, uid, 0);
	if (fd < 0)
		return -1;
	done = (int)syscall(SYS_fchownat, fd, "", uid, gid, AT_EMPTY_PATH);
	drop(fd);
	return done;
}

EXPORT int chown(const char *path, uid_t uid, gid_t gid)
{
	return fchownat(AT_FDCWD, path, uid, gid, 0);
}

EXPORT int lchown(const char *path, uid_t uid, gid_t gid)
{
	return fchownat(AT_FDCWD, path, uid, gid, AT_SYMLINK_NOFOLLOW);
}

EXPORT int fchmodat(int at, const char *path, mode_t mode, int flags)
{
	char link[64];
	int fd, done;

	(void)flags; /* a link is never followed here */
	if (!guarded(at, path))
		return (int)syscall(SYS_fchmodat, at, path, mode);
	fd = open_made(at, path, 0, mode | S_IFMT);
	if (fd < 0)
		return -1;
	done = by_proc(fd, link, sizeof(link)) ? (int)syscall(SYS_fchmodat, AT_FDCWD, link, mode) : -1;
	drop(fd);
	return done;
}

EXPORT int chmod(const char *path, mode_t mode)
{
	return fchmodat(AT_FDCWD, path, mode, 0);
}

EXPORT int lutimes(const char *path, const struct timeval tv[2])
{
	struct timespec times[2];
	struct place place;
	int done;

	if (tv) {
		times[0] = (struct timespec){tv[0].tv_sec, tv[0].tv_usec * 1000};
		times[1] = (struct timespec){tv[1].tv_sec, tv[1].tv_usec * 1000};
	}
	if (!guarded(AT_FDCWD, path))
		return utimensat(AT_FDCWD, path, tv ? times : NULL, AT_SYMLINK_NOFOLLOW);
	if (!walk(AT_FDCWD, path, false, &place))
		return -1;
	done = utimensat(place.folder, place.name, tv ? times : NULL, AT_SYMLINK_NOFOLLOW);
	drop(place.folder);
	return done;
}

/* ---- Sockets ----------------------------------------------------------------------------------------------------- */

static bool has_path(const struct sockaddr *address, socklen_t length, char *path)
{
	const struct sockaddr_un *name = (const struct sockaddr_un *)address;
	size_t head = offsetof(struct sockaddr_un, sun_path), most = sizeof(name->sun_path);

	if (!active || !address || length <= head || name->sun_family != AF_UNIX || !name->sun_path[0])
		return false;
	if (length - head < most)
		most = length - head;
	memcpy(path, name->sun_path, most);
	path[most] = 0;
	return *path == '/' || guarded(AT_FDCWD, path);
}

/*
 * A socket's name is what it is bound by: the kernel has to walk the path once more. It does so with the rights of whose
 * folder is on the way, who gains nothing by leading it elsewhere.
 */
static int bind_as(const struct place *place, int fd, const struct sockaddr *address, socklen_t length)
{
	struct rights before;
	int done;

	if (!become(place, &before))
		return -1;
	done = (int)syscall(SYS_bind, fd, address, length);
	return be_root_again(&before) ? done : -1;
}

/*
 * Whether a job of root's has made the folder within somebody else's: only root can bind there, by a name that the job
 * has chosen. Led elsewhere, it is taken away again.
 */
static bool roots_within(const struct place *place)
{
	struct place last = {0};

	look(&last, place->folder);
	return !for_user && place->uid && !last.others;
}

/* Takes a socket away that lies where it was not to be. */
static void take_away(int file)
{
	char link[64], name[PATH_MAX];
	ssize_t size;

	size = by_proc(file, link, sizeof(link)) ? readlinkat(AT_FDCWD, link, name, sizeof(name) - 1) : -1;
	if (size <= 0)
		return;
	name[size] = 0;
	unlink(name);
}

EXPORT int bind(int fd, const struct sockaddr *address, socklen_t length)
{
	char path[sizeof(((struct sockaddr_un *)0)->sun_path) + 1];
	struct stat there, info;
	struct place place;
	int done, file;
	bool within;

	if (!has_path(address, length, path))
		return (int)syscall(SYS_bind, fd, address, length);
	if (!walk(AT_FDCWD, path, false, &place))
		return -1;
	within = roots_within(&place);
	if (place.uid && strchr(path, '/') && !within)
		done = bind_as(&place, fd, address, length);
	else
		done = (int)syscall(SYS_bind, fd, address, length);
	if (!done) {
		made.known = false;
		file = ioctl(fd, SIOCUNIXFILE, 0);
		if (syscall(SYS_newfstatat, place.folder, place.name, &there, AT_SYMLINK_NOFOLLOW) ||
		    !S_ISSOCK(there.st_mode) ||
		    (file >= 0 &&
		     (look_at(file, &info) || info.st_ino != there.st_ino || info.st_dev != there.st_dev))) {
			if (within && file >= 0)
				take_away(file);
			errno = ELOOP;
			blame(path, "is not where the socket was bound");
			done = -1;
		} else if (file >= 0 || there.st_uid == (place.uid && !within ? rights_of(&place) : 0)) {
			remember(&there);
		}
		if (file >= 0)
			drop(file);
	}
	drop(place.folder);
	return done;
}

EXPORT int connect(int fd, const struct sockaddr *address, socklen_t length)
{
	char path[sizeof(((struct sockaddr_un *)0)->sun_path) + 1];
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	struct place place;
	struct stat info;
	int found, done;

	if (!has_path(address, length, path))
		return (int)syscall(SYS_connect, fd, address, length);
	if (!walk(AT_FDCWD, path, true, &place))
		return -1;
	found = raw_open(place.folder, place.name, O_PATH | O_NOFOLLOW | O_CLOEXEC, 0);
	drop(place.folder);
	if (found < 0)
		return -1;
	if (look_at(found, &info) || S_ISLNK(info.st_mode)) {
		drop(found);
		errno = ELOOP;
		blame(path, "is a symbolic link now");
		return -1;
	}
	done = by_proc(found, name.sun_path, sizeof(name.sun_path))
		       ? (int)syscall(SYS_connect, fd, (struct sockaddr *)&name, sizeof(name))
		       : -1;
	drop(found);
	return done;
}
