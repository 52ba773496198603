/* y = x w' for few rows of x.  A unit of work is a range of outputs.
 *
 * Each number of y is summed in the same order however many rows and threads there are.
 */
#include "kernel.h"
#include "rows.h"
#include "units.h"

#define UNIT_SIZE 32768 /* weights in a unit, about */

typedef struct {
    const wide *x, *w;
    wide *y;
    long rows, in, out, stride, unit_outputs; /* stride: of y's rows */
} job_t;

static void unit_of_outputs(const void *argument, long unit) {
    const job_t *job = argument;
    const long first = unit * job->unit_outputs;
    const long end = first + job->unit_outputs < job->out ? first + job->unit_outputs : job->out;
    for (long row = 0; row < job->rows; row++)
        product(job->x + row * job->in, job->w, job->y + row * job->stride, job->in, first, end);
}

/* x (rows, in), w (out, in) to y (rows, out), whose rows are `stride` apart */
void linear(const wide *x, const wide *w, wide *y, long rows, long in, long out, long stride,
            int threads) {
    long unit_outputs = round_up((UNIT_SIZE + in - 1) / in, OUTPUTS);
    job_t job = {.x = x, .w = w, .y = y, .rows = rows, .in = in, .out = out, .stride = stride,
                 .unit_outputs = unit_outputs};
    for_units(unit_of_outputs, &job, (out + unit_outputs - 1) / unit_outputs, threads);
}
