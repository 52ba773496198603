/* The products of a linear layer in training, of matrices too small for what is made for large ones.
 *
 *   c = a' b      dW = dy' x
 *   c = a b       dx = dy W,  and  y = x W'  with W' laid out anew
 *
 * A unit of work is a range of c's rows; each number is summed in one order, so that it does not depend
 * on how many threads there are.
 */
#include "kernel.h"
#include "tile.h"
#include "units.h"

typedef struct {
    product_t whole;
    long unit_rows;
} job_t;

static void unit_of_rows(const void *argument, long unit) {
    const job_t *job = argument;
    product_t p = job->whole;
    const long first = unit * job->unit_rows, left = p.rows - first;
    p.a += p.a_is_transposed ? first : first * p.a_stride;
    p.c += first * p.c_stride;
    p.rows = left < job->unit_rows ? left : job->unit_rows;
    multiply(&p);
}

/* Whether these are the faster products here: with few registers, those of others are. */
int matmul_pays(void) { return MANY_REGISTERS; }

/* How many numbers of `room` are needed. */
long matmul_room(long terms, long columns, int b_is_transposed) {
    return b_is_transposed ? panels(terms, columns) : columns % LANES ? terms * LANES : 0;
}

/* a (rows, terms), b (terms, columns) to c (rows, columns); with `add`, to what it holds.  A matrix that
 * is transposed lies there as (terms, rows) or (columns, terms). */
void matmul(const wide *a, const wide *b, wide *c, wide *room, long rows, long terms, long columns,
            int a_is_transposed, int b_is_transposed, int add, int threads) {
    const long last = columns % LANES, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    if (rows == 0) return;
    if (terms == 0 && !add) memset(c, 0, (size_t)(rows * columns) * sizeof(wide));
    product_t whole = {.a = a, .b = b, .c = c, .rows = rows, .terms = terms, .columns = columns,
                       .a_stride = a_is_transposed ? rows : terms, .b_stride = columns,
                       .c_stride = columns, .a_is_transposed = a_is_transposed, .add = add};
    if (b_is_transposed) {
        lay_panels(b, room, terms, columns, 1);
        whole.b = room, whole.b_stride = PANEL, whole.panel_terms = terms;
    } else if (last) {
        for (long k = 0; k < terms; k++)
            for (long i = 0; i < LANES; i++)
                room[k * LANES + i] = i < last ? b[(k + 1) * columns - last + i] : 0;
        whole.b_rest = room;
    }
    const long units = threads > 1 ? 4 * threads : 1; /* more than threads: one may be slow */
    const job_t job = {.whole = whole, .unit_rows = (tiles + units - 1) / units * TILE_ROWS};
    for_units(unit_of_rows, &job, (rows + job.unit_rows - 1) / job.unit_rows, threads);
}
