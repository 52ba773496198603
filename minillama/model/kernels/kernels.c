/* All kernels as one translation unit, compiled once for each dtype. */
#include "rms_norm.c"
#include "vectors.h"

int vector_bytes(void) { return VECTOR_BYTES; }

#ifndef HALF
#include "attention.c"
#include "cross_entropy.c"
#include "decode_attention.c"
#include "decoder.c"
#include "linear.c"
#include "matmul.c"
#include "mlp.c"
#include "normed_linear.c"
#include "swiglu.c"
#endif
