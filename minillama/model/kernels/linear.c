/* y = x w' for few rows of x.  A unit of work is a range of outputs.
 *
 * Each number of y is summed in the same order whatever the number of threads.
 */
#include "kernels.h"
#include "row_products.h"
#include "threads.h"

#define FEW_ROWS_UNIT 32768 /* about so many weights in a unit */
#define FEW_ROWS 64    /* as in linear.py */

typedef struct {
    const wide *x, *w; /* x: (in, width) */
    wide *y;
    long rows, in, width, out, stride, unit_outputs; /* stride: of y's rows */
} few_rows_job;

static void few_rows_unit(const void *argument, long unit) {
    const few_rows_job *job = argument;
    const long in = job->in, width = job->width, first = unit * job->unit_outputs;
    const long end = first + job->unit_outputs < job->out ? first + job->unit_outputs : job->out;
    if (width == 1) {
        row_product(job->x, job->w, job->y, in, 1, first, end);
        return;
    }
    wide lanes[LANE_OUTPUTS * FEW_ROWS];
    for (long o = first; o < end; o += LANE_OUTPUTS) {
        const long count = end - o < LANE_OUTPUTS ? end - o : LANE_OUTPUTS;
        row_product(job->x, job->w + o * in, lanes, in, width, 0, count);
        rows_of_lanes(lanes, job->y + o, count, job->rows, width, job->stride);
    }
}

void linear_few_rows(const wide *x, const wide *w, wide *y, wide *scratch, long rows, long n_in,
                     long n_out, long stride, int threads) {
    const long width = width_for(rows);
    const long unit_outputs = round_up((FEW_ROWS_UNIT + n_in - 1) / n_in, LANE_OUTPUTS);
    if (width > 1) {
        lanes_of_rows(x, scratch, n_in, rows, width);
        x = scratch;
    }
    few_rows_job job = {.x = x, .w = w, .y = y, .rows = rows, .in = n_in, .width = width,
                        .out = n_out, .stride = stride, .unit_outputs = unit_outputs};
    for_units(few_rows_unit, &job, (n_out + unit_outputs - 1) / unit_outputs, threads);
}
