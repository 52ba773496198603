/* The number types of a kernel, chosen by the compiler's command line: -DFLOAT32, -DFLOAT64,
 * -DBFLOAT16 or -DFLOAT16.
 *
 * `scalar` is what tensors hold and `wide` what is computed in: float for float, bfloat16 and
 * float16; double for double.  No header of Python or torch is needed.
 */
#ifndef NUMBERS_H
#define NUMBERS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>

#if defined(BFLOAT16) || defined(FLOAT16)
#define HALF
#endif

#if defined(BFLOAT16)
typedef uint16_t scalar;
typedef float wide;
static inline wide widen(scalar v) {
    uint32_t bits = (uint32_t)v << 16;
    wide w;
    memcpy(&w, &bits, sizeof w);
    return w;
}
static inline scalar narrow(wide w) { /* to the nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &w, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return w != w ? 0x7fc0 : (scalar)rounded;
}
#else
#if defined(FLOAT16)
typedef _Float16 scalar;
typedef float wide;
#elif defined(FLOAT32)
typedef float scalar, wide;
#elif defined(FLOAT64)
typedef double scalar, wide;
#endif
static inline wide widen(scalar v) { return (wide)v; }
static inline scalar narrow(wide w) { return (scalar)w; }
#endif

#endif
