// The kernels one by one, as the tests and the torch operations see them.
#pragma once

#include "attention.h"
#include "matmul.h"
#include "rows.h"

namespace truedraft {

template <typename T>
struct Pieces {
  static void pack(const T* weight, int64_t k, const int64_t* order, int64_t tiles, T* out);
  // out [rows, columns] = rows [count, stride] @ weight
  static void matmul(const PackedWeight<T>& weight, const T* rows, int64_t stride, int64_t count, int64_t columns,
                     float* out, int threads);
  static void gated(const PackedWeight<T>& weight, const T* rows, int64_t stride, int64_t count, int64_t columns,
                    T* out, int threads);
  static void norm(const float* x, const float* weight, int64_t count, int64_t n, float eps, T* out);
  static void rope(const float* qkv, int64_t count, const HeadShape& shape, const float* q_norm, const float* k_norm,
                   float eps, const float* cosine, const float* sine, const int64_t* positions, const int64_t* slots,
                   T* query, T* k_plane, T* v_plane);
  static void attention(const AttentionInput<T>& in, int threads);
};

// Of int8 weights.
struct Int8Pieces {
  template <typename T>
  static void quantize(const T* x, int64_t count, int64_t n, int64_t padded, int8_t* values, float* scales,
                       int32_t* offsets);
  static void pack(const int8_t* weight, int64_t k, const int64_t* order, int64_t tiles, int8_t* out);
  static void matmul(const PackedWeight<int8_t>& weight, const MatmulRows<int8_t>& rows, int64_t count,
                     int64_t columns, float* out, int threads);
};

extern template struct Pieces<bf16>;
extern template struct Pieces<float>;

}  // namespace truedraft
