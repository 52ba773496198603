/* dW = dy' x, the gradient of a linear layer's weight: for each row, every number of dy times all of x.
 *
 * A tile of dW, OUTPUTS rows of VECS vectors, stays in registers while rows of dy and x go by.  A unit
 * of work is a range of outputs; each number is summed over the rows in their order, so that it does
 * not depend on how many threads there are.
 */
#include "kernel.h"
#include "units.h"

#define OUTPUTS 6 /* with a vector of dy and VECS of x, tiles fill most registers */
#if MANY_REGISTERS
#define VECS 4
#else
#define VECS 2
#endif
#define ROWS 256L /* go by at a time: so much of x and dy stays near */
#define AHEAD 16  /* rows: dy is asked for so early, as each may lie on another page of memory */

typedef struct {
    const wide *dy, *x, *rest; /* (rows, out), (rows, in), (rows, LANES): x's last in % LANES features */
    wide *dw;
    long rows, out, in, unit_outputs;
    int add; /* to what dw holds */
} job_t;

typedef struct {
    const wide *dy, *x;
    wide *dw;
    long rows, out, x_stride, in, columns; /* columns: of the last vector */
    int add;
} tile_t;

static inline __attribute__((always_inline)) void tile_of(const tile_t *t, const int outputs,
                                                          const int vecs) {
    const wide *dy = t->dy, *x = t->x;
    const long rows = t->rows, out = t->out, x_stride = t->x_stride, in = t->in;
    const int whole = t->columns == LANES;
    vec sum[OUTPUTS][VECS];
#pragma GCC unroll 6
    for (int o = 0; o < outputs; o++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) {
            const wide *from = t->dw + o * in + v * LANES;
            sum[o][v] = !t->add                       ? splat(0)
                        : whole || v < vecs - 1 ? load(from)
                                                : load_some(from, t->columns);
        }
    for (long row = 0; row < rows; row++) {
        vec of_x[VECS];
        __builtin_prefetch(dy + (row + AHEAD) * out + outputs);
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) of_x[v] = load(x + row * x_stride + v * LANES);
#pragma GCC unroll 6
        for (int o = 0; o < outputs; o++) {
            vec of_dy = splat(dy[row * out + o]);
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) sum[o][v] += of_dy * of_x[v];
        }
    }
#pragma GCC unroll 6
    for (int o = 0; o < outputs; o++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) {
            wide *to = t->dw + o * in + v * LANES;
            if (whole || v < vecs - 1)
                store(to, sum[o][v]);
            else
                store_some(to, sum[o][v], t->columns);
        }
}

/* tile_of for every size that the edges of dW leave, each with its sizes known to the compiler */
static void tile(const tile_t *t, int outputs, int vecs) {
#define CASE(o, v)                \
    case (o) * (VECS + 1) + (v):  \
        tile_of(t, o, v);         \
        break;
#if VECS == 4
#define CASES(o) CASE(o, 1) CASE(o, 2) CASE(o, 3) CASE(o, 4)
#else
#define CASES(o) CASE(o, 1) CASE(o, 2)
#endif
    switch (outputs * (VECS + 1) + vecs) { CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6) }
}

static void unit_of_outputs(const void *argument, long unit) {
    const job_t *job = argument;
    const long in = job->in, out = job->out, first = unit * job->unit_outputs;
    const long end = first + job->unit_outputs < out ? first + job->unit_outputs : out;
    for (long row = 0; row < job->rows; row += ROWS) {
        tile_t t = {
            .rows = job->rows - row < ROWS ? job->rows - row : ROWS,
            .out = out,
            .in = in,
            .add = job->add || row > 0,
        };
        for (long i = 0; i < in;) {
            const long whole_vecs = (in - i) / LANES;
            const int vecs = whole_vecs >= VECS ? VECS : whole_vecs ? (int)whole_vecs : 1;
            t.x = whole_vecs ? job->x + row * in + i : job->rest + row * LANES;
            t.x_stride = whole_vecs ? in : LANES;
            t.columns = whole_vecs ? LANES : in - i;
            for (long o = first; o < end; o += OUTPUTS) {
                t.dy = job->dy + row * out + o;
                t.dw = job->dw + o * in + i;
                tile(&t, end - o < OUTPUTS ? (int)(end - o) : OUTPUTS, vecs);
            }
            i += vecs * LANES;
        }
    }
}

/* Whether it is the faster one here: with few registers, torch's product is. */
int weight_gradient_pays(void) { return MANY_REGISTERS; }

/* How many numbers of `room` are needed. */
long weight_gradient_room(long rows, long in) { return in % LANES ? rows * LANES : 0; }

/* dy (rows, out), x (rows, in) to dw (out, in); with `add`, to what it holds */
void weight_gradient(const wide *dy, const wide *x, wide *dw, wide *room, long rows, long out, long in,
                     int add, int threads) {
    const long columns = in % LANES, tiles = (out + OUTPUTS - 1) / OUTPUTS;
    if (out == 0) return;
    if (columns)
        for (long row = 0; row < rows; row++)
            for (long c = 0; c < LANES; c++)
                room[row * LANES + c] = c < columns ? x[row * in + in - columns + c] : 0;
    if (rows == 0 && !add) memset(dw, 0, (size_t)(out * in) * sizeof(wide));
    const long units = threads > 1 ? 4 * threads : 1; /* more than threads: one may be slow */
    job_t job = {.dy = dy, .x = x, .rest = room, .dw = dw, .rows = rows, .out = out, .in = in,
                 .unit_outputs = (tiles + units - 1) / units * OUTPUTS, .add = add};
    for_units(unit_of_outputs, &job, (out + job.unit_outputs - 1) / job.unit_outputs, threads);
}
