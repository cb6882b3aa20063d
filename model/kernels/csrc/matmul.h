// Row-invariant product of activations with packed weights.
//
// Weights are packed in tiles of 32 output columns: tile[step][32 columns][kWidth elements of k], zero-padded, so
// one step is 128 bytes whatever the element type. Each output element is accumulated over all of k in ascending
// order by one lane; how many rows are computed together changes nothing. Threads split the tiles, never k.
//
// Int8 weights take rows of int8 values with a scale for each group of them (rows.h). A group's sums are whole numbers,
// so exact; they are scaled and added to the row's sums in float32, group after group.
#pragma once

#include <algorithm>
#include <type_traits>

#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace truedraft {

constexpr int kTileColumns = 32;
constexpr int kMaxRows = 12;  // 24 accumulators, 2 weight registers, 1 broadcast
constexpr int kMaxInt8Rows = 7;  // 14 of a group and 14 of the row
constexpr int64_t kPanelRows = 240;  // rows that pass over a thread's tiles together: they stay in L2

template <typename T>
struct PackedWeight {
  const T* data = nullptr;      // [tiles, steps, 32, kWidth]
  const float* bias = nullptr;  // [tiles * 32] or null
  int64_t tiles = 0;
  int64_t steps = 0;
  const float* scales = nullptr;  // int8 only: [tiles * 32]

  int64_t tile_elements() const { return steps * kTileColumns * Word<T>::kWidth; }
};

// Rows of weight [n, k] -> packed tiles. `order[c]` is the source row of packed column c, or -1 for zeros.
template <typename T>
void pack_weight(const T* weight, int64_t k, const int64_t* order, int64_t tiles, T* out) {
  constexpr int width = Word<T>::kWidth;
  const int64_t steps = round_up(k, width) / width, whole = k / (16 * width) * 16;
#pragma omp parallel for
  for (int64_t tile = 0; tile < tiles; ++tile) {
    T* base = out + tile * steps * kTileColumns * width;
    const int64_t* sources = order + tile * kTileColumns;
    for (int64_t step = 0; step < whole; step += 16) {
      for (int half = 0; half < 2; ++half) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i) {
          const int64_t source = sources[half * 16 + i];
          r[i] = source >= 0 ? _mm512_loadu_si512(weight + source * k + step * width) : _mm512_setzero_si512();
        }
        transpose16(r);
        for (int i = 0; i < 16; ++i) {
          _mm512_storeu_si512(base + ((step + i) * kTileColumns + half * 16) * width, r[i]);
        }
      }
    }
    for (int column = 0; column < kTileColumns; ++column) {
      for (int64_t position = whole * width; position < steps * width; ++position) {
        const bool inside = sources[column] >= 0 && position < k;
        base[(position / width * kTileColumns + column) * width + position % width] =
            inside ? weight[sources[column] * k + position] : T(0);
      }
    }
  }
}

// Rows that a product takes: [count, stride], each with at least steps * kWidth readable elements, finite behind its end.
template <typename T>
struct MatmulRows {
  const T* data;
  int64_t stride;
  MatmulRows from(int64_t row) const { return {data + row * stride, stride}; }
};

template <>
struct MatmulRows<int8_t> {
  const int8_t* data;
  int64_t stride;
  const float* scales;  // [count, groups]
  const int32_t* offsets;
  int64_t groups;
  MatmulRows from(int64_t row) const {
    return {data + row * stride, stride, scales + row * groups, offsets + row * groups, groups};
  }
};

// Sums of R rows over `steps` steps of 128 bytes.
template <typename T, int R, typename Sum>
inline void add_steps(Sum (&low)[R], Sum (&high)[R], const char* weights, int64_t steps, const T* rows, int64_t stride,
                      const char* ahead) {
  constexpr int width = Word<T>::kWidth;
  for (int64_t step = 0; step < steps; ++step) {
    const __m512i w0 = _mm512_loadu_si512(weights + step * 128);
    const __m512i w1 = _mm512_loadu_si512(weights + step * 128 + 64);
    _mm_prefetch(ahead + step * 128, _MM_HINT_T0);
    _mm_prefetch(ahead + step * 128 + 64, _MM_HINT_T0);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512i word = broadcast_word(rows + r * stride + step * width);
      low[r] = Word<T>::dot(low[r], w0, word);
      high[r] = Word<T>::dot(high[r], w1, word);
    }
  }
}

