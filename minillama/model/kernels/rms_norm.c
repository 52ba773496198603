/* RMSNorm over contiguous rows, one pass over memory in each direction.
 *
 *   forward    r = 1 / sqrt(mean(x^2) + eps),  y = x r * gain
 *   backward   n = x r,  dx = r (g gain - n mean(g gain n)),  dgain = sum over rows of g n
 *
 * Rows are split into units by the shape alone; each unit has its own partial sum of dgain, and these
 * are added in order.  So results do not depend on the number of threads, to the bit.
 */
#include "rms_norm.h"
#include "kernels.h"
#include "threads.h"

#define MAX_UNITS 64      /* bounds the memory of the partial sums of dgain */
#define UNIT_NUMBERS 8192 /* in a unit, at least: starting one must cost next to nothing */

typedef struct {
    const scalar *x, *dy;
    const wide *gain;
    scalar *y, *dx;
    wide *r;        /* 1 / rms of each row; forward: NULL if it need not be kept */
    wide *partials; /* of dgain, one row for each unit */
    long rows, dim, unit_rows;
    wide eps;
    int cast_first;
} rms_norm_job;

static inline void rms_norm_backward_rows(const scalar *restrict g, const scalar *restrict x,
                                          const wide *restrict gain, const wide *restrict r_kept,
                                          scalar *restrict dx, wide *restrict dgain, long rows, long dim) {
    for (long row = 0; row < rows; row++, g += dim, x += dim, dx += dim) {
        wide r = r_kept[row], part[PARTS] = {0}, rest = 0;
        long i = 0;
        for (; i + PARTS <= dim; i += PARTS)
            for (int j = 0; j < PARTS; j++) {
                wide gx = widen(g[i + j]) * widen(x[i + j]);
                dgain[i + j] += gx * r;
                part[j] += gx * gain[i + j];
            }
        for (; i < dim; i++) {
            wide gx = widen(g[i]) * widen(x[i]);
            dgain[i] += gx * r;
            rest += gx * gain[i];
        }
        /* r mean(g gain n), in an order in which r * r does not overflow */
        wide r_mean = r * (sum_parts(part) + rest) / (wide)dim * r;
        for (i = 0; i < dim; i++)
            dx[i] = narrow(r * (widen(g[i]) * gain[i] - widen(x[i]) * r_mean));
    }
}

static long rms_norm_rows_in(const rms_norm_job *job, long unit) {
    const long left = job->rows - unit * job->unit_rows;
    return left < job->unit_rows ? left : job->unit_rows;
}

static inline void rms_norm_rows(const rms_norm_job *job, long unit, int cast_first) {
    const long dim = job->dim, first = unit * job->unit_rows;
    const long end = first + rms_norm_rows_in(job, unit);
    for (long row = first; row < end; row++) {
        const wide r = rms_norm_row(job->x + row * dim, job->gain, job->y + row * dim, dim, job->eps,
                                    cast_first);
        if (job->r) job->r[row] = r;
    }
}

static void rms_norm_forward_unit(const void *argument, long unit) {
    const rms_norm_job *job = argument;
    if (job->cast_first && sizeof(scalar) < sizeof(wide))
        rms_norm_rows(job, unit, 1);
    else
        rms_norm_rows(job, unit, 0);
}

static void rms_norm_backward_unit(const void *argument, long unit) {
    const rms_norm_job *job = argument;
    const long dim = job->dim, first = unit * job->unit_rows;
    wide *dgain = job->partials + unit * dim;
    memset(dgain, 0, (size_t)dim * sizeof(wide));
    rms_norm_backward_rows(job->dy + first * dim, job->x + first * dim, job->gain, job->r + first,
                           job->dx + first * dim, dgain, rms_norm_rows_in(job, unit), dim);
}

/* Sets unit_rows and returns how many units there are. */
static long split_into_units(rms_norm_job *job) {
    const long most = (job->rows + MAX_UNITS - 1) / MAX_UNITS;
    const long least = (UNIT_NUMBERS + job->dim - 1) / job->dim;
    job->unit_rows = most > least ? most : least;
    return (job->rows + job->unit_rows - 1) / job->unit_rows;
}

void rms_norm_forward(const scalar *x, const wide *gain, scalar *y, wide *r, long rows, long dim,
                      double eps, int cast_first, int threads) {
    rms_norm_job job = {.x = x, .gain = gain, .y = y, .r = r, .rows = rows, .dim = dim,
                        .eps = (wide)eps, .cast_first = cast_first};
    const long units = split_into_units(&job);
    for_units(rms_norm_forward_unit, &job, units, threads);
}

int rms_norm_backward(const scalar *dy, const scalar *x, const wide *gain, const wide *r, scalar *dx,
                      wide *dgain, long rows, long dim, int threads) {
    rms_norm_job job = {.x = x, .dy = dy, .gain = gain, .r = (wide *)r, .dx = dx, .rows = rows,
                        .dim = dim};
    const long units = split_into_units(&job);
    memset(dgain, 0, (size_t)dim * sizeof(wide));
    if (units == 0) return 0;
    job.partials = malloc((size_t)(units * dim) * sizeof(wide));
    if (!job.partials) return -1;
    for_units(rms_norm_backward_unit, &job, units, threads);
    for (long unit = 0; unit < units; unit++)
        for (long i = 0; i < dim; i++) dgain[i] += job.partials[unit * dim + i];
    free(job.partials);
    return 0;
}
