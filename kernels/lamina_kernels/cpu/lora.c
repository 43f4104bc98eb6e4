/* Batched LoRA for short segments: y[rows] += (x[rows] . A^T) . B for each segment's adapter.

   A slice with DoRA's gains ends as gain * (y - bias + (x . A^T) . B) + bias instead, where y is the base
   projection's output with its bias [out], if it has one; gains are float [out_s].

   A [R, in] is row-major and stacks the adapter's slices. B_s [r_s, out_s], one slice, scaled, is cut into tiles
   of TILE columns, each tile row-major [r_s, TILE], the last one padded. Weights, x and y are float, bfloat16 or
   float16; all sums are float. Every weight is read in order, for MR rows together: at a few rows per adapter the
   weights' bytes are what costs, and a general matrix product packs (reads and writes) them again first.

   A result depends only on its own row and adapter, never on the other segments or the number of threads. */

#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h> /* compilers do not vectorize the conversion of _Float16 */
#endif

#if defined(__AVX512F__)
#define VL 16 /* floats in a vector register */
#else
#define VL 8
#endif
#define MR 4         /* rows of x that share a pass over the weights */
#define NR 3         /* rows of A in flight: MR * NR sums, NR weights and one x fill 16 registers */
#define TILE (2 * VL) /* columns of B that lie together */
/* One task: enough work to be worth an atomic ticket, little enough to share out among threads. */
#define ROW_STEP 64
#define RANK_STEP 6
#define TILE_STEP 8

enum { A_PTR, A_ROWS, SLICES, FIRST_SLICE }; /* a slot's entry in the table, then its slices: */
enum { B_PTR, B_RANK, B_COLUMN, B_WIDTH, GAIN_PTR, SLICE_FIELDS }; /* GAIN_PTR 0: plain LoRA */
#define FIELDS (FIRST_SLICE + 3 * SLICE_FIELDS)
enum { SLOT, START, STOP, SEGMENT_FIELDS };

typedef float vec __attribute__((vector_size(VL * 4)));
typedef uint32_t vecu __attribute__((vector_size(VL * 4)));
typedef uint16_t half_vecu __attribute__((vector_size(VL * 2)));

#define INLINE static inline __attribute__((always_inline))

INLINE float sum_of(vec v) {
    float lanes[VL];
    memcpy(lanes, &v, sizeof v);
    for (int step = VL / 2; step; step /= 2)
        for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
    return lanes[0];
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t next_ticket(int64_t *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

int lamina_lora_tile(void) { return TILE; }

/* ---- element types: load and store one vector or one value as float ---- */

INLINE vec load_f32(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_f32(float *p, vec v) { memcpy(p, &v, sizeof v); }
INLINE float get_f32(const float *p) { return *p; }
INLINE void put_f32(float *p, float v) { *p = v; }

INLINE vec load_bf16(const uint16_t *p) {
    half_vecu half;
    memcpy(&half, p, sizeof half);
    return (vec)(__builtin_convertvector(half, vecu) << 16);
}
INLINE void store_bf16(uint16_t *p, vec v) { /* round to nearest, ties to even; NaN stays NaN */
    vecu bits = (vecu)v, rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    vecu is_nan = (vecu)(v != v);
    half_vecu half = __builtin_convertvector((rounded & ~is_nan) | (0x7FC0u & is_nan), half_vecu);
    memcpy(p, &half, sizeof half);
}
INLINE float get_bf16(const uint16_t *p) {
    uint32_t bits = (uint32_t)*p << 16;
    float v;
    memcpy(&v, &bits, 4);
    return v;
}
INLINE void put_bf16(uint16_t *p, float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    *p = v != v ? 0x7FC0 : (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

#define NAME(stem) stem##_f32
#define ELEMENT float
#include "lora_kernel.h"
#undef NAME
#undef ELEMENT

#define NAME(stem) stem##_bf16
#define ELEMENT uint16_t
#include "lora_kernel.h"
#undef NAME
#undef ELEMENT

#ifdef __FLT16_MANT_DIG__ /* the compiler knows _Float16 */
typedef _Float16 half_vecf __attribute__((vector_size(VL * 2)));
INLINE vec load_f16(const _Float16 *p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    half_vecf half;
    memcpy(&half, p, sizeof half);
    return __builtin_convertvector(half, vec);
#endif
}
INLINE void store_f16(_Float16 *p, vec v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    half_vecf half = __builtin_convertvector(v, half_vecf);
    memcpy(p, &half, sizeof half);
#endif
}
INLINE float get_f16(const _Float16 *p) { return (float)*p; }
INLINE void put_f16(_Float16 *p, float v) { *p = (_Float16)v; }

#define NAME(stem) stem##_f16
#define ELEMENT _Float16
#include "lora_kernel.h"
#endif
