/* Vectors as wide as the machine's registers, and the functions of them that kernels share. */
#ifndef VECTORS_H
#define VECTORS_H

#include "numbers.h"

#if defined(FLOAT64)
typedef int64_t integer;
#define EXPONENT_BIAS 1023
#define MANTISSA_BITS 52
#define EXP_TERMS 14
#define LOWEST (-708.0)
#define LN2_HIGH 0x1.62e42fefa38p-1 /* ln 2 in two parts; the first has few bits, so that */
#define LN2_LOW 0x1.ef35793c7673p-45 /* its product with an integer is exact */
#else
typedef int32_t integer;
#define EXPONENT_BIAS 127
#define MANTISSA_BITS 23
#define EXP_TERMS 8
#define LOWEST (-87.0f)
#define LN2_HIGH 0x1.62e4p-1f
#define LN2_LOW 0x1.7f7d1cp-20f
#endif

#if defined(__AVX512F__) /* as wide as the registers: compilers split wider ones badly */
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define MANY_REGISTERS 1 /* 32 */
#else
#define MANY_REGISTERS 0 /* 16 */
#endif
#define LANES ((long)(VECTOR_BYTES / sizeof(wide)))
typedef wide vec __attribute__((vector_size(VECTOR_BYTES)));
typedef integer ivec __attribute__((vector_size(VECTOR_BYTES)));
typedef wide unaligned_vec __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(wide))));

static inline vec load(const wide *p) { return *(const unaligned_vec *)p; }
static inline void store(wide *p, vec v) { *(unaligned_vec *)p = v; }
static inline vec splat(wide w) { return w - (vec){0}; }

static inline vec load_partial(const wide *p, long n) {
    wide lane[LANES] = {0};
    memcpy(lane, p, (size_t)n * sizeof(wide));
    return load(lane);
}

static inline void store_partial(wide *p, vec v, long n) {
    wide lane[LANES];
    store(lane, v);
    memcpy(p, lane, (size_t)n * sizeof(wide));
}

static inline long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

/* Adds halves, down to 16 bytes: in registers, and in a fixed order. */
#define LANES16 ((int)(16 / sizeof(wide)))
typedef wide vec16 __attribute__((vector_size(16)));
typedef wide unaligned_vec16 __attribute__((vector_size(16), aligned(sizeof(wide))));

static inline wide sum_lanes(vec v) {
#if VECTOR_BYTES == 16
    vec16 last = v;
#else
    typedef wide vec32 __attribute__((vector_size(32)));
    union {
        vec32 whole;
        vec16 half[2];
    } last32;
#if VECTOR_BYTES == 64
    union {
        vec whole;
        vec32 half[2];
    } all = {.whole = v};
    last32.whole = all.half[0] + all.half[1];
#else
    last32.whole = v;
#endif
    vec16 last = last32.half[0] + last32.half[1];
#endif
    wide total = last[0] + last[1];
    for (int j = 2; j < LANES16; j += 2) total += last[j] + last[j + 1];
    return total;
}

static inline vec vec_max(vec a, vec b) {
    ivec bigger = a > b;
    return (vec)((bigger & (ivec)a) | (~bigger & (ivec)b));
}

static inline wide max_lanes(vec v) {
    wide lane[LANES];
    store(lane, v);
    for (long half = LANES / 2; half; half /= 2)
        for (long j = 0; j < half; j++)
            lane[j] = lane[j + half] > lane[j] ? lane[j + half] : lane[j];
    return lane[0];
}

static const double taylor[] = { /* 1 / n! */
    1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320,
    1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};

/* e^x for x <= 0; below LOWEST it is 0.  x = k ln 2 + f with k an integer, |f| <= ln 2 / 2;
 * e^f by Taylor, times 2^k through the exponent's bits.  NaN gives NaN. */
static inline vec vec_exp(vec x) {
    const wide to_integer = (wide)3 * ((integer)1 << (MANTISSA_BITS - 1)); /* adding it rounds */
    ivec low = x < LOWEST; /* includes minus infinity; their result is discarded */
    vec shifted = x * (wide)1.44269504088896340736 + to_integer;
    vec k = shifted - to_integer;
    vec f = x - k * LN2_HIGH - k * LN2_LOW;
    vec y = splat((wide)taylor[EXP_TERMS - 1]);
    for (int n = EXP_TERMS - 2; n >= 0; n--) y = y * f + (wide)taylor[n];
    ivec power = ((ivec)shifted - (ivec)splat(to_integer) + EXPONENT_BIAS) << MANTISSA_BITS;
    return (vec)((ivec)(y * (vec)power) & ~low);
}

static inline vec sigmoid(vec g) {
    ivec positive = g > 0;
    vec e = vec_exp((vec)((positive & (ivec)-g) | (~positive & (ivec)g))); /* of -|g| */
    vec numerator = (vec)((positive & (ivec)splat(1)) | (~positive & (ivec)e));
    return numerator / (1 + e);
}

static inline wide dot(const wide *a, const wide *b, long n) {
    vec sum = splat(0);
    long i = 0;
    for (; i + LANES <= n; i += LANES) sum += load(a + i) * load(b + i);
    wide total = sum_lanes(sum);
    for (; i < n; i++) total += a[i] * b[i];
    return total;
}

/* y[c][r] = x[r][c], LANES16 rows at once: of more, compilers make gathers, which are slower. */
static inline void transpose(const wide *restrict x, long x_stride, wide *restrict y, long y_stride,
                             long rows, long columns) {
    long r = 0;
    for (; r + LANES16 <= rows; r += LANES16, x += LANES16 * x_stride)
        for (long c = 0; c < columns; c++) {
            vec16 v;
            for (int i = 0; i < LANES16; i++) v[i] = x[i * x_stride + c];
            *(unaligned_vec16 *)(y + c * y_stride + r) = v;
        }
    for (; r < rows; r++, x += x_stride)
        for (long c = 0; c < columns; c++) y[c * y_stride + r] = x[c];
}

#endif
