// Attention of the rows of a step over runs of slots: one pass over the keys, sums put right as larger scores turn up.
//
// A block of keys is turned once, so that a vector holds the same lane of W keys; all queries that see the block then
// read it from the cache. That is why rows that share a run come in one call.

#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "vectors.h"

constexpr int KEYS = 64;          // in a block
constexpr int GROUPS = KEYS / W;  // vectors of keys in a block
constexpr int TILE = 6;           // queries at a time
constexpr int MAX_HEAD_DIM = 256;
constexpr float LOG2E = 1.44269504f;
constexpr float SLACK = 8;  // how far, as a power of 2, a score may be above what weights are relative to

// Rows [first_row, first_row + num_rows) over the slots of runs [first_run, first_run + num_runs), taken as one list:
// row i sees its positions (last + i - window, last + i], as far as there are any.
struct Call {
  int64_t first_row, num_rows, first_run, num_runs, last, window;
};

struct Run {
  int64_t slot, length;
};

// One layer of one step. Strides in elements: between rows of q and of out, between the KV heads of the slabs.
struct Job {
  const void *q, *keys, *values;
  void* out;
  const Call* calls;
  const Run* runs;
  const float* sinks;  // one for each query head, or null
  int64_t num_calls, num_runs, q_stride, out_stride, head_stride, num_kv_heads, group, head_dim;
  float scaling;
};

// Of some rows and the query heads of one KV head, so far: weighted sums of values, largest scores, sums of weights.
struct State {
  int64_t first_row;
  float *out, *top;
  vf* sum;  // its lanes are still to be added
};

// A block of keys and values, as lanes.
template <class E>
struct Block {
  typedef typename E::T T;
  alignas(64) vi keys[MAX_HEAD_DIM / E::PER_LANE][GROUPS];
  alignas(64) vi pairs[E::PER_LANE == 1 ? 1 : KEYS / 2][MAX_HEAD_DIM / W];
  const uint32_t* values;  // of a step: one key, or two
  int64_t stride;
  int num_keys, dim;
  mutable const char *next_key, *next_value;  // of the block behind this one
  int num_lines;                              // of it, to fetch for every lane of a tile's scores

  int num_lanes() const { return dim / E::PER_LANE; }

  void read(const T* key, const T* value, int num) {
    num_keys = num;
    for (int first = 0; first < num; first += W)
      for (int next = 0; next < num_lanes(); next += W) {
        const int lane = std::min(next, num_lanes() - W);  // nothing behind the last slot is read
        vi rows[W];
        for (int i = 0; i < W; i++)
          rows[i] = first + i < num ? load<vi>(key + (first + i) * dim + lane * E::PER_LANE) : vi{};
        turn(rows);
        for (int i = 0; i < W; i++) keys[lane + i][first / W] = rows[i];
      }
    if (E::PER_LANE == 1) {
      values = reinterpret_cast<const uint32_t*>(value);
      stride = dim;
    } else {
      for (int at = 0; at < num; at += 2)
        for (int i = 0; i < dim; i += W) {
          const T* low = value + at * dim + i;
          const vu high = at + 1 < num ? (vu)E::widen(low + dim) : vu{};
          pairs[at / 2][i / W] = (vi)(high | ((vu)E::widen(low) >> 16));
        }
      values = reinterpret_cast<const uint32_t*>(pairs);
      stride = MAX_HEAD_DIM;
    }
  }

  // While so many tiles are computed on this block, `num` keys and values from there on, which are read next, come into
  // the second-level cache.
  void fetch(const T* key, const T* value, int64_t num, int64_t tiles) {
    next_key = reinterpret_cast<const char*>(key), next_value = reinterpret_cast<const char*>(value);
    const int64_t lines = num * dim * sizeof(T) / 64, chances = tiles * num_lanes();
    num_lines = (lines + chances - 1) / chances;
  }
};

// Up to TILE queries on a block.
template <class E, int N>
struct Tile {
  typedef typename E::T T;
  const T* q[N];
  float *out[N], keep[N];
  vf scores[N][GROUPS];
  alignas(64) T weights[N][KEYS];

