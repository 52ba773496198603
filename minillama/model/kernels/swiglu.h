/* SwiGLU of vectors and of rows:  y = g sigma(g) u.
 *
 *   backward   dg = dy u sigma(g) (1 + g (1 - sigma(g))),  du = dy g sigma(g)
 */
#ifndef SWIGLU_H
#define SWIGLU_H

#include "vectors.h"

static inline vec swiglu(vec g, vec u) { return g * sigmoid(g) * u; }

static inline void swiglu_gradient(vec dy, vec g, vec u, vec *dg, vec *du) {
    vec s = sigmoid(g);
    *dg = dy * u * s * (1 + g * (1 - s));
    *du = dy * g * s;
}

static inline void swiglu_row(const wide *g, const wide *u, wide *y, long n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) store(y + i, swiglu(load(g + i), load(u + i)));
    if (i < n)
        store_partial(y + i, swiglu(load_partial(g + i, n - i), load_partial(u + i, n - i)), n - i);
}

static inline void swiglu_gradient_row(const wide *dy, const wide *g, const wide *u, wide *dg,
                                       wide *du, long n) {
    vec of_g, of_u;
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        swiglu_gradient(load(dy + i), load(g + i), load(u + i), &of_g, &of_u);
        store(dg + i, of_g);
        store(du + i, of_u);
    }
    if (i < n) {
        const long rest = n - i;
        swiglu_gradient(load_partial(dy + i, rest), load_partial(g + i, rest),
                        load_partial(u + i, rest), &of_g, &of_u);
        store_partial(dg + i, of_g, rest);
        store_partial(du + i, of_u, rest);
    }
}

#endif
