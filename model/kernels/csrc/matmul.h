// Row-invariant product of activations with packed weights.
//
// Weights are packed in tiles of 32 output columns: tile[step][32 columns][kWidth elements of k], zero-padded, so
// one step is 128 bytes whatever the element type. Each output element is accumulated over all of k in ascending
// order by one lane; how many rows are computed together changes nothing. Threads split the tiles, never k.
#pragma once

#include <algorithm>

#include "simd.h"
#include "threads.h"

namespace truedraft {

constexpr int kTileColumns = 32;
constexpr int kMaxRows = 12;  // 24 accumulators, 2 weight registers, 1 broadcast
constexpr int64_t kPanelRows = 240;  // rows that pass over a thread's tiles together: they stay in L2

template <typename T>
struct PackedWeight {
  const T* data = nullptr;      // [tiles, steps, 32, kWidth]
  const float* bias = nullptr;  // [tiles * 32] or null
  int64_t tiles = 0;
  int64_t steps = 0;

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

template <typename T, int R, typename Epilogue>
inline void tile_rows(const T* tile, int64_t steps, const T* rows, int64_t stride, const float* bias, const char* ahead,
                      const Epilogue& epilogue, int64_t row, int64_t tile_index) {
  constexpr int width = Word<T>::kWidth;
  __m512 low[R], high[R];
  for (int r = 0; r < R; ++r) {
    low[r] = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
    high[r] = bias ? _mm512_loadu_ps(bias + 16) : _mm512_setzero_ps();
  }
  const char* weights = reinterpret_cast<const char*>(tile);
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
  for (int r = 0; r < R; ++r) epilogue(row + r, tile_index, low[r], high[r]);
}

// `rows` is [count, stride] with at least steps * kWidth readable, finite-padded elements a row.
template <typename T, typename Epilogue>
void matmul_tiles(const PackedWeight<T>& weight, const T* rows, int64_t stride, int64_t count, Range tiles,
                  const Epilogue& epilogue) {
  for (int64_t panel = 0; panel < count; panel += kPanelRows) {
    const int64_t panel_rows = std::min(kPanelRows, count - panel);
    const int64_t blocks = (panel_rows + kMaxRows - 1) / kMaxRows;
    for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
      const T* data = weight.data + tile * weight.tile_elements();
      const float* bias = weight.bias ? weight.bias + tile * kTileColumns : nullptr;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t begin = panel + panel_rows * block / blocks;
        const int64_t end = panel + panel_rows * (block + 1) / blocks;
        const T* a = rows + begin * stride;
        // The first pass over a tile fetches ahead in the stream; later passes find the tile in the cache.
        const char* ahead = reinterpret_cast<const char*>(data) + (block == 0 ? 4096 : 0);
        switch (end - begin) {
#define TRUEDRAFT_ROWS(R)                                                                                \
  case R:                                                                                                \
    tile_rows<T, R>(data, weight.steps, a, stride, bias, ahead, epilogue, begin, tile);                 \
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
