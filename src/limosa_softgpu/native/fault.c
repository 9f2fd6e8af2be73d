/* Reading the rules of fault.h and carrying them out. Both libraries have a copy of this file of their own. */
#define _GNU_SOURCE
#include "fault.h"
#include "node.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FAULTS_FOLDER NODE_FOLDER "/faults"
#define NAME_ROOM 128
#define RULE_ROOM 1024

struct rule {
    struct rule *next;
    char name[NAME_ROOM]; /* of its file */
    char function[256], hazard[64]; /* patterns, with commas between them */
    pid_t caller, target;
    char caller_name[NAME_ROOM], target_name[NAME_ROOM];
    unsigned long nth; /* 0: each one */
    double delay;
    bool hang;
    int lost; /* index of a GPU, -1 */
    struct fault fault;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards `rules`; never held while waiting */
static struct rule *rules;
static _Atomic(struct node_state *) node_seen; /* readable for ever, also while the node is closed (node.h) */
static _Atomic uint32_t generation_read; /* of which `rules` are */
static atomic_bool any_rules;

/* ------------------------------------------------------------------------------------------ reading the rules --- */

static const struct {
    const char *name;
    int code;
} results[] = {
    {"CUDA_SUCCESS", 0},
    {"CUDA_ERROR_INVALID_VALUE", 1},
    {"CUDA_ERROR_OUT_OF_MEMORY", 2},
    {"CUDA_ERROR_NOT_INITIALIZED", 3},
    {"CUDA_ERROR_DEINITIALIZED", 4},
    {"CUDA_ERROR_DEVICE_UNAVAILABLE", 46},
    {"CUDA_ERROR_NO_DEVICE", 100},
    {"CUDA_ERROR_INVALID_DEVICE", 101},
    {"CUDA_ERROR_INVALID_CONTEXT", 201},
    {"CUDA_ERROR_ECC_UNCORRECTABLE", 214},
    {"CUDA_ERROR_OPERATING_SYSTEM", 304},
    {"CUDA_ERROR_INVALID_HANDLE", 400},
    {"CUDA_ERROR_ILLEGAL_STATE", 401},
    {"CUDA_ERROR_NOT_FOUND", 500},
    {"CUDA_ERROR_NOT_READY", 600},
    {"CUDA_ERROR_ILLEGAL_ADDRESS", 700},
    {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", 701},
    {"CUDA_ERROR_LAUNCH_FAILED", 719},
    {"CUDA_ERROR_NOT_PERMITTED", 800},
    {"CUDA_ERROR_NOT_SUPPORTED", 801},
    {"CUDA_ERROR_SYSTEM_NOT_READY", 802},
    {"CUDA_ERROR_TIMEOUT", 909},
    {"CUDA_ERROR_UNKNOWN", 999},
    {"NVML_SUCCESS", 0},
    {"NVML_ERROR_UNINITIALIZED", 1},
    {"NVML_ERROR_INVALID_ARGUMENT", 2},
    {"NVML_ERROR_NOT_SUPPORTED", 3},
    {"NVML_ERROR_NO_PERMISSION", 4},
    {"NVML_ERROR_NOT_FOUND", 6},
    {"NVML_ERROR_INSUFFICIENT_SIZE", 7},
    {"NVML_ERROR_DRIVER_NOT_LOADED", 9},
    {"NVML_ERROR_TIMEOUT", 10},
    {"NVML_ERROR_LIBRARY_NOT_FOUND", 12},
    {"NVML_ERROR_FUNCTION_NOT_FOUND", 13},
    {"NVML_ERROR_GPU_IS_LOST", 15},
    {"NVML_ERROR_RESET_REQUIRED", 16},
    {"NVML_ERROR_OPERATING_SYSTEM", 17},
    {"NVML_ERROR_MEMORY", 20},
    {"NVML_ERROR_UNKNOWN", 999},
};

static bool read_number(const char *text, long *value)
{
    char *end;
    errno = 0;
    *value = strtol(text, &end, 10);
    return errno == 0 && end != text && !*end;
}

static bool read_result(const char *text, int *code)
{
    long number;
    for (size_t i = 0; i < sizeof(results) / sizeof(results[0]); i++)
        if (!strcmp(text, results[i].name)) {
            *code = results[i].code;
            return true;
        }
    if (!read_number(text, &number))
        return false;
    *code = (int)number;
    return true;
}

static bool read_text(const char *text, char *to, size_t room)
{
    size_t length = strlen(text);
    if (length == 0 || length >= room)
        return false;
    memcpy(to, text, length + 1);
    return true;
}

/* A process: its id, or the pattern of a name. */
static bool read_who(const char *text, pid_t *pid, char name[NAME_ROOM])
{
    long number;
    if (!read_number(text, &number))
        return read_text(text, name, NAME_ROOM);
    *pid = (pid_t)number;
    return number > 0;
}

static bool read_word(struct rule *rule, const char *key, const char *value)
{
    struct fault *fault = &rule->fault;
    long number;
    char *end;

    if (!strcmp(key, "function"))
        return read_text(value, rule->function, sizeof(rule->function));
    if (!strcmp(key, "hazard"))
        return read_text(value, rule->hazard, sizeof(rule->hazard));
    if (!strcmp(key, "caller"))
        return read_who(value, &rule->caller, rule->caller_name);
    if (!strcmp(key, "target"))
        return read_who(value, &rule->target, rule->target_name);
    if (!strcmp(key, "nth")) {
        rule->nth = strtoul(value, &end, 10);
        return rule->nth > 0 && !*end;
    }
    if (!strcmp(key, "every")) {
        rule->nth = 0;
        return !strcmp(value, "1");
    }
    if (!strcmp(key, "result")) {
        fault->actions |= FAULT_RESULT;
        return read_result(value, &fault->result);
    }
    if (!strcmp(key, "after")) {
        fault->actions |= FAULT_AFTER;
        return read_result(value, &fault->after);
    }
    if (!strcmp(key, "hang")) {
        rule->hang = true;
        return !*value;
    }
    if (!strcmp(key, "delay")) {
        rule->delay = strtod(value, &end);
        return end != value && !*end && rule->delay >= 0;
    }
    if (!strcmp(key, "crash") || !strcmp(key, "crash-after")) {
        bool after = key[5], target = !strcmp(value, "target");
        if (target)
            fault->actions |= after ? FAULT_CRASH_TARGET_AFTER : FAULT_CRASH_TARGET;
        else
            fault->actions |= after ? FAULT_CRASH_CALLER_AFTER : FAULT_CRASH_CALLER;
        return target || !strcmp(value, "caller");
    }
    if (!strcmp(key, "state")) {
        fault->actions |= FAULT_STATE;
        if (!read_number(value, &number))
            return false;
        fault->state = (int)number;
        return true;
    }
    if (!strcmp(key, "memory")) {
        fault->actions |= !strcmp(value, "device") ? FAULT_NO_DEVICE_MEMORY : FAULT_NO_HOST_MEMORY;
        return !strcmp(value, "device") || !strcmp(value, "host");
    }
    if (!strcmp(key, "lost")) {
        if (!read_number(value, &number) || number < 0 || number >= NODE_MAX_GPUS)
            return false;
        rule->lost = (int)number;
        return true;
    }
    if (!strcmp(key, "lie")) {
        fault->actions |= FAULT_LIE;
        return read_text(value, fault->lie, sizeof(fault->lie));
    }
    return false;
}

/* A rule from the text of its file; false where it is none. */
static bool read_rule(struct rule *rule, char *text)
{
    bool counted = false;

    strcpy(rule->function, "*");
    rule->nth = 1;
    rule->lost = -1;
    for (char *rest = NULL, *word = strtok_r(text, " \t\r\n", &rest); word; word = strtok_r(NULL, " \t\r\n", &rest)) {
        char *value = strchr(word, '=');
        if (value)
            *value++ = 0;
        if (!read_word(rule, word, value ? value : "")) {
            node_log("fault %s is void: %s", rule->name, word);
            return false;
        }
        counted |= !strcmp(word, "nth");
    }
    if (rule->hazard[0] && !counted)
        rule->nth = 0;
    return true;
}

static void rule_path(const struct rule *rule, const char *suffix, char *path, size_t room)
{
    snprintf(path, room, FAULTS_FOLDER "/%s%s", rule->name, suffix);
}

static struct rule *load_rule(const char *name)
{
    struct rule *rule = calloc(1, sizeof(*rule));
    char path[NAME_ROOM + 64], text[RULE_ROOM];

    if (!rule)
        return NULL;
    strcpy(rule->name, name);
    rule_path(rule, "", path, sizeof(path));
    int fd = node_open_file(path, O_RDONLY);
    /* NOLINTNEXTLINE(clang-analyzer-unix.BlockInCriticalSection): a file in memory, and the lock is for reading rules. */
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
    if (fd >= 0)
        close(fd);
    if (length >= 0) {
        text[length] = 0;
        if (read_rule(rule, text))
            return rule;
    }
    free(rule);
    return NULL;
}

/* Read all rules. The mutex is held. They are kept in the order of their names, so that what happens when several fit
 * does not depend on the folder. */
static void load_rules(uint32_t generation)
{
    DIR *folder = opendir(FAULTS_FOLDER);

    while (rules) {
        struct rule *next = rules->next;
        free(rules);
        rules = next;
    }
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        size_t length = strlen(entry->d_name);
        if (entry->d_name[0] == '.' || length >= NAME_ROOM
            || (length > 6 && !strcmp(entry->d_name + length - 6, ".count")))
            continue;
        struct rule *rule = load_rule(entry->d_name);
        if (!rule)
            continue;
        struct rule **at = &rules;
        while (*at && strcmp((*at)->name, rule->name) < 0)
            at = &(*at)->next;
        rule->next = *at;
        *at = rule;
    }
    if (folder)
        closedir(folder);
    any_rules = rules != NULL;
    generation_read = generation;
}

/* ------------------------------------------------------------------------------------------ which rule it is ---- */

/* A thread of the parent may have held the mutex. What it guarded may be half changed and is read anew. */
static void forked(void)
{
    pthread_mutex_init(&mutex, NULL);
    rules = NULL;
    node_seen = NULL;
    generation_read = 0;
    any_rules = false;
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, forked);
}

