/* How a program reaches the driver, and how the shim gets between: direct symbols (it is loaded first), dlsym and dlvsym,
 * cuGetProcAddress. The real dlsym cannot be asked for by dlsym, which is ours: it is read from the C library's table. */
#include "find.h"
#include "compiler.h"
#include "driver_api.h"
#include "hooks.h"
#include "nccl.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

typedef void *dlsym_function(void *, const char *);
typedef void *dlvsym_function(void *, const char *, const char *);

#pragma weak _r_debug

/* Jumped to by the stubs below. */
__attribute__((visibility("hidden"))) void *shim_real_dlsym, *shim_real_dlvsym;

/* Until the real dlsym is known none of the C library's functions is called: a program may have its own of that name, and be
 * asking for the real one (AddressSanitizer, linked statically). */
const char *find_past(const char *text, const char *with)
{
    while (*with && *text == *with)
        text++, with++;
    return *with ? NULL : text;
}

static bool is_same(const char *text, const char *other)
{
    const char *rest = find_past(text, other);

    return rest && !*rest;
}

struct wanted {
    const char *symbol;
    void *found;
    bool anywhere; /* not in a C library of that name, which other C libraries have not */
};

/* What a library says of its symbols. */
struct tables {
    const ElfW(Sym) * symbols;
    const char *strings;
    const uint32_t *gnu, *sysv;
    struct relocations {
        const ElfW(Rela) * first;
        size_t bytes;
    } data, calls;
};

static struct tables tables_at(uintptr_t base, const ElfW(Dyn) * dynamic)
{
    struct tables found = {0};

    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        /* The loader has made these addresses absolute (glibc), or not (others). */
        uintptr_t at = dynamic->d_un.d_ptr < base ? base + dynamic->d_un.d_ptr : dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_SYMTAB)
            found.symbols = (void *)at;
        else if (dynamic->d_tag == DT_STRTAB)
            found.strings = (void *)at;
        else if (dynamic->d_tag == DT_GNU_HASH)
            found.gnu = (void *)at;
        else if (dynamic->d_tag == DT_HASH)
            found.sysv = (void *)at;
        else if (dynamic->d_tag == DT_RELA)
            found.data.first = (void *)at;
        else if (dynamic->d_tag == DT_RELASZ)
            found.data.bytes = dynamic->d_un.d_val;
        else if (dynamic->d_tag == DT_JMPREL)
            found.calls.first = (void *)at;
        else if (dynamic->d_tag == DT_PLTRELSZ)
            found.calls.bytes = dynamic->d_un.d_val;
    }
    return found;
}

static const ElfW(Dyn) * dynamic_of(const struct dl_phdr_info *info)
{
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            return (void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    return NULL;
}

static struct tables tables_of(const struct dl_phdr_info *info)
{
    return tables_at(info->dlpi_addr, dynamic_of(info));
}

/* Looks one library's exported symbols through. */
static bool look(const char *path, uintptr_t base, const ElfW(Dyn) * dynamic, struct wanted *wanted)
{
    const char *name = path;

    for (const char *at = path; *at; at++)
        if (*at == '/')
            name = at + 1;
    if (!wanted->anywhere && !find_past(name, "libc.so") && !find_past(name, "libdl.so"))
        return false;
    if (dynamic == _DYNAMIC) /* we are */
        return false;
    struct tables tables = tables_at(base, dynamic);
    const ElfW(Sym) *symbols = tables.symbols;
    const char *strings = tables.strings;
    const uint32_t *gnu = tables.gnu, *sysv = tables.sysv;
    if (!symbols || !strings)
        return false;
    uint32_t n = 0;
    if (sysv)
        n = sysv[1];
    else if (gnu) { /* the largest number in any chain */
        const uint32_t *buckets = gnu + 4 + gnu[2] * (sizeof(ElfW(Addr)) / 4), *chains = buckets + gnu[0];
        uint32_t last = 0;
        for (uint32_t i = 0; i < gnu[0]; i++)
            last = buckets[i] > last ? buckets[i] : last;
        if (last >= gnu[1]) {
            while (!(chains[last - gnu[1]] & 1))
                last++;
            n = last + 1;
        }
    }
    for (uint32_t i = 0; i < n; i++)
        if (symbols[i].st_shndx != SHN_UNDEF && symbols[i].st_value
            && is_same(strings + symbols[i].st_name, wanted->symbol)) {
            wanted->found = (void *)(base + symbols[i].st_value);
            return true;
        }
    return false;
}

static int look_at_one(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    return look(info->dlpi_name, info->dlpi_addr, dynamic_of(info), data);
}

/* The loader's own list, where it tells it (glibc): a program may have its own dl_iterate_phdr, too (ThreadSanitizer). */
static void look_at_all(struct wanted *wanted)
{
    const struct link_map *at = &_r_debug ? _r_debug.r_map : NULL;

    if (!at)
        dl_iterate_phdr(look_at_one, wanted);
    while (at && !look(at->l_name, at->l_addr, at->l_ld, wanted))
        at = at->l_next;
}

struct looked {
    uintptr_t inside;
    struct span found;
};

static int look_for_span(struct dl_phdr_info *info, size_t size, void *data)
{
    struct looked *looked = data;
    struct span found = {UINTPTR_MAX, 0};

    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_LOAD) {
            uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = begin + info->dlpi_phdr[i].p_memsz;
            found.begin = begin < found.begin ? begin : found.begin;
            found.end = end > found.end ? end : found.end;
        }
    if (looked->inside < found.begin || looked->inside >= found.end)
        return 0;
    looked->found = found;
    return 1;
}

