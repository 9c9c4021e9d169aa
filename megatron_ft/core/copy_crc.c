/* Copies memory and takes the CRC-64/XZ of it in one pass.
 *
 * A plain shared object: core/copy_crc.py loads it with ctypes, so every call runs without the GIL.
 * On other processors than x86-64 with PCLMULQDQ (2010 on) `copy_crc_level` is 0, and nothing else
 * may be called.
 *
 * The CRC is folded as in "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ" (Intel,
 * 2009): a value of 128 bits is moved on by d * 128 bits with two products by x^(128 d + 63) and
 * x^(128 d - 1) modulo the polynomial, in reflected order.  What is left of 256 bytes takes eight
 * tables.  The CRC without its first and last inversion ("raw") is linear: the raw CRC of a block is
 * the XOR of those of its parts, each moved on by the bytes behind it, and zeros add nothing.  So
 * parts of a block may come in any order, from several threads.
 *
 * Bytes are stored past the caches ("stream") where nobody reads them soon.  A source may change
 * while it is copied: each byte is read once, and the CRC is of what was stored.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* One copy; without a source the target is filled with zeros, with source == target it is read. */
struct part {
    uint8_t *target;
    const uint8_t *source;
    size_t length;
};

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define POLYNOMIAL 0x42F0E1EBA9EA3693ULL /* ECMA-182 */
#define REFLECTED 0xC96C5795D7870F42ULL
#define STRIDE 256
#define LINE 64
#define AHEAD 4096 /* bytes that are asked for early: reads wait behind streamed stores otherwise */

enum { NONE, PLAIN, STREAM };

static uint64_t tables[8][256]; /* of a byte that 0 to 7 bytes follow */
static uint64_t steps[4][256];  /* x^(8 * digit * 256^place), reflected */
static uint64_t by_1024[2], by_2048[2];
static int level;

static uint64_t reflected(uint64_t value)
{
    uint64_t result = 0;
    for (int bit = 0; bit < 64; bit++, value >>= 1)
        result = result << 1 | (value & 1);
    return result;
}

/* x^exponent modulo the polynomial, reflected: its bit 63 is x^0. */
static uint64_t power(unsigned exponent)
{
    uint64_t value = 1;
    while (exponent--)
        value = value << 1 ^ (value >> 63 ? POLYNOMIAL : 0);
    return reflected(value);
}

static uint64_t product(uint64_t left, uint64_t right)
{
    uint64_t result = 0;
    for (; left; left <<= 1) {
        result ^= right & -(left >> 63);
        right = right >> 1 ^ (REFLECTED & -(right & 1));
    }
    return result;
}

/* The raw CRC after this many zeros, fewer than 2^32. */
static uint64_t moved_on(uint64_t raw, size_t zeros)
{
    for (int place = 0; zeros; place++, zeros >>= 8)
        if (zeros & 255)
            raw = product(steps[place][zeros & 255], raw);
    return raw;
}

