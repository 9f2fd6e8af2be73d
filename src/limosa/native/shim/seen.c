/* GPUs that the driver sees and the program does not.
 *
 * A process can import memory only of GPUs that the driver saw at cuInit (measured). A job with CUDA_VISIBLE_DEVICES that
 * is moved to another GPU would have to make its memory anew in the pause. So for the time of cuInit the driver is told
 * another list: the program's GPUs first, as they were, then all others; and what the program asks afterwards is answered
 * as if those were not there.
 *
 * The environment is not touched. The driver asks for the variable by getenv (libcuda imports it, seen with 580), and
 * getenv is answered here: to libcuda's own code, in the thread that is inside cuInit, with the longer list; to all others
 * by the C library, as ever. So no other thread, no child that is forked or started meanwhile, and no library that cuInit
 * loads ever finds anything but what the program has set, and nothing has to be put back. A driver that reads the
 * environment in another way, or a program with a getenv of its own, sees what it would have seen without us.
 *
 * In doubt nothing is done, and the job makes its memory anew as before. */
#include "seen.h"
#include "driver.h"
#include "find.h"
#include "gate.h"
#include "hooks.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define VARIABLE "CUDA_VISIBLE_DEVICES"
#define MOST 64 /* GPUs of a machine */
#define HIDDEN_MOST 3 /* with more, the driver's own steps take longer than what is won (measured) */
#define LIST_MOST 4096
#define UUID_LENGTH 40 /* "GPU-" and 36 more */
#define BY_BUS "/proc/driver/nvidia/gpus"

extern char **environ;

typedef char *getenv_function(const char *);
typedef char uuid_text[UUID_LENGTH + 1];

_Atomic int seen_count = INT_MAX, seen_hidden;

static getenv_function *_Atomic real_getenv, *_Atomic real_secure_getenv;
static TLS const char *list_instead; /* of the thread that is inside cuInit: what libcuda is to read; NULL else */
static TLS bool was_read; /* it has */
static atomic_bool initialised; /* also in a child: no driver lets it initialise once more */

__attribute__((constructor(102))) static void begin(void)
{
    atomic_store(&real_getenv, (getenv_function *)find_in(RTLD_NEXT, "getenv"));
    atomic_store(&real_secure_getenv, (getenv_function *)find_in(RTLD_NEXT, "secure_getenv"));
}

/* Before the constructors have run there is one thread, and no driver. */
static char *walk(const char *name)
{
    size_t length = strlen(name);

    for (char **each = environ; each && *each; each++)
        if (!strncmp(*each, name, length) && (*each)[length] == '=')
            return *each + length + 1;
    return NULL;
}

/* What libcuda is to read instead; NULL where whoever asks gets what there is. */
static char *instead(const char *name, const void *asks)
{
    if (!UNLIKELY(list_instead != NULL) || strcmp(name, VARIABLE) != 0 || !find_is_driver(asks))
        return NULL;
    was_read = true;
    return (char *)(uintptr_t)list_instead;
}

EXPORT char *getenv(const char *name)
{
    char *found = instead(name, __builtin_return_address(0));
    getenv_function *theirs = atomic_load_explicit(&real_getenv, memory_order_relaxed);

    if (found)
        return found;
    return theirs ? theirs(name) : walk(name);
}

EXPORT char *secure_getenv(const char *name)
{
    char *found = instead(name, __builtin_return_address(0));
    getenv_function *theirs = atomic_load_explicit(&real_secure_getenv, memory_order_relaxed);

    if (found)
        return found;
    if (theirs)
        return theirs(name);
    return getuid() == geteuid() && getgid() == getegid() ? walk(name) : NULL;
}

/* ---------------------------------------------------------------------------------------- what there is to be seen --- */

/* Whether the driver will be able to open that GPU's node. The kernel is asked for the rights, the device cgroup's among
 * them, without opening the device; whoever has hooked open() (../sight) is asked by an open that only names it. */