bool find_span(const void *address, struct span *span)
{
    struct looked looked = {.inside = (uintptr_t)address};

    if (!dl_iterate_phdr(look_for_span, &looked))
        return false;
    *span = looked.found;
    return true;
}

struct linked {
    bool (*each)(const char *symbol, void *data);
    void *data;
};

/* By what is to be put in their places: the number of symbols is not told by the tables of a program that exports none. */
static bool look_linked(const struct tables *tables, struct relocations of, const struct linked *linked)
{
    for (size_t i = 0; of.first && i < of.bytes / sizeof *of.first; i++) {
        const ElfW(Sym) *symbol = &tables->symbols[ELF64_R_SYM(of.first[i].r_info)];
        if (ELF64_R_SYM(of.first[i].r_info) && symbol->st_shndx == SHN_UNDEF
            && !linked->each(tables->strings + symbol->st_name, linked->data))
            return false;
    }
    return true;
}

static int look_at_linked(struct dl_phdr_info *info, size_t size, void *data)
{
    const struct tables tables = tables_of(info);

    (void)size;
    if (dynamic_of(info) == _DYNAMIC || !tables.symbols || !tables.strings)
        return 0;
    return !look_linked(&tables, tables.calls, data) || !look_linked(&tables, tables.data, data);
}

static int count_loaded(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    *(unsigned long long *)data = info->dlpi_adds;
    return 1;
}

bool find_linked(bool (*each)(const char *symbol, void *data), void *data)
{
    static _Atomic unsigned long long known;
    unsigned long long loaded = 0;

    dl_iterate_phdr(count_loaded, &loaded);
    if (atomic_exchange(&known, loaded) == loaded)
        return false;
    dl_iterate_phdr(look_at_linked, &(struct linked){each, data});
    return true;
}

__attribute__((constructor(101))) static void find_begin(void)
{
    struct wanted sym = {"dlsym", NULL, false}, vsym = {"dlvsym", NULL, false};

    if (shim_real_dlsym)
        return;
    look_at_all(&sym);
    look_at_all(&vsym);
    if (!sym.found) {
        sym.anywhere = true;
        look_at_all(&sym);
    }
    shim_real_dlvsym = vsym.found;
    shim_real_dlsym = sym.found;
}

static const char driver[] = "libcuda.so";

bool find_is_driver(const void *address)
{
    Dl_info info;
    const char *name;

    if (!dladdr(address, &info) || !info.dli_fname)
        return false;
    name = strrchr(info.dli_fname, '/');
    return !strncmp(name ? name + 1 : info.dli_fname, driver, sizeof driver - 1);
}

void *find_driver(void)
{
    static void *_Atomic handle;
    void *library = atomic_load(&handle);

    if (!library && (library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD)))
        atomic_store(&handle, library);
    return library;
}

void *find_in(void *library, const char *symbol)
{
    find_begin();
    /* Not the program's, so not ours. */
    return shim_real_dlsym ? ((dlsym_function *)shim_real_dlsym)(library, symbol) : NULL;
}

void *find_in_driver(const char *symbol)
{
    void *library = find_driver();

    return library ? find_in(library, symbol) : NULL;
}

static void *ask(void *library, const char *symbol, const char *version)
{
    return version ? ((dlvsym_function *)shim_real_dlvsym)(library, symbol, version)
                   : ((dlsym_function *)shim_real_dlsym)(library, symbol);
}

struct answer {
    void *found;
    long given; /* 0: whatever the real one says */
};

