// What the engine calls on a CPU, by ctypes (kernels.py). Rows lie next to each other; is_bf16: bfloat16, else float32.

#include "attention.h"

template <class E>
using In = const typename E::T*;
template <class E>
using Out = typename E::T*;

// x += more, where there is more; out = RMS norm of x's rows times weight.
template <class E>
static void add_norm(Out<E> x, In<E> more, In<E> weight, Out<E> out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows > 16)
  for (int64_t row = 0; row < rows; row++) {
    Out<E> here = x + row * size;
    vf squares = {};
    for (int64_t i = 0; i < size; i += W) {
      if (more) E::narrow(here + i, E::widen(here + i) + E::widen(more + row * size + i));
      const vf v = E::widen(here + i);
      squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(added(squares) / size + eps);
    for (int64_t i = 0; i < size; i += W)
      E::narrow(out + row * size + i, E::widen(here + i) * scale * E::widen(weight + i));
  }
}

// SiLU of the first half of each row times the second half.
template <class E>
static void silu_mul(In<E> both, Out<E> out, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows > 16)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < size; i += W) {
      const vf gate = E::widen(both + row * 2 * size + i), up = E::widen(both + (row * 2 + 1) * size + i);
      const vf power = gate * -LOG2E;
      const vf bounded = choose(power > 126.0f, vf{} + 126.0f, power);
      E::narrow(out + row * size + i, gate / (1.0f + exp2_(bounded)) * up);
    }
}

// A row of qkv: query heads, key heads, value heads. Queries are rotated where they are; keys, rotated, and values go
// to the slabs.
template <class E>
static void rope_write(Out<E> qkv, In<E> cos, In<E> sin, const int64_t* slots, Out<E> keys, Out<E> values, int64_t rows,
                       int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t head_stride) {
  const int64_t half = dim / 2;
#pragma omp parallel for if (rows > 16)
  for (int64_t row = 0; row < rows; row++) {
    Out<E> head = qkv + row * (num_heads + 2 * num_kv_heads) * dim;
    In<E> c = cos + row * dim;
    In<E> s = sin + row * dim;
    for (int64_t h = 0; h < num_heads + num_kv_heads; h++, head += dim) {
      Out<E> to = h < num_heads ? head : keys + (h - num_heads) * head_stride + slots[row] * dim;
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

// Any pointer where one of T is wanted.
struct Any {
  const void* p;
  template <class T>
  operator T*() const {
    return static_cast<T*>(const_cast<void*>(p));
  }
};

extern "C" {

int kvreuse_width() { return W; }

void kvreuse_attend(const Job* job, int64_t num_rows, int64_t parts, int is_bf16) {
  (is_bf16 ? attend<BFloat16> : attend<Float>)(*job, num_rows, parts);
}

void kvreuse_add_norm(Any x, Any more, Any weight, Any out, int64_t rows, int64_t size, float eps, int is_bf16) {
  if (is_bf16)
    add_norm<BFloat16>(x, more, weight, out, rows, size, eps);
  else
    add_norm<Float>(x, more, weight, out, rows, size, eps);
}

void kvreuse_silu_mul(Any both, Any out, int64_t rows, int64_t size, int is_bf16) {
  if (is_bf16)
    silu_mul<BFloat16>(both, out, rows, size);
  else
    silu_mul<Float>(both, out, rows, size);
}

void kvreuse_rope_write(Any qkv, Any cos, Any sin, const int64_t* slots, Any keys, Any values, int64_t rows,
                        int64_t num_heads, int64_t num_kv_heads, int64_t dim, int64_t head_stride, int is_bf16) {
  if (is_bf16)
    rope_write<BFloat16>(qkv, cos, sin, slots, keys, values, rows, num_heads, num_kv_heads, dim, head_stride);
  else
    rope_write<Float>(qkv, cos, sin, slots, keys, values, rows, num_heads, num_kv_heads, dim, head_stride);
}
}