__attribute__((constructor)) static void prepare(void)
{
    __builtin_cpu_init();
    level = !__builtin_cpu_supports("pclmul")                                              ? 0
            : !(__builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx2"))    ? 1
            : !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"))   ? 2
                                                                                           : 3;
    by_1024[0] = power(1024 + 63), by_1024[1] = power(1024 - 1);
    by_2048[0] = power(2048 + 63), by_2048[1] = power(2048 - 1);
    for (int byte = 0; byte < 256; byte++) {
        uint64_t crc = (uint64_t)byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (REFLECTED & -(crc & 1));
        tables[0][byte] = crc;
    }
    for (int behind = 1; behind < 8; behind++)
        for (int byte = 0; byte < 256; byte++) {
            uint64_t before = tables[behind - 1][byte];
            tables[behind][byte] = tables[0][before & 255] ^ before >> 8;
        }
    uint64_t one = power(8);
    for (int place = 0; place < 4; place++) {
        steps[place][0] = power(0);
        for (int digit = 1; digit < 256; digit++)
            steps[place][digit] = product(steps[place][digit - 1], one);
        one = product(steps[place][255], one);
    }
}

static uint64_t by_tables(const uint8_t *from, size_t length, uint64_t raw)
{
    for (; length >= 8; from += 8, length -= 8) {
        uint64_t word;
        memcpy(&word, from, 8);
        raw ^= word;
        raw = tables[7][raw & 255] ^ tables[6][raw >> 8 & 255] ^ tables[5][raw >> 16 & 255] ^
              tables[4][raw >> 24 & 255] ^ tables[3][raw >> 32 & 255] ^
              tables[2][raw >> 40 & 255] ^ tables[1][raw >> 48 & 255] ^ tables[0][raw >> 56];
    }
    while (length--)
        raw = tables[0][(raw ^ *from++) & 255] ^ raw >> 8;
    return raw;
}

/* Copies that are still to be made. */
struct queue {
    const struct part *next, *end;
    uint8_t *to;
    const uint8_t *from;
    size_t left;
};

#define LOAD1(from) _mm_loadu_si128((const __m128i *)(from))
#define STREAM1(to, value) _mm_stream_si128((__m128i *)(to), value)

static inline void stream_line(uint8_t *to, const uint8_t *from)
{
    __m128i a = LOAD1(from), b = LOAD1(from + 16), c = LOAD1(from + 32), d = LOAD1(from + 48);
    STREAM1(to, a);
    STREAM1(to + 16, b);
    STREAM1(to + 32, c);
    STREAM1(to + 48, d);
}

/* Copy past the caches; whole lines where the target's begin. */
static void streamed(const uint8_t *from, uint8_t *to, size_t length)
{
    size_t head = -(uintptr_t)to % LINE;
    if (head > length)
        head = length;
    memcpy(to, from, head);
    from += head, to += head, length -= head;
    for (; length >= LINE; from += LINE, to += LINE, length -= LINE)
        stream_line(to, from);
    memcpy(to, from, length);
}

/* Make at least `wanted` bytes of the copies, if there are so many. */
static void make(struct queue *queue, size_t wanted)
{
    while (wanted) {
        if (!queue->left) {
            if (queue->next == queue->end)
                return;
            queue->to = queue->next->target;
            queue->from = queue->next->source;
            queue->left = queue->next++->length;
        }
        size_t step = queue->left;
        if (wanted < step) { /* to the end of a line */
            size_t lines = wanted + -((uintptr_t)queue->to + wanted) % LINE;
            step = lines < step ? lines : step;
        }
        streamed(queue->from, queue->to, step);
        queue->to += step, queue->from += step, queue->left -= step;
        wanted -= step < wanted ? step : wanted;
    }
}

static inline void make_stride(struct queue *queue)
{
    if (queue->left < STRIDE || (uintptr_t)queue->to % LINE) {
        make(queue, STRIDE);
        return;
    }
    for (int line = 0; line < STRIDE; line += LINE)
        stream_line(queue->to + line, queue->from + line);
    queue->to += STRIDE, queue->from += STRIDE, queue->left -= STRIDE;
}

/* FOLD defines a function that takes the raw CRC of a multiple of STRIDE bytes in COUNT values of
 * one width, stores them, and makes copies of the queue beside it. */
#define FOLD(NAME, FEATURES, TYPE, COUNT, LOAD, FIRST, KEY, FOLDED, STORE)                         \
    __attribute__((target(FEATURES))) static uint64_t NAME(                                        \
        const uint8_t *from, uint8_t *to, size_t length, uint64_t raw, struct queue *beside)       \
    {                                                                                              \
        enum { WIDTH = sizeof(TYPE), STEP = WIDTH * COUNT };                                       \
        const TYPE key = KEY(STEP == 256 ? by_2048 : by_1024);                                     \
        TYPE value[COUNT];                                                                         \
        uint8_t left[STEP] __attribute__((aligned(LINE)));                                         \
        for (int n = 0; n < COUNT; n++) {                                                          \
            value[n] = LOAD(from + n * WIDTH);                                                     \
            STORE(to + n * WIDTH, value[n]);                                                       \
        }                                                                                          \
        value[0] = FIRST(value[0], raw);                                                           \
        for (size_t at = STEP; at < length; at += STEP) {                                          \
            _Pragma("GCC unroll 8") for (int n = 0; n < COUNT; n++)                                \
            {                                                                                      \
                TYPE next = LOAD(from + at + n * WIDTH);                                           \
                STORE(to + at + n * WIDTH, next);                                                  \
                value[n] = FOLDED(value[n], key, next);                                            \
            }                                                                                      \
            if (beside && at % STRIDE == 0) {                                                      \
                for (int line = 0; line < STRIDE; line += LINE)                                    \
                    _mm_prefetch((const char *)from + at + AHEAD + line, _MM_HINT_T0);             \
                make_stride(beside);                                                               \
            }                                                                                      \
        }                                                                                          \
        memcpy(left, value, STEP);                                                                 \
        return by_tables(left, STEP, 0);                                                           \
    }

#define NOWHERE(to, value) (void)(to)

#define KEY1(powers) _mm_set_epi64x((long long)(powers)[1], (long long)(powers)[0])
#define FIRST1(value, raw) _mm_xor_si128(value, _mm_set_epi64x(0, (long long)(raw)))
#define FOLDED1(value, key, next)                                                                  \
    _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(value, key, 0x00),                            \
                                _mm_clmulepi64_si128(value, key, 0x11)),                           \
                  next)
