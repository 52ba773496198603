/* The product that follows a norm,  y = RMSNorm(x) W',  and its gradients, a few rows at a time: each row is
 * normalized just before the product, and again in the backward pass.
 *
 *   backward   dn = dy W,  dx = d + the norm's gradient of dn (rms_norm.h),  dW = dy' n
 *
 * d is the gradient that x gets from elsewhere, by the residual sum.  N rows, D numbers in each; each
 * number is summed in one order, so that it does not depend on the number of threads.
 */
#include "kernels.h"
#include "rms_norm.h"
#include "threads.h"
#include "tile.h"

#define NORMED_UNIT_ROWS 96L        /* rows in a unit, which reads all panels of the weight */
#define NORMED_GROUP_SIZE 131072L   /* about so many numbers of n per thread: with dn they fit its cache */
#define NORMED_WEIGHT_ROWS (4 * TILE_ROWS) /* of dW in a unit */

typedef struct {
    const wide *x, *dy, *d, *gain, *w; /* w: in panels, transposed in the forward pass */
    wide *y, *r, *dx, *dgain, *dw;
    wide *n, *dn, *dgain_part; /* forward: n of each thread; backward: both of a group of rows */
    long first, rows, dim, out; /* rows of the group that begins at first */
    wide eps;
    int threads;
} normed_linear_job;

static long normed_group_rows(long rows, long dim, int threads) {
    const long group = round_up(NORMED_GROUP_SIZE / dim, TERMS) * threads;
    return group < rows ? group : rows;
}

static void normed_linear_forward_unit(const void *argument, long unit) {
    const normed_linear_job *job = argument;
    const long dim = job->dim, first = unit * NORMED_UNIT_ROWS;
    const long rows = rows_left(job->rows, NORMED_UNIT_ROWS, unit);
    wide *n = job->n + thread_of(job->threads) * NORMED_UNIT_ROWS * dim;
    for (long row = 0; row < rows; row++) {
        const wide r = rms_norm_row(job->x + (first + row) * dim, job->gain, n + row * dim, dim, job->eps, 0);
        if (job->r) job->r[first + row] = r;
    }
    times(n, dim, job->w, job->y + first * job->out, job->out, rows, dim, job->out, 0);
}

static void normed_linear_backward_unit(const void *argument, long unit) {
    const normed_linear_job *job = argument;
    const long dim = job->dim, of_group = unit * NORMED_UNIT_ROWS, first = job->first + of_group;
    const long rows = rows_left(job->rows, NORMED_UNIT_ROWS, unit);
    times(job->dy + first * job->out, job->out, job->w, job->dn + of_group * dim, dim, rows, job->out, dim, 0);
    rms_norm_residual_rows(job->x + first * dim, job->gain, job->r + first, job->d + first * dim,
                           job->dn + of_group * dim, job->n + of_group * dim, job->dx + first * dim, rows, dim);
}

/* Units of dW, and one of dgain. */
static void normed_linear_weights_unit(const void *argument, long unit) {
    const normed_linear_job *job = argument;
    const long dim = job->dim, out = job->out, row = unit * NORMED_WEIGHT_ROWS;
    if (row >= out) {
        rms_norm_add_dgain(job->dn, job->x + job->first * dim, job->r + job->first, job->dgain,
                           job->dgain_part, job->rows, dim, TERMS);
        return;
    }
    if (!job->dw) return;
    const product_t p = {.a = job->dy + job->first * out + row, .b = job->n, .c = job->dw + row * dim,
                         .rows = rows_left(out, NORMED_WEIGHT_ROWS, unit), .terms = job->rows,
                         .columns = dim, .a_stride = out, .b_stride = dim, .c_stride = dim,
                         .a_is_transposed = 1, .add = job->first > 0};
    multiply(&p);
}

int normed_linear_fits(long dim) { return MANY_REGISTERS && dim % LANES == 0; }

long normed_linear_scratch(long rows, long dim, long out, int backward, int threads) {
    if (!backward) return panels_size(dim, out) + threads * NORMED_UNIT_ROWS * dim;
    return panels_size(out, dim) + (2 * normed_group_rows(rows, dim, threads) + 1) * dim;
}

void normed_linear_forward(const wide *x, const wide *gain, const wide *w, wide *y, wide *r, wide *scratch,
                           long rows, long dim, long out, double eps, int threads) {
    const long units = units_of(rows, NORMED_UNIT_ROWS);
    pack_panels(w, scratch, dim, out, 1);
    const normed_linear_job job = {.x = x, .gain = gain, .w = scratch, .y = y, .r = r,
                                   .n = scratch + panels_size(dim, out), .rows = rows, .dim = dim,
                                   .out = out, .eps = (wide)eps, .threads = threads_of(units, threads)};
    for_units(normed_linear_forward_unit, &job, units, threads);
}

void normed_linear_backward(const wide *dy, const wide *d, const wide *x, const wide *gain, const wide *w,
                            const wide *r, wide *dx, wide *dgain, wide *dw, wide *scratch, long rows,
                            long dim, long out, int threads) {
    const long group = normed_group_rows(rows, dim, threads);
    normed_linear_job job = {.x = x, .dy = dy, .d = d, .gain = gain, .w = scratch, .r = (wide *)r, .dx = dx,
                             .dgain = dgain, .dw = dw, .n = scratch + panels_size(out, dim), .dim = dim,
                             .out = out};
    job.dn = job.n + group * dim;
    job.dgain_part = job.dn + group * dim;
    pack_panels(w, scratch, out, dim, 0);
    memset(dgain, 0, (size_t)dim * sizeof(wide));
    for (; job.first < rows; job.first += group) {
        job.rows = rows_left(rows, group, job.first / group);
        for_units(normed_linear_backward_unit, &job, units_of(job.rows, NORMED_UNIT_ROWS), threads);
        for_units(normed_linear_weights_unit, &job, units_of(out, NORMED_WEIGHT_ROWS) + 1, threads);
    }
}
