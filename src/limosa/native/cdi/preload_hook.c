/* A createContainer hook: keeps what an image has in /etc/ld.so.preload when the CDI spec lays its own file over that.
 *
 * Nearly no image has such a file, and then this does nothing. Where one has, it lays a third file over both, with the
 * libraries of the spec's file first and the image's after them. The file lies in a tmpfs that nothing but this mount
 * holds: it ends with the container, and neither the image nor the container's own layer changes.
 *
 *     preload_hook FILE FOLDER < state of the container (OCI runtime specification)
 *
 * FILE: what the spec lays over /etc/ld.so.preload. FOLDER: one of the host's that the tmpfs is mounted over meanwhile. The
 * runtimes run this in the container's mount namespace, before its root is changed (runc, crun).
 *
 * The root folder is the image's, and hostile: it is walked with openat2() only, which keeps links inside of it, and what
 * is found is a regular file of a bounded size or nothing. Whatever goes wrong, the container starts: it then has the
 * spec's file alone, and this says so on stderr. */
#define _GNU_SOURCE
#include "../own_start.h" /* IWYU pragma: keep: it is the program's start */

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TARGET "etc/ld.so.preload"
#define STATE_ROOM (1 << 20)   /* bytes of what a runtime writes: its annotations are in it */
#define CONFIG_ROOM (16 << 20)
#define LIST_ROOM (64 << 10)   /* of a list of libraries */

#ifndef SYS_open_tree
#define SYS_open_tree 428
#endif
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
#define TREE_CLONE 1
#define RESOLVE_INSIDE 0x10 /* RESOLVE_IN_ROOT */
#define RESOLVE_NO_PROC 0x02 /* RESOLVE_NO_MAGICLINKS */

struct how {
    uint64_t flags, mode, resolve;
};

/* number: an errno, 0 for none. */
static int give_up(const char *what, int number)
{
    fprintf(stderr, "limosa: the image's own /etc/ld.so.preload is not seen: %s%s%s\n", what, number ? ": " : "",
            number ? strerror(number) : "");
    return 0;
}