static bool openable(int number)
{
    char path[32];
    struct stat found;

    snprintf(path, sizeof path, "/dev/nvidia%d", number);
    if (faccessat(AT_FDCWD, path, R_OK | W_OK, AT_EACCESS))
        return false;
    int fd = open(path, O_PATH | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool well = !fstat(fd, &found) && S_ISCHR(found.st_mode) && (int)minor(found.st_rdev) == number;
    close(fd);
    return well;
}

/* Instances of a GPU that is partitioned are counted and named in other ways. */
static bool is_partitioned(int minor)
{
    char path[64];
    bool found = false;

    snprintf(path, sizeof path, "/proc/driver/nvidia/capabilities/gpu%d/mig", minor);
    DIR *folder = opendir(path);
    for (struct dirent *one; folder && !found && (one = readdir(folder));)
        found = !strncmp(one->d_name, "gi", 2);
    if (folder)
        closedir(folder);
    return found;
}

/* A client of MPS counts the GPUs of its server. */
static bool under_mps(void)
{
    return getenv("CUDA_MPS_PIPE_DIRECTORY") || !access("/tmp/nvidia-mps/control", F_OK);
}

static bool is_digit(char letter)
{
    return letter >= '0' && letter <= '9';
}

static bool is_uuid(const char *text)
{
    return !strncmp(text, "GPU-", 4) && strspn(text + 4, "0123456789abcdefABCDEF-") >= UUID_LENGTH - 4;
}

/* What follows the name of a line; NULL where there is no such line. */
static const char *value_of(const char *text, const char *name)
{
    const char *found = strstr(text, name);

    return found ? found + strlen(name) + strspn(found + strlen(name), " \t") : NULL;
}

/* The UUID and the number of the node, from a GPU's folder of the kernel's module. */
static bool read_information(const char *bus, uuid_text uuid, int *minor)
{
    char path[128], text[2048];

    if (snprintf(path, sizeof path, BY_BUS "/%s/information", bus) >= (int)sizeof path)
        return false;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[n < 0 ? 0 : n] = 0;
    const char *said = value_of(text, "GPU UUID:"), *node = value_of(text, "Device Minor:");
    if (!said || !is_uuid(said) || !node || !is_digit(*node))
        return false;
    memcpy(uuid, said, UUID_LENGTH);
    uuid[UUID_LENGTH] = 0;
    for (*minor = 0; is_digit(*node) && *minor < MOST; node++)
        *minor = *minor * 10 + (*node - '0');
    return *minor < MOST;
}

static int read_uuids(uuid_text *uuids)
{
    int n = 0, minor;
    DIR *folder = opendir(BY_BUS);

    for (struct dirent *one; folder && n < MOST && (one = readdir(folder));)
        if (one->d_name[0] != '.' && read_information(one->d_name, uuids[n], &minor) && openable(minor))
            n++;
    if (folder)
        closedir(folder);
    return n;
}

/* ------------------------------------------------------------------------------------------------------- the list --- */

/* Which GPU a word means, as a number below n; -1 where that is not clear. By number the driver counts what it can open;
 * CUDA_DEVICE_ORDER changes which GPU a number is, not which numbers there are. */
static int by_number(const char *word, size_t length, int n)
{
    int number = 0;

    if (!length || length > 2 || (length == 2 && word[0] == '0'))
        return -1;
    for (size_t i = 0; i < length; i++) {
        if (!is_digit(word[i]))
            return -1;
        number = number * 10 + (word[i] - '0');
    }
    return number < n ? number : -1;
}

static int by_uuid(const char *word, size_t length, const uuid_text *uuids, int n)
{
    int found = -1;

    if (length <= 4 || length > UUID_LENGTH || strncmp(word, "GPU-", 4) != 0)
        return -1;
    for (int i = 0; i < n; i++)
        if (!strncasecmp(uuids[i], word, length)) {
            if (found >= 0)
                return -1; /* the beginning of two */
            found = i;
        }
    return found;
}

/* The list that the driver is to read: what the program has set, and behind it the GPUs that it leaves out. NULL where
 * there are none, too many, or not everything in it is understood. *count is how many GPUs it names. */
static char *longer(const char *list, int *count)
{
    uuid_text uuids[MOST];
    bool uuid = !strncmp(list, "GPU-", 4), named[MOST] = {false};
    int n = 0;

    if (!list[0] || strlen(list) > LIST_MOST || under_mps())
        return NULL;
    for (int minor = 0; minor < MOST; minor++)
        if (openable(minor)) {
            if (is_partitioned(minor))
                return NULL;
            n++;
        }
    if (uuid && read_uuids(uuids) != n)
        return NULL;
    *count = 0;
    for (const char *word = list; word;) {
        word += strspn(word, " ");
        size_t length = strcspn(word, ",");
        int gpu = uuid ? by_uuid(word, length, (const uuid_text *)uuids, n) : by_number(word, length, n);
        if (gpu < 0 || named[gpu])
            return NULL;
        named[gpu] = true;
        ++*count;
        word = word[length] ? word + length + 1 : NULL;
    }
    if (*count == n || n - *count > HIDDEN_MOST)
        return NULL;
    size_t room = strlen(list) + HIDDEN_MOST * (UUID_LENGTH + 2) + 1;
    char *made = malloc(room);
    size_t used = made ? (size_t)snprintf(made, room, "%s", list) : 0;
    for (int gpu = 0; made && gpu < n; gpu++) {
        if (!named[gpu] && uuid)
            used += (size_t)snprintf(made + used, room - used, ",%s", uuids[gpu]);
        else if (!named[gpu])
            used += (size_t)snprintf(made + used, room - used, ",%d", gpu);
    }
    return made;
}

static bool switched_off(void)
{
    const char *words = secure_getenv("LIMOSA_SHIM_WITHOUT");

    return words && strstr(words, "unseen");
}

/* A list ends for the driver at the first word that it does not take. So whatever else it makes of this one, the
 * program's GPUs are the first that it names, or fewer if there are fewer. */
static void hide(int count)
{
    int all = 0;

    if (real(cuDeviceGetCount)(&all) || all <= count)
        return;
    atomic_store(&seen_hidden, all - count);
    atomic_store(&seen_count, count);
}

CUresult seen_init(unsigned flags)
{
    const char *list = NULL;
    char *more = NULL;
    int count = 0;

    /* list_instead: a library that cuInit loads calls it once more. */
    if (!atomic_load(&initialised) && !list_instead && shim_ready() && !switched_off())
        list = getenv(VARIABLE);
    more = list ? longer(list, &count) : NULL;
    list_instead = more;
    was_read = false;
    CUresult result = real(cuInit)(flags);
    if (more) {
        list_instead = NULL;
        if (!result && was_read)
            hide(count);
        else if (result) /* one of the others may be to blame: as the program has asked for it */
            result = real(cuInit)(flags);
        if (!was_read)
            free(more); /* else the driver may have kept it */
    }
    if (!result && shim_ready())
        atomic_store(&initialised, true);
    return result;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    typedef CUresult get(int *);
    get *function = (get *)entry_call(AT_cuDeviceGetCount);

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = function(count);
    if (!result && seen_is_hidden(*count - 1))
        *count = atomic_load(&seen_count);
    return gate_left(reader, result);
}
