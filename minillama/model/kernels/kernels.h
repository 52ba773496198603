/* The functions that Python calls, and the structs that it fills in.
 *
 * library.py reads this file: each argument's ctype comes from its prototype, each field's from its
 * struct.  Arrays are contiguous.  A function that returns int returns 0, or -1 where it says so.
 */
#ifndef KERNELS_H
#define KERNELS_H

#include "numbers.h"

int vector_bytes(void);

/* ------------------------------------------------------------------------------------ every dtype */

/* x (rows, dim) to y; r: 1 / rms of each row, or NULL. */
void rms_norm_forward(const scalar *x, const wide *gain, scalar *y, wide *r, long rows, long dim,
                      double eps, int cast_first, int threads);

/* -1: no memory. */
int rms_norm_backward(const scalar *dy, const scalar *x, const wide *gain, const wide *r, scalar *dx,
                      wide *dgain, long rows, long dim, int threads);

/* ------------------------------------------------------------------------------ float and double */

#ifndef HALF

/* x (rows, 2 dim) to y (rows, dim) */
void swiglu_forward(const wide *x, wide *y, long rows, long dim, int threads);
void swiglu_backward(const wide *dy, const wide *x, wide *dx, long rows, long dim, int threads);

/* log_sum may be NULL; -1: no memory. */
int attention_forward(const wide *qkv, const wide *cos, const wide *sin, wide *y, wide *log_sum,
                      long batch, long length, long heads, long groups, long dim, int threads);
int attention_backward(const wide *dy, const wide *qkv, const wide *cos, const wide *sin,
                       const wide *y, const wide *log_sum, wide *dqkv, long batch, long length,
                       long heads, long groups, long dim, int threads);

/* first: of each sequence, or NULL; -1: no memory. */
int decode_attention(const wide *qkv, const wide *cos, const wide *sin, wide *keys, wide *values,
                     const int64_t *first, wide *y, long batch, long heads, long groups, long dim,
                     long capacity, long length, long rotation_stride, int threads);

/* -1: a target is neither `ignored` nor in 0 .. dim - 1; then nothing is done. */
int cross_entropy(wide *logits, const int64_t *targets, wide *loss, wide *log_z, long rows, long dim,
                  long ignored, double z_loss, int with_gradient, int threads);

/* x (rows, n_in), w (n_out, n_in) to y (rows, n_out), whose rows are `stride` apart; `scratch` has 64 x n_in
 * numbers, unless there is one row. */
void linear_few_rows(const wide *x, const wide *w, wide *y, wide *scratch, long rows, long n_in,
                     long n_out, long stride, int threads);

/* Whether matmul is faster here than BLAS or oneDNN: with few registers it is not. */
int matmul_pays(void);

/* The size of matmul's scratch, in numbers. */
long matmul_scratch(long terms, long columns, int b_is_transposed);

/* a (rows, terms), b (terms, columns) to c (rows, columns), added to `addend`, which may be c, unless that
 * is NULL.  A transposed matrix is stored as (terms, rows) or (columns, terms). */
void matmul(const wide *a, const wide *b, const wide *addend, wide *c, wide *scratch, long rows, long terms,
            long columns, int a_is_transposed, int b_is_transposed, int threads);

/* Whether the MLP's kernel supports these sizes; with few registers BLAS or oneDNN is faster. */
int mlp_fits(long dim, long inner);

/* The size of the MLP's scratch, in numbers. */
long mlp_forward_scratch(long dim, long inner, int threads);
long mlp_backward_scratch(long rows, long dim, long inner, int normed, int threads);

/* gate, up (inner, dim) and down (dim, inner); gu (rows, 2 inner) and r (rows) may be NULL.  With a
 * gain (dim), x is normalized before and added after, else gain is NULL. */
void mlp_forward(const wide *x, const wide *gain, const wide *gate, const wide *up, const wide *down,
                 wide *y, wide *gu, wide *r, wide *scratch, long rows, long dim, long inner, double eps,
                 int threads);

/* The gradients of the weights may be NULL, and dx if gain is; they need not be zeros before. */
void mlp_backward(const wide *dy, const wide *x, const wide *gain, const wide *gate, const wide *up,
                  const wide *down, const wide *gu, const wide *r, wide *dx, wide *dgain, wide *dgate,
                  wide *dup, wide *ddown, wide *scratch, long rows, long dim, long inner, int threads);

/* Whether the next kernel supports this size; with few registers BLAS or oneDNN is faster. */
int normed_linear_fits(long dim);
long normed_linear_scratch(long rows, long dim, long out, int backward, int threads);

/* y = RMSNorm(x) w' for x (rows, dim) and w (out, dim); r (rows) may be NULL. */
void normed_linear_forward(const wide *x, const wide *gain, const wide *w, wide *y, wide *r, wide *scratch,
                           long rows, long dim, long out, double eps, int threads);

/* dx is the gradient of x plus d (rows, dim).  dw may be NULL. */
void normed_linear_backward(const wide *dy, const wide *d, const wide *x, const wide *gain, const wide *w,
                            const wide *r, wide *dx, wide *dgain, wide *dw, wide *scratch, long rows,
                            long dim, long out, int threads);

typedef struct {
    const wide *attention_gain, *q, *k, *v, *o, *mlp_gain, *gate, *up, *down;
    wide *keys, *values; /* (B, G, capacity, K) */
} decoder_layer_t;

typedef struct {
    const decoder_layer_t *layers;
    const wide *final_gain, *head;
    const int64_t *first;  /* of each sequence, as in cached_attention_t; NULL: 0 */
    const wide *cos, *sin; /* of the new position, (K / 2) or (B, K / 2) */
    const wide *embedded;  /* (B, D): the tokens */
    wide *logits;          /* (B, V) */
    wide *x, *qkv, *y, *h, *gates; /* D, (H + 2G) K, H K, F, 2F features; zeros at first */
    wide *scratch;         /* scratch_size for each thread */
    long n_layers, rows, dim, heads, groups, head_dim, inner, vocab, capacity, length, scratch_size;
    long rotation_stride;
    double eps;
    int threads;
} decoder_t;

/* Python compares these with its own structs. */
long decoder_size(void);
long decoder_layer_size(void);

/* The size of one thread's scratch, and the width of the activations, in numbers. */
long decoder_scratch(const decoder_t *job);
long decoder_width(long rows);

/* Reads one token of each sequence and writes the logits. */
void decode(const decoder_t *job);

#endif

#endif
