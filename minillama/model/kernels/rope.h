/* Turns one head's features at one position; `way` is -1 to turn back. */
static inline void turn(const wide *restrict x, wide *restrict y, const wide *restrict cos,
                        const wide *restrict sin, long dim, wide way, wide scale) {
    const long half = dim / 2;
    long c = 0;
    for (; c + LANES <= half; c += LANES) {
        vec a = load(x + c), b = load(x + c + half), turned = way * load(sin + c);
        store(y + c, (a * load(cos + c) - b * turned) * scale);
        store(y + c + half, (b * load(cos + c) + a * turned) * scale);
    }
    for (; c < half; c++) {
        wide a = x[c], b = x[c + half], turned = way * sin[c];
        y[c] = (a * cos[c] - b * turned) * scale;
        y[c + half] = (b * cos[c] + a * turned) * scale;
    }
}