  template <int G>
  inline void score(const Block<E>& block, int group) {
    vf sum[N][G] = {};
    const char *next_key = block.next_key, *next_value = block.next_value;
    for (int lane = 0; lane < block.num_lanes(); lane++) {
      for (int n = 0; n < block.num_lines; n++, next_key += 64, next_value += 64) {
        __builtin_prefetch(next_key, 0, 2);
        __builtin_prefetch(next_value, 0, 2);
      }
      vi key[G];
      for (int g = 0; g < G; g++) key[g] = in_register(block.keys[lane][group + g]);
      for (int i = 0; i < N; i++) {
        const uint32_t a = load<uint32_t>(q[i] + lane * E::PER_LANE);
        for (int g = 0; g < G; g++) sum[i][g] = E::multiply_add(sum[i][g], a, key[g]);
      }
    }
    block.next_key = next_key, block.next_value = next_value;
    for (int i = 0; i < N; i++)
      for (int g = 0; g < G; g++) scores[i][group + g] = sum[i][g];
  }

  template <int C>
  inline void add_values(const Block<E>& block, int column) {
    vf sum[N][C];
    for (int i = 0; i < N; i++)
      for (int c = 0; c < C; c++) sum[i][c] = load<vf>(out[i] + column + c * W) * keep[i];
    const uint32_t* row = block.values + column;
    for (int at = 0; at < block.num_keys; at += E::PER_LANE, row += block.stride) {
      vi value[C];
      for (int c = 0; c < C; c++) value[c] = in_register(load<vi>(row + c * W));
      for (int i = 0; i < N; i++) {
        const uint32_t a = load<uint32_t>(weights[i] + at);
        for (int c = 0; c < C; c++) sum[i][c] = E::multiply_add(sum[i][c], a, value[c]);
      }
    }
    for (int i = 0; i < N; i++)
      for (int c = 0; c < C; c++) store(out[i] + column + c * W, sum[i][c]);
  }

  // Scores of query i, which sees keys [low, high), become weights: powers of 2, relative to `top`. That follows the
  // largest score only when it is far behind: weights up to 2^SLACK do no harm, and sums then stay as they are.
  inline void weigh(int i, const Block<E>& block, float scale, int low, int high, float& top, vf& sum) {
    const int groups = (block.num_keys + W - 1) / W;
    keep[i] = 1.0f;
    if (low >= high) {
      std::memset(weights[i], 0, sizeof weights[i]);
      return;
    }
    vf largest = vf{} - INFINITY;
    for (int g = 0; g < groups; g++) {
      if (g * W < low || (g + 1) * W > high) {
        const vi key = lanes_from(g * W);
        scores[i][g] = choose((key >= low) & (key < high), scores[i][g], vf{} - INFINITY);
      }
      largest = larger(largest, scores[i][g]);
    }
    if (is_any_above(largest * scale, top + SLACK)) {
      const float before = top;
      top = highest(largest) * scale;
      keep[i] = exp2_(vf{} + (before - top))[0];
      sum *= keep[i];
    }
    for (int g = 0; g < groups; g++) {
      const vf weight = exp2_(scores[i][g] * scale - top);
      sum += weight;
      E::narrow(weights[i] + g * W, weight);
    }
  }

  // Queries first, first + 1, ... of the state; `position` is that of the block's first key among the call's.
  void run(int first, const Job& job, const Call& call, int head, int64_t position, const Block<E>& block,
           const State& state) {
    const int dim = job.head_dim, groups = (block.num_keys + W - 1) / W;
    for (int i = 0; i < N; i++) {
      const int64_t row = state.first_row + (first + i) / job.group, member = (first + i) % job.group;
      q[i] = static_cast<const T*>(job.q) + row * job.q_stride + (head * job.group + member) * dim;
      out[i] = state.out + int64_t(first + i) * dim;
    }
    int group = 0;
    for (; group + 4 <= groups; group += 4) score<4>(block, group);
    for (; group < groups; group++) score<1>(block, group);
    for (int i = 0; i < N; i++) {
      const int64_t row = state.first_row + (first + i) / job.group;
      const int64_t last = call.last + row - call.first_row - position;  // counted in this block
      const int high = std::min<int64_t>(block.num_keys, last + 1), low = std::max<int64_t>(0, last + 1 - call.window);
      weigh(i, block, job.scaling * LOG2E, low, high, state.top[first + i], state.sum[first + i]);
    }
    int column = 0;
    for (; column + 4 * W <= dim; column += 4 * W) add_values<4>(block, column);
    for (; column < dim; column += W) add_values<1>(block, column);
  }
};

