/* The products of a linear layer in training, whose matrices are too small for what is made for large ones.
 *
 *   c = a' b      dW = dy' x
 *   c = a b       dx = dy W,  and  y = x W'  with W' laid out anew
 *
 * A tile of c, TILE_ROWS rows of TILE_VECS vectors, stays in registers while numbers of a meet vectors
 * of b.  A unit of work is a range of c's rows; each number is summed in one order, so that it does not
 * depend on how many threads there are.
 */
#include "kernel.h"
#include "units.h"

#define TILE_ROWS 6 /* with a number of a and TILE_VECS of b, tiles fill most registers */
#if MANY_REGISTERS
#define TILE_VECS 4
#else
#define TILE_VECS 2
#endif
#define TERMS 256L /* of the sums, at a time: so much of a and b stays near */
#define AHEAD 16   /* terms: a' is asked for so early, as each may lie on another page of memory */

typedef struct {
    const wide *a, *b, *b_rest; /* b_rest: (terms, LANES), b's last columns % LANES */
    wide *c;
    long rows, terms, columns, unit_rows; /* c: (rows, columns) */
    int a_is_transposed;                  /* (terms, rows), not (rows, terms) */
    int add;                              /* to what c holds */
} job_t;

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
        for (int v = 0; v < vecs; v++) {
            const wide *from = t->c + r * t->c_stride + v * LANES;
            if (!t->add)
                sum[r][v] = splat(0);
            else
                sum[r][v] = whole || v < vecs - 1 ? load(from) : load_some(from, t->last);
        }
    for (long k = 0; k < terms; k++) {
        vec of_b[TILE_VECS];
        if (transposed) __builtin_prefetch(a + (k + AHEAD) * a_stride + rows);
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
                store(to, sum[r][v]);
            else
                store_some(to, sum[r][v], t->last);
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

static void unit_of_rows(const void *argument, long unit) {
    const job_t *job = argument;
    const long rows = job->rows, terms = job->terms, columns = job->columns;
    const long first = unit * job->unit_rows;
    const long end = first + job->unit_rows < rows ? first + job->unit_rows : rows;
    for (long k = 0; k < terms; k += TERMS) {
        tile_t t = {
            .terms = terms - k < TERMS ? terms - k : TERMS,
            .a_stride = job->a_is_transposed ? rows : terms,
            .c_stride = columns,
            .add = job->add || k > 0,
        };
        for (long j = 0; j < columns;) {
            const long whole_vecs = (columns - j) / LANES;
            const int vecs = whole_vecs >= TILE_VECS ? TILE_VECS : whole_vecs ? (int)whole_vecs : 1;
            t.b = whole_vecs ? job->b + k * columns + j : job->b_rest + k * LANES;
            t.b_stride = whole_vecs ? columns : LANES;
            t.last = whole_vecs ? LANES : columns - j;
            for (long r = first; r < end; r += TILE_ROWS) {
                t.a = job->a + (job->a_is_transposed ? k * rows + r : r * terms + k);
                t.c = job->c + r * columns + j;
                tile(&t, job->a_is_transposed, end - r < TILE_ROWS ? (int)(end - r) : TILE_ROWS, vecs);
            }
            j += vecs * LANES;
        }
    }
}

/* y (columns, rows) = x' */
static void transpose(const wide *x, wide *y, long rows, long columns) {
    for (long r = 0; r < rows; r += LANES)
        for (long c = 0; c < columns; c++)
            for (long i = r; i < r + LANES && i < rows; i++) y[c * rows + i] = x[i * columns + c];
}

/* Whether these are the faster products here: with few registers, those of others are. */
int matmul_pays(void) { return MANY_REGISTERS; }

/* How many numbers of `room` are needed. */
long matmul_room(long terms, long columns, int b_is_transposed) {
    return (b_is_transposed ? terms * columns : 0) + (columns % LANES ? terms * LANES : 0);
}

/* a (rows, terms), b (terms, columns) to c (rows, columns); with `add`, to what it holds.  A matrix that
 * is transposed lies there as (terms, rows) or (columns, terms). */
void matmul(const wide *a, const wide *b, wide *c, wide *room, long rows, long terms, long columns,
            int a_is_transposed, int b_is_transposed, int add, int threads) {
    const long last = columns % LANES, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    if (rows == 0) return;
    if (terms == 0 && !add) memset(c, 0, (size_t)(rows * columns) * sizeof(wide));
    if (b_is_transposed) {
        transpose(b, room, columns, terms);
        b = room;
        room += terms * columns;
    }
    if (last)
        for (long k = 0; k < terms; k++)
            for (long i = 0; i < LANES; i++)
                room[k * LANES + i] = i < last ? b[(k + 1) * columns - last + i] : 0;
    const long units = threads > 1 ? 4 * threads : 1; /* more than threads: one may be slow */
    job_t job = {.a = a, .b = b, .b_rest = room, .c = c, .rows = rows, .terms = terms,
                 .columns = columns, .unit_rows = (tiles + units - 1) / units * TILE_ROWS,
                 .a_is_transposed = a_is_transposed, .add = add};
    for_units(unit_of_rows, &job, (rows + job.unit_rows - 1) / job.unit_rows, threads);
}
