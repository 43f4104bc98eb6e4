/* The kernel for one element type: lora.c includes this with NAME(stem) and ELEMENT defined. */

/* h[m, n] = x[m, :] . A[n, :] for M rows of x and N rows of A. */
INLINE void NAME(dots)(const int M, const int N, int64_t in, const float *x, int64_t ldx, const ELEMENT *A,
                       float *h, int64_t ldh) {
    vec sums[MR][NR] = {{{0}}};
    int64_t k = 0;
    for (; k + VL <= in; k += VL) {
        vec a[NR];
        for (int n = 0; n < N; n++) {
            a[n] = NAME(load)(A + n * in + k);
            __builtin_prefetch(A + (n + N) * in + k); /* the next N rows follow */
        }
        for (int m = 0; m < M; m++) {
            vec row = load_f32(x + m * ldx + k);
            for (int n = 0; n < N; n++) sums[m][n] += row * a[n];
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            float total = sum_of(sums[m][n]);
            for (int64_t i = k; i < in; i++) total += x[m * ldx + i] * NAME(get)(A + n * in + i);
            h[m * ldh + n] = total;
        }
}

INLINE void NAME(dots_of_rows)(const int N, int64_t rows, int64_t in, const float *x, int64_t ldx,
                               const ELEMENT *A, float *h, int64_t ldh) {
    int64_t m = 0;
    for (; m + MR <= rows; m += MR) NAME(dots)(MR, N, in, x + m * ldx, ldx, A, h + m * ldh, ldh);
    for (; m < rows; m++) NAME(dots)(1, N, in, x + m * ldx, ldx, A, h + m * ldh, ldh);
}

static void NAME(shrink)(int64_t rows, int64_t ranks, int64_t in, const float *x, int64_t ldx, const ELEMENT *A,
                         float *h, int64_t ldh) {
    int64_t n = 0;
    for (; n + NR <= ranks; n += NR) NAME(dots_of_rows)(NR, rows, in, x, ldx, A + n * in, h + n, ldh);
    for (; n < ranks; n++) NAME(dots_of_rows)(1, rows, in, x, ldx, A + n * in, h + n, ldh);
}

/* One vector of y becomes gain * (y - bias + delta) + bias; one value alike. bias may be NULL. */
INLINE void NAME(rescale)(ELEMENT *y, vec delta, const float *gain, const ELEMENT *bias) {
    vec shift = bias ? NAME(load)(bias) : (vec){0};
    NAME(store)(y, load_f32(gain) * (NAME(load)(y) - shift + delta) + shift);
}
INLINE void NAME(rescale_one)(ELEMENT *y, float delta, const float *gain, const ELEMENT *bias) {
    float shift = bias ? NAME(get)(bias) : 0;
    NAME(put)(y, *gain * (NAME(get)(y) - shift + delta) + shift);
}

/* y[m, :width] += sum over k of h[m, k] * B[k, :] for M rows and one tile; width is TILE except in the last.
   With gain [width], unless NULL, the sum is rescaled, and so is y; bias [width] or NULL then. */
INLINE void NAME(add_tile)(const int M, int64_t width, int64_t rank, const float *h, int64_t ldh, const ELEMENT *B,
                           const float *gain, const ELEMENT *bias, ELEMENT *y, int64_t ldy) {
    vec sums[MR][2] = {{{0}}};
    for (int64_t k = 0; k < rank; k++) {
        vec left = NAME(load)(B + k * TILE), right = NAME(load)(B + k * TILE + VL);
        __builtin_prefetch(B + (k + 16) * TILE);
        for (int m = 0; m < M; m++) {
            sums[m][0] += h[m * ldh + k] * left;
            sums[m][1] += h[m * ldh + k] * right;
        }
    }
    for (int m = 0; m < M; m++) {
        ELEMENT *out = y + m * ldy;
        if (gain && width == TILE) {
            NAME(rescale)(out, sums[m][0], gain, bias);
            NAME(rescale)(out + VL, sums[m][1], gain + VL, bias ? bias + VL : bias);
        } else if (gain) {
            for (int n = 0; n < width; n++)
                NAME(rescale_one)(out + n, sums[m][n / VL][n % VL], gain + n, bias ? bias + n : bias);
        } else if (width == TILE) {
            NAME(store)(out, NAME(load)(out) + sums[m][0]);
            NAME(store)(out + VL, NAME(load)(out + VL) + sums[m][1]);
        } else {
            for (int n = 0; n < width; n++) NAME(put)(out + n, NAME(get)(out + n) + sums[m][n / VL][n % VL]);
        }
    }
}

INLINE void NAME(add_tiles)(const int M, int64_t width, int64_t rank, const float *h, int64_t ldh, const ELEMENT *B,
                            const float *gain, const ELEMENT *bias, ELEMENT *y, int64_t ldy) {
    for (int64_t n = 0; n < width; n += TILE, B += rank * TILE)
        NAME(add_tile)(M, smaller(TILE, width - n), rank, h, ldh, B, gain ? gain + n : gain, bias ? bias + n : bias,
                       y + n, ldy);
}

static void NAME(expand)(int64_t rows, int64_t width, int64_t rank, const float *h, int64_t ldh, const ELEMENT *B,
                         const float *gain, const ELEMENT *bias, ELEMENT *y, int64_t ldy) {
    int64_t m = 0;
    for (; m + MR <= rows; m += MR)
        NAME(add_tiles)(MR, width, rank, h + m * ldh, ldh, B, gain, bias, y + m * ldy, ldy);
    for (; m < rows; m++) NAME(add_tiles)(1, width, rank, h + m * ldh, ldh, B, gain, bias, y + m * ldy, ldy);
}

/* One fused site of one layer, by `threads` threads. table [slots, FIELDS] describes each slot's weights;
   segments [count, SEGMENT_FIELDS] are disjoint (slot, start row, stop row); bias [out], or NULL, is what the base
   projection added to y. Scratch: h [rows, ldh]; and, unless ELEMENT is float, xf [rows, in] for x as float. Every
   thread walks the same list of tasks and does those whose ticket it drew. */
void NAME(lamina_lora)(const ELEMENT *x, int64_t ldx, ELEMENT *y, int64_t ldy, int64_t in, const ELEMENT *bias,
                       const int64_t *table, const int32_t *segments, int count, float *h, int64_t ldh, float *xf,
                       int threads) {
    const int convert = sizeof(ELEMENT) != sizeof(float);
    const float *rows = convert ? xf : (const float *)x;
    const int64_t ldr = convert ? in : ldx;
    int64_t convert_tickets = 0, shrink_tickets = 0, expand_tickets = 0;
    #pragma omp parallel num_threads(threads)
    {
        int64_t task = 0, ticket;
        if (convert) {
            ticket = next_ticket(&convert_tickets);
            for (const int32_t *seg = segments; seg < segments + count * SEGMENT_FIELDS; seg += SEGMENT_FIELDS)
                for (int64_t t = seg[START]; t < seg[STOP]; t++) {
                    if (task++ != ticket) continue;
                    for (int64_t k = 0; k < in; k++) xf[t * in + k] = NAME(get)(x + t * ldx + k);
                    ticket = next_ticket(&convert_tickets);
                }
            #pragma omp barrier
        }
        task = 0, ticket = next_ticket(&shrink_tickets);
        for (const int32_t *seg = segments; seg < segments + count * SEGMENT_FIELDS; seg += SEGMENT_FIELDS) {
            const int64_t *slot = table + seg[SLOT] * FIELDS;
            const ELEMENT *A = (const ELEMENT *)(intptr_t)slot[A_PTR];
            for (int64_t t = seg[START]; t < seg[STOP]; t += ROW_STEP)
                for (int64_t n = 0; n < slot[A_ROWS]; n += RANK_STEP) {
                    if (task++ != ticket) continue;
                    NAME(shrink)(smaller(ROW_STEP, seg[STOP] - t), smaller(RANK_STEP, slot[A_ROWS] - n), in,
                                 rows + t * ldr, ldr, A + n * in, h + t * ldh + n, ldh);
                    ticket = next_ticket(&shrink_tickets);
                }
        }
        #pragma omp barrier
        task = 0, ticket = next_ticket(&expand_tickets);
        for (const int32_t *seg = segments; seg < segments + count * SEGMENT_FIELDS; seg += SEGMENT_FIELDS) {
            const int64_t *slot = table + seg[SLOT] * FIELDS, *slice = slot + FIRST_SLICE;
            int64_t first = 0; /* this slice's first column of h */
            for (int64_t j = 0; j < slot[SLICES]; j++, first += slice[B_RANK], slice += SLICE_FIELDS)
                for (int64_t t = seg[START]; t < seg[STOP]; t += ROW_STEP)
                    for (int64_t n = 0; n < slice[B_WIDTH]; n += TILE_STEP * TILE) {
                        if (task++ != ticket) continue;
                        const int64_t column = slice[B_COLUMN] + n;
                        const float *gain = (const float *)(intptr_t)slice[GAIN_PTR];
                        NAME(expand)(smaller(ROW_STEP, seg[STOP] - t), smaller(TILE_STEP * TILE, slice[B_WIDTH] - n),
                                     slice[B_RANK], h + t * ldh + first, ldh,
                                     (const ELEMENT *)(intptr_t)slice[B_PTR] + n * slice[B_RANK],
                                     gain ? gain + n : gain, bias ? bias + column : bias, y + t * ldy + column, ldy);
                        ticket = next_ticket(&expand_tickets);
                    }
        }
    }
}
