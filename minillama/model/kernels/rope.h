/* Rotary position embedding of one head at one position. */
#ifndef ROPE_H
#define ROPE_H

#include "vectors.h"

/* y = scale * rotate(x); direction is 1, or -1 for the inverse. */
static inline void rotate(const wide *restrict x, wide *restrict y, const wide *restrict cos,
                          const wide *restrict sin, long dim, wide direction, wide scale) {
    const long half = dim / 2;
    long c = 0;
    for (; c + LANES <= half; c += LANES) {
        vec a = load(x + c), b = load(x + c + half), s = direction * load(sin + c);
        store(y + c, (a * load(cos + c) - b * s) * scale);
        store(y + c + half, (b * load(cos + c) + a * s) * scale);
    }
    for (; c < half; c++) {
        wide a = x[c], b = x[c + half], s = direction * sin[c];
        y[c] = (a * cos[c] - b * s) * scale;
        y[c + half] = (b * cos[c] + a * s) * scale;
    }
}

#endif