/* What dlsym (version NULL) and dlvsym are to answer. */
__attribute__((visibility("hidden"), used)) struct answer shim_answer(void *library, const char *symbol,
                                                                      const char *version)
{
    find_begin();
    if (symbol && library != RTLD_NEXT && nccl_names(symbol)) {
        void *found = ask(library, symbol, version);
        return (struct answer){found ? nccl_instead(symbol, found) : NULL, found != NULL};
    }
    if (!symbol || symbol[0] != 'c' || symbol[1] != 'u' || symbol[2] < 'A' || symbol[2] > 'Z' || library == RTLD_NEXT)
        return (struct answer){NULL, 0};
    void *real = ask(library, symbol, version);
    int place = entry_of(symbol);
    if (place >= 0 && (!real || real == entry_hook(place))) {
        /* The whole program was searched, and we were found before any driver: as if we were not there. */
        if (real && entry_real(place)) {
            entry_asked_for(place);
            return (struct answer){real, 1};
        }
        ask(library, "a function of libcuda.so.1", version); /* for dlerror */
        return (struct answer){NULL, 1};
    }
    return (struct answer){real && find_is_driver(real) ? entry_instead(symbol, real) : real, real != NULL};
}

__attribute__((visibility("hidden"), used)) struct answer shim_dlsym_answer(void *library, const char *symbol)
{
    return shim_answer(library, symbol, NULL);
}

/* The real functions find out by their return address who asks (RTLD_NEXT): they are jumped to, not called. */
#if defined(__x86_64__)
__asm__(".text\n"
        ".globl dlsym\n.type dlsym, @function\n"
        "dlsym:\n"
        "  endbr64\n"
        "  push %rdi\n  push %rsi\n  sub $8, %rsp\n"
        "  call shim_dlsym_answer\n"
        "  add $8, %rsp\n  pop %rsi\n  pop %rdi\n"
        "  test %rdx, %rdx\n  jne 1f\n"
        "  jmp *shim_real_dlsym(%rip)\n"
        "1: ret\n"
        ".size dlsym, .-dlsym\n"
        ".globl dlvsym\n.type dlvsym, @function\n"
        "dlvsym:\n"
        "  endbr64\n"
        "  push %rdi\n  push %rsi\n  push %rdx\n"
        "  call shim_answer\n"
        "  mov %rdx, %rcx\n"
        "  pop %rdx\n  pop %rsi\n  pop %rdi\n"
        "  test %rcx, %rcx\n  jne 1f\n"
        "  jmp *shim_real_dlvsym(%rip)\n"
        "1: ret\n"
        ".size dlvsym, .-dlvsym\n");
#elif defined(__aarch64__)
__asm__(".text\n"
        ".globl dlsym\n.type dlsym, %function\n"
        "dlsym:\n"
        "  hint #34\n" /* bti c */
        "  stp x29, x30, [sp, #-48]!\n  stp x0, x1, [sp, #16]\n"
        "  bl shim_dlsym_answer\n"
        "  mov x9, x0\n  mov x10, x1\n"
        "  ldp x0, x1, [sp, #16]\n  ldp x29, x30, [sp], #48\n"
        "  cbnz x10, 1f\n"
        "  adrp x9, shim_real_dlsym\n  ldr x9, [x9, :lo12:shim_real_dlsym]\n  br x9\n"
        "1: mov x0, x9\n  ret\n"
        ".size dlsym, .-dlsym\n"
        ".globl dlvsym\n.type dlvsym, %function\n"
        "dlvsym:\n"
        "  hint #34\n" /* bti c */
        "  stp x29, x30, [sp, #-48]!\n  stp x0, x1, [sp, #16]\n  str x2, [sp, #32]\n"
        "  bl shim_answer\n"
        "  mov x9, x0\n  mov x10, x1\n"
        "  ldp x0, x1, [sp, #16]\n  ldr x2, [sp, #32]\n  ldp x29, x30, [sp], #48\n"
        "  cbnz x10, 1f\n"
        "  adrp x9, shim_real_dlvsym\n  ldr x9, [x9, :lo12:shim_real_dlvsym]\n  br x9\n"
        "1: mov x0, x9\n  ret\n"
        ".size dlvsym, .-dlvsym\n");
#else
#error "the shim knows x86-64 and aarch64"
#endif

/* cuGetProcAddress: what it finds is replaced like what dlsym finds. */
typedef int get_proc(const char *, void **, int, uint64_t);
typedef int get_proc_v2(const char *, void **, int, uint64_t, void *);

EXPORT int cuGetProcAddress(const char *symbol, void **found, int version, uint64_t flags)
{
    get_proc *real = entry_call(AT_cuGetProcAddress);
    if (!real)
        return CUDA_ERROR_NO_DEVICE;
    int result = real(symbol, found, version, flags);
    if (!result && symbol && found && *found)
        *found = entry_instead(symbol, *found);
    return result;
}

EXPORT int cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags, void *status)
{
    get_proc_v2 *real = entry_call(AT_cuGetProcAddress_v2);
    if (!real)
        return CUDA_ERROR_NO_DEVICE;
    int result = real(symbol, found, version, flags, status);
    if (!result && symbol && found && *found)
        *found = entry_instead(symbol, *found);
    return result;
}
