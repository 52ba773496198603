/* The products of a linear layer in training, for matrices too small for BLAS to be fast.
 *
 *   c = a' b      dW = dy' x
 *   c = a b       dx = dy W,  and  y = x W'  with W' packed,  to which a residual may be added
 *
 * A unit of work is a range of c's rows; each number is summed in one order, so that it does not depend
 * on the number of threads.
 */
#include "kernels.h"
#include "threads.h"
#include "tile.h"

typedef struct {
    product_t whole;
    const wide *addend; /* as c, or NULL */
    long unit_rows;
} matmul_job;

static void matmul_unit(const void *argument, long unit) {
    const matmul_job *job = argument;
    product_t p = job->whole;
    const long first = unit * job->unit_rows, left = p.rows - first;
    p.a += p.a_is_transposed ? first : first * p.a_stride;
    p.c += first * p.c_stride;
    p.rows = left < job->unit_rows ? left : job->unit_rows;
    if (job->addend && job->addend != job->whole.c)
        memcpy(p.c, job->addend + first * p.c_stride, (size_t)(p.rows * p.c_stride) * sizeof(wide));
    multiply(&p);
}

int matmul_pays(void) { return MANY_REGISTERS; }

long matmul_scratch(long terms, long columns, int b_is_transposed) {
    return b_is_transposed ? panels_size(terms, columns) : columns % LANES ? terms * LANES : 0;
}

void matmul(const wide *a, const wide *b, const wide *addend, wide *c, wide *scratch, long rows, long terms,
            long columns, int a_is_transposed, int b_is_transposed, int threads) {
    const long last = columns % LANES, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    if (rows == 0) return;
    if (terms == 0 && !addend) memset(c, 0, (size_t)(rows * columns) * sizeof(wide));
    product_t whole = {.a = a, .b = b, .c = c, .rows = rows, .terms = terms, .columns = columns,
                       .a_stride = a_is_transposed ? rows : terms, .b_stride = columns,
                       .c_stride = columns, .a_is_transposed = a_is_transposed, .add = addend != NULL};
    if (b_is_transposed) {
        pack_panels(b, scratch, terms, columns, 1);
        whole.b = scratch, whole.b_stride = PANEL, whole.panel_terms = terms;
    } else if (last) {
        for (long k = 0; k < terms; k++)
            for (long i = 0; i < LANES; i++)
                scratch[k * LANES + i] = i < last ? b[(k + 1) * columns - last + i] : 0;
        whole.b_rest = scratch;
    }
    const long units = threads > 1 ? 4 * threads : 1; /* more than threads: one may be slow */
    const matmul_job job = {.whole = whole, .addend = addend, .unit_rows = (tiles + units - 1) / units * TILE_ROWS};
    for_units(matmul_unit, &job, (rows + job.unit_rows - 1) / job.unit_rows, threads);
}
