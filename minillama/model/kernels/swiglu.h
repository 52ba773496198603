/* SwiGLU of two halves of a row:  y = g sigma(g) u,  where the row is [g, u].
 *
 *   backward   dg = dy u sigma(g) (1 + g (1 - sigma(g))),  du = dy g sigma(g)
 */
static inline vec gated(vec g, vec u) { return g * sigmoid(g) * u; }

static inline void gated_backward(vec dy, vec g, vec u, vec *dg, vec *du) {
    vec s = sigmoid(g);
    *dg = dy * u * s * (1 + g * (1 - s));
    *du = dy * g * s;
}
