// Vectors of W floats, and the two kinds of elements that models are made of. With GCC's vector extension:
// the same source is good for every processor, only the product of two bfloat16 pairs has an instruction of its own.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>

constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

template <class V, class T>
static inline V load(const T* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V, class T>
static inline void store(T* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

// Compilers would rather read memory again and again.
static inline vi in_register(vi v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#endif
  return v;
}

static inline vf choose(vi which, vf yes, vf no) { return (vf)(((vi)yes & which) | ((vi)no & ~which)); }
static inline vf larger(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return choose(a > b, a, b);
#endif
}

static inline vi lanes_from(int first) {
  vi v;
  for (int i = 0; i < W; i++) v[i] = first + i;
  return v;
}

static inline float added(vf v) {
  for (int half = W / 2; half; half /= 2) v += __builtin_shuffle(v, (lanes_from(0) + half) & (W - 1));
  return v[0];
}

static inline float highest(vf v) {
  for (int half = W / 2; half; half /= 2) v = larger(v, __builtin_shuffle(v, (lanes_from(0) + half) & (W - 1)));
  return v[0];
}

static inline bool is_any_above(vf v, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_NLE_UQ);
#else
  return highest(v) > limit;
#endif
}

// 2 to the power x, to the last bit or two; no less than 2^-126. x is at most 127.
static inline vf exp2_(vf x) {
  const float whole = 12582912.0f;  // adding it leaves no room for a fraction
  x = larger(vf{} - 126.0f, x);     // in this order: what is no number stays so
  const vf shifted = x + whole, f = x - (shifted - whole);
  vf p = f * 1.535336188e-4f + 1.339887440e-3f;
  p = p * f + 9.618437357e-3f;
  p = p * f + 5.550332548e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472028e-1f;
  p = p * f + 1.0f;
  return (vf)((vi)p + ((vi)shifted << 23));
}

// The square of W x W lanes in `rows`, turned.
static inline void turn(vi* rows) {
#pragma GCC unroll 4
  for (int size = 1; size < W; size *= 2) {
    const vi lane = lanes_from(0), is_high = (lane & size) != 0;
    const vi low = lane + (is_high & (W - size)), high = lane + (~is_high & size) + (is_high & W);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
      if (i & size) continue;
      const vi a = rows[i], b = rows[i + size];
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + size] = __builtin_shuffle(a, b, high);
    }
  }
}

// A lane is 32 bits: one float, or two neighbours of bfloat16.
struct Float {
  typedef float T;
  static constexpr int PER_LANE = 1;

  static inline vf widen(const T* from) { return load<vf>(from); }
  static inline void narrow(T* to, vf v) { store(to, v); }
  static inline vf multiply_add(vf sum, uint32_t a, vi b) {
    float scalar;
    std::memcpy(&scalar, &a, sizeof a);
    return sum + scalar * (vf)b;
  }
};

struct BFloat16 {
  typedef uint16_t T;
  static constexpr int PER_LANE = 2;

  static inline vf widen(const T* from) { return (vf)(__builtin_convertvector(load<vh>(from), vu) << 16); }
  static inline void narrow(T* to, vf v) {
#if defined(__AVX512BF16__)
    store(to, (vh)_mm512_cvtneps_pbh((__m512)v));
#else
    const vu bits = (vu)v, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const vi is_number = v == v;
    store(to, __builtin_convertvector((rounded & (vu)is_number) | (0x7fc0 & ~(vu)is_number), vh));
#endif
  }
  static inline vf multiply_add(vf sum, uint32_t a, vi b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
#else
    const uint32_t high = a & 0xffff0000u, low = a << 16;
    return Float::multiply_add(Float::multiply_add(sum, low, b << 16), high, b & 0xffff0000);
#endif
  }
};
