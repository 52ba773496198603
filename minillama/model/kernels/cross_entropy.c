/* Cross-entropy of rows of logits, and its gradient in their place.
 *
 *   log Z = log sum exp(l),   loss = log Z - l[target],   objective = loss + z_loss (log Z)^2
 *   d objective / d l = softmax(l) (1 + 2 z_loss log Z) - onehot(target)
 *
 * A row whose target is `ignored` has loss 0, log Z 0 and no gradient.
 */
#include "kernel.h"
#include "units.h"

#define UNIT_SIZE 16384 /* numbers in a unit, about */

typedef struct {
    wide *logits, *loss, *log_z;
    const int64_t *targets;
    long rows, dim, unit_rows, ignored;
    wide z_loss;
    int with_gradient;
} job_t;

static inline wide greatest(const wide *x, long n) {
    wide top = x[0];
    long i = 0;
    if (n >= LANES) {
        vec highest = load(x);
        for (; i + LANES <= n; i += LANES) highest = vec_max(highest, load(x + i));
        top = max_of(highest);
    }
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* Returns the sum of exp(x - top); with `keep`, that exponential takes the place of each x. */
static inline wide exponentials(wide *x, long n, wide top, int keep) {
    vec total = splat(0);
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec e = vec_exp(load(x + i) - top);
        if (keep) store(x + i, e);
        total += e;
    }
    if (i < n) {
        wide lane[LANES];
        for (int j = 0; j < LANES; j++) lane[j] = i + j < n ? x[i + j] : -INFINITY;
        vec e = vec_exp(load(lane) - top);
        store(lane, e);
        if (keep) memcpy(x + i, lane, (size_t)(n - i) * sizeof(wide));
        total += e;
    }
    return sum_of(total);
}

static void unit_of_rows(const void *argument, long unit) {
    const job_t *job = argument;
    for (long row = unit * job->unit_rows; row < (unit + 1) * job->unit_rows && row < job->rows; row++) {
        wide *x = job->logits + row * job->dim;
        const long target = job->targets[row];
        if (target == job->ignored) {
            job->loss[row] = job->log_z[row] = 0;
            if (job->with_gradient) memset(x, 0, (size_t)job->dim * sizeof(wide));
            continue;
        }
        const wide of_target = x[target], top = greatest(x, job->dim);
        const wide sum = exponentials(x, job->dim, top, job->with_gradient);
        const wide log_z = top + log(sum);
        job->log_z[row] = log_z;
        job->loss[row] = log_z - of_target;
        if (job->with_gradient) {
            const wide factor = (1 + 2 * job->z_loss * log_z) / sum;
            for (long i = 0; i < job->dim; i++) x[i] *= factor;
            x[target] -= 1;
        }
    }
}

/* Returns 0, or -1 if a target is neither `ignored` nor in 0 .. dim - 1; then nothing is done. */
int cross_entropy(wide *logits, const int64_t *targets, wide *loss, wide *log_z, long rows, long dim,
                  long ignored, double z_loss, int with_gradient, int threads) {
    for (long row = 0; row < rows; row++)
        if (targets[row] != ignored && (targets[row] < 0 || targets[row] >= dim)) return -1;
    job_t job = {.logits = logits, .loss = loss, .log_z = log_z, .targets = targets, .rows = rows,
                 .dim = dim, .unit_rows = (UNIT_SIZE + dim - 1) / dim, .ignored = ignored,
                 .z_loss = (wide)z_loss, .with_gradient = with_gradient};
    for_units(unit_of_rows, &job, (rows + job.unit_rows - 1) / job.unit_rows, threads);
    return 0;
}
