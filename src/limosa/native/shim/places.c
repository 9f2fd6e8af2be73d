/* Where the process's GPUs are. After a restore onto other GPUs the driver (580) says the new UUID and the old PCI bus id,
 * measured; NCCL, and whoever looks into /sys, goes by the bus id. So Limosa tells both, and what asks the driver for them
 * gets what was told.
 *
 * The shim's thread writes and the application's threads read, without a lock: there are two tables, and a number says which
 * one counts. Who finds that it has changed meanwhile reads again. A fork at any moment finds one whole. */
#include "places.h"
#include "compiler.h"
#include "driver.h"
#include "gate.h"
#include "hooks.h"
#include "memory.h"
#include "protocol.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef unsigned char uuid[16];

static uuid first[MAX_DEVICES]; /* the GPUs that were there when the driver was initialised */
static int n_first;

static struct table {
    uint64_t operation;
    size_t n; /* 0: nobody has moved it, and the driver's own answers are right */
    struct gpu_place places[PROTOCOL_PLACES_MOST];
    uuid before[MAX_DEVICES]; /* where each GPU was when the operation began */
} tables[2];
static _Atomic unsigned turn;
/* Whether the driver was seen to say another UUID than at first. Then it says where the process is, whoever has moved it;
 * else it may say for ever what it said at first. */
static atomic_bool driver_knows;

static void copy(unsigned char *to, const unsigned char *from)
{
    memcpy(to, from, sizeof(uuid));
}

static bool same(const unsigned char *one, const unsigned char *other)
{
    return !memcmp(one, other, sizeof(uuid));
}

/* Where the operation of this table has brought what was there. */
static const unsigned char *brought_to(const struct table *table, const unsigned char *was)
{
    for (size_t i = 0; i < table->n; i++)
        if (same(table->places[i].was, was))
            return table->places[i].is;
    return was;
}

void places_begin(void)
{
    struct table *next = &tables[(atomic_load(&turn) + 1) & 1];
    int n = 0;

    n_first = 0;
    if (!real(cuDeviceGetCount)(&n))
        for (int device = 0; device < n && device < MAX_DEVICES; device++)
            if (!real(cuDeviceGetUuid_v2)(first[n_first], device))
                n_first++;
    next->operation = next->n = 0;
    memcpy(next->before, first, sizeof first);
    atomic_store(&driver_knows, false);
    atomic_fetch_add(&turn, 1);
}

int places_first(unsigned char (*uuids)[16])
{
    memcpy(uuids, first, (size_t)n_first * sizeof(uuid));
    return n_first;
}

int places_told(uint64_t operation, const struct gpu_place *places, size_t bytes)
{
    unsigned now = atomic_load(&turn);
    const struct table *table = &tables[now & 1];
    struct table *next = &tables[(now + 1) & 1];

    if (!bytes || bytes % sizeof *places || bytes > sizeof next->places)
        return -EINVAL;
    bool again = table->n && table->operation == operation;
    for (int i = 0; i < MAX_DEVICES; i++)
        copy(next->before[i], again ? table->before[i] : brought_to(table, table->before[i]));
    next->operation = operation;
    next->n = bytes / sizeof *places;
    memcpy(next->places, places, bytes);
    atomic_store(&turn, now + 1);
    return 0;
}

static bool in_table(const struct table *table, CUdevice device, const unsigned char *said, struct gpu_place *found)
{
    const unsigned char *where = atomic_load(&driver_knows) ? said : brought_to(table, table->before[device]);

    for (size_t i = 0; i < table->n; i++)
        if (same(table->places[i].is, where)) {
            *found = table->places[i];
            return true;
        }
    return false;
}

static bool told(void)
{
    return tables[atomic_load_explicit(&turn, memory_order_acquire) & 1].n != 0;
}

/* Where a GPU of the process is, whose UUID by the driver is that; false where nothing better is known than the driver's own
 * answers. */
static bool find(CUdevice device, const unsigned char *said, struct gpu_place *found)
{
    unsigned before;
    bool well;

    if (device < 0 || device >= n_first)
        return false;
    if (!same(said, first[device]))
        atomic_store(&driver_knows, true);
    do {
        before = atomic_load_explicit(&turn, memory_order_acquire);
        well = in_table(&tables[before & 1], device, said, found);
        atomic_thread_fence(memory_order_acquire);
    } while (atomic_load_explicit(&turn, memory_order_relaxed) != before);
    return well;
}