/* All of a file, ended by 0; NULL: it is longer, or cannot be read. */
static char *read_all(int fd, size_t room)
{
    char *text = malloc(room + 1);
    size_t n = 0;

    for (ssize_t got = 1; text && got > 0 && n <= room; n += (size_t)got) {
        got = read(fd, text + n, room + 1 - n);
        if (got < 0)
            break;
        if (got == 0) {
            text[n] = 0;
            return text;
        }
    }
    free(text);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------------- JSON --- */

static const char *blanks(const char *at)
{
    return at + strspn(at, " \t\r\n");
}

/* Behind a string that begins at its quote; NULL: it has no end. */
static const char *behind_string(const char *at)
{
    for (at++; *at && *at != '"'; at++)
        if (*at == '\\') {
            at++;
            if (!*at)
                return NULL;
        }
    return *at ? at + 1 : NULL;
}

/* Behind a value; NULL: it is none. Brackets are counted, not matched: a runtime's own file is well made. */
static const char *behind_value(const char *at)
{
    int depth = 0;
    do {
        at = blanks(at);
        if (*at == '"') {
            at = behind_string(at);
        } else if (*at == '{' || *at == '[') {
            depth++;
            at++;
        } else if (depth && (*at == '}' || *at == ']')) {
            depth--;
            at++;
        } else if (depth && (*at == ',' || *at == ':')) {
            at++;
        } else {
            size_t n = strcspn(at, ",:]}{[\" \t\r\n");
            at = n ? at + n : NULL;
        }
    } while (at && depth);
    return at;
}

/* The value of a name in an object; NULL where it has none. */
static const char *member(const char *at, const char *name)
{
    at = at ? blanks(at) : NULL;
    if (!at || *at != '{')
        return NULL;
    for (at = blanks(at + 1); *at == '"'; at = blanks(at + 1)) {
        const char *end = behind_string(at);
        bool found = end && (size_t)(end - at - 2) == strlen(name) && !strncmp(at + 1, name, strlen(name));
        at = end ? blanks(end) : NULL;
        if (!at || *at != ':')
            return NULL;
        at = blanks(at + 1);
        if (found)
            return at;
        at = behind_value(at);
        at = at ? blanks(at) : NULL;
        if (!at || *at != ',')
            return NULL;
    }
    return NULL;
}

/* Copy a string without escapes, as paths of runtimes are. */
static bool copy_string(const char *at, char *to, size_t room)
{
    if (!at || *at != '"')
        return false;
    size_t n = strcspn(at + 1, "\"\\");
    if (at[1 + n] != '"' || n >= room)
        return false;
    memcpy(to, at + 1, n);
    to[n] = 0;
    return true;
}

/* --------------------------------------------------------------------------------------------------- the root --- */

/* The container's root folder, open. */
static int open_root(void)
{
    char bundle[PATH_MAX], path[PATH_MAX], place[2 * PATH_MAX + 32];
    char *state = read_all(STDIN_FILENO, STATE_ROOM);
    bool found = copy_string(member(state, "bundle"), bundle, sizeof bundle);

    free(state);
    if (!found)
        return -1;
    snprintf(place, sizeof place, "%s/config.json", bundle);
    int fd = open(place, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    char *config = fd >= 0 ? read_all(fd, CONFIG_ROOM) : NULL;
    if (fd >= 0)
        close(fd);
    found = config && copy_string(member(member(config, "root"), "path"), path, sizeof path);
    free(config);
    if (!found)
        return -1;
    snprintf(place, sizeof place, "%s%s%s", path[0] == '/' ? "" : bundle, path[0] == '/' ? "" : "/", path);
    return open(place, O_PATH | O_DIRECTORY | O_CLOEXEC);
}

static int open_inside(int root, int flags)
{
    struct how how = {.flags = (uint64_t)flags | O_CLOEXEC, .resolve = RESOLVE_INSIDE | RESOLVE_NO_PROC};
    return (int)syscall(SYS_openat2, root, TARGET, &how, sizeof how);
}

/* What the image has there, NULL for nothing: seen below all mounts, in a copy of the root's alone. */
static char *image_list(int root)
{
    struct stat info;
    int below = (int)syscall(SYS_open_tree, root, "", TREE_CLONE | O_CLOEXEC | AT_EMPTY_PATH);
    if (below < 0) {
        give_up("it cannot be looked at", errno);
        return NULL;
    }
    int fd = open_inside(below, O_PATH), number = fd < 0 ? errno : 0;
    close(below);
    if (fd < 0) {
        if (number != ENOENT)
            give_up("it cannot be opened", number);
        return NULL;
    }
    char *text = NULL;
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) { /* opening a device may do something */
        char there[64];
        snprintf(there, sizeof there, "/proc/self/fd/%d", fd);
        int file = open(there, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
        text = file >= 0 ? read_all(file, LIST_ROOM) : NULL;
        if (file >= 0)
            close(file);
        if (!text)
            give_up("it is too long, or cannot be read", 0);
    }
    close(fd);
    if (text && !text[strspn(text, " \t\r\n:")]) { /* a runtime made it, to mount over it */
        free(text);
        text = NULL;
    }
    return text;
}

/* ----------------------------------------------------------------------------------------------- the third file --- */

static bool write_all(int fd, const char *text)
{
    size_t length = strlen(text);
    return write(fd, text, length) == (ssize_t)length;
}

/* Mount a file with both lists over the target. */
static const char *lay_over(int target, const char *folder, const char *ours, const char *theirs, int *number)
{
    char file[PATH_MAX], there[64];

    if (mount("limosa", folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=256k,mode=755")) {
        *number = errno;
        return "no tmpfs can be mounted";
    }
    snprintf(file, sizeof file, "%s/ld.so.preload", folder);
    snprintf(there, sizeof there, "/proc/self/fd/%d", target);
    const char *problem = NULL;
    int fd = open(file, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0 || !write_all(fd, ours) || !write_all(fd, "\n") || !write_all(fd, theirs) || fchmod(fd, 0644))
        problem = "the list of both cannot be written";
    if (fd >= 0)
        close(fd);
    if (!problem && mount(NULL, folder, NULL, MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL))
        problem = "the list of both cannot be made unchangeable";
    if (!problem && mount(file, there, NULL, MS_BIND, NULL))
        problem = "the list of both cannot be mounted";
    *number = problem ? errno : 0;
    umount2(folder, MNT_DETACH);
    return problem;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return give_up("this hook was called wrongly", 0);
    int root = open_root();
    if (root < 0)
        return give_up("the container's root folder is not found", 0);
    char *theirs = image_list(root);
    if (!theirs)
        return 0;
    int target = open_inside(root, O_PATH), list = open(argv[1], O_RDONLY | O_CLOEXEC);
    char *ours = list >= 0 ? read_all(list, LIST_ROOM) : NULL;
    struct stat spec, seen;
    /* In the container's mounts the spec's file lies there; where it does not this is another namespace. */
    if (target < 0 || !ours || fstat(list, &spec) || fstat(target, &seen) || spec.st_dev != seen.st_dev
        || spec.st_ino != seen.st_ino)
        return give_up("this runtime calls hooks outside of the container\'s mounts", 0);
    int number = 0;
    const char *problem = lay_over(target, argv[2], ours, theirs, &number);
    return problem ? give_up(problem, number) : 0;
}