#define PLAIN1(to, value) _mm_storeu_si128((__m128i *)(to), value)
FOLD(none1, "pclmul", __m128i, 8, LOAD1, FIRST1, KEY1, FOLDED1, NOWHERE)
FOLD(plain1, "pclmul", __m128i, 8, LOAD1, FIRST1, KEY1, FOLDED1, PLAIN1)
FOLD(stream1, "pclmul", __m128i, 8, LOAD1, FIRST1, KEY1, FOLDED1, STREAM1)

#define LOAD2(from) _mm256_loadu_si256((const __m256i *)(from))
#define KEY2(powers) _mm256_broadcastsi128_si256(KEY1(powers))
#define FIRST2(value, raw) _mm256_xor_si256(value, _mm256_set_epi64x(0, 0, 0, (long long)(raw)))
#define FOLDED2(value, key, next)                                                                  \
    _mm256_xor_si256(_mm256_xor_si256(_mm256_clmulepi64_epi128(value, key, 0x00),                  \
                                      _mm256_clmulepi64_epi128(value, key, 0x11)),                 \
                     next)
#define PLAIN2(to, value) _mm256_storeu_si256((__m256i *)(to), value)
#define STREAM2(to, value) _mm256_stream_si256((__m256i *)(to), value)
#define WIDE2 "avx2,vpclmulqdq,pclmul"
FOLD(none2, WIDE2, __m256i, 8, LOAD2, FIRST2, KEY2, FOLDED2, NOWHERE)
FOLD(plain2, WIDE2, __m256i, 8, LOAD2, FIRST2, KEY2, FOLDED2, PLAIN2)
FOLD(stream2, WIDE2, __m256i, 8, LOAD2, FIRST2, KEY2, FOLDED2, STREAM2)

#define LOAD4(from) _mm512_loadu_si512((const void *)(from))
#define KEY4(powers) _mm512_broadcast_i32x4(KEY1(powers))
#define FIRST4(value, raw)                                                                         \
    _mm512_xor_si512(value, _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, (long long)(raw)))
#define FOLDED4(value, key, next)                                                                  \
    _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, key, 0x00),                          \
                              _mm512_clmulepi64_epi128(value, key, 0x11), next, 0x96)
#define PLAIN4(to, value) _mm512_storeu_si512((void *)(to), value)
#define STREAM4(to, value) _mm512_stream_si512((void *)(to), value)
#define WIDE4 "avx512f,avx512vl,vpclmulqdq,pclmul"
FOLD(none4, WIDE4, __m512i, 4, LOAD4, FIRST4, KEY4, FOLDED4, NOWHERE)
FOLD(plain4, WIDE4, __m512i, 4, LOAD4, FIRST4, KEY4, FOLDED4, PLAIN4)
FOLD(stream4, WIDE4, __m512i, 4, LOAD4, FIRST4, KEY4, FOLDED4, STREAM4)

typedef uint64_t fold(const uint8_t *, uint8_t *, size_t, uint64_t, struct queue *);
static fold *const folds[3][3] = {
    {none1, plain1, stream1}, {none2, plain2, stream2}, {none4, plain4, stream4}};

static uint64_t few(const uint8_t *from, uint8_t *to, size_t length, uint64_t raw)
{
    if (!to)
        return by_tables(from, length, raw);
    memcpy(to, from, length);
    return by_tables(to, length, raw);
}

