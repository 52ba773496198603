/* Cross-entropy of rows of logits, and its gradient, written over them.
 *
 *   log Z = log sum exp(l),   loss = log Z - l[target],   objective = loss + z_loss (log Z)^2
 *   d objective / d l = softmax(l) (1 + 2 z_loss log Z) - onehot(target)
 *
 * A row whose target is `ignored` has loss 0, log Z 0 and no gradient.
 */
#include "kernels.h"
#include "threads.h"

#define CROSS_ENTROPY_UNIT 16384 /* about so many numbers in a unit */

typedef struct {
    wide *logits, *loss, *log_z;
    const int64_t *targets;
    long rows, dim, unit_rows, ignored;
    wide z_loss;
    int with_gradient;
} cross_entropy_job;

static inline wide max_of_row(const wide *x, long n) {
    wide top = x[0];
    long i = 0;
    if (n >= LANES) {
        vec highest = load(x);
        for (; i + LANES <= n; i += LANES) highest = vec_max(highest, load(x + i));
        top = max_lanes(highest);
    }
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* Returns the sum of exp(x - top); with `keep`, each x is replaced by its exponential. */
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
    return sum_lanes(total);
}

static void cross_entropy_unit(const void *argument, long unit) {
    const cross_entropy_job *job = argument;
    for (long row = unit * job->unit_rows; row < (unit + 1) * job->unit_rows && row < job->rows; row++) {
        wide *x = job->logits + row * job->dim;
        const long target = job->targets[row];
        if (target == job->ignored) {
            job->loss[row] = job->log_z[row] = 0;
            if (job->with_gradient) memset(x, 0, (size_t)job->dim * sizeof(wide));
            continue;
        }
        const wide of_target = x[target], top = max_of_row(x, job->dim);
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

int cross_entropy(wide *logits, const int64_t *targets, wide *loss, wide *log_z, long rows, long dim,
                  long ignored, double z_loss, int with_gradient, int threads) {
    for (long row = 0; row < rows; row++)
        if (targets[row] != ignored && (targets[row] < 0 || targets[row] >= dim)) return -1;
    cross_entropy_job job = {.logits = logits, .loss = loss, .log_z = log_z, .targets = targets, .rows = rows,
                 .dim = dim, .unit_rows = (CROSS_ENTROPY_UNIT + dim - 1) / dim, .ignored = ignored,
                 .z_loss = (wide)z_loss, .with_gradient = with_gradient};
    for_units(cross_entropy_unit, &job, (rows + job.unit_rows - 1) / job.unit_rows, threads);
    return 0;
}
