/* y = x w' for few rows of x, where reading w from memory is all the time that it takes.
 *
 * A unit of work is a range of outputs, OUTPUTS of them at a time.  Each number of y is summed in the
 * same order however many rows and threads there are.
 */
#include "kernel.h"
#include "units.h"

#define OUTPUTS 4
#define UNIT_SIZE 32768 /* weights in a unit, about */
#define AHEAD 4096      /* bytes: w is asked for so early */

typedef struct {
    const wide *x, *w;
    wide *y;
    long rows, in, out, stride, unit_outputs; /* stride: of y's rows */
} job_t;

static inline void outputs_of(const wide *restrict x, const wide *restrict w, wide *restrict y,
                              long in, int outputs) {
    const long whole_in = in / LANES * LANES;
    vec sum[OUTPUTS];
    for (int o = 0; o < outputs; o++) sum[o] = splat(0);
    for (long i = 0; i < whole_in; i += LANES) {
        vec v = load(x + i);
        for (int o = 0; o < outputs; o++) {
            __builtin_prefetch((const char *)(w + o * in + i) + AHEAD);
            sum[o] += v * load(w + o * in + i);
        }
    }
    for (int o = 0; o < outputs; o++) {
        y[o] = sum_of(sum[o]);
        for (long i = whole_in; i < in; i++) y[o] += x[i] * w[o * in + i];
    }
}

static void unit_of_outputs(const void *argument, long unit) {
    const job_t *job = argument;
    const long end = (unit + 1) * job->unit_outputs < job->out ? (unit + 1) * job->unit_outputs : job->out;
    for (long o = unit * job->unit_outputs; o < end; o += OUTPUTS)
        for (long row = 0; row < job->rows; row++) {
            const wide *x = job->x + row * job->in;
            wide *y = job->y + row * job->stride;
            if (end - o >= OUTPUTS)
                outputs_of(x, job->w + o * job->in, y + o, job->in, OUTPUTS);
            else
                for (long last = o; last < end; last++)
                    outputs_of(x, job->w + last * job->in, y + last, job->in, 1);
        }
}

/* x (rows, in), w (out, in) to y (rows, out), whose rows are `stride` apart */
void linear(const wide *x, const wide *w, wide *y, long rows, long in, long out, long stride,
            int threads) {
    long unit_outputs = round_up((UNIT_SIZE + in - 1) / in, OUTPUTS);
    job_t job = {.x = x, .w = w, .y = y, .rows = rows, .in = in, .out = out, .stride = stride,
                 .unit_outputs = unit_outputs};
    for_units(unit_of_outputs, &job, (out + unit_outputs - 1) / unit_outputs, threads);
}
