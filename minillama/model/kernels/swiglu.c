/* SwiGLU (swiglu.h) of rows [g, u]; only they are kept for the backward pass. */
#include "swiglu.h"
#include "kernels.h"
#include "threads.h"

#define SWIGLU_UNIT 16384 /* about so many numbers of y in a unit */

typedef struct {
    const wide *x, *dy;
    wide *out;
    long rows, dim, unit_rows;
} swiglu_job;

static long swiglu_unit_end(const swiglu_job *job, long unit) {
    const long end = (unit + 1) * job->unit_rows;
    return end < job->rows ? end : job->rows;
}

static void swiglu_forward_unit(const void *argument, long unit) {
    const swiglu_job *job = argument;
    const long dim = job->dim, end = swiglu_unit_end(job, unit);
    for (long row = unit * job->unit_rows; row < end; row++) {
        const wide *g = job->x + row * 2 * dim;
        swiglu_row(g, g + dim, job->out + row * dim, dim);
    }
}

static void swiglu_backward_unit(const void *argument, long unit) {
    const swiglu_job *job = argument;
    const long dim = job->dim, end = swiglu_unit_end(job, unit);
    for (long row = unit * job->unit_rows; row < end; row++) {
        const wide *g = job->x + row * 2 * dim, *u = g + dim, *dy = job->dy + row * dim;
        wide *dg = job->out + row * 2 * dim;
        swiglu_gradient_row(dy, g, u, dg, dg + dim, dim);
    }
}

static void run_swiglu(void (*work)(const void *, long), swiglu_job job, int threads) {
    job.unit_rows = (SWIGLU_UNIT + job.dim - 1) / job.dim;
    for_units(work, &job, (job.rows + job.unit_rows - 1) / job.unit_rows, threads);
}

void swiglu_forward(const wide *x, wide *y, long rows, long dim, int threads) {
    run_swiglu(swiglu_forward_unit, (swiglu_job){.x = x, .out = y, .rows = rows, .dim = dim}, threads);
}

void swiglu_backward(const wide *dy, const wide *x, wide *dx, long rows, long dim, int threads) {
    run_swiglu(swiglu_backward_unit,
               (swiglu_job){.x = x, .dy = dy, .out = dx, .rows = rows, .dim = dim}, threads);
}
