/* RMSNorm of one row:  r = 1 / sqrt(mean(x^2) + eps),  y = x r * gain. */
#ifndef RMS_NORM_H
#define RMS_NORM_H

#include "numbers.h"

#define PARTS 16 /* partial sums of a row: enough for a vector, in a fixed order */

/* Written so that compilers keep the parts in registers. */
static inline wide sum_parts(const wide *part) {
    wide eight[8], four[4];
    for (int j = 0; j < 8; j++) eight[j] = part[j] + part[j + 8];
    for (int j = 0; j < 4; j++) four[j] = eight[j] + eight[j + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}


static inline wide inverse_rms(wide square_sum, long dim, wide eps) {
    const wide mean_square = square_sum / (wide)dim + eps;
    return mean_square == 0 ? 0 : 1 / sqrt(mean_square); /* eps = 0: a row of zeros stays zeros */
}

/* Returns r. */
static inline wide rms_norm_row(const scalar *restrict x, const wide *restrict gain,
                                scalar *restrict y, long dim, wide eps, int cast_first) {
    wide part[PARTS] = {0}, rest = 0;
    long i = 0;
    for (; i + PARTS <= dim; i += PARTS)
        for (int j = 0; j < PARTS; j++) part[j] += widen(x[i + j]) * widen(x[i + j]);
    for (; i < dim; i++) rest += widen(x[i]) * widen(x[i]);
    const wide r = inverse_rms(sum_parts(part) + rest, dim, eps);
    for (i = 0; i < dim; i++) {
        wide n = widen(x[i]) * r;
        if (cast_first) n = widen(narrow(n));
        y[i] = narrow(n * gain[i]);
    }
    return r;
}

#endif
