#include "pieces.h"

namespace truedraft {

template <typename T>
void Pieces<T>::pack(const T* weight, int64_t k, const int64_t* order, int64_t tiles, T* out) {
  pack_weight(weight, k, order, tiles, out);
}

template <typename T>
void Pieces<T>::matmul(const PackedWeight<T>& weight, const T* rows, int64_t stride, int64_t count, int64_t columns,
                       float* out, int threads) {
  parallel_region(threads, 1, [&](Worker& worker) {
    worker.each_range(weight.tiles, weight.tiles, [&](Range tiles) {
      matmul_tiles(weight, MatmulRows<T>{rows, stride}, count, tiles, StoreColumns<float>{out, columns, columns});
    });
  });
}

template <typename T>
void Pieces<T>::gated(const PackedWeight<T>& weight, const T* rows, int64_t stride, int64_t count, int64_t columns,
                      T* out, int threads) {
  parallel_region(threads, 1, [&](Worker& worker) {
    worker.each_range(weight.tiles, weight.tiles, [&](Range tiles) {
      matmul_tiles(weight, MatmulRows<T>{rows, stride}, count, tiles, GateColumns<T>{out, columns, columns});
    });
  });
}

template <typename T>
void Pieces<T>::norm(const float* x, const float* weight, int64_t count, int64_t n, float eps, T* out) {
  for (int64_t r = 0; r < count; ++r) rms_norm_row(x + r * n, weight, n, eps, out + r * n);
}

template <typename T>
void Pieces<T>::rope(const float* qkv, int64_t count, const HeadShape& shape, const float* q_norm, const float* k_norm,
                     float eps, const float* cosine, const float* sine, const int64_t* positions, const int64_t* slots,
                     T* query, T* k_plane, T* v_plane) {
  std::vector<float> scratch(static_cast<size_t>(shape.dim));
  for (int64_t r = 0; r < count; ++r) {
    const int64_t angle = positions[r] * (shape.dim / 2), slot = slots[r] * shape.kv_heads * shape.dim;
    rope_row(qkv + r * shape.columns(), shape, q_norm, k_norm, eps, cosine + angle, sine + angle,
             query + r * shape.heads * shape.dim, k_plane + slot, v_plane + slot, scratch.data());
  }
}

template <typename T>
void Pieces<T>::attention(const AttentionInput<T>& in, int threads) {
  const AttentionPlan plan = plan_attention(in, threads);
  std::vector<float> partials(static_cast<size_t>(plan.partials * partial_stride(in.shape.dim)));
  std::vector<AttentionScratch<T>> scratch(static_cast<size_t>(threads));
  parallel_region(threads, kAttentionPhases, [&](Worker& worker) {
    AttentionScratch<T>& mine = scratch[static_cast<size_t>(worker.id())];
    mine.fit(in.shape);
    attend(in, plan, partials.data(), mine, worker);
  });
}

template struct Pieces<bf16>;
template struct Pieces<float>;

template <typename T>
void Int8Pieces::quantize(const T* x, int64_t count, int64_t n, int64_t padded, int8_t* values, float* scales,
                          int32_t* offsets) {
  const int64_t groups = group_count(n);
  for (int64_t r = 0; r < count; ++r) {
    quantize_row(x + r * n, n, padded, values + r * padded, scales + r * groups, offsets + r * groups);
  }
}

template void Int8Pieces::quantize<bf16>(const bf16*, int64_t, int64_t, int64_t, int8_t*, float*, int32_t*);
template void Int8Pieces::quantize<float>(const float*, int64_t, int64_t, int64_t, int8_t*, float*, int32_t*);

void Int8Pieces::pack(const int8_t* weight, int64_t k, const int64_t* order, int64_t tiles, int8_t* out) {
  pack_weight(weight, k, order, tiles, out);
}

void Int8Pieces::matmul(const PackedWeight<int8_t>& weight, const MatmulRows<int8_t>& rows, int64_t count,
                        int64_t columns, float* out, int threads) {
  parallel_region(threads, 1, [&](Worker& worker) {
    worker.each_range(weight.tiles, weight.tiles, [&](Range tiles) {
      matmul_tiles(weight, rows, count, tiles, StoreColumns<float>{out, columns, columns});
    });
  });
}

}  // namespace truedraft