// Queries [i, end), as many at a time as there are.
template <class E, int N, class... Rest>
static void run_tiles(int64_t i, int64_t end, const Rest&... rest) {
  for (; i + N <= end; i += N) {
    Tile<E, N> tile;
    tile.run(i, rest...);
  }
  if constexpr (N > 1) run_tiles<E, N - 1>(i, end, rest...);
}

// Rows [first_row, end_row) of one call.
template <class E>
static void attend_call(const Job& job, const Call& call, int head, int64_t first_row, int64_t end_row, Block<E>& block,
                        const State& state) {
  typedef typename E::T T;
  const T* keys = static_cast<const T*>(job.keys) + head * job.head_stride;
  const T* values = static_cast<const T*>(job.values) + head * job.head_stride;
  const Run* last_run = job.runs + job.num_runs - 1;
  int64_t start = 0, stop = 0;
  for (const Run* run = job.runs + call.first_run; run < job.runs + call.first_run + call.num_runs; run++)
    for (int64_t at = 0; at < run->length; at += KEYS, start = stop) {
      stop = start + std::min<int64_t>(KEYS, run->length - at);
      // Those that see something of positions [start, stop).
      const int64_t from = std::max(first_row, call.first_row + start - call.last);
      const int64_t to = std::min(end_row, call.first_row + stop - 1 - call.last + call.window);
      if (from >= to) continue;
      const int64_t end = (to - state.first_row) * job.group;
      const int64_t i = (from - state.first_row) * job.group;
      const int64_t here = (run->slot + at) * job.head_dim;
      block.read(keys + here, values + here, stop - start);
      const bool is_last = at + KEYS >= run->length;
      const Run next = is_last ? run[run < last_run] : Run{run->slot + at + KEYS, run->length - at - KEYS};
      block.fetch(keys + next.slot * job.head_dim, values + next.slot * job.head_dim,
                  std::min<int64_t>(KEYS, next.length), (end - i + TILE - 1) / TILE);
      run_tiles<E, TILE>(i, end, job, call, head, start, block, state);
    }
}

// All calls of rows [first_row, end_row), for one KV head.
template <class E>
static void attend_rows(const Job& job, int head, int64_t first_row, int64_t end_row) {
  const int64_t dim = job.head_dim, num = (end_row - first_row) * job.group;
  std::vector<float> out(num * dim), top(num, -INFINITY);
  std::vector<vf> sums(num);
  std::unique_ptr<Block<E>> block(new Block<E>);
  block->dim = dim;
  const State state = {first_row, out.data(), top.data(), sums.data()};
  for (const Call* call = job.calls; call < job.calls + job.num_calls; call++) {
    const int64_t from = std::max(first_row, call->first_row), to = std::min(end_row, call->first_row + call->num_rows);
    if (from < to) attend_call(job, *call, head, from, to, *block, state);
  }
  for (int64_t i = 0; i < num; i++) {
    const int64_t row = first_row + i / job.group, query_head = head * job.group + i % job.group;
    // A sink is one more key whose value is zero.
    const float sum = added(sums[i]) + (job.sinks ? std::exp2(job.sinks[query_head] * LOG2E - top[i]) : 0.0f);
    typename E::T* to = static_cast<typename E::T*>(job.out) + row * job.out_stride + query_head * dim;
    for (int c = 0; c < dim; c += W) E::narrow(to + c, load<vf>(&out[i * dim + c]) / sum);
  }
}

// Rows are cut in `parts` of the same size; those of all KV heads are spread over the threads.
template <class E>
static void attend(const Job& job, int64_t num_rows, int64_t parts) {
#pragma omp parallel for collapse(2) schedule(dynamic) if (parts > 1 || job.num_kv_heads > 1)
  for (int64_t part = 0; part < parts; part++)
    for (int64_t head = 0; head < job.num_kv_heads; head++)
      attend_rows<E>(job, head, num_rows * part / parts, num_rows * (part + 1) / parts);
}
