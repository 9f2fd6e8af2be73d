/* Types and operators. Ranks are added up in their order, so that each gets the same bits, and gets them again. */
#include "comm.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static const size_t bytes_of[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

size_t type_bytes(ncclDataType_t type)
{
    return (int)type >= 0 && type < ncclNumTypes ? bytes_of[type] : 0;
}

/* Numbers of eight bits with a point are only carried. */
bool type_reduces(ncclDataType_t type)
{
    return (int)type >= 0 && type <= ncclBfloat16;
}

/* ------------------------------------------------------------------------------------- floats of sixteen bits --- */

static float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static uint32_t as_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static float from_bfloat(uint16_t half)
{
    return as_float((uint32_t)half << 16);
}

static uint16_t to_bfloat(float value)
{
    uint32_t bits = as_bits(value);
    if (value != value)
        return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* to the nearest, to even */
}

static float from_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    if (exponent == 31)
        return as_float(sign | 0x7f800000 | fraction << 13);
    if (exponent)
        return as_float(sign | (exponent + 112) << 23 | fraction << 13);
    float small = (float)fraction / 16777216.0f; /* 2^-24 */
    return sign ? -small : small;
}

static uint16_t to_half(float value)
{
    uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000)
        return 0x7fff;
    if (size >= 0x477ff000) /* 65520 and more */
        return (uint16_t)(sign | 0x7c00);
    if (size < 0x38800000) { /* less than 2^-14: a multiple of 2^-24, which the sum with 0.5 rounds to */
        uint32_t rounded = as_bits(as_float(size) + 0.5f) - as_bits(0.5f);
        return (uint16_t)(sign | rounded);
    }
    size += 0xfff + (size >> 13 & 1);
    return (uint16_t)(sign | (size - 0x38000000) >> 13);
}

/* -------------------------------------------------------------------------------------------------- reducing --- */

#define PLAIN(value) (value)

/* For each type: how it lies in memory, what is computed with (no overflow of a sign), and how to get from one to the other. */
#define TYPES(TYPE)                                                                                                    \
    TYPE(ncclInt8, int8_t, int8_t, uint8_t, PLAIN, PLAIN)                                                              \
    TYPE(ncclUint8, uint8_t, uint8_t, uint8_t, PLAIN, PLAIN)                                                           \
    TYPE(ncclInt32, int32_t, int32_t, uint32_t, PLAIN, PLAIN)                                                          \
    TYPE(ncclUint32, uint32_t, uint32_t, uint32_t, PLAIN, PLAIN)                                                       \
    TYPE(ncclInt64, int64_t, int64_t, uint64_t, PLAIN, PLAIN)                                                          \
    TYPE(ncclUint64, uint64_t, uint64_t, uint64_t, PLAIN, PLAIN)                                                       \
    TYPE(ncclFloat16, uint16_t, float, float, from_half, to_half)                                                      \
    TYPE(ncclFloat32, float, float, float, PLAIN, PLAIN)                                                               \
    TYPE(ncclFloat64, double, double, double, PLAIN, PLAIN)                                                            \
    TYPE(ncclBfloat16, uint16_t, float, float, from_bfloat, to_bfloat)

#define EACH(stored, number, load, store, expression, last)                                                            \
    for (size_t i = 0; i < count; i++) {                                                                               \
        number a = load(((const stored *)from[0])[i]);                                                                 \
        for (int rank = 1; rank < n; rank++) {                                                                         \
            number b = load(((const stored *)from[rank])[i]);                                                          \
            a = (number)(expression);                                                                                  \
        }                                                                                                              \
        ((stored *)to)[i] = store((number)(last));                                                                     \
    }

#define REDUCER(type, stored, number, sum, load, store)                                                                \
    static void reduce_##type(int operator, void *to, const void *const *from, int n, size_t count)                    \
    {                                                                                                                  \
        switch (operator) {                                                                                            \
        case ncclProd: EACH(stored, number, load, store, (sum)a * (sum)b, a) break;                                    \
        case ncclMax: EACH(stored, number, load, store, a > b ? a : b, a) break;                                       \
        case ncclMin: EACH(stored, number, load, store, a < b ? a : b, a) break;                                       \
        case ncclAvg: EACH(stored, number, load, store, (sum)a + (sum)b, a / (number)n) break;                         \
        default: EACH(stored, number, load, store, (sum)a + (sum)b, a) break;                                          \
        }                                                                                                              \
    }                                                                                                                  \
    static void multiply_##type(const void *factor, void *to, const void *from, size_t count)                          \
    {                                                                                                                  \
        number by = load(*(const stored *)factor);                                                                     \
        for (size_t i = 0; i < count; i++)                                                                             \
            ((stored *)to)[i] = store((number)((sum)load(((const stored *)from)[i]) * (sum)by));                       \
    }
TYPES(REDUCER)

void reduce(ncclDataType_t type, int operator, void *to, const void *const *from, int n, size_t count)
{
    switch (type) {
#define CASE(type, stored, number, sum, load, store)                                                                   \
    case type: reduce_##type(operator, to, from, n, count); break;
        TYPES(CASE)
#undef CASE
    default: break;
    }
}

void multiply(ncclDataType_t type, const struct scalar *scalar, void *to, const void *from, size_t count)
{
    _Alignas(8) unsigned char factor[8];

    memcpy(factor, scalar->device ? scalar->device : (const void *)scalar->bytes, type_bytes(type));
    switch (type) {
#define CASE(type, stored, number, sum, load, store)                                                                   \
    case type: multiply_##type(factor, to, from, count); break;
        TYPES(CASE)
#undef CASE
    default: break;
    }
}