/* Are there rules? One atomic read where nobody has ever written one. */
static bool rules_current(void)
{
    struct node_state *node = node_seen;
    uint32_t generation;
    if (!node)
        node_seen = node = node_mapped();
    if (node)
        generation = __atomic_load_n(&node->fault_generation, __ATOMIC_ACQUIRE);
    else if (!node_peek(offsetof(struct node_state, fault_generation), &generation, sizeof(generation)))
        return false;
    if (generation == 0) /* never any, or closed for a checkpoint: then no file of the node may be opened */
        return false;
    if (generation == generation_read)
        return any_rules;
    pthread_mutex_lock(&mutex);
    if (generation != generation_read)
        load_rules(generation);
    pthread_mutex_unlock(&mutex);
    return any_rules;
}

/* Count one call for a rule, over the whole node. */
static unsigned long count(const struct rule *rule)
{
    char path[NAME_ROOM + 64], text[32] = "";
    unsigned long calls = 0;

    rule_path(rule, ".count", path, sizeof(path));
    int fd = node_open_file(path, O_RDWR | O_CREAT | O_EXCL);
    if (fd >= 0)
        fchmod(fd, 0666); /* whatever the umask is; a file that somebody else has put there keeps its mode */
    else if (errno == EEXIST)
        fd = node_open_file(path, O_RDWR);
    struct stat info;
    if (fd >= 0 && (fstat(fd, &info) != 0 || info.st_nlink > 1)) { /* the other name may be of a file of root's */
        close(fd);
        fd = -1;
    }
    if (fd < 0)
        return 0;
    if (flock(fd, LOCK_EX) == 0 && pread(fd, text, sizeof(text) - 1, 0) >= 0) {
        calls = strtoul(text, NULL, 10) + 1;
        int length = snprintf(text, sizeof(text), "%lu\n", calls);
        if (pwrite(fd, text, (size_t)length, 0) != length)
            calls = 0;
    }
    close(fd);
    return calls;
}

