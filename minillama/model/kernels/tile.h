/* Products of matrices by tiles of c that stay in registers.
 *
 * A tile is TILE_ROWS rows of TILE_VECS vectors of c; for each term, its rows of a are multiplied by its
 * vectors of b.  A number of c is the sum, in order, of partial sums of TERMS terms, so that long sums
 * stay accurate.  Splitting c, or the terms at multiples of TERMS, does not change the result.
 */
#ifndef TILE_H
#define TILE_H

#include "vectors.h"

#define TILE_ROWS 6 /* a tile, one number of a and TILE_VECS vectors of b fill most registers */
#if MANY_REGISTERS
#define TILE_VECS 4
#else
#define TILE_VECS 2
#endif
#define TERMS 256L /* in a partial sum; so many terms of a and b fit in the cache */
#define PREFETCH_TERMS 16 /* how far ahead a' is prefetched: each term may be on another page */

typedef struct {
    const wide *a, *b;
    wide *c;
    long terms, a_stride, b_stride, c_stride, last; /* last: columns of the last vector */
    int add;
} tile_t;

static inline __attribute__((always_inline)) void tile_of(const tile_t *t, const int transposed,
                                                          const int rows, const int vecs) {
    const wide *a = t->a, *b = t->b;
    const long a_stride = t->a_stride, b_stride = t->b_stride, terms = t->terms;
    const int whole = t->last == LANES;
    vec sum[TILE_ROWS][TILE_VECS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) sum[r][v] = splat(0);
    for (long k = 0; k < terms; k++) {
        vec of_b[TILE_VECS];
        if (transposed) __builtin_prefetch(a + (k + PREFETCH_TERMS) * a_stride + rows);
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) of_b[v] = load(b + k * b_stride + v * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vec of_a = splat(transposed ? a[k * a_stride + r] : a[r * a_stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) sum[r][v] += of_a * of_b[v];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) {
            wide *to = t->c + r * t->c_stride + v * LANES;
            if (whole || v < vecs - 1)
                store(to, t->add ? load(to) + sum[r][v] : sum[r][v]);
            else
                store_partial(to, t->add ? load_partial(to, t->last) + sum[r][v] : sum[r][v], t->last);
        }
}

/* tile_of for every size that the edges of c leave, each with its sizes known to the compiler */
#define CASE(transposed, r, v)         \
    case (r) * (TILE_VECS + 1) + (v):  \
        tile_of(t, transposed, r, v);  \
        break;
#if TILE_VECS == 4
#define CASES(t, r) CASE(t, r, 1) CASE(t, r, 2) CASE(t, r, 3) CASE(t, r, 4)
#else
#define CASES(t, r) CASE(t, r, 1) CASE(t, r, 2)
#endif
#define SIZES(t) CASES(t, 1) CASES(t, 2) CASES(t, 3) CASES(t, 4) CASES(t, 5) CASES(t, 6)

static void tile(const tile_t *t, int transposed, int rows, int vecs) {
    const int size = rows * (TILE_VECS + 1) + vecs;
    if (transposed)
        switch (size) { SIZES(1) }
    else
        switch (size) { SIZES(0) }
}

/* Panels of b are as wide as a tile, so that what a tile reads is contiguous. */
#define PANEL (TILE_VECS * LANES)

/* c = a b, or with `add` c + a b; rows of each lie `stride` apart. */
typedef struct {
    const wide *a, *b;
    const wide *b_rest; /* (terms, LANES), b's last columns % LANES; NULL if b's rows are padded to LANES */
    wide *c;
    long rows, terms, columns; /* c: (rows, columns) */
    long a_stride, b_stride, c_stride;
    long panel_terms; /* of each panel, if b is in panels; else 0 */
    int a_is_transposed; /* (terms, rows), not (rows, terms) */
    int add;
} product_t;

static void multiply(const product_t *p) {
    for (long k = 0; k < p->terms; k += TERMS) {
        tile_t t = {
            .terms = p->terms - k < TERMS ? p->terms - k : TERMS,
            .a_stride = p->a_stride,
            .c_stride = p->c_stride,
            .add = p->add || k > 0,
        };
        for (long j = 0; j < p->columns;) {
            const long whole_vecs = (p->columns - j) / LANES;
            const int vecs = whole_vecs >= TILE_VECS ? TILE_VECS : whole_vecs ? (int)whole_vecs : 1;
            const int is_rest = !whole_vecs && p->b_rest;
            const long in_b = p->panel_terms ? j / PANEL * PANEL * p->panel_terms + j % PANEL : j;
            t.b = is_rest ? p->b_rest + k * LANES : p->b + k * p->b_stride + in_b;
            t.b_stride = is_rest ? LANES : p->b_stride;
            t.last = whole_vecs ? LANES : p->columns - j;
            for (long r = 0; r < p->rows; r += TILE_ROWS) {
                t.a = p->a + (p->a_is_transposed ? k * p->a_stride + r : r * p->a_stride + k);
                t.c = p->c + r * p->c_stride + j;
                tile(&t, p->a_is_transposed, p->rows - r < TILE_ROWS ? (int)(p->rows - r) : TILE_ROWS,
                     vecs);
            }
            j += vecs * LANES;
        }
    }
}

/* The size of all panels, in numbers. */
static long panels_size(long terms, long columns) { return terms * round_up(columns, PANEL); }

/* Copies b (terms, columns), or b' (columns, terms), into panels. */
static void pack_panels(const wide *b, wide *y, long terms, long columns, int is_transposed) {
    for (long j = 0; j < columns; j += PANEL, y += terms * PANEL) {
        const long width = columns - j < PANEL ? columns - j : PANEL;
        if (is_transposed)
            transpose(b + j * terms, terms, y, PANEL, width, terms);
        else
            for (long k = 0; k < terms; k++)
                memcpy(y + k * PANEL, b + k * columns + j, (size_t)width * sizeof(wide));
    }
}

/* c = a b, or c + a b, for b in panels */
static void times(const wide *a, long a_stride, const wide *b, wide *c, long c_stride, long rows,
                  long terms, long columns, int add) {
    const product_t p = {.a = a, .b = b, .c = c, .rows = rows, .terms = terms, .columns = columns,
                         .a_stride = a_stride, .b_stride = PANEL, .panel_terms = terms,
                         .c_stride = c_stride, .add = add};
    multiply(&p);
}

/* Rows are split into units of `unit_rows`. */
static long units_of(long rows, long unit_rows) { return (rows + unit_rows - 1) / unit_rows; }

static long rows_left(long rows, long unit_rows, long unit) {
    const long left = rows - unit * unit_rows;
    return left < unit_rows ? left : unit_rows;
}

#endif
