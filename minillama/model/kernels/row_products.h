/* Products of few rows x with rows of w, where most of the time goes into reading w.
 *
 * A single row is summed along its features.  Several are `lanes`: x is (in, width), the rows of each
 * feature side by side, so that a number of w is multiplied by a whole vector and nothing is summed
 * across lanes.
 */
#ifndef ROW_PRODUCTS_H
#define ROW_PRODUCTS_H

#include "vectors.h"

#define ROW_OUTPUTS 4       /* rows of w at a time, for one row of x */
#define PREFETCH_BYTES 4096 /* how far ahead w is prefetched */
#define LANE_OUTPUTS 8L     /* rows of w at a time, for lanes */

static inline void outputs_of(const wide *restrict x, const wide *restrict w, wide *restrict y,
                              long in, int outputs) {
    const long vector_in = in / LANES * LANES;
    vec sum[ROW_OUTPUTS];
    for (int o = 0; o < outputs; o++) sum[o] = splat(0);
    for (long i = 0; i < vector_in; i += LANES) {
        vec v = load(x + i);
        for (int o = 0; o < outputs; o++) {
            __builtin_prefetch((const char *)(w + o * in + i) + PREFETCH_BYTES);
            sum[o] += v * load(w + o * in + i);
        }
    }
    for (int o = 0; o < outputs; o++) {
        wide total = sum_lanes(sum[o]);
        for (long i = vector_in; i < in; i++) total += x[i] * w[o * in + i];
        y[o] = total;
    }
}

static inline void lane_outputs_of(const wide *restrict x, const wide *restrict w,
                                   wide *restrict y, long in, long width, long outputs) {
    vec sum[LANE_OUTPUTS];
    for (long o = 0; o < outputs; o++) sum[o] = splat(0);
    for (long i = 0; i < in; i++) {
        vec v = load(x + i * width);
        __builtin_prefetch(w + outputs * (in + i)); /* of the next rows */
        for (long o = 0; o < outputs; o++) sum[o] += v * w[o * in + i];
    }
    for (long o = 0; o < outputs; o++) store(y + o * width, sum[o]);
}

/* y[o] = x . w[o] for o from `first` to `end`; width is 1 or a multiple of LANES */
static inline void row_product(const wide *x, const wide *w, wide *y, long in, long width, long first,
                           long end) {
    if (width == 1) {
        for (; first + ROW_OUTPUTS <= end; first += ROW_OUTPUTS)
            outputs_of(x, w + first * in, y + first, in, ROW_OUTPUTS);
        for (; first < end; first++) outputs_of(x, w + first * in, y + first, in, 1);
        return;
    }
    for (; first < end; first += LANE_OUTPUTS)
        for (long lane = 0; lane < width; lane += LANES) {
            const wide *from = w + first * in;
            wide *to = y + first * width + lane;
            if (first + LANE_OUTPUTS <= end)
                lane_outputs_of(x + lane, from, to, in, width, LANE_OUTPUTS);
            else
                for (long o = 0; o < end - first; o++)
                    lane_outputs_of(x + lane, from + o * in, to + o * width, in, width, 1);
        }
}

/* The width of lanes that hold so many rows. */
static inline long width_for(long rows) { return rows == 1 ? 1 : round_up(rows, LANES); }

/* Lanes y (n, width) of x (rows, n); those beyond the last row are 0. */
static inline void lanes_of_rows(const wide *x, wide *y, long n, long rows, long width) {
    for (long i = 0; i < n; i++)
        for (long row = 0; row < width; row++) y[i * width + row] = row < rows ? x[row * n + i] : 0;
}

/* y (rows, n), whose rows are `stride` apart, of lanes x (n, width) */
static inline void rows_of_lanes(const wide *x, wide *y, long n, long rows, long width,
                                 long stride) {
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < n; i++) y[row * stride + i] = x[i * width + row];
}

#endif