template <typename T, int R, typename Epilogue>
inline void tile_rows(const PackedWeight<T>& weight, int64_t tile, const MatmulRows<T>& rows, const char* ahead,
                      const Epilogue& epilogue, int64_t row) {
  const float* bias = weight.bias ? weight.bias + tile * kTileColumns : nullptr;
  const T* data = weight.data + tile * weight.tile_elements();
  __m512 low[R], high[R];
  if constexpr (std::is_same_v<T, int8_t>) {
    constexpr int64_t group_steps = kGroup / Word<T>::kWidth;
    for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_ps();
    for (int64_t group = 0; group < rows.groups; ++group) {
      const int64_t begin = group * group_steps, steps = std::min(group_steps, weight.steps - begin);
      __m512i group_low[R], group_high[R];
      for (int r = 0; r < R; ++r) {
        group_low[r] = group_high[r] = _mm512_set1_epi32(rows.offsets[r * rows.groups + group]);
      }
      add_steps<T, R>(group_low, group_high, reinterpret_cast<const char*>(data) + begin * 128, steps,
                      rows.data + begin * Word<T>::kWidth, rows.stride, ahead + begin * 128);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const __m512 scale = _mm512_set1_ps(rows.scales[r * rows.groups + group]);
        low[r] = _mm512_add_ps(low[r], _mm512_mul_ps(_mm512_cvtepi32_ps(group_low[r]), scale));
        high[r] = _mm512_add_ps(high[r], _mm512_mul_ps(_mm512_cvtepi32_ps(group_high[r]), scale));
      }
    }
    const float* scales = weight.scales + tile * kTileColumns;
    for (int r = 0; r < R; ++r) {
      low[r] = _mm512_mul_ps(low[r], _mm512_loadu_ps(scales));
      high[r] = _mm512_mul_ps(high[r], _mm512_loadu_ps(scales + 16));
      if (bias) {
        low[r] = _mm512_add_ps(low[r], _mm512_loadu_ps(bias));
        high[r] = _mm512_add_ps(high[r], _mm512_loadu_ps(bias + 16));
      }
    }
  } else {
    for (int r = 0; r < R; ++r) {
      low[r] = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
      high[r] = bias ? _mm512_loadu_ps(bias + 16) : _mm512_setzero_ps();
    }
    add_steps<T, R>(low, high, reinterpret_cast<const char*>(data), weight.steps, rows.data, rows.stride, ahead);
  }
  for (int r = 0; r < R; ++r) epilogue(row + r, tile, low[r], high[r]);
}

template <typename T, typename Epilogue>
void matmul_tiles(const PackedWeight<T>& weight, const MatmulRows<T>& rows, int64_t count, Range tiles,
                  const Epilogue& epilogue) {
  constexpr int64_t most = std::is_same_v<T, int8_t> ? kMaxInt8Rows : kMaxRows;
  for (int64_t panel = 0; panel < count; panel += kPanelRows) {
    const int64_t panel_rows = std::min(kPanelRows, count - panel);
    const int64_t blocks = (panel_rows + most - 1) / most;
    for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
      const char* data = reinterpret_cast<const char*>(weight.data + tile * weight.tile_elements());
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t begin = panel + panel_rows * block / blocks;
        const int64_t end = panel + panel_rows * (block + 1) / blocks;
        const MatmulRows<T> part = rows.from(begin);
        // The first pass over a tile fetches ahead in the stream; later passes find the tile in the cache.
        const char* ahead = data + (block == 0 ? 4096 : 0);
        switch (end - begin) {
#define TRUEDRAFT_ROWS(R)                                                                \
  case R:                                                                                \
    if constexpr (R <= most) tile_rows<T, R>(weight, tile, part, ahead, epilogue, begin); \
    break;
          TRUEDRAFT_ROWS(1)
          TRUEDRAFT_ROWS(2)
          TRUEDRAFT_ROWS(3)
          TRUEDRAFT_ROWS(4)
          TRUEDRAFT_ROWS(5)
          TRUEDRAFT_ROWS(6)
          TRUEDRAFT_ROWS(7)
          TRUEDRAFT_ROWS(8)
          TRUEDRAFT_ROWS(9)
          TRUEDRAFT_ROWS(10)
          TRUEDRAFT_ROWS(11)
          TRUEDRAFT_ROWS(12)
#undef TRUEDRAFT_ROWS
        }
      }
    }
  }
}

// Epilogues: what becomes of the 32 fp32 sums of (row, tile).

template <typename Out>
struct StoreColumns {
  Out* out;
  int64_t stride, columns;
  void operator()(int64_t row, int64_t tile, __m512 low, __m512 high) const {
    const int64_t column = tile * kTileColumns;
    Out* p = out + row * stride + column;
    store16(p, low, first_lanes(columns - column));
    store16(p + 16, high, first_lanes(columns - column - 16));
  }
};

struct AddColumns {  // out += sums: the residual stream
  float* out;
  int64_t stride, columns;
  void operator()(int64_t row, int64_t tile, __m512 low, __m512 high) const {
    const int64_t column = tile * kTileColumns;
    float* p = out + row * stride + column;
    const __mmask16 m0 = first_lanes(columns - column), m1 = first_lanes(columns - column - 16);
    store16(p, _mm512_add_ps(load16(p, m0), low), m0);
    store16(p + 16, _mm512_add_ps(load16(p + 16, m1), high), m1);
  }
};

template <typename Out>
struct GateColumns {  // a tile holds 16 gate columns, then the 16 up columns: silu(gate) * up
  Out* out;
  int64_t stride, columns;
  void operator()(int64_t row, int64_t tile, __m512 low, __m512 high) const {
    const int64_t column = tile * 16;
    store16(out + row * stride + column, _mm512_mul_ps(silu16(low), high), first_lanes(columns - column));
  }
};

}  // namespace truedraft
