/* SwiGLU (swiglu.h) of rows; only they are kept for the backward pass. */
#include "kernel.h"
#include "swiglu.h"
#include "units.h"

#define UNIT_SIZE 16384 /* numbers of y in a unit, about */

typedef struct {
    const wide *x, *dy;
    wide *out;
    long rows, dim, unit_rows;
} job_t;

static void forward_unit(const void *argument, long unit) {
    const job_t *job = argument;
    const long dim = job->dim, whole_dim = dim / LANES * LANES, rest = dim - whole_dim;
    for (long row = unit * job->unit_rows; row < (unit + 1) * job->unit_rows && row < job->rows; row++) {
        const wide *g = job->x + row * 2 * dim, *u = g + dim;
        wide *y = job->out + row * dim;
        for (long i = 0; i < whole_dim; i += LANES) store(y + i, gated(load(g + i), load(u + i)));
        if (rest) {
            const long i = whole_dim;
            store_some(y + i, gated(load_some(g + i, rest), load_some(u + i, rest)), rest);
        }
    }
}

static void backward_unit(const void *argument, long unit) {
    const job_t *job = argument;
    const long dim = job->dim, whole_dim = dim / LANES * LANES, rest = dim - whole_dim;
    vec a, b;
    for (long row = unit * job->unit_rows; row < (unit + 1) * job->unit_rows && row < job->rows; row++) {
        const wide *g = job->x + row * 2 * dim, *u = g + dim, *dy = job->dy + row * dim;
        wide *dg = job->out + row * 2 * dim, *du = dg + dim;
        for (long i = 0; i < whole_dim; i += LANES) {
            gated_backward(load(dy + i), load(g + i), load(u + i), &a, &b);
            store(dg + i, a);
            store(du + i, b);
        }
        if (rest) {
            const long i = whole_dim;
            gated_backward(load_some(dy + i, rest), load_some(g + i, rest), load_some(u + i, rest), &a, &b);
            store_some(dg + i, a, rest);
            store_some(du + i, b, rest);
        }
    }
}

static void run(void (*work)(const void *, long), job_t job, int threads) {
    job.unit_rows = (UNIT_SIZE + job.dim - 1) / job.dim;
    for_units(work, &job, (job.rows + job.unit_rows - 1) / job.unit_rows, threads);
}

/* x (rows, 2 dim) to y (rows, dim) */
void swiglu_forward(const wide *x, wide *y, long rows, long dim, int threads) {
    run(forward_unit, (job_t){.x = x, .out = y, .rows = rows, .dim = dim}, threads);
}

void swiglu_backward(const wide *dy, const wide *x, wide *dx, long rows, long dim, int threads) {
    run(backward_unit, (job_t){.x = x, .dy = dy, .out = dx, .rows = rows, .dim = dim}, threads);
}
