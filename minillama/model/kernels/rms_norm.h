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

/* n = x r gain, again, and the gradient of x where it is also part of a residual sum whose gradient is d:
 * dx = d + r (dn gain - x r^2 mean(dn gain x)). */
static inline void rms_norm_residual_rows(const wide *restrict x, const wide *restrict gain,
                                          const wide *restrict r_kept, const wide *restrict d,
                                          const wide *restrict dn, wide *restrict n, wide *restrict dx,
                                          long rows, long dim) {
    for (long row = 0; row < rows; row++, x += dim, d += dim, dn += dim, n += dim, dx += dim) {
        wide part[PARTS] = {0}, rest = 0;
        const wide r = r_kept[row];
        long i = 0;
        for (; i + PARTS <= dim; i += PARTS)
            for (int j = 0; j < PARTS; j++) part[j] += dn[i + j] * gain[i + j] * x[i + j];
        for (; i < dim; i++) rest += dn[i] * gain[i] * x[i];
        const wide r_mean = r * (sum_parts(part) + rest) / (wide)dim * r; /* r * r may overflow */
        for (i = 0; i < dim; i++) {
            n[i] = x[i] * r * gain[i];
            dx[i] = d[i] + r * (dn[i] * gain[i] - x[i] * r_mean);
        }
    }
}

/* dgain += sum over rows of dn x r, in blocks of `block` rows whose sums are made in `part`. */
static inline void rms_norm_add_dgain(const wide *restrict dn, const wide *restrict x,
                                      const wide *restrict r, wide *restrict dgain,
                                      wide *restrict part, long rows, long dim, long block) {
    for (long first = 0; first < rows; first += block) {
        const long end = first + block < rows ? first + block : rows;
        memset(part, 0, (size_t)dim * sizeof(wide));
        for (long row = first; row < end; row++)
            for (long i = 0; i < dim; i++) part[i] += dn[row * dim + i] * x[row * dim + i] * r[row];
        for (long i = 0; i < dim; i++) dgain[i] += part[i];
    }
}

#endif