static bool still_there(const struct rule *rule)
{
    char path[NAME_ROOM + 64];
    rule_path(rule, "", path, sizeof(path));
    return access(path, F_OK) == 0;
}

/* Whether a pattern means a function: cuMemAlloc means cuMemAlloc_v2 as well, cuMemcpyAsync also cuMemcpyAsync_ptsz. */
static bool one_means(const char *pattern, const char *function)
{
    char plain[sizeof(((struct rule *)0)->function)];
    if (fnmatch(pattern, function, 0) == 0)
        return true;
    if (!read_text(function, plain, sizeof(plain)))
        return false;
    size_t length = strlen(plain);
    if (length > 5 && (!strcmp(plain + length - 5, "_ptsz") || !strcmp(plain + length - 5, "_ptds")))
        plain[length -= 5] = 0;
    if (length > 3 && plain[length - 3] == '_' && plain[length - 2] == 'v' && plain[length - 1] >= '0'
        && plain[length - 1] <= '9')
        plain[length - 3] = 0;
    return fnmatch(pattern, plain, 0) == 0;
}

static bool means(const char *patterns, const char *function)
{
    char list[sizeof(((struct rule *)0)->function)], *rest = NULL;

    strcpy(list, patterns);
    for (const char *pattern = strtok_r(list, ",", &rest); pattern; pattern = strtok_r(NULL, ",", &rest))
        if (one_means(pattern, function))
            return true;
    return false;
}

/* Read one of /proc/PID's files as text; its length, 0 where it cannot be read. */
static size_t read_process(pid_t pid, const char *what, char *text, size_t room)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, what);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, text, room - 1);
    if (fd >= 0)
        close(fd);
    length = length < 0 ? 0 : length;
    text[length] = 0;
    return (size_t)length;
}