/* The raw CRC of any number of bytes, stored at `to` as `how` says. */
static uint64_t copied(const uint8_t *from, uint8_t *to, size_t length, uint64_t raw, int how)
{
    size_t head = how == STREAM ? -(uintptr_t)to % LINE : 0;
    if (head > length)
        head = length;
    size_t middle = (length - head) / STRIDE * STRIDE;
    uint8_t *const nowhere = NULL;
    raw = few(from, to, head, raw);
    from += head, to = to ? to + head : nowhere;
    if (middle)
        raw = folds[level - 1][how](from, to, middle, raw, NULL);
    return few(from + middle, to ? to + middle : nowhere, length - head - middle, raw);
}

/* 0 if this processor cannot, else by the width of its products: 1, 2, 3 for 128, 256, 512 bits. */
int copy_crc_level(void)
{
    return level;
}

/* Use no wider products than these, for tests of what other processors do. */
void copy_crc_use(int wanted)
{
    level = wanted;
}

/* The CRC of each block of `length` bytes, the last of which may be short; copied to `to` through
 * the caches, unless that is NULL. */
void copy_crc_blocks(const uint8_t *from, uint8_t *to, size_t length, size_t block, uint64_t *crcs)
{
    for (size_t at = 0; at < length; at += block) {
        size_t step = length - at < block ? length - at : block;
        *crcs++ = ~copied(from + at, to ? to + at : NULL, step, ~0ULL, to ? PLAIN : NONE);
    }
}

/* Make copies into a region of whole blocks.  The raw CRCs of their bytes are added to `raw`, an
 * entry a block, and their numbers to `covered`; several threads may add at once. */
void copy_crc_parts(const struct part *parts, size_t count, const uint8_t *region, size_t block,
                    uint64_t *raw, uint64_t *covered)
{
    for (; count--; parts++) {
        uint8_t *to = parts->target;
        const uint8_t *from = parts->source;
        for (size_t left = parts->length; left;) {
            size_t number = (size_t)(to - region) / block, inside = (size_t)(to - region) % block;
            size_t step = left < block - inside ? left : block - inside;
            if (!from)
                memset(to, 0, step);
            else {
                uint64_t sum = from == to ? copied(to, NULL, step, 0, NONE)
                                          : copied(from, to, step, 0, STREAM);
                __atomic_fetch_xor(raw + number, moved_on(sum, block - inside - step),
                                   __ATOMIC_RELAXED);
                from += step;
            }
            __atomic_fetch_add(covered + number, step, __ATOMIC_RELAXED);
            to += step, left -= step;
        }
    }
    _mm_sfence();
}

/* Verify blocks, and copy each of them when the next one is read: reads and writes of memory
 * overlap, and no byte of a block is copied before the block was found right.
 *
 * `parts[ends[n - 1]]` to before `parts[ends[n]]` are the copies out of block n, from ends[-1] = 0
 * on.  Returns how many blocks are wrong, whose numbers go to `wrong`. */
size_t copy_crc_verified(const uint8_t *from, size_t length, size_t block, const uint64_t *expected,
                         const struct part *parts, const size_t *ends, size_t *wrong)
{
    size_t found = 0, number = 0, first = 0;
    struct queue queue = {parts, parts, NULL, NULL, 0};
    for (size_t at = 0; at < length; at += block, number++) {
        size_t step = length - at < block ? length - at : block, middle = step / STRIDE * STRIDE;
        uint64_t raw = ~0ULL;
        if (middle)
            raw = folds[level - 1][NONE](from + at, NULL, middle, raw, &queue);
        make(&queue, SIZE_MAX);
        if (~few(from + at + middle, NULL, step - middle, raw) != expected[number])
            wrong[found++] = number;
        else
            queue.next = parts + first, queue.end = parts + ends[number];
        first = ends[number];
    }
    make(&queue, SIZE_MAX);
    _mm_sfence();
    return found;
}

/* Make copies without digests. */
void copy_crc_stream(const struct part *parts, size_t count)
{
    for (; count--; parts++)
        streamed(parts->source, parts->target, parts->length);
    _mm_sfence();
}

#else

int copy_crc_level(void)
{
    return 0;
}

#endif
