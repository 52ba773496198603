/* The gated MLP,  y = (silu(x G') * (x U')) W',  and its gradients, a few rows at a time, so that the
 * activations between the products stay in the cache.  With a gain it is the whole sub-layer of a
 * pre-norm block,  y = x + MLP(RMSNorm(x)):  each row is normalized just before its products, again in
 * the backward pass, and beside x only r = 1 / rms is kept.
 *
 *   backward   dh = dy W,  dg and du by swiglu.h,  dx = dg G + du U,
 *              dG = dg' x,  dU = du' x,  dW = dy' h
 *
 * For these only x and gu = [x G', x U'] are kept; h is recomputed.  Rows do not depend on each other,
 * and each number of a weight's gradient is summed in one order (tile.h): neither depends on how many
 * threads there are.  N rows, D numbers in each, F between the products; D and F are whole vectors.
 */
#include "kernels.h"
#include "rms_norm.h"
#include "swiglu.h"
#include "threads.h"
#include "tile.h"

#define MLP_UNIT_ROWS 96L           /* most rows in a unit, which reads all panels of the weights */
#define MLP_GROUP_SIZE 262144L      /* about so many numbers of h and dgu per thread: they fit its cache */
#define MLP_GATE_ROWS (4 * TILE_ROWS)  /* of dG and of dU in a unit */
#define MLP_DOWN_ROWS (2 * TILE_ROWS)  /* of dW, whose rows are longer */

typedef struct {
    const wide *x, *dy;           /* (N, D) */
    const wide *gain;             /* (D); NULL: neither norm nor residual sum */
    wide *r, *dgain;              /* (N): NULL if it need not be kept; (D) */
    wide *n, *dn;                 /* backward: (rows, D), the normalized rows and their gradient */
    wide *dgain_part;             /* (D) */
    wide *g, *u, *w;              /* in panels: backward G, U, W, forward their transposes */
    wide *gu;                     /* (N, 2F); NULL if it need not be kept */
    wide *y, *dx;                 /* (N, D); dx and the next may be NULL: not wanted */
    wide *dg, *du, *dw;           /* of G, U: (F, D), of W: (D, F) */
    wide *h, *dgu;                /* backward: (rows, F), (rows, 2F) */
    wide *thread_scratch;         /* forward: one for each thread */
    long first, rows, dim, inner; /* rows of the group that begins at first; D, F */
    long unit_rows;
    wide eps;
    int threads;
} mlp_job;

/* The rows of a unit: fewer where otherwise there would be too few units for all threads. */
static long unit_rows_for(long rows, int threads) {
    const long share = round_up(units_of(rows, 2 * threads), TILE_ROWS);
    return threads > 1 && share < MLP_UNIT_ROWS ? share : MLP_UNIT_ROWS;
}

static long group_rows(long rows, long inner, int threads) {
    const long group = round_up(MLP_GROUP_SIZE / (3 * inner), TERMS) * threads; /* whole blocks of terms, as in multiply */
    return group < rows ? group : rows;
}

static void mlp_forward_unit(const void *argument, long unit) {
    const mlp_job *job = argument;
    const long dim = job->dim, inner = job->inner, first = unit * job->unit_rows;
    const long rows = rows_left(job->rows, job->unit_rows, unit);
    const wide *x = job->x + first * dim;
    wide *h = job->thread_scratch + thread_of(job->threads) * job->unit_rows * (3 * inner + dim);
    wide *gu = job->gu ? job->gu + first * 2 * inner : h + job->unit_rows * inner;
    wide *y = job->y + first * dim, *n = h + job->unit_rows * 3 * inner;
    if (job->gain) {
        for (long row = 0; row < rows; row++) {
            const wide r = rms_norm_row(x + row * dim, job->gain, n + row * dim, dim, job->eps, 0);
            if (job->r) job->r[first + row] = r;
        }
        memcpy(y, x, (size_t)(rows * dim) * sizeof(wide));
        x = n;
    }
    times(x, dim, job->g, gu, 2 * inner, rows, dim, inner, 0);
    times(x, dim, job->u, gu + inner, 2 * inner, rows, dim, inner, 0);
    for (long r = 0; r < rows; r++) {
        const wide *g = gu + r * 2 * inner;
        swiglu_row(g, g + inner, h + r * inner, inner);
    }
    times(h, inner, job->w, y, dim, rows, inner, dim, job->gain != NULL);
}

static void mlp_backward_unit(const void *argument, long unit) {
    const mlp_job *job = argument;
    const long dim = job->dim, inner = job->inner, of_group = unit * job->unit_rows;
    const long rows = rows_left(job->rows, job->unit_rows, unit), first = job->first + of_group;
    wide *h = job->h + of_group * inner, *dgu = job->dgu + of_group * 2 * inner;
    times(job->dy + first * dim, dim, job->w, h, inner, rows, dim, inner, 0); /* dh, in h's place */
    for (long r = 0; r < rows; r++) {
        const wide *g = job->gu + (first + r) * 2 * inner, *u = g + inner;
        wide *dg = dgu + r * 2 * inner, *du = dg + inner;
        for (long i = 0; i < inner; i += LANES) {
            wide *at = h + r * inner + i;
            vec of_g = load(g + i), of_u = load(u + i), a, b;
            swiglu_gradient(load(at), of_g, of_u, &a, &b);
            store(dg + i, a);
            store(du + i, b);
            store(at, swiglu(of_g, of_u));
        }
    }
    if (!job->dx) return;
    wide *dx = job->dx + first * dim, *dn = job->gain ? job->dn + of_group * dim : dx;
    times(dgu, 2 * inner, job->g, dn, dim, rows, inner, dim, 0);
    times(dgu + inner, 2 * inner, job->u, dn, dim, rows, inner, dim, 1);
    if (!job->gain) return;
    rms_norm_residual_rows(job->x + first * dim, job->gain, job->r + first, job->dy + first * dim, dn,
                           job->n + of_group * dim, dx, rows, dim);
}

