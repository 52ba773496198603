/* y = x w' for few rows of x.  A unit of work is a range of outputs.
 *
 * Each number of y is summed in the same order however many threads there are.
 */
#include "kernel.h"
#include "rows.h"
#include "units.h"

#define UNIT_SIZE 32768 /* weights in a unit, about */
#define MOST_ROWS 64    /* as in linear.py */

typedef struct {
    const wide *x, *w; /* x: (in, width) */
    wide *y;
    long rows, in, width, out, stride, unit_outputs; /* stride: of y's rows */
} job_t;

static void unit_of_outputs(const void *argument, long unit) {
    const job_t *job = argument;
    const long in = job->in, width = job->width, first = unit * job->unit_outputs;
    const long end = first + job->unit_outputs < job->out ? first + job->unit_outputs : job->out;
    if (width == 1) {
        product(job->x, job->w, job->y, in, 1, first, end);
        return;
    }
    wide lanes[LANE_OUTPUTS * MOST_ROWS];
    for (long o = first; o < end; o += LANE_OUTPUTS) {
        const long some = end - o < LANE_OUTPUTS ? end - o : LANE_OUTPUTS;
        product(job->x, job->w + o * in, lanes, in, width, 0, some);
        rows_of_lanes(lanes, job->y + o, some, job->rows, width, job->stride);
    }
}

/* x (rows, in), w (out, in) to y (rows, out), whose rows are `stride` apart; `room` has MOST_ROWS x in
 * numbers, unless there is one row. */
void linear(const wide *x, const wide *w, wide *y, wide *room, long rows, long in, long out,
            long stride, int threads) {
    const long width = width_for(rows);
    const long unit_outputs = round_up((UNIT_SIZE + in - 1) / in, LANE_OUTPUTS);
    if (width > 1) {
        lanes_of_rows(x, room, in, rows, width);
        x = room;
    }
    job_t job = {.x = x, .w = w, .y = y, .rows = rows, .in = in, .width = width, .out = out,
                 .stride = stride, .unit_outputs = unit_outputs};
    for_units(unit_of_outputs, &job, (out + unit_outputs - 1) / unit_outputs, threads);
}