/* The same, where the driver was not asked yet. Inside the gate. */
static bool ask(CUdevice device, struct gpu_place *found)
{
    uuid said;

    return UNLIKELY(told()) && !real(cuDeviceGetUuid_v2)(said, device) && find(device, said, found);
}

static CUresult get_uuid(int entry, unsigned char *answer, CUdevice device)
{
    CUresult (*function)(void *, CUdevice) = (CUresult (*)(void *, CUdevice))entry_call(entry);
    struct gpu_place place;

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = function(answer, device);
    if (!result && UNLIKELY(told()) && find(device, answer, &place))
        copy(answer, place.is);
    return gate_left(reader, result);
}

EXPORT CUresult cuDeviceGetUuid(void *answer, CUdevice device)
{
    return get_uuid(AT_cuDeviceGetUuid, answer, device);
}

EXPORT CUresult cuDeviceGetUuid_v2(void *answer, CUdevice device)
{
    return get_uuid(AT_cuDeviceGetUuid_v2, answer, device);
}

EXPORT CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device)
{
    typedef CUresult get(char *, int, CUdevice);
    get *function = (get *)entry_call(AT_cuDeviceGetPCIBusId);
    struct gpu_place place;

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = function(id, length, device);
    if (!result && ask(device, &place)) {
        char text[32];
        int n = snprintf(text, sizeof text, "%04X:%02X:%02X.%x", place.domain, place.bus, place.slot, place.function);
        if (n < length)
            memcpy(id, text, (size_t)n + 1);
        else
            result = CUDA_ERROR_INVALID_VALUE;
    }
    return gate_left(reader, result);
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    typedef CUresult get(int *, int, CUdevice);
    get *function = (get *)entry_call(AT_cuDeviceGetAttribute);
    struct gpu_place place;

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = function(value, attribute, device);
    if (!result && (attribute == DEVICE_PCI_BUS || attribute == DEVICE_PCI_SLOT || attribute == DEVICE_PCI_DOMAIN)
        && ask(device, &place)) {
        *value = (int)place.domain;
        if (attribute != DEVICE_PCI_DOMAIN)
            *value = attribute == DEVICE_PCI_BUS ? place.bus : place.slot;
    }
    return gate_left(reader, result);
}

/* A number in hexadecimal of at most so many digits, and what follows it; NULL where there is none. */
static const char *read_number(const char *text, int digits, unsigned *number)
{
    const char *begin = text;

    for (*number = 0; text - begin < digits; text++) {
        unsigned value = (unsigned char)*text;
        if (value >= '0' && value <= '9')
            value -= '0';
        else if ((value | 32) >= 'a' && (value | 32) <= 'f')
            value = (value | 32) - 'a' + 10;
        else
            break;
        *number = *number << 4 | value;
    }
    return text == begin ? NULL : text;
}

/* In the three forms that cuda.h knows: domain:bus:slot.function, domain:bus:slot, bus:slot.function. */
static bool read_bus_id(const char *text, struct gpu_place *place)
{
    unsigned number[3] = {0}, function = 0;
    int n = 0;

    do {
        if (n == 3 || !(text = read_number(n ? text + 1 : text, 8, &number[n])))
            return false;
        n++;
    } while (*text == ':');
    if (*text == '.' && !(text = read_number(text + 1, 1, &function)))
        return false;
    if (*text || n < 2 || number[n - 2] > 255 || number[n - 1] > 255)
        return false;
    *place = (struct gpu_place){.domain = n == 3 ? number[0] : 0,
                                .bus = (uint8_t)number[n - 2],
                                .slot = (uint8_t)number[n - 1],
                                .function = (uint8_t)function};
    return true;
}

/* A bus id that the program has from before the move, and that no GPU of it has now, is the driver's to know. */
EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *id)
{
    typedef CUresult get(CUdevice *, const char *);
    get *function = (get *)entry_call(AT_cuDeviceGetByPCIBusId);
    struct gpu_place wanted, place;

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    if (device && id && UNLIKELY(told()) && read_bus_id(id, &wanted))
        for (CUdevice each = 0; each < n_first; each++)
            if (ask(each, &place) && place.domain == wanted.domain && place.bus == wanted.bus
                && place.slot == wanted.slot && place.function == wanted.function) {
                *device = each;
                return gate_left(reader, CUDA_SUCCESS);
            }
    return gate_left(reader, function(device, id));
}
