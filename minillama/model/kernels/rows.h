/* Products of one row x with rows of w, where reading w is all the time that it takes. */
#define OUTPUTS 4  /* rows of w at a time */
#define AHEAD 4096 /* bytes: w is asked for so early */

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
        wide total = sum_of(sum[o]);
        for (long i = whole_in; i < in; i++) total += x[i] * w[o * in + i];
        y[o] = total;
    }
}

/* y[o] = x . w[o] for o from `first` to `end` */
static inline void product(const wide *x, const wide *w, wide *y, long in, long first, long end) {
    for (; first + OUTPUTS <= end; first += OUTPUTS)
        outputs_of(x, w + first * in, y + first, in, OUTPUTS);
    for (; first < end; first++) outputs_of(x, w + first * in, y + first, in, 1);
}