/* Units of dW, then of dG, then of dU, and one of dgain. */
static void mlp_weights_unit(const void *argument, long unit) {
    const mlp_job *job = argument;
    const long dim = job->dim, inner = job->inner;
    const long w_units = units_of(dim, MLP_DOWN_ROWS), d_units = units_of(inner, MLP_GATE_ROWS);
    if (unit == w_units + 2 * d_units) {
        rms_norm_add_dgain(job->dn, job->x + job->first * dim, job->r + job->first, job->dgain,
                           job->dgain_part, job->rows, dim, TERMS);
        return;
    }
    const int is_w = unit < w_units, is_u = unit >= w_units + d_units;
    unit -= is_w ? 0 : is_u ? w_units + d_units : w_units;
    const long unit_rows = is_w ? MLP_DOWN_ROWS : MLP_GATE_ROWS, row = unit * unit_rows, columns = is_w ? inner : dim;
    wide *c = is_w ? job->dw : is_u ? job->du : job->dg;
    if (!c) return;
    const product_t p = {
        .a = (is_w ? job->dy + job->first * dim : is_u ? job->dgu + inner : job->dgu) + row,
        .b = is_w ? job->h : job->gain ? job->n : job->x + job->first * dim,
        .c = c + row * columns,
        .rows = rows_left(is_w ? dim : inner, unit_rows, unit),
        .terms = job->rows,
        .columns = columns,
        .a_stride = is_w ? dim : 2 * inner,
        .b_stride = columns,
        .c_stride = columns,
        .a_is_transposed = 1,
        .add = job->first > 0,
    };
    multiply(&p);
}

int mlp_fits(long dim, long inner) { return MANY_REGISTERS && dim % LANES == 0 && inner % LANES == 0; }

long mlp_forward_scratch(long dim, long inner, int threads) {
    return 2 * panels_size(dim, inner) + panels_size(inner, dim) + threads * MLP_UNIT_ROWS * (3 * inner + dim);
}

long mlp_backward_scratch(long rows, long dim, long inner, int normed, int threads) {
    return 2 * panels_size(inner, dim) + panels_size(dim, inner) +
           group_rows(rows, inner, threads) * (3 * inner + (normed ? 2 * dim : 0)) + (normed ? dim : 0);
}

void mlp_forward(const wide *x, const wide *gain, const wide *gate, const wide *up, const wide *down,
                 wide *y, wide *gu, wide *r, wide *scratch, long rows, long dim, long inner, double eps,
                 int threads) {
    mlp_job job = {.x = x, .gain = gain, .y = y, .gu = gu, .r = r, .eps = (wide)eps, 
                 .g = scratch, .u = scratch + panels_size(dim, inner),
                 .w = scratch + 2 * panels_size(dim, inner), .rows = rows, .dim = dim, .inner = inner,
                 .unit_rows = unit_rows_for(rows, threads)};
    const long units = units_of(rows, job.unit_rows);
    job.thread_scratch = job.w + panels_size(inner, dim);
    job.threads = threads_of(units, threads);
    pack_panels(gate, job.g, dim, inner, 1);
    pack_panels(up, job.u, dim, inner, 1);
    pack_panels(down, job.w, inner, dim, 1);
    for_units(mlp_forward_unit, &job, units, threads);
}

void mlp_backward(const wide *dy, const wide *x, const wide *gain, const wide *gate, const wide *up,
                  const wide *down, const wide *gu, const wide *r, wide *dx, wide *dgain, wide *dgate,
                  wide *dup, wide *ddown, wide *scratch, long rows, long dim, long inner, int threads) {
    const long group = group_rows(rows, inner, threads);
    mlp_job job = {.dy = dy, .x = x, .gain = gain, .r = (wide *)r, .gu = (wide *)gu, .dx = dx, .dgain = dgain, .dg = dgate, .du = dup, .dw = ddown,
                 .g = scratch, .u = scratch + panels_size(inner, dim), .w = scratch + 2 * panels_size(inner, dim),
                 .dim = dim, .inner = inner, .unit_rows = unit_rows_for(group, threads)};
    job.h = job.w + panels_size(dim, inner);
    job.dgu = job.h + group * inner;
    job.n = job.dgu + group * 2 * inner;
    job.dn = job.n + group * dim;
    job.dgain_part = job.dn + group * dim;
    if (gain) memset(dgain, 0, (size_t)dim * sizeof(wide));
    pack_panels(gate, job.g, inner, dim, 0);
    pack_panels(up, job.u, inner, dim, 0);
    pack_panels(down, job.w, dim, inner, 0);
    for (; job.first < rows; job.first += group) {
        job.rows = rows_left(rows, group, job.first / group);
        for_units(mlp_backward_unit, &job, units_of(job.rows, job.unit_rows), threads);
        if (gain || dgate || dup || ddown)
            for_units(mlp_weights_unit, &job,
                      units_of(dim, MLP_DOWN_ROWS) + 2 * units_of(inner, MLP_GATE_ROWS) + (gain != NULL), threads);
    }
}