static bool ends_with(const char *pattern, const char *path)
{
    const char *slash = strrchr(path, '/');
    return fnmatch(pattern, slash ? slash + 1 : path, 0) == 0;
}

/* Whether a process has that name (fault.h). */
static bool is_called(pid_t pid, const char *pattern)
{
    char path[64], text[4096];

    snprintf(path, sizeof(path), "/proc/%d/exe", (int)pid);
    ssize_t linked = readlink(path, text, sizeof(text) - 1);
    text[linked > 0 ? linked : 0] = 0;
    if (linked > 0 && ends_with(pattern, text))
        return true;
    size_t length = read_process(pid, "cmdline", text, sizeof(text));
    const char *word = text;
    for (int i = 0; i < 3 && word < text + length; i++, word += strlen(word) + 1)
        if (ends_with(pattern, word))
            return true;
    read_process(pid, "comm", text, sizeof(text));
    text[strcspn(text, "\n")] = 0;
    return fnmatch(pattern, text, 0) == 0;
}

/* Whether a process (0: none) is the one that a rule means, if it means one. */
static bool is_meant(pid_t meant, const char *name, pid_t pid)
{
    if (!meant && !name[0])
        return true;
    return pid > 0 && (meant ? meant == pid : is_called(pid, name));
}

static bool concerns(const struct rule *rule, const char *function, pid_t target)
{
    bool step = !strncmp(function, "step:", 5);
    if (step != !strncmp(rule->function, "step:", 5) || !means(rule->function, function))
        return false;
    return is_meant(rule->caller, rule->caller_name, getpid()) && is_meant(rule->target, rule->target_name, target);
}

/* The first rule that fits and whose turn it is, as a copy. */
static bool find_rule(const char *function, const char *hazard, pid_t target, struct rule *found)
{
    bool fits = false;

    pthread_mutex_lock(&mutex);
    for (struct rule *rule = rules; rule && !fits; rule = rule->next) {
        if (hazard ? strcmp(rule->hazard, hazard) != 0 : rule->hazard[0] != 0)
            continue;
        if (function ? !concerns(rule, function, target)
                     : !is_meant(rule->caller, rule->caller_name, getpid())
                    || !is_meant(rule->target, rule->target_name, target))
            continue;
        unsigned long calls = count(rule); /* also of a rule for each call: who looks at the node is told */
        if (rule->nth && calls != rule->nth)
            continue;
        *found = *rule;
        fits = true;
    }
    pthread_mutex_unlock(&mutex);
    return fits;
}

/* ---------------------------------------------------------------------------------------------- what it does ---- */

static void rest(double seconds)
{
    node_pace(node_now(), seconds, 0, 0);
}

/* Wait until the rule is taken away, or the node with it. */
static void hang(const struct rule *rule)
{
    while (still_there(rule))
        rest(0.02);
}

static void lose(int gpu)
{
    struct node_state *node = node_open();
    int lock = node_lock();
    if (node && gpu >= 0 && gpu < node_gpus(node))
        node->gpus[gpu].lost = 1;
    node_unlock(lock);
}

struct fault fault_ask(const char *function, pid_t target)
{
    struct fault none = {0};
    struct rule rule;

    if (!rules_current())
        return none;
    /* Hazards that are nothing but a slow or a hanging call. */
    if (!strcmp(function, "cuInit") && fault_hazard("init-slow"))
        rest(2.7);
    if (!find_rule(function, NULL, target, &rule))
        return none;
    if (target)
        node_log("fault %s: %s of process %d", rule.name, function, (int)target);
    else
        node_log("fault %s: %s", rule.name, function);
    if (rule.lost >= 0)
        lose(rule.lost);
    if (rule.delay > 0)
        rest(rule.delay);
    if (rule.hang)
        hang(&rule);
    if (rule.fault.actions & FAULT_CRASH_CALLER)
        kill(getpid(), SIGKILL);
    return rule.fault;
}

bool fault_rules(void)
{
    return rules_current();
}

bool fault_hazard_about(const char *name, pid_t target, double seconds)
{
    struct rule rule;

    if (!rules_current() || !find_rule(NULL, name, target, &rule))
        return false;
    node_log("hazard %s (%s)", name, rule.name);
    for (double since = node_now(); (seconds < 0 || node_now() - since < seconds) && still_there(&rule);)
        rest(0.02);
    return true;
}

bool fault_hazard_wait(const char *name, double seconds)
{
    return fault_hazard_about(name, getpid(), seconds);
}

bool fault_hazard(const char *name)
{
    return fault_hazard_wait(name, 0);
}
