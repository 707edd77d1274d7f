// What the engine calls on a CPU, by ctypes. Rows lie next to each other; is_bf16: bfloat16, else float32.

#include "attention.h"

template <class E>
static void add_norm(typename E::T *x, const typename E::T *more, const typename E::T *weight, typename E::T *out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows > 16)
  for (int64_t row = 0; row < rows; row++) {
    typename E::T *here = x + row * size;
    vf squares = {};
    for (int64_t i = 0; i < size; i += W) {
      if (more) E::narrow(here + i, E::widen(here + i) + E::widen(more + row * size + i));
      const vf v = E::widen(here + i);
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(added(squares) / size + eps);
    for (int64_t i = 0; i < size; i += W) E::narrow(out + row * size + i, E::widen(here + i) * scale * E::widen(weight + i));
  }
}

template <class E>
static void silu_mul(const typename E::T *both, typename E::T *out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows > 16)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < size; i += W) {
      const vf gate = E::widen(both + row * 2 * size + i), up = E::widen(both + (row * 2 + 1) * size + i);
      vf power = gate * -LOG2E;
      power = choose(power > 126.0f, vf{} + 126.0f, power);
      E::narrow(out + row * size + i, gate / (1.0f + exp2_(power)) * up);
    }
}

// A row of qkv: query heads, key heads, value heads. Queries are turned where they are; keys, turned, and values go to
// the slabs.
template <class E>
static void rope_write(typename E::T *qkv, const typename E::T *cos, const typename E::T *sin, const int64_t *slots, typename E::T *keys, typename E::T *values, int64_t rows, int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t head_stride) {
  const int64_t half = dim / 2;
#pragma omp parallel for if (rows > 16)
  for (int64_t row = 0; row < rows; row++) {
    typename E::T *head = qkv + row * (num_heads + 2 * num_kv_heads) * dim;
    const typename E::T *c = cos + row * dim, *s = sin + row * dim;
    for (int64_t h = 0; h < num_heads + num_kv_heads; h++, head += dim) {
      typename E::T *to = h < num_heads ? head : keys + (h - num_heads) * head_stride + slots[row] * dim;
      for (int64_t i = 0; i < half; i += W) {
        const vf a = E::widen(head + i), b = E::widen(head + half + i);
        E::narrow(to + i, a * E::widen(c + i) - b * E::widen(s + i));
        E::narrow(to + half + i, b * E::widen(c + half + i) + a * E::widen(s + half + i));
      }
    }
    for (int64_t h = 0; h < num_kv_heads; h++, head += dim)
      std::memcpy(values + h * head_stride + slots[row] * dim, head, dim * sizeof *head);
  }
}

extern "C" {

int kvreuse_width() { return W; }

void kvreuse_attend(const Job *job, int64_t num_rows, int64_t parts, int is_bf16) {
  is_bf16 ? attend<BFloat16>(*job, num_rows, parts) : attend<Float>(*job, num_rows, parts);
}

void kvreuse_add_norm(void *x, const void *more, const void *weight, void *out, int64_t rows, int64_t size, float eps, int is_bf16) {
  typedef uint16_t h;
  is_bf16 ? add_norm<BFloat16>((h *)x, (const h *)more, (const h *)weight, (h *)out, rows, size, eps)
          : add_norm<Float>((float *)x, (const float *)more, (const float *)weight, (float *)out, rows, size, eps);
}

void kvreuse_silu_mul(const void *both, void *out, int64_t rows, int64_t size, int is_bf16) {
  is_bf16 ? silu_mul<BFloat16>((const uint16_t *)both, (uint16_t *)out, rows, size) : silu_mul<Float>((const float *)both, (float *)out, rows, size);
}

void kvreuse_rope_write(void *qkv, const void *cos, const void *sin, const int64_t *slots, void *keys, void *values, int64_t rows, int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t head_stride, int is_bf16) {
  typedef uint16_t h;
  is_bf16 ? rope_write<BFloat16>((h *)qkv, (const h *)cos, (const h *)sin, slots, (h *)keys, (h *)values, rows, num_heads, num_kv_heads, dim, head_stride)
          : rope_write<Float>((float *)qkv, (const float *)cos, (const float *)sin, slots, (float *)keys, (float *)values, rows, num_heads, num_kv_heads, dim, head_stride);
}
}
